"""What a comparison costs over its parts: python tests/benchmarks/compare_speed.py IMAGES BACKBONES.csv [FOLDER]

1. `layertap compare` of all backbones of the table: seconds of the extraction over those of the forwards and of
   decoding once for each way to decode, from the logs of the data sets; and the peak of its memory, beside that of
   `layertap embed` with each backbone alone, of which the largest counts.
2. `feature_similarity` of three features of 50,000 images in files (0.5 GB): seconds, and the
   largest memory of its own.

A temporary folder in FOLDER takes the data sets.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from extract.analysis.similarity import feature_similarity

_MEASURED = """
import os, resource, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


def measured(*command: object) -> tuple[float, float]:
    """Seconds of a command, and the peak of its memory in GB."""
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", _MEASURED, sys.executable, "-m", "layertap", *map(str, command)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    code, peak_kb = map(int, result.stdout.split())
    if code:
        sys.exit(f"layertap {' '.join(map(str, command))} exited with {code}")
    return time.perf_counter() - start, peak_kb / 1e6


def logged(out: Path) -> tuple[float, float, float]:
    """Seconds of the runs of a data set, of waiting for images, and of its forwards."""
    ended = [line for line in map(json.loads, (out / "runs.jsonl").open()) if line["event"] == "ended"]
    return (
        sum(line["seconds"] for line in ended),
        sum(line["stages"]["images"] for line in ended),
        sum(line["stages"]["forward"] for line in ended),
    )


def compare_speed(images: str, table: Path, folder: Path) -> None:
    """Print the first part."""
    of = ("compare", images, "--from", table, "-p", "centroid", "-o", folder / "compared")
    whole_s, peak = measured(*of)
    again_s, _ = measured(*of)  # probes, matrices and the page alone
    names = sorted(path.parent.name for path in (folder / "compared").glob("*/runs.jsonl"))
    logs = {name: logged(folder / "compared" / name) for name in names}
    decoded_s = sum(images_s for _, images_s, _ in logs.values())
    forwards_s = sum(forward_s for _, _, forward_s in logs.values())
    extraction_s = whole_s - again_s
    ways = sum(images_s > 0.05 * seconds for seconds, images_s, _ in logs.values())
    print(f"{len(names)} backbones, decoded in {ways} ways: {whole_s:.1f} s, of which {extraction_s:.1f} s extraction")
    print(f"  forwards {forwards_s:.1f} s, decoding {decoded_s:.1f} s: {extraction_s / (forwards_s + decoded_s):.2f}")
    peaks = {}
    for number, line in enumerate(csv.DictReader(table.open())):
        weights = line.get("weights") or ""
        weights = str(table.parent / weights) if (table.parent / weights).is_file() else weights
        out = folder / f"alone-{number}"
        _, peaks[line["backbone"]] = measured(
            "embed", images, "-b", line["backbone"], *(("--weights", weights) if weights else ()), "-o", out
        )
    largest = max(peaks, key=lambda name: peaks[name])
    print(f"  memory {peak:.2f} GB; {largest} alone {peaks[largest]:.2f} GB")


def feature_similarity_memory(folder: Path) -> None:
    """Print the second part."""
    arrays, count = [], 50_000
    for number, width in enumerate((1280, 768, 512)):
        file = folder / f"{number}.npy"
        array = np.lib.format.open_memmap(file, "w+", np.float32, (count, width))
        for start in range(0, count, 5000):
            array[start : start + 5000] = np.random.default_rng((number, start)).normal(size=(5000, width))
        array.flush()
        arrays.append(np.load(file, mmap_mode="r"))
        del array
    before, peak, done = own_gb(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, own_gb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    feature_similarity(arrays)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(f"feature_similarity of {count:,} images: {seconds:.0f} s, {peak - before:.2f} GB")


def own_gb() -> float:
    """Memory of this process that is not that of files."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1e6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as place:
        compare_speed(sys.argv[1], Path(sys.argv[2]), Path(place))
        feature_similarity_memory(Path(place))
