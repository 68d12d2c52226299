"""Masks of the images of a data set: which file belongs to which row, and the class of each pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.errors import InputError, first_line
from extract.images.csv_lists import TABLES, plain_path, read_table
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from pipelines.probe.coco import CocoFile
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import printable

__all__ = ["MaskFiles", "class_names", "is_table_of_masks", "masks_of_rows", "where_masks_are_expected"]

_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".npy")
_MOST_LABELS = 1000  # more are numbers of objects, or no labels at all
_COUNTED = 1 << 16  # labels below are counted, which is faster than sorting
_VOID = 255  # label without a class, as in Pascal VOC, Cityscapes and MMSegmentation
_LOST = 0.01  # least share of the labelled pixels outside the crop that is told


def is_table_of_masks(where: str) -> bool:
    """Return whether masks are named in a table: FILE.csv or FILE.csv:COLUMN."""
    return any(ending in where.lower() for ending in TABLES) and not Path(where).is_dir()


def masks_of_rows(reader: FeatureReader, where: str) -> list[str | None]:
    """Return the mask of each row: its file in a folder, or the `file_name` in a COCO file; None for no mask.

    In a folder, a mask has the path of its image with another suffix: photos/a/1.jpg has masks/a/1.png. In a COCO file,
    an image has its path or its name.

    Raises:
        InputError: `where` is neither a folder nor a COCO file, or an image has two masks.
    """
    paths = [plain_path(path) for path in reader.paths]
    if where.lower().endswith(".json"):
        known = CocoFile(Path(where)).names
        names = [PurePosixPath(path).name for path in paths]
        return [path if path in known else name if name in known else None
                for path, name in zip(paths, names, strict=True)]  # fmt: skip
    folder = Path(where)
    if not folder.is_dir():
        expected = "expected a folder of masks, a table FILE.csv[:COLUMN] of their files, or a COCO file FILE.json"
        raise InputError(f"--masks {where}: {expected if folder.exists() else 'no such folder'}")
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith("."):
            stem = _without_suffix(path.relative_to(folder).as_posix())
            if stem in files:
                raise InputError(f"{files[stem]} and {path} are masks of the same image; remove one of them")
            files[stem] = path
    found = [files.get(_without_suffix(path)) for path in paths]
    return [None if path is None else str(path) for path in found]


def where_masks_are_expected(reader: FeatureReader, where: str) -> str:
    """Return the place of the first image's mask, for an error about masks of which none belongs to a row."""
    path = plain_path(reader.paths[0])
    if where.lower().endswith(".json"):
        return f"expected an image with the file_name {printable(path)!r} in {where}"
    if is_table_of_masks(where):
        return ""
    example = printable(str(Path(where) / _without_suffix(path)))
    return f"the mask of the first image is expected in {example}.png; a table (--masks FILE.csv) may name other files"


def _without_suffix(path: str) -> str:
    return str(PurePosixPath(path.lstrip("/")).with_suffix("")) if PurePosixPath(path).name else path


def class_names(path: Path) -> dict[int, str]:
    """Read a table with the columns `id` and `name`: label in masks -> name of the class.

    Raises:
        InputError: the table lacks a column, or a label is not a whole number from 0 or occurs twice.
    """
    table, _ = read_table(str(path), "name")
    if "id" not in table:
        raise InputError(f"{path} has no column 'id'")
    names: dict[int, str] = {}
    for text, name in zip(table["id"], table["name"], strict=True):
        if not str(text).isascii() or not str(text).isdigit():
            raise InputError(f"{path}: the id {text!r} is not a whole number from 0")
        if int(text) in names:
            raise InputError(f"{path}: the id {text} occurs twice")
        names[int(text)] = str(name)
    if len(set(names.values())) < len(names):
        raise InputError(f"{path}: two classes have the same name", hint="give each its own name")
    return names


