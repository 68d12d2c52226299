"""Taps: keep and edit the activations and gradients of layers while a model runs.

    with Taps(model, ["layer?", "fc"]) as taps:
        for images in batches:
            taps(images)                    # or model(images)
            taps.record["layer4"]           # (B, C, H, W) on the CPU, a copy

    with Taps(model).edit("layer2", lambda h: h * 0) as taps: ...
    with Taps(model).keep("fc", "grad") as taps: ...

Differences from a bare `register_forward_hook`:

* On a CPU model, `output.detach().cpu()` shares the layer's memory, and the next in-place ReLU or `+=` overwrites it.
  Taps copy every tensor inside the hook.
* A module that runs twice in a forward (ResNet's shared `relu`) is recorded as `relu#0` and `relu#1`.
* Each call of the model starts an empty record. Looking up a layer that did not run raises an error; values of an
  earlier forward are never returned.
* Gradients come from tensor hooks. Backward hooks of modules fail next to in-place layers.
* The end of the `with` block removes all hooks registered by it, also after an exception, and no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import nn

from extract.errors import InputError, LayertapError, UnknownNameError, unknown_name
from extract.taps.absence import FROZEN, NOT_CALLED, reason_absent
from extract.taps.capture import Capture, CopyOut, copy_out
from extract.taps.edits import Edit
from extract.taps.function_calls import FunctionCalls
from extract.taps.functions import unwatched
from extract.taps.graphs import Graphs, copy_in_graph
from extract.taps.layer_names import match_layers, named_layers, named_parameters, unwrap
from extract.taps.record import Record, Reduce, Requested, Site, What, split_text
from extract.taps.scope import OTHER_THREAD, TRACED
from extract.taps.surgery import ParameterGradients, Surgery
from extract.taps.torch_internals import COMPILED_CODE_OFF

__all__ = ["Taps", "capture_of", "taps_of"]

_SHOWN = 20  # requests in `repr(taps)`, and names in an error
_EDITABLE = ("output", "input", "grad", "grad_input")

# Names, globs, text forms of a site, or types of layers; or a site.
Layers = str | type[nn.Module] | Site | Sequence[str | type[nn.Module]]


class Taps:
    """Context manager: keep and edit activations and gradients of chosen layers.

    Args:
        model: any module. Names refer to the model inside `torch.compile`, `DistributedDataParallel` and single-device
            `nn.DataParallel` wrappers. Compiled code runs uncompiled inside the block, because it ignores hooks,
            also that of other models. Compile before the block, or use `compile`, whose graph runs in it.
        layers: names, globs or types of layers whose outputs are kept; see `keep`, which adds more.
        reduce: applied to each kept tensor on its device before the copy to the CPU; see `keep`.
        stop: end each forward as soon as all requested values are computed. The first forward runs to its end and
            counts the calls of each layer; later forwards stop when these counts are reached. Applies to `taps(...)`,
            which then returns None, and not to `model(...)` or calls outside the thread of the block. Leave it off if
            the number of calls of a layer varies between batches.
        on_record: called with each complete record, gradients included: when the next forward of the model starts, and
            when the block ends without an error.

    Only calls of the model itself in the thread and asyncio task that opened the block are recorded. Layers called
    directly (`model.features(x)`), in other threads, by `reduce`, edits, `on_record` and `torch.export`, or during
    recomputation by activation checkpointing are not. Hooks registered inside the block run after those of `Taps`,
    whose record lacks what they return.

    Raises:
        InputError: the model is not an `nn.Module`, or is exported; or it, or a layer asked for or one around that, is
            scripted, or replicated over several devices.
        UnknownNameError: a pattern matches no layer.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers = (),
        *,
        reduce: Reduce | None = None,
        stop: bool = False,
        on_record: Callable[[Record], None] | None = None,
    ):
        _check_model(model)
        self._model, self._stop, self._on_record = model, stop, on_record
        # See `taps_of`.
        self._copy_out: CopyOut = copy_out
        self._has_other_callers = True
        self._replaces = True
        self._layers = {"": unwrap(model), **named_layers(model)}
        self._parameters = named_parameters(model)
        self._requests: list[Requested] = []
        self._kept_of: dict[str, list[Requested]] = {}  # name of a layer or parameter -> what is kept of it
        self._to_keep: Counter[tuple[str, What]] = Counter()  # with `stop`: see `Capture`
        self._capture: Capture | None = None  # the open block, or the last one
        self._edited: set[int] = set()  # id of each request whose edit was applied in this block
        self._graphs: Graphs | None = None  # where calls run compiled
        self._undo = contextlib.ExitStack()
        if layers != ():
            self.keep(layers, reduce=reduce)

    def keep(
        self,
        layers: Layers,
        what: What = "output",
        *,
        reduce: Reduce | None = None,
        call: int | None = None,
        live: bool = False,
    ) -> Self:
        """Keep values of more layers. Call it before the `with` block.

        Args:
            layers: names or globs (`blocks.*`, `**` for all layers), types (`nn.Conv2d`), or text forms of a `Site`:
                `relu#1`, `lstm:1.0`, `fc:0@input`; or a `Site`. The empty name is the model itself.
                `LAYER/FUNCTION` means functions called in the layer's own `forward`: `layer1.0/add`, `*/softmax`,
                `/flatten` (of the model itself).
            what: `"output"`; `"input"`: every tensor among the arguments, positional by index, keywords by name;
                `"grad"`: the gradient of the loss with respect to the output, or to a parameter (`fc.weight`);
                `"grad_input"`: with respect to the inputs, through this layer only; `"attention"`: the weights
                (B, heads, T, S) of every attention computed in the layer. Gradients are those of the last backward
                pass inside the block; a GradScaler scales them with the loss. Under `DistributedDataParallel`, the
                gradient of a parameter is that of this process, before the mean over processes, which `.grad` has.
            reduce: a function of one tensor, called on the tensor's device, without autograd unless `live` is set; it
                must not change the tensor. It returns a tensor or a dict of tensors, which is copied to the CPU and
                recorded.
            call: keep only this call of the layer in each forward (0 is the first); None keeps all calls.
            live: keep the tensor itself, on its device and with its graph, for a loss that trains layers before it.
                Looking it up raises an error if the model has changed it in place since. With `reduce`, what it returns
                is kept, with its graph too: `reduce=torch.clone` keeps a copy that later layers do not change.

        Raises:
            UnknownNameError: a pattern matches no layer, or `what` is unknown.
            InputError: `reduce` is not a function, the same value of a layer is already kept, a function has no value
                of this kind, or `live` is not for an output or input. In inference mode, a layer kept live raises it.
        """
        if reduce is not None:
            _check_function("reduce", layers, reduce, "use a function, such as lambda x: x.mean((2, 3))")
        for request in self._requests_for(layers, what, call):
            others = self._kept_of.setdefault(request.layer, [])
            if any(_overlap(request, other) for other in others):
                raise InputError(f"the {request.what} of layer {request.layer!r} is already kept")
            if live and request.what not in ("output", "input"):
                raise InputError(f"live=True keeps outputs and inputs; a value of kind {request.what!r} has no graph")
            others.append(dataclasses.replace(request, reduce=reduce, live=live))
            self._requests.append(others[-1])
        self._to_keep.clear()  # a forward may have to go on for longer now
        return self

    def edit(
        self,
        layers: Layers,
        fn: Edit,
        what: Literal["output", "input", "grad", "grad_input"] = "output",
        *,
        call: int | None = None,
    ) -> Self:
        """Replace values of layers by `fn(value)`, for later layers and the record. Call it before the `with` block.

        Autograd differentiates through the edit. Several edits of one value run in the order of their `edit` calls.

        Args:
            layers: see `keep`.
            fn: a function of one tensor that returns a tensor of the same shape, dtype and device; see `extract.edits`.
                It receives a copy, which it may change. If a layer takes or returns several tensors, `fn` is applied to
                each floating-point tensor in its tuples, lists, mappings and dataclasses; a `Site` selects one of them.
                One in a set, deque or another object is an error.
            what: `"output"`, `"input"`, `"grad"`: the gradient with respect to the output, or `"grad_input"`: with
                respect to the inputs, through this layer only.
            call: edit only this call of the layer in each forward; None edits all calls.

        Where activation checkpointing computes a layer again, `fn` is called again: if it draws from a generator of its
        own or counts its calls, as `smooth` does, this differs from the forward.

        Raises:
            UnknownNameError: a pattern matches no layer, or `what` is unknown.
            InputError: `fn` is not a function.
        """
        if what not in _EDITABLE:
            raise unknown_name("what to edit", what, _EDITABLE)
        _check_function("edit", layers, fn, "use an edit, such as edits.scale(0.5) or edits.replace(0.0)")
        requests: dict[Any, Requested] = {}  # of a module or parameter with two names, the first
        for request in self._requests_for(layers, what, call):
            target = id(self._layers.get(request.layer, self._parameters.get(request.layer)))
            value = target, request.operation, request.what, request.call, request.path
            requests.setdefault(value, dataclasses.replace(request, edit=fn))
        self._requests += requests.values()
        return self

    def compile(
        self, *, backend: str | Callable[..., Any] = "inductor", mode: str | None = None, options: Any = None
    ) -> Self:
        """Compile the model with its taps into one graph, which `taps(...)` runs.

        The first call captures a graph (`torch.export`) whose outputs are the output of the model and the values that
        are kept, and compiles it with `fullgraph=True`. Records are those of eager `Taps`, but for rounding. Another
        graph is made for arguments of other shapes, strides or types, and where layers, parameters, numbers or texts
        that are attributes of the model, or in its lists, dicts and configurations, its mode, gradients or autocast
        have changed. Other Python (counters, classes, `reduce`) runs once for a graph. `model(...)` runs eagerly.

        The graph can be trained: gradients reach parameters, arguments, and layers before a value that is kept `live`.
        The output of the model does not depend on such a value for `torch.autograd.grad`. Dropout draws other numbers
        than an eager forward.

        Args:
            backend: of `torch.compile`, as the others.
            mode: such as "reduce-overhead", which uses CUDA graphs.
            options: a dict, for the backend.

        Raises:
            InputError: the model is in a wrapper that does more than to call it. At a call: an edit is requested, or
                the gradient of a layer; a layer has hooks of others, such as open `Taps`; the model replaces its
                buffers; an argument or the output holds an object other than tensors, numbers and texts; or the forward
                is to stop in training mode.
            LayertapError: at a call; the model cannot be captured or compiled as one graph.
        """
        if any(isinstance(m, nn.DataParallel | nn.parallel.DistributedDataParallel) for m in self._model.modules()):
            raise InputError("a graph would leave out what the wrapper of the model does", hint="tap the model inside")
        self._graphs = Graphs(self._layers[""], self._call_for_graph, backend=backend, mode=mode, options=options)
        return self

    def _call_for_graph(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Call the model under new `Taps` with the same requests, whose copies a graph makes; return `ModelCall`, too.

        Raises:
            InputError: a graph cannot do what is requested.
        """
        # Hooks on parameters receive gradients of compiled code, too.
        requests = [request for request in self._requests if request.layer not in self._parameters]
        for request in requests:
            if _changes_layer(request):
                what = f"the {request.what if request.edit is None else 'edit'} of {request.name!r}"
                raise InputError(f"{what} runs Python in each pass; a graph cannot", hint="leave out compile()")
        root = self._layers[""]
        if self._stop and any(module.training for module in root.modules()):  # later layers may write into buffers
            raise InputError("a compiled forward cannot stop in training mode", hint="leave out stop=True or compile()")
        taps = taps_of(root, copy_out=copy_in_graph, has_other_callers=False)
        taps._requests = requests
        with taps:
            output = taps(*args, **kwargs)
            return None if self._stop else output, capture_of(taps).forward

    def _requests_for(self, layers: Layers, what: What, call: int | None) -> list[Requested]:
        """Return the requests of one call of `keep` or `edit`, one per layer, without `reduce` and `edit`."""
        if self._is_open:
            raise LayertapError("call keep and edit before the `with` block starts")
        if self._graphs is not None:
            self._graphs.all.clear()
        if what not in get_args(What):
            raise unknown_name("what", what, get_args(What))
        asked: list[Any] = [layers]
        if not isinstance(layers, type | Site | str):
            with contextlib.suppress(TypeError):
                asked = list(layers)
        requests: list[Requested] = []
        for layer in asked:
            if isinstance(layer, type) and issubclass(layer, nn.Module):
                of_type = [name for name, module in self._layers.items() if name and isinstance(module, layer)]
                if not of_type:
                    raise UnknownNameError(f"the model has no layer of type {layer.__name__}")
                requests += [Requested(name, "", what, call, pattern=layer.__name__) for name in of_type]
            elif isinstance(layer, Site):
                requests += self._matches(layer.layer, layer.call, tuple(map(str, layer.path)), layer.what)
            elif isinstance(layer, str):
                pattern, call_in_text, path, what_in_text = split_text(layer, self._layers)
                number = call if call_in_text is None else call_in_text
                requests += self._matches(pattern, number, path, what_in_text or what)
            else:
                raise InputError(f"expected names, globs or types of layers, got {type(layer).__name__}")
        for request in requests:
            if request.layer in self._layers:
                self._check_open_to_hooks(request.layer)
        return requests

    def _matches(self, pattern: str, call: int | None, path: tuple[str, ...], what: str) -> list[Requested]:
        """Return a request for each layer, or parameter, that a name or glob means."""
        if what not in get_args(What):
            raise unknown_name("what", what, get_args(What))
        layer, slash, operation = pattern.partition("/")
        if slash and what in ("input", "grad_input", "attention"):
            raise InputError(f"{pattern!r}: only outputs and gradients of a function without a module are available")
        if not layer or layer in self._layers:  # without a name, the model itself
            return [Requested(layer, operation, cast(What, what), call, path)]
        known = [name for name in self._layers if name] + ([*self._parameters] if what == "grad" else [])
        names = match_layers(known, layer)
        glob = pattern if names != [layer] else ""
        return [Requested(name, operation, cast(What, what), call, path, pattern=glob) for name in names]

    def _check_open_to_hooks(self, name: str) -> None:
        """Check that hooks of a layer work: neither it nor one around it is scripted, or replicated.

        Raises:
            InputError: they do not.
        """
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            outer = ".".join(parts[:depth])
            if reason := _why_closed(self._layers.get(outer)):
                is_inside = f", inside {outer!r}," if outer != name else ""
                raise InputError(f"layer {name!r}{is_inside} is {reason[0]}", hint=reason[1])

    @property
    def _is_open(self) -> bool:
        return self._capture is not None and self._capture.scope.is_open

    def __enter__(self) -> Self:
        if self._is_open:
            raise LayertapError("these Taps are already open in a `with` block")
        if self._stop and any(request.what in ("grad", "grad_input") for request in self._requests):
            raise InputError("gradients need complete forwards", hint="do not set stop=True")
        self._edited.clear()
        # A record may be pickled, or kept for long: it must keep neither the model alive, nor what a `reduce` holds.
        requested = [dataclasses.replace(request, reduce=None) for request in self._requests if request.edit is None]
        why_absent = weakref.WeakMethod(self._why_absent)
        capture = Capture(
            self._layers[""],
            lambda calls, text: why(calls, text) if (why := why_absent()) else None,
            requested,
            self._to_keep if self._stop else None,
            self._on_record,
            self._copy_out,
            self._has_other_callers,
            unwatched,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(capture.close)
            capture.is_compiled = self._graphs is not None
            self._register(capture, undo)
            self._undo, self._capture = undo.pop_all(), capture
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output, or None with `stop=True`."""
        if self._capture is None or not self._is_open:
            raise LayertapError("call Taps inside its `with` block")
        is_counted = self._capture.scope.counts_models()
        if self._graphs is not None and is_counted:
            return self._graphs(self._capture, args, kwargs)
        if not self._stop or not is_counted:
            return self._model(*args, **kwargs)
        self._capture.run_until_kept(self._model, args, kwargs)
        return None

    @property
    def record(self) -> Record:
        """The record of the last forward of the model.

        Raises:
            LayertapError: the model has not been called inside the `with` block, or its last call did not finish.
        """
        hint = "if it is compiled: compile it before the block, and open the block outside of compiled functions"
        forward = self._capture.forward if self._capture is not None else None
        if forward is None:
            is_unseen = self._capture is not None and bool(self._capture.scope.unseen)
            raise LayertapError(f"nothing recorded yet: {NOT_CALLED}", hint=hint if is_unseen else "")
        if forward.running:
            raise LayertapError("the last forward of the model did not finish; it left no record", hint=hint)
        return forward.record

    def __repr__(self) -> str:
        lines = [
            f"  {'keep' if request.edit is None else 'edit'} {request.text() or 'the model itself'}"
            for request in self._requests
        ]
        rest = [f"  ... {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
        return "\n".join([f"Taps({type(unwrap(self._model)).__name__})", *lines[:_SHOWN], *rest])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        capture = self._capture
        self._undo.close()
        gradients = any(request.what in ("grad", "grad_input") for request in self._requests)
        if gradients and isinstance(error, RuntimeError) and "does not require grad" in str(error):
            error.add_note(FROZEN)
        if kind is None and capture is not None:
            capture.hand_on()
            self._check_edits(capture)

    def _register(self, capture: Capture, undo: contextlib.ExitStack) -> None:
        """Register all hooks; closing `undo` removes them and restores the switches."""
        root = self._layers[""]
        modules = list(root.modules())
        self._check_replaced(modules, self._requests)
        # Compiled code ignores hooks added later. What calls the model may be compiled, which the model does not know,
        # so all compiled code is off. Without the compiler, whose import takes a second, there is none.
        compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in [self._model, *modules])
        if compiled or ("torch._dynamo" in sys.modules and self._has_other_callers):
            undo.enter_context(COMPILED_CODE_OFF.active())

        requests = sorted(self._requests, key=lambda request: request.edit is None)  # edits come before keeps
        of_parameters = [request for request in requests if request.layer in self._parameters]
        of_layers = [request for request in requests if request.layer not in self._parameters]
        surgery = None
        if any(_is_of_function(request) or _changes_layer(request) for request in of_layers):
            surgery = Surgery(capture, self._edited, self._copy_out, self._replaces)
            FunctionCalls(capture, surgery, self._layers, of_layers).register()
        requests_of: dict[int, tuple[nn.Module, list[Requested]]] = {}
        for request in of_layers:
            if not _is_of_function(request):
                module = self._layers[request.layer]
                requests_of.setdefault(id(module), (module, []))[1].append(request)
        for module, asked in requests_of.values():
            if surgery is not None and any(_changes_layer(request) for request in asked):
                surgery.add(module, asked)
            capture.keep(module, [request for request in asked if request.edit is None])
        capture.register()
        if of_parameters:
            ParameterGradients(capture, self._parameters, of_parameters, self._edited).register(root)

    def _check_replaced(self, modules: Iterable[nn.Module], requests: Sequence[Requested]) -> None:
        """Check that the model, of these modules, still has all layers and parameters that are asked for.

        Raises:
            LayertapError: it has others since these `Taps` were made.
        """
        present = set(map(id, modules))
        if any(request.layer in self._parameters for request in requests):
            present |= {id(parameter) for parameter in self._layers[""].parameters()}
        for request in requests:
            if id(self._layers.get(request.layer, self._parameters.get(request.layer))) not in present:
                raise LayertapError(
                    f"layer {request.layer!r} was replaced by another after these Taps were made",
                    hint="make new Taps of the model",
                )

    def _why_absent(self, calls: Counter[int | str], text: str) -> str | None:
        name = split_text(text, self._layers)[0].partition("/")[0]
        unseen = self._capture.scope.unseen if self._capture is not None else {}
        return reason_absent(text, self._kept_of.get(name, ()), self._layers, calls, unseen)

    def _check_edits(self, capture: Capture) -> None:
        """Check that every edit was applied in this block; that of a glob or a type, to at least one layer.

        All layers that are edited must still be in the model: those put in their place inside the block have no edit.

        A result without the edit would be taken for one with it. `nn.MultiheadAttention` never calls the linear layer
        that it holds, so a glob need not reach each of its layers.

        Raises:
            LayertapError: an edit was never applied, or its layer was replaced, and no call of the model interrupted.
        """
        if capture.forward is not None and capture.forward.running:
            return
        edits = [request for request in self._requests if request.edit is not None]
        self._check_replaced(self._layers[""].modules(), edits)
        effective = {_group(request) for request in edits if id(request) in self._edited}
        idle = [request for request in edits if id(request) not in self._edited]
        # Another thread that calls the model itself calls the same layers. The compiler traces those of this thread.
        for where, asked, hint in (
            (OTHER_THREAD, idle, ""),
            (TRACED, edits, "without gradients, open the block under torch.compiler.set_stance('force_eager')"),
        ):
            there = [r for r in asked if capture.scope.unseen.get(id(self._layers.get(r.layer))) == where]
            if missed := [request for request in there if request.call is None or request in idle]:
                raise LayertapError(f"the edit of {_names(missed)} never took effect: it ran {where}", hint=hint)
        idle = [request for request in idle if _group(request) not in effective]
        if not idle:
            return
        reason: str | None = NOT_CALLED
        if capture.forward is not None:
            calls = capture.forward.calls
            reason = reason_absent(idle[0].text(), idle[:1], self._layers, calls, capture.scope.unseen)
        raise LayertapError(f"the edit of {_names(idle)} never took effect: {reason}")


def _is_of_function(request: Requested) -> bool:
    """Whether a request is for a function, or attention, rather than for an input or output of the layer."""
    return bool(request.operation) or request.what == "attention"


def _changes_layer(request: Requested) -> bool:
    """Whether the model may continue with another tensor: an edited one, or a copy whose gradient is watched."""
    return request.edit is not None or request.what in ("grad", "grad_input")


def _overlap(one: Requested, other: Requested) -> bool:
    """Whether two requests for one layer may be for the same value."""
    depth = min(len(one.path), len(other.path))
    same = (one.operation, one.what, one.path[:depth]) == (other.operation, other.what, other.path[:depth])
    return same and (None in (one.call, other.call) or one.call == other.call)


def _group(request: Requested) -> Any:
    """Return what an edit has in common with those of the same glob or type: one of them has to take effect."""
    if not request.pattern:
        return id(request)
    return request.pattern, request.path, request.what, request.call, id(request.edit)


def taps_of(
    model: nn.Module,
    *,
    copy_out: CopyOut = copy_out,
    has_other_callers: bool = True,
    replaces: bool = True,
    stop: bool = False,
    on_record: Callable[[Record], None] | None = None,
) -> Taps:
    """Return `Taps` for layertap's own code, which may differ from those of its users.

    Args:
        model: see `Taps`.
        copy_out: reduces and copies a kept tensor.
        has_other_callers: whether other code calls the model, which may compile or export it.
        replaces: whether the model may receive a copy of an output in its place, where a gradient hook on the output
            is not safe.
        stop: see `Taps`.
        on_record: see `Taps`.
    """
    taps = Taps(model, stop=stop, on_record=on_record)
    taps._copy_out, taps._has_other_callers, taps._replaces = copy_out, has_other_callers, replaces
    return taps


def capture_of(taps: Taps) -> Capture:
    """Return the block of open `Taps`."""
    assert taps._capture is not None
    return taps._capture


def _names(requests: Sequence[Requested]) -> str:
    """Return the names of what is requested, for messages."""
    names = list(dict.fromkeys(request.name for request in requests))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


def _check_function(what: str, layers: Layers, function: object, hint: str) -> None:
    if not callable(function):
        raise InputError(f"the {what} of {layers!r} is {function!r}; expected a function of a tensor", hint=hint)


def _check_model(model: nn.Module) -> None:
    """Check that the layers of a model can have hooks.

    Raises:
        InputError: it is scripted, replicated over devices, or exported, or no module.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.fx.GraphModule) and "_guards_fn" in dict(model.named_children()) | model.__dict__:
        raise InputError("the model is exported: its graph calls no layers", hint="use the module it was exported from")
    inside = set(unwrap(model).modules()) - {unwrap(model)}
    for module in model.modules():
        if module not in inside and (reason := _why_closed(module)):
            raise InputError(f"the model is {reason[0]}", hint=reason[1])


def _why_closed(module: nn.Module | None) -> tuple[str, str] | None:
    """Return why hooks inside a module do not work, and what to do."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted: its code ignores hooks", "use the Python module that it was created from"
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return (
            f"replicated over {len(module.device_ids)} devices, and each copy sees a part of the batch",
            "tap the module inside, on one device",
        )
    return None
