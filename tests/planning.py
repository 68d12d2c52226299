"""Plans from settings by name."""

from __future__ import annotations

import os
from typing import Any

from extract.compute.backbone import Backbone
from extract.extraction.run import ExtractionSettings, Plan
from extract.extraction.run import plan as plan_with
from extract.images import ImageList

__all__ = ["plan"]


def plan(images: str | os.PathLike[str] | ImageList, *, out: Any, backbone: Backbone, **settings: Any) -> Plan:
    """As of `extract.extraction.run.plan`, with these settings."""
    return plan_with(images, out=out, backbone=backbone, settings=ExtractionSettings(**settings))
