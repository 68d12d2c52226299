"""The rows that a reader reads: some rows of some shards, with their paths, labels, splits and ids.

A shard holds one file handle and about 90 KB of memory while it is open. Shards are opened on first use where there are
many, within the limit of open files.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial as bind
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, LockedError
from extract.row_status import Status
from extract.store.format.dataset import UNFINISHED_HINT, DataSet
from extract.store.format.layout import REPAIR_HINT, Identity, StoredFeature
from extract.store.format.receipt import reasons_in, reasons_of
from extract.store.format.shard import Shard
from extract.store.format.version import RowTable
from extract.store.format.writer import wrong_rows
from extract.store.places.bucket import Bucket
from extract.store.places.shard_cache import RemoteFile, ShardCache

__all__ = ["OpenShards", "OpenedDataSet", "RowSelection", "ShardFile", "open_selections", "read_one_version"]

T = TypeVar("T")

_REPAIR = "run `layertap sync` to repair the data set"
_ATTEMPTS = 5  # to read a data set while new versions are published
# A data set of more shards is opened shard by shard, on first use: an open shard takes 2 ms, 90 KB and a file handle.
# Of others, damage is reported before any work is done. A missing shard is an error at once, always.
OPENED_AT_ONCE = 64
_AT_ONCE = 8  # shards of a bucket that are opened at the same time
_OTHER_FILES = 128  # handles that are left to the rest of the process
_UNKNOWN_OPEN_FILES = 256
_MOST = 30_000  # open shards: Linux allows a process 65,530 memory maps (vm.max_map_count)


class OpenShards:
    """The shards of a reader that are open and may be closed to stay within the limit of open files.

    Args:
        most: shards that may be open, if the system permits as many.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._limit: int | None = None  # not known yet
        self._open: OrderedDict[ShardFile, None] = OrderedDict()  # in the order in which they were opened
        self._is_closed = False

    def open(self, file: ShardFile, read: Callable[[], Shard]) -> Shard:
        """Open the shard of a file and return it, and close the shard that was opened first if too many are open.

        Threads may open the same shard at the same time; each reads its own, and the last one stays.
        """
        if self._is_closed:
            raise LayertapError(f"{file.name} is closed")
        if self._limit is None:
            self._limit = min(self._most, _most_open_shards())
        shard = read()
        with contextlib.suppress(KeyError):  # another thread has closed the last one
            while len(self._open) >= self._limit:
                first, _ = self._open.popitem(last=False)
                first.opened = None
        file.opened = shard  # before another thread may close it
        self._open[file] = None
        return shard

    def close(self) -> None:
        """Open no more shards."""
        self._is_closed = True
        self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict(), "_limit": None}


class ShardFile:
    """A shard of a reader, opened on first use; another process that unpickles it opens the file again.

    Args:
        name: path or URL, for errors.
        n_rows: rows of the shard.
        read: opens the shard; picklable.
        open_shards: the shards of the reader.
        opened: the shard if it is to stay open, because a process writes to its file.

    Attributes:
        opened: the shard while it is held open; with None, it closes as soon as no array and no other thread uses it.
    """

    def __init__(
        self, name: str, n_rows: int, read: Callable[[], Shard], open_shards: OpenShards, opened: Shard | None = None
    ):
        self.name, self.n_rows, self.opened = name, n_rows, opened
        self._read, self._open_shards = read, open_shards

    @property
    def shard(self) -> Shard:
        """The open shard.

        Raises:
            InputError: the shard is damaged, of another data set, or no longer exists.
            LayertapError: the reader is closed, or the file cannot be read.
        """
        return self.opened or self._open_shards.open(self, self._read)

    def close(self) -> None:
        """Close the file for good."""
        self._open_shards.close()
        if self.opened is not None:
            self.opened.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "opened": None}


