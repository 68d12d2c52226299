"""Callbacks of `Taps` beside those of modules: of functions (`relu`, `+`, attention) and of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from extract.errors import LayertapError
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
        # Layer -> requests for its functions, and for its attention.
        self._functions_of: dict[str, list[TapRequest]] = {}
        self._attentions_of: dict[str, list[TapRequest]] = {}
        self._waiting: list[TapRequest] = []  # for parameters that are not hooked yet
        self._handles: list[RemovableHandle] = []  # of the block

    def _listen(self) -> Listener:
        """Return what is told of each function."""
        self._functions_of, self._attentions_of = {}, {}
        for request in self._requests:
            if request.operation:
                self._functions_of.setdefault(request.layer, []).append(request)
            elif request.what == "attention":
                self._attentions_of.setdefault(request.layer, []).append(request)
        self._listener = Listener(self._on_operation, self._edits_function, self._on_write)
        return self._listener

    def _push(self, names: list[str], module: nn.Module, args: Any) -> None:
        if forward := self._computing():
            again = in_backward()
            if again and forward.again_in != (task := torch._C._current_graph_task_id()):
                forward.again.clear()  # of a backward pass that was interrupted
                forward.again_in = task
            if again and not forward.again:
                forward.end_again = watch_again(self._listener)
            if not again and not torch._C._len_torch_function_stack():
                self._traced.add(id(module))  # a mode is off inside the functions that it watches: torch.cond is one
            # The frame of the module's call, which PyTorch's function `inner` is called in.
            forward.modules(again).append((names, sys._getframe(3)))
        else:
            self._pass_over(module)

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
            request.edit is not None and fnmatchcase(name, request.operation)
            for layer in modules[-1][0]
            for request in self._functions_of.get(layer, ())
        )

    def _on_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        forward, name, again = self._computing(), operation_name(function), in_backward()
        if forward is None or name is None or not (modules := forward.modules(again)):
            return result
        attended = {
            layer: self._attentions_of[layer] for names, _ in modules for layer in names if layer in self._attentions_of
        }
        if attended and not again:
            with unwatched():
                weights = attention_weights(function, args, kwargs, result)
            for layer, requests in attended.items() if weights is not None else ():
                point = HookPoint([(layer, request) for request in requests])
                self._keep_values(point, forward, forward.attentions[layer], weights, "attention")
                forward.attentions[layer] += 1
        for layer in modules[-1][0]:
            key = f"{layer}/{name}"
            requests = [r for r in self._functions_of.get(layer, ()) if fnmatchcase(name, r.operation)]
            if requests and any(True for _ in tensors_in(result)):
                forward.operations[key] += not again
                number = number_again(forward.operations, key) if again else forward.operations[key] - 1
                point = HookPoint([(key, request) for request in requests])
                if kwargs.get("out") is not None and point.edits_output(number):
                    raise LayertapError(
                        f"{key} cannot be edited: the layer gives it a tensor to write into (out=)",
                        hint="edit the output of the layer",
                    )
                result = self._edit(point, number, result, "output")
                result = self._watch(point, number, result, "output", self._watched_tensor)
                self._keep_values(point, None if again else forward, number, result, "output")
        return result

    def _hook_parameters(self, *_: Any) -> None:
        """Hook the parameters that are neither frozen nor of a lazy layer that has not run."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            parameter = self._parameters[request.layer]
            if parameter.requires_grad and not is_lazy(parameter):
                handle = parameter.register_hook(partial(self._on_parameter, request))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            else:
                self._waiting.append(request)

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
