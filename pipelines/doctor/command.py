"""The command `layertap doctor`."""

from __future__ import annotations

from typing import Any

import click

from pipelines.embed.config import EmbedConfig
from pipelines.terminal.commands import command, mode_of
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.options import given, json_flag, option, print_result
from pipelines.terminal.text_output import print_line

__all__ = ["doctor"]

_OF_BENCH = "With --bench"

_MODES = {"bench": (("layers", "weights", "device"), ("backbone", "as_json"))}


@command(short_help="Check this machine, images, a backbone and an output folder.")
@click.argument("images", required=False, shell_complete=complete_paths)
@click.option("-b", "--backbone", help="Check the weights of this backbone.")
@click.option("-o", "--out", help="Output folder. [default: that of `embed`]", shell_complete=complete_paths)
@click.option("--bench", is_flag=True, help="Instead, measure how fast this machine computes features.")
@option("-l", "--layers", model=EmbedConfig, metavar="LAYER[:POOLING]...", heading=_OF_BENCH)
@option("--weights", model=EmbedConfig, heading=_OF_BENCH)
@option("--device", model=EmbedConfig, heading=_OF_BENCH)
@json_flag
@click.pass_context
def doctor(
    ctx: click.Context, /, images: str | None, backbone: str | None, out: str | None, bench: bool, as_json: bool,
    **flags: Any,
) -> None:  # fmt: skip
    """Check this machine, and whether IMAGES can be read, BACKBONE loaded and OUT written.

    Decodes one of the images. Nothing is downloaded, and nothing that is written stays. Exits with 1 if something
    needed is missing or broken; such lines start with !!.

    With --bench, measure decoding on one core, the forward with each option, and the whole pipeline: as it is, and with
    the flags that are the fastest here. Without IMAGES, noise is used.

    \b
    layertap doctor
    layertap doctor photos -b torchvision/resnet50 -o outputs/photos
    layertap doctor photos -b torchvision/resnet50 --bench
    """
    if mode_of(ctx, _MODES) == "bench":
        from pipelines.embed import bench as job

        settings = given({"backbone": backbone, **flags})
        result = job.bench(images, say=lambda text: print_line(f"measuring {text} ...", err=True), **settings)
        print_result(result, as_json, job.as_json, job.print_bench)
        return
    from pipelines.doctor import checks

    sections = checks.examine(images, backbone, out)
    print_result(sections, as_json, checks.as_json, checks.print_report)
    if checks.problems_of(sections):
        ctx.exit(1)
