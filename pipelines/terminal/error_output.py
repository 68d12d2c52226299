"""Errors on the terminal: `error: MESSAGE`, and after a blank line `hint: HINT`, on stderr."""

from __future__ import annotations

import click

from pipelines.terminal.commands import GONE_OPTIONS, with_keys
from pipelines.terminal.text_output import print_line, printable_lines

__all__ = ["print_error", "print_usage_error"]


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
        message, hint = (
            with_keys(text, lambda key: f"--{key.replace('_', '-')}" not in own) for text in (message, hint)
        )
    print_line(f"error: {message}", fg="red", err=True)
    if hint:
        click.echo(f"\n{click.style('hint:', fg='cyan')} {printable_lines(hint)}", err=True)


def print_usage_error(error: click.ClickException) -> None:
    """Print an error that click has raised; the hint names similar words, or else the help of the command."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # a command without arguments prints its help
        error.show()
        return
    message = error.format_message()
    hint = ""
    if isinstance(error, click.NoSuchOption) and error.option_name in GONE_OPTIONS:
        message, hint = error.message, GONE_OPTIONS[error.option_name]
    elif isinstance(error, click.NoSuchOption | click.exceptions.NoSuchCommand) and error.possibilities:
        given = error.option_name if isinstance(error, click.NoSuchOption) else error.command_name
        longer = [name for name in error.possibilities if name.startswith(given)]
        message, hint = error.message, f"did you mean {' or '.join(longer or error.possibilities)}?"
    elif message.startswith("Got unexpected extra argument"):
        hint = "quote a path with spaces; for several values, repeat the option: -l layer1 -l layer2"
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"{error.ctx.command_path} --help lists arguments and options"
    print_error(message.rstrip("."), hint)
