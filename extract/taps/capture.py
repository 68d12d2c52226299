"""The core of `Taps`: keep inputs and outputs of layers while a model runs, by PyTorch's public hooks.

A `Capture` is one `with` block. Hooks on the model itself start and end a record. Hooks on layers pass arguments and
outputs through steps: functions of (call, value) that return what the model continues with. A layer has four places:

    on_enter    its arguments, before other hooks see them
    on_receive  its arguments, as the layer receives them; inputs are kept here
    on_return   its output, before other hooks see it
    on_leave    its output, as the model receives it; outputs are kept here

The steps in this module keep values and change nothing. `surgery` adds those of edits and gradients. `copies` has the
copies of unusual tensors. `scope` says which calls belong to the block.

Only calls in the thread of the block count, between the pre-hook and the hook of the model. Where activation
checkpointing computes a layer again in the backward pass, edits are applied again, and no values are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from extract.taps.copies import dense_copy
from extract.taps.live import versions_of
from extract.taps.nested import Path, tensors_in
from extract.taps.record import Record, Reduce, Requested, Site, What
from extract.taps.scope import ModelBoundHook, Scope, frames_of, in_backward, is_simple
from extract.taps.torch_internals import (
    computes_tangents,
    graph_task,
    has_dispatch_modes,
    hooks_of,
    inference_mode,
    is_in_functorch,
)

__all__ = ["UNKNOWN", "Call", "Capture", "CopyOut", "ModelCall", "Point", "Step", "as_kept", "copy_out"]

UNKNOWN = -1  # number of a call where it is not known which call a backward pass repeats


class _Stop(BaseException):
    """Ends a forward once all requested values are computed; a model's `except Exception` does not catch it."""


@dataclasses.dataclass(slots=True, eq=False)
class ModelCall:
    """One call of the model: its record and its progress.

    Attributes:
        record: kept values.
        caller: function that called the hook at the start of the model, and will call the one at its end; None
            afterwards.
        running: whether the model runs.
        handed_on: whether the record was passed to `on_record`.
        calls: id of a module, or name of a function or attention -> number of its calls.
        kept: (layer, what) -> number of calls kept.
        left: number of (layer, what) pairs with calls still to be kept.
    """

    record: Record
    caller: FrameType | None
    calls: Counter[int | str]
    left: int
    running: bool = True
    handed_on: bool = False
    kept: Counter[tuple[str, What]] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One call of a layer.

    Attributes:
        number: index of the call in the forward of the model. Where a backward pass repeats a call, 0 if the layer ran
            once, else `UNKNOWN`. None for a call outside the model's, which passes no steps.
        forward: the running forward; None where a backward pass repeats a call, or outside.
        arguments: what the layer received, for steps at its output.
        changes: what edits and gradients remember of this call.
    """

    number: Any
    forward: ModelCall | None
    arguments: tuple[Any, ...] = ()
    changes: Any = None


Step = Callable[[Call, Any], Any]
CopyOut = Callable[[Tensor, Reduce | None, Site], Any]


@dataclasses.dataclass(eq=False)
class Point:
    """A layer with the steps at its four places; see the top of this file.

    Attributes:
        module: the layer.
        calls: calls in progress, the innermost last: a layer may call itself.
        hooks: number of its hooks of this block.
        is_counted_on_entry: whether a pre-hook counts the call. A layer that calls no others needs none.
    """

    module: nn.Module
    on_enter: list[Step] = dataclasses.field(default_factory=list)
    on_receive: list[Step] = dataclasses.field(default_factory=list)
    on_return: list[Step] = dataclasses.field(default_factory=list)
    on_leave: list[Step] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    hooks: int = 0
    is_counted_on_entry: bool = True


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
    """Return a contiguous, dense copy on the CPU that owns its memory."""
    return (
        value.clone()
        if type(value) is Tensor and to_cpu is None and _is_plain(value)
        else dense_copy(value, site, to_cpu)
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether `clone` gives what `dense_copy` returns."""
    return (
        tensor.is_cpu
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_in_functorch(tensor)
        and tensor.is_contiguous()
    )


