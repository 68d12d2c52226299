"""Commands that read or copy data sets: `layertap show`, `status`, `report`, `search` and more."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from extract.errors import InputError
from extract.system.optional_libraries import library
from pipelines.terminal.config import COMPRESS_HELP, SHARD_ROWS_HELP
from pipelines.terminal.options import DATA_SET, FOLDER, LateChoice, json_flag, tell

__all__ = ["diff", "export", "merge", "report", "search", "show", "status", "verify"]


@click.command()
@click.argument("out", type=FOLDER)
@json_flag
def show(out: Path, as_json: bool) -> None:
    """Tell what is inside the data set OUT."""
    from pipelines.data_sets.show import describe, print_description

    tell(describe(out), as_json, dict, print_description)


@click.command()
@click.argument("out")
@click.option("--watch", is_flag=True, help="Tell it again every few seconds, until all is done.")
@json_flag
def status(out: str, watch: bool, as_json: bool) -> None:
    """Tell how far the data set OUT is: shards, rows, rates by machine, from the receipts of its shards alone.

    Of one of `layertap sync`: its runs, rows, failing images, disk and drift.
    """
    from pipelines.data_sets.status import Making, is_made_in_shards, print_making
    from pipelines.data_sets.status import watch as watch_making
    from pipelines.sync.status import describe_status, print_status

    if is_made_in_shards(out):
        for content in watch_making(out) if watch else [Making(out).look()]:
            if watch and not as_json and sys.stdout.isatty():
                click.clear()
            tell(content, as_json, dict, print_making, indent=None if watch else 1)
        return
    if watch:
        raise InputError(f"--watch: {out} is no data set of `layertap embed`")
    tell(describe_status(Path(out)), as_json, dict, print_status)


@click.command()
@click.argument("out", type=FOLDER)
@click.argument("other", required=False, type=FOLDER)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="HTML file. [default: OUT/report.html]")
@click.option("-l", "--layer", help="That images are compared by. [default: embedding, or the last]")
@click.option(
    "--map",
    "maps",
    multiple=True,
    type=click.Choice(["pca", "tsne", "umap"]),
    default=["pca"],
    show_default=True,
    help="Maps of the images; repeats. tsne needs scikit-learn, umap umap-learn.",
)
@click.option(
    "--probe",
    "probe_results",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Results of `layertap probe` besides OUT/probe; repeats.",
)
@click.option("--images", help="Where the images lie, if they were moved.")
@click.option("--thumbnails", type=click.IntRange(min=0), default=1500, show_default=True, help="At most so many.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn at random.")
def report(out: Path, other: Path | None, **settings: Any) -> None:
    """Write one HTML page that tells what is in the data set OUT, and how it differs from OTHER.

    The page has everything in it, thumbnails of images as well: it loads nothing, and can be opened anywhere.

    \b
    layertap report outputs/photos
    layertap report outputs/photos outputs/photos-2 --map pca --map tsne -o report.html
    """
    library("plotly", "report", "layertap report")
    from pipelines.data_sets.report import run_report

    written = run_report(out, other, say=lambda text: click.echo(text, err=True), **settings)
    click.echo(f"{written}, {written.stat().st_size / 1e6:.1f} MB; open it in a browser")


@click.command()
@click.argument("out", type=DATA_SET)
@click.argument("query", metavar="[ROW|PATH|IMAGE]", required=False)
@click.option("--text", help="Search for a text, in a data set of a backbone with a text tower (CLIP, SigLIP).")
@click.option("-k", type=click.IntRange(min=1), default=10, show_default=True, help="Images to find.")
@click.option("-l", "--layer", help="By its features. [default: embedding, or the only one]")
@click.option("--itself", is_flag=True, help="A row of the data set may find itself, too.")
@click.option("-b", "--backbone", help="Its spec: to be given where it is code (python/, hub/), which will be run.")
@click.option("--weights", help="Name or file of the backbone's weights, if the file was moved.")
@click.option("--images", help="Where the images lie, if they were moved; for the picture.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Draw the images found: a .png, .svg or .pdf.")
@json_flag
def search(out: Path | str, query: str | None, as_json: bool, **settings: Any) -> None:
    """Find the images of the data set OUT that are nearest to an image or a text, by cosine, exactly.

    What is searched for is the number of a row, the path of an image in the data set, or else an image file, whose
    features are computed as those of the data set were; or --text.

    \b
    layertap search outputs/photos 17
    layertap search outputs/photos new.jpg -k 20 -o gallery.png
    layertap search outputs/photos-clip --text "a dog on grass"
    """
    if settings["output"] is not None:
        library("matplotlib", "figures", "--output")
    from pipelines.data_sets.search import as_json as found_as_json
    from pipelines.data_sets.search import print_found, run_search

    found = run_search(out, query, **settings)
    tell(found, as_json, found_as_json, print_found)
    if settings["output"] and not as_json:
        click.echo(f"drawn: {settings['output']}")


@click.command()
@click.argument("first", metavar="A", type=FOLDER)
@click.argument("second", metavar="B", type=FOLDER)
@json_flag
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Tell how the data sets A and B differ: what their numbers depend on, and the features of images in both.

    Images are the same if their bytes are, whatever they are called.
    """
    from extract.analysis.dataset_diff import compare
    from pipelines.data_sets.diff import as_json as diff_as_json
    from pipelines.data_sets.diff import print_diff

    tell(compare(first, second), as_json, diff_as_json, lambda found, echo: print_diff(found, first, second, echo))


