"""Masks from the objects of a COCO file, which are polygons or run lengths."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.errors import InputError, first_line
from extract.system.optional_libraries import library
from pipelines.terminal.text_output import printable

__all__ = ["CocoFile"]

_BACKGROUND = "background"


class CocoFile:
    """Masks by the annotations of a COCO file: the pixels of an object have the id of its category.

    Pixels without an object have 0. Pixels of several objects have no class, -1, as in the reference training of
    torchvision.

    Args:
        path: JSON file with `images`, `annotations` and `categories`.

    Attributes:
        path: the file.
        names: `file_name` of the images.
        classes: label -> name; 0 is the background.

    Raises:
        InputError: the file cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            content = json.loads(path.read_bytes())
            self._images = {str(image["file_name"]): image for image in content["images"]}
            if any(int(annotation["category_id"]) == 0 for annotation in content["annotations"]):
                raise ValueError("objects have the category id 0, which is that of pixels without an object")
            # Some exporters write an id 0 that no object has.
            categories = [(int(row["id"]), str(row["name"])) for row in content["categories"] if int(row["id"])]
            self.classes = {0: _BACKGROUND} | dict(categories)
            _check_unique("file_name", [str(image["file_name"]) for image in content["images"]])
            _check_unique("category id", [number for number, _ in categories])
            _check_unique("category name", [_BACKGROUND, *(name for _, name in categories)])
            self._annotations: dict[Any, list[Mapping[str, Any]]] = {}
            for annotation in content["annotations"]:
                self._annotations.setdefault(annotation["image_id"], []).append(annotation)
        except OSError as error:
            raise InputError(f"--masks {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"--masks {path} is not a COCO file: {_reason(error)}") from error
        self.names = frozenset(self._images)

    def size(self, name: str) -> tuple[int, int]:
        """Return the (height, width) that the file states for an image.

        Raises:
            InputError: it states none, or more pixels than an image may have.
        """
        image = self._images[name]
        try:
            height, width = int(image["height"]), int(image["width"])
            if min(height, width) < 1 or height * width > defaults.MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise InputError(f"{self.path}: the image {printable(name)} is not valid: {_reason(error)}") from error
        return height, width

    def read(self, name: str) -> NDArray[np.int64]:
        """Return the mask (H, W) of an image.

        Raises:
            InputError: an annotation is not valid.
            LayertapError: pycocotools is not installed.
        """
        coco = library("pycocotools.mask", "coco", "a COCO file of masks")
        height, width = self.size(name)
        try:
            mask = np.zeros((height, width), np.int64)
            covered, several = np.zeros((2, height, width), bool)
            for annotation in self._annotations.get(self._images[name]["id"], ()):
                shape = annotation["segmentation"]
                if not shape:
                    continue
                _check_shape(shape, height, width)
                if not isinstance(shape, Mapping):
                    shape = coco.merge(coco.frPyObjects(shape, height, width))
                elif isinstance(shape["counts"], list):
                    shape = coco.frPyObjects(shape, height, width)
                inside = coco.decode(shape).astype(bool)
                mask[inside] = int(annotation["category_id"])
                several |= covered & inside
                covered |= inside
        except Exception as error:  # pycocotools raises `Exception` itself
            raise InputError(f"{self.path}: an object of {printable(name)} is not valid: {_reason(error)}") from error
        mask[several] = -1
        return mask


def _check_unique(what: str, values: Sequence[Any]) -> None:
    """Raise ValueError if a value occurs twice; "background" is the name of pixels without an object."""
    for value, count in Counter(values).items():
        if count > 1:
            taken = "; pixels without an object have it" if value == _BACKGROUND else ""
            raise ValueError(f"the {what} {printable(str(value))} occurs twice{taken}")


def _check_shape(shape: Any, height: int, width: int) -> None:
    """Check what pycocotools does not: with wrong sizes or coordinates it crashes or runs for very long."""
    if isinstance(shape, Mapping):
        if list(shape["size"]) != [height, width]:
            raise ValueError(f"its size is {shape['size']}; expected {[height, width]}")
        return
    for polygon in shape:
        values = np.asarray(polygon, np.float64)
        if values.ndim != 1 or len(values) < 6 or not (np.abs(values) <= 2 * max(height, width)).all():
            raise ValueError("a polygon needs three points or more, near the picture")


def _reason(error: BaseException) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
