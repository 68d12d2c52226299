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
from typing import Any, cast

import numpy as np
from PIL import Image

from extract import defaults
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.feature_choice import choose_features
from extract.errors import InputError, LayertapError
from extract.extraction.forward_rates import PLAIN, ComputeOption, Measured, compute_options, forward_rates
from extract.extraction.kept_measurements import Measurements
from extract.extraction.plan import plan
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.extraction.tuning import batch_rates, best_batch_size, decode_rate, pictures_of, ranked
from extract.images import ImageList, Images, list_images
from extract.images.sources import ImageSource, SourceOfSource
from extract.system.leftovers import temporary_folder
from extract.system.operating_system import flush_to_disk
from extract.system.torch_state import evaluating, full_float32

__all__ = ["Bench", "PipelineRate", "as_json", "bench", "print_bench"]

_DECODED = 200  # images
_WRITTEN_BYTES = 256 << 20
_PIPELINE_S = 20.0  # approximate time of a run of the whole pipeline
_GAIN = 1.03  # required speed-up of a batch size or a number of workers other than the default
_SYNTHETIC = 64  # images


@dataclass(frozen=True)
class PipelineRate:
    """Rate of a run of the whole pipeline, in images per second.

    Attributes:
        way: how the forward was computed.
        decode: "exact" or "fast".
        batch_size: images per batch.
        workers: processes that decode.
        images_per_s: rate over all images, without the time for comparing and compiling.
        bound: rate that decoding, forward and writing together allow on this machine.
    """

    way: ComputeOption
    decode: str
    batch_size: int
    workers: int
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
        batches: batch size -> rate of the forward with the fastest option.
        write: rate at which rows of these features reach the disk.
        row_bytes: bytes of a row of these features.
        pipelines: the plain option; the fastest option that agrees with it; and this one with other batch sizes and
            numbers of workers.
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
        if projected := [feature for feature in choice.features if feature.principal_axes]:
            raise InputError(
                f"{projected[0].name}: bench does not fit principal axes",
                hint="measure srpK, or the layer without pcaK",
            )
        say("decoding")
        decode = {"exact": decode_rate(image_list, preprocessing, _DECODED)}
        if preprocessing.can_be_faster:
            decode["fast"] = decode_rate(image_list, preprocessing.faster(), _DECODED)
        pictures, fast = pictures_of(
            image_list, preprocessing, defaults.BATCH_SIZE, both_ways=preprocessing.can_be_faster
        )
        say("forward")
        options = compute_options(loaded.device, thorough=thorough)
        measured = forward_rates(loaded, choice, pictures, options, fast=fast, refused_too=True).measured
        plain = next(measurement for measurement in measured if measurement.way == PLAIN)
        on_cpu = loaded.device.type == "cpu"
        decode_s = {name: 1 / rate for name, rate in decode.items()}
        best, best_decode = ranked(
            Measurements(measured, decode_s, 1 / plain.images_per_s, on_cpu, defaults.BATCH_SIZE)
        )[0]
        say(f"batch sizes: {best.way}")
        batches = batch_rates(loaded, choice, pictures, best.way)
        say("writing")
        row_bytes = sum(4 * int(np.prod(feature.shape)) for feature in choice.features)
        write = _write_rate(row_bytes)

        def pipeline(measurement: Measured, decoding: str, batch_size: int, workers: int) -> PipelineRate:
            how = f"{decoding} decoding, batches of {batch_size}, {workers} workers"
            say(f"the whole pipeline: {measurement.way}, {how}")
            bound = _bound(measurement.images_per_s, decode[decoding], write, on_cpu, workers)
            way: dict[str, Any] = {"precision": measurement.way.precision, "compile": measurement.way.compile}
            settings = ExtractionSettings(
                layers=layers, batch_size=batch_size, workers=workers, decode=cast(Any, decoding), **way
            )
            rate = _pipeline_rate(loaded, image_list, settings, bound)
            return PipelineRate(measurement.way, decoding, batch_size, workers, rate, bound)

        pipelines = [pipeline(plain, "exact", defaults.BATCH_SIZE, defaults.WORKERS)]
        fastest = pipelines[0]
        if (best.way, best_decode) != (PLAIN, "exact"):
            fastest = pipeline(best, best_decode, defaults.BATCH_SIZE, defaults.WORKERS)
            pipelines.append(fastest)
        # A forward alone does not show what a batch size or a worker costs the other stages.
        for batch_size in {best_batch_size(batches)} - {defaults.BATCH_SIZE}:
            pipelines.append(pipeline(best, best_decode, batch_size, defaults.WORKERS))
            fastest = _faster(pipelines[-1], fastest)
        for workers in {max(1, defaults.WORKERS // 2), min(defaults.CORES, 2 * defaults.WORKERS)} - {defaults.WORKERS}:
            pipelines.append(pipeline(best, best_decode, fastest.batch_size, workers))
            fastest = _faster(pipelines[-1], fastest)
    recommended = {
        "batch_size": fastest.batch_size, "workers": fastest.workers, "precision": fastest.way.precision,
        "compile": fastest.way.compile, "decode": fastest.decode,
    }  # fmt: skip
    return Bench(
        images or "noise, 500x375, as JPEG", backbone, str(loaded.device), defaults.CORES, decode, measured,
        batches, write, row_bytes, pipelines, recommended,
    )  # fmt: skip


def _faster(other: PipelineRate, default: PipelineRate) -> PipelineRate:
    """Return the other pipeline if it is clearly faster."""
    return other if other.images_per_s > _GAIN * default.images_per_s else default


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
        flush_to_disk(file.fileno())
        return _WRITTEN_BYTES / row_bytes / (time.perf_counter() - start)


def _bound(forward: float, decode: float, write: float, on_cpu: bool, workers: int) -> float:
    """Return the rate that stages of these rates allow together; on a CPU, decoding and the forward share the cores."""
    decoding = decode * min(defaults.CORES, workers)
    compute = 1 / (1 / forward + 1 / (decode * defaults.CORES)) if on_cpu else forward
    return min(compute, decoding, write)


def _pipeline_rate(backbone: Backbone, images: ImageList, settings: ExtractionSettings, bound: float) -> float:
    """Return images per second of a whole run, without the time for comparing and compiling."""
    repeated = _repeated(images, max(12 * settings.batch_size, int(bound * _PIPELINE_S)))
    with temporary_folder(Path("layertap-bench")) as folder:
        planned = plan(repeated, out=folder / "out", backbone=backbone, settings=settings)
        summary = extract(planned)
    prepared_in_s = summary.computation.prepared_in_s if summary.computation else 0.0
    return summary.computed / (summary.seconds - prepared_in_s)


def _repeated(images: ImageList, count: int) -> Images:
    """Return `count` repeated images. Their bytes differ, since equal images would be computed once."""
    paths = [f"{row:09d}" for row in range(count)]
    source = _Repeated(images.source, len(images))
    return Images(images.root, paths, np.full(count, -1, np.int64), classes=[], splits=[""] * count, source=source)


class _Repeated(SourceOfSource):
    """A source that repeats the rows of another source."""

    def __init__(self, source: ImageSource, count: int):
        super().__init__(source)
        self._count = count

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

    def is_remote(self, row: int) -> bool:
        """See `ImageSource`."""
        return self._source.is_remote(row % self._count)


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
            f"  {pipeline.way!s:20} {pipeline.decode:6} decoding, batches of {pipeline.batch_size:4}, "
            f"{pipeline.workers} workers {pipeline.images_per_s:9.1f}, {share:.2f} of the bound {pipeline.bound:.1f}"
        )
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in result.recommended.items())
    echo(f"recommended: {flags}")


def as_json(result: Bench) -> dict[str, Any]:
    """Return the rates as JSON-compatible data."""
    return dataclasses.asdict(result)
