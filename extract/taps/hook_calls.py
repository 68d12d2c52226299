"""Hook callbacks of `Taps`: track the running forward, keep values at each point, and replace edited ones."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from extract.errors import InputError, LayertapError
from extract.taps.block import OPENED, Block
from extract.taps.copies import overlaps_itself
from extract.taps.edits import apply_edit
from extract.taps.functions import (
    Listener,
    Write,
    unwatch,
    unwatched,
    watch,
    watch_again,
    write,
)
from extract.taps.gradients import (
    BackwardPasses,
    CopyOut,
    frames_of,
    on_gradient,
    separated,
    stand_in,
    to_watch,
)
from extract.taps.layer_names import named_layers, named_parameters, unwrap
from extract.taps.nested import Path, as_arguments, is_several, map_tensors, tensors_in, unread
from extract.taps.record import Record, Reduce, Requested, Site, What
from extract.taps.requests import (
    UNKNOWN,
    Call,
    HookPoint,
    ModelCall,
    TapRequest,
    number_again,
)
from extract.taps.stand_ins import stands_in
from extract.taps.torch_internals import (
    computes_tangents,
    graph_task,
    has_dispatch_modes,
    has_function_modes,
    hooks_of,
    inference_mode,
    is_in_functorch,
    is_saved,
    is_shared,
    memory_of,
)

__all__ = ["HookCalls", "ModelBoundHook", "copy_out", "in_backward"]


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
    if reduce is None and not torch.is_inference_mode_enabled():
        attached = tensor.requires_grad or computes_tangents()
        return _copied(tensor.detach() if attached else tensor, site, to_cpu)
    # Copies made in inference mode could not be used in training later. This guard is what `torch.inference_mode` uses;
    # the latter takes as long as the copy of a small tensor.
    with inference_mode(False):
        value = tensor.detach()
        if reduce is None:
            return _copied(value, site, to_cpu)
        with torch.no_grad():
            try:
                value = reduce(value)
            except Exception as error:
                shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
                error.add_note(f"while reducing {site}{shape}")
                raise
            if isinstance(value, dict):
                return {name: _copied(part, site, to_cpu) for name, part in value.items()}
            return _copied(value, site, to_cpu)


def _copied(value: Any, site: Site, to_cpu: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return a contiguous, dense copy on the CPU that owns its memory, and warn of infinite float16 values.

    Raises:
        InputError: the value is not a tensor, or is a nested tensor, or is inside torch.func.
    """
    if type(value) is Tensor and to_cpu is None and _is_plain(value):
        return value.clone()
    if not isinstance(value, Tensor):
        raise InputError(
            f"the reduction of {site} returned {type(value).__name__}; expected a tensor or a dict of tensors"
        )
    if value.is_nested:
        raise InputError(
            f"{site} is a nested tensor, whose rows differ in shape",
            hint="reduce it to a plain tensor, for example by lambda h: h.to_padded_tensor(0.0); an "
            "nn.TransformerEncoder makes none if its use_nested_tensor is False",
        )
    if hasattr(value, "full_tensor"):
        raise InputError(
            f"{site} is a DTensor, spread over processes",
            hint="reduce it to this part (lambda t: t.to_local()) or, in all, to the whole (lambda t: t.full_tensor())",
        )
    if is_in_functorch(value):
        raise InputError(
            f"{site} is inside torch.func (vmap, grad, ...), where values cannot be copied out of the model"
        )
    if value.is_quantized:
        value = value.dequantize()
    elif value.layout is not torch.strided:
        value = value.to_dense()
    if to_cpu is not None:
        return to_cpu(value)
    kept = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    kept.copy_(value)  # what copy_ returns could be a subclass
    if kept.dtype is torch.float16 and kept.isinf().any():
        warnings.warn(f"{site} has infinite values: the largest float16 is 65504", RuntimeWarning, stacklevel=3)
    return kept


def _is_plain(tensor: Tensor) -> bool:
    """Whether `clone` gives what `_copied` returns."""
    return (
        tensor.is_cpu
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_in_functorch(tensor)
        and tensor.is_contiguous()
    )


