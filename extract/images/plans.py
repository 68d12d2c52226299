"""Plans: sorted lists of images on disk, of which no process reads more than a few row groups.

A plan is a folder with a Parquet file, `layertap-plan.parquet`, of these columns:

    path     binary   ascending by bytes, each once; relative to `root` (kind "folder") or to its folder, or a URL
    label    int32    index into `classes`; -1 for no class
    split    uint8    index into SPLIT_CODES
    id       binary   UTF-8; only for a list with ids

All row groups but the last have `group_rows` rows. `layertap_plan` in the metadata of the file is the description, a
JSON object (`_DESCRIPTION`), and `layertap_plan_xxh3` its xxh3-128. The description has the xxh3-128 of each column of
each row group, so that damage is found when the rows are read. The same images give the same bytes.

A plan may come from an untrusted source, so its rows are checked.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.credentials import without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.images.image_list import Images, ListHashes
from extract.images.sources import BrokenListError, Files
from extract.system.atomic_files import open_regular
from extract.system.json_files import Text, parse_json, read_json
from extract.system.optional_libraries import library
from extract.system.urls import is_url, without_query

__all__ = [
    "COLUMNS",
    "METADATA",
    "METADATA_XXH3",
    "PLAN_FILE",
    "SPLIT_CODES",
    "VERSION",
    "base_of",
    "is_plan",
    "open_plan",
    "values_xxh3",
]

PLAN_FILE = "layertap-plan.parquet"
VERSION = 2
METADATA = b"layertap_plan"
METADATA_XXH3 = b"layertap_plan_xxh3"
COLUMNS = {"path": "binary", "label": "int32", "split": "uint8", "id": "binary"}
SPLIT_CODES = ("", "train", "val", "test")

_MOST_GROUP_ROWS = 1 << 22
_MOST_GROUP_BYTES = 1 << 30
_CACHED_GROUPS = 2  # a batch may span two
_XXH3 = Text("[0-9a-f]{32}", "a hash of 32 hexadecimal digits")
_DESCRIPTION = {
    "version": int,
    "kind": Text("folder|list", "folder or list"),
    "root": str,
    "count": int,
    "group_rows": int,
    "classes": [str],
    "splits": [Text("train|val|test", "train, val or test")],
    "left_out": {str: int},
    "paths_xxh3": _XXH3,
    "labels_xxh3": _XXH3,
    "first_paths": [str],
    "groups_xxh3": {str: [_XXH3]},
}


def is_plan(where: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a plan.

    Raises:
        InputError: it is a plan of an earlier version.
    """
    folder = Path(where)
    with contextlib.suppress(PermissionError):  # listing the folder reports this
        if (folder / PLAN_FILE).is_file():
            return True
    for name in ("plan.json", "listing/begun.json"):
        if not os.path.isfile(folder / name):  # noqa: PTH113  it is False where the folder cannot be read
            continue
        content: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, LayertapError):  # a file of somebody else
            content = read_json(folder / name, {"format": str, "root": str})
        if content.get("format") == "layertap plan":
            again = shlex.join(["layertap", "embed", "--plan", content["root"], "-o", str(folder)])
            raise InputError(
                f"{folder} is a plan of an earlier version of layertap, which this version does not read",
                hint=f"delete it, and list the images again: {again}",
            )
    return False


