from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract import FeatureReader, InputError, UnknownNameError
from extract.store import batches as store_batches
from extract.store.feature_array import FeatureArray
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from tests.extract.store.rows import complete_data_set, data_set, no_files

ROWS, WIDTH = 3000, 512
FAILED = np.array([0, 5, 1300, 1301, 2999])


DISK = "/var/tmp"  # temporary files of tests may lie in memory, where the system does not tell what is cached


def cache_state_is_known() -> bool:
    """Whether the system tells what is in the file cache."""
    with contextlib.suppress(OSError, AttributeError), tempfile.TemporaryFile(dir=DISK) as file:
        file.write(b"a")
        file.flush()
        return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    return False


needs_cache_state = pytest.mark.skipif(not cache_state_is_known(), reason="the system does not tell what is cached")


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


@pytest.fixture
def one_shard() -> Iterator[Path]:
    """The folder, on a disk, of 3,000 uncompressed rows in one shard of several chunks; row i holds i everywhere."""
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        yield write_one_shard(Path(folder))


def write_one_shard(folder: Path) -> Path:
    data = data_set(
        folder / "out", features=[StoredFeature("x", (WIDTH,), "float32")],
        images={"root": "/p", "count": ROWS, "paths_xxh3": ""}, shard_rows=ROWS,
    )  # fmt: skip
    data.open_or_create()
    rows = np.arange(ROWS)
    names = RowNames(
        [str(i) for i in rows], rows % 7, ["val" if i % 3 == 0 else "train" for i in rows], list("abcdefg")
    )
    create_shard(data.path(0, part=True), data.features, data.identity(0), names, {})
    with ShardWriter(data, 0) as writer:
        values = np.repeat(rows[:, None], WIDTH, 1).astype("float32")
        writer.write(rows, {"x": values}, np.where(np.isin(rows, FAILED), 3, 1).astype("uint8"), no_files(ROWS))
        writer.publish()
    return data.out


def read_through_the_buffer(array: FeatureArray, rows: np.ndarray) -> None:
    """Takes the place of `FeatureArray.mapped`."""


@needs_cache_state
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("split", [None, "val"])
@pytest.mark.parametrize("shuffle", [None, "chunks", "rows"])
def test_rows_in_the_file_cache_are_not_buffered_and_come_in_the_same_order(
    one_shard: Path, shuffle: str | None, split: str | None, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"shuffle": shuffle, "seed": 5, "split": split, "memory_bytes": 4 << 20}
    with FeatureReader(one_shard, check=check) as reader, monkeypatch.context() as patch:
        patch.setattr(store_batches, "_fill", lambda *_: pytest.fail("a buffer was used"))
        rows, sizes = passes(reader, 100, **settings)
    monkeypatch.setattr(FeatureArray, "mapped", read_through_the_buffer)
    with FeatureReader(one_shard) as reader:
        buffered_rows, buffered_sizes = passes(reader, 100, **settings)
    assert np.array_equal(rows, buffered_rows)
    assert sizes == buffered_sizes


def test_a_batch_is_the_callers_own(one_shard: Path) -> None:
    for shuffle in (None, "chunks", "rows"):
        with FeatureReader(one_shard) as reader:
            for x, rows in reader.batches("x", 100, shuffle=shuffle):
                x[...], rows[...] = -1, -1
            assert len(passes(reader, 100, shuffle=shuffle)[0]) == ROWS - len(FAILED)


@needs_cache_state
def test_a_changed_row_is_noticed_in_the_file_cache(one_shard: Path) -> None:
    shard = one_shard / "shards/000000.h5"
    with FeatureReader(one_shard) as reader:
        offset = reader._index.files[0].shard.offsets["/features/x"] + 1234 * WIDTH * 4
    with shard.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x01")
    for shuffle in (None, "chunks", "rows"):
        with FeatureReader(one_shard, check=True) as reader, pytest.raises(InputError, match="row 1234 .* is damaged"):
            list(reader.batches("x", 100, shuffle=shuffle))


@needs_cache_state
def test_rows_that_are_not_in_the_file_cache_are_buffered(one_shard: Path) -> None:
    shard = one_shard / "shards/000000.h5"
    with shard.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with FeatureReader(one_shard) as reader:
        rows = np.arange(100, 200)
        assert reader["x"].mapped(rows) is None
        shard.read_bytes()
        mapped = reader["x"].mapped(rows)
        assert mapped is not None
        assert np.array_equal(mapped[:, 0], rows)
        shard.rename(shard.with_suffix(".moved"))  # nothing is known about the cache; the map stays valid
        assert reader["x"].mapped(rows) is None
        assert len(passes(reader, 100, shuffle="rows")[0]) == ROWS - len(FAILED)


def test_rows_of_several_shards_and_compressed_rows_are_buffered(reader: FeatureReader) -> None:
    array = reader["x"]
    assert array.mapped(np.array([699, 700])) is None
    assert array.mapped(np.array([1500, 1501])) is None  # of the compressed shard


CLOSED = """
import sys, threading
from extract import FeatureReader, LayertapError
path, shuffle = sys.argv[1], None if sys.argv[2] == "None" else sys.argv[2]
reader = FeatureReader(path)
if sys.argv[3] == "thread":
    threading.Timer(0.05, reader.close).start()
batches = reader.batches("x", 1, shuffle=shuffle)
x, rows = next(batches)
if sys.argv[3] == "here":
    reader.close()
other = bytes(50_000_000)  # takes the addresses of the map if it is unmapped
try:
    for x, rows in batches if sys.argv[3] == "here" else (b for _ in range(1000) for b in reader.batches("x", 1)):
        assert (x == rows[:, None]).all(), rows
except LayertapError as error:
    assert "is closed" in str(error), error
print("ended")
"""


@needs_cache_state
@pytest.mark.parametrize(
    ("shuffle", "closed"), [(None, "here"), ("chunks", "here"), ("rows", "here"), (None, "thread")]
)
def test_after_a_reader_is_closed_batches_are_right_or_an_error(
    one_shard: Path, shuffle: str | None, closed: str
) -> None:
    """In a process of its own: an array over a map that is gone ends the process, or has the bytes of another file."""
    command = [sys.executable, "-c", CLOSED, str(one_shard), str(shuffle), closed]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
