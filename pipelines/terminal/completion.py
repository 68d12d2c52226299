"""Completion in a shell: `layertap completion bash`.

A shell starts `layertap` for each completion, so nothing here imports PyTorch or timm, which takes seconds. Names of
backbones come from the index that `layertap backbones` and other commands keep (`extract.backbones.catalogue_index`).
Before it exists, they are read from the source files of the installed libraries; these have no names of weights.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from extract import defaults
from extract.backbones.catalogue_index import kept_names

__all__ = ["SHELLS", "backbone_names", "complete_backbones", "complete_paths", "completion"]

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_LAYERTAP_COMPLETE"  # the name that click derives from the name of the program

# A model of timm or torchvision is a function with this decorator.
_REGISTERED = re.compile(r"^@register_model(?:\(\))?\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


def backbone_names(source: str, incomplete: str = "") -> Iterator[str]:
    """Yield the names of a source's backbones without importing its library.

    Sources with names that are not in files (`hf`, `hub`, `python`), and libraries that are not installed, have none.

    Args:
        source: name of the source.
        incomplete: what is typed of the name; if it has a dot, names of timm have the tags of their weights.
    """
    if source not in _NAMES:
        return
    kept = kept_names(source, incomplete)
    yield from _NAMES[source]() if kept is None else kept


def _bundled() -> Iterator[str]:
    yield defaults.BACKBONE.partition("/")[2]


def _registered_in(library: str) -> Callable[[], Iterator[str]]:
    def names() -> Iterator[str]:
        for path in _files(library, "models/*.py"):
            yield from _REGISTERED.findall(path.read_text(encoding="utf-8"))

    return names


def _open_clip() -> Iterator[str]:
    return (path.stem for path in _files("open_clip", "model_configs/*.json"))


def _files(library: str, pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(library)
    if spec is not None and spec.origin:
        yield from sorted(Path(spec.origin).parent.glob(pattern))


_NAMES: dict[str, Callable[[], Iterator[str]]] = {
    "bundled": _bundled,
    "torchvision": _registered_in("torchvision"),
    "timm": _registered_in("timm"),
    "open_clip": _open_clip,
}


def complete_backbones(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a source, or the name of one of its backbones."""
    sources = [
        source for source in _NAMES if f"{source}/".startswith(incomplete) or incomplete.startswith(f"{source}/")
    ]
    if len(sources) == 1:  # not the source alone, behind which a shell would put a space
        typed = incomplete.partition("/")[2]
        specs = [f"{sources[0]}/{name}" for name in backbone_names(sources[0], typed)]
    else:
        specs = [f"{source}/" for source in sources]
    return [CompletionItem(spec) for spec in specs if spec.startswith(incomplete)]


def complete_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file or folder."""
    return [CompletionItem(incomplete, type="file")]


@click.command(short_help="Print a script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, values and names of backbones in SHELL.

    \b
    eval "$(layertap completion bash)"       # in ~/.bashrc
    eval "$(layertap completion zsh)"        # in ~/.zshrc
    layertap completion fish | source        # in ~/.config/fish/config.fish
    """
    script_class = get_completion_class(shell)
    assert script_class is not None
    click.echo(script_class(ctx.find_root().command, {}, "layertap", _VARIABLE).source())
