"""Callbacks of `Taps` beside those of modules: of functions (`relu`, `+`, attention) and of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from extract.taps.edits import apply_edit
from extract.taps.functions import Listener, attention_weights, operation_name, unwatched, watch_again
from extract.taps.gradients import BackwardPasses, add_earlier_parts
from extract.taps.hook_calls import HookCalls, in_backward
from extract.taps.nested import tensors_in
from extract.taps.record import Record, Site
from extract.taps.requests import HookPoint, TapRequest, number_again

__all__ = ["FunctionAndParameterCalls"]


class FunctionAndParameterCalls(HookCalls):
    """The part of `Taps` that acts when a layer calls a function, or when a parameter receives its gradient.

    Args:
        model: see `HookCalls`.
        stop: see `HookCalls`.
        on_record: see `HookCalls`.
    """

    def __init__(self, model: nn.Module, stop: bool, on_record: Callable[[Record], None] | None):
        super().__init__(model, stop, on_record)
        self._listener = Listener()  # chosen when the block starts

    def _push(self, names: list[str], module: nn.Module, args: Any) -> None:
        if forward := self._computing():
            again = in_backward()
            if again and forward.again_in != (task := torch._C._current_graph_task_id()):
                forward.again.clear()  # of a backward pass that was interrupted
                forward.again_in = task
            if again and not forward.again:
                forward.end_again = watch_again(self._listener)
            # The frame of the module's call, which PyTorch's function `inner` is called in.
            forward.modules(again).append((names, sys._getframe(2)))

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if (forward := self._computing()) and (modules := forward.modules(in_backward())):
            modules.pop()
            if modules is forward.again and not modules:
                forward.end_again()

    def _on_write(self, tensor: Tensor, written: set[int]) -> list[Callable[[], object]]:
        forward = self._computing()
        return forward.before_write(tensor, written) if forward is not None and forward.stand_ins else []

    def _edits_function(self, function: Any) -> bool:
        """Whether a call of this function, now, has its result edited."""
        forward, name = self._computing(), operation_name(function)
        if forward is None or name is None or not (modules := forward.modules(in_backward())):
            return False
        return any(
            request.edit is not None and request.layer in modules[-1][0] and fnmatchcase(name, request.operation)
            for request in self._requests
            if request.operation
        )

    def _on_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        forward, name, again = self._computing(), operation_name(function), in_backward()
        if forward is None or name is None or not (modules := forward.modules(again)):
            return result
        attended = [
            request
            for request in self._requests
            if request.what == "attention" and any(request.layer in names for names, _ in modules)
        ]
        if attended and not again:
            with unwatched():
                weights = attention_weights(function, args, kwargs, result)
            for layer in dict.fromkeys(request.layer for request in attended if weights is not None):
                point = HookPoint([(layer, request) for request in attended if request.layer == layer])
                self._keep_values(point, forward, forward.attentions[layer], weights, "attention")
                forward.attentions[layer] += 1
        for layer in modules[-1][0]:
            requests = [
                (f"{layer}/{name}", request)
                for request in self._requests
                if request.operation and request.layer == layer and fnmatchcase(name, request.operation)
            ]
            if requests and any(True for _ in tensors_in(result)):
                key = f"{layer}/{name}"
                forward.operations[key] += not again
                number = number_again(forward.operations, key) if again else forward.operations[key] - 1
                point = HookPoint(requests)
                result = self._edit(point, number, result, "output")
                result = self._watch(point, number, result, "output", self._watched_tensor)
                self._keep_values(point, None if again else forward, number, result, "output")
        return result

    def _on_parameter(self, request: TapRequest, gradient: Tensor) -> Tensor | None:
        site, block, forward = Site(request.layer, what="grad"), self._block, self._forward
        if block is None or not self._is_our_thread() or not block.is_of_this_task:
            return None
        if request.edit is not None:
            self._edited.add(id(request))
            with block.users_code():
                return apply_edit(gradient, request.edit, site)
        if forward is not None:
            self._passes = self._passes or BackwardPasses()
            if (number := self._passes.number(block.thread)) is None:
                return None
            earlier = forward.record.by_site.get(site)
            self._keep(forward, site, request, gradient)
            add_earlier_parts(forward, site, request, earlier, number)
        return None
