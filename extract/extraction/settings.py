"""Requested settings of a run: how features are computed and stored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from extract import defaults
from extract.errors import InputError, unknown_name
from extract.store.format.copying import COMPRESSIONS
from extract.store.format.untrusted import need_libraries
from extract.store.format.value_types import VALUE_TYPES

__all__ = ["PRECISIONS", "ExtractionSettings"]

PRECISIONS = ("float32", "bfloat16", "float16")
_CHOICES = {
    "decode": ("exact", "fast"), "orientation": ("exif", "ignore"), "icc": ("ignore", "srgb"),
    "dtype": VALUE_TYPES, "precision": PRECISIONS,
}  # fmt: skip
_LEAST = {"batch_size": 1, "workers": 0, "limit": 1, "max_pixels": 1, "shard_rows": 1, "fit_on": 2}


@dataclass(frozen=True)
class ExtractionSettings:
    """Settings of a run, checked on creation. `extract_features` documents each of them.

    Attributes:
        distortion: see `extract_features`; None: `srp` without a number of values is refused.
        axes: see `extract_features`.
        fit_on: see `extract_features`; None: `pcaK` without `axes` is refused.
        sync_s: seconds of work that a power failure may lose; 0 forces each batch to the disk.

    Raises:
        UnknownNameError: the value of a setting does not exist.
        InputError: a number is out of range.
        LayertapError: the compression needs a library that is not installed.
    """

    layers: str | Sequence[str] = defaults.LAYERS
    batch_size: int = defaults.BATCH_SIZE
    workers: int = defaults.WORKERS
    decode: str = defaults.DECODE
    dtype: str = defaults.DTYPE
    precision: str = defaults.PRECISION
    compile: str = defaults.COMPILE
    min_cosine: float = defaults.MIN_COSINE
    limit: int | None = None
    keep: Sequence[str] = ()
    max_pixels: int = defaults.MAX_PIXELS
    orientation: str = defaults.ORIENTATION
    icc: str = defaults.ICC
    shard_rows: int | None = None
    compress: str | None = None
    distortion: float | None = None
    axes: str | os.PathLike[str] | None = None
    fit_on: int | None = None
    sync_s: float = defaults.SYNC_S

    def __post_init__(self) -> None:
        if self.compress is not None and self.compress not in COMPRESSIONS:
            raise unknown_name("compression", self.compress, COMPRESSIONS)
        need_libraries(self.compress)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown_name(name, getattr(self, name), choices)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; it must be at least {least}")
        if not -1 <= self.min_cosine <= 1:
            raise InputError(f"min_cosine is {self.min_cosine}; expected -1 to 1")
        if self.distortion is not None and not 0 < self.distortion < 1:
            raise InputError(f"distortion is {self.distortion}; expected a number above 0 and below 1")

    @property
    def layer_list(self) -> list[str]:
        """The layers as a list, also if only one was given."""
        return [self.layers] if isinstance(self.layers, str) else list(self.layers)

    def recorded(self) -> dict[str, Any]:
        """Return the settings for the provenance of a data set.

        `keep` and `sync_s` do not affect features. `distortion` affects them by the numbers in the
        resolved layers only, and `axes` and `fit_on` by the axes that the data set keeps.
        """
        settings = asdict(self) | {"layers": self.layer_list}
        for name in ("keep", "sync_s", "distortion", "axes", "fit_on"):
            del settings[name]
        return settings
