"""Whether a data set is what was written: every file, receipt, row and count; and mending what is not."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.status import Status
from extract.store.copying import copy_shard
from extract.store.dataset import DataSet
from extract.store.files import read_json, sync_folder
from extract.store.shard import Shard
from extract.store.writer import ShardWriter, hash_rows, size_and_hash, write_receipt

__all__ = ["Fault", "Verification", "repair", "verify"]


@dataclass(frozen=True)
class Fault:
    """Something that is not as it was written.

    Attributes:
        what: in words.
        shard: number; None: of the data set.
        file: name of the file, within the folder.
        row: of the data set; None: of the whole file.
        path: of the row's image.
        kind: "rows" (these rows are to be computed again), "file" (all of its rows), "receipt" (to be written again),
            or "missing" (nothing is there to be mended: `embed` computes it).
    """

    what: str
    shard: int | None = None
    file: str = ""
    row: int | None = None
    path: str | None = None
    kind: str = "file"


@dataclass
class Verification:
    """What was found.

    Attributes:
        dataset: what was looked at.
        faults: none, if all is well.
        rows: status -> number of rows, of the shards that can be read.
    """

    dataset: DataSet
    faults: list[Fault] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)


def verify(out: Path, on_rows: Callable[[int], None] = lambda rows: None) -> Verification:
    """Check every hash, receipt and count of a data set; nothing is written.

    Args:
        out: its folder.
        on_rows: called with a number of rows that have been checked.

    Raises:
        InputError: it is no data set, or its description is damaged.
        LayertapError: a library for its compression is missing.
    """
    dataset = DataSet.open(out)
    found = Verification(dataset)
    listed = xxhash.xxh3_128()
    whole, classes = True, None
    for number, where in enumerate(dataset.whereabouts()):
        n_rows = len(dataset.shard_range(number))
        part = where.published is None
        revision = where.part if part else where.published
        path = dataset.path(number, revision or 0, part=part and revision is not None)
        name = str(path.relative_to(out))
        if revision is None:
            receipt = ", though its receipt is there" if path.with_suffix(".json").exists() else ""
            found.faults.append(Fault(f"is missing{receipt}", number, name, kind="missing"))
            found.rows["pending"] += n_rows
            whole = False
            on_rows(n_rows)
            continue
        try:
            shard = dataset.open_shard(number, path)
        except InputError as error:  # other errors are not the file's: too many open files, a missing library
            found.faults.append(Fault(str(error).removeprefix(f"{path} "), number, name))
            whole = False
            on_rows(n_rows)
            continue
        with shard:
            _check_rows(shard, name, part, found)
            if not part:
                _check_receipt(shard, name, found)
            for i, image in enumerate(shard.text("path")):
                listed.update((b"\0" if number or i else b"") + os.fsencode(image))
            if classes is not None and classes != shard.text("classes"):
                found.faults.append(Fault("has other classes than the shards before it", number, name))
            classes = shard.text("classes")
        on_rows(n_rows)
    if whole and listed.hexdigest() != dataset.images["paths_xxh3"]:
        found.faults.append(Fault("the paths of the shards are not those of dataset.json"))
    return found


def _check_rows(shard: Shard, name: str, part: bool, found: Verification) -> None:
    number, first_row = shard.identity.shard, shard.identity.first_row
    status = shard.column("status")
    known = np.isin(status, list(Status))
    found.rows.update(Status(code).text for code in status[known].tolist())
    pending = int((status == Status.PENDING).sum())
    if pending:
        how = "is unfinished" if part else "is damaged: it is published"
        found.faults.append(
            Fault(
                f"{how}, {pending:,} of {len(shard):,} rows are pending",
                number,
                name,
                kind="missing" if part else "file",
            )
        )
    if not known.all():
        found.faults.append(Fault(f"has rows of a status that does not exist ({status[~known][0]})", number, name))
    labels, n_classes = shard.column("label"), len(shard.text("classes"))
    if ((labels < -1) | (labels >= n_classes)).any():
        found.faults.append(Fault(f"has labels beyond its {n_classes} classes", number, name))

    def row_faults(rows: NDArray[np.int64], what: str) -> None:
        paths = shard.text("path", rows)
        found.faults.extend(
            Fault(what, number, name, first_row + row, path, "rows")
            for row, path in zip(rows.tolist(), paths, strict=True)
        )

    stored, wrong, unlike = shard.column("row_hash"), [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start, stop, block in shard.blocks(np.flatnonzero(status != Status.PENDING)):
        agree = np.zeros(stop - start, bool) if block is None else hash_rows(block) == stored[start:stop]
        wrong.append(start + np.flatnonzero(~agree))
        if block is not None:
            unlike.append(start + np.flatnonzero(agree & ~_as_status_says(block, status[start:stop])))
    row_faults(np.concatenate(wrong), "its features do not agree with their hash")
    row_faults(np.concatenate(unlike), "its features are not as its status says")


def _as_status_says(block: dict[str, NDArray[Any]], status: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which rows are finite where they are ok, NaN where there was no picture, and not finite where that is said."""
    flat = [values.reshape(len(values), -1) for values in block.values()]
    finite = np.logical_and.reduce([np.isfinite(values).all(1) for values in flat])
    none = np.logical_and.reduce([np.isnan(values).all(1) for values in flat])
    found: NDArray[np.bool_] = np.select(
        [status == Status.OK, status == Status.NOT_FINITE, np.isin(status, (Status.DECODE_ERROR, Status.MISSING))],
        [finite, ~finite, none],
        True,
    )
    return found


