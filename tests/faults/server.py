"""A process that has loaded everything once, and runs `layertap` commands with a failing system call, each in a fork.

It is started with the library of `shim.c` in LD_PRELOAD. Each line of its input is a JSON object: the `folder` whose
files are concerned, the arguments of the `command`, the `fault` (kind, number, error, sticky) or null, the `log` for
their output, and whether to `fork`. Each line of its output is the result: `code`, or `signal`, and `counts` of the
calls by kind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

KINDS = (
    "write", "pwrite", "fsync", "rename", "link", "unlink", "fallocate", "truncate", "pread", "read", "open", "create",
    "mkdir",
)  # fmt: skip
_MOST_S = 60.0  # for a command; it takes less than a second


def serve() -> None:
    """Answer requests until the input ends."""
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_answer(shim, request) if request["fork"] else _prepare(request)), flush=True)


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command in this process, which imports what it needs."""
    with Path(request["log"]).open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        return {"code": _run_command(request["command"])}


def _answer(shim: ctypes.CDLL, request: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 70
        try:
            code = _run(shim, request, writer)
        finally:
            os._exit(code)
    os.close(writer)
    end = time.monotonic() + _MOST_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    with os.fdopen(reader, "rb") as pipe:
        counts = json.loads(pipe.read() or b"{}")
    code = os.waitstatus_to_exitcode(ended[1])
    return {"code": code, "counts": counts} if code >= 0 else {"signal": -code, "counts": counts}


def _run(shim: ctypes.CDLL, request: dict[str, Any], pipe: int) -> int:
    """Run the command of a request in this process, and return its exit code."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["FAULT_FOLDER"] = request["folder"]
    kind, *rest = request["fault"] or ("", 0, 0, 0)
    shim.fault_set(KINDS.index(kind) if kind else -1, *rest)
    code = _run_command(request["command"])
    counts = {name: shim.fault_count(number) for number, name in enumerate(KINDS)} | {"failed": shim.fault_hits()}
    os.write(pipe, json.dumps(counts).encode())
    return code


def _run_command(arguments: list[str]) -> int:
    from pipelines.cli import main

    try:
        main(arguments, prog_name="layertap")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    return 0


if __name__ == "__main__":
    serve()
