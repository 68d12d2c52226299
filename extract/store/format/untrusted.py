"""Checks of the content of a shard: HDF5 files are not trusted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
from h5py import h5a, h5d, h5l, h5s, h5t, h5z

from extract.errors import InputError, LayertapError, first_line
from extract.store.format.layout import FORMAT, READABLE_VERSIONS, VERSIONS_TEXT, Identity
from extract.system.optional_libraries import library

__all__ = [
    "FILTERS",
    "Refuse",
    "attributes_of",
    "filters_of",
    "identity_of",
    "member",
    "need_libraries",
    "open_untrusted",
]

Refuse = Callable[[str], InputError]  # description of a fault -> error that also names the file

# Supported compressions, by HDF5 filter number.
FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_LZF: "lzf", 32026: "blosc2"}
_BESIDE = {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}


@contextlib.contextmanager
def open_untrusted(path: Path | str, source: Any = None) -> Iterator[h5py.File]:
    """Context manager: open an HDF5 file for reading, and turn any error in the block into an InputError.

    Args:
        path: path or URL of the file.
        source: file object to read the bytes from, if they are not in a local file.

    Raises:
        InputError: the file is not HDF5, or is damaged.
        OSError: the file cannot be opened, with an error number of the system.
    """
    try:
        try:
            file = h5py.File(source or path, "r", locking=False)
        except OSError as error:
            if source or "locking flag values" not in str(error):
                raise
            file = h5py.File(path, "r")  # this process has already opened it with h5py itself, with a lock
    except OSError as error:
        if error.errno:  # an error of the system, not of HDF5
            raise
        raise InputError(f"{path} cannot be opened as HDF5: {first_line(error)}") from error
    try:
        with file:
            yield file
    except LayertapError:
        raise
    except Exception as error:  # h5py raises errors of many types on malformed files
        raise InputError(f"{path} is damaged: {first_line(error)}") from error


def need_libraries(compression: str | None) -> None:
    """Import the library that a compression needs, which registers it with HDF5.

    Raises:
        LayertapError: the library is not installed.
    """
    if compression == "blosc2":
        library("hdf5plugin", "blosc2", "blosc2")


def member(group: h5py.Group, name: str, kind: type, refuse: Refuse) -> Any:
    """Return a member stored in the file itself; refuse links, external storage and virtual or compact datasets."""
    if name.encode() not in group.id:
        raise refuse(f"it has no {name!r}")
    if group.id.links.get_info(name.encode()).type != h5l.TYPE_HARD:
        raise refuse(f"{name!r} is a soft or external link")
    child = group[name]
    if not isinstance(child, kind):
        raise refuse(f"{name!r} is a {type(child).__name__.lower()}; expected a {kind.__name__.lower()}")
    if isinstance(child, h5py.Dataset):
        properties = child.id.get_create_plist()
        if properties.get_layout() == h5d.VIRTUAL:
            raise refuse(f"{name!r} is a virtual dataset")
        if properties.get_external_count():
            raise refuse(f"{name!r} stores its data in external files")
        if properties.get_layout() == h5d.COMPACT:
            raise refuse(f"{name!r} has a compact layout, in its own header")
        stored_type = child.id.get_type()
        if stored_type.get_class() not in (h5t.INTEGER, h5t.FLOAT, h5t.STRING) or (
            isinstance(stored_type, h5t.TypeStringID) and stored_type.is_variable_str()
        ):
            raise refuse(f"{name!r} holds neither numbers nor fixed-length text")
    return child


def filters_of(data: h5py.Dataset, refuse: Refuse) -> str | None:
    """Return the compression of a dataset, None if it is plain; refuse unknown filters and a missing checksum."""
    properties = data.id.get_create_plist()
    used = {properties.get_filter(i)[0] for i in range(properties.get_nfilters())}
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
    values = {name: _attribute(file, name) for name in ("format", "format_version", *Identity.__annotations__)}
    if values.pop("format") != FORMAT or values.pop("format_version") not in READABLE_VERSIONS:
        raise refuse(f"its attributes do not give format {FORMAT!r}, format_version {VERSIONS_TEXT}")
    numbers = {name: value for name, value in values.items() if isinstance(value, int)}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    if numbers.keys() != {"shard", "first_row", "n_rows"} or texts.keys() != {"fingerprint", "images"}:
        raise refuse(f"its attributes are missing or have other types: {values}")
    if numbers["n_rows"] < 1 or numbers["first_row"] < 0 or numbers["shard"] < 0:
        raise refuse(f"its attributes are out of range: {numbers}")
    return Identity(numbers["shard"], numbers["first_row"], numbers["n_rows"], texts["fingerprint"], texts["images"])


def attributes_of(data: h5py.Dataset) -> dict[str, str]:
    """Return the text attributes among the first 64 attributes of a dataset."""
    names = [h5a.open(data.id, index=i).name.decode() for i in range(min(64, h5a.get_num_attrs(data.id)))]
    return {name: value for name in names if isinstance(value := _attribute(data, name), str)}


def _attribute(owner: h5py.File | h5py.Dataset, name: str) -> str | int | None:
    """Return an attribute that is one integer or text; any other attribute is not read, and None is returned."""
    if not h5a.exists(owner.id, name.encode()):
        return None
    attribute = h5a.open(owner.id, name.encode())
    stored_type, space = attribute.get_type(), attribute.get_space()
    if space.get_simple_extent_type() != h5s.SCALAR or stored_type.get_size() > 1 << 16:
        return None
    if stored_type.get_class() == h5t.INTEGER:
        return int(owner.attrs[name])
    if stored_type.get_class() == h5t.STRING:
        value = owner.attrs[name]
        return os.fsdecode(value) if isinstance(value, bytes) else str(value)
    return None
