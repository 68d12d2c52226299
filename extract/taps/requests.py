"""Requests of taps to keep and edit values, and why a requested value is missing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, get_args

from torch import nn

from extract.errors import InputError, LayertapError, unknown_name
from extract.taps.edits import Edit
from extract.taps.layer_names import match_layers
from extract.taps.nested import Path
from extract.taps.record import Reduce, Requested, Site, What, split_text

__all__ = [
    "FROZEN",
    "UNKNOWN",
    "Requests",
    "TapRequest",
    "number_again",
    "requests_for",
    "why_absent",
]


@dataclasses.dataclass(frozen=True)
class TapRequest(Requested):
    """A request to edit a value of one layer, or to keep it if `edit` is None."""

    reduce: Reduce | None = None
    edit: Edit | None = None
    live: bool = False  # the tensor itself is kept, not a copy

    @property
    def is_of_function(self) -> bool:
        """Whether it is for a function, or attention, rather than for an input or output of the layer."""
        return bool(self.operation) or self.what == "attention"

    @property
    def changes_layer(self) -> bool:
        """Whether the model may continue with another tensor: an edited one, or a copy whose gradient is watched."""
        return self.edit is not None or self.what in ("grad", "grad_input")

    @property
    def group(self) -> Any:
        """What an edit has in common with those of the same glob or type: one of them has to take effect."""
        if not self.pattern:
            return id(self)
        return self.pattern, self.path, self.what, self.call, id(self.edit)

    def overlaps(self, other: TapRequest) -> bool:
        """Whether both requests may be for the same value."""
        same = (self.layer, self.operation, self.what) == (other.layer, other.operation, other.what)
        depth = min(len(self.path), len(other.path))
        calls = (self.call, other.call)
        return same and self.path[:depth] == other.path[:depth] and (None in calls or calls[0] == calls[1])

    def without_functions(self) -> Requested:
        """Return what is requested, without what is done with it: it can be pickled."""
        return Requested(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Requested)})


FROZEN = (
    "with all before it frozen, let the inputs require gradients, or edit the layer first: "
    "edit(layer, lambda h: h.requires_grad_())"
)


def requests_for(
    layers: str | Site | Sequence[str],
    what: What,
    call: int | None,
    layer_names: Collection[str],
    parameter_names: Collection[str],
) -> list[TapRequest]:
    """Return the requests of one call of `Taps.keep` or `Taps.edit`, one per layer, without `reduce` and `edit`.

    Args:
        layers: see `Taps.keep`.
        what: see `Taps.keep`; for texts that do not contain it.
        call: see `Taps.keep`; for texts that do not contain it.
        layer_names: all layer names of the model.
        parameter_names: all parameter names of the model.

    Raises:
        UnknownNameError: a pattern matches no layer, or the kind of value is unknown.
        InputError: the input, input gradient or attention of a function without a module is requested.
    """
    if what not in get_args(What):
        raise unknown_name("what", what, get_args(What))
    if isinstance(layers, Site):
        asked: list[tuple[str, int | None, tuple[str, ...], str | None]]
        asked = [(layers.layer, layers.call, tuple(map(str, layers.path)), layers.what)]
    else:
        asked = [split_text(text, layer_names) for text in ([layers] if isinstance(layers, str) else layers)]
    requests = []
    for pattern, own_call, path, own_what in asked:
        if own_what is not None and own_what not in get_args(What):
            raise unknown_name("what", own_what, get_args(What))
        kind = what if own_what is None else cast(What, own_what)
        layer, slash, operation = pattern.partition("/")
        if kind in ("input", "grad_input", "attention") and slash:
            raise InputError(f"{pattern!r}: only outputs and gradients of a function without a module are available")
        if not layer or layer in layer_names:
            inside = [layer]  # without a name, the model itself
        else:
            names = [name for name in layer_names if name] + ([*parameter_names] if kind == "grad" else [])
            inside = match_layers(names, layer)
        own_call = call if own_call is None else own_call
        glob = pattern if inside != [layer] else ""
        requests += [TapRequest(name, operation, kind, own_call, path, pattern=glob) for name in inside]
    return requests


def why_absent(
    text: str,
    requests: Sequence[TapRequest],
    layers: Mapping[str, nn.Module],
    calls: Mapping[int | str, int],
    *,
    replaced: bool,
    unseen: str | None,
) -> str | None:
    """Return why a requested value is missing from a record; None if it was not requested.

    Args:
        text: text form of a site.
        requests: what is kept of its layer.
        layers: layers of the model when the `Taps` were made.
        calls: id of a module -> number of its calls in the forward.
        replaced: whether the model now has another module or parameter of this name.
        unseen: what the layer did that its hooks did not see, such as running in another thread.
    """
    layer, call, path, what = split_text(text, layers)
    name, slash, operation = layer.partition("/")
    asked = [
        request
        for request in requests
        if bool(request.operation) == bool(slash)
        and what in (None, request.what)
        and (call is None or request.call in (None, call))
    ]
    if not asked:
        return None
    layer = f"layer {name!r}" if name else "the model"
    if unseen and not calls.get(id(layers[name])):
        return f"{layer} {unseen}"
    if slash:
        return f"no function {operation!r} was called in the forward of layer {name!r}"
    if replaced:
        kind = "module" if name in layers else "parameter"
        return f"{layer} was replaced by another {kind} after these Taps were made"
    if name not in layers:
        return (
            f"no gradient reached parameter {name!r}: call backward() inside the `with` block, on a loss that depends "
            "on it (FSDP hands the gradients of its parameters to no hook: read `.grad`)"
        )
    if all(request.what in ("grad", "grad_input") for request in asked):
        return (
            f"no gradient reached {layer}: call backward() inside the block, on a loss that depends on it, outside "
            f"no_grad ({FROZEN}; reentrant checkpoints may give none)"
        )
    if all(request.what == "attention" for request in asked):
        return f"{layer} computed no attention that layertap recognises"
    parent, count = layers.get(name.rpartition(".")[0]), calls.get(id(layers[name]), 0)
    if not count and isinstance(parent, nn.MultiheadAttention):
        return f"{layer} never runs: nn.MultiheadAttention uses its weights without calling it"
    if not count:
        return f"{layer} did not run in this forward"
    call = asked[0].call if call is None else call
    if call is not None and call >= count:
        return f"{layer} ran {count} times in this forward; there is no call {call}, since the first is 0"
    verb, path = "returned" if asked[0].what == "output" else "received", path or asked[0].path
    where = f" at path {'.'.join(path)} (to pool, pass a function as `reduce`)" if path else ""
    return f"{layer} ran, but {verb} no tensor{where}"


class Requests:
    """Requests for one kind of value of a layer or function.

    Args:
        pairs: (name of the layer, request) pairs.
    """

    def __init__(self, pairs: Sequence[tuple[str, TapRequest]]):
        self.pairs = pairs
        self._of: dict[tuple[int, Path], list[tuple[Site, TapRequest]]] = {}

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def of(self, call: int, path: Path) -> list[tuple[Site, TapRequest]]:
        """Return the requests for one tensor, with its site.

        Args:
            call: number of the call; `UNKNOWN` if it is not known which call is repeated.
            path: path of the tensor in the value.

        Raises:
            LayertapError: the number is unknown, and an edit is for one call.
        """
        if (call, path) not in self._of:
            covering = [(layer, request) for layer, request in self.pairs if request.covers(path)]
            for layer, request in covering:
                if call == UNKNOWN and request.call is not None and request.edit is not None:
                    raise LayertapError(
                        f"layer {layer!r} runs more than once under checkpointing: edit all calls or none"
                    )
            self._of[call, path] = [
                (Site(layer, call, path, request.what), request)
                for layer, request in covering
                if request.call in (None, call)
            ]
        return self._of[call, path]

    def is_for(self, call: int | None) -> bool:
        """Whether some request is for this call."""
        return any(request.call in (None, call) for _, request in self.pairs)


UNKNOWN = -1  # number of a call where it is not known which call a backward pass repeats


def number_again(calls: Counter[Any], key: Any) -> int:
    """Return the number of a call that a backward pass repeats, 0 if there was one call in the forward."""
    return 0 if calls[key] == 1 else UNKNOWN
