"""Boxes of pictures from a table, a COCO file, or a folder of YOLO or Pascal VOC files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import yaml

from extract.errors import InputError, first_line
from extract.images.csv_lists import TABLES, plain_path, read_table
from extract.images.image_list import SPLITS, label_text
from extract.images.part_names import Window
from extract.system.json_files import read_json
from extract.system.similar_paths import did_you_mean

__all__ = ["Box", "read_boxes"]

_MOST_BYTES = 4 << 30  # of a COCO file; that of COCO's 118,000 training pictures has 450 MB
_MOST_PIXELS = 1_000_000_000  # along an axis; names hold 12 digits
_SIDES = ("x", "y", "w", "h")
_COCO = {
    "images": [{"id": (int, str), "file_name": str}],
    "annotations": [{"id?": (int, str), "image_id": (int, str), "bbox": [float], "category_id?": int}],
    "categories?": [{"id": int, "name": str}],
}


class Box(NamedTuple):
    """A box of a file.

    Attributes:
        file: path of the picture; without suffix if the boxes are in a file for each picture.
        window: the rectangle.
        label: name of its class; None if it has none.
        id: its id; None if it has none.
        split: train, val, test, or empty.
        kept: values of the columns to keep.
    """

    file: str
    window: Window
    label: str | None = None
    id: str | None = None
    split: str = ""
    kept: tuple[Any, ...] = ()


def read_boxes(where: str | os.PathLike[str], keep: Sequence[str] = ()) -> Iterator[Box]:
    """Yield the boxes of pictures.

    Args:
        where: a CSV, TSV or Parquet table with the columns `path`, `x`, `y`, `w`, `h`, and perhaps `label`, `id` and
            `split`, in pixels, or in fractions of the picture if no number is above 1; a `.json` file in the format of
            COCO; or a folder of `.txt` files in the format of YOLO, or of `.xml` files in that of Pascal VOC, whose
            pixels begin at 1.
        keep: columns of a table, or keys of annotations of COCO, to keep.

    Raises:
        InputError: the boxes do not exist, are in another format, or one has no numbers.
    """
    where = os.fspath(where)
    path = Path(where)
    if path.is_dir():
        if keep:
            raise InputError(f"keep {keep[0]!r}: boxes of {where} have a class only", hint="make a table of the boxes")
        return _in_folder(path)
    if path.suffix.lower() == ".json":
        return _of_coco(path, keep)
    if where.lower().endswith(TABLES):
        return _of_table(where, keep)
    hint = did_you_mean(where)
    raise InputError(
        f"boxes {where}: expected a table, a .json file of COCO, or a folder of YOLO or Pascal VOC files", hint=hint
    )


def _window(place: str, numbers: Iterable[Any], scale: float = 0.0) -> Window:
    """Return a window of x, y, w and h; of fractions, if `scale` is the number that is the whole picture.

    Pixels are rounded as Pillow's `crop` rounds the edges. What lies left of or above the picture is cut off. A box
    without area stays one: its row fails when it is cut.
    """
    try:
        x, y, w, h = map(float, numbers)
        if not all(abs(number) < _MOST_PIXELS for number in (x, y, w, h)):  # also no NaN
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(f"{place}: expected four numbers for x, y, w and h, below {_MOST_PIXELS:,}") from None
    if scale:
        x, y, w, h = (number / scale * 100 for number in (x, y, w, h))
        # Of -0.0, whose sign no name has, and 0, `max` returns the first.
        sides = max(0, x), max(0, y), max(0, w + min(x, 0)), max(0, h + min(y, 0))
        return Window(*sides, percent=True, cut=min(x, y) < -0.01)  # a pixel of 10,000
    (left, width), (top, height) = (_rounded(x, w), _rounded(y, h))
    return Window(left, top, width, height, cut=min(round(x), round(y)) < 0)


def _rounded(start: float, length: float) -> tuple[int, int]:
    first, last = max(round(start), 0), round(start + length)
    return first, max(last - first, 1 if length > 0 and last >= first else 0)


def _of_table(where: str, keep: Sequence[str]) -> Iterator[Box]:
    columns, lines = read_table(where, "x", ("y", "w", "h", "label", *keep))
    for name in ("path", *_SIDES, *(each.strip().lower() for each in keep)):
        if name not in columns:
            there = ", ".join(map(repr, columns))
            raise InputError(f"{where}: no column {name!r} among {there}; boxes need path, x, y, w and h")
    places = [f"{where}: line {line}" for line in lines] or [f"{where}: row {row}" for row in range(len(columns["x"]))]
    sides = list(zip(*(columns[name] for name in _SIDES), strict=True))
    windows = [_window(place, numbers) for place, numbers in zip(places, sides, strict=True)]
    if all(float(number) <= 1 for numbers in sides for number in numbers):
        windows = [_window(place, numbers, 1) for place, numbers in zip(places, sides, strict=True)]
    else:
        _check_pixels(places, sides)
    none = [None] * len(windows)
    labels, ids, splits = (columns.get(name) or none for name in ("label", "id", "split"))
    kept = list(zip(*(columns[name.strip().lower()] for name in keep), strict=True)) or [()] * len(windows)
    for place, path, window, label, id, split, values in zip(
        places, columns["path"], windows, labels, ids, splits, kept, strict=True
    ):
        split = str(split or "").strip().lower()
        if not isinstance(path, str) or not path:
            raise InputError(f"{place}: the path is empty")
        if split and split not in SPLITS:
            raise InputError(f"{place}: split {split!r}; expected train, val, test or an empty value")
        id = None if id is None else str(id)
        yield Box(plain_path(path), window, label_text(label), id, SPLITS.get(split, ""), values)


def _check_pixels(places: Sequence[str], sides: Sequence[tuple[Any, ...]]) -> None:
    """Refuse a box that looks like fractions among boxes in pixels."""
    for place, numbers in zip(places, sides, strict=True):
        values = list(map(float, numbers))
        if all(0 <= value <= 1 for value in values) and any(math.modf(value)[0] for value in values):
            raise InputError(
                f"{place}: {','.join(map(str, numbers))} looks like fractions of the picture, but other boxes are in "
                "pixels",
                hint="give all boxes in pixels, or all in fractions",
            )


def _of_coco(path: Path, keep: Sequence[str]) -> Iterator[Box]:
    try:
        content = read_json(path, _COCO, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"boxes {path}: no such file", hint=did_you_mean(path)) from None
    files = _by_id(path, "images", [(image["id"], image["file_name"]) for image in content["images"]])
    categories = [(category["id"], category["name"]) for category in content.get("categories", [])]
    classes = _by_id(path, "categories", categories)
    if content["annotations"] and all(max(box["bbox"], default=2) <= 1 for box in content["annotations"]):
        raise InputError(
            f"{path}: its boxes look like fractions of pictures; those of COCO are in pixels",
            hint="make a table of the boxes, which may have fractions",
        )
    for number, box in enumerate(content["annotations"]):
        place = f"{path}: annotation {box.get('id', number)}"
        if box["image_id"] not in files:
            raise InputError(f"{place}: no image has the id {box['image_id']}")
        label = box.get("category_id")
        if label is not None and classes and label not in classes:
            raise InputError(f"{place}: no category has the id {label}")
        name = None if label is None else classes.get(label, str(label))
        id = str(box["id"]) if "id" in box else None
        yield Box(
            plain_path(files[box["image_id"]]), _window(place, box["bbox"]), name, id, "", _kept(place, box, keep)
        )


def _by_id(path: Path, what: str, items: Sequence[tuple[Any, str]]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for id, name in items:
        if names.setdefault(id, name) != name:  # as in files that were joined
            raise InputError(f"{path}: the {what} {names[id]!r} and {name!r} have the same id {id}")
    return names


def _kept(place: str, box: Mapping[str, Any], keep: Sequence[str]) -> tuple[Any, ...]:
    values = {**box, **(box["attributes"] if isinstance(box.get("attributes"), dict) else {})}
    for name in keep:
        if not isinstance(values.get(name), str | int | float):
            raise InputError(f"{place}: expected text or a number for {name!r}; it has {', '.join(map(repr, values))}")
    return tuple(values[name] for name in keep)


def _in_folder(folder: Path) -> Iterator[Box]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".txt", ".xml"))
    files = [path for path in files if path.name != "classes.txt"]
    kinds = {path.suffix.lower() for path in files}
    if len(kinds) != 1:
        what = "both .txt and .xml files" if kinds else "no .txt or .xml file"
        raise InputError(f"boxes {folder}: {what}; expected those of YOLO (.txt) or of Pascal VOC (.xml)")
    if kinds == {".xml"}:
        return (box for path in files for box in _of_voc(path, _stem(folder, path)))
    names = _yolo_classes(folder)
    return (box for path in files for box in _of_yolo(path, _stem(folder, path), names))


def _stem(folder: Path, path: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


def _of_voc(path: Path, stem: str) -> Iterator[Box]:
    try:
        content = path.read_bytes()
        if b"<!ENTITY" in content:  # a few of them make gigabytes
            raise ElementTree.ParseError("it declares entities")
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, OSError) as error:
        raise InputError(f"{path} is not a file of Pascal VOC: {first_line(error)}") from error
    for number, each in enumerate(root.iter("object")):
        place = f"{path}: object {number}"
        sides = [each.findtext(f"bndbox/{name}") for name in ("xmin", "ymin", "xmax", "ymax")]
        try:
            left, top, right, bottom = (float(side or "") for side in sides)
        except ValueError:
            raise InputError(f"{place}: expected a bndbox with xmin, ymin, xmax and ymax") from None
        window = _window(place, (left - 1, top - 1, right - left + 1, bottom - top + 1))
        yield Box(stem, window, (each.findtext("name") or "").strip() or None)


def _of_yolo(path: Path, stem: str, names: Mapping[str, str]) -> Iterator[Box]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        values, place = line.split(), f"{path}: line {number}"
        if not values:
            continue
        if len(values) != 5:
            raise InputError(f"{place} has {len(values)} values; expected class, x, y, width and height")
        try:
            x, y, w, h = map(float, values[1:])
        except ValueError:
            raise InputError(f"{place}: expected numbers for x, y, width and height") from None
        if max(x, y, w, h) > 1:
            raise InputError(f"{place}: {' '.join(values[1:])}; expected fractions of the picture, at most 1")
        if names and values[0] not in names:
            raise InputError(f"{place}: no class has the number {values[0]}")
        yield Box(stem, _window(place, (x - w / 2, y - h / 2, w, h), 1), names.get(values[0], values[0]))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a file of text in UTF-8: {first_line(error)}") from error


def _yolo_classes(folder: Path) -> dict[str, str]:
    """Return the classes that a `classes.txt`, or a `data.yaml` of the folder or above it, names; by number."""
    if (listed := folder / "classes.txt").is_file():
        return {str(number): name.strip() for number, name in enumerate(_text(listed).splitlines()) if name.strip()}
    for place in (folder, *folder.resolve().parents[:2]):
        if (described := place / "data.yaml").is_file():
            try:
                names = yaml.safe_load(_text(described)).get("names") or {}
            except (yaml.YAMLError, AttributeError) as error:
                raise InputError(f"{described} is not a description of YOLO: {first_line(error)}") from error
            items = names.items() if isinstance(names, dict) else enumerate(names)
            return {str(number): str(name) for number, name in items}
    return {}
