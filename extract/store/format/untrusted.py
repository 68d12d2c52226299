"""What a shard may hold: HDF5 files are not trusted, and everything is looked at before it is believed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
from h5py import h5a, h5d, h5l, h5s, h5t, h5z

from extract.errors import InputError, LayertapError, first_line
from extract.store.format.layout import FORMAT, FORMAT_VERSION, Identity
from extract.system.optional_libraries import library

__all__ = ["FILTERS", "Refuse", "attributes_of", "filters_of", "identity_of", "member", "need_libraries", "opened"]

Refuse = Callable[[str], InputError]  # what is wrong -> the error that names the file, too

# What a feature may have been packed with, by HDF5's number of the filter.
FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_LZF: "lzf", 32026: "blosc2"}
_BESIDE = {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}


@contextlib.contextmanager
def opened(path: Path | str, source: Any = None) -> Iterator[h5py.File]:
    """The file, open for reading while it is described; whatever goes wrong in it is an InputError.

    Args:
        path: its name.
        source: reads its bytes, where they are in no file of this machine.
    """
    try:
        try:
            file = h5py.File(source or path, "r", locking=False)
        except OSError as error:
            if source or "locking flag values" not in str(error):
                raise
            file = h5py.File(path, "r")  # this process has it open already, by h5py alone and with a lock
    except OSError as error:
        if error.errno:  # the system's word, not HDF5's
            raise
        raise InputError(f"{path} cannot be opened as HDF5: {first_line(error)}") from error
    try:
        with file:
            yield file
    except LayertapError:
        raise
    except Exception as error:  # h5py answers a strange file with errors of many kinds
        raise InputError(f"{path} is damaged: {first_line(error)}") from error


def need_libraries(compression: str | None) -> None:
    """Make HDF5 know a compression.

    Raises:
        LayertapError: the library it needs is not installed.
    """
    if compression == "blosc2":
        library("hdf5plugin", "blosc2", "blosc2")


def member(group: h5py.Group, name: str, kind: type, refuse: Refuse) -> Any:
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


def filters_of(data: h5py.Dataset, refuse: Refuse) -> str | None:
    """What a data set was packed with; None if it is plain."""
    properties = data.id.get_create_plist()
    used = {properties.get_filter(i)[0] for i in range(properties.get_nfilters())}
    if not used:
        return None
    if unknown := used - _BESIDE - FILTERS.keys():
        raise refuse(f"{data.name} went through a filter that layertap does not know (number {min(unknown)})")
    # The checksum goes first when it is read, so that nothing damaged is unpacked.
    if len(used - _BESIDE) != 1 or data.chunks is None or h5z.FILTER_FLETCHER32 not in used:
        raise refuse(f"{data.name} went through the filters {sorted(used)}; expected one, with a checksum")
    return FILTERS[(used - _BESIDE).pop()]


def identity_of(file: h5py.File, refuse: Refuse) -> Identity:
    """Which shard of which data set a file says it is."""
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


def attributes_of(data: h5py.Dataset) -> dict[str, str]:
    """The attributes of a data set that are text, at most 64."""
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
