"""The user's cache folder: what is stored is read back; whatever is wrong with it, nothing is."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from extract.store.places import objects
from extract.store.places.block_cache import BLOCK_BYTES, CACHE_BYTES, BlockCache, RemoteFile, _hashes
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


# The cache of blocks of remote files. Its checksums are public: whoever can write to the folder can compute them.

CONTENT = np.random.default_rng(0).bytes(300_000)
REMOTE = RemoteFile("s3://bucket/shards/000000.h5", len(CONTENT), "0" * 64)


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, with the one block of REMOTE."""
    monkeypatch.setattr(objects, "read_range", lambda url, start, stop: CONTENT[start:stop])
    assert read_block(tmp_path / "blocks") == CONTENT
    return tmp_path / "blocks"


def read_block(folder: Path, cache_bytes: int = CACHE_BYTES) -> bytes:
    out = bytearray(len(CONTENT))
    BlockCache(cache_bytes, folder).read(REMOTE, 0, len(CONTENT), memoryview(out))
    return bytes(out)


def block_of(folder: Path) -> Path:
    (block,) = folder.glob("*/*")
    return block


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_block_of_another_user_is_not_read(blocks: Path) -> None:
    block, forged = block_of(blocks), b"E" * len(CONTENT)
    block.write_bytes(forged + b"".join(_hashes(REMOTE, 0, forged)))
    assert read_block(blocks) == forged  # of this user, it is taken for a block
    os.chown(block, 65534, 65534)
    assert read_block(blocks) == CONTENT
    assert block.stat().st_uid == os.geteuid()  # it was fetched again and replaced


@pytest.mark.parametrize("made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_something_else_in_the_place_of_a_block_is_not_waited_for(blocks: Path, made: Callable[[Path], None]) -> None:
    block = block_of(blocks)
    block.unlink()
    made(block)
    assert read_block(blocks) == CONTENT


def test_links_in_the_folder_of_blocks_lead_to_no_change_elsewhere(blocks: Path, tmp_path: Path) -> None:
    victim = tmp_path / "documents" / "letter.new"  # also what killed processes leave has this ending
    victim.parent.mkdir()
    victim.write_bytes(b"dear")
    block = block_of(blocks)
    # Whoever can write to the folder can guess a name that is made of process and thread.
    block.with_name(f"{block.name}.{os.getpid()}-{threading.get_ident()}.new").symlink_to(victim)
    BlockCache(folder=blocks)._store(REMOTE, 0, CONTENT)
    assert victim.read_bytes() == b"dear"
    for planted in (blocks / "bytes", blocks / "zz", block.parent):
        shutil.rmtree(block.parent)
        (blocks / "bytes").unlink()
        planted.symlink_to(victim if planted.name == "bytes" else victim.parent)
        assert read_block(blocks) == CONTENT
        assert [path.name for path in victim.parent.iterdir()] == ["letter.new"]
        assert victim.read_bytes() == b"dear"
        planted.unlink()
        assert read_block(blocks) == CONTENT


def test_blocks_are_used_from_memory_where_they_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(objects, "read_range", lambda url, start, stop: CONTENT[start % len(CONTENT) :][: stop - start])
    (tmp_path / "file").touch()
    large = RemoteFile("s3://bucket/x", 3 * BLOCK_BYTES, "1" * 64)
    cache, out = BlockCache(folder=tmp_path / "file" / "blocks"), bytearray(10)
    for start in (0, BLOCK_BYTES, 2 * BLOCK_BYTES):
        cache.read(large, start, start + 10, memoryview(out))
        assert bytes(out) == CONTENT[start % len(CONTENT) :][:10]
    (record,) = caplog.records
    assert "blocks of remote files are not kept (Not a directory)" in record.getMessage()
