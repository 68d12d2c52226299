"""A shard in a bucket, checked and open for reading by byte ranges, through the block cache on the local disk.

The columns beside the features are read when the shard is opened, and held in memory; features are read on demand.
HDF5 never waits for the network: it holds a global lock, which garbage collection in any other thread may need,
including fsspec's. HDF5 reads only blocks in memory; if blocks are missing, they are fetched and HDF5 is called again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.store.format.checked_file import Seekable
from extract.store.format.layout import Identity, before_hdf5, read_header
from extract.store.format.shard import Shard, runs
from extract.store.format.untrusted import open_untrusted
from extract.store.places.block_cache import BLOCK_BYTES, BlockCache, RemoteFile

__all__ = ["RemoteShard"]

_PREFETCHED = 8  # blocks that `take` fetches concurrently


class RemoteShard(Shard):
    """A finished shard in a bucket; a context manager. Instances can be pickled, shared by threads, and forked.

    Args:
        file: the object.
        receipt: content of its receipt.
        cache: the block cache to read through.

    Attributes:
        receipt: content of its receipt.

    Raises:
        InputError, LayertapError: see `Shard`; or the store does not answer.
    """

    def __init__(self, file: RemoteFile, receipt: dict[str, Any], cache: BlockCache):
        self._initialise(file.url)
        self.receipt, self.size = receipt, file.size
        self._file, self._cache = file, cache
        self._chunk_ranges: dict[str, NDArray[np.int64]] = {}
        self._lock = os.getpid(), threading.Lock()
        block_file = _BlockFile(file, cache)
        buffered = io.BufferedReader(block_file)
        self._row_data = read_header(buffered, file.url)
        buffered.detach()  # otherwise its finaliser closes `bytes_of`
        block_file.fetching = False  # HDF5 reads from here on
        while True:
            try:
                with open_untrusted(file.url, block_file) as hdf5_file:
                    self._describe(hdf5_file)
                    for name in self.compression:
                        self._chunk_ranges[name] = _chunks_of(hdf5_file["features"][name])
                break
            except (LayertapError, OSError):
                if not block_file.fetch_missing():
                    raise
        self._packed_bytes = _BlockFile(file, cache, fetching=False)

    @property
    def is_part(self) -> bool:
        """Always False; see `Shard`."""
        return False

    def _array_at(self, start: int | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Read a plain dataset into memory; None as `start` gives an array without bytes."""
        values = np.empty(shape, dtype)
        if start is not None:
            self._cache.read(self._file, start, start + values.nbytes, _bytes_of(values))
        return values

    # Rows

    def read(self, name: str, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """See `Shard.read`."""
        if name in self.compression:
            return super().read(name, start, stop, out)
        feature = self._feature[name]
        if out is None or not out.flags.c_contiguous:
            rows = np.empty((stop - start, *feature.kept_shape), feature.kept_dtype)
        else:
            rows = out
        self._fill(name, start, stop, rows)
        if out is not None and rows is not out:
            out[...] = rows
            return out
        return rows

    def _fill(self, name: str, start: int, stop: int, out: NDArray[Any]) -> None:
        if not self._columns:
            raise LayertapError(f"{self.name} is closed")
        first, row_bytes = self.offsets[f"/features/{name}"], self._feature[name].row_bytes
        self._cache.read(self._file, first + start * row_bytes, first + stop * row_bytes, _bytes_of(out))

    def mapped(self, name: str, sample: NDArray[np.int64]) -> NDArray[Any] | None:
        """Always None; see `Shard.mapped`."""
        return None

    def row(self, name: str, row: int) -> NDArray[Any]:
        """See `Shard.row`."""
        values: NDArray[Any] = self.read(name, row, row + 1)[0]
        return values

    def take(self, name: str, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """See `Shard.take`. Rows are read in file order, and several blocks are fetched concurrently."""
        if name in self.compression:
            return super().take(name, rows, out)
        feature = self._feature[name]
        unique_rows, inverse = np.unique(rows, return_inverse=True)
        values = np.empty((len(unique_rows), *feature.kept_shape), feature.kept_dtype)
        starts = self.offsets[f"/features/{name}"] + unique_rows * feature.row_bytes
        blocks = np.unique([starts // BLOCK_BYTES, (starts + feature.row_bytes - 1) // BLOCK_BYTES])
        n_read, expected = 0, -1
        for first, stop in runs(unique_rows):
            block = int(np.searchsorted(blocks, starts[n_read] // BLOCK_BYTES))
            if block != expected and len(blocks) > 1:
                self._cache.prefetch(self._file, blocks[block : block + _PREFETCHED].tolist())
                expected = block
            self._fill(name, first, stop, values[n_read : n_read + stop - first])
            n_read += stop - first
        if out is None:
            return values[inverse]
        np.take(values, inverse, axis=0, out=out, mode="clip")
        return out

    @contextlib.contextmanager
    def _reopened(self) -> Iterator[int | None]:
        yield None

    def prefetch(self, name: str, start: int, stop: int) -> None:
        """Do nothing: no file is mapped. See `Shard.prefetch`."""

    def forget(self, name: str, start: int, stop: int) -> None:
        """Do nothing: no file is mapped. See `Shard.forget`."""

    def _unpack(self, name: str, start: int, stop: int) -> NDArray[Any]:
        if self._lock[0] != os.getpid():  # forked, perhaps while another thread held the lock
            self._lock = os.getpid(), threading.Lock()
        chunk_rows = self.chunks[name]
        with self._lock[1]:
            try:
                chunks = slice(start // chunk_rows, -(-stop // chunk_rows))
                for chunk_start, chunk_stop in self._chunk_ranges[name][chunks].tolist():
                    self._packed_bytes.hold(chunk_start, chunk_stop)
                while True:
                    try:
                        return super()._unpack(name, start, stop)
                    except LayertapError:
                        if not self._packed_bytes.fetch_missing():
                            raise
            finally:
                self._packed_bytes.forget()

    def _source(self) -> io.RawIOBase:
        return self._packed_bytes

    # Closing and pickling

    def close(self) -> None:
        """See `Shard.close`."""
        self._columns = {}
        packed, self._packed = self._packed, None
        if packed is not None and packed[0] == os.getpid():
            packed[1].close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._file, self.receipt, self._cache, self.identity)


class _BlockFile(Seekable):
    """File object over an object in a bucket; some of its blocks are held in memory.

    Attributes:
        fetching: whether a read fetches a block that is not in memory; otherwise the read fails, and the block is
            recorded for `fetch_missing`.
    """

    def __init__(self, file: RemoteFile, cache: BlockCache, *, fetching: bool = True):
        super().__init__(file.size)
        self._file, self._cache, self.fetching = file, cache, fetching
        self._blocks: dict[int, bytearray] = {}
        self._missing: list[int] = []

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        stop = min(self._position + len(out), self._file.size)
        n_read = 0
        while self._position < stop:
            number, within = divmod(self._position, BLOCK_BYTES)
            if number not in self._blocks:
                if not self.fetching:
                    self._missing.append(number)
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                self._hold(number)
            piece = memoryview(self._blocks[number])[within : within + stop - self._position]
            out[n_read : n_read + len(piece)] = piece
            self._position, n_read = self._position + len(piece), n_read + len(piece)
        return n_read

    def hold(self, start: int, stop: int) -> None:
        """Load the blocks of a byte range into memory."""
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if number not in self._blocks:
                self._hold(number)

    def _hold(self, number: int) -> None:
        start, stop = self._file.block(number)
        content = bytearray(stop - start)
        self._cache.read(self._file, start, stop, memoryview(content))
        self._blocks[number] = content

    def fetch_missing(self) -> bool:
        """Load the blocks recorded as missing since the last call; return False if there were none."""
        missing, self._missing = self._missing, []
        for number in missing:
            self._hold(number)
        return bool(missing)

    def forget(self) -> None:
        """Release the blocks in memory."""
        self._blocks = {}


def _bytes_of(values: NDArray[Any]) -> memoryview:
    return memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _chunks_of(data: h5py.Dataset) -> NDArray[np.int64]:
    """Return (chunks, 2) int64, the byte range (start, stop) of each chunk in the file, in row order."""
    ranges: dict[int, tuple[int, int]] = {}

    def note(chunk: Any) -> None:
        ranges[chunk.chunk_offset[0]] = chunk.byte_offset, chunk.byte_offset + chunk.size

    data.id.chunk_iter(note)
    return np.array([ranges[row] for row in sorted(ranges)], np.int64) + before_hdf5(data.file.id)


def _unpickled(file: RemoteFile, receipt: dict[str, Any], cache: BlockCache, identity: Identity) -> RemoteShard:
    shard = RemoteShard(file, receipt, cache)
    if shard.identity != identity:
        raise InputError(
            f"{file.url} was replaced by another shard after the reader was pickled", hint="open the data set again"
        )
    return shard
