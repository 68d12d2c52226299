"""What is left of whole layers after they are reduced: a linear probe and the similarity of images. Prints Markdown.

    python tests/benchmarks/reduced_layers.py TRAIN TEST [-b bundled/efficientnet_lite0] [-l LAYER]... [--limit N]

TRAIN and TEST are folders with one folder of images for each class. Each layer is stored whole and in each reduced
form, in a run of its own; the principal axes are fitted to images of TRAIN.

- Accuracy on TEST of a ridge classifier on the rows of TRAIN, in its dual form, which takes whole layers too. A fifth
  of TRAIN chooses the strength of the penalty.
- RSA: Spearman correlation of the Euclidean distances between all pairs of images of TEST, reduced and whole.
- CKA: linear, of TEST, reduced and whole.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from extract import FeatureReader, extract_features
from extract.compute.backbone import Backbone, load_backbone

REDUCED = ("none", "mean_map", "grid4", "srp1024", "srp4096", "pca256")
LAYERS = ("blocks.0", "blocks.1", "blocks.2", "blocks.4")
PENALTIES = 10.0 ** np.arange(-8, 3)  # over the mean square length of a row
BLOCK = 1 << 15  # values of each row in memory at once, in float64


def products(first: FeatureReader, second: FeatureReader, name: str) -> NDArray[np.float64]:
    """Return the products of all rows of two readers, without holding the rows."""
    a, b = (reader[name][:].reshape(len(reader), -1) for reader in (first, second))
    return sum(
        a[:, start : start + BLOCK].astype(np.float64) @ b[:, start : start + BLOCK].astype(np.float64).T
        for start in range(0, a.shape[1], BLOCK)
    )  # type: ignore[return-value]


def accuracy(
    train: NDArray[np.float64], cross: NDArray[np.float64], labels: NDArray[np.int64], truth: NDArray[np.int64]
) -> float:
    """Return the accuracy of the ridge classifier from the products of the rows of TRAIN, and of TEST with TRAIN."""
    held_out = np.arange(len(labels)) % 5 == 0
    fit = np.flatnonzero(~held_out)
    inside, outside = train[np.ix_(fit, fit)], train[np.ix_(held_out, fit)]
    scores = [(predicted(inside, outside, labels[fit], penalty) == labels[held_out]).mean() for penalty in PENALTIES]
    return float((predicted(train, cross, labels, PENALTIES[int(np.argmax(scores))]) == truth).mean())


def predicted(
    gram: NDArray[np.float64], cross: NDArray[np.float64], labels: NDArray[np.int64], penalty: float
) -> NDArray[np.int64]:
    """Return the classes of rows by their products with labelled rows, all centred on the mean of these."""
    means = gram.mean(0)
    cross = cross - cross.mean(1, keepdims=True) - means + gram.mean()
    gram = gram - means - means[:, None] + gram.mean()
    targets = np.eye(labels.max() + 1)[labels]
    targets -= targets.mean(0)
    ridge = gram + penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
    classes: NDArray[np.int64] = (cross @ np.linalg.solve(ridge, targets)).argmax(1)
    return classes


def distances(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distances of all pairs of rows."""
    first, second = np.triu_indices(len(gram), 1)
    squares = np.diag(gram)
    pairs: NDArray[np.float64] = squares[first] + squares[second] - 2 * gram[first, second]
    return np.sqrt(np.maximum(pairs, 0))


def cka(gram: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return linear CKA by the products of the rows."""
    k, m = (x - x.mean(0) - x.mean(1, keepdims=True) + x.mean() for x in (gram, other))
    return float((k * m).sum() / math.sqrt((k * k).sum() * (m * m).sum()))


def compare(layer: str, backbone: Backbone, options: argparse.Namespace, work: Path) -> None:
    """Store a layer, compare its reductions with the whole, and print rows of the table."""
    whole: NDArray[np.float64] | None = None
    for pooling in REDUCED:
        out, name = work / f"{layer}-{pooling}", f"{layer}:{pooling}"
        start = time.perf_counter()
        kwargs = {"backbone": backbone, "layers": name, "limit": options.limit, "progress": False}
        train = extract_features(options.train, out=out / "train", **kwargs)
        axes = out / "train" if pooling.startswith("pca") else None
        test = extract_features(options.test, out=out / "test", axes=axes, **kwargs)
        seconds = time.perf_counter() - start
        gram = products(test, test, layer)
        whole = gram if whole is None else whole
        right = accuracy(products(train, train, layer), products(test, train, layer), train.labels[:], test.labels[:])
        rsa = spearmanr(distances(gram), distances(whole)).statistic
        size = math.prod(train[layer].shape[1:])
        alike = f"{rsa:.3f} | {cka(gram, whole):.3f}"
        print(f"| `{name}` | {size:,} | {right:.1%} | {alike} | {seconds:.0f} s |", flush=True)
        train.close()
        test.close()


def main() -> None:
    """Read the options, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("-b", "--backbone", default="bundled/efficientnet_lite0")
    parser.add_argument("-l", "--layers", action="append", help=f"default: {', '.join(LAYERS)}")
    parser.add_argument("--limit", type=int, help="images of each folder")
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    print("| feature | values | accuracy | RSA | CKA | time |\n|---|---|---|---|---|---|", flush=True)
    for layer in options.layers or LAYERS:
        with tempfile.TemporaryDirectory() as folder:
            compare(layer, backbone, options, Path(folder))


if __name__ == "__main__":
    main()
