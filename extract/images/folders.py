"""Images below a folder, here or behind a URL."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from extract.errors import InputError, LayertapError, first_line
from extract.images.decoding import IMAGE_SUFFIXES
from extract.images.images import Images, is_litter, labels_from_folders, order_of
from extract.images.source import Files, file_system, is_url

__all__ = ["entries_below", "list_folder", "pick_images"]


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
        root, names = str(folder.resolve()), _files_below(where)
    paths, left_out = pick_images(names)
    paths = [paths[i] for i in order_of(paths)]
    labels, classes, splits = labels_from_folders(paths)
    return Images(root, paths, labels, classes, splits, Files(root, paths), left_out=left_out)


def pick_images(names: Iterable[str]) -> tuple[list[str], Counter[str]]:
    """Those that end as images do, and how many others there are, by suffix."""
    paths: list[str] = []
    left_out: Counter[str] = Counter()
    for name in names:
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  a Path for each of a million files is slow
        if suffix in IMAGE_SUFFIXES:
            paths.append(name)
        else:
            left_out[suffix or "no suffix"] += 1
    return paths, left_out


def _files_below(root: str) -> Iterator[str]:
    """Relative paths of all files below a folder."""

    def refuse(folder: str, error: OSError) -> None:
        where = os.path.join(root, folder)  # noqa: PTH118
        raise InputError(f"{where}: the folder cannot be read: {error.strerror}") from error

    for relative, _ in entries_below(root, refuse):
        yield relative


def entries_below(root: str, on_unreadable: Callable[[str, OSError], None]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files below a folder, as (relative path, entry); hidden files and litter are left out.

    Links are followed, but not into a folder that holds them.

    Args:
        root: the folder.
        on_unreadable: called with the relative path of a folder that cannot be read, and why.
    """
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        folder, above = waiting.pop()
        full = os.path.join(root, folder)  # noqa: PTH118
        try:
            here = os.stat(full)  # noqa: PTH116
            identity = (here.st_dev, here.st_ino)
            if identity in above:
                continue
            with os.scandir(full) as scan:
                entries = list(scan)
        except OSError as error:
            on_unreadable(folder, error)
            continue
        for entry in entries:
            if is_litter(entry.name):
                continue
            relative = f"{folder}/{entry.name}" if folder else entry.name
            if _is_folder(entry):
                waiting.append((relative, above | {identity}))
            else:
                yield relative, entry


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
