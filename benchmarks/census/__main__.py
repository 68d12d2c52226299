"""Compare layertap with references on every network of timm, torchvision and transformers; resumable.

    python -m benchmarks.census OUT.jsonl [--library timm] [--families] [--only GLOB] [--limit N]

Each network runs in a process of its own, with limits on time and memory; a line of OUT.jsonl holds its numbers.
Networks that have a line are skipped, and the smallest come first. `--families` takes the smallest network of each
family that runs. `python -m benchmarks.census.page OUT.jsonl` writes the page of the documentation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers

from benchmarks.census.comparison import Report, compare
from benchmarks.census.embedding import compare_embedding
from benchmarks.census.networks import (
    LIBRARIES,
    MOST_PARAMETERS,
    Network,
    NotRunError,
    count_parameters,
    networks,
    prepare,
)
from benchmarks.census.processes import LimitError, run_limited

MOST_MEMBERS = 4  # of a family, tried one after the other until one runs


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--families", action="store_true", help="the smallest network of each family")
    parser.add_argument("--only", default="*", help="glob of LIBRARY/NAME")
    parser.add_argument("--limit", type=int, help="number of networks to run")
    parser.add_argument("--seconds", type=float, default=120, help="time limit for a network")
    parser.add_argument("--memory-gb", type=float, default=10, help="memory limit for a network")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    libraries = [options.library] if options.library else LIBRARIES
    selected = [n for library in libraries for n in networks(library) if fnmatchcase(n.key, options.only)]
    if options.families:  # timm's test_* networks are made for tests
        selected = [n for n in selected if not n.name.startswith("test_")]
    counts = _parameters(selected, options.out.with_suffix(".parameters.json"))
    selected.sort(key=lambda network: counts[network.key] or float("inf"))
    results = read(options.out)
    families = {(network.library, network.family) for network in selected}
    _append(options.out, {"about": about() | {"families": len(families)}})
    done = 0
    for network in _family_members(selected, results) if options.families else selected:
        if network.key in results:
            continue
        if done == options.limit:
            return
        result = _run(network, counts[network.key], options)
        results[network.key] = result
        _append(options.out, result)
        print(json.dumps(result), flush=True)
        done += 1


def about() -> dict[str, Any]:
    """Return the versions that the results depend on, and the day."""
    libraries = (torch, timm, torchvision, transformers)
    return {library.__name__: library.__version__ for library in libraries} | {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat()
    }


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return LIBRARY/NAME -> result, the last line of each network."""
    if not path.exists():
        return {}
    lines = map(json.loads, whole_lines(path))
    return {f"{line['library']}/{line['name']}": line for line in lines if "about" not in line}


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without a last one that a killed process did not write to its end."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")


def _family_members(selected: list[Network], results: dict[str, dict[str, Any]]) -> Iterator[Network]:
    """Yield the members of each family, smallest first, until one of them has run."""
    tried: dict[tuple[str, str], int] = {}
    for network in selected:
        family = network.library, network.family
        if tried.get(family, 0) >= MOST_MEMBERS:
            continue
        yield network
        tried[family] = MOST_MEMBERS if "numbers" in results.get(network.key, {}) else tried.get(family, 0) + 1


def _parameters(selected: list[Network], path: Path) -> dict[str, int | None]:
    """Return the number of parameters of each network, None where it cannot be built; they are kept in a file."""
    counts: dict[str, int | None] = json.loads(path.read_text()) if path.exists() else {}
    missing = [network for network in selected if network.key not in counts]
    if missing:
        run_limited(_count_all, missing, seconds=7200, memory_bytes=10**10, update=counts.update)
        path.write_text(json.dumps(counts))
    return counts


def _count_all(tell: Callable[[dict[str, int | None]], None], missing: list[Network]) -> None:
    for network in missing:
        try:
            count: int | None = count_parameters(network)
        except Exception:  # said again where it is run
            count = None
        tell({network.key: count})


def _run(network: Network, parameters: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Run a network in its own process and return the line of the results."""
    line: dict[str, Any] = {
        "library": network.library, "name": network.name, "family": network.family, "parameters": parameters,
    }  # fmt: skip
    start = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="census-"))
    memory = int(options.memory_gb * 1e9)
    try:
        if parameters is not None and parameters > MOST_PARAMETERS:
            raise NotRunError(f"more than {MOST_PARAMETERS // 1_000_000} M parameters")
        run_limited(
            _compare_network, network, scratch, seconds=options.seconds, memory_bytes=memory, update=line.update
        )
    except (NotRunError, LimitError) as error:
        line["not run"] = str(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if line.get("stage") == "end":
        del line["stage"]
    return line | {"seconds": round(time.monotonic() - start, 1)}


def _compare_network(tell: Callable[[dict[str, Any]], None], network: Network, scratch: Path) -> None:
    """Compare a network, and tell the parts of its line."""
    os.environ["TMPDIR"] = str(scratch)
    warnings.simplefilter("ignore")
    tell({"stage": "building"})
    try:
        model, pictures = prepare(network)
    except NotRunError as error:
        tell({"not run": str(error), "stage": "end"})
        return
    report = Report()

    def tell_report(stage: str) -> None:
        numbers = {kind: number for kind, number in report.numbers.items() if number}
        wrong = {kind: number for kind, number in report.wrong.items() if number}
        parts = {
            "wrong": wrong,
            "refused": report.refused,
            "uncompared": report.uncompared,
            "examples": report.examples,
        }
        tell({"stage": stage, "numbers": numbers} | {name: dict(part) for name, part in parts.items() if part})

    report.tell = tell_report
    tell({"size": list(pictures.shape[2:]), "parameters": sum(p.numel() for p in model.parameters())})
    compare(model, pictures, report)
    del model
    tell_report("embedding")
    if network.library != "torchvision" or "." not in network.family:  # layertap has classification models alone
        try:
            compare_embedding(network, scratch, report)
        except NotRunError as error:
            report.uncompared[f"embedding: {error}"] += 1
    tell_report("end")


if __name__ == "__main__":
    main()
