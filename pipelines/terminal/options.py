"""What commands share: options whose help and defaults are those of keys of configurations, and how they answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from extract.errors import InputError
from extract.system.urls import is_url

__all__ = ["DATA_SET", "FOLDER", "LateChoice", "config_file", "given", "json_flag", "option", "print_json", "tell"]


class _DataSet(click.Path):
    """A data set: its folder, or its URL in a bucket, which stays as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_url(str(value)) else super().convert(value, param, ctx)


class _Folder(click.Path):
    """A folder; whoever names a bucket is told what reads one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_url(str(value)):
            raise InputError(
                f"{value}: this command reads folders; copy the data set (aws s3 sync {value} FOLDER). What reads a "
                f"bucket: `layertap status`, `probe`, `search`, `export`, and in Python FeatureReader({str(value)!r})"
            )
        return super().convert(value, param, ctx)


class LateChoice(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """A choice between words that a slow module knows; they are asked for when the command's help or value is.

    Args:
        words: gives them.
    """

    def __init__(self, words: Callable[[], Iterable[str]]) -> None:
        self._words = words
        super().__init__(())

    @property
    def choices(self) -> tuple[str, ...]:
        """The words."""
        return tuple(self._words())

    @choices.setter
    def choices(self, words: Iterable[str]) -> None:
        pass  # click sets them when the command is declared


DATA_SET = _DataSet(path_type=Path)
FOLDER = _Folder(path_type=Path)

json_flag = click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
config_file = click.option(
    "--config", type=click.Path(path_type=Path), help="YAML file with these words as keys; flags win over it."
)


def option(*names: str, model: type[BaseModel], **settings: Any) -> Callable[[Any], Any]:
    """An option whose help and default are those of the configuration key of the same name."""
    key = names[-1].partition("/")[0].lstrip("-").replace("-", "_")
    field = model.model_fields[key]
    text = field.description or ""
    if field.default is not None and not isinstance(field.default, bool):
        default = " ".join(field.default) if isinstance(field.default, list) else field.default
        text += f" [default: {default}]"
    return click.option(*names, help=text, default=None, **settings)


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Of all flags, those that were given."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def print_json(content: Any, indent: int | None = 1) -> None:
    """Print what JSON can hold; on one line without an indent."""
    click.echo(json.dumps(content, indent=indent))


def tell(
    found: Any,
    as_json: bool,
    in_json: Callable[[Any], Any],
    in_words: Callable[[Any, Callable[[str], None]], None],
    indent: int | None = 1,
) -> None:
    """Print what a command has found, for programs or for people."""
    if as_json:
        print_json(in_json(found), indent)
    else:
        in_words(found, click.echo)
