"""A backbone that takes a millisecond, and pictures for it."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from extract import Backbone, FeatureReader, load_backbone
from extract.extraction.plan import Plan
from extract.extraction.run import extract
from extract.images import list_images
from extract.store.format.dataset import DataSet
from extract.sync.difference import Guards, Report
from extract.sync.passes import Pass
from tests.planning import plan

CODE = """
import torch
from torch import nn
from torchvision import transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))


def tiny():
    torch.manual_seed(0)
    return Net(), lambda picture: transforms.functional.to_tensor(picture.resize((8, 8)))
"""

CONFIGURATION = {"backbone": "tiny"}
EAGER = Guards(settle_s=0, max_vanish=1, retry_after_s=1e9)


def picture(seed: int, height: int = 8) -> bytes:
    """A file whose size depends on the height alone."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, 8, 3)).astype(np.uint8)
    return b"P6 8 %d 255\n" % height + pixels.tobytes()


@functools.cache
def tiny_backbone() -> Backbone:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tiny.py").write_text(CODE)
        return load_backbone(f"python/{folder}/tiny.py:tiny", device="cpu")


def planner(**settings: Any) -> Callable[..., Plan]:
    """How to compute features with the tiny backbone."""
    backbone = tiny_backbone()
    settings = {"layers": ["conv", "fc"], "batch_size": 4, "shard_rows": 6, "workers": 0} | settings

    def plan_for(images: Any, out: Path) -> Plan:
        return plan(images, out=out, backbone=backbone, **settings)

    return plan_for


def one_pass(root: Path, out: Path, plan_for: Callable[..., Plan], **settings: Any) -> Report:
    """A pass that waits for nothing and believes everything."""
    return Pass(os.fspath(root), out, plan_for, CONFIGURATION, **({"guards": EAGER} | settings)).run()


class Fresh(NamedTuple):
    """What a fresh extraction of a folder gives."""

    reader: FeatureReader
    paths_xxh3: str


def fresh_of(root: Path, parts: Any = None) -> Fresh:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fresh"
        extract(planner(batch_size=64, shard_rows=1000)(list_images(root, parts=parts), out))
        return Fresh(FeatureReader(out), DataSet.open(out).images["paths_xxh3"])


def same_as_fresh(root: Path, out: Path, fresh: Fresh | None = None, parts: Any = None) -> Fresh:
    """Assert that a data set is what a fresh extraction of the folder gives; returns that, open."""
    fresh = fresh or fresh_of(root, parts)
    expected = fresh.reader
    with FeatureReader(out) as actual:
        order = sorted(range(len(actual)), key=lambda row: os.fsencode(actual.paths[row]))
        assert [actual.paths[row] for row in order] == expected.paths
        np.testing.assert_array_equal(actual.status[order], expected.status)
        for layer in actual.layers:
            np.testing.assert_allclose(actual[layer][:][order], expected[layer][:], rtol=1e-5, atol=1e-6)
        names = [
            [reader.classes[label] if label >= 0 else None for label in reader.labels[rows]]
            for reader, rows in ((actual, order), (expected, slice(None)))
        ]
        assert names[0] == names[1]
        assert [actual.splits[row] for row in order] == expected.splits
        assert actual.columns.keys() == expected.columns.keys()
        for name, values in actual.columns.items():
            np.testing.assert_array_equal(np.asarray(values)[order], expected.columns[name])
    assert DataSet.open(out).images["paths_xxh3"] == fresh.paths_xxh3
    return fresh
