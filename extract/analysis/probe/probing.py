"""Train and test one probe on arrays: `linear_probe`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from extract.analysis.probe.feature_matrix import FeatureRows, Labelled, Source
from extract.analysis.probe.metrics import (
    Estimate,
    average_precision,
    by_class,
    classification_metrics,
    confusion_of,
    exact_proportion,
    format_metric,
    metric_name,
    multilabel_metrics,
    regression_metrics,
)
from extract.analysis.probe.model import LinearProbe
from extract.analysis.probe.protocols import PROTOCOLS, Fitted, Settings, few_shot
from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.system.free_memory import free_bytes
from extract.system.html_tables import Table, html_summary
from extract.system.torch_state import device_named

__all__ = ["MOST_IN_A_TABLE", "ProbeResult", "linear_probe", "probe", "probe_resources"]

PRIMARY = {"classification": "top1", "multilabel": "mAP", "regression": "r2", "segmentation": "mIoU", "depth": "delta1"}
MOST_IN_A_TABLE = 1000  # classes in a confusion matrix, whose size is their square
_LARGEST = 1e100  # target: the sum of squares must be finite
SCALINGS = ("none", "l2", "standardise")


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        protocol: name of the protocol.
        task: "classification", "multilabel", "regression", "segmentation" or "depth".
        scaling: scaling of the features: "none", "l2" or "standardise".
        metrics: name -> value with its 95 % interval, on the test rows. For few-shot: "top1@5" etc., the mean over five
            draws.
        classes: (K,) names, or labels as given.
        per_class: (K,) columns: n, recall, precision, f1 for classification; n, average_precision for multilabel; n
            (pixels), iou, accuracy for segmentation.
        per_image: (N,) columns for the test images of a segmentation: n, pixel_accuracy, mIoU; of depths: n, rmse,
            abs_rel, delta1.
        confusion: (K, K) numbers of test rows (of pixels for segmentation) of class i predicted as class j, for at most
            1,000 classes.
        swept: name of the chosen hyper-parameter: "C", "lambda", "alpha" or "k"; empty: none.
        chosen: value of the chosen hyper-parameter.
        curve: (value, top-1, mAP or R^2 on the validation rows; for segmentation and depth, top-1 of their tokens) for
            all values tried; for few-shot, (rows per class, top-1 on training rows that were not drawn).
        shots: for few-shot: rows per class -> top-1 of each draw.
        n_train, n_val, n_test: numbers of rows; n_val: rows that the hyper-parameter was chosen on. n_train includes
            those of them that the final fit uses: with folds, both are all training rows.
        predictions: (N,) class numbers; (N, K) labels, 0 or 1; (N, K) numbers; None for few-shot and dense probes.
        truth: (N,) class numbers, negative for classes missing from training; (N, K) labels or numbers; empty for
            dense probes.
        probabilities: (N, K); None if the probe has no probabilities.
        objective: objective of logistic regression for the chosen value, on training and validation rows.
        model: the probe, for prediction and saving; None for k nearest neighbours and few-shot.
        notes: warnings about the result.
        seconds: run time.
        chosen_on: the rows that the hyper-parameter was chosen on, in words; without one, the rows of `validation`.
        validation: the primary metric on rows that are neither tested nor fitted, by which one of several layers may be
            chosen: the best value of `curve`; NaN if no rows were left.
    """

    protocol: str
    task: str
    scaling: str
    metrics: dict[str, Estimate]
    classes: NDArray[Any]
    n_train: int
    n_val: int
    n_test: int
    truth: NDArray[Any]
    swept: str = ""
    chosen: float = float("nan")
    curve: Sequence[tuple[float, float]] = ()
    per_class: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    per_image: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    confusion: NDArray[np.int64] | None = None
    shots: Mapping[int, list[float]] = field(default_factory=dict)
    predictions: NDArray[Any] | None = None
    probabilities: NDArray[np.float32] | None = None
    objective: float | None = None
    model: LinearProbe | None = None
    notes: Sequence[str] = ()
    seconds: float = 0.0
    chosen_on: str = ""
    validation: float = float("nan")

    @property
    def primary(self) -> str:
        """Name of the metric that features are compared by: "top1", "mAP", "r2"; for few-shot, with the most shots."""
        return f"top1@{max(self.shots)}" if self.shots else PRIMARY[self.task]

    @property
    def value(self) -> float:
        """Value of the primary metric."""
        return self.metrics[self.primary].value

    @property
    def right(self) -> NDArray[np.bool_] | None:
        """Whether each test row (N,) is classified correctly; None for few-shot and other tasks."""
        if self.task != "classification" or self.predictions is None:
            return None
        return np.asarray(self.predictions == self.truth)

    def __repr__(self) -> str:
        name, text = metric_name(self.primary), self._with_interval(self.primary)
        return f"ProbeResult({self.protocol}: {name} {text}, {self.n_train:,} train rows, {self.n_test:,} test rows)"

    def _with_interval(self, metric: str) -> str:
        estimate = self.metrics[metric]
        text = format_metric(metric, estimate.value)
        if not math.isfinite(estimate.low):
            return text
        low, high = (format_metric(metric, end, unit=False) for end in (estimate.low, estimate.high))
        return f"{text} ({low} to {high})"

    def _repr_html_(self) -> str:
        metrics = [[metric_name(metric), self._with_interval(metric)] for metric in self.metrics]
        chosen = [f"{self.swept} {self.chosen:.3g}, chosen on {self.chosen_on}"] if self.swept else []
        return html_summary(repr(self), [Table(["metric", "value (95 % interval)"], metrics)], [*chosen, *self.notes])