class MaskFiles:
    """Masks of images with the numbers of classes from 0 to K - 1, and -1 for pixels without a class.

    Args:
        where: as the user named the masks.
        names: row -> its file, or its name in a COCO file.
        ignored: labels without a class; None: 255, but none in a COCO file.
        named: label -> name of its class; None: all labels in the masks are classes, or those of the COCO file.
    """

    def __init__(
        self, where: str, names: Mapping[int, str], ignored: Sequence[int] | None, named: Mapping[int, str] | None
    ):
        self._names = names
        self._coco = CocoFile(Path(where)) if where.lower().endswith(".json") else None
        default = [] if self._coco else [_VOID]
        self._ignored = np.array(default if ignored is None else ignored, np.int64)
        if named is None and self._coco is not None:
            named = self._coco.classes
        self._named = None if named is None else {label: name for label, name in named.items()
                                                  if label not in self._ignored}  # fmt: skip
        self.ids = np.array(sorted(self._named or ()), np.int64)

    @property
    def classes(self) -> list[str]:
        """Names of the K classes; `ids` has their labels in masks."""
        return [str(label) if self._named is None else self._named[label] for label in self.ids.tolist()]

    def examine(self, tokens: TokenArray, pictures: Pictures) -> list[str]:
        """Read all masks once: learn the classes, compare the sizes with those of the pictures, and return notes.

        Raises:
            InputError: a mask cannot be read, has another size than its picture, or a label that is not a class.
        """
        counts: dict[int, int] = {}
        total = lost = 0
        mostly_lost: list[int] = []
        for row in self._names:
            mask = self._labels(row)
            self._check_size(row, mask, pictures)
            of_mask = _counted(mask)
            for label, pixels in of_mask.items():
                counts[label] = counts.get(label, 0) + pixels
            if len(counts) > _MOST_LABELS:
                raise InputError(
                    f"the masks have more than {_MOST_LABELS:,} different labels; expected classes",
                    hint="numbers of objects and depths are not classes",
                )
            labelled = sum(of_mask.values())
            outside = labelled - int((mask[_inside(tokens, mask)] >= 0).sum())
            total, lost = total + labelled, lost + outside
            if outside > labelled / 2:
                mostly_lost.append(row)
        if not total:
            raise InputError("no pixel of the masks has a class", hint="does --ignore-label name the right labels?")
        if self._named is None:
            self.ids = np.array(sorted(counts), np.int64)
        elif unknown := sorted(set(counts) - set(self._named)):
            row = next(row for row in self._names if (self._labels(row) == unknown[0]).any())
            raise InputError(
                f"{self._shown(row)} has the label {unknown[0]}, which is not a class",
                hint="add it to the file of --class-names, or name it with --ignore-label",
            )
        notes = [f"sizes of masks are not compared with the images: {pictures.why_not}"] if pictures.why_not else []
        if lost > _LOST * total:
            of_images = f", and more than half of those of {len(mostly_lost):,} images" if mostly_lost else ""
            notes.append(
                f"{lost / total:.0%} of the labelled pixels lie outside the crop{of_images}; they are neither learned "
                "from nor tested"
            )
        return notes

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        labels = self._labels(row)
        numbers = np.minimum(np.searchsorted(self.ids, labels), len(self.ids) - 1)
        return np.asarray(np.where(labels < 0, -1, numbers), np.int64)

    def _labels(self, row: int) -> NDArray[np.int64]:
        """Return (H, W) labels as they are in the file, but -1 for ignored ones."""
        mask = self._coco.read(self._names[row]) if self._coco is not None else _read(Path(self._names[row]))
        if (lowest := int(mask.min())) < (-1 if self._coco else 0) and lowest not in self._ignored:
            raise InputError(f"{self._shown(row)} has the label {lowest}", hint="name it with --ignore-label")
        mask[np.isin(mask, self._ignored)] = -1
        return mask

    def _check_size(self, row: int, mask: NDArray[np.int64], pictures: Pictures) -> None:
        """A mask may be smaller or larger than its picture, but must have its aspect ratio within a pixel."""
        size = pictures.size(row)
        if size is None:
            return
        (height, width), (picture_width, picture_height) = mask.shape, size
        if abs(width * picture_height - height * picture_width) > max(picture_width, picture_height):
            turned = "; are the pixels stored in another orientation than the mask?" * ((height, width) == size)
            raise InputError(
                f"{self._shown(row)} has {width} x {height} pixels, and its image {picture_width} x {picture_height}"
                f"{turned}"
            )

    def _shown(self, row: int) -> str:
        return f"the mask {printable(self._names[row])}"


def _inside(tokens: TokenArray, mask: NDArray[np.int64]) -> tuple[slice, slice]:
    """Return the rows and columns of pixels with their centres inside the crop."""
    height, width = mask.shape
    left, top, right, bottom = tokens.window((width, height))
    rows, columns = (slice(max(0, round(start)), max(0, round(end))) for start, end in ((top, bottom), (left, right)))
    return rows, columns


def _counted(mask: NDArray[np.int64]) -> dict[int, int]:
    """Return label -> number of pixels, without -1."""
    labels = mask[mask >= 0]
    if labels.size and labels.max() < _COUNTED:
        counts = np.bincount(labels)
        present = np.flatnonzero(counts)
        return dict(zip(present.tolist(), counts[present].tolist(), strict=True))
    values, numbers = np.unique(labels, return_counts=True)
    return dict(zip(values.tolist(), numbers.tolist(), strict=True))


def _read(path: Path) -> NDArray[np.int64]:
    """Read a mask (H, W): the numbers of an image with one channel or a palette, or an array of integers."""
    try:
        if path.suffix.lower() == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as image:
                array = np.asarray(image)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or "not an image"
        raise InputError(f"the mask {printable(str(path))} cannot be read: {reason}") from error
    except (ValueError, EOFError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"the mask {printable(str(path))} cannot be read: {first_line(error)}") from error
    if array.ndim == 3:
        raise InputError(
            f"the mask {printable(str(path))} has {array.shape[2]} channels; expected one, of labels or of a palette",
            hint="convert colours to labels first",
        )
    if array.ndim != 2 or array.dtype.kind not in "iub" or not array.size:
        raise InputError(
            f"the mask {printable(str(path))} has {array.ndim} axes of {array.dtype}; expected integers (H, W)"
        )
    return np.asarray(array, np.int64)
