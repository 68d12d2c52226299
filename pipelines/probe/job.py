"""Measure how good stored features are, layer by layer: `layertap probe OUT -p PROTOCOL`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.dataset_diff import image_hashes
from extract.analysis.probe.feature_matrix import FeatureRows, Labelled
from extract.analysis.probe.metrics import mcnemar
from extract.analysis.probe.model import LinearProbe
from extract.analysis.probe.probing import ProbeResult, probe
from extract.errors import InputError
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from extract.system.atomic_files import own_folder
from extract.system.urls import is_url
from extract.taps.layer_names import match_layers
from pipelines.probe.config import ProbeConfig
from pipelines.probe.labelling import Labelling, drop_leaks, label_rows
from pipelines.probe.token_probes import Example, TokenProbes
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.text_output import data_set_name

__all__ = [
    "Comparison", "ProbeRun", "ProbedFeature", "arrays_of", "data_sets", "folder_of_results", "run_probe",
]  # fmt: skip

_NOT_SAVED = ("knn", "fewshot", "segmentation-knn")


@dataclass(frozen=True)
class ProbedFeature:
    """A feature, or several concatenated features, and the result of its probe.

    Attributes:
        data_set: name of the data set.
        parts: names of the concatenated features; usually one.
        width: D.
        result: result of the probe, without its probabilities.
        confidences: (N,) probability of the predicted class of each test row; None if the probe has none.
    """

    data_set: str
    parts: tuple[str, ...]
    width: int
    result: ProbeResult
    confidences: NDArray[np.float32] | None = None

    @property
    def layer(self) -> str:
        """Name of the feature; `a+b` for concatenated features."""
        return "+".join(self.parts)


@dataclass(frozen=True)
class Comparison:
    """McNemar's exact test between the best feature and another, on the test images that both have.

    Attributes:
        better: (data set, layer) of the best feature.
        other: (data set, layer) of the other feature.
        only_better: number of images that only the best feature classifies correctly.
        only_other: number of images that only the other feature classifies correctly.
        p: two-sided p-value, not corrected for multiple comparisons.
    """

    better: tuple[str, str]
    other: tuple[str, str]
    only_better: int
    only_other: int
    p: float


@dataclass
class ProbeRun:
    """Results of a run so far.

    Attributes:
        config: configuration of the run.
        labellings: data set -> labels and splits.
        fingerprints: data set -> fingerprint of its features.
        test_paths: data set -> paths of its test images.
        probed: results in the order of the layers.
        comparisons: tests between the best feature and each other feature.
        examples: of a segmentation or of depths: some test images with the predictions of the best feature.
        complete: whether the run is finished.
    """

    config: ProbeConfig
    labellings: dict[str, Labelling] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    test_paths: dict[str, list[str]] = field(default_factory=dict)
    probed: list[ProbedFeature] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    complete: bool = False

    @property
    def by_validation(self) -> bool:
        """Whether all features have a metric on validation rows. Only by it is the best chosen, never on test rows."""
        return all(math.isfinite(feature.result.validation) for feature in self.probed)

    @property
    def best(self) -> ProbedFeature:
        """The best of all features."""
        return self.best_of(self.probed)

    def best_of(self, probed: Sequence[ProbedFeature]) -> ProbedFeature:
        """Return the best feature on validation rows; without them, the first. Ties: the first."""
        if not self.by_validation:
            return probed[0]
        shots = min((max(feature.result.shots) for feature in self.probed if feature.result.shots), default=0)

        def quality(feature: ProbedFeature) -> float:
            return dict(feature.result.curve)[shots] if shots else feature.result.validation

        return max(probed, key=quality)


def run_probe(
    config: ProbeConfig, say: Callable[[str], None], on_result: Callable[[ProbeRun], None] = lambda outcome: None
) -> ProbeRun:
    """Probe every requested layer of every data set.

    Args:
        config: configuration of the run.
        say: receives a line about each step.
        on_result: called with the results so far: after each layer, and at the end.

    Raises:
        InputError: a path is not a data set, labels are missing, or the protocol does not fit the labels or `save`.
        UnknownNameError: a layer does not exist.
    """
    outcome = ProbeRun(config)
    if config.save is not None and config.protocol in _NOT_SAVED:
        raise InputError(f"the protocol {config.protocol} has no probe that can be saved", hint="use another protocol")
    with contextlib.ExitStack() as stack:
        locations = data_sets(config.out)
        readers = opened_readers(config, locations, stack, say)
        columns = {(name, parts): arrays for name, reader in readers.items()
                   for parts, arrays in arrays_of(config, reader, name).items()}  # fmt: skip
        outcome.fingerprints = {name: reader.fingerprint for name, reader in readers.items()}
        if config.save is not None and len(columns) > 1:
            raise InputError(
                f"--save keeps the probe of one layer, and there are {len(columns)}; a choice of "
                "the best layer on the test images would bias its result",
                hint="name one with -l",
            )
        _probe_all(outcome, readers, locations, columns, say, on_result)
    outcome.complete = True
    on_result(outcome)
    return outcome


_Columns = dict[tuple[str, tuple[str, ...]], list[Any]]  # data set, parts -> features that are concatenated


def _probe_all(
    outcome: ProbeRun, readers: dict[str, FeatureReader], locations: Mapping[str, Path | str], columns: _Columns,
    say: Callable[[str], None], on_result: Callable[[ProbeRun], None],
) -> None:  # fmt: skip
    """Label the rows, probe all features, and test their differences."""
    config, token_probes = outcome.config, dict[str, TokenProbes]()
    labels = config.files if config.is_dense else config.labels
    for name, reader in readers.items():
        labelling = label_rows(
            reader, labels, config.task, group=config.group, test_fraction=config.test_fraction, seed=config.seed
        )
        labelling = drop_leaks(labelling) if config.drop_leaks else labelling
        if config.is_dense:
            root = data_set_at(locations[name]).images["root"]
            tokens = next(arrays[0] for (data_set, _), arrays in columns.items() if data_set == name)
            token_probes[name] = TokenProbes(config, reader, root, labelling, tokens)
            labelling = token_probes[name].labelling
        outcome.labellings[name] = labelling
        outcome.test_paths[name] = [reader.paths[row] for row in labelling.test.tolist()]
    for number, ((name, parts), arrays) in enumerate(columns.items(), 1):
        layer = "+".join(parts)
        say(f"probing {layer}" + (f" of {name}" if len(readers) > 1 else "") + f" ({number} of {len(columns)})")
        if config.is_dense:
            result, examples = token_probes[name].probe(arrays, validated=len(columns) > 1)
            result = replace(result, model=result.model if config.save else None)
            width = sum(tokens.shape[1] for tokens in arrays)
            outcome.probed.append(ProbedFeature(name, parts, width, result))
            if outcome.best is outcome.probed[-1]:
                outcome.examples = examples()
        else:
            outcome.probed.append(_probed(config, outcome.labellings[name], name, parts, arrays))
        on_result(outcome)
    outcome.comparisons = list(_comparisons(outcome, readers))
    if config.save is not None:
        (feature,) = outcome.probed
        more = token_probes[feature.data_set].about(feature.result) if config.is_dense else {}
        _save(feature, config.out[0], config.save, more)


def data_sets(paths: Sequence[str]) -> dict[str, Path | str]:
    """Return name -> location of each data set. Names are the last parts of the paths; if these repeat, the paths.

    Raises:
        InputError: a path is not a data set, or a data set is given twice.
    """
    for path in paths:
        if not is_url(path) and not Path(path).is_dir():
            raise InputError(f"{path} is not a folder; expected a data set of `layertap embed`")
        data_set_at(path)
    resolved = [path.rstrip("/") if is_url(path) else str(Path(path).resolve()) for path in paths]
    if len(set(resolved)) < len(resolved):
        raise InputError(f"a data set is given twice: {', '.join(paths)}")
    names = [data_set_name(path) for path in resolved]
    if len(set(names)) < len(names):
        names = list(paths)
    locations = [path.rstrip("/") if is_url(path) else Path(path) for path in paths]
    return dict(zip(names, locations, strict=True))


def opened_readers(
    config: ProbeConfig, locations: Mapping[str, Path | str], stack: contextlib.ExitStack, say: Callable[[str], None]
) -> dict[str, FeatureReader]:
    """Return name -> reader of the rows of each data set without the images that `config.without` names.

    Raises:
        InputError: a data set cannot be read; or the file names no image of a data set, or all.
    """
    readers = {
        name: stack.enter_context(FeatureReader(path, check=isinstance(path, Path))) for name, path in locations.items()
    }
    if config.without is None:
        return readers
    return {name: reader.without(config.without, say) for name, reader in readers.items()}


def folder_of_results(config: ProbeConfig, name: str) -> Path:
    """Return the folder OUT/probe/NAME in the first data set, which need not exist.

    Raises:
        InputError: the data set is in a bucket, OUT/probe cannot be written to, or a folder is a symbolic link.
    """
    if is_url(config.out[0]):
        raise InputError(
            f"{config.out[0]} is in a bucket", hint="name a folder on this machine for the results with -o"
        )
    parent = Path(config.out[0]) / "probe"
    check_folder(parent)
    folder = own_folder(parent) / name
    return own_folder(folder) if folder.exists() else folder


def arrays_of(config: ProbeConfig, reader: FeatureReader, where: str) -> dict[tuple[str, ...], list[Any]]:
    """Return the features to probe, or their tokens, by the names of the parts that are concatenated."""
    read: Callable[[str], Any] = reader.tokens if config.is_dense else reader.__getitem__
    layers = config.layers or (reader.layers_with_tokens() if config.is_dense else reader.layers)
    return {parts: [read(part) for part in parts] for parts in _layers(reader, layers, where)}


def _layers(reader: FeatureReader, layers: Sequence[str], where: str) -> Iterator[tuple[str, ...]]:
    """Yield the features to probe: each a tuple of one name, or of several names to concatenate."""
    for text in layers:
        if "+" in text and text not in reader:
            matches = [match_layers(reader.layers, part, where) for part in text.split("+")]
            for part, names in zip(text.split("+"), matches, strict=True):
                if len(names) > 1:
                    raise InputError(
                        f"{part!r} in {text!r} matches {len(names)} layers", hint=f"name each: {'+'.join(names)}"
                    )
            yield tuple(names[0] for names in matches)
        else:
            yield from ((name,) for name in match_layers(reader.layers, text, where))


def _probed(
    config: ProbeConfig, labelling: Labelling, data_set: str, parts: tuple[str, ...], arrays: list[Any]
) -> ProbedFeature:
    train, val, test = (
        Labelled(FeatureRows.of(arrays, rows), labelling.targets[rows], labelling.groups[rows])
        for rows in labelling.sets.values()
    )
    result = probe(
        train, val if len(val) else None, test, labelling.classes, labelling.task,
        protocol=config.protocol, scaling=config.scaling, balanced=config.class_weight == "balanced", seed=config.seed,
        device=config.device, memory_bytes=config.memory_bytes,
    )  # fmt: skip
    confidences = None
    if labelling.task == "classification" and result.probabilities is not None:
        confidences = result.probabilities.max(1)
    # With many layers, arrays that are not reported would fill the memory.
    result = replace(result, probabilities=None, model=result.model if config.save else None)
    return ProbedFeature(data_set, parts, train.rows.width, result, confidences)


def _comparisons(outcome: ProbeRun, readers: dict[str, FeatureReader]) -> Iterator[Comparison]:
    best = outcome.best
    for other in outcome.probed:
        right, other_right = best.result.right, other.result.right
        if other is best or right is None or other_right is None:
            continue
        if other.data_set != best.data_set:  # test images of both, matched by the hash of their bytes
            first, second = (
                image_hashes(readers[feature.data_set])[outcome.labellings[feature.data_set].test]
                for feature in (best, other)
            )
            _, best_places, other_places = np.intersect1d(first, second, return_indices=True)
            right, other_right = right[best_places], other_right[other_places]
        if len(right):
            yield Comparison((best.data_set, best.layer), (other.data_set, other.layer), *mcnemar(right, other_right))


def _save(probed: ProbedFeature, out: str, file: Path, more: Mapping[str, Any]) -> None:
    """Save the probe with all settings needed to compute the same features of other images, and `more` about it."""
    model, dataset = probed.result.model, data_set_at(out)
    assert model is not None
    layers, features = list(probed.parts), dataset.depends_on.get("features", {})
    if missing := [name for name in layers if name not in features]:
        raise InputError(f"{dataset.out} does not record what {missing[0]} is; its probe cannot be saved")
    with FeatureReader(out) as reader:
        provenance = {key: reader.provenance.get(key) for key in ("backbone", "configuration", "versions")}
    about = {
        "protocol": probed.result.protocol,
        "chosen": {probed.result.swept: probed.result.chosen} if probed.result.swept else {},
        "layers": layers,
        "poolings": [feature.attributes.get("pooling", "none") for name in layers
                     for feature in dataset.features if feature.name == name],
        "depends_on": {**dataset.depends_on, "features": {name: features[name] for name in layers}},
        "provenance": provenance,
        "n_train": probed.result.n_train,
        "metrics": {name: metric.value for name, metric in probed.result.metrics.items()},
        **more,
    }  # fmt: skip
    saved = LinearProbe(
        model.coef_, model.intercept_, model.classes_, model.task, model.scaling, model.has_probabilities, about
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    saved.save(file)
