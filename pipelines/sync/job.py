"""Synchronise data sets with their folders, once: `layertap sync CONFIG`."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

import click

from extract.errors import InputError, LayertapError, LockedError, UnknownNameError, first_line
from extract.images.image_list import are_asked
from extract.sync.difference import Report
from extract.sync.passes import Pass
from extract.system.atomic_files import append_line, write_whole
from pipelines.embed.config import FeaturesConfig
from pipelines.sync.config import SyncConfig
from pipelines.terminal.error_output import print_error
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.text_output import counted, print_line

if TYPE_CHECKING:
    from extract.compute.backbone import Backbone
    from extract.extraction.plan import Plan
    from extract.images import Images

__all__ = ["PassReporter", "SyncResult", "as_json", "exit_code", "print_synced", "sync_all"]

_RUNS_KEPT = 1000  # lines of runs.jsonl

# Keys that features do not depend on. A pass with the same others and no new images does not load the backbone.
_OTHER_KEYS = (
    "images", "out", "device", "workers", "batch_size", "min_cosine", "axes", "without", "shard_rows", "compress",
    "sync_s", "strict",
)  # fmt: skip


@dataclass(frozen=True)
class SyncResult:
    """Result of the pass of a data set.

    Attributes:
        config: configuration of the data set.
        report: what the pass did; None: it failed.
        error: why it failed.
    """

    config: SyncConfig
    report: Report | None = None
    error: LayertapError | None = None

    @property
    def exit_code(self) -> int:
        """0 done; 1 failed, unreadable folder or no good row; 2 wrong input; 3 failed rows if `strict`; 4 locked."""
        if self.error is not None:
            wrong = isinstance(self.error, InputError | UnknownNameError)
            return 4 if isinstance(self.error, LockedError) else 2 if wrong else 1
        assert self.report is not None
        if self.report.unreadable or 0 < self.report.rows == self.report.failed:
            return 1
        return 3 if self.config.strict and self.report.failed else 0


def sync_all(
    configs: Sequence[SyncConfig],
    *,
    force: bool = False,
    dry_run: bool = False,
    on_synced: Callable[[SyncResult], None] = lambda synced: None,
    reporter: PassReporter | None = None,
) -> tuple[list[SyncResult], int]:
    """Run a pass of each data set in order; a failure does not stop the other passes.

    Args:
        configs: configurations of the data sets.
        force: see `extract.sync.passes.Pass`.
        dry_run: see `extract.sync.passes.Pass`.
        on_synced: called after each pass.
        reporter: keeps the backbone between calls; pass one only if all data sets have the same backbone.

    Returns:
        the results, and the signal that stopped the passes; 0: none did.
    """
    results = []
    with signals_held() as received:
        for config in configs:
            if received:
                break
            synced = _sync_one(config, force, dry_run, reporter or PassReporter(), lambda: bool(received))
            results.append(synced)
            on_synced(synced)
    return results, received[0] if received else 0


def _sync_one(
    config: SyncConfig, force: bool, dry_run: bool, reporter: PassReporter, stop: Callable[[], bool]
) -> SyncResult:
    started, start = datetime.now(UTC), time.perf_counter()
    with reporter:
        try:
            this_pass = Pass(
                config.root,
                config.folder,
                lambda images, folder: reporter.plan(config, images, folder),
                configuration_of(config),
                config.settings() if are_asked(config) else None,
                without=config.without,
                guards=config.guards,
                force=force,
                dry_run=dry_run,
                on_plan=reporter.on_plan,
                on_rows=reporter.on_rows,
                on_computation=reporter.on_computation,
                stop=stop,
            )
            synced = SyncResult(config, this_pass.run())
        except LayertapError as error:
            synced = SyncResult(config, error=error)
        except Exception as error:  # a bug, here or in a library, must not stop the other passes
            traceback.print_exc()
            synced = SyncResult(config, error=LayertapError(f"{type(error).__name__}: {first_line(error)}"))
    ours = (config.folder / "passes").is_dir()  # otherwise the folder was refused
    if ours and not dry_run and not isinstance(synced.error, LockedError):
        with contextlib.suppress(OSError):  # a folder that cannot be written to has been reported
            add_run(config.folder, _run_entry(synced, started, time.perf_counter() - start))
    return synced


def configuration_of(config: SyncConfig) -> dict[str, Any]:
    """Return the settings that the features depend on, and size and modification time of the files among them."""
    names = FeaturesConfig.model_fields.keys() - _OTHER_KEYS
    settings: dict[str, Any] = {name: getattr(config, name) for name in sorted(names)}
    backbone = config.backbone.partition("/")[2].partition(":")[0]  # a file, if the backbone is code
    for name in filter(None, (config.weights, backbone)):
        with contextlib.suppress(OSError):
            status = Path(name).stat()
            if S_ISREG(status.st_mode):
                settings[f"file {name}"] = [status.st_size, status.st_mtime_ns]
    return settings


def _run_entry(synced: SyncResult, started: datetime, seconds: float) -> dict[str, Any]:
    report = synced.report
    ended = {"started": started.isoformat(timespec="seconds"), "seconds": round(seconds, 3)}
    if report is None:
        return {"event": "failed", **ended, "error": str(synced.error)}
    return {"event": "stopped" if report.stopped else "synced", **asdict(report), **ended}


def add_run(out: Path, run: dict[str, Any]) -> None:
    """Add a line to `runs.jsonl`; when the file exceeds 2,000 lines, keep the last 1,000."""
    path = out / "runs.jsonl"
    append_line(path, json.dumps(run))
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > 2 * _RUNS_KEPT:
        write_whole(path, b"".join(lines[-_RUNS_KEPT:]))


class PassReporter(contextlib.ExitStack):
    """Context manager for each pass: load the backbone when it is needed, and print progress on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._backbone: Backbone | None = None
        self._loaded_settings: dict[str, Any] = {}  # settings with which it was loaded

    def plan(self, config: SyncConfig, images: Images, folder: Path) -> Plan:
        """Return the plan of computing features of images into a folder."""
        from extract.extraction.plan import existing_at, resolve
        from pipelines.terminal.backbone import backbone_of

        settings = configuration_of(config)
        if self._backbone is None or self._loaded_settings != settings:  # or its weights file was replaced
            self._loaded_settings = settings
            self._backbone = backbone_of(config)
        return resolve(config.settings(), images, self._backbone, existing_at(folder))

    def on_plan(self, plan: Plan, count: int) -> None:
        """Print what will be computed, and start a progress bar."""
        from pipelines.terminal.progress import Progress

        print_line(f"computing {counted(count, 'image')} with {plan.backbone.spec} on {plan.backbone.device}", err=True)
        self._progress = self.enter_context(Progress(count))
        self._precision = plan.settings.precision

    def on_rows(self, rows: int, resumed: bool) -> None:
        """Advance the progress bar."""
        self._progress.advance(rows, resumed)

    def on_computation(self, computation: Any) -> None:
        """Print how the features are computed."""
        from pipelines.embed.job import describe_computation

        self._progress.say(describe_computation(computation, self._precision))


