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
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from extract.errors import InputError, LayertapError, UnknownNameError, unknown_name
from extract.taps.capture import Capture, ModelCall, Variant
from extract.taps.edits import Edit
from extract.taps.function_calls import FunctionCalls
from extract.taps.functions import unwatched
from extract.taps.gradients import ParameterGradients
from extract.taps.layer_names import layer_named, named_layers, named_parameters, unwrap
from extract.taps.record import Record, Reduce, Site, What, split_text
from extract.taps.requests import FROZEN, TapRequest, requests_for, why_absent
from extract.taps.surgery import Surgery
from extract.taps.torch_internals import COMPILED_CODE_OFF

__all__ = ["Taps", "capture_of", "taps_of"]

_SHOWN = 20  # requests in `repr(taps)`, and names in an error
_TRACED = "in code that PyTorch's compiler traces, such as a branch of torch.cond"
_EDITABLE = ("output", "input", "grad", "grad_input")

# Names, globs, text forms of a site, or types of layers; or a site.
Layers = str | type[nn.Module] | Site | Sequence[str | type[nn.Module]]


class Taps:
    """Context manager: keep and edit activations and gradients of chosen layers.

    Args:
        model: any module. Names refer to the model inside `torch.compile`, `DistributedDataParallel` and single-device
            `nn.DataParallel` wrappers. Compiled code runs uncompiled inside the block, because it ignores hooks,
            also that of other models. Compile before the block.
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
        self._closed = _closed_layers(model)
        self._model, self._stop, self._on_record = model, stop, on_record
        self._variant = Variant()
        self._layers = {"": unwrap(model), **named_layers(model)}
        self._parameters = named_parameters(model)
        self._requests: list[TapRequest] = []
        self._kept_of: dict[str, list[TapRequest]] = {}  # name of a layer or parameter -> what is kept of it
        self._to_keep: Counter[tuple[str, What]] = Counter()  # with `stop`: see `Capture`
        self._capture: Capture | None = None  # the open block, or the last one
        self._edited: set[int] = set()  # id of each request whose edit was applied in this block
        self._undo = contextlib.ExitStack()
        # A record may be kept for long, and must not keep the model alive.
        explained_by = weakref.WeakMethod(self._why_absent)
        self._explain = lambda calls, text: explain(calls, text) if (explain := explained_by()) else None
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
            if any(request.overlaps(other) for other in others):
                raise InputError(f"the {request.what} of layer {request.layer!r} is already kept")
            if live and request.what not in ("output", "input"):
                raise InputError(f"live=True keeps outputs and inputs; a value of kind {request.what!r} has no graph")
            others.append(dataclasses.replace(request, reduce=reduce, live=live))
            self._requests.append(others[-1])
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
                each floating-point tensor in its tuples, lists, deques, mappings, dataclasses and namespaces; a `Site`
                selects one of them. One in a set or in another object is an error.
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
        requests: dict[Any, TapRequest] = {}  # of a module or parameter with two names, the first
        for request in self._requests_for(layers, what, call):
            target = id(self._layers.get(request.layer, self._parameters.get(request.layer)))
            value = target, request.operation, request.what, request.call, request.path
            requests.setdefault(value, dataclasses.replace(request, edit=fn))
        self._requests += requests.values()
        return self

    def _requests_for(self, layers: Layers, what: What, call: int | None) -> list[TapRequest]:
        if self._is_open:
            raise LayertapError("call keep and edit before the `with` block starts")
        names = partial(requests_for, what=what, call=call, layer_names=self._layers, parameter_names=self._parameters)
        given: list[Any] = [layers]
        if not isinstance(layers, type | Site | str):
            with contextlib.suppress(TypeError):
                given = list(layers)
        requests: list[TapRequest] = []
        for layer in given:
            if isinstance(layer, type) and issubclass(layer, nn.Module):
                of_type = [name for name, module in self._layers.items() if name and isinstance(module, layer)]
                if not of_type:
                    raise UnknownNameError(f"the model has no layer of type {layer.__name__}")
                requests += [dataclasses.replace(request, pattern=layer.__name__) for request in names(of_type)]
            elif isinstance(layer, Site | str):
                requests += names(layer)
            else:
                raise InputError(f"expected names, globs or types of layers, got {type(layer).__name__}")
        for request in requests:
            if reason := self._closed.get(request.layer):
                raise reason
        return requests

    @property
    def _is_open(self) -> bool:
        return self._capture is not None and self._capture.block.is_open

    def __enter__(self) -> Self:
        if self._is_open:
            raise LayertapError("these Taps are already open in a `with` block")
        if self._stop and any(request.what in ("grad", "grad_input") for request in self._requests):
            raise InputError("gradients need complete forwards", hint="do not set stop=True")
        self._edited.clear()
        requested = [request.without_functions() for request in self._requests if request.edit is None]
        capture = Capture(
            self._layers[""],
            self._explain,
            requested,
            self._to_keep if self._stop else None,
            self._on_record,
            self._variant,
            unwatched,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(capture.close)
            self._register(capture, undo)
            self._undo, self._capture = undo.pop_all(), capture
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output, or None with `stop=True`."""
        if self._capture is None or not self._is_open:
            raise LayertapError("call Taps inside its `with` block")
        if not self._stop or not self._capture.block.counts_calls:
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
        forward = self._forward
        if forward is None:
            raise LayertapError(
                "nothing recorded yet: the model itself must be called inside the `with` block, in its thread and "
                "asyncio task (model.forward(...), other methods and single layers do not count, compiled or not)",
                hint=hint if self._capture is not None and self._capture.traced else "",
            )
        if forward.running:
            raise LayertapError("the last forward of the model did not finish; it left no record", hint=hint)
        return forward.record

    @property
    def _forward(self) -> ModelCall | None:
        """The running call of the model, or the last one."""
        return self._capture.forward if self._capture is not None else None

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
        # Compiled code ignores hooks added later. What calls the model may be compiled, which the model does not know,
        # so all compiled code is off. Without the compiler, whose import takes a second, there is none.
        compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in [self._model, *modules])
        if compiled or ("torch._dynamo" in sys.modules and self._variant.has_other_callers):
            undo.enter_context(COMPILED_CODE_OFF.active())

        requests = sorted(self._requests, key=lambda request: request.edit is None)  # edits come before keeps
        of_parameters = [request for request in requests if request.layer in self._parameters]
        of_layers = [request for request in requests if request.layer not in self._parameters]
        surgery = None
        if any(r.is_of_function or r.changes_layer for r in of_layers):
            surgery = Surgery(capture, self._variant, self._edited)
            FunctionCalls(capture, surgery, self._layers, of_layers).register(self._closed)
        requests_of: dict[int, tuple[nn.Module, list[tuple[str, TapRequest]]]] = {}
        for request in of_layers:
            if not request.is_of_function:
                module = self._layers[request.layer]
                requests_of.setdefault(id(module), (module, []))[1].append((request.layer, request))
        for module, pairs in requests_of.values():
            if surgery is not None and any(request.changes_layer for _, request in pairs):
                surgery.add(module, pairs)
            capture.keep(module, [(name, request) for name, request in pairs if request.edit is None])
        capture.register()
        if surgery is not None:
            surgery.move_edits_to_front()
        if of_parameters:
            ParameterGradients(capture, self._parameters, of_parameters, self._edited).register(root)

    def _is_replaced(self, name: str) -> bool:
        """Whether the model now has another layer or parameter of this name than when these `Taps` were made."""
        if name in self._layers:
            return name != "" and layer_named(self._model, name) is not self._layers[name]
        layer, _, last = name.rpartition(".")
        module = layer_named(self._model, layer)
        own = {} if module is None else dict(module.named_parameters(recurse=False, remove_duplicate=False))
        return own.get(last) is not self._parameters[name]

    def _why_absent(self, calls: Counter[int | str], text: str) -> str | None:
        name = split_text(text, self._layers)[0].partition("/")[0]
        return why_absent(
            text,
            kept := self._kept_of.get(name, ()),
            self._layers,
            calls,
            replaced=bool(kept) and self._is_replaced(name),
            unseen=self._why_unseen(name),
        )

    def _why_unseen(self, name: str) -> str | None:
        """Return what a layer did in this block that its hooks did not see."""
        capture, module = self._capture, id(self._layers.get(name))
        if capture is None:
            return None
        if module in capture.in_workers:
            return "ran in another thread than the model, where nothing is recorded"
        if module in capture.traced:
            return f"ran {_TRACED}, where nothing is recorded"
        return None

    def _check_edits(self, capture: Capture) -> None:
        """Check that every edit was applied in this block; that of a glob or a type, to at least one layer.

        A result without the edit would be taken for one with it. `nn.MultiheadAttention` never calls the linear layer
        that it holds, so a glob need not reach each of its layers.

        A layer that ran in another thread, or was replaced, was missed, whatever became of others.

        Raises:
            LayertapError: an edit was never applied, although no call of the model was interrupted.
        """
        if capture.forward is not None and capture.forward.running:
            return
        edits = [request for request in self._requests if request.edit is not None]
        effective = {request.group for request in edits if id(request) in self._edited}
        idle = [request for request in edits if id(request) not in self._edited]
        for reason, is_missed in (
            ("replaced after these Taps were made", self._is_replaced),
            ("called in another thread than the model", lambda name: id(self._layers.get(name)) in capture.in_workers),
        ):
            if missed := [request for request in idle if is_missed(request.layer)]:
                raise LayertapError(f"the edit of {_names(missed)} never took effect: it was {reason}")
        traced = [request for request in edits if id(self._layers.get(request.layer)) in capture.traced]
        if missed := [request for request in traced if request.call is None or request in idle]:
            raise LayertapError(
                f"the edit of {_names(missed)} never took effect {_TRACED}",
                hint="without gradients, open the block under torch.compiler.set_stance('force_eager')",
            )
        idle = [request for request in idle if request.group not in effective]
        if not idle:
            return
        names = _names(idle)
        if capture.forward is None:
            raise LayertapError(
                f"the edit of {names} never took effect: the model itself was not called inside the `with` block, in "
                "its thread and asyncio task (model.forward(...), other methods, single layers and steps compiled "
                "before do not count)"
            )
        if all(request.what in ("grad", "grad_input") for request in idle):
            raise LayertapError(
                f"the edit of the gradient of {names} never took effect: no gradient reached it inside the `with` "
                "block",
                hint="call backward() inside the block, on a loss that depends on it, and do not freeze it"
                + (f"; {FROZEN}" if any(request.layer in self._layers for request in idle) else ""),
            )
        raise LayertapError(
            f"the edit of {names} never took effect: no matching call returned a floating-point tensor "
            "before the model returned"
        )


