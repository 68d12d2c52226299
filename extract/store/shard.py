"""One shard, open for reading. Files are not trusted: each is checked before anything in it is believed.

HDF5 is asked once where everything lies. What is stored without compression is then read through a memory map, which
is as fast as `np.load`, needs no lock, and may be shared between threads and over a fork; only compressed features are
read through HDF5.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import h5py
import numpy as np
from h5py import h5a, h5d, h5l, h5s, h5t, h5z
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, first_line
from extract.store.layout import (
    FORMAT,
    FORMAT_VERSION,
    ROW_DATA,
    Extent,
    Identity,
    RowNames,
    StoredFeature,
    chunk_rows,
    extent_of,
    read_header,
    row_bytes,
)

__all__ = ["BLOCK_BYTES", "FILTERS", "Shard", "need_libraries", "runs"]

# What a feature may have been packed with, by HDF5's number of the filter.
FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_LZF: "lzf", 32026: "blosc2"}
_HARMLESS = {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}

_FEATURES = 10_000  # in one file
_TEXT_BYTES = 1 << 24  # of the provenance
_CHUNK_BYTES = 1 << 26  # of a compressed chunk of more than one row
_ROW_BYTES = 1 << 32
BLOCK_BYTES = 1 << 26  # of features, held in memory at once
_WORTH_ASKING = 1 << 20  # bytes from which on the kernel is told what is about to be read


class Shard:
    """A finished shard, or one being written; a context manager. It can be pickled, shared by threads, and forked.

    Args:
        path: the file.

    Attributes:
        path: the file.
        identity: which shard of which data set it says it is.
        features: what it holds, sorted by name.
        compression: name of the feature -> "gzip", "lzf" or "blosc2", for those that are compressed.
        chunks: name of the feature -> rows in a chunk.
        stored_bytes: name of the feature -> bytes in the file.
        offsets: "/features/NAME", "/status", ... -> first byte in the file, for what is stored plain.

    Raises:
        InputError: it is not there, no shard, damaged, or holds what a shard has no need of.
        LayertapError: it cannot be read, or a library for its compression is missing.
    """

    def __init__(self, path: Path):
        self.path = path
        self._packed: tuple[int, h5py.File] | None = None
        self._guard = threading.Lock()
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise InputError(f"{path} is no file")
            with path.open("rb") as raw:
                read_header(raw, path)
                self._mapping = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
                with _opened(path) as file:
                    self._describe(file)
        except FileNotFoundError as error:
            raise InputError(f"{path} does not exist") from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else first_line(error)
            raise LayertapError(f"{path} cannot be read: {reason}") from error

    def _describe(self, file: h5py.File) -> None:
        """Take over what the file says, after checking it."""
        path = self.path

        def refuse(what: str) -> InputError:
            return InputError(f"{path} is refused: {what}")

        self.identity = _identity(file, refuse)
        n_rows = self.identity.n_rows
        group = _child(file, "features", h5py.Group, refuse)
        if not 1 <= len(group) <= _FEATURES:
            raise refuse(f"it has {len(group):,} features")
        self.features: list[StoredFeature] = []
        self.compression: dict[str, str] = {}
        self.chunks: dict[str, int] = {}
        self.stored_bytes: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        for name in sorted(group):
            data = _child(group, name, h5py.Dataset, refuse)
            if data.dtype not in (np.dtype("<f4"), np.dtype("<f2")):
                raise refuse(f"feature {name!r} is {data.dtype}; expected float32 or float16")
            if not data.shape or data.shape[0] != n_rows or (data.chunks or data.shape)[1:] != data.shape[1:]:
                raise refuse(f"feature {name!r} has shape {data.shape} in chunks {data.chunks}, with {n_rows} rows")
            feature = StoredFeature(name, data.shape[1:], data.dtype.name, _attributes(data))
            self.chunks[name] = data.chunks[0] if data.chunks else chunk_rows(feature, n_rows)
            chunk_bytes = feature.row_bytes * self.chunks[name]
            if feature.row_bytes > _ROW_BYTES or chunk_bytes > max(_CHUNK_BYTES, feature.row_bytes):
                raise refuse(f"feature {name!r} is in chunks of {data.chunks}")
            self.features.append(feature)
            self.stored_bytes[name] = data.id.get_storage_size()
            used = _filters(data, refuse)
            if used - _HARMLESS:
                self.compression[name] = FILTERS[(used - _HARMLESS).pop()]
                if data.id.get_num_chunks() != -(-n_rows // data.chunks[0]):
                    raise refuse(f"feature {name!r} has {data.id.get_num_chunks():,} chunks for {n_rows:,} rows")
            else:
                self._arrays[name] = self._mapped(data, extent_of(data), refuse)
        self._feature = {feature.name: feature for feature in self.features}
        self._columns: dict[str, NDArray[Any]] = {}
        for name, width, dtype in (*ROW_DATA, ("label", (), "<i8")):
            self._columns[name] = self._column(file, name, refuse)
            if self._columns[name].shape != (n_rows, *width) or self._columns[name].dtype != np.dtype(dtype):
                raise refuse(f"{name} is {self._columns[name].dtype} {self._columns[name].shape}; expected {dtype}")
        for name, shape in (("path", (n_rows,)), ("split", (n_rows,)), ("classes", None), ("provenance", ())):
            self._columns[name] = column = self._column(file, name, refuse)
            if column.dtype.kind != "S" or column.shape != (column.shape[:1] if shape is None else shape):
                raise refuse(f"{name} is {column.dtype} {column.shape}; expected text of fixed length")
        if self._columns["provenance"].nbytes > _TEXT_BYTES:
            raise refuse(f"provenance of {self._columns['provenance'].nbytes:,} bytes")

    def _column(self, file: h5py.File, name: str, refuse: Any) -> NDArray[Any]:
        data = _child(file, name, h5py.Dataset, refuse)
        if data.chunks is not None:
            raise refuse(f"{name} is in chunks")
        _filters(data, refuse)
        return self._mapped(data, extent_of(data), refuse)

    def _mapped(self, data: h5py.Dataset, extent: Extent, refuse: Any) -> NDArray[Any]:
        """A plain data set as an array over the file itself."""
        if data.size == 0:
            return np.empty(data.shape, data.dtype)
        needed = int(np.prod(data.shape, dtype=object)) * data.dtype.itemsize
        if extent.size < needed or extent.offset + needed > len(self._mapping) or not extent.whole:
            raise refuse(f"{data.name} says it has {needed:,} bytes; they are not in the file, or not in order")
        self.offsets[data.name] = extent.offset
        return np.ndarray(data.shape, data.dtype, self._mapping, extent.offset)

    # Rows

    def __len__(self) -> int:
        return self.identity.n_rows

    def read(self, name: str, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """(stop - start, *shape): neighbouring rows, copied; into `out`, where that is given."""
        if name in self.compression:
            rows = self._unpack(name, start, stop)
        else:
            rows = self._arrays[name][start:stop]
            if rows.nbytes > _WORTH_ASKING and hasattr(mmap, "MADV_WILLNEED"):
                self._advise(rows, mmap.MADV_WILLNEED)
        if out is None:
            return rows if name in self.compression else rows.copy()
        out[...] = rows
        return out

    def row(self, name: str, row: int) -> NDArray[Any]:
        """(*shape): one row, copied."""
        if name in self.compression:
            found: NDArray[Any] = self._unpack(name, row, row + 1)[0]
        else:
            found = self._arrays[name][row].copy()
        return found

    def take(self, name: str, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """(len(rows), *shape): rows in any order, copied; into `out`, where that is given. They must be in range."""
        if out is None:
            feature = self._feature[name]
            out = np.empty((len(rows), *feature.shape), feature.dtype)
        if name not in self.compression:
            # "clip" writes straight into `out`, four times as fast as through a buffer (NumPy, "take").
            np.take(self._arrays[name], rows, axis=0, out=out, mode="clip")
            return out
        home = rows // self.chunks[name]
        order = np.argsort(home, kind="stable")
        for first, stop in _equal(home[order]):  # each chunk is unpacked once
            where = order[first:stop]
            first_row = int(rows[where].min())
            out[where] = self._unpack(name, first_row, int(rows[where].max()) + 1)[rows[where] - first_row]
        return out

    def blocks(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, int, dict[str, NDArray[Any]] | None]]:
        """Ascending rows in runs of neighbours that memory can hold: (start, stop, name -> features of these rows).

        None instead of the features says that some of them are damaged, and cannot be unpacked.

        Raises:
            LayertapError: a library for the compression is missing.
        """
        self.need_libraries()
        at_most = max(1, BLOCK_BYTES // max(1, row_bytes(self.features)))
        for name in self.compression:  # a damaged chunk takes no others with it
            at_most = min(at_most, self.chunks[name])
        for start, stop in runs(rows, at_most):
            try:
                block = {feature.name: self.read(feature.name, start, stop) for feature in self.features}
            except InputError:
                yield start, stop, None
                continue
            yield start, stop, block
            for name in block:
                self.forget(name, start, stop)

    def forget(self, name: str, start: int, stop: int) -> None:
        """Take rows that have been read out of this process's memory; the file stays in the kernel's cache."""
        if name in self._arrays and hasattr(mmap, "MADV_DONTNEED"):
            self._advise(self._arrays[name][start:stop], mmap.MADV_DONTNEED)

    def _advise(self, rows: NDArray[Any], advice: int) -> None:
        start = rows.__array_interface__["data"][0] - np.frombuffer(self._mapping, np.uint8, 1).ctypes.data
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(advice, page, start + rows.nbytes - page)

    def _unpack(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of a compressed feature; HDF5's handles do not survive a fork, so each process opens its own."""
        self.need_libraries()
        with self._guard:
            if self._packed is None or self._packed[0] != os.getpid():
                # Chunks are read whole, so that HDF5's own cache of them would only be a copy.
                try:
                    self._packed = os.getpid(), h5py.File(self.path, "r", locking=False, rdcc_nbytes=0)
                except OSError as error:
                    raise LayertapError(f"{self.path} cannot be read: {first_line(error)}") from error
            try:
                found: NDArray[Any] = self._packed[1]["features"][name][start:stop]
            except OSError as error:
                raise InputError(
                    f"{self.path} is damaged: {name!r} cannot be unpacked in rows {start} to {stop - 1}"
                ) from error
            return found

    def need_libraries(self) -> None:
        """See that what was compressed can be unpacked.

        Raises:
            LayertapError: a library is not installed.
        """
        for compression in self.compression.values():
            need_libraries(compression)

    # What is beside the features

    def column(self, name: str) -> NDArray[Any]:
        """(N, ...): status, row_hash, source_size, source_mtime_ns, source_hash or label, as it is now; a copy."""
        return self._columns[name].copy()

    def text(self, name: str, rows: slice | NDArray[np.int64] | EllipsisType = ...) -> list[str]:
        """The path or split of rows, or the classes, as `os.fsdecode` gives them."""
        return [os.fsdecode(value) for value in self._columns[name][rows].tolist()]

    @property
    def names(self) -> RowNames:
        """Paths, labels, splits and classes."""
        return RowNames(self.text("path"), self.column("label"), self.text("split"), self.text("classes"))

    @property
    def provenance(self) -> dict[str, Any]:
        """What the features were made from and with.

        Raises:
            InputError: it is no JSON object.
        """
        try:
            content = json.loads(self._columns["provenance"].item())
            if isinstance(content, dict):
                return content
        except (ValueError, RecursionError):
            pass
        raise InputError(f"{self.path} is damaged: its provenance is no JSON object")

    # Life

    def close(self) -> None:
        """Give the file back; arrays that were taken from it stay valid."""
        self._arrays, self._columns = {}, {}
        packed, self._packed = self._packed, None
        if packed is not None and packed[0] == os.getpid():
            packed[1].close()
        with contextlib.suppress(BufferError):  # an array over it is in use: the last one closes it
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.identity)


