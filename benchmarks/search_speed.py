"""The nearest of a million rows: one query, and a hundred, against plain numpy and FAISS on the same rows, in turn.

    python -m benchmarks.search_speed [--rows 1000000] [--width 256] [--rounds 3] [--folder /tmp]

A data set of made-up features is written through the store. Each way runs in a process of its own, which reads the
rows from the file cache, and tells its seconds (imports and opening left out) and its peak memory (VmHWM). Plain numpy
holds all rows and their lengths: `x @ q.T / lengths`, `argpartition`, `argsort`; FAISS is its flat index, which holds
all rows at length 1, and is left out where it is not installed. What they hold is read before the clock starts.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import created, fill, parser, python

K = 10


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


def child(way: str, out: str, width: str, count: str) -> None:
    """Run one way, and print what it took."""
    queries = np.random.default_rng(1).normal(size=(int(count), int(width))).astype(np.float32)
    before = time.perf_counter()
    search = WAYS[way](out, queries)
    prepared = time.perf_counter() - before
    start = time.perf_counter()
    rows = search()
    print(json.dumps({"seconds": time.perf_counter() - start, "prepared": prepared, "rows": rows.tolist()}))


def write(out: Path, rows: int, width: int) -> None:
    """A data set of normal features."""
    from extract.store.format.layout import StoredFeature

    generator = np.random.default_rng(0)
    feature = StoredFeature("embedding", (width,), "float32", {"layer": "x", "pooling": "none"})
    data = created(out, [feature], rows, 250_000)
    fill(data, lambda some: {"embedding": generator.standard_normal((len(some), width), np.float32)}, 10_000)


def main() -> None:
    """Measure, and print."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path)
    options.add_argument("--child", nargs=4)
    given = options.parse_args()
    if given.child:
        child(*given.child)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write(Path(folder, "out"), given.rows, given.width)
        print(f"{given.rows:,} x {given.width}, float32, {given.rows * given.width * 4 / 1e6:,.0f} MB")
        ways = [way for way in WAYS if way != "faiss" or importlib.util.find_spec("faiss")]
        for count in (1, 100):
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for _ in range(given.rounds):
                for way in ways:
                    took = python("-m", "benchmarks.search_speed", "--child", way, f"{folder}/out", given.width, count)
                    found[way].append({**json.loads(took.out), "peak": took.peak_mb})
            base = median(one["seconds"] for one in found["numpy"])
            for way, runs in found.items():
                seconds, prepared, peak = (median(one[key] for one in runs) for key in ("seconds", "prepared", "peak"))
                same = runs[0]["rows"] == found["ours"][0]["rows"]
                print(
                    f"{count:4} queries, {way:6} {seconds:7.2f} s, {base / seconds:5.2f} times numpy; "
                    f"{prepared:5.2f} s before; peak {peak:7,.0f} MB; same rows as ours: {same}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
