"""What tests of sync share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import metadata

import pytest


@pytest.fixture(scope="package", autouse=True)
def _versions_of_libraries_are_looked_up_once() -> Iterator[None]:
    """Each pass asks for seven of them, which takes a third of its time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metadata, "version", functools.cache(metadata.version))
        yield
