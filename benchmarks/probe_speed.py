"""Probes against a plain loop of scikit-learn: SimCLR's 45 strengths on a data set, or every protocol on drawn rows.

    layertap embed ../shared/data/cifar10-6k -o outputs/cifar10-6k
    python -m benchmarks.probe_speed outputs/cifar10-6k [--scaling standardise] [--rounds 3] [--large]
    OMP_NUM_THREADS=1 python -m benchmarks.probe_speed [--protocols clip fewshot] [--sizes 100x10x3 600x512x10]

Nine tenths of the training rows are fitted on, a tenth chooses; scaling is of the rows that are fitted on. `--large`
only times ours, on ten times as many rows, made by repetition with noise. Without a data set, CPU seconds of
`linear_probe` are compared with those of scikit-learn for exactly the fits that the protocol asks for.
"""

from __future__ import annotations

import time
import warnings
from itertools import product
from unittest.mock import patch

import numpy as np
from scipy.special import logsumexp
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.linear_model import Ridge
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler, normalize

from benchmarks.common import parser, ratio
from extract import FeatureReader
from extract.analysis.probe import linear_probe, protocols
from extract.analysis.probe.feature_matrix import FeatureRows, Scaling
from extract.analysis.probe.logistic import LogisticRegression
from extract.errors import InputError

STRENGTHS = np.logspace(-6, 5, 45)
LOGISTIC = ["clip", "simclr", "dinov2-logreg", "fewshot"]
KS, ALPHAS = (10, 20, 100, 200), np.logspace(-5, 6, 45)
SIZES = [
    "100x10x3", "100x512x3", "100x2048x3", "600x30x5", "600x512x10", "600x2048x10", "2000x10x10", "2000x64x10",
    "2000x512x10", "2000x2048x10", "2000x512x2", "2000x64x100",
]  # fmt: skip


def ours(x, y, x_val, y_val, scaling):
    """Accuracies on the validation rows, one for each strength."""
    started = time.perf_counter()
    scale = Scaling.of(scaling, FeatureRows.of(x))
    fit = LogisticRegression(FeatureRows.of(x).scaled(scale), y, int(y.max()) + 1).fit(STRENGTHS.tolist())
    seen = FeatureRows.of(x_val).scaled(scale).between(0, len(x_val))
    found = [float(((seen @ w.T + b).argmax(1) == y_val).mean()) for w, b in zip(fit.weights, fit.biases, strict=True)]
    return time.perf_counter() - started, found


def loop(x, y, x_val, y_val, scaling):
    """The same, as one writes it by hand."""
    started, found = time.perf_counter(), []
    for strength in STRENGTHS:
        first = StandardScaler() if scaling == "standardise" else FunctionTransformer()
        model = make_pipeline(first, Reference(C=strength, max_iter=1000))
        found.append(float(model.fit(x, y).score(x_val, y_val)))
    return time.perf_counter() - started, found


def drawn(size):
    """Rows of classes whose means are drawn, and their classes."""
    n, d, k = (int(part) for part in size.split("x"))
    generator = np.random.default_rng(0)
    y = np.arange(n) % k
    means = generator.normal(size=(k, d))
    return (means[y] + 2 * generator.normal(size=(n, d))).astype(np.float32), y


def fits_of(x, y, protocol):
    """(rows, classes, C) of every fit that a protocol asks for, without those that it compares ahead."""
    fits = []

    class Recorded(LogisticRegression):
        def __init__(self, rows, targets, *given, **how):
            self.data = rows.between(0, len(rows)), targets
            super().__init__(rows, targets, *given, **how)

        def fit(self, strengths, until_settled=False):
            fits.extend((*self.data, strength) for strength in strengths)
            return super().fit(strengths, until_settled)

        def left_out_scores(self, strengths, folds):
            rows, targets = self.data
            left = [draw != fold for draw in folds.T for fold in range(folds.max() + 1)]
            fits.extend((rows[kept], targets[kept], strength) for kept in left for strength in strengths)
            return super().left_out_scores(strengths, folds)

    search = protocols._coarse_to_fine
    with patch.multiple(protocols, LogisticRegression=Recorded, _coarse_to_fine=lambda compare, **_: search(compare)):
        linear_probe(x, y, x, y, protocol=protocol, device="cpu")
    return fits


def neighbours_by_hand(x, y):
    """What the protocol knn does: k chosen on a tenth of the rows, then all rows predicted from all."""

    def predicted(rows, targets, queries, k):
        def weigh(distances):
            return np.exp((1 - distances) / 0.07)

        model = KNeighborsClassifier(min(k, len(rows)), weights=weigh, metric="cosine", algorithm="brute")
        return model.fit(rows, targets).predict_proba(queries)

    tenth = len(x) // 10
    for k in KS:
        predicted(x[tenth:], y[tenth:], x[:tenth], k)
    predicted(x, y, x, KS[0])


def centroids_by_hand(x, y):
    """What the protocol centroid does: the validation score of five folds, drawn four times, then all rows."""
    x = normalize(x)
    for draw in range(4):
        for fit, left_out in StratifiedKFold(5, shuffle=True, random_state=draw).split(x, y):
            NearestCentroid().fit(x[fit], y[fit]).predict(x[left_out])
    NearestCentroid().fit(x, y).predict(x)


