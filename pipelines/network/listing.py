"""List backbones, or the layers of one and their bytes on disk: `layertap list`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from extract.backbones.sources import SOURCES, Entry, describe, list_sources, match_specs
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.feature_choice import EMBEDDING, LayerShapes, layer_shapes
from extract.errors import InputError
from extract.images import list_images
from extract.taps.layer_names import match_layers, named_layers
from extract.taps.layer_table import LayerRow, layer_table
from pipelines.terminal.tables import print_aligned

__all__ = [
    "POOLINGS_SHOWN", "LayerBytes", "as_json", "bytes_as_json", "entries", "layer_bytes", "list_layers", "print_bytes",
    "print_entries", "print_sources", "print_table", "sources",
]  # fmt: skip

POOLINGS_SHOWN = ("none", "auto", "grid4", "srp4096")
_VALUE_BYTES = 4  # float32, the default of `embed`
_SHOWN = 4  # names of weights per line
_MOST_BUILT = 100


def sources() -> dict[str, Any]:
    """Return source -> number of its backbones, and its note for the user."""
    return {
        source: {"models": len(catalogue.names), "note": catalogue.note} for source, catalogue in list_sources().items()
    }


def print_sources(listing: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the sources."""
    for source, entry in listing.items():
        models = f"{entry['models']:>5,} {'model ' if entry['models'] == 1 else 'models'}"
        echo(f"{source:12} {models}  {entry['note']}".rstrip())


def entries(pattern: str) -> Iterator[Entry]:
    """Yield the entries of matching backbones; each is looked up when it is reached.

    Models are built for their width and parameters if at most `_MOST_BUILT` match: building all of timm takes minutes.
    """
    specs = match_specs(pattern)
    return (describe(spec, len(specs) <= _MOST_BUILT) for spec in specs)


def print_entries(entries: Iterator[Entry], echo: Callable[[str], None]) -> None:
    """Print the entries."""
    echo(f"{'backbone':48} {'width':>6} {'input':>9} {'parameters':>14}  {'licence':16} weights")
    for entry in entries:
        size = "x".join(map(str, entry.input_px)) if entry.input_px else "?"
        more = ", ..." if len(entry.weights) > _SHOWN else ""
        weights = ", ".join(entry.weights[:_SHOWN]) + more
        licence = entry.licence or "-"
        parameters = "-" if entry.parameters is None else f"{entry.parameters:,}"
        numbers = f"{entry.width or '-':>6} {size:>9} {parameters:>14}"
        echo(f"{entry.spec:48} {numbers}  {licence:16} {weights}".rstrip())


def as_json(rows: Iterator[Entry] | Sequence[LayerRow]) -> list[dict[str, Any]]:
    """Return entries or layers as JSON-compatible data."""
    return [asdict(row) for row in rows]


def _loaded(spec: str) -> Backbone:
    """Load a backbone to look at its layers.

    Its weights are random, so that none are downloaded, if a model with random weights has the same layers.
    """
    source = SOURCES.get(spec.partition("/")[0])
    random = source is not None and source.same_layers_at_random
    return load_backbone(spec, weights="random" if random else None, device="cpu")


def list_layers(spec: str, patterns: Sequence[str], *, operations: bool) -> list[LayerRow]:
    """Return the table of a backbone's layers, and of its embedding, which stands first."""
    backbone = _loaded(spec)
    pictures = torch.randn(2, 3, *backbone.preprocessing.crop_px, generator=torch.Generator().manual_seed(0))
    named = named_layers(backbone.model)
    shapes = [] if EMBEDDING in named else _embedding(backbone)
    names = [EMBEDDING] * len(shapes) + sorted(named, key=lambda name: name != EMBEDDING)
    if patterns:
        names = match_layers(names, patterns, spec)
    inputs = []
    for layer in shapes if EMBEDDING in names else []:
        _, shape = layer.poolings["none"]
        note = f"input of {backbone.classifier}; `embed` computes it"
        inputs.append(LayerRow(EMBEDDING, "input", {"": shape}, _VALUE_BYTES * math.prod(shape), 1, notes=[note]))
    layers = [name for name in names if name in named]
    return inputs + layer_table(backbone.model, pictures, layers, operations=operations)


