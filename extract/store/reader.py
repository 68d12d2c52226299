"""Read features by row number, over all shards of a data set; or all rows as a table of Arrow, pandas or polars."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, unknown_name
from extract.images.part_names import file_of, windows_of
from extract.row_status import Status
from extract.store.batches import Shuffle, batches
from extract.store.feature_array import FeatureArray, RowIndex
from extract.store.file_means import FileMeans, file_means
from extract.store.format.layout import REPAIR_HINT, ROW_DATA, StoredFeature, feature_types
from extract.store.format.writer import hash_records, hash_rows
from extract.store.places.shard_cache import CACHE_BYTES, ShardCache
from extract.store.row_selection import OpenShards, RowSelection, open_selections
from extract.store.text_column import TextColumn
from extract.store.tokens.token_array import TokenArray
from extract.store.tokens.token_layout import token_layout
from extract.system.dissimilarities import dissimilarities
from extract.system.html_tables import Table, html_summary
from extract.system.optional_libraries import library
from extract.system.urls import is_url

if TYPE_CHECKING:  # imports torch, which is not needed to read arrays
    from extract.store.torch_dataset import FeatureDataset, Residency

__all__ = ["ArrowRows", "FeatureArray", "FeatureReader", "RowPictures", "as_utf8"]

RowPictures = Callable[[int, int], Sequence[bytes | None]]

_MOST_IN_RDM = 20_000  # rows
_MEANS_AT_ONCE = 1024  # rows that are added up at once
_SHOWN = 10  # classes and splits in a notebook
_VERIFIED_BYTES = 4 << 20  # features that are verified at once: they stay in the caches of the processor


@dataclass(frozen=True)
class RowCounts:
    """Numbers of the rows of a reader.

    Attributes:
        status: status -> rows.
        classes: class -> rows; every class is there.
        unlabelled: rows without a class.
        splits: split -> rows; rows without a split are left out.
    """

    status: dict[str, int]
    classes: dict[str, int]
    unlabelled: int
    splits: dict[str, int]


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
            union of their classes, and labels are renumbered. A folder may be a URL such as `s3://BUCKET/NAME`. It is
            read through a cache on the local disk: a shard is downloaded whole when one of its features is first read.
        partial: also open an unfinished data set. The rows are those stored at this moment; `rows` lists them. Rows of
            an unfinished shard must match their hashes. Behind a URL, only finished shards are read.
        cache_bytes: maximum size of the cache for URLs in `$XDG_CACHE_HOME/layertap` (`~/.cache/layertap`); the shards
            that were opened least recently are removed. If rows are read in random order, give it the size of the data
            set: otherwise shards are downloaded again and again.
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
        given = [path] if isinstance(path, str | os.PathLike) else path
        paths = [source if isinstance(source, str) and is_url(source) else Path(source) for source in given]
        if not paths:
            raise InputError("no data set given: the list of folders is empty")
        self._name = ", ".join(map(str, paths))
        self._selections: list[RowSelection] = []
        self._sets: list[int] = []  # index of the path that each selection is from
        features: list[StoredFeature] | None = None
        fingerprint, base = "", 0
        self._open_shards = OpenShards()
        self._is_closed = False
        cache = ShardCache(cache_bytes) if any(isinstance(source, str) for source in paths) else None
        try:
            for number, source in enumerate(paths):
                opened = open_selections(source, partial, cache, self._open_shards)
                self._selections += [selection.after(base) for selection in opened.selections]
                if features is None:
                    features, fingerprint = opened.features, opened.fingerprint
                elif opened.fingerprint != fingerprint or feature_types(opened.features) != feature_types(features):
                    raise InputError(
                        f"{source} and {paths[0]} have different fingerprints; their features cannot be combined",
                        hint=f"`layertap show {shlex.join([str(paths[0]), str(source)])}` compares them",
                    )
                more = {feature.name: feature.attributes for feature in opened.features}  # than earlier versions store
                features = [replace(each, attributes={**more[each.name], **each.attributes}) for each in features]
                self._sets += [number] * len(opened.selections)
                base += opened.n_rows
        except BaseException:
            self.close()
            raise
        self._features, self._fingerprint = features or [], fingerprint
        self._index_rows(check)

    def _index_rows(self, check: bool) -> None:
        """Note where the rows of the selections are; `check`: see the class."""
        self._row_data: dict[str, NDArray[Any]] = {}
        self._index = RowIndex(
            [selection.file for selection in self._selections],
            [selection.chosen for selection in self._selections],
            [len(selection.rows) for selection in self._selections],
        )
        self._unverified = np.ones(len(self), np.bool_) if check else None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def layers(self) -> list[str]:
        """Names of the features, in the order requested at extraction; sorted for a single shard."""
        return [feature.name for feature in self._features]

    def __getitem__(self, layer: str) -> FeatureArray:
        for feature in self._features:
            if feature.name == layer:
                return FeatureArray(self._index, feature, None if self._unverified is None else self._verify)
        raise unknown_name("layer", layer, self.layers, self._name)

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """(N,) int64, row of the data set for each row: 0 to N - 1, except for a single shard or with `partial`."""
        return _frozen(np.concatenate([np.empty(0, np.int64), *(selection.rows for selection in self._selections)]))

    @property
    def paths(self) -> Sequence[str]:
        """Path of each image, relative to the image folder; undecodable bytes as in `os.fsdecode`.

        Like `splits` and `ids`, it is read from the files; copy what is needed after the reader is closed: `paths[:]`.
        """
        return self._text_column("path")

    @property
    def files(self) -> Sequence[str]:
        """Path of the file of each row: of a part of an image, such as a box or tile, without which part it is."""
        return TextColumn(len(self), lambda start, stop: [file_of(path) for path in self._texts("path", start, stop)])

    @cached_property
    def windows(self) -> NDArray[Any]:
        """(N, 4) x, y, width and height of rows that are boxes or tiles: int64 pixels, or float64 fractions.

        Raises:
            InputError: a row is not a box or tile, or some are in pixels and others in fractions.
        """
        return _frozen(windows_of(self.paths[:]))

    @property
    def splits(self) -> Sequence[str]:
        """Split of each row: train, val, test or empty."""
        return self._text_column("split")

    @property
    def ids(self) -> Sequence[str] | None:
        """Id of each row from the list of images; None if there are no ids."""
        return self._text_column("id") if self._has_ids else None

    @cached_property
    def columns(self) -> Mapping[str, Sequence[str] | NDArray[Any]]:
        """Name -> values of each row, of the further columns of a list that were kept: text, int64 or float64.

        Of several data sets, the columns that all of them have, with values of one kind.
        """
        kinds = [set(selection.kept_columns.items()) for selection in self._selections]
        columns: dict[str, Sequence[str] | NDArray[Any]] = {}
        for name, kind in sorted(set.intersection(*kinds)) if kinds else ():
            if kind == "S":
                columns[name.rpartition("/")[2]] = self._text_column(name)
            else:
                numbers = np.concatenate([selection.column(name) for selection in self._selections])
                columns[name.rpartition("/")[2]] = _frozen(numbers)
        return columns

    def _text_column(self, name: str) -> TextColumn:
        return TextColumn(len(self), partial(self._texts, name))

    def _texts(self, name: str, start: int, stop: int) -> list[str]:
        if self._is_closed:
            raise LayertapError(
                f"{self._name} is closed",
                hint="copy what is needed later, such as reader.paths[:], before the reader is closed",
            )
        ranges = self._index.ranges_between(start, stop)
        return [text for i, first, last in ranges for text in self._selections[i].texts(name, first, last)]

    @cached_property
    def _has_ids(self) -> bool:
        return bool(self._selections) and all(selection.has_ids for selection in self._selections)

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes."""
        class_lists = {tuple(selection.classes) for selection in self._selections}
        if len(class_lists) == 1:
            return list(class_lists.pop())
        return sorted({name for names in class_lists for name in names}, key=os.fsencode)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """(N,) int64, index into `classes`; -1 unknown. Samples of `dataset(...)` are fewer: see its own `labels`."""
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
        return _frozen(np.repeat(np.array(self._sets, np.int64), np.diff(self._index.starts)))

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
            ranges = self._index.ranges_between(start, stop)
            columns = [self._selections[i].column(name, first, last) for i, first, last in ranges]
            return np.concatenate([empty[name], *columns])
        if name not in self._row_data:
            columns = [selection.column(name) for selection in self._selections]
            self._row_data[name] = _frozen(np.concatenate([empty[name], *columns]))
        return self._row_data[name]

    @property
    def provenance(self) -> dict[str, Any]:
        """Backbone, weights, configuration, versions and machine that computed the features of the first shard."""
        return self._selections[0].shard.provenance if self._selections else {}

    def require(self, *, backbone: str | None = None, layer: str | None = None, weights: str | None = None) -> None:
        """Check what the features are of, by the stored names alone: nothing is computed. `layertap.check` computes.

            reader.require(backbone="timm/resnet50", layer="embedding", weights="a1_in1k")

        Args:
            backbone: the spec that the features were computed with.
            layer: a feature that must be there.
            weights: the recorded name or file of the weights, or the first characters, at least 8, of their sha256.

        Raises:
            InputError: the features are of another backbone or of other weights.
            UnknownNameError: there is no such feature.
        """
        recorded = self.provenance
        if layer is not None and layer not in self.layers:
            raise unknown_name("layer", layer, self.layers, self._name)
        if backbone is not None and backbone != recorded.get("backbone"):
            raise InputError(f"{self._name} has features of {recorded.get('backbone')}, not of {backbone}")
        source = str(recorded.get("weights", ""))
        sha256 = str(recorded.get("depends_on", {}).get("weights_sha256", ""))
        names = {source, source.partition(" (")[0], recorded.get("configuration", {}).get("weights")}
        if weights is None or weights in names or (len(weights) >= 8 and sha256.startswith(weights)):
            return
        raise InputError(f"{self._name} has features of the weights {source} ({sha256[:12]}...), not of {weights}")

    @cached_property
    def counts(self) -> RowCounts:
        """Numbers of rows by status, class and split."""
        status, splits = Counter(self.status.tolist()), Counter(self.splits)
        del splits[""]
        unlabelled, *classes = np.bincount(self.labels + 1, minlength=len(self.classes) + 1).tolist()
        return RowCounts(
            status={Status(code).text: count for code, count in sorted(status.items())},
            classes=dict(zip(self.classes, classes, strict=True)),
            unlabelled=unlabelled,
            splits=dict(splits),
        )

    @property
    def failures(self) -> list[tuple[int, str, str, str]]:
        """Rows whose status is not ok: (row, path, status, reason)."""
        failures = []
        for selection, start, stop in zip(self._selections, self._index.starts, self._index.starts[1:], strict=False):
            status = self.status[start:stop]
            bad = np.flatnonzero(status != Status.OK)
            reasons, shard_start = (selection.reasons, selection.shard.identity.first_row) if len(bad) else ({}, 0)
            its_rows = bad if selection.chosen is None else selection.chosen[bad]
            for row, its_row in zip(bad.tolist(), its_rows.tolist(), strict=True):
                path = selection.texts("path", row, row + 1)[0]
                failures.append(
                    (int(start) + row, path, Status(status[row]).text, reasons.get(shard_start + its_row, ""))
                )
        return failures

    def place_of(self, row: int) -> tuple[Path, int, int]:
        """Return the file that holds a row, its shard's number, and the row's number in the data set of that shard."""
        ((shard, _, local),) = self._index.by_shard(np.array([row]))
        return shard.path, shard.identity.shard, shard.identity.first_row + int(local[0])

    @property
    def compression(self) -> dict[str, tuple[str, float]]:
        """Feature -> (gzip, lzf or blosc2; compression ratio), for compressed features."""
        stored, plain, filters = Counter[str](), Counter[str](), dict[str, str]()
        for selection in self._selections:
            shard = selection.shard
            # Of a shard in a bucket, only the receipt has them until its features are downloaded.
            packed = shard.stored_bytes or (selection.receipt or {}).get("compression", {}).get("bytes", {})
            for feature in self._features:
                n_bytes = feature.row_bytes * len(shard)
                plain[feature.name] += n_bytes
                stored[feature.name] += packed.get(feature.name, n_bytes)
            filters |= shard.compression
        return {name: (filters[name], plain[name] / max(1, stored[name])) for name in self.layers if name in filters}

    def checked(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return layer -> all features of rows as they are kept, verified so that copies do not hide damage.

        Raises:
            InputError: a row does not match its hashes.
        """
        features = {layer: self[layer].kept(rows) for layer in self.layers}
        columns, paths = self._records(rows)
        agree = (hash_rows(features) == columns["row_hash"]) & (hash_records(paths, columns) == columns["record_hash"])
        if not agree.all():
            row = int(rows[np.flatnonzero(~agree)[0]])
            raise InputError(
                f"row {row} ({self.paths[row]}) of {self._name} is damaged: it does not match its hashes",
                hint=REPAIR_HINT,
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
                y = reader.labels[rows]    # -1: no class

        Args:
            layer: name of a feature.
            batch_size: rows in each batch; the last may have fewer.
            shuffle: None for the stored order. "chunks" reads blocks of neighbouring rows (about a megabyte each) in
                random order and mixes the rows of as many blocks as fit in memory, as fast as in order. "rows" makes
                every order of the rows equally likely; it needs a fast disk, or features that fit in the file cache.
            seed: seed of the order; the same seed gives the same order on any machine.
            split: only the rows of this split; None for all.
            memory_bytes: maximum allocation, apart from 64 bytes per row and the returned batch.

        Raises:
            UnknownNameError: no such layer or split.
            ValueError: batch_size, memory_bytes, seed or shuffle is out of range.
        """
        chosen = self._good_rows(split)
        return batches(self[layer], chosen, batch_size, shuffle=shuffle, seed=seed, memory_bytes=memory_bytes)

    def dataset(
        self,
        layers: str | Sequence[str],
        *,
        split: str | None = None,
        transform: Any = None,
        unlabelled: bool = False,
        targets: Any = None,
        residency: Residency = "disk",
        device: Any = None,
    ) -> FeatureDataset:
        """Return the rows with status ok and a class, or all with targets, as a `torch.utils.data.Dataset`.

        Its positions are not rows of this reader: use `dataset.labels` and `dataset.rows`. Rows without a class are
        there, with the label -1, if `unlabelled` is True or no row has a class; otherwise a warning counts them.

        Args:
            layers: names of features; of a list, the samples have a dict of tensors.
            split: only the rows of this split; None for all.
            transform: applied to the features of each sample.
            unlabelled: whether also to take rows without a class beside rows with one.
            targets: one for each row of this reader, or a function of the row, in place of labels.
            residency: "disk", "memory", "gpu" or "auto", see `FeatureDataset`.
            device: device of "gpu" and "auto".

        Raises:
            UnknownNameError: no such layer, split or residency.
            InputError: no layer is named, or see `FeatureDataset`.
            LayertapError: see `FeatureDataset`.
        """
        from extract.store.torch_dataset import FeatureDataset

        if not layers:
            raise InputError("a dataset needs at least one layer")
        arrays = self[layers] if isinstance(layers, str) else {layer: self[layer] for layer in layers}
        rows = self._good_rows(split)
        return FeatureDataset(arrays, self.labels, rows, transform, unlabelled, targets, residency, device)

    def tokens(self, layer: str, *, split: str | None = None) -> TokenArray:
        """Return the tokens of the rows with status ok: positions of maps, or patch tokens; see `TokenArray`.

        Args:
            layer: name of a feature with axes (T, C), (C, H, W) or (H, W, C), such as one with the pooling `tokens`.
            split: only the rows of this split; None for all.

        Raises:
            UnknownNameError: no such layer or split.
            InputError: the feature has no tokens, or their grid is not recorded.
        """
        array = self[layer]
        depends_on = self.provenance.get("depends_on")
        preprocessing = depends_on.get("preprocessing") if isinstance(depends_on, dict) else None
        layout = token_layout(layer, array.shape[1:], array.attributes)
        described = preprocessing if isinstance(preprocessing, dict) else {}
        return TokenArray(array, layout, self._good_rows(split), described)

    def layers_with_tokens(self) -> list[str]:
        """Return the names of the features that `tokens` accepts.

        Raises:
            InputError: there are none.
        """
        names = []
        for name in self.layers:
            with contextlib.suppress(InputError):
                self.tokens(name)
                names.append(name)
        if not names:
            self.tokens(self.layers[0])  # raises the reason
        return names

    def _good_rows(self, split: str | None) -> NDArray[np.int64]:
        good = self.status == Status.OK
        if split is not None:
            splits = sorted(set(self.splits))
            if split not in splits:
                raise unknown_name("split", split, splits, self._name)
            good &= np.array(self.splits) == split
        return np.flatnonzero(good)

    def per_file(self, layer: str) -> FileMeans:
        """Return the mean of a feature over the rows of each file with status ok: of a slide's tiles, a clip's frames.

            files, means, n_rows = reader.per_file("embedding")

        Sums are float64; besides the result, a few megabytes of features are held at once.

        Raises:
            UnknownNameError: no such layer.
        """
        return file_means(self.files, self.batches(layer, _MEANS_AT_ONCE), self[layer].shape[1:])

    def rdm(self, layer: str, metric: str = "correlation", *, condensed: bool = False) -> NDArray[np.float64]:
        """Return the representational dissimilarity matrix (RDM) of a layer: (N, N) float64, in the order of the rows.

        Rows and columns of images without features are NaN.

        Args:
            layer: name of a feature; features of several axes are flattened.
            metric: "correlation": 1 - Pearson's r of two images; "cosine": 1 - their cosine; "euclidean": their
                distance. NaN where it is not defined.
            condensed: return (N (N - 1) / 2,), the pairs in the order of `np.triu_indices(N, 1)`.

        Raises:
            UnknownNameError: no such layer or metric.
            InputError: there are more than 20,000 rows, whose matrix takes 3.2 GB.
        """
        if len(self) > _MOST_IN_RDM:
            raise InputError(
                f"the matrix of {len(self):,} rows takes {8 * len(self) ** 2 / 1e9:,.0f} GB; expected at most "
                f"{_MOST_IN_RDM:,} rows",
                hint=f"choose rows: 1 - numpy.corrcoef(reader[{layer!r}][rows])",
            )
        good = self._good_rows(None)
        matrix = np.full((len(self), len(self)), np.nan)
        if len(good):
            matrix[np.ix_(good, good)] = dissimilarities(self[layer][good].reshape(len(good), -1), metric)
        return matrix[np.triu_indices(len(self), 1)] if condensed else matrix

    def without(self, table: Any, on_note: Callable[[str], None] = lambda note: None) -> FeatureReader:
        """Return a reader of the rows whose images are not named in a table, such as that of `layertap findings`.

            reader.without("findings.csv")["embedding"][:]

        Its `rows` are those of this reader. Both read the same open files, which either closes.

        Args:
            table: file, DataFrame, findings or paths; see `extract_features`. A row whose `keep` is true names none.
            on_note: called with the number of rows that are left out, and of paths that are those of no row, in words.

        Raises:
            InputError: the table cannot be used, or names no image, or all.
        """
        from extract.images.named_images import named_images

        named = named_images(table)
        rows = np.array(named.rows_of_others(self.paths), np.int64)
        on_note(named.note)
        reader = object.__new__(type(self))
        reader._name, reader._features, reader._fingerprint = self._name, self._features, self._fingerprint
        reader._open_shards, reader._is_closed = self._open_shards, self._is_closed
        edges = pairwise(np.searchsorted(rows, self._index.starts).tolist())
        parts = zip(self._selections, self._index.starts, edges, strict=False)
        reader._selections = [part.part(rows[first:stop] - start) for part, start, (first, stop) in parts]
        reader._sets = self._sets
        reader._index_rows(check=self._unverified is not None)
        return reader

    # As a table

    def to_arrow(self, layers: str | Sequence[str] | None = None) -> Any:
        """Return all rows as a `pyarrow.Table`: row, path, label, class, split, status, id, kept columns, layers.

        Features are lists of a fixed size; their shape is in the metadata of the column. Features of files on this
        machine that are neither compressed nor encoded are not copied; the table keeps the files mapped.

        Args:
            layers: names of features; None for all.

        Raises:
            UnknownNameError: no such layer.
            LayertapError: pyarrow is not installed.
        """
        names = [layers] if isinstance(layers, str) else self.layers if layers is None else list(layers)
        for name in names:
            self[name]  # raises if it does not exist
        return ArrowRows(self, list(dict.fromkeys(names))).table()

    def to_pandas(self, layers: str | Sequence[str] | None = None) -> Any:
        """Return all rows as a `pandas.DataFrame`: the columns of `to_arrow`, and features as arrays.

        Raises:
            UnknownNameError: no such layer.
            LayertapError: pandas or pyarrow is not installed.
        """
        library("pandas", "pandas", "to_pandas")
        return self.to_arrow(layers).to_pandas()

    def to_polars(self, layers: str | Sequence[str] | None = None) -> Any:
        """Return all rows as a `polars.DataFrame`: the columns of `to_arrow`, and features of type Array.

        Raises:
            UnknownNameError: no such layer.
            LayertapError: polars or pyarrow is not installed.
        """
        polars = library("polars", "polars", "to_polars")
        return polars.from_arrow(self.to_arrow(layers))

    # Internals

    def _verify(self, rows: NDArray[np.int64]) -> None:
        """Verify those rows that were not verified before."""
        # 0.6 us for a row of 1,280 float16 in the file cache, as much as its read; below the noise in a search.
        assert self._unverified is not None
        new = np.unique(rows[self._unverified[rows]])
        at_once = max(1, _VERIFIED_BYTES // max(1, sum(feature.row_bytes for feature in self._features)))
        for start in range(0, len(new), at_once):
            self.checked(new[start : start + at_once])
            self._unverified[new[start : start + at_once]] = False

    def _records(self, rows: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], list[bytes]]:
        """Return (column -> its values, paths when the features were computed) of rows in any order."""
        columns = {name: np.empty((len(rows), *width), dtype) for name, width, dtype in ROW_DATA}
        paths = [b""] * len(rows)
        for shard, positions, local in self._index.by_shard(rows):
            for name, values in columns.items():
                values[positions] = shard.column(name, local)
            for position, path in zip(positions.tolist(), shard.text("path", local), strict=True):
                paths[position] = os.fsencode(path)
        return columns, paths

    def close(self) -> None:
        """Close the files; arrays that were read stay valid."""
        self._is_closed = True
        for selection in self._selections:
            selection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FeatureReader({self._name!r}, {len(self):,} rows, layers={self.layers})"

    def _repr_html_(self) -> str:
        rows = [
            [
                feature.name,
                str((len(self), *feature.shape)),
                feature.dtype,
                f"{len(self) * feature.row_bytes / 1e6:,.2f}",
                feature.attributes.get("pooling", ""),
                feature.attributes.get("axes", ""),
            ]
            for feature in self._features
        ]
        return html_summary(
            f"FeatureReader({self._name!r}), {len(self):,} rows",
            [Table(["feature", "shape", "dtype", "MB", "pooling", "axes"], rows)],
            [] if self._is_closed else self._row_counts(),
        )

    def _row_counts(self) -> list[str]:
        """Return the numbers of rows by status, class and split as text."""
        counts = self.counts
        lines = [", ".join(f"{count:,} {status}" for status, count in counts.status.items())]
        for title, numbers in (("classes", counts.classes), ("splits", counts.splits)):
            if numbers:
                shown = ", ".join(f"{name} ({count:,})" for name, count in list(numbers.items())[:_SHOWN])
                lines.append(f"{len(numbers):,} {title}: {shown}" + (", ..." if len(numbers) > _SHOWN else ""))
        return lines


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only, because callers share it, and return it."""
    values.flags.writeable = False
    return values


class ArrowRows:
    """Converts rows to Arrow.

    The columns are `row`, `path`, `label`, `class`, `split`, `status`, `id` if there are ids, kept columns, and the
    features. A path with bytes that are not UTF-8 is escaped; then `path_bytes` has the bytes of all paths. The
    metadata of a feature are its shape and its attributes, and those of the table the provenance.

    Args:
        reader: reader of the rows.
        names: features.
        pictures: returns the encoded pictures of the rows from START to STOP, None for a missing one; they are stored
            in the column `image` as the library `datasets` stores them.

    Attributes:
        schema: the schema of the tables.

    Raises:
        InputError: a feature has the name of another column.
        LayertapError: pyarrow is not installed.
    """

    def __init__(self, reader: FeatureReader, names: Sequence[str], pictures: RowPictures | None = None):
        self._pictures = pictures
        self._arrow = pa = library("pyarrow", "parquet", "Arrow")
        self._reader, self._names = reader, names
        text, number = pa.string(), pa.int64()
        columns = {"row": number, "path": text, "label": number, "class": text, "split": text, "status": text}
        if reader.ids is not None:
            columns["id"] = text
        self._kept = reader.columns
        if reserved := columns.keys() & self._kept.keys():  # of a file that another program wrote
            raise InputError(f"the column {min(reserved)!r} cannot be converted: the table has one of this name")
        for name, values in self._kept.items():
            columns[name] = pa.from_numpy_dtype(values.dtype) if isinstance(values, np.ndarray) else text
        if any("\udc80" <= char <= "\udcff" for path in reader.paths for char in path):
            columns["path_bytes"] = pa.binary()
        if pictures is not None:
            columns["image"] = pa.struct({"bytes": pa.binary(), "path": text})
        if reserved := columns.keys() & set(names):
            raise InputError(f"the layer {min(reserved)!r} cannot be converted: the table has a column of this name")
        fields = [pa.field(name, kind) for name, kind in columns.items()]
        for name in names:
            shape = reader[name].shape[1:]
            kind = pa.list_(pa.from_numpy_dtype(reader[name].dtype), math.prod(shape))
            fields.append(pa.field(name, kind, metadata={"shape": json.dumps(shape), **reader[name].attributes}))
        self.schema = pa.schema(fields, {"layertap": json.dumps(reader.provenance)})
        self._classes = [*map(as_utf8, reader.classes), None]  # label -1 gives the last item

    def table(self) -> Any:
        """Return the table of all rows. Features that are stored as they are read are not copied."""
        parts = zip(*(self._reader[name].parts() for name in self._names), strict=True)
        batches = [self.batch(part[0][0], part[0][1], [values for _, _, values in part]) for part in parts]
        if not self._names:
            batches = [self.batch(0, len(self._reader), [])]
        return self._arrow.Table.from_batches(batches, self.schema)

    def batch(self, start: int, stop: int, features: Sequence[NDArray[Any]]) -> Any:
        """Return a record batch of the rows of a range; `features`: (stop - start, *shape) of each name."""
        reader, pa = self._reader, self._arrow
        paths, labels = reader.paths[start:stop], reader.labels[start:stop].tolist()
        columns: dict[str, Any] = {
            "row": reader.rows[start:stop],
            "path": [as_utf8(path) for path in paths],
            "label": labels,
            "class": [self._classes[label] for label in labels],
            "split": reader.splits[start:stop],
            "status": [Status(code).text for code in reader.status[start:stop].tolist()],
        }
        if reader.ids is not None:
            columns["id"] = [as_utf8(each) for each in reader.ids[start:stop]]
        for name, values in self._kept.items():
            part = values[start:stop]
            columns[name] = part if isinstance(part, np.ndarray) else [as_utf8(each) for each in part]
        if "path_bytes" in self.schema.names:
            columns["path_bytes"] = [os.fsencode(path) for path in paths]
        if self._pictures is not None:
            encoded = zip(self._pictures(start, stop), columns["path"], strict=True)
            columns["image"] = [None if data is None else {"bytes": data, "path": path} for data, path in encoded]
        arrays = [pa.array(values, self.schema.field(name).type) for name, values in columns.items()]
        for name, values in zip(self._names, features, strict=True):
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=self.schema.field(name).type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def as_utf8(text: str) -> str:
    """Escape the bytes of a text that are not UTF-8."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")
