"""Compare backbones on the same images: `layertap compare IMAGES -b A -b B -o OUT`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.alikeness import MOST_COLUMNS, alikeness
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.paired_tests import paired_tests
from extract.backbones.catalogue import describe
from extract.compute.backbone import load_backbone
from extract.errors import InputError, LayertapError
from extract.extraction.several import Member, MemberRun, extract_several
from extract.images import ImageList, list_images
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from pipelines.compare.candidates import Candidate, candidates_of
from pipelines.compare.comparison import Compared, Comparison, Disputed
from pipelines.compare.config import CompareConfig
from pipelines.compare.files import check_out, mark_out, write_results
from pipelines.compare.page import write_page
from pipelines.compare.rates import forward_rate
from pipelines.probe.config import ProbeConfig
from pipelines.probe.job import ProbedFeature, ProbeRun
from pipelines.probe.report import probe_and_write
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import printable

__all__ = ["compare"]

_DISPUTED = 36  # images that are shown
_MOST_ALIKE = 60  # features that are compared with each other; of more, the best layer of each backbone


def compare(config: CompareConfig, say: Callable[[str], None]) -> tuple[Comparison, list[Path]]:
    """Extract the features of all backbones, probe them if there are labels, and write the results.

    Args:
        config: configuration of the run.
        say: receives a line about each step.

    Returns:
        the comparison, and the written files.

    Raises:
        InputError: there are no images or backbones, no backbone can be used, or OUT holds other files.
        LayertapError: see `extract_several`.
    """
    candidates = candidates_of(config.backbones, config.table)
    check_out(config.folder)
    images = list_images(config.images, config.limit)
    for note in images.notes:
        say(f"note: {printable(note)}")
    mark_out(config.folder)
    runs, signal = _extract(config, candidates, images, say)
    compared = [_compared(config, candidate, runs[candidate.name]) for candidate in candidates]
    comparison = Comparison(compared, n_images=len(images), signal=signal)
    if signal:
        return comparison, []
    good = [entry for entry in compared if not entry.error]
    if not good:
        reasons = "\n".join(f"{entry.name}: {entry.error}" for entry in compared)
        errors = [run.error for run in runs.values() if run.error is not None]
        raise InputError(f"no backbone could be used\n{reasons}", hint=errors[0].hint if errors else "")
    if random := [name for name, run in runs.items() if run.about.get("random")]:
        comparison.notes.append(f"random weights: {', '.join(random)}")
    files = []
    if config.labels is not None or images.classes:
        files += _probe(config, comparison, good, say)
    say("comparing features with each other")
    with contextlib.ExitStack() as stack:
        readers = {entry.name: stack.enter_context(FeatureReader(config.folder / entry.name)) for entry in good}
        _add_alikeness(comparison, good, readers)
        for entry in good:
            _add_sizes(entry, DataSet.open(config.folder / entry.name))
    results = write_results(comparison, config.folder)
    return comparison, [write_page(comparison, config.folder, config.images), *results, *files]


def _extract(
    config: CompareConfig, candidates: Sequence[Candidate], images: ImageList, say: Callable[[str], None]
) -> tuple[dict[str, MemberRun], int]:
    """Compute the features of all candidates; return what became of each, and the signal that stopped the run."""
    settings = config.settings()

    def load(candidate: Candidate) -> Callable[[], Any]:
        return lambda: load_backbone(candidate.spec, weights=candidate.weights, device=config.device, seed=config.seed)

    members = [
        Member(candidate.name, config.folder / candidate.name, load(candidate), settings) for candidate in candidates
    ]
    say(f"images    {len(images):,} in {images.root}; {len(members)} backbones")
    with Progress(len(images) * len(members)) as progress, signals_held() as received:
        runs = extract_several(
            images,
            members,
            config.folder,
            on_member=lambda name, rows: progress.say(f"{name}: images {rows.start + 1:,} to {rows.stop:,}"),
            on_failure=lambda name, error: progress.say(f"{name} is left out: {printable(error.message)}"),
            on_rows=progress.advance,
            on_note=lambda note: progress.say(f"note: {printable(note)}"),
            stop=lambda: bool(received),
        )
    return runs, received[0] if received else 0


def _compared(config: CompareConfig, candidate: Candidate, run: MemberRun) -> Compared:
    about = run.about
    entry = Compared(candidate.name, candidate.spec, str(about.get("weights", candidate.weights or "")))
    entry.error = "" if run.error is None else run.error.message
    entry.parameters = about.get("parameters")
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


def _probe(
    config: CompareConfig, comparison: Comparison, good: Sequence[Compared], say: Callable[[str], None]
) -> list[Path]:
    """Probe all layers of all backbones, choose the best layer of each, and test their differences."""
    probed = ProbeConfig(
        out=[str(config.folder / entry.name) for entry in good], protocol=config.protocol, labels=config.labels,
        test_fraction=config.test_fraction, seed=config.seed, device=config.device, results=config.folder / "probe",
    )  # fmt: skip
    outcome, files = probe_and_write(probed, say)
    best = {entry.name: _best_layer(outcome, entry.name) for entry in good}
    if len(outcome.probed) > len(good):
        comparison.chosen_on = "validation images" if outcome.by_validation else "test images"
    comparison.protocol = config.protocol
    comparison.metric = next(iter(best.values())).result.primary
    comparison.layers = [_layer(feature) for feature in outcome.probed]
    comparison.notes += next(iter(outcome.labellings.values())).notes
    for entry in good:
        feature = best[entry.name]
        estimate = feature.result.metrics[comparison.metric]
        entry.layer, entry.value, entry.low, entry.high = feature.layer, estimate.value, estimate.low, estimate.high
        entry.chosen_by = feature.chosen_by if outcome.by_validation else None
    comparison.backbones.sort(key=lambda entry: -1.0 if entry.value is None else entry.value, reverse=True)
    ranked = [entry.name for entry in comparison.backbones if entry.value is not None]
    rows, predicted = _on_common_images(outcome, {name: best[name] for name in ranked})
    truth = outcome.labellings[ranked[0]].targets[rows]
    tests = paired_tests({name: values == truth for name, values in zip(ranked, predicted, strict=True)})
    comparison.n_test, comparison.disputed = len(rows), _disputed(outcome, ranked, rows, predicted)
    first = comparison.backbones[0]
    for entry in good:
        if entry is not first and entry.value is not None and first.value is not None:
            entry.behind, entry.p = first.value - entry.value, tests[first.name, entry.name].corrected
    return files


def _best_layer(outcome: ProbeRun, name: str) -> ProbedFeature:
    """Return the best layer of a backbone, by validation images if all layers have them; ties: the first."""
    layers = [feature for feature in outcome.probed if feature.data_set == name]
    if outcome.by_validation:
        return max(layers, key=lambda feature: feature.chosen_by)
    return max(layers, key=lambda feature: feature.result.value)


def _layer(feature: ProbedFeature) -> dict[str, Any]:
    result = feature.result
    estimate = result.metrics[result.primary]
    return {
        "backbone": feature.data_set, "layer": feature.layer, "value": estimate.value, "low": estimate.low,
        "high": estimate.high, "chosen_by": feature.chosen_by if result.curve else None,
        "chosen": {result.swept: result.chosen} if result.swept else {},
    }  # fmt: skip


def _on_common_images(outcome: ProbeRun, best: dict[str, ProbedFeature]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows (n,) of the test images that all backbones have, and the predicted classes (backbones, n)."""
    rows = {name: outcome.labellings[name].test for name in best}
    common = next(iter(rows.values()))
    for others in rows.values():
        common = np.intersect1d(common, others)
    predicted = []
    for name, feature in best.items():
        assert feature.result.predictions is not None
        predicted.append(feature.result.predictions[np.isin(rows[name], common)])
    return common, np.stack(predicted)


