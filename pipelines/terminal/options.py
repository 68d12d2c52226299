"""Options with the help and defaults of configuration keys, and functions that print results."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

from extract.errors import InputError
from extract.extraction.settings import RARE, Heading, choices_of
from extract.system.urls import is_url
from pipelines.terminal.commands import Option
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.config import keys_of
from pipelines.terminal.text_output import print_line, print_out

__all__ = [
    "BACKBONE_HELP",
    "DATA_SET",
    "FOLDER",
    "config_file",
    "given",
    "is_data_set",
    "json_flag",
    "option",
    "options",
    "print_json",
    "print_result",
]

# Keys whose values a shell completes as paths.
_PATHS = ("out", "weights", "without", "masks", "class_names", "depth", "results", "save", "rdm", "triplets", "stimuli",
          "targets")  # fmt: skip

# Help text that `search`, `verify` and `predict` share.
BACKBONE_HELP = (
    "Spec of the backbone; required if it is code (python/, hub/), which will be run, or a model of the hub (hf/) that "
    "is not in its cache."
)


class _DataSet(click.Path):
    """Parameter type for a data set: a folder, or a URL, which is returned unchanged if the command reads buckets."""

    def __init__(self, reads_buckets: bool) -> None:
        super().__init__(path_type=Path)
        self._reads_buckets = reads_buckets

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not is_url(str(value)):
            return super().convert(value, param, ctx)
        if self._reads_buckets:
            return value
        raise InputError(
            f"{value}: this command reads folders",
            hint=f"copy the data set (aws s3 sync {value} FOLDER). Buckets are read by `layertap show --status`, "
            f"`probe`, `search`, `export`, and in Python FeatureReader({str(value)!r})",
        )


def is_data_set(text: str) -> bool:
    """Return whether a text names a data set, in an argument that may also name something else."""
    return is_url(text) or (Path(text) / "dataset.json").is_file()


DATA_SET = _DataSet(reads_buckets=True)
FOLDER = _DataSet(reads_buckets=False)

json_flag = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
config_file = click.option(
    "--config", type=click.Path(path_type=Path), help="YAML file with these options as keys; flags override the file."
)


def option(*names: str, model: type[Any], **how: Any) -> Callable[[Any], Any]:
    """Return a click option for the configuration key of the same name: its type, and its help with the default."""
    key = names[-1].partition("/")[0].lstrip("-").replace("-", "_")
    field = keys_of(model)[key]
    text = field.description or ""
    if field.default not in (None, [], ()) and not isinstance(field.default, bool):
        default = " ".join(field.default) if isinstance(field.default, list | tuple) else field.default
        text = text.partition(" [default: ")[0] + f" [default: {default}]"
    complete = complete_paths if key in _PATHS else None
    heading = next((each for each in field.metadata if isinstance(each, Heading)), "Options")
    how = {**_how_to_read(field.annotation), "heading": heading, "rare": RARE in field.metadata, **how}
    return click.option(*names, cls=Option, help=text, default=None, shell_complete=complete, **how)


def options(
    model: type[BaseModel],
    names: Mapping[str, tuple[str, ...]],
    metavars: Mapping[str, str],
    leave_out: Collection[str] = ("images",),
) -> Callable[[Any], Any]:
    """Return a decorator that adds an option for each key of a configuration.

    Args:
        model: the configuration.
        names: key -> short name, or all names if one of them starts with `--`; others are named as the key.
        metavars: key -> placeholder of its value in the help text.
        leave_out: keys that are arguments of the command, or options with a form of their own.
    """

    def add(command: Any) -> Any:
        for key, field in reversed(keys_of(model).items()):
            long = f"--{key.replace('_', '-')}"
            if field.annotation is bool:
                long += f"/--no-{long[2:]}"
            chosen = names.get(key, ())
            chosen = chosen if any(name.startswith("--") for name in chosen) else (*chosen, long)
            if key not in leave_out:
                command = option(*chosen, model=model, metavar=metavars.get(key))(command)
        return command

    return add


def _how_to_read(annotation: Any) -> dict[str, Any]:
    """Return how click reads the values of a type: as words, numbers, paths, or text that the model itself reads."""
    if words := choices_of(annotation):
        return {"type": click.Choice(words)}
    kind, *others = [part for part in get_args(annotation) or (annotation,) if part is not type(None)]
    if list[str] in (annotation, kind):
        return {"multiple": True}
    if others or kind not in (int, float, Path):
        return {}
    return {"type": click.Path(path_type=Path) if kind is Path else kind}


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def print_json(content: Any) -> None:
    """Print a value as JSON."""
    print_out(json.dumps(content, indent=1).replace("\x7f", "\\u007f"))  # the only control character that stays


def print_result(
    result: Any, as_json: bool, to_json: Callable[[Any], Any], print_text: Callable[[Any, Callable[[str], None]], None]
) -> None:
    """Print the result of a command as JSON or as text."""
    if as_json:
        print_json(to_json(result))
    else:
        print_text(result, print_line)
