"""The rows that a reader reads: some rows of some shards, with their paths, labels, splits and ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature
from extract.store.format.row_hash import wrong_rows
from extract.store.format.shard import Shard
from extract.store.places.block_cache import BlockCache
from extract.store.places.bucket import Bucket, open_remote_shard
from extract.system.atomic_files import allow_more_files

__all__ = ["OpenedDataSet", "RowSelection", "open_selections", "read_one_version"]

T = TypeVar("T")

_ATTEMPTS = 5  # to read a data set while new versions are published


@dataclass(frozen=True)
class RowSelection:
    """Rows of one shard.

    Attributes:
        shard: the open shard.
        rows: (N,) int64, their numbers in the data set, ascending.
        chosen: (N,) int64, their numbers in the shard; None for all rows of the shard, in order.
        names: paths, labels, splits and classes; None to read them from the shard.
    """

    shard: Shard
    rows: NDArray[np.int64]
    chosen: NDArray[np.int64] | None = None
    names: RowNames | None = None

    def after(self, count: int) -> RowSelection:
        """Return the selection with `count` added to its row numbers, for the rows of preceding data sets."""
        return replace(self, rows=self.rows + count)

    def column(self, name: str) -> NDArray[Any]:
        """Return (N, ...), a column of the shard."""
        column = self.shard.column(name)
        return column if self.chosen is None else column[self.chosen]

    def own_paths(self) -> list[str]:
        """Return the paths of the images when their features were computed."""
        return self._text("path")

    def _text(self, name: str) -> list[str]:
        return self.shard.text(name, ... if self.chosen is None else self.chosen)

    @property
    def paths(self) -> list[str]:
        """Path of each image."""
        return self._text("path") if self.names is None else list(self.names.paths)

    @property
    def splits(self) -> list[str]:
        """Split of each row: train, val, test or empty."""
        return self._text("split") if self.names is None else list(self.names.splits)

    @property
    def ids(self) -> list[str] | None:
        """Ids from the list of images; None if it has none."""
        return self._text("id") if self.names is None and self.shard.has_ids else None

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


def open_selections(path: Path | str, partial: bool, cache: BlockCache | None) -> OpenedDataSet:
    """Open a data set folder or a shard, for a URL through `cache`; see `FeatureReader` for `partial` and errors."""
    if isinstance(path, str):
        assert cache is not None
        return _open_url(path, partial, cache)
    if path.is_dir():
        return read_one_version(path, lambda dataset: _select_from_shards(dataset, partial))
    with contextlib.ExitStack() as on_error:
        shard = on_error.enter_context(Shard(path))
        selection = _select_stored(shard, shard.identity.first_row, partial)
        on_error.pop_all()  # the shard stays open
    return OpenedDataSet([selection], shard.features, shard.identity.fingerprint, len(shard))


def _open_url(url: str, partial: bool, cache: BlockCache) -> OpenedDataSet:
    """Open a data set or a shard in a bucket."""
    if url.endswith(".h5"):
        shard = open_remote_shard(url, cache)
        selection = _select_stored(shard, shard.identity.first_row, partial)
        return OpenedDataSet([selection], shard.features, shard.identity.fingerprint, len(shard))
    bucket = Bucket(url)
    shards = bucket.open_shards(cache, partial=partial)
    selections = [_select_stored(shard, shard.identity.first_row, partial) for shard in shards]
    return OpenedDataSet(selections, bucket.dataset.features, bucket.dataset.fingerprint, bucket.dataset.n_rows)


def read_one_version(out: Path, read: Callable[[DataSet], T]) -> T:
    """Return `read(dataset)`; if it fails because a new version was published meanwhile, try that version.

    Raises:
        InputError: a file of the version is missing.
    """
    for attempt in range(_ATTEMPTS):
        dataset = DataSet.open(out)
        try:
            result = read(dataset)
        except (LayertapError, FileNotFoundError) as error:
            if DataSet.open(out).version != dataset.version and attempt + 1 < _ATTEMPTS:
                continue
            if isinstance(error, FileNotFoundError):
                raise InputError(f"{error.filename} is missing; run `layertap sync` to repair the data set") from error
            raise
        return result
    raise AssertionError("the last attempt returns or raises")


def _select_from_shards(dataset: DataSet, partial: bool) -> OpenedDataSet:
    selections: list[RowSelection] = []
    with contextlib.ExitStack() as on_error:
        if dataset.version is None:
            for first, shard in _open_shards(dataset, partial):
                selections.append(_select_stored(on_error.enter_context(shard), first, partial))
        else:
            for selection in _select_from_version(dataset):
                on_error.enter_context(selection.shard)
                selections.append(selection)
        on_error.pop_all()  # the shards stay open
    return OpenedDataSet(selections, dataset.features, dataset.fingerprint, dataset.n_rows)


def _select_from_version(dataset: DataSet) -> Iterator[RowSelection]:
    """Yield the rows of the published version of a data set of `layertap sync`.

    Raises:
        FileNotFoundError: the version's table does not exist.
        LayertapError: a pass is missing, unfinished or damaged.
    """
    table = dataset.version_rows()
    assert dataset.version is not None
    for number, pass_dataset in zip(dataset.version.passes, dataset.data_sets_with_shards(), strict=True):
        start, stop = np.searchsorted(table.passes, [number, number + 1]).tolist()
        shards = table.rows[start:stop] // pass_dataset.shard_rows
        shard_files = pass_dataset.shard_files()
        allow_more_files(len(shard_files))
        for shard in np.unique(shards).tolist():
            if shard >= len(shard_files):
                raise InputError(f"{pass_dataset.out} has no shard {shard}; run `layertap sync` to repair the data set")
            first, last = (start + np.searchsorted(shards, [shard, shard + 1])).tolist()
            path = pass_dataset.path(shard, shard_files[shard].published or 0)
            opened = pass_dataset.open_shard(shard, path)
            try:
                _stored_rows(opened, partial=False)
                chosen = table.rows[first:last] - opened.identity.first_row
                if chosen.max() >= len(opened):
                    raise InputError(f"{path} has no row {chosen.max()}, to which the version refers")
                names = RowNames(
                    table.paths[first:last], table.labels[first:last], table.splits[first:last], table.classes
                )
                all_rows = len(chosen) == len(opened) and bool((chosen == np.arange(len(opened))).all())
                yield RowSelection(opened, np.arange(first, last), None if all_rows else chosen, names)
            except BaseException:
                opened.close()
                raise


def _select_stored(shard: Shard, first_row: int, partial: bool) -> RowSelection:
    """Select the rows of a shard that are not pending."""
    stored = _stored_rows(shard, partial)
    return RowSelection(shard, first_row + stored, None if len(stored) == len(shard) else stored)


def _open_shards(dataset: DataSet, partial: bool) -> Iterator[tuple[int, Shard]]:
    """Yield (first row, shard) of the shards of a data set that can be read."""
    shard_files = dataset.shard_files()
    if not partial and any(files.published is None for files in shard_files):
        shard_files = dataset.shard_files()  # a listing can miss a file that is renamed at the same time
    allow_more_files(len(shard_files))
    for shard, files in enumerate(shard_files):
        if files.published is not None:
            path = dataset.path(shard, files.published)
        elif partial and files.part is not None:
            path = dataset.path(shard, files.part, part=True)
        elif partial:
            continue
        else:
            path = dataset.current(shard, files) or dataset.path(shard)
            state = "unfinished" if files.part is not None else "missing"
            raise LayertapError(
                f"{path} is {state} (shard {shard} of {dataset.n_shards}); run the command that created the "
                "data set again to finish it, or read the available rows with partial=True"
            )
        try:
            opened = dataset.open_shard(shard, path)
        except InputError:
            # The shard may just have been published or rewritten, which gives it another name.
            current_files = dataset.shard_files()[shard]
            if current_files == files or current_files.published is None:
                raise
            opened = dataset.open_shard(shard, dataset.path(shard, current_files.published))
        yield dataset.shard_range(shard).start, opened


def _stored_rows(shard: Shard, partial: bool) -> NDArray[np.int64]:
    """Return the rows of a shard that are not pending; in a part, only rows that match their hashes.

    Raises:
        InputError: the shard is damaged.
        LayertapError: rows are pending, and `partial` is False.
    """
    is_part = shard.is_part
    if is_part:
        shard.keep_columns()
    status = shard.column("status")
    if not np.isin(status, list(Status)).all():
        raise InputError(f"{shard.name} is damaged: it has rows with an unknown status")
    stored = np.flatnonzero(status != Status.PENDING)
    if len(stored) < len(shard) and not is_part:
        raise InputError(
            f"{shard.name} is damaged: {len(shard) - len(stored)} rows are pending in a finished file; "
            "run `layertap verify --repair`, then the command that created the data set"
        )
    if len(stored) < len(shard) and not partial:
        raise LayertapError(
            f"{shard.name} is unfinished: {len(shard) - len(stored)} rows are pending; run the command that created "
            "the data set again to finish it, or read the available rows with partial=True"
        )
    # A row that a power failure damaged may have a status, but does not match its hashes.
    return np.setdiff1d(stored, wrong_rows(shard, stored)) if is_part else stored
