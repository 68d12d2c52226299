"""Gradients of parameters: edit and keep them, and add up the parts in which some arrive."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from extract.errors import LayertapError
from extract.taps.capture import Capture, frames_of
from extract.taps.edits import apply_edit
from extract.taps.functions import unwatched
from extract.taps.record import Record, Site
from extract.taps.requests import TapRequest
from extract.taps.torch_internals import engine_code, graph_task, when_backward_ends

__all__ = ["ParameterGradients"]


class ParameterGradients:
    """Gradients of parameters in one block.

    Args:
        capture: the block.
        parameters: all parameters of the model by their names.
        requests: requests for gradients of parameters.
        edited: receives the id of each request whose edit was applied.
    """

    def __init__(
        self,
        capture: Capture,
        parameters: Mapping[str, nn.Parameter],
        requests: list[TapRequest],
        edited: set[int],
    ):
        self._capture, self._parameters, self._edited = capture, parameters, edited
        self._waiting = requests  # for parameters that are not hooked yet
        self._passes = _BackwardPasses()
        self._parts: dict[Site, int] = {}  # site of a gradient kept in this forward -> number of its backward pass
        capture.on_begin.append(self._begin)

    def register(self, root: nn.Module) -> None:
        """Hook the parameters; those that are frozen, or of a lazy layer, after the first forward that changes this."""
        self._hook()
        if self._waiting:
            self._capture.hook(root.register_forward_hook, self._hook)

    def ended(self) -> None:
        """Let go of the last backward pass."""
        self._passes.ended()

    def _begin(self) -> None:
        self._parts.clear()
        self._passes.ended()

    def _hook(self, *_: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            parameter = self._parameters[request.layer]
            if parameter.requires_grad and not is_lazy(parameter):
                handle = parameter.register_hook(partial(self._on_gradient, request))  # type: ignore[no-untyped-call]
                self._capture.remove_at_end(handle)
            else:
                self._waiting.append(request)

    def _on_gradient(self, request: TapRequest, gradient: Tensor) -> Tensor | None:
        capture, site = self._capture, Site(request.layer, what="grad")
        if not capture.is_in_our_thread() or not capture.block.is_of_this_task:
            return None
        if request.edit is not None:
            self._edited.add(id(request))
            with capture.block.users_code():
                return apply_edit(gradient, request.edit, site)
        if capture.forward is not None and (number := self._passes.number(capture.block.thread)) is not None:
            record = capture.forward.record
            earlier = record.by_site.get(site)
            with unwatched():
                capture.keep_tensor(record, site, request, gradient)
                self._add_earlier(record, site, request, earlier, number)
        return None

    def _add_earlier(self, record: Record, site: Site, request: TapRequest, earlier: Any, number: int) -> None:
        """Add the kept part of a gradient to what was kept before in the same backward pass.

        A parameter that several reentrant checkpoints share receives its gradient in parts.

        Args:
            record: the record.
            site: the site of the gradient.
            request: the request that keeps it.
            earlier: what was kept before; None if nothing was.
            number: number of the backward pass.

        Raises:
            LayertapError: the parts are reduced.
        """
        is_same_pass = self._parts.get(site) == number
        self._parts[site] = number
        if earlier is None or not is_same_pass:
            return
        if request.reduce is not None:
            raise LayertapError(
                f"{site} comes in parts, one for each reentrant checkpoint, which cannot be reduced one by one",
                hint="keep it without `reduce`, or checkpoint with use_reentrant=False",
            )
        with torch.no_grad():
            record.by_site[site] = earlier + record.by_site[site]


class _BackwardPasses:
    """Numbers the backward passes of a thread. A reentrant checkpoint runs passes inside another; all count as one.

    PyTorch does not say which pass is inside which; the stack of the thread that called `backward` does.
    """

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
