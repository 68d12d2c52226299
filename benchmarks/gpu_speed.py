"""The pipeline with decoded images over the bare forward, on one device.

    python -m benchmarks.gpu_speed [-b torchvision/resnet50]... [--images 8192] [--batch-size 256]
        [--precision float32] [--compile off] [--rounds 3] [--device auto] [--workers 8] [--decode FOLDER]

Bare: batches of float32 pictures that lie on the device already go through the model, and nothing is done with what
comes out. The pipeline: workers read uint8 pictures of the right size from a `.npy` file, which go to the device, are
normalised, and their embeddings go to HDF5 files on the disk. Both in the same precision, in turn; the median over
rounds is told, and what the main process does for an image. With --decode, `layertap embed` of the photos in FOLDER
follows, with the time of each stage and the bottleneck.

`--main-process` tells only the CPU time of the main process for an image: decoded pictures, and a forward that takes
no time. On a GPU, all else is done by workers and the device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks import common
from benchmarks.common import python, ratio
from extract import load_backbone
from extract.backbones.preprocessing import Preprocessing
from extract.backbones.weights import Weights
from extract.compute.backbone import Backbone
from extract.extraction.pipeline import Summary
from extract.extraction.plan import existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.system.torch_state import evaluating, full_float32, keeping_freed_memory

BACKBONES = ["torchvision/resnet50", "torchvision/vit_b_16"]
POOL = 1024  # pictures that differ; they come again and again, as images of their own


@contextmanager
def pictures_file(pool: NDArray[np.uint8], count: int) -> Iterator[Path]:
    """A `.npy` file of `count` pictures (H, W, 3): those of the pool in turn, each with its number in the first bytes.

    Images with the same bytes would be computed once.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pictures.npy"
        file = np.lib.format.open_memmap(path, "w+", np.uint8, (count, *pool.shape[1:]))
        for start in range(0, count, len(pool)):
            file[start : start + len(pool)] = pool[: count - start]
        file.reshape(count, -1)[:, :8] = np.arange(count, dtype=np.uint64).view(np.uint8).reshape(count, 8)
        file.flush()
        yield path


def embedded(backbone: Backbone, listed: Path, **settings: Any) -> Summary:
    """Embed pictures that have the size of the backbone's input, as `layertap embed` does."""
    preprocessing = replace(backbone.preprocessing, resize_px=backbone.preprocessing.crop_px, library_transform=None)
    with tempfile.TemporaryDirectory() as folder:
        existing = existing_at(Path(folder) / "out")
        decoded = replace(backbone, preprocessing=preprocessing)
        how = ExtractionSettings(min_cosine=0.9, **settings)
        summary = extract(resolve(how, list_images(listed), decoded, existing))
    assert summary.status.keys() == {"ok"}
    return summary


def by_pipeline(backbone: Backbone, listed: Path, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Images per second, comparing and compiling excluded, and the seconds of each stage."""
    names = ("batch_size", "precision", "compile", "workers")
    summary = embedded(backbone, listed, **{name: getattr(options, name) for name in names})
    assert summary.computation is not None
    return options.images / (summary.seconds - summary.computation.prepared_in_s), summary.stages


class Nothing(nn.Module):
    """A model whose embedding, 512 values, takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[:, 0, 0, :32].repeat(1, 16))


def nothing(side: int) -> Backbone:
    """The backbone of `Nothing`, for pictures of this side."""
    preprocessing = Preprocessing(side, (side, side), "bilinear", (0.0,) * 3, (1.0,) * 3)
    return Backbone(
        "benchmark/nothing", "nothing", Nothing().eval(), Weights("none", "0" * 64), preprocessing, classifier="fc"
    )


