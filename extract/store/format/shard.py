"""One shard, open for reading, with rows as they are kept, and copies of it.

Files are not trusted: each is checked before it is used.

HDF5 reports the offsets of all datasets once. Uncompressed datasets are then read through a memory map, which is as
fast as `np.load`, needs no lock, and can be shared between threads and across a fork; HDF5 takes 14 times as long for a
random row. Only compressed features are read through HDF5.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.store.format.checked_file import Seekable
from extract.store.format.layout import (
    COLUMNS,
    REPAIR_HINT,
    ROW_DATA,
    RowNames,
    StoredFeature,
    chunk_rows,
    new_shard_file,
    plain_offset,
    preallocated,
    read_header,
    row_bytes,
)
from extract.store.format.schemas import PROVENANCE
from extract.store.format.untrusted import (
    FILTERS,
    Refuse,
    StoredDataset,
    attributes_of,
    dataset_in,
    filters_of,
    group_in,
    identity_of,
    kept_columns_in,
    need_libraries,
    open_untrusted,
)
from extract.store.format.value_types import STORED_TYPES, value_type_of
from extract.system.json_files import parse_json

__all__ = ["BLOCK_BYTES", "COMPRESSIONS", "MEDIA_ERRORS", "Shard", "copy_shard", "runs"]

COMPRESSIONS = tuple(FILTERS.values())
_FEATURES = 10_000  # limit for one file
_TEXT_BYTES = 1 << 24  # limit for the provenance
_CHUNK_BYTES = 1 << 26  # limit for a chunk of more than one row
_ROW_BYTES = 1 << 32
BLOCK_BYTES = 1 << 26  # features held in memory at once
_ROW_DATA = {name for name, *_ in ROW_DATA}
# System errors for a disk or a server that does not return stored data.
MEDIA_ERRORS = {errno.EIO, errno.ESTALE, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA}
_READ_AHEAD_BYTES = 1 << 20  # bytes of a read above which the kernel is advised to read ahead


class Shard:
    """A finished shard or a part; a context manager. Instances can be shared by threads, and forked.

    Args:
        path: the file.
        name: URL that the file is a copy of, for errors; None for its path.
        with_features: whether the bytes of the features are in the file. Otherwise features cannot be read,
            `stored_bytes` is empty, and `offsets` has only the columns beside them.

    Attributes:
        path: the file.
        name: path or URL of the file, for errors.
        size: bytes of the file.
        identity: shard and data set according to the file's attributes.
        features: the features, sorted by name.
        compression: name of the feature -> "gzip", "lzf" or "blosc2", for compressed features.
        chunks: name of the feature -> rows in a chunk.
        stored_bytes: name of the feature -> bytes in the file.
        offsets: "/features/NAME", "/status", ... -> first byte in the file, for uncompressed datasets.

    Raises:
        InputError: the file does not exist, is not a shard, is damaged, or uses HDF5 features that no shard uses.
        LayertapError: the file cannot be read.
    """

    def __init__(self, path: Path, name: str | None = None, *, with_features: bool = True):
        self.path, self.name = path, name or str(path)
        self._packed: tuple[int, h5py.File] | None = None
        self._guard = os.getpid(), threading.Lock()
        self._arrays: dict[str, NDArray[Any]] = {}
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise InputError(f"{self.name} is not a regular file")
            with path.open("rb") as raw:
                self._row_data = read_header(raw, self.name)
                self._inode = os.fstat(raw.fileno()).st_ino
                self._mapping = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
                self.size = len(self._mapping)
                with open_untrusted(path, self.name) as file:
                    self._describe(file, with_features)
        except FileNotFoundError as error:
            raise InputError(f"{self.name} does not exist") from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else first_line(error)
            raise LayertapError(f"{self.name} cannot be read: {reason}") from error
        for feature in self.features if with_features else ():
            if feature.name not in self.compression:
                start, shape = self.offsets.get(f"/features/{feature.name}"), (len(self), *feature.kept_shape)
                self._arrays[feature.name] = self._array_at(start, shape, feature.kept_dtype)

    def _describe(self, file: h5py.File, with_features: bool) -> None:
        """Check the structure of the file and set the attributes from it."""

        def refuse(problem: str) -> InputError:
            return InputError(f"{self.name} is not a valid shard: {problem}")

        self.identity = identity_of(file, refuse)
        n_rows = self.identity.n_rows
        group = group_in(file.id, "features", refuse)
        if not 1 <= (count := group.get_num_objs()) <= _FEATURES:
            raise refuse(f"it has {count:,} features; expected 1 to {_FEATURES:,}")
        self.features: list[StoredFeature] = []
        self.compression: dict[str, str] = {}
        self.chunks: dict[str, int] = {}
        self.stored_bytes: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        for name in sorted(encoded.decode() for encoded in group):
            data = dataset_in(group, name, refuse, "/features")
            kept = value_type_of(data.dtype, data.shape[1:])
            if kept is None:
                raise refuse(f"feature {name!r} is {data.dtype}; expected {', '.join(STORED_TYPES)}")
            if not data.shape or data.shape[0] != n_rows or (data.chunks or data.shape)[1:] != data.shape[1:]:
                raise refuse(f"feature {name!r} has shape {data.shape}, chunks {data.chunks}; expected {n_rows} rows")
            feature = StoredFeature(name, kept[1], kept[0], attributes_of(data))
            self.chunks[name] = data.chunks[0] if data.chunks else chunk_rows(feature, n_rows)
            chunk_bytes = feature.row_bytes * self.chunks[name]
            if feature.row_bytes > _ROW_BYTES or chunk_bytes > max(_CHUNK_BYTES, feature.row_bytes):
                raise refuse(f"feature {name!r} has chunks of {data.chunks}, which are too large")
            self.features.append(feature)
            if packed := filters_of(data, refuse):
                self.compression[name] = packed
            if not with_features:  # HDF5 keeps the index of compressed chunks among them
                continue
            self.stored_bytes[name] = data.id.get_storage_size()
            if not packed:
                self._locate(data, refuse)
                continue
            if (count := data.id.get_num_chunks()) != -(-n_rows // self.chunks[name]):
                raise refuse(f"feature {name!r} has {count:,} chunks, too few or too many for {n_rows:,} rows")
            plain = feature.row_bytes * n_rows
            if self.stored_bytes[name] > plain * 2 + (1 << 20):
                raise refuse(f"feature {name!r} takes {self.stored_bytes[name]:,} bytes, but {plain:,} decompressed")
        self._feature = {feature.name: feature for feature in self.features}
        self._columns: dict[str, NDArray[Any]] = {}
        for name, width, dtype in (*ROW_DATA, ("label", (), "<i8")):
            self._columns[name] = self._column(file, name, refuse)
            if self._columns[name].shape != (n_rows, *width) or self._columns[name].dtype != np.dtype(dtype):
                raise refuse(f"{name} is {self._columns[name].dtype} {self._columns[name].shape}; expected {dtype}")
        texts = {"path": (n_rows,), "split": (n_rows,), "classes": None, "provenance": ()}
        if "id" in file:
            texts["id"] = (n_rows,)
        for name, shape in texts.items():
            self._columns[name] = column = self._column(file, name, refuse)
            if column.dtype.kind != "S" or column.shape != (column.shape[:1] if shape is None else shape):
                raise refuse(f"{name} is {column.dtype} {column.shape}; expected fixed-length text")
        for data in kept_columns_in(file, n_rows, refuse):
            self._columns[data.name] = self._array_at(self._locate(data, refuse), data.shape, data.dtype)
        if (size := self._columns["provenance"].nbytes) > _TEXT_BYTES:
            raise refuse(f"its provenance has {size:,} bytes; at most {_TEXT_BYTES:,}")

    def _column(self, file: h5py.File, name: str, refuse: Refuse) -> NDArray[Any]:
        data = dataset_in(file.id, name, refuse)
        if data.chunks is not None:
            raise refuse(f"{name} is stored in chunks; expected one contiguous block")
        return self._array_at(self._locate(data, refuse), data.shape, data.dtype)

    def _array_at(self, start: int | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a plain dataset as an array over the memory map; None as `start` gives an array without bytes."""
        if start is None:
            return np.empty(shape, dtype)
        # Unlike np.ndarray(buffer=...), np.frombuffer keeps the map from being unmapped while the array is in use.
        return np.frombuffer(self._mapping, dtype, math.prod(shape), start).reshape(shape)

    def _locate(self, data: StoredDataset, refuse: Refuse) -> int | None:
        """Check the location of a plain dataset and return its offset in the file; None if it has no bytes."""
        if filters_of(data, refuse):
            raise refuse(f"{data.name} is compressed; expected plain data")
        if data.size == 0:
            return None
        needed = data.size * data.dtype.itemsize
        start = plain_offset(data.id, data.chunks)
        if start is None or data.id.get_storage_size() < needed or start + needed > self.size:
            raise refuse(f"{data.name} needs {needed:,} bytes, which are not in the file or not contiguous")
        # Only row data lies in the ranges that the user block lists.
        inside = [first <= start and start + needed <= stop for first, stop in self._row_data]
        outside = [start + needed <= first or stop <= start for first, stop in self._row_data]
        if not (any(inside) if data.name.startswith("/features/") or data.name[1:] in _ROW_DATA else all(outside)):
            raise refuse(f"{data.name} is not at the location that the header of the file gives")
        self.offsets[data.name] = start
        return start

    # Rows

    def __len__(self) -> int:
        return self.identity.n_rows

    def read(self, name: str, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return (stop - start, *shape), a copy of neighbouring rows; in `out` if it is given."""
        if name in self.compression:
            rows = self._unpack(name, start, stop)
        else:
            rows = self._plain(name)[start:stop]
            if rows.nbytes > _READ_AHEAD_BYTES and hasattr(mmap, "MADV_WILLNEED"):
                self._advise(rows, mmap.MADV_WILLNEED)
        if out is None:
            return rows if name in self.compression else rows.copy()
        out[...] = rows
        return out

    def _plain(self, name: str) -> NDArray[Any]:
        if name not in self._arrays:
            raise LayertapError(f"{self.name} is closed")
        return self._arrays[name]

    def take(self, name: str, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return (len(rows), *shape), a copy of rows in any order, all in range; in `out` if it is given."""
        if out is None:
            feature = self._feature[name]
            out = np.empty((len(rows), *feature.kept_shape), feature.kept_dtype)
        if name not in self.compression:
            # "clip" writes directly into `out`, which is four times as fast as through a buffer (NumPy, "take").
            np.take(self._plain(name), rows, axis=0, out=out, mode="clip")
            return out
        chunk = rows // self.chunks[name]
        order = np.argsort(chunk, kind="stable")
        starts = np.flatnonzero(np.diff(chunk[order])) + 1
        for positions in np.split(order, starts) if len(order) else ():  # decompress each chunk once
            first_row = int(rows[positions].min())
            out[positions] = self._unpack(name, first_row, int(rows[positions].max()) + 1)[rows[positions] - first_row]
        return out

    def blocks(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, int, dict[str, NDArray[Any]] | None]]:
        """Yield ascending rows in runs of neighbours that fit in memory: (start, stop, name -> features of these rows).

        The features are None if these rows cannot be read or decompressed. Unlike the other methods that read features,
        `blocks` survives an unreadable disk sector, which kills a process that reads it through a memory map.

        Raises:
            LayertapError: the file cannot be read, or a library for the compression is missing.
        """
        largest, smallest = max(self.chunks.values()), min(self.chunks.values())
        at_most = max(1, BLOCK_BYTES // max(1, row_bytes(self.features)))
        if at_most > largest:
            at_most -= at_most % largest  # so that each chunk is decompressed once
        with self._reopened() as file:
            for start, stop in runs(rows, at_most):
                block = self._block(file, start, stop)
                if block is not None or stop - start <= smallest:
                    yield start, stop, block
                    continue
                for first in range(start, stop, smallest):  # so that damage loses as few rows as possible
                    last = min(first + smallest, stop)
                    yield first, last, self._block(file, first, last)

    @contextlib.contextmanager
    def _reopened(self) -> Iterator[FileIO | None]:
        """Context manager: yield the file; None if it was renamed, replaced or removed."""
        with contextlib.ExitStack() as stack:
            file: FileIO | None = None
            with contextlib.suppress(OSError):
                file = stack.enter_context(self.path.open("rb", buffering=0))
            yield file if file is not None and os.fstat(file.fileno()).st_ino == self._inode else None

    def _block(self, file: FileIO | None, start: int, stop: int) -> dict[str, NDArray[Any]] | None:
        features = {}
        for feature in self.features:
            if feature.name in self.compression or file is None:
                try:
                    features[feature.name] = self.read(feature.name, start, stop)
                except InputError:
                    return None
                continue
            values = np.empty((stop - start, *feature.kept_shape), feature.kept_dtype)
            features[feature.name] = values
            try:
                file.seek(self.offsets[f"/features/{feature.name}"] + start * feature.row_bytes)
                if file.readinto(values.reshape(-1).view(np.uint8).data) < values.nbytes:
                    return None
            except OSError as error:
                if error.errno in MEDIA_ERRORS:
                    return None
                raise LayertapError(f"{self.name} cannot be read: {error.strerror}") from error
        return features

    def mapped(self, name: str, sample: NDArray[np.int64]) -> NDArray[Any] | None:
        """Return (N, *shape), the rows without a copy, if the sample of them is in the kernel's file cache; else None.

        None also if the feature is compressed, or if the system or the file system does not say what is in the cache.
        """
        if name in self.compression or not hasattr(os, "RWF_NOWAIT"):  # Linux
            return None
        offsets = self.offsets[f"/features/{name}"] + sample * self._feature[name].row_bytes
        with self._reopened() as file:
            if file is None:
                return None
            try:
                for offset in offsets.tolist():
                    os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
            except OSError:  # EAGAIN: not in the cache; EOPNOTSUPP: the file system does not say
                return None
        return self._plain(name)

    def forget(self, name: str, start: int, stop: int) -> None:
        """Release the memory map's pages of rows that were read; the file stays in the kernel's cache."""
        if name in self._arrays and hasattr(mmap, "MADV_DONTNEED"):
            self._advise(self._arrays[name][start:stop], mmap.MADV_DONTNEED)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        """Start reading rows into the kernel's cache; reads of other rows are waited for meanwhile."""
        if name in self._arrays and hasattr(mmap, "MADV_WILLNEED"):
            self._advise(self._arrays[name][start:stop], mmap.MADV_WILLNEED)

    def _advise(self, rows: NDArray[Any], advice: int) -> None:
        start = rows.__array_interface__["data"][0] - np.frombuffer(self._mapping, np.uint8, 1).ctypes.data
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(advice, page, start + rows.nbytes - page)

    def _unpack(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return rows of a compressed feature."""
        need_libraries(self.compression[name])
        if self._guard[0] != os.getpid():  # forked, perhaps while another thread held the lock
            self._guard = os.getpid(), threading.Lock()
        with self._guard[1]:
            if not self._columns:
                raise LayertapError(f"{self.name} is closed")
            if self._packed is None or self._packed[0] != os.getpid():  # HDF5's handles do not survive a fork
                # No chunk cache: chunks are read whole, so the cache would only hold a copy.
                try:
                    # Through the map, because the file may have been renamed or removed.
                    self._packed = os.getpid(), h5py.File(_MappedFile(self._mapping), "r", rdcc_nbytes=0)
                except OSError as error:
                    raise LayertapError(f"{self.name} cannot be read: {first_line(error)}") from error
            try:
                values: NDArray[Any] = self._packed[1]["features"][name][start:stop]
            except OSError as error:
                raise InputError(
                    f"{self.name} is damaged: rows {start} to {stop - 1} of {name!r} cannot be decompressed",
                    hint=REPAIR_HINT,
                ) from error
            return values

    # Columns beside the features

    def column(self, name: str, rows: slice | NDArray[np.int64] = slice(None)) -> NDArray[Any]:
        """Return (N, ...), a copy of a column: row data, label, kept numbers, or the bytes of a text."""
        return self._view(name)[rows].copy()

    def text(self, name: str, rows: slice | NDArray[np.int64] | EllipsisType = ...) -> list[str]:
        """Return the path, split, id or text of a kept column of rows, or the classes, decoded by `os.fsdecode`."""
        return [os.fsdecode(value) for value in self._view(name)[rows].tolist()]

    def _view(self, name: str) -> NDArray[Any]:
        if not self._columns:
            raise LayertapError(f"{self.name} is closed")
        return self._columns[name]

    @property
    def is_part(self) -> bool:
        """Whether the file is unfinished: being written, or left by an interrupted run."""
        return self.path.suffix == ".part"

    @property
    def has_ids(self) -> bool:
        """Whether each row has an id."""
        return "id" in self._columns

    @property
    def kept_columns(self) -> dict[str, np.dtype[Any]]:
        """Dtype in the file of each kept column, by its path `/columns/NAME`."""
        return {name: column.dtype for name, column in self._columns.items() if name.startswith(f"/{COLUMNS}/")}

    @property
    def provenance(self) -> dict[str, Any]:
        """Backbone, weights, configuration, versions and machine that computed the features.

        Raises:
            InputError: the provenance is damaged.
        """
        return parse_json(self._view("provenance").item(), f"/provenance of {self.name}", PROVENANCE)

    # Closing

    def copy_columns(self) -> None:
        """Copy the columns beside the features, so that a process that writes to the file does not change them."""
        self._columns = {name: column.copy() for name, column in self._columns.items()}

    def close(self) -> None:
        """Close the file; arrays that were read from it stay valid."""
        self._arrays, self._columns = {}, {}
        packed, self._packed = self._packed, None
        if packed is not None and packed[0] == os.getpid():
            packed[1].close()
        with contextlib.suppress(BufferError):  # an array over the map is in use: the last such array closes the map
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _MappedFile(Seekable):
    """File object over a memory map; its position, unlike that of a descriptor, is not shared with a forked process."""

    def __init__(self, mapping: mmap.mmap):
        super().__init__(len(mapping))
        self._mapping = mapping

    def readinto(self, buffer: Any) -> int:
        content = self._mapping[self._position : self._position + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def runs(rows: NDArray[np.integer[Any]], at_most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ascending rows as half-open ranges of at most `at_most` neighbours: [3, 4, 5, 9] -> (3, 6), (9, 10)."""
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for part in np.split(rows, breaks):
        step = at_most or len(part)
        for first in range(0, len(part), step):
            piece = part[first : first + step]
            yield int(piece[0]), int(piece[-1]) + 1


def copy_shard(
    shard: Shard, path: Path, *, compress: str | None = None, pending: NDArray[np.int64] | None = None
) -> None:
    """Write a copy of a shard, complete or not at all.

    Args:
        shard: the shard to copy.
        path: path of the copy; a file of that name is replaced.
        compress: "gzip", "lzf" or "blosc2"; None writes a plain copy, whose rows can be changed.
        pending: rows, relative to the shard, that are pending in the copy. Rows that cannot be read are pending, too.

    Raises:
        UnknownNameError: no such compression.
        LayertapError: the disk is full or cannot be written to, or a library for the compression is missing.
    """
    n_rows = len(shard)
    layouts = [
        _packed((chunk_rows(feature, n_rows), *feature.kept_shape), compress)
        if compress
        else preallocated((chunk_rows(feature, n_rows), *feature.kept_shape))
        for feature in shard.features
    ]
    keep = np.ones(n_rows, bool)
    keep[[] if pending is None else pending] = False
    with new_shard_file(path, shard.features, layouts, shard.identity, _names_of(shard), shard.provenance) as file:
        for start, stop, block in shard.blocks(np.flatnonzero(keep)):
            if block is None:
                keep[start:stop] = False
                continue
            for name, values in block.items():
                file["features"][name][start:stop] = values
        for name, *_ in ROW_DATA:
            values = shard.column(name)
            values[~keep] = 0  # a status of 0 is pending
            file[name][...] = values


def _names_of(shard: Shard) -> RowNames:
    """Return what is known of all rows before their features are computed."""
    ids = shard.text("id") if shard.has_ids else None
    columns = {
        name.removeprefix(f"/{COLUMNS}/"): shard.text(name) if dtype.kind == "S" else shard.column(name)
        for name, dtype in shard.kept_columns.items()
    }
    return RowNames(shard.text("path"), shard.column("label"), shard.text("split"), shard.text("classes"), ids, columns)


def _packed(chunks: tuple[int, ...], compress: str) -> Any:
    """Return creation properties: shuffle, compression, and a checksum that is verified before decompression."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(chunks)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compress == "blosc2":
        need_libraries(compress)
        import hdf5plugin

        options = hdf5plugin.Blosc2(cname="zstd", clevel=5, filters=hdf5plugin.Blosc2.SHUFFLE)
        properties.set_filter(options.filter_id, h5py.h5z.FLAG_MANDATORY, options.filter_options)
    elif compress in COMPRESSIONS:
        properties.set_shuffle()
        if compress == "gzip":
            properties.set_deflate(4)
        else:
            properties.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
    else:
        raise unknown_name("compression", compress, COMPRESSIONS)
    properties.set_fletcher32()
    return properties
