"""The file format, version 1, and the creation of shards.

A data set is a folder:

    dataset.json          its content, and what the features depend on (extract/store/format/dataset.py)
    shards/000000.h5      a finished shard: the name is the commit
    shards/000000.json    its receipt: size, sha256, rows by status, label and split, why rows failed
    shards/000001.h5.part a shard being written, or left by an interrupted run
    shards/000002-r1.h5   a finished shard that was rewritten to fill failed rows; -r2: a second time
    axes/HASH.safetensors principal axes of features with a pooling pcaK (extract/compute/principal_axes.py)

A shard is plain HDF5 (superblock 3, HDF5 1.10 or later) with rows in path order:

    /                     attributes: format="layertap", format_version=1, shard, first_row, n_rows, fingerprint,
                          images (xxh3-128 of all paths of the data set)
    /features/NAME        (N, *shape) float32 or float16, or as in extract/store/format/value_types.py, chunks of whole
                          rows; attributes: layer, pooling, axes ("C", "CHW", "HWC", "TC"), source_dtype; perhaps
                          grid: rows and columns of its positions, as in "14,14"; prefix: tokens before the patch
                          tokens, as in "class,other"; principal_axes: sha256 of their file
    /path                 (N,) fixed-length UTF-8: relative to the image folder, the bytes of the file name
    /label                (N,) int64, index into /classes; -1 unknown
    /split                (N,) fixed-length UTF-8: train, val, test or empty
    /id                   (N,) fixed-length UTF-8; only if the list of images has ids
    /columns/NAME         (N,) fixed-length UTF-8, int64 or float64: further columns of the list that were kept
    /classes              (K,) fixed-length UTF-8
    /status               (N,) uint8: 0 pending, 1 ok, 2 decode error, 3 not finite, 4 missing,
                          5 io error
    /row_hash             (N,) uint64: xxh3-64 over the bytes of the row's features, in sorted order of names
    /record_hash          (N,) uint64: xxh3-64 over path, a zero byte, row_hash, source_size, source_mtime_ns,
                          source_hash and status
    /source_size          (N,) int64 bytes; -1 no file          /source_mtime_ns  (N,) int64; -1 no file or unknown
    /source_hash          (N, 16) uint8: xxh3-128 of the file, big-endian; 0 no file
    /provenance           JSON text: what the features depend on, backbone, weights, configuration, versions, machine

All numbers are little-endian. Readers ignore unknown attributes and datasets. Features of rows with status 2, 4 and 5
are NaN, or the smallest number of the type if they are whole numbers.

A shard is created at full size before the first image is read. Without compression, the chunks of a feature are
contiguous (HDF5's implicit chunk index), so a feature is one array in the file. After creation, only the bytes of
features, status, row_hash, record_hash and source_* change; they are written in place, without HDF5. So a kill cannot
leave the structures of HDF5 half changed, a full disk is an OSError in place of a crash of HDF5, and readers need no
lock. Superblock 3 has checksums of all structures. Text has a fixed length, because HDF5 stores other text in a heap
without checksums, where one file can make many rows point to one large text.

A user block of text, which HDF5 skips, precedes the HDF5 data. Its first line is

    layertap shard, format 1; HDF5 begins at byte 512

Its second line is JSON: `size` of the file, `row_data` (ascending byte ranges that are written after creation), and
`fixed_xxh3`, the xxh3-128 of all other bytes after the user block. A reader that verifies it never passes a damaged
structure to HDF5, which can crash or hang on it: of 12,000 files with one to eight changed bytes in their structures,
it hung on 4 (HDF5 2.0; of an older file format, it crashed on 7 and hung on 3).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.store.format.checked_file import hdf5_in_memory, hdf5_on_disk
from extract.system.atomic_files import allocate, discard, flush_to_disk, reserve_space, sync_folder

__all__ = [
    "CHANGES_VERSION",
    "COLUMNS",
    "FORMAT",
    "FORMAT_VERSION",
    "READABLE_VERSIONS",
    "REPAIR_HINT",
    "ROW_DATA",
    "VERSIONS_TEXT",
    "WHOLE_TYPES",
    "Identity",
    "RowNames",
    "StoredFeature",
    "chunk_rows",
    "create_shard",
    "encoded_texts",
    "feature_types",
    "kept_as",
    "new_shard_file",
    "plain_offset",
    "preallocated",
    "read_as",
    "read_header",
    "read_layout",
    "row_bytes",
]

FORMAT = "layertap"
FORMAT_VERSION = 1  # of files that are written
READABLE_VERSIONS = (1,)  # every version that was ever written: its data sets stay readable
CHANGES_VERSION = 2  # of a `dataset.json` whose version has a table of changes; its shards are of the versions above
VERSIONS_TEXT = " or ".join(map(str, READABLE_VERSIONS))
REPAIR_HINT = "run `layertap verify OUT --repair`, then the command that created the data set"
WHOLE_TYPES = ("int32", "int64")  # of features that are whole numbers

# Chunks of 0.5 to 1 MB, full width: measured on (80k, 1280) float16, such chunks write at disk speed and read at
# 11.8 GB/s; chunks of one row are 4 and 32 times slower, h5py's own guess 2 and 4 times.
_CHUNK_BYTES = 1 << 20

# Limit on the bytes that do not change after creation: opening a shard hashes them.
_FIXED_BYTES = 1 << 30
# Group of kept columns. They are in the shard, so that merged data sets and buckets have them, and h5py reads them.
COLUMNS = "columns"
AXES_FOLDER = "axes"  # of a data set
AXES_NAMES = re.compile(r"[0-9a-f]{16}\.safetensors|(axes\.)?fitting\.[0-9a-f]{16}\.new")  # files in it
_TEXTS_AT_ONCE = 1 << 16  # paths, splits or ids in memory while they are written

# Datasets other than features that are written row by row; datasets with 8-byte rows come first, for alignment.
ROW_DATA: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("record_hash", (), "<u8"),
    ("row_hash", (), "<u8"),
    ("source_size", (), "<i8"),
    ("source_mtime_ns", (), "<i8"),
    ("source_hash", (16,), "u1"),
    ("status", (), "u1"),
)


def kept_as(value_type: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype in the file, and the shape of a row in it, of features with this shape."""
    if value_type == "int8":
        return np.dtype([("scale", "<f4"), ("values", "i1", shape)]), ()
    return np.dtype("<u2" if value_type == "bfloat16" else value_type).newbyteorder("<"), shape


