"""Gradients of parameters: edit and keep them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from extract.errors import LayertapError
from extract.taps.capture import Capture, frames_of
from extract.taps.copies import edited_by
from extract.taps.functions import unwatched
from extract.taps.record import Site
from extract.taps.requests import TapRequest
from extract.taps.torch_internals import engine_code

__all__ = ["ParameterGradients"]


class ParameterGradients:
    """Gradients of parameters in one block.

    Args:
        capture: the block.
        parameters: all parameters of the model by their names.
        requests: requests for gradients of parameters, edits first.
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

    def register(self, root: nn.Module) -> None:
        """Hook the parameters; those that are frozen, or of a lazy layer, after the first forward that changes this."""
        self._hook()
        if self._waiting:
            self._capture.hook(root.register_forward_hook, self._hook)

    def _hook(self, *_: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            parameter = self._parameters[request.layer]
            if parameter.requires_grad and not is_lazy(parameter):
                self._capture.hook(parameter.register_hook, partial(self._on_gradient, request))
            else:
                self._waiting.append(request)

    def _on_gradient(self, request: TapRequest, gradient: Tensor) -> Tensor | None:
        capture, site = self._capture, Site(request.layer, what="grad")
        if not capture.is_in_our_thread() or not capture.block.is_of_this_task:
            return None
        # A pass inside another one: PyTorch does not say so; the stacks do. On a GPU, the passes have two threads.
        passes = [
            frame
            for top in dict.fromkeys((sys._getframe(), sys._current_frames().get(capture.block.thread)))
            for frame in frames_of(top)
            if frame.f_code is engine_code
        ]
        if len(passes) > 1:
            caller = passes[0].f_back
            if caller is not None and caller.f_code is torch.autograd.grad.__code__:
                return None  # what it computes is no part of the outer pass
            raise LayertapError(
                f"{site} comes in parts, one for each reentrant checkpoint", hint="checkpoint with use_reentrant=False"
            )
        if request.edit is not None:
            self._edited.add(id(request))
            with capture.block.users_code():
                return edited_by(gradient, request.edit, site)
        if capture.forward is not None:
            with unwatched():
                capture.keep_tensor(capture.forward.record, site, request, gradient)
        return None
