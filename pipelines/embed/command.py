"""The command `layertap embed`, which also writes plans and sbatch files."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from extract.errors import InputError, LayertapError, OtherFeaturesError
from extract.extraction.settings import IMAGES, WORKERS
from pipelines.embed.config import EmbedConfig, listed_images
from pipelines.terminal.commands import Option, command, mode_of
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.config import load_config
from pipelines.terminal.options import config_file, given, json_flag, options, print_result
from pipelines.terminal.text_output import command_line, counted, print_line

__all__ = ["embed"]

_OF_ARRAYS = ("gpus", "cpus", "time", "partition")
_MODES = {"plan": ((), ("out", "as_json")), "slurm": (_OF_ARRAYS, ("config",))}

_array_option = partial(click.option, cls=Option, heading=WORKERS, rare=True)


@command(short_help="Compute features of images, and store them in HDF5.")
@click.argument("images", required=False, shell_complete=complete_paths)
@options(
    EmbedConfig,
    {"backbone": ("-b",), "layers": ("-l",), "out": ("-o",)},
    {
        "layers": "LAYER[:POOLING]...", "size": "PX|HxW", "crop": "PX|HxW", "mean": "R,G,B", "std": "R,G,B",
        "keep": "COLUMN", "without": "FILE", "shards_of": "I/N",
    },
)  # fmt: skip
@click.option(
    "--plan", is_flag=True, cls=Option, heading=IMAGES,
    help="Only list many images once: OUT becomes a plan, which replaces IMAGES in later commands.",
)  # fmt: skip
@click.option(
    "--slurm", type=click.IntRange(1, 1_000_000), metavar="TASKS", cls=Option, heading=WORKERS,
    help="Only print an sbatch file for --config FILE: an array of tasks that share the shards.",
)  # fmt: skip
@_array_option("--gpus", type=click.IntRange(min=0), default=1, show_default=True, help="GPUs per task of --slurm.")
@_array_option("--cpus", type=click.IntRange(min=1), default=8, show_default=True, help="Cores per task of --slurm.")
@_array_option("--time", metavar="[D-]HH:MM:SS", help="Limit per task of --slurm. [default: the partition's]")
@_array_option("--partition", help="Partition of --slurm. [default: the cluster's]")
@config_file
@json_flag
@click.pass_context
def embed(
    ctx: click.Context, /, config: Path | None, as_json: bool, plan: bool, slurm: int | None, **flags: Any
) -> None:
    """Compute features of IMAGES, and store them in HDF5.

    IMAGES is a folder, a .csv or .parquet list with a column `path`, a .tar or .zip archive (or a pattern of several:
    'shards-{000..099}.tar'), an .npy array or FILE.h5:NAME of uint8 pictures, a URL (s3://, gs://, https://),
    a dataset of Hugging Face (hfds://NAME), or a plan, which --plan has written.

    To resume an interrupted run, run the same command again. A file that cannot be decoded is stored as a row with an
    error status.

    \b
    layertap embed photos                                     # embedding of the bundled backbone
    layertap embed photos -b torchvision/resnet50 -l layer3 -l layer4:max_map -o outputs/photos-r50
    layertap embed photos --plan && layertap embed outputs/photos-plan
    layertap embed --config configs/photos.yaml --slurm 16 > photos.sbatch && sbatch photos.sbatch
    """
    mode = mode_of(ctx, _MODES)
    array = {name: flags.pop(name) for name in _OF_ARRAYS}
    if mode == "plan":
        _write_plan(flags["images"], flags["out"], as_json)
        return
    if mode == "slurm":  # `layertap slurm CONFIG` of earlier versions names the file in the place of IMAGES
        if config and flags["images"]:
            raise InputError("IMAGES has no effect with --slurm: CONFIG names the images", hint="leave it out")
        _print_sbatch(config or flags["images"], tasks=slurm, **array)
        return
    resolved = load_config(EmbedConfig, config, given(flags))
    if resolved.is_shared:
        from pipelines.embed.cluster import driver

        run = driver.embed_shared(resolved)
        print_result(run, as_json, driver.as_json, driver.print_shared)
        ctx.exit(driver.exit_code(run))
    images = listed_images(resolved)  # before PyTorch is imported
    from pipelines.embed.job import embed, print_summary, summary_as_json

    try:
        outcome = embed(resolved, images)
    except OtherFeaturesError as error:
        can_add = error.only_layers and not resolved.add_layers
        other = ["-o", f"{resolved.place}-2"]
        hint = command_line(*["--add-layers"] if can_add else other)
        if resolved.out and not can_add:  # a second -o would stand beside the first
            hint = f"choose another output folder: {shlex.join(other)}"
        raise InputError(error.message, hint=hint) from error
    print_result(outcome, as_json, summary_as_json, print_summary)
    if outcome.signal:
        ctx.exit(128 + outcome.signal)
    if len(outcome.failures) == outcome.summary.n_rows:
        raise LayertapError(f"no image of {counted(outcome.summary.n_rows, 'row')} has features; the reasons are above")
    if resolved.strict and outcome.failures:
        ctx.exit(3)


def _write_plan(images: str | None, out: str | None, as_json: bool) -> None:
    from pipelines.embed import plan_job
    from pipelines.terminal.config import name_of

    if images is None:
        raise click.UsageError("Missing argument 'IMAGES'.")
    try:
        planned = plan_job.plan(images, Path(out or Path("outputs") / f"{name_of(images)}-plan"))
    except KeyboardInterrupt:
        print_line(f"\nstopped: no plan was written. To list the images again:\n  {command_line()}", err=True)
        raise
    print_result(planned, as_json, dict, plan_job.print_plan)


def _print_sbatch(config: Path | str | None, **settings: Any) -> None:
    from pipelines.embed.cluster.slurm import as_sbatch

    if config is None:
        raise InputError("--slurm needs a config file, which each task reads", hint="add --config FILE")
    click.echo(as_sbatch(Path(config), **settings), nl=False)  # noqa: TID251  a script, which is run as it is
