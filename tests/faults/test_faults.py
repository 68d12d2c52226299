"""A call of the operating system fails once, or from then on: the command ends with one line, and resumes equal."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from extract import FeatureReader
from extract.store.verify import verify
from tests.conftest import TINY_INPUT, make_picture
from tests.extract.store.rows import change_a_value

SHORT = -1  # half of the bytes are written
# Kind of call -> errors, and whether later calls of this kind fail, too.
ERRORS = {
    "write": [(errno.EIO, 0), (errno.ENOSPC, 1), (SHORT, 1)],
    "pwrite": [(errno.EIO, 0), (errno.ENOSPC, 1), (SHORT, 0), (SHORT, 1)],
    "fsync": [(errno.EIO, 0)],
    "rename": [(errno.EIO, 0), (errno.EROFS, 1)],
    "link": [(errno.EIO, 0), (errno.EPERM, 1), (errno.EROFS, 1)],
    "unlink": [(errno.EIO, 0), (errno.EROFS, 1)],
    "fallocate": [(errno.ENOSPC, 1), (errno.EIO, 0)],
    "truncate": [(errno.EIO, 0)],
    "pread": [(errno.EIO, 0)],
    "read": [(errno.EIO, 0)],
    "open": [(errno.EMFILE, 0), (errno.EIO, 0)],
    "create": [(errno.ENOSPC, 1), (errno.EROFS, 1), (errno.EMFILE, 0)],
    "mkdir": [(errno.ENOSPC, 1), (errno.EROFS, 1)],
}
BACKBONE = [
    "-b", "timm/test_resnet", "--weights", "random", "--workers", "0", "--device", "cpu", "-l", "layer2", "-l",
    "layer4:none", "--size", "64", "--crop", "64", "--shard-rows", "4", "--batch-size", "3",
]  # fmt: skip


@dataclass
class Job:
    """A command on the folder `OUT`, which starts as a copy of `start`, and the one that finishes what is left."""

    start: Path | None
    command: list[str]
    last: list[str] | None = None  # runs after the command, if there is one
    code: int = 0  # exit code without a fault
    is_export: bool = False  # refuses to run twice
    calls: dict[str, int] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)


class Server:
    """See tests/faults/server.py."""

    def __init__(self, process: subprocess.Popen[str], folder: Path):
        self._process, self._folder, self._log = process, folder, folder / "log.txt"
        self.out = folder / "run/OUT"

    def start(self, job: Job) -> None:
        """Put the folder of a job in place."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()
        if job.start is not None:
            shutil.copytree(job.start, self.out)

    def run(self, command: list[str], fault: Any = None, fork: bool = True) -> dict[str, Any]:
        """Run a command, and return the result with the output; OUT in an argument is the folder."""
        named = [argument.replace("OUT", str(self.out)) for argument in command]
        request = {
            "folder": str(self.out.parent), "command": named, "fault": fault, "log": str(self._log), "fork": fork,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return {**json.loads(answer), "log": self._log.read_text()}

    def finish(self, job: Job) -> dict[str, Any]:
        """Run the commands of a job without a fault, and return the last result."""
        is_complete = job.is_export and self.out.exists()
        result = self.run(job.command)
        if job.last:
            result = self.run(job.last)
        if is_complete and result.get("code") == 2 and "already exists" in result["log"]:
            return {**result, "code": 0}  # it has removed what was left
        return result

    def make(self, command: list[str], name: str) -> Path:
        """Run a command without a fault, and keep the folder."""
        self.start(Job(None, []))
        result = self.run(command, fork=False)
        assert result["code"] == 0, result["log"]
        return self.out.rename(self._folder / name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("faults")
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    yield Server(process, folder)
    process.kill()
    process.communicate()


def complete_data_set(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a folder of pictures, all good, and their data set, of a time when one could not be decoded."""
    pictures = tmp_path_factory.mktemp("pictures")
    for i in range(10):
        path = pictures / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        make_picture(i, 64, 64).save(path)
    bad = pictures / "a/bad.png"
    bad.write_bytes(b"no picture")
    complete = server.make(["embed", str(pictures), "-o", "OUT", *BACKBONE], f"complete {pictures.name}")
    make_picture(99).save(bad)
    return pictures, complete


@pytest.fixture(scope="module")
def all_jobs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Name -> job, with the calls that it makes and its result without a fault, for every command that writes."""
    pictures, complete = complete_data_set(server, tmp_path_factory)
    embed = ["embed", str(pictures), "-o", "OUT", *BACKBONE]
    damaged = shutil.copytree(complete, complete.with_name("damaged"))
    change_a_value(damaged, 1, "layer2", 2)
    of_half = {name: ["embed", str(pictures / name), "-o", "OUT", *BACKBONE] for name in "ab"}
    halves = [server.make(command, f"half {name}") for name, command in of_half.items()]
    config = tmp_path_factory.mktemp("config") / "sync.yaml"
    followed = shutil.copytree(pictures, config.parent / "followed")
    settings = {
        "backbone": "timm/test_resnet", "weights": "random", "workers": 0, "device": "cpu", "settle": 0,
        "max_vanish": 1, "layers": ["layer2"], "images": str(followed), "out": str(server.out), **TINY_INPUT,
    }  # fmt: skip
    config.write_text(yaml.safe_dump(settings))
    synced = server.make(["sync", str(config)], "synced")
    for i in (1, 3, 5, 7):
        (followed / f"b/{i}.png").unlink()
    make_picture(77).save(followed / "b/new.png")
    changed = shutil.copytree(synced, synced.with_name("changed"))
    server.start(Job(changed, []))
    result = server.run(["sync", str(config)], fork=False)
    assert result["code"] == 0, result["log"]
    changed = server.out.rename(synced.with_name("twice"))

    def export(to: str) -> Job:
        return Job(None, ["export", str(complete), "--to", to, "-o", "OUT"], is_export=True)

    made = {
        "embed": Job(None, embed),
        "embed, packed": Job(None, [*embed, "--compress", "gzip"]),
        "embed, retry": Job(complete, [*embed, "--retry-failed"]),
        "merge": Job(None, ["merge", *map(str, halves), "-o", "OUT"]),
        "repair": Job(damaged, ["verify", "OUT", "--repair"], last=embed, code=1),
        "sync": Job(synced, ["sync", str(config)]),
        "compact": Job(changed, ["compact", "OUT", "--max-dead", "0"]),
        "export h5": export("h5"),
        "export npy": export("npy"),
        "export mat": export("mat"),
        "report": Job(complete, ["report", "OUT"]),
    }
    return tried(server, made)


def tried(server: Server, jobs: dict[str, Job]) -> dict[str, Job]:
    """Run each job without a fault, and note the calls that it makes, and its result."""
    for name, job in jobs.items():
        server.start(job)
        server.run(job.command, fork=False)  # imports what the command needs
        server.start(job)
        job.calls = server.run(job.command)["counts"]
        result = server.finish(job)
        assert result["code"] == 0, f"{name}: {result}"
        job.result = content_of(server.out)
        assert job.result
    return jobs


def content_of(out: Path) -> dict[str, Any]:
    """Return what a user can read: rows of a data set, bytes of an export, and the names of all files."""
    if out.is_file():
        return {"bytes": out.read_bytes()}
    if not out.exists():
        return {}
    if not (out / "dataset.json").exists():
        return {path.name: path.read_bytes() for path in out.iterdir()}
    assert verify(out).faults == []
    files = (path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    # A sync that is interrupted may take a number. Files that were put aside are no part of the data set. Where rows
    # cannot be read, `repair` has them computed again, as a new revision of their shard.
    number = r"(?<=^versions/)\d{6}|(?<=^passes/)\d{6}|(?<=/\d{6})-r\d+"
    names = sorted(re.sub(number, "", name) for name in files if "damaged" not in name)
    with FeatureReader(out) as reader:
        features = {name: np.asarray(reader[name][:]).tobytes() for name in reader.layers}
        return {
            # Not the log of a pass: rows that a failed pass stored are moved to a new one, which computes nothing.
            "names": [name for name in names if name not in (".lock", "passes//runs.jsonl")],
            "features": features, "paths": reader.paths[:],
            "status": reader.status.tolist(), "labels": reader.labels.tolist(), "failures": reader.failures,
        }  # fmt: skip


Fault = tuple[str, str, int, int, int]


@functools.cache
def shuffled(calls: tuple[tuple[str, str, int], ...]) -> list[Fault]:
    """Return every fault of every job: (job, kind, number of the call, error, sticky), in a random but fixed order."""
    faults = [
        (name, kind, number, error, sticky)
        for name, kind, count in calls
        for number in range(1, count + 1)
        for error, sticky in ERRORS[kind]
    ]
    random.Random(0).shuffle(faults)
    return faults


MANY = int(os.environ.get("LAYERTAP_FUZZ", "45"))


@pytest.mark.slow
def test_a_failing_call_is_one_line_and_the_next_run_is_equal(server: Server, all_jobs: dict[str, Job]) -> None:
    faults = shuffled(tuple((name, kind, job.calls[kind]) for name, job in all_jobs.items() for kind in ERRORS))
    hits, problems = 0, []
    for name, *fault in faults[:MANY]:
        job = all_jobs[name]
        server.start(job)
        result = server.run(job.command, fault)
        hits += result["counts"].get("failed", 0) > 0
        if problem := problem_of(result, job) or problem_after(server, job):
            problems.append(f"{name}, {fault}: {problem}\n{result['log']}")
    assert not problems, f"{len(problems)} of {MANY}:\n" + "\n".join(problems)
    assert hits > MANY * 0.9  # otherwise nothing was tested


def problem_of(result: dict[str, Any], job: Job) -> str:
    """Return what is wrong with the end of a command; empty if nothing is."""
    if "signal" in result:
        return f"it was ended by signal {result['signal']}"
    errors = [line for line in result["log"].splitlines() if line.startswith("error:")]
    if result["code"] not in (0, 1, 2) or "Traceback" in result["log"]:
        return f"exit code {result['code']}, or a traceback"
    ended_well = result["code"] == job.code and not errors
    return "" if ended_well or (result["code"] and len(errors) == 1) else f"exit code {result['code']}, {errors}"


def problem_after(server: Server, job: Job) -> str:
    """Run the command again without a fault; return how the result differs; empty if it does not."""
    for left in (path for path in server.out.parent.rglob("*.new") if path.exists()):
        os.utime(left, (1e9, 1e9))  # leftovers are removed when nobody has changed them for ten minutes
    again = server.finish(job)
    if "signal" in again or again["code"]:
        return f"the next run failed: {again}"
    content = content_of(server.out)
    different = [key for key in content | job.result if content.get(key) != job.result.get(key)]
    strays = [path.name for path in server.out.parent.iterdir() if path != server.out]
    detail = {key: (content.get(key), job.result.get(key)) for key in different if key == "names"}
    return f"different: {different} {detail}; left: {strays}" if different or strays else ""
