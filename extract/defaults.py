"""Defaults of an extraction for the library, the config file and the command line; defined only here."""

from __future__ import annotations

import os
from typing import Final

BACKBONE = "bundled/efficientnet_lite0"  # real ImageNet weights, without a download
LAYERS = ("embedding",)  # the backbone's final pooled vector
BATCH_SIZE = 64
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORKERS = min(8, CORES)
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