def _reopened(path: Path, identity: Identity) -> Shard:
    shard = Shard(path)
    if shard.identity != identity:
        raise InputError(f"{path} is another shard now than the one that was pickled")
    return shard


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        if error.errno:  # the system's word, not HDF5's
            raise
        raise InputError(f"{path} cannot be opened as HDF5: {first_line(error)}") from error
    try:
        with file:
            yield file
    except (RuntimeError, KeyError, ValueError, TypeError, OSError) as error:
        if isinstance(error, LayertapError):
            raise
        raise InputError(f"{path} is damaged: {first_line(error)}") from error


def need_libraries(compression: str | None) -> None:
    """Make HDF5 know a compression.

    Raises:
        LayertapError: the library it needs is not installed.
    """
    if compression == "blosc2":
        try:
            import hdf5plugin  # noqa: F401
        except ImportError as error:
            raise LayertapError("blosc2 needs hdf5plugin: pip install 'layertap[blosc2]'") from error


def _child(group: h5py.Group, name: str, kind: type, refuse: Any) -> Any:
    """A member that lies in this file itself: no soft or external link, no external storage, no virtual data set."""
    if name.encode() not in group.id:
        raise refuse(f"it has no {name!r}")
    if group.id.links.get_info(name.encode()).type != h5l.TYPE_HARD:
        raise refuse(f"{name!r} is a link to elsewhere")
    child = group[name]
    if not isinstance(child, kind):
        raise refuse(f"{name!r} is a {type(child).__name__.lower()}")
    if isinstance(child, h5py.Dataset):
        properties = child.id.get_create_plist()
        if properties.get_layout() == h5d.VIRTUAL:
            raise refuse(f"{name!r} is a virtual data set")
        if properties.get_external_count():
            raise refuse(f"{name!r} keeps its data in other files")
        if properties.get_layout() == h5d.COMPACT:
            raise refuse(f"{name!r} is stored in its own header")
        of = child.id.get_type()
        if of.get_class() not in (h5t.INTEGER, h5t.FLOAT, h5t.STRING) or (
            isinstance(of, h5t.TypeStringID) and of.is_variable_str()
        ):
            raise refuse(f"{name!r} is neither of numbers nor of text of fixed length")
    return child


