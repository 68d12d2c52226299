"""Tables with a value for each image, such as labels or names of masks: which row belongs to which image.

The column `path` names the images. Without it, it is the only column whose values do. These attempts are made in turn;
the first one by which any row has an image is that of the whole table:

1. by the id, for a column `id` and images that have ids;
2. by the path, which may be absolute, or begin with the name of the folder of the images;
3. for parts of files, such as boxes, by the path of the file: the value is that of all its parts;
4. by the path without suffix;
5. by the file name;
6. by the name without suffix.

Not the attempt that finds most: the loose ones find wrong images too, as `train/3.png` for a row of `test/3.png`. Rows
and images that are left over are counted in notes.

In each, a row that names no image as it is written may differ by Unicode form (NFC or NFD), backslashes in place of
slashes, spaces around it, and the case of the suffix; not by the case of names, which are two images on some disks.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.credentials import text_without_credentials, without_credentials
from extract.errors import InputError
from extract.images.csv_lists import plain_path, read_table
from extract.images.image_list import SPLITS
from extract.images.part_names import FileNames, has_parts
from extract.system.csv_cells import safe_cell
from pipelines.terminal.text_output import printable

__all__ = ["ImageTable", "images_of_names", "read_image_table", "without_fractions"]

_FILE_SUFFIX = re.compile(r"\.[^\W\d_]\w{0,4}")  # .svs, but not .05 of the name 22.05
_EXAMPLES = 3  # columns in an error
_WHOLE_NUMBER = re.compile(r"(-?\d+)(\.0*)?|nan", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class ImageTable:
    """Values of images from a table.

    Attributes:
        texts: value of each image; "" for an empty value, None for an image without a row.
        splits: train, val, test or "" for each image; None if the table has no column `split`.
        notes: by what rows and images were matched, and how many were, in words.
    """

    texts: list[str | None]
    splits: list[str] | None
    notes: list[str]


def read_image_table(
    where: str, column: str, noun: str, paths: Sequence[str], ids: Sequence[str] | None, root: str, *,
    by_file: bool = True,
) -> ImageTable:  # fmt: skip
    """Read the values of images from a table.

    Two rows of one image are an error, unless they say the same.

    Args:
        where: CSV, TSV or Parquet file, or URL.
        column: its column of values.
        noun: what they are, for the notes.
        paths: of the images.
        ids: of the images, if they have any.
        root: folder of the images, as given or absolute.
        by_file: whether the value of a file may be that of its parts.

    Raises:
        InputError: no row, or no single column, names images; a row names several images; two rows of one image
            differ; or a split is unknown.
    """
    table, lines = read_table(where, column)
    column = column.strip().lower()
    keys = ["path"] if "path" in table else [name for name in table if name not in (column, "split")]
    values = {key: ["" if value is None else str(value) for value in table[key]] for key in keys}
    # Data sets of earlier versions have paths as they stood in a list.
    paths = [plain_path(path) for path in paths]
    files = list(FileNames(paths)) if by_file and has_parts(paths) else paths
    by, names, key, images_of = _joined(where, values, paths, files, ids, root)

    def place(row: int) -> str:
        number = f"line {lines[row]}" if lines else f"row {row}"
        return f"{number} ({printable(values[key][row])!r})"

    def content(row: int) -> tuple[str, str]:
        return _text(table[column][row]), str(table["split"][row] or "").strip().lower() if "split" in table else ""

    row_of: dict[int, int] = {}
    for row, images in enumerate(images_of):
        _check_same(images, names, f"{where}: {place(row)} names two images {by}")
        for image in images:
            before = row_of.setdefault(image, row)
            if content(before) != content(row):
                raise InputError(
                    f"{where}: {place(before)} and {place(row)} belong to the same image, "
                    f"{printable(names[image])}, and differ: {content(before)[0]!r} and {content(row)[0]!r}",
                    hint="leave one of them out",
                )
    notes = [f"{noun}: column {printable(key)}, {by}, {len(row_of):,} of {len(paths):,} images"]
    if unmatched := sum(not images for images in images_of):
        notes.append(f"{unmatched:,} of the {len(images_of):,} rows of {text_without_credentials(where)} have no image")
    rows = [row_of.get(image) for image in range(len(paths))]
    for row in row_of.values():
        if (split := content(row)[1]) and split not in SPLITS:
            raise InputError(f"{where}: {place(row)}: split {split!r}; expected train, val, test or no text")
    return ImageTable(
        [None if row is None else content(row)[0] for row in rows],
        ["" if row is None else SPLITS.get(content(row)[1], "") for row in rows] if "split" in table else None,
        notes,
    )


def images_of_names(
    where: str, names: Sequence[str], paths: Sequence[str], ids: Sequence[str] | None, root: str
) -> tuple[NDArray[np.int64], str]:
    """Return the image of each name, -1 if there is none, and by what they were matched, as in tables.

    Args:
        where: what has the names, for errors.
        names: names of images: paths, file names, stems or ids.
        paths: of the images.
        ids: of the images, if they have any.
        root: folder of the images, as given or absolute.

    Raises:
        InputError: no name is that of an image, a name is that of several images, or two names are of the same image.
    """
    values = {"path": names} | ({"id": names} if ids is not None else {})
    paths = [plain_path(path) for path in paths]
    by, _, _, images_of = _joined(where, values, paths, paths, ids, root)
    first: dict[int, str] = {}
    for name, images in zip(names, images_of, strict=True):
        # By their paths: parts of a file share its id.
        _check_same(images, paths, f"{where}: {printable(name)!r} names two images {by}")
        if images and first.setdefault(images[0], name) is not name:
            raise InputError(f"{where}: {printable(first[images[0]])!r} and {printable(name)!r} name the same image")
    return np.array([images[0] if images else -1 for images in images_of], np.int64), by


def _check_same(images: Sequence[int], names: Sequence[str], found: str) -> None:
    if len(different := sorted({names[image] for image in images})) > 1:
        raise InputError(
            f"{found}: {printable(different[0])} and {printable(different[1])}",
            hint=f"expected paths, such as {printable(different[0])!r}",
        )


def without_fractions(texts: Sequence[str | None]) -> list[str | None]:
    """Return 1 for 1.0 and "" for nan if all texts are whole numbers, as a column with gaps is written with floats."""
    found = [_WHOLE_NUMBER.fullmatch(text or "nan") for text in texts]
    if not all(found):
        return list(texts)
    return [None if text is None else match and (match[1] or "") for text, match in zip(texts, found, strict=True)]


def _joined(
    where: str, values: Mapping[str, Sequence[str]], paths: Sequence[str], files: Sequence[str],
    ids: Sequence[str] | None, root: str,
) -> tuple[str, Sequence[str], str, list[list[int]]]:  # fmt: skip
    """Return by what rows and images are joined, the names of the images, the column, and the images of each row."""
    root = root.rstrip("/")
    folders = [f"{folder}/" for folder in (root, root.rpartition("/")[2]) if folder]

    def paths_of(value: str) -> list[str]:
        given = plain_path(value)
        # Data sets of earlier versions have URLs as they were given.
        public = without_credentials(given)
        return [given, public, *(public.removeprefix(folder) for folder in folders)]

    def stems_of(value: str) -> list[str]:
        return [form for path in paths_of(value) for form in (path, _stem(path))]

    # by what -> images, what a row has to name of one, and what the value of a row may name, in the order of preference
    attempts: dict[str, tuple[Sequence[str], Callable[[str], str], Callable[[str], Iterable[str]]]] = {
        "by the path": (paths, str, paths_of),
        **({} if files is paths else {"by the path of the file": (files, str, paths_of)}),
        "by the path without suffix": (files, _stem, stems_of),
        "by the file name": (files, _name, lambda value: [_name(value)]),
        "by the name without suffix": (
            files, lambda path: _stem(_name(path)), lambda value: [_name(value), _stem(_name(value))],
        ),
    }  # fmt: skip
    if ids is not None and "id" in values:
        attempts = {"by the id": (ids, str, lambda value: [value]), **attempts}
    for by, (names, key, forms) in attempts.items():
        columns = {"id": values["id"]} if names is ids else values
        (first, rows), *others = _images_of(columns, names, key, forms).items() or [("", [])]
        if other := next((column for column, images in others if images != rows), None):
            raise InputError(
                f"{where}: the columns {first!r} and {other!r} both name images {by}, but not the same ones",
                hint="rename the right one to 'path'",
            )
        if rows:
            return by, names, first, rows
    if not values:
        raise InputError(f"{where}: no column names images", hint="add a column 'path'")
    examples = ", ".join(repr(printable(next(iter(column), "none"))) for column in [*values.values()][:_EXAMPLES])
    raise InputError(
        f"{where}: none of its {len(next(iter(values.values()))):,} values of {' or '.join(map(repr, values))} "
        f"names an image; the table has {examples}, the images have {printable(next(iter(paths), 'no images'))!r}"
    )


def _images_of(
    columns: Mapping[str, Sequence[str]], names: Sequence[str], key: Callable[[str], str],
    forms: Callable[[str], Iterable[str]],
) -> dict[str, list[list[int]]]:  # fmt: skip
    """Return the images of each row, for each column by which any row has an image."""
    exact: dict[str, list[int]] = {}
    folded: dict[str, list[int]] = {}
    for image, name in enumerate(map(key, names)):
        for spelling in {name, safe_cell(name)}:  # a table that layertap wrote has the escaped forms of a few names
            exact.setdefault(spelling, []).append(image)
        folded.setdefault(_folded(name), []).append(image)

    def images(value: str) -> list[int]:
        spellings = ((exact, value), (folded, _folded(value)))
        return next((images[form] for images, text in spellings for form in forms(text) if form in images), [])

    joined = {column: [images(value) if value else [] for value in values] for column, values in columns.items()}
    return {column: rows for column, rows in joined.items() if any(rows)}


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    stem, suffix = os.path.splitext(path)  # noqa: PTH122  a Path for each of a million names is slow
    return stem if _FILE_SUFFIX.fullmatch(suffix) else path


def _folded(path: str) -> str:
    stem, suffix = os.path.splitext(unicodedata.normalize("NFC", path).strip().replace("\\", "/"))  # noqa: PTH122
    return stem + suffix.lower()


def _text(value: Any) -> str:
    """Return the text of a table cell; "" for NaN, None and blank text."""
    if isinstance(value, float):  # a Parquet column of integers with gaps is read as floats: 3.0 means 3
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None else str(value).strip()