def linear_probe(
    x_train: Source,
    y_train: ArrayLike,
    x_test: Source,
    y_test: ArrayLike,
    *,
    protocol: str = "clip",
    x_val: Source | None = None,
    y_val: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    scaling: str | None = None,
    class_weight: str | None = None,
    seed: int = 0,
    device: str = "auto",
    memory_bytes: int | None = None,
) -> ProbeResult:
    """Evaluate features with a simple classifier or regression, following a protocol of the literature.

        result = linear_probe(x_train, y_train, x_test, y_test, protocol="simclr")
        result.metrics["top1"]       # Estimate(value=0.742, low=0.714, high=0.769)
        result.chosen, result.curve  # C, and top-1 on validation rows for each C

    Test rows are predicted once, by a probe chosen without them.

    Args:
        x_train: (N, D) features, or (N, *shape); an array, tensor, memory map, or a feature of a `FeatureReader`.
        y_train: (N,) classes of any sortable type; (N, K) of 0 and 1 for labels that do not exclude each other; for the
            protocol "ridge", (N,) or (N, K) numbers.
        x_test: (N, D) features of the test rows.
        y_test: classes, labels or numbers of the test rows.
        protocol: one of `PROTOCOLS`, which `extract.analysis.probe.protocols` describes.
        x_val: features for choosing hyper-parameters; None: a tenth of the training rows.
        y_val: classes, labels or numbers of the validation rows.
        groups: (N,) group of each training row, such as its file or patient, in numbers or text: no group is both
            fitted and chosen on; of few-shot draws, each has one row of a group. None: all rows are independent.
        scaling: "none", "l2" or "standardise"; None: the protocol's own.
        class_weight: "balanced" gives all classes the same weight, as in scikit-learn.
        seed: seed of all random choices.
        device: "auto", "cpu", "cuda", ...
        memory_bytes: limit for the features and variables held at once; features that do not fit are read again in each
            pass. None: half of the free memory.

    Raises:
        InputError: shapes do not match, a value is not finite, there are fewer than two classes, or the protocol does
            not support the task.
        UnknownNameError: the protocol, scaling or class weight does not exist.
        LayertapError: the device runs out of memory, or features are too large for float32.
    """
    if (x_val is None) != (y_val is None):
        raise InputError("give both x_val and y_val, or neither")
    if class_weight not in (None, "balanced"):
        raise unknown_name("class_weight", str(class_weight), ["balanced"])
    if not isinstance(protocol, str) or protocol not in PROTOCOLS:
        raise unknown_name("protocol", str(protocol), PROTOCOLS)
    definition = PROTOCOLS[protocol]
    numbers = definition.tasks == ("regression",)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise InputError(f"seed is {seed!r}; expected a whole number from 0 to {(1 << 32) - 1}")
    given = {"train": (x_train, y_train), "val": (x_val, y_val), "test": (x_test, y_test)}
    targets = {name: np.asarray(y) for name, (_, y) in given.items() if y is not None}
    task, classes, encoded = _encode_targets(targets, numbers)
    of_groups, count = dict[str, NDArray[np.int64]](), len(encoded["train"])
    if groups is not None:
        if np.shape(groups) != (count,):
            raise InputError(f"groups have shape {np.shape(groups)}; expected ({count},), one for each row of y_train")
        of_groups["train"] = np.unique(np.asarray(groups), return_inverse=True)[1]
        of_groups["val"] = count + np.arange(len(encoded.get("val", ())))  # each row is a group
    parts = dict[str, Labelled]()
    for name, y in encoded.items():
        x = given[name][0]
        # Convert a list of rows to an array: `FeatureRows` treats a list as arrays side by side.
        rows = FeatureRows.of(np.asarray(x) if isinstance(x, list | tuple) else x)  # type: ignore[arg-type]
        if len(rows) != len(y):
            raise InputError(f"x_{name} has {len(rows):,} rows, but y_{name} has {len(y):,}")
        parts[name] = Labelled(rows, y, of_groups.get(name))
    return probe(
        parts["train"], parts.get("val") or None, parts["test"], classes, task, protocol=protocol, scaling=scaling,
        balanced=class_weight == "balanced", seed=seed, device=device, memory_bytes=memory_bytes,
    )  # fmt: skip


