"""Write `docs/llms.txt`, a page for programs that read: every command and function in a line each.

`python docs/summary.py` writes it; a test compares the file with the program. The layout follows llmstxt.org.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipelines.cli import SECTIONS, main

DOCS = Path(__file__).parent
MODULES = ("layertap", "extract.edits", "extract.probe", "extract.search", "extract.ablation", "extract.attribution",
           "extract.sklearn")  # fmt: skip

INTRODUCTION = """\
# layertap

> layertap computes features of images, from any layer of any vision network (backbone), and stores them on disk.
> It is a command line and a Python library. Images are folders, lists, archives, arrays or URLs.

- Backbone: `bundled/efficientnet_lite0`, `torchvision/NAME`, `timm/NAME`, `open_clip/NAME:TAG`, `hf/NAME`,
  `hub/OWNER/REPO:ENTRY` or `python/FILE.py:FACTORY`.
- Layer: `LAYER[:POOLING]`, a name of `named_modules()` or a glob, such as `layer4` or `blocks.*:mean_tokens`.
- `layertap embed photos` writes outputs/photos; run again, it resumes. Other layers or backbones need another `-o`.
- `FeatureReader("outputs/photos")["embedding"][:]` is an array (N, C); `labels`, `paths` and `splits` have its rows.
- Results are printed on stdout, all else on stderr. Most commands have `--json`. `COMMAND --help` lists the options.
"""


def summary() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *_commands(), *_functions(), *_pages()])


def _commands() -> Iterator[str]:
    for title, names in SECTIONS.items():
        yield f"## Commands: {title.lower()}\n"
        for name in names:
            command = main.commands[name]
            context = click.Context(command, info_name=f"layertap {name}")
            arguments = " ".join(param.make_metavar(context) for param in command.params if _is_argument(param))
            options = ", ".join(f"`{max(param.opts, key=len)}`" for param in command.params if not _is_argument(param))
            usage = f"layertap {name} {arguments}".rstrip()
            yield f"- `{usage}`: {command.get_short_help_str(limit=200)}" + (f" Options: {options}." if options else "")
        yield ""


def _is_argument(param: click.Parameter) -> bool:
    return isinstance(param, click.Argument)


def _functions() -> Iterator[str]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        yield f"## Python: `from {module_name.replace('extract', 'layertap')} import ...`\n"
        for name in module.__all__:
            member = getattr(module, name)
            if not (inspect.isfunction(member) or inspect.isclass(member)):
                continue
            yield f"- `{name}{_parameters(member)}`: {_first_line(member)}"
            if inspect.isclass(member) and not issubclass(member, Exception | enum.Enum):
                yield from _members(name, member)
        yield ""


def _members(name: str, cls: type) -> Iterator[str]:
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for member_name, member in vars(cls).items():
        if member_name.startswith("_") or member_name in fields:
            continue
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        function = getattr(function, "__func__", function)
        if inspect.isfunction(function) and inspect.getdoc(function):
            parameters = (
                _parameters(function) if member is function or isinstance(member, classmethod | staticmethod) else ""
            )
            yield f"  - `{name}.{member_name}{parameters}`: {_first_line(function)}"


def _parameters(member: Any) -> str:
    """Return the names of the parameters, with `=` at those that may be left out."""
    if inspect.isclass(member) and issubclass(member, Exception | enum.Enum):
        return ""
    names, is_marked = [], False
    for parameter in inspect.signature(member).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_marked:
            names.append("*")
        is_marked |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        names.append(f"{stars}{parameter.name}" + ("=" if parameter.default is not parameter.empty else ""))
    return f"({', '.join(names)})"


def _first_line(member: Any) -> str:
    """Return the first sentence of the first paragraph of the docstring."""
    paragraph = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
    return re.split(r"(?<!al)[.] (?=[A-Z])", paragraph)[0].rstrip(":.") + "."


def _pages() -> Iterator[str]:
    yield "## Pages\n"
    for path in sorted(DOCS.rglob("*.md")):
        lines = path.read_text(encoding="utf-8").splitlines()
        yield f"- [{lines[0].removeprefix('# ')}]({path.relative_to(DOCS).as_posix()})"
    yield "- [In a notebook](guides/notebook.ipynb)"
    yield ""


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(summary(), encoding="utf-8")
