"""Taps: keep and edit what layers compute and the gradients they get, while a model runs.

    with Taps(model, ["layer?", "fc"]) as taps:
        for images in batches:
            taps(images)                    # or model(images)
            taps.record["layer4"]           # (B, C, H, W) on the CPU, a copy

    with Taps(model).edit("layer2", lambda h: h * 0) as taps: ...
    with Taps(model).keep("fc", "grad") as taps: ...

What a bare `register_forward_hook` gets wrong and this does not:

* On a CPU model `output.detach().cpu()` is the layer's own memory, and the next in-place ReLU or `+=` rewrites it. Here
  every tensor is copied inside the hook.
* A module that runs twice in a forward (ResNet's shared `relu`) gives `relu#0` and `relu#1`, not only the last.
* Each call of the model starts an empty record. A layer that did not run raises; it never answers with old values.
* Gradients are taken at the tensors, not with backward hooks of modules, which fail beside in-place layers.
* Hooks leave with the `with` block, whatever happened inside it, and only those registered here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from extract.errors import InputError, LayertapError, unknown_name
from extract.taps.edits import Edit, apply_edit
from extract.taps.functions import attention_weights, operation_name, unwatched, watching
from extract.taps.layer_names import match_layers, named_layers, named_parameters, unwrap
from extract.taps.nested import Path, map_tensors, tensors_in
from extract.taps.non_copying_hook import UncopiedHook
from extract.taps.record import Record, Reduce, Site, What, split_text, take
from extract.taps.requests import Block, Call, ModelCall, Point, Wish
from extract.taps.switches import COMPILED_CODE_OFF, FUSED_ATTENTION_OFF

__all__ = ["Taps"]


class _Stop(BaseException):
    """Ends a forward once all that was asked for has been computed; a model's `except Exception` lets it by."""


