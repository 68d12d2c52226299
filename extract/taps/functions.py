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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from extract.taps.copies import copied

__all__ = ["Listener", "attention_weights", "memory_of", "operation_name", "unwatched", "watch_again", "watching"]

# Common names of operators, which PyTorch names __radd__ and the like.
_OPERATORS = {"truediv": "div", "getitem": "index"} | {f"r{name}": name for name in ("add", "mul", "sub", "div", "pow")}
_IN_PLACE_OPERATORS = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imatmul__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})  # fmt: skip
# Their names end like those of functions that write, but they write no values.
_NO_VALUES_WRITTEN = frozenset({
    "detach_", "requires_grad_", "rename_", "resize_", "resize_as_", "set_", "share_memory_", "squeeze_", "swapaxes_",
    "swapdims_", "t_", "transpose_", "unsqueeze_",
})  # fmt: skip
_NO_OPERATIONS = frozenset({"__get__", "__set__", "__delete__", "size", "dim", "stride"})


@dataclasses.dataclass(frozen=True)
class Listener:
    """Receives the function calls of a thread.

    Attributes:
        on_call: receives function, arguments, keyword arguments and result after each call; returns the result, or what
            replaces it.
        edits: whether `on_call` would replace the result of this function if it were called now.
        on_write: receives a tensor that a function is about to write into, and the memory (`memory_of`) of tensors that
            change with it, to which it may add; returns what is to be done after the function.
    """

    on_call: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any] = lambda function, args, kwargs, result: result
    edits: Callable[[Any], bool] = lambda function: False
    on_write: Callable[[Tensor, set[int]], list[Callable[[], object]]] = lambda tensor, written: []


class _Watch(TorchFunctionMode):
    """Function mode that calls each listener after each function; what it returns replaces the result.

    If the result of a function that works in place is edited, the function gets a copy. The edited result is then
    written into the argument, where the caller expects it. Written there directly, it would replace values that
    autograd has saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling() or _state.busy:  # the compiler traces this, too
            return func(*args, **kwargs)
        given, afterwards = None, []
        if _is_in_place(func, args, kwargs):
            afterwards = self._before_write(args[0])
            if func.__name__ != "__setitem__" and any(listener.edits(func) for listener in self.listeners):
                given, args = args[0], (copied(args[0]), *args[1:])
        result = func(*args, **kwargs)
        for listener in self.listeners:
            result = listener.on_call(func, args, kwargs, result)
        if given is not None and isinstance(result, Tensor) and result.shape == given.shape:
            result = given.copy_(result)
        for action in afterwards:
            action()
        return result

    def _before_write(self, tensor: Tensor) -> list[Callable[[], object]]:
        """Tell the listeners of a write, and of writes that follow from it; return what is to be done after it."""
        try:
            written = {memory_of(tensor)}
        except NotImplementedError:  # a tensor without memory of its own, as inside torch.func
            return []
        actions: list[Callable[[], object]] = []
        known = 0
        while len(written) > known:
            known = len(written)
            for listener in self.listeners:
                actions += listener.on_write(tensor, written)
        return actions


def memory_of(tensor: Tensor) -> int:
    """Return what tensors have in common that share memory, as long as one of them exists."""
    return int(tensor.untyped_storage()._cdata)


class _State(threading.local):
    """Thread-local state: the one mode for all listeners, and whether layertap's own code is running (`busy`)."""

    def __init__(self) -> None:
        self.watch: _Watch | None = None
        self.busy = False


_state = _State()


def _is_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function writes its result into its first argument: `add_`, `+=`, `relu(x, inplace=True)`."""
    name: str = getattr(function, "__name__", "")
    if not args or not isinstance(args[0], Tensor):
        return False
    if name.endswith("_"):
        return name in _IN_PLACE_OPERATORS or (not name.endswith("__") and name not in _NO_VALUES_WRITTEN)
    if not isinstance(function, FunctionType) or not (kwargs.get("inplace") or any(given is True for given in args)):
        return False
    return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get("inplace"))


@contextlib.contextmanager
def watching(listener: Listener) -> Iterator[None]:
    """Context manager: tell the listener of each function call of this thread."""
    watch = _state.watch
    if watch is None:
        watch = _state.watch = _Watch()
        watch.__enter__()  # type: ignore[no-untyped-call]
    watch.listeners.append(listener)
    try:
        yield
    finally:
        watch.listeners.remove(listener)
        if not watch.listeners and _state.watch is watch:
            _leave(watch)
            _state.watch = None


def _leave(mode: TorchFunctionMode) -> None:
    """Exit a function mode, whatever modes were entered after it; none if PyTorch has discarded it."""
    if mode not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        return
    later = []
    while (last := _pop_mode()) is not mode:  # type: ignore[no-untyped-call]
        later.append(last)
    for other in reversed(later):
        _push_mode(other)  # type: ignore[no-untyped-call]


def watch_again(listener: Listener) -> Callable[[], None]:
    """Watch functions where a backward pass computes layers again; return a function that ends it.

    A mode is off inside the functions that it watches, and `Tensor.backward` is one. On a GPU, a backward pass runs in
    a thread of its own. If the backward pass is interrupted, PyTorch discards the mode.
    """
    watch = _state.watch
    if watch is None:
        watch = _Watch()
        watch.listeners.append(listener)
    elif watch in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        return lambda: None
    watch.__enter__()  # type: ignore[no-untyped-call]
    return partial(_leave, watch)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Context manager: hide layertap's own operations from the listeners of this thread."""
    busy, _state.busy = _state.busy, True
    try:
        yield
    finally:
        _state.busy = busy


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
