"""Time, memory and written bytes of passes of `layertap sync` over a data set of N files.

    python -m benchmarks.sync_scale 1000000 --home /var/tmp/sync-scale

Each step is a process, and prints a line of JSON: seconds, seconds of CPU time, peak memory, bytes passed to the system
for writing (with temporary files), and the bytes of the files of `versions/` that it wrote.

    fill       one pass of N rows and its first version, all made up
    unchanged  a pass without changes
    known      a pass of 1,000 renamed and deleted files; nothing is computed
    changed    a pass of 1,000 added, edited, renamed and deleted files, half of which are computed
    again      a pass without changes after these
    reader     a `FeatureReader` opened, and 10,000 random rows read and compared with their paths

The scan is simulated: it yields N made-up files in the order of a real scan. Only changed files exist, in a folder.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.common import parser, peak_mb, python
from extract.sync.difference import Guards
from extract.sync.passes import Pass
from extract.sync.records import Records, publish, stored_rows
from extract.sync.scan import Scan, ScannedFile

STEPS = ("fill", "unchanged", "known", "changed", "again", "reader")
GUARDS = Guards(settle_s=0, max_vanish=1, retry_after_s=1e9)
CONFIGURATION = {"backbone": "tiny"}
TIME_NS = 10**18


def path_of(i: int) -> bytes:
    """Path of a made-up file; paths ascend with `i`."""
    return b"camera-%02d/2024-%04d/picture-%08d.ppm" % (i // 1_000_000, i // 1000 % 1000, i)


def content_of(i: int) -> bytes:
    """Bytes of a made-up file."""
    return b"P6 8 8 255\n" + i.to_bytes(4, "big") * 48


def feature_of(rows: np.ndarray) -> np.ndarray:
    """(R, 4) float32, the made-up features of files."""
    return np.stack([rows % 4096, rows // 4096, rows % 7, rows % 11], 1).astype(np.float32)


class Folder:
    """N made-up files, of which some have changed; the changed ones are real files below `root`."""

    def __init__(self, home: Path, count: int):
        self.root, self.count, self._note = home / "root", count, home / "changes.json"
        self.root.mkdir(exist_ok=True)
        noted: dict[str, list[Any]] = json.loads(self._note.read_text()) if self._note.exists() else {}
        self.removed, self.real = set(noted.get("removed", [])), set(noted.get("real", []))

    def change(self, counts: dict[str, int], seed: int) -> None:
        """Change files that have not changed before; `counts`: kind of change -> number of files."""
        generator = np.random.default_rng(seed)
        order = (int(i) for i in generator.choice(self.count, 2 * sum(counts.values()), replace=False))
        chosen = (i for i in order if i not in self.removed)
        for kind, count in counts.items():
            for i in itertools.islice(chosen, count):
                path = path_of(i).decode()
                if kind != "add":
                    self.removed.add(i)
                if kind in ("add", "rename"):
                    path = path.replace("picture", "added" if kind == "add" else "renamed")
                if kind != "delete":
                    (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                    (self.root / path).write_bytes(content_of(i if kind == "rename" else self.count + seed * 4096 + i))
                    self.real.add(path)
        self._note.write_text(json.dumps({"removed": sorted(self.removed), "real": sorted(self.real)}))

    def files(self) -> Iterator[ScannedFile]:
        """Yield what a scan yields."""
        real = []
        for path in self.real:
            status = (self.root / path).stat()
            real.append(ScannedFile(path.encode(), status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return heapq.merge(self._unchanged(), iter(sorted(real))) if real else self._unchanged()

    def _unchanged(self) -> Iterator[ScannedFile]:
        removed = self.removed
        for i in range(self.count):
            if i not in removed:
                yield ScannedFile(path_of(i), 203, TIME_NS + i, TIME_NS + i)


def fill(home: Path, count: int) -> dict[str, Any]:
    """Write the pass and its first version."""
    from extract.images import list_images
    from extract.store.format.dataset import shard_rows_for
    from extract.store.format.layout import RowNames, create_shard
    from extract.store.format.writer import ShardWriter
    from tests.extract.sync.tiny import picture, planner

    out, sample = home / "out", home / "sample"
    sample.mkdir()
    (sample / "x.ppm").write_bytes(picture(0))
    plan = planner(layers=["fc"], shard_rows=None)(list_images(sample), out / "passes" / "000001")
    images = {"root": str(home / "root"), "count": count, "paths_xxh3": "0" * 32}
    dataset = replace(plan.dataset, images=images, shard_rows=min(count, shard_rows_for(plan.dataset.features)))
    dataset.open_or_create()
    seconds = {}
    start = time.perf_counter()
    for shard in range(dataset.n_shards):
        rows = dataset.shard_range(shard)
        names = RowNames([path_of(i).decode() for i in rows], np.full(len(rows), -1), [""] * len(rows), [])
        create_shard(dataset.path(shard, part=True), dataset.features, dataset.identity(shard), names, plan.provenance)
        with ShardWriter(dataset, shard) as writer:
            for first in range(rows.start, rows.stop, 1 << 16):
                some = np.arange(first, min(first + (1 << 16), rows.stop))
                hashes = [xxhash.xxh3_128_digest(content_of(i)) for i in some.tolist()]
                source = {
                    "source_size": np.full(len(some), 203),
                    "source_mtime_ns": TIME_NS + some,
                    "source_hash": np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16),
                }
                writer.write(some, {"fc": feature_of(some)}, np.ones(len(some), np.uint8), source)
            writer.publish()
    seconds["features"] = time.perf_counter() - start
    start = time.perf_counter()
    rows = stored_rows(out / "passes" / "000001", TIME_NS)
    paths = np.array([path_of(i) for i in range(count)])
    array = rows.astype([("path", paths.dtype), *rows.dtype.descr[1:]])
    array["path"], array["ctime_ns"], array["settled"] = paths, array["mtime_ns"], 1
    versions = plan.provenance["versions"]
    records = Records(array, configuration=CONFIGURATION, versions=versions, last_pass=1, changed=True)
    publish(out, os.fspath(home / "root"), records, None)
    seconds["version"] = time.perf_counter() - start
    return {f"{name}_s": round(value, 1) for name, value in seconds.items()}


def run_pass(home: Path, count: int, counts: dict[str, int]) -> dict[str, Any]:
    """Change files, and run a pass."""
    folder = Folder(home, count)
    if counts:
        folder.change(counts, seed=1 + len(folder.removed))

    def refuse(*_: Any) -> Any:
        raise AssertionError("a backbone was asked for, although no image has to be computed")

    plan_for: Any = refuse
    if "add" in counts:
        from tests.extract.sync.tiny import planner, tiny_backbone

        tiny_backbone()
        plan_for = planner(layers=["fc"], shard_rows=None, batch_size=64)
    Scan.files = lambda _: folder.files()  # type: ignore[method-assign]
    before = round(peak_mb())
    report = Pass(os.fspath(folder.root), home / "out", plan_for, CONFIGURATION, guards=GUARDS).run()
    assert ("torch" in sys.modules) == ("add" in counts)
    names = ("added", "changed", "renamed", "deleted", "computed", "rows", "version")
    return {"peak_before_mb": before, **{name: getattr(report, name) for name in names}, "notes": report.notes}


def reader(home: Path, count: int) -> dict[str, Any]:
    """Open a reader, and compare random rows with what their paths say."""
    from extract import FeatureReader

    start, before = time.perf_counter(), round(peak_mb())
    with FeatureReader(home / "out") as opened:
        seconds, peak = time.perf_counter() - start, round(peak_mb())
        start = time.perf_counter()
        rows = np.sort(np.random.default_rng(0).choice(len(opened), min(10_000, len(opened)), replace=False))
        paths = [opened.paths[row] for row in rows.tolist()]
        features = opened["fc"].take(rows)
        folder = Folder(home, count)
        known = [k for k, path in enumerate(paths) if "picture" in path and path not in folder.real]
        numbers = np.array([int(paths[k][-12:-4]) for k in known])
        np.testing.assert_array_equal(features[known], feature_of(numbers))
        assert len(opened) == count - len(folder.removed) + len(folder.real)
        assert [opened.classes[label] for label in opened.labels[rows].tolist()] == [
            path.partition("/")[0] for path in paths
        ]
        read = time.perf_counter() - start
    return {"open_s": round(seconds, 2), "peak_before_mb": before, "peak_open_mb": peak, "read_10000_s": round(read, 2)}


def step(name: str, home: Path, count: int) -> None:
    """Run one step and print its line."""
    versions = home / "out" / "versions"
    tables = set(versions.iterdir()) if versions.exists() else set()
    start = time.perf_counter()
    match name:
        case "fill":
            result = fill(home, count)
        case "unchanged" | "again":
            result = run_pass(home, count, {})
        case "known":
            result = run_pass(home, count, {"rename": 500, "delete": 500})
        case "changed":
            result = run_pass(home, count, {"add": 250, "edit": 250, "rename": 250, "delete": 250})
        case _:
            result = reader(home, count)
    seconds, times = time.perf_counter() - start, os.times()
    written = Path("/proc/self/io").read_text().partition("wchar:")[2].split()[0]
    new_tables = set(versions.iterdir()) - tables if versions.exists() else set()
    line = {
        "step": name,
        "files": count,
        "seconds": round(seconds, 1),
        "cpu_s": round(times.user + times.system, 1),
        "peak_mb": round(peak_mb()),
        "written_mb": round(int(written) / 1e6, 2),
        "table_mb": round(sum(path.stat().st_size for path in new_tables) / 1e6, 3),
        **result,
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("files", type=int)
    options.add_argument("--home", type=Path, required=True, help="folder for the data set; its content is deleted")
    options.add_argument("--step", help="run one step on what earlier steps left")
    args = options.parse_args()
    if args.step:
        step(args.step, args.home, args.files)
        return
    shutil.rmtree(args.home, ignore_errors=True)
    args.home.mkdir(parents=True)
    for name in STEPS:
        own = ("-m", "benchmarks.sync_scale", args.files, "--home", args.home, "--step", name)
        print(python(*own).out, end="", flush=True)


if __name__ == "__main__":
    main()