def print_synced(synced: SyncResult, echo: Callable[[str], None]) -> None:
    """Print the result of a pass; errors and notes on stderr."""
    out, report = synced.config.folder, synced.report
    if report is None:
        assert synced.error is not None
        config = click.get_current_context().params["config_path"]
        print_error(synced.error.message, synced.error.hint.replace("sync CONFIG", f"sync {shlex.quote(config)}"))
        return
    for note in report.notes:
        print_line(f"note: {out}: {note}", fg="yellow", err=True)
    for path, why in report.unreadable.items():
        print_line(f"{out}: {path} cannot be read ({why}); its rows are kept", fg="red", err=True)
    if report.stopped:
        echo(f"{out}: stopped; what was computed is stored, and the next pass continues")
        return
    counts = {name: getattr(report, name) for name in ("added", "changed", "renamed", "deleted", "failed", "unchanged")}
    text = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    if report.waiting:
        settle = synced.config.settle
        text += f", {report.waiting:,} wait for the next pass: they changed in the last {settle:g} s"
    images = counted(report.computed, "image")
    done = f"at most {images} to be computed" if report.dry_run else f"{images} computed"  # copies are found by hash
    text += f"; {done}" if report.computed else ""
    echo(f"{out}: version {report.version}, {counted(report.rows, 'row')}: {text}, {report.seconds:.1f} s")


def as_json(synced: SyncResult) -> dict[str, Any]:
    """Return the result of a pass as JSON-compatible data."""
    head = {"images": synced.config.images, "out": str(synced.config.folder), "exit_code": synced.exit_code}
    if synced.report is None:
        return {**head, "error": str(synced.error)}
    return {**head, **asdict(synced.report)}


def exit_code(results: Sequence[SyncResult], signal: int) -> int:
    """Return the exit code of all passes: that of the signal, or else of the worst result."""
    if signal:
        return 128 + signal
    codes = {result.exit_code for result in results}
    return next((code for code in (1, 2, 4, 3) if code in codes), 0)
