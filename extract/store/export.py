"""Export features to files for other tools: HDF5, NumPy arrays, Parquet, MATLAB, a Hugging Face folder, or RDMs.

An export is written to a temporary folder and moved to its path when complete. What a killed export has left is removed
by a later one to the same path; see `extract.system.atomic_files`. At most 64 MB of features are held in memory at
once, and the labels and the status of all rows.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, unknown_name
from extract.row_status import Status
from extract.store.format.checked_file import hdf5_on_disk
from extract.store.format.layout import ROW_DATA, Identity, RowNames, StoredFeature, new_shard_file, preallocated
from extract.store.format.shard import BLOCK_BYTES
from extract.store.format.writer import hash_records, hash_rows
from extract.store.hugging_face import SPLITS, card_of, schema_of
from extract.store.reader import ArrowRows, FeatureReader, RowPictures
from extract.system.atomic_files import claim, flush_to_disk, remove_leftovers, sync_folder, temporary_folder
from extract.system.csv_cells import safe_cell
from extract.system.optional_libraries import library

__all__ = ["FORMATS", "Format", "export"]

_OnRows = Callable[[int], None]
_ROWS_AT_ONCE = 1 << 16  # rows in memory, with their paths
_PICTURES_AT_ONCE = 256  # rows in memory, with their pictures


def export(
    reader: FeatureReader,
    path: Path,
    to: str,
    layers: Sequence[str] | None = None,
    on_rows: _OnRows = lambda rows: None,
    pictures: RowPictures | None = None,
    metric: str | None = None,
) -> None:
    """Write features, with path, label and status of each row.

    Args:
        reader: the rows to write, including rows without features.
        path: the file to write, or the folder for a format of several files.
        to: a name in `FORMATS`.
        layers: layers to write; None writes all.
        on_rows: called with the number of rows written since the last call.
        pictures: pictures for a column `image`, in a format that has one; see `ArrowRows`.
        metric: of the dissimilarities in `rdm`; None is "correlation", see `FeatureReader.rdm`.

    Raises:
        UnknownNameError: no such layer, format or metric.
        InputError: `path` exists, there are no rows, a row does not match its hashes, or the format cannot use the name
            of a layer, or has no pictures.
        LayertapError: the disk is full or cannot be written to, or a library is missing.
    """
    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    if not len(reader):
        raise InputError("there are no rows to export")
    if pictures is not None and not FORMATS[to].has_pictures:
        able = ", ".join(name for name, each in FORMATS.items() if each.has_pictures)
        raise InputError(f"the format {to} has no pictures; formats with pictures: {able}")
    if metric is not None and to != "rdm":
        raise InputError(f"the format {to} has no dissimilarities", hint="leave out the metric, or export rdm")
    names = list(dict.fromkeys(layers or reader.layers))
    for name in names:
        reader[name]
    further = [pictures] if FORMATS[to].has_pictures else [metric] if metric is not None else []
    remove_leftovers(path)  # also if the export was complete when its process was killed
    try:
        if os.path.lexists(path):
            numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
            free = next(each for each in numbered if not os.path.lexists(each))
            raise InputError(f"{path} already exists", hint=f"delete it, or choose another name, such as -o {free}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as folder:
            output = folder / "export"
            FORMATS[to].write(reader, output, names, on_rows, *further)
            for file in [output, *output.rglob("*")]:
                if file.is_dir():
                    sync_folder(file)
                else:
                    with file.open("rb") as written:
                        flush_to_disk(written.fileno())
            claim(output, path)
            sync_folder(path.parent)
    except FileExistsError as error:
        raise InputError(f"{path} was created by another process", hint="choose another name, or delete it") from error
    except OSError as error:
        raise LayertapError(f"cannot write {path}: {error.strerror or error}") from error


def _blocks(
    reader: FeatureReader, most_rows: int = _ROWS_AT_ONCE
) -> Iterator[tuple[int, int, dict[str, NDArray[Any]]]]:
    """Yield all rows in blocks that fit in memory: (start, stop, layer -> features that match their hashes)."""
    step = max(1, BLOCK_BYTES // max(1, sum(reader[name].row_bytes for name in reader.layers)))
    step = min(step, most_rows)
    for start in range(0, len(reader), step):
        stop = min(start + step, len(reader))
        kept = reader.checked(np.arange(start, stop))
        yield start, stop, {name: reader[name].values(rows) for name, rows in kept.items()}
        for name in reader.layers:
            reader[name].forget(start, stop)


def _to_h5(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows) -> None:
    features = [
        StoredFeature(name, reader[name].shape[1:], reader[name].dtype.name, reader[name].attributes)
        for name in sorted(names)
    ]
    identity = Identity(0, 0, len(reader), reader.fingerprint, "")
    rows = RowNames(reader.paths, reader.labels, reader.splits, reader.classes, reader.ids, reader.columns)
    layouts = [preallocated(None) for _ in features]
    with new_shard_file(path, features, layouts, identity, rows, reader.provenance) as file:
        for start, stop, block in _blocks(reader):
            chosen = {feature.name: block[feature.name] for feature in features}
            for name, values in chosen.items():
                file["features"][name][start:stop] = values
            columns = {name: reader.column(name, slice(start, stop)) for name, *_ in ROW_DATA}
            columns["row_hash"] = hash_rows(chosen)
            columns["record_hash"] = hash_records(list(map(os.fsencode, rows.paths[start:stop])), columns)
            for name, values in columns.items():
                file[name][start:stop] = values
            on_rows(stop - start)


def _to_npy(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows) -> None:
    if "labels" in names:
        raise InputError("the layer 'labels' cannot be exported: labels.npy holds the labels of the rows")
    path.mkdir()
    np.save(path / "labels.npy", reader.labels)
    _write_rows(reader, path / "rows.csv")
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((path / f"{name}.npy").open("wb")) for name in names}
        for name, file in files.items():
            header = {"descr": reader[name].dtype.str, "fortran_order": False, "shape": reader[name].shape}
            np.lib.format.write_array_header_1_0(file, header)
        for start, stop, block in _blocks(reader):
            for name, file in files.items():
                file.write(block[name].data)
            on_rows(stop - start)


def _to_rdm(
    reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows, metric: str = "correlation"
) -> None:
    """Write the dissimilarity matrix of each layer, see `FeatureReader.rdm`, as NAME.npy and NAME.mat, and rows.csv."""
    path.mkdir()
    _write_rows(reader, path / "rows.csv")
    for name in names:
        matrix = reader.rdm(name, metric)
        np.save(path / f"{name}.npy", matrix)
        with _matlab_file(path / f"{name}.mat") as file:
            _set_matlab_class(file.create_dataset("rdm", data=matrix), "double")  # symmetric: no axes to reverse
            _set_matlab_class(file.create_dataset("status", data=reader.status[None]), "uint8")
            _write_texts(file, {"paths": reader.paths})
    for start, stop, _ in _blocks(reader):  # checks hashes; after the matrices, which are refused for many rows
        on_rows(stop - start)


def _write_rows(reader: FeatureReader, path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as text:
        table = csv.writer(text)
        further = {**({"id": reader.ids} if reader.ids else {}), **reader.columns}
        table.writerow(map(safe_cell, ["row", "path", "label", "class", "split", "status", *further]))
        classes = [*reader.classes, ""]  # label -1 indexes the last entry
        columns = (range(len(reader)), reader.paths, reader.labels, reader.splits, reader.status)
        for row, image, label, split, status, *others in zip(*columns, *further.values(), strict=True):
            cells = [row, image, label, classes[label], split, Status(status).text, *others]
            table.writerow(map(safe_cell, cells))


def _to_parquet(
    reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows, pictures: RowPictures | None
) -> None:
    parquet = library("pyarrow.parquet", "parquet", "Parquet")
    rows = ArrowRows(reader, names, pictures)
    with parquet.ParquetWriter(path, rows.schema) as writer:
        for start, stop, block in _blocks(reader, _PICTURES_AT_ONCE if pictures else _ROWS_AT_ONCE):
            writer.write_batch(rows.batch(start, stop, [block[name] for name in names]))
            on_rows(stop - start)


def _to_hugging_face(
    reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows, pictures: RowPictures | None
) -> None:
    """Write Parquet files for each split, and a card. Without splits, all rows are `train`."""
    parquet = library("pyarrow.parquet", "datasets", "a dataset folder of Hugging Face")
    rows = ArrowRows(reader, names, pictures)
    schema, has_splits, files = schema_of(reader, rows, pictures is not None), any(reader.splits), dict[str, Any]()
    (path / "data").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        for start, stop, block in _blocks(reader, _PICTURES_AT_ONCE if pictures else _ROWS_AT_ONCE):
            batch = rows.batch(start, stop, [block[name] for name in names])
            splits = np.array([SPLITS[split] if has_splits else "train" for split in reader.splits[start:stop]])
            for split in np.unique(splits).tolist():
                if split not in files:
                    file = path / "data" / f"{split}-00000.parquet"
                    files[split] = stack.enter_context(parquet.ParquetWriter(file, schema))
                files[split].write_batch(batch.take(np.flatnonzero(splits == split)))
            on_rows(stop - start)
    (path / "README.md").write_text(card_of(reader, names, sorted(files)), encoding="utf-8")


def _to_mat(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows) -> None:
    """Write MATLAB 7.3: HDF5 after a user block with MATLAB's own header, and all axes in reverse order.

    Layout from MathWorks, "MAT-File Versions", and from files written by MATLAB: `MATLAB_class` names the type, text is
    uint16 with `MATLAB_int_decode` 2.
    """
    n_rows, variables = len(reader), _variables([*names, *reader.columns])
    texts = {"paths": reader.paths, "splits": reader.splits, "classes": reader.classes, "layers": list(names)}
    if (ids := reader.ids) is not None:
        texts["ids"] = ids
    numbers = {variables[name]: each for name, each in reader.columns.items() if isinstance(each, np.ndarray)}
    texts |= {variables[name]: each for name, each in reader.columns.items() if not isinstance(each, np.ndarray)}
    shapes = {name: reader[name].shape[1:] or (1,) for name in names}
    dtypes = {name: reader[name].dtype if reader[name].dtype.kind == "i" else np.dtype(np.float32) for name in names}
    with _matlab_file(path) as file:
        _write_texts(file, texts)
        _set_matlab_class(file.create_dataset("labels", data=reader.labels[None].astype(np.float64) + 1), "double")
        for name, column in numbers.items():
            _set_matlab_class(file.create_dataset(name, data=column[None].astype(np.float64)), "double")
        _set_matlab_class(file.create_dataset("status", data=reader.status[None]), "uint8")
        for name, shape in shapes.items():
            row_bytes = dtypes[name].itemsize * math.prod(shape)
            chunks = (*shape[::-1], max(1, min(n_rows, (1 << 20) // row_bytes)))
            data = file.create_dataset(variables[name], (*shape[::-1], n_rows), dtypes[name], chunks=chunks)
            _set_matlab_class(data, "single" if dtypes[name].kind == "f" else dtypes[name].name)
        for start, stop, block in _blocks(reader):
            for name, shape in shapes.items():
                transposed = block[name].reshape(-1, *shape).transpose().astype(dtypes[name])
                file[variables[name]][..., start:stop] = transposed
            on_rows(stop - start)


def _write_texts(file: h5py.File, texts: Mapping[str, Sequence[str]]) -> None:
    """Write texts as matrices of characters, padded with spaces; each column here is a row in MATLAB."""
    for name, values in texts.items():
        longest = max((len(_utf16(value)) // 2 for value in values), default=0) or 1
        data = file.create_dataset(name, (longest, len(values)), np.uint16)
        _set_matlab_class(data, "char")
        data.attrs["MATLAB_int_decode"] = np.int32(2)
        for start in range(0, len(values), 10_000):
            encoded = list(map(_utf16, values[start : start + 10_000]))
            padded = b"".join(text + b" \0" * (longest - len(text) // 2) for text in encoded)
            data[:, start : start + len(encoded)] = np.frombuffer(padded, "<u2").reshape(-1, longest).T


@contextlib.contextmanager
def _matlab_file(path: Path) -> Iterator[h5py.File]:
    """Context manager: yield an HDF5 file, which becomes a file of MATLAB 7.3 by its header."""
    with hdf5_on_disk(path, "x", libver=("earliest", "v108"), userblock_size=512) as file:
        yield file
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, written by layertap".ljust(116) + bytes(8) + b"\x00\x02IM")


def _set_matlab_class(data: h5py.Dataset, kind: str) -> None:
    data.attrs["MATLAB_class"] = np.bytes_(kind)


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")


def _variables(names: Sequence[str]) -> dict[str, str]:
    """Return layer or kept column -> its MATLAB variable: other characters become `_`, at most 63 characters."""
    taken = {"paths", "splits", "ids", "classes", "layers", "labels", "status"}
    variables = {}
    for name in names:
        base = re.sub(r"\W", "_", name, flags=re.ASCII)
        base = (base if base[:1].isalpha() else f"layer_{base}")[:58]
        candidates = (base, *(f"{base}_{i}" for i in range(2, 9999)))
        unique = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(unique)
        variables[name] = unique
    return variables


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes:
        write: writes some layers of a reader to a path: (reader, path, layers, on_rows), and the pictures or metric.
        is_folder: whether the path is a folder of several files.
        has_pictures: whether there may be pictures.
    """

    write: Callable[..., None]
    is_folder: bool = False
    has_pictures: bool = False

    def default_path(self, folder: Path, name: str) -> Path:
        """Return the default path for an export of a data set.

        Args:
            folder: folder of the data set.
            name: name of the format.
        """
        return folder.with_name(f"{folder.name}{'-' if self.is_folder else '.'}{name}")


# To add a format, add its entry: `layertap export` reads this table.
FORMATS: dict[str, Format] = {
    "h5": Format(_to_h5),  # contiguous datasets; `FeatureReader` can open the file
    "npy": Format(_to_npy, is_folder=True),  # one file for each layer, `labels.npy` and `rows.csv`
    "parquet": Format(_to_parquet, has_pictures=True),  # one column of lists of a fixed size for each layer
    "mat": Format(_to_mat),  # MATLAB 7.3
    "hf": Format(_to_hugging_face, is_folder=True, has_pictures=True),  # Parquet files for each split, and README.md
    "rdm": Format(_to_rdm, is_folder=True),  # dissimilarity matrices of images, a .npy and a .mat for each layer
}
