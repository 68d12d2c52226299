"""Defaults of an extraction for the library, the config file and the command line; defined only here."""

from __future__ import annotations

import os
from typing import Final

BACKBONE = "bundled/efficientnet_lite0"  # real ImageNet weights, without a download
LAYERS = ("embedding",)  # the backbone's final pooled vector
BATCH_SIZE = 64
# On a GPU with so much memory. One activation of ResNet-50, (256, 64, 112, 112) in float32, takes 0.8 GB.
BATCH_SIZE_OF_LARGE_GPU = 256
LARGE_GPU_BYTES = 12_000_000_000
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# A core decodes 718 photos of 0.2 megapixels a second, and a GPU computes thousands: all cores are needed. A process
# has 20 MB of its own, and takes up to 200 MB while it decodes 12 megapixels. A machine with little memory has fewer.
_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
WORKERS = max(1, min(CORES, _MEMORY_BYTES // (300 << 20)))
DEVICE = "auto"
PRECISION: Final = "float32"
ORIENTATION: Final = "exif"
ICC: Final = "ignore"
MIN_COSINE = 0.999  # between a feature in lower precision or from fast decoding, and the exact one
SYNC_S = 30.0  # age at which Linux itself writes changed pages to the disk (vm.dirty_expire_centisecs)
SEED = 0
AT_ONCE_S = 0.5  # signals to end that arrive this close together, to a process and to its group, count as one
MAX_PIXELS = 2 * 89_478_485  # of one image; Pillow refuses more as a decompression bomb
MAX_FILE_BYTES = 1 << 30  # of one image file; 16-bit RGB of MAX_PIXELS has as many
