"""`layertap sync --schedule` over a folder that changes all the time, with kills at random.

python -m tests.soak [--minutes 30] [--seed 0] [--schedulers 1]

Somebody writes, edits, renames, copies and deletes pictures; passes, and now and then a scheduler itself, are killed.
At the end the data set must be what a fresh extraction of the folder gives; the memory and open files of the
schedulers, and what the data set takes of the disk, must not have grown from the second fifth of the time to the last.

Each alarm (call of `on_failure`) must have a cause: a pass that was killed here, or a failure that the pass itself
noted in `runs.jsonl`. Schedulers of one config find the data set locked by each other, which is no alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
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
LOCKED = 4  # exit code of a pass that found the data set locked

# A single write to a file opened for appending is not mixed with those of the hooks of another scheduler.
HOOK = """
import json, os, sys

alarm = {"code": int(os.environ["LAYERTAP_EXIT_CODE"]), **json.load(sys.stdin)}
os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), json.dumps(alarm).encode() + b"\\n")
"""


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


def passes_of(scheduler: int) -> list[int]:
    """Process ids of the running passes of a scheduler; its hooks are children, too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == scheduler and b"sync" in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedulers", type=int, default=1, help="so many schedulers run the same config")
    args = parser.parse_args()
    chance = random.Random(args.seed + 1)
    with tempfile.TemporaryDirectory() as home_name:
        home = Path(home_name)
        root, out, config, alarms = home / "root", home / "out", home / "soak.yaml", home / "alarms.jsonl"
        root.mkdir()
        (home / "tiny.py").write_text(CODE)
        (home / "hook.py").write_text(HOOK)
        config.write_text(
            f"images: {root}\nout: {out}\nbackbone: python/{home}/tiny.py:tiny\nlayers: [conv, fc]\nworkers: 0\n"
            "batch_size: 16\nshard_rows: 64\nsettle: 0.5\nmax_vanish: 1\nretry_after: 30s\nkeep_gone: 60s\n"
            f"schedule: {{every: 3s, on_failure: {sys.executable} {home}/hook.py {alarms}}}\n"
        )
        people = People(root, args.seed)
        command = [sys.executable, "-m", "layertap", "schedule", str(config)]
        log = (home / "log").open("wb")
        schedulers = [subprocess.Popen(command, stderr=log) for _ in range(args.schedulers)]
        samples: list[tuple[float, dict[str, float]]] = []
        kills = {"passes": 0, "schedulers": 0}
        begin = time.monotonic()
        end = begin + args.minutes * 60
        try:
            while time.monotonic() < end:
                time.sleep(1)
                for number, scheduler in enumerate(schedulers):
                    assert scheduler.poll() is None, (home / "log").read_text()[-2000:]
                    if (sample := measured(scheduler, out)) is not None:
                        samples.append((time.monotonic(), sample))
                    passes = passes_of(scheduler.pid)
                    if passes and chance.random() < 0.1:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(chance.choice(passes), signal.SIGKILL)
                            kills["passes"] += 1
                    elif chance.random() < 0.004:
                        scheduler.kill()
                        scheduler.wait()
                        kills["schedulers"] += 1
                        schedulers[number] = subprocess.Popen(command, stderr=log)
        finally:
            people.stop.set()
            people.thread.join()
            for scheduler in schedulers:
                scheduler.terminate()
        for scheduler in schedulers:
            assert scheduler.wait(timeout=120) == 0
        while subprocess.run([sys.executable, "-m", "layertap", "sync", str(config)]).returncode == LOCKED:
            time.sleep(1)  # a pass whose scheduler was killed is still at work
        time.sleep(1)
        subprocess.run([sys.executable, "-m", "layertap", "sync", str(config)], check=True)
        runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
        print(f"{people.done:,} changes, {len(runs):,} passes noted, killed: {kills}")
        skipped = (home / "log").read_text().count("the pass was skipped: another process is at work")
        print(f"{skipped:,} passes found the data set locked")
        true_alarms = report_alarms(alarms, runs, kills["passes"])
        not_grown = report(samples, begin, end)
        check(root, out, home)
        print("the data set is what a fresh extraction gives")
        if not not_grown:
            raise SystemExit("something has grown")
        if not true_alarms:
            raise SystemExit("there were false alarms")


def report_alarms(path: Path, runs: list[dict[str, Any]], killed: int) -> bool:
    """Print how many alarms there were, why, and whether each was true; returns whether all were.

    Args:
        path: the alarms, a JSON object a line.
        runs: lines of `runs.jsonl`.
        killed: how many passes were killed here.
    """
    alarms = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    causes = Counter(cause_of(alarm, runs) for alarm in alarms)
    by_kills = causes[True, "the pass was killed by signal 9"]
    if by_kills > killed:  # a kill that came too late gives no alarm, but none gives two
        causes[True, "the pass was killed by signal 9"] = killed
        causes[False, "the pass was said to be killed, more often than passes were killed"] = by_kills - killed
    true = sum(count for (is_true, _), count in causes.items() if is_true)
    print(f"{len(alarms):,} alarms: {true:,} true, {len(alarms) - true:,} false; {killed:,} passes were killed")
    for (is_true, cause), count in causes.most_common():
        print(f"  {count:,} {'true' if is_true else 'FALSE'}: {cause}")
    return true == len(alarms)


def cause_of(alarm: dict[str, Any], runs: list[dict[str, Any]]) -> tuple[bool, str]:
    """Return whether an alarm is true, and what it is about."""
    code, data_sets = alarm["code"], alarm["data_sets"]
    if alarm["event"] == "ended":
        return code == 0, "a failure has ended"
    if code == -signal.SIGKILL:
        return True, "the pass was killed by signal 9"
    if code in (0, LOCKED):
        return False, f"exit code {code}"
    if data_sets and "out" not in data_sets[0]:  # from the scheduler itself, not from a pass
        error = data_sets[0].get("error", "")
        return "cannot be started" in error, error
    for data_set in data_sets:
        if data_set["exit_code"] == code and "error" in data_set:
            noted = any(run["event"] == "failed" and run["error"] == data_set["error"] for run in runs)
            return noted, f"exit code {code}: {data_set['error']}" + ("" if noted else ", which no pass noted")
        if data_set["exit_code"] == code == 1:
            same = [run for run in runs if run.get("version") == data_set["version"]]
            failed = any(run["unreadable"] or 0 < run["rows"] == run["failed"] for run in same)
            return failed, f"exit code 1: unreadable: {data_set['unreadable']}, {data_set['failed']} rows failed"
    return False, f"exit code {code}, and the pass printed no reason: {data_sets}"


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
