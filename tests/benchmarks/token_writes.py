"""Shards of all tokens of 12 blocks, written and published: `python tests/benchmarks/token_writes.py [FOLDER]`.

Five shards of 128 rows of 12 features (197, 768) in float32, 930 MB each: the bytes of a ViT-B/16. A raw write and
`fdatasync` of the same bytes, the writer with the hashes of its rows and files, shard after shard, and the same with
each shard published in one of two threads while the next is written, as a run does. In turn, medians of the rates.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter

SHARDS, ROWS, BATCH, ROUNDS = 5, 128, 64, 3
VALUES = {
    f"blocks.{block}": np.random.default_rng(block).normal(size=(BATCH, 197, 768)).astype(np.float32)
    for block in range(12)
}
GB = SHARDS * ROWS // BATCH * sum(values.nbytes for values in VALUES.values()) / 1e9


def raw(folder: Path) -> None:
    """Write the bytes alone."""
    for shard in range(SHARDS):
        with (folder / f"{shard}").open("wb", buffering=0) as file:
            for _ in range(ROWS // BATCH):
                for values in VALUES.values():
                    file.write(values.data)
            os.fdatasync(file.fileno())


def stored(folder: Path, publishers: int) -> None:
    """Write and publish the shards of a data set."""
    features = [StoredFeature(name, values.shape[1:], "float32") for name, values in VALUES.items()]
    images = {"root": "/", "count": SHARDS * ROWS, "paths_xxh3": ""}
    data = DataSet(folder / "data", {"weights": "w"}, features, images, ROWS)
    data.open_or_create()
    publishing: list[Future[object]] = []
    with ThreadPoolExecutor(publishers or 1) as publisher:
        for shard in range(SHARDS):
            rows = np.array(data.shard_range(shard))
            names = RowNames([f"{row}.jpg" for row in rows], rows % 2, ["train"] * ROWS, ["a", "b"])
            create_shard(data.path(shard, part=True), features, data.identity(shard), names, {})
            writer = ShardWriter(data, shard)
            for here in np.split(rows, ROWS // BATCH):
                source = {"source_size": here, "source_mtime_ns": here, "source_hash": np.zeros((BATCH, 16), np.uint8)}
                writer.write(here, VALUES, np.ones(BATCH, np.uint8), source)
            writer.flush()
            publishing.append(publisher.submit(writer.publish))
            if len(publishing) > publishers:
                publishing.pop(0).result()
        for last in publishing:
            last.result()


def main(place: Path) -> None:
    """Measure, and print the rates."""
    ways = {
        "raw write": raw,
        "written, then published": lambda folder: stored(folder, 0),
        "published in a thread": lambda folder: stored(folder, 1),
        "published in two": lambda folder: stored(folder, 2),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, way in ways.items():
            folder = place / f"{number} {name}"
            folder.mkdir()
            os.sync()
            start = time.perf_counter()
            way(folder)
            rates[name].append(GB / (time.perf_counter() - start))
            shutil.rmtree(folder)
    plain = statistics.median(rates["raw write"])
    for name, measured in rates.items():
        each = ", ".join(f"{rate:.2f}" for rate in measured)
        print(f"{name:24} {statistics.median(measured) / plain:.2f} of the raw write  ({each} GB/s)", flush=True)


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        main(place)
    finally:
        shutil.rmtree(place)
