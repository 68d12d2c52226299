"""Files of dissimilarity matrices (RDMs) and responses with the names of their images, and of odd-one-out triplets.

A list of texts with one for each image names the images: a second array of .npz, HDF5 or .mat files, or the first line
or column of a CSV file of dissimilarities. A table of responses names them in the column `path`, `id` or `row`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.analysis.rsa import Floats, condensed, images_of_pairs
from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.images.arrays import SUFFIXES, arrays_in, open_array, split_name
from extract.images.csv_lists import TABLES, file_and_column, opened, read_table
from extract.system.optional_libraries import library

__all__ = ["read_rdms", "read_responses", "read_stimuli", "read_triplets"]

_NAMED = (".npz", ".mat", *SUFFIXES)  # files of several arrays
_NUMBERED = ("unnamed: ", "__index_level_")  # columns of row numbers that pandas writes
_KEYS = ("path", "id", "row")  # columns that name images, in the order of preference


def read_rdms(where: str) -> tuple[Floats, list[str] | None]:
    """Return RDMs (S, N (N - 1) / 2), and the names of the N images; None if the file has none.

    Args:
        where: FILE.npy, .npz[:NAME], .h5[:NAME], .mat[:NAME], .csv, .tsv or .txt; see `condensed` for the shapes.

    Raises:
        InputError: the file has no RDMs; or several arrays of numbers, or lists of names, and it is not clear which.
    """
    array, lists = _one_array(where, "rdm")
    rdms = condensed(array, where)
    return rdms, _only_list(where, lists, images_of_pairs(rdms.shape[1]))


def read_responses(
    where: str, others: Sequence[str | None]
) -> tuple[Any, list[str] | None, list[str] | None, str]:  # fmt: skip
    """Read responses to images.

    Args:
        where: an array (P, T) or (P,) in FILE.npy, .npz[:NAME], .h5[:NAME] or .mat[:NAME]; or a table FILE.csv, .tsv or
            .parquet, all columns besides those that name images, or those of FILE.csv:COLUMN,COLUMN.
        others: that of `--stimuli` and of `--group`, FILE.csv:COLUMN or COLUMN, which are no targets.

    Returns:
        (P, T) numbers, of .npy and HDF5 not yet read; and, None if the file has none: (T,) names of the targets, (P,)
        names of the images; and the column of these.

    Raises:
        InputError: the file has no responses, a table names no images and no stimuli are given, a cell is no number,
            or see `read_rdms`.
        UnknownNameError: there is no such column.
    """
    path, chosen = split_name(where, TABLES)
    if not path.lower().endswith(TABLES):
        array, lists = _one_array(where, "targets")
        array = np.asarray(array)[:, None] if len(array.shape) == 1 else array
        if len(array.shape) != 2 or not all(array.shape):
            raise InputError(f"{where}: {array.dtype} of shape {array.shape}; expected images or trials x targets")
        return array, None, _only_list(where, lists, len(array)), ""
    table, _ = read_table(path, None)
    used = {"", *_KEYS, "split", *(each.rpartition(":")[2].strip().lower() for each in others if each)}
    targets = [name.strip().lower() for name in chosen.split(",") if chosen]
    targets = targets or [name for name in table if name not in used and not name.startswith(_NUMBERED)]
    numbers = [_numbers(path, table, name) for name in targets]
    if not numbers or not len(numbers[0]):
        raise InputError(f"{path} has no targets: rows, and columns besides those that name images")
    key = next((key for key in _KEYS if key in table), "")
    if not key and not others[0]:
        hint = "add a column 'path', 'id' or 'row', or name them in their order: --stimuli FILE.csv"
        raise InputError(f"{path} names no images", hint=hint)
    images = ["" if cell is None else str(cell) for cell in table[key]] if key else None
    return np.stack(numbers, 1), targets, images, key


def _numbers(path: str, table: Mapping[str, Sequence[Any]], name: str) -> Floats:
    """Return a column as numbers; empty cells and NA are NaN."""
    if name not in table:
        raise unknown_name("column", name, table, path)
    cells = ["nan" if cell in (None, "", "NA") else cell for cell in table[name]]
    if (wrong := next((row for row, cell in enumerate(cells) if not _is_number(cell)), None)) is not None:
        hint = f"name the columns of targets: {path}:COLUMN,COLUMN"
        found = f"column {name!r}: row {wrong}, from 0, is {cells[wrong]!r}"
        raise InputError(f"{path}: {found}; expected a number", hint=hint)
    return np.array([float(cell) for cell in cells])


def _one_array(where: str, default: str) -> tuple[Any, list[list[str]]]:
    """Return the array of numbers of a file that is named, `default` or the only one, and its lists of texts."""
    path, name = split_name(where, _NAMED)
    arrays = _arrays_of(path)
    numbers = [key for key, each in arrays.items() if each.dtype.kind not in "OSU"]
    chosen = [key for key in numbers if key == (name or default)] or ([] if name else numbers)
    if len(chosen) != 1:
        raise InputError(f"{where}: one array of numbers is expected; {path} has {', '.join(numbers) or 'none'}",
                         hint=f"name one: {path}:NAME")  # fmt: skip
    return arrays[chosen[0]], [list(names) for names in {tuple(_texts(arrays[key])) for key in arrays.keys() - numbers}]


def _only_list(where: str, lists: list[list[str]], count: int) -> list[str] | None:
    """Return the list of `count` texts, which names the images; None if there is none."""
    fitting = [names for names in lists if len(names) == count]
    if len(fitting) > 1:
        raise InputError(f"{where}: {len(fitting)} lists may name its images", hint="name them with --stimuli FILE.csv")
    return fitting[0] if fitting else None


def read_stimuli(where: str) -> tuple[list[str], str]:
    """Return the names of images in their order, and the column of FILE.csv[:COLUMN] that has them, or `path`."""
    file, column = file_and_column(where, "path")
    key = column.strip().lower()
    return [str(value) for value in read_table(file, column)[0][key]], key


def read_triplets(where: str) -> tuple[NDArray[np.int64], list[str] | None]:
    """Read odd-one-out choices (T, 3): numbers of images, of which the third is the odd one.

    Args:
        where: .npy of numbers; or text with three numbers from 0, or three names, in a line.

    Returns:
        the numbers, and the names of the images that they count; None if they count the stimuli.

    Raises:
        InputError: it has another shape, or an image twice in a line.
    """
    cells = _arrays_of(where)["rdm"] if where.lower().endswith(".npy") else _cells(where)
    if cells.dtype.kind == "U" and np.char.isdecimal(cells[-1]).all():
        cells = cells[int(not np.char.isdecimal(cells[0]).all()) :]  # without a header
        cells = cells.astype(np.int64) if np.char.isdecimal(cells).all() else cells
    if cells.dtype.kind not in "iuU" or cells.ndim != 2 or cells.shape[1] != 3:
        raise InputError(f"{where}: {cells.dtype.name} {cells.shape}; expected numbers or names of images (T, 3)")
    if (again := (cells == np.roll(cells, 1, axis=1)).any(1)).any():
        row = int(again.argmax())
        raise InputError(f"{where}: triplet {row}, from 0, has an image twice: {', '.join(map(str, cells[row]))}")
    if cells.dtype.kind != "U":
        return cells.astype(np.int64), None
    names, numbers = np.unique(cells, return_inverse=True)
    return numbers.reshape(cells.shape), names.tolist()


def _arrays_of(path: str) -> dict[str, Any]:
    """Return name -> array, of .npy and HDF5 not yet read; the numbers of a file with one array are called rdm."""
    suffix = Path(path).suffix.lower()
    if suffix in (".csv", ".tsv", ".txt"):
        return _in_table(path)
    with opened(path):  # raises if it is not there
        pass
    try:
        if h5py.is_hdf5(path):
            return _in_hdf5(path, is_matlab=suffix == ".mat")
        if suffix == ".mat":  # before version 7.3
            found = library("scipy.io", "sklearn", path).loadmat(path)
            return {key: each for key, each in found.items() if not key.startswith("__")}
        return dict(np.load(path, allow_pickle=False)) if suffix == ".npz" else {"rdm": open_array(path, "")}
    except LayertapError:
        raise
    except Exception as error:  # NumPy, h5py and SciPy raise many types on damaged files
        hint = f"expected .npy, .csv, .tsv, .txt, {', '.join(_NAMED)}"
        raise InputError(f"{path} cannot be read as arrays: {first_line(error)}", hint=hint) from error


def _in_hdf5(path: str, is_matlab: bool) -> dict[str, Any]:
    """Return the arrays of an HDF5 file. MATLAB has its axes in reverse order, texts as uint16, and cells as links."""

    def value(data: h5py.Dataset) -> Any:
        if h5py.check_string_dtype(data.dtype) is not None:
            return np.asarray(data.asstr()[()], object)
        if h5py.check_ref_dtype(data.dtype) is not None:
            return np.array([text for cell in data[()].ravel() for text in value(data.file[cell])], object)
        if not is_matlab and data.shape is not None:
            return data  # which keeps the file open
        array = np.asarray(data[()]).T
        if data.attrs.get("MATLAB_class") != b"char":
            return array
        rows = np.ascontiguousarray(array.astype("<u2"))
        return np.array([row.tobytes().decode("utf-16-le", "surrogatepass") for row in rows], object)

    return {name: value(open_array(path, name)) for name in arrays_in(path) if not name.startswith("#")}


def _texts(array: NDArray[Any]) -> list[str]:
    """Return texts; those of MATLAB may be arrays in cells, and are padded with spaces."""
    cells = [each.item() if isinstance(each, np.ndarray) and each.size == 1 else each for each in array.ravel()]
    return [(os.fsdecode(each) if isinstance(each, bytes) else str(each)).rstrip(" ") for each in cells]


def _in_table(path: str) -> dict[str, Any]:
    """Return the numbers of a table, and the texts of its first line and first column, if these are no numbers."""
    cells, texts = _cells(path), {}
    # An empty corner is that of a table with numbered rows and columns, or of a diagonal without values.
    is_numbered = cells[0, 0] == "" and (cells.diagonal() != "").any()
    if is_numbered or (len(cells) > 1 and not any(map(_is_number, cells[0, 1:]))):
        texts["head"], cells = cells[0, int(is_numbered) :], cells[1:]
    if is_numbered or not any(map(_is_number, cells[:, 0])):
        texts["index"], cells = cells[:, 0], cells[:, 1:]
    try:
        return {"rdm": np.where(cells == "", "nan", cells).astype(np.float64), **texts}
    except ValueError as error:
        raise InputError(f"{path} is not a matrix of numbers: {first_line(error)}") from error


def _is_number(cell: Any) -> bool:
    try:
        return float(cell or "nan") is not None
    except ValueError:
        return False


def _cells(path: str) -> NDArray[Any]:
    """Return the cells of a table (rows, columns) as text, separated by commas, tabs, semicolons or spaces."""
    with opened(path) as file:
        head = file.readline().decode("utf-8-sig", "replace")
        file.seek(0)
        delimiter = next((each for each in ",;\t" if each in head), None)
        try:
            how: dict[str, Any] = {"delimiter": delimiter, "comments": None, "quotechar": '"', "encoding": "utf-8-sig"}
            cells = np.loadtxt(file, str, ndmin=2, **how)
        except ValueError as error:
            raise InputError(f"{path} is not a table: {first_line(error)}") from error
    if not cells.size:
        raise InputError(f"{path} is empty")
    return np.char.strip(cells)
