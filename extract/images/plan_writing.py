"""Write a plan: list a folder or list into memory, sort, and write the file of the plan (`extract.images.plans`).

Labels and splits depend on all paths: `train` is a split only if all first folders have names of splits. So all names
are held in memory, without an object for each, and sorted there: 10 million names take 0.8 GB, and 35 to 47 s of CPU
time. Runs on the disk that are merged need less memory, 0.2 GB, and 59 to 122 s.

The file gets its name when it is complete. A process that is killed leaves no plan, and the next one lists again.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.images.csv_lists import Row, list_rows, places_of, stored_path
from extract.images.image_list import (
    Images,
    class_and_split,
    classes_of_folders,
    classes_of_values,
    labels_hash,
    other_suffix,
)
from extract.images.listing import check_exists, files_behind, files_below, is_plan, kind_of, no_images
from extract.images.plans import (
    COLUMNS,
    METADATA,
    METADATA_XXH3,
    PLAN_FILE,
    SPLIT_CODES,
    VERSION,
    base_of,
    open_plan,
)
from extract.system.atomic_files import atomic_write, is_temporary, locked
from extract.system.optional_libraries import library
from extract.system.urls import is_url

__all__ = ["write_plan"]

GROUP_ROWS = 100_000  # a reader reads a group at once: 15 ms, 10 MB of text
_REPORTED_ROWS = 50_000


def write_plan(
    images: str | os.PathLike[str],
    out: str | os.PathLike[str],
    on_rows: Callable[[str, int], None] = lambda stage, rows: None,
) -> Images:
    """List images into a plan. A finished plan stays unchanged.

    The images are those of `list_images`, with its order, labels, classes and splits. A URL is listed folder by folder;
    for a hundred million images, prefer the object store's own inventory as a list.

    Args:
        images: a folder, its URL, or a list; see `list_images`.
        out: folder of the plan; created if needed.
        on_rows: called with "listed" or "written", and a number of rows.

    Raises:
        InputError: no images, `images` is neither a folder nor a list, a URL that the plan would store has credentials,
            or `out` contains something else.
        LockedError: another process writes to `out`.
        LayertapError: the disk is full, a URL does not answer, or pyarrow is not installed.
    """
    where, out = os.fspath(images).removeprefix("file://"), Path(out)
    library("pyarrow", "parquet", "a plan")
    kind = _kind(where)
    where = where.rstrip("/") if is_url(where) else where
    root, base = places_of(where)
    if is_url(where) and base_of(kind, root) != (where if kind == "folder" else base):
        raise _has_credentials(root, "its URL has a user name or a signature")
    _check_place(out, where, kind, root)
    with locked(out):
        if not is_plan(out):
            left_out: Counter[str] = Counter()
            listed = _Listed(_rows_of_list(where) if kind == "list" else _rows_of_folder(where, left_out), on_rows)
            if not len(listed.codes):
                raise no_images(where, left_out)
            description = {"version": VERSION, "kind": kind, "root": root, "left_out": dict(sorted(left_out.items()))}
            try:
                _write(out / PLAN_FILE, where, listed, description, on_rows)
            except OSError as error:
                raise LayertapError(f"cannot write {out / PLAN_FILE}: {error.strerror or error}") from error
    return open_plan(out)


def _has_credentials(where: str, what: str) -> InputError:
    return InputError(
        f"{where}: {what}, without which the images cannot be read, and which a plan would store",
        hint="use the images directly: `layertap embed` stores no credentials",
    )


def _kind(where: str) -> str:
    """Return "folder" or "list".

    Raises:
        InputError: `where` is neither, or does not exist.
    """
    kind = "plan" if not is_url(where) and is_plan(where) else kind_of(where)
    if kind in ("folder", "list") and not is_url(where):
        check_exists(where)
        kind = kind if Path(where).is_dir() == (kind == "folder") else "file"
    if kind not in ("folder", "list"):
        raise InputError(
            f"{where}: a plan is written for a folder or a list only",
            hint=f"use it directly: {shlex.join(['layertap', 'embed', where])}",
        )
    return kind


def _check_place(out: Path, where: str, kind: str, root: str) -> None:
    """Check that `out` may become, or already is, the plan of these images.

    Raises:
        InputError: `out` contains something else, or lies in the folder to list.
    """
    if kind == "folder" and not is_url(where) and out.resolve().is_relative_to(root):
        raise InputError(f"{out} lies in the folder to list", hint="choose another place for the plan")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; a plan is a folder")
    if is_plan(out):
        if (other := open_plan(out).root) != root:
            raise InputError(f"{out} is a plan of {other}", hint=f"choose another folder for one of {root}")
    elif out.is_dir() and any(entry.name != ".lock" and not is_temporary(entry) for entry in out.iterdir()):
        raise InputError(f"{out} is not empty, and not a plan", hint="choose another folder")


def _rows_of_folder(where: str, left_out: Counter[str]) -> Iterator[Row]:
    """Yield the images of a folder in order, labelled with their first two folders, which determine the class."""
    list_files = files_behind if is_url(where) else files_below
    for name in list_files(where):
        if other := other_suffix(name):
            left_out[other] += 1
        else:
            yield Row(os.fsencode(name), 0, "/".join(name.split("/", 2)[:-1]))


def _rows_of_list(where: str) -> Iterator[Row]:
    for row in list_rows(where):
        if stored_path(row.path) != row.path:
            raise _has_credentials(where, f"the URL in line or row {row.place} has credentials")
        yield row


class _Texts:
    """Texts in one block of bytes, each with its end."""

    def __init__(self) -> None:
        self._block, self._ends = bytearray(), array("q", [0])

    def append(self, text: bytes) -> None:
        self._block += text
        self._ends.append(len(self._block))

    def as_arrow(self) -> Any:
        import pyarrow as pa

        buffers = [None, pa.py_buffer(self._ends), pa.py_buffer(self._block)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(self._ends) - 1, buffers)


class _Listed:
    """The rows of a listing, in its order, in columns.

    Attributes:
        texts: "path" and, if a row has an id, "id"; see `Row`.
        codes: number of each row's label and split in `values`.
        values: (label, split) -> its number.
    """

    def __init__(self, rows: Iterator[Row], on_rows: Callable[[str, int], None]):
        paths, ids, have_ids = _Texts(), _Texts(), False
        self.codes = array("i")
        self.values: dict[tuple[str | None, str], int] = {}
        for row in rows:
            paths.append(row.path)
            ids.append((row.id or "").encode())
            have_ids = have_ids or row.id is not None
            self.codes.append(self.values.setdefault((row.label, row.split), len(self.values)))
            if not len(self.codes) % _REPORTED_ROWS:
                on_rows("listed", _REPORTED_ROWS)
        on_rows("listed", len(self.codes) % _REPORTED_ROWS)
        self.texts = {"path": paths, "id": ids} if have_ids else {"path": paths}


def _write(
    file: Path, where: str, listed: _Listed, description: dict[str, Any], on_rows: Callable[[str, int], None]
) -> None:
    """Sort the rows, and write the file of a plan.

    Args:
        file: the file.
        where: the folder or list, for errors.
        listed: the rows.
        description: the part of the description that does not depend on the rows.
        on_rows: called with "written" and a number of rows.

    Raises:
        InputError: a list has a path twice.
    """
    import pyarrow as pa
    from pyarrow import compute, parquet

    texts = {name: column.as_arrow() for name, column in listed.texts.items()}
    order = compute.array_sort_indices(texts["path"])
    classes, label_of, split_of = _classes(description["kind"], listed.values)
    codes = np.frombuffer(listed.codes, np.int32)[order]
    numbers = {"label": label_of[codes], "split": split_of[codes]}

    def groups(name: str) -> Iterator[Any]:
        for start in range(0, len(order), GROUP_ROWS):
            rows = slice(start, start + GROUP_ROWS)
            yield numbers[name][rows] if name in numbers else texts[name].take(order[rows]).to_pylist()

    paths_xxh3 = xxhash.xxh3_128()
    last_path = b""
    names = [name for name in COLUMNS if name in texts or name in numbers]
    schema = pa.schema([(name, COLUMNS[name]) for name in names])
    options = {"compression": "zstd", "use_dictionary": list(numbers), "write_statistics": False}
    with (
        atomic_write(file) as target,
        parquet.ParquetWriter(target, schema, write_page_checksum=True, **options) as writer,
    ):
        for values in zip(*map(groups, names), strict=True):
            paths = values[0]
            for before, path in itertools.pairwise([last_path, *paths]):
                if before == path:
                    raise InputError(f"{where}: {os.fsdecode(path)} is listed twice; expected each path only once")
            paths_xxh3.update((b"\0" if last_path else b"") + b"\0".join(paths))
            last_path = paths[-1]
            writer.write_table(pa.table(dict(zip(names, values, strict=True)), schema))
            on_rows("written", len(paths))
        split_texts = ([SPLIT_CODES[code] for code in codes.tolist()] for codes in groups("split"))
        description |= {
            "ends": [min(start + GROUP_ROWS, len(order)) for start in range(0, len(order), GROUP_ROWS)],
            "classes": classes,
            "splits": sorted(SPLIT_CODES[code] for code in np.unique(numbers["split"]).tolist() if code),
            "paths_xxh3": paths_xxh3.hexdigest(),
            "labels_xxh3": labels_hash(
                numbers["label"], [split_texts, [classes], groups("id") if "id" in texts else []]
            ),
        }
        content = json.dumps(description).encode()
        writer.add_key_value_metadata({METADATA: content, METADATA_XXH3: xxhash.xxh3_128_hexdigest(content)})


def _classes(
    kind: str, values: Iterable[tuple[str | None, str]]
) -> tuple[list[str], NDArray[np.int32], NDArray[np.uint8]]:
    """Return the classes, and the label and split of each of `values`, which are those of `_Listed`."""
    if kind == "folder":
        classes, split_level = classes_of_folders(folder or "" for folder, _ in values)
        values = [class_and_split(folder or "", split_level) for folder, _ in values]
    else:
        classes = classes_of_values({label for label, _ in values if label is not None})
    number: dict[str | None, int] = {None: -1} | {name: i for i, name in enumerate(classes)}
    labels = np.array([number[label] for label, _ in values], np.int32)
    return classes, labels, np.array([SPLIT_CODES.index(split) for _, split in values], np.uint8)
