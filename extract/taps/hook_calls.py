"""Hook callbacks of `Taps`: track the running forward, keep values at each point, and replace edited ones."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from extract.errors import LayertapError
from extract.taps.edits import apply_edit
from extract.taps.functions import attention_weights, operation_name, unwatched, watching
from extract.taps.gradients import CopyOut, on_gradient, to_watch
from extract.taps.layer_names import named_layers, named_parameters, unwrap
from extract.taps.model_bound_hook import ModelBoundHook
from extract.taps.nested import Path, map_tensors, tensors_in
from extract.taps.record import Record, Site, What, copy_out, split_text
from extract.taps.requests import Block, Call, HookPoint, ModelCall, TapRequest
from extract.taps.switches import COMPILED_CODE_OFF, FUSED_ATTENTION_OFF

__all__ = ["HookCalls"]

_UNKNOWN = -1
_NOTHING_TO_HIDE = contextlib.nullcontext()


class _Stop(BaseException):
    """Ends a forward once all requested values are computed; a model's `except Exception` does not catch it."""


class HookCalls:
    """The hooks of one `Taps`, and their state while the model runs.

    Args:
        model: the model to register the hooks on.
        on_record: see `Taps`.

    Attributes:
        layers: name -> module.
        parameters: name -> parameter.
        requests: the values to keep and edit.
        block: the open `with` block, or None.
        forward: the current or last call of the model, or None.
        take: the function that reduces and copies a kept tensor.
        stands_in: whether the model may receive a copy of an output in its place, where a gradient hook on the output
            itself is not safe.
    """

    def __init__(self, model: nn.Module, on_record: Callable[[Record], None] | None):
        self._model = model
        self._on_record = on_record
        self.layers = named_layers(model)
        self.parameters = named_parameters(model)
        self.requests: list[TapRequest] = []
        self.block: Block | None = None
        self.forward: ModelCall | None = None
        self.copy_out: CopyOut = copy_out
        self.stands_in = True
        self._points: list[HookPoint] = []
        self._edited: set[int] = set()  # id of each request whose edit was applied in this block
        self._stoppable = False  # the forward runs inside `stopping`, which catches _Stop
        self._to_keep: Counter[tuple[str, What]] = Counter()  # `ModelCall.kept` of a whole forward
        self._calls: Counter[int] = Counter()  # id of a module -> its calls in a whole forward

    def open(self, block: Block) -> None:
        """Open a `with` block."""
        self.block, self.forward = block, None
        self._edited.clear()

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Context manager: end a call of the model as soon as all requested values are computed."""
        self._stoppable = True
        try:
            yield
        except _Stop:
            assert self.forward is not None
            self.forward.running = False
        finally:
            self._stoppable = False

    def register(self, undo: contextlib.ExitStack) -> None:
        """Register all hooks; closing `undo` removes them and restores the switches."""

        def hook(register: Callable[..., RemovableHandle], function: Callable[..., Any], **options: Any) -> None:
            undo.callback(register(ModelBoundHook(function), **options).remove)

        root = unwrap(self._model)
        modules = list(root.modules())
        if any(isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer) for module in modules):
            # Their fused code calls no submodules and no functions that `watching` sees.
            undo.enter_context(FUSED_ATTENTION_OFF.active())
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in [self._model, *modules]):
            undo.enter_context(COMPILED_CODE_OFF.active())  # compiled code ignores hooks added later

        hook(root.register_forward_pre_hook, self.begin, prepend=True)
        if any(request.operation or request.what == "attention" for request in self.requests):
            names: dict[int, list[str]] = {}
            for name, module in self.layers.items():
                names.setdefault(id(module), []).append(name)
            for module in {id(module): module for module in self.layers.values()}.values():
                hook(module.register_forward_pre_hook, partial(self._push, names[id(module)]))
                hook(module.register_forward_hook, self._pop, always_call=True)
            undo.enter_context(watching(self._on_operation))
        requests_of: dict[int, tuple[nn.Module, list[tuple[str, TapRequest]]]] = {}
        for request in sorted(self.requests, key=lambda request: request.edit is None):  # edits come before keeps
            if request.layer in self.parameters:
                parameter = self.parameters[request.layer]
                if not parameter.requires_grad:
                    continue
                handle = parameter.register_hook(partial(self._on_parameter, request))  # type: ignore[no-untyped-call]
                undo.callback(handle.remove)
            elif not request.operation and request.what != "attention":
                module = self.layers[request.layer]
                requests_of.setdefault(id(module), (module, []))[1].append((request.layer, request))
        points = [(module, HookPoint(requests)) for module, requests in requests_of.values()]
        self._points = [point for _, point in points]
        for module, point in points:
            hook(module.register_forward_pre_hook, partial(self._pre_hook, point), with_kwargs=True)
            hook(module.register_forward_hook, partial(self._forward_hook, point), always_call=True)
        hook(root.register_forward_hook, self._end)

    def check_edits(self) -> None:
        """Check that every edit of an output or input was applied.

        Raises:
            LayertapError: the last forward finished, and an edit was never applied.
        """
        edits = [request for request in self.requests if request.edit is not None and request.what != "grad"]
        idle = [request for request in edits if id(request) not in self._edited]
        if idle and self.forward is not None and not self.forward.running:
            names = ", ".join(dict.fromkeys(f"{w.layer}/{w.operation}" if w.operation else w.layer for w in idle))
            raise LayertapError(
                f"the edit of {names} never took effect: no matching call returned a floating-point tensor"
            )

    def why_absent(self, text: str) -> str | None:
        """Return why a requested value is missing from a record; None if it was not requested."""
        layer = split_text(text, self.layers)[0]
        name, slash, operation = layer.partition("/")
        asked = [w for w in self.requests if w.edit is None and w.layer == name and bool(w.operation) == bool(slash)]
        if not asked:
            return None
        if slash:
            return f"no function {operation!r} was called in the forward of layer {name!r}"
        if name in self.layers and named_layers(self._model).get(name) is not self.layers[name]:
            return f"layer {name!r} was replaced by another module after these Taps were made"
        if all(request.what in ("grad", "grad_input") for request in asked) or "@grad" in text:
            return (
                f"no gradient reached layer {name!r}: call backward() inside the `with` block, on a loss that depends "
                "on it (with reentrant checkpointing, layers that run more than once get none; use_reentrant=False)"
            )
        if all(request.what == "attention" for request in asked):
            return f"layer {name!r} computed no attention that layertap recognises"
        parent = self.layers.get(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return f"layer {name!r} never runs: nn.MultiheadAttention uses its weights without calling it"
        return f"layer {name!r} did not run in this forward"

    # The hooks. A forward is running between the pre-hook and the hook of the model itself; calls in other threads are
    # ignored. When activation checkpointing recomputes layers in the backward pass, edits are applied again and
    # gradients are watched, but no values are kept.

    def begin(self, module: nn.Module, args: Any) -> None:
        """Complete the last record and start a new one; the pre-hook of the model."""
        if self.block is not None and self.block.thread == threading.get_ident():
            self.hand_on()
            for point in self._points:
                point.calls.clear()  # calls of a forward that was stopped or interrupted
            self.forward = ModelCall(Record(self.why_absent), [[""]])
            self.forward.left = len(self._to_keep)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if forward := self._running():
            if forward.stand_ins:
                forward.check_stand_ins()
            forward.running = False
            self._to_keep |= forward.kept
            self._calls = forward.calls

    def hand_on(self) -> None:
        """Pass the last record, now complete, to `on_record`, once."""
        forward = self.forward
        if forward is not None and not forward.running and not forward.handed_on and self._on_record is not None:
            forward.handed_on = True
            self._on_record(forward.record)

    def _running(self) -> ModelCall | None:
        """Return the forward that is running in this thread, or None."""
        block, forward = self.block, self.forward
        if block is None or forward is None or not forward.running or block.thread != threading.get_ident():
            return None
        # A backward pass inside the forward may recompute checkpointed layers, which does not count as a call.
        return None if _in_backward() else forward

    def _push(self, names: list[str], module: nn.Module, args: Any) -> None:
        if forward := self._running():
            forward.stack.append(names)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if forward := self._running():
            forward.stack.pop()

    def _pre_hook(self, point: HookPoint, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_our_thread():
            return None
        call = Call(self._call_number(module))
        point.calls.append(call)
        if call.number is None:
            return None
        value: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        passed = self._edit_and_keep(point, call.number, value, "input")
        if any(request.what == "grad" for _, request in point.requests):
            call.inputs = [tensor for _, tensor in tensors_in(passed)]
        if passed is value:
            return None
        return tuple(passed[i] for i in range(len(args))), {name: passed[name] for name in kwargs}

    def _forward_hook(self, point: HookPoint, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_our_thread() or not point.calls:
            return None
        call = point.calls[-1]
        try:
            for given, stand_in, version in call.stand_ins:
                # The layer wrote into the copy of its input; other readers may expect the change in the input itself.
                if stand_in._version != version:
                    given.copy_(stand_in)
            if call.number is None or output is None:  # output is None if the layer raised
                return None
            passed = self._edit_and_keep(point, call.number, output, "output")
            return None if passed is output else passed
        finally:
            point.calls.pop()

    def _on_parameter(self, request: TapRequest, gradient: Tensor) -> Tensor | None:
        site = Site(request.layer, what="grad")
        if not self._is_our_thread():
            return None
        if request.edit is not None:
            return apply_edit(gradient, request.edit, site)
        if self.forward is not None:
            self._keep(self.forward, site, request, gradient)
        return None

    def _call_number(self, module: nn.Module) -> int | None:
        """Return the index of this call of the module in the forward of the model.

        In a recomputation it is 0 for a module that ran once, else _UNKNOWN; None for a call outside the model's.
        """
        if forward := self._running():
            forward.calls[id(module)] += 1
            return forward.calls[id(module)] - 1
        if self.forward is None or not _in_backward():
            return None
        return 0 if self._calls[id(module)] == 1 else _UNKNOWN

    def _is_our_thread(self) -> bool:
        """Whether a hook was called for the thread of the block; backward passes on a GPU run in another thread."""
        if self.block is None:
            return False
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return self.block.thread == threading.get_ident() or (on_gpu and _in_backward())

    def _on_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        forward = self._running()
        name = operation_name(function)
        if forward is None or name is None:
            return result
        attended = [
            request
            for request in self.requests
            if request.what == "attention" and any(request.layer in n for n in forward.stack)
        ]
        if attended:
            with unwatched():
                weights = attention_weights(function, args, kwargs, result)
            for request in attended if weights is not None else ():
                call = forward.attentions[request.layer]
                forward.attentions[request.layer] += 1
                self._edit_and_keep(HookPoint([(request.layer, request)]), call, weights, "attention")
        for layer in forward.stack[-1]:
            requests = [
                (f"{layer}/{name}", request)
                for request in self.requests
                if request.operation and request.layer == layer and fnmatchcase(name, request.operation)
            ]
            if requests and any(True for _ in tensors_in(result)):
                call = forward.operations[f"{layer}/{name}"]
                forward.operations[f"{layer}/{name}"] += 1
                result = self._edit_and_keep(HookPoint(requests), call, result, "output")
        return result

    def _edit_and_keep(self, point: HookPoint, call: int, value: Any, side: What) -> Any:
        """Edit a value, watch its gradients, keep it, and return what the model continues with."""
        if not point.only_keeps:
            with unwatched():
                value = map_tensors(value, partial(self._edited_or_watched, point, call, side))
        forward = self._running()
        if forward is None:
            return value
        for layer, request in point.requests:
            if request.what != side or request.edit is not None or request.call not in (None, call):
                continue
            if isinstance(value, Tensor) and not request.path:
                self._keep(forward, Site(layer, call, (), side), request, value)
            else:
                for path, tensor in tensors_in(value, request.path):
                    self._keep(forward, Site(layer, call, path, side), request, tensor)
            forward.kept[layer, side] += 1
            forward.left -= forward.kept[layer, side] == self._to_keep[layer, side]
        if self._stoppable and self._to_keep and not forward.left:
            raise _Stop
        return value

    def _keep(self, forward: ModelCall, site: Site, request: TapRequest, tensor: Tensor) -> None:
        """Copy a tensor into the record."""
        # Entering `unwatched` takes as long as the copy of a small tensor, and is of no use without a function mode.
        with unwatched() if torch._C._len_torch_function_stack() else _NOTHING_TO_HIDE:
            forward.record._put(site, self.copy_out(tensor, request.reduce, site))

    def _edited_or_watched(self, point: HookPoint, call: int, side: What, path: Path, tensor: Tensor) -> Tensor:
        """Return the tensor that replaces the given one: edited, or with its gradient watched."""
        gradient: What = "grad" if side == "output" else "grad_input"
        given, watched = tensor, []
        for layer, request in point.requests:
            if not request.covers(path) or request.what not in (side, gradient):
                continue
            if call == _UNKNOWN and request.call is not None and request.edit is not None:
                raise LayertapError(f"layer {layer!r} runs more than once under checkpointing: edit all calls or none")
            if request.call not in (None, call):
                continue
            site = Site(layer, call, path, request.what)
            if request.what == gradient and (call != _UNKNOWN or request.edit is not None):
                watched.append((site, request))
            elif request.what == side and request.edit is not None and tensor.is_floating_point():
                tensor = apply_edit(tensor, request.edit, site)
                self._edited.add(id(request))
        if watched and tensor.requires_grad:
            tensor = self._watched(point, side, tensor, watched)
        if side == "input" and tensor is not given:
            point.calls[-1].stand_ins.append((given, tensor, tensor._version))
        return tensor

    def _watched(self, point: HookPoint, side: What, tensor: Tensor, requests: list[tuple[Site, TapRequest]]) -> Tensor:
        """Hook a tensor to edit and keep its gradient; return that tensor: the given one where that is safe."""
        assert self.block is not None
        assert self.forward is not None
        watched = to_watch(point, side, tensor, requests[0][0], self.forward, stands_in=self.stands_in)
        if watched is None:
            return tensor
        on_gradient(watched, requests, self.block, self.forward, self.copy_out)
        return watched


def _in_backward() -> bool:
    """Whether this thread is inside a backward pass; the same test as in `torch.utils.checkpoint`."""
    return torch._C._current_graph_task_id() != -1
