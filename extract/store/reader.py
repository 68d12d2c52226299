"""Read features by row number, over all shards of a data set."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, unknown_name
from extract.row_status import Status
from extract.store.batches import Shuffle, batches
from extract.store.format.layout import ROW_DATA, StoredFeature, chunk_rows
from extract.store.format.receipt import reasons_in, reasons_of
from extract.store.format.row_hash import hash_records, hash_rows
from extract.store.format.shard import BLOCK_BYTES, Shard
from extract.store.open_shards import OpenShards
from extract.store.places.block_cache import CACHE_BYTES, BlockCache
from extract.store.places.remote_shard import RemoteShard
from extract.store.row_selection import RowSelection, open_selections
from extract.store.text_column import TextColumn
from extract.system.urls import is_url

if TYPE_CHECKING:  # imports torch, which is not needed to read arrays
    from extract.store.torch_dataset import FeatureDataset

__all__ = ["FeatureArray", "FeatureReader"]


class FeatureReader:
    """Features of a data set, of several data sets with the same fingerprint, or of one shard; a context manager.

        with FeatureReader("outputs/photos") as reader:
            reader.layers                    # ["layer4", ...]
            reader["layer4"][10:20]          # (10, 2048), rows 10 to 19
            reader.paths[10], reader.labels[10], reader.classes

    A reader can be shared by threads, forked, and pickled (another process opens the files again). The shards of a data
    set of more than 64 are opened on first use: an error in such a shard is raised then.

    Args:
        path: a data set folder, a `.h5` shard, or a list of folders, whose rows are concatenated; `classes` is then the
            union of their classes, and labels are renumbered. Each may be a URL such as `s3://BUCKET/NAME`, which is
            read by byte ranges through a cache on the local disk.
        partial: also open an unfinished data set. The rows are those stored at this moment; `rows` lists them. Rows of
            an unfinished shard must match their hashes. Behind a URL, only finished shards are read.
        cache_bytes: maximum size of the cache for URLs in `$XDG_CACHE_HOME/layertap` (`~/.cache/layertap`); the least
            recently used blocks are removed.
        check: verify the hashes of each row when its features are first read; a row that was changed raises InputError.
            All features of the row are read for this, also behind a URL.

    Raises:
        InputError: `path` does not exist or is not of this format; or the folders' fingerprints differ.
        LayertapError: a shard is missing, unfinished, damaged, or of another data set.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        partial: bool = False,
        cache_bytes: int = CACHE_BYTES,
        check: bool = False,
    ):
        paths = [_path_or_url(source) for source in ([path] if isinstance(path, str | os.PathLike) else path)]
        if not paths:
            raise InputError("no data set given: the list of folders is empty")
        self._name = ", ".join(map(str, paths))
        self._selections: list[RowSelection] = []
        self._sets: list[int] = []  # index of the path that each selection is from
        features: list[StoredFeature] | None = None
        fingerprint, base = "", 0
        self._open_shards = OpenShards()
        self._cache = BlockCache(cache_bytes) if any(isinstance(source, str) for source in paths) else None
        try:
            for number, source in enumerate(paths):
                opened = open_selections(source, partial, self._cache, self._open_shards)
                self._selections += [selection.after(base) for selection in opened.selections]
                if features is None:
                    features, fingerprint = opened.features, opened.fingerprint
                elif opened.fingerprint != fingerprint or _shapes_and_dtypes(opened.features) != _shapes_and_dtypes(
                    features
                ):
                    raise InputError(
                        f"{source} and {paths[0]} have different fingerprints; their features cannot be combined"
                    )
                self._sets += [number] * len(opened.selections)
                base += opened.n_rows
        except BaseException:
            self.close()
            raise
        self._files = [selection.file for selection in self._selections]
        self._features, self._fingerprint = features or [], fingerprint
        self._row_data: dict[str, NDArray[Any]] = {}
        counts = [len(selection.rows) for selection in self._selections]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._unverified = np.ones(len(self), np.bool_) if check else None
        # The rows of each shard that the reader has; None for all rows.
        self._chosen = [selection.chosen for selection in self._selections]
        self._rows = [selection.rows for selection in self._selections]

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def layers(self) -> list[str]:
        """Names of the features, in the order requested at extraction; sorted for a single shard."""
        return [feature.name for feature in self._features]

    def __getitem__(self, layer: str) -> FeatureArray:
        for feature in self._features:
            if feature.name == layer:
                return FeatureArray(self, feature)
        raise unknown_name("layer", layer, self.layers, self._name)

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """(N,) int64, row of the data set for each row: 0 to N - 1, except for a single shard or with `partial`."""
        return _frozen(np.concatenate([np.empty(0, np.int64), *self._rows]))

    @property
    def paths(self) -> Sequence[str]:
        """Path of each image, relative to the image folder; undecodable bytes as in `os.fsdecode`.

        Like `splits` and `ids`, it is read from the files; copy what is needed after the reader is closed: `paths[:]`.
        """
        return self._text_column("path")

    @property
    def splits(self) -> Sequence[str]:
        """Split of each row: train, val, test or empty."""
        return self._text_column("split")

    @property
    def ids(self) -> Sequence[str] | None:
        """Id of each row from the list of images; None if there are no ids."""
        return self._text_column("id") if self._has_ids else None

    def _text_column(self, name: str) -> TextColumn:
        def read(start: int, stop: int) -> list[str]:
            ranges = self._ranges_between(start, stop)
            return [text for i, first, last in ranges for text in self._selections[i].texts(name, first, last)]

        return TextColumn(len(self), read)

    @cached_property
    def _has_ids(self) -> bool:
        return bool(self._selections) and all(selection.has_ids for selection in self._with_other_names())

    def _with_other_names(self) -> Iterator[RowSelection]:
        """Yield one selection of each data set whose shards have the same classes, and all of the others."""
        for number, selection in enumerate(self._selections):
            if not (selection.same_names and number and self._sets[number] == self._sets[number - 1]):
                yield selection

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes."""
        class_lists = {tuple(selection.classes) for selection in self._with_other_names()}
        if len(class_lists) == 1:
            return list(class_lists.pop())
        return sorted({name for names in class_lists for name in names}, key=os.fsencode)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """(N,) int64, index into `classes`; -1 unknown."""
        number = {name: i for i, name in enumerate(self.classes)}
        labels = []
        for selection in self._selections:
            if unknown := set(selection.classes) - number.keys():
                raise InputError(
                    f"{selection.file.name} is damaged: other shards do not have its class {min(unknown)!r}"
                )
            numbers = np.array([*(number[name] for name in selection.classes), -1], np.int64)  # -1 stays -1
            labels.append(numbers[selection.labels])
        return _frozen(np.concatenate([np.empty(0, np.int64), *labels]))

    @property
    def status(self) -> NDArray[np.uint8]:
        """(N,) uint8, codes of `extract.row_status.Status`; 1 is ok."""
        return self.column("status")

    @cached_property
    def sets(self) -> NDArray[np.int64]:
        """(N,) int64, index of the path that each row is from; 0 if a single path was given."""
        counts = np.diff(self._starts)
        return _frozen(np.repeat(np.array(self._sets, np.int64), counts))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data set: sha256 of everything that the features depend on."""
        return self._fingerprint

    def column(self, name: str, rows: slice | None = None) -> NDArray[Any]:
        """Return (N, ...), a column of all rows, which the reader keeps; or a copy for a range of rows.

        Args:
            name: status, row_hash, record_hash, source_size, source_mtime_ns or source_hash.
            rows: the range of rows; its step must be 1.

        Raises:
            UnknownNameError: no such column.
        """
        empty = {name: np.empty((0, *width), dtype) for name, width, dtype in ROW_DATA}
        if name not in empty:
            raise unknown_name("column", name, empty, self._name)
        if rows is not None:
            start, stop, step = rows.indices(len(self))
            if step != 1:
                raise ValueError(f"the rows have step {step}; it must be 1")
            ranges = self._ranges_between(start, stop)
            columns = [self._selections[i].column(name, first, last) for i, first, last in ranges]
            return np.concatenate([empty[name], *columns])
        if name not in self._row_data:
            columns = [selection.column(name) for selection in self._selections]
            self._row_data[name] = _frozen(np.concatenate([empty[name], *columns]))
        return self._row_data[name]

    @property
    def provenance(self) -> dict[str, Any]:
        """Backbone, weights, configuration, versions and machine that computed the features of the first shard."""
        return self._files[0].shard.provenance if self._files else {}

    @property
    def failures(self) -> list[tuple[int, str, str, str]]:
        """Rows whose status is not ok: (row, path, status, reason)."""
        failures = []
        reasons: tuple[Shard | None, dict[int, str]] = None, {}
        for row in np.flatnonzero(self.status != Status.OK).tolist():
            shard, its_row = self._shard_and_row(row)
            if reasons[0] is not shard:
                shard_reasons = (
                    reasons_in(shard.receipt) if isinstance(shard, RemoteShard) else reasons_of(shard.path, len(shard))
                )
                reasons = shard, shard_reasons
            failures.append((row, self.paths[row], Status(self.status[row]).text, reasons[1].get(its_row, "")))
        return failures

    def place_of(self, row: int) -> tuple[Path, int, int]:
        """Return the file that holds a row, its shard's number, and the row's number in the data set of that shard."""
        shard, its_row = self._shard_and_row(row)
        return shard.path, shard.identity.shard, its_row

    def _shard_and_row(self, row: int) -> tuple[Shard, int]:
        shard_index = int(np.searchsorted(self._starts, row, "right")) - 1
        local = self._local(shard_index, np.array([row - self._starts[shard_index]]))
        shard = self._files[shard_index].shard
        return shard, shard.identity.first_row + int(local[0])

    @property
    def compression(self) -> dict[str, tuple[str, float]]:
        """Feature -> (gzip, lzf or blosc2; compression ratio), for compressed features."""
        compression = {}
        kinds: dict[str, set[str]] = {}
        stored = Counter[str]()
        for file in self._files:
            shard = file.shard
            stored.update(shard.stored_bytes)
            for name, filter_name in shard.compression.items():
                kinds.setdefault(name, set()).add(filter_name)
        for feature in self._features:
            if feature.name in kinds:
                plain = sum(file.n_rows for file in self._files) * feature.row_bytes
                filters = " and ".join(sorted(kinds[feature.name]))
                compression[feature.name] = (filters, plain / max(1, stored[feature.name]))
        return compression

    def checked(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return layer -> (len(rows), *shape), all features of rows, verified so that copies do not hide damage.

        Raises:
            InputError: a row does not match its hashes.
        """
        features = {layer: self[layer].unchecked(rows) for layer in self.layers}
        columns, paths = self._records(rows)
        agree = (hash_rows(features) == columns["row_hash"]) & (hash_records(paths, columns) == columns["record_hash"])
        if not agree.all():
            row = int(rows[np.flatnonzero(~agree)[0]])
            raise InputError(
                f"row {row} ({self.paths[row]}) of {self._name} is damaged: it does not match its hashes; run "
                "`layertap verify --repair`, then `layertap embed` or `layertap sync`"
            )
        return features

    # For training

    def batches(
        self,
        layer: str,
        batch_size: int,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
        split: str | None = None,
        memory_bytes: int = 256 << 20,
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Return an iterator over the rows with status ok, as (features, rows): (B, *shape) and (B,) int64.

            for x, rows in reader.batches("layer4", 256, shuffle="chunks", seed=epoch):
                y = reader.labels[rows]

        Args:
            layer: name of a feature.
            batch_size: rows in each batch; the last may have fewer.
            shuffle: None for the stored order. "chunks" reads blocks of neighbouring rows (about a megabyte each) in
                random order and mixes the rows of as many blocks as fit in memory, as fast as in order. "rows" makes
                every order of the rows equally likely; it needs a fast disk, or features that fit in the file cache.
            seed: seed of the order; the same seed gives the same order on any machine.
            split: only the rows of this split; None for all.
            memory_bytes: maximum allocation, apart from 24 bytes per row and the returned batch.

        Raises:
            UnknownNameError: no such layer or split.
            ValueError: batch_size, memory_bytes, seed or shuffle is out of range.
        """
        chosen = self._good_rows(split)
        return batches(self[layer], chosen, batch_size, shuffle=shuffle, seed=seed, memory_bytes=memory_bytes)

    def dataset(
        self, layers: str | Sequence[str], *, split: str | None = None, transform: Any = None
    ) -> FeatureDataset:
        """Return the rows with status ok as a `torch.utils.data.Dataset`; see `FeatureDataset`.

        Raises:
            UnknownNameError: no such layer or split.
        """
        from extract.store.torch_dataset import FeatureDataset

        return FeatureDataset(self, layers, self._good_rows(split), transform)

    def _good_rows(self, split: str | None) -> NDArray[np.int64]:
        good = self.status == Status.OK
        if split is not None:
            splits = sorted(set(self.splits))
            if split not in splits:
                raise unknown_name("split", split, splits, self._name)
            good &= np.array(self.splits) == split
        return np.flatnonzero(good)

    # Internals

    def _local(self, shard_index: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert row numbers of a selection to row numbers of its shard."""
        chosen = self._chosen[shard_index]
        return rows if chosen is None else chosen[rows]

    def _verify(self, rows: NDArray[np.int64]) -> None:
        """Verify those rows that were not verified before, if the reader checks what it reads."""
        if self._unverified is None:
            return
        new = np.unique(rows[self._unverified[rows]])
        at_once = max(1, BLOCK_BYTES // max(1, sum(feature.row_bytes for feature in self._features)))
        for start in range(0, len(new), at_once):
            self.checked(new[start : start + at_once])
            self._unverified[new[start : start + at_once]] = False

    def _records(self, rows: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], list[bytes]]:
        """Return (column -> its values, paths when the features were computed) of rows in any order."""
        columns = {name: np.empty((len(rows), *width), dtype) for name, width, dtype in ROW_DATA}
        paths = [b""] * len(rows)
        order = np.argsort(rows, kind="stable")
        edges = np.searchsorted(rows[order], self._starts).tolist()
        for shard_index, (first, stop) in enumerate(pairwise(edges)):
            if first == stop:
                continue
            positions, shard = order[first:stop], self._files[shard_index].shard
            local = self._local(shard_index, rows[positions] - self._starts[shard_index])
            for name, values in columns.items():
                values[positions] = shard.column(name, local)
            for position, path in zip(positions.tolist(), shard.text("path", local), strict=True):
                paths[position] = os.fsencode(path)
        return columns, paths

    def _ranges_between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard index, start, stop), the range of rows `start` to `stop` in each shard that has some of them."""
        starts = self._starts
        for shard_index in range(int(np.searchsorted(starts, start, "right")) - 1, len(starts) - 1):
            if starts[shard_index] >= stop:
                return
            first, last = max(start, int(starts[shard_index])), min(stop, int(starts[shard_index + 1]))
            if first < last:
                yield shard_index, first - int(starts[shard_index]), last - int(starts[shard_index])

    def close(self) -> None:
        """Close the files; arrays that were read stay valid."""
        for selection in self._selections:
            selection.file.close()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FeatureReader({self._name!r}, {len(self):,} rows, layers={self.layers})"


_INTEGERS = (int, np.int64, np.int32)  # but not bool


class FeatureArray:
    """One feature over all shards; indexing reads rows.

    The index is an int, a slice, a boolean mask, or an array of rows in any order, with or without repeats. The result
    is a NumPy array.
    """

    def __init__(self, reader: FeatureReader, feature: StoredFeature):
        self._reader = reader
        self._feature = feature
        self.dtype: np.dtype[Any] = np.dtype(feature.dtype)
        self.shape: tuple[int, ...] = (len(reader), *feature.shape)
        self._edges: list[int] = reader._starts.tolist()  # first row of each shard, and the end

    @property
    def attributes(self) -> dict[str, str]:
        """HDF5 attributes of the feature: layer, pooling, axes, source_dtype."""
        return dict(self._feature.attributes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._feature.row_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        is_row = type(rows) in _INTEGERS and 0 <= rows < self.shape[0]
        if is_row and self._reader._unverified is None:  # fast path for a loop over rows
            shard_index = bisect_right(self._edges, rows) - 1
            chosen, local = self._reader._chosen[shard_index], rows - self._edges[shard_index]
            shard = self._reader._files[shard_index].shard
            return shard.row(self._feature.name, int(local if chosen is None else chosen[local]))
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            return self.between(start, stop) if step == 1 else self.take(np.arange(start, stop, step))
        index = np.asarray(rows)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(f"the mask has shape {index.shape}, expected ({len(self)},)")
            return self.take(np.flatnonzero(index))
        if isinstance(rows, tuple) or index.ndim > 1 or (index.size and index.dtype.kind not in "iu"):
            raise IndexError(f"expected an int, a slice, a list of ints or a mask, got {rows!r}")
        index = index.astype(np.int64)
        if index.size and (int(index.min()) < -len(self) or int(index.max()) >= len(self)):
            raise IndexError(f"rows {index.min()} to {index.max()} are out of range for {len(self)} rows")
        values = self.take(np.atleast_1d(np.where(index < 0, index + len(self), index)))
        return values if index.ndim else values[0]

    def pieces(self) -> list[tuple[int, int]]:
        """Return (start, stop), the rows of each chunk: about a megabyte of neighbouring rows in one file."""
        pieces: list[tuple[int, int]] = []
        for shard_index, start in enumerate(self._reader._starts[:-1].tolist()):
            stop = int(self._reader._starts[shard_index + 1])
            step = chunk_rows(self._feature, self._reader._files[shard_index].n_rows)
            pieces += [(first, min(first + step, stop)) for first in range(start, stop, step)]
        return pieces

    def forget(self, start: int, stop: int) -> None:
        """Release memory-mapped pages of rows that were read; the file stays in the kernel's cache."""
        for shard_index, first, last in self._reader._ranges_between(start, stop):
            if self._reader._chosen[shard_index] is None:
                self._reader._files[shard_index].shard.forget(self._feature.name, first, last)

    def between(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return (stop - start, *shape), neighbouring rows, all in range; in `out` if it is given."""
        if self._reader._unverified is not None:
            self._reader._verify(np.arange(start, stop))
        ranges = list(self._reader._ranges_between(start, stop))
        if out is None:
            if len(ranges) == 1:
                return self._read(*ranges[0])
            out = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        n_read = 0
        for shard_index, first, last in ranges:
            self._read(shard_index, first, last, out[n_read : n_read + last - first])
            n_read += last - first
        return out

    def take(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return (len(rows), *shape), rows in any order, all in range; in `out` if it is given."""
        self._reader._verify(rows)
        return self.unchecked(rows, out)

    def unchecked(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Like `take`, but the rows are never verified."""
        if out is None:
            out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        reader, name = self._reader, self._feature.name
        if len(reader._files) == 1:
            return reader._files[0].shard.take(name, reader._local(0, rows), out)
        if len(rows) and (rows[1:] < rows[:-1]).any():
            # Sorted first, so that each shard is read once and all rows are reordered at once.
            order = np.argsort(rows, kind="stable")
            out[order] = self.unchecked(rows[order])
            return out
        edges = np.searchsorted(rows, reader._starts).tolist()
        for shard_index, (first, last) in enumerate(pairwise(edges)):
            if first < last:
                local = reader._local(shard_index, rows[first:last] - self._edges[shard_index])
                reader._files[shard_index].shard.take(name, local, out[first:last])
        return out

    def _read(self, shard_index: int, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        reader, name = self._reader, self._feature.name
        chosen = reader._chosen[shard_index]
        if chosen is None:
            return reader._files[shard_index].shard.read(name, start, stop, out)
        return reader._files[shard_index].shard.take(name, chosen[start:stop], out)


def _path_or_url(path: str | os.PathLike[str]) -> Path | str:
    """Return a URL as text, any other path as `Path`."""
    return path if isinstance(path, str) and is_url(path) else Path(path)


def _shapes_and_dtypes(features: Sequence[StoredFeature]) -> dict[str, Any]:
    return {feature.name: (feature.shape, feature.dtype) for feature in features}


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only, because callers share it, and return it."""
    values.flags.writeable = False
    return values
