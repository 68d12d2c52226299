"""Faults of code that is neither part of layertap nor installed: the file of a user's own backbone.

Such a fault is an error with one line, which names the file and the line. Any other unexpected exception is a bug of
layertap, and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path

from extract.errors import InputError, LayertapError, first_line

__all__ = ["described", "exits_refused", "own_faults_refused"]

_ROOT = Path(__file__).parents[2]
_LAYERTAP = tuple(_ROOT / package for package in ("extract", "layertap", "pipelines"))
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


@contextlib.contextmanager
def exits_refused() -> Iterator[None]:
    """Context manager: an error in place of the end of the program, if code inside calls `sys.exit`.

    A program that ends with exit code 0 looks as if it had done its work. Used wherever such code runs.

    Raises:
        InputError: the code called `sys.exit`, or another function that raises SystemExit.
    """
    try:
        yield
    except SystemExit as stop:
        called = f"sys.exit({'' if stop.code is None else repr(stop.code)})"
        raise InputError(
            f"{_place(stop) or _innermost_first(stop)[0][1]}, called {called}",
            hint="the code of a backbone must not end the program: remove the call, or move it below if __name__ == "
            "'__main__'",
        ) from stop


@contextlib.contextmanager
def own_faults_refused(reported: Collection[int]) -> Iterator[None]:
    """Context manager: an error of one line for an exception from a user's own code, such as a model or a loss.

    Args:
        reported: `errno` of each OSError that the caller reports, such as a full disk, wherever it was raised.

    Raises:
        InputError: code that is not installed raised an exception, or called a library that did.
    """
    try:
        yield
    except (LayertapError, MemoryError):
        raise
    except Exception as error:
        if _place(error) is None or (isinstance(error, OSError) and error.errno in reported):
            raise
        raise InputError(described(error)) from error


def described(error: BaseException) -> str:
    """Return type and first line of an exception, and the place in the user's own code, if it passed through any."""
    place = _place(error)
    return f"{type(error).__name__}: {first_line(error)}" + (f" ({place})" if place else "")


def _place(error: BaseException) -> str | None:
    """Return file and line of the innermost call in the user's own code; None if there is none below the handler."""
    return next((place for name, place in _innermost_first(error) if _is_own(name)), None)


def _innermost_first(error: BaseException) -> list[tuple[str, str]]:
    """Return each file of the traceback, and its place in words; the handler itself is the last."""
    names = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return [(name, f"{name}, line {line}") for name, line in reversed(names)]


def _is_own(name: str) -> bool:
    path = Path(name)
    return not (
        name.startswith("<")  # such as <string> and <frozen importlib._bootstrap>
        or _INSTALLED & set(path.parts)
        or any(path.is_relative_to(folder) for folder in (*_LAYERTAP, _STANDARD_LIBRARY))
    )
