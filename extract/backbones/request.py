"""The request that a source loads a backbone from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LoadRequest"]


@dataclass(frozen=True)
class LoadRequest:
    """A request to load a backbone, passed to its source.

    Attributes:
        spec: SOURCE/NAME.
        name: NAME, the part of the spec after the source.
        weights: a name, a file, "random", or None for the source's default.
        seed: seed of random weights.
        allow_missing_head: whether a weights file may lack the classifier.
        preprocessing: values that replace the library's own; any of size, crop, interpolation, mean, std.
    """

    spec: str
    name: str
    weights: str | None
    seed: int
    allow_missing_head: bool
    preprocessing: Mapping[str, Any]
