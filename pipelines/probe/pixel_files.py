"""Files with a value for each pixel of an image, masks and depth maps: which row they belong to, and their size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract import defaults
from extract.errors import InputError, first_line
from extract.images.csv_lists import TABLES, plain_path
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from extract.system.atomic_files import open_regular
from pipelines.probe.coco import CocoFile
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import printable

__all__ = [
    "CropLoss", "DepthFiles", "check_size", "files_of_rows", "is_table_of_files", "read_pixels",
    "where_files_are_expected",
]  # fmt: skip

_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".npy")
_MOST_TIMES = 32  # sides of a file, in sides of its image
_NOTED = 0.01  # least share of pixels outside the crop for which there is a note


def is_table_of_files(where: str | CocoFile) -> bool:
    """Return whether files are named in a table: FILE.csv or FILE.csv:COLUMN."""
    return isinstance(where, str) and any(ending in where.lower() for ending in TABLES) and not Path(where).is_dir()


def files_of_rows(reader: FeatureReader, where: str | CocoFile, option: str) -> list[str | None]:
    """Return the file of each row in a folder, or the `file_name` of its image in a COCO file; None for no file.

    In a folder, a file has the path of its image with another suffix: photos/a/1.jpg has masks/a/1.png. In a COCO file,
    an image has its path or its name.

    Raises:
        InputError: `where` is not a folder, or an image has two files, or two images have the same.
    """
    paths = [plain_path(path) for path in reader.paths]
    if isinstance(where, CocoFile):
        known = where.names
        names = [PurePosixPath(path).name for path in paths]
        found = [path if path in known else name if name in known else None
                 for path, name in zip(paths, names, strict=True)]  # fmt: skip
        return _each_once(found, paths)
    folder = Path(where)
    if not folder.is_dir():
        coco = ", or a COCO file FILE.json" if option == "masks" else ""
        expected = f"expected a folder, or a table FILE.csv[:COLUMN] of files{coco}"
        raise InputError(f"--{option} {where}: {expected if folder.exists() else 'no such folder'}")
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith("."):
            stem = _without_suffix(path.relative_to(folder).as_posix())
            if stem in files:
                raise InputError(f"{files[stem]} and {path} belong to the same image; remove one of them")
            files[stem] = path
    in_folder = [files.get(_without_suffix(path)) for path in paths]
    return _each_once([None if path is None else str(path) for path in in_folder], paths)


def _each_once(files: list[str | None], paths: Sequence[str]) -> list[str | None]:
    """Return the files if no two images have the same."""
    image_of: dict[str, str] = {}
    for file, path in zip(files, paths, strict=True):
        if file is not None and image_of.setdefault(file, path) != path:
            raise InputError(
                f"{printable(file)} belongs to two images, {printable(image_of[file])} and {printable(path)}",
                hint="name the file of each image in a table FILE.csv",
            )
    return files


def where_files_are_expected(reader: FeatureReader, where: str | CocoFile, option: str) -> str:
    """Return the place of the first image's file, for an error about files of which none belongs to a row."""
    path = plain_path(reader.paths[0])
    if isinstance(where, CocoFile):
        return f"expected an image with the file_name {printable(path)!r} in {where.path}"
    if is_table_of_files(where):
        return ""
    example = printable(str(Path(where) / _without_suffix(path)))
    return f"for the first image, {example}.png is expected; a table (--{option} FILE.csv) may name other files"


def _without_suffix(path: str) -> str:
    return str(PurePosixPath(path.lstrip("/")).with_suffix("")) if PurePosixPath(path).name else path


