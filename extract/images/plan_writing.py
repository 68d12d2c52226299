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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from extract.errors import InputError, LayertapError
from extract.images.csv_lists import Row, list_rows, places_of, stored_path
from extract.images.image_list import (
    Images,
    labels_from_folders,
    labels_from_values,
    labels_hash,
    other_suffix,
    texts_hash,
)
from extract.images.listing import check_exists, files_behind, files_below, is_plan, kind_of, no_images
from extract.images.plans import METADATA, METADATA_XXH3, PLAN_FILE, SPLIT_CODES, VERSION, base_of, open_plan
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
            rows = _rows_of_list(where) if kind == "list" else _rows_of_folder(where, left_out)
            columns, classes, has_parts = _listed(kind, rows, on_rows)
            if not len(columns["path"]):
                raise no_images(where, left_out)
            description = {"version": VERSION, "kind": kind, "root": root, "classes": classes}
            description["left_out"] = dict(sorted(left_out.items()))
            description |= {"parts": True} if has_parts else {}
            try:
                _write(out / PLAN_FILE, where, columns, description, on_rows)
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
    kind = kind_of(where)
    is_image = kind == "folder" and Path(where).is_file()
    if kind not in ("folder", "list") or is_image or is_plan(where):
        raise InputError(
            f"{where}: a plan is written for a folder or a list only",
            hint=f"use it directly: {shlex.join(['layertap', 'embed', where])}",
        )
    if not is_url(where):
        check_exists(where)
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
    """Yield the images of a folder, labelled with their first two folders as `a/b/`, which determine the class."""
    list_files = files_behind if is_url(where) else files_below
    for name in list_files(where):
        if other := other_suffix(name):
            left_out[other] += 1
        else:
            yield Row(os.fsencode(name), 0, name[: len(name) - len(name.split("/", 2)[-1])])


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


def _listed(
    kind: str, rows: Iterator[Row], on_rows: Callable[[str, int], None]
) -> tuple[dict[str, Any], list[str], bool]:
    """Return the columns of a plan as arrays of Arrow, in the order of the listing, its classes, and if it has parts.

    Parts are rows of a list whose names have a media fragment.
    """
    import pyarrow as pa

    from extract.images.part_names import fragment_of

    paths, ids, have_ids, has_parts = _Texts(), _Texts(), False, False
    numbers: dict[tuple[str | None, str], int] = {}
    pairs = array("i")  # of label and split, of each row
    for row in rows:
        paths.append(row.path)
        ids.append((row.id or "").encode())
        have_ids = have_ids or row.id is not None
        has_parts = has_parts or (kind == "list" and b"#" in row.path and bool(fragment_of(os.fsdecode(row.path))))
        pairs.append(numbers.setdefault((row.label, row.split), len(numbers)))
        if not len(pairs) % _REPORTED_ROWS:
            on_rows("listed", _REPORTED_ROWS)
    on_rows("listed", len(pairs) % _REPORTED_ROWS)
    if kind == "folder":
        labels, classes, splits = labels_from_folders([folder or "" for folder, _ in numbers])
    else:
        labels, classes = labels_from_values([label for label, _ in numbers])
        splits = [split for _, split in numbers]
    codes = np.array([SPLIT_CODES.index(split) for split in splits], np.uint8)
    columns = {
        "path": paths.as_arrow(),
        "label": pa.array(labels.astype(np.int32)[pairs]),
        "split": pa.array(codes[pairs]),
    }
    return columns | ({"id": ids.as_arrow()} if have_ids else {}), classes, has_parts


def _write(
    file: Path, where: str, columns: dict[str, Any], description: dict[str, Any], on_rows: Callable[[str, int], None]
) -> None:
    """Sort the rows, and write the file of a plan.

    Args:
        file: the file.
        where: the folder or list, for errors.
        columns: the rows, see `_listed`.
        description: the part of the description that does not depend on the order of the rows.
        on_rows: called with "written" and a number of rows.

    Raises:
        InputError: a list has a path twice.
    """
    import pyarrow as pa
    from pyarrow import compute, parquet

    table, order = pa.table(columns), compute.array_sort_indices(columns["path"])
    starts = range(0, len(order), GROUP_ROWS)

    def texts(name: str) -> Iterator[list[Any]]:
        return (columns[name].take(order.slice(start, GROUP_ROWS)).to_pylist() for start in starts)

    labels = columns["label"].take(order).to_numpy()
    splits = ([SPLIT_CODES[code] for code in codes] for codes in texts("split"))
    description |= {
        "ends": [min(start + GROUP_ROWS, len(order)) for start in starts],
        "splits": sorted(SPLIT_CODES[code] for code in compute.unique(columns["split"]).to_pylist() if code),
        "paths_xxh3": texts_hash(_without_repeats(where, texts("path"))),
        "labels_xxh3": labels_hash(labels, [splits, [description["classes"]], texts("id") if "id" in columns else []]),
    }
    content = json.dumps(description).encode()
    options = {"compression": "zstd", "use_dictionary": ["label", "split"], "write_statistics": False}
    options |= {"write_page_checksum": True, "store_schema": False}  # readers need not know of Arrow's large types
    with atomic_write(file) as target, parquet.ParquetWriter(target, table.schema, **options) as writer:
        writer.add_key_value_metadata({METADATA: content, METADATA_XXH3: xxhash.xxh3_128_hexdigest(content)})
        for start in starts:
            group = table.take(order.slice(start, GROUP_ROWS))
            writer.write_table(group, GROUP_ROWS)
            on_rows("written", len(group))


def _without_repeats(where: str, groups: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the sorted paths of a list; raise an InputError if one occurs twice."""
    last: list[bytes] = []
    for paths in groups:
        for before, path in itertools.pairwise([*last, *paths]):
            if before == path:
                raise InputError(f"{where}: {os.fsdecode(path)} is listed twice; expected each path only once")
        last = paths[-1:]
        yield paths
