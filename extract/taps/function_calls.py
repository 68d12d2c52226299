"""Functions without a module (`relu`, `+`, attention): keep and edit their results, and watch their gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from extract.errors import InputError, LayertapError
from extract.taps.capture import Call, Capture, as_kept, frames_of, in_backward, number_again
from extract.taps.functions import (
    Listener,
    attention_weights,
    is_watched,
    operation_name,
    unwatch,
    unwatched,
    watch,
    watch_again,
    written_by,
)
from extract.taps.nested import tensors_in
from extract.taps.record import Requested
from extract.taps.surgery import Requests, Surgery
from extract.taps.torch_internals import TRACED, graph_task, has_function_modes

__all__ = ["FunctionCalls"]

Running = tuple[list[str], FrameType]  # names of a running layer, and the frame of its call


class FunctionCalls:
    """Functions that layers call, and attention, in one block.

    Args:
        capture: the block.
        surgery: edits and watches results.
        layers: all layers of the model by their names.
        requests: all requests of the block.

    While functions are watched, PyTorch does not use its fused code for attention, which rounds otherwise. An
    `nn.TransformerEncoder` would then also return values at padded places, where its fused code leaves zeros: such a
    call is refused.
    """

    def __init__(
        self, capture: Capture, surgery: Surgery, layers: Mapping[str, nn.Module], requests: Sequence[Requested]
    ):
        self._capture, self._surgery, self._layers, self._requests = capture, surgery, layers, requests
        # Layer -> requests for its functions, and for its attention.
        self._functions_of: dict[str, list[Requested]] = {}
        self._attentions_of: dict[str, list[Requested]] = {}
        for request in requests:
            if request.operation:
                self._functions_of.setdefault(request.layer, []).append(request)
            elif request.what == "attention":
                self._attentions_of.setdefault(request.layer, []).append(request)
        self._listener = Listener(self._on_operation)
        self._stack: list[Running] = []  # the innermost last
        self._again: list[Running] = []  # the same of the layers that a backward pass computes again
        self._again_in = -1  # the backward pass (graph task) that computes them
        self._end_again: Callable[[], None] = lambda: None  # ends the watching of functions meanwhile
        capture.on_let_go.append(self._let_go)

    def _let_go(self) -> None:
        self._stack.clear()
        self._again.clear()
        unwatch(self._listener)

    def register(self) -> None:
        """Register hooks on the layers that a request needs; scripted ones take none."""
        is_asked = bool(self._functions_of or self._attentions_of)
        hook = self._capture.hook
        if is_asked:
            hook(self._layers[""].register_forward_pre_hook, self._watch)
        modules: dict[int, tuple[nn.Module, list[str]]] = {}
        for name, module in self._layers.items():
            if not isinstance(module, torch.jit.ScriptModule):
                modules.setdefault(id(module), (module, []))[1].append(name)
        for module, names in modules.values():
            if is_asked:
                hook(module.register_forward_pre_hook, partial(self._push, names))
                hook(module.register_forward_hook, self._pop, always_call=True)
            if isinstance(module, nn.TransformerEncoder):
                hook(module.register_forward_pre_hook, partial(self._refuse_fused, names[0]), with_kwargs=True)

    def _watch(self, *_: Any) -> None:
        """Watch the functions of this thread until the end of the forward, if it is running the model."""
        if self._capture.running():
            watch(self._listener)

    def _refuse_fused(self, name: str, encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a padded batch where functions are watched and the encoder would use its fused code without that.

        Raises:
            InputError: both are so.
        """
        watched = is_watched(self._listener) or is_watched(self._surgery.listener)
        arguments = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | kwargs
        if watched and self._capture.running() and _is_fused(encoder, arguments):
            raise InputError(
                f"{f'layer {name!r}' if name else 'the model'} computes this padded batch as a nested tensor; "
                "functions, attention, gradients and edits cannot be had in this forward without changing its output",
                hint="set its use_nested_tensor to False first; it then returns values at padded places, not zeros",
            )

    def _push(self, names: list[str], module: nn.Module, args: Any) -> None:
        if not self._capture.computing():
            self._capture.pass_over(module)
            return
        again = in_backward()
        if again and self._again_in != (task := graph_task()):
            self._again.clear()  # of a backward pass that was interrupted
            self._again_in = task
        if again and not self._again:
            self._end_again = watch_again(self._listener)
        if not (again or has_function_modes()):
            # A mode is off inside the functions that it watches: torch.cond is one.
            self._capture.unseen[id(module)] = TRACED
        # The frame of the module's call, which PyTorch's function `inner` is called in.
        self._running_layers(again).append((names, sys._getframe(3)))

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._capture.computing() and (layers := self._running_layers(in_backward())):
            layers.pop()
            if layers is self._again and not layers:
                self._end_again()

    def _running_layers(self, again: bool) -> list[Running]:
        """Return `_again` or `_stack`, without layers that a `BaseException` has left: PyTorch calls no hook for it."""
        layers = self._again if again else self._stack
        while layers and not any(frame is layers[-1][1] for frame in frames_of(sys._getframe())):
            layers.pop()
        return layers

    def _on_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        forward, name, again = self._capture.computing(), operation_name(function), in_backward()
        if forward is None or name is None or not (layers := self._running_layers(again)):
            return result
        attended = {
            layer: self._attentions_of[layer] for names, _ in layers for layer in names if layer in self._attentions_of
        }
        if attended and not again:
            with unwatched():
                weights = attention_weights(function, args, kwargs, result)
            for layer, requests in attended.items() if weights is not None else ():
                call = Call(forward.calls[layer], forward)
                self._capture.keep_values(as_kept(layer, requests), call, weights)
                forward.calls[layer] += 1
        for layer in layers[-1][0]:
            key = f"{layer}/{name}"
            requests = [r for r in self._functions_of.get(layer, ()) if fnmatchcase(name, r.operation)]
            if requests and any(True for _ in tensors_in(result)):
                forward.calls[key] += not again
                number = number_again(forward.calls, key) if again else forward.calls[key] - 1
                with unwatched():
                    call, written = Call(number, None if again else forward), written_by(function, args, kwargs)
                    result = self._pass_result(key, requests, call, kwargs, [*written], result)
        return result

    def _pass_result(
        self,
        key: str,
        requests: list[Requested],
        call: Call,
        kwargs: dict[str, Any],
        written: list[Tensor],
        result: Any,
    ) -> Any:
        """Edit, watch and keep the result of a function, and return what the model continues with."""
        edits = Requests([r for r in requests if r.edit is not None and r.what == "output"], key)
        gradients = Requests([r for r in requests if r.what == "grad"], key)
        if edits.is_for(call.number):
            if kwargs.get("out") is not None:
                raise LayertapError(
                    f"{key} cannot be edited: the layer gives it a tensor to write into (out=)",
                    hint="edit the output of the layer",
                )
            result = self._surgery.edit_result(edits, call, written, result)
        if gradients:
            result = self._surgery.watch_output(gradients, call, result)
        kept = [r for r in requests if r.edit is None and r.what == "output"]
        return self._capture.keep_values(as_kept(key, kept), call, result)


def _is_fused(encoder: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether an `nn.TransformerEncoder` may compute a padded batch as a nested tensor, with zeros at padded places."""
    if arguments.get("src_key_padding_mask") is None or not getattr(encoder, "use_nested_tensor", False):
        return False
    needs_gradients = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in encoder.parameters())
    return not (encoder.training or needs_gradients)
