"""What listing images into a plan costs, by the number of names: a folder that is walked, and a list in no order.

    python -m benchmarks.plan_speed [--names 1000000 10000000] [--kinds folder list]

Names are made up, and the files are not there: what a disk needs to tell the names of a folder comes on top (here it is
measured on 100,000 files). Each plan is made by a process of its own, and opened by another, which reads every name
once, as the workers of a run do.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import parser, python

MAKE = """
import json, sys, time
from benchmarks.common import peak_mb
from extract.images import plan_writing
kind, count, where, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
if kind == "folder":
    def made(root):
        return (f"{i // 100000:04d}/{i // 1000:06d}/picture-{i:09d}.jpg" for i in range(count))
    plan_writing.files_below = made
before, start, cpu, stages = peak_mb(), time.perf_counter(), time.process_time(), {}
def on_rows(stage, rows):
    stages[stage] = time.perf_counter() - start
found = plan_writing.write_plan(where, out, on_rows)
assert len(found) == count
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu": cpu, "stages": stages, "before": before, "peak": peak_mb()}))
"""
READ = """
import json, sys, time
from benchmarks.common import peak_mb
from extract.images import list_images
start = time.perf_counter()
found = list_images(sys.argv[1])
opened, before = time.perf_counter() - start, peak_mb()
names = found.source._names
for row in range(len(found)):
    names[row]
print(json.dumps({"opened": opened, "seconds": time.perf_counter() - start, "before": before, "peak": peak_mb()}))
"""
WALK = """
import json, sys, time
from extract.images.listing import files_below
start = time.perf_counter()
count = sum(1 for _ in files_below(sys.argv[1]))
print(json.dumps({"rate": count / (time.perf_counter() - start)}))
"""


def run(program: str, *arguments: object) -> dict[str, Any]:
    return dict(json.loads(python("-c", program, *arguments).out))


def write_list(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.write("path,label\n")
        for i in range(count):
            number = i * 7_919 % count
            file.write(f"{number // 100_000:04d}/{number // 1000:06d}/picture-{number:09d}.jpg,class {number % 1000}\n")


def measure(kind: str, count: int, scratch: Path) -> float:
    """Tell it, and return the seconds."""
    where = scratch / "images"
    where.mkdir(exist_ok=True)
    if kind == "list":
        where = scratch / "list.csv"
        write_list(where, count)
    made = run(MAKE, kind, count, where, scratch / "plan")
    size = sum(path.stat().st_size for path in (scratch / "plan").rglob("*") if path.is_file())
    stages = ", ".join(f"{stage} after {seconds:.0f} s" for stage, seconds in made["stages"].items() if seconds > 0.1)
    print(
        f"{kind}, {count:,} names: {made['seconds']:.1f} s ({stages}), {made['cpu']:.1f} s of CPU time\n"
        f"    at most {made['peak']:.0f} MB of memory ({made['before']:.0f} before); {size / 1e6:.0f} MB on the disk"
    )
    read = run(READ, scratch / "plan")
    print(
        f"    opened in {read['opened'] * 1e3:.1f} ms; every name once in {read['seconds']:.1f} s, "
        f"{count / read['seconds']:,.0f} a second; at most {read['peak']:.0f} MB ({read['before']:.0f} before)",
        flush=True,
    )
    return made["seconds"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--names", type=int, nargs="+", default=[1_000_000, 10_000_000])
    options.add_argument("--kinds", nargs="+", default=["folder", "list"])
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(100_000):
            path = Path(folder) / f"{i // 1000:03d}" / f"picture-{i:06d}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.touch()
        print(f"a walk alone, over 100,000 files here: {run(WALK, folder)['rate']:,.0f} names a second", flush=True)
    for kind in arguments.kinds:
        seconds = 0.0
        for count in arguments.names:
            with tempfile.TemporaryDirectory() as scratch:
                seconds = measure(kind, count, Path(scratch))
        print(f"    at this rate, 100 million in {seconds * 1e8 / arguments.names[-1] / 60:.0f} minutes")


if __name__ == "__main__":
    main()
