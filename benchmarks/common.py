"""What several benchmarks do: time ways in turn, run commands, make pictures and data sets, and tell ratios."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
SUFFIXES = {".jpg", ".jpeg", ".png"}
# A small process starts the command: the peak of a process counts that of its parent before `exec`, too.
_STARTER = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
seconds, cpu_s = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
with open(sys.argv[1], "w") as file:
    json.dump({"seconds": seconds, "cpu_s": cpu_s, "peak_mb": usage.ru_maxrss / 1024}, file)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of options whose help is the docstring of the module."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    before: Callable[[str], object] = str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of a call of each way, round after round, in an order that alternates.

    Args:
        ways: by name.
        rounds: number of seconds of each.
        calls: how often a way is called in a round.
        before: is called with the name, without the clock.
        clock: `time.process_time` counts CPU seconds, on a busy machine.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            before(name)
            start = clock()
            for _ in range(calls):
                ways[name]()
            taken[name].append((clock() - start) / calls)
    return taken


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios within the rounds."""
    return statistics.median(one / other for one, other in zip(numerators, denominators, strict=True))


def say(what: str, ours: Sequence[float], plain: Sequence[float], than: str) -> None:
    """Print how fast ours is, of the plain way; both are seconds by round."""
    medians = ", ".join(f"{statistics.median(seconds) * 1000:,.0f} ms" for seconds in (ours, plain))
    print(f"{what:58} {ratio(plain, ours):6.2f} of {than}  ({medians})", flush=True)


class Run(NamedTuple):
    """What a process took, those that it waited for included, and what it printed."""

    seconds: float
    cpu_s: float
    peak_mb: float
    out: str
    err: str


def run(*command: object, **options: Any) -> Run:
    """Run a command in a process of its own, and end this one with its text if it fails."""
    with tempfile.NamedTemporaryFile() as file:
        whole = [sys.executable, "-c", _STARTER, file.name, *map(str, command)]
        done = subprocess.run(whole, capture_output=True, text=True, check=False, **options)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))[:200]} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return Run(**json.load(file), out=done.stdout, err=done.stderr)


def python(*arguments: object, **options: Any) -> Run:
    """Run Python with the packages of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return run(sys.executable, *arguments, env=environment, **options)


def peak_mb() -> float:
    """The most resident memory of this process so far."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def repeated(images: Path, count: int, folder: Path) -> int:
    """Fill a folder with pictures, over and over; all have other bytes, since same files are computed once.

    Returns:
        How many of the files are as they were; the others have a few bytes at their end that no decoder reads.
    """
    files = sorted(path for path in images.rglob("*") if path.suffix.lower() in SUFFIXES)[:count]
    if not files:
        sys.exit(f"no {', '.join(sorted(SUFFIXES))} files in {images}")
    folder.mkdir()
    for number, file in enumerate(itertools.islice(itertools.cycle(files), count)):
        name = folder / f"{number:07d}{file.suffix.lower()}"
        name.write_bytes(file.read_bytes() + (name.name.encode() if number >= len(files) else b""))
    return len(files)


def created(out: Path, features: Sequence[Any], count: int, shard_rows: int) -> Any:
    """A data set of made-up names in ten classes, with its shards created and no row written."""
    import xxhash

    from extract.store.format.dataset import DataSet
    from extract.store.format.layout import RowNames, create_shard

    paths = [f"class{row % 10}/image_{row:09d}.jpg" for row in range(count)]
    hashed = xxhash.xxh3_128_hexdigest(b"\0".join(map(os.fsencode, paths)))
    images = {"root": "/photos", "count": count, "paths_xxh3": hashed}
    data = DataSet(out, {"weights": "w"}, list(features), images, shard_rows)
    data.open_or_create()
    for shard in range(data.n_shards):
        rows = np.array(data.shard_range(shard))
        here = paths[rows[0] : rows[-1] + 1]
        names = RowNames(here, rows % 10, ["train"] * len(rows), [f"class{number}" for number in range(10)])
        create_shard(data.path(shard, part=True), data.features, data.identity(shard), names, {})
    return data


def fill(
    data: Any,
    values: Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]],
    batch: int = 1024,
    sync_s: float = 30,
    publish: bool = True,
) -> None:
    """Write every row of a data set, in batches, and publish its shards or force them to the disk."""
    from extract.store.format.writer import ShardWriter

    for shard in range(data.n_shards):
        rows = np.array(data.shard_range(shard))
        with ShardWriter(data, shard, sync_s=sync_s) as writer:
            for some in np.split(rows, range(batch, len(rows), batch)):
                hashes = np.zeros((len(some), 16), np.uint8)
                source = {"source_size": some, "source_mtime_ns": some, "source_hash": hashes}
                writer.write(some, values(some), np.ones(len(some), np.uint8), source)
            if publish:
                writer.publish()
            else:
                os.fsync(writer._file)
