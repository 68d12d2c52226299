"""The source of parts of files: a file is read and decoded once for consecutive rows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash
from PIL import Image

from extract import defaults
from extract.images.decoding import NOTE
from extract.images.part_names import FileNames, Window, file_of, fragment_of, has_parts, part_of
from extract.images.sources import ImageSource, PackedNames, Whole

__all__ = ["Parts", "source_of"]


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


class Parts(ImageSource):
    """ImageSource of parts of files.

    Args:
        files: the file of each row; a file of several rows is there several times.
        names: names of the rows.
    """

    def __init__(self, files: ImageSource, names: Sequence[str]):
        self._files = files
        self._names = names
        self._read: tuple[str, Any] = "", None  # the last file, and what was read of it
        self._hashed: tuple[Any, bytes] = None, b""
        # What the last picture was decoded of, how, and the picture.
        self._decoded: tuple[Any, Any, Image.Image | None] = None, None, None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": ("", None), "_hashed": (None, b""), "_decoded": (None, None, None)}

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        name = FileNames(self._names)[row]
        file, content = self._read
        if file != name or content is None:
            content = self._files.read(row)
            self._read = name, content
        return content  # type: ignore[no-any-return]

    def picture(
        self,
        row: int,
        data: bytes,
        max_pixels: int = defaults.MAX_PIXELS,
        min_decode_px: int = 0,
        orientation: str = defaults.ORIENTATION,
        icc: str = defaults.ICC,
    ) -> Image.Image:
        """See `ImageSource`. A file is decoded at its full size, since windows are in pixels of it."""
        whole = self.whole(row, data, max_pixels, min_decode_px, orientation, icc)
        if whole.box is None:
            return whole.picture
        cut = whole.picture.crop(whole.box)
        if whole.note:
            cut.info[NOTE] = whole.note
        return cut

    def whole(self, row: int, data: bytes, *options: Any) -> Whole:
        """See `ImageSource`."""
        max_pixels, min_decode_px, orientation, icc = options
        part = part_of(self._names[row])
        if part is None:
            return Whole(self._files.picture(row, data, max_pixels, min_decode_px, orientation, icc))
        how = max_pixels, orientation, icc
        decoded, before, whole = self._decoded
        if decoded is not data or before != how or whole is None:
            self._decoded = None, None, None  # not two pictures in memory
            whole = self._files.picture(row, data, max_pixels, 0, orientation, icc)
            self._decoded = data, how, whole
        return _with_box(whole, part.window)

    def local_path(self, row: int) -> str | None:
        """See `ImageSource`."""
        return self._files.local_path(row)

    def file(self, row: int) -> str | None:
        """See `ImageSource`."""
        name = self._names[row]
        file = file_of(name)
        return file if file != name else None

    def content_hash(self, row: int, data: bytes) -> bytes:
        """See `ImageSource`."""
        if self._hashed[0] is not data:
            self._hashed = data, self._files.content_hash(row, data)
        digest, fragment = self._hashed[1], fragment_of(self._names[row])
        return xxhash.xxh3_128_digest(digest + fragment.encode()) if fragment else digest

    def check_there(self) -> None:
        """See `ImageSource`."""
        self._files.check_there()


def _with_box(picture: Image.Image, window: Window | None) -> Whole:
    if window is None:
        return Whole(picture)
    of = f"the picture of {picture.width} x {picture.height} pixels"
    note = f"the box {window} reaches over the border of {of}; the part inside is used"
    return Whole(picture, window.inside(picture.size), note if window.reaches_over(picture.size) else "")
