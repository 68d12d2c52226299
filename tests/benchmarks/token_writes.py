"""Shards of all tokens of 12 blocks, written and published: `python tests/benchmarks/token_writes.py [FOLDER]`.

Twelve shards of 128 rows of 12 features (197, 768) in float32, 930 MB each: the bytes of a ViT-B/16. A raw write and
`fdatasync` of the same bytes, the writer with the hashes of its rows and files, shard after shard, and the same with
each shard published in two threads while the next are written, as a run does. The ratio to the raw write of the same
round: its median over the rounds, and the 95 % interval of this median.
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

SHARDS = 12
ROWS = 128
BATCH = 64
ROUNDS = 6
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
    """Measure, and print the ratios."""
    ways = {
        "written, then published": lambda folder: stored(folder, 0),
        "published in two threads": lambda folder: stored(folder, 2),
        "raw write": raw,
    }
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        seconds = {}
        for name in list(ways)[:: 1 if number % 2 else -1]:
            folder = place / name
            folder.mkdir()
            os.sync()
            start = time.perf_counter()
            ways[name](folder)
            seconds[name] = time.perf_counter() - start
            shutil.rmtree(folder)
        for name, spent in seconds.items():
            ratios[name].append(seconds["raw write"] / spent)
        rates = ", ".join(f"{name} {GB / spent:.2f} GB/s" for name, spent in seconds.items())
        print(f"round {number}: {rates}", flush=True)
    random = np.random.default_rng(0)
    for name, measured in ratios.items():
        medians = np.median(random.choice(measured, (2000, ROUNDS)), axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        print(f"{name:24} {statistics.median(measured):.2f} of the raw write ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        main(place)
    finally:
        shutil.rmtree(place)