def _filters(data: h5py.Dataset, refuse: Any) -> set[int]:
    properties = data.id.get_create_plist()
    used = {properties.get_filter(i)[0] for i in range(properties.get_nfilters())}
    if unknown := used - _HARMLESS - FILTERS.keys():
        raise refuse(f"{data.name} went through a filter that layertap does not know (number {min(unknown)})")
    if len(used - _HARMLESS) > 1 or (data.chunks is None and used) or (used and not used - _HARMLESS):
        raise refuse(f"{data.name} went through the filters {sorted(used)}")
    return used


def _identity(file: h5py.File, refuse: Any) -> Identity:
    values = {name: _attribute(file, name) for name in ("format", "format_version", *Identity.__annotations__)}
    if (values.pop("format"), values.pop("format_version")) != (FORMAT, FORMAT_VERSION):
        raise refuse(f"its attributes do not say {FORMAT}, format_version {FORMAT_VERSION}")
    numbers = {name: value for name, value in values.items() if isinstance(value, int)}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    if numbers.keys() != {"shard", "first_row", "n_rows"} or texts.keys() != {"fingerprint", "images"}:
        raise refuse(f"its attributes are {values}")
    if numbers["n_rows"] < 1 or numbers["first_row"] < 0 or numbers["shard"] < 0:
        raise refuse(
            f"it says it is shard {numbers['shard']}, from row {numbers['first_row']}, of {numbers['n_rows']} rows"
        )
    return Identity(numbers["shard"], numbers["first_row"], numbers["n_rows"], texts["fingerprint"], texts["images"])


def _attributes(data: h5py.Dataset) -> dict[str, str]:
    names = [h5a.open(data.id, index=i).name.decode() for i in range(min(64, h5a.get_num_attrs(data.id)))]
    return {name: value for name in names if isinstance(value := _attribute(data, name), str)}


def _attribute(of: h5py.File | h5py.Dataset, name: str) -> str | int | None:
    """A single number or text; None for anything else, which is not even read."""
    if not h5a.exists(of.id, name.encode()):
        return None
    attribute = h5a.open(of.id, name.encode())
    kind, space = attribute.get_type(), attribute.get_space()
    if space.get_simple_extent_type() != h5s.SCALAR or kind.get_size() > 1 << 16:
        return None
    if kind.get_class() == h5t.INTEGER:
        return int(of.attrs[name])
    if kind.get_class() == h5t.STRING:
        value = of.attrs[name]
        return os.fsdecode(value) if isinstance(value, bytes) else str(value)
    return None


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


def _equal(values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of positions that hold the same value, of a sorted array: [4, 4, 7] -> (0, 2), (2, 3)."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    yield from ((a, b) for a, b in itertools.pairwise(edges) if a < b)
