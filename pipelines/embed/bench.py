"""Measure each stage and the whole pipeline on this machine: `layertap bench [IMAGES] -b BACKBONE`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from extract import defaults
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.feature_choice import choose_features
from extract.errors import LayertapError
from extract.extraction.plan import plan
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.extraction.tuning import (
    ComputeOption,
    Measured,
    batch_rates,
    best_batch_size,
    compute_options,
    decode_rate,
    forward_rates,
    pictures_of,
    ranked,
)  # fmt: skip
from extract.images import ImageList, Images, list_images
from extract.images.sources import ImageSource
from extract.system.leftovers import temporary_folder
from extract.system.torch_state import evaluating, full_float32

__all__ = ["Bench", "PipelineRate", "as_json", "bench", "print_bench"]

_DECODED = 200  # images
_WRITTEN_BYTES = 256 << 20
_PIPELINE_S = 30.0  # approximate time of a run of the whole pipeline
_SYNTHETIC = 64  # images


@dataclass(frozen=True)
class PipelineRate:
    """Rate of a run of the whole pipeline, in images per second.

    Attributes:
        way: how the forward was computed.
        decode: "exact" or "fast".
        images_per_s: rate over all images, without the time for comparing and compiling.
        bound: rate that decoding, forward and writing together allow on this machine.
    """

    way: ComputeOption
    decode: str
    images_per_s: float
    bound: float


@dataclass(frozen=True)
class Bench:
    """Measured rates, in images per second.

    Attributes:
        images: location of the images.
        backbone: spec of the backbone.
        device: device that was used.
        cores: cores of this machine that may be used.
        decode: "exact" and "fast" -> rate of a core.
        forward: rate of each option for batches in memory.
        batches: batch size -> rate, eager, in float32.
        write: rate at which rows of these features reach the disk.
        row_bytes: bytes of a row of these features.
        pipelines: the plain option, and the fastest option that agrees with it.
        recommended: flags for `layertap embed`.
    """

    images: str
    backbone: str
    device: str
    cores: int
    decode: dict[str, float]
    forward: list[Measured]
    batches: dict[int, float]
    write: float
    row_bytes: int
    pipelines: list[PipelineRate]
    recommended: dict[str, Any]


def bench(
    images: str | None,
    *,
    backbone: str = defaults.BACKBONE,
    layers: tuple[str, ...] = defaults.LAYERS,
    weights: str | None = None,
    device: str = defaults.DEVICE,
    thorough: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Run the benchmark.

    Args:
        images: see `layertap embed`; None: noise, 500x375, as JPEG.
        backbone: spec of the backbone.
        layers: layers to extract.
        weights: see `load_backbone`.
        device: device to compute on.
        thorough: whether to measure options that are rarely the fastest and slow to compile.
        say: receives the name of each measurement.

    Raises:
        LayertapError: the working directory cannot be written to.
    """
    if not os.access(".", os.W_OK):
        raise LayertapError(
            "bench measures writing to the working directory, which is not writable", hint="run it elsewhere"
        )
    loaded = load_backbone(backbone, weights=weights, device=device)
    preprocessing = loaded.preprocessing
    with _images(images) as where:
        image_list = list_images(where)
        with evaluating(loaded.model), full_float32():
            choice = choose_features(loaded, list(layers))
        say("decoding")
        decode = {"exact": decode_rate(image_list, preprocessing, _DECODED)}
        if preprocessing.can_be_faster:
            decode["fast"] = decode_rate(image_list, preprocessing.faster(), _DECODED)
        say("batch sizes")
        batches = batch_rates(loaded, choice, pictures_of(image_list, preprocessing, defaults.BATCH_SIZE)[0])
        batch_size = best_batch_size(batches)
        pictures, fast = pictures_of(image_list, preprocessing, batch_size, both_ways=preprocessing.can_be_faster)
        measured = []
        for option in compute_options(loaded.device, thorough=thorough):
            say(f"forward: {option}")
            measured += forward_rates(loaded, choice, pictures, [option], fast=fast, refused_too=True)
        say("writing")
        row_bytes = sum(4 * int(np.prod(feature.shape)) for feature in choice.features)
        write = _write_rate(row_bytes)
        plain, best = measured[0], ranked(measured)[0]
        pipelines = []
        for (option, decoding), measurement in {(plain.way, "exact"): plain, (best.way, best.decode): best}.items():
            say(f"the whole pipeline: {option}, {decoding} decoding")
            bound = _bound(measurement.images_per_s, decode[decoding], write, loaded.device.type == "cpu")
            rate = _pipeline_rate(loaded, image_list, layers, option, decoding, batch_size, bound)
            pipelines.append(PipelineRate(option, decoding, rate, bound))
    recommended = {
        "batch_size": batch_size, "workers": defaults.WORKERS, "precision": best.way.precision,
        "compile": best.way.compile, "decode": best.decode,
    }  # fmt: skip
    return Bench(
        images or "noise, 500x375, as JPEG", backbone, str(loaded.device), defaults.CORES, decode, measured,
        batches, write, row_bytes, pipelines, recommended,
    )  # fmt: skip


