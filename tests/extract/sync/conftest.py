"""What tests of sync share."""

from __future__ import annotations

import functools
from importlib import metadata

import pytest


@pytest.fixture(scope="session", autouse=True)
def _versions_of_libraries_are_looked_up_once() -> None:
    """Each pass asks for seven of them, which takes a third of its time."""
    metadata.version = functools.cache(metadata.version)
