"""Commands that compute features of images: `layertap embed`, `plan`, `slurm` and `bench`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from extract.errors import InputError, LayertapError, OtherFeaturesError
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.config import load_config
from pipelines.terminal.options import config_file, given, json_flag, option, options, print_result
from pipelines.terminal.text_output import command_line, print_line

__all__ = ["bench", "embed", "plan", "slurm"]

_embed_option = partial(option, model=EmbedConfig)


@click.command(short_help="Compute features of images, and store them in HDF5.")
@click.argument("images", required=False, shell_complete=complete_paths)
@options(
    EmbedConfig,
    {"backbone": ("-b",), "layers": ("-l",), "out": ("-o",)},
    {
        "layers": "LAYER[:POOLING]...", "size": "PX|HxW", "crop": "PX|HxW", "mean": "R,G,B", "std": "R,G,B",
        "keep": "COLUMN", "shards_of": "I/N",
    },
)  # fmt: skip
@config_file
@json_flag
@click.pass_context
def embed(ctx: click.Context, /, config: Path | None, as_json: bool, **flags: Any) -> None:
    """Compute features of IMAGES, and store them in HDF5.

    IMAGES is a folder, a .csv or .parquet list with a column `path`, a .tar or .zip archive (or a pattern of several:
    'shards-{000..099}.tar'), an .npy array or FILE.h5:NAME of uint8 pictures, a URL (s3://, gs://, https://),
    a dataset of Hugging Face (hfds://NAME), or a plan (see `layertap plan`).

    To resume an interrupted run, run the same command again. A file that cannot be decoded is stored as a row with an
    error status.

    \b
    layertap embed photos                                     # embedding of the bundled backbone
    layertap embed photos -b torchvision/resnet50 -l layer3 -l layer4:max_map -o outputs/photos-r50
    """
    resolved = load_config(EmbedConfig, config, given(flags))
    if resolved.max_distortion is not None:
        from extract.extraction.run import NO_MAX_DISTORTION

        print_line(f"note: {NO_MAX_DISTORTION}", fg="yellow", err=True)
    if resolved.is_shared:
        from pipelines.embed.cluster.driver import as_json as shared_as_json
        from pipelines.embed.cluster.driver import embed_shared, exit_code, print_shared

        run = embed_shared(resolved)
        print_result(run, as_json, shared_as_json, print_shared)
        ctx.exit(exit_code(run))
    from pipelines.embed.job import embed, print_summary, summary_as_json

    try:
        outcome = embed(resolved)
    except OtherFeaturesError as error:
        can_add = error.only_layers and not resolved.add_layers
        more = ["--add-layers"] if can_add else ["-o", f"{resolved.place}-2"]
        raise InputError(error.message, hint=command_line(*more)) from error
    print_result(outcome, as_json, summary_as_json, print_summary)
    if outcome.signal:
        ctx.exit(128 + outcome.signal)
    if len(outcome.failures) == outcome.summary.n_rows:
        raise LayertapError(f"none of the {outcome.summary.n_rows:,} images has features; the reasons are above")
    if resolved.strict and outcome.failures:
        ctx.exit(3)


@click.command(short_help="List many images once, for several runs.")
@click.argument("images", shell_complete=complete_paths)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder of the plan. [default: outputs/<name of IMAGES>-plan]"
)
@json_flag
def plan(images: str, out: Path | None, as_json: bool) -> None:
    """List IMAGES once, and write a plan: a folder that other commands accept in place of IMAGES.

    For many images, up to a hundred million: a job that is given the plan does not list the images again, and does not
    hold all names in memory. This command holds them, in 60 to 80 bytes a name. IMAGES is a folder, the URL of a
    folder, or a .csv, .tsv or .parquet list. The plan gives the same rows as IMAGES: a data set that was started with
    IMAGES can be resumed with the plan, and vice versa.

    A complete plan is left as it is. A command that is interrupted writes no plan. Plans need pyarrow.

    \b
    layertap plan photos -o outputs/photos-plan
    layertap embed outputs/photos-plan
    """
    from pipelines.embed.plan_job import as_json as plan_as_json
    from pipelines.embed.plan_job import plan as make_plan
    from pipelines.embed.plan_job import print_plan
    from pipelines.terminal.config import name_of

    out = out or Path("outputs") / f"{name_of(images)}-plan"
    try:
        planned = make_plan(images, out)
    except KeyboardInterrupt:
        print_line(f"\nstopped: no plan was written. To list the images again:\n  {command_line()}", err=True)
        raise
    print_result(planned, as_json, plan_as_json, print_plan)


@click.command(short_help="Print an sbatch file for a run on a cluster.")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--tasks", type=click.IntRange(1, 1_000_000), required=True, help="Number of tasks.")
@click.option("--gpus", type=click.IntRange(min=0), default=1, show_default=True, help="GPUs per task.")
@click.option("--cpus", type=click.IntRange(min=1), default=8, show_default=True, help="CPU cores per task.")
@click.option("--time", metavar="[D-]HH:MM:SS", help="Time limit per task. [default: the partition's]")
@click.option("--partition", help="SLURM partition. [default: the cluster's]")
def slurm(config: Path, **settings: Any) -> None:
    """Print an sbatch file that runs `layertap embed --config CONFIG` as an array whose tasks share the shards.

    To build shards that are still missing, submit the same file again.

    \b
    layertap slurm configs/photos.yaml --tasks 16 > photos.sbatch && sbatch photos.sbatch
    """
    from pipelines.embed.cluster.slurm import as_sbatch

    click.echo(as_sbatch(config, **settings), nl=False)  # noqa: TID251  a script, which is run as it is


@click.command(short_help="Measure how fast this machine computes features.")
@click.argument("images", required=False, shell_complete=complete_paths)
@_embed_option("-b", "--backbone")
@_embed_option("-l", "--layers", metavar="LAYER[:POOLING]...")
@_embed_option("--weights")
@_embed_option("--device")
@click.option("--thorough", is_flag=True, deprecated="it has no effect")
@json_flag
def bench(images: str | None, as_json: bool, thorough: bool, **flags: Any) -> None:
    """Measure how fast this machine computes features with a backbone.

    Measure decoding on one core, the forward with each option, and the whole pipeline: as it is, and with the flags
    that are the fastest here. Without IMAGES, noise is used.

    \b
    layertap bench photos -b torchvision/resnet50
    """
    from pipelines.embed.bench import as_json as bench_as_json
    from pipelines.embed.bench import bench as measure
    from pipelines.embed.bench import print_bench

    result = measure(images, say=lambda text: print_line(f"measuring {text} ...", err=True), **given(flags))
    print_result(result, as_json, bench_as_json, print_bench)
