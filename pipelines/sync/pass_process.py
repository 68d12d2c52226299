"""A scheduled pass in its own process."""

from __future__ import annotations

import contextlib
import locale
import logging
import os
import selectors
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PassProcess", "PassResult", "RunningPass"]

_READ_BYTES = 1 << 16

log = logging.getLogger("layertap.schedule")


@dataclass(frozen=True)
class PassResult:
    """How a pass ended.

    Attributes:
        code: the exit code; -N if signal N killed the process.
        output: what the pass printed on stdout.
    """

    code: int
    output: str


class RunningPass(Protocol):
    """A pass that was started."""

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the pass; may return earlier."""

    def result(self) -> PassResult | None:
        """Return how the pass ended, or None while it runs; does not wait."""

    def terminate(self) -> None:
        """Ask the pass to finish its batch and to exit."""


class PassProcess:
    """A process whose stdout is kept and whose stderr is logged line by line.

    Args:
        command: the program and its arguments.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, command: Sequence[str]):
        # The process gets a session of its own. Otherwise Ctrl-C in a terminal would reach it directly, and again
        # through the scheduler, and a second Ctrl-C ends a pass without finishing the batch.
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._output = bytearray()
        self._incomplete_line = b""
        self._pipes = selectors.PollSelector()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pipes.register(self._process.stdout, selectors.EVENT_READ, self._output.extend)
        self._pipes.register(self._process.stderr, selectors.EVENT_READ, self._log_lines)

    def wait(self, seconds: float) -> None:
        """Read what the process prints; return when it printed something or ended, at the latest after `seconds`."""
        if not self._pipes.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return
        for key, _ in self._pipes.select(seconds):
            content = os.read(key.fd, _READ_BYTES)
            key.data(content)
            if not content:
                self._pipes.unregister(key.fileobj)

    def result(self) -> PassResult | None:
        """Return how the process ended; None while it runs, or a worker process that has inherited its pipes.

        Workers can outlive a killed process by some seconds, and keep the data set locked.
        """
        self.wait(0)
        if self._pipes.get_map() or self._process.poll() is None:
            return None
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return PassResult(self._process.returncode, _decode(self._output))

    def terminate(self) -> None:
        """Send SIGTERM to the process, which finishes its batch."""
        self._process.terminate()

    def _log_lines(self, content: bytes) -> None:
        """Log all complete lines; empty content marks the end, and completes the last line."""
        lines = (self._incomplete_line + content).splitlines(keepends=True)
        self._incomplete_line = b""
        if content and not lines[-1].endswith((b"\n", b"\r")):
            self._incomplete_line = lines.pop()
        for line in lines:
            log.info("sync: %s", _decode(line).rstrip())


def _decode(content: bytes | bytearray) -> str:
    return content.decode(locale.getpreferredencoding(False), "backslashreplace")
