"""Images in tar and zip archives. Members are located once and read by offset; nothing is extracted to disk.

In the WebDataset layout (https://github.com/webdataset/webdataset), `.cls` files contain the labels. An image has the
label of its name without suffix: `22.05.png` has that of `22.05.cls`. Without such a file, it has that of a sample
whose name ends at an earlier dot, as WebDataset's samples end at the first one: `a.seg.png` has that of `a.cls`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

import numpy as np

from extract.credentials import without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.images.image_list import Images, is_litter, labels_from_folders, labels_from_values, order_of, pick_images
from extract.images.sources import (
    UNKNOWN,
    BrokenListError,
    ImageSource,
    PackedNames,
    check_file_size,
    read_remote,
    suffix_of,
)
from extract.system.similar_paths import did_you_mean
from extract.system.urls import file_system, http_status, is_http, is_missing, is_url, server_answer

__all__ = ["ARCHIVES", "list_archives"]

ARCHIVES = (".tar", ".zip")

_LABEL_BYTES = 1 << 12
_NO_PARTS = "the server does not send parts of files (HTTP range requests); copy the archive to this machine"
_STORED = 0  # methods of zip (APPNOTE.TXT 4.4.5)
_DEFLATED = 8
_ENCRYPTED = -1
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field (APPNOTE.TXT 4.3.7)


@dataclass(frozen=True, slots=True)
class _Member:
    """A file in an archive.

    Attributes:
        name: path in the archive.
        archive: index of the archive.
        offset: of its data in a tar, of its local header in a zip, in bytes.
        packed, size: packed and unpacked size in bytes.
        method: compression method of zip, or `_ENCRYPTED`.
        crc: CRC-32 of the unpacked data; None in a tar.
        mtime_ns: modification time in nanoseconds, or `UNKNOWN`.
        label: content of a `.cls` file; None if it is too long or encrypted, and for other files.
    """

    name: str
    archive: int
    offset: int
    packed: int
    size: int
    method: int = _STORED
    crc: int | None = None
    mtime_ns: int = UNKNOWN
    label: str | None = None


class Members(ImageSource):
    """ImageSource of the members of archives, which are opened for each read, as files of a folder are."""

    def __init__(self, archives: Sequence[str], members: Sequence[_Member], zipped: bool):
        self._archives, self._zipped = PackedNames(archives), zipped
        self._states = [_state_of(archive) for archive in archives]
        self._columns = {
            name: np.array([getattr(member, name) or 0 for member in members], np.int64)
            for name in ("archive", "offset", "packed", "size", "method", "crc", "mtime_ns")
        }

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        member = {name: int(column[row]) for name, column in self._columns.items()}
        archive, offset, size = self._archives[member["archive"]], member["offset"], member["size"]
        read = partial(_range, archive, self._states[member["archive"]])
        check_file_size(max(size, member["packed"]))
        if member["method"] == _ENCRYPTED:
            raise ValueError("encrypted")
        if not self._zipped:
            return read(offset, size), member["mtime_ns"]
        header = read(offset, _LOCAL_HEADER.size)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if signature != b"PK\3\4":
            raise ValueError("the archive is damaged: its directory gives an offset at which no file starts")
        packed = read(offset + len(header) + name_bytes + extra_bytes, member["packed"])
        data = _unpacked(packed, member["method"], size)
        if len(data) != size or zlib.crc32(data) != member["crc"]:
            raise ValueError("the archive is damaged: the checksum of this file does not match")
        return data, member["mtime_ns"]

    def check_there(self) -> None:
        """See `ImageSource`."""
        for archive, state in zip(self._archives, self._states, strict=True):
            try:
                same = _state_of(archive) == state
            except LayertapError as error:
                raise LayertapError(
                    f"{error.message}. Stored rows are safe", hint="run again when the archive is available"
                ) from error
            if not same:
                raise _changed(archive)


def _changed(archive: str) -> BrokenListError:
    return BrokenListError(f"{archive} has changed since its files were listed. Stored rows are safe")


def _range(archive: str, state: tuple[int, int], offset: int, length: int) -> bytes:
    # `zipfile` would read the directory of the archive again in each worker.
    if is_url(archive):
        data = read_remote(archive, offset, offset + length) if length else b""
    else:
        with open(archive, "rb") as file:  # noqa: PTH123
            if _local_state(os.fstat(file.fileno())) != state:  # the offset may be that of another image
                raise _changed(archive)
            file.seek(offset)
            data = file.read(length)
    if len(data) > length:
        raise ValueError(_NO_PARTS)
    if len(data) < length:
        raise ValueError("the archive is truncated")
    return data


def list_archives(where: str, archives: Sequence[str]) -> Images:
    """List the images in archives of one kind, by the names of the members.

    If two archives contain an image of the same name, all paths are prefixed with the archive's name. Members whose
    names lead outside the archive are not images, nor are symbolic links in a tar, or hard links without an earlier
    target. Encrypted files are listed, but cannot be read.

    Args:
        where: path, pattern or URL as given by the user.
        archives: paths or URLs of the archives.

    Raises:
        InputError: archives of different kinds, or one that is damaged or not an archive; or the labels of `.cls`
            files are ambiguous (see `_labels`).
        LayertapError: an archive cannot be read.
    """
    kinds = {suffix_of(archive, ARCHIVES) for archive in archives}
    if len(kinds) > 1 or not kinds <= set(ARCHIVES):
        raise InputError(f"{where}: expected only .tar or only .zip archives, got {', '.join(kinds)}")
    zipped = kinds == {".zip"}
    left_out: Counter[str] = Counter()
    listed: list[_Member] = []
    for number, archive in enumerate(archives):
        latest: dict[str, _Member] = {}  # a later member replaces an earlier one of its name
        for member in (_in_zip if zipped else _in_tar)(archive, number, left_out, latest):
            if member.name in latest:
                left_out["replaced by a later one of the same name"] += 1
            latest[member.name] = member
        if is_url(archive) and latest and len(read_remote(archive, 0, 1)) != 1:
            raise InputError(f"{archive}: {_NO_PARTS}")
        listed += latest.values()
    names, notes = _names(where, archives, listed)
    picked, other_files = pick_images(names)
    left_out += other_files
    index = {name: i for i, name in enumerate(names)}
    paths = [picked[i] for i in order_of(picked)]
    members = [listed[index[path]] for path in paths]
    values, classes, splits = labels_from_folders([member.name for member in members])
    labels, notes_on_labels = _labels(archives, members, [member for member in listed if _is_sidecar(member.name)])
    notes += notes_on_labels
    if used := sum(label is not None for label in labels):
        left_out -= Counter({".cls": used})
        values, classes = labels_from_values(labels)
    elif classes == [only := _only_folder(members)]:
        hint = f"to avoid that, pack its contents: tar -C {only} -cf ... ."
        notes = (*notes, f"all images lie in the folder {only!r}, which is the only class; {hint}")
    # A pattern stays as it is if its alternatives in braces are absolute paths.
    whole = is_url(where) or any(os.path.isabs(archive) for archive in archives)  # noqa: PTH117
    root = without_credentials(where) if whole else os.path.abspath(where)  # noqa: PTH100
    source = Members(archives, members, zipped)
    return Images(root, paths, values, classes, splits, source, left_out=left_out, notes=notes)


def _names(where: str, archives: Sequence[str], members: Sequence[_Member]) -> tuple[list[str], tuple[str, ...]]:
    """Return member names, prefixed with the archive's name if an image name occurs in two archives, and notes."""
    names = [member.name for member in members]
    twice, count = (Counter(pick_images(names)[0]).most_common(1) or [("", 0)])[0]
    if count < 2:
        return names, ()
    titles = [_title(archive) for archive in archives]
    if len(set(titles)) < len(titles):
        raise InputError(f"{where}: several archives have the same name, and {twice} is in more than one")
    note = f"{twice} is in several archives; therefore all paths start with the name of their archive"
    return [f"{titles[member.archive]}/{member.name}" for member in members], (note,)


