"""Labels and splits of the rows of a data set: what to predict, and the rows to train, choose and test on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.row_groups import row_groups
from extract.errors import InputError, unknown_name
from extract.images.csv_lists import TABLES, file_and_column, plain_path
from extract.images.image_list import labels_from_values
from extract.images.part_names import has_parts
from extract.row_status import Status
from extract.store.reader import FeatureReader
from pipelines.terminal.image_tables import read_image_table, without_fractions
from pipelines.terminal.text_output import printable

__all__ = ["FILES", "SEPARATOR", "Labelling", "drop_leaks", "group_values", "label_rows"]

TEST_FRACTION = 0.2  # of each class, if a data set has no splits
FILES = {"segmentation": "masks", "depth": "depth"}  # tasks whose targets are files -> option that names them
_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".npy")  # of masks and depth maps
SEPARATOR = "|"  # between the labels of a multilabel row
_MOST_CLASSES = 20  # more classes need two rows each on average; otherwise they are taken for names or ids of images

_MOST_NOTES = 3  # on names of classes


@dataclass(frozen=True)
class Labelling:
    """Labels and splits of the rows of a data set.

    Attributes:
        task: "classification", "multilabel", "regression", "segmentation" or "depth".
        classes: (K,) names; none for segmentation and depth.
        unseen: names of the classes without training rows; their targets are -1, -2, ...
        targets: (N,) int64, (N, K) float32, (N, 1) float64 or, for segmentation and depth, (N,) names of files, for
            all rows; undefined for rows that are left out.
        train: row numbers, ascending; likewise `val` and `test`. Rows that are left out are in none of the three.
        groups: (N,) number of the group of each row; see `row_groups`.
        counts: number of "rows", and of rows left out because they are "failed", "unlabelled", "without a split".
        leaks: "test in train" and so on -> number of rows of the first split of whose group rows are in the second.
        notes: decisions, in words.
    """

    task: str
    classes: NDArray[Any]
    targets: NDArray[Any]
    train: NDArray[np.int64]
    val: NDArray[np.int64]
    test: NDArray[np.int64]
    groups: NDArray[np.int64]
    counts: dict[str, int]
    leaks: dict[str, int]
    notes: list[str]
    unseen: tuple[str, ...] = ()

    @property
    def sets(self) -> dict[str, NDArray[np.int64]]:
        """The three sets of rows by name."""
        return {"train": self.train, "val": self.val, "test": self.test}


def label_rows(
    reader: FeatureReader,
    labels: str | None,
    task: str = "classification",
    *,
    group: str | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
) -> Labelling:
    """Return the labels and splits of a data set.

    Args:
        reader: reader of the data set.
        labels: FILE or FILE:COLUMN, see `read_image_table`; None: the classes of the data set. For
            segmentation and depth, see `_files_of_rows`.
        task: "classification"; "multilabel": a row has any number of labels, separated by |; "regression",
            "segmentation" or "depth".
        group: kept column, `id`, or FILE:COLUMN; rows with the same value stay together, as copies and parts of one
            file do. None: these alone.
        test_fraction: fraction of each class to draw for testing; None: the data set's splits, or 0.2 without splits.
        seed: seed of the draw.

    Raises:
        InputError: the file matches no row, a label is not a number, or no rows are left.
        UnknownNameError: there is no such column.
    """
    notes: list[str] = []
    groups = row_groups(reader, None if group is None else group_values(reader, group, notes))
    if labels is None:
        names_of_classes = [*reader.classes, None]  # label -1 gives the last item, None
        texts, splits = [names_of_classes[label] for label in reader.labels.tolist()], list(reader.splits)
    elif task in FILES and not _is_table_of_files(labels):
        texts, splits = _files_of_rows(reader, labels, FILES[task]), list(reader.splits)
    else:
        texts, splits, more_notes = _from_file(reader, labels, task)
        notes += more_notes
    good, are_parts = reader.status == Status.OK, has_parts(reader.paths[:])
    if task == "classification":
        texts = [None if text == "-1" else text for text in texts]  # -1 is unlabelled, as in a list of images
    labelled = np.array([text is not None for text in texts], bool)
    counts = {"rows": len(reader.paths), "failed": int((~good).sum()), "unlabelled": int((good & ~labelled).sum())}
    used = good & labelled
    if not used.any():
        remedy = "name a table of labels: --labels FILE.csv" if labels is None and counts["unlabelled"] else ""
        if task in FILES and labels is not None:
            remedy = _where_files_are_expected(reader, labels, FILES[task])
        raise InputError(
            f"none of the {len(reader.paths):,} rows has both features and a label: {_reasons(counts)}", hint=remedy
        )
    classes, targets = _targets(texts, used, task, labels or "the data set")
    notes += _notes_on_spellings(classes, task)
    names = np.array(splits)
    known_splits = set(names[used].tolist()) - {""}
    if test_fraction is not None or not known_splits:
        fraction = TEST_FRACTION if test_fraction is None else test_fraction
        strata = targets if task == "classification" else np.zeros(len(targets), np.int64)
        is_test = _draw_test_rows(strata, groups, used, fraction, seed)
        names = np.where(is_test, "test", "train")
        population = "each class" if task == "classification" else "the rows"
        together = "copies" + (" and parts of a file" if are_parts else "")
        together += f", and images of the same {group}," if group else ""
        notes.append(f"{fraction:.0%} of {population} drawn for testing, with seed {seed}; {together} stay together")
        if known_splits:
            notes.append(f"the existing splits ({', '.join(sorted(known_splits))}) are not used")
        elif any(reader.splits):
            notes.append("the splits of the data set are not used: the list of labels has others, or none for these")
    elif "test" not in known_splits:
        if not known_splits >= {"train", "val"}:
            raise InputError(
                f"labelled rows are in {' and '.join(sorted(known_splits))} only",
                hint="draw test rows with --test-fraction",
            )
        names[names == "val"] = "test"
        notes.append("no labelled test images: val is used for testing, and nothing is chosen on it")
    if without := int((used & (names == "")).sum()):
        counts["without a split"] = without
    sets = {name: np.flatnonzero(used & (names == name)) for name in ("train", "val", "test")}
    for name in ("train", "test"):
        if not len(sets[name]):
            if test_fraction is not None or not known_splits:
                raise InputError("each class has only one image; no test images can be drawn")
            others = ", ".join(f"{split} has {len(rows):,}" for split, rows in sets.items() if len(rows))
            raise InputError(
                f"the split {name!r} has no rows with features and a label ({others}; {_reasons(counts)})",
                hint="draw test rows with --test-fraction, or store images of the other splits too",
            )
    n_groups, n_test = len(np.unique(groups[sets["test"]])), len(sets["test"])
    if n_groups < n_test and (group or are_parts):
        notes.append(
            f"the {n_test:,} test rows are of {n_groups:,} groups; intervals and p-values, which take rows as "
            "independent, are too narrow and too small"
        )
    labelling = Labelling(task, classes, targets, sets["train"], sets["val"], sets["test"], groups, counts, {}, notes)
    return _keep_trained_classes(replace(labelling, leaks=_leaks(groups, labelling)))


def drop_leaks(labelling: Labelling) -> Labelling:
    """Drop training rows whose group is in val or test, and rows of val whose group is in test."""
    groups = labelling.groups
    in_test = np.isin(groups[labelling.val], groups[labelling.test])
    val = labelling.val[~in_test]
    copied = np.isin(groups[labelling.train], np.concatenate([groups[labelling.test], groups[val]]))
    remaining = replace(labelling, train=labelling.train[~copied], val=val)
    if not len(remaining.train):
        raise InputError("all training rows are copies of rows of val or test, or of their files or groups")
    dropped = len(labelling.train) - len(remaining.train) + len(labelling.val) - len(val)
    what = "copies of rows of val or test, or of their files or groups"
    notes = [*labelling.notes, f"{dropped:,} rows of train and val left out: they are {what}"]
    return _keep_trained_classes(replace(remaining, notes=notes))


def _from_file(reader: FeatureReader, labels: str, task: str) -> tuple[list[str | None], list[str], list[str]]:
    """Return the label text of each row, the splits, and notes, from a table.

    An empty label becomes None, but "" for multilabel. Files are relative to the folder of the table.
    """
    where, column = file_and_column(labels, {"segmentation": "mask", "depth": "depth"}.get(task, "label"))
    root = str(reader.provenance.get("configuration", {}).get("images", ""))
    table = read_image_table(
        where, column, FILES.get(task, "labels"), reader.paths, reader.ids, root, by_file=task not in FILES
    )
    texts = without_fractions(table.texts) if task == "classification" else table.texts
    if task in FILES:
        texts = [text and str(Path(where).parent / text) for text in texts]
    if task != "multilabel":
        texts = [text or None for text in texts]
    return texts, list(reader.splits) if table.splits is None else table.splits, table.notes


def _is_table_of_files(where: str) -> bool:
    """Return whether files are named in a table: FILE.csv or FILE.csv:COLUMN."""
    return any(ending in where.lower() for ending in TABLES) and not Path(where).is_dir()


def _files_of_rows(reader: FeatureReader, where: str, option: str) -> list[str | None]:
    """Return the file of each row in a folder; None for no file.

    A file has the path of its image with another suffix: photos/a/1.jpg has masks/a/1.png.

    Raises:
        InputError: `where` is not a folder, or an image has two files, or two images have the same.
    """
    folder = Path(where)
    if not folder.is_dir():
        if where.lower().endswith(".json"):
            raise InputError(
                f"--{option} {where}: COCO files are not read",
                hint="write a PNG of labels for each image, by `annToMask` of pycocotools (docs/guides/tokens.md)",
            )
        expected = "expected a folder, or a table FILE.csv[:COLUMN] of files"
        raise InputError(f"--{option} {where}: {expected if folder.exists() else 'no such folder'}")
    if has_parts(reader.paths[:]):
        raise InputError(
            f"--{option} {where}: the rows are parts of images, such as {printable(reader.paths[0])}",
            hint="name the file of each part in a table FILE.csv",
        )
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith("."):
            stem = _without_suffix(path.relative_to(folder).as_posix())
            if stem in files:
                raise InputError(f"{files[stem]} and {path} belong to the same image; remove one of them")
            files[stem] = path
    image_of: dict[Path, str] = {}
    for name in map(plain_path, reader.paths):
        file = files.get(_without_suffix(name))
        if file is not None and image_of.setdefault(file, name) != name:
            raise InputError(
                f"{printable(str(file))} belongs to two images, {printable(image_of[file])} and {printable(name)}",
                hint="name the file of each image in a table FILE.csv",
            )
    in_folder = [files.get(_without_suffix(plain_path(path))) for path in reader.paths]
    return [None if path is None else str(path) for path in in_folder]


def _where_files_are_expected(reader: FeatureReader, where: str, option: str) -> str:
    """Return the place of the first image's file, for an error about files of which none belongs to a row."""
    if _is_table_of_files(where):
        return ""
    example = printable(str(Path(where) / _without_suffix(plain_path(reader.paths[0]))))
    return f"for the first image, {example}.png is expected; a table (--{option} FILE.csv) may name other files"


