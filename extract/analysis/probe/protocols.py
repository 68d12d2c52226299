"""Protocols of the literature for evaluating features: the model, the rows it is fitted on, the choice of its strength.

In every protocol, scaling statistics come from the fitted rows, hyper-parameters are chosen on validation rows, and
test rows are predicted at the end, by a probe chosen without them. Without validation rows, a tenth of the training
rows is held out for the choice, as in DINOv2 (the first of `torch.randperm` with the seed). The protocols clip and
simclr, whose papers use the validation rows of their data sets, choose on stratified folds of all training rows if a
tenth is less than 500 rows.

A tenth of few training rows cannot tell the strengths apart: two probes that disagree on a twentieth of m rows have
accuracies whose difference has a standard error of sqrt(0.05 / m), which is a point at 500 rows. With fewer rows,
strengths are compared on five stratified folds of all training rows (Kohavi 1995), drawn again until 500 rows are
predicted, at most four times. Accuracies within one standard error of the best then count as ties (Hastie, Tibshirani
and Friedman 2009, section 7.10).

By the metric on these rows, one of several layers can be chosen too. Protocols without a hyper-parameter compute it for
this alone. If the test rows chose the layer, its interval would lie too high, and backbones with many layers would seem
better (docs/benchmarks.md).

The papers choose the strength with the best accuracy on validation rows, and none specifies how to break ties. Here,
ties go to the smallest log loss on these rows, then to the strongest penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows, Labelled, Scaling, mean_of
from extract.analysis.probe.logistic import LogisticRegression
from extract.analysis.probe.metrics import average_precision
from extract.analysis.probe.model import LinearProbe
from extract.analysis.probe.nearest_rows import neighbour_shares
from extract.errors import InputError

__all__ = [
    "N_FOLDS", "PROTOCOLS", "SHOTS", "Fitted", "Protocol", "Settings", "clip", "fit_ridge", "knn", "primary",
    "standard_error", "stratified_folds",
]  # fmt: skip

SHOTS = (1, 2, 5, 10, 20)
_KS = (10, 20, 100, 200)
_REPEATS = 5  # draws of a few-shot probe
_FEW_ROWS = 50  # to choose on; on fewer, the error of an accuracy exceeds 14 points
_MOST_LEFT_OUT = 100  # rows a class that each draw predicts, besides the test rows
# Against scikit-learn's cross-validation by log loss, on 500 data sets of 15 to 1,000 rows (drawn as in the test of few
# rows), the best on a tenth loses 0.6 points of accuracy (35 on one) and 0.06 of calibration error; folds gain 0.09
# points (standard error 0.04, at worst -3.4) and lose 0.0025. A `val` split, dinov2-logreg and fewshot define the rows
# to choose on. All folds and strengths are fitted side by side: a fold is a column of weights.
ENOUGH_ROWS = 500  # to choose on; see above
N_FOLDS = 5
_MOST_DRAWS = 4

_SCORES = 1 << 26  # held at once while strengths are compared
# In nats per validation row. Smaller differences of the log loss count as ties: for separable classes, the log loss
# keeps falling by ever smaller amounts as the penalty goes to zero.
_EQUAL_LOG_LOSS = 1e-3
_WIDEST_RIDGE = 8_000  # largest min(N, D), the side of the matrix whose eigenvectors are computed
_MOST_RIDGE_BYTES = 8 << 30  # largest size of the rows in double precision, if N < D


@dataclass(frozen=True)
class Settings:
    """Settings of a protocol.

    Attributes:
        task: "classification", "multilabel" or "regression".
        classes: (K,) names of the classes, labels or targets.
        scaling: scaling of the features: "none", "l2" or "standardise".
        balanced: weight rows by N / (K * rows of their class), as scikit-learn's class_weight="balanced".
        seed: seed of all random choices.
        device: device to compute on.
        memory_bytes: limit for the features and variables held at once.
    """

    task: str
    classes: NDArray[Any]
    scaling: str
    balanced: bool
    seed: int
    device: torch.device
    memory_bytes: int


Scorer = Callable[[FeatureRows], NDArray[np.float32]]


@dataclass(frozen=True)
class Fitted:
    """Result of fitting by a protocol.

    Attributes:
        scores: function of rows that returns (N, K) scores.
        n_train: number of rows of the final fit.
        swept: name of the chosen hyper-parameter: "C", "lambda", "alpha", "k"; empty: none.
        chosen: value of the chosen hyper-parameter.
        curve: (value, primary metric on the validation rows) for all values tried, in ascending order.
        n_val: number of rows used for the choice.
        chosen_on: these rows, in words; empty: no choice.
        model: probe that computes the scores and can be saved; None if it would be as large as its training rows.
        threshold: scores above it mean that the label is present.
        objective: objective of the final fit, for logistic regression.
        notes: warnings about the result.
        validation: primary metric on the rows for the choice, if there is no hyper-parameter.
    """

    scores: Scorer
    n_train: int
    swept: str = ""
    chosen: float = float("nan")
    curve: Sequence[tuple[float, float]] = ()
    n_val: int = 0
    chosen_on: str = ""
    model: LinearProbe | None = None
    threshold: float = 0.0
    objective: float | None = None
    notes: Sequence[str] = field(default_factory=list)
    validation: float = math.nan

    @property
    def choice(self) -> dict[str, Any]:
        """How the hyper-parameter was chosen: attributes that `ProbeResult` has too."""
        names = ("swept", "chosen", "chosen_on", "curve", "objective")
        validation = max((value for _, value in self.curve), default=self.validation)
        return {name: getattr(self, name) for name in names} | {"validation": validation}


@dataclass(frozen=True)
class Protocol:
    """A protocol of the literature.

    Attributes:
        fit: function of the training rows, the validation rows or None, and the settings; None for few-shot, which
            fits many probes.
        about: short description.
        tasks: supported tasks.
        scaling: default scaling of the features.
    """

    fit: Callable[[Labelled, Labelled | None, Settings], Fitted] | None
    about: str
    tasks: tuple[str, ...] = ("classification", "multilabel")
    scaling: str = "none"


def simclr(train: Labelled, val: Labelled | None, settings: Settings) -> Fitted:
    """Logistic regression: best of 45 strengths from 1e-6 to 1e5 on validation rows, refitted with these rows.

    SimCLR (Chen et al. 2020), appendix B.8, following Kornblith, Shlens and Le 2019, appendix A.5: L-BFGS, no
    augmentation. The range is interpreted as that of C.
    """
    return _refit(_choice(train, val, settings), settings, np.logspace(-6, 5, 45), "C")


def dinov2_logreg(train: Labelled, val: Labelled | None, settings: Settings) -> Fitted:
    """Logistic regression: C of 10^linspace(-6, 5, 45), chosen on a tenth of the training rows, refitted on all rows.

    DINOv2 (Oquab et al. 2023), `dinov2/eval/log_regression.py`: at most 1,000 iterations; its seed is 0, which is also
    the default here. Validation rows, if given, are added to the training rows.
    """
    all_rows = train if val is None else train + val
    choice = _on_validation(*held_out(all_rows, None, settings), settings)
    return _refit(choice, settings, 10 ** np.linspace(-6, 5, 45), "C")


def clip(train: Labelled, val: Labelled | None, settings: Settings) -> Fitted:
    """Logistic regression: lambda = 1 / C searched from coarse to fine on validation rows, refitted with these rows.

    CLIP (Radford et al. 2021), appendix A.3: 1e-6 to 1e6 in 96 logarithmic steps. The search tries 1e-6, 1e-4, ...,
    1e6 first, then the midpoints next to the best value, down to 8 steps in a factor of ten; at most 1,000 iterations.
    """
    return _refit(_choice(train, val, settings), settings, None, "lambda")


def knn(train: Labelled, val: Labelled | None, settings: Settings) -> Fitted:
    """Vote of the 10, 20, 100 or 200 nearest rows by cosine, each with the weight exp(cosine / 0.07).

    DINO (Caron et al. 2021), `eval_knn.py`; k is chosen on validation rows, which then become neighbours too.
    """
    fit, validation, chosen_on = held_out(train, val, settings)
    ks = [k for k in _KS if k <= len(fit)] or [len(fit)]
    n_classes, resources = len(settings.classes), (settings.device, settings.memory_bytes)

    def shares_of(bank: Labelled) -> Callable[[FeatureRows, Sequence[int]], list[NDArray[np.float32]]]:
        scaling = Scaling.of(settings.scaling, bank.rows)  # once: rows are scored in many calls
        rows, targets = bank.rows.scaled(scaling), bank.targets
        return lambda queries, ks: neighbour_shares(rows, targets, n_classes, queries.scaled(scaling), ks, *resources)

    votes = zip(ks, shares_of(fit)(validation.rows, ks), strict=True)
    curve = [(float(k), primary(scores, validation.targets, settings.task)) for k, scores in votes]
    k = ks[int(np.argmax([value for _, value in curve]))]
    neighbours, notes = fit + validation, _note_on_few_rows(validation)
    shares = shares_of(neighbours)

    def of_rows(rows: FeatureRows) -> NDArray[np.float32]:
        return shares(rows, [k])[0]  # not of a model with probabilities: most are exactly 0

    return Fitted(of_rows, len(neighbours), "k", k, curve, len(validation), chosen_on, threshold=0.5, notes=notes)


def centroid(train: Labelled, val: Labelled | None, settings: Settings) -> Fitted:
    """Class with the nearest mean by cosine; there is no hyper-parameter, so validation rows are used for training.

    Nearest class mean (Mensink et al. 2013; Snell, Swersky and Zemel 2017), with features of length 1. Before that,
    validation rows are predicted from the training rows alone.
    """
    if val is None and train.n_groups // 10 < ENOUGH_ROWS:
        folds = _folds(train, settings.seed)
        left_out = [draw == fold for draw in folds.T for fold in range(N_FOLDS)]
        splits = [(train.subset(np.flatnonzero(~rows)), train.subset(np.flatnonzero(rows)))
                  for rows in left_out if rows.any()]  # fmt: skip
        chosen_on = train.in_words(_folds_in_words(folds)) if splits else ""
    else:
        fit, validation, chosen_on = held_out(train, val, settings)
        splits = [(fit, validation)]
    right = [_class_means(fit, settings).scores(rows.rows).argmax(1) == rows.targets for fit, rows in splits]
    on_validation = float(np.concatenate(right).mean()) if right else math.nan
    all_rows = train if val is None else train + val
    model = _class_means(all_rows, settings)
    return Fitted(model.scores, len(all_rows), chosen_on=chosen_on, model=model, validation=on_validation)


def _class_means(train: Labelled, settings: Settings) -> LinearProbe:
    scaling = Scaling.of(settings.scaling, train.rows)
    sums = np.zeros((len(settings.classes), train.rows.width))
    for start, block in train.rows.scaled(scaling).blocks():
        targets = train.targets[start : start + len(block)]
        for class_number in np.unique(targets):
            sums[class_number] += block[targets == class_number].sum(0, dtype=np.float64)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    means = (sums / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    if len(means) == 2:
        means = means[1:] - means[:1]
    zero = np.zeros(len(means), np.float32)
    return LinearProbe(means, zero, settings.classes, settings.task, scaling, has_probabilities=False)


def ridge(train: Labelled, val: Labelled | None, settings: Settings) -> Fitted:
    """Ridge regression: best of 45 alphas from 1e-5 to 1e6 on validation rows, refitted with these rows.

    Hoerl and Kennard 1970; as scikit-learn's `Ridge`, |X w + b - y|^2 + alpha |w|^2, on standardised features.
    """
    fit, validation, chosen_on = held_out(train, val, settings)
    alphas = np.logspace(-5, 6, 45)
    scaling = Scaling.of(settings.scaling, fit.rows)
    weights, biases = fit_ridge(fit.rows.scaled(scaling), fit.targets, alphas.tolist())
    results = score_on_validation(weights, biases, validation.rows.scaled(scaling), validation.targets, settings.task)
    curve = [(alpha, result.value) for alpha, result in zip(alphas.tolist(), results, strict=True)]
    alpha = float(alphas[::-1][position_of_best(results[::-1])])
    all_rows = fit + validation
    scaling = Scaling.of(settings.scaling, all_rows.rows)
    weights, biases = fit_ridge(all_rows.rows.scaled(scaling), all_rows.targets, [alpha])
    model = LinearProbe(weights[0], biases[0], settings.classes, settings.task, scaling, has_probabilities=False)
    notes = _note_on_range("alpha", alpha, curve) + _note_on_few_rows(validation)
    return Fitted(model.scores, len(all_rows), "alpha", alpha, curve, len(validation), chosen_on, model, notes=notes)


_CLASSES = ("classification",)
PROTOCOLS = {
    "clip": Protocol(clip, "logistic regression, 96 lambdas searched from coarse to fine"),
    "simclr": Protocol(simclr, "logistic regression, 45 C from 1e-6 to 1e5"),
    "dinov2-logreg": Protocol(dinov2_logreg, "logistic regression, 45 C, chosen on a tenth of the training rows"),
    "knn": Protocol(knn, "10, 20, 100 or 200 nearest rows by cosine, temperature 0.07", scaling="l2"),
    "centroid": Protocol(centroid, "the nearest class mean by cosine", _CLASSES, "l2"),
    "fewshot": Protocol(None, "logistic regression on 1, 2, 5, 10, 20 rows a class, five draws", _CLASSES),
    "ridge": Protocol(ridge, "ridge regression, 45 alphas from 1e-5 to 1e6", ("regression",), "standardise"),
}


def held_out(train: Labelled, val: Labelled | None, settings: Settings) -> tuple[Labelled, Labelled, str]:
    """Return the rows to fit on, and the rows for choosing the strength, also in words: `val`, or a tenth of `train`.

    Raises:
        InputError: there are fewer than 10 training rows, or groups of them, and no validation rows.
    """
    if val is not None:
        return train, val, _VALIDATION
    n_groups, count = train.n_groups, train.n_groups // 10
    if not count:
        raise _nothing_to_choose_on(train, f"{n_groups} {{}} are too few to hold out a tenth")
    order = torch.randperm(n_groups, generator=torch.Generator().manual_seed(settings.seed)).numpy()
    is_held_out = np.isin(train.grouping[1], order[:count])
    fit, validation = train.subset(np.flatnonzero(~is_held_out)), train.subset(np.flatnonzero(is_held_out))
    return fit, validation, train.in_words("a tenth of the training rows")


def _nothing_to_choose_on(train: Labelled, problem: str) -> InputError:
    """Return the error for training rows, named by {} in the problem, of which none can be left out."""
    noun = "training rows" if train.n_groups == len(train) else "groups of training rows"
    return InputError(
        f"{problem.format(noun)} for choosing hyper-parameters",
        hint="give validation rows, or use the protocol centroid, which has no hyper-parameters",
    )


def few_shot(
    train: Labelled, val: Labelled | None, test: Labelled, settings: Settings
) -> tuple[dict[int, list[float]], list[tuple[float, float]]]:
    """Compute top-1 of probes fitted on a few rows of each class.

    Returns:
        shots -> top-1 on the test rows of each of 5 draws; and (shots, mean top-1 on training rows that were not
        drawn), by which layers can be chosen.

    The strength is searched as in `clip`, on min(shots, 4) validation rows per class, as in CoOp (Zhou et al. 2022, and
    its code). These rows come from the validation rows, or from training rows that were not drawn. In each draw, the
    rows of fewer shots are part of the rows of more shots. Numbers of shots for which a class has too few rows are
    skipped. Of each group of training rows, a draw has one row at most.

    Raises:
        InputError: a class has too few rows for one shot.
    """
    values: dict[int, list[float]] = {}
    left_out_values: dict[int, list[float]] = {}
    n_classes, noun = len(settings.classes), train.in_words("training rows")
    generators = [np.random.default_rng([settings.seed, repeat]) for repeat in range(_REPEATS)]
    independent = [_one_of_each_group(train, generator) for generator in generators]
    fewest = min(int(np.bincount(rows.targets, minlength=n_classes).min()) for rows in independent)
    fewest_val = fewest if val is None else int(np.bincount(val.targets, minlength=n_classes).min())
    for train, generator in zip(independent, generators, strict=True):
        order = _shuffle_by_class(train.targets, n_classes, generator)
        source, order_val = train, [rows[::-1] for rows in order]  # without validation rows, the last training rows
        if val is not None:
            source, order_val = val, _shuffle_by_class(val.targets, n_classes, generator)
        for shots in SHOTS:
            n_val = min(shots, 4)
            n_kept = n_val if val is None else 0
            if shots + n_kept > fewest or n_val > fewest_val:
                continue
            drawn = _chosen(train, [rows[:shots] for rows in order]).held()
            validation = _chosen(source, [rows[:n_val] for rows in order_val])
            unseen = _chosen(train, [rows[shots : len(rows) - n_kept][:_MOST_LEFT_OUT] for rows in order])
            probes: dict[float, LinearProbe] = {}
            choice = _on_validation(drawn, validation.held(), _VALIDATION, settings, probes)
            model = probes[_coarse_to_fine(choice.compare, ahead=True)[1]]
            for predicted, of_shots in ((test, values), (unseen if len(unseen) else validation, left_out_values)):
                top1 = primary(model.scores(predicted.rows), predicted.targets, settings.task)
                of_shots.setdefault(shots, []).append(top1)
    if not values:
        raise InputError(
            f"a class has {fewest} {noun}" + ("" if val is None else f" and {fewest_val} validation rows")
            + "; few-shot needs at least one for training and one for validation"
        )  # fmt: skip
    return values, [(float(shots), float(np.mean(each))) for shots, each in left_out_values.items()]


def _chosen(rows: Labelled, of_classes: Sequence[NDArray[np.int64]]) -> Labelled:
    return rows.subset(np.sort(np.concatenate(of_classes)))


def _one_of_each_group(rows: Labelled, generator: np.random.Generator) -> Labelled:
    """Draw one row of each group."""
    if rows.n_groups == len(rows):
        return rows
    order = generator.permutation(len(rows))
    _, first = np.unique(rows.grouping[1][order], return_index=True)
    return rows.subset(np.sort(order[first]))


class ValidationScore(NamedTuple):
    """Result of a strength on the validation rows.

    Attributes:
        value: the primary metric.
        log_loss: in nats; 0 for regression.
        margin: values that are at most this much smaller than this one, if it is the best, count as equal.
    """

    value: float
    log_loss: float
    margin: float = 0.0


Compare = Callable[[Sequence[float]], list[ValidationScore]]  # of values of C


@dataclass(frozen=True)
class _Choice:
    """How strengths are compared.

    Attributes:
        compare: evaluates values of C.
        all_rows: rows of the final fit.
        judged: rows used for the choice.
        chosen_on: these rows, in words.
        folds: whether the comparison is on folds, by fits until predictions have settled.
    """

    compare: Compare
    all_rows: Labelled
    judged: Labelled
    chosen_on: str
    folds: bool = False


# The curve of (C, primary metric) in ascending order, and the best strength (`position_of_best`).
Sweep = tuple[list[tuple[float, float]], float]
_VALIDATION = "validation rows"


def _choice(train: Labelled, val: Labelled | None, settings: Settings) -> _Choice:
    """Compare on the validation rows; without them, on a tenth of the training rows, or on folds of few rows."""
    if val is None and train.n_groups // 10 < ENOUGH_ROWS:
        return _on_folds(train, settings)
    return _on_validation(*held_out(train, val, settings), settings)


def _on_validation(
    train: Labelled, val: Labelled, chosen_on: str, settings: Settings, probes: dict[float, LinearProbe] | None = None
) -> _Choice:
    """Compare on validation rows; the probes that are compared are put into `probes`."""
    problem, scaling = _problem(train, settings)
    rows = val.rows.scaled(scaling)

    def compare(strengths: Sequence[float]) -> list[ValidationScore]:
        fit = problem.fit(strengths)
        for strength, weights, biases in zip(strengths, fit.weights, fit.biases, strict=True):
            if probes is not None:
                probes[strength] = LinearProbe(weights, biases, settings.classes, settings.task, scaling)
        return score_on_validation(fit.weights, fit.biases, rows, val.targets, settings.task)

    return _Choice(compare, train + val, val, chosen_on)


def _on_folds(train: Labelled, settings: Settings) -> _Choice:
    """Compare on folds.

    Raises:
        InputError: no class has two training rows, or two groups of them.
    """
    folds = _folds(train, settings.seed)
    judged = train.subset(np.flatnonzero(folds[:, 0] >= 0))
    if not len(judged):
        raise _nothing_to_choose_on(train, "no class has two {}, so no row can be held out")
    problem, _ = _problem(train, settings)

    def compare(strengths: Sequence[float]) -> list[ValidationScore]:
        return [score_left_out(scores, train.targets, settings.task, folds)
                for scores in problem.left_out_scores(strengths, folds)]  # fmt: skip

    return _Choice(compare, train, judged, train.in_words(_folds_in_words(folds)), folds=True)


def _folds(train: Labelled, seed: int) -> NDArray[np.int64]:
    """Return the folds (N, R) of rows: those of their groups, stratified by the first row of each."""
    first, places = train.grouping
    folds = stratified_folds(train.targets[first], seed)[places]
    return folds[:, : -(-ENOUGH_ROWS // len(train))]


def _folds_in_words(folds: NDArray[np.int64]) -> str:
    draws = folds.shape[1]
    return f"{N_FOLDS} folds of the training rows" + (f", drawn {draws} times" if draws > 1 else "")


def _problem(train: Labelled, settings: Settings) -> tuple[LogisticRegression, Scaling]:
    scaling, weights = Scaling.of(settings.scaling, train.rows), None
    if settings.balanced:
        counts = np.bincount(train.targets)
        weights = (len(train) / (np.count_nonzero(counts) * counts[train.targets])).astype(np.float32)
    problem = LogisticRegression(
        train.rows.scaled(scaling), train.targets, len(settings.classes),
        sample_weight=weights, device=settings.device, memory_bytes=settings.memory_bytes,
    )  # fmt: skip
    return problem, scaling


def _compare_all(compare: Compare, strengths: NDArray[np.float64]) -> Sweep:
    """Compare all strengths, side by side."""
    results = compare(strengths.tolist())
    curve = [(strength, result.value) for strength, result in zip(strengths.tolist(), results, strict=True)]
    return curve, float(strengths[position_of_best(results)])  # `strengths` starts with the strongest penalty


def _coarse_to_fine(compare: Compare, ahead: bool = False) -> Sweep:
    """Search as CLIP does: every sixteenth of 97 values, then the midpoints on both sides of the best.

    Args:
        compare: evaluates values of C.
        ahead: whether to compare what the next round may need too. In small problems, a round costs as much for six
            values as for two.
    """
    known: dict[int, ValidationScore] = {}
    compared: dict[int, ValidationScore] = {}
    steps = ahead_of = list(range(0, 97, 16))
    for distance in (8, 4, 2, 1, 0):
        if not compared.keys() >= set(steps):
            compared |= zip(ahead_of, compare([10 ** (6 - step / 8) for step in ahead_of]), strict=True)  # 1 / lambda
        known |= {step: compared[step] for step in steps}
        from_strongest = sorted(known, reverse=True)
        best = from_strongest[position_of_best([known[step] for step in from_strongest])]
        steps = [step for step in (best - distance, best + distance) if 0 <= step <= 96 and step not in known]
        if not steps:
            break
        further = [best + sign * part * distance // 2 for sign in (-1, 1) for part in (1, 3)] if distance > 1 else []
        ahead_of = steps + [step for step in further if ahead and 0 <= step <= 96 and step not in compared]
    return [(10 ** (6 - step / 8), known[step].value) for step in from_strongest], 10 ** (6 - best / 8)


def _refit(choice: _Choice, settings: Settings, strengths: NDArray[np.float64] | None, swept: str) -> Fitted:
    """Choose a strength, of all `strengths` or from coarse to fine, and fit its probe on all rows."""
    curve, chosen = _coarse_to_fine(choice.compare) if strengths is None else _compare_all(choice.compare, strengths)
    largest = max(strength for strength, _ in curve)
    problem, scaling = _problem(choice.all_rows, settings)
    fit = problem.fit([chosen], until_settled=choice.folds)  # as the probes that were compared
    model = LinearProbe(fit.weights[0], fit.biases[0], settings.classes, settings.task, scaling)
    if swept == "lambda":
        curve, chosen = [(1 / c, value) for c, value in reversed(curve)], 1 / chosen
    notes = _note_on_scale(swept, problem.deviation, largest * len(choice.all_rows))
    notes += _note_on_range(swept, chosen, curve) + _note_on_few_rows(choice.judged)
    if not fit.converged[0]:
        notes.append(_note_on_iterations(f"{swept} = {chosen:.3g}", int(fit.iterations[0]), bool(fit.separated[0])))
    return Fitted(
        model.scores, len(choice.all_rows), swept, chosen, curve, len(choice.judged), choice.chosen_on, model,
        objective=float(fit.objectives[0]), notes=notes,
    )  # fmt: skip


def _shuffle_by_class(
    targets: NDArray[np.int64], n_classes: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return the rows of each class in random order."""
    order = np.argsort(targets, kind="stable")
    edges = np.searchsorted(targets[order], np.arange(1, n_classes))
    return [generator.permutation(rows) for rows in np.split(order, edges)]