def _title(archive: str) -> str:
    name = without_credentials(archive).rpartition("/")[2]
    return os.fsdecode(unquote_to_bytes(name)) if is_http(archive) else name


def _only_folder(members: Sequence[_Member]) -> str:
    """Return the only top folder if it contains folders, as after `tar -cf photos.tar photos`; otherwise ""."""
    tops = {member.name.partition("/")[0] for member in members}
    return tops.pop() if len(tops) == 1 and any(member.name.count("/") > 1 for member in members) else ""


def _is_sidecar(name: str) -> bool:
    return name[-4:].lower() == ".cls"


def _labels(
    archives: Sequence[str], images: Sequence[_Member], sidecars: Sequence[_Member]
) -> tuple[list[str | None], tuple[str, ...]]:
    """Return the content of the `.cls` file of each image, None if it has none, and notes.

    Raises:
        InputError: two images have the same file, or a file is not a label.
    """
    files = {(sidecar.archive, sidecar.name[:-4]): sidecar for sidecar in sidecars}
    labels: list[str | None] = []
    image_of: dict[tuple[int, str], str] = {}
    for image in images:
        samples = ((image.archive, stem) for stem in _samples(_stem(image.name))) if files else ()
        sample = next((sample for sample in samples if sample in files), None)
        if sample is None:
            labels.append(None)
            continue
        where, sidecar = archives[image.archive], files[sample]
        if (before := image_of.setdefault(sample, image.name)) != image.name:
            raise InputError(
                f"{where}: {sidecar.name} belongs to two images, {before} and {image.name}",
                hint="give each image another name before its suffix, and a .cls file of that name",
            )
        if sidecar.label is None:
            raise InputError(f"{where}: {sidecar.name} cannot be read as a label of at most {_LABEL_BYTES:,} bytes")
        labels.append(sidecar.label)
    notes = []
    if image_of and len(image_of) < len(images):
        notes.append(f"{len(images) - len(image_of):,} of {len(images):,} images have no .cls file, and no label")
    if unused := [sidecar.name for key, sidecar in files.items() if key not in image_of]:
        notes.append(f"{len(unused):,} of {len(sidecars):,} .cls files belong to no image; the first is {unused[0]}")
    return labels, tuple(notes)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]  # noqa: PTH122  a Path for each of a million files is slow