def ridge_by_hand(x, y):
    """What the protocol ridge does: 45 strengths on nine tenths of the rows, and one on all."""
    tenth = len(x) // 10
    for rows, targets, alphas in ((x[tenth:], y[tenth:], ALPHAS), (x, y, ALPHAS[:1])):
        scaled = StandardScaler().fit_transform(rows)
        for alpha in alphas:
            Ridge(alpha=alpha).fit(scaled, targets).predict(scaled)


BY_HAND = {"knn": neighbours_by_hand, "centroid": centroids_by_hand, "ridge": ridge_by_hand}
TOLERANCES = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)  # of scikit-learn; the first is its default
AT_THE_OPTIMUM = 1e-6  # relative


def objective(model, rows, targets, strength):
    """What scikit-learn minimises."""
    scores = model.decision_function(rows)
    scores = np.stack([0 * scores, scores], 1) if scores.ndim == 1 else scores
    losses = logsumexp(scores, axis=1) - scores[np.arange(len(targets)), np.searchsorted(model.classes_, targets)]
    return strength * losses.sum() + (model.coef_**2).sum() / 2


def at_the_optimum(rows, targets, strength):
    """CPU seconds of scikit-learn with the first tolerance that reaches the least objective of all."""
    found = []
    for tolerance in TOLERANCES:
        started = time.process_time()
        model = Reference(C=strength, max_iter=20_000, tol=tolerance).fit(rows, targets)
        found.append((time.process_time() - started, objective(model, rows.astype(np.float64), targets, strength)))
    least = min(value for _, value in found)
    return next(seconds for seconds, value in found if value <= least * (1 + AT_THE_OPTIMUM))


def by_hand(size, protocol):
    """Print CPU seconds of a protocol without logistic regression, and of scikit-learn."""
    x, y = drawn(size)
    targets = y.astype(np.float64) if protocol == "ridge" else y
    started = time.process_time()
    linear_probe(x, targets, x, targets, protocol=protocol, device="cpu")
    middle = time.process_time()
    BY_HAND[protocol](x, y)
    own, other = middle - started, time.process_time() - middle
    print(f"{size} {protocol}: {own:.3f} s, scikit-learn {other:.3f} s: {own / other:.2f} times", flush=True)


def each_protocol(sizes, names, optimum=False):
    """Print CPU seconds of every protocol and of scikit-learn."""
    for size, protocol in product(sizes, names):
        if protocol in BY_HAND:
            by_hand(size, protocol)
            continue
        x, y = drawn(size)
        try:
            fits = fits_of(x, y, protocol)
        except InputError as error:
            print(f"{size} {protocol}: {error}")
            continue
        started = time.process_time()
        linear_probe(x, y, x, y, protocol=protocol, device="cpu")
        middle = time.process_time()
        for rows, targets, strength in fits:
            Reference(C=strength, max_iter=1000).fit(rows, targets)
        own, other = middle - started, time.process_time() - middle
        print(f"{size} {protocol}: {own:.2f} s, scikit-learn {other:.2f} s for {len(fits)} fits: {own / other:.2f} "
              "times", flush=True)  # fmt: skip
        if optimum:
            seconds = sum(at_the_optimum(*fit) for fit in fits)
            print(f"    to the same objective: scikit-learn {seconds:.2f} s: {own / seconds:.2f} times", flush=True)


def main() -> None:
    """Measure, and print."""
    options = parser(__doc__)
    options.add_argument("data_set", nargs="?")
    options.add_argument("--protocols", nargs="+", default=[*LOGISTIC, *BY_HAND], choices=[*LOGISTIC, *BY_HAND])
    options.add_argument("--sizes", nargs="+", default=SIZES, help="rows x values x classes of drawn rows")
    options.add_argument("--optimum", action="store_true", help="also with tolerances that reach the optimum")
    options.add_argument("--layer", default="embedding")
    options.add_argument("--scaling", choices=["none", "standardise"], default="standardise")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large", action="store_true")
    arguments = options.parse_args()
    warnings.filterwarnings("ignore")  # scikit-learn's, where it stops before it has converged
    if arguments.data_set is None:
        each_protocol(arguments.sizes, arguments.protocols, arguments.optimum)
        return
    with FeatureReader(arguments.data_set) as reader:
        train = np.array(reader.splits) == "train"
        x, y = reader[arguments.layer][train], reader.labels[train]
    generator = np.random.default_rng(0)
    if arguments.large:
        spread = x.std(0)
        x = np.concatenate([x + 0.1 * spread * generator.normal(size=x.shape).astype(np.float32) for _ in range(10)])
        y = np.tile(y, 10)
    order = generator.permutation(len(x))
    out, left = np.sort(order[: len(x) // 10]), np.sort(order[len(x) // 10 :])
    given = (x[left], y[left], x[out], y[out], arguments.scaling)
    print(f"{len(left):,} x {x.shape[1]:,}, scaling {arguments.scaling}")
    times: dict[str, list[float]] = {"ours": [], "loop": []}
    for _ in range(arguments.rounds):
        for name, run in (("ours", ours), ("loop", loop)):
            if name == "loop" and arguments.large:
                continue
            seconds, found = run(*given)
            times[name].append(seconds)
            best = int(np.argmax(found))
            print(f"{name}: {seconds:.1f} s; best {found[best]:.4f} at C = {STRENGTHS[best]:.2g}", flush=True)
    if times["loop"]:
        print(f"the loop takes {ratio(times['loop'], times['ours']):.1f} times as long")


if __name__ == "__main__":
    main()
