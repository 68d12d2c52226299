"""List the layers of a backbone: `layertap layers BACKBONE [PATTERN ...]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from extract.backbones.sources import SOURCES
from extract.compute.backbone import Backbone, load_backbone
from extract.taps.layer_names import match_layers, named_layers
from extract.taps.layer_table import LayerRow, layer_table
from pipelines.terminal.tables import print_aligned

__all__ = ["as_json", "list_layers", "loaded_for_layers", "print_table"]


def loaded_for_layers(spec: str) -> Backbone:
    """Load a backbone to look at its layers.

    Its weights are random, so that none are downloaded, if a model with random weights has the same layers.
    """
    source = SOURCES.get(spec.partition("/")[0])
    random = source is not None and source.same_layers_at_random
    return load_backbone(spec, weights="random" if random else None, device="cpu")


def list_layers(spec: str, patterns: Sequence[str], *, operations: bool) -> list[LayerRow]:
    """Return the table of a backbone's layers."""
    backbone = loaded_for_layers(spec)
    pictures = torch.randn(2, 3, *backbone.preprocessing.crop_px, generator=torch.Generator().manual_seed(0))
    names = match_layers(named_layers(backbone.model), patterns, spec) if patterns else None
    return layer_table(backbone.model, pictures, names, operations=operations)


def as_json(rows: Sequence[LayerRow]) -> list[dict[str, Any]]:
    """Return the table as JSON-compatible data."""
    return [asdict(row) for row in rows]


def print_table(rows: Sequence[LayerRow], echo: Callable[[str], None]) -> None:
    """Print the table: name, type, output shape of an image, its bytes, parameters, notes."""
    cells = [("layer", "type", "shape", "bytes", "parameters", "notes")]
    for row in rows:
        shapes = ", ".join(
            (f"{part} " if part else "") + "x".join(map(str, shape)) for part, shape in row.shapes.items()
        )
        cells.append((row.name, row.type, shapes, f"{row.bytes:,}", f"{row.parameters:,}", "; ".join(row.notes)))
    print_aligned(cells, "<<<>><", echo)
