"""What a power cut leaves: any of the pages written since the last fdatasync, in any state between old and new."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from extract import Status
from extract.store.format.dataset import DataSet
from extract.store.format.shard import Shard
from extract.store.format.writer import ShardWriter
from tests.extract.store.rows import VALUES, create, write

PAGE = 512  # what a disk writes whole


class Disk:
    """Keeps what was written to a file, and which of it was forced to the disk."""

    def __init__(self, content: bytes) -> None:
        self.safe = bytearray(content)
        self.loose: list[tuple[int, bytes]] = []

    def written(self, content: memoryview, offset: int) -> None:
        self.loose.append((offset, bytes(content)))

    def forced(self) -> None:
        for offset, content in self.loose:
            self.safe[offset : offset + len(content)] = content
        self.loose = []

    def after_a_power_cut(self, dice: random.Random) -> bytes:
        """The safe bytes, with each page that was written since as it was after some of the writes, or none."""
        pages = bytearray(self.safe)
        for start in range(0, len(pages), PAGE):
            page = slice(start, start + PAGE)
            for offset, content in self.loose[: dice.randint(0, len(self.loose))]:
                first, stop = max(offset, start), min(offset + len(content), start + PAGE)
                if first < stop:
                    pages[first:stop] = content[first - offset : stop - offset]
            assert len(pages[page]) <= PAGE
        return bytes(pages)


@pytest.mark.parametrize(("retried", "sync_s"), [
    (False, 0.0),
    (True, 1e9),
    pytest.param(True, 0.0, marks=pytest.mark.slow),
    pytest.param(False, 1e9, marks=pytest.mark.slow),
])  # fmt: skip
def test_no_row_that_says_it_is_done_is_wrong(
    data: DataSet, monkeypatch: pytest.MonkeyPatch, sync_s: float, retried: bool
) -> None:
    part = create(data, 0)
    if retried:  # rows that have failed are written over, as by a run that goes on
        with ShardWriter(data, 0) as writer:
            write(writer, list(range(10)), Status.DECODE_ERROR)
    disk, dice = Disk(part.read_bytes()), random.Random(0)
    states: list[tuple[int, bytes]] = []
    done = 0
    pwrite, forced = os.pwrite, os.fdatasync

    def recorded(file: int, content: memoryview, offset: int) -> int:
        disk.written(content, offset)
        states.append((done, disk.after_a_power_cut(dice)))  # in the middle of a batch
        return pwrite(file, content, offset)

    monkeypatch.setattr(os, "pwrite", recorded)
    monkeypatch.setattr(os, "fdatasync", lambda file: (forced(file), disk.forced()))
    with ShardWriter(data, 0, sync_s=sync_s) as writer:
        for rows in ([0, 1], [2], [3, 4, 5], [6], [7, 8, 9]):
            write(writer, rows)
            done += 1
            states += [(done, disk.after_a_power_cut(dice)) for _ in range(6)]
    monkeypatch.undo()
    torn = 0
    batches = np.array([1, 1, 2, 3, 3, 3, 4, 5, 5, 5])
    for acknowledged, content in states:
        part.write_bytes(content)
        with ShardWriter(data, 0) as writer:
            torn += writer.check()
            good = np.flatnonzero(writer.status == Status.OK)
        with Shard(part) as shard:
            for name, values in VALUES.items():
                assert np.array_equal(shard.read(name, 0, 10)[good], values[good])
            assert shard.column("source_size")[good].tolist() == good.tolist()
            assert shard.column("source_mtime_ns")[good].tolist() == (2 * good).tolist()
        if sync_s == 0:  # and then, nothing that was acknowledged is lost
            assert set(np.flatnonzero(batches <= acknowledged)) <= set(good)
    assert torn > 0 or sync_s == 0  # it is not the luck of the dice


@pytest.mark.parametrize("count", [pytest.param(12, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.soak)])
def test_killed_and_resumed_runs_end_as_one_that_was_left_alone(count: int) -> None:
    script = Path(__file__).with_name("kill.py")
    run = subprocess.run([sys.executable, str(script), str(count)], capture_output=True, text=True,
                         cwd=Path(__file__).parents[3])  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["kills"], result["all the same"]) == (count, True)
    assert len(result["left"]) >= 3  # it struck in several places
