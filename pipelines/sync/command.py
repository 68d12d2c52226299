"""The command for data sets that follow folders: `layertap sync`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from extract.errors import InputError
from extract.system.urls import is_url
from pipelines.terminal.commands import Option, command, mode_of
from pipelines.terminal.options import json_flag, print_json
from pipelines.terminal.text_output import counted, print_line

__all__ = ["sync"]

_MODES = {"watch": ((), ("only",)), "schedule": (("system",), ()), "compact": (("max_dead",), ("only",))}


@command(short_help="Update data sets as files change: once, at fixed times, or at once.")
@click.argument("config_path", type=click.Path(), metavar="CONFIG")
@click.option("--only", multiple=True, metavar="OUT", help="Process only this data set; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@click.option("--force", is_flag=True, help="Proceed even if most images are gone, or the folder is another one.")
@click.option("--watch", is_flag=True, help="Run a pass as soon as files change, until it is stopped.")
@click.option(
    "--schedule", is_flag=True, help="Run passes at the times under `schedule` in CONFIG, until it is stopped."
)
@click.option(
    "--print", "system", type=click.Choice(["systemd", "cron"]),
    help="With --schedule: only print the schedule, in the format of another scheduler.",
)  # fmt: skip
@click.option(
    "--compact", is_flag=True, help="Only remove features of deleted and replaced images; CONFIG may be a data set."
)
@click.option("--max-dead", type=click.FloatRange(0, 1), default=0.2, show_default=True, cls=Option, rare=True,
              help="With --compact: only from passes with a larger fraction of unused rows.")  # fmt: skip
@json_flag
@click.pass_context
def sync(
    ctx: click.Context, /, config_path: str, only: tuple[str, ...], dry_run: bool, force: bool, watch: bool,
    schedule: bool, system: str | None, compact: bool, max_dead: float, as_json: bool,
) -> None:  # fmt: skip
    """Synchronise data sets with folders, as configured in the file CONFIG.

    New and changed files are computed; renamed and touched files are not. Rows of deleted files are removed. If a
    large part of the files is gone, nothing is changed, since the disk may be unmounted. Readers see the data set as it
    was before or after a pass, never in between.

    With --schedule, a pass that was due while no scheduler ran starts at once. With --watch, the backbone stays in
    memory; folders whose changes the kernel does not report, such as network file systems, are scanned every few
    seconds. SIGTERM and Ctrl-C stop after the batch in flight.

    \b
    layertap sync configs/nightly.yaml
    layertap sync configs/nightly.yaml --dry-run
    layertap sync configs/nightly.yaml --schedule
    layertap sync configs/nightly.yaml --schedule --print systemd
    layertap sync outputs/photos-nightly --compact
    """
    mode = mode_of(ctx, _MODES)
    if is_url(config_path):
        raise InputError(f"{config_path}: `sync` works on this machine, not on a URL", hint="name a file or a folder")
    config = Path(config_path)
    if mode == "compact" and not config.is_file():
        if only:
            raise InputError(f"--only has no effect: {config} is not a config file", hint="leave it out")
        _compact(config, max_dead)
        return
    if mode == "schedule" and system is None:
        from pipelines.sync.schedule import run_until_stopped

        run_until_stopped(config)
        return
    from pipelines.sync.config import chosen, load_sync_file

    file = load_sync_file(config)
    if system is not None:
        from pipelines.sync.systemd import as_cron, as_systemd

        text = (as_systemd if system == "systemd" else as_cron)(file)
        click.echo(text)  # noqa: TID251  a file of the system, which is used as it is
        return
    from pipelines.sync import job

    data_sets = chosen(file, only)
    if mode == "compact":
        for data_set in data_sets:
            _compact(data_set.folder, max_dead)
        return
    if mode == "watch":
        from pipelines.sync.watch import watch as follow

        signal_number = follow(data_sets, lambda synced: job.print_synced(synced, print_line))
        ctx.exit(128 + signal_number if signal_number else 0)
    if force and len(data_sets) > 1:
        raise InputError("--force works on one data set only", hint="name it with --only OUT")

    def say(synced: Any) -> None:  # errors always go to stderr
        job.print_synced(synced, (lambda line: None) if as_json else print_line)

    results, signal_number = job.sync_all(data_sets, force=force, dry_run=dry_run, on_synced=say)
    if as_json:
        print_json([job.as_json(result) for result in results])
    ctx.exit(job.exit_code(results, signal_number))


def _compact(out: Path, max_dead: float) -> None:
    from extract.sync.compaction import compact as compact_out
    from extract.system.atomic_files import bytes_below

    before = bytes_below(out / "passes")
    done = compact_out(out, max_dead)
    freed = (before - bytes_below(out / "passes")) / 1e6
    if not done.passes:
        print_line(f"{out}: nothing to compact; no pass has more than {max_dead:.0%} of unused rows (--max-dead)")
        return
    print_line(f"{out}: {counted(done.removed, 'row')} removed, {done.rows:,} copied; {freed:,.1f} MB smaller")
