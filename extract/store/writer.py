"""Write a shard: batch by batch into the `.part` file, then publish it under its final name."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract import defaults
from extract.errors import InputError, LayertapError, LockedError
from extract.status import Status
from extract.store.copying import copy_shard
from extract.store.dataset import DataSet
from extract.store.files import discard, read_json, sync_folder, write_json
from extract.store.layout import ROW_DATA
from extract.store.shard import Shard, runs

__all__ = ["ShardWriter", "hash_rows", "reasons_of", "size_and_hash", "write_receipt", "wrong_rows"]


def hash_rows(features: Mapping[str, NDArray[Any]]) -> NDArray[np.uint64]:
    """xxh3-64 of each row over all features, in sorted order of their names.

    Args:
        features: name -> (B, *shape), as stored.

    Returns:
        (B,) uint64.
    """
    columns = [np.ascontiguousarray(features[name]) for name in sorted(features)]
    n_rows = len(columns[0])
    flat = [column.reshape(n_rows, -1).view(np.uint8) for column in columns] if n_rows else []
    if len(flat) == 1:
        return np.array([xxhash.xxh3_64_intdigest(row.data) for row in flat[0]], np.uint64)
    hashes = np.empty(n_rows, np.uint64)
    for row in range(n_rows):
        state = xxhash.xxh3_64()
        for column in flat:
            state.update(column[row].data)
        hashes[row] = state.intdigest()
    return hashes


class ShardWriter:
    """An open `.part` file whose rows are being filled; a context manager.

    The file has its full size and structure already, so rows are written in place and HDF5 takes no part in it. A row
    is stored when `write` returns. If the process dies at any moment, the file still opens, and rows whose `write` had
    not returned are pending. If the power fails, rows of the last `sync_s` seconds may be lost; those that are damaged
    by it do not agree with their hash, and `check` finds them.

    Args:
        dataset: what the shard belongs to.
        shard: its number.
        revision: of the file; its `.part` was made by `create_shard` or `copy_shard`.
        sync_s: seconds after which what was written is forced to the disk; 0: after every batch.

    Attributes:
        status: (N,) of the rows of this shard.

    Raises:
        LockedError: another process has the file open.
        LayertapError: the file cannot be opened, is damaged, or belongs to another data set.
    """

    def __init__(self, dataset: DataSet, shard: int, revision: int = 0, *, sync_s: float = defaults.SYNC_S):
        self._dataset, self._number, self._revision = dataset, shard, revision
        self._part = part = dataset.path(shard, revision, part=True)
        self._final = dataset.path(shard, revision)
        self._sync_s, self._synced = sync_s, time.monotonic()
        try:
            self._file = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LayertapError(f"{part} cannot be opened: {error.strerror}") from error
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock that HDF5 takes, too
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise LockedError(f"{part} is open in another process") from error
                if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):  # a file system without locks
                    raise
            try:
                self._shard = dataset.open_shard(shard, part)
            except InputError as error:
                raise LayertapError(f"{error}; delete the file, and its rows will be computed again") from error
        except BaseException:
            os.close(self._file)
            raise
        self._offsets = self._shard.offsets
        self._row_data = {name: (width, np.dtype(dtype)) for name, width, dtype in ROW_DATA}
        self._features = {feature.name: feature for feature in self._shard.features}
        self.first_row = self._shard.identity.first_row
        self.status: NDArray[np.uint8] = self._shard.column("status")
        self._reasons: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            self._shard.close()
            os.close(self._file)
            self._file = -1

    def check(self) -> int:
        """Reset to pending each stored row whose features do not agree with its hash; returns how many."""
        wrong = wrong_rows(self._shard, np.flatnonzero(self.status))
        self.reset(wrong)
        return len(wrong)

    def reset(self, rows: NDArray[np.int64]) -> None:
        """Make rows, counted within the shard, pending."""
        self.status[rows] = Status.PENDING
        try:
            for start, stop in runs(rows):
                self._put("/status", start, self.status[start:stop])
        except OSError as error:
            raise LayertapError(f"cannot write to {self._part}: {error.strerror}") from error

    def write(
        self,
        rows: NDArray[np.int64],
        features: Mapping[str, NDArray[Any]],
        status: NDArray[np.uint8],
        source: Mapping[str, NDArray[Any]],
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        """Store one batch of rows.

        Args:
            rows: (R,) int64, ascending, counted over the whole data set.
            features: name -> (R, *shape) in the file's dtype, for every feature of the file.
            status: (R,) uint8, none of them pending.
            source: "source_size", "source_mtime_ns", "source_hash" -> one value a row.
            reasons: row -> why it failed, for the receipt.

        Raises:
            ValueError: a feature is missing or has another shape than the file.
            LayertapError: the disk refused; rows of this call stay pending.
        """
        if features.keys() != self._features.keys():
            raise ValueError(f"features {sorted(features)} given, the file has {sorted(self._features)}")
        for name, values in features.items():
            if values.shape != (len(rows), *self._features[name].shape) or values.dtype != self._features[name].dtype:
                expected = f"rows of {self._features[name].shape} {self._features[name].dtype}"
                raise ValueError(f"{name}: {values.shape} {values.dtype} given for {len(rows)} {expected}")
        local = rows - self.first_row
        if len(local) and not (local[0] >= 0 and local[-1] < len(self.status) and (np.diff(local) > 0).all()):
            raise ValueError(f"rows {rows} are not ascending rows of this shard")
        columns: dict[str, NDArray[Any]] = {f"/features/{name}": values for name, values in features.items()}
        columns["/row_hash"] = hash_rows(features)
        columns |= {f"/{name}": np.asarray(values, self._row_data[name][1]) for name, values in source.items()}
        try:
            for name, values in columns.items():
                for start, stop in runs(local):
                    first = int(np.searchsorted(local, start))
                    self._put(name, start, values[first : first + stop - start])
            if self._sync_s == 0:
                os.fdatasync(self._file)  # so that no status is on the disk before its row
            for start, stop in runs(local):
                first = int(np.searchsorted(local, start))
                self._put("/status", start, status[first : first + stop - start])
            if time.monotonic() - self._synced >= self._sync_s:
                os.fdatasync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            raise LayertapError(
                f"cannot write to {self._part}: {error.strerror}; what was stored before is safe"
            ) from error
        self.status[local] = status
        self._reasons.update(reasons or {})

    def give_reasons(self, reasons: Mapping[int, str]) -> None:
        """Why rows of the data set failed, for the receipt."""
        self._reasons.update(reasons)

    def _put(self, name: str, row: int, values: NDArray[Any]) -> None:
        """Write values over rows from `row` on."""
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        offset = self._offsets[name] + row * (len(content) // max(1, len(values)))
        while content:
            written = os.pwrite(self._file, content, offset)
            content, offset = content[written:], offset + written

    def publish(self, compress: str | None = None) -> Path:
        """Close the file and give it its final name, then remove the file it replaces; returns the final path.

        The receipt is written first, and the name is taken with a link, which fails where it exists: of two writers,
        one wins.

        Args:
            compress: "gzip", "lzf" or "blosc2" packs the features first; None leaves them plain.

        Raises:
            LayertapError: rows are pending, the disk is full, or a shard of that name exists.
        """
        pending = int((self.status == Status.PENDING).sum())
        if pending:
            raise LayertapError(f"{self._part}: {pending} rows are still pending")
        ready = self._part
        try:
            os.fsync(self._file)
            if compress:
                ready = self._final.with_name(self._final.name + ".packed.new")
                self._pack(ready, compress)
            if self._final.exists():
                raise FileExistsError
            write_receipt(self._final, ready, self._shard, self._reasons)
            _claim(ready, self._final)
            self._part.unlink(missing_ok=True)
            sync_folder(self._final.parent)
            for earlier in range(self._revision):
                self._dataset.withdraw(self._dataset.path(self._number, earlier))
        except FileExistsError as error:
            raise LayertapError(f"{self._final} exists already: another run published this shard first") from error
        except OSError as error:
            if not self._part.exists():
                raise LayertapError(
                    f"cannot publish {self._final}: {self._part.name} or its folder has vanished; run again to compute "
                    "its rows anew"
                ) from error
            raise LayertapError(
                f"cannot publish {self._final}: {error.strerror}; its rows are safe in {self._part.name}; "
                "run again to go on"
            ) from error
        finally:
            if ready != self._part:
                discard(ready)
        self._close()
        return self._final

    def _pack(self, path: Path, compress: str) -> None:
        """Write a compressed copy, and read it again."""
        try:
            copy_shard(self._shard, path, compress=compress)
        except LayertapError as error:
            raise LayertapError(
                f"{error}; its rows are safe in {self._part.name}; run again to go on, or without compression"
            ) from error
        with Shard(path) as packed:
            wrong = wrong_rows(packed, np.arange(len(packed)))
        if len(wrong):
            raise LayertapError(
                f"{path}: {len(wrong)} rows are not what they were before {compress}, first row {wrong[0]}; "
                f"they are safe in {self._part.name}; run again without compression"
            )


def write_receipt(final: Path, file: Path, shard: Shard, reasons: Mapping[int, str]) -> None:
    """Write the receipt of the shard `final`, whose content lies in `file` and is open as `shard`."""
    status, first_row = shard.column("status"), shard.identity.first_row
    failed = {first_row + int(row) for row in np.flatnonzero(status != Status.OK)}
    receipt = {
        **vars(shard.identity),
        "status": {Status(code).text: count for code, count in sorted(Counter(status.tolist()).items())},
        "reasons": {str(row): reasons[row] for row in sorted(failed & reasons.keys())},
        **size_and_hash(file),
    }
    with Shard(file) as ready:
        if ready.compression:
            plain = sum(feature.row_bytes for feature in ready.features) * len(ready)
            packed = {name: ready.stored_bytes[name] for name in ready.compression}
            receipt["compression"] = {
                "filter": next(iter(ready.compression.values())),
                "ratio": round(plain / max(1, sum(packed.values())), 3),
            }
    write_json(final.with_suffix(".json"), receipt)


def wrong_rows(shard: Shard, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the given rows (ascending, counted within the shard) whose features do not agree with their hash."""
    stored, wrong = shard.column("row_hash"), [np.empty(0, np.int64)]
    for start, stop, block in shard.blocks(rows):
        agree = np.zeros(stop - start, bool) if block is None else hash_rows(block) == stored[start:stop]
        wrong.append(start + np.flatnonzero(~agree))
    return np.concatenate(wrong)


def size_and_hash(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as a receipt has them."""
    with path.open("rb") as raw:
        return {"size": os.fstat(raw.fileno()).st_size, "sha256": hashlib.file_digest(raw, "sha256").hexdigest()}


def reasons_of(path: Path) -> dict[int, str]:
    """Row of the data set -> why it failed, from the receipt of a published shard; empty if that is lost or damaged."""
    try:
        reasons = read_json(path.with_suffix(".json"))["reasons"]
        return {int(row): str(reason) for row, reason in reasons.items()}
    except (OSError, InputError, KeyError, ValueError, AttributeError):
        return {}


def _claim(part: Path, final: Path) -> None:
    """Move a file to a name that must be free.

    Raises:
        FileExistsError: it is not.
    """
    try:
        os.link(part, final)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without hard links (exFAT, some network ones): the lock of the data set must do.
        if final.exists():
            raise FileExistsError from error
        part.rename(final)
    else:
        part.unlink()
