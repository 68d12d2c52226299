"""Verify every file, receipt, row and count of a data set, and repair damage."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, system_errors_as
from extract.row_status import Status
from extract.store.format.dataset import DataSet, ShardFiles
from extract.store.format.kept_axes import axes_file, recorded_axes
from extract.store.format.receipt import checked_receipt, counts_of, reasons_of, receipt_of, size_and_hash
from extract.store.format.shard import MEDIA_ERRORS, Shard, copy_shard
from extract.store.format.value_types import finite_rows
from extract.store.format.version import RowTable, pass_folder
from extract.store.format.writer import ShardWriter, checked
from extract.store.reader import FeatureReader
from extract.store.row_selection import read_one_version
from extract.system.atomic_files import sync_folder, write_json

__all__ = ["Fault", "Remedy", "Verification", "repair", "verify"]

_HASHES_AT_ONCE = 1 << 18


class Remedy(Enum):
    """What `repair` does about a fault."""

    ROW = "the row is reset to pending"
    FILE = "the file is renamed, and all its rows are pending"
    RECEIPT = "the receipt is written again"
    NONE = "none: `embed` computes missing rows; other faults must be inspected"


@dataclass(frozen=True)
class Fault:
    """A fault in a data set, such as a damaged row or a missing file.

    Attributes:
        what: description.
        remedy: what `repair` does about it.
        shard: number of the shard; None for a fault of the data set.
        file: path of the file, relative to the data set's folder.
        row: row of the data set; None for a fault of the whole file.
        path: path of the row's image.
    """

    what: str
    remedy: Remedy
    shard: int | None = None
    file: str = ""
    row: int | None = None
    path: str | None = None


@dataclass
class Verification:
    """Result of `verify`.

    Attributes:
        dataset: the verified data set.
        faults: all faults; empty for an intact data set. In a data set of `layertap sync`, shard and row are those of
            the pass that the file belongs to.
        rows: status -> number of rows, over all readable shards; rows of missing shards are pending.
    """

    dataset: DataSet
    faults: list[Fault] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)


def verify(out: Path, on_rows: Callable[[int], None] = lambda rows: None) -> Verification:
    """Verify every hash, receipt and count of a data set; nothing is written.

    Args:
        out: folder of the data set.
        on_rows: called with the number of rows verified since the last call.

    Raises:
        InputError: the folder is not a data set, or its description is damaged.
        LayertapError: a library for the compression is missing, or files cannot be opened.
    """
    return read_one_version(
        out,
        lambda dataset: (_verify_version if dataset.version else _verify_shards)(dataset, on_rows),
        is_usable=lambda verification: not verification.faults,
    )


def _verify_version(dataset: DataSet, on_rows: Callable[[int], None]) -> Verification:
    """Verify the table and every pass of a data set of `layertap sync`."""
    verification = Verification(dataset)
    assert dataset.version is not None
    for number in dataset.version.passes:
        folder = pass_folder(dataset.out, number)
        name = folder.relative_to(dataset.out).as_posix()
        try:
            pass_verification = _verify_shards(DataSet.open(folder), on_rows)
        except InputError as error:
            verification.faults.append(Fault(str(error).removeprefix(f"{folder} "), Remedy.NONE, file=name))
            continue
        verification.faults += [replace(fault, file=f"{name}/{fault.file}") for fault in pass_verification.faults]
    try:
        table = dataset.version_rows()
        if xxhash.xxh3_128_hexdigest(b"\0".join(sorted(table.paths.tolist()))) != dataset.images["paths_xxh3"]:
            verification.faults.append(Fault("the paths of the version do not match dataset.json", Remedy.NONE))
        if not verification.faults:
            with FeatureReader(dataset.out) as reader:
                verification.rows.update(Status(code).text for code in reader.status.tolist())
                verification.faults += _rows_of_other_images(dataset.out, reader, table)
    except (LayertapError, FileNotFoundError) as error:
        verification.faults.append(Fault(f"the version cannot be read: {error}", Remedy.NONE))
    return verification


def _rows_of_other_images(out: Path, reader: FeatureReader, table: RowTable) -> Iterator[Fault]:
    """Yield a fault for each row of a version whose features were computed from another image than that of its path."""
    if table.hashes is None:
        return
    for start in range(0, len(reader), _HASHES_AT_ONCE):
        stop = min(start + _HASHES_AT_ONCE, len(reader))
        differ = (table.hashes[start:stop] != reader.column("source_hash", slice(start, stop))).any(1)
        for row in (start + np.flatnonzero(differ)).tolist():
            path, shard, its_row = reader.place_of(row)
            image = os.fsdecode(table.paths[row])
            what = "has the features of another image; to repair it, delete the folder versions and run `layertap sync`"
            yield Fault(what, Remedy.NONE, shard, path.relative_to(out).as_posix(), its_row, image)


def _verify_shards(dataset: DataSet, on_rows: Callable[[int], None]) -> Verification:
    out, verification = dataset.out, Verification(dataset)
    try:
        for sha256 in recorded_axes(dataset):
            axes_file(dataset, sha256)
    except LayertapError as error:
        verification.faults.append(Fault(str(error).removeprefix(f"{out}/"), Remedy.NONE))
    paths_digest, all_readable = xxhash.xxh3_128(), True
    classes: list[str] | None = None
    for number, files in enumerate(dataset.shard_files()):
        shard = _check_shard(dataset, number, files, verification)
        if shard is None:
            all_readable = False
        else:
            with shard:
                for i, image in enumerate(shard.text("path")):
                    paths_digest.update((b"\0" if number or i else b"") + os.fsencode(image))
                if classes is not None and classes != shard.text("classes"):
                    description = "has other classes than the preceding shards"
                    name = shard.path.relative_to(out).as_posix()
                    verification.faults.append(Fault(description, Remedy.NONE, number, name))
                classes = shard.text("classes")
        on_rows(len(dataset.shard_range(number)))
    if all_readable and paths_digest.hexdigest() != dataset.images["paths_xxh3"]:
        verification.faults.append(Fault("the paths of the shards do not match dataset.json", Remedy.NONE))
    return verification


def _check_shard(dataset: DataSet, number: int, files: ShardFiles, verification: Verification) -> Shard | None:
    """Add the faults of one shard to `verification`; return the open shard, or None if it cannot be read."""
    path = dataset.current(number, files)
    if path is None:
        last = dataset.path(number)
        receipt = ", but its receipt exists" if last.with_suffix(".json").exists() else ""
        name = last.relative_to(dataset.out).as_posix()
        verification.faults.append(Fault(f"is missing{receipt}", Remedy.NONE, number, name))
        verification.rows[Status.PENDING.text] += len(dataset.shard_range(number))
        return None
    name = path.relative_to(dataset.out).as_posix()
    try:
        shard = dataset.open_shard(number, path)
    except LayertapError as error:
        current_files = dataset.shard_files()[number]
        if current_files != files:  # the shard was published or rewritten while it was verified
            return _check_shard(dataset, number, current_files, verification)
        cause = error.__cause__
        if not isinstance(error, InputError) and not (isinstance(cause, OSError) and cause.errno in MEDIA_ERRORS):
            raise  # not a fault of the file: too many open files, a missing library
        verification.faults.append(Fault(error.message.removeprefix(f"{path} "), _remedy_of(path), number, name))
        return None
    faults = [*_faults_of_rows(shard, name, verification.rows)]
    if files.published is not None:
        faults += _faults_of_receipt(shard, name, faults)
    verification.faults += faults
    return shard


def _remedy_of(path: Path) -> Remedy:
    """Return the remedy for a file that cannot be opened as its shard."""
    if path.is_symlink():
        return Remedy.NONE  # the target may be on a disk that is not mounted
    try:
        with Shard(path):
            # The file is an intact, but different shard: dataset.json may be wrong, or two files may be swapped.
            return Remedy.NONE
    except LayertapError:
        return Remedy.FILE


def _faults_of_rows(shard: Shard, name: str, counts: Counter[str]) -> Iterator[Fault]:
    number, first_row, part = shard.identity.shard, shard.identity.first_row, shard.is_part
    status = shard.column("status")
    valid = np.isin(status, list(Status))
    counts.update(Status(code).text for code in status[valid].tolist())

    def of_rows(rows: NDArray[np.int64], description: str) -> Iterator[Fault]:
        for row, path in zip(rows.tolist(), shard.text("path", rows), strict=True):
            yield Fault(description, Remedy.ROW, number, name, first_row + row, path)

    pending = np.flatnonzero(status == Status.PENDING)
    if part and len(pending):
        description = f"is unfinished: {len(pending):,} of {len(shard):,} rows are pending"
        yield Fault(description, Remedy.NONE, number, name)
    elif len(pending):
        yield from of_rows(pending, "is pending in a finished file")
    labels, n_classes = shard.column("label"), len(shard.text("classes"))
    if ((labels < -1) | (labels >= n_classes)).any():
        yield Fault(f"has labels outside its {n_classes} classes", Remedy.FILE, number, name)
    damaged, contradicting = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start, stop, block, agree in checked(shard, np.flatnonzero(status != Status.PENDING)):
        damaged.append(start + np.flatnonzero(~agree))
        if block is not None:
            # Features of rows without an image are NaN, and those of computed rows finite if the status is ok.
            are_finite = np.logical_and.reduce([finite_rows(block[each.name], each.dtype) for each in shard.features])
            contradicting.append(start + np.flatnonzero(agree & (are_finite != (status[start:stop] == Status.OK))))
    yield from of_rows(np.concatenate(damaged), "does not match its hashes")
    yield from of_rows(np.concatenate(contradicting), "features contradict the status")


def _faults_of_receipt(shard: Shard, name: str, row_faults: Collection[Fault]) -> list[Fault]:
    number, receipt_name = shard.identity.shard, Path(name).with_suffix(".json").as_posix()
    try:
        receipt = checked_receipt(shard.path, len(shard))
    except FileNotFoundError:
        return [Fault("is missing", Remedy.RECEIPT, number, receipt_name)]
    except LayertapError as error:
        path = shard.path.with_suffix(".json")
        what = str(error).removeprefix(f"{path} ")
        if path.exists() and not path.is_file():
            return [Fault(f"{what}; remove it, and --repair writes a receipt", Remedy.NONE, number, receipt_name)]
        return [Fault(f"{what}; --repair writes it again", Remedy.RECEIPT, number, receipt_name)]
    expected = {**vars(shard.identity), **size_and_hash(shard.path)}
    if not row_faults:
        # Receipts of earlier versions have no labels and splits.
        expected |= {entry: value for entry, value in counts_of(shard).items() if entry in receipt}
    # Wrong rows explain a mismatch. Without wrong rows, the receipt is wrong, or bytes that no other hash covers; a
    # repair does not overwrite the receipt, because it is the only evidence.
    hint = "" if row_faults else "; all rows match their hashes. If the receipt is removed, --repair writes a new one"
    return [
        Fault(f"its {key} differs from the receipt{hint}", Remedy.NONE, number, name)
        for key, value in expected.items()
        if receipt.get(key) != value
    ]


def repair(verification: Verification) -> int:
    """Reset wrong rows to pending, so that `embed` or `sync` computes them again; return the number of these rows.

    A published shard with wrong rows is renamed to `.damaged` and replaced by a `.part` copy in which these rows are
    pending. An unreadable shard is renamed, and all its rows are pending. Each shard is first verified again, under the
    lock.

    Raises:
        LockedError: another process writes to the data set.
        LayertapError: the disk is full or cannot be written to.
    """
    if verification.dataset.version:
        with verification.dataset.locked():
            return sum(_repair_shards(pass_verification) for pass_verification in _by_pass(verification))
    return _repair_shards(verification)


def _by_pass(verification: Verification) -> Iterator[Verification]:
    """Yield the faults of each pass, as a verification of the pass's own data set."""
    folders = {fault.file.rpartition("/shards/")[0] for fault in verification.faults if "/shards/" in fault.file}
    for folder in sorted(folders):
        faults = [
            replace(fault, file=fault.file.removeprefix(f"{folder}/"))
            for fault in verification.faults
            if fault.file.startswith(f"{folder}/")
        ]
        yield Verification(DataSet.open(verification.dataset.out / folder), faults)


