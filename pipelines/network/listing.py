"""List backbones, or the layers of one and their bytes on disk: `layertap list`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from extract.backbones.sources import SOURCES, Entry, describe, list_sources, match_specs
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.feature_choice import EMBEDDING, choose_features
from extract.errors import InputError
from extract.images import list_images
from extract.taps.batch_axis import Trial
from extract.taps.layer_names import match_layers, named_layers
from extract.taps.record import Site
from extract.taps.taps import Taps
from pipelines.terminal.tables import print_aligned

__all__ = [
    "LayerRow", "as_json", "bytes_as_json", "count_of", "entries", "layer_table", "list_layers", "print_entries",
    "print_sources", "print_table", "sources",
]  # fmt: skip

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


@dataclass
class LayerRow:
    """One layer, or one function called in a layer's forward.

    Attributes:
        name: name for `Taps`.
        type: class of the module, or "function".
        shapes: part of the output -> shape for one image in the first call; the shape for all pictures if the rows are
            not the images. For a function, the shape of its first tensor.
        bytes: size of all output tensors for one image, over all calls; tensors whose rows are not the images do not
            count.
        calls: number of calls in a forward.
        parameters: number of parameters in the layer and its submodules.
        notes: facts to know before using its values.
    """

    name: str
    type: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    bytes: int = 0
    calls: int = 0
    parameters: int = 0
    notes: list[str] = field(default_factory=list)


def layer_table(model: nn.Module, pictures: Tensor, names: Sequence[str], *, operations: bool) -> list[LayerRow]:
    """Run a few pictures and return one row per layer.

    Args:
        model: in eval mode.
        pictures: (B, 3, H, W), all different, at least 2.
        names: names of layers.
        operations: also list functions called in the layers' own forwards, as `LAYER/FUNCTION`.
    """
    named = named_layers(model)
    trial = Trial(model, pictures, [(name, "output") for name in names])
    sites: dict[str, list[Site]] = {}
    for site in trial.record.sites.values():
        sites.setdefault(site.layer, []).append(site)
    rows = []
    for name in names:
        module = named[name]
        row = LayerRow(name, type(module).__name__, parameters=sum(p.numel() for p in module.parameters()))
        row.calls = len({site.call for site in sites.get(name, [])})
        for site in sites.get(name, []):
            _describe(row, trial, site)
        if not row.calls:
            row.notes.append(_why_silent(named, name))
        elif row.calls > 1:
            row.notes.append(f"runs {row.calls} times: {name}#0 to {name}#{row.calls - 1}")
        rows.append(row)
    return rows + (_operations(model, pictures[:1], names) if operations else [])


def _describe(row: LayerRow, trial: Trial, site: Site) -> None:
    value = trial.record[site]
    part = ".".join(map(str, site.path))
    try:
        where = trial.rows(site)
    except InputError as error:
        note = str(error).split(": ", 1)[-1]
        shape = tuple(value.shape)
    else:
        by_image = where.by_image(value)
        shape, row.bytes = tuple(by_image.shape[1:]), row.bytes + by_image[0].numel() * by_image.element_size()
        note = f"the batch is on axis {where.axis}" if where.axis else ""
        note = f"{where.per_image} rows per image" if where.per_image > 1 else note
    if site.call == 0:
        row.shapes[part] = shape
    note = f"{part}: {note}" if note and part else note
    if note and note not in row.notes:
        row.notes.append(note)


def _why_silent(named: dict[str, nn.Module], name: str) -> str:
    if isinstance(named.get(name.rpartition(".")[0]), nn.MultiheadAttention):
        return "never called: nn.MultiheadAttention uses its weights directly"
    return "never called, or returns no tensor"


def _operations(model: nn.Module, picture: Tensor, names: Sequence[str]) -> list[LayerRow]:
    """Return a row for each function that returns tensors, called by these layers or by the model itself."""
    named = named_layers(model)
    # Functions inside torch.nn modules such as nn.Conv2d add nothing to the row of the layer.
    callers = ["", *[name for name in names if not type(named[name]).__module__.startswith("torch.nn.")]]
    taps = Taps(model, [f"{name}/*" for name in callers], reduce=_bytes_and_shape)
    with torch.no_grad(), taps:
        taps(picture)
    rows: dict[str, LayerRow] = {}
    for site, value in taps.record.by_site.items():
        size, *shape = value.tolist()
        row = rows.setdefault(site.layer, LayerRow(site.layer, "function", {"": tuple(shape)}))
        row.calls, row.bytes = site.call + 1, row.bytes + size
    for row in rows.values():
        if row.calls > 1:
            row.notes.append(f"called {row.calls} times: {row.name}#0 to {row.name}#{row.calls - 1}")
    return list(rows.values())


def _bytes_and_shape(tensor: Tensor) -> Tensor:
    return torch.tensor([tensor.numel() * tensor.element_size(), *tensor.shape[1:]])


def as_json(rows: Iterator[Entry] | Sequence[LayerRow]) -> list[dict[str, Any]]:
    """Return entries or layers as JSON-compatible data."""
    return [asdict(row) for row in rows]


def bytes_as_json(rows: Sequence[LayerRow], count: int) -> list[dict[str, Any]]:
    """Return layers as JSON-compatible data, with the bytes of a number of images."""
    return [row | {"images": count, "bytes_in_all": row["bytes"] * count} for row in as_json(rows)]


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
    embedding = [] if EMBEDDING in named else _embedding(backbone)
    names = [EMBEDDING] * len(embedding) + sorted(named, key=lambda name: name != EMBEDDING)
    if patterns:
        names = match_layers(names, patterns, spec)
    inputs = embedding if EMBEDDING in names else []
    layers = [name for name in names if name in named]
    return inputs + layer_table(backbone.model, pictures, layers, operations=operations)


def _embedding(backbone: Backbone) -> list[LayerRow]:
    """Return the row of the embedding of a backbone; nothing if it has none."""
    try:
        (feature,) = choose_features(backbone, [EMBEDDING]).features
    except InputError:
        return []
    note = f"input of {backbone.classifier}; `embed` computes it"
    size = _VALUE_BYTES * math.prod(feature.shape)
    return [LayerRow(EMBEDDING, "input", {"": feature.shape}, size, 1, notes=[note])]


def print_table(rows: Sequence[LayerRow], echo: Callable[[str], None], count: int | None = None) -> None:
    """Print the table: name, type, output shape of an image, its bytes, parameters, notes.

    With a number of images, the bytes are those of all of them in float32.
    """
    cells = [("layer", "type", "shape", "bytes" if count is None else f"{count:,} images", "parameters", "notes")]
    for row in rows:
        shapes = ", ".join(
            (f"{part} " if part else "") + "x".join(map(str, shape)) for part, shape in row.shapes.items()
        )
        size = f"{row.bytes:,}" if count is None else _text(row.bytes * count)
        cells.append((row.name, row.type, shapes, size, f"{row.parameters:,}", "; ".join(row.notes)))
    print_aligned(cells, "<<<>><", echo)


def count_of(images: str) -> int:
    """Return a number of images, or that of anything that `embed` takes; none of the images is read.

    Raises:
        InputError: there are no images.
    """
    count = int(images) if images.isascii() and images.isdigit() else len(list_images(images))
    if count < 1:
        raise InputError("--bytes is 0; expected a number of images, or a folder or list of images")
    return count


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
