"""The command `layertap doctor`."""

from __future__ import annotations

import click

from pipelines.terminal.completion import complete_paths
from pipelines.terminal.options import json_flag, print_result

__all__ = ["doctor"]


@click.command(short_help="Check this machine, images, a backbone and an output folder.")
@click.argument("images", required=False, shell_complete=complete_paths)
@click.option("-b", "--backbone", help="Check the weights of this backbone.")
@click.option("-o", "--out", help="Output folder. [default: that of `embed`]", shell_complete=complete_paths)
@json_flag
@click.pass_context
def doctor(ctx: click.Context, /, images: str | None, backbone: str | None, out: str | None, as_json: bool) -> None:
    """Check this machine, and whether IMAGES can be read, BACKBONE loaded and OUT written.

    Decodes one of the images. Nothing is downloaded, and nothing that is written stays. Exits with 1 if something
    needed is missing or broken; such lines start with !!.

    \b
    layertap doctor
    layertap doctor photos -b torchvision/resnet50 -o outputs/photos
    """
    from pipelines.doctor.checks import as_json as report_as_json
    from pipelines.doctor.checks import examine, print_report, problems_of

    sections = examine(images, backbone, out)
    print_result(sections, as_json, report_as_json, print_report)
    if problems_of(sections):
        ctx.exit(1)