def _most_open_shards() -> int:
    """Return how many more shards may be open, after the limit of open files was raised as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2 * _MOST if hard == resource.RLIM_INFINITY else min(2 * _MOST, hard)
    soft = limit if soft == resource.RLIM_INFINITY else soft
    if soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    try:
        count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:  # macOS
        count = _UNKNOWN_OPEN_FILES
    return max(1, min(_MOST, soft - count - _OTHER_FILES))


@dataclass(frozen=True)
class RowSelection:
    """Rows of one shard.

    Attributes:
        file: the shard. For a shard in a bucket, it has the features; it is downloaded on first use.
        rows: (N,), their numbers in the data set, ascending.
        chosen: (N,) int64, their numbers in the shard; None for all rows of the shard, in order.
        names: of a version, its table, with paths, labels and splits of these rows; None to read them from the shard.
        without_features: of a shard in a bucket: everything but the features.
        receipt: of a shard in a bucket: content of its receipt.
    """

    file: ShardFile
    rows: range | NDArray[np.int64]
    chosen: NDArray[np.int64] | None = None
    names: RowTable | None = None
    without_features: ShardFile | None = None
    receipt: Mapping[str, Any] | None = None

    @property
    def shard(self) -> Shard:
        """The open shard, perhaps without its features; see `ShardFile.shard` for errors."""
        return (self.without_features or self.file).shard

    @property
    def reasons(self) -> dict[int, str]:
        """Row of the data set -> why it failed."""
        shard = self.shard
        return reasons_of(shard.path, len(shard)) if self.receipt is None else reasons_in(self.receipt)

    def close(self) -> None:
        """Close the files; arrays that were read stay valid."""
        self.file.close()
        if self.without_features is not None:
            self.without_features.close()

    def after(self, count: int) -> RowSelection:
        """Return the selection with `count` added to its row numbers, for the rows of preceding data sets."""
        if isinstance(self.rows, range):
            return replace(self, rows=range(self.rows.start + count, self.rows.stop + count))
        return replace(self, rows=self.rows + count)

    def part(self, places: NDArray[np.int64]) -> RowSelection:
        """Return the selection of some of these rows, by their numbers (M,) in it, which ascend."""
        if len(places) == len(self.rows):
            return self
        rows = self.rows.start + places if isinstance(self.rows, range) else self.rows[places]
        chosen = places if self.chosen is None else self.chosen[places]
        return replace(self, rows=rows, chosen=chosen, names=self.names and self.names.part(places))

    def column(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return (stop - start, ...), a column of the shard for some of the rows; by default for all."""
        if self.chosen is None:
            return self.shard.column(name, slice(start, stop))
        return self.shard.column(name, self.chosen[start:stop])

    def texts(self, name: str, start: int, stop: int) -> list[str]:
        """Return the path, split, id or text of a kept column of some of the rows."""
        if self.names is not None and name in ("path", "split"):
            column = self.names.paths if name == "path" else self.names.splits
            return [os.fsdecode(text) for text in column[start:stop].tolist()]
        return self.shard.text(name, slice(start, stop) if self.chosen is None else self.chosen[start:stop])

    @property
    def has_ids(self) -> bool:
        """Whether the rows have ids."""
        return self.names is None and self.shard.has_ids

    @property
    def kept_columns(self) -> dict[str, str]:
        """Name in the shard -> "S" for text, "i" or "f" for numbers, of the kept columns."""
        return {name: dtype.kind for name, dtype in self.shard.kept_columns.items()}

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self.shard.text("classes") if self.names is None else list(self.names.classes)

    @property
    def labels(self) -> NDArray[np.int64]:
        """(N,) int64, index into `classes`; -1 unknown.

        Raises:
            InputError: a label is out of range.
        """
        labels = self.column("label") if self.names is None else self.names.labels
        if len(labels) and not (labels.min() >= -1 and labels.max() < len(self.classes)):
            raise InputError(f"{self.shard.name} is damaged: a label is not the index of a class")
        return labels


@dataclass(frozen=True)
class OpenedDataSet:
    """A data set, or one shard, open for reading.

    Attributes:
        selections: the rows that can be read.
        features: features of each row.
        fingerprint: fingerprint of the data set.
        n_rows: rows of the data set or shard, including rows that cannot be read yet.
    """

    selections: list[RowSelection]
    features: list[StoredFeature]
    fingerprint: str
    n_rows: int


def open_selections(
    path: Path | str, partial: bool, cache: ShardCache | None, open_shards: OpenShards
) -> OpenedDataSet:
    """Open a data set folder or a shard, for a URL through `cache`; see `FeatureReader` for `partial` and errors."""
    if isinstance(path, str):
        assert cache is not None
        return _open_url(path, partial, cache)
    if path.is_dir():
        return read_one_version(path, lambda dataset: _select_from_shards(dataset, partial, open_shards))
    shard = Shard(path)
    file = ShardFile(shard.name, len(shard), bind(_open_again, path, shard.identity), open_shards, shard)
    selection = _select_stored(file, shard.identity.first_row, partial)
    return OpenedDataSet([selection], shard.features, shard.identity.fingerprint, len(shard))


