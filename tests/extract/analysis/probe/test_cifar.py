"""The protocols on real photos, against scripts of scikit-learn, and what is larger than memory."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from extract import Status, extract_features
from extract.analysis.probe import linear_probe
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from tests.conftest import SHARED
from tests.extract.store.rows import no_files

pytestmark = pytest.mark.soak

SMALL = {"size": 96, "crop": 96}  # takes a fifth of the time, and the references have the same features


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """5,000 and 1,000 embeddings of CIFAR-10, from 96 pixels, by the bundled backbone: x, y, x_test, y_test."""
    if not (SHARED / "cifar10-6k").is_dir():
        pytest.skip("no CIFAR-10 beside the checkout")
    with extract_features(
        SHARED / "cifar10-6k", out=tmp_path_factory.mktemp("cifar") / "out", progress=False, preprocessing=SMALL
    ) as reader:
        train, test = (np.array(reader.splits) == split for split in ("train", "test"))
        x = reader["embedding"][:]
        return x[train], reader.labels[train], x[test], reader.labels[test]


def reference(x, y, strength):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it stops before it has converged where regularisation is weak
        return LogisticRegression(C=strength, max_iter=1000).fit(x, y)


def tenth(count):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    return order[: count // 10], order[count // 10 :]


def objective(model, x, y, strength):
    loss = -model.predict_log_proba(x.astype(np.float64))[np.arange(len(y)), y].sum()
    return strength * loss + (model.coef_**2).sum() / 2


def compare(result, x, y, x_test, y_test, strength):
    """What the script chose, fitted on all, against what we chose; and both at our choice."""
    assert abs(result.value - reference(x, y, strength).score(x_test, y_test)) <= 0.003
    ours = 1 / result.chosen if result.swept == "lambda" else result.chosen
    same = LogisticRegression(C=ours, max_iter=10_000, tol=1e-7).fit(x, y)
    assert result.objective == pytest.approx(objective(same, x, y, ours), rel=1e-4)
    print(f"{result.protocol}: {result.value:.4f} at C = {ours:.3g}, script {strength:.3g}; objective "
          f"{result.objective / objective(same, x, y, ours) - 1:+.1e}")  # fmt: skip


def test_sweeps_of_45_strengths_are_those_of_a_script(features):
    x, y, x_test, y_test = features
    out, left = tenth(len(x))
    strengths = np.logspace(-6, 5, 45)[8:25]  # 1e-4 to 1: outside, scikit-learn takes minutes, and nothing is chosen
    on_val = [reference(x[left], y[left], c).score(x[out], y[out]) for c in strengths]
    for protocol in ("simclr", "dinov2-logreg"):
        result = linear_probe(x, y, x_test, y_test, protocol=protocol)
        assert strengths[0] < result.chosen < strengths[-1]
        compare(result, x, y, x_test, y_test, strengths[int(np.argmax(on_val))])


def test_the_search_of_clip_is_that_of_a_script(features):
    x, y, x_test, y_test = features
    out, left = tenth(len(x))
    known = {}
    steps = list(range(0, 97, 16))
    for distance in (8, 4, 2, 1, 0):
        for step in steps:
            known[step] = reference(x[left], y[left], 1 / 10 ** (-6 + step / 8)).score(x[out], y[out])
        best = max(known, key=lambda step: (known[step], step))
        steps = [step for step in (best - distance, best + distance) if 0 <= step <= 96 and step not in known]
    compare(linear_probe(x, y, x_test, y_test, protocol="clip"), x, y, x_test, y_test, 1 / 10 ** (-6 + best / 8))


def test_few_shot_is_that_of_a_script(features):
    x, y, x_test, y_test = features
    result = linear_probe(x, y, x_test, y_test, protocol="fewshot")
    values = []
    for repeat in range(5):
        generator = np.random.default_rng([0, repeat])
        order = [generator.permutation(np.flatnonzero(y == c)) for c in range(10)]
        drawn, out = (np.concatenate([rows[part] for rows in order]) for part in (slice(5), slice(-4, None)))
        known, steps = {}, list(range(0, 97, 16))
        for distance in (8, 4, 2, 1, 0):
            for step in steps:
                probe = reference(x[drawn], y[drawn], 10 ** (6 - step / 8))
                known[step] = probe.score(x[out], y[out]), log_loss(y[out], probe.predict_proba(x[out]))
            top = max(known.values())[0]
            least = min(loss for score, loss in known.values() if score == top)
            best = max(step for step, (score, loss) in known.items() if score == top and loss <= least + 1e-3)
            steps = [step for step in (best - distance, best + distance) if 0 <= step <= 96 and step not in known]
        values.append(reference(x[drawn], y[drawn], 10 ** (6 - best / 8)).score(x_test, y_test))
    print("few-shot, 5 a class:", result.shots[5], "script", values)
    # Among equally good strengths, log loss often prefers a weak penalty, with which scikit-learn stops early.
    assert np.mean(result.shots[5]) == pytest.approx(np.mean(values), abs=0.01)


LARGE = """
import sys
import numpy as np
from extract import FeatureReader
from extract.analysis.probe.logistic import LogisticRegression
from extract.analysis.probe.feature_matrix import FeatureRows, Scaling
with FeatureReader(sys.argv[1]) as reader, np.load(sys.argv[2]) as test:
    rows = FeatureRows.of(reader["embedding"])
    rows = rows.scaled(Scaling.of("standardise", rows))
    fit = LogisticRegression(rows, reader.labels.copy(), 10, memory_bytes=int(sys.argv[3])).fit([1e-6, 1e-5, 1e-4])
    x = rows.scaling(test["x"].copy())
    print(*[((x @ w.T + b).argmax(1) == test["y"]).mean() for w, b in zip(fit.weights, fit.biases)], *fit.objectives)
lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(int(lines["VmHWM"].split()[0]) / 1024)
"""


def large_data_set(out, x, y, times):
    """The rows so many times, each time with other noise, in a data set of shards of 512 MB."""
    feature = StoredFeature("embedding", x.shape[1:], "float32", {"layer": "embedding", "pooling": "none"})
    count, generator = times * len(x), np.random.default_rng(0)
    paths = [f"{i:07d}" for i in range(count)]
    images = {"root": "/photos", "count": count, "paths_xxh3": "0" * 32}
    data = DataSet(out=out, depends_on={"weights": "w"}, features=[feature], images=images, shard_rows=100_000)
    data.open_or_create()
    for shard in range(data.n_shards):
        rows = data.shard_range(shard)
        names = RowNames(
            [paths[i] for i in rows], y[np.array(rows) % len(y)], ["train"] * len(rows), list("0123456789")
        )
        create_shard(data.path(shard, part=True), [feature], data.identity(shard), names, {})
        with ShardWriter(data, shard) as writer:
            for start in range(rows.start, rows.stop, len(x)):
                here = np.arange(start, min(start + len(x), rows.stop))
                noise = 0.05 * x.std(0) * generator.normal(size=(len(here), x.shape[1]))
                values = {"embedding": (x[here % len(x)] + noise).astype(np.float32)}
                writer.write(here, values, np.full(len(here), Status.OK, "uint8"), no_files(len(here)), {})
            writer.publish()
    return count * feature.row_bytes


def test_data_sets_larger_than_memory_are_streamed(features, tmp_path):
    x, y, x_test, y_test = features
    size = large_data_set(tmp_path / "large", x, y, 45)
    np.savez(tmp_path / "test.npz", x=x_test, y=y_test)
    results, peaks = {}, {}
    for memory in (200 << 20, 8 << 30):
        command = [sys.executable, "-c", LARGE, str(tmp_path / "large"), str(tmp_path / "test.npz"), str(memory)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        values, peak = run.stdout.splitlines()
        results[memory], peaks[memory] = np.array(values.split(), float), float(peak)
    streamed, held = results.values()
    print(f"{size / 1e9:.2f} GB of features; top-1 and objectives streamed {streamed}, held {held}; MB {peaks}")
    assert size > 1 << 30
    assert peaks[200 << 20] < 1000 < peaks[8 << 30]
    assert np.abs(streamed[:3] - held[:3]).max() <= 0.005
    np.testing.assert_allclose(streamed[3:], held[3:], rtol=1e-5)
