"""Why do stored rows differ from computed ones? The search of `check`, and the mistakes that it tries."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import nn

from extract import defaults
from extract.backbones.preprocessing import INTERPOLATIONS, Preprocessing
from extract.compute.agreement import deviations
from extract.extraction.plan import Plan
from extract.extraction.reproduce import TOLERANCE, computed_rows, in_batches
from extract.images import Images
from extract.images.sources import Chosen

__all__ = ["Cause", "Models", "Search", "stored_rows"]

_TRIED = 2  # rows that a change is tried on
_CHANGES = 3  # that are combined
_BATCHES = (32, 64, 16, 128, 8)  # sizes that a loop in training mode is likely to have
_BLOCK = 4096  # stored rows that are compared at once
_MOST = 0.8  # part of the sampled rows that an order must explain
_NORMALISATIONS = (
    ("none: pixels from 0 to 1", (0.0,) * 3, (1.0,) * 3),
    ("none: pixels from 0 to 255", (0.0,) * 3, (1 / 255,) * 3),
    ("of ImageNet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ("of Inception and ViT, to -1..1", (0.5,) * 3, (0.5,) * 3),
    ("of CLIP", (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ("the mean of ImageNet, no std", (0.485, 0.456, 0.406), (1.0,) * 3),
    ("divided by 255 twice", (0.0,) * 3, (255.0,) * 3),
)

Rows = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Cause:
    """Why stored rows differ from computed ones.

    Attributes:
        kind: length, order, files, weights, BGR, normalisation, precision, interpolation, crop, mirror, EXIF, ICC,
            training mode, preprocessing.
        what: the cause in words.
    """

    kind: str
    what: str


Models = Iterable[tuple[Cause, nn.Module | None]]  # the model with other weights; None if they cannot be loaded
# The causes, the largest deviation with them, and what is nearest if none fit.
Explanation = tuple[list[Cause], float, str]


def stored_rows(stored: Any, rows: Places) -> Rows:
    """Return rows (R, D) of an array, of a file or of a data set, in any order."""
    unique, back = np.unique(rows, return_inverse=True)  # HDF5 takes ascending numbers alone
    values: Rows = np.asarray(stored[unique])[back].reshape(len(rows), -1).astype(np.float64)
    return values


@dataclass(eq=False)
class Search:
    """Rows that differ, and what computes them in other ways.

    Attributes:
        plan: computes the images of the rows, eagerly: compiling would take longer than the few rows.
        feature: name of the feature in the plan.
        stored: (N, *shape), all stored rows.
        rows: (R,) numbers of the stored rows, ascending; image i of the plan has row `rows[i]`.
        values: (R, D), the rows computed as given.
        changed: (R,), whether the image of a row has changed since the row was stored.
        images: all images, in the order of the rows.
        tolerance: largest deviation of rows that agree.
        is_unit: whether computed rows are scaled to length 1.
    """

    plan: Plan
    feature: str
    stored: Any
    rows: Places
    values: Rows
    changed: NDArray[np.bool_]
    images: Images
    tolerance: float
    is_unit: bool = False

    def explain(self, models: Models) -> Explanation:
        """Return the causes with which all rows agree; if something is only near, the causes are facts."""
        count = Cause("order", f"there are {len(self.stored):,} rows for {len(self.images):,} images")
        facts = [count] if len(self.stored) != len(self.images) else []
        causes = facts[:]
        if _are_unit(stored_rows(self.stored, self.rows)) and not _are_unit(self.values):
            causes.append(Cause("length", "the stored rows are scaled to length 1 (L2)"))
            self.is_unit, self.values = True, _scaled(self.values)
        places, order = self._order()
        causes += [Cause("order", order)] if order else []
        there = np.flatnonzero(places >= 0)  # -1: an image without a row
        wrong = there[self._apart(self.values[there], places[there]) > self.tolerance]
        if len(stale := wrong[self.changed[wrong]]):
            names = ", ".join(self._name(i) for i in stale[:3])
            causes.append(Cause("files", f"{len(stale)} of {len(self.rows)} images have changed since: {names}"))
        there, wrong = np.setdiff1d(there, stale), np.setdiff1d(wrong, stale)
        if not len(wrong):
            return causes, float(self._apart(self.values[there], places[there]).max(initial=0)), ""
        more, remaining, nearest = self._changes(there, wrong[:_TRIED], places, causes, models)
        return [*(facts if nearest else causes), *more], remaining, nearest

    def _name(self, i: int) -> str:
        return f"row {self.rows[i]} ({self.images.paths[self.rows[i]]})"

    def _apart(self, values: Rows, places: Places) -> Rows:
        """Return the deviation of each computed row from the stored row of its place."""
        apart: Rows = np.nan_to_num(deviations(values, stored_rows(self.stored, places)), nan=np.inf)
        return apart

    def _computed(self, plan: Plan, images: Places, at_once: int = defaults.BATCH_SIZE) -> Rows:
        """Compute images (P, D) of a plan; NaN where one cannot be read."""
        computed = computed_rows(plan, in_batches(images, at_once))
        values = np.concatenate([stored.features[self.feature] for _, stored in computed])
        rows: Rows = values.reshape(len(images), -1).astype(np.float64)
        return _scaled(rows) if self.is_unit else rows

    def _order(self) -> tuple[Places, str]:
        """Return the stored row of each computed one, -1 if there is none; and the order, if it is not the given one.

        An order is taken if it explains most of the places, or rows elsewhere agree exactly.
        """
        rows, places = self.rows, self._places()
        usual = Counter((places - rows).tolist()).most_common(1)[0][0]
        named = [("", rows), (f"the rows are shifted by {usual:+d}", rows + usual)]
        if off := len(self.stored) - len(self.images):
            i = int(np.argmax(places != rows))
            shifted = np.where(rows < rows[i], rows, rows + off)
            shifted[i] = shifted[i] if shifted[i] == places[i] else -1
            words = f"the rows are shifted by {off:+d} from {self._name(i)} on: an image there is left out or twice"
            named.append((words, shifted))
        else:
            named += [(words, order[rows]) for words, order in _orders(self.images.paths)]
        words, expected = max(named, key=lambda each: (each[1] == places).sum())
        if words and (expected == places).mean() >= _MOST:
            return np.where((expected >= -1) & (expected < len(self.stored)), expected, places), words
        moved = (places != rows) & (self._apart(self.values, places) <= self.tolerance)
        if not moved.any():
            return rows, ""
        i = int(np.argmax(moved))
        words = f"{moved.sum()} of {len(rows)} rows are in other places, which no sorting of the paths gives"
        return np.where(moved, places, rows), f"{words}: the features of {self._name(i)} are in row {places[i]}"

    def _places(self) -> Places:
        """Return the stored row most like each computed one, by the cosine from the mean; the row itself if as like."""
        count, places = len(self.stored), self.rows.copy()
        some = stored_rows(self.stored, np.unique(np.linspace(0, count - 1, min(count, 512)).astype(np.int64)))
        mean = some[np.isfinite(some).all(1)].mean(0)
        queries = _scaled(self.values - (self.values.mean(0) if len(places) > 4 else mean))
        best = (queries * _scaled(stored_rows(self.stored, places) - mean)).sum(1) + 1e-6
        for start in range(0, count, _BLOCK):
            block = stored_rows(self.stored, np.arange(start, min(start + _BLOCK, count)))
            cosines = queries @ _scaled(np.nan_to_num(block - mean)).T
            better = cosines.max(1) > best
            best[better], places[better] = cosines.max(1)[better], start + cosines.argmax(1)[better]
        return places

    def _changes(self, there: Places, some: Places, places: Places, known: list[Cause], models: Models) -> Explanation:
        """Return the changes with which all rows that are there agree, tried on some."""
        plan, source = self.plan, cast(Any, self.plan.images.source)  # many changes are tried on the same pictures
        source.picture = functools.lru_cache(2 * _TRIED)(source.picture)

        def tried(plan: Plan) -> float:
            """Return the largest deviation of some rows."""
            try:
                return float(self._apart(self._computed(plan, some), places[some]).max())
            except Exception:  # the model takes no input of this size, or the precision is not supported
                return np.inf

        best, causes, facts = tried(plan), list[Cause](), list[Cause]()
        for cause, model in models:
            facts += [] if model else [cause]
            if model and (outcome := tried(_with_model(plan, model))) < 0.5 * best:
                best, causes, plan = outcome, [cause], _with_model(plan, model)
        while best > self.tolerance and len(causes) < _CHANGES:
            kinds, least, chosen = {cause.kind for cause in causes}, 0.9 * best, None
            for cause, changed in _mistakes(plan, is_near=best < 0.1):
                if cause.kind not in kinds and (outcome := tried(changed)) < least:
                    least, chosen = outcome, ([*causes, cause], changed)
                    if outcome <= self.tolerance:
                        break
            if chosen is None:
                break
            best, (causes, plan) = least, chosen
        apart = self._apart(self._computed(plan, there), places[there])
        if (apart <= self.tolerance).all():
            return causes, float(apart.max()), ""
        if trained := self._in_training_mode():
            return trained
        given = self._apart(self.values[there], places[there])
        if self._how_wrong(given) <= self._how_wrong(apart):  # as of one bad row, which no change of all rows explains
            causes, apart = [], given
        (wrong, remaining), first = self._how_wrong(apart), self._name(there[np.argmax(apart > self.tolerance)])
        nearest = "; ".join(f"{cause.kind}: {cause.what}" for cause in [*known, *causes]) or "as given"
        rows = f"{wrong} of {len(there)} rows, the first is {first}," if wrong < len(there) else "they"
        as_half = ", as much as half precision or another decoder changes" if remaining <= TOLERANCE["bfloat16"] else ""
        return facts, remaining, f"{nearest}, with which {rows} differ by up to {remaining:.1e}{as_half}"

    def _how_wrong(self, apart: Rows) -> tuple[int, float]:
        """Return how many rows differ, and by how much."""
        return int((apart > self.tolerance).sum()), float(apart.max())

    def _in_training_mode(self) -> Explanation | None:
        """Return in which batches the model ran in training mode, if rows agree with that."""
        model = copy.deepcopy(self.plan.backbone.model)
        norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        for layer in norms:  # without statistics, it takes those of the batch, as in training mode
            layer.running_mean = layer.running_var = None
        count = min(len(self.stored), len(self.images)) if norms else 0
        for size in dict.fromkeys(min(size, count) for size in _BATCHES if count):
            batch, every = replace(self.plan, images=self.images.select(range(size))), np.arange(size)
            values = self._computed(_with_model(batch, model), every, at_once=size)
            if (remaining := float(self._apart(values, every).max())) <= self.tolerance:
                return [Cause("training mode", f"no model.eval(), in batches of {size}")], remaining, ""
        return None


def _scaled(rows: Rows) -> Rows:
    """Return rows scaled to length 1."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Rows = rows / np.where(lengths > 0, lengths, 1)
    return scaled