def taps_of(
    model: nn.Module, variant: Variant, *, stop: bool = False, on_record: Callable[[Record], None] | None = None
) -> Taps:
    """Return `Taps` for layertap's own code, which differ from those of its users."""
    taps = Taps(model, stop=stop, on_record=on_record)
    taps._variant = variant
    return taps


def capture_of(taps: Taps) -> Capture:
    """Return the block of open `Taps`."""
    assert taps._capture is not None
    return taps._capture


def _names(requests: Sequence[TapRequest]) -> str:
    """Return the names of what is requested, for messages."""
    names = list(dict.fromkeys(request.name for request in requests))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


def _check_function(what: str, layers: Layers, function: object, hint: str) -> None:
    if not callable(function):
        raise InputError(f"the {what} of {layers!r} is {function!r}; expected a function of a tensor", hint=hint)


def _closed_layers(model: nn.Module) -> dict[str, InputError]:
    """Return layer -> why it cannot be hooked, for layers that are, or are inside one that is, scripted or replicated.

    Raises:
        InputError: this is so for the model itself, or it is exported, or no module.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.fx.GraphModule) and "_guards_fn" in dict(model.named_children()) | model.__dict__:
        raise InputError("the model is exported: its graph calls no layers", hint="use the module it was exported from")
    root = unwrap(model)
    inside = set(root.modules())
    for module in (*(module for module in model.modules() if module not in inside), root):
        if reason := _why_closed(module):
            raise InputError(f"the model is {reason[0]}", hint=reason[1])
    closed: dict[str, InputError] = {}
    if not any(map(_why_closed, inside)):  # as nearly always: then no names are needed
        return closed
    layers = named_layers(model)
    for name, module in layers.items():
        if reason := _why_closed(module):
            closed[name] = InputError(f"layer {name!r} is {reason[0]}", hint=reason[1])
            for other in layers:
                if other.startswith(f"{name}."):
                    closed[other] = InputError(
                        f"layer {other!r} is inside {name!r}, which is {reason[0]}", hint=reason[1]
                    )
    return closed


def _why_closed(module: nn.Module) -> tuple[str, str] | None:
    """Return why hooks inside a module do not work, and what to do."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted: its code ignores hooks", "use the Python module that it was created from"
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return (
            f"replicated over {len(module.device_ids)} devices, and each copy sees a part of the batch",
            "tap the module inside, on one device",
        )
    return None
