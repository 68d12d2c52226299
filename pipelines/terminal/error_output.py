"""Errors on the terminal: `error: MESSAGE`, and after a blank line `hint: HINT`, on stderr."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import textwrap
from pathlib import Path

import click

from extract.system.similar_paths import folder_or_list
from pipelines.terminal.commands import GONE_KINDS, GONE_OPTIONS
from pipelines.terminal.text_output import print_line, printable_lines

__all__ = ["print_error", "print_usage_error"]

# An option in a message, and its value.
_OPTION = re.compile(
    r"`[^`]*`|layertap .*|"
    r"(?<![\w./-])--([a-z][a-z-]*)( (?:FILE|FOLDER|N|[\d.]+|random|all|cpu|ray|processes|float\d+|exact|off|ignore)\b)?"
)

_LONGEST_ARGUMENTS = 200  # characters of a message: a shell passes each file of a pattern


def print_error(message: str, hint: str = "") -> None:
    """Print an error; `hint` says what to do, and may be empty.

    An option that the running command lacks is named as the key of a config file, which `sync` reads.
    """
    context = click.get_current_context(silent=True)
    command = context and context.command
    if isinstance(command, click.Group):
        command = command.commands.get(context.invoked_subcommand or "") if context else None
    if command:
        own = {name for parameter in command.params for name in parameter.opts}
        message, hint = (_OPTION.sub(lambda match: _as_key(match, own), text) for text in (message, hint))
    print_line(f"error: {message}", fg="red", err=True)
    if hint:
        click.echo(f"\n{click.style('hint:', fg='cyan')} {printable_lines(hint)}", err=True)


def _as_key(match: re.Match[str], own: set[str]) -> str:
    """Return a key of a config file (`workers: 2`) in place of an option that is not among `own`."""
    key = (match[1] or "").replace("-", "_")
    if not key or f"--{match[1]}" in own:
        return match[0]
    return f"`{key}:{match[2]}`" if match[2] else f"`{key}`"


def print_usage_error(error: click.ClickException) -> None:
    """Print an error that click has raised; the hint names similar words, or else the help of the command."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # a command without arguments prints its help
        error.show()
        return
    message, hint = error.format_message(), ""
    if isinstance(error, click.NoSuchOption | click.exceptions.NoSuchCommand):
        name = error.option_name if isinstance(error, click.NoSuchOption) else error.command_name
        known = {each.lstrip("-"): each for each in error.possibilities or ()}  # dashes would make all options similar
        near = [each for word, each in known.items() if word.startswith(name.lstrip("-"))]
        near = near or [known[word] for word in difflib.get_close_matches(name.lstrip("-"), known)]
        message, hint = error.message, GONE_OPTIONS.get(name) or _did_you_mean(near)
    elif isinstance(error, click.MissingParameter):
        message = " ".join(message.split())  # click writes each choice on a line of its own
    elif message.startswith("Got unexpected extra argument") and isinstance(error, click.UsageError):
        start, _, extra = message.partition("(")
        hint = _several_arguments(extra.removesuffix(")"), error.ctx)
        message = f"{start}({textwrap.shorten(extra, _LONGEST_ARGUMENTS, placeholder=' ...)')}"
    elif isinstance(error, click.BadParameter) and error.param and isinstance(error.param.type, click.Choice):
        word = message.rpartition("' is not one of")[0].rpartition(": '")[2]
        # 0.51: fp16 is near float16, and lasso not near pls
        hint = _did_you_mean(difflib.get_close_matches(word, error.param.type.choices, n=2, cutoff=0.51))
        if error.param.name == "kind":
            hint = GONE_KINDS.get(word, hint)
        if error.param.name == "kinds" and word.startswith("dup"):  # of `findings`
            hint = _did_you_mean(["copy", "near-duplicate"])
    if not hint and isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"{error.ctx.command_path} --help lists arguments and options"
    print_error(message.rstrip("."), hint)


def _did_you_mean(near: list[str]) -> str:
    return f"did you mean {' or '.join(near)}?" if near else ""


def _several_arguments(extra: str, ctx: click.Context | None) -> str:
    """Return what to do about arguments that no parameter takes: a path with spaces, several files, or several values.

    Args:
        extra: the arguments.
        ctx: the command; it has read the arguments before them.
    """
    for path in (Path(value) for value in (ctx.params.values() if ctx else ()) if isinstance(value, str | Path)):
        if os.path.exists(f"{path} {extra}"):  # noqa: PTH110  thousands of names are no error, as for Path
            return f"quote a path with spaces: {shlex.quote(f'{path} {extra}')}"
        if path.is_file() and path.suffix == Path(extra).suffix:
            return folder_or_list(path)
    return "quote a path with spaces; for several values, repeat the option: -l layer1 -l layer2"
