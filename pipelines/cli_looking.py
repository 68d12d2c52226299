"""Commands that look inside a backbone: `layertap inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click

from pipelines.cli_options import given, option
from pipelines.config import InspectConfig, LookConfig, checked

__all__ = ["inspect"]


def _looking(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments and options of all of them."""
    of_look = partial(option, model=LookConfig)
    options = [
        click.argument("backbone"),
        click.argument("images"),
        of_look("-l", "--layers", multiple=True, metavar="LAYER"),
        of_look("--sample", metavar="N|all"),
        of_look("--weights"),
        of_look("--allow-missing-head/--no-allow-missing-head"),
        of_look("--batch-size", type=int),
        of_look("--workers", type=int),
        of_look("--device"),
        of_look("--seed", type=int),
    ]
    return reduce(lambda decorated, one: one(decorated), reversed(options), command)


_of_inspect = partial(option, model=InspectConfig)


@click.command()
@_looking
@_of_inspect("--grad/--no-grad")
@_of_inspect("--loss", metavar="cross_entropy|FILE.py:FUNCTION")
@_of_inspect("--csv", type=click.Path(path_type=Path), metavar="FILE")
@_of_inspect("--pictures", type=click.Path(path_type=Path), metavar="FOLDER")
@_of_inspect("--format", type=click.Choice(["png", "svg", "pdf"]))
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def inspect(as_json: bool, **flags: Any) -> None:
    """Tell what the layers of BACKBONE do on IMAGES: what is wrong, in words, then a table.

    Dead channels, saturated units, NaN and the first image that gives one, activations that explode; with --grad,
    gradients that vanish or explode, and layers that take none. Nothing is stored.

    \b
    layertap inspect bundled/efficientnet_lite0 photos
    layertap inspect python/net.py:make photos --weights last.pth --grad
    layertap inspect torchvision/resnet50 photos -l 'layer?' --pictures outputs/inside
    """
    from pipelines.inspect import as_json as inspected_as_json
    from pipelines.inspect import inspect as run_inspect
    from pipelines.inspect import print_inspection

    inspected = run_inspect(checked(InspectConfig, given(flags)))
    if as_json:
        click.echo(json.dumps(inspected_as_json(inspected), indent=1))
    else:
        print_inspection(inspected, click.echo)
        if inspected.written:
            click.echo("written: " + ", ".join(map(str, inspected.written)))