def read_as(value_type: str) -> str:
    """Return the dtype of the values that readers return and writers take."""
    return value_type if value_type in ("float32", "float16", *WHOLE_TYPES) else "float32"


@dataclass(frozen=True)
class StoredFeature:
    """HDF5 dataset of one feature.

    Attributes:
        name: name in the file and in the reader.
        shape: shape of one row.
        dtype: one of `STORED_TYPES`.
        attributes: HDF5 attributes of the dataset, see above.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.kept_shape) * self.kept_dtype.itemsize

    @property
    def value_dtype(self) -> str:
        """Dtype of the values that readers return and writers take."""
        return read_as(self.dtype)

    @property
    def blank(self) -> NDArray[Any]:
        """Row without values (*shape): NaN, or the smallest of whole numbers."""
        dtype = np.dtype(self.value_dtype)
        return np.full(self.shape, np.iinfo(dtype).min if dtype.kind == "i" else np.nan, dtype)

    @property
    def kept_dtype(self) -> np.dtype[Any]:
        """Dtype in the file."""
        return kept_as(self.dtype, self.shape)[0]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of a row in the file."""
        return kept_as(self.dtype, self.shape)[1]


@dataclass(frozen=True)
class Identity:
    """Attributes of a shard's file, which identify the shard and its data set.

    Attributes:
        shard: number of the shard in the data set.
        first_row: row of the data set that is row 0 of the shard.
        n_rows: rows in the shard.
        fingerprint: fingerprint of the data set.
        images: xxh3-128 of all paths of the data set.
    """

    shard: int
    first_row: int
    n_rows: int
    fingerprint: str
    images: str


