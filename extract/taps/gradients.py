"""Gradients: choose a tensor that is safe to hook, edit and keep its gradient, and add up those of parameters."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from extract.errors import LayertapError
from extract.taps.block import Block
from extract.taps.copies import copied
from extract.taps.edits import apply_edit
from extract.taps.functions import unwatched
from extract.taps.record import Reduce, Site, What
from extract.taps.requests import Call, HookPoint, ModelCall, TapRequest
from extract.taps.stand_ins import StandIn, StandInError, StandIns
from extract.taps.torch_internals import engine_code, graph_task, when_backward_ends

__all__ = [
    "BackwardPasses",
    "CopyOut",
    "add_earlier_parts",
    "frames_of",
    "on_gradient",
    "separated",
    "stand_in",
    "to_watch",
]

CopyOut = Callable[[Tensor, Reduce | None, Site], Any]  # reduces and copies a kept tensor


def to_watch(
    point: HookPoint, side: What, tensor: Tensor, site: Site, forward: ModelCall, *, stands_in: bool
) -> Tensor | None:
    """Return the tensor to hook and to pass on to the model: the given tensor if that is safe, else a copy.

    Args:
        point: the point that the tensor passes.
        side: "input" for an input of the layer; any other value means an output.
        tensor: the input or output.
        site: the site of the gradient, for errors.
        forward: the running forward.
        stands_in: whether a copy of an output may replace it where a hook on the output itself is not safe.

    Returns:
        The tensor, or None if its gradient cannot be watched.
    """
    if side == "input":
        # Only this layer reads the copy, so the copy's gradient is the gradient through this layer alone.
        known = [copy for given, copy in point.calls[-1].watched if given is tensor]
        try:
            copy = known[0] if known else copied(tensor)
        except RuntimeError as error:  # one of several views of a tensor that was written to, which cannot be read
            raise StandInError(site) from error
        if not known:
            point.calls[-1].pass_on(stand_in(forward, site, tensor, copy, follows=True))
        tensor = copy
    elif not stands_in:
        if tensor.is_leaf:  # a hook on it would outlive this forward
            return None
    else:
        tensor = separated(point, tensor, site, forward)
    forward.see(tensor)
    return tensor


def separated(point: HookPoint, output: Tensor, site: Site, forward: ModelCall) -> Tensor:
    """Return the output of a layer if a hook on it is safe, else a copy that is passed on in its place.

    Args:
        point: the point that the output passes.
        output: the output.
        site: the site of the gradient, for errors.
        forward: the running forward.
    """
    call = point.calls[-1] if point.calls else None
    if call is not None and any(output is copy for copy in call.separated):
        return output
    if not (output.is_leaf or output._is_view() or forward.has_seen(output) or _has_other_readers(output, call)):
        return output
    # A hook on a leaf would outlive this forward. A hook on a view is lost when the view is written to in place.
    # A tensor that a layer returns unchanged, from its input or from a layer inside it, has other readers. So may
    # one of several outputs: an LSTM cell computes its output from its cell state.
    copy = copied(output)
    stand_in(forward, site, output, copy)
    if call is not None:
        call.separated.append(copy)
    return copy


def stand_in(forward: ModelCall, site: Site, given: Tensor, tensor: Tensor, *, follows: bool = False) -> StandIn | None:
    """Follow the writes into a tensor that the model continues with in place of another; see `StandIns.add`."""
    if forward.stand_ins is None:
        forward.stand_ins = StandIns()
    if graph_task() != -1:
        forward.stand_ins.check_again(site)
        return None
    forward.watch()
    return forward.stand_ins.add(site, given, tensor, follows=follows)


def on_gradient(
    tensor: Tensor,
    requests: Sequence[tuple[Site, TapRequest]],
    block: Block,
    forward: ModelCall,
    copy_out: CopyOut,
    edited_requests: set[int],
) -> None:
    """Register a hook that edits and keeps the gradient of a tensor while the `with` block is open.

    Args:
        tensor: the tensor.
        requests: what to keep and edit.
        block: the `with` block.
        forward: the call of the model that computed the tensor.
        copy_out: reduces and copies a kept gradient.
        edited_requests: receives the id of each request whose edit was applied.
    """
    edits = [(site, request) for site, request in requests if request.edit is not None]
    # The graph must not keep the record alive, whose live tensors keep the graph alive.
    record = weakref.ref(forward.record)

    def edited(gradient: Tensor) -> Tensor | None:
        if not block.open:
            return None
        with block.users_code():
            for site, request in edits:
                assert request.edit is not None
                gradient = apply_edit(gradient, request.edit, site)
                edited_requests.add(id(request))
            for site, request in requests:
                if request.edit is None and (kept := record()) is not None:
                    kept.by_site[site] = copy_out(gradient, request.reduce, site)
        return gradient if edits else None

    tensor.register_hook(edited)  # type: ignore[no-untyped-call]


def _has_other_readers(tensor: Tensor, call: Call | None) -> bool:
    """Whether the call of a layer received this very tensor as an input, or returns others beside it."""
    return call is not None and (call.returns_several or any(tensor is given for given in call.inputs))


class BackwardPasses:
    """Numbers the backward passes of a thread. A reentrant checkpoint runs passes inside another; all count as one."""

    def __init__(self) -> None:
        self._number = 0
        self._task = -1  # the graph task, one for each pass inside another
        self._frame: FrameType | None = None  # of the outermost pass

    def number(self, thread: int) -> int | None:
        """Return the number of the backward pass that was started in a thread and is running.

        The result is None for `torch.autograd.grad` inside another pass: what it computes is no part of the outer one.
        """
        task = graph_task()
        if task == self._task:
            return self._number
        passes = [
            frame
            for top in (sys._getframe(), sys._current_frames().get(thread))  # on a GPU, two threads
            for frame in frames_of(top)
            if frame.f_code is engine_code
        ]
        innermost, outermost = (passes[0], passes[-1]) if passes else (None, None)
        if innermost is not None and innermost is not outermost:
            caller = innermost.f_back
            if caller is not None and caller.f_code is torch.autograd.grad.__code__:
                return None
        if innermost is outermost:
            when_backward_ends(self.ended)
        if outermost is None or outermost is not self._frame:
            self._number += 1
        self._task, self._frame = task, outermost
        return self._number

    def ended(self) -> None:
        """Let go of the last pass, whose frame keeps variables of its callers alive."""
        self._frame = None


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def add_earlier_parts(forward: ModelCall, site: Site, request: TapRequest, earlier: Any, number: int) -> None:
    """Add the kept part of a parameter's gradient to what was kept before in the same backward pass.

    A parameter that several reentrant checkpoints share receives its gradient in parts.

    Args:
        forward: the call of the model.
        site: the site of the gradient.
        request: the request that keeps it.
        earlier: what was kept before; None if nothing was.
        number: number of the backward pass.

    Raises:
        LayertapError: the parts are reduced.
    """
    same_pass = forward.parameters_in.get(site) == number
    forward.parameters_in[site] = number
    if earlier is None or not same_pass:
        return
    if request.reduce is not None:
        raise LayertapError(
            f"{site} comes in parts, one for each reentrant checkpoint, which cannot be reduced one by one",
            hint="keep it without `reduce`, or checkpoint with use_reentrant=False",
        )
    with unwatched(), torch.no_grad():
        forward.record.by_site[site] = earlier + forward.record.by_site[site]