def read_pixels(path: Path, kinds: str, expected: str) -> NDArray[Any]:
    """Read (H, W) numbers from an image with one channel or a palette, or from .npy.

    Args:
        path: file.
        kinds: kinds of NumPy types that are accepted, such as "iub".
        expected: these, in words.

    Raises:
        InputError: the file cannot be read, or has other contents.
    """
    shown = printable(str(path))
    try:
        os.close(open_regular(path))  # a pipe among the files of a folder would be waited for
        if path.suffix.lower() == ".npy":
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.size > defaults.MAX_PIXELS:
                raise ValueError(f"{array.size:,} values")
            array = np.array(array)
        else:
            with Image.open(path) as image:
                array = np.asarray(image)
    except InputError as error:
        raise InputError(f"{shown} is not a regular file") from error
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or "not an image"
        raise InputError(f"{shown} cannot be read: {reason}") from error
    except Exception as error:  # NumPy and Pillow raise many types on damaged files
        raise InputError(f"{shown} cannot be read: {first_line(error)}") from error
    if array.ndim == 3:
        raise InputError(
            f"{shown} has {array.shape[2]} channels; expected one, of {expected}",
            hint="convert colours to numbers first",
        )
    if array.ndim != 2 or array.dtype.kind not in kinds or not array.size:
        raise InputError(f"{shown} has {array.ndim} axes of {array.dtype}; expected {expected} (H, W)")
    return array


def check_size(name: str, shape: tuple[int, ...], size: tuple[int, int] | None) -> None:
    """Check that a file has the aspect ratio of its picture within a pixel; it may be smaller or larger.

    Args:
        name: name of the file.
        shape: (H, W) of the file.
        size: (width, height) of the picture; None: not known.

    Raises:
        InputError: it has another, or far more pixels.
    """
    if size is None:
        return
    (height, width), (picture_width, picture_height) = shape, size
    if width > _MOST_TIMES * picture_width and height > _MOST_TIMES * picture_height:
        raise InputError(
            f"{printable(name)} has {width} x {height} pixels, and its image only {picture_width} x {picture_height}"
        )
    if abs(width * picture_height - height * picture_width) > max(picture_width, picture_height):
        turned = "; are the pixels stored in another orientation?" if (height, width) == size else ""
        raise InputError(
            f"{printable(name)} has {width} x {height} pixels, and its image {picture_width} x {picture_height}{turned}"
        )


class CropLoss:
    """Counts the pixels of files that lie outside the crop.

    Args:
        tokens: tokens of the data set.
        pictures: pictures of its rows.
    """

    def __init__(self, tokens: TokenArray, pictures: Pictures):
        self._tokens, self._pictures = tokens, pictures
        self.total = self._lost = self._mostly = 0

    def count(self, counted: NDArray[np.bool_]) -> None:
        """Count the pixels of an image that are set in (H, W)."""
        height, width = counted.shape
        left, top, right, bottom = self._tokens.window((width, height))
        rows, columns = (
            slice(max(0, round(start)), max(0, round(end))) for start, end in ((top, bottom), (left, right))
        )
        total = int(counted.sum())
        lost = total - int(counted[rows, columns].sum())
        self.total, self._lost = self.total + total, self._lost + lost
        self._mostly += lost > total / 2

    def notes(self, what: str) -> list[str]:
        """Return notes for the report; `what` names the pixels that were counted."""
        why = self._pictures.why_not
        notes = [f"sizes are not compared with those of the images: {printable(why)}"] if why else []
        if self._lost > _NOTED * self.total:
            of_images = f", and more than half of those of {self._mostly:,} images" if self._mostly else ""
            notes.append(
                f"{self._lost / self.total:.0%} of the {what} lie outside the crop{of_images}; they are not used"
            )
        return notes


class DepthFiles:
    """Depth maps (H, W) in float32 by row, in the unit of the files; 0, negative numbers and NaN mean unknown.

    Args:
        names: row -> its file.
    """

    def __init__(self, names: Mapping[int, str]):
        self._names = names

    def examine(self, tokens: TokenArray, pictures: Pictures) -> list[str]:
        """Read all depth maps once, compare their sizes with those of the pictures, and return notes.

        Raises:
            InputError: a file cannot be read, or has another size than its picture.
        """
        loss = CropLoss(tokens, pictures)
        for row, name in self._names.items():
            depth = self[row]
            check_size(name, depth.shape, pictures.size(row))
            loss.count((depth > 0) & (depth < np.inf))
        if not loss.total:
            raise InputError("no pixel of the depth maps has a positive depth")
        return loss.notes("pixels of known depth")

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        return read_pixels(Path(self._names[row]), "iuf", "numbers as depths").astype(np.float32)