class Capture:
    """One `with` block over a model: its hooks, and the record of the last call of the model.

    Args:
        root: the model, without wrappers.
        explain: see `Record`; receives `ModelCall.calls`.
        requested: see `Record`.
        to_keep: (layer, what) -> number of calls kept in a whole forward. After all of them, a forward that was called
            by `run_until_kept` ends. None: forwards run to their end.
        on_record: see `Taps`.
        copy_out: reduces and copies a kept tensor.
        has_other_callers: see `taps_of`.
        unheard: see `Scope`.

    Attributes:
        scope: says which calls belong to the block.
        is_compiled: whether graphs fill records, too.
        forward: the running call of the model, or the last one.
        on_end: called with the output of a forward when it ends.
        on_let_go: called when what a forward holds is to be freed, also after an exception.
    """

    def __init__(
        self,
        root: nn.Module,
        explain: Callable[[Counter[int | str], str], str | None],
        requested: Sequence[Requested],
        to_keep: Counter[tuple[str, What]] | None,
        on_record: Callable[[Record], None] | None,
        copy_out: CopyOut,
        has_other_callers: bool,
        unheard: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self._root, self._explain, self._requested = root, explain, requested
        self._to_keep, self._on_record = to_keep, on_record
        self._copy_out, self._has_other_callers = copy_out, has_other_callers
        self.scope, self.is_compiled = Scope(unheard), False
        self._points: dict[int, Point] = {}
        self._handles: list[RemovableHandle] = []
        self._stoppable = False  # the forward runs inside `run_until_kept`, which catches _Stop
        self.forward: ModelCall | None = None
        self.on_end: list[Callable[[Any], None]] = []
        self.on_let_go: list[Callable[[], None]] = []

    def point(self, module: nn.Module) -> Point:
        """Return the point of a layer, for steps that are added before `register`."""
        return self._points.setdefault(id(module), Point(module))

    def keep(self, module: nn.Module, requests: Iterable[Requested]) -> None:
        """Add the steps that keep inputs or outputs of a layer."""
        for what, steps in (("input", self.point(module).on_receive), ("output", self.point(module).on_leave)):
            if kept := [kept for r in requests if r.what == what for kept in as_kept(r.layer, [r])]:
                steps.append(partial(self.keep_values, kept))

    def hook(self, register: Callable[..., RemovableHandle], function: Callable[..., Any], **options: Any) -> None:
        """Register a hook until the end of the block."""
        self._handles.append(register(ModelBoundHook(function, self.scope.unseen, self.is_compiled), **options))

    def register(self) -> None:
        """Register the hooks of all points, and those of the model itself."""
        self.scope.is_open = True
        for point in self._points.values():
            module, others = point.module, len(self._handles)
            # Hooks of others may call the layer, too.
            point.is_counted_on_entry = not is_simple(module) or bool(
                point.on_enter or point.on_receive or (point.on_return and point.on_leave) or any(hooks_of(module))
            )
            if point.is_counted_on_entry:
                self.hook(module.register_forward_pre_hook, partial(self._enter, point), with_kwargs=True, prepend=True)
            if point.on_receive:
                hook = partial(self._pass_arguments, point, point.on_receive)
                self.hook(module.register_forward_pre_hook, hook, with_kwargs=True)
            if point.on_return:
                hook = partial(self._leave, point, point.on_return, not point.on_leave)
                self.hook(module.register_forward_hook, hook, with_kwargs=True, always_call=True, prepend=True)
            if point.on_leave or not point.on_return:
                hook = partial(self._leave, point, point.on_leave, True)
                self.hook(module.register_forward_hook, hook, with_kwargs=True, always_call=True)
            point.hooks = len(self._handles) - others
        self.hook(self._root.register_forward_pre_hook, self._begin, prepend=True)  # before its hooks as a layer
        self.hook(self._root.register_forward_hook, self._end)
        if self.on_let_go:
            self.hook(self._root.register_forward_hook, self._finish, always_call=True)

    def close(self) -> None:
        """Remove all hooks."""
        self.scope.is_open = False
        for handle in self._handles:
            handle.remove()
        self.let_go()

    def run_until_kept(self, model: nn.Module, args: Any, kwargs: Any) -> Record:
        """Call the model, end the forward when all is kept that an earlier forward has kept, and return the record."""
        self._stoppable = True
        try:
            model(*args, **kwargs)
        except _Stop as stop:
            if stop.args != (self,):  # the model calls these Taps, and is stopped by others
                raise
            assert self.forward is not None
            self.forward.running = False
        finally:
            self._stoppable = False
            self.let_go()
        assert self.forward is not None
        return self.forward.record

    def let_go(self) -> None:
        """Let go of what the last forward holds."""
        if self.forward is not None:
            self.forward.caller = None
        for point in self._points.values():
            point.calls.clear()
        for call in self.on_let_go:
            call()

    def hand_on(self) -> None:
        """Pass the last record, now complete, to `on_record`, once."""
        forward = self.forward
        if forward is not None and not forward.running and not forward.handed_on and self._on_record is not None:
            forward.handed_on = True
            self.scope.call_users(self._on_record, forward.record)

    def running(self) -> ModelCall | None:
        """Return the forward that is running in this thread, or None."""
        forward = self.forward
        if forward is None or not forward.running or not self.scope.counts_layers():
            return None
        # A backward pass inside the forward may recompute checkpointed layers, which does not count as a call.
        return forward if graph_task() == -1 else None  # `in_backward()`, but faster

    def computing(self) -> ModelCall | None:
        """Return the forward that is running, or some of whose layers a backward pass computes again; or None."""
        if not in_backward():
            return self.running()
        return self.forward if self.scope.counts_repeated() else None

    # The hooks of the model.

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.begin(sys._getframe(2))

    def begin(self, caller: FrameType) -> None:
        """Complete the last record and start a new one; `caller` is the function that calls the model's hooks."""
        if in_backward() or not self.scope.counts_models():
            return
        if self._has_other_callers and torch.compiler.is_exporting() and has_dispatch_modes():
            return  # of this thread: the exported program would contain the hooks, and the record no values
        if self._is_inside_forward():
            return  # the model calls itself: its layers run again in the same forward
        self.hand_on()
        self.let_go()
        calls: Counter[int | str] = Counter()
        record = Record(partial(self._explain, calls), self._requested)
        self.forward = ModelCall(record, caller, calls, len(self._to_keep or ()))

    def _is_inside_forward(self) -> bool:
        """Whether the running forward is among the callers of this function; another one was interrupted."""
        forward = self.forward
        return forward is not None and forward.running and forward.caller in list(frames_of(sys._getframe()))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if (forward := self.running()) and forward.caller is sys._getframe(2):
            forward.caller = None
            for call in self.on_end:
                call(output)
            forward.running = False
            if self._to_keep is not None:
                self._to_keep |= forward.kept

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.scope.is_in_our_thread() and not self._is_inside_forward():
            self.let_go()

    # The hooks of layers. PyTorch calls a hook without keyword arguments if another thread removes it meanwhile; such a
    # call is ignored.

    def _call(self, module: nn.Module) -> Call:
        """Return a new call of a layer."""
        if forward := self.running():
            number = forward.calls.get(key := id(module), 0)
            forward.calls[key] = number + 1
            return Call(number, forward)
        if again := self.computing():
            return Call(0 if again.calls[id(module)] == 1 else UNKNOWN, None)
        return Call(None, None)

    def _enter(self, point: Point, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not self.scope.is_in_our_thread():
            return self.scope.pass_over(module, self.forward)
        point.calls.append(self._call(point.module))
        return self._pass_arguments(point, point.on_enter, module, args, kwargs) if point.on_enter else None

    def _pass_arguments(self, point: Point, steps: list[Step], module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not self.scope.is_in_our_thread() or not point.calls or kwargs is None or point.calls[-1].number is None:
            return None
        value = {**dict(enumerate(args)), **kwargs}
        passed = self._pass(steps, point.calls[-1], value)
        if passed is value:
            return None
        return tuple([passed[i] for i in range(len(args))]), {name: passed[name] for name in kwargs}

    def _leave(self, point: Point, steps: list[Step], is_last: bool, module: nn.Module, args: Any, *rest: Any) -> Any:
        if not self.scope.is_in_our_thread():
            return None if point.is_counted_on_entry else self.scope.pass_over(module, self.forward)
        if not point.is_counted_on_entry:
            call = self._call(point.module)
        elif point.calls:
            call = point.calls.pop() if is_last else point.calls[-1]
        else:
            return None
        if call.number is None or len(rest) < 2 or rest[1] is None:  # None if the layer raised
            return None
        call.arguments = (args, rest[0])
        passed = self._pass(steps, call, rest[1])
        return None if passed is rest[1] else passed

    def _pass(self, steps: list[Step], call: Call, value: Any) -> Any:
        """Pass a value through steps, which do not hear of each other's functions."""
        with self.scope.quiet():
            for step in steps:
                value = step(call, value)
        return value

    # The steps that keep values.

    def keep_values(self, kept: list[tuple[Requested, Site]], call: Call, value: Any) -> Any:
        """Keep a value of a call in the record; end the forward after the last value."""
        forward = call.forward
        if forward is None:
            return value
        for request, first in kept:
            if request.call is not None and request.call != call.number:
                continue
            if isinstance(value, Tensor) and not request.path and call.number == 0:
                self.keep_tensor(forward.record, first, request, value)
            else:
                for path, tensor in _tensors(value, request.path):
                    site = Site(first.layer, call.number, path, request.what)
                    self.keep_tensor(forward.record, site, request, tensor)
            if self._to_keep is not None:
                key = first.layer, request.what
                forward.kept[key] += 1
                forward.left -= forward.kept[key] == self._to_keep[key]
        if self._stoppable and self._to_keep and not forward.left:
            raise _Stop(self)
        return value

    def keep_tensor(self, record: Record, site: Site, request: Requested, tensor: Tensor) -> None:
        """Copy a tensor into the record, or keep the tensor itself."""
        if request.live:
            value = tensor if request.reduce is None else self.scope.call_users(request.reduce, tensor)
            record.by_site[site], record.live[site] = value, versions_of(value, site, request.reduce is not None)
        elif request.reduce is None:
            record.by_site[site] = self._copy_out(tensor, None, site)
        else:
            record.by_site[site] = self.scope.call_users(self._copy_out, tensor, request.reduce, site)


def _tensors(value: Any, within: tuple[str, ...]) -> Iterable[tuple[Path, Tensor]]:
    """Return what `tensors_in` yields; arguments that are all tensors need no search."""
    if type(value) is dict and all(isinstance(part, Tensor) for part in value.values()):
        return [((key,), part) for key, part in value.items() if within in ((), (str(key),))]
    return tensors_in(value, within)


def as_kept(layer: str, requests: Iterable[Requested]) -> list[tuple[Requested, Site]]:
    """Return requests for values of a layer, with the site of a tensor of its first call; see `Capture.keep_values`."""
    return [(request, Site(layer, 0, (), request.what)) for request in requests]
