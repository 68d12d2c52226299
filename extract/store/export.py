"""Features as plain files for other tools: one HDF5 file, NumPy arrays, Parquet, or MATLAB.

Each is written beside its place and moved there when it is whole; no more than 64 MB of features are held at once.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.status import Status
from extract.store.files import discard, sync_folder, take_space
from extract.store.layout import ROW_DATA, Identity, RowNames, StoredFeature, new_shard_file, preallocated
from extract.store.reader import FeatureReader
from extract.store.shard import BLOCK_BYTES
from extract.store.writer import hash_rows

__all__ = ["FORMATS", "export"]

_OnRows = Callable[[int], None]


def export(
    reader: FeatureReader,
    path: Path,
    to: str,
    layers: Sequence[str] | None = None,
    on_rows: _OnRows = lambda rows: None,
) -> None:
    """Write features, with path, label and status of each row.

    Args:
        reader: what is written; rows without features too, with their status.
        path: the file, or for "npy" the folder.
        to: "h5" (contiguous data sets; `FeatureReader` opens it, too), "npy" (a file for each layer, `labels.npy` and
            `rows.csv`), "parquet" (a fixed-size list of float32 for each layer) or "mat" (MATLAB 7.3).
        layers: None writes all.
        on_rows: called with a number of rows that have been written.

    Raises:
        UnknownNameError: no such layer.
        InputError: there is something of that name already, or the rows cannot be told in that format.
        LayertapError: the disk is full or refuses, or a library is missing.
    """
    names = list(layers or reader.layers)
    for name in names:
        reader[name]
    if path.exists():
        raise InputError(f"{path} exists already; choose another name, or delete it")
    temporary = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        FORMATS[to](reader, temporary, names, on_rows)
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LayertapError(f"cannot write {path}: {reason}") from error
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        discard(path)


def _blocks(reader: FeatureReader, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are small enough to be held in memory."""
    step = max(1, BLOCK_BYTES // max(1, sum(reader[name].row_bytes for name in names)))
    for start in range(0, len(reader), step):
        yield start, min(start + step, len(reader))


def _to_h5(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows) -> None:
    features = [
        StoredFeature(name, reader[name].shape[1:], reader[name].dtype.name, reader[name].attributes)
        for name in sorted(names)
    ]
    identity = Identity(0, 0, len(reader), reader.fingerprint, "")
    rows = RowNames(reader.paths, reader.labels, reader.splits, reader.classes)
    layouts = [preallocated(None) for _ in features]
    with new_shard_file(path, features, layouts, identity, rows, reader.provenance) as file:
        for start, stop in _blocks(reader, names):
            block = {feature.name: reader[feature.name][start:stop] for feature in features}
            for name, values in block.items():
                file["features"][name][start:stop] = values
            file["row_hash"][start:stop] = hash_rows(block)
            on_rows(stop - start)
        for name in (name for name, *_ in ROW_DATA if name != "row_hash"):
            file[name][...] = reader.column(name)


def _to_npy(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows) -> None:
    path.mkdir()
    np.save(path / "labels.npy", reader.labels)
    with (path / "rows.csv").open("w", encoding="utf-8", errors="surrogateescape", newline="") as text:
        table = csv.writer(text)
        table.writerow(["row", "path", "label", "class", "split", "status"])
        classes = [*reader.classes, ""]  # -1 is the last
        for row, values in enumerate(zip(reader.paths, reader.labels, reader.splits, reader.status, strict=True)):
            image, label, split, status = values
            table.writerow([row, image, label, classes[label], split, Status(status).text])
    taken = {"labels.npy"}
    for name in names:
        array = reader[name]
        if f"{name}.npy" in taken:
            raise InputError(f"the layer {name!r} cannot be exported: a file of this name holds the labels")
        with (path / f"{name}.npy").open("wb") as file:
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            np.lib.format.write_array_header_1_0(file, header)
            for start, stop in _blocks(reader, [name]):
                file.write(array[start:stop].data)
                on_rows((stop - start) if name == names[0] else 0)


def _to_parquet(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows) -> None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise LayertapError("Parquet needs pyarrow: pip install 'layertap[parquet]'") from error
    fields = [
        pa.field("row", pa.int64()), pa.field("path", pa.string()), pa.field("label", pa.int64()),
        pa.field("class", pa.string()), pa.field("split", pa.string()), pa.field("status", pa.string()),
    ]  # fmt: skip
    if own := {field.name for field in fields} & set(names):
        raise InputError(f"the layer {min(own)!r} cannot be exported: a column of this name says something else")
    # Names of files need not be text; what is not is escaped, and the bytes stand beside it.
    undecodable = any("\udc80" <= char <= "\udcff" for image in reader.paths for char in image)
    if undecodable:
        fields.append(pa.field("path_bytes", pa.binary()))
    for name in names:
        shape = reader[name].shape[1:]
        about = {"shape": json.dumps(shape), **reader[name].attributes}
        fields.append(pa.field(name, pa.list_(pa.float32(), int(np.prod(shape))), metadata=about))
    schema = pa.schema(fields, {"layertap": json.dumps(reader.provenance)})
    classes = [*reader.classes, None]
    with parquet.ParquetWriter(path, schema) as writer:
        for start, stop in _blocks(reader, names):
            images, labels = reader.paths[start:stop], reader.labels[start:stop].tolist()
            columns: list[Any] = [
                np.arange(start, stop), [_as_text(image) for image in images], labels,
                [classes[label] for label in labels], reader.splits[start:stop],
                [Status(code).text for code in reader.status[start:stop].tolist()],
            ]  # fmt: skip
            if undecodable:
                columns.append([os.fsencode(image) for image in images])
            arrays = [pa.array(values, field.type) for values, field in zip(columns, fields, strict=False)]
            for name in names:
                flat = pa.array(reader[name][start:stop].reshape(-1).astype(np.float32))
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, int(np.prod(reader[name].shape[1:]))))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            on_rows(stop - start)


