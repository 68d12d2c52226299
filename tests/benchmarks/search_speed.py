"""The nearest of a million rows: one query, and a hundred, against plain numpy and FAISS on the same rows, in turn.

    python tests/benchmarks/search_speed.py [--rows 1000000] [--width 256] [--rounds 3] [--folder /tmp]

A data set of made-up features is written through the store. Each way runs in a process of its own, which reads the
rows from the file cache, and tells its seconds (imports and opening left out) and its peak memory (VmHWM). Plain numpy
holds all rows and their lengths: `x @ q.T / lengths`, `argpartition`, `argsort`; FAISS is its flat index, which holds
all rows at length 1, and is left out where it is not installed. What they hold is read before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

K = 10


def peak_mb() -> float:
    """The most memory that this process has had so far."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1000


def ours(out, queries):
    """`extract.analysis.probe.nearest_rows.nearest`."""
    from extract import FeatureReader
    from extract.analysis.probe.nearest_rows import nearest

    reader = FeatureReader(out)
    return lambda: nearest(reader["embedding"], queries, K).rows


def plain(out, queries):
    """As one writes it by hand."""
    from extract import FeatureReader

    x = FeatureReader(out)["embedding"][:]
    lengths = np.linalg.norm(x, axis=1)

    def search():
        rows = []
        for start in range(0, len(queries), 10):  # all at once would hold 400 MB more
            cosines = queries[start : start + 10] @ x.T / lengths
            top = np.argpartition(-cosines, K, axis=1)[:, :K]
            order = np.argsort(-np.take_along_axis(cosines, top, 1), axis=1)
            rows.append(np.take_along_axis(top, order, 1))
        return np.concatenate(rows)

    return search


def faiss(out, queries):
    """FAISS's exact index."""
    import faiss as library

    from extract import FeatureReader

    x = FeatureReader(out)["embedding"][:]
    library.normalize_L2(x)
    index = library.IndexFlatIP(x.shape[1])
    index.add(x)
    return lambda: index.search(queries, K)[1]


WAYS = {"ours": ours, "numpy": plain, "faiss": faiss}


def child(way: str, out: str, count: int) -> None:
    """Run one way, and print what it took."""
    queries = np.random.default_rng(1).normal(size=(count, json.loads(Path(out, "width").read_text()))).astype("f4")
    before = time.perf_counter()
    search = WAYS[way](out, queries)
    prepared = time.perf_counter() - before
    start = time.perf_counter()
    rows = search()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "prepared": prepared, "peak": peak_mb(), "rows": rows.tolist()}))


def write(out: Path, rows: int, width: int) -> None:
    """A data set of normal features."""
    from extract import Status
    from extract.store.format.dataset import DataSet
    from extract.store.format.layout import RowNames, StoredFeature, create_shard
    from extract.store.format.writer import ShardWriter

    features = [StoredFeature("embedding", (width,), "float32", {"layer": "x", "pooling": "none"})]
    images = {"root": "/nowhere", "count": rows, "paths_xxh3": ""}
    data = DataSet(out, {"weights": "none"}, features, images, 250_000)
    data.open_or_create()
    (out / "width").write_text(str(width))
    generator = np.random.default_rng(0)
    for shard in range(data.n_shards):
        here = data.shard_range(shard)
        names = RowNames([f"{i}.png" for i in here], np.full(len(here), -1), [""] * len(here), [])
        create_shard(data.path(shard, part=True), features, data.identity(shard), names, {})
        with ShardWriter(data, shard) as writer:
            for start in range(here.start, here.stop, 10_000):
                some = np.arange(start, min(start + 10_000, here.stop))
                source = {
                    "source_size": np.full(len(some), -1), "source_mtime_ns": np.full(len(some), -1),
                    "source_hash": np.zeros((len(some), 16), "u1"),
                }  # fmt: skip
                values = generator.standard_normal((len(some), width), np.float32)
                writer.write(some, {"embedding": values}, np.full(len(some), Status.OK, "u1"), source, {})
            writer.publish()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1], int(arguments.child[2]))
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        write(folder / "out", arguments.rows, arguments.width)
        print(f"{arguments.rows:,} x {arguments.width}, float32, {arguments.rows * arguments.width * 4 / 1e6:,.0f} MB")
        for count in (1, 100):
            found: dict[str, list[dict]] = {way: [] for way in WAYS}
            for _ in range(arguments.rounds):
                for way in WAYS:
                    command = [sys.executable, __file__, "--child", way, str(folder / "out"), str(count)]
                    run = subprocess.run(command, capture_output=True, text=True, check=False)
                    if run.returncode:
                        print(f"{way}: {run.stderr.strip().splitlines()[-1]}")
                        continue
                    found[way].append(json.loads(run.stdout.splitlines()[-1]))
            base = median(one["seconds"] for one in found["numpy"])
            for way, runs in found.items():
                if runs:
                    seconds, prepared, peak = (
                        median(one[key] for one in runs) for key in ("seconds", "prepared", "peak")
                    )
                    same = runs[0]["rows"] == found["ours"][0]["rows"]
                    print(
                        f"{count:4} queries, {way:6} {seconds:7.2f} s, {base / seconds:5.2f} times numpy; "
                        f"{prepared:5.2f} s before; peak {peak:7,.0f} MB; same rows as ours: {same}",
                        flush=True,
                    )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
