"""The rows that a reader reads: some rows of some shards, with their paths, labels, splits and ids."""

from __future__ import annotations

import contextlib
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
from extract.store.format.layout import RowNames, StoredFeature
from extract.store.format.receipt import reasons_in, reasons_of
from extract.store.format.row_hash import wrong_rows
from extract.store.format.shard import Shard
from extract.store.open_shards import OpenShards, ShardFile
from extract.store.places.bucket import Bucket
from extract.store.places.shard_cache import RemoteFile, ShardCache
from extract.system.atomic_files import allow_more_files

__all__ = ["OpenedDataSet", "RowSelection", "open_selections", "read_one_version"]

T = TypeVar("T")

_ATTEMPTS = 5  # to read a data set while new versions are published
# A data set of more shards is opened shard by shard, on first use: an open shard takes 2 ms, 90 KB and a file handle.
# Of others, damage is reported before any work is done. A missing shard is an error at once, always.
OPENED_AT_ONCE = 64
_AT_ONCE = 8  # shards of a bucket that are opened at the same time


@dataclass(frozen=True)
class RowSelection:
    """Rows of one shard.

    Attributes:
        file: the shard. For a shard in a bucket, it has the features; it is downloaded on first use.
        rows: (N,), their numbers in the data set, ascending.
        chosen: (N,) int64, their numbers in the shard; None for all rows of the shard, in order.
        names: paths, labels, splits and classes; None to read them from the shard.
        same_names: whether all shards of the data set have the same classes and kept columns, and all or none ids.
        without_features: of a shard in a bucket: everything but the features.
        receipt: of a shard in a bucket: content of its receipt.
    """

    file: ShardFile
    rows: range | NDArray[np.int64]
    chosen: NDArray[np.int64] | None = None
    names: RowNames | None = None
    same_names: bool = False
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

    def column(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return (stop - start, ...), a column of the shard for some of the rows; by default for all."""
        if self.chosen is None:
            return self.shard.column(name, slice(start, stop))
        return self.shard.column(name, self.chosen[start:stop])

    def texts(self, name: str, start: int, stop: int) -> list[str]:
        """Return the path, split, id or text of a kept column of some of the rows."""
        if self.names is not None:
            return list({"path": self.names.paths, "split": self.names.splits}[name][start:stop])
        return self.shard.text(name, slice(start, stop) if self.chosen is None else self.chosen[start:stop])

    @property
    def has_ids(self) -> bool:
        """Whether the rows have ids."""
        return self.names is None and self.shard.has_ids

    @property
    def kept_columns(self) -> dict[str, str]:
        """Name in the shard -> "S" for text, "i" or "f" for numbers, of the kept columns."""
        kept = self.shard.kept_columns if self.names is None else {}
        return {name: dtype.kind for name, dtype in kept.items()}

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
    with contextlib.ExitStack() as on_error:
        shard = on_error.enter_context(Shard(path))
        selection = _select_stored(shard, shard.identity.first_row, partial)
        on_error.pop_all()  # the shard stays open
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
            ShardFile(
                file.url,
                len(rows),
                read=bind(_open_remote, cache, file, dataset, shard, with_features),
                open_shards=open_shards,
            )
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
        shards = dataset.shards
        try:
            result = read(dataset)
            if is_usable(result) or _is_current(dataset, shards):
                return result
        except LayertapError:
            if _is_current(dataset, shards):
                raise
        except FileNotFoundError as error:
            if _is_current(dataset, shards):
                raise InputError(
                    f"{error.filename} is missing", hint="run `layertap sync` to repair the data set"
                ) from error
    raise LockedError(f"{out} was changed {_ATTEMPTS} times while it was read", hint="run again")


def _is_current(dataset: DataSet, shards: Path) -> bool:
    now = DataSet.open(dataset.out)
    return now.version == dataset.version and (now.fingerprint, now.shards) == (dataset.fingerprint, shards)


def _select_from_shards(dataset: DataSet, partial: bool, open_shards: OpenShards) -> OpenedDataSet:
    selections: list[RowSelection] = []
    same_names = dataset.version is not None or "labels_xxh3" in dataset.images
    with contextlib.ExitStack() as on_error:
        select = _select_from_version if dataset.version is not None else _select_from_files
        for selection in select(dataset, partial, open_shards):
            on_error.callback(selection.file.close)
            selections.append(replace(selection, same_names=same_names))
        on_error.pop_all()  # the shards stay open
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
        shard_files = pass_dataset.shard_files()
        if at_once:
            allow_more_files(len(shard_files))
        last_shard = int(rows[-1]) // pass_dataset.shard_rows if len(rows) else -1
        if last_shard >= len(shard_files):
            raise InputError(
                f"{pass_dataset.out} has no shard {last_shard}", hint="run `layertap sync` to repair the data set"
            )
        for shard in range(last_shard + 1):
            shard_start = pass_dataset.shard_range(shard).start
            first, last = (start + np.searchsorted(rows, [shard_start, shard_start + pass_dataset.shard_rows])).tolist()
            if first == last:
                continue
            path = pass_dataset.path(shard, shard_files[shard].published or 0)
            n_rows = len(pass_dataset.shard_range(shard))
            if at_once:
                file = ShardFile(str(path), n_rows, _open_finished(pass_dataset, shard, path))
            else:
                read = bind(_open_later, pass_dataset, shard, path)
                file = ShardFile(str(path), n_rows, read=read, open_shards=open_shards)
            try:
                chosen = table.rows[first:last] - shard_start
                if chosen[-1] >= n_rows:
                    raise InputError(f"{path} has no row {chosen[-1]}, to which the version refers")
                names = RowNames(
                    table.paths[first:last], table.labels[first:last], table.splits[first:last], table.classes
                )
                all_rows = len(chosen) == n_rows and bool((chosen == np.arange(n_rows)).all())
                yield RowSelection(file, range(first, last), None if all_rows else chosen, names)
            except BaseException:
                file.close()
                raise


def _select_stored(shard: Shard, first_row: int, partial: bool) -> RowSelection:
    """Select the rows of a shard that are not pending."""
    stored = _stored_rows(shard, partial)
    file = ShardFile(shard.name, len(shard), shard)
    if len(stored) == len(shard):
        return RowSelection(file, range(first_row, first_row + len(shard)))
    return RowSelection(file, first_row + stored, stored)


def _open_finished(dataset: DataSet, shard: int, path: Path) -> Shard:
    """Open a finished shard, and check that no row is pending; see `_stored_rows` for errors."""
    opened = dataset.open_shard(shard, path)
    try:
        _stored_rows(opened, partial=False)
    except BaseException:
        opened.close()
        raise
    return opened


def _open_later(dataset: DataSet, shard: int, path: Path) -> Shard:
    """Like `_open_finished`, for a reader that is open; the shard may have been replaced since."""
    try:
        return _open_finished(dataset, shard, path)
    except InputError as error:
        if path.exists() and DataSet.open(dataset.out).fingerprint == dataset.fingerprint:
            raise
        raise InputError(
            f"{path} no longer exists: it was replaced or removed after the reader was opened",
            hint="open the data set again",
        ) from error


def _select_from_files(dataset: DataSet, partial: bool, open_shards: OpenShards) -> Iterator[RowSelection]:
    """Yield the rows of the shards of a data set that can be read."""
    shard_files = dataset.shard_files()
    if not partial and any(files.published is None for files in shard_files):
        shard_files = dataset.shard_files()  # a listing can miss a file that is renamed at the same time
    at_once = len(shard_files) <= OPENED_AT_ONCE
    if at_once:
        allow_more_files(len(shard_files))
    for shard, files in enumerate(shard_files):
        rows = dataset.shard_range(shard)
        if files.published is not None:
            path = dataset.path(shard, files.published)
            if not at_once:
                read = bind(_open_later, dataset, shard, path)
                yield RowSelection(ShardFile(str(path), len(rows), read=read, open_shards=open_shards), rows)
                continue
        elif partial and files.part is not None:
            path = dataset.path(shard, files.part, part=True)
        elif partial:
            continue
        else:
            path = dataset.current(shard, files) or dataset.path(shard)
            state = "unfinished" if files.part is not None else "missing"
            raise LayertapError(
                f"{path} is {state} (shard {shard} of {dataset.n_shards})",
                hint=UNFINISHED_HINT,
            )
        try:
            opened = dataset.open_shard(shard, path)
        except InputError:
            # The shard may just have been published or rewritten, which gives it another name.
            current_files = dataset.shard_files()[shard]
            if current_files == files or current_files.published is None:
                raise
            opened = dataset.open_shard(shard, dataset.path(shard, current_files.published))
        try:
            selection = _select_stored(opened, rows.start, partial)
        except BaseException:
            opened.close()
            raise
        yield selection


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
            hint="run `layertap verify --repair`, then the command that created the data set",
        )
    if len(stored) < len(shard) and not partial:
        raise LayertapError(
            f"{shard.name} is unfinished: {len(shard) - len(stored)} rows are pending",
            hint=UNFINISHED_HINT,
        )
    # A row that a power failure damaged may have a status, but does not match its hashes.
    return np.setdiff1d(stored, wrong_rows(shard, stored)) if is_part else stored