def _disputed(
    outcome: ProbeRun, names: Sequence[str], rows: NDArray[np.int64], predicted: NDArray[np.int64]
) -> list[Disputed]:
    """Return the images with the largest share of pairs of backbones that predict different classes."""
    labelling, paths = outcome.labellings[names[0]], dict[int, str]()
    for row, path in zip(labelling.test.tolist(), outcome.test_paths[names[0]], strict=True):
        paths[row] = path
    count = len(names)
    if count < 2:
        return []
    agreeing = sum((predicted == each).sum(0) - 1 for each in predicted) / (count * (count - 1))
    order = [place for place in np.argsort(agreeing, kind="stable").tolist() if agreeing[place] < 1][:_DISPUTED]
    classes = [*map(str, labelling.classes.tolist())]

    def name_of(number: int) -> str:
        return classes[number] if number >= 0 else labelling.unseen[-1 - number]

    return [
        Disputed(
            row := int(rows[place]), paths[row], name_of(int(labelling.targets[row])), float(1 - agreeing[place]),
            [(name, classes[number]) for name, number in zip(names, predicted[:, place].tolist(), strict=True)],
        )
        for place in order
    ]  # fmt: skip


def _add_alikeness(comparison: Comparison, good: Sequence[Compared], readers: dict[str, FeatureReader]) -> None:
    """Compare all features, or the best layers if there are too many, and fill in what follows for each backbone."""
    best = {entry.name: (entry.name, entry.layer or readers[entry.name].layers[-1]) for entry in good}
    features = [(entry.name, layer) for entry in good for layer in readers[entry.name].layers]
    if len(features) > _MOST_ALIKE:
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
        comparison.alikeness = alikeness(arrays, k=min(10, max(1, len(rows) - 1)))
    except LayertapError as error:
        comparison.why_not_alike = str(error)
        return
    comparison.features = features
    place = {feature: number for number, feature in enumerate(features)}
    for entry in good:
        own = place.get(best[entry.name])
        others = [place[best[other.name]] for other in good if other is not entry and best[other.name] in place]
        if own is not None:
            entry.effective_rank = float(comparison.alikeness.effective_rank[own])
        if own is not None and others:
            entry.alignment = float(comparison.alikeness.mutual_knn[own, others].mean())


def _add_sizes(entry: Compared, dataset: DataSet) -> None:
    features = {feature.name: feature for feature in dataset.features}
    entry.layer = entry.layer or dataset.features[-1].name
    entry.width, entry.row_bytes = math.prod(features[entry.layer].shape), features[entry.layer].row_bytes
