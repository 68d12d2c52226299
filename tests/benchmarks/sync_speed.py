"""What a pass costs when nothing has changed, beside looking at the same files with os.scandir and os.stat alone.

python tests/benchmarks/sync_speed.py [--files 100000] [--entries 1000000]

Each measurement is a process of its own, in turn, three times. The manifest of a million entries is made up; its pass
sees a million files that are not there.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import os, sys
count, waiting = 0, [sys.argv[1]]
while waiting:
    with os.scandir(waiting.pop()) as entries:
        for entry in entries:
            if entry.is_dir():
                waiting.append(entry.path)
            else:
                entry.stat()
                count += 1
"""
COST = """
import sys
usage = __import__("resource").getrusage(0)
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(usage.ru_utime + usage.ru_stime, int(peak) / 1024)
"""
PASS = """
import sys
sys.argv = ["layertap", "sync", sys.argv[1]]
from pipelines.cli import main
try:
    main()
except SystemExit as error:
    assert not error.code, error.code
"""
ENTRIES = """
import os, sys, tempfile
from pathlib import Path
from extract.sync.manifest import Manifest
from extract.sync.manifest import StoredRow
from extract.sync.scan import ScannedFile
count = int(sys.argv[1])
def seen():
    for i in range(count):
        yield ScannedFile(b"folder/%03d/picture-%07d.jpg" % (i // 1000, i), 100_000 + i, 10**18 + i, 10**18 + i)
with tempfile.TemporaryDirectory() as out, Manifest(Path(out)) as manifest:
    with manifest.transaction():
        ids = manifest.add_pass(1, (StoredRow(i.to_bytes(16), 100_000 + i, 10**18 + i, i, 1) for i in range(count)), 0)
        manifest.set_files((one, True, number) for one, number in zip(seen(), ids))
        del ids
    def cpu():
        times = os.times()
        return times.user + times.system
    start = cpu()
    manifest.record_scan(seen())
    assert not list(manifest.files_to_examine(0, 0)) and not manifest.gone()
    print(cpu() - start)
"""


def cost(code: str, *args: object) -> tuple[float, float]:
    """CPU seconds and peak MB of a process; the seconds that it prints itself, if it does."""
    run = subprocess.run([sys.executable, "-c", code + COST, *map(str, args)], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    *told, seconds, peak = run.stdout.splitlines()[-1].split() if code != ENTRIES else run.stdout.split()
    return float(told[0] if told else seconds), float(peak)


def write_files(root: Path, count: int) -> None:
    """Tiny pictures, no two the same."""
    for folder in range(-(-count // 1000)):
        (root / f"{folder:03d}").mkdir(parents=True)
    for i in range(count):
        picture = b"P6 8 8 255\n" + i.to_bytes(4) * 48
        (root / f"{i // 1000:03d}" / f"{i:07d}.ppm").write_bytes(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--entries", type=int, default=1_000_000)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.extract.sync.tiny import CODE

    with tempfile.TemporaryDirectory() as home:
        root, config = Path(home) / "root", Path(home) / "sync.yaml"
        write_files(root, args.files)
        (Path(home) / "tiny.py").write_text(CODE)
        backbone = f"python/{home}/tiny.py:tiny"
        config.write_text(f"images: {root}\nout: {home}/out\nbackbone: {backbone}\nlayers: [fc]\nbatch_size: 512\n")
        start = time.perf_counter()
        cost(PASS, config)
        print(f"the first pass: {args.files:,} files in {time.perf_counter() - start:.0f} s")
        time.sleep(3)
        cost(PASS, config)  # files younger than the steps of the clock are read once more
        rounds = [(cost(BARE, root), cost(PASS, config)) for _ in range(3)]
        for i, name in enumerate(("scandir and stat alone", "a pass without changes")):
            seconds = statistics.median(one[i][0] for one in rounds)
            peak = max(one[i][1] for one in rounds)
            print(f"{name}: {seconds:.2f} s of CPU, {peak:,.0f} MB at most")
        ratio = statistics.median(one[1][0] / one[0][0] for one in rounds)
        print(f"ratio {ratio:.1f}; {(Path(home) / 'out' / 'manifest.sqlite').stat().st_size / 1e6:,.0f} MB of manifest")
    seconds, peak = cost(ENTRIES, args.entries)
    print(f"{args.entries:,} entries made up, taken over and compared: {seconds:.1f} s of CPU, {peak:,.0f} MB at most")


if __name__ == "__main__":
    main()