def main_process_us(side: int, images: int, workers: int, batch_size: int) -> float:
    """Microseconds of CPU that the main process and its threads take for an image, without those of a whole run.

    Args:
        side: pixels; the pictures go to the model as they are, since normalising them is the work of a GPU.
        images: number of pictures; a run over a quarter of them is subtracted.
        workers: decoding processes.
        batch_size: pictures per batch.
    """
    backbone = nothing(side)
    pool = np.random.default_rng(0).integers(0, 256, (POOL, side, side, 3), dtype=np.uint8)

    def small(self: Preprocessing, batch: Tensor) -> Tensor:
        return batch[:, :1, :32].permute(0, 3, 1, 2).float()

    def cpu_s(count: int) -> float:
        with pictures_file(pool, count) as listed:
            began = time.process_time()
            embedded(backbone, listed, workers=workers, batch_size=batch_size, compile="off")
            return time.process_time() - began

    with patch.object(Preprocessing, "to_input", small):
        cpu_s(batch_size)  # what libraries do once is not counted
        few = cpu_s(images // 4)
        return (cpu_s(images) - few) / (images - images // 4) * 1e6


def bare(backbone: Backbone, pictures: Tensor, options: argparse.Namespace) -> float:
    """Images per second of the model alone."""
    model, size = backbone.model, options.batch_size
    with (
        torch.inference_mode(), evaluating(model), full_float32(), keeping_freed_memory(),
        torch.autocast(backbone.device.type, getattr(torch, options.precision), enabled=options.precision != "float32"),
    ):  # fmt: skip
        whole = pictures[: len(pictures) // size * size]
        there = [backbone.preprocessing.to_input(part.to(backbone.device)) for part in whole.split(size)]
        run = torch.compile(model, options={"triton.cudagraphs": True}) if options.compile != "off" else model
        for part in there[:1] * 3:
            run(part)
        wait(backbone)
        start, done = time.perf_counter(), 0
        for part in itertools.cycle(there):
            run(part)
            done += len(part)
            if done >= options.images:
                break
        wait(backbone)
        return done / (time.perf_counter() - start)


def wait(backbone: Backbone) -> None:
    """Until the device has done all."""
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)


def main() -> None:
    """Measure each backbone."""
    parser = common.parser(__doc__)
    parser.add_argument("-b", "--backbone", action="append")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compile", default="off")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--decode", type=Path)
    parser.add_argument("--main-process", action="store_true")
    options = parser.parse_args()
    if options.main_process:
        for side in (32, 224):
            how = (side, options.images, options.workers, options.batch_size)
            each = statistics.median(main_process_us(*how) for _ in range(options.rounds))
            print(f"{side} x {side} pixels: {each:.0f} us of the main process an image", flush=True)
        return
    for spec in options.backbone or BACKBONES:
        backbone = load_backbone(spec, weights="random", device=options.device)
        size = backbone.preprocessing.crop_px
        pictures = torch.randint(0, 256, (max(POOL, options.batch_size), *size, 3), dtype=torch.uint8)
        ours, theirs, stages = [], [], {}
        with pictures_file(pictures.numpy(), options.images) as listed:
            by_pipeline(backbone, listed, options)  # what libraries do once is not counted
            for _ in range(options.rounds):
                rate, stages = by_pipeline(backbone, listed, options)
                ours.append(rate)
                theirs.append(bare(backbone, pictures, options))
        spent = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items())
        print(
            f"{spec} on {backbone.device}, {options.precision}, compile {options.compile}: pipeline "
            f"{statistics.median(ours):.0f} images/s, bare {statistics.median(theirs):.0f}, "
            f"ratio {ratio(ours, theirs):.3f}; {spent}",
            flush=True,
        )
        if options.decode:
            decoded(spec, options)


def decoded(spec: str, options: argparse.Namespace) -> None:
    """`layertap embed` of photos, as it comes."""
    with tempfile.TemporaryDirectory() as out:
        done = python(
            "-m", "layertap", "embed", options.decode, "-o", out, "-b", spec, "--weights", "random",
            "--device", options.device, "--precision", options.precision, "--min-cosine", "0.9",
            "--compile", options.compile, "--batch-size", options.batch_size, "--json",
        )  # fmt: skip
        told = json.loads(done.out)
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in told["stages"].items())
        print(
            f"  with decoding: {told['images_per_s']:.0f} images/s, bound by {told['bottleneck']}; {stages}", flush=True
        )


if __name__ == "__main__":
    main()
