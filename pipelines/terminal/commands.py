"""Commands and options with headings, rare options, options that change what a command does, and earlier names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from extract.errors import InputError
from extract.extraction.settings import HEADINGS
from pipelines.terminal.text_output import print_line

__all__ = [
    "GONE_KINDS",
    "GONE_OPTIONS",
    "OLD_COMMANDS",
    "OLD_OPTIONS",
    "SHOW_ALL",
    "Command",
    "Option",
    "command",
    "mode_of",
]

# Names of earlier versions, which work and which no help lists -> the names of today.
OLD_COMMANDS = {
    "ablate": "inspect --edit zero",
    "backbones": "list --what backbones",
    "bench": "doctor --bench",
    "compact": "sync --compact",
    "diff": "show",
    "layers": "list --what layers",
    "plan": "embed --plan",
    "schedule": "sync --schedule",
    "slurm": "embed --slurm 1",
    "status": "show --status",
    "watch": "sync --watch",
}
OLD_OPTIONS = {
    "--layer": "--layers",
    "--output": "--out",
    "--picture": "--pictures",
    "--results": "--out",
    "--tasks": "--slurm",
}

# Options that do not exist, and what to do instead.
_START_AGAIN = "to start again, delete the output, or name another one with -o"
GONE_OPTIONS = {
    "--at": "patches are searched in Python: layertap.search.nearest_patches(reader.tokens(layer), patch, k)",
    "--budget": "use --limit N, which takes the first N images",
    "--clobber": _START_AGAIN,
    "--force": _START_AGAIN,
    "--iterations": "leave it out; no protocol of `layertap probe` is trained in iterations",
    "--max-distortion": "layertap.probe.feature_similarity compares stored features, as LAYER:srpK and LAYER:flatten",
    "--overwrite": _START_AGAIN,
    "--restart": _START_AGAIN,
    "--schedule": "`layertap sync CONFIG --schedule` runs passes at fixed times",
    "--thorough": "leave it out; `layertap doctor --bench` always measures the same",
    "--verbose": "commands print notes and progress on stderr; `layertap doctor` prints versions and devices",
    "--watch": "to follow a folder, `layertap sync CONFIG --watch`; the progress: `watch layertap show OUT --status`",
    "--weights": "`layertap list` needs none; `layertap compare` reads them from the table of --from FILE.csv",
}
GONE_KINDS = {  # of `draw`
    "channels": "use maps, which shows channels beside the images",
    "filters": "`layertap inspect` names filters that do nothing",
}

SHOW_ALL = "layertap.show_all"  # key of `Context.meta`: whether the help lists rare options


class Option(click.Option):
    """An option below a heading of the help; a rare one is listed by `--help-all` only."""

    def __init__(self, *names: Any, heading: str = "Options", rare: bool = False, **how: Any):
        super().__init__(*names, **how)
        self.heading, self.rare = heading, rare

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the name and the text of the option; None if the help does not list it."""
        return None if self.rare and not ctx.meta.get(SHOW_ALL) else super().get_help_record(ctx)


def _print_all_help(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        print_line(ctx.get_help())
        ctx.exit()


class Command(click.Command):
    """A command with options below headings, which accepts the names of options of earlier versions."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, `--help`, and `--help-all` if there are rare options."""
        parameters = super().get_params(ctx)
        if any(isinstance(parameter, Option) and parameter.rare for parameter in parameters):
            text = "Also list options that are rarely used, and exit."
            parameters.append(click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False,
                                           callback=_print_all_help, help=text))  # fmt: skip
        return parameters

    def make_parser(self, ctx: click.Context) -> Any:
        """Return the parser, which also reads `OLD_OPTIONS`."""
        parser = super().make_parser(ctx)
        options = {name: each for each in self.params if isinstance(each, click.Option) for name in each.opts}
        for old, new in OLD_OPTIONS.items():
            if new in options and old not in options:
                action = "append" if options[new].multiple else "store"
                parser.add_option(options[new], [old], options[new].name, action=action, nargs=options[new].nargs)
        return parser

    def records(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return heading -> name and text of each option below it."""
        below: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Options", *HEADINGS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                below.setdefault(getattr(parameter, "heading", "Options"), []).append(record)
        return {heading: records for heading, records in below.items() if records}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings."""
        for heading, records in self.records(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)


command = partial(click.command, cls=Command)


def mode_of(ctx: click.Context, modes: Mapping[str, tuple[Collection[str], Collection[str]]]) -> str:
    """Return the option that makes a command do something else, empty if none was given.

    Args:
        ctx: the running command.
        modes: name of such an option -> names of those that work with it only, and of others that work with it too.

    Raises:
        InputError: an option was given that has no effect.
    """
    typed = {
        parameter.name: parameter.opts[-1]
        for parameter in ctx.command.params
        if isinstance(parameter, click.Option)
        and ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    }
    mode = next((name for name in modes if name in typed), "")
    only, others = modes.get(mode, ((), ()))
    for name, option in typed.items():
        needed = [other for other, (names, _) in modes.items() if name in names]
        if needed and mode not in needed:
            raise InputError(
                f"{option} has no effect without --{needed[0]}", hint=f"add --{needed[0]}, or leave it out"
            )
        if mode and name not in (mode, *only, *others):
            raise InputError(f"{option} has no effect with --{mode}", hint="leave it out")
    return mode
