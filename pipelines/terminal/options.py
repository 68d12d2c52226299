"""Options with the help and defaults of configuration keys, and functions that print results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from extract.errors import InputError
from extract.system.urls import is_url
from pipelines.terminal.completion import complete_backbones, complete_paths
from pipelines.terminal.text_output import print_line

__all__ = [
    "BACKBONE_HELP",
    "DATA_SET",
    "FOLDER",
    "LateChoice",
    "config_file",
    "given",
    "is_data_set",
    "json_flag",
    "option",
    "print_json",
    "print_result",
]

_PATHS = (
    "out",
    "weights",
    "masks",
    "class_names",
    "depth",
    "results",
    "save",
)  # keys whose values a shell completes as paths

# Help text that `search`, `verify` and `predict` share.
BACKBONE_HELP = (
    "Spec of the backbone; required if it is code (python/, hub/), which will be run, or a model of the hub (hf/) that "
    "is not in its cache."
)


class _DataSet(click.Path):
    """Parameter type for a data set: a folder, or a URL, which is returned unchanged."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_url(str(value)) else super().convert(value, param, ctx)


class _Folder(click.Path):
    """Parameter type for a folder; the error for a URL names the commands that read buckets."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_url(str(value)):
            raise InputError(
                f"{value}: this command reads folders",
                hint=f"copy the data set (aws s3 sync {value} FOLDER). Buckets are read by `layertap status`, `probe`, "
                f"`search`, `export`, and in Python FeatureReader({str(value)!r})",
            )
        return super().convert(value, param, ctx)


def is_data_set(text: str) -> bool:
    """Return whether a text names a data set, in an argument that may also name something else."""
    return is_url(text) or (Path(text) / "dataset.json").is_file()


class LateChoice(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """A choice whose words are loaded late, since their module is slow to import.

    Args:
        words: returns the words; called when click prints the help or checks a value.
    """

    def __init__(self, words: Callable[[], Iterable[str]]) -> None:
        self._words = words
        super().__init__(())

    @property
    def choices(self) -> tuple[str, ...]:
        """The permitted words."""
        return tuple(self._words())

    @choices.setter
    def choices(self, words: Iterable[str]) -> None:
        pass  # click assigns them when the command is declared


DATA_SET = _DataSet(path_type=Path)
FOLDER = _Folder(path_type=Path)

json_flag = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
config_file = click.option(
    "--config", type=click.Path(path_type=Path), help="YAML file with these options as keys; flags override the file."
)


def option(*names: str, model: type[BaseModel], **settings: Any) -> Callable[[Any], Any]:
    """Return a click option for the configuration key of the same name, with its help and default in the help text."""
    key = names[-1].partition("/")[0].lstrip("-").replace("-", "_")
    field = model.model_fields[key]
    text = field.description or ""
    if field.default not in (None, []) and not isinstance(field.default, bool):
        default = " ".join(field.default) if isinstance(field.default, list) else field.default
        text += f" [default: {default}]"
    backbones = dict.fromkeys(("backbone", "backbones"), complete_backbones)
    complete = {**backbones, **dict.fromkeys(_PATHS, complete_paths)}.get(key)
    return click.option(*names, help=text, default=None, shell_complete=complete, **settings)


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def print_json(content: Any, indent: int | None = 1) -> None:
    """Print a value as JSON; on one line if `indent` is None."""
    click.echo(json.dumps(content, indent=indent).replace("\x7f", "\\u007f"))  # the only control character that stays


def print_result(
    result: Any,
    as_json: bool,
    to_json: Callable[[Any], Any],
    print_text: Callable[[Any, Callable[[str], None]], None],
    indent: int | None = 1,
) -> None:
    """Print the result of a command as JSON or as text."""
    if as_json:
        print_json(to_json(result), indent)
    else:
        print_text(result, print_line)
