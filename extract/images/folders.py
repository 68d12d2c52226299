"""List the images below a folder, local or behind a URL."""

from __future__ import annotations

import contextlib
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from extract.credentials import without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.images.decoding import ARRAY_SUFFIX, IMAGE_SUFFIXES
from extract.images.image_list import Images, is_litter, labels_from_folders
from extract.images.sources import Files
from extract.system.similar_paths import did_you_mean, folder_or_list
from extract.system.urls import file_system, is_http, is_url

__all__ = [
    "check_exists",
    "entries_below",
    "files_behind",
    "files_below",
    "in_byte_order",
    "list_folder",
    "other_suffix",
    "pick_images",
    "refuse_web_folder",
]

Entry = TypeVar("Entry")


def list_folder(where: str) -> Images:
    """List every image below a folder, or a single image file; without any, the pictures in `.npy` files.

    Links are followed. Hidden files and litter (`is_litter`) are skipped; other files are counted in `left_out`.
    """
    folder = Path(where)
    if is_url(where):
        refuse_web_folder(where)
        base = where.rstrip("/")
        root = without_credentials(base)
        names: Iterable[str] = sorted(_names_behind(where), key=os.fsencode)
    elif folder.is_file() and folder.suffix.lower() in IMAGE_SUFFIXES:
        root, paths = str(folder.parent.resolve()), [folder.name]
        return Images(root, paths, np.full(1, -1, np.int64), [], [""], Files(root, paths))
    elif folder.is_dir():
        base = root = str(folder.resolve())
        names = files_below(where)
    else:
        check_exists(where)
        raise InputError(f"{where}: not an image, folder, list, archive or array")
    names = list(names)
    paths, left_out = pick_images(names)
    if not paths:  # beside images, such files may be anything
        paths = [name for name in names if name.lower().endswith(ARRAY_SUFFIX)]
        del left_out[ARRAY_SUFFIX]
    return Images(root, paths, *labels_from_folders(paths), Files(base, paths), left_out=left_out)


def check_exists(where: str) -> None:
    """Raise an InputError unless there is a local file or folder."""
    if not Path(where).exists():
        files = ("*" in where or "?" in where) and Path(where).parent.is_dir()
        hint = folder_or_list(Path(where)) if files else did_you_mean(where)
        raise InputError(f"{where}: no such folder or file", hint=hint)


def refuse_web_folder(url: str) -> None:
    """Raise an InputError for a folder of a web server: HTTP has no listing, only pages made for people."""
    if is_http(url):
        raise InputError(
            f"{url}: not a list or archive; the folders of a web server cannot be listed",
            hint="write a list (.csv) with a column path that has the URL of each image, or download the folder",
        )


def pick_images(names: Iterable[str]) -> tuple[list[str], Counter[str]]:
    """Return the names with an image suffix, and the number of other names by suffix."""
    paths: list[str] = []
    left_out: Counter[str] = Counter()
    for name in names:
        if other := other_suffix(name):
            left_out[other] += 1
        else:
            paths.append(name)
    return paths, left_out


def other_suffix(name: str) -> str:
    """Return the suffix of a file that is not an image ("no suffix" if it has none), or "" for an image."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  a Path for each of a million files is slow
    if suffix in IMAGE_SUFFIXES:
        return ""
    return suffix or "no suffix"


def files_below(root: str) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, as `entries_below`; refuse an unreadable folder."""

    def refuse(folder: str, error: OSError) -> None:
        where = os.path.join(root, folder)  # noqa: PTH118
        remedy = "; reading needs the permissions r and x (chmod u+rx)" if isinstance(error, PermissionError) else ""
        raise InputError(f"{where}: the folder cannot be read: {error.strerror}{remedy}") from error

    for relative, _ in entries_below(root, refuse):
        yield relative