class PlanColumn(Sequence[Any]):
    """A column of a plan; `[row]`, `[start:stop]` and `[array of rows]` read the row groups that they need.

    Two groups are kept in memory. They are not sent to worker processes.
    """

    def __init__(self, file: Path, name: str, description: dict[str, Any]):
        self._file, self._name = file, name
        self._count: int = description["count"]
        self._group_rows: int = description["group_rows"]
        self._xxh3 = description["groups_xxh3"][name]
        self._n_classes = len(description["classes"])
        self._first_paths = description["first_paths"] if name == "path" else []
        self._is_below = description["kind"] == "folder" and not is_url(description["root"])
        self._cached: dict[int, list[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": {}}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self._count)
            values = []
            for number in range(start // self._group_rows, -(-stop // self._group_rows)):
                first = number * self._group_rows
                values += self._group(number)[max(start - first, 0) : stop - first]
        elif isinstance(rows, np.ndarray):
            values = [self[row] for row in rows.tolist()]
        else:
            if not 0 <= rows < self._count:
                raise IndexError(rows)
            number, place = divmod(int(rows), self._group_rows)
            return self._group(number)[place]
        return np.array(values, np.int64) if self._name == "label" else values

    def row_of(self, path: str) -> int | None:
        """Return the row of a path, or None if the plan does not have it; only of the column `path`."""
        key = os.fsencode(path)
        number = bisect.bisect(self._first_paths, key, key=os.fsencode) - 1
        if number < 0:
            return None
        paths = self._group(number)
        place = bisect.bisect_left(paths, key, key=os.fsencode)
        return number * self._group_rows + place if paths[place : place + 1] == [path] else None

    def _group(self, number: int) -> list[Any]:
        values = self._cached.pop(number, None)
        if values is None:
            values = self._read(number)
        self._cached[number] = values  # reinserted: the group used last is last
        if len(self._cached) > _CACHED_GROUPS:
            del self._cached[next(iter(self._cached))]
        return values

    def _read(self, number: int) -> list[Any]:
        """Read and check the column in a row group.

        Raises:
            BrokenListError: the file is missing or damaged.
        """
        is_text = self._name in ("path", "id")
        with _opened(self._file, [self._name] if is_text else []) as parquet:
            group, n_rows = parquet.metadata.row_group(number), self._count - number * self._group_rows
            if group.num_rows != min(n_rows, self._group_rows) or group.total_byte_size > _MOST_GROUP_BYTES:
                raise ValueError(f"row group {number} has {group.num_rows:,} rows in {group.total_byte_size:,} bytes")
            column = parquet.read_row_group(number, [self._name], use_threads=False).column(0)
            if is_text:
                column = _texts(column)
            if column.null_count or str(column.type) != COLUMNS[self._name]:
                raise ValueError(f"the column {self._name} is {column.type}, with {column.null_count:,} nulls")
            values = column.to_pylist() if is_text else column.to_numpy()
            if values_xxh3(values) != self._xxh3[number]:
                raise ValueError(f"the column {self._name} of row group {number} has another hash")
            if self._name == "path":
                return self._checked_paths(values, number)
            if self._name == "id":
                return [value.decode() for value in values]
            return self._checked_numbers(values)

    def _checked_numbers(self, values: NDArray[Any]) -> list[Any]:
        least, limit = (-1, self._n_classes) if self._name == "label" else (0, len(SPLIT_CODES))
        if values.min() < least or values.max() >= limit:
            raise ValueError("a label or split is out of range")
        numbers: list[int] = values.tolist()
        return numbers if self._name == "label" else [SPLIT_CODES[number] for number in numbers]

    def _checked_paths(self, paths: list[bytes], number: int) -> list[str]:
        # Checked on the joined paths: a loop over the paths would take longer than reading the file.
        joined = b"\0" + b"\0".join(paths) + b"\0"
        if joined.count(b"\0") != len(paths) + 1 or b"\0\0" in joined:
            raise ValueError("a path is empty, or contains a null character")
        if self._is_below and (b"\0/" in joined or re.search(rb"[\0/]\.\.[\0/]", joined)):
            raise ValueError("a path leads outside its folder")
        following = [*paths[1:], *map(os.fsencode, self._first_paths[number + 1 : number + 2])]
        if not all(map(bytes.__lt__, paths, following)) or os.fsdecode(paths[0]) != self._first_paths[number]:
            raise ValueError("its paths are not in order")
        return list(map(os.fsdecode, paths))


def open_plan(where: str | os.PathLike[str]) -> Images:
    """Open a plan. Its rows are checked when they are read.

    Raises:
        InputError: the folder is not a plan, or its description is damaged.
    """
    file = Path(where).resolve() / PLAN_FILE
    if not file.is_file():
        raise InputError(f"{file.parent} is not a plan: it has no {PLAN_FILE}")
    description = _description(file)
    kind, root = description["kind"], description["root"]
    columns: dict[str, Any] = {name: PlanColumn(file, name, description) for name in description["groups_xxh3"]}
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


def _description(file: Path) -> dict[str, Any]:
    """Read and check the description of a plan.

    Raises:
        InputError: it is damaged, or of another version.
    """
    with _opened(file) as parquet:
        metadata = parquet.metadata.metadata or {}
        content = metadata.get(METADATA, b"")
        if xxhash.xxh3_128_hexdigest(content).encode() != metadata.get(METADATA_XXH3):
            raise ValueError("its description has another hash")
        version = parse_json(content, file).get("version")
        if version != VERSION:
            raise InputError(f"{file} has version {version}, expected {VERSION}; a newer layertap may read it")
        description = parse_json(content, file, _DESCRIPTION)
        count, group_rows, root = (description[name] for name in ("count", "group_rows", "root"))
        columns = description["groups_xxh3"]
        n_groups = {len(description["first_paths"]), *map(len, columns.values())}
        if not 1 <= group_rows <= _MOST_GROUP_ROWS or count < 1 or n_groups != {-(-count // group_rows)}:
            raise ValueError(f"it has {count:,} images in groups of {group_rows:,}")
        if not COLUMNS.keys() - {"id"} <= columns.keys() <= COLUMNS.keys():
            raise ValueError(f"it has the columns {', '.join(columns)}")
        if "\0" in root or not (is_url(root) or root.startswith("/")):
            raise ValueError(f"its root is {root!r}")
    return description


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
    try:
        # Without threads, which could still be running when an error ends the process.
        options = {"pre_buffer": False, "read_dictionary": list(texts)}
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


def values_xxh3(values: list[bytes] | NDArray[Any]) -> str:
    """Return the hash of a column in a row group: texts, or numbers."""
    return xxhash.xxh3_128_hexdigest(values.tobytes() if isinstance(values, np.ndarray) else b"\0".join(values))
