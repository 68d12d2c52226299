"""The command line: `layertap COMMAND`.

Data goes to stdout; errors, hints, progress and notes go to stderr. An error is printed as `error: MESSAGE` and, if
there is something to do, after a blank line, `hint: HINT`.

Exit codes: 0 done; 1 failed, or all rows failed; 2 wrong usage or input; 3 done, but rows failed under `--strict`;
4 another run holds the lock; 130 interrupted (Ctrl-C); 143 terminated (SIGTERM).
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from extract.errors import InputError, LayertapError, LockedError, UnknownNameError, first_line
from extract.system.foreign_code import exits_refused, own_faults_refused
from extract.system.optional_libraries import own_version
from pipelines import demo
from pipelines.compare import command as compare
from pipelines.data_sets import command as data_sets
from pipelines.doctor import command as doctor
from pipelines.embed import command as embed
from pipelines.network import command as network
from pipelines.probe import command as probe
from pipelines.sync import command as sync
from pipelines.terminal import completion
from pipelines.terminal.commands import OLD_COMMANDS
from pipelines.terminal.config import with_home
from pipelines.terminal.error_output import print_error, print_usage_error
from pipelines.terminal.graceful_stop import Terminated, end_on_signals
from pipelines.terminal.options import is_data_set
from pipelines.terminal.text_output import STDOUT, print_line

__all__ = ["SECTIONS", "main"]

# What `layertap --help` lists, by purpose: every command, but `demo`, which stands among those to start with.
SECTIONS = {
    "Extract features": ("embed", "sync"),
    "Look at data sets": ("show", "report", "findings", "search", "verify", "check", "export", "merge"),
    "Measure features": ("probe", "predict", "compare"),
    "Look inside a network": ("list", "inspect", "draw"),
    "Set up": ("doctor",),
}
_FIRST_COMMANDS = [
    ("layertap demo", "Run embed, probe and report on digits."),
    ("layertap doctor photos", "Check this machine and the images in photos."),
    ("layertap embed photos", "Store their features in outputs/photos."),
    ("layertap show outputs/photos", "Describe what is stored."),
]

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_OPEN_FILES_ERRORS = {errno.EMFILE, errno.ENFILE}
_MACHINE_ERRORS = _DISK_ERRORS | _OPEN_FILES_ERRORS | {errno.ENOMEM}


def _print_machine_error(error: OSError | MemoryError) -> None:
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        detail = f" ({first_line(error)})" if str(error) else ""
        hint = "free or add memory, or lower --workers and --batch-size"
        print_error(f"out of memory{detail}; stored rows are safe", hint)
        return
    hint = ""
    if error.filename == STDOUT:
        hint = "write it to another file or disk"
        if sys.stdout is sys.__stdout__:  # else Python writes what is left when it exits: exit code 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    elif error.errno in _OPEN_FILES_ERRORS:
        hint = "raise the limit of open files (ulimit -n)"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free disk space, or choose another output folder, and run again"
    print_error(f"{error.filename or 'writing'}: {error.strerror}", hint)


def _with_home(argument: str) -> str:
    option = re.match(r"--[^=]*=|-[A-Za-z](?=~)|", argument)
    assert option is not None
    return option[0] + with_home(argument.removeprefix(option[0]))


class _Commands(click.Group):
    """Group that reports expected errors on stderr, without a traceback, and exits with the matching code."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run a command and exit, as click does; wrong usage is reported as other errors are."""
        run: Any = super().main
        if not standalone_mode:
            return run(*arguments, standalone_mode=False, **options)
        try:
            # Without the standalone mode, click returns the exit code, and raises what it would print itself.
            code = run(*arguments, standalone_mode=False, **options)
        except click.ClickException as error:
            print_usage_error(error)
            sys.exit(error.exit_code)
        except click.Abort:
            print_line("interrupted", err=True)
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands to start with, and then all commands by purpose."""
        with formatter.section("Start with"):
            formatter.write_dl(_FIRST_COMMANDS)
        listed = {name for names in SECTIONS.values() for name in names}
        others = tuple(
            name for name in self.list_commands(ctx) if name not in listed and not self.commands[name].hidden
        )
        for title, names in {**SECTIONS, "Other commands": others}.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in names])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, after the home folder in `~/photos`, `-o~/out` and `--out=~/out` is expanded."""
        if args in (["help"], ["version"]):
            args = [f"--{args[0]}"]
        return super().parse_args(ctx, [_with_home(argument) for argument in args])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; `help embed` is `embed --help`, and a path in place of a command is told apart."""
        if args[0] == "help" and len(args) == 2:
            args = [args[1], "--help"]
        if args[0] in OLD_COMMANDS:
            new = OLD_COMMANDS[args[0]]
            if not ctx.resilient_parsing:  # otherwise a shell is completing the line
                print_line(f"note: `layertap {args[0]}` is now `layertap {new}`", fg="yellow", err=True)
            args = [*new.split(), *args[1:]]
        if args[0] not in self.commands and not ctx.resilient_parsing and Path(args[0]).exists():
            name = "show" if is_data_set(args[0]) else "embed"
            raise InputError(f"{args[0]} is a path; expected a command", hint=f"layertap {name} {shlex.quote(args[0])}")
        return super().resolve_command(ctx, args)

    @end_on_signals()
    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")  # file names may have undecodable bytes
        try:
            with exits_refused(), own_faults_refused(_MACHINE_ERRORS):
                return super().invoke(ctx)
        except LayertapError as error:
            print_error(error.message, error.hint)
            ctx.exit(
                4 if isinstance(error, LockedError) else 2 if isinstance(error, InputError | UnknownNameError) else 1
            )
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno not in _MACHINE_ERRORS | {errno.ENAMETOOLONG}:
                raise
            _print_machine_error(error)
            ctx.exit(1)
        except KeyboardInterrupt as stop:
            terminated = isinstance(stop, Terminated)
            print_line("terminated" if terminated else "interrupted", err=True)
            ctx.exit(143 if terminated else 130)


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        print_line(f"{context.find_root().info_name}, version {own_version()}")
        context.exit()


@click.group(
    cls=_Commands,
    help="layertap computes features of images, from any layer of any vision network (backbone), "
    "and stores them on disk.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-V", "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version,
              help="Show the version and exit.")  # fmt: skip
def main() -> None:
    """Run a command."""


# Each click command defined in these modules becomes a command of `layertap`.
for _module in (compare, completion, data_sets, demo, doctor, embed, network, probe, sync):
    for _member in vars(_module).values():
        if isinstance(_member, click.Command):
            main.add_command(_member)


# Units of systemd and lines of cron that earlier versions printed start this module.
if __name__ == "__main__":
    main()
