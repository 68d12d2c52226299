"""Write a shard: batch by batch into the `.part` file, then publish it under its final name."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import LayertapError, LockedError
from extract.status import Status
from extract.store.dataset import DataSet
from extract.store.layout import sync_folder, write_json

__all__ = ["ShardWriter", "hash_rows"]


def hash_rows(features: Mapping[str, NDArray[Any]]) -> NDArray[np.uint64]:
    """xxh3-64 of each row over all features, in sorted order of their names.

    Args:
        features: name -> (B, *shape), as stored.

    Returns:
        (B,) uint64.
    """
    columns = [np.ascontiguousarray(features[name]) for name in sorted(features)]
    hashes = np.empty(len(columns[0]), np.uint64)
    for row in range(len(hashes)):
        state = xxhash.xxh3_64()
        for column in columns:
            state.update(column[row].data if column[row].ndim else column[row].tobytes())
        hashes[row] = state.intdigest()
    return hashes


class ShardWriter:
    """An open `.part` file whose rows are being filled; a context manager.

    A row becomes stored when `write` returns. If the process dies at any moment, the file still opens, and rows whose
    `write` had not returned are pending.

    Args:
        dataset: what the shard belongs to.
        shard: its number; its `.part` file was made by `create_shard`.

    Raises:
        LockedError: another process has the file open.
        LayertapError: the file cannot be opened, or belongs to another data set.
    """

    def __init__(self, dataset: DataSet, shard: int):
        self._part = part = dataset.part_path(shard)
        try:
            self._file = h5py.File(part, "r+")
        except BlockingIOError as error:
            raise LockedError(f"{part} is open in another process") from error
        except OSError as error:
            damaged = "signature" in str(error) or "truncated" in str(error)
            remedy = "; it is damaged: delete it, and its rows will be computed again" if damaged else ""
            raise LayertapError(f"{part} cannot be opened: {error}{remedy}") from error
        if fault := dataset.fault_of(self._file, shard):
            self._file.close()
            raise LayertapError(f"{part} {fault}; delete it, and its rows will be computed again")
        self._features: dict[str, h5py.Dataset] = dict(self._file["features"].items())
        self.first_row = int(self._file.attrs["first_row"])
        self.status: NDArray[np.uint8] = self._file["status"][:]
        self._reasons: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def check(self) -> int:
        """Reset to pending each stored row whose features do not agree with its hash; returns how many."""
        done = np.flatnonzero(self.status)
        stored = self._file["row_hash"][:]
        wrong: list[int] = []
        for start, stop in runs(done, at_most=256):
            block = {name: data[start:stop] for name, data in self._features.items()}
            wrong.extend(start + np.flatnonzero(hash_rows(block) != stored[start:stop]))
        for row in wrong:
            self._file["status"][row] = self.status[row] = Status.PENDING
        self._file.flush()
        return len(wrong)

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
            if values.shape != (len(rows), *self._features[name].shape[1:]):
                raise ValueError(f"{name}: {values.shape} given for {len(rows)} rows of {self._features[name].shape}")
        local = rows - self.first_row
        columns = {f"features/{name}": values for name, values in features.items()}
        columns |= {"row_hash": hash_rows(features), **source}
        try:
            for start, stop in runs(local):
                first = int(np.searchsorted(local, start))
                for name, values in columns.items():
                    self._file[name][start:stop] = values[first : first + stop - start]
            self._file.flush()
            for start, stop in runs(local):
                first = int(np.searchsorted(local, start))
                self._file["status"][start:stop] = status[first : first + stop - start]
            self._file.flush()
        except OSError as error:
            raise LayertapError(f"cannot write to {self._part}: {error}; what was stored before is safe") from error
        self.status[local] = status
        self._reasons.update(reasons or {})

    def publish(self) -> Path:
        """Close the file and give it its final name, then write the receipt; returns the final path.

        The name is taken with a link, which fails where it exists: of two writers, one wins.

        Raises:
            LayertapError: rows are pending, or a shard of that name exists.
        """
        pending = int((self.status == Status.PENDING).sum())
        if pending:
            raise LayertapError(f"{self._part}: {pending} rows are still pending")
        receipt = {
            "shard": int(self._file.attrs["shard"]),
            "first_row": self.first_row,
            "n_rows": len(self.status),
            "fingerprint": str(self._file.attrs["fingerprint"]),
            "status": {Status(code).text: count for code, count in sorted(Counter(self.status.tolist()).items())},
            "reasons": {str(row): reason for row, reason in sorted(self._reasons.items())},
        }
        self._file.close()
        final = self._part.with_suffix("")
        try:
            with self._part.open("r+b") as raw:
                os.fsync(raw.fileno())
                digest = hashlib.file_digest(raw, "sha256").hexdigest()
                receipt |= {"size": os.fstat(raw.fileno()).st_size, "sha256": digest}
            if final.exists():
                raise FileExistsError
            # Before the name, which is the commit: a published shard always has its receipt.
            write_json(final.with_suffix(".json"), receipt)
            _claim(self._part, final)
            sync_folder(final.parent)
        except FileExistsError as error:
            raise LayertapError(f"{final} exists already: another run published this shard first") from error
        except OSError as error:
            raise LayertapError(
                f"cannot publish {final}: {error.strerror}; its rows are safe in {self._part.name}; run again to go on"
            ) from error
        return final


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


def runs(rows: NDArray[np.integer[Any]], at_most: int | None = None) -> Iterator[tuple[int, int]]:
    """Ascending rows as half-open ranges of neighbours: [3, 4, 5, 9] -> (3, 6), (9, 10)."""
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for part in np.split(rows, breaks):
        step = at_most or len(part)
        for first in range(0, len(part), step):
            piece = part[first : first + step]
            yield int(piece[0]), int(piece[-1]) + 1
