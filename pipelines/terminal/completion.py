"""Completion of commands, options, values and paths in a shell, by click: `layertap completion bash`."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from pipelines.terminal.commands import command

__all__ = ["SHELLS", "complete_paths", "completion"]

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_LAYERTAP_COMPLETE"  # the name that click derives from the name of the program


def complete_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file or folder."""
    return [CompletionItem(incomplete, type="file")]


@command(hidden=True, short_help="Print a script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, values and paths in SHELL.

    \b
    eval "$(layertap completion bash)"       # in ~/.bashrc
    eval "$(layertap completion zsh)"        # in ~/.zshrc
    layertap completion fish | source        # in ~/.config/fish/config.fish
    """
    script_class = get_completion_class(shell)
    assert script_class is not None
    click.echo(script_class(ctx.find_root().command, {}, "layertap", _VARIABLE).source())
