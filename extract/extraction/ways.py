"""Ways in which rows may have been computed by mistake, the frequent ones first: pixels, precision, and orders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.backbones.preprocessing import INTERPOLATIONS, Preprocessing

__all__ = ["Way", "changes", "orders"]

_NORMALISATIONS = (
    ("none: pixels from 0 to 1", (0.0,) * 3, (1.0,) * 3),
    ("none: pixels from 0 to 255", (0.0,) * 3, (1 / 255,) * 3),
    ("of ImageNet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ("of Inception and ViT, to -1..1", (0.5,) * 3, (0.5,) * 3),
    ("of CLIP", (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ("the mean of ImageNet, no std", (0.485, 0.456, 0.406), (1.0,) * 3),
    ("divided by 255 twice", (0.0,) * 3, (255.0,) * 3),
)
_SIDES = (224, 256, 288, 192, 384)  # of inputs


@dataclass(frozen=True)
class Way:
    """A way in which rows may have been computed.

    Attributes:
        preprocessing: resize, crop, interpolation, normalisation, and how files are decoded.
        bgr: whether the channels of the pixels are in the order blue, green, red.
        mirrored: whether pictures are mirrored.
        antialias: whether the resize averages; False: torchvision resizes tensors without.
        precision: as of `extract_features`.
        unit: whether rows are scaled to length 1.
    """

    preprocessing: Preprocessing
    bgr: bool = False
    mirrored: bool = False
    antialias: bool = True
    precision: str = defaults.PRECISION
    unit: bool = False


def changes(way: Way, is_near: bool) -> Iterator[tuple[str, str, Way]]:
    """Yield changes of a way: kind, words, the changed way.

    Args:
        way: the way.
        is_near: whether rows differ by little, as by lower precision.
    """
    pre = way.preprocessing

    def with_values(kind: str, words: str, **values: Any) -> tuple[str, str, Way]:
        return kind, words, replace(way, preprocessing=replace(pre, **values))

    yield "BGR", "the channels are in the order blue, green, red", replace(way, bgr=not way.bgr)
    for precision in ("bfloat16", "float16", "bfloat16-weights") if is_near else ():
        yield "precision", f"computed in half precision ({precision})", replace(way, precision=precision)
    if pre.library_transform is not None:
        for resize in (round(min(pre.crop_px) / 0.875), pre.crop_px):
            for words, mean, std in _NORMALISATIONS[:5]:
                plain = Preprocessing(
                    resize, pre.crop_px, "bilinear", mean, std, orientation=pre.orientation, icc=pre.icc
                )
                yield "preprocessing", f"{plain} ({words})", replace(way, preprocessing=plain)
    else:
        for words, mean, std in _NORMALISATIONS:
            if (mean, std) != (pre.mean, pre.std):
                given = f"mean {pre.mean}, std {pre.std}"
                yield with_values("normalisation", f"mean and std {words}; given: {given}", mean=mean, std=std)
        given = f"given: {pre.interpolation}"
        for name in INTERPOLATIONS:
            if name != pre.interpolation:
                yield with_values("interpolation", f"{name}; {given}", interpolation=name)
        for name in ("bilinear", "bicubic"):
            kind, words, changed = with_values(
                "interpolation", f"{name} without antialiasing; {given}", interpolation=name
            )
            yield kind, words, replace(changed, antialias=False)
            yield with_values(
                "interpolation", f"{name} by torchvision on tensors; {given}", interpolation=name, fast=True
            )
        for resize, crop in _geometries(pre):
            words = f"resize {_sides(resize)}, crop {_sides(crop)}"
            given = f"resize {_sides(pre.resize_px)}, crop {_sides(pre.crop_px)}"
            yield with_values("crop", f"{words}; given: {given}", resize_px=resize, crop_px=crop)
    yield "mirror", "the pictures are mirrored", replace(way, mirrored=not way.mirrored)
    if pre.orientation == "exif":
        yield with_values("EXIF", "the EXIF orientation is ignored", orientation="ignore")
    if pre.icc == "ignore":
        yield with_values("ICC", "colour profiles are converted to sRGB", icc="srgb")


def _sides(value: int | tuple[int, int]) -> str:
    return str(value) if isinstance(value, int) else "x".join(map(str, value))


def _geometries(pre: Preprocessing) -> list[tuple[Any, tuple[int, int]]]:
    """Return other sizes of the resize and the crop: first those of the same input, as fast as the given one."""
    side = min(pre.crop_px)
    same: list[Any] = [pre.crop_px, side, *(int(side / part) for part in (0.875, 0.9, 0.95, 0.96)), 256, 232]
    geometries = [(resize, pre.crop_px) for resize in same if isinstance(resize, tuple) or resize >= side]
    for other in _SIDES:
        if other != side:
            geometries += [(resize, (other, other)) for resize in (int(other / 0.875), (other, other), other)]
    return [each for each in dict.fromkeys(geometries) if each != (pre.resize_px, pre.crop_px)]


def orders(paths: Sequence[str]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield orders in which a loop may have gone through the images: words, the place of each image."""
    keys: dict[str, Callable[[int], Any]] = {
        "in reverse order": lambda row: -row,
        "sorted by path": lambda row: os.fsencode(paths[row]),
        "sorted by path, numbers by value (2 before 10)": lambda row: [
            (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", paths[row])
        ],
        "sorted by path without case": lambda row: paths[row].lower(),
        "sorted by file name, not by folder": lambda row: paths[row].rpartition("/")[2],
    }
    for words, key in keys.items():
        yield f"the rows are {words}", np.argsort(sorted(range(len(paths)), key=key))
