"""The store against the plainest way to do the same: `python tests/benchmarks/store_speed.py [FOLDER]`.

Ratios of rates, medians of five rounds in turn; 1 is as fast as the plain way. 80,000 rows of 1,280 float16 (205 MB),
written into FOLDER (a temporary one by default), read from the file cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from extract import FeatureReader
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter

ROWS, WIDTH, BATCH, ROUNDS = 80_000, 1280, 256, 5


def in_turn(**ways: Callable[[], Any]) -> dict[str, float]:
    """Median seconds of each, one after the other in each round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def say(what: str, ours: float, plain: float, than: str) -> None:
    """A line with the ratio."""
    print(f"{what:58} {plain / ours:6.2f} of {than}  ({ours * 1000:,.0f} ms, {plain * 1000:,.0f} ms)", flush=True)


def empty(out: Path, shard_rows: int) -> DataSet:
    """A data set with its shards created, no row written."""
    shutil.rmtree(out, ignore_errors=True)
    images = {"root": "/", "count": ROWS, "paths_xxh3": ""}
    data = DataSet(out, {"weights": "w"}, [StoredFeature("x", (WIDTH,), "float16")], images, shard_rows)
    data.open_or_create()
    for shard in range(data.n_shards):
        rows = np.array(data.shard_range(shard))
        names = RowNames([f"class/{row:08d}.jpg" for row in rows], rows % 10, ["train"] * len(rows), list("0123456789"))
        create_shard(data.path(shard, part=True), data.features, data.identity(shard), names, {})
    return data


def fill(data: DataSet, values: np.ndarray, sync_s: float, publish: bool) -> None:
    """Write every row, in batches, and force them to the disk."""
    for shard in range(data.n_shards):
        rows = data.shard_range(shard)
        with ShardWriter(data, shard, sync_s=sync_s) as writer:
            for start in range(rows.start, rows.stop, BATCH):
                here = np.arange(start, min(start + BATCH, rows.stop))
                zeros = np.zeros((len(here), 16), np.uint8)
                source = {"source_size": here, "source_mtime_ns": here, "source_hash": zeros}
                writer.write(here, {"x": values[start : start + len(here)]}, np.ones(len(here), np.uint8), source)
            if publish:
                writer.publish()
            else:
                os.fsync(writer._file)


def main(folder: Path) -> None:
    """Measure, and print the ratios."""
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float16)
    one, many = folder / "one", folder / "many"

    def raw() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            for start in range(0, ROWS, BATCH):
                file.write(values[start : start + BATCH].data)
            os.fsync(file.fileno())

    data: list[DataSet] = []
    appended: dict[str, list[float]] = {"raw": [], "append": [], "sync1": [], "sync0": [], "publish": []}
    for _ in range(ROUNDS):  # creating the file, which takes its space, is not part of appending to it
        for name, work in (
            ("raw", raw),
            ("append", lambda: fill(data[0], values, 30, False)),
            ("sync1", lambda: fill(data[0], values, 0.05, False)),
            ("sync0", lambda: fill(data[0], values, 0, False)),
            ("publish", lambda: fill(data[0], values, 30, True)),
        ):
            data[:] = [empty(one, ROWS)] if name != "raw" else []
            os.sync()
            start = time.perf_counter()
            work()
            appended[name].append(time.perf_counter() - start)
    median = {name: statistics.median(seconds) for name, seconds in appended.items()}
    say("append, batches of 256", median["append"], median["raw"], "raw write and fsync")
    say("  forced to the disk every 50 ms", median["sync1"], median["raw"], "raw write and fsync")
    say("  forced to the disk at every batch (sync_s 0)", median["sync0"], median["raw"], "raw write and fsync")
    say("  and published (sha256 of the file)", median["publish"], median["raw"], "raw write and fsync")

    fill(empty(many, ROWS // 50), values, 30, True)
    np.save(folder / "plain.npy", values)
    for name in ("gzip", "lzf"):
        with FeatureReader(one) as reader, h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=reader["x"][:], chunks=(256, WIDTH), compression=name, shuffle=True)
    mapped = np.load(folder / "plain.npy", mmap_mode="r")
    random = np.random.default_rng(0)
    batches = [random.integers(0, ROWS, BATCH) for _ in range(300)]
    single = random.integers(0, ROWS, 3000)
    with FeatureReader(one) as reader, FeatureReader(many) as of_many, h5py.File(one / "shards/000000.h5") as naive:
        x, plain = reader["x"], naive["features/x"]
        assert np.array_equal(x[:], values)
        assert np.array_equal(of_many["x"][batches[0]], values[batches[0]])
        seconds = in_turn(ours=lambda: x[:], plain=lambda: np.load(folder / "plain.npy"))
        say("sequential read of everything", seconds["ours"], seconds["plain"], "np.load")
        seconds = in_turn(
            ours=lambda: [x[rows] for rows in batches],
            plain=lambda: [mapped[rows] for rows in batches],
            many=lambda: [of_many["x"][rows] for rows in batches],
        )
        say("random batches of 256", seconds["ours"], seconds["plain"], "np.memmap")
        say("  over 50 shards", seconds["many"], seconds["plain"], "np.memmap")
        seconds = in_turn(ours=lambda: [x[row] for row in single], plain=lambda: [plain[row] for row in single])
        say("random rows one at a time", seconds["ours"], seconds["plain"], "h5py dataset[i]")

        def a_pass(of: FeatureReader, shuffle: Any) -> None:
            for _ in of.batches("x", BATCH, shuffle=shuffle, seed=0, memory_bytes=64 << 20):
                pass

        rows_of_naive = ROWS / len(single) * seconds["plain"]
        # One kind at a time: a pass in chunks gives its pages back, and the next of another kind would map them anew.
        taken = in_turn(rows=lambda: a_pass(reader, "rows"), rows_of_many=lambda: a_pass(of_many, "rows"))
        taken |= in_turn(chunks=lambda: a_pass(reader, "chunks"), chunks_of_many=lambda: a_pass(of_many, "chunks"))
        taken |= in_turn(order=lambda: a_pass(reader, None))
        say('an epoch, shuffle="rows"', taken["rows"], rows_of_naive, "h5py dataset[i]")
        say('an epoch, shuffle="chunks", over 50 shards', taken["chunks_of_many"], taken["chunks"], "one file")
        say('an epoch, shuffle="rows", over 50 shards', taken["rows_of_many"], taken["rows"], "one file")
        for name, spent in taken.items():
            print(f"  an epoch, {name}: {ROWS / spent:,.0f} rows/s")


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        main(place)
    finally:
        shutil.rmtree(place)
