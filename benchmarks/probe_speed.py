"""The 45 strengths of SimCLR's protocol, side by side, against a plain loop of scikit-learn, in turn.

    layertap embed ../shared/data/cifar10-6k -o outputs/cifar10-6k
    python -m benchmarks.probe_speed outputs/cifar10-6k [--scaling standardise] [--rounds 3] [--large]

Nine tenths of the training rows are fitted on, a tenth chooses; scaling is of the rows that are fitted on. `--large`
only times ours, on ten times as many rows, made by repetition with noise.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from benchmarks.common import parser, ratio
from extract import FeatureReader
from extract.analysis.probe.feature_matrix import FeatureRows, Scaling
from extract.analysis.probe.logistic import LogisticRegression

STRENGTHS = np.logspace(-6, 5, 45)


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


def main() -> None:
    """Measure, and print."""
    options = parser(__doc__)
    options.add_argument("data_set")
    options.add_argument("--layer", default="embedding")
    options.add_argument("--scaling", choices=["none", "standardise"], default="standardise")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large", action="store_true")
    arguments = options.parse_args()
    warnings.filterwarnings("ignore")  # scikit-learn's, where it stops before it has converged
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
