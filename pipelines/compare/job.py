"""Compare backbones on the same images: `layertap compare IMAGES -b A -b B -o OUT`."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.metrics import paired_tests, rank_test
from extract.analysis.similarity import MOST_COLUMNS, feature_similarity
from extract.backbones.sources import describe, match_specs
from extract.compute.backbone import Backbone, load_backbone
from extract.credentials import text_without_credentials
from extract.errors import InputError, LayertapError, UnknownNameError
from extract.extraction.several import Member, MemberRun, extract_several
from extract.images import Images, list_images
from extract.images.csv_lists import read_table
from extract.images.part_names import FileNames
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.schemas import RUN
from extract.store.reader import FeatureReader
from extract.system.json_files import is_finite_number, read_json_lines, without_nan
from pipelines.compare.comparison import Compared, Comparison, Disputed, Score, Task
from pipelines.compare.config import CompareConfig
from pipelines.compare.files import check_out, mark_out, write_page, write_results
from pipelines.probe.config import ProbeConfig
from pipelines.probe.job import ProbedFeature, ProbeRun
from pipelines.probe.labelling import Labelling, label_rows
from pipelines.probe.report import probe_and_write
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import printable

__all__ = ["Candidate", "candidates_of", "compare", "forward_rate"]

_MOST_COMPARED = 60  # features that are compared with each other; of more, the best layer of each backbone
_DISPUTED_IN_A_ROW = 6  # images that are shown
_DISPUTED_ROWS = 6  # of them; divided among the tasks
_RESERVED = ("probe",)  # folders of a comparison that are not data sets
_COLUMNS = ("backbone", "weights", "name")
_GLOB = re.compile(r"[*?\[]")


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
        files += _add_tasks(comparison, config, good, say)
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
    listed, count = images.slice(0, len(images)), len(images)
    # What `label_rows` reads of a data set, as if all images had features, and all of them different bytes.
    unread: Any = SimpleNamespace(
        paths=listed.paths,
        files=FileNames(listed.paths),
        ids=listed.ids,
        labels=listed.labels,
        splits=listed.splits,
        classes=images.classes,
        status=np.full(count, Status.OK, np.uint8),
        provenance={"configuration": {"images": config.images}},
        column=lambda name: np.arange(2 * count, dtype=np.uint64).view(np.uint8).reshape(-1, 16),
    )
    for labels in config.labels_of_tasks.values():
        labelling = label_rows(unread, labels, test_fraction=config.test_fraction, seed=config.seed)
        if len(labelling.classes) < 2:
            where = "the images have" if labels is None else f"{text_without_credentials(labels)} has"
            raise InputError(f"{where} only 1 class; a probe needs at least two")


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
        with FeatureReader(config.folder / candidate.name) as reader:
            if not (reader.status == Status.OK).any():
                _, _, status, reason = reader.failures[0]
                entry.error = f"no image has features: {status}: {reason}"
        entry.images_per_s = forward_rate(config.folder / candidate.name)
        if candidate.weights is None:
            with contextlib.suppress(LayertapError):  # of a source that states no licence
                entry.licence = describe(candidate.spec).licence
    return entry


def _add_similarity(comparison: Comparison, good: Sequence[Compared], readers: dict[str, FeatureReader]) -> None:
    """Compare all features, or the best layers if there are too many, and fill in what follows for each backbone."""
    best = {entry.name: (entry.name, entry.layer or readers[entry.name].layers[-1]) for entry in good}
    features = [(entry.name, layer) for entry in good for layer in readers[entry.name].layers]
    if len(features) > _MOST_COMPARED:
        features = [*best.values()]
        comparison.notes.append(f"{len(features)} best layers are compared with each other, not all layers")
    rows = reduce(np.intersect1d, [np.flatnonzero(reader.status == Status.OK) for reader in readers.values()])
    arrays = {(name, layer): FeatureRows.of(readers[name][layer], rows) for name, layer in features}
    if wide := [feature for feature, array in arrays.items() if array.width > MOST_COLUMNS]:
        names = ", ".join(f"{name}: {layer}" for name, layer in wide)
        comparison.notes.append(f"too wide to be compared with other features: {names}; pool them")
        arrays = {feature: array for feature, array in arrays.items() if feature not in wide}
    try:
        comparison.similarity = feature_similarity([*arrays.values()], k=min(10, max(1, len(rows) - 1)))
    except LayertapError as error:
        comparison.no_similarity_reason = str(error)
        return
    comparison.features = [*arrays]
    place = {feature: number for number, feature in enumerate(arrays)}
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


@dataclass(frozen=True)
class Candidate:
    """A backbone to compare.

    Attributes:
        name: name of its data set, and in tables.
        spec: spec of the backbone.
        weights: name or file of weights, or "random"; None: the source's own.
    """

    name: str
    spec: str
    weights: str | None = None


def candidates_of(specs: Sequence[str], table: Path | None) -> list[Candidate]:
    """Return the candidates in order, without repeated ones.

    Args:
        specs: specs, or globs of specs.
        table: CSV file with the column `backbone` and optionally `weights`, relative to the file, and `name`.

    Raises:
        InputError: the table cannot be used, two different candidates have the same name, or there are none.
        UnknownNameError: no backbone matches a glob.
    """
    found = [_candidate(spec) for text in specs for spec in (match_specs(text) if _GLOB.search(text) else [text])]
    found = list(dict.fromkeys(found + (_of_table(table) if table is not None else [])))
    if not found:
        raise InputError("there are no backbones to compare", hint="name each with -b, or a table with --from FILE.csv")
    by_name: dict[str, Candidate] = {}
    for candidate in found:
        other = by_name.setdefault(candidate.name.lower(), candidate)  # some file systems ignore case
        if other is not candidate:
            raise InputError(
                f"two backbones are called {printable(candidate.name)}: {printable(other.spec)} and "
                f"{printable(candidate.spec)}",
                hint="give each a name in the column `name` of --from FILE.csv",
            )
    return found


def _candidate(spec: str, weights: str | None = None, name: str = "") -> Candidate:
    if not name:
        stem = "" if weights is None else f"-{Path(weights).stem}"
        name = re.sub(r"[^\w.-]+", "-", spec + stem).strip("-.")
    return Candidate(name, spec, weights)


def _of_table(table: Path) -> list[Candidate]:
    columns, lines = read_table(str(table), "backbone")
    if unknown := [name for name in columns if name not in _COLUMNS]:
        raise InputError(f"{table} has the column {printable(unknown[0])}; expected {', '.join(_COLUMNS)}")
    found, empty = [], [""] * len(columns["backbone"])
    for number, values in enumerate(zip(*(columns.get(column, empty) for column in _COLUMNS), strict=True)):
        spec, weights, name = (str(value or "").strip() for value in values)
        where = f"{table}, line {lines[number]}" if lines else f"{table}, row {number}"
        if not spec:
            raise InputError(f"{where}: no backbone")
        if name and (not re.fullmatch(r"[\w.-]+", name) or name.startswith(".") or name.lower() in _RESERVED):
            raise InputError(
                f"{where}: the name {name!r} cannot be that of a folder; expected letters, digits, '-', '_' and '.'"
            )
        if weights and (table.parent / weights).is_file():
            weights = str(table.parent / weights)
        found.append(_candidate(spec, weights or None, name))
    return found


def _add_tasks(
    comparison: Comparison, config: CompareConfig, good: Sequence[Compared], say: Callable[[str], None]
) -> list[Path]:
    """Probe all layers of all backbones in each task, and order the backbones, the best one first.

    Args:
        comparison: the comparison; gets the tasks.
        config: configuration of the run.
        good: the backbones that have features; get their scores or ranks.
        say: receives a line about each step.

    Returns:
        the written files.
    """
    files: list[Path] = []
    comparison.protocol = config.protocol
    for name, labels in config.labels_of_tasks.items():
        if config.tasks:
            say(f"task      {name}")
        task, written = _task(name, labels, config, [entry.name for entry in good], say)
        comparison.tasks.append(task)
        files += written
    if (only := comparison.only_task) is not None:
        for entry in good:
            for key, value in vars(only.scores[entry.name]).items():
                setattr(entry, key, value)
        order = [*only.scores]
    else:
        order = _add_ranks(comparison, good)
    place = {name: number for number, name in enumerate(order)}
    comparison.backbones.sort(key=lambda entry: place.get(entry.name, len(place)))
    return files


def _add_ranks(comparison: Comparison, good: Sequence[Compared]) -> list[str]:
    """Rank the backbones over all tasks; return their names, the best one first."""
    # Metrics of different tasks cannot be averaged. The test of Nemenyi corrects for all pairs by itself, without the
    # test of Friedman before it.
    test = rank_test([[task.scores[entry.name].value for entry in good] for task in comparison.tasks])
    best = int(test.ranks.argmin())
    comparison.critical_difference = test.critical_difference if len(good) > 1 else None
    for number, entry in enumerate(good):
        entry.rank = float(test.ranks[number])
        entry.p = None if number == best else float(test.p[best, number])
        layers = Counter(task.scores[entry.name].layer for task in comparison.tasks)
        entry.layer = layers.most_common(1)[0][0]
    return [good[number].name for number in np.argsort(test.ranks, kind="stable").tolist()]


def _task(
    name: str, labels: str | None, config: CompareConfig, names: Sequence[str], say: Callable[[str], None]
) -> tuple[Task, list[Path]]:
    """Probe all layers of the named backbones, choose the best layer of each, and test their differences."""
    results = config.folder / "probe" / name if config.tasks else config.folder / "probe"
    probed = ProbeConfig(
        out=[str(config.folder / backbone) for backbone in names], protocol=config.protocol, labels=labels,
        test_fraction=config.test_fraction, seed=config.seed, device=config.device, results=results,
    )  # fmt: skip
    outcome, files = probe_and_write(probed, say)
    best = {
        backbone: outcome.best_of([feature for feature in outcome.probed if feature.data_set == backbone])
        for backbone in names
    }
    metric = next(iter(best.values())).result.primary
    scores = {}
    for backbone, feature in best.items():
        estimate, chosen_by = feature.result.metrics[metric], without_nan(feature.result.validation)
        scores[backbone] = Score(feature.layer, estimate.value, estimate.low, estimate.high, chosen_by)
    ranked = sorted(names, key=lambda backbone: scores[backbone].value, reverse=True)
    rows, predicted = _on_common_images(outcome, {backbone: best[backbone] for backbone in ranked})
    truth = _named(outcome.labellings[ranked[0]], outcome.labellings[ranked[0]].targets[rows])
    # All pairs, not those with the best alone, which is the best partly by chance.
    tests = paired_tests({backbone: row == truth for backbone, row in zip(ranked, predicted, strict=True)})
    for other in ranked[1:]:
        scores[other].behind = scores[ranked[0]].value - scores[other].value
        scores[other].p = tests[ranked[0], other]
    chosen_on = ""
    notes = list(next(iter(outcome.labellings.values())).notes)
    if len(outcome.probed) > len(names) and not outcome.by_validation:
        notes.append("no images were left to choose layers on: the first layer of each backbone is taken")
    elif len(outcome.probed) > len(names):
        chosen_on = " or ".join(sorted({feature.result.chosen_on for feature in outcome.probed} - {""}))
    most = _DISPUTED_IN_A_ROW * max(1, _DISPUTED_ROWS // max(1, len(config.tasks)))
    return Task(
        name, metric, len(rows), chosen_on, {backbone: scores[backbone] for backbone in ranked},
        [_layer(feature) for feature in outcome.probed], _disputed(outcome, ranked, rows, predicted, most),
        notes,
    ), files  # fmt: skip


def _layer(feature: ProbedFeature) -> dict[str, Any]:
    result = feature.result
    estimate = result.metrics[result.primary]
    return {
        "backbone": feature.data_set, "layer": feature.layer, "value": estimate.value, "low": estimate.low,
        "high": estimate.high, "chosen_by": without_nan(result.validation),
        "chosen": {result.swept: result.chosen} if result.swept else {},
    }  # fmt: skip


def _on_common_images(outcome: ProbeRun, best: dict[str, ProbedFeature]) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """Return the rows (n,) of the test images that all backbones have, and the predicted classes (backbones, n).

    Classes are names: a backbone that fails on all training images of a class has other numbers of classes.
    """
    rows = {name: outcome.labellings[name].test for name in best}
    common = reduce(np.intersect1d, rows.values())
    predicted = []
    for name, feature in best.items():
        assert feature.result.predictions is not None
        common_predictions = feature.result.predictions[np.isin(rows[name], common)]
        predicted.append(_named(outcome.labellings[name], common_predictions))
    return common, np.stack(predicted)


def _named(labelling: Labelling, numbers: NDArray[np.int64]) -> NDArray[np.str_]:
    """Return the names of classes from their numbers; those without training rows have the numbers -1, -2, ..."""
    return np.array([*map(str, labelling.classes.tolist()), *reversed(labelling.unseen)], np.str_)[numbers]


def _disputed(
    outcome: ProbeRun, names: Sequence[str], rows: NDArray[np.int64], predicted: NDArray[np.str_], most: int
) -> list[Disputed]:
    """Return at most `most` images with the largest share of pairs of backbones that predict different classes."""
    labelling, count = outcome.labellings[names[0]], len(names)
    if count < 2:
        return []
    paths = dict(zip(labelling.test.tolist(), outcome.test_paths[names[0]], strict=True))
    agreeing = sum((predicted == each).sum(0) - 1 for each in predicted) / (count * (count - 1))
    order = [place for place in np.argsort(agreeing, kind="stable").tolist() if agreeing[place] < 1][:most]
    return [
        Disputed(
            row := int(rows[place]), paths[row], str(_named(labelling, labelling.targets[row])),
            float(1 - agreeing[place]), list(zip(names, predicted[:, place].tolist(), strict=True)),
        )
        for place in order
    ]  # fmt: skip
