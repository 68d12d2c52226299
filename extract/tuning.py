"""What this machine can do for a backbone, measured: decoding, the forward in each way there is, writing.

settings, measured = fastest("photos", backbone=backbone)
extract_features("photos", out="outputs/photos", backbone=backbone, **settings)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from extract import defaults
from extract.backbones import Backbone
from extract.errors import InputError, first_line
from extract.features import Choice, choose_features
from extract.first_batch import FULL_PRECISION, Agreement, agreement
from extract.forward import ready
from extract.images import Images, list_images, load_batches
from extract.preprocessing import Preprocessing
from extract.settings import evaluating, full_float32
from extract.store.dataset import DataSet

__all__ = ["Measured", "Way", "decode_rate", "fastest", "forward_rates", "pictures_of", "ways_for"]

_AT_LEAST_S = 1.0  # of repeated forwards
_FORWARDS = 3
_DECODED = 16  # images that are decoded both ways


@dataclass(frozen=True)
class Way:
    """One way to compute features."""

    precision: str
    engine: str

    def __str__(self) -> str:
        return f"{self.precision}, {self.engine}"


@dataclass(frozen=True)
class Measured:
    """A forward that was timed.

    Attributes:
        way: it was computed.
        images_per_s: of batches that lie in memory; 0 where it failed.
        start_s: seconds until the first batch was computed, with compiling.
        agreement: feature -> how it agrees with eager float32.
        why_not: it may not be taken; empty: it may.
    """

    way: Way
    images_per_s: float = 0.0
    start_s: float = 0.0
    agreement: dict[str, Agreement] = field(default_factory=dict)
    why_not: str = ""


def ways_for(device: torch.device, *, thorough: bool = False) -> list[Way]:
    """The ways to compute on a device, the plain one first.

    Args:
        device: of the backbone.
        thorough: also those that are seldom the fastest and take long to compile: inductor on a CPU, beside OpenVINO.
    """
    by_openvino = device.type == "cpu" and importlib.util.find_spec("openvino") is not None
    engines = ["eager", *(["openvino"] if by_openvino else []), *(["inductor"] if thorough or not by_openvino else [])]
    lower = ["bfloat16"] if device.type == "cpu" else ["bfloat16", "float16"]
    return [Way(precision, engine) for precision in ("float32", *lower) for engine in engines]


def pictures_of(
    images: Images, preprocessing: Preprocessing, count: int, max_pixels: int = defaults.MAX_PIXELS
) -> Tensor:
    """The first images that can be decoded, as many as `count`, repeated where there are fewer: (count, ...).

    Raises:
        InputError: none of the first can be decoded.
    """
    rows = [list(range(min(count, len(images))))]
    batches = load_batches(
        images, rows, preprocessing.prepare, workers=0, max_pixels=max_pixels, at_least_px=preprocessing.at_least_px
    )
    with contextlib.closing(batches):
        batch = next(batches)
    if not len(batch.images):
        raise InputError(
            f"none of the first {len(rows[0])} images can be decoded: {next(iter(batch.reasons.values()))}"
        )
    return torch.cat([batch.images] * -(-count // len(batch.images)))[:count]


def forward_rates(
    backbone: Backbone, choice: Choice, pictures: Tensor, ways: Iterable[Way], min_cosine: float = defaults.MIN_COSINE
) -> list[Measured]:
    """Time forwards of one batch, the eager one in float32 first, and compare what they give.

    Args:
        backbone: as loaded.
        choice: of features.
        pictures: a batch, as `Preprocessing.prepare` makes it.
        ways: to be timed.
        min_cosine: from which on a feature in lower precision may be taken.
    """
    with ready(backbone, choice, "float32") as plain:
        expected = plain(pictures)
    measured = []
    for way in ways:
        try:
            start = time.perf_counter()
            with ready(backbone, choice, "float32", way.precision, way.engine, len(pictures)) as forward:
                found = agreement(forward(pictures), expected)
                start_s = time.perf_counter() - start
                rate = len(pictures) / _median_s(lambda forward=forward: forward(pictures))  # type: ignore[misc]
        except Exception as error:  # a compiler may fail in any way
            measured.append(Measured(way, why_not=first_line(error)))
            continue
        plain_way = way == Way("float32", "eager")
        measured.append(Measured(way, rate, start_s, {} if plain_way else found, _why_not(way, found, min_cosine)))
    return measured


def _median_s(call: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < _FORWARDS or sum(times) < _AT_LEAST_S:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _why_not(way: Way, found: dict[str, Agreement], min_cosine: float) -> str:
    if way.precision == "float32":
        worst = max(one.max_deviation for one in found.values())
        return "" if worst <= FULL_PRECISION else f"off by {worst:.1e} of the largest value, more than rounding"
    least = min(one.min_cosine for one in found.values())
    return "" if least >= min_cosine else f"cosine to float32 {least:.6f}, less than {min_cosine}"


def decode_rate(images: Images, preprocessing: Preprocessing, count: int) -> float:
    """Images per second that one core reads, decodes and prepares."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        pictures_of(images, preprocessing, min(count, 8))
        start = time.perf_counter()
        decoded = len(pictures_of(images, preprocessing, min(count, len(images))))
        return decoded / (time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)


