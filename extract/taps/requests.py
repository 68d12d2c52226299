"""State of taps: requests to keep and edit values, and the progress of the running model."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast, get_args

from torch import Tensor, nn

from extract.errors import InputError, LayertapError, unknown_name
from extract.taps.edits import Edit
from extract.taps.layer_names import match_layers
from extract.taps.nested import Path, tensors_in
from extract.taps.record import Record, Reduce, Requested, Site, What, split_text
from extract.taps.stand_ins import StandIn, StandIns, originals
from extract.taps.torch_internals import memory_of

__all__ = [
    "FROZEN",
    "UNKNOWN",
    "Call",
    "HookPoint",
    "ModelCall",
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
    calls: Mapping[int, int],
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


@dataclasses.dataclass
class HookPoint:
    """A module, or a function called in a module, with its requests as (layer name, request) pairs.

    Attributes:
        requests: all requests.
        kept: kind of value -> the requests that keep it, as (layer name, request, site of a tensor of the first call).
        edits: of "input" and "output", those that are edited.
        watches: whether the gradient of an output or input is watched.
        calls: calls in progress, the innermost last: a module may call itself.
        numbers: their numbers instead, if outputs are kept and nothing else.
    """

    requests: list[tuple[str, TapRequest]]
    kept: dict[What, list[tuple[str, TapRequest, Site]]] = dataclasses.field(init=False)
    edits: frozenset[What] = dataclasses.field(init=False)
    watches: bool = dataclasses.field(init=False)
    calls: list[Call] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = {what: [] for what in get_args(What)}
        for layer, request in self.requests:
            if request.edit is None:
                self.kept[request.what].append((layer, request, Site(layer, 0, (), request.what)))
        edited = {request.what for _, request in self.requests if request.edit is not None}
        self.edits = frozenset(edited & {"input", "output"})
        self.watches = any("grad" in request.what for _, request in self.requests)

    def edits_output(self, call: int) -> bool:
        """Whether the output of this call is edited."""
        return "output" in self.edits and any(
            request.edit is not None and request.what == "output" and request.call in (None, call)
            for _, request in self.requests
        )

    def asked(self, call: int, what: What, path: Path) -> Iterator[tuple[str, TapRequest]]:
        """Yield the requests for one tensor of a call.

        Raises:
            LayertapError: it is unknown which call is repeated, and an edit is for one of them.
        """
        for layer, request in self.requests:
            if request.what != what or not request.covers(path):
                continue
            if call == UNKNOWN and request.call is not None and request.edit is not None:
                raise LayertapError(f"layer {layer!r} runs more than once under checkpointing: edit all calls or none")
            if request.call in (None, call):
                yield layer, request


UNKNOWN = -1  # number of a call where it is not known which call a backward pass repeats


def number_again(calls: Counter[Any], key: Any) -> int:
    """Return the number of a call that a backward pass repeats; see `Call`."""
    return 0 if calls[key] == 1 else UNKNOWN


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        number: index of the call in the forward of the model. Where a backward pass repeats a call, 0 if the module ran
            once, else -1: which call it repeats is unknown. None for a call outside the model's.
        forward: the running forward; None where a backward pass repeats a call, or outside.
        inputs: tensors that the module received; empty unless the gradient of its output is watched.
        returns_several: whether the module returned several tensors.
        returns_new: whether it returned a tensor that nothing else can read.
        watched: (input, its copy) for each input whose gradient is watched.
        stand_ins: how tensors stand in for its inputs.
        separated: copies of outputs, passed on in their place because their gradients are watched.
        received: if the output is edited, the tensors that the module received, each with its version, which is None
            in inference mode.
        written: the memory that the module may have written into since, for inference mode.
        end_again: ends the watching of functions in a backward pass that computes the module again.
    """

    number: int | None
    forward: ModelCall | None
    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    returns_several: bool = False
    returns_new: bool = False
    watched: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    stand_ins: list[StandIn] = dataclasses.field(default_factory=list)
    separated: list[Tensor] = dataclasses.field(default_factory=list)
    received: list[tuple[Tensor, int | None]] = dataclasses.field(default_factory=list)
    written: set[int] = dataclasses.field(default_factory=set)
    end_again: Callable[[], None] | None = None

    def pass_on(self, stand_in: StandIn | None) -> None:
        """Remember that the module receives a tensor in place of one of its inputs."""
        if stand_in is not None:
            self.stand_ins.append(stand_in)

    def receive(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Remember the tensors that the module receives."""
        args, kwargs = arguments
        for value in (*args, *kwargs.values()):
            for tensor in (value,) if isinstance(value, Tensor) else [part for _, part in tensors_in(value)]:
                self.received.append((tensor, None if tensor.is_inference() else tensor._version))

    def has_written(self, tensor: Tensor) -> bool:
        """Whether the module has received this very tensor, or what it stands in for, and written into it."""
        return bool(self.received) and any(
            original is received
            and (memory_of(received) in self.written if version is None else received._version != version)
            for original in originals(tensor)
            for received, version in self.received
        )


Running = tuple[list[str], FrameType | None]  # names of a running module, and the frame of its call if it is known


def _calls_this(frame: FrameType) -> bool:
    """Whether a frame is one of the callers of this function."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


@dataclasses.dataclass
class ModelCall:
    """One call of the model: its record and its progress.

    Attributes:
        record: kept values.
        stack: names of the running modules and the frames of their calls, the innermost last.
        caller: function that called the hook at the start of the model, and will call the one at its end; None
            afterwards.
        watch: starts the watching of functions, for writes into stand-ins.
        again: the same of the modules that a backward pass computes again.
        again_in: the backward pass (graph task) that computes them.
        end_again: ends the watching of functions meanwhile.
        running: whether the model runs.
        returned_generator: whether the model returned a generator or coroutine, whose code runs later.
        handed_on: whether the record was passed to `on_record`.
        calls: id of a module -> number of its calls.
        operations: name of a function -> number of its calls.
        attentions: layer -> number of attentions computed in it.
        kept: (layer, what) -> number of calls kept.
        left: number of (layer, what) pairs with calls still to be kept.
        stand_ins: tensors that the model continues with in place of others; None if there are none.
        editing: running calls of modules whose outputs are edited, the innermost last.
        parameters_in: site of a parameter's gradient -> number of the backward pass that it is of.
    """

    record: Record
    stack: list[Running]
    caller: FrameType | None
    watch: Callable[[], None]
    again: list[Running] = dataclasses.field(default_factory=list)
    again_in: int = -1
    end_again: Callable[[], None] = lambda: None
    running: bool = True
    returned_generator: bool = False
    handed_on: bool = False
    calls: Counter[int] = dataclasses.field(default_factory=Counter)
    operations: Counter[str] = dataclasses.field(default_factory=Counter)
    attentions: Counter[str] = dataclasses.field(default_factory=Counter)
    kept: Counter[tuple[str, What]] = dataclasses.field(default_factory=Counter)
    left: int = 0
    stand_ins: StandIns | None = None
    editing: list[Call] = dataclasses.field(default_factory=list)
    parameters_in: dict[Site, int] = dataclasses.field(default_factory=dict)
    _seen: weakref.WeakValueDictionary[int, Tensor] = dataclasses.field(default_factory=weakref.WeakValueDictionary)

    def modules(self, again: bool) -> list[Running]:
        """Return `again` or `stack`, without modules that a `BaseException` has left: PyTorch calls no hook for it."""
        modules = self.again if again else self.stack
        while modules and (frame := modules[-1][1]) is not None and not _calls_this(frame):
            modules.pop()
        return modules

    def see(self, tensor: Tensor) -> None:
        """Remember that the gradient of this tensor is watched."""
        self._seen[id(tensor)] = tensor

    def has_seen(self, tensor: Tensor) -> bool:
        """Whether the gradient of this tensor is watched in this forward."""
        return self._seen.get(id(tensor)) is tensor