def _note_on_iterations(chosen: str, iterations: int, separated: bool) -> str:
    """Return what it means that the final fit reached the limit of iterations."""
    if separated:
        return (
            f"the classes of the training rows are separated completely: with {chosen} all of these rows are right, "
            f"and further iterations than {iterations:,} would only make the probabilities more extreme"
        )
    return f"{chosen} had not converged after {iterations:,} iterations; --scaling standardise usually converges sooner"


def _note_on_scale(swept: str, deviation: float, weight: float) -> list[str]:
    """Return a note if even the weakest penalty exceeds the curvature of the loss, deviation^2 / 4, on every axis."""
    if weight * deviation**2 / 4 >= 1:
        return []
    return [
        f"the features vary so little (standard deviation {deviation:.1g}) that every {swept} keeps the weights near "
        "zero; use --scaling standardise (scaling='standardise')"
    ]


def _note_on_range(swept: str, chosen: float, curve: Sequence[tuple[float, float]]) -> list[str]:
    """Return a note if the chosen value is the first or the last."""
    values = [value for value, _ in curve]
    return [f"{swept} = {chosen:.3g} is at the end of its range"] if chosen in (min(values), max(values)) else []


def _note_on_few_rows(judged: Labelled) -> list[str]:
    """Return a note if the choice is made on fewer than 50 rows, or groups of rows."""
    noun = "rows" if len(judged) == judged.n_groups else "groups of rows"
    return [f"chosen on only {judged.n_groups} {noun}"] if judged.n_groups < _FEW_ROWS else []