def probe(
    train: Labelled,
    val: Labelled | None,
    test: Labelled,
    classes: NDArray[Any],
    task: str,
    *,
    protocol: str = "clip",
    scaling: str | None = None,
    balanced: bool = False,
    seed: int = 0,
    device: str = "auto",
    memory_bytes: int | None = None,
) -> ProbeResult:
    """Run `linear_probe` on rows with encoded targets.

    Args:
        train: training rows; class targets are indices of `classes`.
        val: likewise, or None.
        test: likewise; -1, -2, ... for classes missing from training.
        classes: (K,) class names of any type.
        task: "classification", "multilabel" or "regression".
        protocol: see `linear_probe`, also for the following arguments.
        scaling: None: the protocol's own.
        balanced: whether all classes have the same weight.
        seed: seed of all random choices.
        device: "auto", "cpu", "cuda", ...
        memory_bytes: None: half of the free memory.
    """
    started = time.perf_counter()
    definition = PROTOCOLS[protocol]
    if task not in definition.tasks:
        suitable = ", ".join(name for name, other in PROTOCOLS.items() if task in other.tasks)
        raise InputError(
            f"the protocol {protocol} supports {' and '.join(definition.tasks)}, not {task}", hint=f"use {suitable}"
        )
    if scaling is not None and scaling not in SCALINGS:
        raise unknown_name("scaling", scaling, SCALINGS)
    if balanced and (task != "classification" or protocol in ("knn", "centroid")):
        raise InputError(f"class weights need logistic regression of classes; {protocol} for {task} has none")
    if task == "regression" and (constant := np.flatnonzero(np.ptp(train.targets, axis=0) == 0)).size:
        name, value = classes[constant[0]], train.targets[0, constant[0]]
        raise InputError(f"{name} is {value:g} in all training rows; regression needs different values")
    if task == "classification" and len(classes) < 2:
        raise InputError(f"the training rows have only {len(classes)} class; a probe needs at least two")
    parts = {name: part for name, part in (("train", train), ("val", val), ("test", test)) if part is not None}
    widths = {name: part.rows.width for name, part in parts.items()}
    if len(set(widths.values())) > 1:
        raise InputError(f"rows have different widths: {widths}")
    torch_device, memory_bytes = probe_resources(device, memory_bytes)
    settings = Settings(task, classes, scaling or definition.scaling, balanced, seed, torch_device, memory_bytes)
    # Rows that fit are read once. The limit is a third, since the fitted rows are also held along their principal axes.
    held_bytes = sum(part.rows.nbytes for part in parts.values())
    if held_bytes <= memory_bytes // 3:
        settings = replace(settings, memory_bytes=memory_bytes - held_bytes)
        parts = {name: part.held() for name, part in parts.items()}
    train, val, test = parts["train"], parts.get("val"), parts["test"]
    try:
        if definition.fit is None:
            result = _few_shot(train, val, test, settings, protocol)
        else:
            result = _evaluate(definition.fit(train, val, settings), test, settings, protocol)
    except torch.OutOfMemoryError as error:
        raise LayertapError(
            f"not enough memory on {torch_device}: {first_line(error)}",
            hint="set a smaller --max-memory-mb (memory_bytes)",
        ) from error
    notes = list(result.notes)
    if task == "classification" and (n_unknown := int((test.targets < 0).sum())):
        notes.append(f"{n_unknown:,} test rows have a class that no training row has; these rows count as wrong")
    return replace(result, notes=notes, seconds=time.perf_counter() - started)


