"""Read features: rows of a data set by number, over all its shards."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, unknown_name
from extract.status import Status
from extract.store.dataset import DataSet
from extract.store.layout import FORMAT, FORMAT_VERSION
from extract.store.writer import runs

__all__ = ["FeatureArray", "FeatureReader", "open_shard"]


class FeatureReader:
    """The features of a finished data set, or of one shard of it.

        with FeatureReader("outputs/photos") as reader:
            reader.layers                    # ["layer4", ...]
            reader["layer4"][10:20]          # (10, 2048), rows 10 to 19
            reader.paths[10], reader.labels[10], reader.classes

    Args:
        path: a data set folder, or a `.h5` shard.

    Raises:
        InputError: nothing of this format there.
        LayertapError: a shard is missing, unfinished, or of another fingerprint.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._files: list[h5py.File] = []
        try:
            if self._path.is_dir():
                dataset = DataSet.open(self._path)
                self._open_folder(dataset)
                self._layers = [feature.name for feature in dataset.features]
            else:
                self._files.append(open_shard(self._path))
                self._layers = list(self._files[0]["features"])
            for file in self._files:
                if (pending := int((file["status"][:] == Status.PENDING).sum())) > 0:
                    raise LayertapError(f"{file.filename} is unfinished: {pending} rows are pending; run embed again")
            counts = [_attribute(file, "n_rows") for file in self._files]
            self._starts = np.concatenate([[0], np.cumsum(counts)])
        except BaseException:
            self.close()
            raise

    def _open_folder(self, dataset: DataSet) -> None:
        for shard in range(dataset.n_shards):
            path = dataset.shard_path(shard)
            if not path.exists():
                state = "unfinished" if dataset.part_path(shard).exists() else "missing"
                raise LayertapError(f"{path} is {state} (shard {shard} of {dataset.n_shards}); run embed again")
            file = open_shard(path)
            self._files.append(file)
            if fault := dataset.fault_of(file, shard):
                raise LayertapError(f"{path} {fault}; delete it and run embed again")

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def layers(self) -> list[str]:
        """Names of the features, in the order they were asked for (of a single shard: sorted)."""
        return self._layers

    def __getitem__(self, layer: str) -> FeatureArray:
        if layer not in self._layers:
            raise unknown_name("layer", layer, self._layers, str(self._path))
        return FeatureArray([file["features"][layer] for file in self._files], self._starts)

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    @property
    def paths(self) -> list[str]:
        """Paths of the images, relative to their folder; undecodable bytes as in `os.fsdecode`."""
        return [os.fsdecode(path) for file in self._files for path in file["path"][:]]

    @property
    def labels(self) -> NDArray[np.int64]:
        """(N,) index into `classes`; -1 unknown."""
        return self._column("label")

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return [os.fsdecode(name) for name in self._files[0]["classes"][:]]

    @property
    def splits(self) -> list[str]:
        """train, val, test or empty, for each row."""
        return [os.fsdecode(split) for file in self._files for split in file["split"][:]]

    @property
    def status(self) -> NDArray[np.uint8]:
        """(N,) codes of `extract.status.Status`; 1 is ok."""
        return self._column("status")

    @property
    def provenance(self) -> dict[str, Any]:
        """What the features were made from and with."""
        content: dict[str, Any] = json.loads(self._files[0]["provenance"][()])
        return content

    @property
    def failures(self) -> list[tuple[int, str, str, str]]:
        """Rows without good features: (row, path, status, reason)."""
        found = []
        for file, start in zip(self._files, self._starts, strict=False):
            status = file["status"][:]
            bad = np.flatnonzero(status != Status.OK)
            if len(bad):
                receipt = Path(file.filename).with_suffix(".json")
                reasons = json.loads(receipt.read_text(encoding="utf-8"))["reasons"] if receipt.exists() else {}
                first_row = int(file.attrs["first_row"])
                found += [
                    (
                        int(start + row),
                        os.fsdecode(file["path"][row]),
                        Status(status[row]).text,
                        reasons.get(str(first_row + row), ""),
                    )
                    for row in bad.tolist()
                ]
        return found

    def _column(self, name: str) -> NDArray[Any]:
        return np.concatenate([file[name][:] for file in self._files])

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FeatureReader({str(self._path)!r}, {len(self):,} rows, layers={self._layers})"


class FeatureArray:
    """One feature over all shards; rows are read when indexed.

    The index is an int, a slice, an array of rows in any order with repeats, or a boolean mask; the result is numpy.
    """

    def __init__(self, parts: Sequence[h5py.Dataset], starts: NDArray[np.int64]):
        self._parts = parts
        self._starts = starts
        self.dtype: np.dtype[Any] = parts[0].dtype
        self.shape: tuple[int, ...] = (int(starts[-1]), *parts[0].shape[1:])

    @property
    def attributes(self) -> dict[str, str]:
        """What is written beside the data: layer, pooling, axes, source_dtype."""
        return {name: str(value) for name, value in self._parts[0].attrs.items()}

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        if isinstance(rows, slice):
            return self._read(np.arange(*rows.indices(len(self))))
        index = np.asarray(rows)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(f"a mask of shape {index.shape} for {len(self)} rows")
            return self._read(np.flatnonzero(index))
        if isinstance(rows, tuple) or index.ndim > 1 or (index.size and index.dtype.kind not in "iu"):
            raise IndexError(f"rows are an int, a slice, a list of ints or a mask, not {rows!r}")
        index = index.astype(np.int64)
        if ((index < -len(self)) | (index >= len(self))).any():
            raise IndexError(f"rows from {index.min()} to {index.max()} of {len(self)}")
        values = self._read(np.atleast_1d(index % max(1, len(self))))
        return values if index.ndim else values[0]

    def _read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """(len(rows), *shape): each run of neighbouring rows is one read, whatever the order asked for."""
        wanted, inverse = np.unique(rows, return_inverse=True)
        found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        done = 0
        for shard, part in enumerate(self._parts):
            start = int(self._starts[shard])
            here = wanted[(wanted >= start) & (wanted < self._starts[shard + 1])] - start
            for first, stop in runs(here):
                part.read_direct(found, np.s_[first:stop], np.s_[done : done + stop - first])
                done += stop - first
        return found if np.array_equal(wanted, rows) else found[inverse]


def _attribute(file: h5py.File, name: str) -> int:
    if name not in file.attrs:
        raise InputError(f"{file.filename} has no attribute {name!r}; it is no whole shard")
    return int(file.attrs[name])


def open_shard(path: Path) -> h5py.File:
    """Open a shard, finished or not, for reading.

    Raises:
        InputError: it is not there, no HDF5, or of another format.
    """
    try:
        file = h5py.File(path, "r")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be opened as HDF5: {error}; if it is damaged, delete it and run again"
        ) from error
    version = (file.attrs.get("format"), file.attrs.get("format_version"))
    if version != (FORMAT, FORMAT_VERSION):
        file.close()
        raise InputError(f"{path}: format {version[0]} version {version[1]}; expected {FORMAT} {FORMAT_VERSION}")
    return file
