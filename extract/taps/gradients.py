"""Gradients of tensors that pass while a model runs: where a hook on a tensor is safe, and what it does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from extract.taps.edits import apply_edit
from extract.taps.functions import unwatched
from extract.taps.record import Reduce, Site, What
from extract.taps.requests import Block, Call, ModelCall, Point, Wish

__all__ = ["Take", "in_backward", "on_gradient", "to_watch"]

Take = Callable[[Tensor, Reduce | None, Site], Any]  # how a tensor is kept


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; asked as `torch.utils.checkpoint` asks it."""
    return torch._C._current_graph_task_id() != -1


def to_watch(
    point: Point, side: What, tensor: Tensor, site: Site, forward: ModelCall, *, stands_in: bool
) -> Tensor | None:
    """The tensor to watch the gradient at, which goes on: the tensor itself where that is safe, or a copy of it.

    Args:
        point: where it passes.
        side: "input" or another.
        tensor: that passes.
        site: of the gradient, for errors.
        forward: that is running.
        stands_in: whether a copy of an output may go on in its place where its own gradient could not be had.

    Returns:
        None where its gradient cannot be had.
    """
    if side == "input":
        # The gradient through this layer alone is that of a copy which nobody else reads.
        known = [stand_in for given, stand_in, _ in point.calls[-1].stand_ins if given is tensor]
        tensor = known[0] if known else tensor.clone()
    elif not stands_in:
        if tensor.is_leaf:  # a hook on it would outlive this forward
            return None
    elif tensor.is_leaf or tensor._is_view() or forward.has_seen(tensor) or _is_among(tensor, point.calls):
        # A hook on a leaf would outlive this forward; one on a view is lost when it is written to in place; and
        # what a layer hands on as it got it, or as a layer inside it gave it, has other readers.
        given, tensor = tensor, tensor.clone()
        # Of a view, what it is a view of has other names, whose life cannot be followed.
        named = None if given._is_view() else weakref.ref(given)
        forward.stand_ins.append((site, named, tensor.detach(), tensor._version))
    forward.see(tensor)
    return tensor


def on_gradient(
    tensor: Tensor, wishes: Sequence[tuple[Site, Wish]], block: Block, forward: ModelCall, take: Take
) -> None:
    """Edit and keep the gradient of a tensor when it comes, if the `with` block is still open then."""
    edits = [(site, wish.edit) for site, wish in wishes if wish.edit is not None]

    def edited(gradient: Tensor) -> Tensor | None:
        if not block.open:
            return None
        with unwatched():
            for site, edit in edits:
                gradient = apply_edit(gradient, edit, site)
            for site, wish in wishes:
                if wish.edit is None:
                    forward.record._put(site, take(gradient, wish.reduce, site))
        return gradient if edits else None

    tensor.register_hook(edited)  # type: ignore[no-untyped-call]


def _is_among(tensor: Tensor, calls: list[Call]) -> bool:
    """Whether the innermost call was given this very tensor."""
    return bool(calls) and any(tensor is given for given in calls[-1].inputs)
