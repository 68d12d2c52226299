"""The command line: `layertap COMMAND`.

Exit codes: 0 done, 1 failed (or every row did), 2 wrong usage or input, 3 done but rows failed and `--strict`, 4
another run holds the lock, 130 and 143 interrupted.
"""

from __future__ import annotations

import errno
import io
import json
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import click

from extract.errors import InputError, LayertapError, LockedError, UnknownNameError
from pipelines.cli_looking import ablate, draw, inspect
from pipelines.cli_options import given, option
from pipelines.config import EmbedConfig, ProbeConfig, load_config

__all__ = ["main"]

# torch, timm and h5py are imported inside the commands: `layertap --help` does not wait for them.


_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


class _TerminatedError(BaseException):
    """SIGTERM, so that what is half made is removed, as after Ctrl-C."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError


class _Commands(click.Group):
    """Turns the errors layertap raises on purpose into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")  # names of files need not be text
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminate)
        try:
            return super().invoke(ctx)
        except LayertapError as error:
            click.secho(f"error: {error}", fg="red", err=True)
            ctx.exit(
                4 if isinstance(error, LockedError) else 2 if isinstance(error, InputError | UnknownNameError) else 1
            )
        except OSError as error:
            if error.errno not in _OF_THE_DISK:
                raise
            click.secho(f"error: {error.filename or 'writing'}: {error.strerror}", fg="red", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        except _TerminatedError:
            click.echo("terminated", err=True)
            ctx.exit(143)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="layertap")
def main() -> None:
    """Features of images, under any backbone, on disk: right, in order, crash-proof."""


for _command in (inspect, draw, ablate):
    main.add_command(_command)


@main.command()
@click.argument("images", required=False)
@option("-b", "--backbone")
@option("-l", "--layers", multiple=True, metavar="LAYER[:POOLING]")
@option("-o", "--out")
@option("--weights")
@option("--allow-missing-head/--no-allow-missing-head")
@option("--size", metavar="PX|HxW")
@option("--crop", metavar="PX|HxW")
@option("--interpolation")
@option("--mean", metavar="R,G,B")
@option("--std", metavar="R,G,B")
@option("--batch-size", type=int)
@option("--workers", type=int)
@option("--decode", type=click.Choice(["exact", "fast"]))
@option("--device")
@option("--dtype", type=click.Choice(["float32", "float16"]))
@option("--precision", type=click.Choice(["float32", "bfloat16", "float16"]))
@option("--compile", type=click.Choice(["auto", "on", "off", "inductor", "openvino"]))
@option("--fast/--no-fast")
@option("--min-cosine", type=float)
@option("--limit", type=int)
@option("--max-pixels", type=int)
@option("--seed", type=int)
@option("--shard-rows", type=int)
@option("--compress", type=click.Choice(["gzip", "lzf", "blosc2"]))
@option("--sync-s", type=float)
@option("--retry-failed/--no-retry-failed")
@option("--strict/--no-strict")
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML file with these words as keys; flags win over it."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def embed(ctx: click.Context, /, config: Path | None, as_json: bool, **flags: Any) -> None:
    """Compute features of IMAGES, and store them in HDF5.

    IMAGES is a folder, a .csv or .parquet list with a column `path`, a .tar or .zip archive (or a pattern of several:
    'shards-{000..099}.tar'), an .npy array or FILE.h5:NAME of uint8 pictures, or a URL (s3://, gs://, https://).

    Run again, it goes on where it was, or says that all is done. A file that cannot be decoded is a row with a status.

    \b
    layertap embed photos                                     # embedding of the bundled backbone
    layertap embed photos -b torchvision/resnet50 -l layer3 -l layer4:max_map -o outputs/photos-r50
    """
    from pipelines.embed import embed, print_summary, summary_as_json

    resolved = load_config(EmbedConfig, config, given(flags))
    outcome = embed(resolved)
    if as_json:
        click.echo(json.dumps(summary_as_json(outcome), indent=1))
    else:
        print_summary(outcome, click.echo)
    if outcome.signal:
        ctx.exit(128 + outcome.signal)
    if len(outcome.failures) == outcome.summary.n_rows:
        raise LayertapError(f"none of the {outcome.summary.n_rows:,} images has features; the reasons are above")
    if resolved.strict and outcome.failures:
        ctx.exit(3)


