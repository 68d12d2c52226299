"""Limit the pixels of every picture that a transform makes on its way from a decoded picture to the input of a model.

A picture of 1x8000 pixels whose shorter side is resized to 224 would have 401 million pixels. Transforms of libraries
and users are code, so the sizes are checked where Pillow and PyTorch make pictures: when they resize, crop or pad.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

from extract import defaults

__all__ = ["limited_pictures"]


@dataclass(frozen=True)
class _Limit:
    """The size of the decoded picture, (width, height), and the pixels that a picture may have."""

    size: tuple[int, int]
    pixels: int

    def check(self, width: float, height: float) -> None:
        """Raise ValueError if a picture of this size would be too large."""
        if width * height > self.pixels:
            what = "too thin" if max(self.size) > 16 * min(self.size) else "too large"
            raise ValueError(
                f"{self.size[0]}x{self.size[1]} pixels: {what}; preprocessing would make it {width:.0f}x{height:.0f}, "
                f"and the limit is {self.pixels:,} pixels; --max-pixels raises it"
            )


_limit: ContextVar[_Limit | None] = ContextVar("limit of pictures", default=None)


@contextlib.contextmanager
def limited_pictures(size: tuple[int, int], max_pixels: int = defaults.MAX_PIXELS) -> Iterator[None]:
    """Context manager: refuse to make a picture of more pixels inside, in this thread.

    Args:
        size: (width, height) of the decoded picture, for the message.
        max_pixels: the limit. A limit set outside that is higher, and the default if that is higher, take precedence:
            a small picture may be enlarged beyond the limit for decoding.

    Raises:
        ValueError: inside; a picture would have more pixels.
    """
    outside = _limit.get()
    limit = _Limit(size, max(max_pixels, defaults.MAX_PIXELS, outside.pixels if outside else 0))
    token = _limit.set(limit)
    try:
        if outside:
            yield
        else:
            with _pillow, _TorchSizes(limit):
                yield
    finally:
        _limit.reset(token)


class _TorchSizes(TorchFunctionMode):
    """Check the sizes of pictures that PyTorch resizes or pads."""

    def __init__(self, limit: _Limit):
        super().__init__()
        self._limit = limit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.interpolate:
            self._check_resized(*args, **kwargs)
        elif func is torch.nn.functional.pad:
            self._check_padded(*args, **kwargs)
        return func(*args, **kwargs)

    def _check_resized(self, image: Any, size: Any = None, scale_factor: Any = None, *args: Any, **kwargs: Any) -> None:
        height, width = image.shape[-2:] if image.ndim > 3 else (1, image.shape[-1])
        if size is not None:
            height, width = (1, *size)[-2:] if isinstance(size, tuple | list) else (size if image.ndim > 3 else 1, size)
        elif scale_factor is not None:
            factors = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * 2
            height, width = height * factors[0], width * factors[-1]
        self._limit.check(float(width), float(height))

    def _check_padded(self, image: Any, pad: Any, *args: Any, **kwargs: Any) -> None:
        sides = [*image.shape]
        for i, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=False)):
            sides[-1 - i] += before + behind
        height, width = (1, 1, *sides)[-2:]
        self._limit.check(float(width), float(height))


class _PillowSizes:
    """Context manager: check the sizes of pictures that Pillow makes, in threads with a limit.

    Pillow has no hook for that, so three of its functions are replaced, once for all threads that are inside.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._restore = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                for owner, name, size_of in _FUNCTIONS:
                    original = getattr(owner, name)
                    setattr(owner, name, _checked(original, size_of))
                    self._restore.callback(setattr, owner, name, original)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._restore.close()


def _size_of_resized(image: Any, size: Any, *args: Any, **kwargs: Any) -> tuple[float, float]:
    return size[0], size[1]


def _size_of_cropped(image: Any, box: Any = None, *args: Any, **kwargs: Any) -> tuple[float, float]:
    return (abs(box[2] - box[0]), abs(box[3] - box[1])) if box is not None else image.size


def _size_of_new(mode: Any, size: Any, *args: Any, **kwargs: Any) -> tuple[float, float]:
    return size[0], size[1]


_FUNCTIONS: tuple[tuple[Any, str, Callable[..., tuple[float, float]]], ...] = (
    (Image.Image, "resize", _size_of_resized), (Image.Image, "crop", _size_of_cropped), (Image, "new", _size_of_new),
)  # fmt: skip
_pillow = _PillowSizes()


def _checked(function: Callable[..., Any], size_of: Callable[..., tuple[float, float]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if limit := _limit.get():
            limit.check(*size_of(*args, **kwargs))
        return function(*args, **kwargs)

    return checked
