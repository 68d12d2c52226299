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

    A program that ends with exit code 0 looks as if it had done its work. Other exceptions that code is not expected to
    handle, such as GeneratorExit, are errors too, if a user's own code raised them (Python itself raises GeneratorExit
    in a generator that is closed); Ctrl-C is not. Used wherever such code runs.

    Raises:
        InputError: the code called `sys.exit`, or another function that raises SystemExit; or a user's own code raised
            an exception that does not derive from Exception.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except SystemExit as stop:
        called = f"sys.exit({'' if stop.code is None else repr(stop.code)})"
        raise InputError(
            f"{_place(stop) or _innermost(stop)}, called {called}",
            hint="the code of a backbone must not end the program: remove the call, or move it below if __name__ == "
            "'__main__'",
        ) from stop
    except BaseException as error:
        if _place(error) is None:  # for example, a generator of layertap is closed
            raise
        raise InputError(f"{described(error)}; expected an exception that derives from Exception") from error


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
    own = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_own(frame.f_code.co_filename)
    ]
    return own[-1] if own else None


def _innermost(error: BaseException) -> str:
    places = [f"{frame.f_code.co_filename}, line {line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return places[-1] if places else "unknown code"


def _is_own(name: str) -> bool:
    path = Path(name)
    return not (
        name.startswith("<")  # such as <string> and <frozen importlib._bootstrap>
        or _INSTALLED & set(path.parts)
        or any(path.is_relative_to(folder) for folder in (*_LAYERTAP, _STANDARD_LIBRARY))
    )