@main.command()
@click.argument("images", required=False)
@option("-b", "--backbone")
@option("-l", "--layers", multiple=True, metavar="LAYER[:POOLING]")
@option("--weights")
@option("--device")
@click.option("--thorough", is_flag=True, help="Also ways that are seldom the fastest and take long to compile.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def bench(images: str | None, thorough: bool, as_json: bool, **flags: Any) -> None:
    """Measure what this machine can do for a backbone, and what the pipeline makes of it.

    Decoding on one core, the forward in each way there is, writing; then the whole pipeline against the bound that they
    give together. Without IMAGES, pictures of noise are taken. Recommends flags for `layertap embed`. Takes minutes.

    \b
    layertap bench photos -b torchvision/resnet50
    """
    from pipelines.bench import as_json as bench_as_json
    from pipelines.bench import bench as measure
    from pipelines.bench import print_bench

    found = measure(
        images, thorough=thorough, say=lambda text: click.echo(f"measuring {text} ...", err=True), **given(flags)
    )
    if as_json:
        click.echo(json.dumps(bench_as_json(found), indent=1))
    else:
        print_bench(found, click.echo)


@main.command()
@click.argument("backbone")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--ops", is_flag=True, help="Functions without a module too: layer1.0/add, /flatten.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def layers(backbone: str, patterns: tuple[str, ...], ops: bool, as_json: bool) -> None:
    """List the layers of BACKBONE, or those that match a PATTERN, with what they give for one image.

    A note tells where a hook cannot be trusted, or not simply.

    \b
    layertap layers torchvision/resnet50 'layer?' 'layer4.*'
    layertap layers timm/vit_small_patch16_224 'blocks.*.attn' --ops
    """
    from pipelines.layers import as_json as table_as_json
    from pipelines.layers import list_layers, print_table

    rows = list_layers(backbone, patterns, operations=ops)
    if as_json:
        click.echo(json.dumps(table_as_json(rows), indent=1))
    else:
        print_table(rows, click.echo)


@main.command()
@click.argument("pattern", required=False, metavar="[GLOB]")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def backbones(pattern: str | None, as_json: bool) -> None:
    """List the backbones that can be named, or those that match GLOB.

    Their weights are not loaded. The licence is that of the default weights, where their source states it.

    \b
    layertap backbones                        # the sources
    layertap backbones 'timm/vit_small*'
    """
    from pipelines.backbones import as_json as entries_as_json
    from pipelines.backbones import entries, print_entries, print_sources, sources

    if pattern is None:
        if as_json:
            click.echo(json.dumps(sources(), indent=1))
        else:
            print_sources(click.echo)
    elif as_json:
        click.echo(json.dumps(entries_as_json(entries(pattern)), indent=1))
    else:
        print_entries(entries(pattern), click.echo)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--only", multiple=True, metavar="OUT", help="Only this data set of several; repeats.")
@click.option("--dry-run", is_flag=True, help="Only tell what there is to do.")
@click.option("--force", is_flag=True, help="Go on though most images are gone, or the folder is another one.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@click.pass_context
def sync(ctx: click.Context, /, config: Path, only: tuple[str, ...], dry_run: bool, force: bool, as_json: bool) -> None:
    """Bring data sets into step with folders, as the file CONFIG says.

    What is new or has changed is computed; renamed and touched files are not. A file that is gone takes its row with
    it. If a large part of them is gone, nothing is done: it may be the disk that is gone. Readers see the data set as
    it was, or as it is, and nothing in between.

    
    layertap sync configs/nightly.yaml
    layertap sync configs/nightly.yaml --dry-run
    """
    from pipelines.sync import as_json as synced_as_json
    from pipelines.sync import exit_code, print_synced, sync_all
    from pipelines.sync_config import chosen, load_sync_file

    data_sets = chosen(load_sync_file(config), only)
    if force and len(data_sets) > 1:
        raise InputError("--force is for one data set: name it by --only OUT")

    def tell(synced: Any) -> None:
        print_synced(synced, (lambda line: None) if as_json else click.echo)

    found, signal_number = sync_all(data_sets, force=force, dry_run=dry_run, on_synced=tell)
    if as_json:
        click.echo(json.dumps([synced_as_json(one) for one in found], indent=1))
    ctx.exit(exit_code(found, signal_number))


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--print",
    "system",
    type=click.Choice(["systemd", "cron"]),
    help="Only print it, for a scheduler that you have.",
)
@click.pass_context
def schedule(ctx: click.Context, /, config: Path, system: str | None) -> None:
    """Run `layertap sync CONFIG` at the times that CONFIG says under `schedule`, until it is stopped.

    A pass that was due while nothing ran begins at once. SIGTERM and Ctrl-C finish the batch in flight; SIGHUP reads
    CONFIG again.

    \b
    layertap schedule configs/nightly.yaml
    layertap schedule configs/nightly.yaml --print systemd
    """
    if system is not None:
        from pipelines.sync_config import load_sync_file
        from pipelines.units import as_cron, as_systemd

        click.echo((as_systemd if system == "systemd" else as_cron)(load_sync_file(config)))
        return
    from pipelines.schedule import Scheduler

    ctx.exit(Scheduler(config).run_until_stopped())


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.pass_context
def watch(ctx: click.Context, /, config: Path) -> None:
    """Bring data sets into step with folders as soon as something changes there, until it is stopped.

    As `layertap sync CONFIG`, but the backbone stays in memory. Folders on network file systems are polled.
    """
    from pipelines.sync import print_synced
    from pipelines.sync_config import load_sync_file
    from pipelines.watch import watch as follow

    signal_number = follow(load_sync_file(config).data_sets, lambda synced: print_synced(synced, click.echo))
    ctx.exit(128 + signal_number if signal_number else 0)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status(out: Path, as_json: bool) -> None:
    """Tell how the data set OUT of `layertap sync` is doing: runs, rows, failing images, disk, drift."""
    from pipelines.status import describe_status, print_status

    content = describe_status(out)
    if as_json:
        click.echo(json.dumps(content, indent=1))
    else:
        print_status(content, click.echo)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--max-dead",
    type=click.FloatRange(0, 1),
    default=0.2,
    show_default=True,
    help="Only passes of which a larger part of the rows is not needed.",
)
def compact(out: Path, max_dead: float) -> None:
    """Remove features of images that are gone or replaced from the data set OUT of `layertap sync`.

    Who has it open goes on reading what there was.
    """
    from extract.store.files import bytes_below
    from extract.sync.compaction import compact as compact_out

    before = bytes_below(out / "passes")
    done = compact_out(out, max_dead)
    freed = (before - bytes_below(out / "passes")) / 1e6
    click.echo(f"{out}: {done.removed:,} rows removed, {done.rows:,} copied; {freed:,.1f} MB smaller")


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(out: Path, as_json: bool) -> None:
    """Tell what is inside the data set OUT."""
    from pipelines.show import describe, print_description

    content = describe(out)
    if as_json:
        click.echo(json.dumps(content, indent=1))
    else:
        print_description(content, click.echo)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
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
    from pipelines.report import run_report

    written = run_report(out, other, say=lambda text: click.echo(text, err=True), **settings)
    click.echo(f"{written}, {written.stat().st_size / 1e6:.1f} MB; open it in a browser")


