"""A backbone that takes a millisecond, and pictures for it."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from extract import Backbone, load_backbone
from extract.extraction import plan
from extract.planning import Plan
from extract.sync.guards import Guards
from extract.sync.passes import Report, sync

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
    settings = {"layers": ["conv", "fc"], "batch_size": 4, "shard_rows": 3, "workers": 0} | settings

    def plan_for(images: Any, out: Path) -> Plan:
        return plan(images, out=out, backbone=backbone, **settings)

    return plan_for


def one_pass(root: Path, out: Path, plan_for: Callable[..., Plan], **settings: Any) -> Report:
    """A pass that waits for nothing and believes everything."""
    return sync(os.fspath(root), out, plan_for, CONFIGURATION, **({"guards": EAGER} | settings))
