"""Hook callbacks of `Taps`: track the running forward, keep values at each point, and replace edited ones."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from extract.errors import InputError, LayertapError
from extract.taps.edits import apply_edit
from extract.taps.functions import attention_weights, operation_name, unwatched
from extract.taps.gradients import CopyOut, on_gradient, to_watch
from extract.taps.layer_names import named_layers, named_parameters
from extract.taps.nested import Path, map_tensors, tensors_in
from extract.taps.record import Record, Reduce, Site, What, split_text
from extract.taps.requests import Block, Call, HookPoint, ModelCall, TapRequest

__all__ = ["HookCalls", "copy_out"]

_UNKNOWN = -1
_NOTHING_TO_HIDE = contextlib.nullcontext()


class _Stop(BaseException):
    """Ends a forward once all requested values are computed; a model's `except Exception` does not catch it."""


def copy_out(
    tensor: Tensor, reduce: Reduce | None, site: Site, to_cpu: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Reduce a tensor on its device, then copy the result to the CPU.

    Args:
        tensor: on the device of the model.
        reduce: see `Taps.keep`.
        site: the site of the tensor, for errors.
        to_cpu: copies a dense tensor to the CPU, possibly asynchronously; None makes a blocking copy.
    """

    def kept(value: Any) -> Tensor:
        dense = _dense(value, site)
        return _copied(dense, site) if to_cpu is None else to_cpu(dense)

    # Copies made in inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        value = tensor.detach()
        if reduce is None:
            return kept(value)
        try:
            value = reduce(value)
        except Exception as error:
            error.add_note(f"while reducing {site} of shape {tuple(tensor.shape)}")
            raise
        if isinstance(value, dict):
            return {name: kept(part) for name, part in value.items()}
        return kept(value)


def _dense(tensor: Any, site: Site) -> Tensor:
    """Return the tensor in dense, unquantised form.

    Raises:
        InputError: the value is not a tensor, or is a nested tensor, or is inside torch.func.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"the reduction of {site} returned {type(tensor).__name__}; expected a tensor or a dict of tensors"
        )
    if tensor.is_nested:
        raise InputError(f"{site} is a nested tensor, whose rows differ in shape; reduce it to a plain tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise InputError(
            f"{site} is inside torch.func (vmap, grad, ...), where values cannot be copied out of the model"
        )
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _copied(tensor: Tensor, site: Site) -> Tensor:
    """Return a contiguous copy on the CPU that owns its memory, and warn of infinite float16 values."""
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    kept.copy_(tensor)  # what copy_ returns could be a subclass
    if kept.dtype == torch.float16 and kept.isinf().any():
        warnings.warn(f"{site} has infinite values: the largest float16 is 65504", RuntimeWarning, stacklevel=3)
    return kept


