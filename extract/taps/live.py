"""Tensors that are kept with their graph. A later layer may write into them, which is found by their version."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from extract.errors import InputError, LayertapError

__all__ = ["Versions", "check_unchanged", "versions_of"]

Versions = list[tuple[Tensor, int]]


def versions_of(value: Any, site: object, is_reduced: bool) -> Versions:
    """Return the tensors of a live value that can be written into, each with its number of writes until now.

    Args:
        value: the tensor of a site, since `torch.autograd.grad` needs the tensor itself, or what it was reduced to.
        site: its site, for errors.
        is_reduced: whether it was reduced.

    Raises:
        InputError: the value is not a tensor or a dict of tensors, or has no graph in inference mode.
    """
    tensors = list(value.values()) if isinstance(value, dict) else [value]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"the reduction of {site} returned {type(tensor).__name__}; expected a tensor or a dict of tensors"
            )
        if tensor.is_inference() and not is_reduced:
            raise InputError(
                f"{site} cannot be kept live in inference mode, which has no graph", hint="use torch.no_grad()"
            )
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def check_unchanged(versions: Versions, site: object) -> None:
    """Check that the tensors of a live value were not written into since they were kept.

    Raises:
        LayertapError: they were.
    """
    if any(tensor._version != version for tensor, version in versions):
        raise LayertapError(
            f"{site} was changed in place after it was kept live: a later layer wrote into it",
            hint="keep a copy with its graph, keep(..., live=True, reduce=torch.clone), or make that layer work "
            "out of place",
        )
