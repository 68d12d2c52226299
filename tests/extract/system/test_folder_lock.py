"""A folder that is kept as it is, without a write, while other processes want to lock it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from extract.errors import LockedError
from extract.system.atomic_files import kept, locked
from tests.extract.store.processes import result_of


def enter(manager: Callable[[Path], AbstractContextManager[object]], out: Path) -> None:
    with manager(out):
        pass


def test_a_folder_that_is_kept_is_not_locked_by_a_writer_and_the_other_way_round(tmp_path: Path) -> None:
    with locked(tmp_path):
        error = result_of(enter, kept, tmp_path)
        assert isinstance(error, LockedError)
        assert str(error).startswith(f"{tmp_path} is locked by pid {os.getpid()} on ")
        with pytest.raises(LockedError, match="another thread"), kept(tmp_path):
            pass
    with kept(tmp_path):
        error = result_of(enter, locked, tmp_path)
        assert isinstance(error, LockedError)
        assert str(error).startswith(f"{tmp_path} is locked by another process; wait until that process ends")
        assert result_of(enter, kept, tmp_path) is None
    assert result_of(enter, locked, tmp_path) is None


def test_a_folder_that_is_kept_may_be_missing_and_is_not_made(tmp_path: Path) -> None:
    with kept(tmp_path / "out"):
        assert not (tmp_path / "out").exists()
    with kept(tmp_path):
        assert not list(tmp_path.iterdir())