def probe_resources(device: str, memory_bytes: int | None) -> tuple[torch.device, int]:
    """Return the device of a probe, which needs double precision, and the limit for features and variables.

    Raises:
        InputError: there is no such device, or it is mps.
    """
    torch_device = device_named(device)
    if torch_device.type == "mps" and device != "auto":
        raise InputError("probes need double precision, which mps does not support", hint="use --device cpu")
    memory_bytes = free_bytes() // 2 if memory_bytes is None else memory_bytes
    if torch_device.type == "cuda":
        return torch_device, min(memory_bytes, torch.cuda.mem_get_info(torch_device)[0] // 2)
    return torch.device("cpu") if torch_device.type == "mps" else torch_device, memory_bytes


def _few_shot(train: Labelled, val: Labelled | None, test: Labelled, settings: Settings, protocol: str) -> ProbeResult:
    shots, curve = few_shot(train, val, test, settings)
    metrics = {f"top1@{n}": _over_draws(values, len(test)) for n, values in shots.items()}
    n_val = 0 if val is None else len(val)
    return ProbeResult(
        protocol, settings.task, settings.scaling, metrics, settings.classes, len(train), n_val, len(test),
        test.targets, shots=shots, curve=curve, validation=curve[-1][1],
        chosen_on="training rows that were not drawn",
    )  # fmt: skip


def _evaluate(fitted: Fitted, test: Labelled, settings: Settings, protocol: str) -> ProbeResult:
    """Predict the test rows, once, and compute the metrics."""
    scores = fitted.scores(test.rows)
    probabilities = None if fitted.model is None else fitted.model.probabilities(scores)
    truth, k = test.targets, len(settings.classes)
    per_class: dict[str, NDArray[Any]] = {}
    confusion, predictions = None, scores
    if settings.task == "classification":
        metrics = classification_metrics(scores, truth, probabilities, settings.seed)
        predictions = scores.argmax(1)
        per_class = by_class(predictions, truth, k)
        confusion = confusion_of(predictions, truth, k) if k <= MOST_IN_A_TABLE else None
    elif settings.task == "multilabel":
        metrics = multilabel_metrics(scores, truth, settings.seed)
        predictions = (scores > fitted.threshold).astype(np.int64)
        per_class = {"n": truth.sum(0).astype(np.int64), "average_precision": average_precision(scores, truth)}
    else:
        metrics = regression_metrics(scores.astype(np.float64), truth, settings.seed)
    return ProbeResult(
        protocol, settings.task, settings.scaling, metrics, settings.classes, fitted.n_train, fitted.n_val, len(test),
        truth, per_class=per_class, confusion=confusion, predictions=predictions, probabilities=probabilities,
        model=fitted.model, notes=fitted.notes, **fitted.choice,
    )  # fmt: skip


_T = 2.776  # 0.975 quantile of Student's t for 4 degrees of freedom, those of five draws


def _over_draws(values: list[float], n_test: int) -> Estimate:
    """Return the mean of the draws with an interval for the choice of training rows and that of test rows.

    All draws are tested on the same rows. The two are independent, so the squares of their half widths add up.
    """
    mean = float(np.mean(values))
    half = _T * float(np.std(values, ddof=1)) / len(values) ** 0.5
    of_rows = exact_proportion(mean, n_test)
    low, high = math.hypot(half, mean - of_rows.low), math.hypot(half, of_rows.high - mean)
    return Estimate(mean, max(0.0, mean - low), min(1.0, mean + high), "Student's t of draws, and Clopper-Pearson")


def _encode_targets(
    targets: Mapping[str, NDArray[Any]], numbers: bool
) -> tuple[str, NDArray[Any], dict[str, NDArray[Any]]]:
    """Return the task, the classes, and the encoded targets of the parts: train, val if given, and test."""
    arrays, train, test = targets.values(), targets["train"], targets["test"]
    if not train.size or not test.size:
        raise InputError(f"{len(train):,} training rows and {len(test):,} test rows; expected at least one of each")
    if any(array.dtype.kind == "f" and not np.isfinite(array).all() for array in arrays):
        raise InputError("a target is NaN or infinite", hint="leave out such rows")
    if any(array.dtype.kind == "O" for array in arrays):
        kinds = sorted({type(value).__name__ for array in arrays for value in array.ravel().tolist()})
        if kinds != ["str"]:
            raise InputError(f"targets have several types ({', '.join(kinds)}); expected only text, or only numbers")
    if train.ndim not in (1, 2) or len({(array.ndim, array.shape[1:]) for array in arrays}) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise InputError(f"targets have shapes {shapes}; expected (N,) or (N, K)")
    if numbers:
        if any(
            array.dtype.kind not in "iufb" or np.abs(array.astype(np.float64)).max(initial=0) > _LARGEST
            for array in arrays
        ):
            raise InputError("regression targets must be finite numbers below 1e100")
        names = np.array([f"target {i}" for i in range(np.prod(train.shape[1:], dtype=int))])
        return "regression", names, {name: y.reshape(len(y), -1).astype(np.float64) for name, y in targets.items()}
    if train.ndim == 2 and train.shape[1] == 1:  # a column of classes
        return _encode_targets({name: y[:, 0] for name, y in targets.items()}, numbers)
    if train.ndim == 2:
        if any(not np.isin(array, (0, 1)).all() for array in arrays):
            raise InputError("targets of shape (N, K) must be labels, 0 or 1", hint="for numbers, use protocol='ridge'")
        return "multilabel", np.arange(train.shape[1]), {name: y.astype(np.float32) for name, y in targets.items()}
    if train.dtype.kind == "f" and (train != np.round(train)).any():
        raise InputError(
            "y_train holds fractions; expected whole class numbers", hint="for numbers, use protocol='ridge'"
        )
    classes = np.unique(train)
    encoded = {name: _class_numbers(name, y, classes, train.dtype) for name, y in targets.items()}
    return "classification", classes, encoded


def _class_numbers(name: str, labels: NDArray[Any], classes: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Return the number (N,) of the class of each row; -1, -2, ...: one for each class missing from training."""
    numbers = {value: number for number, value in enumerate(classes.tolist())}
    missing = sorted(set(labels.tolist()) - set(numbers))
    numbers |= {value: -1 - number for number, value in enumerate(missing)}
    indices = np.array([numbers[value] for value in labels.tolist()], np.int64)
    if name == "val" and (indices < 0).any():
        raise InputError(f"y_val has the class {labels[indices < 0][0].item()!r}, which y_train does not have")
    if not (indices >= 0).any() and len(labels):
        raise InputError(
            f"y_{name} and y_train have no class in common; for example, y_{name} has {labels[0].item()!r} "
            f"({labels.dtype}) and y_train has {classes[0].item()!r} ({dtype})"
        )
    return indices
