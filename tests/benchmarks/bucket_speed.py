"""Reading from a bucket against fsspec: `python tests/benchmarks/bucket_speed.py [FOLDER]`; about two minutes.

A server of moto on this machine, in a process of its own, holds 80,000 rows of 1,280 float16 (205 MB) in four shards.
Ratios of rates, medians of three rounds in turn; 1 is as fast as the plain way. The plain ways: `cat_file` of the same
files, one after the other; `cat_ranges` of ranges of 16 MB; `cat_file` of each row; and the data set in a local folder.
The cache is in FOLDER (a temporary one by default): cold is empty, warm has everything.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import s3fs

from extract import FeatureReader
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.receipt import read_receipt
from extract.store.format.writer import ShardWriter
from extract.store.places.bucket import Bucket

ROWS, WIDTH, SHARDS, BATCH, ROUNDS = 80_000, 1280, 4, 256, 3
RANGE_BYTES = 16 << 20


def written(out: Path, values: np.ndarray) -> DataSet:
    """The data set in a folder."""
    images = {"root": "/", "count": ROWS, "paths_xxh3": ""}
    data = DataSet(out, {"weights": "w"}, [StoredFeature("x", (WIDTH,), "float16")], images, ROWS // SHARDS)
    data.open_or_create()
    for shard in range(SHARDS):
        rows = np.array(data.shard_range(shard))
        names = RowNames([f"class/{row:08d}.jpg" for row in rows], rows % 10, ["train"] * len(rows), list("0123456789"))
        create_shard(data.path(shard, part=True), data.features, data.identity(shard), names, {})
        with ShardWriter(data, shard) as writer:
            source = {"source_size": rows, "source_mtime_ns": rows, "source_hash": np.zeros((len(rows), 16), np.uint8)}
            writer.write(rows, {"x": values[rows]}, np.ones(len(rows), np.uint8), source)
            writer.publish()
    return data


def in_turn(**ways: Callable[[], Any]) -> dict[str, float]:
    """Median seconds of each, one after the other in each round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            if "cold" in name:
                shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]), ignore_errors=True)
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def say(what: str, ours: float, plain: float, than: str) -> None:
    """A line with the ratio."""
    print(f"{what:50} {plain / ours:7.2f} of {than}  ({ours * 1000:,.0f} ms, {plain * 1000:,.0f} ms)", flush=True)


def main(folder: Path) -> None:
    """Measure, and print the ratios."""
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float16)
    data, url = written(folder / "set", values), "s3://bench/set"
    boto3.client("s3").create_bucket(Bucket="bench")
    bucket = Bucket(url)
    bucket.open_or_create(data)

    fs = s3fs.S3FileSystem(use_listings_cache=False)
    start = time.perf_counter()
    for shard in range(SHARDS):
        fs.put_file(str(data.path(shard)), f"bench/plain/{shard}")
    plain = time.perf_counter() - start
    start = time.perf_counter()
    for shard in range(SHARDS):
        assert bucket.publish(data.path(shard), read_receipt(data.path(shard), len(data.shard_range(shard))) or {})
    say("publish, with receipts", time.perf_counter() - start, plain, "put_file")

    paths = [f"bench/set/shards/{shard:06d}.h5" for shard in range(SHARDS)]
    with data.open_shard(0, data.path(0)) as opened:
        first = opened.offsets["/features/x"]
    random = np.random.default_rng(0)
    single = random.integers(0, ROWS, 100)
    batches = [random.integers(0, ROWS, BATCH) for _ in range(10)]
    places = [(int(row) // (ROWS // SHARDS), first + int(row) % (ROWS // SHARDS) * 2 * WIDTH) for row in single]

    sizes = [data.path(shard).stat().st_size for shard in range(SHARDS)]
    ranges = [
        (path, start, min(start + RANGE_BYTES, size))
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, size, RANGE_BYTES)
    ]

    def whole() -> None:
        with FeatureReader(url) as reader:
            assert len(reader["x"][:]) == ROWS

    def in_order() -> None:
        with FeatureReader(url) as reader:
            for _ in reader.batches("x", BATCH):
                pass

    def at_random() -> None:
        with FeatureReader(url) as reader:
            for row in single:
                assert np.array_equal(reader["x"][row], values[row])

    def in_batches(where: str | Path) -> None:
        with FeatureReader(where) as reader:
            for rows in batches:
                reader["x"][rows]

    def ranges_one_by_one() -> None:
        for shard, place in places:
            fs.cat_file(paths[shard], start=place, end=place + 2 * WIDTH)

    with FeatureReader(url) as reader:
        assert np.array_equal(reader["x"][:], values)
    taken = in_turn(
        plain=lambda: [fs.cat_file(path) for path in paths],
        in_ranges=lambda: fs.cat_ranges(*map(list, zip(*ranges, strict=True)), batch_size=8),
        cold=whole, warm=whole, order_cold=in_order, order_warm=in_order,
        folder=lambda: FeatureReader(data.out)["x"][:],
    )  # fmt: skip
    say("everything, cold cache", taken["cold"], taken["plain"], "fsspec cat_file")
    say("  the same", taken["cold"], taken["in_ranges"], "fsspec cat_ranges of 16 MB")
    say("everything, warm cache", taken["warm"], taken["plain"], "fsspec cat_file")
    say("  the same", taken["warm"], taken["folder"], "a local folder")
    say("a pass in batches of 256, cold cache", taken["order_cold"], taken["plain"], "fsspec cat_file")
    say("a pass in batches of 256, warm cache", taken["order_warm"], taken["plain"], "fsspec cat_file")
    taken = in_turn(
        plain=ranges_one_by_one, cold=at_random, warm=at_random,
        batches_cold=lambda: in_batches(url), batches_warm=lambda: in_batches(url), folder=lambda: in_batches(data.out),
    )  # fmt: skip
    say(
        "100 random rows one at a time, cold: four shards",
        taken["cold"],
        taken["plain"],
        "fsspec cat_file of each",
    )
    say("100 random rows one at a time, warm cache", taken["warm"], taken["plain"], "fsspec cat_file of each")
    each = taken["plain"] / len(single) * BATCH * len(batches)
    say("10 random batches of 256, cold cache", taken["batches_cold"], each, "fsspec cat_file of each")
    say("10 random batches of 256, warm cache", taken["batches_warm"], each, "fsspec cat_file of each")
    say("  the same", taken["batches_warm"], taken["folder"], "a local folder")
    with FeatureReader(url) as reader:
        start = time.perf_counter()
        for row in random.integers(0, ROWS, 3000):
            reader["x"][row]
        print(f"  random rows one at a time, warm: {3000 / (time.perf_counter() - start):,.0f} rows/s")


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    code = (
        "from moto.server import ThreadedMotoServer; import time; server = ThreadedMotoServer(port=0, verbose=False); "
        "server.start(); print(server.get_host_and_port(), flush=True); time.sleep(3600)"
    )
    moto = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert moto.stdout is not None
        port = (re.findall(r"\d+", moto.stdout.readline()) or [""])[-1]
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="us-east-1", XDG_CACHE_HOME=str(place / "cache"),
        )  # fmt: skip
        main(place)
    finally:
        moto.kill()
        shutil.rmtree(place)
