"""Runs: files of sorted rows, merged while they are read. Each run is a piece of a listing, or several merged pieces.

A run is a file of JSON lines. The first line is the head; every other line is a block of rows, column by column. The
file name, `000017-000019.jsonl`, contains the numbers of its first and last piece. If merged runs have not been removed
yet, the run with the most pieces is valid.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from extract.images.csv_lists import Row
from extract.system.atomic_files import atomic_write

__all__ = ["Runs"]

# Memory of a merge: 400 blocks of 500 rows, 300 bytes a row.
BLOCK_ROWS = 500
MERGED_AT_ONCE = 400


class Runs:
    """The runs in a folder.

    Args:
        folder: folder of the runs.
        in_sequence: whether each piece sorts after the piece before, and rows have only a path.

    Attributes:
        heads: head of each run: number of `rows`, `last` path, `end` (whether it ends the listing), and the other
            values given to `add`.
    """

    def __init__(self, folder: Path, *, in_sequence: bool):
        self._folder, self._in_sequence = folder, in_sequence
        self._look()

    def _look(self) -> None:
        """Find the runs, and remove files of runs that were merged."""
        widest: dict[int, tuple[int, Path]] = {}
        for path in self._folder.glob("*.jsonl"):
            if named := re.fullmatch(r"(\d{6,})-(\d{6,})\.jsonl", path.name, re.ASCII):
                first, last = map(int, named.groups())
                widest[first] = max(widest.get(first, (last, path)), (last, path))
        self._paths: list[Path] = []
        self.heads: list[dict[str, Any]] = []
        self._pieces = 0
        while self._pieces in widest:
            last, path = widest[self._pieces]
            self._take(path)
            self._pieces = last + 1
        for path in set(self._folder.glob("*.jsonl")) - set(self._paths):
            path.unlink()

    def _take(self, path: Path) -> None:
        head = _head(path)
        del head["deciding"]  # those of all runs may not fit into memory
        self.heads.append(head)
        self._paths.append(path)

    @property
    def rows(self) -> int:
        """Number of rows in all runs."""
        return sum(head["rows"] for head in self.heads)

    @property
    def ended(self) -> bool:
        """Whether the listing is complete."""
        return bool(self.heads) and bool(self.heads[-1]["end"])

    def deciding(self) -> Iterator[str]:
        """Yield the names that determine the classes, some repeatedly."""
        return itertools.chain.from_iterable(_head(path)["deciding"] for path in self._paths)

    def add(self, rows: list[Row], deciding: Iterable[str], *, end: bool, **more: Any) -> None:
        """Write the next piece as a run.

        Args:
            rows: sorted rows.
            deciding: names that determine the classes.
            end: whether this piece is the last.
            more: other values to store in the head.
        """
        last = os.fsdecode(rows[-1].path) if rows else ""
        head = {"rows": len(rows), "last": last, "deciding": list(deciding), "end": end, **more}
        self._take(self._write(self._pieces, self._pieces, head, rows))
        self._pieces += 1

    def _write(self, first: int, last: int, head: dict[str, Any], rows: Iterable[Row]) -> Path:
        path = self._folder / f"{first:06d}-{last:06d}.jsonl"
        with atomic_write(path) as file:
            file.write(json.dumps(head).encode() + b"\n")
            found = iter(rows)
            while block := list(itertools.islice(found, BLOCK_ROWS)):
                paths, *others = zip(*block, strict=True)
                columns = [list(map(os.fsdecode, paths)), *([] if self._in_sequence else others)]
                file.write(json.dumps(columns).encode() + b"\n")
        return path

    def merge(self, on_rows: Callable[[int], None]) -> None:
        """Merge runs until at most `MERGED_AT_ONCE` are left, unless they are in sequence.

        Args:
            on_rows: called with the number of rows of each merged run.
        """
        while not self._in_sequence and len(self._paths) > MERGED_AT_ONCE:
            count = min(MERGED_AT_ONCE, len(self._paths) - MERGED_AT_ONCE + 1)
            rows = [0, *itertools.accumulate(head["rows"] for head in self.heads)]
            start = min(range(len(self._paths) - count + 1), key=lambda one: rows[one + count] - rows[one])
            paths, heads = self._paths[start : start + count], self.heads[start : start + count]
            head = {
                **heads[-1],
                "rows": sum(one["rows"] for one in heads),
                "last": max((one["last"] for one in heads), key=os.fsencode),
                "deciding": list(dict.fromkeys(name for path in paths for name in _head(path)["deciding"])),
                "ids": any(one["ids"] for one in heads),
            }
            first, last = paths[0].name.partition("-")[0], paths[-1].stem.partition("-")[2]
            self._write(int(first), int(last), head, heapq.merge(*(_rows_of(path, b"") for path in paths)))
            self._look()
            on_rows(head["rows"])

    def in_order(self, start: bytes) -> Iterator[Row]:
        """Yield the rows with a path of at least `start`, in order."""
        behind = [_rows_of(path, start) for path, head in zip(self._paths, self.heads, strict=True)
                  if os.fsencode(head["last"]) >= start]  # fmt: skip
        return itertools.chain.from_iterable(behind) if self._in_sequence else heapq.merge(*behind)


def _head(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head: dict[str, Any] = json.loads(file.readline())
        return head


def _rows_of(path: Path, start: bytes) -> Iterator[Row]:
    """Yield a run's rows from path `start` on. The file is open only while a block is read: there may be hundreds."""
    with path.open("rb") as file:
        file.readline()
        place = file.tell()
    while True:
        with path.open("rb") as file:
            file.seek(place)
            line = file.readline()
        if not line:
            return
        place += len(line)
        names, *others = json.loads(line)
        paths = list(map(os.fsencode, names))
        if paths[-1] < start:
            continue
        rows = map(Row, paths, *others) if others else map(Row, paths, itertools.repeat(0))
        yield from rows if paths[0] >= start else (row for row in rows if row.path >= start)