_of_probe = partial(option, model=ProbeConfig)


@main.command()
@click.argument("out", nargs=-1, metavar="OUT...")
@_of_probe("-p", "--protocol", type=click.Choice(list(get_args(ProbeConfig.model_fields["protocol"].annotation))))
@_of_probe("-l", "--layers", multiple=True, metavar="LAYER")
@_of_probe("--labels", metavar="FILE[:COLUMN]")
@_of_probe("--multilabel/--no-multilabel")
@_of_probe("--test-fraction", type=float)
@_of_probe("--drop-leaks/--keep-leaks")
@_of_probe("--scaling", type=click.Choice(["none", "l2", "standardise"]))
@_of_probe("--class-weight", type=click.Choice(["balanced"]))
@_of_probe("--seed", type=int)
@_of_probe("--similarity/--no-similarity")
@_of_probe("-o", "--results", metavar="FOLDER")
@_of_probe("--save", metavar="FILE.safetensors")
@_of_probe("--device")
@_of_probe("--max-memory-mb", type=int)
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML file with these words as keys; flags win over it."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def probe(config: Path | None, as_json: bool, **flags: Any) -> None:
    """Tell how good the features of the data sets OUT are, layer by layer, by a protocol of the literature.

    Strengths are chosen on validation images; test images are predicted by what was chosen without them. Writes
    results.json, results.csv, predictions.csv and pictures.

    \b
    layertap probe outputs/photos                                # every layer that is stored
    layertap probe outputs/photos -p knn -l 'blocks.*' -l blocks.5+blocks.6
    layertap probe outputs/photos -p ridge --labels ages.csv:age
    layertap probe outputs/photos -l embedding --save probe.safetensors
    """
    from pipelines.probe_report import as_json as outcome_as_json
    from pipelines.probe_report import print_outcome, probe_and_write

    resolved = load_config(ProbeConfig, config, given(flags))
    outcome, files = probe_and_write(resolved, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(outcome_as_json(outcome), indent=1))
        return
    print_outcome(outcome, click.echo)
    click.echo("written: " + ", ".join(map(str, files)))


