"""Plans from settings by name, and a small network for runs."""

from __future__ import annotations

import os
from typing import Any

from extract.compute.backbone import Backbone
from extract.extraction.plan import Plan, existing_at, resolve
from extract.extraction.settings import ExtractionSettings
from extract.images import Images, list_images

__all__ = ["BY_COMMAND", "NET", "plan"]

# For `extract_features`, and for the command line; images are decoded in the process of the test.
NET: dict[str, Any] = {
    "backbone": "timm/test_resnet", "weights": "random", "device": "cpu", "progress": False, "workers": 0,
}  # fmt: skip
BY_COMMAND = ["-b", "timm/test_resnet", "--weights", "random", "--device", "cpu", "--workers", 0]


def plan(images: str | os.PathLike[str] | Images, *, out: Any, backbone: Backbone, **settings: Any) -> Plan:
    """The plan of a run over images, which are listed if they are not yet, with these settings."""
    requested = ExtractionSettings(**settings)
    if isinstance(images, str | os.PathLike):
        images = list_images(images, requested.limit, requested.keep_list)
    return resolve(requested, images, backbone, existing_at(out))
