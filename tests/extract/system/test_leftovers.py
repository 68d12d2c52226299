from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extract.system import atomic_files
from extract.system.atomic_files import (
    atomic_write,
    is_temporary,
    remove_leftovers,
    temporary_file,
    temporary_folder,
    write_json,
)
from tests.extract.store.processes import kill_itself, killed, started


def killed_in(function: Callable[..., Any], path: Path) -> None:
    """Call a function in another process, which kills itself; what it leaves is as old as can be."""
    killed(function, path)
    age(path.parent)


def age(folder: Path) -> None:
    for left in folder.iterdir():
        os.utime(left, (0, 0), follow_symlinks=False)


def kill_while_writing(path: Path) -> None:
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        kill_itself()


def kill_in_folder(path: Path) -> None:
    with temporary_folder(path) as folder:
        (folder / "features").mkdir()
        (folder / "features" / "a").write_bytes(b"half")
        kill_itself()


def hold(path: Path, ready: Any, end: Any) -> None:
    with temporary_file(path) as (file, _), temporary_folder(path):
        file.write(b"living")
        ready.set()
        end.wait(30)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_of_a_killed_process_is_removed_when_the_file_is_written_again(tmp_path: Path) -> None:
    killed_in(kill_while_writing, tmp_path / "a.json")
    killed_in(kill_while_writing, tmp_path / "b.json")
    assert len(names(tmp_path)) == 2
    write_json(tmp_path / "a.json", {})
    assert [name[:6] for name in names(tmp_path)] == ["a.json", "b.json"]
    assert "b.json" not in names(tmp_path)


def test_a_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    killed_in(kill_in_folder, tmp_path / "a")
    assert len(names(tmp_path)) == 1
    with temporary_folder(tmp_path / "a") as folder:
        assert names(tmp_path) == [folder.name]
    assert names(tmp_path) == []


def test_what_a_living_process_writes_is_kept(tmp_path: Path) -> None:
    ready, end = multiprocessing.Event(), multiprocessing.Event()
    process = started(hold, tmp_path / "a", ready, end)
    assert ready.wait(30)
    age(tmp_path)
    living = names(tmp_path)
    assert len(living) == 2
    os.kill(process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    try:
        write_json(tmp_path / "a", {})
        with temporary_folder(tmp_path / "a"):
            pass
        assert names(tmp_path) == sorted([*living, "a"])
    finally:
        os.kill(process.pid, signal.SIGCONT)  # type: ignore[arg-type]
        end.set()
        process.join()
    assert names(tmp_path) == ["a"]


def test_a_file_that_was_made_just_now_is_kept_though_it_is_not_locked_yet(tmp_path: Path) -> None:
    for name in (f"a.{atomic_files._token()}.new", f".a.{atomic_files._token()}.new/lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = names(tmp_path)
    remove_leftovers(tmp_path / "a")
    assert names(tmp_path) == before
    age(tmp_path)
    remove_leftovers(tmp_path / "a")
    assert names(tmp_path) == []


def test_a_file_without_a_lock_is_kept_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    killed_in(kill_while_writing, tmp_path / "a")
    monkeypatch.setattr("fcntl.flock", no_locks)
    write_json(tmp_path / "a", {})
    assert len(names(tmp_path)) == 2


USERS = [
    "a.new", "a.123.new", "a.20260101.new", ".a.new", "a.0123456789ab-01234567.new.txt", "b.0123456789ab-01234567.new",
    "a.0123456789AB-01234567.new", "xa.0123456789ab-01234567.new", "a.b.0123456789ab-01234567.new",
]  # fmt: skip


def test_files_of_the_user_are_kept(tmp_path: Path) -> None:
    for name in USERS:
        (tmp_path / name).write_text("mine")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a.0123456789ab-01234567.new").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "a.0123456789ab-01234568.new")
    age(tmp_path)
    before = names(tmp_path)
    write_json(tmp_path / "a", {})
    with temporary_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == sorted([*before, "a"])
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_link_in_a_leftover_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    (tmp_path / "y").write_text("mine")
    left = tmp_path / "out" / f".a.{atomic_files._token()}.new"
    left.mkdir(parents=True)
    (left / "linked").symlink_to(tmp_path / "mine")
    (left / "lock").symlink_to(tmp_path / "y")
    age(tmp_path / "out")
    remove_leftovers(tmp_path / "out" / "a")
    assert left.exists()  # its lock is a link: not one of ours
    (left / "lock").unlink()
    age(tmp_path / "out")
    remove_leftovers(tmp_path / "out" / "a")
    assert not left.exists()
    assert (tmp_path / "mine" / "x").exists()
    assert (tmp_path / "y").read_text() == "mine"


def test_an_error_inside_is_raised_and_nothing_stays(tmp_path: Path) -> None:
    for temporary in (temporary_file, temporary_folder):
        with pytest.raises(FileNotFoundError, match="inside"), temporary(tmp_path / "a"):  # type: ignore[operator]
            raise FileNotFoundError("inside")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "日" * 85, "a\udcff" + "b" * 200])
def test_long_names_get_a_shorter_temporary_name(tmp_path: Path, name: str) -> None:
    killed_in(kill_while_writing, tmp_path / name)
    killed_in(kill_in_folder, tmp_path / name)
    assert all(map(is_temporary, tmp_path.iterdir()))
    write_json(tmp_path / name, {})
    assert names(tmp_path) == [name]


def test_a_file_is_written_where_a_lock_does_not_exclude_its_own_process_and_clocks_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files.fcntl, "flock", lambda *_: None)  # as on NFS, in one process
    now = time.time()
    monkeypatch.setattr(atomic_files.time, "time", lambda: now + 3600)
    write_json(tmp_path / "x.json", {"a": 1})
    assert names(tmp_path) == ["x.json"]
