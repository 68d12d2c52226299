"""Measure decoding, the forward and the whole pipeline on this machine: `layertap doctor [IMAGES] --bench`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from extract import defaults
from extract.compute.backbone import load_backbone
from extract.compute.feature_choice import choose_features
from extract.errors import InputError
from extract.extraction.plan import default_batch_size, existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.extraction.tuning import Measured, compute_options, decode_seconds, forward_rates, ranked
from extract.extraction.validation import decoded_in
from extract.images import list_images
from extract.system.atomic_files import temporary_folder
from extract.system.torch_state import evaluating, full_float32

__all__ = ["Bench", "as_json", "bench", "print_bench"]

_DECODED = 64  # images
_SYNTHETIC = 256  # images
_PIPELINE_S = 20.0  # approximate time of a run of the whole pipeline


@dataclass(frozen=True)
class Bench:
    """Measurements, in images per second.

    Attributes:
        images: location of the images.
        backbone: spec of the backbone.
        device: device that was used.
        cores: cores of this machine that may be used.
        decode: "exact" and "fast" -> rate of a core.
        forward: rate of each option for batches in memory.
        pipelines: of the plain option, and of the fastest option that agrees with it: the option (`way`), `decode`, the
            number of `images`, and `images_per_s`, without the time for comparing and compiling.
    """

    images: str
    backbone: str
    device: str
    cores: int
    decode: dict[str, float]
    forward: list[Measured]
    pipelines: list[dict[str, Any]]


def bench(
    images: str | None,
    *,
    backbone: str = defaults.BACKBONE,
    layers: tuple[str, ...] = defaults.LAYERS,
    weights: str | None = None,
    device: str = defaults.DEVICE,
    say: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Run the benchmark.

    Args:
        images: see `layertap embed`; None: noise, 500x375, as JPEG.
        backbone: spec of the backbone.
        layers: layers to extract.
        weights: see `load_backbone`.
        device: device to compute on.
        say: receives the name of each measurement.
    """
    loaded = load_backbone(backbone, weights=weights, device=device)
    ways = {"exact": loaded.preprocessing}
    if loaded.preprocessing.can_be_faster:
        ways["fast"] = loaded.preprocessing.faster()
    with temporary_folder(Path(tempfile.gettempdir()) / "layertap-bench") as folder:
        image_list = list_images(images or _write_noise(folder / "images"))
        with evaluating(loaded.model), full_float32():
            choice = choose_features(loaded, list(layers))
        if projected := [feature for feature in choice.features if feature.principal_axes]:
            raise InputError(
                f"{projected[0].name}: bench does not fit principal axes",
                hint="measure srpK, or the layer without pcaK",
            )
        say("decoding")
        batch_size = default_batch_size(loaded.device)
        decode_s = {name: decode_seconds(image_list, way, count=_DECODED) for name, way in ways.items()}
        (pictures,) = decoded_in(image_list, [ways["exact"]], defaults.MAX_PIXELS, batch_size)
        say("forward")
        plain, tried = forward_rates(loaded, choice, pictures, compute_options(loaded.device))

        def pipeline(measured: Measured, decode: str) -> dict[str, Any]:
            option = measured.way
            say(f"the whole pipeline: {option}, {decode} decoding")
            way: dict[str, Any] = {"decode": decode, "precision": option.precision, "compile": option.compile}
            settings = ExtractionSettings(layers=layers, min_cosine=-1.0, **way)  # its rate alone is of interest
            some = image_list.head(max(batch_size, int(measured.images_per_s * _PIPELINE_S)))
            out = existing_at(folder / decode / str(option))
            summary = extract(resolve(settings, some, loaded, out))
            prepared_in_s = summary.computation.prepared_in_s if summary.computation else 0.0
            rate = summary.computed / (summary.seconds - prepared_in_s)
            return {"way": option, "decode": decode, "images": len(some), "images_per_s": rate}

        best = ranked(tried)[0], "fast" if "fast" in ways else "exact"
        pipelines = [pipeline(*each) for each in dict.fromkeys([(plain, "exact"), best])]
    return Bench(
        images or "noise, 500x375, as JPEG", backbone, str(loaded.device), defaults.CORES,
        {name: 1 / seconds for name, seconds in decode_s.items()}, tried, pipelines,
    )  # fmt: skip


def _write_noise(folder: Path) -> str:
    """Write pictures of noise, and return their folder."""
    folder.mkdir()
    for number in range(_SYNTHETIC):
        noise = np.random.default_rng(number).integers(0, 256, (75, 100, 3)).astype(np.uint8)
        picture = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number:03d}.jpg", quality=90)
    return str(folder)


def print_bench(result: Bench, echo: Callable[[str], None]) -> None:
    """Print the rates."""
    echo(f"{result.backbone} on {result.device}, {result.cores} cores; {result.images}; images/s:")
    for name, rate in result.decode.items():
        echo(f"  decode, {name:12} {rate:17.1f} per core")
    for measured in result.forward:
        rate_text = f"{measured.images_per_s:9.1f}" if measured.images_per_s else "        -"
        echo(f"  forward, {measured.way!s:19} {rate_text}{measured.remark}")
    for pipeline in result.pipelines:
        way = pipeline["way"]
        flags = f"--precision {way.precision} --compile {way.compile} --decode {pipeline['decode']}"
        echo(f"  pipeline, {pipeline['images']:,} images {pipeline['images_per_s']:9.1f}  {flags}")


def as_json(result: Bench) -> dict[str, Any]:
    """Return the rates as JSON-compatible data."""
    return dataclasses.asdict(result)
