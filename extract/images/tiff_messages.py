"""What libtiff says of a file, as text in place of lines on stderr.

Pillow reports "decoder error -2" for all that can go wrong in libtiff, which prints the reason itself. Its handlers of
errors and warnings can be replaced (`TIFFSetErrorHandler`), for the whole process only. They are replaced once; in
threads that do not decode here, the handlers that were there before are called.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["errors_of_libtiff"]

_MESSAGE_BYTES = 400
_NO_MEMORY = "decoder error -9"  # PIL.ImageFile.ERRORS
_HANDLERS = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")  # tiff.h of libtiff 4
# void handler(const char *module, const char *format, va_list). Where integers are 64 bits wide on Linux (System V for
# x86-64, AAPCS64), a va_list is passed as a pointer.
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
_kept: list[object] = []  # C has pointers to them
_collecting = threading.local()


@contextlib.contextmanager
def errors_of_libtiff(kind: str | None) -> Iterator[None]:
    """Context manager: decode a TIFF file without output of libtiff; "decoder error -2" becomes its first message.

    Where libtiff cannot be found in this process, it prints, and the reason is a general one.

    Args:
        kind: format of the file; of others than TIFF, nothing is done.

    Raises:
        ValueError: libtiff cannot decode the file.
    """
    if kind != "TIFF":
        yield
        return
    _install()
    messages: list[str] = []
    _collecting.errors = messages
    try:
        yield
    except OSError as error:
        if not str(error).startswith("decoder error"):
            raise
        if str(error) == _NO_MEMORY:
            raise MemoryError from error
        raise ValueError(_reason(messages[0] if messages else "")) from error
    finally:
        _collecting.errors = None


def _reason(message: str) -> str:
    if "not configured" in message or "not implemented" in message:
        return f"this build of Pillow cannot decode the file: {message}"
    if message:
        return f"damaged or truncated: {message}"
    return "libtiff cannot decode it: it is damaged, or of a compression that this build of Pillow lacks"


@functools.cache
def _install() -> None:
    with contextlib.suppress(OSError, AttributeError):  # another system, or libtiff is a part of Pillow's own library
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").split("\n")
        paths = {line[line.index("/") :] for line in maps if "/libtiff" in line}
        for path in paths if ctypes.sizeof(ctypes.c_long) == 8 else ():
            library = ctypes.CDLL(path)  # loaded already
            for name in _HANDLERS:
                _replace(getattr(library, name), is_error=name == _HANDLERS[0])


def _replace(set_handler: Any, is_error: bool) -> None:
    earlier: list[Any] = []

    def collect(module: bytes | None, text: bytes, arguments: int | None) -> None:
        errors = getattr(_collecting, "errors", None)
        if errors is None:
            for handler in earlier:
                handler(module, text, arguments)
        elif is_error:
            buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
            _libc().vsnprintf(buffer, _MESSAGE_BYTES, text, ctypes.c_void_p(arguments))
            errors.append(buffer.value.decode("utf-8", "replace").strip())

    callback = _Handler(collect)
    set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
    _kept.append(callback)
    if before := set_handler(ctypes.cast(callback, ctypes.c_void_p)):
        earlier.append(_Handler(before))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