def entries_below(root: str, on_unreadable: Callable[[str, OSError], None]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (relative path, entry) of all files below a folder, in the byte order of their paths.

    Hidden files and litter are skipped. Links are followed, except into a folder that contains them.

    Args:
        root: the folder.
        on_unreadable: called with the relative path of a folder that cannot be read, and the error.
    """
    trail: list[tuple[str, tuple[int, int]]] = []  # open folders: path, (device, inode)

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

    return in_byte_order(look)


def in_byte_order(
    look: Callable[[str], Iterable[tuple[str, bool, Entry]]],
) -> Iterator[tuple[str, Entry]]:
    """Yield (relative path, entry) of all files in a tree, in the byte order of their paths.

    A folder sorts as `NAME/` among its neighbours: "a-b", then "a/b", then "a0". So each folder is read only when its
    turn comes, and memory holds only the entries of the folders above the current file.

    Args:
        look: maps a folder ("" or a path that ends in `/`) to its entries: name, whether it is a folder, and the value
            to yield with the path.
    """

    def turned(folder: str) -> list[tuple[bytes, str, bool, Entry]]:
        entries = []
        for name, is_folder, entry in look(folder):
            path = f"{folder}{name}/" if is_folder else folder + name
            entries.append((os.fsencode(path), path, is_folder, entry))
        entries.sort(key=operator.itemgetter(0), reverse=True)
        return entries

    waiting = turned("")
    while waiting:
        _, path, is_folder, entry = waiting.pop()
        if is_folder:
            waiting += turned(path)
        else:
            yield path, entry


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link to itself
        return False


def _names_behind(url: str) -> Iterator[str]:
    """Yield the names of all files below a URL, relative to it."""
    fs, path = file_system(url)
    with _errors_of_listing(url):
        names = fs.find(path) or fs.ls(path, detail=False)  # `find` returns nothing if no server answers
    root = path.rstrip("/") + "/"
    if not names:
        raise InputError(f"{url}: no files there")
    if list(map(str, names)) == [path]:
        raise InputError(f"{url}: not a folder, list or archive")
    for name in names:
        relative = str(name).removeprefix(root).lstrip("/")
        if not any(is_litter(part) for part in relative.split("/")):
            yield relative


@contextlib.contextmanager
def _errors_of_listing(where: str, may_be_missing: bool = False) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if not may_be_missing:
            raise InputError(f"{where}: no such folder or file") from error
    except Exception as error:  # each protocol's library raises its own errors
        raise LayertapError(f"{where} cannot be listed: {type(error).__name__}: {first_line(error)}") from error


def files_behind(url: str) -> Iterator[str]:
    """Yield the names of all files below a URL, in byte order, folder by folder.

    Hidden files and litter are skipped.

    Raises:
        InputError: the URL has no files, or is not a folder, or is that of a web server.
        LayertapError: a folder cannot be listed, for example because the server does not answer.
    """
    refuse_web_folder(url)
    fs, path = file_system(url)
    root = path.rstrip("/")

    def look(folder: str) -> list[tuple[str, bool, None]]:
        here = f"{root}/{folder}".rstrip("/") if folder else path
        entries: list[tuple[str, bool]] = []
        with _errors_of_listing(f"{url}/{folder}".rstrip("/"), may_be_missing=folder != ""):  # removed meanwhile
            listed = fs.ls(here, detail=True)
            entries = [(str(item["name"]).rstrip("/"), item["type"] == "directory") for item in listed]
            fs.invalidate_cache(here)  # or the cache would keep every listing
        if not folder and not entries:
            raise InputError(f"{url}: no files there")
        if not folder and entries == [(path, False)]:
            raise InputError(f"{url}: not a folder, list or archive")
        # Object stores list the folder itself among its entries.
        parent = here.rstrip("/")
        names = [(name.rpartition("/")[2], is_dir) for name, is_dir in entries if name.rpartition("/")[0] == parent]
        return [(name, is_folder, None) for name, is_folder in names if name and not is_litter(name)]

    return (name for name, _ in in_byte_order(look))
