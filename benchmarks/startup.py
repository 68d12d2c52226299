"""The time of whole commands, most of which is start-up, beside the imports of the libraries that they need.

    python -m benchmarks.startup [--rounds 5] [--checkout FOLDER ...] [--only TEXT ...] [-o times.json]

Each command is a process of its own, on 64 made-up pictures, with all caches warm: one round before the first is not
counted. The commands of all checkouts take turns, so that a busy machine delays all of them. Printed are medians: the
seconds of the process, its seconds of CPU with those of its workers, and the seconds of CPU beyond those of
`import torch`. OpenMP has one thread, since threads that wait for a busy core burn CPU.

"start-up" of `embed` is the process less the time from its first image to its last receipt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image

from benchmarks.common import ROOT, Run, parser, python

IMAGES = 64
RESNET = ["-b", "torchvision/resnet50", "--weights", "resnet50.pth"]

IMPORTS = {f"import {name}": ["-c", f"import {name}"] for name in ("torch", "torchvision", "timm")}
COMMANDS = {
    "--version": ["--version"],
    "--help": ["--help"],
    "embed --help": ["embed", "--help"],
    "backbones": ["backbones"],
    "backbones 'timm/vit_small*'": ["backbones", "timm/vit_small*"],
    "show": ["show", "done"],
    "status": ["status", "done"],
    "embed": ["embed", "photos", "-o", "new", "--json"],
    "embed, nothing to do": ["embed", "photos", "-o", "done", "--json"],
    "embed resnet50": ["embed", "photos", *RESNET, "-o", "new", "--json"],
    "embed resnet50, nothing to do": ["embed", "photos", *RESNET, "-o", "done-resnet50", "--json"],
    "probe": ["probe", "done", "-o", "probe"],
    "search": ["search", "done", "photos/class0/000.jpg"],
}


def make_inputs(work: Path) -> None:
    """Write pictures of four classes, which differ in their mean, and a weights file."""
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        path = work / "photos" / f"class{number % 4}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 128, (6, 8, 3)) + 32 * (number % 4)
        Image.fromarray(coarse.astype(np.uint8)).resize((640, 480), Image.Resampling.BICUBIC).save(path)
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet50().state_dict(), work / "resnet50.pth")


def run_in(work: Path, arguments: list[str], checkout: Path) -> Run:
    """Run Python in a folder, with the packages of a checkout."""
    subprocess.run(["rm", "-rf", "new", "probe"], cwd=work, check=True)
    variables = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    return python(*arguments, cwd=work, env=variables)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--checkout", type=Path, action="append", help="several are compared [default: this one]")
    options.add_argument("--only", action="append", default=[], metavar="TEXT", help="only commands that contain it")
    options.add_argument("-o", "--out", type=Path, help="JSON file for all times")
    arguments = options.parse_args()
    checkouts = [path.resolve() for path in arguments.checkout or [ROOT]]
    jobs = [(name, None, line) for name, line in IMPORTS.items()] + [
        (name, checkout, ["-m", "layertap", *line])
        for name, line in COMMANDS.items()
        for checkout in checkouts
        if not arguments.only or any(text in name for text in arguments.only)
    ]
    times: dict[tuple[str, Path | None], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        work = Path(folder)
        make_inputs(work)
        for checkout in checkouts:
            for more in (["-o", "done"], [*RESNET, "-o", "done-resnet50"]):
                run_in(work, ["-m", "layertap", "embed", "photos", *more], checkout)
        for number in range(arguments.rounds + 1):
            for name, checkout, line in jobs:
                took = run_in(work, line, checkout or ROOT)
                measured = {"seconds": took.seconds, "cpu_s": took.cpu_s}
                if "--json" in line:
                    measured["startup_s"] = took.seconds - json.loads(took.out)["seconds"]
                if number:
                    times[name, checkout].append(measured)
                    print(f"{number} {name}: {took.seconds:.2f} s", file=sys.stderr)
    report(times, arguments.out)


def report(times: dict[tuple[str, Path | None], list[dict[str, float]]], out: Path | None) -> None:
    """Print medians, and write all times."""
    torch_cpu_s = median(measured["cpu_s"] for measured in times["import torch", None])
    results: list[dict[str, Any]] = []
    print(f"{'':32} {'seconds':>8} {'CPU':>8} {'beyond torch':>13} {'start-up':>9}")
    for (name, checkout), rounds in times.items():
        medians = {key: median(measured[key] for measured in rounds) for key in rounds[0]}
        startup = f"{medians['startup_s']:9.2f}" if "startup_s" in medians else ""
        numbers = (
            f"{medians['seconds']:8.2f} {medians['cpu_s']:8.2f} {medians['cpu_s'] - torch_cpu_s:13.2f} {startup:9}"
        )
        print(f"{name:32} {numbers} {checkout or ''}".rstrip())
        results.append({"command": name, "checkout": str(checkout or ""), "medians": medians, "rounds": rounds})
    if out is not None:
        out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
