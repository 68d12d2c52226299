"""Encoding models: a simulated cortex whose answers are known, and speed and memory against himalaya.

    python -m benchmarks.encoding_models cortex ../shared/data/cifar10-6k   # 2,000 photos, 10,000 voxels of three areas
    python -m benchmarks.encoding_models speed [--targets 20000] [--folds 5] [--folds-of-himalaya 5]
    python -m benchmarks.encoding_models memory
    python -m benchmarks.encoding_models noise

`cortex`: each voxel reads a layer of the bundled backbone with random weights, and has three trials with known noise.
Others read two layers, the second in parts that are uncorrelated with the first: its unique variance is known.
`speed`: 5,000 images, 2,048 features, 20 strengths, nested in folds, in turn with `RidgeCV` of himalaya (pip install
himalaya), which does not nest: it is called for each outer fold. CPU seconds, as a machine may be busy.
`memory`: features four times larger than the bound; the peak of the process above its size without them.
`noise`: p-values of targets that no feature predicts, with and without the factor for the dependence of folds.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.common import parser
from extract import FeatureReader, extract_features
from extract.analysis.encoding import scores
from extract.analysis.encoding.encoding import STRENGTHS, encoding

LAYERS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.5"]
AREAS = (1, 3, 4)  # layers that are read
IMAGES, TRIALS = 2000, 3


def standardised(values):
    return (values - values.mean(0)) / values.std(0)


def cortex(photos: Path, n_voxels: int) -> None:
    paths = sorted(path for path in photos.rglob("*") if path.suffix in (".png", ".jpg", ".jpeg"))
    chosen = paths[:: max(1, len(paths) // IMAGES)][:IMAGES]
    with tempfile.TemporaryDirectory() as folder:
        extract_features(
            [str(path) for path in chosen], layers=LAYERS, out=f"{folder}/out", preprocessing={"size": 64, "crop": 64}
        )  # the photos of CIFAR-10 have 32 pixels
        with FeatureReader(f"{folder}/out") as reader:
            features = {layer: standardised(reader[layer][:].astype(np.float64)) for layer in LAYERS}
    generator = np.random.default_rng(0)
    area = np.arange(n_voxels) % len(AREAS)
    signal = np.empty((len(chosen), n_voxels))
    for number, layer in enumerate(AREAS):
        x = features[LAYERS[layer]]
        signal[:, area == number] = standardised(x @ generator.normal(size=(x.shape[1], (area == number).sum())))
    ceiling = generator.uniform(0.2, 0.9, n_voxels)  # of R^2, of the mean of three trials
    noise = np.sqrt(TRIALS * (1 / ceiling - 1))
    image = np.tile(np.arange(len(chosen)), TRIALS)
    trials = (signal[image] + noise * generator.normal(size=(len(image), n_voxels))).astype(np.float32)
    started = time.perf_counter()
    found = encoding(features, trials, images=image, draws=0)
    seconds = time.perf_counter() - started
    print(
        f"{len(chosen):,} images, {n_voxels:,} voxels, {TRIALS} trials, {len(LAYERS)} layers: {seconds:.0f} s",
        flush=True,
    )
    right = found.best == np.array(AREAS)[area]
    for number, layer in enumerate(AREAS):
        print(f"  area of {LAYERS[layer]}: {right[area == number].mean():.1%} of voxels are mapped to it")
    print(f"  mapped to their layer: {right.mean():.2%}")
    for name in ("ceiling", "split_half"):
        error = getattr(found, name) - ceiling
        print(f"  {name}: mean error {error.mean():+.4f}, mean absolute {np.abs(error).mean():.4f}")
    normalised = found.normalised(found.best_r)
    print(f"  r of the best layer / ceiling: median {np.nanmedian(normalised):.3f}; 1 is all that can be known")

    # Reads of the second layer that no read of the first correlates with: their variance is unique to it.
    first, second = (features[LAYERS[layer]] for layer in AREAS[:2])
    apart = second @ np.linalg.svd(first.T @ second)[2][first.shape[1] :].T
    reads = [standardised(x @ generator.normal(size=(x.shape[1], 300))) for x in (first, apart)]
    unique = generator.uniform(0.1, 0.5, 300)
    mixed = np.sqrt(0.8 - unique) * reads[0] + np.sqrt(unique) * reads[1]
    mixed += np.sqrt(0.2) * standardised(generator.normal(size=mixed.shape))
    for names in (("first", "second"), ("second", "first")):
        both = dict(zip(names, (first, second) if names[0] == "first" else (second, first), strict=True))
        found = encoding(both, mixed, partition=True, draws=0).partition
        part = "unique_second" if names[1] == "second" else "unique_first"
        error = found[part] - unique / mixed.var(0)
        print(f"  {part}: mean error {error.mean():+.4f}, mean absolute {np.abs(error).mean():.4f}", flush=True)


def speed(n_targets: int, n_folds: int, n_timed: int) -> None:
    from himalaya.backend import set_backend
    from himalaya.ridge import RidgeCV
    from sklearn.model_selection import PredefinedSplit

    set_backend("torch")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(5000, 2048)).astype(np.float32)
    y = x @ generator.normal(size=(2048, n_targets)).astype(np.float32) / 45
    y += 2 * generator.normal(size=y.shape).astype(np.float32)
    started = time.process_time()
    found = encoding({"a": x}, y, folds=n_folds, draws=0)
    ours = time.process_time() - started
    print(f"ours, {n_folds} outer folds: {ours:.0f} CPU seconds", flush=True)
    seconds = []
    for fold in range(n_timed):
        test = found.folds == fold
        shift, scale = x[~test].mean(0), np.sqrt(x[~test].var(0).mean())
        started = time.process_time()
        model = RidgeCV(
            np.array(STRENGTHS, np.float32), fit_intercept=True, cv=PredefinedSplit(found.folds[~test]),
            solver_params={"n_targets_batch": 2000, "n_alphas_batch": 5},
        ).fit((x[~test] - shift) / scale, y[~test])  # fmt: skip
        predicted = np.asarray(model.predict((x[test] - shift) / scale))
        seconds.append(time.process_time() - started)
        r = (standardised(predicted) * standardised(y[test])).mean(0)
        differs, strengths = np.abs(r - found.layers[0].fold_r[fold]), np.asarray(model.best_alphas_)
        other = ~np.isclose(strengths, found.layers[0].strengths[fold], rtol=1e-4)
        print(f"himalaya, outer fold {fold}: {seconds[-1]:.0f} CPU seconds; r differs by {differs[~other].max():.1e}")
        if other.any():
            both = [found.layers[0].strengths[fold][other], strengths[other]]
            of_ours, of_theirs = (validation_errors(x, y[:, other], found.folds, fold, each) for each in both)
            above = of_theirs / of_ours - 1
            print(
                f"  {other.sum()} targets have another strength, and r differs by {differs[other].max():.1e}; its "
                f"validation error is {above.min():.1e} to {above.max():.1e} above that of ours, by scikit-learn"
            )
    print(f"himalaya / ours, for one outer fold: {np.mean(seconds) / (ours / n_folds):.2f}")


def validation_errors(x, y, folds, outer: int, strengths):
    """Return the mean squared errors (T,) on which strengths (T,) are chosen, by scikit-learn."""
    from sklearn.linear_model import Ridge

    errors = []
    for inner in set(folds.tolist()) - {outer}:
        fitted = (folds != outer) & (folds != inner)
        scale = np.sqrt(x[fitted].astype(np.float64).var(0).mean())
        model = Ridge(strengths, solver="cholesky").fit(x[fitted] / scale, y[fitted])
        predicted = model.predict(x[folds == inner] / scale).reshape(-1, y.shape[1])
        errors.append(((predicted - y[folds == inner]) ** 2).mean(0))
    return np.mean(errors, 0)


def memory() -> None:
    rows, width, bound = 176_128, 384, 64 << 20
    with tempfile.TemporaryDirectory() as folder:
        file, generator, seen = Path(f"{folder}/x"), np.random.default_rng(0), []
        with file.open("wb") as written:
            for _ in range(0, rows, 4096):
                block = generator.normal(size=(4096, width)).astype(np.float32)
                block.tofile(written)
                seen.append(block[:, :2] + generator.normal(size=(4096, 2)))
        y = np.concatenate(seen).astype(np.float32)

        class Rows:  # read without a memory map, whose pages would count
            shape, dtype = (rows, width), np.dtype(np.float32)

            def __getitem__(self, index):
                count = (index.stop - index.start) * width
                return np.fromfile(file, np.float32, count, offset=index.start * width * 4).reshape(-1, width)

        encoding({"a": np.ones((10, 2)) * np.arange(10)[:, None]}, np.zeros((10, 1)), draws=0)  # loads libraries
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = encoding({"a": Rows()}, y, draws=0, memory_bytes=bound)
        above = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sizes = f"features {4 * rows * width >> 20} MB, bound {bound >> 20} MB"
    print(f"{sizes}: peak {above:.0f} MB above; r {found.layers[0].r.round(3)}")


def noise() -> None:
    for images, width, fit in ((100, 5, "ridge"), (100, 400, "ridge"), (400, 60, "ridge"), (100, 30, "pls")):
        for factor in (1.0, 2**0.5):
            below = []
            with patch.object(scores, "_DEPENDENCE", factor):
                for seed in range(6):
                    generator = np.random.default_rng(seed)
                    x, y = generator.normal(size=(images, width)), generator.normal(size=(images, 400))
                    (layer,) = encoding({"a": x}, y, fit=fit, n_components=5, draws=300, seed=seed).layers
                    below.append((layer.p <= 0.05).mean())
            print(f"{images} x {width}, {fit}, drawn r times {factor:.2f}: {np.mean(below):.1%} of p-values up to 0.05")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("what", choices=["cortex", "speed", "memory", "noise"])
    options.add_argument("photos", type=Path, nargs="?", default=Path("../shared/data/cifar10-6k"))
    options.add_argument("--voxels", type=int, default=10_000)
    options.add_argument("--targets", type=int, default=20_000)
    options.add_argument("--folds", type=int, default=5)
    options.add_argument("--folds-of-himalaya", type=int, default=5)
    given = options.parse_args()
    if given.what == "cortex":
        cortex(given.photos, given.voxels)
    elif given.what == "speed":
        speed(given.targets, given.folds, min(given.folds, given.folds_of_himalaya))
    else:
        {"memory": memory, "noise": noise}[given.what]()


if __name__ == "__main__":
    main()
