"""What the command line of a checkout does, run in a scratch folder and kept."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from .commands import COMMANDS, GOLDEN, Command, make_inputs
from .described_files import Blobs, Normaliser, describe

__all__ = ["drive", "record"]

HERE = Path(__file__).parent
ENVIRONMENT = {
    "COLUMNS": "120",
    "HF_HUB_OFFLINE": "1",
    "LC_ALL": "C.UTF-8",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
}
# Imported before the first fork. Modules of the checkout itself are imported by each command, as it needs them.
LIBRARIES = ("torch", "torchvision", "timm", "h5py", "PIL.Image", "pydantic", "yaml", "click", "matplotlib", "tqdm")
COMMAND_S = 300  # after which a command is killed


def record(checkout: Path, to: Path) -> float:
    """Run all commands with the code of a checkout, and keep what they do in a folder; returns how long it took.

    Raises:
        subprocess.CalledProcessError: the recording itself failed.
    """
    start = time.monotonic()
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="compared-") as folder:
        scratch = Path(folder) / "scratch"
        (scratch / ".tmp").mkdir(parents=True)
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": f"{checkout}:{HERE.parent}",
            "TMPDIR": str(scratch / ".tmp"),
        }
        command = [sys.executable, "-P", "-m", HERE.name, "drive", str(checkout), str(to)]
        subprocess.run(command, cwd=scratch, env=environment, check=True)
    return time.monotonic() - start


def drive(checkout: Path, to: Path) -> None:
    """Run all commands in the working directory, with the code that comes first on the path."""
    scratch = Path.cwd()
    for name in LIBRARIES:
        importlib.import_module(name)
    cli = importlib.import_module("pipelines.cli")
    if not Path(cli.__file__ or "").is_relative_to(checkout):
        raise SystemExit(f"{cli.__file__} is not of {checkout}")
    make_inputs(scratch)
    words = {
        str(scratch): "SCRATCH",
        str(checkout): "CHECKOUT",
        sys.executable: "PYTHON",
        os.uname().nodename: "HOST",
    }
    normal, blobs = Normaliser(words), Blobs(to / "blobs")
    before = _states(scratch)
    recorded = []
    for command in COMMANDS:
        if command.needs_golden and not GOLDEN.is_dir():
            continue
        failed = ""
        if command.before:
            try:
                command.before(scratch)
            except Exception as problem:
                failed = f"before the command: {type(problem).__name__}: {problem}\n"
            before = _states(scratch)
        start = time.monotonic()
        code, out, error = _run(command, scratch)
        seconds = time.monotonic() - start
        after = _states(scratch)
        changed = [path for path, state in after.items() if before.get(path) != state]
        files = {str(path.relative_to(scratch)): _described(path, command, blobs, normal) for path in sorted(changed)}
        recorded.append({
            "name": command.name,
            "command": "layertap " + " ".join(command.arguments),
            "exit code": code,
            "stdout": _printed(out, command, normal),
            "stderr": _printed(failed.encode() + error, command, normal),
            "files": {_name(name): parts for name, parts in files.items()} if not command.shape_only else {},
            "removed": sorted(_name(str(path.relative_to(scratch))) for path in before.keys() - after.keys()),
            "seconds": round(seconds, 2),
        })  # fmt: skip
        before = after
        (to / "recording.json").write_text(json.dumps(recorded, indent=1))
        print(f"{seconds:6.1f} s  exit code {code:3}  {command.name}", file=sys.stderr, flush=True)


def _states(scratch: Path) -> dict[Path, tuple[int, ...]]:
    """File -> what changes when it is written."""
    found = {}
    for folder, folders, names in os.walk(scratch):
        if ".cache" in folders:
            folders.remove(".cache")
        for name in names:
            path = Path(folder) / name
            with contextlib.suppress(FileNotFoundError):
                status = path.stat(follow_symlinks=False)
                found[path] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def _name(name: str) -> str:
    """The name of a file without what a random generator chose."""
    return re.sub(r"(?<=layertap-)\w+|tmp\w{8}|(?<=\.)(\w{8}|[0-9a-f]{12}-[0-9a-f]{8})(?=\.new)", "RANDOM", name)


def _described(path: Path, command: Command, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    if not command.files or command.shape_only:
        return {}
    parts = describe(path, blobs, normal)
    return {part: text for part, text in parts.items() if not _is_ignored(command, f"{path} [{part}]")}


def _is_ignored(command: Command, part: str) -> bool:
    return bool(command.ignored and re.search(command.ignored, part))


def _printed(data: bytes, command: Command, normal: Normaliser) -> list[str]:
    text = data.decode("utf-8", "backslashreplace")
    if text[:1] in "{[":
        with contextlib.suppress(ValueError):
            text = json.dumps(normal.json(json.loads(text)), indent=1)
    text = normal.text(text)
    if command.shape_only:
        text = re.sub(r" +", " ", re.sub(r"[\d.,]+(e-\d+)?", "N", text))
    for pattern, word in command.masked:
        text = re.sub(pattern, word, text)
    lines = text.splitlines()
    if "Traceback (most recent call last):" in lines:  # where an error was raised may move
        begin = lines.index("Traceback (most recent call last):")
        lines = [*lines[: begin + 1], *(line for line in lines[begin + 1 :] if not line.startswith(" "))]
    return lines


def _run(command: Command, scratch: Path) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a command, run in a fork of this process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error, _held_lock(scratch, command.locked):
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                for stream, descriptor in ((out, 1), (error, 2)):
                    os.dup2(stream.fileno(), descriptor)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                code = _in_child(command)
            finally:
                os._exit(code)
        timer = threading.Timer(COMMAND_S, lambda: os.killpg(child, 9))
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        timer.join()
        texts = []
        for stream in (out, error):
            stream.seek(0)
            texts.append(stream.read())
    return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def _in_child(command: Command) -> int:
    """Run a command; returns the exit code that Python would end with."""
    import atexit

    sys.argv = ["layertap", *(word.replace("{scratch}", str(Path.cwd())) for word in command.arguments)]
    with contextlib.ExitStack() as at_the_end:
        _set_constants(command.constants)
        if command.digits is not None:
            at_the_end.enter_context(_few_digits(command.digits))
        code = _exit_code()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _exit_code() -> int:
    try:
        importlib.import_module("pipelines.cli").main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _set_constants(constants: dict[str, Any]) -> None:
    """Give constants of the checkout's modules other values, whichever module they are in."""
    if not constants:
        return
    package = importlib.import_module("pipelines")
    for module in list(pkgutil.walk_packages(package.__path__, "pipelines.")):
        with contextlib.suppress(ImportError):
            vars(importlib.import_module(module.name)).update({
                name: value for name, value in constants.items() if hasattr(importlib.import_module(module.name), name)
            })  # fmt: skip


@contextlib.contextmanager
def _few_digits(count: int) -> Iterator[None]:
    """scikit-learn has only so many pictures of digits."""
    from sklearn import datasets

    digits = datasets.load_digits()
    few = type(digits)(images=digits.images[:count], target=digits.target[:count])
    with mock.patch.object(datasets, "load_digits", return_value=few):
        yield


@contextlib.contextmanager
def _held_lock(scratch: Path, name: str | None) -> Iterator[None]:
    """This process has a data set locked."""
    if name is None:
        yield
        return
    with (scratch / name / ".lock").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        file.write("pid 1 on somewhere since yesterday\n")
        file.flush()
        yield
        file.truncate(0)
