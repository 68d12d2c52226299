"""Features of an image folder: `layertap embed IMAGES -b BACKBONE -l LAYER[:POOLING] ... -o OUT`."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from extract.backbones import load_backbone
from extract.extraction import Plan, Summary, extract, plan
from pipelines.config import EmbedConfig
from pipelines.progress import Progress

__all__ = ["embed", "print_summary", "summary_as_json"]

_SHOWN = 10  # failures named on the terminal; all of them are in the file


def embed(config: EmbedConfig) -> tuple[Plan, Summary, int]:
    """Run the job; what is going on is told on stderr.

    Returns:
        What was planned, what was done, and the number of the signal that ended it early (0: none).
    """
    backbone = load_backbone(config.backbone, weights=config.weights, device=config.device, seed=config.seed)
    if backbone.weights.random:
        text = f"WARNING: {backbone.weights.source} weights: these features mean nothing; use them for tests only"
        click.secho(text, fg="red", bold=True, err=True)
    planned = plan(
        config.images,
        out=config.folder,
        backbone=backbone,
        layers=config.layers,
        batch_size=config.batch_size,
        workers=config.workers,
        dtype=config.dtype,
        limit=config.limit,
        shard_rows=config.shard_rows,
    )
    _tell(planned)
    with Progress(len(planned.images)) as progress, _signals_held() as received:

        def on_rows(rows: int, found: bool) -> None:
            if found and rows < len(planned.images):
                click.echo(f"resuming: {rows:,} of {len(planned.images):,} rows done", err=True)
            progress.advance(rows, found)

        summary = extract(planned, on_rows=on_rows, stop=lambda: bool(received))
    return planned, summary, received[0] if summary.stopped else 0


def _tell(planned: Plan) -> None:
    """What was resolved, before the work begins."""
    images, backbone, choice = planned.images, planned.backbone, planned.choice
    splits = sorted(set(images.splits) - {""})
    lines = [
        f"images    {len(images):,} in {images.root}"
        + (f", {len(images.classes)} classes" if images.classes else "")
        + (f", splits {' '.join(splits)}" if splits else ""),
        f"backbone  {backbone.spec}, weights {backbone.weights.source}, on {backbone.device}",
        f"input     {backbone.preprocessing}",
    ]
    if images.left_out:
        kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in images.left_out.most_common(5))
        lines.insert(1, f"          {images.left_out.total():,} other files left out ({kinds})")
    for i, feature in enumerate(choice.features):
        size = "x".join(map(str, feature.activation_shape))
        by = ", chosen by auto" if feature.automatic and feature.pooling != "none" else ""
        source = f"{feature.site} {size}, {feature.pooling}{by}"
        shape = "(" + ", ".join(map(str, feature.shape)) + ")"
        lines.append(f"{'features' if i == 0 else '':10}{feature.name} {shape} from {source}")
    if choice.never_run:
        lines.append(f"          left out, for they never run: {', '.join(choice.never_run)}")
    click.echo("\n".join(lines), err=True)


@contextlib.contextmanager
def _signals_held() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted in the list, so that the batch in flight is finished; a second one is not held."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[number])
        click.echo("\nfinishing the batch in flight ...", err=True)

    before: dict[int, Any] = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_summary(planned: Plan, summary: Summary, echo: Callable[[str], None]) -> None:
    """The end of a run, for people."""
    out = planned.dataset.out
    if summary.stopped:
        done = summary.found + summary.computed
        echo(f"stopped: {done:,} of {summary.n_rows:,} rows are stored in {out}. To go on:\n  {_command()}")
        return
    if not summary.computed:
        echo(f"{out} is complete: all {summary.n_rows:,} rows were done before; nothing to do")
        return
    echo(f"{out}: {summary.n_rows:,} rows" + (f", {summary.found:,} of them found done" if summary.found else ""))
    for feature in planned.dataset.features:
        shape = ", ".join(map(str, (summary.n_rows, *feature.shape)))
        echo(f"  {feature.name}  ({shape}) {feature.dtype}")
    total = sum(summary.stages.values()) or 1
    shares = ", ".join(f"{stage} {seconds / total:.0%}" for stage, seconds in summary.stages.items())
    echo(f"{summary.seconds:.1f} s, {summary.images_per_s:.1f} images/s; time went to {shares}")
    if summary.failures:
        counts = ", ".join(f"{count:,} {status}" for status, count in summary.status.items() if status != "ok")
        echo(f"{len(summary.failures):,} rows without features ({counts}):")
        for path, status, reason in summary.failures[:_SHOWN]:
            echo(f"  {printable(path)}: {status}: {reason}")
        if len(summary.failures) > _SHOWN:
            echo(f"  ... and {len(summary.failures) - _SHOWN:,} more: layertap show {shlex.quote(str(out))} --json")


def summary_as_json(planned: Plan, summary: Summary) -> dict[str, Any]:
    """The end of a run, for machines."""
    return {
        "out": str(planned.dataset.out),
        "fingerprint": planned.dataset.fingerprint,
        "rows": summary.n_rows,
        "found_done": summary.found,
        "computed": summary.computed,
        "stopped": summary.stopped,
        "status": dict(summary.status),
        "failures": [{"path": path, "status": status, "reason": why} for path, status, why in summary.failures],
        "features": {f.name: {"shape": [summary.n_rows, *f.shape], "dtype": f.dtype} | f.attributes
                     for f in planned.dataset.features},
        "backbone": planned.backbone.spec,
        "weights": planned.backbone.weights.source,
        "weights_sha256": planned.backbone.weights.sha256,
        "device": str(planned.backbone.device),
        "seconds": round(summary.seconds, 3),
        "images_per_s": round(summary.images_per_s, 2),
        "stages": {stage: round(seconds, 3) for stage, seconds in summary.stages.items()},
    }  # fmt: skip


def printable(path: str) -> str:
    """A path that cannot break the terminal or the line: control characters and undecodable bytes are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in path)


def _command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
