"""Copies of tensors that are passed on to the model in place of the originals."""

from __future__ import annotations

import torch
from torch import Tensor

from extract.taps.torch_internals import is_in_functorch

__all__ = ["copied", "overlaps_itself", "with_attributes"]


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides and Python attributes, which autograd differentiates.

    `Tensor.clone` makes a slice contiguous, and PyTorch rounds some functions in another way for contiguous tensors:
    the model would compute other values with the copy. Of frames that overlap in memory, each has its own in the copy.
    """
    return with_attributes(_with_strides_of(tensor), tensor)


def with_attributes(tensor: Tensor, other: Tensor) -> Tensor:
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
