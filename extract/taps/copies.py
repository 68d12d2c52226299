"""Copies of tensors that are passed on to the model in place of the originals."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["copied"]


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which autograd differentiates.

    `Tensor.clone` makes a slice contiguous, and PyTorch rounds some functions in another way for contiguous tensors:
    the model would compute other values with the copy.
    """
    copy = tensor.clone()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return copy
    strides = tensor.stride()
    # An expanded tensor, with a stride of 0, cannot be written to.
    if copy.stride() == strides or 0 in strides or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return copy
    if type(copy) is not Tensor:  # a subclass
        return copy
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