def fastest(
    images: str | os.PathLike[str] | Images,
    *,
    backbone: Backbone,
    layers: str | Sequence[str] = defaults.LAYERS,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = defaults.BATCH_SIZE,
    min_cosine: float = defaults.MIN_COSINE,
    limit: int | None = None,
    precisions: Sequence[str] = ("float32", "bfloat16", "float16"),
) -> tuple[dict[str, str], list[Measured]]:
    """The fastest way to compute features of these images that agrees with the plain one.

    Args:
        images: as of `extract_features`; the first batch is computed in each way.
        backbone: as loaded.
        layers: as of `extract_features`.
        out: a data set that is to be gone on with: what its features depend on stays, and nothing is measured.
        batch_size: images a forward.
        min_cosine: from which on features in lower precision agree.
        limit: only so many images.
        precisions: to choose from.

    Returns:
        `precision`, `compile` and `decode` as `extract_features` takes them; and what was measured.

    Raises:
        InputError: as of `extract_features`.
    """
    found = images if isinstance(images, Images) else list_images(images, limit)
    decode = "exact" if _no_faster(backbone.preprocessing) else "fast"
    if out is not None and (Path(out) / "dataset.json").exists():
        depends_on = DataSet.open(Path(out)).depends_on
        precision, _, way = str(depends_on["precision"]).partition(" ")
        decode = "fast" if depends_on["preprocessing"].get("resized_by") == "torchvision" else "exact"
        compile = "openvino" if way == "openvino" else "auto"
        return {"precision": precision, "compile": compile, "decode": decode}, []
    with evaluating(backbone.model), full_float32():
        choice = choose_features(backbone, [layers] if isinstance(layers, str) else layers)
    count = min(batch_size, len(found))
    exact = pictures_of(found, backbone.preprocessing, count)
    ways = [way for way in ways_for(backbone.device) if way.precision in precisions]
    measured = forward_rates(backbone, choice, exact, ways, min_cosine)
    if decode == "fast":
        few = min(count, _DECODED)
        fast = pictures_of(found, replace(backbone.preprocessing, fast=True), few)
        with ready(backbone, choice, "float32") as forward:
            agreed = agreement(forward(fast), forward(exact[:few]))
        if min(one.min_cosine for one in agreed.values()) < min_cosine:
            decode = "exact"
    best = max((one for one in measured if not one.why_not), key=lambda one: one.images_per_s).way
    compile = "off" if best.engine == "eager" else best.engine
    return {"precision": best.precision, "compile": compile, "decode": decode}, measured


def _no_faster(preprocessing: Preprocessing) -> bool:
    try:
        preprocessing.faster()
    except InputError:
        return True
    return False