def _repair_shards(verification: Verification) -> int:
    dataset, pending = verification.dataset, 0
    with dataset.locked():
        shard_files = dataset.shard_files()
        for number in sorted({fault.shard for fault in verification.faults if fault.shard is not None}):
            files = shard_files[number]
            path = dataset.current(number, files)
            if path is None:
                continue
            current = Verification(dataset)
            shard = _check_shard(dataset, number, files, current)
            # Faults of rows from other checks, such as recomputation, remain valid as long as the file is the same.
            name = path.relative_to(dataset.out).as_posix()
            of_rows = (fault for fault in verification.faults if fault.file == name and fault.row is not None)
            faults = {*current.faults, *of_rows}
            with system_errors_as(f"cannot repair {path}"), nullcontext() if shard is None else shard:
                pending += _apply_remedies(dataset, number, files, shard, faults)
    return pending


def _apply_remedies(dataset: DataSet, number: int, files: ShardFiles, shard: Shard | None, faults: set[Fault]) -> int:
    """Apply the strongest remedy of the faults of one shard; return the number of rows it resets to pending."""
    remedies = {fault.remedy for fault in faults}
    rows = np.array(sorted({fault.row for fault in faults if fault.remedy is Remedy.ROW and fault.row is not None}))
    rows = rows.astype(np.int64) - dataset.shard_range(number).start
    path = dataset.current(number, files)
    assert path is not None
    if Remedy.FILE in remedies:
        other_name = dataset.path(number, files.published or 0, part=True)
        if files.published is not None and other_name.exists() and other_name.samefile(path):
            other_name.unlink()  # a run was killed between the link and the unlink
        _rename_damaged(path)
        return len(dataset.shard_range(number))
    if shard is None:
        return 0
    if Remedy.ROW in remedies:
        if files.published is None:
            with ShardWriter(dataset, number, files.part or 0) as writer:
                writer.reset(rows)
        else:
            copy_shard(shard, dataset.path(number, files.published + 1, part=True), pending=rows)
            _rename_damaged(path)
        return len(rows)
    if Remedy.RECEIPT in remedies:
        failed = np.flatnonzero(shard.column("status") != Status.OK) + shard.identity.first_row
        unknown_reasons = {int(row): "unknown, because the receipt was lost" for row in failed}
        receipt = receipt_of(path, shard, {**unknown_reasons, **reasons_of(path, len(shard))})
        write_json(path.with_suffix(".json"), receipt, tidy=False)
    return 0


def _rename_damaged(path: Path) -> None:
    """Rename a file, then its receipt, to names in `.damaged`, which no reader opens; the user may inspect them."""
    for file in (path, path.with_suffix(".json")):
        names = (file.with_name(f"{file.name}.damaged{count}") for count in ("", *(f"-{i}" for i in range(2, 1000))))
        if os.path.lexists(file) and (file == path or path.suffix == ".h5"):
            file.rename(next(name for name in names if not os.path.lexists(name)))
    sync_folder(path.parent)
