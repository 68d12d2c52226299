"""Plans from settings by name, and a small network for runs."""

from __future__ import annotations

import os
from typing import Any

from extract.compute.backbone import Backbone
from extract.extraction.run import ExtractionSettings, Plan
from extract.extraction.run import plan as plan_with
from extract.images import Images

__all__ = ["BY_COMMAND", "NET", "plan"]

# For `extract_features`, and for the command line; images are decoded in the process of the test.
NET: dict[str, Any] = {
    "backbone": "timm/test_resnet", "weights": "random", "device": "cpu", "progress": False, "workers": 0,
}  # fmt: skip
BY_COMMAND = ["-b", "timm/test_resnet", "--weights", "random", "--device", "cpu", "--workers", 0]


def plan(images: str | os.PathLike[str] | Images, *, out: Any, backbone: Backbone, **settings: Any) -> Plan:
    """As of `extract.extraction.run.plan`, with these settings."""
    return plan_with(images, out=out, backbone=backbone, settings=ExtractionSettings(**settings))