class Taps:
    """Keep and edit what chosen layers compute, for as long as the `with` block lasts.

    Args:
        model: any module. Names are looked up inside `torch.compile` and single-device `nn.DataParallel` wrappers;
            compiled code runs uncompiled inside the block, because it ignores hooks.
        layers: names or globs whose outputs are kept; more is asked for with `keep`.
        reduce: applied to each kept tensor on its device before the copy to the CPU; see `keep`.
        stop: end each forward as soon as everything asked for has been computed. The first forward runs whole, to learn
            how often each layer is called; later ones stop when each has been called as often. Needs `taps(...)`
            instead of `model(...)`, which then returns None. For a model whose layers run a different number of times
            on different batches, leave it off.
        on_record: called with each record when it is complete, with its gradients: when the next forward of the model
            begins, and when the block ends without an error.

    The record is of the model's own call, in the thread that opened the block. Layers run past it
    (`model.features(x)`), in other threads, or again by activation checkpointing, are not recorded.

    Raises:
        InputError: the model is scripted, exported, or replicated over several devices, and would ignore hooks.
        UnknownNameError: a pattern matches no layer.
    """

    _stands_in = True  # whether a copy of an output goes on in its place where its own gradient could not be had

    def __init__(
        self,
        model: nn.Module,
        layers: str | Sequence[str] = (),
        *,
        reduce: Reduce | None = None,
        stop: bool = False,
        on_record: Callable[[Record], None] | None = None,
    ):
        _check_hookable(model)
        self._model = model
        self._layers = named_layers(model)
        self._parameters = named_parameters(model)
        self._wishes: list[Wish] = []
        self._stop = stop
        self._on_record = on_record
        self._points: list[Point] = []
        self._block: Block | None = None  # while the `with` block is open
        self._forward: ModelCall | None = None  # the current one, or the last
        self._edited_layers: set[str] = set()  # whose outputs or inputs an edit has reached
        self._stoppable = False  # the forward was begun by __call__, which catches _Stop
        self._to_keep: Counter[tuple[str, What]] = Counter()  # as `kept`, of a whole forward
        self._calls: Counter[int] = Counter()  # id of a module -> its calls in a whole forward
        if layers:
            self.keep(layers, reduce=reduce)

    def keep(
        self,
        layers: str | Site | Sequence[str],
        what: What = "output",
        *,
        reduce: Reduce | None = None,
        call: int | None = None,
    ) -> Self:
        """Ask for more to be kept, before the `with` block begins.

        Args:
            layers: names or globs, or text forms of a `Site`: `relu#1`, `lstm:1.0`, `fc:0@input`; or a `Site`.
                `LAYER/FUNCTION` means functions called in the layer's own `forward`: `layer1.0/add`, `*/softmax`,
                `/flatten` (of the model itself).
            what: `"output"`; `"input"`: every tensor among the arguments, positional by index, keywords by name;
                `"grad"`: the gradient of the loss with respect to the output, or to a parameter (`fc.weight`);
                `"grad_input"`: with respect to the inputs, as far as it flows through this layer; `"attention"`: the
                weights (B, heads, T, S) of every attention computed in the layer. Gradients are of the last backward
                pass inside the block, and scaled where a GradScaler scales the loss.
            reduce: a function of one tensor, on its device, without gradients; it must not change the tensor. It
                returns a tensor or a dict of tensors: what is copied to the CPU and recorded.
            call: only this call of the layer in each forward (0 is the first); None keeps them all.

        Raises:
            UnknownNameError: a pattern matches no layer.
            InputError: the same value of a layer is already kept.
        """
        for wish in self._wishes_for(layers, what, call):
            if any(wish.overlaps(other) for other in self._wishes if other.edit is None):
                raise InputError(f"the {wish.what} of layer {wish.layer!r} is kept already")
            self._wishes.append(dataclasses.replace(wish, reduce=reduce))
        return self

    def edit(
        self,
        layers: str | Site | Sequence[str],
        fn: Edit,
        what: Literal["output", "input", "grad"] = "output",
        *,
        call: int | None = None,
    ) -> Self:
        """Ask for a change, before the `with` block begins: later layers, and the record, see what `fn` returns.

        The edit takes part in autograd. Several edits of one value run in the order they were asked for.

        Args:
            layers: as for `keep`.
            fn: a function of one tensor that returns one of the same shape, dtype and device; `extract.edits` has ready
                ones. It is given a copy: what it does to it reaches nobody else. Where a layer takes or gives several
                tensors it is applied to each floating-point one; a `Site` names one.
            what: `"output"`, `"input"`, or `"grad"`: the gradient with respect to the output.
            call: only this call of the layer in each forward; None edits them all.

        Raises:
            UnknownNameError: a pattern matches no layer.
        """
        if what not in ("output", "input", "grad"):
            raise unknown_name("what to edit", what, ["output", "input", "grad"])
        self._wishes += [dataclasses.replace(wish, edit=fn) for wish in self._wishes_for(layers, what, call)]
        return self

    def _wishes_for(self, layers: str | Site | Sequence[str], what: What, call: int | None) -> list[Wish]:
        if self._block is not None:
            raise LayertapError("ask before the `with` block begins")
        if what not in get_args(What):
            raise unknown_name("what", what, get_args(What))
        if isinstance(layers, Site):
            asked: list[tuple[str, int | None, tuple[str, ...], str | None]]
            asked = [(layers.layer, layers.call, tuple(map(str, layers.path)), layers.what)]
        else:
            asked = [split_text(text, self._layers) for text in ([layers] if isinstance(layers, str) else layers)]
        wishes = []
        for pattern, own_call, path, own_what in asked:
            if own_what is not None and own_what not in get_args(What):
                raise unknown_name("what", own_what, get_args(What))
            kind = what if own_what is None else cast(What, own_what)
            layer, slash, operation = pattern.partition("/")
            if kind in ("input", "grad_input", "attention") and slash:
                raise InputError(f"{pattern!r}: of a function without a module, outputs and gradients can be had")
            if slash and not layer:
                inside = [""]
            else:
                names = [*self._layers, *self._parameters] if kind == "grad" else list(self._layers)
                inside = match_layers(names, layer)
            own_call = call if own_call is None else own_call
            wishes += [Wish(name, operation, kind, own_call, path) for name in inside]
        return wishes

    @property
    def record(self) -> Record:
        """What the last forward of the model gave.

        Raises:
            LayertapError: the model has not been called inside the `with` block, or its last call did not finish.
        """
        if self._forward is None:
            raise LayertapError(
                "nothing recorded yet: the model itself must be called inside the `with` block, in its thread "
                "(model.forward_features(...) or a single layer does not count)"
            )
        if self._forward.running:
            raise LayertapError("the last forward of the model did not finish; it left no record")
        return self._forward.record

    def __enter__(self) -> Self:
        if self._block is not None:
            raise LayertapError("these Taps are in use already")
        if self._stop and any(wish.what in ("grad", "grad_input") for wish in self._wishes):
            raise InputError("gradients need whole forwards; leave stop=True off")
        block = Block()
        with contextlib.ExitStack() as undo:
            self._enter(undo)
            block.undo = undo.pop_all()
        self._block, self._forward = block, None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.open = False
            block.undo.close()
        if kind is None:
            self._hand_on()
            self._check_edits()

    def _check_edits(self) -> None:
        """An edit that never took effect must not pass for one that did."""
        idle = [
            wish
            for wish in self._wishes
            if wish.edit is not None and wish.what != "grad" and not self._has_edited(wish)
        ]
        if idle and self._forward is not None and not self._forward.running:
            names = ", ".join(dict.fromkeys(f"{w.layer}/{w.operation}" if w.operation else w.layer for w in idle))
            raise LayertapError(f"the edit of {names} never took effect: no such call gave a floating-point tensor")

    def _has_edited(self, wish: Wish) -> bool:
        if not wish.operation:
            return wish.layer in self._edited_layers
        return any(fnmatchcase(name, f"{wish.layer}/{wish.operation}") for name in self._edited_layers)

    def _take(self, tensor: Tensor, reduce: Reduce | None, site: Site) -> Any:
        """How a tensor is kept."""
        return take(tensor, reduce, site)

    def _enter(self, undo: contextlib.ExitStack) -> None:
        """Register everything; `undo` takes it back."""

        def hook(register: Callable[..., RemovableHandle], function: Callable[..., Any], **options: Any) -> None:
            undo.callback(register(UncopiedHook(function), **options).remove)

        root = unwrap(self._model)
        modules = list(root.modules())
        if any(isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer) for module in modules):
            # Their fused code calls no submodule and no function that could be seen.
            undo.enter_context(FUSED_ATTENTION_OFF.turned())
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in [self._model, *modules]):
            undo.enter_context(COMPILED_CODE_OFF.turned())  # it ignores hooks added later

        hook(root.register_forward_pre_hook, self._begin, prepend=True)
        if any(wish.operation or wish.what == "attention" for wish in self._wishes):
            names: dict[int, list[str]] = {}
            for name, module in self._layers.items():
                names.setdefault(id(module), []).append(name)
            for module in {id(module): module for module in self._layers.values()}.values():
                hook(module.register_forward_pre_hook, partial(self._push, names[id(module)]))
                hook(module.register_forward_hook, self._pop, always_call=True)
            undo.enter_context(watching(self._on_operation))
        points: dict[int, tuple[nn.Module, Point]] = {}
        for wish in sorted(self._wishes, key=lambda wish: wish.edit is None):  # edits come before keeps
            if wish.layer in self._parameters:
                parameter = self._parameters[wish.layer]
                if not parameter.requires_grad:
                    continue
                handle = parameter.register_hook(partial(self._on_parameter, wish))  # type: ignore[no-untyped-call]
                undo.callback(handle.remove)
            elif not wish.operation and wish.what != "attention":
                module = self._layers[wish.layer]
                points.setdefault(id(module), (module, Point([])))[1].wishes.append((wish.layer, wish))
        self._points = [point for _, point in points.values()]
        for module, point in points.values():
            hook(module.register_forward_pre_hook, partial(self._before, point), with_kwargs=True)
            hook(module.register_forward_hook, partial(self._after, point), always_call=True)
        hook(root.register_forward_hook, self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; returns its output, or None with `stop=True`."""
        if self._block is None:
            raise LayertapError("call Taps inside its `with` block")
        if not self._stop:
            return self._model(*args, **kwargs)
        self._stoppable = True
        try:
            self._model(*args, **kwargs)
        except _Stop:
            assert self._forward is not None
            self._forward.running = False
        finally:
            self._stoppable = False
        return None

    def _why_absent(self, text: str) -> str | None:
        """Why a record has nothing of this name although it was asked for; None if it was not."""
        layer = split_text(text, self._layers)[0]
        name, slash, operation = layer.partition("/")
        asked = [w for w in self._wishes if w.edit is None and w.layer == name and bool(w.operation) == bool(slash)]
        if not asked:
            return None
        if slash:
            return f"no function {operation!r} was called in the forward of layer {name!r}"
        if name in self._layers and named_layers(self._model).get(name) is not self._layers[name]:
            return f"layer {name!r} was replaced by another module after these Taps were made"
        if all(wish.what in ("grad", "grad_input") for wish in asked) or "@grad" in text:
            return (
                f"no gradient reached layer {name!r}: call backward() inside the `with` block, on a loss that depends "
                "on it (with reentrant checkpointing, layers that run more than once get none; use_reentrant=False)"
            )
        if all(wish.what == "attention" for wish in asked):
            return f"layer {name!r} computed no attention that is known here"
        parent = self._layers.get(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return f"layer {name!r} never runs: nn.MultiheadAttention uses its weights without calling it"
        return f"layer {name!r} did not run in this forward"

    # The hooks. Between the pre-hook and the hook of the model itself a forward is running; what happens in other
    # threads is not ours. When activation checkpointing computes a part again, in the backward pass, edits must be made
    # again and gradients can be had, but nothing is kept.

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._block is not None and self._block.thread == threading.get_ident():
            self._hand_on()
            for point in self._points:
                point.calls.clear()  # of a forward that was stopped or interrupted
            self._forward = ModelCall(Record(self._why_absent))
            self._forward.left = len(self._to_keep)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if forward := self._running():
            forward.check_stand_ins()
            forward.running = False
            self._to_keep |= forward.kept
            self._calls = forward.calls

    def _hand_on(self) -> None:
        """Give the last record to `on_record`: it is complete."""
        forward = self._forward
        if forward is not None and not forward.running and not forward.handed_on and self._on_record is not None:
            forward.handed_on = True
            self._on_record(forward.record)

    def _running(self) -> ModelCall | None:
        """The forward that is running in this thread."""
        block, forward = self._block, self._forward
        if block is None or forward is None or not forward.running or block.thread != threading.get_ident():
            return None
        # A backward pass inside the forward may compute checkpointed parts again: that is no call of theirs.
        return None if _in_backward() else forward

    def _push(self, names: list[str], module: nn.Module, args: Any) -> None:
        if forward := self._running():
            forward.stack.append(names)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if forward := self._running():
            forward.stack.pop()

    def _before(self, point: Point, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_our_thread():
            return None
        call = Call(self._call_number(module))
        point.calls.append(call)
        if call.number is None:
            return None
        value: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        passed = self._pass(point, call.number, value, "input")
        if any(wish.what == "grad" for _, wish in point.wishes):
            call.inputs = [tensor for _, tensor in tensors_in(passed)]
        if passed is value:
            return None
        return tuple(passed[i] for i in range(len(args))), {name: passed[name] for name in kwargs}

    def _after(self, point: Point, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_our_thread() or not point.calls:
            return None
        call = point.calls[-1]
        try:
            for given, stand_in, version in call.stand_ins:
                # The layer wrote into its input, and others may count on that.
                if stand_in._version != version:
                    given.copy_(stand_in)
            if call.number is None or output is None:  # None: also where the layer raised
                return None
            passed = self._pass(point, call.number, output, "output")
            return None if passed is output else passed
        finally:
            point.calls.pop()

    def _on_parameter(self, wish: Wish, gradient: Tensor) -> Tensor | None:
        site = Site(wish.layer, what="grad")
        if not self._is_our_thread():
            return None
        if wish.edit is not None:
            return apply_edit(gradient, wish.edit, site)
        if self._forward is not None:
            with unwatched():
                self._forward.record._put(site, self._take(gradient, wish.reduce, site))
        return None

    def _call_number(self, module: nn.Module) -> int | None:
        """Which call of the module this is in its forward; _UNKNOWN while it is computed again; None: not ours."""
        if forward := self._running():
            forward.calls[id(module)] += 1
            return forward.calls[id(module)] - 1
        if self._forward is None or not _in_backward():
            return None
        return 0 if self._calls[id(module)] == 1 else _UNKNOWN

    def _is_our_thread(self) -> bool:
        """Whether a hook was called by the thread of the block; on a GPU, another thread runs its backward passes."""
        if self._block is None:
            return False
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return self._block.thread == threading.get_ident() or (on_gpu and _in_backward())

    def _on_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        forward = self._running()
        name = operation_name(function)
        if forward is None or name is None:
            return result
        attended = [
            wish for wish in self._wishes if wish.what == "attention" and any(wish.layer in n for n in forward.stack)
        ]
        if attended:
            with unwatched():
                weights = attention_weights(function, args, kwargs, result)
            for wish in attended if weights is not None else ():
                call = forward.attentions[wish.layer]
                forward.attentions[wish.layer] += 1
                self._pass(Point([(wish.layer, wish)]), call, weights, "attention")
        for layer in forward.stack[-1]:
            wishes = [
                (f"{layer}/{name}", wish)
                for wish in self._wishes
                if wish.operation and wish.layer == layer and fnmatchcase(name, wish.operation)
            ]
            if wishes and any(True for _ in tensors_in(result)):
                call = forward.operations[f"{layer}/{name}"]
                forward.operations[f"{layer}/{name}"] += 1
                result = self._pass(Point(wishes), call, result, "output")
        return result

    def _pass(self, point: Point, call: int, value: Any, side: What) -> Any:
        """What goes on from a point in place of a value: edited, with its gradients watched; then it is kept."""
        with unwatched():
            value = map_tensors(value, partial(self._changed, point, call, side))
        forward = self._running()
        if forward is None:
            return value
        for layer, wish in point.wishes:
            if wish.what != side or wish.edit is not None or wish.call not in (None, call):
                continue
            for path, tensor in tensors_in(value):
                if wish.takes(path):
                    site = Site(layer, call, path, side)
                    with unwatched():
                        forward.record._put(site, self._take(tensor, wish.reduce, site))
            forward.kept[layer, side] += 1
            forward.left -= forward.kept[layer, side] == self._to_keep[layer, side]
        if self._stoppable and self._to_keep and not forward.left:
            raise _Stop
        return value

    def _changed(self, point: Point, call: int, side: What, path: Path, tensor: Tensor) -> Tensor:
        """The tensor that takes the place of one that passes."""
        gradient: What = "grad" if side == "output" else "grad_input"
        given, watched = tensor, []
        for layer, wish in point.wishes:
            if not wish.takes(path) or wish.what not in (side, gradient):
                continue
            if call == _UNKNOWN and wish.call is not None and wish.edit is not None:
                raise LayertapError(f"layer {layer!r} runs more than once under checkpointing: edit all calls or none")
            if wish.call not in (None, call):
                continue
            site = Site(layer, call, path, wish.what)
            if wish.what == gradient and (call != _UNKNOWN or wish.edit is not None):
                watched.append((site, wish))
            elif wish.what == side and wish.edit is not None and tensor.is_floating_point():
                tensor = apply_edit(tensor, wish.edit, site)
                self._edited_layers.add(layer)
        if watched and tensor.requires_grad:
            tensor = self._watched(point, side, tensor, watched)
        if side == "input" and tensor is not given:
            point.calls[-1].stand_ins.append((given, tensor, tensor._version))
        return tensor

    def _watched(self, point: Point, side: What, tensor: Tensor, wishes: list[tuple[Site, Wish]]) -> Tensor:
        """A tensor whose gradient will be edited and kept; the tensor itself where that is safe."""
        assert self._block is not None
        assert self._forward is not None
        block, forward = self._block, self._forward
        if side == "input":
            # The gradient through this layer alone is that of a copy which nobody else reads.
            known = [stand_in for given, stand_in, _ in point.calls[-1].stand_ins if given is tensor]
            tensor = known[0] if known else tensor.clone()
        elif not self._stands_in:
            if tensor.is_leaf:  # a hook on it would outlive this forward
                return tensor
        elif tensor.is_leaf or tensor._is_view() or forward.has_seen(tensor) or _is_among(tensor, point.calls):
            # A hook on a leaf would outlive this forward; one on a view is lost when it is written to in place; and
            # what a layer hands on as it got it, or as a layer inside it gave it, has other readers.
            given, tensor = tensor, tensor.clone()
            # Of a view, what it is a view of has other names, whose life cannot be followed.
            named = None if given._is_view() else weakref.ref(given)
            forward.stand_ins.append((wishes[0][0], named, tensor.detach(), tensor._version))
        forward.see(tensor)
        edits = [(site, wish.edit) for site, wish in wishes if wish.edit is not None]

        def on_gradient(gradient: Tensor) -> Tensor | None:
            if not block.open:
                return None
            with unwatched():
                for site, edit in edits:
                    gradient = apply_edit(gradient, edit, site)
                for site, wish in wishes:
                    if wish.edit is None:
                        forward.record._put(site, self._take(gradient, wish.reduce, site))
            return gradient if edits else None

        tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return tensor


def _is_among(tensor: Tensor, calls: list[Call]) -> bool:
    """Whether the innermost call was given this very tensor."""
    return bool(calls) and any(tensor is given for given in calls[-1].inputs)


_UNKNOWN = -1


def _in_backward() -> bool:
    """Whether this thread is inside a backward pass; asked as `torch.utils.checkpoint` asks it."""
    return torch._C._current_graph_task_id() != -1


def _check_hookable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is no nn.Module; hooks need one")
    for name, module in {"": model, **dict(model.named_modules())}.items():
        where = f"layer {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{where} is scripted: its code ignores hooks; use the Python module it was made from")
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise InputError(
                f"{where} is replicated over {len(module.device_ids)} devices, and each copy sees a part of the batch; "
                "tap the module inside, on one device"
            )
    if isinstance(model, torch.fx.GraphModule) and "_guards_fn" in dict(model.named_children()) | model.__dict__:
        raise InputError("the model is exported: its graph calls no layers; use the module it was exported from")
