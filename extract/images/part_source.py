"""The source of parts of files: a file is read and decoded once for consecutive rows of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import xxhash
from PIL import Image

from extract.images.decoding import AS_DEFAULT, NOTE, SLIDE_SUFFIXES, VIDEO_SUFFIXES, DecodeOptions
from extract.images.part_names import FileNames, Part, Window, file_of, fragment_of, has_parts, part_hash, part_of
from extract.images.pyramids import Pyramid, is_read_in_regions, open_pyramid
from extract.images.sources import ImageSource, OnDisk, PackedNames, Whole, suffix_of
from extract.images.videos import Video

__all__ = ["Parts", "hash_with_other_files", "source_of"]

_OF_SEVERAL_FILES = (".mrxs", ".vms", ".vmu")  # slides whose pixels are in other files, which `identity` tells apart


def source_of(names: Sequence[str], source: Callable[[Sequence[str]], ImageSource]) -> ImageSource:
    """Return the source of rows with these names, of which some may be parts of files.

    Args:
        names: names of the rows; see `extract.images.part_names`.
        source: names of files -> their source.
    """
    if not has_parts(names):
        return source(names)
    packed = PackedNames(names)
    return Parts(source(FileNames(packed)), packed)


# What is kept of the last file, for its next row: what was read of it and under which name; the hash of that; the
# picture decoded of it, and how; the pyramid or video opened of it, and in which process, since a forked process would
# share the position in its file.
_NOTHING: dict[str, Any] = {
    "_read": ("", None), "_hashed": (None, b""), "_decoded": (None, None, None), "_opened": (None, 0, None),
}  # fmt: skip


class Parts(ImageSource):
    """ImageSource of parts of files.

    Args:
        files: the file of each row; a file of several rows is there several times.
        names: names of the rows.
    """

    _read: tuple[str, Any]
    _hashed: tuple[Any, bytes]
    _decoded: tuple[Any, Any, Image.Image | None]
    _opened: tuple[Any, int, Pyramid | Video | None]

    def __init__(self, files: ImageSource, names: Sequence[str]):
        self._files, self._names = files, names
        vars(self).update(_NOTHING)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | _NOTHING

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        name = FileNames(self._names)[row]
        file, content = self._read
        if file != name or content is None:
            content = self._on_disk(row, name) or self._files.read(row)
            self._read = name, content
        return content  # type: ignore[no-any-return]

    def _on_disk(self, row: int, name: str) -> tuple[OnDisk, int] | None:
        """Return what stands for a file of which only parts are read, and its modification time; None for others.

        Raises:
            FileNotFoundError: there is no such file.
            OSError, ValueError: it is not a file of the local disk.
        """
        path, is_of_video = self._files.local_path(row), self._is_of_video(row)
        if path is None and (is_of_video or suffix_of(name, SLIDE_SUFFIXES) in SLIDE_SUFFIXES):
            raise ValueError("slides and videos are read from local files only; copy it to this machine")
        if path is None or not (is_of_video or is_read_in_regions(path)):
            return None
        data = OnDisk(path)
        return data, data.mtime_ns

    def _is_of_video(self, row: int) -> bool:
        """Whether a row is a frame of a video, or a video of which no frame could be listed."""
        name = self._names[row]
        return fragment_of(name).startswith("t=") or suffix_of(name, VIDEO_SUFFIXES) in VIDEO_SUFFIXES

    def picture(self, row: int, data: bytes, options: DecodeOptions = AS_DEFAULT) -> Image.Image:
        """See `ImageSource`. A file is decoded at its full size, since windows are in pixels of it."""
        part = part_of(self._names[row])
        is_of_video = self._is_of_video(row)
        if is_of_video or isinstance(data, OnDisk) or (part and part.window and part.window.level):
            picture = (
                self._frame(data, part, options) if is_of_video
                else self._region(data, part or Part(), options)
            )  # fmt: skip
            if isinstance(data, OnDisk):
                data.check_unchanged()
            return picture
        whole = self.whole(row, data, options)
        return whole.picture if whole.box is None else _noted(whole.picture.crop(whole.box), whole.note)

    def whole(self, row: int, data: bytes, options: DecodeOptions) -> Whole:
        """See `ImageSource`."""
        if isinstance(data, OnDisk):
            raise ValueError("it is only read in parts: a pooling of boxes (roi) needs whole pictures")
        part = part_of(self._names[row])
        if part is None:
            return Whole(self._files.picture(row, data, options))
        options = options._replace(min_decode_px=0)
        decoded, before, picture = self._decoded
        if decoded is not data or before != options or picture is None:
            self._decoded = None, None, None  # not two pictures in memory
            picture = self._files.picture(row, data, options)
            self._decoded = data, options, picture
        if part.window is None:
            return Whole(picture)
        return Whole(picture, part.window.inside(picture.size), _note(part.window, picture.size))

    def _frame(self, data: bytes, part: Part | None, options: DecodeOptions) -> Image.Image:
        video: Video = self._opened_of(data, Video)
        if part is None or part.seconds is None:
            raise ValueError("no frame of this video was listed")
        return video.picture(round(part.seconds * 1e6), options)

    def _region(self, data: bytes, part: Part, options: DecodeOptions) -> Image.Image:
        pyramid, window = self.pyramid(data), part.window
        if window is None:
            width, height = pyramid.sizes[0]
            raise ValueError(f"its {width} x {height} pixels are only read in regions: ask for tiles (--tiles 512)")
        try:
            return _noted(pyramid.region(window, options), _note(window, pyramid.sizes[0]))
        except Exception:
            self._opened = _NOTHING["_opened"]  # OpenSlide reads nothing more of a slide after an error
            raise

    def pyramid(self, data: bytes) -> Pyramid:
        """Return the levels of what `read` returned; see `extract.images.pyramids.open_pyramid`."""
        pyramid: Pyramid = self._opened_of(data, open_pyramid)
        return pyramid

    def _opened_of(self, data: Any, open_file: Callable[[Any], Any]) -> Any:
        of, process, opened = self._opened
        if of is not data or process != os.getpid() or opened is None:
            self._opened = _NOTHING["_opened"]
            opened = open_file(data)
            self._opened = data, os.getpid(), opened
        return opened

    def local_path(self, row: int) -> str | None:
        """See `ImageSource`."""
        return self._files.local_path(row)

    def part(self, row: int) -> Part | None:
        """See `ImageSource`."""
        return part_of(self._names[row])

    def file(self, row: int) -> str | None:
        """See `ImageSource`."""
        name = self._names[row]
        file = file_of(name)
        return file if file != name else None

    def content_hash(self, row: int, data: bytes) -> bytes:
        """See `ImageSource`."""
        hashed, digest = self._hashed  # which another thread may set
        if hashed is not data:
            digest = self._files.content_hash(row, data)
            if isinstance(data, OnDisk):
                digest = hash_with_other_files(data.path, digest, lambda: self.pyramid(data))
            self._hashed = data, digest
        return part_hash(digest, fragment_of(self._names[row]).encode())

    def check_there(self) -> None:
        """See `ImageSource`."""
        self._files.check_there()


def hash_with_other_files(path: str, digest: bytes, pyramid: Callable[[], Pyramid]) -> bytes:
    """Return the hash of a file, given that of its bytes; of a slide in several files, of its pixels too.

    Raises:
        LayertapError, ValueError: the slide cannot be opened.
    """
    if not path.lower().endswith(_OF_SEVERAL_FILES):
        return digest
    return xxhash.xxh3_128_digest(digest + pyramid().identity.encode())


def _note(window: Window, size: tuple[int, int]) -> str:
    """Return what the user should know of a window of a picture of (width, height)."""
    if not window.reaches_over(size):
        return ""
    of = f"the picture of {size[0]} x {size[1]} pixels"
    return f"the box {window} reaches over the border of {of}; the part inside is used"


def _noted(cut: Image.Image, note: str) -> Image.Image:
    if note:
        cut.info[NOTE] = note
    return cut
