"""Compare backbones on the same images: `layertap compare IMAGES -b A -b B -o OUT`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.similarity import MOST_COLUMNS, feature_similarity
from extract.backbones.sources import describe
from extract.compute.backbone import Backbone, load_backbone
from extract.credentials import text_without_credentials
from extract.errors import InputError, LayertapError, UnknownNameError
from extract.extraction.several import Member, MemberRun, extract_several
from extract.images import Images, list_images
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.schemas import RUN
from extract.store.reader import FeatureReader
from extract.system.json_files import is_finite_number, read_json_lines
from pipelines.compare.candidates import Candidate, candidates_of
from pipelines.compare.comparison import Compared, Comparison
from pipelines.compare.config import CompareConfig
from pipelines.compare.files import check_out, mark_out, write_results
from pipelines.compare.page import write_page
from pipelines.compare.tasks import add_tasks
from pipelines.probe.labelling import label_rows
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import printable

__all__ = ["compare", "forward_rate"]

_MOST_COMPARED = 60  # features that are compared with each other; of more, the best layer of each backbone


def compare(config: CompareConfig, print_line: Callable[[str], None] | None) -> tuple[Comparison, list[Path]]:
    """Extract the features of all backbones, probe them if there are labels, and write the results.

    Args:
        config: configuration of the run.
        print_line: receives a line about each step; None: nothing is printed, nor is progress shown.

    Returns:
        the comparison, and the written files.

    Raises:
        InputError: there are no images or backbones, no backbone can be used, or OUT holds other files.
        LayertapError: see `extract_several`.
    """
    say = print_line or (lambda text: None)
    candidates = candidates_of(config.backbones, config.table)
    check_out(config.folder)
    images = list_images(config.images, config.limit)
    for note in images.notes:
        say(f"note: {printable(note)}")
    members = [_member(config, candidate) for candidate in candidates]
    with signals_held() as received:
        has_labels, why_no_labels = _has_labels(config, images)
        if why_no_labels:
            say(f"note: {printable(why_no_labels)}")
        mark_out(config.folder)
        say(f"images    {len(images):,} in {printable(images.root)}; {len(members)} backbones")
        runs = {} if received else _extract(config, members, images, received, shown=print_line is not None)
    if received:
        return Comparison([], signal=received[0]), []
    compared = [_compared(config, candidate, runs[candidate.name]) for candidate in candidates]
    comparison = Comparison(compared, n_images=len(images))
    good = [entry for entry in compared if not entry.error]
    if not good:
        reasons = "\n".join(f"{entry.name}: {entry.error}" for entry in compared)
        errors = [run.error for run in runs.values() if run.error is not None]
        is_usage = all(isinstance(error, InputError | UnknownNameError) for error in errors)
        raise (InputError if is_usage else LayertapError)(
            f"no backbone could be used\n{reasons}", hint=errors[0].hint if errors else ""
        )
    comparison.notes += [*images.notes, *filter(None, [why_no_labels])]
    if random := [name for name, run in runs.items() if run.about.get("random")]:
        comparison.notes.append(f"random weights: {', '.join(random)}")
    files = []
    if has_labels:
        files += add_tasks(comparison, config, good, say)
    say("comparing features with each other")
    with contextlib.ExitStack() as stack:
        readers = {entry.name: stack.enter_context(FeatureReader(config.folder / entry.name)) for entry in good}
        _add_similarity(comparison, good, readers)
        for entry in good:
            _add_sizes(entry, DataSet.open(config.folder / entry.name))
    results = write_results(comparison, config.folder)
    return comparison, [write_page(comparison, config.folder, config.images), *results, *files]


def _has_labels(config: CompareConfig, images: Images) -> tuple[bool, str]:
    """Return whether backbones are probed, and, if folders of images are no classes to probe, why not.

    Raises:
        InputError: labels that were named cannot be used.
    """
    are_named = bool(config.tasks) or config.labels is not None
    if not are_named and not images.classes:
        return False, ""
    try:
        _check_labels(config, images)
    except InputError as error:
        if are_named:
            raise
        return False, f"the classes of the images are not used: {error.message}"
    return True, ""


def _check_labels(config: CompareConfig, images: Images) -> None:
    """Check that the labels of all tasks fit the images, and that there are images to train and to test on.

    They are checked before features are computed, which may take hours.

    Raises:
        InputError: see `label_rows`; or there is only one class.
    """
    rows = cast(FeatureReader, _Unread(images, config.images))
    for labels in config.labels_of_tasks.values():
        labelling = label_rows(rows, labels, test_fraction=config.test_fraction, seed=config.seed)
        if len(labelling.classes) < 2:
            where = "the images have" if labels is None else f"{text_without_credentials(labels)} has"
            raise InputError(f"{where} only 1 class; a probe needs at least two")


class _Unread:
    """What `label_rows` reads of a data set, as if its images had features, and all of them different bytes."""

    def __init__(self, images: Images, given: str):
        listed = images.slice(0, len(images))
        self.paths, self.ids, self.labels, self.splits = listed.paths, listed.ids, listed.labels, listed.splits
        self.classes = images.classes
        self.status: NDArray[np.uint8] = np.full(len(images), Status.OK, np.uint8)
        self.provenance: dict[str, Any] = {"configuration": {"images": given}}

    def __len__(self) -> int:
        return len(self.paths)

    def column(self, name: str) -> NDArray[np.uint8]:
        """Return a different hash for each row."""
        numbers = np.arange(2 * len(self), dtype=np.uint64)
        return numbers.view(np.uint8).reshape(-1, 16)


def _member(config: CompareConfig, candidate: Candidate) -> Member:
    def load() -> Backbone:
        try:
            return load_backbone(candidate.spec, weights=candidate.weights, device=config.device, seed=config.seed)
        except LayertapError as error:
            error.hint = error.hint.replace(": --weights FILE", " in the column `weights` of --from FILE.csv")
            raise

    return Member(candidate.name, config.folder / candidate.name, load, config.settings())


def _extract(
    config: CompareConfig, members: Sequence[Member], images: Images, received: list[int], *, shown: bool
) -> dict[str, MemberRun]:
    """Compute the features of all members until a signal is received; return the outcome of each."""
    with Progress(len(images) * len(members), shown=shown) as progress:
        return extract_several(
            images,
            members,
            config.folder,
            on_member=lambda name, rows: progress.say(f"{name}: images {rows.start + 1:,} to {rows.stop:,}"),
            on_failure=lambda name, error: progress.say(f"{name} is left out: {error.message}"),
            on_rows=progress.advance,
            on_note=lambda note: progress.say(f"note: {printable(note)}"),
            stop=lambda: bool(received),
        )


def _compared(config: CompareConfig, candidate: Candidate, run: MemberRun) -> Compared:
    about = run.about
    entry = Compared(candidate.name, candidate.spec, str(about.get("weights", candidate.weights or "")))
    entry.error = "" if run.error is None else run.error.message
    entry.parameters = about.get("parameters")
    if run.error is None and not run.complete:
        entry.error = "its data set is not complete"
    if run.complete:
        entry.error = _why_no_features(config.folder / candidate.name)
        entry.images_per_s = forward_rate(config.folder / candidate.name)
        if candidate.weights is None:
            with contextlib.suppress(LayertapError):  # of a source that states no licence
                entry.licence = describe(candidate.spec).licence
    return entry


def _why_no_features(out: Path) -> str:
    """Return why no row of a data set has features; empty: some have."""
    with FeatureReader(out) as reader:
        if (reader.status == Status.OK).any():
            return ""
        _, _, status, reason = reader.failures[0]
        return f"no image has features: {status}: {reason}"


def _add_similarity(comparison: Comparison, good: Sequence[Compared], readers: dict[str, FeatureReader]) -> None:
    """Compare all features, or the best layers if there are too many, and fill in what follows for each backbone."""
    best = {entry.name: (entry.name, entry.layer or readers[entry.name].layers[-1]) for entry in good}
    features = [(entry.name, layer) for entry in good for layer in readers[entry.name].layers]
    if len(features) > _MOST_COMPARED:
        features = [*best.values()]
        comparison.notes.append(f"{len(features)} best layers are compared with each other, not all layers")
    widths = {feature: math.prod(readers[feature[0]][feature[1]].shape[1:]) for feature in features}
    if wide := [f"{name}: {layer}" for (name, layer), width in widths.items() if width > MOST_COLUMNS]:
        comparison.notes.append(f"too wide to be compared with other features: {', '.join(wide)}; pool them")
        features = [feature for feature in features if widths[feature] <= MOST_COLUMNS]
    rows = np.arange(len(next(iter(readers.values()))))
    for reader in readers.values():
        rows = np.intersect1d(rows, np.flatnonzero(reader.status == Status.OK))
    arrays = [FeatureRows.of(readers[name][layer], rows) for name, layer in features]
    try:
        comparison.similarity = feature_similarity(arrays, k=min(10, max(1, len(rows) - 1)))
    except LayertapError as error:
        comparison.no_similarity_reason = str(error)
        return
    comparison.features = features
    place = {feature: number for number, feature in enumerate(features)}
    for entry in good:
        own = place.get(best[entry.name])
        others = [place[best[other.name]] for other in good if other is not entry and best[other.name] in place]
        if own is not None:
            entry.effective_rank = float(comparison.similarity.effective_rank[own])
        # It says how consistent neighbours are, not how good: over eleven backbones on CIFAR-10, its rank correlation
        # with accuracy was -0.35, that of the effective rank 0.72.
        if own is not None and others:
            entry.alignment = float(comparison.similarity.mutual_knn[own, others].mean())


def _add_sizes(entry: Compared, dataset: DataSet) -> None:
    features = {feature.name: feature for feature in dataset.features}
    entry.layer = entry.layer or dataset.features[-1].name
    entry.width, entry.row_bytes = math.prod(features[entry.layer].shape), features[entry.layer].row_bytes


def forward_rate(out: Path) -> float | None:
    """Return images per second of the forwards of all logged runs, without their preparation; None if not known."""
    rows = seconds = 0.0
    prepared: dict[str, float] = {}  # start of a run -> seconds
    with contextlib.suppress(LayertapError):
        for line in read_json_lines(out / "runs.jsonl", RUN):
            in_advance: Any = (line.get("computation") or {}).get("prepared_in_s")
            if line["event"] == "computing" and is_finite_number(in_advance):
                prepared[str(line["started"])] = float(in_advance)
            stages: Any = line.get("stages")
            if line["event"] == "ended" and isinstance(stages, dict) and is_finite_number(stages.get("forward")):
                rows += float(line.get("rows") or 0)
                seconds += float(stages["forward"]) - prepared.pop(str(line["started"]), 0.0)
    return rows / seconds if rows and seconds > 0 else None
