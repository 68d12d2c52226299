"""Plans: sorted lists of images on disk, of which no process reads more than a few row groups.

A plan is a folder with a Parquet file, `layertap-plan.parquet`, of these columns:

    path     binary   ascending by bytes, each once; relative to `root` (kind "folder") or to its folder, or a URL
    label    int32    index into `classes`; -1 for no class
    split    uint8    index into SPLIT_CODES
    id       binary   UTF-8; only for a list with ids

`layertap_plan` in the metadata of the file is the description, a JSON object (`_DESCRIPTION`), and `layertap_plan_xxh3`
its xxh3-128. The pages of the file have checksums, so that damage is found when rows are read. The same images give the
same bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from extract.credentials import without_credentials
from extract.errors import InputError, first_line
from extract.images.image_list import Images, ListHashes
from extract.images.sources import BrokenListError, Files, ImageSource
from extract.system.atomic_files import open_regular
from extract.system.json_files import Text, parse_json
from extract.system.optional_libraries import library
from extract.system.urls import is_url, without_query

__all__ = ["COLUMNS", "METADATA", "METADATA_XXH3", "PLAN_FILE", "SPLIT_CODES", "VERSION", "base_of", "open_plan"]

PLAN_FILE = "layertap-plan.parquet"
VERSION = 3
METADATA = b"layertap_plan"
METADATA_XXH3 = b"layertap_plan_xxh3"
COLUMNS = {"path": "binary", "label": "int32", "split": "uint8", "id": "binary"}
SPLIT_CODES = ("", "train", "val", "test")

_MOST_BYTES = 1 << 30  # of the description
_READ: dict[str, Callable[[Any], Any]] = {
    "path": os.fsdecode,
    "label": int,
    "split": SPLIT_CODES.__getitem__,
    "id": bytes.decode,
}
_DESCRIPTION = {
    "version": int,
    "kind": Text("folder|list", "folder or list"),
    "root": str,
    "ends": [int],
    "classes": [str],
    "parts?": bool,
    "splits": [str],
    "left_out": {str: int},
    "paths_xxh3": str,
    "labels_xxh3": str,
}


class PlanColumn(Sequence[Any]):
    """A column of a plan; `[row]`, `[start:stop]` and `[array of rows]` read the row groups that they need.

    The last group is kept in memory. It is not sent to worker processes.

    Args:
        file: the file of the plan.
        name: name of the column.
        starts: first row of each row group, and the number of rows.
        n_classes: number of classes.
        digest: hash of the description; a file that has replaced this one has another.
    """

    def __init__(self, file: Path, name: str, starts: list[int], n_classes: int, digest: bytes):
        self._file, self._name, self._starts, self._n_classes, self._digest = file, name, starts, n_classes, digest
        self._cached: tuple[int, list[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": None}

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(self._group, range(len(self._starts) - 1)))

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice | np.ndarray):
            numbers = rows.tolist() if isinstance(rows, np.ndarray) else range(len(self))[rows]
            values = [self[row] for row in numbers]
            return np.array(values, np.int64) if self._name == "label" else values
        if not 0 <= rows < len(self):
            raise IndexError(rows)
        number = bisect.bisect(self._starts, rows) - 1
        return self._group(number)[rows - self._starts[number]]

    def _group(self, number: int) -> list[Any]:
        """Return the column in a row group.

        Raises:
            BrokenListError: the file is missing or damaged.
        """
        if self._cached is None or self._cached[0] != number:
            with _opened(self._file) as parquet:
                if parquet.metadata.metadata.get(METADATA_XXH3) != self._digest:
                    raise ValueError("it was replaced by another plan")
                values = parquet.read_row_group(number, [self._name], use_threads=False).column(0).to_pylist()
                if len(values) != self._starts[number + 1] - self._starts[number]:
                    raise ValueError(f"row group {number} has {len(values):,} rows")
                if self._name == "label" and not -1 <= min(values) <= max(values) < self._n_classes:
                    raise ValueError("a label is out of range")
                self._cached = number, list(map(_READ[self._name], values))
        return self._cached[1]


def open_plan(where: str | os.PathLike[str]) -> Images:
    """Open a plan. Its rows are checked when they are read.

    Raises:
        InputError: the folder is not a plan, or its description is damaged.
    """
    file = Path(where).resolve() / PLAN_FILE
    if not file.is_file():
        raise InputError(f"{file.parent} is not a plan: it has no {PLAN_FILE}")
    with _opened(file) as parquet:
        metadata = parquet.metadata.metadata or {}
        content, digest = (metadata.get(key, b"") for key in (METADATA, METADATA_XXH3))
        if xxhash.xxh3_128_hexdigest(content).encode() != digest:
            raise ValueError("its description has another hash")
        if (version := parse_json(content, file).get("version")) != VERSION:
            raise ValueError(f"it has version {version}, expected {VERSION}")
        description = parse_json(content, file, _DESCRIPTION)
        kind, root = description["kind"], description["root"]
        if "\0" in root or not (is_url(root) or root.startswith("/")):
            raise ValueError(f"its root is {root!r}")
        types = {column.name: str(column.type) for column in parquet.schema_arrow}
        if {"id": "binary"} | types != COLUMNS:
            raise ValueError(f"it has the columns {types}")
        starts = [0, *description["ends"]]
        if len(starts) < 2 or starts != sorted({*starts}):
            raise ValueError(f"its row groups end at {starts[1:]}")
    columns: dict[str, Any] = {
        name: PlanColumn(file, name, starts, len(description["classes"]), digest) for name in types
    }
    source = partial(Files, base_of(kind, root), anywhere=kind == "list")
    return Images(
        without_credentials(root),
        columns["path"],
        columns["label"],
        description["classes"],
        columns["split"],
        _parts(columns["path"], source) if description.get("parts") else source(columns["path"]),
        columns.get("id"),
        Counter(description["left_out"]),
        stored_hashes=ListHashes(sorted(description["splits"]), description["paths_xxh3"], description["labels_xxh3"]),
    )


def _parts(names: PlanColumn, source: Callable[[Sequence[str]], ImageSource]) -> ImageSource:
    from extract.images.part_names import FileNames
    from extract.images.part_source import Parts

    return Parts(source(FileNames(names)), names)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Context manager: open the file of a plan; raise a BrokenListError for errors of the file and in the block."""
    arrow, parquet = (library(name, "parquet", f"the plan {file.parent}") for name in ("pyarrow", "pyarrow.parquet"))
    # Without threads, which could still be running when an error ends the process. The names of the classes may take
    # more than the 100 MB that readers permit otherwise.
    options = {"pre_buffer": False, "page_checksum_verification": True, "thrift_string_size_limit": _MOST_BYTES}
    try:
        with os.fdopen(open_regular(file), "rb") as content, parquet.ParquetFile(content, **options) as opened:
            yield opened
    except InputError:
        raise
    except (OSError, ValueError, LookupError, TypeError, arrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno:  # of the system; those of Arrow have no number
            raise BrokenListError(f"{file} cannot be read: {error.strerror}") from error
        raise BrokenListError(
            f"{file} is damaged: {first_line(error)}",
            hint=f"delete the plan {file.parent}, and run `layertap embed --plan` again",
        ) from error


def base_of(kind: str, root: str) -> str:
    """Return the folder or URL that the paths of a plan are relative to."""
    if kind == "folder":
        return root
    return (without_query(root) if is_url(root) else root).rpartition("/")[0] or "/"
