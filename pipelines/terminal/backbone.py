"""Load the backbone of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from extract.compute.backbone import Backbone, load_backbone
from pipelines.terminal.config import BackboneConfig
from pipelines.terminal.text_output import print_line

__all__ = ["backbone_of"]


def _on_stderr(text: str) -> None:
    print_line(text, fg="red" if text.startswith("WARNING") else "yellow", bold=text.startswith("WARNING"), err=True)


def backbone_of(config: BackboneConfig, say: Callable[[str], None] = _on_stderr) -> Backbone:
    """Load the backbone of a configuration; pass its notes, and a warning about random weights, to `say`."""
    backbone = load_backbone(
        config.backbone,
        weights=config.weights,
        device=config.device,
        seed=config.seed,
        allow_missing_head=config.allow_missing_head,
        preprocessing=config.preprocessing,
    )
    if backbone.weights.random:
        say(f"WARNING: {backbone.weights.source} weights: these features mean nothing; use them for tests only")
    for note in backbone.notes:
        say(f"note: {note}")
    preprocessing = replace(backbone.preprocessing, orientation=config.orientation, icc=config.icc)
    return replace(backbone, preprocessing=preprocessing)
