"""The records of a data set that follows a folder: what is known of each file, and of stored rows that no file needs.

Features belong to bytes, not to paths: rename, copy, swap and restore are one case. A record names bytes by their hash,
and the row that has their features. The record of a file has its path; that of a row that no file needs has none.

Where rows are parts of files, a file has a record for each part, with the name of the part as its path; its hash is
that of the file and the part. Size, times and `settled` are those of the file, and the same in all of them.

The records are columns of the table of the published version, and are written with it (`publish`). So they are whole,
their hash is in `dataset.json`, and they belong to this version. What a pass has computed and not published is in its
folder, where the next pass finds it. Without a readable table, the records are made again from all passes; then each
file is read once.

All records are in memory as one array, about 120 bytes each.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.images.image_list import in_pieces, labels_from_folders, texts_hash
from extract.images.part_names import file_of
from extract.row_status import Status
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.untrusted import dataset_in, open_untrusted
from extract.store.format.version import RowTable, Version, pass_folder, table_path, write_table
from extract.store.reader import FeatureReader
from extract.system.atomic_files import discard
from extract.system.json_files import parse_json

__all__ = ["NO_HASH", "Records", "load", "locate", "pass_folders", "publish", "row_numbers", "stored_rows"]

NO_HASH = np.zeros((), "V16")  # of an image that could not be read
_HASH_BYTES = 16

# tried_ns: when a failed image was tried last; for a row that no file needs, since when.
_OF_FILES = {"size": "<i8", "mtime_ns": "<i8", "ctime_ns": "<i8", "settled": "u1", "status": "u1", "tried_ns": "<i8"}
_OF_ROWS = {"pass": "<i8", "row": "<i8", "hash": "V16"}
_TYPES = {**_OF_FILES, **_OF_ROWS}
_UNUSED = ("size", "tried_ns", "pass", "row", "hash")  # their status is OK: rows that failed are dropped at once
_SETTINGS = {"configuration": dict, "versions": dict, "last_pass": int, "without_parts?": {str: [int]}}
_PASSES = 1_000_000  # folders of passes have names of six digits


def _empty(count: int, path_bytes: int = 1) -> NDArray[Any]:
    return np.zeros(count, np.dtype([("path", f"S{path_bytes}"), *_TYPES.items()]))


@dataclass
class Records:
    """The records, and the settings of the last computation.

    Attributes:
        array: structured array: path, and the fields in `_TYPES`; in the order of the table.
        configuration: the requested settings of the features.
        versions: library versions of the last computation.
        last_pass: highest number that a pass had.
        parts: settings of the parts of files that rows are; empty: rows are whole files. They are in `dataset.json`,
            since they must not be lost with the table.
        without_parts: path -> size and times, of files that have no parts, and need not be read again.
        made_again: why the records were made again from the passes; empty if they were read.
        changed: whether they differ from those of the published version.
    """

    array: NDArray[Any] = field(default_factory=lambda: _empty(0))
    configuration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    last_pass: int = 0
    parts: dict[str, Any] = field(default_factory=dict)
    without_parts: dict[str, list[int]] = field(default_factory=dict)
    made_again: str = ""
    changed: bool = False

    @property
    def of_files(self) -> NDArray[np.bool_]:
        """(N,) whether each record is that of a file, or of a part of it, and not of a row that no file needs."""
        of_files: NDArray[np.bool_] = self.array["path"] != b""
        return of_files

    @property
    def files(self) -> NDArray[np.bytes_]:
        """(N,) path of the file of each record; of a row that no file needs, empty."""
        paths: NDArray[np.bytes_] = self.array["path"]
        return _files_of_rows(paths) if self.parts else paths

    def by_file(self) -> tuple[NDArray[np.int64], NDArray[np.bytes_], NDArray[np.int64]]:
        """Return the order of the records by file, the files, ascending, and where the records of each begin.

        The last value is (F + 1,): the records of file i are `order[begins[i] : begins[i + 1]]`.
        """
        files = self.files
        order = np.argsort(files, kind="stable")
        if not self.parts:
            return order, files[order], np.arange(len(files) + 1)
        distinct, begins = np.unique(files[order], return_index=True)
        return order, distinct, np.append(begins, len(order))

    @property
    def n_rows(self) -> int:
        """Number of rows that files need; each whole file is one."""
        return int(self.of_files.sum())

    @property
    def n_failed(self) -> int:
        """Number of rows without valid features."""
        return int((self.of_files & (self.array["status"] != Status.OK)).sum())

    @property
    def passes(self) -> list[int]:
        """Passes with a recorded row, ascending."""
        return np.flatnonzero(np.bincount(self.array["pass"])).tolist()

    def below(self, path: bytes) -> NDArray[np.bool_]:
        """(N,) whether the file of each record is at or below a path."""
        paths = self.array["path"]
        below: NDArray[np.bool_] = (paths >= path + b"/") & (paths < path + b"0")  # "0" is the byte after "/"
        below |= paths == path
        if self.parts:  # `files` of all records takes seconds, and there may be many such paths
            near = np.flatnonzero((paths >= path + b"#") & (paths < path + b"$"))  # "$" is the byte after "#"
            below[near] |= _files_of_rows(paths[near]) == path
        return below

    def replace(self, array: NDArray[Any]) -> None:
        """Set the records, and note whether that changes any."""
        array = _sorted(array)
        same = len(array) == len(self.array) and bool((array == self.array).all())
        self.array, self.changed = array, self.changed or not same

    def forget_passes(self, passes: list[int]) -> None:
        """Drop the records of rows of these passes."""
        lost = np.isin(self.array["pass"], passes)
        names = self.array["path"][lost]
        self.replace(self.array[~lost])
        self.unsettle(names)

    def unsettle(self, names: NDArray[np.bytes_]) -> None:
        """Have the files of these rows examined: their records were dropped, those of other parts may be there."""
        if len(names):
            self.array["settled"][np.isin(self.files, _files_of_rows(names))] = 0

    def set_settings(self, **settings: dict[str, Any]) -> None:
        """Set `configuration`, `versions` or `without_parts`."""
        for name, values in settings.items():
            self.changed = self.changed or getattr(self, name) != values
            setattr(self, name, values)

    def next_pass(self, out: Path) -> int:
        """Return a number that no pass has had: readers of earlier versions may still open its shards."""
        self.last_pass = max([self.last_pass, *self.passes, *pass_folders(out)]) + 1
        if self.last_pass >= _PASSES:
            raise LayertapError(f"{out} has had {_PASSES - 1:,} passes", hint="start a new data set")
        return self.last_pass


def _files_of_rows(names: NDArray[np.bytes_]) -> NDArray[np.bytes_]:
    return np.array([os.fsencode(file_of(os.fsdecode(name))) for name in names.tolist()], names.dtype)


def _sorted(array: NDArray[Any]) -> NDArray[Any]:
    return array[np.lexsort((array["path"], array["row"], array["pass"]))]


def row_numbers(array: NDArray[Any]) -> NDArray[np.int64]:
    """(N,) a number for each stored row, in the order of passes and rows."""
    return array["pass"] << 40 | array["row"]  # type: ignore[no-any-return]


def locate(values: NDArray[Any], wanted: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the position of each wanted value in ascending values, and whether it is there."""
    if not len(values):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    # With a longer type of text, `searchsorted` would convert all values at each call.
    of_type = wanted.astype(values.dtype)
    at = np.minimum(np.searchsorted(values, of_type), len(values) - 1)
    return at, (values[at] == of_type) & (of_type == wanted)


