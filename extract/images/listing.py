"""List the images of a folder, list, archive, array, URL or plan."""

from __future__ import annotations

import contextlib
import glob
import itertools
import operator
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from extract.credentials import without_credentials
from extract.errors import InputError, LayertapError
from extract.images.archives import ARCHIVES, list_archives
from extract.images.arrays import list_array, split_name
from extract.images.csv_lists import TABLES, list_table
from extract.images.datasets import PROTOCOL, is_in_memory, is_on_disk, list_hugging_face
from extract.images.decoding import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    SLIDE_SUFFIXES,
    VIDEO_SUFFIXES,
    PixelTypeError,
    decode,
)
from extract.images.image_list import (
    Images,
    are_asked,
    are_frames,
    is_litter,
    labels_from_folders,
    pick_images,
    suffixes_of,
)
from extract.images.named_images import named_images
from extract.images.plans import PLAN_FILE, open_plan
from extract.images.sources import Chosen, Files, ImageSource, suffix_of
from extract.system.similar_paths import did_you_mean, folder_or_list
from extract.system.urls import file_system, is_http, is_missing, is_url, server_answer, without_query

__all__ = [
    "SUFFIXES", "check_exists", "entries_below", "files_behind", "files_below", "in_byte_order", "is_plan", "kind_of",
    "list_images", "listed_again", "no_images", "some_of",
]  # fmt: skip

_MOST_ARCHIVES = 1_000_000
_ARRAYS = (".npy", ".h5", ".hdf5")
_FRAMES = "`layertap embed --fps 1` makes a row of one frame in each second of a video"
SUFFIXES = (*TABLES, *ARCHIVES, *_ARRAYS)  # of files that hold images

Entry = TypeVar("Entry")


def list_images(
    where: str | os.PathLike[str], limit: int | None = None, keep: Sequence[str] = (), without: Any = None,
    parts: Any = None,
) -> Images:  # fmt: skip
    """List images in the byte order of their paths.

    Args:
        where: a folder or a single image; a `.csv`, `.tsv` or `.parquet` list with a column `path`; a `.tar` or `.zip`
            archive, or a pattern for several (`shards-{000..099}.tar`, `parts/*.zip`); an `.npy` array or
            `FILE.h5:NAME` of uint8 pictures; the URL of a folder, list or archive (`s3://bucket/photos`,
            `https://...`); a dataset of Hugging Face (`hfds://FOLDER_OR_NAME[:SPLIT][:COLUMN]`); or a plan written by
            `layertap embed --plan`, whose names are read when needed.
        limit: maximum number of images, the first in order.
        keep: names of further columns of a list or dataset, for `Images.columns`.
        without: images to leave out; see `named_images`.
        parts: settings (`extract.extraction.settings.PartSettings`) that may ask for parts of images; `keep` is then
            of the table of boxes.

    Raises:
        UnknownNameError: a column to keep does not exist.
        InputError: `where` does not exist or contains no images, a list or archive is not valid, or the images to
            leave out are not there.
        LayertapError: a URL does not answer, or the library for its protocol is not installed.
    """
    where, in_parts = os.fspath(where).removeprefix("file://"), are_asked(parts)
    kind = "plan" if not is_url(where) and is_plan(where) else kind_of(where)
    if are_frames(parts) and (is_url(where) or kind in ("Hugging Face", "array", "archives")):
        raise InputError(f"{where}: frames are taken of videos in a folder or list of this machine")
    of_boxes, keep = (keep, ()) if getattr(parts, "boxes", None) else ((), keep)
    if keep and kind not in ("Hugging Face", "list"):
        raise InputError(
            f"keep {keep[0]!r}: {where} has no columns",
            hint="name the list from which the plan was made" if kind == "plan" else "make a list with a column path",
        )
    if kind == "Hugging Face":
        images = list_hugging_face(where, keep)
    elif kind == "list":
        images = list_table(where, keep)
    elif kind == "plan":
        images = open_plan(where)
    elif kind == "archives":
        images = list_archives(where, _expanded(where))
    elif kind == "array":
        images = list_array(where)
    else:
        images = list_folder(where, suffixes_of(parts))
    if not len(images):
        raise no_images(where, images.left_out, "video" if are_frames(parts) else "image")
    if in_parts:
        from extract.images.parts.listing import parts_of  # formats that few runs need

        images = parts_of(images, parts, of_boxes)
    return some_of(images, limit, without)


def some_of(images: Images, limit: int | None, without: Any) -> Images:
    """Return images without those that a table names, and of these the first `limit`.

    Raises:
        InputError, LayertapError: see `named_images`; or the table names none of the images, or all.
    """
    if without is not None:
        named = named_images(without)
        images = images.select(named.rows_of_others(images.paths))
        images = replace(images, notes=(*images.notes, named.note))
    return images if limit is None else images.head(limit)