def _open_url(url: str, partial: bool, cache: ShardCache) -> OpenedDataSet:
    """Open a data set in a bucket."""
    if url.endswith(".h5"):
        raise InputError(f"{url} is a shard; in a bucket, only whole data sets are read", hint="name the data set")
    bucket = Bucket(url)
    dataset, files = bucket.dataset, bucket.finished(partial=partial)
    largest = max([1, *(file.size for file in files.values())])
    # What the cache removes stays on the disk until it is closed.
    whole, without_features = OpenShards(max(1, cache.cache_bytes // largest)), OpenShards()

    def select(shard: int, file: RemoteFile) -> RowSelection:
        rows = dataset.shard_range(shard)
        features, table = (
            ShardFile(file.url, len(rows), bind(_open_remote, cache, file, dataset, shard, with_features), open_shards)
            for open_shards, with_features in ((whole, True), (without_features, False))
        )
        _stored_rows(table.shard, partial=False)
        return RowSelection(features, rows, without_features=table, receipt=file.receipt)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        selections = list(pool.map(select, files, files.values()))
    return OpenedDataSet(selections, dataset.features, dataset.fingerprint, dataset.n_rows)


def _open_remote(cache: ShardCache, file: RemoteFile, dataset: DataSet, shard: int, with_features: bool) -> Shard:
    """Open a shard in a bucket through the cache, and check that it is this shard of its data set."""
    opened = cache.open(file, with_features=with_features)
    dataset.check_shard(shard, opened)
    return opened


def read_one_version(
    out: Path, read: Callable[[DataSet], T], is_usable: Callable[[T], bool] = lambda result: True
) -> T:
    """Return `read(dataset)`; if it fails because a version or layers were published meanwhile, try these.

    Raises:
        InputError: a file of the version is missing.
    """
    for _ in range(_ATTEMPTS):
        dataset = DataSet.open(out)
        shards, files = dataset.shards, dataset.shard_files()
        try:
            result = read(dataset)
            if is_usable(result) or _is_current(dataset, shards):
                return result
        except LayertapError:
            # A shard that has just been published or rewritten has another name; a listing can miss it meanwhile.
            if _is_current(dataset, shards) and dataset.shard_files() == files:
                raise
        except FileNotFoundError as error:
            if _is_current(dataset, shards):
                raise InputError(f"{error.filename} is missing", hint=_REPAIR) from error
    raise LockedError(f"{out} was changed {_ATTEMPTS} times while it was read", hint="run again")


def _is_current(dataset: DataSet, shards: Path) -> bool:
    now = DataSet.open(dataset.out)
    return now.version == dataset.version and (now.fingerprint, now.shards) == (dataset.fingerprint, shards)


def _select_from_shards(dataset: DataSet, partial: bool, open_shards: OpenShards) -> OpenedDataSet:
    select = _select_from_version if dataset.version is not None else _select_from_files
    selections = list(select(dataset, partial, open_shards))
    return OpenedDataSet(selections, dataset.features, dataset.fingerprint, dataset.n_rows)


def _select_from_version(dataset: DataSet, partial: bool, open_shards: OpenShards) -> Iterator[RowSelection]:
    """Yield the rows of the published version of a data set of `layertap sync`.

    Raises:
        FileNotFoundError: the version's table does not exist.
        LayertapError: a pass is missing, unfinished or damaged.
    """
    table = dataset.version_rows()
    assert dataset.version is not None
    passes = dataset.data_sets_with_shards()
    at_once = sum(pass_dataset.n_shards for pass_dataset in passes) <= OPENED_AT_ONCE
    for number, pass_dataset in zip(dataset.version.passes, passes, strict=True):
        start, stop = np.searchsorted(table.passes, [number, number + 1]).tolist()
        rows = table.rows[start:stop]
        if len(rows) and rows[-1] >= pass_dataset.n_rows:
            raise InputError(f"{pass_dataset.out} has no row {rows[-1]}, to which the version refers", hint=_REPAIR)
        for shard, files in enumerate(pass_dataset.shard_files()):
            of_shard = pass_dataset.shard_range(shard)
            first, last = (start + np.searchsorted(rows, [of_shard.start, of_shard.stop])).tolist()
            if first == last:
                continue
            path = pass_dataset.path(shard, files.published or 0)
            file = _finished(pass_dataset, shard, path, open_shards, at_once)
            chosen = table.rows[first:last] - of_shard.start
            names = table.part(slice(first, last))
            all_rows = np.array_equal(chosen, np.arange(len(of_shard)))
            yield RowSelection(file, range(first, last), None if all_rows else chosen, names)


def _select_stored(file: ShardFile, first_row: int, partial: bool) -> RowSelection:
    """Select the rows of an open shard that are not pending."""
    stored = _stored_rows(file.shard, partial)
    if len(stored) == file.n_rows:
        return RowSelection(file, range(first_row, first_row + file.n_rows))
    return RowSelection(file, first_row + stored, stored)


def _finished(dataset: DataSet, shard: int, path: Path, open_shards: OpenShards, at_once: bool) -> ShardFile:
    """Return a finished shard, which is opened `at_once` or on first use."""
    read = bind(_open_finished, dataset, shard, path)
    file = ShardFile(str(path), len(dataset.shard_range(shard)), read, open_shards)
    if at_once:
        _ = file.shard
    return file


def _open_finished(dataset: DataSet, shard: int, path: Path) -> Shard:
    """Open a finished shard, and check that no row is pending; it may have been replaced since the reader was opened.

    Raises:
        InputError: it was replaced; or see `_stored_rows`.
    """
    try:
        opened = dataset.open_shard(shard, path)
        _stored_rows(opened, partial=False)
        return opened
    except InputError as error:
        if path.exists() and DataSet.open(dataset.out).fingerprint == dataset.fingerprint:
            raise
        raise InputError(
            f"{path} no longer exists: it was replaced or removed after the reader was opened",
            hint="open the data set again",
        ) from error


def _open_again(path: Path, identity: Identity) -> Shard:
    """Open a shard in another process, to which its reader was sent; it may have been published since.

    Raises:
        InputError: the file is another shard; or see `Shard`.
    """
    if path.suffix == ".part" and not path.exists():
        path = path.with_suffix("")
    shard = Shard(path)
    if shard.is_part:
        shard.copy_columns()
    if shard.identity != identity:
        raise InputError(
            f"{path} was replaced by another shard after the reader was pickled", hint="open the data set again"
        )
    return shard


def _select_from_files(dataset: DataSet, partial: bool, open_shards: OpenShards) -> Iterator[RowSelection]:
    """Yield the rows of the shards of a data set that can be read."""
    shard_files = dataset.shard_files()
    for shard, files in enumerate(shard_files):
        rows, path = dataset.shard_range(shard), dataset.current(shard, files)
        if files.published is None and not partial:
            state = "missing" if path is None else "unfinished"
            raise LayertapError(
                f"{path or dataset.path(shard)} is {state} (shard {shard} of {dataset.n_shards})", hint=UNFINISHED_HINT
            )
        if path is None:
            continue
        if files.published is not None:
            at_once = len(shard_files) <= OPENED_AT_ONCE
            yield RowSelection(_finished(dataset, shard, path, open_shards, at_once), rows)
        else:
            opened = dataset.open_shard(shard, path)
            read = bind(_open_again, path, opened.identity)
            yield _select_stored(ShardFile(opened.name, len(rows), read, open_shards, opened), rows.start, partial)


def _stored_rows(shard: Shard, partial: bool) -> NDArray[np.int64]:
    """Return the rows of a shard that are not pending; in a part, only rows that match their hashes.

    Raises:
        InputError: the shard is damaged.
        LayertapError: rows are pending, and `partial` is False.
    """
    is_part = shard.is_part
    if is_part:
        shard.copy_columns()
    status = shard.column("status")
    if not np.isin(status, list(Status)).all():
        raise InputError(f"{shard.name} is damaged: it has rows with an unknown status")
    stored = np.flatnonzero(status != Status.PENDING)
    if len(stored) < len(shard) and not is_part:
        raise InputError(
            f"{shard.name} is damaged: {len(shard) - len(stored)} rows are pending in a finished file",
            hint=REPAIR_HINT,
        )
    if len(stored) < len(shard) and not partial:
        raise LayertapError(
            f"{shard.name} is unfinished: {len(shard) - len(stored)} rows are pending",
            hint=UNFINISHED_HINT,
        )
    # A row that a power failure damaged may have a status, but does not match its hashes.
    return np.setdiff1d(stored, wrong_rows(shard, stored)) if is_part else stored
