"""The command line: `layertap COMMAND`.

Exit codes: 0 done; 1 failed, or all rows failed; 2 wrong usage or input; 3 done, but rows failed under `--strict`;
4 another run holds the lock; 130 interrupted (Ctrl-C); 143 terminated (SIGTERM).
"""

from __future__ import annotations

import errno
import io
import re
import sys
from typing import Any

import click

from extract.errors import InputError, LayertapError, LockedError, UnknownNameError, first_line
from extract.system.foreign_code import exits_refused, own_faults_refused
from pipelines import demo
from pipelines.data_sets import command as data_sets
from pipelines.embed import command as embed
from pipelines.network import command as network
from pipelines.probe import command as probe
from pipelines.sync import command as sync
from pipelines.terminal.config import with_home
from pipelines.terminal.graceful_stop import Terminated, end_on_signals

__all__ = ["main"]

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_OPEN_FILES_ERRORS = {errno.EMFILE, errno.ENFILE}


def _print_memory_error(error: BaseException) -> None:
    detail = f" ({first_line(error)})" if str(error) else ""
    remedy = "Stored rows are safe. Free or add memory, or lower --workers and --batch-size"
    click.secho(f"error: out of memory{detail}. {remedy}", fg="red", err=True)


def _with_home(argument: str) -> str:
    match = re.match(r"--[^=]*=|-[A-Za-z](?=~)", argument)
    option = match[0] if match else ""
    try:
        return option + with_home(argument.removeprefix(option))
    except InputError as error:
        raise click.UsageError(str(error)) from None


class _Commands(click.Group):
    """Group that reports expected errors as one line on stderr and exits with the matching code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, after the home folder in `~/photos`, `-o~/out` and `--out=~/out` is expanded."""
        return super().parse_args(ctx, [_with_home(argument) for argument in args])

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")  # file names may have undecodable bytes
        signals = end_on_signals()
        try:
            with exits_refused(), own_faults_refused(_DISK_ERRORS | _OPEN_FILES_ERRORS | {errno.ENOMEM}):
                return super().invoke(ctx)
        except LayertapError as error:
            click.secho(f"error: {error}", fg="red", err=True)
            ctx.exit(
                4 if isinstance(error, LockedError) else 2 if isinstance(error, InputError | UnknownNameError) else 1
            )
        except OSError as error:
            if error.errno == errno.ENOMEM:
                _print_memory_error(error)
                ctx.exit(1)
            if error.errno not in _DISK_ERRORS | _OPEN_FILES_ERRORS:
                raise
            remedy = "; raise the limit of open files (ulimit -n)" if error.errno in _OPEN_FILES_ERRORS else ""
            click.secho(f"error: {error.filename or 'writing'}: {error.strerror}{remedy}", fg="red", err=True)
            ctx.exit(1)
        except MemoryError as error:
            _print_memory_error(error)
            ctx.exit(1)
        except KeyboardInterrupt as stop:
            terminated = isinstance(stop, Terminated)
            click.echo("terminated" if terminated else "interrupted", err=True)
            ctx.exit(143 if terminated else 130)
        finally:
            signals.end()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="layertap")
def main() -> None:
    """Compute features of images with any backbone, and store them on disk: checked, in order, crash-safe."""


# Each click command defined in these modules becomes a command of `layertap`.
for _module in (data_sets, demo, embed, network, probe, sync):
    for _member in vars(_module).values():
        if isinstance(_member, click.Command):
            main.add_command(_member)


# Units of systemd and lines of cron that earlier versions printed start this module.
if __name__ == "__main__":
    main()
