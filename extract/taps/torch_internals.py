"""All names of PyTorch that layertap uses and that are not part of its public interface, in one place.

They were seen in PyTorch 2.14.1. `tests/extract/taps/test_torch_internals.py` says for each what breaks if it changes.
Functions written in C are named here without a function around them: some run at each call of a layer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

__all__ = [
    "COMPILED_CODE_OFF",
    "StorageWeakRef",
    "Switch",
    "computes_tangents",
    "engine_code",
    "function_modes",
    "graph_task",
    "has_dispatch_modes",
    "has_function_modes",
    "hooks_of",
    "inference_mode",
    "is_in_functorch",
    "is_saved",
    "is_shared",
    "memory_of",
    "not_traced",
    "pop_function_mode",
    "push_function_mode",
]

# Number of the running backward pass of this thread, -1 outside: activation checkpointing asks the same. It tells calls
# of layers in the forward from those that a backward pass computes again.
graph_task = torch._C._current_graph_task_id

# The code of the function that runs a backward pass: which passes run inside others is read from the stack.
engine_code = torch.autograd.graph._engine_run_backward.__code__

# What `torch.inference_mode` uses; that takes as long as the copy of a small tensor.
inference_mode = torch._C._InferenceMode

# Whether a tensor is inside torch.func (vmap, grad, ...), where its values cannot be copied out of the model.
is_in_functorch = torch._C._functorch.is_functorch_wrapped_tensor

# The stack of function modes. Layertap's own mode lies below all others, is taken off while layertap's own code runs,
# and is left in any order.
has_function_modes = torch._C._len_torch_function_stack
push_function_mode = _push_mode
pop_function_mode = _pop_mode

# Whether this thread traces tensors, as `torch.export` does: its calls are not calls of the model.
has_dispatch_modes = torch._C._len_torch_dispatch_stack


def function_modes() -> list[TorchFunctionMode]:
    """Return the function modes of this thread, the outermost first."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def computes_tangents() -> bool:
    """Whether forward-mode differentiation is on: values that are kept must not keep tangents."""
    return forward_ad._current_level >= 0


def memory_of(tensor: Tensor) -> int:
    """Return what tensors have in common that share memory, as long as one of them exists.

    A tensor without memory of its own, as inside torch.func, or a sparse one, has nothing in common with another.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return -id(tensor)


def is_shared(tensor: Tensor) -> bool:
    """Whether something else may have the same memory: a view, what autograd has saved, an array of NumPy."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # see `memory_of`
        return True
    # The tensor and `storage` are two users. Memory that PyTorch did not allocate has another owner.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2) or not storage.resizable()


def is_saved(tensor: Tensor) -> bool:
    """Whether autograd may have saved this very tensor, or a view of it exists."""
    return bool(tensor._use_count() > 1)  # type: ignore[attr-defined]


def not_traced(function: Any) -> Any:
    """Decorator: PyTorch's compiler calls this function while it traces, and does not trace it.

    `torch.compiler.assume_constant_result` sets this attribute, but imports the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True
    return function


def hooks_of(module: nn.Module) -> tuple[Any, Any]:
    """Return the forward pre-hooks and the forward hooks of a module, as ordered dicts: number -> hook.

    A layer that has hooks of others may be called by them, and is counted when its call starts.
    """
    return module._forward_pre_hooks, module._forward_hooks


class Switch:
    """A process-wide setting for blocks that may overlap in any order and thread: first in, last out."""

    def __init__(self, turn: Callable[[], Callable[[], None]]):
        self._turn = turn  # changes the setting, and returns a function that restores it
        self._back: Callable[[], None] = lambda: None
        self._users = 0
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager: change the setting; the last block to end restores it."""
        with self._guard:
            if not self._users:
                self._back = self._turn()
            self._users += 1
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if not self._users:
                    self._back()


def _no_compiled_code() -> Callable[[], None]:
    if torch.compiler.is_dynamo_compiling():
        return lambda: None
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError:  # PyTorch refuses it where compiled code runs already
        return lambda: None

    def restore() -> None:
        # A stance knows which it replaces, by names that are not public.
        now = torch.compiler.set_stance("force_eager")
        (stance if now.prev is stance.stance else now).__exit__(None, None, None)  # the user may have set another

    return restore


COMPILED_CODE_OFF = Switch(_no_compiled_code)