def _check_receipt(shard: Shard, name: str, found: Verification) -> None:
    number, path = shard.identity.shard, shard.path
    receipt_name = str(Path(name).with_suffix(".json"))
    try:
        receipt = read_json(path.with_suffix(".json"))
    except FileNotFoundError:
        found.faults.append(Fault("is missing", number, receipt_name, kind="receipt"))
        return
    except LayertapError as error:
        found.faults.append(Fault(str(error), number, receipt_name, kind="receipt"))
        return
    for key, value in {**vars(shard.identity), **size_and_hash(path)}.items():
        if receipt.get(key) != value:
            # Where rows are wrong, that is why; else something beside them is.
            rows_are = any(fault.kind == "rows" and fault.shard == number for fault in found.faults)
            what = f"its {key} is not that of its receipt"
            found.faults.append(Fault(what, number, name, kind="rows" if rows_are and key == "sha256" else "file"))
    counts = Counter(shard.column("status").tolist())
    if receipt.get("status") != {Status(code).text: counts[code] for code in sorted(counts) if code in list(Status)}:
        found.faults.append(Fault("the status of its rows is not that of its receipt", number, name))


def repair(found: Verification) -> int:
    """Make rows that are wrong pending, so that `embed` computes them again; returns how many there are.

    A published shard with wrong rows is put aside (`.damaged`), and a copy without those rows takes its place as a
    `.part`. One that cannot be read, or of which more than rows is wrong, is put aside as a whole.

    Raises:
        LockedError: another process writes to the data set.
        LayertapError: the disk is full or refuses.
    """
    dataset, pending = found.dataset, 0
    with dataset.locked():
        by_shard: dict[int, list[Fault]] = {}
        for fault in found.faults:
            if fault.shard is not None and fault.kind != "missing":
                by_shard.setdefault(fault.shard, []).append(fault)
        for number, faults in by_shard.items():
            where = dataset.whereabouts()[number]
            kinds = {fault.kind for fault in faults}
            first_row = dataset.shard_range(number).start
            rows = np.array(sorted({fault.row - first_row for fault in faults if fault.row is not None}), np.int64)
            try:
                if where.published is None:
                    assert where.part is not None
                    pending += _repair_part(dataset, number, where.part, kinds, rows)
                else:
                    pending += _repair_published(dataset, number, where.published, kinds, rows)
            except OSError as error:
                raise LayertapError(f"cannot repair shard {number} of {dataset.out}: {error.strerror}") from error
    return pending


def _repair_part(dataset: DataSet, number: int, revision: int, kinds: set[str], rows: NDArray[np.int64]) -> int:
    if "file" in kinds:
        _put_aside(dataset.path(number, revision, part=True))
        return len(dataset.shard_range(number))
    with ShardWriter(dataset, number, revision) as writer:
        writer.reset(rows)
    return len(rows)


def _repair_published(dataset: DataSet, number: int, revision: int, kinds: set[str], rows: NDArray[np.int64]) -> int:
    path = dataset.path(number, revision)
    if kinds == {"receipt"}:
        with dataset.open_shard(number, path) as shard:
            failed = np.flatnonzero(shard.column("status") != Status.OK) + shard.identity.first_row
            write_receipt(path, path, shard, {int(row): "the receipt that said why was lost" for row in failed})
        return 0
    if "file" in kinds:
        rows = np.arange(len(dataset.shard_range(number)))
    else:
        with dataset.open_shard(number, path) as shard:
            copy_shard(shard, dataset.path(number, revision + 1, part=True), pending=rows)
    _put_aside(path.with_suffix(".json"))
    _put_aside(path)
    return len(rows)


def _put_aside(path: Path) -> None:
    for count in range(1, 1000):
        aside = path.with_name(f"{path.name}.damaged" + (f"-{count}" if count > 1 else ""))
        if path.exists() and not aside.exists():
            path.rename(aside)
            sync_folder(path.parent)
            return
