"""Probe tokens with masks or depth maps: the files, their sizes, classes and crops; the probe of a layer; examples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract import defaults
from extract.analysis.dense import depth_probe, segmentation_probe, with_validation
from extract.analysis.probe.probing import ProbeResult
from extract.errors import InputError, first_line
from extract.images.csv_lists import read_table
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from extract.system.atomic_files import open_regular
from pipelines.probe.config import ProbeConfig
from pipelines.probe.labelling import Labelling
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import printable

__all__ = ["Example", "TokenProbes", "class_names", "examine"]

_EXAMPLES = 8  # test images that are drawn, evenly spread
_EXAMPLE_PX = 512  # longer side of their pictures


class Example(NamedTuple):
    """A test image with its mask or depth map, and the predicted one.

    Attributes:
        row: row of the data set.
        picture: RGB picture, made smaller; None if it is not available.
        truth: (H, W) numbers of classes, -1 for no label; or depths.
        predicted: (H, W) numbers of classes, -1 outside the crop; or depths, NaN outside the crop.
    """

    row: int
    picture: Image.Image | None
    truth: NDArray[Any]
    predicted: NDArray[Any]


class TokenProbes:
    """The masks or depth maps of a data set, and the probes of its layers.

    Args:
        config: configuration of the run.
        reader: reader of the data set.
        root: location of its images.
        labelling: splits, and the file of each row.
        tokens: tokens of any feature.

    Attributes:
        labelling: the same, with the names of the classes of masks, and with notes.

    Raises:
        InputError: see `examine`.
    """

    def __init__(self, config: ProbeConfig, reader: FeatureReader, root: str, labelling: Labelling, tokens: TokenArray):
        self._config = config
        rows = np.sort(np.concatenate([labelling.train, labelling.val, labelling.test])).tolist()
        names = {row: str(labelling.targets[row]) for row in rows}
        self._pictures = Pictures(reader, root, rows)
        self._files: MaskFiles | DepthFiles = DepthFiles(names)
        if config.task == "segmentation":
            named = None if config.class_names is None else class_names(config.class_names)
            self._files = MaskFiles(names, config.ignore_label or (), named)
        notes = examine(self._files, names, tokens, self._pictures)
        classes = np.array(self._files.classes if isinstance(self._files, MaskFiles) else [])
        self.labelling = replace(labelling, classes=classes, notes=[*labelling.notes, *notes])

    def probe(
        self, tokens: Sequence[TokenArray], *, validated: bool = False
    ) -> tuple[ProbeResult, Callable[[], list[Example]]]:
        """Probe one feature, or several concatenated ones; return the result, and a function that returns examples.

        Args:
            tokens: tokens of each feature.
            validated: whether to also fit a probe that is tested on validation images, by which one of several
                features may be chosen. Their tokens do not serve: those of another grid have other labels.

        Raises:
            InputError: see `segmentation_probe`, `depth_probe`.
        """
        sets, rows = self.labelling, tokens[0].rows
        train, val, test = (np.searchsorted(rows, part) for part in (sets.train, sets.val, sets.test))
        shown = set(test[np.linspace(0, len(test) - 1, min(_EXAMPLES, len(test))).round().astype(int)].tolist())
        kept: dict[int, NDArray[Any]] = {}

        def keep(image: int, predicted: NDArray[Any]) -> None:
            if image in shown:
                kept[int(rows[image])] = predicted

        result = self._fitted(tokens, train, val, test, keep)
        if validated:
            with contextlib.suppress(InputError):  # too few images, or without labels
                fitted, left_out, chosen_on = with_validation(train, val, self._config.seed, sets.groups[rows])
                validation = self._fitted(tokens, fitted, val[:0], left_out).value
                result = replace(result, validation=validation, chosen_on=chosen_on)
        return result, lambda: [self._example(row, predicted) for row, predicted in kept.items()]

    def _fitted(
        self, tokens: Sequence[TokenArray], train: NDArray[np.int64], val: NDArray[np.int64], test: NDArray[np.int64],
        on_prediction: Callable[[int, NDArray[Any]], None] | None = None,
    ) -> ProbeResult:  # fmt: skip
        config, groups = self._config, self.labelling.groups[tokens[0].rows]
        if not len(val) and len(np.unique(groups[train])) < len(train):
            train, val, _ = with_validation(train, val, config.seed, groups)
        common: dict[str, Any] = {
            "val": val if len(val) else None, "protocol": config.protocol, "seed": config.seed,
            "device": config.device, "memory_bytes": config.memory_bytes, "on_prediction": on_prediction,
        }  # fmt: skip
        files = _OfImages(self._files, tokens[0].rows)
        if isinstance(self._files, MaskFiles):
            return segmentation_probe(tokens, files, train, test, classes=self.labelling.classes.tolist(), **common)
        return depth_probe(tokens, files, train, test, max_depth=config.max_depth, **common)

    def _example(self, row: int, predicted: NDArray[Any]) -> Example:
        picture, _ = self._pictures.picture(row)
        if picture is not None:
            picture.thumbnail((_EXAMPLE_PX, _EXAMPLE_PX))
        return Example(row, picture, self._files[row], predicted)

    def about(self, result: ProbeResult) -> Mapping[str, Any]:
        """Return what a saved probe needs to write masks or depths: labels of classes, or how bins give depths."""
        assert result.model is not None
        if isinstance(self._files, DepthFiles):
            return result.model.about
        label_of = dict(zip(self._files.classes, self._files.ids.tolist(), strict=True))
        return {"labels": [label_of[str(name)] for name in result.model.classes_.tolist()]}


class _OfImages:
    """Files by the numbers of images of tokens, in place of rows."""

    def __init__(self, files: MaskFiles | DepthFiles, rows: NDArray[np.int64]):
        self._files, self._rows = files, rows

    def __getitem__(self, image: int) -> NDArray[Any]:
        return self._files[int(self._rows[image])]


_NOTED = 0.01  # least share of pixels outside the crop for which there is a note
_MOST_LABELS = 1000  # more are numbers of objects, or no labels at all
_LARGEST = 0xFFFF - 1  # label; 65,535 is written outside the crop
_VOID = 255  # label without a class, as in Pascal VOC, Cityscapes and MMSegmentation


def _read_pixels(path: Path, kinds: str, expected: str) -> NDArray[Any]:
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


def _check_size(name: str, shape: tuple[int, ...], size: tuple[int, int]) -> None:
    """Check that a file has the aspect ratio of its picture within a pixel; it may be smaller or larger.

    Args:
        name: name of the file.
        shape: (H, W) of the file.
        size: (width, height) of the picture.

    Raises:
        InputError: it has another.
    """
    (height, width), (picture_width, picture_height) = shape, size
    if abs(width * picture_height - height * picture_width) > max(picture_width, picture_height):
        turned = "; are the pixels stored in another orientation?" if (height, width) == size else ""
        raise InputError(
            f"{printable(name)} has {width} x {height} pixels, and its image {picture_width} x {picture_height}{turned}"
        )


def examine(
    files: MaskFiles | DepthFiles, names: Mapping[int, str], tokens: TokenArray, pictures: Pictures
) -> list[str]:
    """Read all files once: learn the classes, compare the sizes with those of the pictures, and return notes.

    All are read before the first fit: a file of another image, or not turned as its picture, would give low metrics and
    no error. What the crop leaves out is told: it can be 42 % of the labelled pixels (320 x 240, 224).

    Args:
        files: masks or depth maps.
        names: row -> its file.
        tokens: tokens of the data set.
        pictures: pictures of its rows.

    Raises:
        InputError: a file cannot be read, has another size than its picture, or a label that is not a class.
    """
    total = lost = mostly = 0
    for row, name in names.items():
        has_value = files.examine(row)
        height, width = has_value.shape
        if (size := pictures.size(row)) is not None:
            _check_size(name, (height, width), size)
        left, top, right, bottom = (max(0, round(edge)) for edge in tokens.window((width, height)))
        of_image = int(has_value.sum())
        outside = of_image - int(has_value[top:bottom, left:right].sum())
        total, lost = total + of_image, lost + outside
        mostly += outside > of_image / 2
    if not total:
        raise InputError(f"there are no {files.pixels} in the files")
    why = pictures.why_not
    notes = [f"sizes are not compared with those of the images: {printable(why)}"] if why else []
    if lost > _NOTED * total:
        of_images = f", and more than half of those of {mostly:,} images" if mostly else ""
        notes.append(f"{lost / total:.0%} of the {files.pixels} lie outside the crop{of_images}; they are not used")
    return notes


class DepthFiles:
    """Depth maps (H, W) in float32 by row, in the unit of the files; 0, negative numbers and NaN mean unknown.

    Args:
        names: row -> its file.
    """

    pixels = "pixels of known depth"

    def __init__(self, names: Mapping[int, str]):
        self._names = names

    def examine(self, row: int) -> NDArray[np.bool_]:
        """Return whether each pixel (H, W) has a depth."""
        depth = self[row]
        return np.asarray((depth > 0) & (depth < np.inf))

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        return _read_pixels(Path(self._names[row]), "iuf", "numbers as depths").astype(np.float32)


class MaskFiles:
    """Masks of images with the numbers of classes from 0 to K - 1, and -1 for pixels without a class.

    Args:
        names: row -> its file.
        ignored: labels without a class, besides 255.
        named: label -> name of its class; None: all labels in the masks are classes.
    """

    pixels = "labelled pixels"

    def __init__(self, names: Mapping[int, str], ignored: Sequence[int], named: Mapping[int, str] | None):
        self._names, self._ignored = names, np.array([*ignored, _VOID], np.int64)
        if named is not None and _VOID in named:
            raise InputError(f"--class-names has the label {_VOID}, which means no label", hint="use another label")
        self._named = None if named is None else {label: name for label, name in named.items()
                                                  if label not in self._ignored}  # fmt: skip
        self._seen = set(self._named or ())

    @property
    def ids(self) -> NDArray[np.int64]:
        """Labels of the classes in masks, ascending; complete once all masks are examined."""
        return np.array(sorted(self._seen), np.int64)

    @property
    def classes(self) -> list[str]:
        """Names of the K classes."""
        return [str(label) if self._named is None else self._named[label] for label in self.ids.tolist()]

    def examine(self, row: int) -> NDArray[np.bool_]:
        """Return whether each pixel (H, W) has a class, and learn the classes.

        Raises:
            InputError: the mask cannot be read, has a label that is not a class, or there are too many labels.
        """
        mask = self._labels(row)
        labels = set(np.flatnonzero(np.bincount(mask[mask >= 0])).tolist())  # faster than sorting
        if self._named is not None and (unknown := labels - self._seen):
            raise InputError(
                f"{printable(self._names[row])} has the label {min(unknown)}, which is not a class",
                hint="add it to the file of --class-names, or name it with --ignore-label",
            )
        self._seen |= labels
        if len(self._seen) > _MOST_LABELS and self._named is None:
            raise InputError(
                f"the masks have more than {_MOST_LABELS:,} different labels; expected classes",
                hint="numbers of objects and depths are not classes",
            )
        return np.asarray(mask >= 0)

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        labels, ids = self._labels(row), self.ids
        numbers = np.minimum(np.searchsorted(ids, labels), len(ids) - 1)
        return np.asarray(np.where(labels < 0, -1, numbers), np.int64)

    def _labels(self, row: int) -> NDArray[np.int64]:
        """Return (H, W) labels as they are in the file, but -1 for ignored ones."""
        name = self._names[row]
        pixels = _read_pixels(Path(name), "iub", "integers as labels")
        if pixels.max() > _LARGEST:
            raise InputError(f"{printable(name)} has the label {pixels.max()}; expected labels up to {_LARGEST:,}")
        mask = pixels.astype(np.int64)
        without = np.isin(mask, self._ignored)
        if (wrong := mask[(mask < 0) & ~without]).size:
            raise InputError(f"{printable(name)} has the label {wrong.min()}", hint="name it with --ignore-label")
        mask[without] = -1
        return mask


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
        if not str(text).isascii() or not str(text).isdigit() or int(text) > _LARGEST:
            raise InputError(f"{path}: the id {text!r} is not a whole number from 0 to {_LARGEST:,}")
        if int(text) in names:
            raise InputError(f"{path}: the id {text} occurs twice")
        names[int(text)] = str(name)
    if len(set(names.values())) < len(names):
        raise InputError(f"{path}: two classes have the same name", hint="give each its own name")
    return names
