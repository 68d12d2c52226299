"""Read the same rows from layertap and from other stores, and compare the time with that of np.load(mmap_mode="r").

    pip install pyarrow pylance datasets zarr webdataset
    python -m benchmarks.stores_compared [STORE ...] [--folder FOLDER] [--json FILE]

Each store writes the rows into a folder of its own. In each round the stores are timed one after the other, and ratios
are formed within the round. Every timed pass is first made without a clock, and there each batch is compared with the
rows that were written. All reads come from the file cache. A store whose library is missing is an error; name the
stores to leave it out. docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.stores import CASES, RANDOM, STORES, Batch, MissingLibraryError, Store

BASELINE = "mmap"


class WrongRowsError(Exception):
    """A store gave other rows than those that were written, or not each row once."""


def checked(batches: Iterator[Batch], expected: np.ndarray, every_row: bool, what: str) -> None:
    """Compare each batch with the rows that were written.

    Raises:
        WrongRowsError: a batch differs, or `every_row` is set and a row is missing or comes twice.
    """
    seen = np.zeros(len(expected), np.int64)
    for number, (values, rows) in enumerate(batches):
        if values.dtype != expected.dtype or not np.array_equal(values, expected[rows]):
            raise WrongRowsError(f"{what}: batch {number} is not that of its rows")
        np.add.at(seen, rows, 1)
    if every_row and (seen != 1).any():
        row = int(np.flatnonzero(seen != 1)[0])
        raise WrongRowsError(f"{what}: row {row} comes {seen[row]} times in an epoch")


def read(store: Store, case: str, batch_size: int, seed: int, n_random: int) -> Iterator[Batch]:
    """Return the batches of a pass; the seed decides which rows are random and in which order they come."""
    if case == RANDOM:
        random = np.random.default_rng(seed)
        chosen = [random.choice(store.count, batch_size, replace=False) for _ in range(n_random)]
        return store.random(chosen)
    if case == "in order":
        return store.in_order(batch_size)
    return getattr(store, case)(batch_size, seed)


def timed(batches: Iterator[Batch]) -> dict[str, float]:
    """Read all batches; return the rows, and the wall and CPU seconds of this process with all of its threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(len(rows) for _, rows in batches)
    return {"rows": count, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def compare(stores: dict[str, Store], expected: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Return case -> store -> the rounds' seconds; each pass of a round is checked before it is timed."""
    results: dict[str, Any] = {}
    for case in options.cases:
        # An epoch that is only mixed is compared with an order of all rows from the map.
        of_case = {name: store for name, store in stores.items() if case in store.cases or name == BASELINE}
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in of_case}
        for store in of_case.values():
            store.open()
        for number in range(-1, options.rounds):  # the first round warms the caches and does not count
            for name, store in of_case.items():
                arguments = (store, case if case in store.cases else "rows", options.batch, number + 1, options.random)
                what = f"{store.title}, {CASES[case]}, round {number + 1}"
                # The pass with checks comes first: memory that a virtual machine has given back to its host is slow
                # when it is first used again, for every store (0.4 s for 200 MB).
                checked(read(*arguments), expected, case != RANDOM, what)
                if store.reopened and number >= 0:
                    store.close()
                    store.open()
                rounds[name].append(timed(read(*arguments)))
                if options.verbose:
                    print(f"{what}: {rounds[name][-1]['wall_s']:.3f} s", file=sys.stderr, flush=True)
        for store in of_case.values():
            store.close()
        results[case] = {name: seconds[1:] for name, seconds in rounds.items()}
    return results


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return case -> store -> median, least and greatest of the ratios to the map: rate, CPU seconds; and rows/s."""
    summaries: dict[str, Any] = {}
    for case, of_case in results.items():
        summaries[case] = {}
        for name, rounds in of_case.items():
            pairs = list(zip(rounds, of_case[BASELINE], strict=True))
            values = {
                "rate": [base["wall_s"] / this["wall_s"] for this, base in pairs],
                "cpu": [this["cpu_s"] / base["cpu_s"] for this, base in pairs],
                "rows_per_s": [this["rows"] / this["wall_s"] for this in rounds],
            }
            summaries[case][name] = {
                key: {"median": statistics.median(each), "least": min(each), "greatest": max(each)}
                for key, each in values.items()
            }
    return summaries


def table(summaries: dict[str, Any]) -> str:
    """Markdown: for each case the rates and the CPU seconds, as ratios to the map."""
    lines = []
    for case, of_case in summaries.items():
        lines += [f"| {CASES[case]} | rate | CPU | rows/s |", "|---|---|---|---|"]
        for name, values in of_case.items():
            ratios = ["{median:.2f} ({least:.2f}..{greatest:.2f})".format(**values[key]) for key in ("rate", "cpu")]
            lines.append(f"| {STORES[name].title} | {' | '.join(ratios)} | {values['rows_per_s']['median']:,.0f} |")
        lines.append("")
    return "\n".join(lines)


def versions(names: list[str]) -> dict[str, str]:
    """Return the versions of the libraries of stores, of Python and of NumPy."""
    packages = sorted({"numpy", *(package for name in names for package in STORES[name].packages)})
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the rows into all stores, compare, and return the report."""
    values = np.random.default_rng(0).standard_normal((options.rows, options.width), np.float32).astype(np.float16)
    names = [BASELINE, *(name for name in options.stores or STORES if name != BASELINE)]
    stores = {}
    for name in names:
        (folder / name).mkdir()
        stores[name] = STORES[name](folder / name)
        stores[name].count = len(values)
        stores[name].write(values)
    results = compare(stores, values, options)
    settings = {key: getattr(options, key) for key in ("rows", "width", "batch", "rounds", "random")}
    return {
        "settings": settings,
        "versions": versions(names),
        "cores": os.cpu_count(),
        "rounds": results,
        "summary": summary(results),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write the figures."""
    parser = common.parser(__doc__)
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"default: all of {', '.join(STORES)}")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--random", type=int, default=300, help="random batches in a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", dest="cases", action="append", choices=CASES, help="default: all")
    parser.add_argument("--folder", type=Path, help="parent of the temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--verbose", action="store_true", help="print each pass")
    options = parser.parse_args(arguments)
    if unknown := set(options.stores) - STORES.keys():
        parser.error(f"unknown store {', '.join(sorted(unknown))}; expected {', '.join(STORES)}")
    options.cases = options.cases or list(CASES)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        try:
            report = run(options, Path(folder))
        except MissingLibraryError as error:
            sys.exit(str(error))
    print(table(report["summary"]))
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
