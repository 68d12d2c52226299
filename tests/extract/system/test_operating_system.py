"""Where the system lacks what only Linux has: the same features, stored as safely as there."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract import FeatureReader
from extract.store.format.checked_file import memory_file, written_ranges
from extract.store.verify import verify
from extract.system import atomic_files
from extract.system.atomic_files import allocate, flush_to_disk
from tests.extract.store.rows import complete_data_set

# Removes the functions that macOS lacks from every process, and starts processes as macOS does.
LIKE_MACOS = """
import mmap, multiprocessing, os

for name in ("posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity", "memfd_create",
             "copy_file_range", "RWF_NOWAIT"):
    delattr(os, name)
for name in ("MADV_WILLNEED", "MADV_DONTNEED", "MADV_RANDOM", "MADV_SEQUENTIAL"):
    delattr(mmap, name)
multiprocessing.set_start_method("spawn")
"""


def embed(folder: Path, out: Path, path: str, *more: str) -> Path:
    small = ["-b", "timm/test_resnet", "--weights", "random", "--size", "64", "--crop", "64", "--shard-rows", "6"]
    command = [sys.executable, "-m", "layertap", "embed", str(folder), "-o", str(out), *small, *more]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert verify(out).faults == []
    return out


@pytest.mark.slow
def test_the_main_job_without_functions_that_only_linux_has(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIKE_MACOS)
    with FeatureReader(embed(folder, tmp_path / "linux", "", "--workers", "0")) as linux:
        for i, more in enumerate((["--workers", "2"], ["--engine", "processes", "--device", "cpu", "--workers", "1"])):
            with FeatureReader(embed(folder, tmp_path / f"macos {i}", str(tmp_path), *more)) as macos:
                np.testing.assert_array_equal(linux["embedding"][:], macos["embedding"][:])
                assert linux.fingerprint == macos.fingerprint


def test_files_without_functions_that_only_linux_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("posix_fallocate", "memfd_create"):
        monkeypatch.delattr(os, name)
    with FeatureReader(complete_data_set(tmp_path / "like macos", "gzip", shard_rows=7).out) as reader:
        assert verify(tmp_path / "like macos").faults == []
        assert np.isfinite(reader["vector"][:]).all()


def test_a_file_gets_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "new").open("wb") as file:
        allocate(file.fileno(), 5000)
        assert os.fstat(file.fileno()).st_size == 5000
        assert os.fstat(file.fileno()).st_blocks * 512 >= 5000
        monkeypatch.delattr(os, "posix_fallocate")
        allocate(file.fileno(), 9000)
        allocate(file.fileno(), 10)
        assert os.fstat(file.fileno()).st_size == 9000


@pytest.mark.parametrize("is_supported", [True, False])
def test_the_cache_of_the_disk_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supported: bool) -> None:
    calls: list[Any] = []

    def asked(descriptor: int, command: int) -> int:
        calls.append(command)
        if not is_supported:
            raise OSError(errno.ENOTSUP, "not supported")
        return 0

    monkeypatch.setattr(atomic_files, "_FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", asked)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    with (tmp_path / "new").open("wb") as file:
        flush_to_disk(file.fileno())
    assert calls == ([51] if is_supported else [51, "fsync"])


def test_the_written_parts_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_file() as file:
        os.ftruncate(file.fileno(), 1 << 20)
        assert list(written_ranges(file.fileno())) == []
        os.pwrite(file.fileno(), b"x" * 10, 8192)
        ((start, stop),) = written_ranges(file.fileno())
        assert start <= 8192 < 8202 <= stop < 1 << 20

        def refused(*_: Any) -> int:
            raise OSError(errno.EINVAL, "not supported")

        monkeypatch.setattr(os, "lseek", refused)
        assert list(written_ranges(file.fileno())) == [(0, 1 << 20)]
