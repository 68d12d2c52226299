"""Commands that read or copy data sets: `layertap show`, `report`, `search` and more."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from extract.errors import InputError
from extract.extraction.settings import ExtractionSettings
from extract.system.optional_libraries import library
from extract.system.urls import is_url
from pipelines.terminal.commands import command
from pipelines.terminal.options import BACKBONE_HELP, DATA_SET, FOLDER, json_flag, option, print_result
from pipelines.terminal.text_output import print_line

__all__ = ["check", "export", "findings", "merge", "report", "search", "show", "verify"]

# Names in modules that are slow to import: `extract.analysis.row_findings`, `extract.store.export`,
# `extract.system.dissimilarities`.
_KINDS = ("failed", "copy across splits", "copy", "near-duplicate", "suspect label", "outlier")
_FORMATS = ("h5", "npy", "parquet", "mat", "hf", "rdm")
_METRICS = ("correlation", "cosine", "euclidean")

_PATH = click.Path(path_type=Path)
_layer = partial(click.option, "-l", "--layers", "layer", metavar="LAYER")
_several = partial(click.option, multiple=True)


@command(short_help="Describe a data set and its progress, or compare it with another.")
@click.argument("out", type=DATA_SET)
@click.argument("other", required=False, type=FOLDER)
@click.option("--status", is_flag=True, help="Only print the progress, or the passes of a data set of `sync`.")
@json_flag
@click.pass_context
def show(ctx: click.Context, /, out: Path | str, other: Path | None, status: bool, as_json: bool) -> None:
    """Describe the data set OUT: its features, images, backbone and settings; and its progress if it is unfinished.

    With OTHER, compare the two: the settings that features depend on, and the features of images in both. Images are
    the same if their bytes are the same, whatever their names are.

    The progress is shards, rows and rates by machine, read from the receipts of the shards alone. The passes of a data
    set of `layertap sync` are listed with its rows, failing images and disk usage; the exit code is 1 if the last one
    failed. Of a data set in a bucket, the progress is printed.

    \b
    layertap show outputs/photos
    layertap show outputs/photos --status
    layertap show outputs/photos outputs/photos-2     # how they differ
    """
    if other is not None:
        if status:
            raise InputError("--status is for one data set", hint="leave it out")
        from extract.analysis.dataset_diff import compare
        from pipelines.data_sets.show import print_diff

        first = FOLDER.convert(out, None, ctx)
        print_result(compare(first, other), as_json, dict, partial(print_diff, first=first, second=other))
        return
    if status or is_url(str(out)):
        _print_progress(ctx, str(out), as_json)
        return
    from pipelines.data_sets.show import describe, print_description

    content = describe(Path(out))
    print_result(content, as_json, dict, print_description)
    if not as_json and not content["complete"] and content["version"] is None:
        _print_progress(ctx, str(out), as_json)


def _print_progress(ctx: click.Context, out: str, as_json: bool) -> None:
    from pipelines.data_sets.status import is_built_in_shards, print_progress, progress_of
    from pipelines.sync.status import describe_status, print_status

    if is_built_in_shards(out):
        print_result(progress_of(out), as_json, dict, print_progress)
        return
    content = describe_status(Path(out))
    print_result(content, as_json, dict, print_status)
    if content["runs"] and content["runs"][-1]["event"] == "failed":  # for monitoring: the last pass
        ctx.exit(1)


@command(short_help="Write an HTML page about a data set.")
@click.argument("out", type=FOLDER)
@click.option("-o", "--out", "output", type=_PATH, help="HTML file. [default: OUT/report.html]")
@_layer(help="Layer to compare images by. [default: embedding, or the last layer]")
@_several(
    "--map", "maps", type=click.Choice(["pca", "tsne", "umap"]), default=["tsne", "pca"],
    show_default=True,
    help="Map of the images; may be repeated; the page opens on the first. pca needs no further library.",
)  # fmt: skip
@_several(
    "--probe", "probe_results", type=_PATH, metavar="FOLDER",
    help="More results of `layertap probe`, besides OUT/probe; may be repeated.",
)  # fmt: skip
@click.option("--images", help="Location of the images, if they were moved or are behind a URL.")
@click.option("--thumbnails", type=click.IntRange(min=0), default=5000, show_default=True, help="Maximum number.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random choices.")
def report(out: Path, **settings: Any) -> None:
    """Write an HTML page that describes the data set OUT.

    The page is a single file that includes thumbnails of the images. It loads no other files, and can be opened
    anywhere.

    \b
    layertap report outputs/photos
    layertap report outputs/photos --map umap -o report.html
    """
    for method, module in (("tsne", "sklearn"), ("tsne", "threadpoolctl"), ("umap", "umap")):
        if method in settings["maps"]:
            library(module, "umap" if method == "umap" else "report", f"layertap report with --map {method}")
    from pipelines.data_sets.report.page import run_report

    written = run_report(out, say=lambda text: print_line(text, err=True), **settings)
    print_line(f"{written}, {written.stat().st_size / 1e6:.1f} MB; open it in a browser")


@command(short_help="List copies, near-duplicates, outliers and suspect labels.")
@click.argument("out", type=DATA_SET)
@click.option("-o", "--out", "output", type=_PATH, help="File: .csv, .json or .parquet.")
@_layer(help="Layer to compare images by. [default: embedding, or the only layer]")
@_several("--kind", "kinds", type=click.Choice(_KINDS), help="What to look for; may be repeated. [default: all]")
@click.option("--images", help="Location of the images, if they were moved; the largest of near-duplicates is kept.")
@json_flag
def findings(out: Path | str, as_json: bool, **settings: Any) -> None:
    """List what is odd about the images of the data set OUT: failed images, copies, near-duplicates, outliers, and
    labels that are probably wrong.

    \b
    layertap findings outputs/photos
    layertap findings outputs/photos -o findings.csv
    layertap findings outputs/photos --kind "suspect label" -o suspects.csv
    """
    from pipelines.data_sets import findings as job

    table = job.run_findings(out, **settings, say=lambda text: print_line(text, err=True))
    print_result(table, as_json, job.as_json, job.print_findings)
    if settings["output"] and not as_json:
        print_line(f"written: {settings['output']}", err=True)


@command(short_help="Find images that are similar to an image or a text.")
@click.argument("out", type=DATA_SET)
@click.argument("query", metavar="[ROW|PATH|IMAGE]", required=False)
@click.option("--text", help="Text to search for, if the backbone of OUT has a text tower (CLIP, SigLIP).")
@click.option("-k", type=click.IntRange(min=1), default=10, show_default=True, help="Number of images to find.")
@_layer(help="Layer to compare. [default: embedding, or the only layer]")
@click.option("--itself", is_flag=True, help="Include the query row in the results.")
@click.option("-b", "--backbone", help=BACKBONE_HELP)
@click.option("--weights", help="Name or file of the backbone's weights, if the file was moved.")
@click.option("--images", help="Location of the images, if they were moved or are behind a URL; for --out.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("-o", "--out", "output", type=_PATH, help="Draw the results; .png, .svg or .pdf.")
@json_flag
def search(out: Path | str, query: str | None, as_json: bool, **settings: Any) -> None:
    """Find the images of the data set OUT that are nearest to an image or a text, by exact cosine search.

    The query is a row number, the path of an image in the data set, or an image file, whose features are computed with
    the data set's recorded settings; or --text.

    \b
    layertap search outputs/photos 17
    layertap search outputs/photos new.jpg -k 20 -o gallery.png
    layertap search outputs/photos-clip --text "a dog on grass"
    """
    if settings["output"] is not None:
        library("matplotlib", "figures", "--out")
    elif settings["images"] is not None:
        raise InputError("--images is for drawing the results", hint="add --out FILE")
    from pipelines.data_sets import search as job

    results = job.run_search(out, query, **settings)
    print_result(results, as_json, dict, job.print_results)
    if settings["output"] and not as_json:
        print_line(f"written: {settings['output']}", err=True)


@command(short_help="Check a data set for damage.")
@click.argument("out", type=FOLDER)
@click.option("--sample", type=click.IntRange(min=1), help="Also compute this many random rows again, and compare.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the choice of rows.")
@click.option("--images", help="Location of the images, if they were moved or are behind a URL; for --sample.")
@click.option("-b", "--backbone", help=BACKBONE_HELP)
@click.option("--weights", help="Name or file of the backbone's weights, if the file was moved.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("--repair", is_flag=True, help="Set wrong rows to pending, so that `embed` computes them again.")
@json_flag
@click.pass_context
def verify(ctx: click.Context, /, out: Path, as_json: bool, **settings: Any) -> None:
    """Check every hash, receipt and count of the data set OUT; exit with 1 if anything is wrong.

    With --sample, also check that the features belong to these images and these weights.
    """
    unused = [name for name in ("images", "backbone", "weights") if settings[name]]
    if settings["sample"] is None and unused:
        raise InputError(f"--{unused[0]} is for computing rows again", hint="add --sample N")
    from pipelines.data_sets import verify as job

    result = job.check(out, **settings)
    print_result(result, as_json, dict, job.print_check)
    if not result["ok"]:
        ctx.exit(1)


@command(short_help="Say whether features are of this model and these images, or why not.")
@click.argument("features", type=FOLDER)
@click.option(
    "--paths", "--images", "images", metavar="LIST",
    help="Images of the rows, in their order: .csv, .parquet, .txt or a folder. [default: the recorded ones]",
)  # fmt: skip
@click.option("-b", "--backbone", "model", help="Spec of the backbone. [default: of a data set, the recorded one]")
@_layer(help="Layer. [default: embedding, or the only layer]")
@click.option("--sample", type=click.IntRange(min=1), default=32, show_default=True, help="Rows to compute.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the choice of rows.")
@click.option("--weights", help="Name or file of the backbone's weights.")
@click.option("--other-weights", help="Second file of weights, which may be those of the features.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@json_flag
@click.pass_context
def check(ctx: click.Context, /, features: Path, as_json: bool, **settings: Any) -> None:
    """Compute rows of FEATURES again, and say why they differ, if they do; exit with 1 then.

    FEATURES is a data set, or FILE.npy, FILE.h5:NAME or FILE.parquet:COLUMN of another program. The preprocessing,
    precision or order that fits is named, or the answer is that none does.

    \b
    layertap check outputs/photos
    layertap check features.npy --paths list.csv -b torchvision/resnet50
    """
    from dataclasses import asdict

    from extract.extraction.check import check as compare

    result = compare(features, **settings)
    print_result(
        result, as_json, lambda each: {"features": str(features), **asdict(each)}, lambda each, say: say(str(each))
    )
    if not result:
        ctx.exit(1)


@command(short_help="Write files for other tools.")
@click.argument("out", type=DATA_SET)
@click.option("--to", type=click.Choice(_FORMATS), required=True, help="Format.")
@click.option("-o", "--out", "output", type=_PATH, help="Output file or folder. [default: beside OUT]")
@_several("-l", "--layers", metavar="LAYER", help="Layer to export; may be repeated. [default: all]")
@click.option(
    "--thumbnails", "thumbnails_px", type=click.IntRange(8, 2048), metavar="PX",
    help="Add a column `image` of thumbnails of at most PX pixels a side, in Parquet and Hugging Face folders.",
)  # fmt: skip
@click.option("--images", help="Location of the images, if they were moved or are behind a URL; for --thumbnails.")
@click.option("--metric", type=click.Choice(_METRICS), help="Dissimilarity in rdm. [default: correlation]")
@option("--without", model=ExtractionSettings, metavar="FILE")
def export(out: Path | str, **settings: Any) -> None:
    """Write the data set OUT as plain files for other tools: HDF5, NumPy, Parquet, MATLAB or a Hugging Face folder.

    With rdm, write the dissimilarity matrix of the images (RDM) in each layer: by default 1 - Pearson's r of each pair.

    \b
    layertap export outputs/photos --to parquet      # outputs/photos.parquet: pandas, DuckDB, embedding-atlas
    layertap export outputs/photos --to parquet --thumbnails 128
    layertap export outputs/photos --to npy          # outputs/photos-npy/: a file per layer, and rows.csv
    """
    from pipelines.data_sets.export import run_export

    print_line(run_export(out, **settings, say=partial(print_line, err=True)))


@command(short_help="Join data sets into one.")
@click.argument("sources", nargs=-1, required=True, type=FOLDER)
@click.option("-o", "--out", type=_PATH, required=True, help="Folder of the new data set.")
@option("--shard-rows", model=ExtractionSettings)
@option("--compress", model=ExtractionSettings)
def merge(sources: tuple[Path, ...], out: Path, shard_rows: int | None, compress: str | None) -> None:
    """Copy the rows of complete data sets with the same fingerprint into a new data set, sorted by path.

    To resume an interrupted merge, run the same command again.
    """
    from extract.store.format.dataset import DataSet
    from extract.store.merge import merge as merge_into
    from pipelines.terminal.progress import Progress

    with Progress(sum(DataSet.open(source).n_rows for source in sources), "rows") as progress:
        merged = merge_into(sources, out, shard_rows=shard_rows, compress=compress, on_rows=progress.advance)
    print_line(f"{out}: {merged.n_rows:,} rows of {len(sources)} data sets, in {merged.n_shards} shards")
