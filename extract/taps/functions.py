"""Observe operations without a module while a model runs: functions, operators, attention.

Forward hooks do not see `relu`, `+` or `flatten` called as functions. A `TorchFunctionMode` sees each call of PyTorch's
public functions with its arguments and result, and does not change the call itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from extract.taps.nested import tensors_in
from extract.taps.torch_internals import (
    function_modes,
    has_function_modes,
    memory_of,
    pop_function_mode,
    push_function_mode,
)

__all__ = [
    "Listener",
    "Write",
    "attention_weights",
    "follow_write",
    "is_watched",
    "operation_name",
    "unwatch",
    "unwatched",
    "version_of",
    "watch",
    "write_into",
    "written_by",
]

# Common names of operators, which PyTorch names __radd__ and the like.
_OPERATORS = {"truediv": "div", "getitem": "index"} | {f"r{name}": name for name in ("add", "mul", "sub", "div", "pow")}
_IN_PLACE_OPERATORS = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imatmul__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})  # fmt: skip
# Their names end like those of functions that write, but they write no values.
_NOTHING_WRITTEN = frozenset({
    "detach_", "requires_grad_", "rename_", "resize_", "resize_as_", "set_", "share_memory_",
})  # fmt: skip
_NO_OPERATIONS = frozenset({"__get__", "__set__", "__delete__", "size", "dim", "stride"})


@dataclasses.dataclass(frozen=True, eq=False)
class Listener:
    """Receives the function calls of a thread.

    Attributes:
        on_call: receives function, arguments, keyword arguments and result after each call; returns the result, or what
            replaces it.
        before_call: receives function, arguments and keyword arguments before each call.
        on_write: receives what a function is about to write into, and adds the memory of tensors that change with it;
            returns what is to be done after the function.
    """

    on_call: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any] | None = None
    before_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] = lambda function, args, kwargs: None
    on_write: Callable[[Write], Iterable[Callable[[], object]]] = lambda write: ()


class _Watch(TorchFunctionMode):
    """Function mode that tells each listener of each function."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling() or _state.busy:  # the compiler traces this, too
            return func(*args, **kwargs)
        for listener in self.listeners:
            listener.before_call(func, args, kwargs)
        written = written_by(func, args, kwargs)
        writes = [(tensor, version_of(tensor), self.before_write(Write(tensor))) for tensor in written]
        result = func(*args, **kwargs)
        for listener in self.listeners:
            if listener.on_call is not None:
                result = listener.on_call(func, args, kwargs, result)
        for tensor, version, actions in writes:
            # `dropout(x, training=False, inplace=True)` writes nothing.
            if version is None or version != version_of(tensor):
                for action in actions:
                    action()
        return result

    def before_write(self, write: Write) -> list[Callable[[], object]]:
        """Tell the listeners of a write, and of writes that follow from it; return what is to be done after it."""
        actions: list[Callable[[], object]] = []
        known = 0
        while len(write.reached) > known:
            known = len(write.reached)
            for listener in self.listeners:
                actions += listener.on_write(write)
        return actions


class Write:
    """A write into a tensor, and what follows from it.

    Attributes:
        tensor: what the model writes into.
        reached: memory (`memory_of`) that changes with it -> whether all that is in it is to change in the same way.
        values: memory -> after the write, a tensor in this memory, or with the values of one that was in it.
        may_be_hidden: whether the tensor may be the `.data` of another one.
    """

    def __init__(self, tensor: Tensor):
        self.reached = {memory_of(tensor): True}
        self.values = {memory_of(tensor): tensor}
        self.tensor = tensor
        # A write through `.data` is hidden from autograd.
        self.may_be_hidden = not (tensor.requires_grad or tensor._is_view())

    def repeat(self, tensor: Tensor, values: Tensor) -> None:
        """Write values into another tensor, in the same way."""
        if self.may_be_hidden and tensor.requires_grad:
            tensor.data.copy_(values.data)
        else:
            write_into(tensor, values)


def follow_write(tensor: Tensor) -> None:
    """Do what follows from a write that no listener has been told of."""
    if _state.watch is not None:
        for action in _state.watch.before_write(Write(tensor)):
            action()