@contextlib.contextmanager
def _images(images: str | None) -> Iterator[str]:
    """Context manager: yield the location of the images; if None is given, write noise to a temporary folder."""
    if images is not None:
        yield images
        return
    with temporary_folder(Path(tempfile.gettempdir()) / "layertap-bench") as temporary:
        folder = temporary / "images"
        folder.mkdir()
        for number in range(_SYNTHETIC):
            noise = np.random.default_rng(number).integers(0, 256, (75, 100, 3)).astype(np.uint8)
            picture = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
            picture.save(folder / f"{number:03d}.jpg", quality=90)
        yield str(folder)


def _write_rate(row_bytes: int) -> float:
    """Return rows per second written and synced to the disk of the working directory."""
    block = np.random.default_rng(0).bytes(4 << 20)
    with tempfile.TemporaryFile(dir=".") as file:
        start = time.perf_counter()
        for _ in range(_WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN_BYTES / row_bytes / (time.perf_counter() - start)


def _bound(forward: float, decode: float, write: float, on_cpu: bool) -> float:
    """Return the rate that stages of these rates allow together; on a CPU, decoding and the forward share the cores."""
    decoding = decode * min(defaults.CORES, defaults.WORKERS)
    compute = 1 / (1 / forward + 1 / (decode * defaults.CORES)) if on_cpu else forward
    return min(compute, decoding, write)


def _pipeline_rate(
    backbone: Backbone,
    images: ImageList,
    layers: tuple[str, ...],
    option: ComputeOption,
    decode: str,
    batch_size: int,
    bound: float,
) -> float:
    """Return images per second of a whole run, without the time for comparing and compiling."""
    repeated = _repeated(images, max(12 * batch_size, int(bound * _PIPELINE_S)))
    with temporary_folder(Path("layertap-bench")) as folder:
        settings = ExtractionSettings(
            layers=layers, batch_size=batch_size, decode=decode, precision=option.precision, compile=option.compile
        )
        planned = plan(repeated, out=folder / "out", backbone=backbone, settings=settings)
        summary = extract(planned)
    prepared_in_s = summary.computation.prepared_in_s if summary.computation else 0.0
    return summary.computed / (summary.seconds - prepared_in_s)


def _repeated(images: ImageList, count: int) -> Images:
    """Return `count` repeated images. Their bytes differ, since equal images would be computed once."""
    paths = [f"{row:09d}" for row in range(count)]
    source = _Repeated(images.source, len(images))
    return Images(images.root, paths, np.full(count, -1, np.int64), classes=[], splits=[""] * count, source=source)


class _Repeated:
    """A source that repeats the rows of another source."""

    def __init__(self, source: ImageSource, count: int):
        self._source, self._count = source, count

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`; the row number is appended to the bytes."""
        data, mtime_ns = self._source.read(row % self._count)
        return data + row.to_bytes(8), mtime_ns

    def decode(
        self, data: bytes, max_pixels: int, min_decode_px: int = 0, orientation: str = defaults.ORIENTATION,
        icc: str = defaults.ICC,
    ) -> Image.Image:  # fmt: skip
        """See `ImageSource`."""
        return self._source.decode(data[:-8], max_pixels, min_decode_px, orientation, icc)

    def check_there(self) -> None:
        """See `ImageSource`."""
        self._source.check_there()


def print_bench(result: Bench, echo: Callable[[str], None]) -> None:
    """Print the rates."""
    echo(f"{result.backbone} on {result.device}, {result.cores} cores; {result.images}")
    echo("images/s of each stage alone:")
    for name, rate in result.decode.items():
        echo(f"  decode, {name:6}             {rate:9.1f} per core")
    for measurement in result.forward:
        rate_text = f"{measurement.images_per_s:9.1f}" if measurement.images_per_s else "        -"
        note = ""
        if measurement.way.engine != "eager" and measurement.images_per_s:
            note = f"  (starts in {measurement.start_s:.0f} s)"
        if measurement.agreement:
            cosine = min(agreement.min_cosine for agreement in measurement.agreement.values())
            off = max(agreement.max_deviation for agreement in measurement.agreement.values())
            note += f"  minimum cosine {cosine:.6f}, largest difference {off:.1e}"
        if measurement.why_not:
            note += f"  rejected: {measurement.why_not}"
        elif measurement.why_not_fast:
            note += f"  fast decoding rejected: {measurement.why_not_fast}"
        echo(f"  forward, {measurement.way!s:18} {rate_text}{note}")
    echo(f"  write, {result.row_bytes / 1e3:.1f} kB per row     {result.write:9.0f}")
    echo("batch size -> forward: " + ", ".join(f"{size} {rate:.1f}" for size, rate in result.batches.items()))
    echo("the whole pipeline:")
    for pipeline in result.pipelines:
        share = pipeline.images_per_s / pipeline.bound
        echo(
            f"  {pipeline.way!s:20} {pipeline.decode:6} decoding {pipeline.images_per_s:9.1f}, {share:.2f} of the "
            f"bound {pipeline.bound:.1f}"
        )
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in result.recommended.items())
    echo(f"recommended: {flags}")


def as_json(result: Bench) -> dict[str, Any]:
    """Return the rates as JSON-compatible data."""
    return dataclasses.asdict(result)
