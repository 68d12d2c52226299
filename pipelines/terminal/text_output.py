"""Text that several jobs print on the terminal."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from extract.credentials import text_without_credentials, without_credentials
from extract.row_status import Status

__all__ = [
    "LAYERTAP",
    "SHOWN",
    "STDOUT",
    "command_line",
    "counted",
    "data_set_name",
    "print_failures",
    "print_line",
    "print_out",
    "print_remedy",
    "printable",
    "printable_lines",
]

# Command that runs this program, where no environment is activated too; -P keeps modules in the working directory from
# being imported.
LAYERTAP = (sys.executable, "-P", "-m", "layertap")
SHOWN = 10  # lines of a list on the terminal; --json has all of them
STDOUT = "standard output"  # in errors
_ESCAPED = re.compile("[\udc80-\udcff]+")  # bytes of file names; with LC_ALL=C, all that are not ASCII


def print_line(text: object, *, err: bool = False, fg: str | None = None, bold: bool = False) -> None:
    """Print text, on stderr if `err`. All text of commands passes here, because names and data sets of strangers may
    contain control characters, which a terminal obeys. Escaping each value was forgotten; the linter refuses
    `click.echo` elsewhere.
    """
    safe = printable_lines(str(text))
    safe = click.style(safe, fg=fg, bold=bold or None) if fg or bold else safe
    click.echo(safe, err=True) if err else print_out(safe)


def print_out(text: str) -> None:
    """Print text that is safe to print on stdout.

    Raises:
        OSError: stdout cannot be written; the file in the error is `STDOUT`.
    """
    try:
        click.echo(text)
    except OSError as error:
        error.filename = STDOUT
        raise


def printable_lines(text: str) -> str:
    """Make text of several lines safe to print; see `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def counted(count: int, noun: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "row"), counted(2000, "row"), counted(2, "class")
    ('1 row', '2,000 rows', '2 classes')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def print_failures(failures: Sequence[tuple[str, str, str]], out: Path, echo: Callable[[str], None]) -> None:
    """Print the number of failures, given as (path, status, reason), and the first `SHOWN` of them."""
    if not failures:
        return
    counts = Counter(status for _, status, _ in failures)
    kinds = ", ".join(f"{count:,} {status}" for status, count in counts.items())
    echo(f"{counted(len(failures), 'row')} without features ({kinds}):")
    for path, status, reason in failures[:SHOWN]:
        echo(f"  {printable(path)}: {status}: {printable(reason)}")
    if len(failures) > SHOWN:
        echo(f"  ... and {len(failures) - SHOWN:,} more: layertap show {shlex.quote(str(out))} --json")


def print_remedy(failures: Sequence[tuple[int, str, str, str]], echo: Callable[[str], None], where: str = "") -> None:
    """Print how to compute failed rows again.

    Args:
        failures: (row, path, status, reason) of all failed rows.
        echo: prints a line.
        where: describes the run that computes them; empty: any run.
    """
    statuses = [status for _, _, status, _ in failures]
    io_errors = statuses.count(Status.IO_ERROR.text)
    if io_errors:
        echo(f"the next run{where} retries images with an {Status.IO_ERROR.text}")
    if io_errors < len(statuses):
        echo(f"to retry failed images after fixing them, add --retry-failed{where and f' to a run{where}'}")


def command_line(*more: str) -> str:
    """Return the command of this process and `more`, to be run; a comment says if URLs have lost their credentials."""
    name = Path(sys.argv[0]).name
    arguments = ["layertap" if name == "__main__.py" else name, *sys.argv[1:]]  # python -m layertap
    public = [text_without_credentials(without_credentials(argument)) for argument in arguments]
    lost = "" if public == arguments else "  # add the signature, token or user name of the URL again"
    return shlex.join([*public, *more]) + lost


def data_set_name(path: str) -> str:
    """Return the name of a data set at an absolute path or URL: the last folder, or the one above "features"."""
    *_, above, last = ["", *path.rstrip("/").split("/")]
    return above if last == "features" and above else last


def printable(path: str) -> str:
    """Make a path safe to print: escape control characters and undecodable bytes; remove credentials from a URL."""
    path = _ESCAPED.sub(lambda part: part[0].encode(errors="surrogateescape").decode(errors="surrogateescape"), path)
    path = text_without_credentials(path)
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in path)
