"""Table of a model's layers: types, shapes, sizes, and notes on outputs that need care."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from extract.errors import InputError
from extract.taps.batch_axis import Trial
from extract.taps.layer_names import match_layers, named_layers
from extract.taps.record import Site
from extract.taps.taps import Taps

__all__ = ["LayerRow", "layer_table"]


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


def layer_table(
    model: nn.Module, pictures: Tensor, layers: str | Sequence[str] | None = None, *, operations: bool = False
) -> list[LayerRow]:
    """Run a few pictures and return one row per layer.

    Args:
        model: in eval mode.
        pictures: (B, 3, H, W), all different, at least 2.
        layers: names or globs; None means every layer.
        operations: also list functions called in the layers' own forwards, as `LAYER/FUNCTION`.

    Raises:
        UnknownNameError: a pattern matches no layer.
    """
    named = named_layers(model)
    names = list(named) if layers is None else match_layers(named, layers)
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
