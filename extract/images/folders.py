"""Images below a folder, here or behind a URL."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from extract.errors import InputError, LayertapError, first_line
from extract.images.decoding import IMAGE_SUFFIXES
from extract.images.image_list import Images, is_litter, labels_from_folders, order_of
from extract.images.sources import Files
from extract.system.urls import file_system, is_url

__all__ = [
    "entries_below",
    "files_behind",
    "files_below",
    "in_byte_order",
    "list_folder",
    "other_suffix",
    "pick_images",
]

Entry = TypeVar("Entry")


def list_folder(where: str) -> Images:
    """Every image below a folder; links are followed, hidden files and litter left out, other files counted.

    A file is a folder of one image.
    """
    if is_url(where):
        root, names = where.rstrip("/"), _names_behind(where)
    else:
        folder = Path(where)
        if folder.is_file() and folder.suffix.lower() in IMAGE_SUFFIXES:
            root, paths = str(folder.parent.resolve()), [folder.name]
            return Images(root, paths, np.full(1, -1, np.int64), [], [""], Files(root, paths))
        if not folder.is_dir():
            there = "not an image, folder, list, archive or array"
            raise InputError(f"{where}: {there if folder.exists() else 'no such folder or file'}")
        root, names = str(folder.resolve()), files_below(where)
    paths, left_out = pick_images(names)
    paths = [paths[i] for i in order_of(paths)]
    labels, classes, splits = labels_from_folders(paths)
    return Images(root, paths, labels, classes, splits, Files(root, paths), left_out=left_out)


def pick_images(names: Iterable[str]) -> tuple[list[str], Counter[str]]:
    """Those that end as images do, and how many others there are, by suffix."""
    paths: list[str] = []
    left_out: Counter[str] = Counter()
    for name in names:
        if other := other_suffix(name):
            left_out[other] += 1
        else:
            paths.append(name)
    return paths, left_out


def other_suffix(name: str) -> str:
    """How a file ends that is no image; empty: it is one."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  a Path for each of a million files is slow
    return "" if suffix in IMAGE_SUFFIXES else suffix or "no suffix"


def files_below(root: str, after: bytes = b"") -> Iterator[str]:
    """Relative paths of all files below a folder, in the order of their bytes."""

    def refuse(folder: str, error: OSError) -> None:
        where = os.path.join(root, folder)  # noqa: PTH118
        raise InputError(f"{where}: the folder cannot be read: {error.strerror}") from error

    for relative, _ in entries_below(root, refuse, after):
        yield relative


def entries_below(
    root: str, on_unreadable: Callable[[str, OSError], None], after: bytes = b""
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files below a folder, as (relative path, entry); hidden files and litter are left out.

    Links are followed, but not into a folder that holds them. The order is that of the bytes of the paths.

    Args:
        root: the folder.
        on_unreadable: called with the relative path of a folder that cannot be read, and why.
        after: as of `in_byte_order`.
    """
    trail: list[tuple[str, tuple[int, int]]] = []  # the folders that are being looked through, with their identities

    def look(folder: str) -> list[tuple[str, bool, os.DirEntry[str]]]:
        full = os.path.join(root, folder.rstrip("/"))  # noqa: PTH118
        while trail and not folder.startswith(trail[-1][0]):
            trail.pop()
        try:
            here = os.stat(full)  # noqa: PTH116
            identity = (here.st_dev, here.st_ino)
            if any(identity == above for _, above in trail):
                return []
            with os.scandir(full) as scan:
                entries = [entry for entry in scan if not is_litter(entry.name)]
        except OSError as error:
            on_unreadable(folder.rstrip("/"), error)
            return []
        trail.append((folder, identity))
        return [(entry.name, _is_folder(entry), entry) for entry in entries]

    return in_byte_order(look, after)


def in_byte_order(
    look: Callable[[str], Iterable[tuple[str, bool, Entry]]], after: bytes = b""
) -> Iterator[tuple[str, Entry]]:
    """All files of a tree, as (relative path, entry), in the order of the bytes of their paths.

    What lies in a folder sorts as `NAME/` among its neighbours: "a-b", then "a/b", then "a0". So folders can be looked
    into one by one when it is their turn, and no more than the entries of those above a file are in memory.

    Args:
        look: the name of each entry of a folder (the empty one, or one that ends in `/`), whether it is a folder, and
            what is to come with it.
        after: only files whose path comes after these bytes; folders that end before them are not looked into.
    """

    def turned(folder: str) -> list[tuple[bytes, str, bool, Entry]]:
        found = []
        for name, is_folder, entry in look(folder):
            path = f"{folder}{name}/" if is_folder else folder + name
            found.append((os.fsencode(path), path, is_folder, entry))
        found.sort(key=operator.itemgetter(0), reverse=True)
        return found

    waiting = turned("")
    while waiting:
        key, path, is_folder, entry = waiting.pop()
        if is_folder:
            if key > after or after.startswith(key):
                waiting += turned(path)
        elif key > after:
            yield path, entry


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _names_behind(url: str) -> Iterator[str]:
    """Names of all files behind a URL, relative to it."""
    fs, path = file_system(url)
    try:
        found = fs.find(path) or fs.ls(path, detail=False)  # `find` takes a server that does not answer for empty
    except FileNotFoundError as error:
        raise InputError(f"{url}: no such folder or file") from error
    except Exception as error:  # each protocol's library has errors of its own
        raise LayertapError(f"{url} cannot be listed: {type(error).__name__}: {first_line(error)}") from error
    root = path.rstrip("/") + "/"
    if not found:
        raise InputError(f"{url}: no files there")
    if list(map(str, found)) == [path]:
        raise InputError(f"{url}: not a folder, list or archive")
    for name in found:
        relative = str(name).removeprefix(root).lstrip("/")
        if not any(is_litter(part) for part in relative.split("/")):
            yield relative


def files_behind(url: str, after: bytes = b"") -> Iterator[str]:
    """Names of all files behind a URL, relative to it, in the order of their bytes; folder by folder, as they come.

    Hidden files and litter are left out.

    Raises:
        InputError: there is nothing, or it is no folder.
        LayertapError: nobody answers.
    """
    fs, path = file_system(url)
    root = path.rstrip("/")

    def look(folder: str) -> list[tuple[str, bool, None]]:
        here = f"{root}/{folder}".rstrip("/") if folder else path
        try:
            found = [(str(one["name"]).rstrip("/"), one["type"] == "directory") for one in fs.ls(here, detail=True)]
            fs.invalidate_cache(here)  # it would keep them all
        except FileNotFoundError as error:
            if folder:  # it went meanwhile
                return []
            raise InputError(f"{url}: no such folder or file") from error
        except Exception as error:  # each protocol's library has errors of its own
            where = f"{url}/{folder}".rstrip("/")
            raise LayertapError(f"{where} cannot be listed: {type(error).__name__}: {first_line(error)}") from error
        if not folder and not found:
            raise InputError(f"{url}: no files there")
        if not folder and found == [(path, False)]:
            raise InputError(f"{url}: not a folder, list or archive")
        # Object stores name the folder itself among its entries, and pages link to others.
        parent = here.rstrip("/")
        names = [(name.rpartition("/")[2], is_folder) for name, is_folder in found if name.rpartition("/")[0] == parent]
        return [(name, is_folder, None) for name, is_folder in names if name and not is_litter(name)]

    return (name for name, _ in in_byte_order(look, after))
