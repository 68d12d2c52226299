"""What Ray prints in the first process, kept off the progress bar and off stdout.

Ray's C++ threads write log lines straight to file descriptor 2, its Python threads print errors of the cluster on
stdout. On a terminal, either would land in the middle of the bar; on stdout, it would spoil `--json`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

__all__ = ["bar_protected"]

# A process of its own: Ray logs why it cannot continue, and then aborts the process, with all its threads.
_RELAY = r"""
import os
rest = b""
while content := os.read(0, 1 << 16):
    *lines, rest = (rest + content).split(b"\n")
    for line in filter(None, lines):
        os.write(1, b"\r\x1b[K" + line + b"\n")  # in place of the bar, which is drawn again below
if rest:
    os.write(1, b"\r\x1b[K" + rest + b"\n")
"""
_RELAY_ENDS_S = 2.0


@contextlib.contextmanager
def bar_protected() -> Iterator[TextIO]:
    """Context manager: print what Ray prints on stderr; on a terminal, as whole lines above the progress bar.

    Inside, stdout is the stream that is yielded. On a terminal, this stream and file descriptor 2 are a pipe to a
    process that prints the lines, and `sys.stderr` is the terminal. Elsewhere there is no bar: the stream is
    `sys.stderr`, and nothing else changes.
    """
    before = sys.stderr
    with contextlib.ExitStack() as at_the_end:
        if _is_terminal(before):
            at_the_end.enter_context(_relayed(before))
        at_the_end.enter_context(contextlib.redirect_stdout(before))
        yield before


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 2 and stream.isatty()
    except (AttributeError, OSError, ValueError):  # it is closed, or a stream in memory
        return False


@contextlib.contextmanager
def _relayed(before: TextIO) -> Iterator[None]:
    before.flush()
    with open(os.dup(2), "w", buffering=1, encoding=before.encoding, errors=before.errors) as terminal:  # noqa: PTH123
        # In a session of its own, so that Ctrl-C in the terminal does not end it.
        relay = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RELAY], stdin=subprocess.PIPE, stdout=terminal, start_new_session=True
        )
        assert relay.stdin is not None
        os.dup2(relay.stdin.fileno(), 2)
        relay.stdin.close()
        try:
            with contextlib.redirect_stderr(terminal):
                yield
        finally:
            before.flush()
            os.dup2(terminal.fileno(), 2)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that was started inside holds the pipe
                relay.wait(_RELAY_ENDS_S)
