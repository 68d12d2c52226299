"""Commands for data sets that follow folders: `layertap sync`, `schedule`, `watch` and `compact`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from extract.errors import InputError
from pipelines.terminal.options import FOLDER, json_flag, print_json
from pipelines.terminal.text_output import counted, print_line

__all__ = ["compact", "schedule", "sync", "watch"]


@click.command(short_help="Update data sets once, as files have changed.")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--only", multiple=True, metavar="OUT", help="Process only this data set; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@click.option("--force", is_flag=True, help="Proceed even if most images are gone, or the folder is another one.")
@json_flag
@click.pass_context
def sync(ctx: click.Context, /, config: Path, only: tuple[str, ...], dry_run: bool, force: bool, as_json: bool) -> None:
    """Synchronise data sets with folders, as configured in the file CONFIG.

    New and changed files are computed; renamed and touched files are not. Rows of deleted files are removed. If a
    large part of the files is gone, nothing is changed, since the disk may be unmounted. Readers see the data set as it
    was before or after a pass, never in between.

    \b
    layertap sync configs/nightly.yaml
    layertap sync configs/nightly.yaml --dry-run
    """
    from pipelines.sync.config import chosen, load_sync_file
    from pipelines.sync.job import as_json as synced_as_json
    from pipelines.sync.job import exit_code, print_synced, sync_all

    data_sets = chosen(load_sync_file(config), only)
    if force and len(data_sets) > 1:
        raise InputError("--force works on one data set only", hint="name it with --only OUT")

    def say(synced: Any) -> None:  # errors always go to stderr
        print_synced(synced, (lambda line: None) if as_json else print_line)

    results, signal_number = sync_all(data_sets, force=force, dry_run=dry_run, on_synced=say)
    if as_json:
        print_json([synced_as_json(result) for result in results])
    ctx.exit(exit_code(results, signal_number))


@click.command(short_help="Update data sets at fixed times.")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--print",
    "system",
    type=click.Choice(["systemd", "cron"]),
    help="Only print the schedule, in the format of another scheduler.",
)
def schedule(config: Path, system: str | None) -> None:
    """Run `layertap sync CONFIG` at the times under `schedule` in CONFIG, until it is stopped.

    A pass that was due while no scheduler ran starts at once. SIGTERM and Ctrl-C stop after the batch in flight.

    \b
    layertap schedule configs/nightly.yaml
    layertap schedule configs/nightly.yaml --print systemd
    """
    if system is not None:
        from pipelines.sync.config import load_sync_file
        from pipelines.sync.systemd import as_cron, as_systemd

        text = (as_systemd if system == "systemd" else as_cron)(load_sync_file(config))
        click.echo(text)  # noqa: TID251  a file of the system, which is used as it is
        return
    from pipelines.sync.schedule import run_until_stopped

    run_until_stopped(config)


@click.command(short_help="Update data sets as soon as files change.")
@click.argument("config", type=click.Path(path_type=Path))
@click.pass_context
def watch(ctx: click.Context, /, config: Path) -> None:
    """Synchronise data sets with folders as soon as files change, until it is stopped.

    Like `layertap sync CONFIG`, but the backbone stays in memory. Folders whose changes the kernel does not report,
    such as network file systems, are scanned every few seconds.
    """
    from pipelines.sync.config import load_sync_file
    from pipelines.sync.job import print_synced
    from pipelines.sync.watch import watch as follow

    signal_number = follow(load_sync_file(config).data_sets, lambda synced: print_synced(synced, print_line))
    ctx.exit(128 + signal_number if signal_number else 0)


@click.command(short_help="Remove unused rows from a data set.")
@click.argument("out", type=FOLDER)
@click.option(
    "--max-dead",
    type=click.FloatRange(0, 1),
    default=0.2,
    show_default=True,
    help="Compact only passes with a larger fraction of unused rows.",
)
def compact(out: Path, max_dead: float) -> None:
    """Remove features of deleted and replaced images from the data set OUT of `layertap sync`.

    Readers that are open continue to read the old files.
    """
    from extract.sync.compaction import compact as compact_out
    from extract.system.atomic_files import bytes_below

    before = bytes_below(out / "passes")
    done = compact_out(out, max_dead)
    freed = (before - bytes_below(out / "passes")) / 1e6
    if not done.passes:
        print_line(f"{out}: nothing to compact; no pass has more than {max_dead:.0%} of unused rows (--max-dead)")
        return
    print_line(f"{out}: {counted(done.removed, 'row')} removed, {done.rows:,} copied; {freed:,.1f} MB smaller")