def pass_folders(out: Path) -> dict[int, Path]:
    """Return number -> folder of the stored passes, ascending."""
    return {int(folder.name): folder for folder in sorted((out / "passes").glob("[0-9]" * 6))}


def stored_rows(folder: Path, now_ns: int, *, partial: bool = False) -> NDArray[Any]:
    """Return records of the rows of a pass, without paths, with size and modification time of the images as read.

    Args:
        folder: folder of the pass.
        now_ns: the time of the computation.
        partial: whether it may be unfinished.

    Raises:
        LayertapError: a shard is missing or cannot be read.
    """
    with FeatureReader(folder, partial=partial) as reader:
        rows = _empty(len(reader))
        rows["pass"] = int(folder.name)
        rows["row"] = reader.rows
        rows["status"] = reader.status
        rows["tried_ns"] = now_ns
        rows["size"] = reader.column("source_size")
        rows["mtime_ns"] = reader.column("source_mtime_ns")
        rows["hash"] = _as_hashes(reader.column("source_hash"))
    return rows


# Reading


def load(out: Path, published: DataSet | None, now_ns: int) -> Records:
    """Read the records of the published version, and add rows that passes have stored and not published.

    Raises:
        LayertapError: a file of the data set cannot be read.
    """
    records, table = Records(), None
    if published is not None:
        try:
            table = published.version_rows()
            records = _read(published, len(table.paths))
        except InputError as error:
            records = Records(made_again=error.message)
        except FileNotFoundError:
            records = Records(made_again="the table of the version is missing")
        assert published.version is not None
        records.parts = published.images.get("parts", {})
        records.last_pass = max([records.last_pass, *published.version.passes])
        if records.made_again:
            # The highest number is not known, and a pickled reader of a removed pass must not find another of its name.
            records.last_pass += published.version.number
    known = set(records.passes)
    rows = [_rows_of(folder, published, now_ns) for number, folder in pass_folders(out).items() if number not in known]
    stored = np.concatenate([_empty(0), *rows])
    arrays = [records.array]
    if records.made_again:
        records.changed = True
        if table is not None:
            files, used = _files_of(table, stored)
            arrays, stored = [files], stored[~used]
    stored = stored[stored["status"] == Status.OK]
    hashes = set(arrays[0]["hash"].tolist()) if len(stored) else set()
    is_new = np.zeros(len(stored), bool)
    for i, content in reversed(list(enumerate(stored["hash"].tolist()))):  # of a rewritten pass, the new rows
        is_new[i] = content not in hashes
        hashes.add(content)
    arrays.append(stored[is_new])
    records.array = _sorted(np.concatenate(arrays))
    return records


