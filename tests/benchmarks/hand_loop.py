"""layertap against the loop one would write by hand, in turn, in one run.

    python tests/benchmarks/hand_loop.py IMAGES [MODEL] [ROUNDS]

The loop by hand: torchvision's `create_feature_extractor`, its preset transform in DataLoader workers, batches of 32,
h5py with chunks of 256 rows. Both sides get the same random weights, the same two workers and the same images; loading
the model and the trial forward are excluded on both. Prints each round, and the median ratio.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.models import get_model_weights
from torchvision.models.feature_extraction import create_feature_extractor

from extract import FeatureReader
from extract.backbones import load_backbone
from extract.extraction import extract, plan
from extract.images import list_images

WORKERS = 2


class _Files(Dataset[Tensor]):
    def __init__(self, files: list[Path], name: str) -> None:
        self.files, self.transform = files, get_model_weights(name).DEFAULT.transforms()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(Image.open(self.files[index]).convert("RGB"))


def by_hand(images: Path, name: str, out: Path) -> tuple[float, np.ndarray]:
    """Images per second, and the features."""
    backbone = load_backbone(f"torchvision/{name}", weights="random")
    model = create_feature_extractor(backbone.model, {"avgpool": "features"})
    loader = DataLoader(_Files([images / path for path in list_images(images).paths], name), 32, num_workers=WORKERS)
    start = time.perf_counter()
    done = 0
    with h5py.File(out, "w") as file, torch.inference_mode():
        for batch in loader:
            rows = model(batch)["features"].flatten(1).cpu().numpy()
            if not done:
                shape, most = (0, rows.shape[1]), (None, rows.shape[1])
                data = file.create_dataset("features", shape, maxshape=most, chunks=(256, rows.shape[1]), dtype="f4")
            data.resize(done + len(rows), 0)
            data[done:] = rows
            done += len(rows)
        seconds = time.perf_counter() - start
        return done / seconds, data[:]


def by_layertap(images: Path, name: str, out: Path) -> tuple[float, np.ndarray]:
    """Images per second, and the features."""
    backbone = load_backbone(f"torchvision/{name}", weights="random")
    summary = extract(plan(images, out=out, backbone=backbone, layers="avgpool", workers=WORKERS))
    with FeatureReader(out) as reader:
        return summary.images_per_s, reader["avgpool"][:]


def main(images: Path, name: str, rounds: int) -> None:
    """Run both in turn, each in a process of its own."""
    ratios = []
    for _ in range(rounds):
        rates, features = [], []
        for side in (by_hand, by_layertap):
            spawn = multiprocessing.get_context("spawn")
            with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawn) as process:
                rate, rows = process.submit(side, images, name, Path(folder) / "out").result()
            rates.append(rate)
            features.append(rows)
        ratios.append(rates[1] / rates[0])
        apart = np.abs(features[1] - features[0]).max() / np.abs(features[0]).max()
        rate_text = f"by hand {rates[0]:.1f} images/s, layertap {rates[1]:.1f}, ratio {ratios[-1]:.2f}"
        print(f"{name}: {rate_text}; features apart by {apart:.0e} of the largest")
    print(f"{name}: median ratio {statistics.median(ratios):.2f} over {rounds} rounds")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:3] or ["resnet50"]), int(sys.argv[3]) if len(sys.argv) > 3 else 3)
