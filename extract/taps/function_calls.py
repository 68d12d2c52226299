"""Callbacks of `Taps` beside those of modules: of functions (`relu`, `+`, attention) and of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from extract.errors import InputError, LayertapError
from extract.taps.edits import apply_edit
from extract.taps.functions import (
    Listener,
    Write,
    attention_weights,
    operation_name,
    unwatched,
    watch_again,
)
from extract.taps.gradients import BackwardPasses, add_earlier_parts
from extract.taps.hook_calls import HookCalls, in_backward
from extract.taps.layer_names import unwrap
from extract.taps.nested import tensors_in
from extract.taps.record import Record, Site
from extract.taps.requests import HookPoint, TapRequest, number_again
from extract.taps.torch_internals import graph_task, has_function_modes

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
        # Layer -> requests for its functions, and for its attention.
        self._functions_of: dict[str, list[TapRequest]] = {}
        self._attentions_of: dict[str, list[TapRequest]] = {}
        self._closed: dict[str, InputError]
        self._is_paused = False  # the watching of functions, in an encoder
        self._waiting: list[TapRequest] = []  # for parameters that are not hooked yet
        self._handles: list[RemovableHandle] = []  # of the block

    def _hook_functions(self, hook: Callable[..., None]) -> bool:
        """Watch the functions that the model calls if a request is for them; return whether any may be watched.

        While functions are watched, PyTorch does not use its fused code for attention, which rounds otherwise. An
        `nn.TransformerEncoder` then also returns values at padded places, where its fused code leaves zeros. So none
        are watched in it until its first layer shows whether it uses that code; if nothing inside it is asked for,
        until its end. What it calls before its first layer is missed, such as the functions that prepare masks.
        """
        self._functions_of, self._attentions_of = {}, {}
        for request in self._requests:
            if request.operation:
                self._functions_of.setdefault(request.layer, []).append(request)
            elif request.what == "attention":
                self._attentions_of.setdefault(request.layer, []).append(request)
        is_asked = bool(self._functions_of or self._attentions_of)
        if is_asked:
            self._listener = Listener(self._on_operation, self._on_write, self._writes_into_a_copy)
            hook(self._layers[""].register_forward_pre_hook, self._watch_functions)
        elif not any(r.layer not in self._parameters and (r.edit or "grad" in r.what) for r in self._requests):
            return False
        modules: dict[int, tuple[nn.Module, list[str]]] = {}
        for name, module in self._layers.items():
            if name not in self._closed:
                modules.setdefault(id(module), (module, []))[1].append(name)
        for module, names in modules.values():
            if is_asked:
                hook(module.register_forward_pre_hook, partial(self._push, names))
                hook(module.register_forward_hook, self._pop, always_call=True)
            if isinstance(module, nn.TransformerEncoder):
                hook(module.register_forward_pre_hook, self._pause)
                hook(module.register_forward_hook, self._go_on, always_call=True)
                for layer in module.layers[:1] if any(map(self._is_asked_inside, names)) else ():
                    hook(unwrap(layer).register_forward_pre_hook, partial(self._go_on_inside, names[0]))
        return True

    def _is_asked_inside(self, encoder: str) -> bool:
        """Whether a request is for functions, attention or gradients inside a layer of this name."""
        for request in self._requests:
            inside, around = _is_in(request.layer, encoder), _is_in(encoder, request.layer)
            is_grad = request.what == "grad" and request.layer in self._layers and not around
            if (inside and (request.operation or is_grad)) or (request.what == "attention" and (inside or around)):
                return True
        return False

    def _pause(self, encoder: Any, args: Any) -> None:
        """Watch no functions in an encoder that may use its fused code for padded batches."""
        is_possible = getattr(encoder, "use_nested_tensor", False) and not all(m.training for m in encoder.layers)
        if is_possible and self._running() and self._is_watching:
            self._is_paused = True
            self._unwatch()

    def _go_on(self, *_: Any) -> None:
        """Watch functions again."""
        if self._is_paused:
            self._is_paused = False
            self._watch_functions()

    def _go_on_inside(self, encoder: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Watch functions again in the first layer of an encoder.

        Raises:
            InputError: the encoder uses its fused code for padded batches.
        """
        if self._running() and args and isinstance(args[0], Tensor) and args[0].is_nested:
            name = f"layer {encoder!r}" if encoder else "the model"
            raise InputError(
                f"{name} computes this padded batch as a nested tensor; functions, attention and gradients inside "
                "it cannot be watched without changing its output",
                hint="set its use_nested_tensor to False first; it then returns values at padded places, not zeros",
            )
        self._go_on()

    def _push(self, names: list[str], module: nn.Module, args: Any) -> None:
        if forward := self._computing():
            again = in_backward()
            if again and forward.again_in != (task := graph_task()):
                forward.again.clear()  # of a backward pass that was interrupted
                forward.again_in = task
            if again and not forward.again:
                forward.end_again = watch_again(self._listener)
            if not (again or self._is_paused or has_function_modes()):
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

    def _writes_into_a_copy(self, function: Any, write: Write) -> bool:
        return self._edits_function(function) or super()._writes_into_a_copy(function, write)

    def _edits_function(self, function: Any) -> bool:
        """Whether a call of this function, now, has its result edited."""
        forward, name = self._computing(), operation_name(function)
        if not self._functions_of or forward is None or name is None:
            return False
        if function.__name__ == "__setitem__" or not (modules := forward.modules(in_backward())):
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


def _is_in(layer: str, other: str) -> bool:
    """Whether a layer is another one or inside it, by their names."""
    return not other or f"{layer}.".startswith(f"{other}.")
