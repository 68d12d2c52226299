"""The user's cache folder: what is stored is read back; whatever is wrong with it, nothing is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from extract.system import user_cache
from extract.system.user_cache import cache_file, keep_newest, read_cached, write_cached


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layertap"


def test_the_folder_is_that_of_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_file("a/b") == tmp_path / "cache/layertap/a/b"
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_file("a") == tmp_path / ".cache/layertap/a"


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(user_cache.os.path, "expanduser", lambda path: path)
    assert not write_cached("a", b"content")
    assert read_cached("a") is None


def test_content_is_read_back_and_replaced(cache: Path) -> None:
    assert read_cached("a/b") is None
    for content in (b"first", b"", b"the second is longer"):
        assert write_cached("a/b", content)
        assert read_cached("a/b") == content
    assert os.listdir(cache / "a") == ["b"]  # noqa: PTH208


def test_a_file_of_another_user_a_folder_and_a_pipe_are_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_cached("a", b"content")
    (cache / "folder").mkdir()
    assert read_cached("folder") is None
    os.mkfifo(cache / "pipe")
    assert read_cached("pipe") is None
    monkeypatch.setattr(user_cache.os, "geteuid", lambda: os.getuid() + 1)
    assert read_cached("a") is None


def test_a_folder_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.write_bytes(b"a file in place of the folder")
    assert not write_cached("a", b"content")
    assert read_cached("a") is None
    keep_newest("folder", 0)
    cache.unlink()

    def full(path: Path) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(user_cache, "temporary_file", full)
    assert not write_cached("a", b"content")


def test_a_write_that_fails_midway_leaves_the_old_content(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_cached("a", b"old")

    def rename(self: Path, target: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "rename", rename)
    assert not write_cached("a", b"new")
    assert read_cached("a") == b"old"
    assert os.listdir(cache) == ["a"]  # noqa: PTH208


def test_files_that_were_not_used_for_the_longest_time_are_deleted(cache: Path) -> None:
    for number, name in enumerate(["x/a", "x/b", "x/c"]):
        assert write_cached(name, bytes(1000))
        os.utime(cache / name, (number, number))
    assert read_cached("x/a") is not None  # used: now it is the newest
    keep_newest("x", 2200)
    assert sorted(os.listdir(cache / "x")) == ["a", "c"]  # noqa: PTH208
    keep_newest("x", 0)
    assert os.listdir(cache / "x") == []  # noqa: PTH208
