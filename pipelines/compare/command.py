"""The command `layertap compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from extract.system.optional_libraries import library
from pipelines.compare.config import CompareConfig
from pipelines.terminal.completion import complete_backbones, complete_paths
from pipelines.terminal.config import checked
from pipelines.terminal.options import given, json_flag, option, print_result

__all__ = ["compare"]


def _choices(key: str) -> click.Choice[str]:
    return click.Choice(list(get_args(CompareConfig.model_fields[key].annotation)))


_option = partial(option, model=CompareConfig)


@click.command(short_help="Compare backbones on your images.")
@click.argument("images", shell_complete=complete_paths)
@click.option(
    "-b", "--backbone", "backbones", multiple=True, metavar="SPEC|GLOB", shell_complete=complete_backbones,
    help=CompareConfig.model_fields["backbones"].description,
)  # fmt: skip
@click.option(
    "--from", "table", type=click.Path(path_type=Path), metavar="FILE.csv",
    help=CompareConfig.model_fields["table"].description,
)  # fmt: skip
@_option("-l", "--layers", multiple=True, metavar="LAYER[:POOLING]")
@_option("-p", "--protocol", type=_choices("protocol"))
@_option("--labels", metavar="FILE[:COLUMN]")
@_option("-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER")
@_option("--limit", type=int)
@_option("--test-fraction", type=float)
@_option("--decode", type=_choices("decode"))
@_option("--dtype", type=_choices("dtype"))
@_option("--precision", type=_choices("precision"))
@_option("--compile", type=_choices("compile"))
@_option("--batch-size", type=int)
@_option("--workers", type=int)
@_option("--device")
@_option("--seed", type=int)
@json_flag
@click.pass_context
def compare(ctx: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Compare backbones, and their layers, on IMAGES: accuracy with labels, speed, size, and how alike they are.

    Each backbone gets a data set in FOLDER. Images are decoded once for all backbones with the same size, crop and
    interpolation. A repeated call resumes, and adds backbones.

    \b
    layertap compare photos -b bundled/efficientnet_lite0 -b torchvision/resnet50 -b timm/vit_small_patch16_224
    layertap compare photos -b 'timm/vit_small*' -p knn --labels labels.csv
    layertap compare photos --from backbones.csv -o outputs/compared
    """
    library("matplotlib", "figures", "layertap compare")
    from pipelines.compare.files import as_json as comparison_as_json
    from pipelines.compare.files import print_comparison
    from pipelines.compare.job import compare as run_compare

    comparison, files = run_compare(checked(CompareConfig, given(flags)), lambda text: click.echo(text, err=True))
    if comparison.signal:
        click.echo("stopped; run the same command again to resume", err=True)
        ctx.exit(128 + comparison.signal)
    print_result(comparison, as_json, comparison_as_json, print_comparison)
    if not as_json:
        click.echo("written: " + ", ".join(map(str, files)), err=True)
