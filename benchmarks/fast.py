"""Whole runs of `layertap embed` strict, compiled and with `--fast`, in turn, each with an empty cache folder; JSON.

    python -m benchmarks.fast IMAGES [-b torchvision/resnet50]... [--images 10 100 512] [--rounds 3]
        [-o OUT.json]

Each run is a process of its own, and its time is that of the whole process, imports included. The
variants run in turn, round after round. Two ratios of each round are given: to the time of the strict run, and
`of_better`, the time of the better of strict and compiled over that of `--fast`: 1 or more says that `--fast` pays.

IMAGES is repeated up to the number of images; each repeat has some bytes at its end that no decoder reads.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import python, ratio

BACKBONES = ("bundled/efficientnet_lite0", "torchvision/resnet18", "torchvision/resnet50")
VARIANTS = {"strict": ["--compile", "off"], "compiled": ["--compile", "on"], "fast": ["--fast"]}


def run(images: Path, backbone: str, flags: list[str], cache: Path, out: Path) -> dict[str, Any]:
    """Run `layertap embed` and return its time and how it computed."""
    weights = [] if backbone.startswith("bundled/") else ["--weights", "random"]
    command = ["-P", "-m", "layertap", "embed", images, "-b", backbone, *weights, *flags, "--json", "-o", out]
    caches = {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    done = python(*command, env=caches)
    shutil.rmtree(out)
    result, seconds = json.loads(done.out), done.seconds
    decode = "fast" if result["computation"]["decoding"] else "exact"
    way = f"{result['precision']}, {result['computation']['engine']}, {decode}"
    told = next((line for line in done.err.splitlines() if line.startswith("fast ")), "")
    print(f"{backbone} {' '.join(flags)}: {seconds:.1f} s, {way}; {told}", file=sys.stderr, flush=True)
    return {"seconds": seconds, "way": way, "told": told}


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
        seconds = [each["seconds"] for each in runs]
        result[name] = {
            "seconds": [round(each, 2) for each in seconds],
            "rate_over_strict": round(ratio(strict, seconds), 3),
            "ways": [each["way"] for each in runs],
        }
    of_better = [min(pair[:2]) / pair[2] for pair in zip(strict, compiled, fast, strict=True)]
    result["fast"] |= {
        "of_better": round(statistics.median(of_better), 3),
        "of_better_least": round(min(of_better), 3),
        "told": [each["told"] for each in times["fast"]],
    }
    return result


def main() -> None:
    """Read the options, measure, and print JSON."""
    parser = common.parser(__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("-b", "--backbone", action="append", help=f"default: {', '.join(BACKBONES)}")
    parser.add_argument("--images", type=int, nargs="+", default=[10, 100, 512], dest="counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="where to write the JSON, too")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for count in options.counts:
            common.repeated(options.images, count, work / f"images-{count}")
            for backbone in options.backbone or BACKBONES:
                results.append(compare(work / f"images-{count}", backbone, count, options.rounds, work))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    text = json.dumps(results, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
