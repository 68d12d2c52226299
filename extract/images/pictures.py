"""Pictures in memory: PIL pictures, arrays and tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from extract.errors import InputError
from extract.images.decoding import conversion, to_picture

__all__ = ["Picture", "as_picture", "each_picture"]

Picture = Image.Image | NDArray[Any] | Tensor


def each_picture(pictures: Picture | Iterable[Picture]) -> Iterable[Picture]:
    """Return an iterable of pictures for a single picture, a batched array or tensor, or an iterable."""
    if isinstance(pictures, Image.Image):
        return [pictures]
    if isinstance(pictures, np.ndarray | Tensor):
        return [pictures] if pictures.ndim < 4 else list(pictures)
    return pictures


def as_picture(picture: Any, given: str) -> Image.Image:
    """Return an upright RGB picture, by the same rules as for a file.

    Args:
        picture: a PIL picture; a uint8 array (H, W, 3) or (H, W); a uint8 tensor (3, H, W), or a float tensor with
            8-bit values scaled to 0..1.
        given: what it is, for the error.

    Raises:
        InputError: the picture does not have 8-bit pixels, or its file cannot be decoded.
    """
    if isinstance(picture, Tensor):
        pixels = picture.detach().cpu()
        if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[0] not in (1, 3, 4)):
            raise InputError(f"{given} is a tensor of shape {tuple(pixels.shape)}; expected (3, H, W)")
        if pixels.is_floating_point():
            pixels = _eight_bits(pixels, given)
        picture = (pixels.permute(1, 2, 0) if pixels.ndim == 3 else pixels).numpy()
        picture = picture[:, :, 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8:
            hint = ""
            if picture.dtype.kind in "fiu" and picture.size:
                hint = conversion("pictures", "pictures = {}", float(picture.min()), float(picture.max()))
            raise InputError(f"{given} is an array of {picture.dtype}; expected uint8, 0 to 255", hint=hint)
        if picture.ndim not in (2, 3) or (picture.ndim == 3 and picture.shape[2] not in (3, 4)) or not picture.size:
            raise InputError(f"{given} is an array of shape {picture.shape}; expected (H, W, 3) or (H, W)")
        picture = Image.fromarray(np.ascontiguousarray(picture))
    if not isinstance(picture, Image.Image):
        raise InputError(f"{given} is a {type(picture).__name__}; expected a PIL picture, an array or a tensor")
    try:
        picture.load()  # Pillow reads the pixels of a file only now
        return to_picture(picture)
    except (ValueError, OSError, SyntaxError) as error:
        raise InputError(f"{given}: {error}") from error


def _eight_bits(pixels: Tensor, given: str) -> Tensor:
    """Convert pixels in 0..1, as torchvision's `to_tensor` returns them, to uint8.

    Raises:
        InputError: the pixels are not 8-bit values scaled to 0..1, so uint8 would change them.
    """
    scaled = pixels.double() * 255
    whole = scaled.round()
    if not bool(((scaled - whole).abs() < 1e-3).all()) or whole.min() < 0 or whole.max() > 255:
        raise InputError(
            f"{given} is a tensor of {pixels.dtype} that is not an 8-bit picture scaled to 0..1",
            hint="pass the picture as it was before any preprocessing, or use Taps on the model",
        )
    return whole.to(torch.uint8)
