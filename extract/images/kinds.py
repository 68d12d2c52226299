"""Classify a place of images as a folder, list, archives or array; build the error for a place without images."""

from __future__ import annotations

import os
import re
from collections import Counter

from extract.errors import InputError
from extract.images.archives import ARCHIVES
from extract.images.arrays import split_name
from extract.images.csv_lists import TABLES
from extract.images.hugging_face import PROTOCOL
from extract.system.urls import is_url

__all__ = ["is_file_of_images", "kind_of", "no_images"]

_ARRAYS = (".npy", ".h5", ".hdf5")


def kind_of(where: str) -> str:
    """Return "folder", "list", "archives", "array" or "Hugging Face" for a path, pattern or URL; a plan is a folder.

    Raises:
        InputError: an array behind a URL, or a compressed tar.
    """
    suffix = _suffix(where)
    if where.startswith(PROTOCOL):
        return "Hugging Face"
    if not is_url(where) and os.path.isdir(where):  # noqa: PTH112
        return "folder"
    if suffix in ARCHIVES:
        return "archives"
    if suffix in TABLES:
        return "list"
    if suffix in _ARRAYS or split_name(where)[1]:
        if is_url(where):
            raise InputError(
                f"{where}: arrays are read from local files only",
                hint="copy it to this machine, or name a folder, list or archive",
            )
        return "array"
    if re.search(r"\.(tgz|tbz2?|txz|tar\.\w+)$", where, re.IGNORECASE):
        raise InputError(
            f"{where}: images cannot be read from the middle of a compressed tar", hint="decompress it to a .tar first"
        )
    return "folder"


def no_images(where: str, left_out: Counter[str]) -> InputError:
    """Return the error for a place whose files are all counted in `left_out`, as none of them is an image."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in left_out.most_common(5))
    count = left_out.total()
    seen = (
        f"none of its {count:,} files is an image ({kinds})"
        if count > 1
        else f"its only file is not an image ({kinds})"
    )
    if not kinds:
        seen = "the folder is empty" if os.path.isdir(where) else "it is empty"  # noqa: PTH112
    hint = "images end in .jpg, .png, .tif, .webp and others" if kinds else ""
    if any(left_out[suffix] for suffix in ARCHIVES):
        hint = f"to read archives, give a pattern, such as '{where}/*.tar'"
    return InputError(f"{where}: no images; {seen}", hint=hint)


def _suffix(where: str) -> str:
    suffix = os.path.splitext(where)[1].lower()  # noqa: PTH122  it may be a URL
    if is_url(where) and suffix not in (*ARCHIVES, *TABLES, *_ARRAYS):  # the suffix may precede a query
        return os.path.splitext(where.partition("?")[0])[1].lower()  # noqa: PTH122
    return suffix


def is_file_of_images(root: str) -> bool:
    """Return whether a name is that of a list, archive or array."""
    names = (*ARCHIVES, *TABLES, *_ARRAYS)
    return root.lower().endswith(names) or root.startswith(PROTOCOL) or bool(split_name(root)[1])
