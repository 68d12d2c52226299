"""Runs: files of sorted rows, merged while they are read. Each run, `000017.jsonl`, is a piece of a listing.

A run is a file of JSON lines. The first line is the head; every other line is a block of rows, column by column.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from extract.errors import InputError
from extract.images.csv_lists import Row
from extract.system.atomic_files import atomic_write, open_unfollowed
from extract.system.json_files import parse_json

__all__ = ["Runs"]

BLOCK_ROWS = 100  # one block of each run is in memory while they are merged: 40 KB
_HEAD_BYTES = 1 << 28

# Shape of a head; see `extract.system.json_files`. A run of a folder has left_out, a run of a list the others.
_HEAD = {
    "rows": int,
    "last": str,
    "deciding": [str],
    "end": bool,
    "left_out?": {str: int},
    "behind?": dict,
    "ids?": bool,
}


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
        self.heads: list[dict[str, Any]] = []
        while self._path(len(self.heads)).exists():
            self._add_head()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.jsonl"

    def _paths(self) -> list[Path]:
        return [self._path(number) for number in range(len(self.heads))]

    def _add_head(self) -> None:
        head = _head(self._path(len(self.heads)))
        if not self._in_sequence and not {"behind", "ids"} <= head.keys():
            raise _damaged(self._path(len(self.heads)))
        del head["deciding"]  # those of all runs may not fit into memory
        self.heads.append(head)

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
        return itertools.chain.from_iterable(_head(path)["deciding"] for path in self._paths())

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
        with atomic_write(self._path(len(self.heads)), tidy=False) as file:
            file.write(json.dumps(head).encode() + b"\n")
            for start in range(0, len(rows), BLOCK_ROWS):
                paths, *others = zip(*rows[start : start + BLOCK_ROWS], strict=True)
                columns = [list(map(os.fsdecode, paths)), *([] if self._in_sequence else others)]
                file.write(json.dumps(columns).encode() + b"\n")
        self._add_head()

    def in_order(self, start: bytes) -> Iterator[Row]:
        """Yield the rows with a path of at least `start`, in order."""
        runs = [_rows_of(path, start) for path, head in zip(self._paths(), self.heads, strict=True)
                if os.fsencode(head["last"]) >= start]  # fmt: skip
        return itertools.chain.from_iterable(runs) if self._in_sequence else heapq.merge(*runs)


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is damaged", hint=f"delete {path.parent}, and run `layertap plan` again")


def _head(path: Path) -> dict[str, Any]:
    """Return the head of a run.

    Raises:
        InputError: the file is not a run, or is damaged.
    """
    with os.fdopen(open_unfollowed(path, os.O_RDONLY), "rb") as file:
        line = file.readline(_HEAD_BYTES)
    try:
        return parse_json(line, path, _HEAD)
    except InputError as error:
        raise _damaged(path) from error


def _rows_of(path: Path, start: bytes) -> Iterator[Row]:
    """Yield a run's rows from path `start` on. The file is open only while a block is read: there may be hundreds.

    Raises:
        InputError: a block is damaged.
    """
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
        paths, others = _block(line, path)
        if paths[-1] < start:
            continue
        rows = map(Row, paths, *others) if others else map(Row, paths, itertools.repeat(0))
        yield from rows if paths[0] >= start else (row for row in rows if row.path >= start)


def _block(line: bytes, path: Path) -> tuple[list[bytes], list[list[Any]]]:
    """Return the paths of a block, and its other columns: none, or place, label, split and id.

    Raises:
        InputError: the block is damaged.
    """
    try:
        names, *others = json.loads(line)
        kinds = zip(others, (int, str | None, str, str | None), strict=True) if others else ()
        if not names or not all(len(column) == len(names) for column in others):
            raise ValueError
        if not all(isinstance(value, kind) for column, kind in kinds for value in column):
            raise ValueError
        return list(map(os.fsencode, names)), others
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path) from error
