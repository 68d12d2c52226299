"""Write a plan: list images into files, in memory that does not grow with their number.

    a folder, walked in order -.
    a list, in sorted pieces --+-> runs -> merged into parts -> plan.json

Labels and splits depend on all paths: `train` is a split only if all first folders have names of splits. So runs are
written first, with the names that determine the classes; parts are written when all these names are known. While a plan
is being written, it has another folder:

    listing/begun.json     what is being listed
    listing/content        copy of a list behind a URL
    listing/*.jsonl        runs (extract/images/index/external_sort.py)

Every file gets its name when it is complete. If the process is killed, the next one resumes after the last run or part.
A plan without `plan.json` is not finished.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from extract.errors import InputError, LayertapError
from extract.images.csv_lists import Row, check_once, places_of, rows_in_pieces, stored_path
from extract.images.folders import check_exists, files_behind, files_below, other_suffix
from extract.images.image_list import Images, class_and_split, classes_of_folders, classes_of_values, hashes_of
from extract.images.index.external_sort import Runs
from extract.images.index.image_index import (
    DECODED,
    FORMAT,
    LISTING,
    VERSION,
    PlannedImages,
    base_of,
    has_decoded_names,
    is_plan,
    open_plan,
    read_in_pieces,
)
from extract.images.index.index_parts import SPLIT_CODES, Part, part_path, read_part, write_part
from extract.images.kinds import kind_of, no_images
from extract.system.atomic_files import atomic_write, discard, own_folder, write_json
from extract.system.folder_lock import locked
from extract.system.json_files import read_json
from extract.system.leftovers import is_temporary
from extract.system.urls import file_system, is_missing, is_url, server_answer

__all__ = ["is_finished", "write_plan"]

_OWN_LISTS = {
    "archives": "archives contain their own lists",
    "array": "an array needs no list",
    "Hugging Face": "a dataset of Hugging Face has its own index",
}
PART_ROWS = 100_000
WALKED_ROWS = 50_000  # rows of a folder in a run; a kill loses at most the unfinished run
SORTED_ROWS = 250_000  # rows of a list in a run: 100 to 150 MB of memory

_KINDS = 1_000  # suffixes of other files that are counted separately
_CLASSES_BYTES = 1 << 25  # half of the limit of `read_json`
_CODE = {split: code for code, split in enumerate(SPLIT_CODES)}


def write_plan(
    images: str | os.PathLike[str],
    out: str | os.PathLike[str],
    on_rows: Callable[[str, int], None] = lambda stage, rows: None,
) -> PlannedImages:
    """List images into a plan, or resume an unfinished plan. A finished plan stays unchanged.

    The images are those of `list_images`, with its order, labels, classes and splits. Runs written before a kill are
    not listed again: if the folder has changed since, the plan has some files from before the change and some from
    after it, each once and in order. A local list that has changed is listed again from its start.

    Memory is bounded by the largest single folder and by the classes; a list of 100 million images adds 20 MB. A URL is
    listed folder by folder; for a hundred million images, prefer the object store's own inventory as a list.

    Args:
        images: a folder, its URL, or a list; see `list_images`.
        out: folder of the plan; created if needed.
        on_rows: called with "listed" or "written", and a number of rows; with "found" for rows that an earlier process
            listed.

    Raises:
        InputError: no images, `images` is neither a folder nor a list, a URL that the plan would store has credentials,
            or `out` contains something else.
        LockedError: another process writes to `out`.
        LayertapError: the disk is full, or a URL does not answer.
    """
    where, out = os.fspath(images).removeprefix("file://"), Path(out)
    kind = _kind(where)
    where = where.rstrip("/") if is_url(where) else where
    root, base = places_of(where)
    if is_url(where) and base_of(kind, root) != (where if kind == "folder" else base):
        raise _has_credentials(root, "its URL has a user name or a signature")
    _check_place(out, where, kind, root)
    with _errors_of_files(out), locked(out):
        if not is_finished(out):
            _begin(out, where, kind, root)
            runs = Runs(out / LISTING, in_sequence=kind == "folder")
            on_rows("found", runs.rows)
            if not runs.ended:
                (_walk if kind == "folder" else _sort)(out / LISTING, where, runs, on_rows)
            if not runs.rows:
                error = no_images(where, _left_out(runs))
                shutil.rmtree(out / "parts")
                shutil.rmtree(out / LISTING)
                raise error
            classes, split_level = _classes(where, kind, runs)
            _write_parts(out, where, kind, runs, classes, split_level, on_rows)
            _finish(out, kind, root, runs, classes)
        shutil.rmtree(out / LISTING, ignore_errors=True)
    return open_plan(out)


def is_finished(out: Path) -> bool:
    """Return whether a folder is a finished plan.

    Raises:
        InputError: its plan.json is damaged.
    """
    return (out / "plan.json").is_file() and is_plan(out)


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
    here = not is_url(where)
    if here and is_plan(where):
        raise InputError(f"{where} is already a plan", hint=f"use it in place of the images: layertap embed {where}")
    kind = kind_of(where)
    if kind in _OWN_LISTS:
        why = _OWN_LISTS[kind]
        raise InputError(f"{where}: {why}, so no plan is written", hint=f"use it directly: layertap embed {where}")
    if here:
        check_exists(where)
    if here and Path(where).is_dir() != (kind == "folder"):
        raise InputError(f"{where}: not a folder or list; a plan is written for a folder or a list")
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
    begun: dict[str, Any] = {}
    if is_finished(out):
        plan = open_plan(out)
        begun = {"kind": plan.kind, "root": plan.root}
    elif (out / LISTING / "begun.json").is_file():
        if any((out / LISTING).glob("*.jsonl")):  # without runs, starting again loses nothing
            begun = read_json(out / LISTING / "begun.json")
    elif out.is_dir() and any(not _was_killed_early(entry) for entry in out.iterdir()):
        raise InputError(f"{out} is not empty, and not a plan", hint="choose another folder")
    if begun and (begun.get("kind"), begun.get("root")) != (kind, root):
        raise InputError(f"{out} is a plan of {begun.get('root')}", hint=f"choose another folder for one of {root}")


def _was_killed_early(entry: Path) -> bool:
    """Return whether an entry of `out` may stem from a process that was killed before it wrote begun.json."""
    inside = [path.name for path in entry.iterdir()] if entry.name == LISTING and entry.is_dir() else ["?"]
    return entry.name == ".lock" or all(name.startswith("begun.json.") for name in inside)


@contextlib.contextmanager
def _errors_of_files(out: Path) -> Iterator[None]:
    """Context manager: turn an OSError into a LayertapError that says how to continue."""
    try:
        yield
    except OSError as error:
        raise LayertapError(
            f"cannot write {error.filename or out}: {error.strerror or error}. The images listed so far are kept",
            hint="run the same command again to continue",
        ) from error


def _begin(out: Path, where: str, kind: str, root: str) -> None:
    """Prepare the folder; remove the runs and parts of a list that has changed since, or of another format of runs."""
    listing, parts = out / LISTING, out / "parts"
    # Format 2 has percent-encoded names, and paths of lists as they stand there.
    runs = 3 if kind == "list" or has_decoded_names(kind, root) else 2
    begun = {"format": FORMAT, "version": VERSION, "kind": kind, "root": root, "part_rows": PART_ROWS, "runs": runs}
    if kind == "list" and not is_url(where):
        status = Path(where).stat()
        begun |= {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    with contextlib.suppress(FileNotFoundError):
        if read_json(listing / "begun.json") != begun:  # written last: a kill in here does no harm
            shutil.rmtree(parts, ignore_errors=True)
            for path in (*listing.glob("*.jsonl"), *listing.glob("content")):
                path.unlink()
    own_folder(listing)
    write_json(listing / "begun.json", begun)
    own_folder(parts)
    for folder in (out, listing, parts):
        for stray in filter(is_temporary, folder.glob("*.new")):
            discard(stray)


def _walk(listing: Path, where: str, runs: Runs, on_rows: Callable[[str, int], None]) -> None:
    """Write the runs of a folder, whose images come in order."""
    left_out = _left_out(runs)
    after = os.fsencode(runs.heads[-1]["last"]) if runs.heads else b""
    files = files_behind(where, after) if is_url(where) else files_below(where, after)
    images = _images(files, left_out)
    while not runs.ended:
        rows = list(itertools.islice(images, WALKED_ROWS))
        deciding = dict.fromkeys(_first_two(row.path) for row in rows)
        # Other files after the last image are counted with the next run, which starts there.
        runs.add(rows, deciding, end=len(rows) < WALKED_ROWS, left_out=left_out)
        on_rows("listed", len(rows))


def _images(names: Iterator[str], left_out: Counter[str]) -> Iterator[Row]:
    for name in names:
        if other := other_suffix(name):
            left_out[other if other in left_out or len(left_out) < _KINDS else "other suffixes"] += 1
        else:
            yield Row(os.fsencode(name), 0)


def _first_two(path: bytes) -> str:
    """Return the first two folders of a path, which determine its class and split."""
    return os.fsdecode(b"/".join(path.split(b"/", 2)[:-1]))


def _left_out(runs: Runs) -> Counter[str]:
    return Counter(runs.heads[-1].get("left_out", {}) if runs.heads else {})


def _sort(listing: Path, where: str, runs: Runs, on_rows: Callable[[str, int], None]) -> None:
    """Write the runs of a list: pieces of `SORTED_ROWS` rows in file order, each sorted."""
    file = Path(where)
    if is_url(where):
        file = listing / "content"
        if not file.exists():
            _copy(where, file)
    begin = runs.heads[-1]["behind"] if runs.heads else {}
    for rows, behind in rows_in_pieces(where, file, SORTED_ROWS, begin):
        if signed := [row for row in rows if stored_path(row.path) != row.path]:
            shutil.rmtree(listing.parent / "parts")
            shutil.rmtree(listing)  # it has a copy of the list
            raise _has_credentials(where, f"the URL in line or row {signed[0].place} has credentials")
        rows.sort(key=operator.itemgetter(0))
        labels = dict.fromkeys(row.label for row in rows if row.label is not None)
        ids = any(row.id is not None for row in rows)
        runs.add(rows, labels, end=len(rows) < SORTED_ROWS, behind=behind, ids=ids)
        on_rows("listed", len(rows))
    if not runs.ended:
        runs.add([], (), end=True, behind={}, ids=False)


def _copy(url: str, file: Path) -> None:
    """Copy the content of a URL to a file, completely or not at all."""
    fs, path = file_system(url)
    with atomic_write(file) as target:
        try:
            with fs.open(path, "rb") as source:
                content = iter(lambda: source.read(1 << 24), b"")
                while data := next(content, b""):
                    target.write(data)
        except Exception as error:  # each protocol's library raises its own errors
            if is_missing(url, error):
                raise InputError(f"{url}: no such file") from error
            raise LayertapError(f"{url} cannot be copied: {server_answer(error)}") from error


def _classes(where: str, kind: str, runs: Runs) -> tuple[list[str], bool]:
    """Return the classes, and whether the first folders are splits.

    Raises:
        InputError: the names of the classes take more than `_CLASSES_BYTES`.
    """
    if kind == "folder":
        classes, split_level = classes_of_folders(runs.deciding())
    else:
        classes, split_level = classes_of_values(set(runs.deciding())), False
    if len(json.dumps(classes)) > _CLASSES_BYTES:
        raise InputError(
            f"{where}: {len(classes):,} classes, whose names take more than {_CLASSES_BYTES >> 20} MB; expected some "
            "thousand",
            hint="leave the column 'label' out, or list folders whose names are classes",
        )
    return classes, split_level


def _write_parts(
    out: Path,
    where: str,
    kind: str,
    runs: Runs,
    classes: list[str],
    split_level: bool,
    on_rows: Callable[[str, int], None],
) -> None:
    """Write the parts that do not exist yet."""
    index = {name: number for number, name in enumerate(classes)}
    ids = _has_ids(runs)
    number, after = 0, b""
    while part_path(out, number).exists():
        number += 1
    if number:
        rows_before = min(number * PART_ROWS, runs.rows)
        rows_of_last = rows_before - (number - 1) * PART_ROWS
        last = read_part(part_path(out, number - 1), rows_of_last, len(classes), ids, below=False, xxh3=None)
        after = last.names[-1]
        on_rows("written", rows_before)
    remaining = _each_once(where, kind, runs.in_order(after), after)
    known: dict[bytes, tuple[int, int]] = {}  # folder -> label and split
    while rows := list(itertools.islice(remaining, PART_ROWS)):
        if kind == "folder":
            folders = [row.path.rpartition(b"/")[0] for row in rows]
            known = {name: known.get(name) or _label_and_split(name, split_level, index) for name in set(folders)}
            codes = [known[folder] for folder in folders]
        else:
            codes = [(-1 if row.label is None else index[row.label], _CODE[row.split]) for row in rows]
        labels, splits = (np.array(column) for column in zip(*codes, strict=True))
        texts = [(row.id or "").encode() for row in rows] if ids else None
        write_part(part_path(out, number), Part([row.path for row in rows], labels, splits, texts))
        number += 1
        on_rows("written", len(rows))


def _each_once(where: str, kind: str, rows: Iterator[Row], after: bytes) -> Iterator[Row]:
    """Yield the rows after a path, given the rows from that path on; check that a list repeats no path."""
    before: Row | None = None
    for row in rows:
        if before is not None and kind == "list":
            check_once(where, before, row)
        before = row
        if row.path > after:
            yield row


def _label_and_split(folder: bytes, split_level: bool, index: dict[str, int]) -> tuple[int, int]:
    name, split = class_and_split(os.fsdecode(folder), split_level)
    return -1 if name is None else index[name], _CODE[split]


def _has_ids(runs: Runs) -> bool:
    return any(head.get("ids", False) for head in runs.heads)


def _finish(out: Path, kind: str, root: str, runs: Runs, classes: list[str]) -> None:
    """Read all parts back from disk, and write plan.json with their hashes and splits."""
    n_parts = -(-runs.rows // PART_ROWS)
    hashes = [xxhash.xxh3_128_digest(part_path(out, number).read_bytes()) for number in range(n_parts)]
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "root": root,
        "count": runs.rows,
        "part_rows": PART_ROWS,
        "classes": classes,
        "ids": _has_ids(runs),
        "left_out": dict(sorted(_left_out(runs).items())),
        "notes": [],
        "parts_xxh3": [digest.hex() for digest in hashes],
    }
    splits: set[str] = set()

    def pieces() -> Iterator[Images]:
        for piece in read_in_pieces(out, content):
            splits.update(piece.split_names)
            yield piece

    paths_xxh3, labels_xxh3 = hashes_of(pieces)
    known = {"splits": sorted(splits), "paths_xxh3": paths_xxh3, "labels_xxh3": labels_xxh3}
    if has_decoded_names(kind, root):
        known["names"] = DECODED
    write_json(out / "plan.json", {**content, **known})
