"""Time and memory of readers and exports of many shards: `python -m benchmarks.store_scale --folder F --shards 1000`.

The rows are made up: 16 float16 values each. Each job runs in its own process; its CPU seconds and its maximum resident
set are printed as JSON. A process that only imports the library is the first job.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from benchmarks.common import created, fill, parser, python

START = (
    "import sys; from pathlib import Path; from extract import FeatureReader; out, scratch = map(Path, sys.argv[1:])"
)
JOBS = {
    "import": "pass",
    "show": "from pipelines.data_sets.show import describe; describe(out)",
    "status": "from pipelines.data_sets.status import progress_of; progress_of(str(out))",
    "verify": "from extract.store.verify import verify; assert not verify(out).faults",
    "open": "FeatureReader(out)",
    "one row": "FeatureReader(out)['vector'][len(FeatureReader(out)) // 2]",
    "names": "r = FeatureReader(out); [sum(map(len, x)) for x in (r.paths, r.splits)], r.labels.sum(), r.status.sum()",
    "epoch in order": "[x.sum() for x, _ in FeatureReader(out).batches('vector', 256)]",
    "epoch, chunks": "[x.sum() for x, _ in FeatureReader(out).batches('vector', 256, shuffle='chunks')]",
    "epoch, rows": "[x.sum() for x, _ in FeatureReader(out).batches('vector', 256, shuffle='rows')]",
    **{
        f"export {to}": f"from extract.store.export import export; export(FeatureReader(out), scratch / 'x', '{to}')"
        for to in ("npy", "h5", "parquet", "mat")
    },
}


def create(out: Path, n_shards: int, rows: int) -> None:
    """Write a finished data set of `n_shards` shards of `rows` rows."""
    from extract.store.format.layout import StoredFeature

    random = np.random.default_rng(0)
    data = created(out, [StoredFeature("vector", (16,), "float16", {"layer": "fc"})], n_shards * rows, rows)
    fill(data, lambda some: {"vector": random.normal(size=(len(some), 16)).astype(np.float16)}, rows)


def main() -> None:
    """Create the data set unless it exists, run the jobs, and print the figures."""
    options = parser(__doc__)
    options.add_argument("--shards", type=int, default=1000)
    options.add_argument("--rows", type=int, default=1000, help="rows of each shard")
    options.add_argument("--folder", type=Path, required=True, help="folder of the data set and the exports")
    options.add_argument("--jobs", nargs="*", default=list(JOBS))
    given = options.parse_args()
    out, scratch = given.folder / f"{given.shards}x{given.rows}", given.folder / "scratch"
    if not out.exists():
        create(out, given.shards, given.rows)
    figures = {}
    for name in given.jobs:
        scratch.mkdir()
        took = python("-c", f"{START}; {JOBS[name]}", out, scratch)
        figures[name] = {"cpu_s": round(took.cpu_s, 2), "peak_mb": round(took.peak_mb)}
        shutil.rmtree(scratch)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
