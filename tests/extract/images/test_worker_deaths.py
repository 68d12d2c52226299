"""The death of a DataLoader worker is told where a batch is waited for; signals are handled afterwards as before.

And what workers inherit does not keep them from working.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from extract.errors import LayertapError
from extract.images import Decoding, list_images, load_batches
from extract.images.loading import Batches, DeadWorkerError
from extract.images.sources import Files


@pytest.fixture(autouse=True)
def no_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch sets its handler once in the life of a process: each test begins as a new process does."""
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    monkeypatch.setattr("extract.images.loading._LOOK_S", 0.05)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


def as_tensor(picture: Any) -> Any:
    return torch.zeros(4, dtype=torch.uint8)


def loaded(folder: Path, workers: int = 1) -> Any:
    return load_batches(list_images(folder), [[0, 1, 2], [3, 4, 5], [6, 7, 8]], Decoding(as_tensor, workers=workers))


def a_child_dies() -> None:
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)


@pytest.mark.parametrize("of_its_own", [False, True], ids=["", "after a loader of the program's own"])
def test_it_is_told_at_the_next_batch_and_not_before(
    folder: Path, of_its_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_its_own:
        list(DataLoader([0], num_workers=1))  # PyTorch sets its handler, which stays
    read, main, first_is_there = Files.read, os.getpid(), multiprocessing.Event()

    def deadly(self: Files, row: int) -> Any:
        if row == 4 and os.getpid() != main:
            first_is_there.wait(30)
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, row)

    monkeypatch.setattr(Files, "read", deadly)
    batches = loaded(folder)
    assert next(batches).rows.tolist() == [0, 1, 2]
    first_is_there.set()
    (worker,) = batches._workers
    wait([worker.sentinel], timeout=30)
    a_child_dies()  # another signal, in the middle of something else
    with pytest.raises(DeadWorkerError, match=r"process that decodes images died \(exit code -9\)"):
        next(batches)
    batches.close()
    a_child_dies()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_what_a_worker_runs_is_no_death(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Files, row: int) -> Any:
        raise RuntimeError("a bug of mine")

    monkeypatch.setattr(Files, "read", fails)
    batches = loaded(folder, workers)
    processes = batches._workers
    with pytest.raises(RuntimeError, match="a bug of mine"), contextlib.closing(batches):
        next(batches)
    assert not any(one.is_alive() for one in processes), "kept by the error"


def test_a_worker_that_hangs_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extract.images.loading._GIVE_UP_S", 0.2)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # for which it is asked to end
    monkeypatch.setattr(Files, "read", lambda self, row: time.sleep(60))
    hangs = pytest.raises(LayertapError, match="a process that decodes images hangs: no image for 0.2 s")
    with hangs as found, contextlib.closing(loaded(folder)) as batches:
        next(batches)
    assert not isinstance(found.value, DeadWorkerError)


@pytest.mark.parametrize(("lives_s", "look_s", "told"), [(0.1, 30, DeadWorkerError), (60, 0.1, ConnectionResetError)])
def test_an_image_that_cannot_be_had_of_a_process_that_is_ending(
    lives_s: float, look_s: float, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch opens the memory of a tensor with the help of the process that has made it."""
    monkeypatch.setattr("extract.images.loading._LOOK_S", look_s)
    worker = multiprocessing.Process(target=time.sleep, args=(lives_s,))
    worker.start()

    def pieces() -> Iterator[Any]:
        raise ConnectionResetError
        yield

    try:
        with pytest.raises(told):
            next(Batches(pieces(), collections.deque(), [worker]))
    finally:
        worker.kill()
        worker.join()


def test_a_piece_or_an_error_that_takes_long_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Files.read

    def slowly(self: Files, row: int) -> Any:
        time.sleep(0.2 * (row % 3 == 0))
        if row == 6:
            raise RuntimeError("DataLoader timed out, says mine")
        return read(self, row)

    monkeypatch.setattr(Files, "read", slowly)
    with contextlib.closing(loaded(folder, 2)) as batches:
        assert [next(batches).rows.tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(RuntimeError, match="says mine"):
            next(batches)


def test_a_handler_of_ones_own_is_heard(folder: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, frame: heard.append(number))
    batches = [loaded(folder), loaded(folder)]
    for each in batches:
        next(each)
    a_child_dies()
    assert heard
    for each in batches:
        each.close()


class WaitsForItsThreads:
    """What becomes of it in a process that has none of them, is written to a file in place of waiting for ever."""

    def __init__(self, marks: Path):
        self._process, self._marks, self._me = os.getpid(), marks, self  # garbage that only a collection finds

    def __del__(self) -> None:
        if os.getpid() != self._process:
            (self._marks / "freed by another process").touch()


def test_workers_do_not_free_what_was_garbage_when_they_were_forked(folder: Path, tmp_path: Path) -> None:
    """A compiled model of OpenVINO waits for its threads then: for ever."""

    def prepare(picture: Any) -> torch.Tensor:
        gc.collect()
        return torch.zeros(1)

    images = list_images(folder)
    WaitsForItsThreads(tmp_path)
    with contextlib.closing(load_batches(images, [list(range(len(images)))], Decoding(prepare, workers=2))) as batches:
        assert len(next(batches).images) == len(images)
    assert not (tmp_path / "freed by another process").exists()