def _samples(stem: str) -> Iterator[str]:
    """Yield the names of the samples that a file may belong to: x/a.b.c, x/a.b and x/a."""
    while stem.rpartition("/")[2]:
        yield stem
        folder, slash, base = stem.rpartition("/")
        stem = folder + slash + base.rpartition(".")[0]


def _label(content: bytes) -> str:
    return content.decode("utf-8-sig", "replace").strip()


def _plain_name(name: str) -> str | None:
    """Return a member's name without `./`; None if it leads outside the archive, "" if it is litter."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        return None
    return "" if any(is_litter(part) for part in parts) else "/".join(parts)


def _in_tar(archive: str, number: int, left_out: Counter[str], before: dict[str, _Member]) -> Iterator[_Member]:
    with _opened(archive, "tar") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        while (info := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # or `tar` would keep every member
            if info.isdir():
                continue
            name = _plain_name(info.name)
            if name == "":
                continue
            if name is not None and info.islnk() and (target := before.get(_plain_name(info.linkname) or "")):
                yield replace(target, name=name)  # a hard link
                continue
            if name is None or not info.isreg() or info.issparse():
                left_out["name that leads out of the archive" if name is None else "link or no plain file"] += 1
                continue
            label = None
            if _is_sidecar(name) and info.size <= _LABEL_BYTES:
                file.seek(info.offset_data)
                label = _label(file.read(info.size))
            seconds = float(info.mtime)
            mtime_ns = int(seconds * 1e9) if 0 <= seconds < 1 << 33 else UNKNOWN
            yield _Member(name, number, info.offset_data, info.size, info.size, mtime_ns=mtime_ns, label=label)
        _check_end(file, tar.offset, archive)


def _check_end(file: BinaryIO, offset: int, archive: str) -> None:
    """Check that a tar ends with blocks of zeros, as `tarfile` also treats a damaged header as the end.

    Raises:
        InputError: the archive is damaged, truncated, or several archives in one file.
    """
    size = file.seek(0, os.SEEK_END)
    if size < offset + 512:
        raise InputError(f"{archive} is truncated: it has {size:,} bytes, and the next header is at {offset:,}")
    file.seek(offset)
    while part := file.read(1 << 20):
        if part.strip(b"\0"):
            raise InputError(
                f"{archive} is damaged after byte {offset:,}: expected a file or the end of the archive",
                hint="if the file contains several archives, split it",
            )


def _in_zip(archive: str, number: int, left_out: Counter[str], before: dict[str, _Member]) -> Iterator[_Member]:
    with _opened(archive, "zip") as file, zipfile.ZipFile(file) as zipped:
        for info in zipped.infolist():
            if info.is_dir():
                continue
            # Some Windows tools write backslashes, which the format does not allow.
            name = _plain_name(info.filename if "/" in info.filename else info.filename.replace("\\", "/"))
            if name == "":
                continue
            if name is None:
                left_out["name that leads out of the archive"] += 1
                continue
            encrypted = bool(info.flag_bits & 1)
            label = None
            if _is_sidecar(name) and info.file_size <= _LABEL_BYTES and not encrypted:
                label = _label(zipped.read(info))
            if max(info.file_size, info.compress_size, info.header_offset) >= 1 << 62:
                raise InputError(f"{archive} is damaged: its directory gives {name} a size of {info.file_size:,} bytes")
            method = _ENCRYPTED if encrypted else info.compress_type
            sizes = info.compress_size, info.file_size
            yield _Member(name, number, info.header_offset, *sizes, method, info.CRC, label=label)


@contextlib.contextmanager
def _opened(archive: str, kind: str) -> Iterator[BinaryIO]:
    with _errors_of(archive):
        if is_url(archive):
            fs, path = file_system(archive)
            file = fs.open(path, "rb")
        else:
            file = open(archive, "rb")  # noqa: PTH123, SIM115
    with file, _errors_of(archive, kind):
        yield file


def _state_of(archive: str) -> tuple[int, int]:
    """Return the size of an archive, and its modification time, or `UNKNOWN`."""
    with _errors_of(archive):
        if not is_url(archive):
            return _local_state(Path(archive).stat())
        fs, path = file_system(archive)
        return int(fs.size(path) or 0), UNKNOWN


def _local_state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _errors_of(archive: str, kind: str = "") -> Iterator[None]:
    """Context manager: convert errors of the system and of servers, and those of `tarfile` and `zipfile`.

    Args:
        archive: the archive.
        kind: its kind, if the block reads its content; otherwise all errors are of the system or a server.

    Raises:
        InputError: there is no such file, or it is damaged.
        LayertapError: it cannot be read.
    """
    try:
        yield
    except LayertapError:
        raise
    except Exception as error:  # each protocol's library raises its own errors; so do `tarfile` and `zipfile`
        if is_missing(archive, error):
            near = "" if is_url(archive) else did_you_mean(archive)
            raise InputError(f"{archive}: no such file", hint=near) from error
        if not kind or isinstance(error, OSError) or http_status(error):
            strerror = "" if is_url(archive) else getattr(error, "strerror", "")
            raise LayertapError(f"{archive} cannot be read: {strerror or server_answer(error)}") from error
        if is_url(archive) and "range" in str(error).lower():
            raise InputError(f"{archive}: {_NO_PARTS}") from error
        raise InputError(f"{archive} is damaged, or not a {kind} archive: {first_line(error)}") from error


def _unpacked(data: bytes, method: int, size: int) -> bytes:
    """Decompress a member, up to one byte above `size`, so that the caller detects a longer one."""
    if method == _STORED:
        return data
    try:
        if method == _DEFLATED:
            return zlib.decompressobj(-15).decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"the archive is damaged: {error}") from error
    raise ValueError(f"compression method {method} is not supported; compress the archive with deflate")