def _without_suffix(path: str) -> str:
    return str(PurePosixPath(path.lstrip("/")).with_suffix("")) if PurePosixPath(path).name else path


def _targets(texts: Sequence[str | None], used: NDArray[np.bool_], task: str, where: str) -> tuple[Any, NDArray[Any]]:
    rows = np.flatnonzero(used).tolist()
    if task == "classification":
        targets = np.full(len(texts), -1, np.int64)
        targets[rows], classes = labels_from_values([texts[row] for row in rows])
        kinds = len(np.unique(targets[rows]))
        if kinds > max(_MOST_CLASSES, len(rows) // 2):
            raise InputError(
                f"{where} gives {kinds:,} classes to {len(rows):,} rows",
                hint="classes need several rows; is it the right column? To predict numbers, use the protocol ridge",
            )
        return np.array(classes), targets
    if task == "multilabel":
        labels_of = {row: {label.strip() for label in str(texts[row]).split(SEPARATOR)} - {""} for row in rows}
        classes = sorted(set().union(*labels_of.values()))
        number = {name: i for i, name in enumerate(classes)}
        labels = np.zeros((len(texts), len(classes)), np.float32)
        for row, names in labels_of.items():
            labels[row, [number[name] for name in names]] = 1
        return np.array(classes), labels
    if task in FILES:
        return np.array([]), np.array([text or "" for text in texts])
    values = np.zeros((len(texts), 1))
    for row in rows:
        try:
            values[row] = float(str(texts[row]))
        except ValueError:
            values[row] = np.nan
        if not np.isfinite(values[row, 0]):
            raise InputError(f"{where}: the label {texts[row]!r} is not a number; the protocol ridge predicts numbers")
    return np.array(["target"]), values


def _notes_on_spellings(classes: NDArray[Any], task: str) -> list[str]:
    """Return notes on the first names of classes or labels that differ only by case or spaces."""
    spellings: dict[str, list[str]] = {}
    for name in classes.tolist():
        spellings.setdefault(" ".join(name.casefold().split()), []).append(name)
    noun = "labels" if task == "multilabel" else "classes"
    return [
        f"the {noun} {' and '.join(map(repr, names))} differ only by case or spaces; if they mean the same, give them "
        "one spelling in a list of labels (--labels)"
        for names in spellings.values() if len(names) > 1
    ][:_MOST_NOTES]  # fmt: skip


def group_values(reader: FeatureReader, group: str, notes: list[str]) -> list[str | None]:
    """Return the value of each row in a kept column, in `id`, or in a column of a table; add notes on a table."""
    columns = {**reader.columns, **({"id": reader.ids} if reader.ids is not None else {})}
    if group in columns:
        return [None if value != value else str(value) for value in columns[group]]  # NaN
    if not _is_table_of_files(group):
        raise unknown_name("column", group, columns, "the data set")
    where, column = file_and_column(group, "group")
    root = str(reader.provenance.get("configuration", {}).get("images", ""))
    table = read_image_table(where, column, "groups", reader.paths, reader.ids, root)
    notes += table.notes
    return table.texts


def _draw_test_rows(
    strata: NDArray[np.int64], groups: NDArray[np.int64], used: NDArray[np.bool_], fraction: float, seed: int
) -> NDArray[np.bool_]:
    """Draw rows for testing: the fraction of each stratum, but at least one of two or more; groups stay together."""
    generator = np.random.default_rng(seed)
    rows = np.flatnonzero(used)
    _, first = np.unique(groups[rows], return_index=True)
    heads = rows[np.sort(first)]  # the first row of each group
    taken = []
    for stratum in np.unique(strata[heads]):
        candidates = generator.permutation(heads[strata[heads] == stratum])
        count = max(round(fraction * len(candidates)), int(len(candidates) > 1))
        taken.append(candidates[: min(count, len(candidates) - 1)])
    return np.isin(groups, groups[np.concatenate(taken)])


def _leaks(groups: NDArray[np.int64], labelling: Labelling) -> dict[str, int]:
    pairs = (("test", "train"), ("test", "val"), ("val", "train"))
    of_set = {name: groups[rows] for name, rows in labelling.sets.items()}
    counts = {f"{later} in {earlier}": int(np.isin(of_set[later], of_set[earlier]).sum()) for later, earlier in pairs}
    return {overlap: count for overlap, count in counts.items() if count}


def _keep_trained_classes(labelling: Labelling) -> Labelling:
    """Keep only the classes that training rows have.

    Rows of val with other classes are left out; rows of test with other classes count as wrong.
    """
    if labelling.task == "multilabel":
        is_trained = labelling.targets[labelling.train].any(0)
        if not is_trained.any():
            raise InputError("no training row has a label")
        untrained = [str(name) for name in labelling.classes[~is_trained]]
        notes = [f"labels that no training row has are left out: {', '.join(untrained[:5])}"] if untrained else []
        targets = labelling.targets[:, is_trained]
        return replace(labelling, classes=labelling.classes[is_trained], targets=targets, notes=labelling.notes + notes)
    if labelling.task != "classification":
        return labelling
    is_trained = np.bincount(labelling.targets[labelling.train], minlength=len(labelling.classes)) > 0
    unseen = np.cumsum(np.logical_not(is_trained)) + len(labelling.unseen)
    number = np.append(np.where(is_trained, np.cumsum(is_trained) - 1, -unseen), -1)
    # Classes that an earlier call has marked as unseen keep their negative targets.
    targets = np.where(labelling.targets >= 0, number[labelling.targets], labelling.targets)
    known = targets[labelling.val] >= 0
    notes = labelling.notes
    if not known.all():
        notes = [*notes, f"{int((~known).sum()):,} rows of val are left out: no training row has their class"]
    names = (*labelling.unseen, *labelling.classes[np.logical_not(is_trained)].tolist())
    classes, val = labelling.classes[is_trained], labelling.val[known]
    return replace(labelling, classes=classes, targets=targets, val=val, notes=notes, unseen=names)


def _reasons(counts: dict[str, int]) -> str:
    left_out = [f"{count:,} {name}" for name, count in counts.items() if name != "rows" and count]
    return ", ".join(left_out) or "no row failed"