@dataclass(frozen=True)
class RowNames:
    """Paths, labels, splits, ids and kept columns of rows, known before their features are computed.

    Attributes:
        paths: relative to the image folder; undecodable bytes as in `os.fsdecode`.
        labels: (N,) int64, index into `classes`; -1 unknown.
        splits: "train", "val", "test" or "" for each row.
        classes: names of the classes.
        ids: ids from the list of images; None if it has none.
        columns: name -> text, int64 or float64 of each row, of kept columns.
    """

    paths: Sequence[str]
    labels: NDArray[np.int64]
    splits: Sequence[str]
    classes: Sequence[str]
    ids: Sequence[str] | None = None
    columns: Mapping[str, Sequence[str] | NDArray[Any]] = field(default_factory=dict)


def row_bytes(features: Sequence[StoredFeature]) -> int:
    """Return the bytes of one row over all features."""
    return sum(feature.row_bytes for feature in features)


def feature_types(features: Sequence[StoredFeature]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return feature -> (shape, dtype). Attributes are left out: later versions store more of them."""
    return {feature.name: (feature.shape, feature.dtype) for feature in features}


def chunk_rows(feature: StoredFeature, n_rows: int) -> int:
    """Return the rows of a chunk: the power of two for chunks of 0.5 to 1 MB, at least 1, at most `n_rows`."""
    rows = 1 << max(0, (_CHUNK_BYTES // max(1, feature.row_bytes)).bit_length() - 1)
    return max(1, min(rows, n_rows))


def create_shard(
    path: Path, features: Sequence[StoredFeature], identity: Identity, names: RowNames, provenance: dict[str, Any]
) -> None:
    """Create a shard at `path` (which ends in `.part`), at full size and with every row pending.

    The disk space is allocated here, so a full disk is detected before the first image is read. If the process dies
    inside this call, no file of that name exists.

    Raises:
        InputError: the paths of the rows take too many bytes for one file.
        LayertapError: there is not enough disk space, or the folder cannot be written to.
    """
    layouts = [preallocated((chunk_rows(feature, identity.n_rows), *feature.kept_shape)) for feature in features]
    with new_shard_file(path, features, layouts, identity, names, provenance):
        pass


@contextmanager
def new_shard_file(
    path: Path,
    features: Sequence[StoredFeature],
    layouts: Sequence[Any],
    identity: Identity,
    names: RowNames,
    provenance: dict[str, Any],
) -> Iterator[h5py.File]:
    """Context manager: yield a new shard to write features to, and give it its name at the end, complete or not at all.

    Args:
        path: final name; a file of that name is replaced.
        features: the features to create.
        layouts: HDF5 creation properties of each feature's dataset.
        identity: attributes of the file.
        names: paths, labels, splits, classes, ids and kept columns of the rows.
        provenance: backbone, weights, configuration, versions, machine.

    Raises:
        InputError: the paths of the rows take too many bytes for one file.
        LayertapError: there is not enough disk space, or the folder cannot be written to.
    """
    if h5py.version.hdf5_version_tuple[:3] < (1, 14, 4):
        # Rows are written where HDF5 says that they are; these versions omit the user block (HDF5 issue 3003).
        raise LayertapError(
            f"HDF5 {h5py.version.hdf5_version} reports wrong offsets of features",
            hint="install another version of h5py",
        )
    n_rows = identity.n_rows
    texts, numbers = _columns_of(names)
    widths = {name: max(map(len, encoded_texts(text)), default=1) or 1 for name, text in texts.items()}
    text_bytes = sum(widths[name] * len(text) for name, text in texts.items())
    if text_bytes > _FIXED_BYTES:  # every path takes the space of the longest
        raise InputError(
            f"{path}: paths and columns take {text_bytes / 1e6:,.0f} MB, too much for one file",
            hint="set a smaller shard_rows",
        )
    encoded_provenance = np.array(json.dumps(provenance, indent=1).encode())
    header_bytes = 512
    while header_bytes < 256 + 48 * (len(features) + len(ROW_DATA)):  # 48: two numbers of up to 20 digits
        header_bytes *= 2
    n_datasets = len(features) + len(names.columns)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        # About its size: HDF5 must not meet a full disk in the middle of its work.
        reserve_space(temporary, text_bytes + n_rows * row_bytes(features) + (1 << 20))
        options: dict[str, Any] = {"libver": ("v110", "v110"), "alignment_threshold": 64, "alignment_interval": 64}
        # All metadata in one block at the start, so that the data after it has no gaps.
        meta_block_size = 1 << (4096 + 2048 * n_datasets).bit_length()
        with hdf5_in_memory(temporary, userblock_size=header_bytes, meta_block_size=meta_block_size, **options) as file:
            file.attrs.update(format=FORMAT, format_version=FORMAT_VERSION)
            file.attrs.update(vars(identity))
            group = file.create_group("features")
            for feature, layout in zip(features, layouts, strict=True):
                shape = (n_rows, *feature.kept_shape)
                data = group.create_dataset(feature.name, shape, feature.kept_dtype, dcpl=layout)
                data.attrs.update(feature.attributes)
            for name, width, row_dtype in ROW_DATA:
                file.create_dataset(name, (n_rows, *width), row_dtype, dcpl=preallocated(None), fillvalue=0)
            for name, text in texts.items():
                text_type = h5py.string_dtype("utf-8", widths[name])
                file.create_dataset(name, len(text), text_type, dcpl=preallocated(None))
            text_type = h5py.string_dtype("utf-8", encoded_provenance.dtype.itemsize)
            fixed = {**numbers, "provenance": encoded_provenance.astype(text_type)}
            for name, values in fixed.items():
                file.create_dataset(name, values.shape, values.dtype, dcpl=preallocated(None))
        with hdf5_on_disk(temporary, "r+", **options) as file:
            for name, text in texts.items():
                _write_text(file[name], text)
            for name, values in fixed.items():
                file[name][...] = values
            yield file
            file.flush()  # assigns the offsets of compressed chunks
            written = [file["features"][feature.name] for feature in features]
            ranges = [_range_of(data) for data in (*written, *(file[name] for name, *_ in ROW_DATA))]
        with temporary.open("r+b") as raw:
            allocate(raw.fileno(), os.fstat(raw.fileno()).st_size)
            _write_header(raw, header_bytes, ranges)
            flush_to_disk(raw.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise LayertapError(f"cannot create {path}: {reason}") from error
    finally:
        discard(temporary)


def _columns_of(names: RowNames) -> tuple[dict[str, Sequence[str]], dict[str, NDArray[Any]]]:
    """Return text and numbers of rows, by the name of their dataset."""
    texts = {"path": names.paths, "split": names.splits, "classes": names.classes}
    if names.ids is not None:
        texts["id"] = names.ids
    numbers = {"label": np.asarray(names.labels, "<i8")}
    for name, column in names.columns.items():
        if isinstance(column, np.ndarray):
            numbers[f"{COLUMNS}/{name}"] = column.astype(column.dtype.newbyteorder("<"))
        else:
            texts[f"{COLUMNS}/{name}"] = column
    return texts, numbers


def _write_text(data: h5py.Dataset, text: Sequence[str]) -> None:
    for start in range(0, len(text), _TEXTS_AT_ONCE):
        encoded = encoded_texts(text[start : start + _TEXTS_AT_ONCE])
        data[start : start + len(encoded)] = np.array(encoded, data.dtype)


def encoded_texts(texts: Sequence[str]) -> list[bytes]:
    """Return the bytes of texts, as `os.fsencode`; all at once, which takes a tenth of the time."""
    encoded = os.fsencode("\0".join(texts)).split(b"\0")
    return encoded if len(encoded) == len(texts) else list(map(os.fsencode, texts))


def preallocated(chunks: tuple[int, ...] | None) -> Any:
    """Return creation properties that allocate space early and do not fill it: a new file is zero."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if chunks is not None:
        properties.set_chunk(chunks)
    return properties


def plain_offset(data: h5py.h5d.DatasetID, chunks: tuple[int, ...] | None) -> int | None:
    """Return the offset in the file of an uncompressed dataset with contiguous rows; None if it has no such offset.

    Args:
        data: the dataset.
        chunks: shape of a chunk; None: it is contiguous.
    """
    if chunks is None:
        offset: int | None = data.get_offset()
        return offset
    rows, count, shape = chunks[0], data.get_num_chunks(), data.shape
    full = math.prod(chunks) * data.dtype.itemsize
    if count != -(-shape[0] // rows):
        return None
    zeros = (0,) * (len(shape) - 1)
    first, last = (data.get_chunk_info_by_coord((row, *zeros)) for row in (0, (count - 1) * rows))
    if (first.size, last.size, last.byte_offset - first.byte_offset) != (full, full, (count - 1) * full):
        return None
    return int(first.byte_offset)


def _range_of(data: h5py.Dataset) -> tuple[int, int]:
    """Return the byte range (start, stop) of a dataset; other bytes may lie between its chunks."""
    if data.chunks is None:
        offset = data.id.get_offset() or 0
        return offset, offset + data.id.get_storage_size()
    chunks: list[Any] = []
    data.id.chunk_iter(chunks.append)
    if not chunks:  # HDF5 could not read where they are, and does not say so
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return min(chunk.byte_offset for chunk in chunks), max(chunk.byte_offset + chunk.size for chunk in chunks)


# The user block


def _write_header(raw: BinaryIO, header_bytes: int, ranges: Iterable[tuple[int, int]]) -> None:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    size = os.fstat(raw.fileno()).st_size
    fixed_xxh3 = _hash_fixed(raw, _between(header_bytes, size, merged))
    content = {"size": size, "row_data": merged, "fixed_xxh3": fixed_xxh3}
    title = f"{FORMAT} shard, format {FORMAT_VERSION}; HDF5 begins at byte {header_bytes}\n"
    text = title.encode() + json.dumps(content).encode() + b"\n"
    raw.seek(0)
    raw.write(text.ljust(header_bytes, b"\0"))
    raw.flush()


def read_header(raw: BinaryIO, path: Path | str) -> list[tuple[int, int]]:
    """Return the byte ranges that are written after creation, after verifying that all other bytes are unchanged.

    Raises:
        InputError: the file is not a shard of this format, or bytes that must not change have changed.
    """
    fixed, row_data, fixed_xxh3 = read_layout(raw, path)
    if fixed_xxh3 != _hash_fixed(raw, fixed):
        raise InputError(f"{path} is damaged: its paths, labels or structure do not match their hash", hint=REPAIR_HINT)
    return row_data


def read_layout(raw: BinaryIO, path: Path | str) -> tuple[list[tuple[int, int]], list[tuple[int, int]], Any]:
    """Read the user block.

    Returns:
        The byte ranges that do not change after creation, those that are written, and the hash of the former.

    Raises:
        InputError: the file is not a shard of this format, or has another size.
    """
    head = raw.read(512)
    title = re.match(rb"layertap shard, format (\d+); HDF5 begins at byte (\d{3,7})\n", head)
    if not title:
        raise InputError(f"{path} is not a layertap shard")
    if int(title[1]) not in READABLE_VERSIONS:
        raise InputError(f"{path} has format {int(title[1])}; this version of layertap reads format {VERSIONS_TEXT}")
    header_bytes = int(title[2])
    head += raw.read(max(0, header_bytes - len(head)))
    size = raw.seek(0, os.SEEK_END)
    try:
        content = json.loads(head[title.end() : header_bytes].rstrip(b"\0"))
        expected, ranges = int(content["size"]), [(int(first), int(stop)) for first, stop in content["row_data"]]
        edges = [header_bytes, *(edge for byte_range in ranges for edge in byte_range), expected]
        if edges != sorted(edges) or expected - sum(stop - first for first, stop in ranges) > 2 * _FIXED_BYTES:
            raise ValueError
        fixed_xxh3 = content["fixed_xxh3"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise InputError(
            f"{path} is damaged: its first {header_bytes} bytes are not a valid header", hint=REPAIR_HINT
        ) from None
    if size != expected:
        raise InputError(f"{path} is damaged: it has {size:,} bytes, expected {expected:,}", hint=REPAIR_HINT)
    return _between(header_bytes, size, ranges), ranges, fixed_xxh3


def _between(header_bytes: int, size: int, row_data: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the byte ranges after the user block without the row data."""
    starts = [header_bytes, *(stop for _, stop in row_data)]
    return list(zip(starts, [*(first for first, _ in row_data), size], strict=True))


def _hash_fixed(raw: BinaryIO, fixed: Iterable[tuple[int, int]]) -> str:
    """Return the xxh3-128 of byte ranges."""
    digest = xxhash.xxh3_128()
    for start, stop in fixed:
        raw.seek(start)
        while start < stop:
            block = raw.read(min(1 << 20, stop - start))
            if not block:
                break
            digest.update(block)
            start += len(block)
    return digest.hexdigest()
