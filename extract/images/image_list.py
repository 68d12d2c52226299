"""Images before any of them is read: names in a fixed order, labels, splits, and their source."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.credentials import without_credentials
from extract.errors import InputError, first_line, unknown_name
from extract.images.decoding import IMAGE_SUFFIXES, SLIDE_SUFFIXES, VIDEO_SUFFIXES
from extract.images.sources import Chosen, ImageSource
from extract.system.optional_libraries import library

__all__ = [
    "PART_KINDS", "SPLITS", "Column", "Images", "ListHashes", "are_asked", "are_frames", "arrow_column",
    "chosen_columns", "in_pieces", "is_litter", "joined", "label_text", "labels_from_folders", "labels_from_values",
    "labels_hash", "order_of", "other_suffix", "pick_images", "suffixes_of", "text_column", "texts_hash", "values_at",
]  # fmt: skip

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

# Files that operating systems and file servers leave in folders and archives, besides hidden files.
_LITTER = frozenset({
    "thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "$recycle.bin", "system volume information", "lost+found",
    "@eadir", "icon\r",
})  # fmt: skip

_LARGEST_LABEL = 100_000  # integers up to it are labels; with a larger one, integers are class names
_PIECE_ROWS = 100_000

# Settings (`extract.extraction.settings.PartSettings`) that ask for rows that are parts of files, and those that have
# an effect with tiles only.
_FRAMES = ("fps", "every", "keyframes")
PART_KINDS = ("boxes", "tiles", "views", *_FRAMES)
_OF_TILES = ("overlap", "level", "content", "masks")

Column = Sequence[str] | NDArray[Any]

# Columns of every table of features, and that of pictures.
_TAKEN = ("row", "path", "path_bytes", "label", "class", "split", "status", "id", "image")


@dataclass(frozen=True)
class ListHashes:
    """What tells two lists of images apart.

    Attributes:
        split_names: the splits that occur, sorted.
        paths_xxh3: xxh3-128 of all paths, separated by zero bytes.
        labels_xxh3: xxh3-128 of labels, splits, classes, ids and kept columns, which may change where paths do not.
    """

    split_names: list[str]
    paths_xxh3: str
    labels_xxh3: str


@dataclass(frozen=True)
class Images:
    """The images of a run, sorted by the bytes of their paths.

    The columns `paths`, `labels`, `splits` and `ids` are in memory, or those of a plan
    (`extract.images.plans.PlanColumn`), which are read when rows are taken. `slice`, `select` and `head` return images
    in memory.

    Attributes:
        root: the folder, archive, list or URL; absolute, so valid from any working directory of this machine.
        paths: relative to the folder or URL, or as in the list or archive, with `/`; bytes that are not UTF-8 are
            decoded as by `os.fsdecode`.
        labels: (N,) int64, index into `classes`; -1 for an image without a class.
        classes: names of the classes.
        splits: `train`, `val`, `test` or empty, for each image.
        source: reads the bytes of a row.
        ids: id of each image, from the list; None if there are no ids.
        left_out: suffix or other reason -> number of files that are not images.
        notes: messages for the user about the listing.
        columns: name -> values of each image, of further columns to store.
        stored_hashes: hashes that are stored with a plan; None: they are computed when needed.
    """

    root: str
    paths: Sequence[str]
    labels: NDArray[np.int64]
    classes: list[str]
    splits: Sequence[str]
    source: ImageSource
    ids: Sequence[str] | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    stored_hashes: ListHashes | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def head(self, count: int) -> Images:
        """Return the first `count` images; `classes` does not change."""
        return self if count >= len(self) else self.slice(0, count)

    def slice(self, start: int, stop: int) -> Images:
        """Return the rows of a range."""
        rows = range(start, min(stop, len(self)))
        return self._taken(lambda column: column[rows.start : rows.stop], Chosen(self.source, rows))

    def select(self, rows: Sequence[int]) -> Images:
        """Return the given rows, which ascend."""
        return self._taken(lambda column: values_at(column, rows), Chosen(self.source, rows))

    def rows_of(self, paths: Sequence[str]) -> list[int | None]:
        """Return the row of each path, None for a path that is not listed."""
        wanted = set(paths)
        rows = {path: row for row, path in enumerate(self.paths) if path in wanted}
        return [rows.get(path) for path in paths]

    def _taken(self, take: Callable[[Any], Any], source: ImageSource) -> Images:
        return replace(
            self,
            paths=take(self.paths),
            labels=take(self.labels),
            splits=take(self.splits),
            source=source,
            ids=None if self.ids is None else take(self.ids),
            columns={name: take(values) for name, values in self.columns.items()},
            stored_hashes=None,
        )

    @property
    def split_names(self) -> list[str]:
        """See `ListHashes`."""
        return self.stored_hashes.split_names if self.stored_hashes else sorted(set(self.splits) - {""})

    @cached_property
    def paths_xxh3(self) -> str:
        """See `ListHashes`."""
        if self.stored_hashes:
            return self.stored_hashes.paths_xxh3
        return texts_hash(in_pieces(self.paths))

    @cached_property
    def labels_xxh3(self) -> str:
        """See `ListHashes`."""
        if self.stored_hashes:
            return self.stored_hashes.labels_xxh3
        texts = [in_pieces(self.splits), [self.classes], in_pieces(self.ids or [])]
        for name in sorted(self.columns):
            texts += [[[name]], (list(map(str, values)) for values in in_pieces(self.columns[name]))]
        return labels_hash(self.labels, texts)


def are_asked(asked: Any) -> bool:
    """Whether settings ask for parts of files.

    Raises:
        InputError: a setting of tiles has no effect, or two kinds of parts are asked for.
    """
    kinds = [name for name in PART_KINDS if getattr(asked, name, None)]
    if len(kinds) > 1:
        raise InputError(f"{kinds[0]} and {kinds[1]} exclude each other: a row is one kind of part")
    if not getattr(asked, "tiles", None) and (given := [name for name in _OF_TILES if getattr(asked, name, None)]):
        raise InputError(f"{given[0]} is that of tiles, and there are none", hint="add --tiles 512")
    if getattr(asked, "masks", None) and not asked.content:
        raise InputError("masks tell the content of tiles, and all tiles are kept", hint="add --content 0.5")
    return bool(kinds)


def are_frames(asked: Any) -> bool:
    """Whether settings ask for frames of videos."""
    return any(getattr(asked, name, None) for name in _FRAMES)


def suffixes_of(asked: Any) -> frozenset[str]:
    """Return the suffixes of the files that a run lists: of images, slides or videos."""
    if are_frames(asked):
        return VIDEO_SUFFIXES
    with_slides = getattr(asked, "tiles", None) or getattr(asked, "boxes", None)
    return IMAGE_SUFFIXES | SLIDE_SUFFIXES if with_slides else IMAGE_SUFFIXES


def texts_hash(pieces: Iterable[Sequence[str | bytes]]) -> str:
    """Return the xxh3-128 of texts, separated by zero bytes."""
    digest = xxhash.xxh3_128()
    _update_with_texts(digest, pieces)
    return digest.hexdigest()


def labels_hash(labels: NDArray[np.integer[Any]], columns: Iterable[Iterable[Sequence[str]]]) -> str:
    """Return `labels_xxh3`.

    Args:
        labels: (N,) integers.
        columns: further columns, each in pieces.
    """
    digest = xxhash.xxh3_128()
    for piece in in_pieces(labels):
        digest.update(piece.astype("<i8").tobytes())
    for pieces in columns:
        _update_with_texts(digest, pieces)
        digest.update(b"\0\0")
    return digest.hexdigest()


def _update_with_texts(digest: xxhash.xxh3_128, pieces: Iterable[Sequence[str | bytes]]) -> None:
    """Add texts, separated by zero bytes, to a hash."""
    separator = b""
    for texts in pieces:
        # All at once, which takes a tenth of the time.
        of_bytes = len(texts) > 0 and isinstance(texts[0], bytes)
        joined = b"\0".join(cast(Sequence[bytes], texts)) if of_bytes else "\0".join(cast(Sequence[str], texts))
        digest.update(separator + os.fsencode(joined))
        separator = b"\0"


def in_pieces(column: Column) -> Iterator[Any]:
    """Yield a column in pieces, so that no copy of all its texts is in memory."""
    return (column[start : start + _PIECE_ROWS] for start in range(0, len(column), _PIECE_ROWS))


def order_of(paths: Sequence[str]) -> list[int]:
    """Return the positions that sort paths by their bytes."""
    encoded = [os.fsencode(path) for path in paths]
    return sorted(range(len(encoded)), key=encoded.__getitem__)


def is_litter(name: str) -> bool:
    """Return whether a file or folder of this name is hidden or was left by an operating system or file server."""
    return name.startswith(".") or name.lower() in _LITTER


def pick_images(names: Iterable[str], suffixes: Collection[str] = IMAGE_SUFFIXES) -> tuple[list[str], Counter[str]]:
    """Return the names with an image suffix, or one of others, and the number of other names by suffix."""
    paths: list[str] = []
    left_out: Counter[str] = Counter()
    for name in names:
        if other := other_suffix(name, suffixes):
            left_out[other] += 1
        else:
            paths.append(name)
    return paths, left_out


def other_suffix(name: str, suffixes: Collection[str] = IMAGE_SUFFIXES) -> str:
    """Return the suffix of a file that is not an image ("no suffix" if it has none), or "" for an image."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  a Path for each of a million files is slow
    if suffix in suffixes:
        return ""
    return suffix or "no suffix"