def _as_text(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _to_mat(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: _OnRows) -> None:
    """MATLAB 7.3: HDF5 behind a user block with MATLAB's own header, and all axes in reverse order.

    Layout from MathWorks, "MAT-File Versions", and from what MATLAB writes: `MATLAB_class` names the type, text is
    uint16 with `MATLAB_int_decode` 2.
    """
    n_rows = len(reader)
    variables = _variables(names)
    size = sum(n_rows * int(np.prod(reader[name].shape[1:])) * 4 * 257 // 256 for name in names)
    texts = {"paths": reader.paths, "splits": reader.splits, "classes": reader.classes, "layers": list(names)}
    units = {name: _char_matrix(values) for name, values in texts.items()}
    take_space(path, size + sum(values.nbytes for values in units.values()) + n_rows * 16 + (1 << 20))
    with h5py.File(path, "w", libver=("earliest", "v108"), userblock_size=512) as file:
        for name, values in units.items():
            data = file.create_dataset(name, data=values)
            data.attrs["MATLAB_class"] = np.bytes_("char")
            data.attrs["MATLAB_int_decode"] = np.int32(2)
        _matlab(file.create_dataset("labels", data=reader.labels[None].astype(np.float64) + 1), "double")
        _matlab(file.create_dataset("status", data=reader.status[None]), "uint8")
        for name in names:
            array = reader[name]
            shape = array.shape[1:] or (1,)
            rows = max(1, min(n_rows, (1 << 20) // (4 * int(np.prod(shape)))))
            data = file.create_dataset(variables[name], (*shape[::-1], n_rows), np.float32, chunks=(*shape[::-1], rows))
            _matlab(data, "single")
            step = max(1, BLOCK_BYTES // (8 * int(np.prod(shape))) // rows) * rows
            for start in range(0, n_rows, step):
                stop = min(start + step, n_rows)
                data[..., start:stop] = array[start:stop].reshape(-1, *shape).transpose().astype(np.float32)
                on_rows((stop - start) if name == names[0] else 0)
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, written by layertap".ljust(116) + bytes(8) + b"\x00\x02IM")


def _matlab(data: h5py.Dataset, kind: str) -> None:
    data.attrs["MATLAB_class"] = np.bytes_(kind)


def _char_matrix(values: Sequence[str]) -> NDArray[np.uint16]:
    """(longest, N) UTF-16 code units padded with spaces: in MATLAB a row for each text."""
    encoded = [np.frombuffer(value.encode("utf-16-le", "surrogatepass"), "<u2") for value in values]
    matrix = np.full((len(values), max(map(len, encoded), default=0) or 1), ord(" "), np.uint16)
    for row, units in zip(matrix, encoded, strict=True):
        row[: len(units)] = units
    return np.ascontiguousarray(matrix.transpose())


def _variables(names: Sequence[str]) -> dict[str, str]:
    """Layer -> name of its variable: what MATLAB does not allow becomes `_`; at most 63 characters."""
    taken = {"paths", "splits", "classes", "layers", "labels", "status"}
    found = {}
    for name in names:
        base = re.sub(r"\W", "_", name, flags=re.ASCII)
        base = (base if base[:1].isalpha() else f"layer_{base}")[:58]
        unique = next(one for one in (base, *(f"{base}_{i}" for i in range(2, 9999))) if one not in taken)
        taken.add(unique)
        found[name] = unique
    return found


FORMATS: dict[str, Callable[[FeatureReader, Path, Sequence[str], _OnRows], None]] = {
    "h5": _to_h5,
    "npy": _to_npy,
    "parquet": _to_parquet,
    "mat": _to_mat,
}
