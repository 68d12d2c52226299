"""Errors: a message, a hint, and both in one text for Python users."""

from __future__ import annotations

import copy
import pickle

import pytest

from extract.errors import DisagreementError, InputError, LayertapError, LockedError, UnknownNameError, unknown_name


@pytest.mark.parametrize(
    ("message", "hint", "text"),
    [
        ("photos does not exist", "", "photos does not exist"),
        ("phtos does not exist", "did you mean photos?", "phtos does not exist; did you mean photos?"),
        ("a:\n  b", "choose another", "a:\n  b\nchoose another"),
        ("--watch is not for this", "`layertap show` is", "--watch is not for this; `layertap show` is"),
    ],
)
@pytest.mark.parametrize("kind", [LayertapError, InputError, UnknownNameError, LockedError])
def test_the_text_is_message_and_hint(kind: type[LayertapError], message: str, hint: str, text: str) -> None:
    error = kind(message, hint=hint)
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(same), same.message, same.hint, same.args) == (text, message, hint, (text,))
        assert type(same) is kind


def test_neither_message_nor_hint_has_credentials() -> None:
    error = InputError("https://me:secret@host/a is missing", hint="try https://me:secret@host/b")
    assert "secret" not in error.message + error.hint + str(error) + repr(error)
    assert "host/a" in error.message
    assert "host/b" in error.hint


def test_errors_with_a_hint_of_their_own_keep_their_attributes() -> None:
    error = DisagreementError("0.9 is less than 0.999", "--precision float32")
    assert (str(error), error.reason) == ("0.9 is less than 0.999; use --precision float32", "0.9 is less than 0.999")
    name = unknown_name("layer", "c", ["a", "b"], "net", "list them")
    assert (name.message, name.hint) == ("layer 'c' not found in net; available: 'a', 'b'", "list them")


def test_an_error_without_arguments_has_empty_texts() -> None:
    assert (LayertapError().message, LayertapError().hint, str(LayertapError())) == ("", "", "")
