"""A network of three layers, for tests that need one and not its numbers: a run over twelve pictures takes 0.1 s."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extract import FeatureReader, extract_features
from extract.backbones import Weights
from extract.backbones.preprocessing import Preprocessing
from extract.compute.backbone import Backbone
from extract.extraction.plan import Plan
from extract.extraction.run import extract
from tests.conftest import make_picture
from tests.planning import plan

__all__ = ["Job", "pictures_for", "small_network"]


class SmallNet(nn.Module):
    """Maps of two sizes, of which the next layer overwrites one, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2, 1)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.layer2(self.layer1(self.conv1(x)))
        logits: Tensor = self.fc(maps.mean((2, 3)))
        return logits


def small_network(seed: int = 0, **preprocessing: Any) -> Backbone:
    """Return a network of its own, whose input has 32 x 32 pixels unless the preprocessing is given."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SmallNet().eval()
    own: dict[str, Any] = {"resize_px": 32, "crop_px": (32, 32), "interpolation": "bilinear", "mean": (0.5,) * 3,
                           "std": (0.5,) * 3}  # fmt: skip
    weights = Weights(f"random (seed {seed})", f"{seed:064x}", random=True)
    asked = {"weights": "random", "seed": seed, "allow_missing_head": False, "preprocessing": None}
    how = Preprocessing(**(own | preprocessing))
    return Backbone("test/small", "test/small", model, weights, how, classifier="fc", asked=asked)


def pictures_for(backbone: Backbone, count: int) -> Tensor:
    """A decoded batch of different pictures."""
    return torch.stack([backbone.preprocessing.cpu_transform(make_picture(seed, 300, 260)) for seed in range(count)])


@dataclass(frozen=True)
class Job:
    """Runs of a backbone over a folder of pictures, which this process decodes.

    Attributes:
        images: the pictures.
        root: the folder of its data sets, which are named below it.
        backbone: the backbone.
        always: settings of each run.
    """

    images: Path
    root: Path
    backbone: Backbone
    always: dict[str, Any] = field(default_factory=dict)

    def plan(self, out: str = "out", **settings: Any) -> Plan:
        given = {"workers": 0} | self.always | settings
        return plan(self.images, out=self.root / out, backbone=self.backbone, **given)

    def run(self, out: str = "out", **settings: Any) -> FeatureReader:
        given: dict[str, Any] = {"workers": 0, "progress": False} | self.always | settings
        return extract_features(self.images, out=self.root / out, backbone=self.backbone, **given)

    def count(self, out: str = "out", **settings: Any) -> int:
        """Run, and return how many images were computed."""
        return extract(self.plan(out, **settings)).computed
