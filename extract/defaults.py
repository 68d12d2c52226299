"""Defaults of an extraction, for the library, the config file and the command line; each stands here alone."""

from __future__ import annotations

import os
from typing import Literal

BACKBONE = "bundled/efficientnet_lite0"  # real ImageNet weights, there without a download
LAYERS = ("embedding",)  # the backbone's own final vector
BATCH_SIZE = 64
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORKERS = min(8, CORES)
DEVICE = "auto"
DTYPE: Literal["float32", "float16"] = "float32"
PRECISION: Literal["float32", "bfloat16", "float16"] = "float32"
DECODE: Literal["exact", "fast"] = "exact"
COMPILE: Literal["auto", "on", "off", "inductor", "openvino"] = "auto"
MIN_COSINE = 0.999  # of a feature in lower precision and in float32
SYNC_S = 30.0  # after which Linux writes changed pages to the disk by itself (vm.dirty_expire_centisecs)
SEED = 0
MAX_PIXELS = 2 * 89_478_485  # of one image; what Pillow takes for a decompression bomb is more
