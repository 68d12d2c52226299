"""Pages that MkDocs builds from the code: the command line from click, and configuration keys from pydantic models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel

from pipelines.cli import main
from pipelines.embed.config import EmbedConfig, FeaturesConfig
from pipelines.probe.config import ProbeConfig
from pipelines.sync.config import ScheduleConfig, SyncConfig

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PARTS = (  # heading, model, the file, keys that stand in an earlier table
    ("Keys of `layertap embed --config`", EmbedConfig, "configs/quickstart.yaml", ()),
    (
        "Keys of `layertap sync`, `schedule` and `watch`",
        SyncConfig,
        "configs/nightly.yaml",
        tuple(FeaturesConfig.model_fields),
    ),
    ("Keys under `schedule`", ScheduleConfig, "configs/nightly.yaml", ()),
    ("Keys of `layertap probe --config`", ProbeConfig, "configs/probe.yaml", ()),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    for name, page in (("command-line", command_line()), ("configuration", configuration())):
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    return files


def command_line() -> str:
    """Return the page of all commands, as Markdown."""
    return "\n".join(_command_line())


def configuration() -> str:
    """Return the page of all keys of configuration files, as Markdown."""
    return "\n".join(_configuration())


def _command_line() -> Iterator[str]:
    yield "# Command line\n"
    yield "This page is generated from the commands themselves; `layertap COMMAND --help` prints the same text."
    yield "[Run an extraction](../guides/extraction.md#exit-codes) lists the exit codes.\n"
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"layertap {name}")
        yield f"## {name}\n"
        yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
        yield _help(command.help or "")
        records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
        yield from _table(("option", "meaning"), ((f"`{left}`", _cell(right)) for left, right in records))


def _help(text: str) -> str:
    """Return the help of a command as Markdown: paragraphs with `\\b` in front keep their lines."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept = paragraph.startswith("\b\n")
        paragraphs.append(f"```text\n{paragraph[2:]}\n```" if kept else _escaped(paragraph))
    return "\n\n".join(paragraphs) + "\n"


def _configuration() -> Iterator[str]:
    yield "# Configuration keys\n"
    yield "This page is generated from the models that check the files. An unknown key is an error. A flag on the command"
    yield "line replaces the key of the same name. Relative paths start at the working directory, and `~` is expanded.\n"
    for heading, model, example, elsewhere in PARTS:
        yield f"## {heading}\n"
        yield f"Example: `{example}` of the repository.\n"
        if elsewhere:
            names = ", ".join(f"`{name}`" for name in elsewhere)
            yield f"These keys mean the same as for `embed`: {names}. Others are:\n"
        fields = {name: field for name, field in model.model_fields.items() if name not in elsewhere}
        yield from _table(("key", "type", "default", "meaning"), (_key(name, field) for name, field in fields.items()))


def _key(name: str, field: Any) -> Iterator[str]:
    yield f"`{name}`"
    yield f"`{_type(field.annotation)}`".replace("|", "\\|")
    yield "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)}`"
    yield _cell(field.description or "")


def _type(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    text = re.sub(r"(?:typing|pathlib)\.(?:_local\.)?", "", text)
    return re.sub(r"Literal\[(.*?)\]", r"\1", text).replace("'", "").replace(" | None", " or null").replace("NoneType", "null")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Return text in which Markdown changes nothing but text between backticks."""
    parts = text.split("`")
    return "`".join(re.sub(r"([*_<\[])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts))
