"""`layertap schedule` over a folder that changes all the time, with kills at random.

python -m tests.soak [--minutes 30] [--seed 0]

Somebody writes, edits, renames, copies and deletes pictures; passes, and now and then the scheduler itself, are killed.
At the end the data set must be what a fresh extraction of the folder gives; the memory and open files of the scheduler,
and what the data set takes of the disk, must not have grown from the second fifth of the time to the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from extract import FeatureReader, extract_features
from extract.row_status import Status
from extract.store.verify import verify
from extract.system.atomic_files import bytes_below
from tests.extract.sync.tiny import CODE, picture

MOST_FILES = 300


class People:
    """Those who use the folder, in a thread of their own."""

    def __init__(self, root: Path, seed: int):
        self.root, self.chance = root, random.Random(seed)
        self.stop = threading.Event()
        self.done = 0
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        while not self.stop.wait(self.chance.expovariate(8)):
            with contextlib.suppress(FileNotFoundError):  # a folder was renamed in between
                self._do_something()
                self.done += 1

    def _do_something(self) -> None:
        chance = self.chance
        files = [path for path in self.root.rglob("*.ppm") if path.is_file()]
        name = self.root / f"{chance.choice('abcd')}/{chance.randrange(1000)}.ppm"
        name.parent.mkdir(exist_ok=True)
        what = chance.choice(["write", "write", "write", "edit", "rename", "copy", "delete", "break", "folder"])
        if what == "write" or len(files) < 20:
            name.write_bytes(picture(chance.randrange(1 << 30), chance.choice([8, 9])))
        elif what == "edit":
            with chance.choice(files).open("r+b") as file:
                file.seek(20)
                file.write(os.urandom(100))
        elif what == "rename":
            chance.choice(files).rename(name)
        elif what == "copy":
            name.write_bytes(chance.choice(files).read_bytes())
        elif what == "break":
            os.truncate(chance.choice(files), 100)
        elif what == "folder" and chance.random() < 0.2:
            one, other = (self.root / letter for letter in chance.sample("abcd", 2))
            one.rename(self.root / "moving")
            other.rename(one)
            (self.root / "moving").rename(other)
        elif what == "delete" or len(files) > MOST_FILES:
            for path in chance.sample(files, max(1, len(files) - MOST_FILES)):
                path.unlink()


def measured(scheduler: subprocess.Popen[bytes], out: Path) -> dict[str, float] | None:
    """Memory and open files of the scheduler, and what the data set takes."""
    try:
        status = Path(f"/proc/{scheduler.pid}/status").read_text()
        memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        files = len(list(Path(f"/proc/{scheduler.pid}/fd").iterdir()))
    except (OSError, IndexError, ValueError):
        return None
    return {"memory MB": memory, "open files": files, "disk MB": bytes_below(out) / 1e6}


def children_of(process: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                    found.append(int(entry.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed + 1)
    with tempfile.TemporaryDirectory() as home_name:
        home = Path(home_name)
        root, out, config = home / "root", home / "out", home / "soak.yaml"
        root.mkdir()
        (home / "tiny.py").write_text(CODE)
        settings = (
            f"backbone: python/{home}/tiny.py:tiny\nlayers: [conv, fc]\nworkers: 0\nbatch_size: 16\nshard_rows: 64\n"
        )
        config.write_text(
            f"images: {root}\nout: {out}\n{settings}shard_rows: 64\nsettle: 0.5\nmax_vanish: 1\nretry_after: 30s\n"
            "keep_gone: 60s\nschedule: {every: 3s, jitter: 1}\n"
        )
        people = People(root, args.seed)
        command = [sys.executable, "-m", "layertap", "schedule", str(config)]
        log = (home / "log").open("wb")
        scheduler = subprocess.Popen(command, stderr=log)
        samples: list[tuple[float, dict[str, float]]] = []
        kills = {"passes": 0, "schedulers": 0}
        begin = time.monotonic()
        end = begin + args.minutes * 60
        try:
            while time.monotonic() < end:
                time.sleep(1)
                assert scheduler.poll() is None, (home / "log").read_text()[-2000:]
                if (sample := measured(scheduler, out)) is not None:
                    samples.append((time.monotonic(), sample))
                passes = children_of(scheduler.pid)
                if passes and chance.random() < 0.1:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(passes), signal.SIGKILL)
                        kills["passes"] += 1
                elif chance.random() < 0.004:
                    scheduler.kill()
                    scheduler.wait()
                    kills["schedulers"] += 1
                    scheduler = subprocess.Popen(command, stderr=log)
        finally:
            people.stop.set()
            people.thread.join()
            scheduler.terminate()
        assert scheduler.wait(timeout=120) == 0
        while subprocess.run([sys.executable, "-m", "layertap", "sync", str(config)]).returncode == 4:
            time.sleep(1)  # a pass whose scheduler was killed is still at work
        time.sleep(1)
        subprocess.run([sys.executable, "-m", "layertap", "sync", str(config)], check=True)
        runs = (out / "runs.jsonl").read_text().count("\n")
        print(f"{people.done:,} changes, {runs:,} passes noted, killed: {kills}")
        ok = report(samples, begin, end)
        check(root, out, home)
        print("the data set is what a fresh extraction gives")
        if not ok:
            raise SystemExit("something has grown")


def report(samples: list[tuple[float, dict[str, float]]], begin: float, end: float) -> bool:
    """Medians of the second and of the last fifth of the time."""
    fifth, ok = (end - begin) / 5, True
    for name in samples[0][1]:
        early = statistics.median(one[name] for at, one in samples if fifth <= at - begin < 2 * fifth)
        late = statistics.median(one[name] for at, one in samples if at >= end - fifth)
        print(f"{name}: {early:.1f}, then {late:.1f}; at most {max(one[name] for _, one in samples):.1f}")
        ok = ok and late <= early * 1.25 + 1
    return ok


def check(root: Path, out: Path, home: Path) -> None:
    """The data set against a fresh extraction."""
    assert verify(out).faults == []
    settings: dict[str, Any] = {"backbone": f"python/{home}/tiny.py:tiny", "layers": ["conv", "fc"], "workers": 0}
    with (
        extract_features(root, out=home / "fresh", progress=False, **settings) as expected,
        FeatureReader(out) as found,
    ):
        order = sorted(range(len(found)), key=lambda row: os.fsencode(found.paths[row]))
        assert [found.paths[row] for row in order] == expected.paths
        assert (found.status[order] == expected.status).all()
        good = expected.status == Status.OK
        for layer in found.layers:
            np.testing.assert_allclose(found[layer][:][order][good], expected[layer][:][good], rtol=1e-5, atol=1e-6)
        print(f"{len(found):,} rows, {int((~good).sum())} of broken pictures")


if __name__ == "__main__":
    main()
