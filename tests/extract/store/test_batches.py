from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract import FeatureReader, UnknownNameError
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from tests.extract.store.rows import complete_data_set, data_set, no_files

ROWS, WIDTH = 3000, 512
FAILED = np.array([0, 5, 1300, 1301, 2999])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    """3,000 rows in shards of 700 and chunks of 512; row i holds i everywhere; five have failed."""
    data = data_set(
        tmp_path_factory.mktemp("batches") / "out", features=[StoredFeature("x", (WIDTH,), "float32")],
        images={"root": "/p", "count": ROWS, "paths_xxh3": ""}, shard_rows=700,
    )  # fmt: skip
    data.open_or_create()
    for shard in range(data.n_shards):
        rows = np.array(data.shard_range(shard))
        names = RowNames(
            [str(i) for i in rows], rows % 7, ["val" if i % 3 == 0 else "train" for i in rows], list("abcdefg")
        )
        create_shard(data.path(shard, part=True), data.features, data.identity(shard), names, {})
        with ShardWriter(data, shard) as writer:
            values = np.repeat(rows[:, None], WIDTH, 1).astype("float32")
            status = np.where(np.isin(rows, FAILED), 3, 1).astype("uint8")
            writer.write(rows, {"x": values}, status, no_files(len(rows)))
            writer.publish("gzip" if shard == 2 else None)
    return FeatureReader(data.out)


def passes(reader: FeatureReader, *arguments: object, **settings: object) -> tuple[np.ndarray, list[int]]:
    """All rows of a pass, after a look at each batch, and the batches' sizes."""
    batches_of_rows, sizes = [], []
    for x, rows in reader.batches("x", *arguments, **settings):  # type: ignore[arg-type]
        assert (x == rows[:, None]).all()
        assert x.shape == (len(rows), WIDTH)
        batches_of_rows.append(rows)
        sizes.append(len(rows))
    return np.concatenate(batches_of_rows), sizes


@settings(max_examples=60, deadline=None)
@given(
    batch_size=st.integers(1, 4000), shuffle=st.sampled_from([None, "chunks", "rows"]), seed=st.integers(0, 2**32),
    memory=st.integers(2 * 512 * WIDTH * 4, 20_000_000), split=st.sampled_from([None, "train", "val"]),
)  # fmt: skip
def test_a_pass_has_each_good_row_once(
    reader: FeatureReader, batch_size: int, shuffle: str | None, seed: int, memory: int, split: str | None
) -> None:
    rows, sizes = passes(reader, batch_size, shuffle=shuffle, seed=seed, memory_bytes=memory, split=split)
    expected = np.setdiff1d(np.arange(ROWS), FAILED)
    if split:
        expected = expected[(expected % 3 == 0) == (split == "val")]
    assert np.array_equal(np.sort(rows), expected)
    assert set(sizes[:-1]) <= {batch_size}
    assert 0 < sizes[-1] <= batch_size
    if shuffle is None:
        assert np.array_equal(rows, expected)


@pytest.mark.parametrize("shuffle", ["chunks", "rows"])
def test_the_order_is_that_of_the_seed(reader: FeatureReader, shuffle: str) -> None:
    first, second, third = (passes(reader, 64, shuffle=shuffle, seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)


def test_rows_are_mixed_as_promised(reader: FeatureReader) -> None:
    """Neighbours in the file are as far apart in a shuffled pass as in a random order: about a third of its length."""
    memory = 4 * 512 * WIDTH * 4  # of chunks: three at a time
    for shuffle, least in (("rows", 0.3), ("chunks", 0.1)):
        rows, _ = passes(reader, 64, shuffle=shuffle, seed=0, memory_bytes=memory)
        place = np.empty(ROWS)
        place[rows] = np.arange(len(rows))
        good = np.setdiff1d(np.arange(ROWS - 1), np.concatenate([FAILED, FAILED - 1]))
        assert np.abs(place[good] - place[good + 1]).mean() > least * ROWS


def test_wrong_arguments_are_told_before_anything_is_read(reader: FeatureReader) -> None:
    for arguments, message in (
        ({"batch_size": 0}, "batch_size is 0"), ({"shuffle": "yes"}, "shuffle is 'yes'"),
        ({"memory_bytes": 1000}, "memory_bytes is 1000; it must be at least 2097152 .two chunks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            reader.batches("x", **{"batch_size": 4, **arguments})  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="layer 'y' not found"):
        reader.batches("y", 4)
    with pytest.raises(UnknownNameError, match="split 'test' not found"):
        reader.batches("x", 4, split="test")


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, "chunks", "rows"])
def test_a_pass_holds_no_more_than_it_says(tmp_path: Path, shuffle: str | None) -> None:
    """400 MB of features in batches of 256, with 32 MB of memory, in a process of its own."""
    width = 2048
    data = data_set(
        tmp_path / "out", features=[StoredFeature("x", (width,), "float32")],
        images={"root": "/p", "count": 50_000, "paths_xxh3": ""}, shard_rows=20_000,
    )  # fmt: skip
    data.open_or_create()
    for shard in range(data.n_shards):
        rows = np.array(data.shard_range(shard))
        names = RowNames([""] * len(rows), np.zeros(len(rows)), [""] * len(rows), ["a"])
        create_shard(data.path(shard, part=True), data.features, data.identity(shard), names, {})
        with ShardWriter(data, shard) as writer:
            for start in range(0, len(rows), 1000):
                batch = rows[start : start + 1000]
                writer.write(
                    batch,
                    {"x": np.ones((len(batch), width), "float32")},
                    np.ones(len(batch), "uint8"),
                    no_files(len(batch)),
                )
            writer.publish()
    code = f"""
from extract import FeatureReader
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith(("RssAnon", "RssFile")):
            yield int(line.split()[1]) // 1024
reader = FeatureReader({str(data.out)!r})
reader.status, reader.splits
list(reader.batches("x", 256, memory_bytes=32 << 20, shuffle={shuffle!r}).__next__())
base, peak, files = sum(anonymous()), 0, 0
for x, rows in reader.batches("x", 256, memory_bytes=32 << 20, shuffle={shuffle!r}):
    own, mapped = anonymous()
    peak, files = max(peak, own), max(files, mapped)
print(peak, files, base)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    private, files, base = map(int, run.stdout.split())
    # The order of the rows is 8 bytes each, three times; batches of 2 MB; and the allocator's own needs.
    assert private < base + 32 + 2 * 2 + 3 * 8 * 50_000 / 1e6 + 8
    if shuffle != "rows":  # whose pages of the file are everywhere, and the kernel's to take back
        assert files < base + 40


def test_an_empty_split_of_a_small_set(tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", failed=tuple(range(23)))
    with FeatureReader(data.out) as reader:
        assert list(reader.batches("vector", 4, shuffle="chunks")) == []
        assert list(reader.batches("vector", 4, shuffle="rows")) == []
        assert len(reader.dataset("vector")) == 0
