"""Parts of a plan: files of a fixed number of rows each, in NumPy's format.

A part is an uncompressed `.npz` of one-dimensional little-endian arrays; the same rows give the same bytes:

    names       uint8    the paths, concatenated
    name_ends   int64    (R,) end of each path in `names`
    labels      int32    (R,) index into the classes of the plan; -1 for no class
    splits      uint8    (R,) index into SPLIT_CODES
    ids         uint8    only for a list with ids: the ids in UTF-8, concatenated
    id_ends     int64    (R,) end of each id in `ids`

Paths ascend by their bytes and contain no zero byte. A plan may come from an untrusted source, so parts are checked.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import first_line
from extract.images.sources import BrokenListError
from extract.system.atomic_files import atomic_write

__all__ = ["MOST_PART_ROWS", "SPLIT_CODES", "Part", "part_path", "read_part", "write_part"]

MOST_PART_ROWS = 1 << 22
SPLIT_CODES = ("", "train", "val", "test")

_PART_BYTES = 1 << 30
_MEMBERS = {"names": "|u1", "name_ends": "<i8", "labels": "<i4", "splits": "|u1", "ids": "|u1", "id_ends": "<i8"}


@dataclass(frozen=True)
class Part:
    """Rows of a plan, in memory.

    Attributes:
        names: paths as bytes.
        labels: (R,) int32.
        splits: (R,) uint8, index into `SPLIT_CODES`.
        ids: ids in UTF-8; None if the rows have no ids.
    """

    names: list[bytes]
    labels: NDArray[np.int32]
    splits: NDArray[np.uint8]
    ids: list[bytes] | None

    def rows(self, chosen: slice) -> Part:
        """Return a slice of the rows."""
        ids = None if self.ids is None else self.ids[chosen]
        return Part(self.names[chosen], self.labels[chosen], self.splits[chosen], ids)


def part_path(plan: Path, number: int) -> Path:
    """Return the path of a part's file."""
    return plan / "parts" / f"{number:06d}.npz"


def write_part(path: Path, part: Part) -> None:
    """Write a part completely or not at all."""
    columns: dict[str, NDArray[Any]] = {
        **_packed("names", "name_ends", part.names),
        "labels": part.labels.astype("<i4"),
        "splits": part.splits.astype("|u1"),
        **(_packed("ids", "id_ends", part.ids) if part.ids is not None else {}),
    }
    with atomic_write(path, tidy=False) as file, zipfile.ZipFile(file, "w") as zipped:
        for name, values in columns.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, values, (1, 0), allow_pickle=False)
            zipped.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getbuffer())  # dated 1980: always the same bytes


def _packed(name: str, ends: str, values: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return {name: np.frombuffer(b"".join(values), np.uint8), ends: np.cumsum(lengths, dtype="<i8")}


def read_part(path: Path, n_rows: int, n_classes: int, ids: bool, below: bool, xxh3: bytes | None) -> Part:
    """Read and check a part.

    Args:
        path: path of the file.
        n_rows: number of rows that it must have.
        n_classes: number of classes; labels must be below it.
        ids: whether rows must have ids; if not, they must have none.
        below: whether paths must stay in the folder that they are relative to.
        xxh3: hash that the file must have, 16 bytes; None if not known yet.

    Raises:
        BrokenListError: the part is missing or not valid; the message names it.
    """
    try:
        if not path.is_file():
            raise ValueError("no such file")
        if path.stat().st_size > _PART_BYTES:
            raise ValueError(f"it is larger than {_PART_BYTES >> 20} MB")
        data = path.read_bytes()
        if xxh3 is not None and xxhash.xxh3_128_digest(data) != xxh3:
            raise ValueError("its hash is not the one in plan.json")
        return _checked(_members(data), n_rows, n_classes, ids, below)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, SyntaxError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise BrokenListError(
            f"{path} is damaged: {why or first_line(error)}",
            hint=f"delete the plan {path.parents[1]}, and run `layertap plan` again",
        ) from error


def _members(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays in the bytes of a part. Declared sizes are checked before memory is allocated."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        for info in zipped.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in _MEMBERS or name in arrays:
                raise ValueError(f"it contains {info.filename!r}")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                raise ValueError(f"{name} is compressed, or larger than the file")
            content = zipped.read(info)
            header = io.BytesIO(content)
            if np.lib.format.read_magic(header) != (1, 0):
                raise ValueError(f"{name} has another version of NumPy's format")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(header)
            size = len(content) - header.tell()
            if dtype.str != _MEMBERS[name] or len(shape) != 1 or fortran or shape[0] * dtype.itemsize != size:
                raise ValueError(f"{name} is {dtype} {shape} in {size} bytes")
            arrays[name] = np.frombuffer(content, dtype, offset=header.tell())
    return arrays


def _checked(columns: dict[str, NDArray[Any]], n_rows: int, n_classes: int, ids: bool, below: bool) -> Part:
    wanted = set(_MEMBERS) if ids else set(_MEMBERS) - {"ids", "id_ends"}
    if set(columns) != wanted:
        raise ValueError(f"it contains {', '.join(columns)}; expected {', '.join(sorted(wanted))}")
    labels, splits = columns["labels"], columns["splits"]
    if not len(labels) == len(splits) == n_rows:
        raise ValueError(f"it has {len(labels):,} labels and {len(splits):,} splits; expected {n_rows:,}")
    if labels.min() < -1 or labels.max() >= n_classes or splits.max() >= len(SPLIT_CODES):
        raise ValueError("a label or split is out of range")
    names = _texts(columns["names"], columns["name_ends"], n_rows)
    # Checked on the joined paths: a loop over the paths would take longer than reading the file.
    joined = b"\0" + b"\0".join(names) + b"\0"
    if joined.count(b"\0") != n_rows + 1 or b"\0\0" in joined:
        raise ValueError("a path is empty, or contains a null character")
    if below and (b"\0/" in joined or re.search(rb"[\0/]\.\.[\0/]", joined)):
        raise ValueError("a path leads outside its folder")
    if not all(map(bytes.__lt__, names, names[1:])):
        raise ValueError("its paths are not in order")
    texts = _texts(columns["ids"], columns["id_ends"], n_rows) if ids else None
    for text in texts or ():
        text.decode()  # raises UnicodeDecodeError, a ValueError
    return Part(names, labels, splits, texts)


def _texts(block: NDArray[np.uint8], ends: NDArray[np.int64], n_rows: int) -> list[bytes]:
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    if len(ends) != n_rows or (ends < starts).any() or ends[-1] != len(block):
        raise ValueError("the ends of its texts do not ascend to the length of the texts")
    data = block.tobytes()
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
