"""Copies of tensors: for the record, and those that are passed on to the model in place of the originals."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from extract.errors import InputError
from extract.taps.record import Site
from extract.taps.torch_internals import is_in_functorch, is_saved, is_shared

__all__ = ["copied", "dense_copy", "edited_by", "overlaps_itself"]


def dense_copy(value: Any, site: Site, to_cpu: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return a contiguous, dense copy on the CPU that owns its memory, and warn of infinite float16 values.

    Args:
        value: a tensor, or what `reduce` returned in its place.
        site: its site, for errors.
        to_cpu: see `copy_out`.

    Raises:
        InputError: the value is not a tensor, or is a nested tensor, or is inside torch.func.
    """
    if not isinstance(value, Tensor):
        raise InputError(
            f"the reduction of {site} returned {type(value).__name__}; expected a tensor or a dict of tensors"
        )
    if value.is_nested:
        raise InputError(
            f"{site} is a nested tensor, whose rows differ in shape",
            hint="reduce it to a plain tensor, for example by lambda h: h.to_padded_tensor(0.0); an "
            "nn.TransformerEncoder makes none if its use_nested_tensor is False",
        )
    if hasattr(value, "full_tensor"):
        raise InputError(
            f"{site} is a DTensor, spread over processes",
            hint="reduce it to this part (lambda t: t.to_local()) or, in all, to the whole (lambda t: t.full_tensor())",
        )
    if is_in_functorch(value):
        raise InputError(
            f"{site} is inside torch.func (vmap, grad, ...), where values cannot be copied out of the model"
        )
    if value.is_quantized:
        value = value.dequantize()
    elif value.layout is not torch.strided:
        value = value.to_dense()
    if to_cpu is not None:
        return to_cpu(value)
    copy = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    copy.copy_(value)  # what copy_ returns could be a subclass
    if copy.dtype is torch.float16 and copy.isinf().any():
        warnings.warn(f"{site} has infinite values: the largest float16 is 65504", RuntimeWarning, stacklevel=3)
    return copy


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides and Python attributes, which autograd differentiates.

    `Tensor.clone` makes a slice contiguous, and PyTorch rounds some functions in another way for contiguous tensors:
    the model would compute other values with the copy. Of frames that overlap in memory, each has its own in the copy.
    """
    return _with_attributes(_with_strides_of(tensor), tensor)


def _with_attributes(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor, with the Python attributes of another one that it does not have."""
    for name, attribute in other.__dict__.items():  # such as `orig` in models of fastai
        tensor.__dict__.setdefault(name, attribute)  # the copy of a subclass may have its data there
    return tensor


def _with_strides_of(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return copy
    strides = tensor.stride()
    if copy.stride() == strides or is_in_functorch(tensor):
        return copy
    if type(copy) is not Tensor or overlaps_itself(tensor):  # a subclass; after `expand` or `unfold`
        return copy
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two places of a tensor may share memory: then a write to one of them would change the other."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def edited_by(tensor: Tensor, edit: Callable[[Tensor], Tensor], site: Site, may_change: bool = False) -> Tensor:
    """Call an edit, and return a result that nothing else can read or change.

    Args:
        tensor: the tensor.
        edit: receives a copy of it.
        site: its site, for errors.
        may_change: whether nothing else can read the tensor, so that the edit receives the tensor itself.

    Raises:
        InputError: the tensor is nested and has no shape, or the edit returns something else than a tensor like it.
    """
    if hasattr(edit, "at"):  # an edit such as `smooth`, which has a separate state for each tensor
        edit = edit.at(site)
    if tensor.is_nested and tensor.layout is torch.strided:
        raise InputError(
            f"{site} is a nested tensor, which edits do not take",
            hint="an nn.TransformerEncoder makes none if its use_nested_tensor is False",
        )
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    # An edit may write in place, and would then change what the caller reads. A later layer that works in place would
    # change what the edit returned and may have kept.
    try:
        result = edit(tensor if may_change else copied(tensor))
    except Exception as error:
        error.add_note(f"while editing {site} of shape {tuple(shape)}")
        raise
    if not isinstance(result, Tensor):
        raise InputError(f"the edit of {site} returned {type(result).__name__}; it must return a tensor")
    if result.shape != shape or result.dtype != dtype or result.device != device:
        returned = f"{tuple(result.shape)} {result.dtype} on {result.device}"
        raise InputError(
            f"the edit of {site} returned {returned}; expected, as given, {tuple(shape)} {dtype} on {device}"
        )
    is_new = type(result) is Tensor and sys.getrefcount(result) <= _references_of_new_result()
    if not is_new or result._is_view() or is_saved(result) or is_shared(result):
        result = copied(result)
    return _with_attributes(result, tensor)


@functools.cache
def _references_of_new_result() -> int:
    """Return how many references Python itself has to a new tensor where `edited_by` counts them."""
    result = torch.zeros(1)
    return sys.getrefcount(result)
