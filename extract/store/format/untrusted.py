"""Checks of the content of a shard: HDF5 files are not trusted."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5p, h5s, h5t, h5z

from extract.errors import InputError, LayertapError, first_line
from extract.store.format.layout import COLUMNS, FORMAT, READABLE_VERSIONS, VERSIONS_TEXT, Identity
from extract.system.optional_libraries import library

__all__ = [
    "FILTERS",
    "Refuse",
    "StoredDataset",
    "attributes_of",
    "dataset_in",
    "filters_of",
    "group_in",
    "identity_of",
    "kept_columns_in",
    "need_libraries",
    "open_untrusted",
]

Refuse = Callable[[str], InputError]  # description of a fault -> error that also names the file

# Supported compressions, by HDF5 filter number.
FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_LZF: "lzf", 32026: "blosc2"}
_COLUMNS = 1_000  # limit for one file
_BESIDE = {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}


@contextlib.contextmanager
def open_untrusted(path: Path, name: str) -> Iterator[h5py.File]:
    """Context manager: open an HDF5 file for reading, and turn any error in the block into an InputError.

    Args:
        path: the file.
        name: its path or URL, for errors.

    Raises:
        InputError: the file is not HDF5, or is damaged.
        OSError: the file cannot be opened, with an error number of the system.
    """
    try:
        try:
            file = h5py.File(path, "r", locking=False)
        except OSError as error:
            if "locking flag values" not in str(error):
                raise
            file = h5py.File(path, "r")  # this process has already opened it with h5py itself, with a lock
    except OSError as error:
        if error.errno:  # an error of the system, not of HDF5
            raise
        raise InputError(f"{name} cannot be opened as HDF5: {first_line(error)}") from error
    try:
        with file:
            yield file
    except LayertapError:
        raise
    except Exception as error:  # h5py raises errors of many types on malformed files
        raise InputError(f"{name} is damaged: {first_line(error)}") from error


def need_libraries(compression: str | None) -> None:
    """Import the library that a compression needs, which registers it with HDF5.

    Raises:
        LayertapError: the library is not installed.
    """
    if compression == "blosc2":
        library("hdf5plugin", "blosc2", "blosc2")


_FIELDS = 2  # of a record: scale and values


@dataclass(frozen=True)
class StoredDataset:
    """A dataset of numbers or fixed-length text, stored in the file itself. A data set has thousands of them.

    HDF5's own objects are used, because those of h5py take five times as long to open.

    Attributes:
        id: the dataset.
        name: its path in the file.
        shape: its shape.
        dtype: its type.
        properties: how it was created.
        chunks: shape of a chunk; None: it is contiguous.
    """

    id: h5d.DatasetID
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    properties: h5p.PropDCID
    chunks: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def group_in(parent: h5g.GroupID, name: str, refuse: Refuse) -> h5g.GroupID:
    """Return a group stored in the file itself; refuse links."""
    return _member(parent, name, h5g.GroupID, "group", refuse)


def dataset_in(parent: h5g.GroupID, name: str, refuse: Refuse, path: str = "") -> StoredDataset:
    """Return a dataset stored in the file itself; refuse links, external storage and virtual or compact datasets.

    Args:
        parent: the group that has it.
        name: its name there.
        refuse: makes the error.
        path: path of the group, without a slash at the end.
    """
    data = _member(parent, name, h5d.DatasetID, "dataset", refuse)
    properties, stored_type = data.get_create_plist(), data.get_type()
    layout = properties.get_layout()
    if layout == h5d.VIRTUAL:
        raise refuse(f"{name!r} is a virtual dataset")
    if properties.get_external_count():
        raise refuse(f"{name!r} stores its data in external files")
    if layout == h5d.COMPACT:
        raise refuse(f"{name!r} has a compact layout, in its own header")
    if not (_is_plain(stored_type) or (path == "/features" and _is_record(stored_type))):
        raise refuse(f"{name!r} holds neither numbers nor fixed-length text")
    chunks = properties.get_chunk() if layout == h5d.CHUNKED else None
    return StoredDataset(data, f"{path}/{name}", data.shape, stored_type.dtype, properties, chunks)


def kept_columns_in(file: h5py.File, n_rows: int, refuse: Refuse) -> Iterator[StoredDataset]:
    """Yield the kept columns of a shard; refuse those of other types, sizes and layouts than the format has."""
    if COLUMNS not in file:
        return
    group = group_in(file.id, COLUMNS, refuse)
    if (count := group.get_num_objs()) > _COLUMNS:
        raise refuse(f"it has {count:,} kept columns; expected at most {_COLUMNS:,}")
    for name in sorted(encoded.decode() for encoded in group):
        data = dataset_in(group, name, refuse, f"/{COLUMNS}")
        if data.chunks is not None or data.shape != (n_rows,):
            raise refuse(
                f"{data.name} has shape {data.shape}, chunks {data.chunks}; expected one block of {n_rows} rows"
            )
        if data.dtype.kind != "S" and data.dtype not in (np.dtype("<i8"), np.dtype("<f8")):
            raise refuse(f"{data.name} is {data.dtype}; expected fixed-length text, int64 or float64")
        yield data


def _is_plain(stored_type: h5t.TypeID) -> bool:
    """Return whether a type is of numbers or of fixed-length text."""
    if stored_type.get_class() == h5t.STRING:
        return not stored_type.is_variable_str()
    return stored_type.get_class() in (h5t.INTEGER, h5t.FLOAT)


def _is_record(stored_type: h5t.TypeID) -> bool:
    """Return whether a type is of records with a few fields, of numbers or of arrays of numbers."""
    if stored_type.get_class() != h5t.COMPOUND or stored_type.get_nmembers() > _FIELDS:
        return False
    fields = [stored_type.get_member_type(number) for number in range(stored_type.get_nmembers())]
    numbers = [field.get_super() if field.get_class() == h5t.ARRAY else field for field in fields]
    return all(number.get_class() in (h5t.INTEGER, h5t.FLOAT) for number in numbers)


def _member(parent: h5g.GroupID, name: str, kind: type, words: str, refuse: Refuse) -> Any:
    encoded = name.encode()
    if encoded not in parent:
        raise refuse(f"it has no {name!r}")
    if parent.links.get_info(encoded).type != h5l.TYPE_HARD:
        raise refuse(f"{name!r} is a soft or external link")
    child = h5o.open(parent, encoded)
    if not isinstance(child, kind):
        raise refuse(f"{name!r} is not a {words}")
    return child


def filters_of(data: StoredDataset, refuse: Refuse) -> str | None:
    """Return the compression of a dataset, None if it is plain; refuse unknown filters and a missing checksum."""
    used = {data.properties.get_filter(i)[0] for i in range(data.properties.get_nfilters())}
    if not used:
        return None
    if unknown := used - _BESIDE - FILTERS.keys():
        raise refuse(f"{data.name} uses an HDF5 filter that layertap does not support (number {min(unknown)})")
    # HDF5 verifies the checksum before it decompresses, so damaged bytes are never decompressed.
    if len(used - _BESIDE) != 1 or data.chunks is None or h5z.FILTER_FLETCHER32 not in used:
        raise refuse(f"{data.name} uses the HDF5 filters {sorted(used)}; expected one compression, with a checksum")
    return FILTERS[(used - _BESIDE).pop()]


def identity_of(file: h5py.File, refuse: Refuse) -> Identity:
    """Return the shard and data set that a file's attributes name."""
    root = file.id
    names = [name.encode() for name in ("format", "format_version", *Identity.__annotations__)]
    values = {name.decode(): _value(h5a.open(root, name)) if h5a.exists(root, name) else None for name in names}
    if values.pop("format") != FORMAT or values.pop("format_version") not in READABLE_VERSIONS:
        raise refuse(f"its attributes do not give format {FORMAT!r}, format_version {VERSIONS_TEXT}")
    numbers = {name: value for name, value in values.items() if isinstance(value, int)}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    if numbers.keys() != {"shard", "first_row", "n_rows"} or texts.keys() != {"fingerprint", "images"}:
        raise refuse(f"its attributes are missing or have other types: {values}")
    if numbers["n_rows"] < 1 or numbers["first_row"] < 0 or numbers["shard"] < 0:
        raise refuse(f"its attributes are out of range: {numbers}")
    return Identity(numbers["shard"], numbers["first_row"], numbers["n_rows"], texts["fingerprint"], texts["images"])


def attributes_of(data: StoredDataset) -> dict[str, str]:
    """Return the text attributes among the first 64 attributes of a dataset."""
    attributes = [h5a.open(data.id, index=i) for i in range(min(64, h5a.get_num_attrs(data.id)))]
    values = {attribute.name.decode(): _value(attribute) for attribute in attributes}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _value(attribute: h5a.AttrID) -> str | int | None:
    """Return an attribute that is one integer or text; any other attribute is not read, and None is returned."""
    stored_type = attribute.get_type()
    kind = stored_type.get_class()
    if kind not in (h5t.INTEGER, h5t.STRING) or stored_type.get_size() > 1 << 16:
        return None
    if attribute.get_space().get_simple_extent_type() != h5s.SCALAR:
        return None
    holder = np.empty((), stored_type.dtype)
    attribute.read(holder)
    if kind == h5t.INTEGER:
        return int(holder)
    value: Any = holder[()]
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)