def labels_from_folders(paths: Sequence[str]) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Return labels, classes and splits, derived from folder names.

    The first folder is the class. If every first folder is named train, val (valid, validation) or test, it is the
    split, and the folder below it is the class.
    """
    folders = [path.rpartition("/")[0] for path in paths]
    names_of = {folder: folder.split("/") if folder else [] for folder in set(folders)}
    tops = {names[0] for names in names_of.values() if names}
    # `train` beside `airplane` and `bus` is a class: all first folders must have names of splits.
    are_splits = bool(tops) and all(top.lower() in SPLITS for top in tops)
    class_of = {folder: names[are_splits] if names[are_splits:] else None for folder, names in names_of.items()}
    split_of = {folder: SPLITS[names[0].lower()] if are_splits and names else "" for folder, names in names_of.items()}
    classes = sorted({name for name in class_of.values() if name is not None}, key=os.fsencode)
    labels, _ = _indexed([class_of[folder] for folder in folders], classes)
    return labels, classes, [split_of[folder] for folder in folders]


def labels_from_values(values: Sequence[str | int | None]) -> tuple[NDArray[np.int64], list[str]]:
    """Return labels and classes from the value given for each image; None, "" and -1 mean no class.

    If all values are integers from 0 to `_LARGEST_LABEL`, they are the labels, and their digits the class names.
    """
    texts = [label_text(value) for value in values]
    return _indexed(texts, _classes_of_values({text for text in texts if text is not None}))


def label_text(value: str | int | None) -> str | None:
    """Return the label given for an image as text; None for no class."""
    return None if value in (None, "", "-1", -1) else str(value)


def _classes_of_values(known: set[str]) -> list[str]:
    """Return the classes for the set of all labels, as text; see `labels_from_values`."""
    numbers = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text, re.ASCII) for text in known)
    if numbers and known and 0 <= min(map(int, known)) <= max(map(int, known)) <= _LARGEST_LABEL:
        return [str(number) for number in range(max(map(int, known)) + 1)]
    return sorted(known, key=int if numbers else os.fsencode)


def _indexed(names: Sequence[str | None], classes: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    index = {name: i for i, name in enumerate(classes)}
    return np.array([-1 if name is None else index[name] for name in names], np.int64), classes


# Further columns of a list or dataset, which are stored with the features of its images: captions, ids, ages. They are
# in the shards, so that one shard, a merged data set and a bucket have them, and `h5py` reads them; a table beside the
# shards would be a second file that must match. Values of CSV stay text: guessing makes 7 of `007`.


def chosen_columns(where: str, keep: Iterable[str], there: Mapping[str, str]) -> dict[str, str]:
    """Return name, as it was given -> column, of the columns to keep.

    Args:
        where: name of the list or dataset.
        keep: names of columns; case-insensitive.
        there: name in lower case -> column that `where` has.

    Raises:
        UnknownNameError: there is no such column.
        InputError: its name cannot be used.
    """
    chosen: dict[str, str] = {}
    for name in keep:
        key = name.strip().lower()
        if key in _TAKEN:
            raise InputError(
                f"keep {name!r}: a data set has a column of this name in any case", hint="rename a column to keep it"
            )
        if key not in there:
            raise unknown_name("column", name, [each for each in there.values() if each.lower() not in _TAKEN], where)
        if not key or key.startswith(".") or {"/", "\0"} & set(key):
            raise InputError(f"keep {name!r}: a kept column cannot have this name", hint="rename the column")
        chosen.setdefault(name.strip(), there[key])
    return chosen


def text_column(where: str, name: str, values: Sequence[str], place: Callable[[int], str]) -> list[str]:
    """Return the values of a column of text, without credentials of URLs.

    Args:
        where: name of the list.
        name: name of the column.
        values: its values.
        place: position of a value -> its line or row, for messages.

    Raises:
        InputError: a value is not UTF-8, or has a null character.
    """
    for i, value in enumerate(values):
        if not value.isascii() and any("\udc80" <= char <= "\udcff" for char in value):
            raise InputError(f"{where}: {place(i)}: the {name} is not UTF-8", hint="save the list in UTF-8")
        if "\0" in value:
            raise InputError(f"{where}: {place(i)}: the {name} contains a null character")
    return [without_credentials(value) for value in values]


def arrow_column(where: str, name: str, column: Any, names: Sequence[str] | None = None) -> Column:
    """Return a column of Arrow as text, int64 or float64.

    Whole numbers and booleans are int64, or float64 with NaN if some are missing; other numbers are float64. Anything
    else that Arrow writes as text, such as times, is text, and empty if it is missing.

    Args:
        where: name of the list or dataset.
        name: name of the column.
        column: an Arrow array.
        names: names of classes, if the values are their numbers.

    Raises:
        InputError: the values are neither text nor numbers, or too large.
    """
    pa = library("pyarrow", "parquet", f"{where}: Parquet")
    if names is not None:
        known = dict(enumerate(names))
        return [known.get(value, "") for value in column.to_pylist()]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    try:
        plain = column.cast(kind)
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
            if not plain.null_count:
                return np.asarray(plain.cast(pa.int64()).to_numpy(), np.int64)
            plain = plain.cast(pa.int64()).cast(pa.float64())
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return np.asarray(plain.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)
        values = [value or "" for value in plain.cast(pa.string()).to_pylist()]
    except (pa.ArrowException, TypeError) as error:
        raise InputError(
            f"{where}: column {name!r} is {kind}; expected text, int64 or float64: {first_line(error)}"
        ) from error
    return text_column(where, name, values, "row {}".format)


def values_at(column: Any, rows: Sequence[int]) -> Any:
    """Return the values of some rows: a list of a list, an array of an array."""
    return [column[row] for row in rows] if isinstance(column, list) else column[np.asarray(rows, np.int64)]


def joined(where: str, parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Return the columns of parts, one after the other.

    Raises:
        InputError: a column has text in one part, and numbers in another.
    """
    columns: dict[str, Column] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        arrays = [column for column in values if isinstance(column, np.ndarray)]
        if arrays and len(arrays) < len(values):
            raise InputError(f"{where}: column {name!r} has text in one split, and numbers in another")
        columns[name] = np.concatenate(arrays) if arrays else [text for column in values for text in column]
    return columns
