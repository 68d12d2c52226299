"""Functions without a module (`relu`, `+`, attention): keep and edit their results, and watch their gradients."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from extract.errors import InputError, LayertapError
from extract.taps.capture import Call, Capture, as_kept
from extract.taps.functions import (
    Listener,
    attention_weights,
    is_watched,
    operation_name,
    unwatch,
    unwatched,
    watch,
    written_by,
)
from extract.taps.nested import tensors_in
from extract.taps.record import Requested
from extract.taps.scope import TRACED, frames_of, in_backward
from extract.taps.surgery import Requests, Surgery
from extract.taps.torch_internals import has_function_modes

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
        self._capture, self._surgery, self._layers = capture, surgery, layers
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
        capture.on_let_go.append(self._let_go)

    def _let_go(self) -> None:
        self._stack.clear()
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
        if in_backward():
            self._check_not_edited(names)
        elif self._capture.running():
            if not has_function_modes():
                # A mode is off inside the functions that it watches: torch.cond is one.
                self._capture.scope.unseen[id(module)] = TRACED
            # The frame of the module's call, which PyTorch's function `inner` is called in.
            self._running_layers().append((names, sys._getframe(3)))
        else:
            self._capture.scope.pass_over(module, self._capture.forward)

    def _check_not_edited(self, names: list[str]) -> None:
        """Check that no edits are lost where a backward pass computes a layer again: functions are not watched there.

        Raises:
            LayertapError: a function of the layer is edited.
        """
        edited = [name for name in names if any(r.edit is not None for r in self._functions_of.get(name, ()))]
        if edited and self._capture.computing():
            raise LayertapError(
                f"a function of layer {edited[0]!r} is edited, and checkpointing computes the layer again without it",
                hint="edit the output of a layer",
            )

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._capture.running() and (layers := self._running_layers()):
            layers.pop()

    def _running_layers(self) -> list[Running]:
        """Return `_stack`, without layers that a `BaseException` has left: PyTorch calls no hook for it."""
        while self._stack and not any(frame is self._stack[-1][1] for frame in frames_of(sys._getframe())):
            self._stack.pop()
        return self._stack

    def _on_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        forward, name = self._capture.running(), operation_name(function)
        if forward is None or name is None or not (layers := self._running_layers()):
            return result
        attended = {
            layer: self._attentions_of[layer] for names, _ in layers for layer in names if layer in self._attentions_of
        }
        if attended:
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
                call = Call(forward.calls[key], forward)
                forward.calls[key] += 1
                with unwatched():
                    result = self._pass_result(key, requests, call, written_by(function, args, kwargs), kwargs, result)
        return result

    def _pass_result(
        self, key: str, requests: list[Requested], call: Call, written: Sequence[Tensor], kwargs: Any, result: Any
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
