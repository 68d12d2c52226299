"""The user's cache folder: what is stored is read back; whatever is wrong with it, nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from extract.system import user_cache
from extract.system.user_cache import cache_file


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


def test_without_a_home_folder_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(user_cache.os.path, "expanduser", lambda path: path)
    with pytest.raises(FileNotFoundError, match="no home folder"):
        cache_file("a")