@main.command()
@click.argument("probe", type=click.Path(path_type=Path))
@click.argument("images", metavar="IMAGES|OUT")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="CSV file to write.")
@click.option("-b", "--backbone", help="Its spec: to be given where it is code (python/, hub/), which will be run.")
@click.option("--weights", help="Name or file of the backbone's weights, if the file was moved.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
def predict(probe: Path, images: str, output: Path, **settings: Any) -> None:
    """Predict classes of images with a PROBE that `layertap probe --save` has kept.

    The features of IMAGES are computed as those were that the probe was fitted on; those of a data set OUT must have
    been.

    \b
    layertap predict probe.safetensors new-photos -o predictions.csv
    """
    from pipelines.predict import run_predict

    click.echo(run_predict(probe, images, output, **settings))


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("query", metavar="ROW|PATH|IMAGE")
@click.option("-k", type=click.IntRange(min=1), default=10, show_default=True, help="Images to find.")
@click.option("-l", "--layer", help="By its features. [default: embedding, or the only one]")
@click.option("--itself", is_flag=True, help="A row of the data set may find itself, too.")
@click.option("-b", "--backbone", help="Its spec: to be given where it is code (python/, hub/), which will be run.")
@click.option("--weights", help="Name or file of the backbone's weights, if the file was moved.")
@click.option("--images", help="Where the images lie, if they were moved; for the picture.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Draw the images found: a .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def search(out: Path, query: str, as_json: bool, **settings: Any) -> None:
    """Find the images of the data set OUT that are nearest to one, by cosine, exactly.

    What is searched for is the number of a row, the path of an image in the data set, or else an image file, whose
    features are computed as those of the data set were.

    \b
    layertap search outputs/photos 17
    layertap search outputs/photos new.jpg -k 20 -o gallery.png
    """
    from pipelines.search import as_json as found_as_json
    from pipelines.search import print_found, run_search

    found = run_search(out, query, **settings)
    if as_json:
        click.echo(json.dumps(found_as_json(found), indent=1))
    else:
        print_found(found, click.echo)
        if settings["output"]:
            click.echo(f"drawn: {settings['output']}")


@main.command()
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Tell how the data sets A and B differ: what their numbers depend on, and the features of images in both.

    Images are the same if their bytes are, whatever they are called.
    """
    from extract.store.comparison import compare
    from pipelines.diff import as_json as diff_as_json
    from pipelines.diff import print_diff

    found = compare(first, second)
    if as_json:
        click.echo(json.dumps(diff_as_json(found), indent=1))
    else:
        print_diff(found, first, second, click.echo)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--sample", type=click.IntRange(min=1), help="Also compute so many random rows again, and compare.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the choice of those rows.")
@click.option("--images", help="Where the images lie, if they were moved.")
@click.option("--weights", help="Name or file of the weights, if the file was moved.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option(
    "--repair", "mend", is_flag=True, help="Make rows that are wrong pending, so that `embed` fills them again."
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_context
def verify(ctx: click.Context, /, out: Path, as_json: bool, **settings: Any) -> None:
    """Check every hash, receipt and count of the data set OUT; exit with 1 if anything is wrong.

    With --sample, also whether the features are really of these images, with these weights.
    """
    from pipelines.verify import as_json as check_as_json
    from pipelines.verify import check, print_check

    result = check(out, **settings)
    if as_json:
        click.echo(json.dumps(check_as_json(result), indent=1))
    else:
        print_check(result, click.echo)
    if result.faults:
        ctx.exit(1)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["h5", "npy", "parquet", "mat"]), required=True, help="What to write.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File, or folder of npy. [default: beside OUT]")
@click.option("-l", "--layers", multiple=True, metavar="LAYER", help="Only these; repeats. [default: all]")
def export(out: Path, to: str, output: Path | None, layers: tuple[str, ...]) -> None:
    """Write the data set OUT as plain files for other tools: HDF5, NumPy, Parquet or MATLAB.

    \b
    layertap export outputs/photos --to parquet      # outputs/photos.parquet: pandas, DuckDB, embedding-atlas
    layertap export outputs/photos --to npy          # outputs/photos-npy/: a file for each layer, and rows.csv
    """
    from pipelines.export import run_export

    click.echo(run_export(out, to, output, layers))


@main.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder of the new data set.")
@option("--shard-rows", type=int)
@option("--compress", type=click.Choice(["gzip", "lzf", "blosc2"]))
def merge(sources: tuple[Path, ...], out: Path, shard_rows: int | None, compress: str | None) -> None:
    """Copy the rows of complete data sets of one fingerprint into a new one, sorted by path.

    Run again, it goes on where it was.
    """
    from pipelines.merge import run_merge

    click.echo(run_merge(sources, out, shard_rows, compress))


@main.command()
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("outputs/demo"), show_default=True)
@click.pass_context
def demo(ctx: click.Context, out: Path) -> None:
    """Run `embed`, `probe` and `report` on 1,797 scans of handwritten digits, offline, with real weights.

    A minute on 2 cores.
    """
    from pipelines.demo import READING, demo_config, demo_probe, demo_report, write_digits
    from pipelines.embed import embed, print_summary
    from pipelines.probe_report import print_outcome, probe_and_write

    config = demo_config(out)
    click.echo(f"{write_digits(Path(config.images)):,} digits in {config.images}", err=True)
    outcome = embed(config)
    print_summary(outcome, click.echo)
    if outcome.signal:
        ctx.exit(128 + outcome.signal)
    found, files = probe_and_write(demo_probe(out), lambda text: click.echo(text, err=True))
    print_outcome(found, click.echo)
    click.echo("pictures: " + ", ".join(str(file) for file in files if file.suffix == ".png"))
    click.echo(f"a page of it all, to be opened in a browser: {demo_report(out)}")
    click.echo("To read it:\n\n" + READING.format(out=config.folder))


if __name__ == "__main__":
    main()
