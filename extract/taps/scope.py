"""Which calls belong to a block of `Taps`: those of its thread and asyncio task, outside functions of the user."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from extract.taps.torch_internals import graph_task, has_function_modes, not_traced

__all__ = ["OTHER_THREAD", "TRACED", "ModelBoundHook", "Scope", "frames_of", "in_backward", "is_simple"]

TRACED = "in code that PyTorch's compiler traces, such as a branch of torch.cond"
OTHER_THREAD = "in another thread than the model"
_NOTHING = contextlib.nullcontext()


class Scope:
    """The thread and the asyncio task of one `with` block, and whether a call there counts.

    Args:
        unheard: context manager: hides what layertap itself computes from those who watch functions.

    Attributes:
        thread: the thread of the block.
        is_open: whether the block has begun and not ended; hooked tensors may outlive it.
        unheard: see above.
        unseen: id of each module of which hooks have missed a call -> where it ran.
    """

    def __init__(self, unheard: Callable[[], contextlib.AbstractContextManager[None]]):
        self.thread = threading.get_ident()
        # All asyncio tasks of a loop run in one thread: while one waits in its block, others may call the model.
        self._task = _current_task()  # None: the block is of all tasks
        self._users_functions = 0  # functions of the user that are running, one called by another
        self.is_open = False
        self.unheard = unheard
        self.unseen: dict[int, str] = {}

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: hide what layertap computes; costs nothing where nobody watches functions."""
        return self.unheard() if has_function_modes() else _NOTHING

    def call_users(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a `reduce`, an edit or an `on_record`; what it calls is no call of the model.

        `reduce=lambda h: model.head(h)` would otherwise be recorded as a call of `head`.
        """
        with self.quiet():
            self._users_functions += 1
            try:
                return function(*args)
            finally:
                self._users_functions -= 1

    def counts_layers(self) -> bool:
        """Whether calls of layers count now: in the thread of the block, not in functions of the user."""
        return not self._users_functions and threading.get_ident() == self.thread and self.is_open

    def counts_models(self) -> bool:
        """Whether calls of the model count now: where those of layers do, and in the asyncio task of the block."""
        return self.counts_layers() and self.is_of_this_task()

    def counts_repeated(self) -> bool:
        """Whether calls of layers that a backward pass repeats belong to the block."""
        return self.is_in_our_thread() and not self._users_functions and self.is_of_this_task()

    def is_of_this_task(self) -> bool:
        """Whether this asyncio task opened the block; true in other threads."""
        return self._task is None or self.thread != threading.get_ident() or self._task is _current_task()

    def is_in_our_thread(self) -> bool:
        """Whether a hook was called for the thread of the block; backward passes on a GPU run in another thread."""
        if self.thread == threading.get_ident():
            return self.is_open
        return self.is_open and torch.cuda.is_initialized() and in_backward()  # type: ignore[no-untyped-call]

    def pass_over(self, module: nn.Module, forward: Any) -> None:
        """Remember that another thread calls a layer while `forward`, a call of the model, is running."""
        is_other = self.is_open and threading.get_ident() != self.thread
        if is_other and forward is not None and forward.running and not in_backward():
            self.unseen.setdefault(id(module), OTHER_THREAD)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; the same test as in `torch.utils.checkpoint`."""
    return graph_task() != -1


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_simple(module: nn.Module) -> bool:
    """Whether a layer is one of PyTorch's own, as it is, and calls no layers.

    Its calls can be counted at their end. Others may call themselves, and would be numbered in the order in which they
    end. PyTorch's own call of a hook takes more than a microsecond.
    """
    kind = type(module).__module__
    return kind.startswith("torch.nn.modules.") and "forward" not in vars(module) and not any(module.children())


class ModelBoundHook:
    """Hook that does nothing in a copied or pickled model, nor where PyTorch's compiler traces a module.

    The compiler traces what `torch.cond` or FlexAttention run, for example, and the code of hooks there; it fails on
    what it cannot translate. This module then runs without its hooks.

    Args:
        hook: the hook.
        unseen: receives the id of each module whose call the compiler has traced, with this as the reason.
        of_graph: whether a graph does what the hook does.
    """

    __slots__ = ("hook", "of_graph", "unseen")

    def __init__(self, hook: Callable[..., Any], unseen: dict[int, str], of_graph: bool = False):
        self.hook, self.unseen, self.of_graph = hook, unseen, of_graph

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Call the hook, or note that the compiler traces the call."""
        if is_dynamo_compiling():  # true for the compiler alone, which does not call the function
            return _note(self, module)
        return self.hook(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Such a file can be loaded where layertap is not installed. A handle, when it is loaded, keeps the numbers of
        # these hooks from those registered there: for a number, PyTorch remembers whether a hook takes keywords.
        return partial, (contextlib.nullcontext.__exit__, contextlib.nullcontext(), RemovableHandle(OrderedDict()))

    def __deepcopy__(self, memo: Any) -> Any:
        return partial(contextlib.nullcontext.__exit__, contextlib.nullcontext())


@not_traced
def _note(hook: ModelBoundHook, module: nn.Module) -> None:
    if not torch.compiler.is_exporting():  # an export is no call of the model
        hook.unseen[id(module)] = TRACED
