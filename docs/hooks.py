"""Pages that MkDocs builds from the code: the command line from click, and configuration keys from pydantic models.

Nothing that is committed can be out of date. Plugins for click do not read the models.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args, get_origin

import click
import yaml

from pipelines.cli import main
from pipelines.compare.config import CompareConfig
from pipelines.embed.config import EmbedConfig
from pipelines.probe.config import ProbeConfig
from pipelines.sync.config import ScheduleConfig, SyncConfig
from pipelines.terminal.commands import OLD_COMMANDS, OLD_OPTIONS, SHOW_ALL
from pipelines.terminal.config import keys_of

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

# Heading, model, and an example in the repository.
PARTS = (
    ("Keys of `layertap embed --config`", EmbedConfig, "configs/quickstart.yaml"),
    ("Keys of `layertap sync`", SyncConfig, "configs/nightly.yaml"),
    ("Keys under `schedule`", ScheduleConfig, "configs/nightly.yaml"),
    ("Keys of `layertap probe --config`", ProbeConfig, "configs/probe.yaml"),
    ("Keys of `layertap compare --config`", CompareConfig, "configs/compare.yaml"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    for name, lines in (("command-line", command_line()), ("configuration", configuration())):
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(lines)))
    return files


def command_line() -> Iterator[str]:
    """Yield the lines of the page of all commands, as Markdown."""
    yield "# Command line\n"
    yield "This page is generated from the commands themselves; `layertap COMMAND --help` prints the same text."
    yield "[Run an extraction](../guides/extraction.md#exit-codes) lists the exit codes.\n"
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"layertap {name}", terminal_width=110, max_content_width=110)
        context.meta[SHOW_ALL] = True
        yield f"## {name}\n"
        yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            keeps_lines = paragraph.startswith("\b\n")
            yield f"```text\n{paragraph[2:]}\n```\n" if keeps_lines else f"{_escaped(paragraph)}\n"
        for heading, records in command.records(context).items():
            rows = [(f"`{option}`", _cell(text)) for option, text in records]
            yield from _table(heading.lower(), "meaning", rows=rows)
    yield "## Names of earlier versions\n"
    yield "These names of commands and options still work, and no help lists them.\n"
    yield from _table(
        "earlier", "today", rows=[(f"`{old}`", f"`{new}`") for old, new in {**OLD_COMMANDS, **OLD_OPTIONS}.items()]
    )


def configuration() -> Iterator[str]:
    """Yield the lines of the page of all keys of configuration files, as Markdown."""
    yield "# Configuration keys\n"
    yield "This page is generated from the models that check the files. An unknown key is an error. A flag on the"
    yield "command line replaces the key of the same name. Relative paths start at the working directory, and `~` is"
    yield "expanded. The default of `workers` depends on the machine: the one below is that of the machine that built"
    yield "this page. Times are seconds, or text such as `90s`, `15m`, `36h` or `30d`.\n"
    of_embed = {name: field.description for name, field in keys_of(EmbedConfig).items()}
    for heading, model, example in PARTS:
        yield f"## {heading}\n"
        yield f"Example: `{example}` of the repository.\n"
        fields = keys_of(model)
        if model is SyncConfig:
            same = [name for name, field in fields.items() if of_embed.get(name) == field.description]
            yield f"These keys have the same meaning as for `embed`: {', '.join(f'`{name}`' for name in same)}."
            yield "`schedule` holds the keys of the next table. `data_sets` is a list of several data sets, each with"
            yield "its own keys; the keys beside it apply to all of them. The other keys are:\n"
            fields = {name: field for name, field in fields.items() if name not in same}
        yield from _table(
            "key", "type", "default", "meaning", rows=[_key(name, field) for name, field in fields.items()]
        )


def _key(name: str, field: Any) -> tuple[str, str, str, str]:
    default = "required"
    if not field.is_required():
        default = f"`{yaml.safe_dump(field.get_default(), default_flow_style=True).splitlines()[0]}`"
    return f"`{name}`", f"`{_type(field.annotation)}`", default, _cell(field.description or "")


def _type(annotation: Any) -> str:
    """Return a type as text: `str`, `list[int]`, `exact or fast`, `int or null`."""
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    if isinstance(annotation, str):  # a value of a Literal
        return annotation
    texts = [_type(part) for part in get_args(annotation)]
    return f"list[{texts[0]}]" if get_origin(annotation) is list else " or ".join(texts)


def _table(*heads: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is, except for code between backticks."""
    parts = text.split("`")
    return "`".join(
        re.sub(r"([*_\[|])", r"\\\1", part).replace("<", "&lt;") if i % 2 == 0 else part for i, part in enumerate(parts)
    )
