"""The pipeline with preloaded images over the bare forward, on one device: python tests/benchmarks/gpu_speed.py

    python tests/benchmarks/gpu_speed.py [-b torchvision/resnet50]... [--images 8192] [--batch-size 256]
        [--precision float32] [--compile off] [--rounds 3] [--device auto] [--decode FOLDER]

Bare: batches of float32 pictures that lie on the device already go through the model, and nothing is done with what
comes out. The pipeline: uint8 pictures of this process go to the device, are normalised, and their embeddings go to
HDF5 files on the disk. Both in the same precision, in turn; the median over rounds is told. With --decode, `layertap
embed` of the photos in FOLDER follows, with the time of each stage and the bottleneck.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from extract import load_backbone
from extract.compute.backbone import Backbone
from extract.extraction.plan import existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import Batch
from extract.system.torch_state import evaluating, full_float32, keeping_freed_memory

BACKBONES = ["torchvision/resnet50", "torchvision/vit_b_16"]
POOL = 1024  # pictures that differ; they come again and again, as images of their own


def preloaded(pictures: Tensor, batches: Any) -> Iterator[Batch]:
    """The rows of each batch, as if they had been decoded."""
    for rows in batches:
        first = rows[0] % (len(pictures) - len(rows) + 1)
        count = len(rows)
        number = np.asarray(rows, np.int64)
        hashes = np.zeros((count, 16), np.uint8)
        hashes[:, :8] = number.view(np.uint8).reshape(count, 8)
        zeros = np.zeros(count, np.int64)
        yield Batch(number, pictures[first : first + count], np.ones(count, np.uint8), {}, 0, zeros, zeros, hashes)


def by_pipeline(backbone: Backbone, pictures: Tensor, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Images per second, comparing and compiling excluded, and the seconds of each stage."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "pictures.npy"
        np.lib.format.open_memmap(listed, "w+", np.uint8, (options.images, 8, 8, 3)).flush()
        how = {"batch_size": options.batch_size, "precision": options.precision, "compile": options.compile}
        settings = ExtractionSettings(workers=0, min_cosine=0.9, **how)
        planned = resolve(settings, listed, backbone, existing_at(Path(folder) / "out"))

        def batches(images: Any, rows: Any, *_: Any, **__: Any) -> Iterator[Batch]:
            return preloaded(pictures, rows)

        with patch("extract.extraction.run.load_batches", batches):
            summary = extract(planned)
        assert dict(summary.status) == {"ok": options.images}
        assert summary.computation is not None
        return options.images / (summary.seconds - summary.computation.prepared_in_s), summary.stages


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-b", "--backbone", action="append")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compile", default="off")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--decode", type=Path)
    options = parser.parse_args()
    for spec in options.backbone or BACKBONES:
        backbone = load_backbone(spec, weights="random", device=options.device)
        size = backbone.preprocessing.crop_px
        pictures = torch.randint(0, 256, (max(POOL, options.batch_size), *size, 3), dtype=torch.uint8)
        ours, theirs, stages = [], [], {}
        by_pipeline(backbone, pictures, options)  # what libraries do once is not counted
        for _ in range(options.rounds):
            rate, stages = by_pipeline(backbone, pictures, options)
            ours.append(rate)
            theirs.append(bare(backbone, pictures, options))
        ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
        spent = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items())
        print(
            f"{spec} on {backbone.device}, {options.precision}, compile {options.compile}: pipeline "
            f"{statistics.median(ours):.0f} images/s, bare {statistics.median(theirs):.0f}, ratio {ratio:.3f}; {spent}",
            flush=True,
        )
        if options.decode:
            decoded(spec, options)


def decoded(spec: str, options: argparse.Namespace) -> None:
    """`layertap embed` of photos, as it comes."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            Path(sys.executable).with_name("layertap"), "embed", options.decode, "-o", out, "-b", spec,
            "--weights", "random", "--device", options.device, "--precision", options.precision, "--min-cosine", "0.9",
            "--compile", options.compile, "--batch-size", str(options.batch_size), "--json",
        ]  # fmt: skip
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in told["stages"].items())
        print(
            f"  with decoding: {told['images_per_s']:.0f} images/s, bound by {told['bottleneck']}; {stages}", flush=True
        )


if __name__ == "__main__":
    main()