@click.command()
@click.argument("out", type=FOLDER)
@click.option("--sample", type=click.IntRange(min=1), help="Also compute so many random rows again, and compare.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the choice of those rows.")
@click.option("--images", help="Where the images lie, if they were moved.")
@click.option("-b", "--backbone", help="Its spec: to be given where it is code (python/, hub/), which will be run.")
@click.option("--weights", help="Name or file of the backbone's weights, if the file was moved.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option(
    "--repair", "mend", is_flag=True, help="Make rows that are wrong pending, so that `embed` fills them again."
)
@json_flag
@click.pass_context
def verify(ctx: click.Context, /, out: Path, as_json: bool, **settings: Any) -> None:
    """Check every hash, receipt and count of the data set OUT; exit with 1 if anything is wrong.

    With --sample, also whether the features are really of these images, with these weights.
    """
    from pipelines.data_sets.verify import as_json as check_as_json
    from pipelines.data_sets.verify import check, print_check

    result = check(out, **settings)
    tell(result, as_json, check_as_json, print_check)
    if result.faults:
        ctx.exit(1)


def _formats() -> Iterable[str]:
    from extract.store.export import FORMATS  # imports h5py

    return FORMATS


@click.command()
@click.argument("out", type=DATA_SET)
@click.option("--to", type=LateChoice(_formats), required=True, help="What to write.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File or folder. [default: beside OUT]")
@click.option("-l", "--layers", multiple=True, metavar="LAYER", help="Only these; repeats. [default: all]")
def export(out: Path | str, to: str, output: Path | None, layers: tuple[str, ...]) -> None:
    """Write the data set OUT as plain files for other tools: HDF5, NumPy, Parquet or MATLAB.

    \b
    layertap export outputs/photos --to parquet      # outputs/photos.parquet: pandas, DuckDB, embedding-atlas
    layertap export outputs/photos --to npy          # outputs/photos-npy/: a file for each layer, and rows.csv
    """
    from pipelines.data_sets.export import run_export

    click.echo(run_export(out, to, output, layers))


@click.command()
@click.argument("sources", nargs=-1, required=True, type=FOLDER)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder of the new data set.")
@click.option("--shard-rows", type=int, help=SHARD_ROWS_HELP)
@click.option("--compress", type=click.Choice(["gzip", "lzf", "blosc2"]), help=COMPRESS_HELP)
def merge(sources: tuple[Path, ...], out: Path, shard_rows: int | None, compress: str | None) -> None:
    """Copy the rows of complete data sets of one fingerprint into a new one, sorted by path.

    Run again, it goes on where it was.
    """
    from pipelines.data_sets.merge import run_merge

    click.echo(run_merge(sources, out, shard_rows, compress))
