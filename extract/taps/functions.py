"""See operations that have no module of their own while a model runs: functions, operators, attention.

`relu`, `+`, `flatten` written as functions go past every forward hook. Here a `TorchFunctionMode` sees each call of
PyTorch's public functions with the arguments as given and the result; the call itself is not changed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["attention_weights", "operation_name", "unwatched", "watching"]

# Operators have names such as __radd__; these are what people call them.
_OPERATORS = {"truediv": "div", "getitem": "index"} | {f"r{name}": name for name in ("add", "mul", "sub", "div", "pow")}
_NO_OPERATIONS = frozenset({"__get__", "__set__", "__delete__", "size", "dim", "stride"})


OnCall = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]


class _Watch(TorchFunctionMode):
    """Calls each listener after each function; what it returns takes the result's place."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[OnCall] = []

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _state.busy:
            for listener in self.listeners:
                result = listener(func, args, kwargs, result)
        return result


class _State(threading.local):
    """Of a thread: the one mode that serves all its listeners, and whether we are at work of our own."""

    def __init__(self) -> None:
        self.watch: _Watch | None = None
        self.busy = False


_state = _State()


@contextlib.contextmanager
def watching(on_call: OnCall) -> Iterator[None]:
    """Listen to the functions called in this thread: `on_call(function, args, kwargs, result)` returns the result."""
    watch = _state.watch
    if watch is None:
        watch = _state.watch = _Watch()
        watch.__enter__()  # type: ignore[no-untyped-call]
    watch.listeners.append(on_call)
    try:
        yield
    finally:
        watch.listeners.remove(on_call)
        if not watch.listeners and _state.watch is watch:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            _state.watch = None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Work of our own, which no listener of this thread must take for the model's."""
    busy, _state.busy = _state.busy, True
    try:
        yield
    finally:
        _state.busy = busy


def operation_name(function: Any) -> str | None:
    """A readable name, the same for `a + b`, `a += b` and `torch.add(a, b)`; None for what computes nothing."""
    name: str | None = getattr(function, "__name__", None)
    if name is None or name in _NO_OPERATIONS:
        return None
    plain = name.strip("_")
    return _OPERATORS.get(plain, plain)


def attention_weights(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Tensor | None:
    """The weights of an attention, (B, heads, T, S), if this call is one; else None.

    Known are `scaled_dot_product_attention`, of which the weights are computed again as its documentation states them,
    in float32; `multi_head_attention_forward`, which is asked for them; and a softmax over the last of four axes, which
    gives them.
    """
    if function is F.scaled_dot_product_attention:
        with torch.no_grad(), torch.autocast(args[0].device.type if args else "cpu", enabled=False):
            return _sdpa_weights(*args, **kwargs)
    if function is F.multi_head_attention_forward:
        asked = inspect.signature(function).bind(*args, **kwargs)
        # Without dropout: it would draw random numbers that the model's own dropout then misses.
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
    # A query that may look nowhere looks nowhere, as in the function itself.
    return scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)