def fit_ridge(
    rows: FeatureRows, targets: NDArray[np.float64], alphas: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Minimise |X w + b - y|^2 + alpha |w|^2, the objective of scikit-learn's `Ridge(alpha)`, for every alpha.

    One eigendecomposition serves all alphas.

    Args:
        rows: (N, D), read in two passes.
        targets: (N, K).
        alphas: M values above zero.

    Returns:
        (M, K, D) weights and (M, K) biases, in double precision: float32 cannot count the seconds of a year.

    Raises:
        InputError: N and D both exceed 8,000; or N < D and the rows exceed 8 GiB in double precision.
    """
    count, width = len(rows), rows.width
    if min(count, width) > _WIDEST_RIDGE or (count < width and 8 * count * width > _MOST_RIDGE_BYTES):
        raise InputError(
            f"ridge regression of {count:,} rows of {width:,} values needs too much memory",
            hint=f"any number of rows is possible with at most {_WIDEST_RIDGE:,} values a row: store the layer with a "
            "pooling",
        )
    mean = mean_of(rows)
    mean_target = targets.mean(0)
    centred_targets = targets - mean_target
    if count < width:
        # w = X^T (X X^T + alpha)^-1 y, which is equal by the push-through identity.
        centred = rows.between(0, count).astype(np.float64) - mean
        values, vectors = np.linalg.eigh(centred @ centred.T)
        projected, backward = vectors.T @ centred_targets, centred.T @ vectors
    else:
        moments, products = np.zeros((width, width)), np.zeros((width, targets.shape[1]))
        for start, block in rows.blocks():
            centred_block = block - mean
            moments += centred_block.T @ centred_block
            products += centred_block.T @ centred_targets[start : start + len(block)]
        values, backward = np.linalg.eigh(moments)
        projected = backward.T @ products
    weights = np.stack([(backward @ (projected / (np.maximum(values, 0) + alpha)[:, None])).T for alpha in alphas])
    return weights, mean_target - weights @ mean


def primary(scores: NDArray[Any], targets: NDArray[Any], task: str) -> float:
    """Return the primary metric: top-1 for classification, mAP for multilabel, R^2 for regression."""
    if task == "classification":
        return float((scores.argmax(1) == targets).mean())
    if task == "multilabel":
        precisions = average_precision(scores, targets)
        return float(np.nanmean(precisions)) if np.isfinite(precisions).any() else 0.0
    spread = ((targets - targets.mean(0)) ** 2).sum(0)
    return float(np.mean(1 - ((scores - targets) ** 2).sum(0) / np.where(spread > 0, spread, 1)))


def position_of_best(scores: Sequence[ValidationScore]) -> int:
    """Return the position of the best strength; `scores` starts with the strongest penalty."""
    best = max(scores)
    equal = [score.value >= best.value - best.margin for score in scores]
    least = min(score.log_loss for score, is_equal in zip(scores, equal, strict=True) if is_equal)
    return next(i for i, score in enumerate(scores) if equal[i] and score.log_loss <= least + _EQUAL_LOG_LOSS)


def standard_error(accuracy: float, count: int) -> float:
    """Return the standard error of an accuracy on `count` rows."""
    return math.sqrt(max(0.0, accuracy * (1 - accuracy)) / count)


def stratified_folds(targets: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """Assign rows to five folds, in several draws.

    Args:
        targets: (N,) classes, each of which is spread over the folds; or (N, K) labels, which are not.
        seed: seed of the draws.

    Returns:
        (N, R) fold numbers; -1 for the only row of a class, which is never left out.
    """
    count = len(targets)
    generator = np.random.default_rng(seed)
    n_draws = min(_MOST_DRAWS, -(-ENOUGH_ROWS // count))
    folds = np.empty((count, n_draws), np.int64)
    for draw in range(n_draws):
        order = generator.permutation(count)
        if targets.ndim == 1:
            order = order[np.argsort(targets[order], kind="stable")]
        folds[order, draw] = np.arange(count) % N_FOLDS
    if targets.ndim == 1:
        folds[np.bincount(targets)[targets] == 1] = -1
    return folds


def score_left_out(
    scores: NDArray[np.float32], targets: NDArray[Any], task: str, folds: NDArray[np.int64]
) -> ValidationScore:
    """Evaluate a strength by the scores (R, N, K) of rows by probes fitted without these rows, averaged over R draws.

    The margin is the standard error of an accuracy; 0 for multilabel.
    """
    left_out = folds[:, 0] >= 0
    known = targets[left_out]
    value, loss = np.mean([_value_and_loss(draw[left_out], known, task) for draw in scores], 0).tolist()
    return ValidationScore(value, loss, standard_error(value, len(known)) if task == "classification" else 0.0)


def _value_and_loss(scores: NDArray[Any], targets: NDArray[Any], task: str) -> tuple[float, float]:
    """Return the primary metric and the log loss of scores (N, K), which have one column for two classes.

    Scores that are not finite have the worst ones.
    """
    if task == "classification" and scores.shape[1] == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], 1)
    value, loss = primary(scores, targets, task), _log_loss(scores, targets, task)
    return -math.inf if math.isnan(value) else value, math.inf if math.isnan(loss) else loss


def _log_loss(scores: NDArray[Any], targets: NDArray[Any], task: str) -> float:
    """Return the mean of -log p over rows, and over labels for multilabel; rows of unknown classes are skipped.

    Args:
        scores: (N, K) logits.
        targets: (N,) classes, negative if unknown; or (N, K) 0 or 1; or (N, K) numbers, for which the result is 0.
        task: see `score_on_validation`.
    """
    wide = scores.astype(np.float64)
    if task == "multilabel":
        return float(np.logaddexp(0, np.where(targets > 0, -wide, wide)).mean())
    known = np.flatnonzero(targets >= 0) if task == "classification" else np.zeros(0, np.int64)
    if not len(known):
        return 0.0
    return float((np.logaddexp.reduce(wide[known], axis=1) - wide[known, targets[known]]).mean())


def score_on_validation(
    weights: NDArray[Any], biases: NDArray[Any], rows: FeatureRows, targets: NDArray[Any], task: str
) -> list[ValidationScore]:
    """Evaluate probes on validation rows, some probes at a time.

    Args:
        weights: (M, K, D) for M strengths.
        biases: (M, K).
        rows: (N, D), scaled.
        targets: classes, labels or numbers of the rows.
        task: "classification", "multilabel" or "regression".
    """
    k = weights.shape[1]
    at_once = max(1, _SCORES // (k * len(rows)))
    results = []
    for first in range(0, len(weights), at_once):
        chunk, shift = weights[first : first + at_once], biases[first : first + at_once]
        scores = np.empty((len(rows), len(chunk), k), chunk.dtype)
        for start, block in rows.blocks():
            products = (block @ chunk.reshape(-1, chunk.shape[2]).T).reshape(-1, len(chunk), k)
            scores[start : start + len(block)] = products + shift
        results += [ValidationScore(*_value_and_loss(scores[:, i], targets, task)) for i in range(len(chunk))]
    return results