def _embedding(backbone: Backbone) -> list[LayerShapes]:
    """Return the shapes of the embedding of a backbone; nothing if it has none."""
    try:
        return layer_shapes(backbone, [EMBEDDING], POOLINGS_SHOWN)
    except InputError:
        return []


def print_table(rows: Sequence[LayerRow], echo: Callable[[str], None]) -> None:
    """Print the table: name, type, output shape of an image, its bytes, parameters, notes."""
    cells = [("layer", "type", "shape", "bytes", "parameters", "notes")]
    for row in rows:
        shapes = ", ".join(
            (f"{part} " if part else "") + "x".join(map(str, shape)) for part, shape in row.shapes.items()
        )
        cells.append((row.name, row.type, shapes, f"{row.bytes:,}", f"{row.parameters:,}", "; ".join(row.notes)))
    print_aligned(cells, "<<<>><", echo)


@dataclass(frozen=True)
class LayerBytes:
    """What layers would take on disk.

    Attributes:
        images: number of images.
        layers: the layers, with the shapes that poolings give.
    """

    images: int
    layers: list[LayerShapes]


def layer_bytes(spec: str, patterns: Sequence[str], images: str) -> LayerBytes:
    """Return the sizes of a backbone's layers. Some made-up pictures are computed; none of the images is read.

    Args:
        spec: spec of the backbone.
        patterns: names and globs of layers; empty means every layer.
        images: a number of images; or anything that `embed` takes, whose images are counted.

    Raises:
        UnknownNameError: a pattern matches no layer.
        InputError: there are no images.
    """
    count = int(images) if images.isascii() and images.isdigit() else len(list_images(images))
    if count < 1:
        raise InputError("--bytes is 0; expected a number of images, or a folder or list of images")
    backbone = _loaded(spec)
    layers = layer_shapes(backbone, patterns, POOLINGS_SHOWN)
    if not patterns:
        layers = _embedding(backbone) + [layer for layer in layers if layer.name != EMBEDDING]
    return LayerBytes(count, layers)


def bytes_as_json(sizes: LayerBytes) -> dict[str, Any]:
    """Return the sizes as JSON-compatible data."""
    return {
        "images": sizes.images,
        "dtype": "float32",
        "layers": [
            {
                "name": layer.name,
                "poolings": {
                    pooling: {
                        "pooling": name,
                        "shape": list(shape),
                        "bytes_per_image": _VALUE_BYTES * math.prod(shape),
                        "bytes": _VALUE_BYTES * math.prod(shape) * sizes.images,
                    }
                    for pooling, (name, shape) in layer.poolings.items()
                },
                "reason": layer.reason,
            }
            for layer in sizes.layers
        ],
    }


def print_bytes(sizes: LayerBytes, echo: Callable[[str], None]) -> None:
    """Print a table: for each layer and pooling, the bytes of an image and of all images."""
    cells = [["layer", "shape", *(title for pooling in POOLINGS_SHOWN for title in (pooling, "in all"))]]
    totals = dict.fromkeys(POOLINGS_SHOWN, 0)
    for layer in sizes.layers:
        row = [layer.name, "x".join(map(str, layer.poolings["none"][1])) if layer.poolings else "-"]
        for pooling in POOLINGS_SHOWN:
            if pooling not in layer.poolings:
                row += ["-", "-"]
                continue
            size = _VALUE_BYTES * math.prod(layer.poolings[pooling][1])
            totals[pooling] += size
            row += [_text(size), _text(size * sizes.images)]
        cells.append(row)
    if len(sizes.layers) > 1:
        sums = [text for size in totals.values() for text in (_text(size), _text(size * sizes.images))]
        cells.append(["all that fit", "", *sums])
    print_aligned(cells, "<<" + ">" * 2 * len(POOLINGS_SHOWN), echo)
    echo(
        f"{sizes.images:,} images in float32, without compression; `layertap embed --dtype float16` takes half, int8 a "
        "quarter. -: it does not fit"
    )
    reasons: dict[str, list[str]] = {}
    for layer in sizes.layers:
        if layer.reason:
            reasons.setdefault(layer.reason, []).append(layer.name)
    for reason, names in reasons.items():
        echo(f"not stored: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: {reason}")


def _text(size: float) -> str:
    """Return a size with three digits.

    >>> _text(3_211_264), _text(999), _text(999_999_999_999)
    ('3.21 MB', '999 B', '1 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if size >= 999.5 else f"{size:.3g} {unit}"