def write_into(tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor; autograd differentiates this unless the tensor is a parameter."""
    # A layer can write into a parameter only without autograd.
    with torch.no_grad() if tensor.is_leaf and tensor.requires_grad else contextlib.nullcontext():
        tensor.copy_(values)


def version_of(tensor: Tensor) -> int | None:
    """Return the version of a tensor, which each write changes; None in inference mode, which counts no writes."""
    return None if tensor.is_inference() else tensor._version


class _State(threading.local):
    """Thread-local state: the one mode for all listeners, and whether layertap's own code is running (`busy`)."""

    def __init__(self) -> None:
        self.watch: _Watch | None = None
        self.busy = False


_state = _State()


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """Return the tensors that the function writes into: `add_`, `+=`, `relu(x, inplace=True)`, `out=`."""
    if kwargs and (out := kwargs.get("out")) is not None:
        return [tensor for _, tensor in tensors_in(out)]
    name: str = getattr(function, "__name__", "")
    if not args:
        return ()
    if name.endswith("_"):
        if name in _IN_PLACE_OPERATORS or (not name.endswith("__") and name not in _NOTHING_WRITTEN):
            return [tensor for _, tensor in tensors_in(args[0])]  # a list for `torch._foreach_add_`
        return ()
    if not isinstance(function, FunctionType) or not isinstance(args[0], Tensor):
        return ()
    if not (kwargs.get("inplace") or any(given is True for given in args)):
        return ()
    return [args[0]] if inspect.signature(function).bind(*args, **kwargs).arguments.get("inplace") else ()


def watch(listener: Listener) -> None:
    """Tell the listener of each function call of this thread, until `unwatch`."""
    watch = _state.watch
    if watch is None:
        watch = _state.watch = _Watch()
        # Below all others: a mode that was entered before this one, inside the model, is left before this one.
        others = [pop_function_mode() for _ in range(has_function_modes())]  # type: ignore[no-untyped-call]
        for mode in (watch, *reversed(others)):
            push_function_mode(mode)  # type: ignore[no-untyped-call]
    if listener not in watch.listeners:
        watch.listeners.append(listener)


def unwatch(listener: Listener) -> None:
    """Tell the listener of no further function call of this thread."""
    watch = _state.watch
    if watch is not None and listener in watch.listeners:
        watch.listeners.remove(listener)
        if not watch.listeners:
            _leave(watch)
            _state.watch = None


def is_watched(listener: Listener) -> bool:
    """Whether the listener is told of the function calls of this thread."""
    return _state.watch is not None and listener in _state.watch.listeners


def _leave(mode: TorchFunctionMode) -> None:
    """Exit a function mode, whatever modes were entered after it; none if PyTorch has discarded it."""
    if mode not in function_modes():
        return
    later = []
    while (last := pop_function_mode()) is not mode:  # type: ignore[no-untyped-call]
        later.append(last)
    for other in reversed(later):
        push_function_mode(other)  # type: ignore[no-untyped-call]


class unwatched:  # noqa: N801  it is used as a function
    """Context manager: hide layertap's own operations from the listeners of this thread."""

    # A mode costs time at each access to a tensor, even if it does nothing: it is taken off where it is on top.
    def __enter__(self) -> None:
        self._busy, self._watch = _state.busy, _state.watch
        if self._watch is not None and not self._busy and has_function_modes():
            if (top := pop_function_mode()) is self._watch:  # type: ignore[no-untyped-call]
                return
            push_function_mode(top)  # type: ignore[no-untyped-call]
        self._watch, _state.busy = None, True

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            push_function_mode(self._watch)  # type: ignore[no-untyped-call]
        _state.busy = self._busy


def operation_name(function: Any) -> str | None:
    """Return a readable name, the same for `a + b`, `a += b` and `torch.add(a, b)`; None if nothing is computed."""
    name: str | None = getattr(function, "__name__", None)
    if name is None or name in _NO_OPERATIONS:
        return None
    plain = name.strip("_")
    return _OPERATORS.get(plain, plain)


def attention_weights(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Tensor | None:
    """Return the weights (B, heads, T, S) if this call computes attention, else None.

    Three kinds of calls are recognised: `scaled_dot_product_attention`, whose weights are recomputed in float32 by the
    formula in its documentation; `multi_head_attention_forward`, which is called again with `need_weights`; and a
    softmax over the last of four axes, whose result is taken as the weights.
    """
    if function is F.scaled_dot_product_attention:
        with torch.no_grad(), torch.autocast(args[0].device.type if args else "cpu", enabled=False):
            return _sdpa_weights(*args, **kwargs)
    if function is F.multi_head_attention_forward:
        asked = inspect.signature(function).bind(*args, **kwargs)
        # training=False: dropout would draw random numbers and change those of the model's own dropout.
        asked.arguments |= {"need_weights": True, "average_attn_weights": False, "training": False}
        weights: Tensor | None = function(*asked.args, **asked.kwargs)[1]
        return weights
    if operation_name(function) == "softmax" and isinstance(result, Tensor) and result.ndim == 4:
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return result if axis in (-1, 3) else None  # (B, heads, T, S)
    return None


def _sdpa_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    query, key = query.detach().float(), key.detach().float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    # A query whose keys are all masked has zero weights, as in `scaled_dot_product_attention`.
    return scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)
