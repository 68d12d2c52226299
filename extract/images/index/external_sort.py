"""Runs: sorted rows on disk, a piece of a listing each, that are read side by side as one.

A run is a file of lines of JSON. The first tells of it; each other one is a block of rows, column by column. Its name,
`000017-000019.jsonl`, has the first and the last piece that it holds: after pieces were merged, and before they are
removed, the widest counts.
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
from extract.system.atomic_files import whole_file

__all__ = ["Runs"]

# Memory of a merge: 400 blocks of 500 rows, of 300 bytes each.
BLOCK_ROWS = 500
MERGED_AT_ONCE = 400


class Runs:
    """The runs in a folder.

    Args:
        folder: where they are.
        in_sequence: whether each piece comes behind the one before, and its rows have nothing but a path.

    Attributes:
        heads: what is known of each run: `rows`, `last` path, whether there was an `end` behind it, and what else was
            given to `add`.
    """

    def __init__(self, folder: Path, *, in_sequence: bool):
        self._folder, self._in_sequence = folder, in_sequence
        self._look()

    def _look(self) -> None:
        """Find the runs; what is left of those that were merged is removed."""
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
        del head["deciding"]  # of all runs, they may not fit into memory
        self.heads.append(head)
        self._paths.append(path)

    @property
    def rows(self) -> int:
        """In all of them."""
        return sum(head["rows"] for head in self.heads)

    @property
    def ended(self) -> bool:
        """Whether everything is listed."""
        return bool(self.heads) and bool(self.heads[-1]["end"])

    def deciding(self) -> Iterator[str]:
        """The names that decide what classes there are, some more than once."""
        return itertools.chain.from_iterable(_head(path)["deciding"] for path in self._paths)

    def add(self, rows: list[Row], deciding: Iterable[str], *, end: bool, **more: Any) -> None:
        """Write the next piece.

        Args:
            rows: sorted.
            deciding: names that decide what classes there are.
            end: whether it is the last.
            more: to be found in its head again.
        """
        last = os.fsdecode(rows[-1].path) if rows else ""
        head = {"rows": len(rows), "last": last, "deciding": list(deciding), "end": end, **more}
        self._take(self._write(self._pieces, self._pieces, head, rows))
        self._pieces += 1

    def _write(self, first: int, last: int, head: dict[str, Any], rows: Iterable[Row]) -> Path:
        path = self._folder / f"{first:06d}-{last:06d}.jsonl"
        with whole_file(path) as file:
            file.write(json.dumps(head).encode() + b"\n")
            found = iter(rows)
            while block := list(itertools.islice(found, BLOCK_ROWS)):
                paths, *others = zip(*block, strict=True)
                columns = [list(map(os.fsdecode, paths)), *([] if self._in_sequence else others)]
                file.write(json.dumps(columns).encode() + b"\n")
        return path

    def merge(self, on_rows: Callable[[int], None]) -> None:
        """Make fewer of them where there are too many to be read side by side.

        Args:
            on_rows: called with the rows of each new run.
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
        """All rows from this path on, in order."""
        behind = [_rows_of(path, start) for path, head in zip(self._paths, self.heads, strict=True)
                  if os.fsencode(head["last"]) >= start]  # fmt: skip
        return itertools.chain.from_iterable(behind) if self._in_sequence else heapq.merge(*behind)


def _head(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head: dict[str, Any] = json.loads(file.readline())
        return head


def _rows_of(path: Path, start: bytes) -> Iterator[Row]:
    """The rows of a run from a path on. The file is open only while a block is read: there may be hundreds."""
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