def is_plan(where: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a plan; False for a folder that cannot be read."""
    return os.path.isfile(os.path.join(where, PLAN_FILE))  # noqa: PTH113, PTH118


def listed_again(dataset_root: str, paths: Sequence[str], images: str | None = None) -> Images:
    """List the images of a data set with these paths, in this order, without labels.

    A URL is opened only if the user named the location of the images: a data set may come from anywhere, and could name
    any server, also one that only this machine reaches, or a bucket for which the user has keys. A list on the local
    disk is no exception: it may have been unpacked together with the data set.

    Args:
        dataset_root: location of the images as recorded in the data set.
        paths: their paths as recorded in the data set.
        images: location that the user named; None: the recorded location.

    Raises:
        InputError: the location no longer lists a path (a local folder is only checked to exist and not to be empty),
            or images would be fetched from a URL that only the data set names.
        InputError, LayertapError: as for `list_images`.
    """
    root = images or dataset_root
    if is_in_memory(root):
        raise InputError("the rows of this data set came from the memory of a program, and no images are stored")
    if not images and (servers := _servers(root, paths)):
        raise InputError(
            f"the images would be fetched from {servers}, a location that only the data set names",
            hint=f"to allow this, add --images {shlex.quote(root)}",
        )
    none = np.full(len(paths), -1, np.int64)
    if not is_url(root) and kind_of(root) == "folder" and not is_plan(root):
        from extract.images.part_source import source_of

        source = source_of(paths, partial(Files, root))
        try:
            source.check_there()
        except LayertapError as error:
            raise InputError(
                f"the images are not in {root} any more", hint="name their place: --images FOLDER"
            ) from error
    else:
        listed = list_images(root)
        source = _listed_in(listed, paths)
    return Images(root, list(paths), none, [], [""] * len(paths), source)


def _listed_in(images: Images, paths: Sequence[str]) -> ImageSource:
    """Return the source of images with these paths, or of parts of them."""
    rows = images.rows_of(paths)
    from extract.images.part_names import has_parts
    from extract.images.part_source import source_of

    if None in rows and has_parts(paths):
        return source_of(paths, partial(_listed_in, images))
    if None in rows:
        raise InputError(f"{images.root} no longer lists {paths[rows.index(None)]}")
    return Chosen(images.source, [row for row in rows if row is not None])


def _servers(root: str, paths: Sequence[str]) -> str:
    """Return the first servers or buckets that images would be fetched from, and the number of the others; "" if none.

    Args:
        root: location of the images.
        paths: paths of the images.
    """
    roots = [root] if is_url(root) or not is_plan(root) else [open_plan(root).root]
    urls = (without_credentials(place) for place in (*roots, *paths) if is_url(place) and not is_on_disk(place))
    servers = dict.fromkeys("/".join(url.split("/", 3)[:3]) for url in urls)
    return ", ".join(list(servers)[:3]) + (f" and {len(servers) - 3} others" if len(servers) > 3 else "")


def _expanded(pattern: str) -> list[str]:
    """Expand a pattern: `{000..099}` and `{a,b}` to all archives; `*`, `?` and `[...]` to the existing ones.

    Raises:
        InputError: the pattern matches no archive.
    """
    if not is_url(pattern) and os.path.exists(pattern):  # noqa: PTH110
        return [pattern]
    query = ""
    if is_url(pattern):  # its query is not part of the pattern
        query = pattern[len(without_query(pattern)) :]
        pattern = without_query(pattern)
    archives: list[str] = []
    for name in _in_braces(pattern):
        if is_url(name) and not is_url(pattern):
            raise InputError(f"{pattern}: the URL {name} in braces", hint="write the protocol before the braces")
        if not glob.has_magic(name):
            archives.append(name + query)
        elif is_url(name):
            archives += [match + query for match in _matches_behind(name)]
        else:
            archives += sorted(glob.glob(name))  # noqa: PTH207
    if not archives:
        raise InputError(f"{pattern}: no such file", hint="" if is_url(pattern) else did_you_mean(pattern))
    return archives


def _matches_behind(pattern: str) -> list[str]:
    """Return the URLs that match a pattern, sorted.

    Raises:
        LayertapError: the folder cannot be listed.
    """
    fs, path = file_system(pattern)
    matches: list[str] = []
    with _errors_of_listing(pattern, may_be_missing=True):
        matches += sorted(fs.glob(path))
    return [str(fs.unstrip_protocol(match)) for match in matches]


def _in_braces(pattern: str) -> list[str]:
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = [[part] for part in parts]
    for i in range(1, len(parts), 2):
        numbers = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", parts[i], re.ASCII)
        if numbers is None:
            choices[i] = parts[i].split(",")
            continue
        first, last = int(numbers[1]), int(numbers[2])
        if not 0 <= last - first < _MOST_ARCHIVES:
            raise InputError(f"{pattern}: {{{parts[i]}}} is not a range; expected {{FIRST..LAST}}, as in {{000..099}}")
        width = len(numbers[1])
        choices[i] = [f"{number:0{width}d}" for number in range(first, last + 1)]
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def kind_of(where: str) -> str:
    """Return "folder", "list", "archives", "array" or "Hugging Face" for a path, pattern or URL; a plan is a folder.

    Raises:
        InputError: an array behind a URL, or a compressed tar.
    """
    suffix = suffix_of(where, SUFFIXES)
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


def list_folder(where: str, suffixes: frozenset[str] = IMAGE_SUFFIXES) -> Images:
    """List every image below a folder, or a single image file; without any, the pictures in `.npy` files.

    Links are followed. Hidden files and litter (`is_litter`) are skipped; other files are counted in `left_out`.

    Args:
        where: the folder, its URL, or the file.
        suffixes: those of the files to list.
    """
    folder = Path(where)
    if is_url(where):
        base = where.rstrip("/")
        root = without_credentials(base)
        names: Iterable[str] = sorted(_names_behind(where), key=os.fsencode)
    elif folder.is_file() and folder.suffix.lower() in suffixes:
        root, paths = str(folder.parent.resolve()), [folder.name]
        return Images(root, paths, np.full(1, -1, np.int64), [], [""], Files(root, paths))
    elif folder.is_dir():
        base = root = str(folder.resolve())
        names = files_below(where)
    else:
        check_exists(where)
        is_slide = folder.suffix.lower() in SLIDE_SUFFIXES
        hint = "slides are read in tiles: `layertap embed --tiles 512`" if is_slide else ""
        hint = _FRAMES if folder.suffix.lower() in VIDEO_SUFFIXES else hint
        raise InputError(f"{where}: not an image, folder, list, archive or array", hint=hint)
    listed = list(names)
    paths, left_out = pick_images(listed, suffixes)
    if not paths and suffixes >= IMAGE_SUFFIXES:  # beside images, such files may be anything
        paths = [name for name in listed if name.lower().endswith(ARRAY_SUFFIX)]
        del left_out[ARRAY_SUFFIX]
    source = Files(base, paths)
    if paths and paths[0].lower().endswith(ARRAY_SUFFIX):
        _check_first_array(source, where, paths[0])
    return Images(root, paths, *labels_from_folders(paths), source, left_out=left_out)


def _check_first_array(source: Files, where: str, name: str) -> None:
    """Refuse a folder of arrays if the first has pixels of another type: the others are likely to have it, too."""
    try:
        decode(source.read(0)[0])
    except PixelTypeError as error:
        raise InputError(
            f"{where}: {name} is {error.what}", hint=f"for each file of this type: {error.remedy}"
        ) from error
    except (OSError, ValueError):
        pass  # its row fails


def check_exists(where: str) -> None:
    """Raise an InputError unless there is a local file or folder."""
    if not Path(where).exists():
        files = ("*" in where or "?" in where) and Path(where).parent.is_dir()
        hint = folder_or_list(Path(where)) if files else did_you_mean(where)
        raise InputError(f"{where}: no such folder or file", hint=hint)


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


def in_byte_order(look: Callable[[str], Iterable[tuple[str, bool, Entry]]]) -> Iterator[tuple[str, Entry]]:
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


def _folder_behind(url: str) -> tuple[Any, str]:
    """Return the file system of the URL of a folder, and its path there; refuse the URL of a web server."""
    if is_http(url):  # HTTP has no listing, only pages made for people
        raise InputError(
            f"{url}: not a list or archive; the folders of a web server cannot be listed",
            hint="write a list (.csv) with a column path that has the URL of each image, or download the folder",
        )
    return file_system(url)


def _names_behind(url: str) -> Iterator[str]:
    """Yield the names of all files below a URL, relative to it."""
    fs, path = _folder_behind(url)
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


def files_behind(url: str) -> Iterator[str]:
    """Yield the names of all files below a URL, in byte order, folder by folder, as few as possible in memory.

    Hidden files and litter are skipped.

    Raises:
        InputError: the URL has no files, or is not a folder, or is that of a web server.
        LayertapError: a folder cannot be listed, for example because the server does not answer.
    """
    fs, path = _folder_behind(url)
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


@contextlib.contextmanager
def _errors_of_listing(where: str, may_be_missing: bool = False) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each protocol's library raises its own errors
        if not is_missing(where, error):
            raise LayertapError(f"{where} cannot be listed: {server_answer(error)}") from error
        if not may_be_missing:
            raise InputError(f"{where}: no such folder or file") from error


def no_images(where: str, left_out: Counter[str], what: str = "image") -> InputError:
    """Return the error for a place whose files are all counted in `left_out`, as none of them is an image or video."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in left_out.most_common(5))
    one = {"image": "an image", "video": "a video"}[what]
    seen = f"none of its {left_out.total():,} files is {one} ({kinds})"
    if left_out.total() == 1:
        seen = f"its only file is not {one} ({kinds})"
    if not kinds:
        seen = "the folder is empty" if os.path.isdir(where) else "it is empty"  # noqa: PTH112
    hint = "images end in .jpg, .png, .tif, .webp and others" if kinds and what == "image" else ""
    if what == "image" and not VIDEO_SUFFIXES.isdisjoint(left_out):
        hint = _FRAMES
    if any(left_out[suffix] for suffix in ARCHIVES):
        hint = f"to read archives, give a pattern, such as '{where}/*.tar'"
    return InputError(f"{where}: no {what}s; {seen}", hint=hint)
