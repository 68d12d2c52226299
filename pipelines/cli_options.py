"""Options of commands that are keys of configurations: one place for their help and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from pydantic import BaseModel

from pipelines.config import EmbedConfig

__all__ = ["given", "option"]


def option(*names: str, model: type[BaseModel] = EmbedConfig, **settings: Any) -> Callable[[Any], Any]:
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
