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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from extract.credentials import without_credentials
from extract.errors import InputError, first_line
from extract.images.image_list import Images, ListHashes
from extract.images.sources import BrokenListError, Files
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

_MOST_GROUP_BYTES = 1 << 30
_XXH3 = Text("[0-9a-f]{32}", "a hash of 32 hexadecimal digits")
_DESCRIPTION = {
    "version": int,
    "kind": Text("folder|list", "folder or list"),
    "root": str,
    "ends": [int],
    "classes": [str],
    "splits": [Text("train|val|test", "train, val or test")],
    "left_out": {str: int},
    "paths_xxh3": _XXH3,
    "labels_xxh3": _XXH3,
}


class PlanColumn(Sequence[Any]):
    """A column of a plan; `[row]`, `[start:stop]` and `[array of rows]` read the row groups that they need.

    The last group is kept in memory. It is not sent to worker processes.

    Args:
        file: the file of the plan.
        name: name of the column.
        ends: of each row group, the row behind its last.
        n_classes: number of classes.
        digest: hash of the description; a file that has replaced this one has another.
    """

    def __init__(self, file: Path, name: str, ends: list[int], n_classes: int, digest: bytes):
        self._file, self._name, self._ends, self._n_classes, self._digest = file, name, ends, n_classes, digest
        self._cached: tuple[int, list[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": None}

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(self._group, range(len(self._ends))))

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice | np.ndarray):
            numbers = rows.tolist() if isinstance(rows, np.ndarray) else range(len(self))[rows]
            values = [self[row] for row in numbers]
            return np.array(values, np.int64) if self._name == "label" else values
        if not 0 <= rows < len(self):
            raise IndexError(rows)
        number = bisect.bisect(self._ends, rows)
        return self._group(number)[rows - self._ends[number]]  # counted from the end of the group

    def _group(self, number: int) -> list[Any]:
        """Return the column in a row group.

        Raises:
            BrokenListError: the file is missing or damaged.
        """
        if self._cached is None or self._cached[0] != number:
            with _opened(self._file, [self._name] if COLUMNS[self._name] == "binary" else []) as parquet:
                if parquet.metadata.metadata.get(METADATA_XXH3) != self._digest:
                    raise ValueError("it was replaced by another plan")
                self._cached = number, self._read(parquet, number)
        return self._cached[1]

    def _read(self, parquet: Any, number: int) -> list[Any]:
        n_rows = self._ends[number] - (self._ends[number - 1] if number else 0)
        column = _texts(parquet.read_row_group(number, [self._name], use_threads=False).column(0))
        if column.null_count or str(column.type) != COLUMNS[self._name] or len(column) != n_rows:
            nulls = f"{column.null_count:,} nulls"
            raise ValueError(f"the column {self._name} is {len(column):,} of {n_rows:,} {column.type}, with {nulls}")
        values = column.to_pylist()
        if self._name == "path":
            return list(map(os.fsdecode, values))
        if self._name == "id":
            return [value.decode() for value in values]
        if self._name == "split":
            return [SPLIT_CODES[value] for value in values]
        if not -1 <= min(values) <= max(values) < self._n_classes:
            raise ValueError("a label is out of range")
        return list(values)


def open_plan(where: str | os.PathLike[str]) -> Images:
    """Open a plan. Its rows are checked when they are read.

    Raises:
        InputError: the folder is not a plan, or its description is damaged.
    """
    file = Path(where).resolve() / PLAN_FILE
    if not file.is_file():
        raise InputError(f"{file.parent} is not a plan: it has no {PLAN_FILE}")
    with _opened(file) as parquet:
        metadata, names = parquet.metadata.metadata or {}, parquet.schema_arrow.names
        content, digest = (metadata.get(key, b"") for key in (METADATA, METADATA_XXH3))
        if xxhash.xxh3_128_hexdigest(content).encode() != digest:
            raise ValueError("its description has another hash")
        if (version := parse_json(content, file).get("version")) != VERSION:
            raise InputError(
                f"{file} has version {version}, expected {VERSION}",
                hint=f"delete the plan {file.parent}, and run `layertap embed --plan` again",
            )
        description = parse_json(content, file, _DESCRIPTION)
        kind, root = description["kind"], description["root"]
        ends = description["ends"]  # of each row group, the row behind its last
        if not ends or ends != sorted({*ends} - {0}) or not COLUMNS.keys() - {"id"} <= set(names) <= COLUMNS.keys():
            raise ValueError(f"it has {ends[-1:]} rows of the columns {', '.join(names)}")
        if "\0" in root or not (is_url(root) or root.startswith("/")):
            raise ValueError(f"its root is {root!r}")
    columns: dict[str, Any] = {
        name: PlanColumn(file, name, ends, len(description["classes"]), digest) for name in names
    }
    return Images(
        without_credentials(root),
        columns["path"],
        columns["label"],
        description["classes"],
        columns["split"],
        Files(base_of(kind, root), columns["path"], anywhere=kind == "list"),
        columns.get("id"),
        Counter(description["left_out"]),
        stored_hashes=ListHashes(sorted(description["splits"]), description["paths_xxh3"], description["labels_xxh3"]),
    )


def _texts(column: Any) -> Any:
    """Return the texts of a column that was read as a dictionary and numbers; a column of other values unchanged.

    The metadata of a file do not tell how large they are: a plan of 39 kB took 9.4 GB.

    Raises:
        ValueError: they are too large.
    """
    from pyarrow import compute, types

    if not types.is_dictionary(column.type):
        return column
    sizes = [compute.binary_length(chunk.dictionary).take(chunk.indices) for chunk in column.chunks]
    if (n_bytes := sum(compute.sum(size).as_py() or 0 for size in sizes)) > _MOST_GROUP_BYTES:
        raise ValueError(f"a row group has {n_bytes:,} bytes of text")
    return column.cast(column.type.value_type)


@contextlib.contextmanager
def _opened(file: Path, texts: Sequence[str] = ()) -> Iterator[Any]:
    """Context manager: open the file of a plan; raise a BrokenListError for errors of the file and in the block.

    Args:
        file: the file.
        texts: columns that are read as a dictionary and numbers.
    """
    arrow, parquet = (library(name, "parquet", f"the plan {file.parent}") for name in ("pyarrow", "pyarrow.parquet"))
    # Without threads, which could still be running when an error ends the process.
    options = {"pre_buffer": False, "page_checksum_verification": True, "read_dictionary": list(texts)}
    try:
        with os.fdopen(open_regular(file), "rb") as content, parquet.ParquetFile(content, **options) as opened:
            yield opened
    except InputError:
        raise
    except (OSError, ValueError, LookupError, arrow.ArrowException) as error:
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
