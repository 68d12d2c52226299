"""What this machine can do for a backbone, and what the pipeline makes of it: `layertap bench [IMAGES] -b BACKBONE`."""

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
from extract.backbones import Backbone, load_backbone
from extract.extraction import extract
from extract.features import Choice, choose_features
from extract.images import Images, list_images
from extract.images.source import Source
from extract.planning import plan_for
from extract.settings import evaluating, full_float32
from extract.tuning import Measured, Way, decode_rate, forward_rates, pictures_of, ways_for

__all__ = ["Bench", "as_json", "bench", "print_bench"]

_BATCH_SIZES = (8, 16, 32, 64, 128)
_GAIN = 1.03  # what a larger batch must gain
_DECODED = 200  # images
_WRITTEN_BYTES = 256 << 20
_PIPELINE_S = 20.0  # about so long the whole pipeline runs, in each way
_SYNTHETIC = 64  # images


@dataclass(frozen=True)
class Pipeline:
    """The whole pipeline, run in one way.

    Attributes:
        way: the forward was computed.
        decode: "exact" or "fast".
        images_per_s: from the first image to the last, without loading the backbone or compiling.
        bound: what decoding and forward together allow on this machine, images per second.
    """

    way: Way
    decode: str
    images_per_s: float
    bound: float


@dataclass(frozen=True)
class Bench:
    """What was measured; rates are images per second.

    Attributes:
        images: where they were.
        backbone: its spec.
        device: it ran on.
        cores: that decode.
        decode: "exact" and "fast" -> rate of one core.
        forward: of batches in memory, each way.
        batches: images a forward -> rate, eager, in float32.
        write: rate at which rows of these features reach the disk.
        row_bytes: of these features.
        pipelines: the plain way, and the fastest that agrees.
        recommended: flags of `layertap embed`.
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
    pipelines: list[Pipeline]
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
    """Measure.

    Args:
        images: as of `layertap embed`; None: pictures of noise, 500x375, as JPEG.
        backbone: its spec.
        layers: whose features.
        weights: as of `load_backbone`.
        device: to compute on.
        thorough: also ways that are seldom the fastest and take long to compile.
        say: told what is being measured.
    """
    loaded = load_backbone(backbone, weights=weights, device=device)
    with _images(images) as where, evaluating(loaded.model), full_float32():
        choice = choose_features(loaded, list(layers))
        found = list_images(where)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        say("decoding")
        ways_to_decode = {"exact": loaded.preprocessing}
        with contextlib.suppress(ValueError):
            ways_to_decode["fast"] = loaded.preprocessing.faster()
        decode = {name: decode_rate(found, one, _DECODED) for name, one in ways_to_decode.items()}
        say("batch sizes")
        pictures = pictures_of(found, loaded.preprocessing, max(_BATCH_SIZES))
        batches = _batch_sizes(loaded, choice, pictures)
        batch_size = _smallest_good(batches)
        measured = []
        for way in ways_for(loaded.device, thorough=thorough):
            say(f"forward: {way}")
            measured += forward_rates(loaded, choice, pictures[:batch_size], [way])
        say("writing")
        row_bytes = sum(4 * int(np.prod(feature.shape)) for feature in choice.features)
        write = _write_rate(row_bytes)
        best = max((one for one in measured if not one.why_not), key=lambda one: one.images_per_s)
        fast = "fast" if "fast" in decode else "exact"
        pipelines = []
        for one, how in {(measured[0].way, "exact"): measured[0], (best.way, fast): best}.items():
            say(f"the whole pipeline: {one[0]}, {one[1]} decoding")
            bound = _bound(how.images_per_s, decode[one[1]], cores, write, loaded.device.type == "cpu")
            rate = _pipeline_rate(loaded, found, layers, one[0], one[1], batch_size, bound)
            pipelines.append(Pipeline(*one, rate, bound))
    recommended = {
        "batch_size": batch_size,
        "workers": defaults.WORKERS,
        "precision": best.way.precision,
        "compile": "off" if best.way.engine == "eager" else best.way.engine,
        "decode": fast,
    }
    return Bench(
        images or "pictures of noise, 500x375, as JPEG", backbone, str(loaded.device), cores, decode, measured,
        batches, write, row_bytes, pipelines, recommended,
    )  # fmt: skip


@contextlib.contextmanager
def _images(given: str | None) -> Iterator[str]:
    """Where the images are; without any, some are made."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        for number in range(_SYNTHETIC):
            noise = np.random.default_rng(number).integers(0, 256, (75, 100, 3)).astype(np.uint8)
            picture = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
            picture.save(Path(folder) / f"{number:03d}.jpg", quality=90)
        yield folder


