"""Probes of features that are larger than memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from extract import Status, extract_features
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from tests.conftest import SHARED
from tests.extract.store.rows import no_files

pytestmark = pytest.mark.soak

SMALL = {"size": 96, "crop": 96}  # takes a fifth of the time


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
