"""Errors that layertap raises on purpose, and the message for an unknown name.

The command line prints these without a traceback, as `error: MESSAGE` and, if there is something to do, `hint: HINT`.
Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from extract.credentials import text_without_credentials

__all__ = [
    "DisagreementError",
    "InputError",
    "LayertapError",
    "LockedError",
    "MachineError",
    "OtherFeaturesError",
    "UnknownNameError",
    "first_line",
    "is_of_the_machine",
    "separated_by_commas",
    "system_errors_as",
    "unknown_name",
]


class LayertapError(Exception):
    """layertap refuses an operation or cannot finish it; the message says what failed and what to do.

    `str(error)` is the whole text, `message` and `hint`; the command line prints the hint on a line of its own. The
    text is not split where it is printed: of 316 messages, no pattern told the remedies from other second sentences.

    Args:
        args: the message: what failed. URLs in it lose their credentials.
        hint: what to do, without credentials too; it starts in lower case, and `str(error)` joins it with a semicolon,
            or as a line of its own to a message of several lines.

    Attributes:
        message: what failed.
        hint: what to do; may be empty.
    """

    def __init__(self, *args: object, hint: str = ""):
        cleaned = [text_without_credentials(arg) if isinstance(arg, str) else arg for arg in args]
        self.message = str(cleaned[0]) if cleaned else ""
        self.hint = text_without_credentials(hint)
        if self.hint:
            joint = "\n" if "\n" in self.message else "; "
            cleaned[0] = self.message + joint + self.hint
        super().__init__(*cleaned)  # pickle calls the class with the whole text, and then restores both attributes


class InputError(LayertapError, ValueError):
    """The input cannot be used: a folder without images, a pooling that does not fit, a wrong file."""


class OtherFeaturesError(InputError):
    """The place of a data set holds other features.

    Attributes:
        only_layers: whether it is complete and of the same images, backbone and preprocessing, so layers can be added.
    """

    def __init__(self, *args: object, hint: str = "", only_layers: bool = False):
        super().__init__(*args, hint=hint)
        self.only_layers = only_layers


class UnknownNameError(LayertapError, KeyError):
    """A backbone, layer, pooling or feature of this name does not exist; the message lists the nearest names."""

    __str__ = Exception.__str__  # KeyError's would put the whole message in quotes


class DisagreementError(LayertapError):
    """Compiled code, lower precision or fast decoding fails, or its features differ too much from the plain ones.

    Attributes:
        reason: the difference, without the remedy.
    """

    def __init__(self, reason: str, instead: str = ""):
        super().__init__(reason, hint=f"use {instead}" if instead else "")
        self.reason = reason


class LockedError(LayertapError):
    """Another run is writing to the same data set."""


class MachineError(LayertapError):
    """The machine cannot read images, whatever their content; the run ends, and no row is marked as failed."""


# A resource of the process or the system is exhausted; the next image would fail too.
_OUT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_of_the_machine(error: BaseException) -> bool:
    """Whether an error in reading or decoding an image comes from the machine, and would recur for all other images.

    >>> is_of_the_machine(OSError(errno.EMFILE, "Too many open files"))
    True
    """
    return isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno in _OUT_OF)


@contextmanager
def system_errors_as(what: str, hint: str = "") -> Iterator[None]:
    """Context manager: an OSError in it becomes a LayertapError that says what failed, and the reason of the system."""
    try:
        yield
    except OSError as error:
        raise LayertapError(f"{what}: {error.strerror or error}", hint=hint) from error


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the name of its class if the message is empty.

    URLs in it lose their credentials.
    """
    return text_without_credentials((str(error).strip() or type(error).__name__).splitlines()[0])


def unknown_name(kind: str, name: str, known: Iterable[str], where: str = "", hint: str = "") -> UnknownNameError:
    """Return an error for a name that does not exist; it lists up to three similar names, or else up to eight names.

    >>> str(unknown_name("layer", "blocks.12", ["blocks.11", "blocks.1", "head"], "timm/vit_tiny"))
    "layer 'blocks.12' not found in timm/vit_tiny; nearest: 'blocks.11', 'blocks.1'"
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    message = f"{kind} {name!r} not found" + (f" in {where}" if where else "")
    if near:
        message += "; nearest: " + ", ".join(map(repr, near))
    elif known:
        shown = known[:8]
        message += "; available: " + ", ".join(map(repr, shown)) + (", ..." if len(known) > len(shown) else "")
    return UnknownNameError(message, hint=hint)


def separated_by_commas(text: str, where: str) -> InputError | None:
    """Return an error if a text holds several layers, separated by commas, each perhaps with a pooling; else None."""
    if "," not in text or "[" in text:  # [1,2] is part of a pattern
        return None
    each = " ".join(f"-l {part.strip()}" for part in text.split(",") if part.strip())
    return InputError(
        f"layer {text!r} of {where}: a name has no commas",
        hint=f"name each layer by itself ({each}; in a list, one item each)",
    )
