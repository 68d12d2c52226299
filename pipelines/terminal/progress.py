"""Progress on stderr: a bar on a terminal, otherwise a line at intervals."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from pipelines.terminal.text_output import print_line, printable_lines

__all__ = ["Progress", "store_warnings_to"]

_LINE_EVERY_S = 10.0


class Progress(contextlib.ExitStack):
    """Context manager: show the progress of a count.

    Args:
        total: expected count; None: unknown.
        unit: what is counted, in the plural.
        shown: False: nothing is printed.
    """

    def __init__(self, total: int | None, unit: str = "images", *, shown: bool = True):
        super().__init__()
        self._unit, self._shown = unit, shown
        self._total = total
        self._resumed = 0
        self._done = 0
        self._start = self._last_line = time.perf_counter()
        self._bar: Any = None
        self.enter_context(store_warnings_to(self.say))
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, unit=f" {unit}", dynamic_ncols=True, file=sys.stderr)
            self.callback(self._bar.close)

    def expect(self, total: int) -> None:
        """Set the expected count if it was unknown, and begin to measure the rate."""
        self._total, self._start = total, time.perf_counter()
        if self._bar is not None:
            self._bar.reset(total)

    def advance(self, rows: int, resumed: bool) -> None:
        """Count rows; `resumed`: they were stored by an earlier run."""
        if not rows:
            return
        self._done += rows
        self._resumed += rows if resumed else 0
        if self._bar is not None:
            self._bar.initial += rows if resumed else 0  # the rate covers this run only
            self._bar.update(rows)
        elif self._shown and time.perf_counter() - self._last_line > _LINE_EVERY_S and not resumed:
            self._last_line = time.perf_counter()
            rate = (self._done - self._resumed) / (self._last_line - self._start)
            if self._total is None:
                print_line(f"{self._done:,} {self._unit}, {rate:,.0f} {self._unit}/s", err=True)
                return
            left = tqdm.format_interval((self._total - self._done) / rate)
            print_line(
                f"{self._done:,} of {self._total:,} {self._unit}, {rate:.1f} {self._unit}/s, {left} left", err=True
            )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(printable_lines(text), file=sys.stderr)
        elif self._shown:
            print_line(text, err=True)


@contextlib.contextmanager
def store_warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Context manager: hand warnings such as "s3://bucket/photos does not answer" to `say` instead of stderr."""
    logger, handler = logging.getLogger("layertap.store"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
