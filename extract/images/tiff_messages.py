"""Decode TIFF files without messages of libtiff on stderr, and with a reason in words.

Pillow reports "decoder error -2" for all that can go wrong in libtiff, which prints the cause itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

__all__ = ["errors_of_libtiff"]

_NO_MEMORY = "decoder error -9"  # PIL.ImageFile.ERRORS
_SETTERS = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")  # tiffio.h of libtiff 4


@contextlib.contextmanager
def errors_of_libtiff(image: Image.Image) -> Iterator[None]:
    """Context manager: libtiff prints nothing about a TIFF file; "decoder error -2" becomes a reason in words.

    The handlers of libtiff belong to the process. They are put back at the end; while several threads decode, one may
    print, or messages may stay off.

    Args:
        image: the TIFF file as opened by Pillow.

    Raises:
        ValueError: libtiff cannot decode the file.
    """
    library = _libtiff()
    earlier = [getattr(library, name)(None) for name in _SETTERS] if library is not None else []
    try:
        yield
    except OSError as error:
        if not str(error).startswith("decoder error"):
            raise
        if str(error) == _NO_MEMORY:
            raise MemoryError from error
        compression = image.info.get("compression", "unknown")
        raise ValueError(
            f"libtiff cannot decode it: it is damaged, or this build of Pillow lacks its compression ({compression})"
        ) from error
    finally:
        for name, handler in zip(_SETTERS, earlier, strict=False):
            getattr(library, name)(handler)


@functools.cache
def _libtiff() -> ctypes.CDLL | None:
    """Return the libtiff that Pillow has loaded; None if it is a part of Pillow's own library, or not on Linux."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").split("\n")
        library = ctypes.CDLL(next(line[line.index("/") :] for line in maps if "/libtiff" in line))
        for name in _SETTERS:
            setter = getattr(library, name)
            setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
    except (OSError, StopIteration, AttributeError):
        return None
    return library
