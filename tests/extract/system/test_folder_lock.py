"""A folder that is kept as it is, without a write, while other processes want to lock it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from extract.errors import LockedError
from extract.system.atomic_files import kept, locked

ROOT = Path(__file__).parents[3]


def in_another_process(name: str, out: Path) -> str:
    """The error with which another process cannot enter `kept` or `locked`; empty if it can."""
    code = f"from extract.system.atomic_files import {name} as enter\nfrom pathlib import Path\n"
    code += (
        f"try:\n with enter(Path({str(out)!r})): pass\nexcept Exception as error: print(type(error).__name__, error)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_a_folder_that_is_kept_is_not_locked_by_a_writer_and_the_other_way_round(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert in_another_process("kept", tmp_path).startswith(
            f"LockedError {tmp_path} is locked by pid {os.getpid()} on "
        )
        with pytest.raises(LockedError, match="another thread"), kept(tmp_path):
            pass
    with kept(tmp_path):
        refused = f"LockedError {tmp_path} is locked by another process; wait until that process ends"
        assert in_another_process("locked", tmp_path).startswith(refused)
        assert in_another_process("kept", tmp_path) == ""
    assert in_another_process("locked", tmp_path) == ""


def test_a_folder_that_is_kept_may_be_missing_and_is_not_made(tmp_path: Path) -> None:
    with kept(tmp_path / "out"):
        assert not (tmp_path / "out").exists()
    with kept(tmp_path):
        assert not list(tmp_path.iterdir())