def _rows_of(folder: Path, published: DataSet | None, now_ns: int) -> NDArray[Any]:
    """Return the rows of a pass that is not recorded; none if it is damaged or has other features."""
    try:
        if published is None or DataSet.open(folder).fingerprint == published.fingerprint:
            return stored_rows(folder, now_ns, partial=True)
    except InputError:  # its images are computed again
        pass
    return _empty(0)


def _files_of(table: RowTable, stored: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return records of the files of a table without them, and which of the stored rows they need.

    They are not settled, so that each file is examined once.
    """
    at, there = locate(row_numbers(stored), table.passes << 40 | table.rows)
    if table.hashes is not None and len(stored):  # a file whose row belongs to another image is examined as a new one
        there &= stored["hash"][at] == _as_hashes(table.hashes)
    paths = table.paths[there]
    files = _empty(len(paths), max(1, paths.itemsize))
    for name in _TYPES:
        files[name] = stored[name][at[there]]
    files["path"] = paths
    used = np.zeros(len(stored), bool)
    used[at[there]] = True
    return files, used


def _read(published: DataSet, n_rows: int) -> Records:
    """Return the records of a version whose table is intact.

    Raises:
        InputError: the table has none, because an earlier version of layertap wrote it; or they are of other types.
    """
    assert published.version is not None
    path = table_path(published.out, published.version.number)

    def refuse(problem: str) -> InputError:
        return InputError(f"{path.name}: {problem}")

    most_bytes = path.stat().st_size
    with open_untrusted(path, path.name) as file:
        if "settings" not in file:
            raise refuse("it was written by an earlier version of layertap")

        def column(name: str, expected: str, count: int | None) -> NDArray[Any]:
            data = dataset_in(file.id, name, refuse)
            inner = (_HASH_BYTES,) if expected == "V16" else ()
            kind = "u1" if expected == "V16" else expected
            is_right = data.dtype.kind == "S" if kind == "S" else data.dtype == np.dtype(kind)
            is_large = data.size * data.dtype.itemsize > most_bytes
            if not is_right or is_large or data.shape[1:] != inner or count not in (None, *data.shape[:1]):
                raise refuse(f"column {name!r} is {data.dtype} {data.shape}")
            values: NDArray[Any] = file[name][...]
            return _as_hashes(values) if expected == "V16" else values

        paths = column("path", "S", n_rows)
        files = _empty(n_rows, max(1, paths.itemsize))
        files["path"], files["hash"] = paths, column("source_hash", "V16", n_rows)
        for name, dtype in {**_OF_FILES, "pass": "<i8", "row": "<i8"}.items():
            files[name] = column(name if name in ("pass", "row") else f"file_{name}", dtype, n_rows)
        unused = _empty(len(column("unused_pass", "<i8", None)))
        for name in _UNUSED:
            unused[name] = column(f"unused_{name}", _TYPES[name], len(unused))
        unused["status"] = Status.OK
        array = np.concatenate([files, unused])
        passes, rows = array["pass"], array["row"]
        if len(array) and not (0 < passes.min() <= passes.max() < _PASSES and 0 <= rows.min() <= rows.max() < 1 << 40):
            raise refuse("it refers to rows that no pass has")
        settings = parse_json(column("settings", "u1", None).tobytes(), path.name, _SETTINGS)
    names = (name.removesuffix("?") for name in _SETTINGS)
    records = Records(**{name: settings[name] for name in names if name in settings})
    records.array = array
    return records


def _as_hashes(values: NDArray[np.uint8]) -> NDArray[np.void]:
    """(N,) one value for each hash of (N, 16) bytes."""
    return np.ascontiguousarray(values).view("V16").reshape(len(values))


def _as_bytes(hashes: NDArray[np.void]) -> NDArray[np.uint8]:
    """(N, 16) the bytes of hashes."""
    return np.ascontiguousarray(hashes).view(np.uint8).reshape(len(hashes), _HASH_BYTES)


# Publishing


def publish(out: Path, root: str, records: Records, published: DataSet | None) -> DataSet | None:
    """Publish the records as a new version, if they have changed, and delete what no version needs any more.

    Returns:
        The published data set; None if there is none.

    Raises:
        LayertapError: the disk is full or cannot be written to.
    """
    of_files = records.of_files
    if published is None and not of_files.any():
        return None
    if published is None or records.changed or published.images["root"] != root:
        files, unused = records.array[of_files], records.array[~of_files]
        passes = np.flatnonzero(np.bincount(files["pass"])).tolist()
        template = published or DataSet.open(pass_folder(out, passes[0]))
        number = 1 + (published.version.number if published and published.version else 0)
        rows_xxh3 = write_table(out, number, _columns(records, files, unused))
        images = {"root": root, "count": len(files), "paths_xxh3": texts_hash(in_pieces(np.sort(files["path"])))}
        images |= {"parts": records.parts} if records.parts else {}
        version = Version(number, rows_xxh3, tuple(passes))
        shard_rows = shard_rows_for(template.features)
        published = DataSet(out, template.depends_on, template.features, images, shard_rows, version)
        try:
            published.write()
        except OSError as error:
            raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
        records.changed = False
    _remove_unneeded(out, records, published)
    return published


def _columns(records: Records, files: NDArray[Any], unused: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
    """Return the columns of a table."""
    labels, classes, splits = labels_from_folders([os.fsdecode(path) for path in files["path"].tolist()])
    settings = {name: getattr(records, name) for name in (name.removesuffix("?") for name in _SETTINGS)}
    return {
        "path": files["path"], "label": labels.astype("<i8"), "split": np.array(splits, "S5"),
        "classes": np.array([os.fsencode(name) for name in classes], "S"),
        "pass": files["pass"], "row": files["row"], "source_hash": _as_bytes(files["hash"]),
        **{f"file_{name}": files[name] for name in _OF_FILES},
        **{f"unused_{name}": _as_bytes(unused[name]) if name == "hash" else unused[name] for name in _UNUSED},
        "settings": np.frombuffer(json.dumps(settings).encode(), np.uint8),
    }  # fmt: skip


def _remove_unneeded(out: Path, records: Records, published: DataSet) -> None:
    """Delete other tables than that of the published version, passes without a recorded row, and manifests that earlier
    versions of layertap wrote. Processes that have these files open can still read them.
    """
    assert published.version is not None
    for table in (out / "versions").glob("*"):
        if table != table_path(out, published.version.number):
            discard(table)
    for left in out.glob("manifest.sqlite*"):
        discard(left)
    recorded = {f"{number:06d}" for number in records.passes}
    for folder in (out / "passes").glob("*"):
        if folder.name not in recorded:
            shutil.rmtree(folder, ignore_errors=True)