def _are_unit(rows: Rows) -> bool:
    return np.allclose(np.linalg.norm(rows, axis=1), 1, atol=2e-3)


def _with_model(plan: Plan, model: nn.Module) -> Plan:
    return replace(plan, backbone=replace(plan.backbone, model=model))


def _with_pictures(plan: Plan, edit: Callable[[Image.Image], Image.Image]) -> Plan:
    """Return the plan of edited pictures."""
    source: Any = Chosen(plan.images.source, range(len(plan.images)))
    picture, whole = source.picture, source.whole
    source.picture = lambda *args: edit(picture(*args))
    source.whole = lambda *args: whole(*args)._replace(picture=edit(whole(*args).picture))
    return replace(plan, images=replace(plan.images, source=source))


def _mistakes(plan: Plan, is_near: bool) -> Iterator[tuple[Cause, Plan]]:
    """Yield mistakes, the frequent ones first, and the plans that make them; lower precision only if rows are near."""
    pre = plan.backbone.preprocessing

    def having(kind: str, what: str, given: object = None, **values: Any) -> tuple[Cause, Plan]:
        backbone = replace(plan.backbone, preprocessing=replace(pre, **values))
        return Cause(kind, what if given is None else f"{what}; given: {given}"), replace(plan, backbone=backbone)

    def without_antialias(other: Preprocessing, picture: Image.Image) -> torch.Tensor:
        """As torchvision resizes tensors, and OpenCV but for rounding."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return other.to_input(other.transform_pixels(pixels, antialias=False)[None])[0]

    swapped = _with_pictures(plan, lambda picture: Image.merge("RGB", picture.split()[::-1]))
    yield Cause("BGR", "the channels are in the order blue, green, red"), swapped
    for precision in ("bfloat16", "float16", "bfloat16-weights") if is_near else ():
        what = f"computed in half precision ({precision})"
        yield Cause("precision", what), replace(plan, settings=replace(plan.settings, precision=precision))
    if pre.library_transform is not None:  # which of its steps differ cannot be tried
        side = min(pre.crop_px)
        for resize, (words, mean, std) in product((round(side / 0.875), pre.crop_px, side), _NORMALISATIONS[:5]):
            what = f"bilinear, {_in_words(resize, pre.crop_px)}, normalisation {words}"
            usual = {"resize_px": resize, "mean": mean, "std": std, "library_transform": None}
            yield having("preprocessing", what, interpolation="bilinear", **usual)
    else:
        for words, mean, std in _NORMALISATIONS:
            yield having("normalisation", words, f"mean {pre.mean}, std {pre.std}", mean=mean, std=std)
        for name in INTERPOLATIONS:
            yield having("interpolation", name, pre.interpolation, interpolation=name)
        for name in ("bilinear", "bicubic"):
            what, given = f"{name} by torchvision on tensors", pre.interpolation
            yield having("interpolation", what, given, interpolation=name, fast=True)
            resized = functools.partial(without_antialias, replace(pre, interpolation=name))
            yield having("interpolation", f"{name} without antialiasing", given, library_transform=resized)
        for resize, crop in _geometries(pre):
            words, given = _in_words(resize, crop), _in_words(pre.resize_px, pre.crop_px)
            yield having("crop", words, given, resize_px=resize, crop_px=crop)
    yield Cause("mirror", "the pictures are mirrored"), _with_pictures(plan, ImageOps.mirror)
    yield having("EXIF", "the EXIF orientation is ignored", orientation="ignore")
    yield having("ICC", "colour profiles are converted to sRGB", icc="srgb")


def _in_words(resize: int | tuple[int, int], crop: tuple[int, int]) -> str:
    resized = resize if isinstance(resize, int) else "x".join(map(str, resize))
    return f"resize {resized}, crop {'x'.join(map(str, crop))}"


def _geometries(pre: Preprocessing) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Yield sizes of the resize and the crop: first those of the same input, as fast as the given one."""
    for crop in (pre.crop_px, *((side, side) for side in (224, 256, 288, 192, 384))):
        parts = (1, 0.875, 0.9, 0.95, 0.96) if crop == pre.crop_px else (1, 0.875)
        sides = (*(int(min(crop) / part) for part in parts), 256, 232)
        yield from ((resize, crop) for resize in (crop, *dict.fromkeys(side for side in sides if side >= min(crop))))


def _orders(paths: Sequence[str]) -> Iterator[tuple[str, Places]]:
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
