"""Time and memory of readers and exports of many shards: `python -m tests.benchmarks.store_scale --shards 1000`.

The rows are made up: 16 float16 values each. Each job runs in its own process; CPU seconds and the maximum resident set
of that process are printed as JSON. A process that only imports the library is the first job.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import xxhash

FEATURE = "vector"
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
    from extract.store.format.dataset import DataSet
    from extract.store.format.layout import RowNames, StoredFeature, create_shard
    from extract.store.format.writer import ShardWriter

    count = n_shards * rows
    paths = [f"class{i % 100:03d}/image_{i:09d}.jpg" for i in range(count)]
    images = {
        "root": "/photos",
        "count": count,
        "paths_xxh3": xxhash.xxh3_128_hexdigest(b"\0".join(map(os.fsencode, paths))),
        "labels_xxh3": "0" * 32,
    }
    features = [StoredFeature(FEATURE, (16,), "float16", {"layer": "fc"})]
    data = DataSet(out=out, depends_on={"weights": "w"}, features=features, images=images, shard_rows=rows)
    data.open_or_create()
    classes = [f"class{i:03d}" for i in range(100)]
    random = np.random.default_rng(0)
    for shard in range(n_shards):
        chosen = data.shard_range(shard)
        labels = np.arange(chosen.start, chosen.stop) % 100
        names = RowNames(paths[chosen.start : chosen.stop], labels, ["train"] * rows, classes)
        create_shard(data.path(shard, part=True), features, data.identity(shard), names, {"weights": "w"})
        with ShardWriter(data, shard) as writer:
            source = {
                "source_size": np.full(rows, 1000),
                "source_mtime_ns": np.zeros(rows, np.int64),
                "source_hash": np.zeros((rows, 16), "u1"),
            }
            values = {FEATURE: random.normal(size=(rows, 16)).astype(np.float16)}
            writer.write(np.arange(chosen.start, chosen.stop), values, np.ones(rows, np.uint8), source, {})
            writer.publish()


def measured(job: str, out: Path, scratch: Path) -> dict[str, float]:
    """Run a job in a process of its own, and return its CPU seconds and its maximum resident set in MB."""
    start = "from pathlib import Path; from extract import FeatureReader"
    code = f"{start}; out, scratch = map(Path, {[str(out), str(scratch)]}); {job}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = "; import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    peak = subprocess.run([sys.executable, "-c", code + report], check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu, 2), "peak_mb": round(int(peak) / 1024)}


def main() -> None:
    """Create the data set unless it exists, run the jobs, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000, help="rows of each shard")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the data set and the exports")
    parser.add_argument("--jobs", nargs="*", default=list(JOBS))
    arguments = parser.parse_args()
    out = arguments.folder / f"{arguments.shards}x{arguments.rows}"
    if not out.exists():
        create(out, arguments.shards, arguments.rows)
    figures = {}
    for name in arguments.jobs:
        scratch = arguments.folder / "scratch"
        subprocess.run(["rm", "-rf", scratch], check=True)
        scratch.mkdir()
        figures[name] = measured(JOBS[name], out, scratch)
        subprocess.run(["rm", "-rf", scratch], check=True)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
