"""The time of whole commands, most of which is start-up, beside the imports of the libraries that they need.

    python tests/benchmarks/startup.py [--rounds 5] [--checkout FOLDER ...] [--only TEXT ...] [-o times.json]

Each command is a process of its own, on 64 made-up pictures, with all caches warm: one round before the first is not
counted. The commands of all checkouts take turns, so that a busy machine delays all of them. Printed are medians: the
seconds of the process, its seconds of CPU with those of its workers, and the seconds of CPU beyond those of
`import torch`. OpenMP has one thread, since threads that wait for a busy core burn CPU.

"start-up" of `embed` is the process less the time from its first image to its last receipt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image

HERE = Path(__file__).resolve().parents[2]
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


def run(arguments: list[str], work: Path, checkout: Path) -> tuple[float, float, bytes]:
    """Run Python in a folder; return its seconds, its seconds of CPU, and its output."""
    subprocess.run(["rm", "-rf", "new", "probe"], cwd=work, check=True)
    variables = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=work, env=os.environ | variables, stdout=out, stderr=errors
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            sys.exit(f"{arguments} in {checkout} failed:\n{errors.read().decode()}")
        return seconds, usage.ru_utime + usage.ru_stime, out.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkout", type=Path, action="append", help="several are compared [default: this one]")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only commands that contain it")
    parser.add_argument("-o", "--out", type=Path, help="JSON file for all times")
    arguments = parser.parse_args()
    checkouts = [path.resolve() for path in arguments.checkout or [HERE]]
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
            run(["-m", "layertap", "embed", "photos", "-o", "done"], work, checkout)
            run(["-m", "layertap", "embed", "photos", *RESNET, "-o", "done-resnet50"], work, checkout)
        for number in range(arguments.rounds + 1):
            for name, checkout, line in jobs:
                seconds, cpu, out = run(line, work, checkout or HERE)
                measured = {"seconds": seconds, "cpu_s": cpu}
                if "--json" in line:
                    measured["startup_s"] = seconds - json.loads(out)["seconds"]
                if number:
                    times[name, checkout].append(measured)
                    print(f"{number} {name}: {seconds:.2f} s", file=sys.stderr)
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