class ModelBoundHook:
    """Hook that does nothing in a copied or pickled model, nor where PyTorch's compiler traces a module.

    The compiler traces what `torch.cond` or FlexAttention run, for example, and the code of hooks there. This module
    then runs without its hooks.

    Args:
        hook: the hook.
        traced: receives the id of each module whose call the compiler has traced.

    Attributes:
        traced: see above.
        func: the function that the hook calls, if it is a `partial`; else the hook.
    """

    __slots__ = ("_hook", "func", "traced")

    def __init__(self, hook: Callable[..., Any], traced: set[int]):
        self._hook, self.traced = hook, traced
        self.func = hook.func if isinstance(hook, partial) else hook

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Call the hook, or note that the compiler traces the call."""
        if is_dynamo_compiling():  # true for the compiler alone, which does not call the function
            return _note(self, module)
        return self._hook(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Such a file can be loaded where layertap is not installed.
        return partial, (contextlib.nullcontext.__exit__, contextlib.nullcontext())

    def __deepcopy__(self, memo: Any) -> ModelBoundHook:
        return ModelBoundHook(_remove, set())


def _note(hook: ModelBoundHook, module: nn.Module) -> None:
    if not torch.compiler.is_exporting():  # an export is no call of the model
        hook.traced.add(id(module))


# The compiler calls this function while it traces, and does not trace it. `torch.compiler.assume_constant_result` sets
# this attribute, but imports the compiler, which takes a second.
_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _remove(module: nn.Module, *args: Any) -> None:
    """Remove copied hooks from a module and those inside it, when one is called: hooks keep layers from fused code."""
    for layer in module.modules():
        for hooks in hooks_of(layer):
            for number in [number for number, hook in hooks.items() if getattr(hook, "func", None) is _remove]:
                del hooks[number]
                for flags in (
                    layer._forward_pre_hooks_with_kwargs,
                    layer._forward_hooks_with_kwargs,
                    layer._forward_hooks_always_called,
                ):
                    flags.pop(number, None)


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
    # Whether other code than `Taps` calls the model, which may compile or export it.
    _has_other_callers = True
    _reduces_call_no_layers = False  # code of the user may call any

    def __init__(self, model: nn.Module, stop: bool, on_record: Callable[[Record], None] | None):
        self._model, self._stop, self._on_record = model, stop, on_record
        self._layers = {"": unwrap(model), **named_layers(model)}
        self._parameters = named_parameters(model)
        self._requests: list[TapRequest] = []
        self._explain: Callable[[Counter[int], str], str | None]  # for records: why a value is absent
        self._requested: list[Requested] = []  # what is kept, for the records
        self._kept_of: dict[str, list[TapRequest]] = {}  # name of a layer or parameter -> what is kept of it
        self._block: Block | None = None  # None outside the `with` block
        self._forward: ModelCall | None = None  # the running call of the model, or the last one
        self._points: list[HookPoint] = []
        self._edited: set[int] = set()  # id of each request whose edit was applied in this block
        self._in_workers: set[int] = set()  # id of each module that a thread of the model's has called in this block
        self._traced: set[int] = set()  # id of each module called in this block in code that the compiler traces
        self._stoppable = False  # the forward runs inside `__call__`, which catches _Stop
        self._to_keep: Counter[tuple[str, What]] = Counter()  # `ModelCall.kept` of a whole forward
        self._passes: BackwardPasses | None = None  # numbered if gradients of parameters are kept
        self._is_watching = False  # whether functions tell the listener
        self._listener = Listener(on_write=self._on_write, writes_into_a_copy=self._writes_into_a_copy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output, or None with `stop=True`."""
        if self._block is None:
            raise LayertapError("call Taps inside its `with` block")
        if not self._stop or threading.get_ident() in self._block.in_users_code:
            return self._model(*args, **kwargs)
        self._stoppable = True
        try:
            self._model(*args, **kwargs)
        except _Stop:
            assert self._forward is not None
            self._forward.running = False
        finally:
            self._stoppable = False
            self._let_go()
        return None

    def _let_go(self) -> None:
        """Let go of what the last forward holds if it was interrupted."""
        if self._forward is not None:
            self._forward.caller = None
            self._forward.stack.clear()
            self._forward.stand_ins = None
            self._forward.editing.clear()
        self._unwatch()

    def _watch_functions(self, *_: Any) -> None:
        """Watch the functions of this thread until the end of the forward, if it is running the model."""
        if self._running():
            self._watch_writes()

    def _watch_writes(self) -> None:
        self._is_watching = True
        watch(self._listener)

    def _unwatch(self) -> None:
        if self._is_watching:
            self._is_watching = False
            unwatch(self._listener)

    def _end_watching(self, *_: Any) -> None:
        """End this after the end of the forward, also by an exception; the model may call itself before that."""
        forward = self._forward
        goes_on = forward is not None and forward.running and forward.caller in list(frames_of(sys._getframe()))
        if self._is_our_thread() and not goes_on:
            self._unwatch()

    @property
    def record(self) -> Record:
        """The record of the last forward of the model.

        Raises:
            LayertapError: the model has not been called inside the `with` block, or its last call did not finish.
        """
        hint = "if it is compiled: compile it before the block, and open the block outside of compiled functions"
        if self._forward is None:
            raise LayertapError(
                "nothing recorded yet: the model itself must be called inside the `with` block, in its thread and "
                "asyncio task (model.forward(...), other methods and single layers do not count, compiled or not)",
                hint=hint if self._traced else "",
            )
        if self._forward.running:
            raise LayertapError("the last forward of the model did not finish; it left no record", hint=hint)
        if self._passes is not None and not in_backward():
            self._passes.ended()
        return self._forward.record

    # The hooks. A forward is running between the pre-hook and the hook of the model itself; calls in other threads are
    # ignored. When activation checkpointing recomputes layers in the backward pass, edits are applied again and
    # gradients are watched, but no values are kept.

    def _begin(self, module: nn.Module, args: Any, caller: FrameType | None = None) -> None:
        """Complete the last record and start a new one; the pre-hook of the model, called by `caller`."""
        block = self._block
        if block is None or in_backward():
            return
        if self._has_other_callers and torch.compiler.is_exporting() and has_dispatch_modes():
            return  # of this thread: the exported program would contain the hooks, and the record no values
        if (thread := threading.get_ident()) != block.thread or thread in block.in_users_code:
            block.callers.add(thread)
            return
        if block.mark is not None and block.mark not in OPENED.get():
            block.ran_in_other_tasks = True
            return
        forward = self._forward
        if forward is not None and forward.running and forward.caller in list(frames_of(sys._getframe())):
            return  # the model calls itself: its layers run again in the same forward
        self._hand_on()
        for point in self._points:
            point.calls.clear()  # calls of a forward that was stopped or interrupted
            point.numbers.clear()
        if self._passes is not None:
            self._passes.ended()
        calls: Counter[int] = Counter()
        record = Record(partial(self._explain, calls), self._requested)
        self._forward = ModelCall(record, [([""], None)], caller or sys._getframe(2), self._watch_writes, calls=calls)
        self._forward.left = len(self._to_keep)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if (forward := self._running()) and forward.caller is sys._getframe(2):
            forward.caller = None
            if forward.stand_ins is not None:
                forward.stand_ins.end()
            forward.running = False
            forward.returned_generator = isinstance(output, GeneratorType | CoroutineType | AsyncGeneratorType)
            self._to_keep |= forward.kept

    def _hand_on(self) -> None:
        """Pass the last record, now complete, to `on_record`, once."""
        forward = self._forward
        if forward is not None and not forward.running and not forward.handed_on and self._on_record is not None:
            forward.handed_on = True
            with self._users_code():
                self._on_record(forward.record)

    def _running(self) -> ModelCall | None:
        """Return the forward that is running in this thread, or None."""
        block, forward = self._block, self._forward
        if block is None or forward is None or not forward.running:
            return None
        if (thread := threading.get_ident()) != block.thread or thread in block.in_users_code:
            return None
        # A backward pass inside the forward may recompute checkpointed layers, which does not count as a call.
        return forward if graph_task() == -1 else None  # `in_backward()`, but faster

    def _users_code(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: see `Block.users_code`."""
        return self._block.users_code() if self._block is not None else unwatched()

    def _computing(self) -> ModelCall | None:
        """Return the forward that is running, or some of whose layers a backward pass computes again; or None."""
        if not in_backward():
            return self._running()
        block = self._block if self._is_our_thread() else None
        in_users_code = block is not None and threading.get_ident() in block.in_users_code
        return self._forward if block and block.is_of_this_task and not in_users_code else None

    def _count(self, point: HookPoint, module: nn.Module, args: Any) -> None:
        """Count the call of a module whose outputs are kept, and nothing else."""
        if forward := self._running():
            number = forward.calls.get(key := id(module), 0)
            forward.calls[key] = number + 1
            point.numbers.append(number)
        else:
            self._pass_over(module)

    def _keep_output(self, point: HookPoint, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the output of a counted call, after other hooks have replaced it."""
        if (forward := self._running()) and point.numbers:
            number = point.numbers.pop()
            if output is not None:  # it is None if the layer raised
                self._keep_values(point, forward, number, output, "output")

    def _start(self, point: HookPoint, module: nn.Module, args: Any) -> None:
        """Count the call of a module of which no input or output is edited."""
        if self._is_our_thread():
            point.calls.append(self._call(module))
        else:
            self._pass_over(module)

    # PyTorch calls a hook without `kwargs` if another thread removes it meanwhile; such a call is ignored.
    def _enter(self, point: HookPoint, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """Count the call of a module, and edit its inputs; runs before other hooks, so that they see the edits."""
        if not self._is_our_thread():
            return self._pass_over(module)
        call = self._call(module)
        point.calls.append(call)
        if call.number is None:
            return None
        passed = value = args, kwargs
        with _unheard():
            if "input" in point.edits:
                arguments = {**dict(enumerate(args)), **kwargs}
                if (edited := self._edit(point, call.number, arguments, "input")) is not arguments:
                    passed = as_arguments(edited, len(args))
            if point.edits_output(call.number) and (forward := self._computing()):
                call.receive(passed)
                forward.editing.append(call)
        if call.received:
            if in_backward():
                call.end_again = watch_again(self._listener)
            elif torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                self._watch_writes()
        return None if passed is value else passed

    def _keep_inputs(self, point: HookPoint, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """Watch and keep the inputs of a module, after other hooks have replaced them."""
        if not self._is_our_thread() or not point.calls:
            return None
        call, value = point.calls[-1], {**dict(enumerate(args)), **kwargs}
        if call.number is None:
            return None
        with _unheard():
            passed = self._watch(point, call.number, value, "input", self._watched_tensor)
            if point.watches:
                call.inputs = [tensor for _, tensor in tensors_in(passed)]
            self._keep_values(point, call.forward, call.number, passed, "input")
        return None if passed is value else as_arguments(passed, len(args))

    def _edit_output(self, point: HookPoint, module: nn.Module, args: Any, output: Any) -> Any:
        """Edit the output of a module, and replace it by a copy where its gradient cannot be watched otherwise.

        It runs before other hooks: what they keep of the output may be a part of the loss.
        """
        if not self._is_our_thread() or not point.calls:
            return None
        call = point.calls[-1]
        if call.number is None or output is None:  # output is None if the layer raised
            return None
        is_new_tensor = _is_new(output)
        with _unheard():
            for added in call.stand_ins:
                added.catch_up()
            call.returns_new = is_new_tensor and not stands_in(output)
            passed = self._edit(point, call.number, output, "output")
            if point.watches and self._stands_in:
                call.returns_several = is_several(passed)
                passed = self._watch(point, call.number, passed, "output", self._separated_tensor)
        return None if passed is output else passed

    def _leave(self, point: HookPoint, module: nn.Module, args: Any, output: Any) -> Any:
        """Watch and keep the output of a module, after other hooks have replaced it."""
        if not self._is_our_thread() or not point.calls:
            return None
        call, passed = point.calls[-1], output
        try:
            if call.number is not None and output is not None:  # output is None if the layer raised
                with _unheard():
                    if point.watches:
                        call.returns_several = is_several(output)
                        passed = self._watch(point, call.number, output, "output", self._watched_tensor)
                    self._keep_values(point, call.forward, call.number, passed, "output")
        finally:
            point.calls.pop()
            if call.received:
                self._end_edit(call)
        return None if passed is output else passed

    def _end_edit(self, call: Call) -> None:
        """Note that a module whose output is edited has ended."""
        if (forward := self._forward) is not None and call in forward.editing:
            forward.editing.remove(call)
        if call.end_again is not None:
            call.end_again()

    def _on_write(self, write: Write) -> Iterable[Callable[[], object]]:
        """Return what is to be done after a function writes into a tensor; see `Listener.on_write`."""
        forward = self._computing()
        if forward is None:
            return ()
        for call in forward.editing:
            call.written |= write.reached.keys()
        return forward.stand_ins.before_write(write) if forward.stand_ins is not None else ()

    def _writes_into_a_copy(self, function: Any, write: Write) -> bool:
        """Whether a function gets a copy of the tensor that it writes into; see `Listener.writes_into_a_copy`.

        If the output of a layer that works in place is edited, the edited output is written where the caller expects
        it. This would replace values that autograd has saved, if it was the layer's own tensor that autograd saw.
        """
        if not torch.is_grad_enabled() or (forward := self._computing()) is None:
            return False
        return any(memory_of(received) in write.reached for call in forward.editing for received, _ in call.received)

    def _pass_over(self, module: nn.Module) -> None:
        """Remember that a thread that the running forward has started calls a module."""
        block, forward = self._block, self._forward
        if block is not None and forward is not None and forward.running and block.is_worker and not in_backward():
            self._in_workers.add(id(module))

    def _call(self, module: nn.Module) -> Call:
        """Return a new call of a module."""
        if forward := self._running():
            number = forward.calls.get(id(module), 0)
            forward.calls[id(module)] = number + 1
            return Call(number, forward)
        forward = self._computing()
        return Call(number_again(forward.calls, id(module)) if forward else None, None)

    def _is_our_thread(self) -> bool:
        """Whether a hook was called for the thread of the block; backward passes on a GPU run in another thread."""
        if self._block is None or self._block.thread == threading.get_ident():
            return self._block is not None
        return torch.cuda.is_initialized() and in_backward()  # type: ignore[no-untyped-call]

    def _edit(self, point: HookPoint, call: int, value: Any, side: What) -> Any:
        """Edit a value, and return what the model continues with."""
        if side not in point.edits:
            return value
        for path, part in () if isinstance(value, Tensor) else unread(value):
            for layer, request in point.asked(call, side, path):
                if request.edit is not None:
                    raise InputError(
                        f"{Site(layer, call, path, side)} is a {type(part).__name__} that holds tensors, which edits "
                        "do not reach",
                        hint="name the tensors to edit, each by its site",
                    )
        return map_tensors(value, partial(self._edited_tensor, point, call, side, {}))

    def _watch(self, point: HookPoint, call: int, value: Any, side: What, watched: Callable[..., Tensor]) -> Any:
        """Watch the gradients of a value, and return what the model continues with."""
        if not point.watches or not torch.is_grad_enabled():
            return value
        return map_tensors(value, partial(watched, point, call, side))

    def _keep_values(
        self, point: HookPoint, forward: ModelCall | None, number: int | None, value: Any, side: What
    ) -> None:
        """Keep a value of a call (see `Call`) in the record; end the forward after the last value."""
        if forward is None or number is None:
            return
        for layer, request, first_site in point.kept[side]:
            if request.call is not None and request.call != number:
                continue
            if isinstance(value, Tensor) and not request.path:
                site = first_site if number == 0 else Site(layer, number, (), side)
                self._keep(forward, site, request, value)
            else:
                for path, tensor in _tensors(value, request.path):
                    self._keep(forward, Site(layer, number, path, side), request, tensor)
            if self._stop:
                forward.kept[layer, side] += 1
                forward.left -= forward.kept[layer, side] == self._to_keep[layer, side]
        if self._stoppable and self._to_keep and not forward.left:
            raise _Stop

    def _keep(self, forward: ModelCall, site: Site, request: TapRequest, tensor: Tensor) -> None:
        """Copy a tensor into the record, or keep the tensor itself."""
        if request.live and request.reduce is None and tensor.is_inference():
            raise InputError(
                f"{site} cannot be kept live in inference mode, which has no graph", hint="use torch.no_grad()"
            )
        # Entering a context takes as long as the copy of a small tensor.
        own = request.reduce is None or self._reduces_call_no_layers
        if own and not request.live and not has_function_modes():
            forward.record.by_site[site] = self._copy_out(tensor, request.reduce, site)
            return
        with self._users_code():
            if request.live:
                forward.record._keep_live(site, tensor if request.reduce is None else request.reduce(tensor))
            else:
                forward.record.by_site[site] = self._copy_out(tensor, request.reduce, site)

    def _edited_tensor(
        self,
        point: HookPoint,
        call: int,
        side: What,
        edited: dict[Any, tuple[Tensor, Tensor]],
        path: Path,
        tensor: Tensor,
    ) -> Tensor:
        """Edit a tensor; one that stands in several places (`return h, h`) is edited once, and is in all of them."""
        edits = [
            (Site(layer, call, path, side), request.edit, request)
            for layer, request in point.asked(call, side, path)
            if request.edit is not None
        ]
        if not edits or not tensor.is_floating_point():
            return tensor
        given, key = tensor, (id(tensor), *[id(request) for _, _, request in edits])
        if key not in edited:
            with self._users_code():
                for site, edit, request in edits:
                    tensor = apply_edit(tensor, edit, site)
                    self._edited.add(id(request))
            # The id of `given` is a key as long as it lives.
            edited[key] = given, self._passed_on(point, edits[0][0], given, tensor)
        return edited[key][1]

    def _passed_on(self, point: HookPoint, site: Site, given: Tensor, edited: Tensor) -> Tensor:
        """Return what the model continues with: the edited tensor, or the given one with its values."""
        if site.what == "output" and point.calls:
            if point.calls[-1].returns_new:
                return edited
            is_kept_by_autograd = torch.is_grad_enabled() and (is_saved(given) or overlaps_itself(given))
            if point.calls[-1].has_written(given) and not is_kept_by_autograd:
                write(given, edited)  # a caller may expect the output of a layer that works in place here
                return given
        if self._forward is not None:
            added = stand_in(self._forward, site, given, edited)
            if site.what == "input":
                point.calls[-1].pass_on(added)
        return edited

    def _gradient_requests(
        self, point: HookPoint, call: int, side: What, path: Path, tensor: Tensor
    ) -> list[tuple[Site, TapRequest]]:
        gradient: What = "grad" if side == "output" else "grad_input"
        return [
            (Site(layer, call, path, gradient), request)
            for layer, request in point.asked(call, gradient, path)
            if tensor.requires_grad and (call != UNKNOWN or request.edit is not None)
        ]

    def _separated_tensor(self, point: HookPoint, call: int, side: What, path: Path, tensor: Tensor) -> Tensor:
        """Return the tensor that is to be watched when all hooks have run."""
        requests = self._gradient_requests(point, call, side, path, tensor)
        if not requests or self._forward is None:
            return tensor
        return separated(point, tensor, requests[0][0], self._forward)

    def _watched_tensor(self, point: HookPoint, call: int, side: What, path: Path, tensor: Tensor) -> Tensor:
        """Hook a tensor to edit and keep its gradient; return that tensor: the given one where that is safe."""
        requests = self._gradient_requests(point, call, side, path, tensor)
        if not requests:
            return tensor
        assert self._block is not None
        assert self._forward is not None
        watched = to_watch(point, side, tensor, requests[0][0], self._forward, stands_in=self._stands_in)
        if watched is None:
            return tensor
        if side == "input":
            copies = point.calls[-1].watched
            if any(copy is watched for _, copy in copies):
                # A tensor that is passed twice has one gradient, which is edited once.
                requests = [(site, request) for site, request in requests if request.edit is None]
            else:
                copies.append((tensor, watched))
        on_gradient(watched, requests, self._block, self._forward, self._copy_out, self._edited)
        return watched


def _tensors(value: Any, within: tuple[str, ...]) -> Iterable[tuple[Path, Tensor]]:
    """Return what `tensors_in` yields; arguments that are all tensors need no search."""
    if type(value) is dict and all(isinstance(part, Tensor) for part in value.values()):
        return [((key,), part) for key, part in value.items() if within in ((), (str(key),))]
    return tensors_in(value, within)


def _is_new(output: Any) -> bool:
    """Whether a forward hook, which calls this first of all, has the only reference to the output of its module."""
    if type(output) is not Tensor or sys.getrefcount(output) > _references_of_new_output():
        return False
    return not (output._is_view() or is_saved(output) or is_shared(output))


_NOTHING = contextlib.nullcontext()


def _unheard() -> contextlib.AbstractContextManager[None]:
    """Context manager: see `unwatched`; it does nothing where nobody watches functions."""
    return unwatched() if has_function_modes() else _NOTHING


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; the same test as in `torch.utils.checkpoint`."""
    return graph_task() != -1


@functools.cache
def _references_of_new_output() -> int:
    """Return how many references Python itself has to an output where `_is_new` counts them."""
    found: list[int] = []

    def count(output: Any) -> None:
        found.append(sys.getrefcount(output))

    class Hook:
        def __call__(self, point: None, module: nn.Module, args: Any, output: Any) -> None:
            count(output)

    probe = nn.ReLU()
    probe.register_forward_hook(ModelBoundHook(partial(Hook().__call__, None), set()), always_call=True)
    with _unheard():
        for _ in range(3):  # a debugger may hold one of them
            probe(torch.zeros(1))
    return min(found)
