"""A small data set with known rows, and the steps by which it is made; used by the tests of the store."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import h5py
import numpy as np
import xxhash

from extract import Status
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.shard import Shard
from extract.store.format.writer import ShardWriter

ROWS, SHARD_ROWS = 23, 10
FEATURES = [StoredFeature("vector", (6,), "float32", {"layer": "fc"}), StoredFeature("map:none", (2, 3, 4), "float16")]
VALUES = {
    "vector": np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32"),
    "map:none": np.random.default_rng(1).normal(size=(ROWS, 2, 3, 4)).astype("float16"),
}
PATHS = [f"class {i % 3}/ü{i}.jpg" for i in range(ROWS)]
PATHS[4] = os.fsdecode(b"class 1/\xff\n.jpg")
PATHS_XXH3 = xxhash.xxh3_128_hexdigest(b"\0".join(map(os.fsencode, PATHS)))

FAILED = 3  # where a row is said to have failed, it is this one
STATUS = ["decode error" if row == FAILED else "ok" for row in range(ROWS)]


def with_a_failed_row(name: str) -> np.ndarray:
    """The values of a feature where that row has failed."""
    values = VALUES[name].copy()
    values[FAILED] = np.nan
    return values


def data_set(out: Path, **changes: object) -> DataSet:
    images = {"root": "/photos", "count": ROWS, "paths_xxh3": PATHS_XXH3}
    content = {"depends_on": {"weights": "w"}, "features": FEATURES, "images": images, "shard_rows": SHARD_ROWS}
    return DataSet(out=out, **{**content, **changes})


def empty_data_set(out: Path, **changes: object) -> DataSet:
    """A data set of which only the description is there."""
    data = data_set(out, **changes)
    data.open_or_create()
    return data


def names_of(rows: range) -> RowNames:
    return RowNames(
        [PATHS[i] for i in rows], np.array([i % 3 for i in rows]), ["train"] * len(rows),
        ["class 0", "class 1", "class 2"],
    )  # fmt: skip


def create(data: DataSet, shard: int) -> Path:
    part = data.path(shard, part=True)
    create_shard(part, FEATURES, data.identity(shard), names_of(data.shard_range(shard)), {"weights": "w"})
    return part


def created(data: DataSet, shard: int) -> tuple[DataSet, int]:
    create(data, shard)
    return data, shard


def new_shard(data: DataSet, shard: int = 0) -> ShardWriter:
    """A shard without rows, opened to write them."""
    return ShardWriter(*created(data, shard))


def write(writer: ShardWriter, rows: list[int], status: Status = Status.OK) -> None:
    if not rows:
        return
    source = {
        "source_size": np.array(rows), "source_mtime_ns": np.array(rows) * 2,
        "source_hash": np.zeros((len(rows), 16), "uint8"),
    }  # fmt: skip
    values = {name: values[rows] for name, values in VALUES.items()}
    if status in (Status.DECODE_ERROR, Status.MISSING):
        values = {name: np.full_like(rows_of, np.nan) for name, rows_of in values.items()}
    reasons = {row: f"row {row} failed" for row in rows} if status != Status.OK else {}
    writer.write(np.array(rows, np.int64), values, np.full(len(rows), status, "uint8"), source, reasons)
    writer.flush()


def published(data: DataSet, shard: int = 0, compress: str | None = None) -> Path:
    """A shard with all its rows."""
    with new_shard(data, shard) as writer:
        write(writer, list(data.shard_range(shard)))
        return writer.publish(compress)


def no_files(count: int) -> dict[str, np.ndarray]:
    """What is known of the image files of rows, where it does not matter."""
    return {
        "source_size": np.full(count, -1), "source_mtime_ns": np.full(count, -1),
        "source_hash": np.zeros((count, 16), "u1"),
    }  # fmt: skip


def complete_data_set(
    out: Path, compress: str | None = None, failed: tuple[int, ...] = (), **changes: object
) -> DataSet:
    """All rows, written in two batches a shard; those of `failed` as decode errors."""
    data = data_set(out, **changes)
    if not changes and not out.exists():
        shutil.copytree(_written(compress, failed), out)
        data.open_or_create()
        return data
    return _write_all(data, compress, failed)


def filled(
    out: Path,
    features: list[StoredFeature],
    count: int,
    values_of: Callable[[np.ndarray], dict[str, np.ndarray]],
    shard_rows: int = 1 << 20,
    *,
    compress: str | None = None,
    failed: Collection[int] = (),
    provenance: dict[str, object] | None = None,
    batch_rows: int = 1000,
    root: str = "/p",
) -> DataSet:
    """Other features: row i has the path `i`, one of seven classes, and is in `val` if 3 divides i."""
    paths = [str(row) for row in range(count)]
    images = {"root": root, "count": count, "paths_xxh3": xxhash.xxh3_128_hexdigest("\0".join(paths).encode())}
    data = empty_data_set(out, features=features, images=images, shard_rows=min(shard_rows, count))
    for shard in range(data.n_shards):
        rows = np.array(data.shard_range(shard))
        splits = ["train" if row % 3 else "val" for row in rows]
        names = RowNames([paths[row] for row in rows], rows % 7, splits, list("abcdefg"))
        create_shard(data.path(shard, part=True), features, data.identity(shard), names, provenance or {})
        with ShardWriter(data, shard) as writer:
            status = np.where(np.isin(rows, list(failed)), Status.DECODE_ERROR, Status.OK).astype("uint8")
            for part in np.split(np.arange(len(rows)), range(batch_rows, len(rows), batch_rows)):
                writer.write(rows[part], values_of(rows[part]), status[part], no_files(len(part)))
            writer.publish(compress)
    return data


_TEMPLATES = tempfile.TemporaryDirectory(prefix="layertap-rows-")


@functools.cache
def _written(compress: str | None, failed: tuple[int, ...]) -> Path:
    return _write_all(data_set(Path(tempfile.mkdtemp(dir=_TEMPLATES.name)) / "out"), compress, failed).out


def _write_all(data: DataSet, compress: str | None, failed: tuple[int, ...]) -> DataSet:
    data.open_or_create()
    for shard in range(data.n_shards):
        with new_shard(data, shard) as writer:
            rows = list(data.shard_range(shard))
            for part in (rows[:4], rows[4:]):
                write(writer, [row for row in part if row not in failed])
                write(writer, [row for row in part if row in failed], Status.DECODE_ERROR)
            writer.publish(compress)
    return data


def change(path: Path, how: Callable[[h5py.File], object]) -> None:
    """Change a shard with HDF5 as a forger would, who makes the user block agree with it again."""
    with h5py.File(path, "r+") as file:
        how(file)
    sign(path)


def sign(path: Path) -> None:
    """Write the user block anew; an independent account of what `extract/store/format/layout.py` says of it."""
    content = bytearray(path.read_bytes())
    title, line = bytes(content).split(b"\n", 2)[:2]
    header_bytes = int(re.fullmatch(rb"layertap shard, format 1; HDF5 begins at byte (\d+)", title)[1])  # type: ignore[index]
    ranges = [tuple(byte_range) for byte_range in json.loads(line)["row_data"]]
    fixed, position = b"", header_bytes
    for start, stop in ranges:
        fixed, position = fixed + bytes(content[position:start]), stop
    header = {
        "size": len(content),
        "row_data": ranges,
        "fixed_xxh3": xxhash.xxh3_128_hexdigest(fixed + bytes(content[position:])),
    }
    content[:header_bytes] = (title + b"\n" + json.dumps(header).encode() + b"\n").ljust(header_bytes, b"\0")
    path.write_bytes(content)


def flip(path: Path, offset: int, bit: int = 1) -> None:
    """Change a bit of a file, as a bad disk or another program does."""
    content = bytearray(path.read_bytes())
    content[offset] ^= bit
    path.write_bytes(content)


def change_a_value(out: Path, shard: int, layer: str, row: int) -> None:
    """Change a byte of a feature in a finished shard."""
    path = out / "shards" / f"{shard:06d}.h5"
    with Shard(path) as opened:
        (feature,) = (feature for feature in opened.features if feature.name == layer)
        offset = opened.offsets[f"/features/{layer}"] + row * feature.row_bytes
    flip(path, offset)