def _batch_sizes(backbone: Backbone, choice: Choice, pictures: Any) -> dict[int, float]:
    """Images a forward -> images per second, until the memory ends."""
    rates: dict[int, float] = {}
    for size in _BATCH_SIZES:
        (one,) = forward_rates(backbone, choice, pictures[:size], [Way("float32", "eager")])
        if not one.images_per_s:
            break
        rates[size] = one.images_per_s
    return rates


def _smallest_good(rates: dict[int, float]) -> int:
    """The smallest batch than which none is faster by more than noise."""
    most = max(rates.values())
    return next(size for size, rate in rates.items() if rate * _GAIN >= most)


def _write_rate(row_bytes: int) -> float:
    """Rows per second to the disk of the working directory, forced to it."""
    block = np.random.default_rng(0).bytes(4 << 20)
    with tempfile.TemporaryFile(dir=".") as file:
        start = time.perf_counter()
        for _ in range(_WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN_BYTES / row_bytes / (time.perf_counter() - start)


def _bound(forward: float, decode: float, cores: int, write: float, shared: bool) -> float:
    """What stages of these rates allow together: on a CPU, decoding takes its time from the forward."""
    decoding = decode * cores
    computing = 1 / (1 / forward + 1 / decoding) if shared else min(forward, decoding)
    return min(computing, write)


def _pipeline_rate(
    backbone: Backbone, images: Images, layers: tuple[str, ...], way: Way, decode: str, batch_size: int, bound: float
) -> float:
    """Images per second of a run, after its first batches."""
    done: list[tuple[float, int]] = []
    repeated = _repeated(images, max(4 * batch_size, int(bound * _PIPELINE_S)))
    settings = {
        "layers": list(layers), "batch_size": batch_size, "workers": defaults.WORKERS, "decode": decode,
        "dtype": "float32", "precision": way.precision, "compile": "off" if way.engine == "eager" else way.engine,
        "min_cosine": -1.0, "max_pixels": defaults.MAX_PIXELS, "shard_rows": None, "compress": None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        planned = plan_for(repeated, Path(folder) / "out", backbone, settings)
        extract(planned, on_rows=lambda rows, found: done.append((time.perf_counter(), rows)))
    return sum(rows for _, rows in done[1:]) / (done[-1][0] - done[0][0])


def _repeated(images: Images, count: int) -> Images:
    """So many images, with other bytes each, since equal ones would be computed once."""
    paths = [f"{row:09d}" for row in range(count)]
    source = _Repeated(images.source, len(images))
    return Images(images.root, paths, np.full(count, -1, np.int64), classes=[], splits=[""] * count, source=source)


class _Repeated:
    """A source whose rows begin anew where another one ends."""

    def __init__(self, source: Source, count: int):
        self._source, self._count = source, count

    def read(self, row: int) -> tuple[bytes, int]:
        """As of `Source`; with the number of the row behind it."""
        data, mtime_ns = self._source.read(row % self._count)
        return data + row.to_bytes(8), mtime_ns

    def decode(self, data: bytes, max_pixels: int, at_least_px: int = 0) -> Image.Image:
        """As of `Source`."""
        return self._source.decode(data[:-8], max_pixels, at_least_px)

    def check_there(self) -> None:
        """As of `Source`."""
        self._source.check_there()


def print_bench(found: Bench, echo: Callable[[str], None]) -> None:
    """For people."""
    echo(f"{found.backbone} on {found.device}, {found.cores} cores; {found.images}")
    echo("images/s of each stage by itself:")
    for name, rate in found.decode.items():
        echo(f"  decode, {name:6}             {rate:9.1f} a core")
    for one in found.forward:
        rate_text = f"{one.images_per_s:9.1f}" if one.images_per_s else "        -"
        note = f"  (starts in {one.start_s:.0f} s)" if one.way.engine != "eager" and one.images_per_s else ""
        if one.agreement:
            cosine = min(each.min_cosine for each in one.agreement.values())
            off = max(each.max_deviation for each in one.agreement.values())
            note += f"  cosine at least {cosine:.6f}, off by {off:.1e}"
        if one.why_not:
            note += f"  not taken: {one.why_not}"
        echo(f"  forward, {one.way!s:18} {rate_text}{note}")
    echo(f"  write, {found.row_bytes / 1e3:.1f} kB a row       {found.write:9.0f}")
    echo("batch size -> forward: " + ", ".join(f"{size} {rate:.1f}" for size, rate in found.batches.items()))
    echo("the whole pipeline:")
    for pipeline in found.pipelines:
        share = pipeline.images_per_s / pipeline.bound
        echo(
            f"  {pipeline.way!s:20} {pipeline.decode:6} decoding {pipeline.images_per_s:9.1f}, {share:.2f} of the "
            f"bound {pipeline.bound:.1f}"
        )
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.recommended.items())
    echo(f"recommended: {flags}")


def as_json(found: Bench) -> dict[str, Any]:
    """For machines."""
    return dataclasses.asdict(found)
