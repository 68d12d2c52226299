"""Names and descriptions of backbones, kept in the user's cache folder.

timm and torchvision give their lists only after an import that takes seconds, and most descriptions are made by
building the model. What they gave is kept: one file for each source, `catalogue/SOURCE-DIGEST.json`. Nothing here
imports PyTorch.

The digest covers the version of PyTorch and the name, size and time of every source file of the packages that define
the backbones, and of this one. A package that is installed again, or edited in place, therefore has another file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from extract.backbones.catalogue_entry import Entry
from extract.backbones.sources import SOURCES
from extract.errors import InputError
from extract.system.json_files import parse_json
from extract.system.optional_libraries import library
from extract.system.user_cache import keep_newest, read_cached, write_cached

__all__ = ["backbone_names", "keep_entries", "kept_entries", "kept_names"]

_FOLDER = "catalogue"
_MOST_BYTES = 16 << 20  # a file has at most 1 MB: the descriptions of all models of timm
_OWN_PACKAGE = "extract"
_ENTRY = {"spec": str, "width": (int, None), "input_px": ([int], None), "parameters": int, "licence": str,
          "weights": [str]}  # fmt: skip
_SHAPE = {"names": {str: [str]}, "entries": [_ENTRY]}


@dataclass
class _Kept:
    """Content of the file of one source.

    Attributes:
        names: names without tags, under "names", and with tags, under "tags"; either may be missing.
        entries: spec -> description, of those that were asked for so far.
    """

    names: dict[str, list[str]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)


def backbone_names(source: str, pattern: str) -> list[str]:
    """Return the known names of a source that may match a pattern, as `BackboneSource.names` does.

    Raises:
        LayertapError: the library of the source is not installed.
    """
    record = SOURCES[source]
    if not record.defined_in:
        return record.names(pattern)
    if record.library and importlib.util.find_spec(record.defined_in[0]) is None:
        library(record.defined_in[0], source, f"{source}/")  # raises the error that names the command to install it
    names = kept_names(source, pattern)
    if names is None:
        names = record.names(pattern)
        _keep(source, _Kept(names={_group(source, pattern): names}))
    return names


def kept_names(source: str, pattern: str = "*") -> list[str] | None:
    """Return the names that `backbone_names` would return, if they are kept, else None; no library is imported."""
    return _read(source).names.get(_group(source, pattern))


def kept_entries(source: str) -> dict[str, Entry]:
    """Return spec -> description of the backbones of a source that were described earlier."""
    return _read(source).entries


def keep_entries(source: str, entries: dict[str, Entry]) -> None:
    """Keep descriptions, spec -> description, if `defined_in` of the source is set and the folder can be written."""
    _keep(source, _Kept(entries=entries))


def _group(source: str, pattern: str) -> str:
    mark = SOURCES[source].tag_mark
    return "tags" if mark and mark in pattern else "names"


def _keep(source: str, more: _Kept) -> None:
    file = _file_of(source)
    if file is None:
        return
    kept = _read(source)
    kept.names |= more.names
    kept.entries |= more.entries
    text = json.dumps({"names": kept.names, "entries": [asdict(entry) for entry in kept.entries.values()]})
    body = text.encode()
    if write_cached(file, hashlib.sha256(body).hexdigest().encode() + b"\n" + body):
        keep_newest(_FOLDER, _MOST_BYTES)


def _read(source: str) -> _Kept:
    """Return what is kept; nothing if the file is missing or damaged."""
    file = _file_of(source)
    digest, _, body = ((file and read_cached(file)) or b"").partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return _Kept()
    try:
        content = parse_json(body, file or "", _SHAPE)
    except InputError:  # written by something else
        return _Kept()
    return _Kept(content["names"], {values["spec"]: _entry(values) for values in content["entries"]})


def _entry(values: dict[str, Any]) -> Entry:
    known = ((each.name, values[each.name]) for each in fields(Entry))
    return Entry(**{name: tuple(value) if isinstance(value, list) else value for name, value in known})  # type: ignore[arg-type]


def _file_of(source: str) -> str | None:
    """Return the name of the file; None if the source is not kept, or a package has no source files to look at."""
    if not SOURCES[source].defined_in:
        return None
    digest = hashlib.sha256(_version("torch"))
    for package in (_OWN_PACKAGE, *SOURCES[source].defined_in):
        stamps = list(_stamps(package))
        if not stamps:
            return None
        digest.update("\n".join((package, repr(_version(package)), *stamps)).encode(errors="surrogateescape"))
    return f"{_FOLDER}/{source}-{digest.hexdigest()[:32]}.json"


def _stamps(package: str) -> Iterator[str]:
    """Yield the path, size and time in ns of each source file of a package; 5 ms for timm."""
    for folder in _folders(package):
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".json")):
                    path = os.path.join(parent, name)  # noqa: PTH118, a tenth of the time of Path
                    with contextlib.suppress(FileNotFoundError):  # the package is being installed
                        status = os.stat(path)  # noqa: PTH116
                        yield f"{path} {status.st_size} {status.st_mtime_ns}"


def _version(package: str) -> bytes:
    """Return the content of `version.py`, which PyTorch, torchvision, timm and open_clip have."""
    files = [path for folder in _folders(package) if (path := Path(folder) / "version.py").is_file()]
    return files[0].read_bytes() if files else b""


def _folders(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or []) if spec is not None else []