class HookCalls:
    """The part of `Taps` that acts while the model runs: the call of the model, the hooks, and the record.

    Args:
        model: the model that the hooks are registered on.
        stop: see `Taps`.
        on_record: see `Taps`.
    """

    # Reduces and copies a kept tensor.
    _copy_out: CopyOut = staticmethod(copy_out)
    # Whether the model may receive a copy of an output in its place, where a gradient hook on the output is not safe.
    _stands_in = True

    def __init__(self, model: nn.Module, stop: bool, on_record: Callable[[Record], None] | None):
        self._model, self._stop, self._on_record = model, stop, on_record
        self._layers = named_layers(model)
        self._parameters = named_parameters(model)
        self._requests: list[TapRequest] = []
        self._block: Block | None = None  # None outside the `with` block
        self._forward: ModelCall | None = None  # the running call of the model, or the last one
        self._points: list[HookPoint] = []
        self._edited: set[int] = set()  # id of each request whose edit was applied in this block
        self._stoppable = False  # the forward runs inside `__call__`, which catches _Stop
        self._to_keep: Counter[tuple[str, What]] = Counter()  # `ModelCall.kept` of a whole forward
        self._calls: Counter[int] = Counter()  # id of a module -> its calls in a whole forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output, or None with `stop=True`."""
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

    @property
    def record(self) -> Record:
        """The record of the last forward of the model.

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

    def _why_absent(self, text: str) -> str | None:
        """Return why a requested value is missing from a record; None if it was not requested."""
        layer = split_text(text, self._layers)[0]
        name, slash, operation = layer.partition("/")
        asked = [w for w in self._requests if w.edit is None and w.layer == name and bool(w.operation) == bool(slash)]
        if not asked:
            return None
        if slash:
            return f"no function {operation!r} was called in the forward of layer {name!r}"
        if name in self._layers and named_layers(self._model).get(name) is not self._layers[name]:
            return f"layer {name!r} was replaced by another module after these Taps were made"
        if all(request.what in ("grad", "grad_input") for request in asked) or "@grad" in text:
            return (
                f"no gradient reached layer {name!r}: call backward() inside the `with` block, on a loss that depends "
                "on it (with reentrant checkpointing, layers that run more than once get none; use_reentrant=False)"
            )
        if all(request.what == "attention" for request in asked):
            return f"layer {name!r} computed no attention that layertap recognises"
        parent = self._layers.get(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return f"layer {name!r} never runs: nn.MultiheadAttention uses its weights without calling it"
        return f"layer {name!r} did not run in this forward"

    # The hooks. A forward is running between the pre-hook and the hook of the model itself; calls in other threads are
    # ignored. When activation checkpointing recomputes layers in the backward pass, edits are applied again and
    # gradients are watched, but no values are kept.

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Complete the last record and start a new one; the pre-hook of the model."""
        if self._block is not None and self._block.thread == threading.get_ident():
            self._hand_on()
            for point in self._points:
                point.calls.clear()  # calls of a forward that was stopped or interrupted
            self._forward = ModelCall(Record(self._why_absent), [[""]])
            self._forward.left = len(self._to_keep)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if forward := self._running():
            if forward.stand_ins:
                forward.check_stand_ins()
            forward.running = False
            self._to_keep |= forward.kept
            self._calls = forward.calls

    def _hand_on(self) -> None:
        """Pass the last record, now complete, to `on_record`, once."""
        forward = self._forward
        if forward is not None and not forward.running and not forward.handed_on and self._on_record is not None:
            forward.handed_on = True
            self._on_record(forward.record)

    def _running(self) -> ModelCall | None:
        """Return the forward that is running in this thread, or None."""
        block, forward = self._block, self._forward
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
        if self._forward is not None:
            self._keep(self._forward, site, request, gradient)
        return None

    def _call_number(self, module: nn.Module) -> int | None:
        """Return the index of this call of the module in the forward of the model.

        In a recomputation it is 0 for a module that ran once, else _UNKNOWN; None for a call outside the model's.
        """
        if forward := self._running():
            forward.calls[id(module)] += 1
            return forward.calls[id(module)] - 1
        if self._forward is None or not _in_backward():
            return None
        return 0 if self._calls[id(module)] == 1 else _UNKNOWN

    def _is_our_thread(self) -> bool:
        """Whether a hook was called for the thread of the block; backward passes on a GPU run in another thread."""
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
            request
            for request in self._requests
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
                for request in self._requests
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
            for path, tensor in _tensors(value, request.path):
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
            forward.record.by_site[site] = self._copy_out(tensor, request.reduce, site)

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
        assert self._block is not None
        assert self._forward is not None
        watched = to_watch(point, side, tensor, requests[0][0], self._forward, stands_in=self._stands_in)
        if watched is None:
            return tensor
        on_gradient(watched, requests, self._block, self._forward, self._copy_out)
        return watched


def _tensors(value: Any, within: tuple[str, ...]) -> Iterable[tuple[Path, Tensor]]:
    """Return what `tensors_in` yields; a tensor, and arguments that are all tensors, need no search."""
    if isinstance(value, Tensor):
        return () if within else (((), value),)
    if type(value) is dict and all(isinstance(part, Tensor) for part in value.values()):
        return [((key,), part) for key, part in value.items() if within in ((), (str(key),))]
    return tensors_in(value, within)


def _in_backward() -> bool:
    """Whether this thread is inside a backward pass; the same test as in `torch.utils.checkpoint`."""
    return torch._C._current_graph_task_id() != -1
