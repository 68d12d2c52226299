"""Compute features of images: `layertap embed IMAGES -b BACKBONE -l LAYER[:POOLING]... -o OUT`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from extract import defaults
from extract.compute.backbone import Backbone
from extract.compute.backends import sharing_graphs
from extract.errors import DisagreementError
from extract.extraction.pipeline import Summary
from extract.extraction.plan import Plan, existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.tuning import fastest
from extract.extraction.validation import Computation
from extract.images import Images
from extract.store.reader import FeatureReader
from pipelines.embed.config import EmbedConfig, listed_images
from pipelines.terminal.backbone import backbone_of
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import command_line, counted, print_failures, print_line, print_remedy, printable

__all__ = ["EmbedResult", "bottleneck", "describe_computation", "embed", "plan_of", "print_summary", "summary_as_json"]

_COUNTED = 100_000  # images whose classes are counted before a run: their labels are held in memory
_WAITING_SHARE = 0.2  # of the time: a forward that waits longer is limited by what it waits for
_BOTTLENECK_MIN_S = 10.0  # in shorter runs, starting takes most of the time, and no bottleneck is printed

# Stage that limits the rate -> what would make the run faster.
_ADVICE = {
    "images": "more cores, --workers up to their number, or --decode fast",
    "forward": "--fast, or a faster device",
    "write": "a faster disk, pooled layers, or --dtype float16",
}
# After --fast, which has tried the other options.
_ADVICE_WHEN_TUNED = _ADVICE | {"images": "more cores, and --workers up to their number", "forward": "a faster device"}


@dataclass(frozen=True)
class EmbedResult:
    """Result of a run.

    Attributes:
        plan: the resolved plan.
        summary: what the run did.
        failures: (row, path, status, reason) of all rows without good features; empty if the run was stopped.
        compression: feature -> (filter, compression ratio) of each compressed feature.
        signal: signal that stopped the run; 0: none.
        tuned: whether `--fast` chose the options.
    """

    plan: Plan
    summary: Summary
    failures: list[tuple[int, str, str, str]]
    compression: dict[str, tuple[str, float]]
    signal: int
    tuned: bool = False


def embed(config: EmbedConfig, images: Images | None = None) -> EmbedResult:
    """Run the job on images that have been listed, or are listed first, and print progress on stderr."""
    images = listed_images(config) if images is None else images
    plan = plan_of(config, backbone_of(config), images)
    if not config.fast:
        return _run(config, plan)
    with sharing_graphs() as graphs:  # the run compiles what was tried
        options = _fastest(config, plan)
        while True:
            try:
                return _run(config, plan.computed_otherwise(**options.pop(0)), graphs.clear)
            except DisagreementError as error:
                if not options:
                    raise
                print_line(f"rejected: {error.reason}. Trying the next fastest:", fg="yellow", err=True)


def plan_of(config: EmbedConfig, backbone: Backbone, images: Images) -> Plan:
    """Return the plan of a job for its loaded backbone."""
    return resolve(config.settings(), images, backbone, existing_at(config.place, add_layers=config.add_layers), _say)


def _run(config: EmbedConfig, plan: Plan, on_start: Callable[[], None] = lambda: None) -> EmbedResult:
    """Run a plan; `on_start` is called when the first batch agrees with the reference."""
    _print_plan(plan)
    with Progress(len(plan.images)) as progress, signals_held() as received:

        def on_rows(rows: int, resumed: bool) -> None:
            if resumed and rows < len(plan.images):
                print_line(f"resuming: {rows:,} of {len(plan.images):,} rows done", err=True)
            progress.advance(rows, resumed)

        def on_computation(computation: Computation) -> None:
            on_start()
            progress.say(describe_computation(computation, plan.settings.precision))

        summary = extract(
            plan,
            retry_failed=config.retry_failed,
            on_rows=on_rows,
            on_computation=on_computation,
            on_note=lambda note: progress.say(f"note: {printable(note)}"),
            stop=lambda: bool(received),
        )
    if summary.stopped:
        return EmbedResult(plan, summary, [], {}, received[0], config.fast)
    with FeatureReader(config.folder) as reader:
        return EmbedResult(plan, summary, reader.failures, reader.compression, 0, config.fast)


def _say(text: str) -> None:
    print_line(text, err=True)


_SOURCES = {
    "measured": "measured on the first images",
    "short": "this job is too short to measure the options",
    "resumed": "the settings of the stored rows",
    "ordered": "the first of the options of a GPU that agrees with eager float32",
    "whole": "whole numbers are computed in float32, of exact pixels",
}


def _fastest(config: EmbedConfig, plan: Plan) -> list[dict[str, Any]]:
    """Return the options that agree with eager float32, fastest first; settings given by the user are kept."""
    tuned = fastest(
        plan,
        fixed=config.model_fields_set,
        on_measuring=lambda: print_line("measuring which options are fastest ...", err=True),
    )
    print_line(f"fast      {_SOURCES[tuned.source]}", err=True)
    for measurement in tuned.measured:
        rate = f"{measurement.images_per_s:8.1f} images/s" if measurement.images_per_s else "        -         "
        print_line(f"          {measurement.way!s:20} {rate}{measurement.remark}", err=True)
    return tuned.settings


def _print_plan(plan: Plan) -> None:
    """Print the resolved plan before the work starts."""
    images, backbone, choice = plan.images, plan.backbone, plan.choice
    user_set = backbone.asked.get("preprocessing", {})
    lines = [
        f"images    {len(images):,} in {images.root}"
        + (f", {counted(len(images.classes), 'class')}" if images.classes else "")
        + (f", splits {' '.join(images.split_names)}" if images.split_names else ""),
        f"backbone  {backbone.spec}, weights {backbone.weights.source}, on {backbone.device}",
        f"input     {backbone.preprocessing}" + (f" (set by the user: {' '.join(user_set)})" if user_set else ""),
    ]
    if (plan.settings.orientation, plan.settings.icc) != (defaults.ORIENTATION, defaults.ICC):
        lines.append(f"decoder   {plan.dataset.depends_on['decoder']}")
    if plan.settings.limit is not None and len(images) <= _COUNTED:
        n_classes = len(set(images.slice(0, len(images)).labels.tolist()) - {-1})
        if n_classes < len(images.classes):
            note = f"the first {len(images):,} images have {n_classes} of the {len(images.classes):,} classes"
            print_line(f"note: {note}", fg="yellow", err=True)
    for note in images.notes:
        print_line(f"note: {note}", fg="yellow", err=True)
    if plan.existing.layers:
        lines.append(f"adds to   {', '.join(sorted(plan.existing.features))}, stored in {plan.dataset.out}")
    if images.left_out:
        kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in images.left_out.most_common(5))
        lines.insert(1, f"          {images.left_out.total():,} other files left out ({kinds})")
    for i, feature in enumerate(choice.features):
        size = "x".join(map(str, feature.activation_shape))
        chosen_by = ", chosen by auto" if feature.automatic and feature.pooling != "none" else ""
        source = f"{feature.site} {size}, {feature.pooling}{chosen_by}"
        shape = "(" + ", ".join(map(str, feature.shape)) + ")"
        lines.append(f"{'features' if i == 0 else '':10}{feature.name} {shape} from {source}")
    if choice.never_run:
        lines.append(f"          left out, since they never run: {', '.join(choice.never_run)}")
    print_line("\n".join(lines), err=True)


_ENGINES = {"eager": "PyTorch, eager", "inductor": "PyTorch, compiled by inductor", "openvino": "OpenVINO, compiled"}


def describe_computation(computation: Computation, precision: str) -> str:
    """Return how the features are computed, which is known after the first batch."""
    text = f"computed  by {_ENGINES[computation.engine]}, in {precision}"
    if computation.why:
        text += f" ({computation.why})"
    for reference, compared in (
        ("compared with eager float32 on the first batch", computation.agreement),
        ("compared with eager float32 and exact decoding on the first few images", computation.decoding),
        ("as stored, compared with the values", computation.storage),
    ):
        for name, agreement in compared.items():
            text += (
                f"\n          {name}: {reference}, minimum cosine {agreement.min_cosine:.6f}, "
                f"difference at most {agreement.max_deviation:.1e} of the largest value"
            )
    return text


def print_summary(outcome: EmbedResult, echo: Callable[[str], None]) -> None:
    """Print the result of a run."""
    dataset, summary = outcome.plan.dataset, outcome.summary
    if summary.stopped:
        done = summary.found + summary.computed
        echo(
            f"stopped: {done:,} of {summary.n_rows:,} rows are stored in {dataset.out}. To resume:\n  {command_line()}"
        )
        return
    if summary.computed:
        resumed = f", {summary.found:,} of them from earlier runs" if summary.found else ""
        echo(f"{dataset.out}: {counted(summary.n_rows, 'row')}{resumed}")
        for feature in dataset.features:
            shape = ", ".join(map(str, (summary.n_rows, *feature.shape)))
            packed = outcome.compression.get(feature.name)
            ratio = f", {packed[0]} compression ratio {packed[1]:.2f}" if packed else ""
            echo(f"  {feature.name}  ({shape}) {feature.dtype}{ratio}")
        total = sum(summary.stages.values()) or 1
        shares = ", ".join(f"{stage} {seconds / total:.0%}" for stage, seconds in summary.stages.items())
        if summary.images_at_once:
            echo(
                f"memory ran short: only {summary.images_at_once} images fitted into a forward; "
                f"next time, use --batch-size {summary.images_at_once}"
            )
        if summary.duplicates:
            copies = counted(summary.duplicates, "image")
            echo(f"{copies} with the bytes of another: computed once, stored for each row")
        echo(f"{summary.seconds:.1f} s, {summary.images_per_s:.1f} images/s; time went to {shares}")
        if summary.seconds >= _BOTTLENECK_MIN_S:
            stage = bottleneck(summary)
            echo(f"bound by {stage}: {(_ADVICE_WHEN_TUNED if outcome.tuned else _ADVICE)[stage]}")
    else:
        failed = f", {len(outcome.failures):,} of them without features" if outcome.failures else ""
        echo(f"{dataset.out} is complete: all {summary.n_rows:,} rows were done before{failed}; nothing to do")
    print_failures([failure[1:] for failure in outcome.failures], dataset.out, echo)
    print_remedy(outcome.failures, echo)


def bottleneck(summary: Summary) -> str:
    """Return the stage that limits the rate: "images", "forward" or "write".

    Images are decoded and rows are written while the forward computes. So a forward that waits for images, or for the
    previous batch to be written, for more than 20 % of the time is limited by them, whatever its own share: a faster
    forward would only wait longer. Of the other time, the largest share decides; the time to complete and publish a
    shard, beside which nothing is computed, counts for "write".
    """
    stages = summary.stages
    least_s = _WAITING_SHARE * sum(stages.values())
    waits = {"images": stages["images"], "write": summary.write_wait_s}
    longest = max(waits, key=waits.__getitem__)
    return longest if waits[longest] > least_s else max(("forward", "write"), key=stages.__getitem__)


def summary_as_json(outcome: EmbedResult) -> dict[str, Any]:
    """Return the result of a run as JSON-compatible data."""
    dataset, summary, backbone = outcome.plan.dataset, outcome.summary, outcome.plan.backbone
    return {
        "out": str(dataset.out),
        "fingerprint": dataset.fingerprint,
        "rows": summary.n_rows,
        "found_done": summary.found,
        "computed": summary.computed,
        "duplicates": summary.duplicates,
        "stopped": summary.stopped,
        "status": dict(summary.status),
        "failures": [
            {"row": row, "path": path, "status": status, "reason": reason}
            for row, path, status, reason in outcome.failures
        ],
        "features": {
            feature.name: {"shape": [summary.n_rows, *feature.shape], "dtype": feature.dtype, **feature.attributes}
            for feature in dataset.features
        },
        "compression": {
            name: {"filter": filter_name, "ratio": round(ratio, 3)}
            for name, (filter_name, ratio) in outcome.compression.items()
        },
        "backbone": backbone.spec,
        "weights": backbone.weights.source,
        "weights_sha256": backbone.weights.sha256,
        "precision": outcome.plan.settings.precision,
        "computation": asdict(summary.computation) if summary.computation else None,
        "device": str(backbone.device),
        "seconds": round(summary.seconds, 3),
        "images_per_s": round(summary.images_per_s, 2),
        "at_once": summary.images_at_once,
        "bottleneck": bottleneck(summary) if summary.computed else None,
        "stages": {stage: round(seconds, 3) for stage, seconds in summary.stages.items()},
    }
