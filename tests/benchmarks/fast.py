"""Whole runs of `layertap embed` strict, compiled and with `--fast`, in turn, each with an empty cache folder; JSON.

    python tests/benchmarks/fast.py IMAGES [-b torchvision/resnet50]... [--images 10 100 512] [--rounds 3]
        [-o OUT.json]
    python tests/benchmarks/fast.py IMAGES --neighbour --rounds 5 [-b ...] [--images 512]

Each run is a process of its own, and its time is that of the whole process, imports included. The
variants run in turn, round after round. Two ratios of each round are given: to the time of the strict run, and
`of_better`, the time of the better of strict and compiled over that of `--fast`: 1 or more says that `--fast` pays.

`--neighbour` runs `--fast` only, beside a process that computes for random seconds and sleeps for random seconds, and
reports which way was taken, whether options were measured, and the seconds until the first batch.

IMAGES is repeated up to the number of images; each repeat has some bytes at its end that no decoder reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BACKBONES = ("bundled/efficientnet_lite0", "torchvision/resnet18", "torchvision/resnet50")
VARIANTS = {"strict": ["--compile", "off"], "compiled": ["--compile", "on"], "fast": ["--fast"]}
SUFFIXES = {".jpg", ".jpeg", ".png"}
SOURCES = {"measured on": "measured", "too short": "short"}
NEIGHBOUR = """
import random, sys, time
source = random.Random(int(sys.argv[1]))
while True:
    end = time.perf_counter() + source.uniform(0.2, 4)
    while time.perf_counter() < end:
        pass
    time.sleep(source.uniform(0.2, 4))
"""


def fill(images: Path, count: int, folder: Path) -> None:
    """Fill a folder with `count` files of other bytes each."""
    files = sorted(path for path in images.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        sys.exit(f"no {', '.join(sorted(SUFFIXES))} files in {images}")
    folder.mkdir()
    for number in range(count):
        file = files[number % len(files)]
        name = folder / f"{number:06d}{file.suffix.lower()}"
        name.write_bytes(file.read_bytes() + (name.name.encode() if number >= len(files) else b""))


def run(images: Path, backbone: str, flags: list[str], cache: Path, out: Path) -> dict[str, Any]:
    """Run `layertap embed` and return its time and how it computed."""
    weights = [] if backbone.startswith("bundled/") else ["--weights", "random"]
    command = [sys.executable, "-P", "-m", "layertap", "embed", str(images), "-b", backbone, *weights, *flags, "--json"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    start = time.perf_counter()
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - start
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        sys.exit(done.stderr)
    result = json.loads(done.stdout)
    decode = "fast" if result["computation"]["decoding"] else "exact"
    way = f"{result['precision']}, {result['computation']['engine']}, {decode}"
    line = next((line for line in done.stderr.splitlines() if line.startswith("fast ")), "")
    source = next((name for text, name in SOURCES.items() if text in line), "")
    before_s = seconds - result["seconds"] + result["computation"]["prepared_in_s"]
    print(f"{backbone} {' '.join(flags)}: {seconds:.1f} s, {way} {source}", file=sys.stderr, flush=True)
    return {"seconds": seconds, "before_s": before_s, "way": way, "source": source}


def compare(images: Path, backbone: str, count: int, rounds: int, work: Path) -> dict[str, Any]:
    """Run the variants in turn."""
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, flags in VARIANTS.items():
            shutil.rmtree(work / name, ignore_errors=True)
            times[name].append(run(images, backbone, flags, work / name, work / "out"))
    result: dict[str, Any] = {"backbone": backbone, "images": count, "rounds": rounds}
    strict, compiled, fast = ([each["seconds"] for each in times[name]] for name in VARIANTS)
    for name, runs in times.items():
        rates = [reference / each["seconds"] for reference, each in zip(strict, runs, strict=True)]
        result[name] = {
            "seconds": [round(each["seconds"], 2) for each in runs],
            "rate_over_strict": round(statistics.median(rates), 3),
            "ways": [each["way"] for each in runs],
        }
    of_better = [min(pair[:2]) / pair[2] for pair in zip(strict, compiled, fast, strict=True)]
    result["fast"] |= {
        "of_better": round(statistics.median(of_better), 3),
        "of_better_least": round(min(of_better), 3),
        "sources": [each["source"] for each in times["fast"]],
    }
    return result


@contextmanager
def neighbour(seed: int) -> Iterator[None]:
    """Context manager: a process that takes a core for random seconds."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def beside_neighbour(images: Path, backbone: str, count: int, rounds: int, work: Path) -> dict[str, Any]:
    """Run `--fast` with an empty cache beside a noisy neighbour, and once on the machine as it is."""
    quiet = run(images, backbone, VARIANTS["fast"], work / "quiet", work / "out")
    noisy = []
    for seed in range(rounds):
        shutil.rmtree(work / "noisy", ignore_errors=True)
        with neighbour(seed):
            noisy.append(run(images, backbone, VARIANTS["fast"], work / "noisy", work / "out"))
    same = sum(each["way"] == quiet["way"] for each in noisy)
    return {"backbone": backbone, "images": count, "quiet": quiet, "noisy": noisy, "same_way": f"{same}/{rounds}"}


def main() -> None:
    """Read the options, measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("-b", "--backbone", action="append", help=f"default: {', '.join(BACKBONES)}")
    parser.add_argument("--images", type=int, nargs="+", default=[10, 100, 512], dest="counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbour", action="store_true", help="beside a noisy neighbour")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="where to write the JSON, too")
    options = parser.parse_args()
    measure = beside_neighbour if options.neighbour else compare
    results = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for count in options.counts:
            fill(options.images, count, work / f"images-{count}")
            for backbone in options.backbone or BACKBONES:
                results.append(measure(work / f"images-{count}", backbone, count, options.rounds, work))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    text = json.dumps(results, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
