from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract import FeatureReader, InputError, LayertapError, UnknownNameError
from extract.store import batches as store_batches
from extract.store.feature_array import FeatureArray
from extract.store.format import layout
from extract.store.format.layout import StoredFeature
from tests.extract.store.processes import result_of
from tests.extract.store.rows import complete_data_set, filled, flip

ROWS, WIDTH, WIDE = 3000, 64, 512
CHUNK_ROWS = 512
FAILED = np.array([0, 5, 1300, 1301, 2999])
GOOD = np.setdiff1d(np.arange(ROWS), FAILED)
CHUNK_BYTES = CHUNK_ROWS * WIDTH * 4
DISK = "/var/tmp"  # temporary files of tests may lie in memory, where the system does not tell what is cached


def cache_state_is_known() -> bool:
    """Whether the system tells what is in the file cache."""
    with contextlib.suppress(OSError, AttributeError), tempfile.TemporaryFile(dir=DISK) as file:
        file.write(b"a")
        file.flush()
        return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    return False


needs_cache_state = pytest.mark.skipif(not cache_state_is_known(), reason="the system does not tell what is cached")


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_CHUNK_BYTES", CHUNK_BYTES)
        yield


def numbered(out: Path, shard_rows: int = ROWS, compress: str | None = None, width: int = WIDTH) -> Path:
    """3,000 rows in chunks of 512; row i holds i everywhere; five have failed."""

    def values_of(rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": np.repeat(rows[:, None], width, 1).astype("float32")}

    features = [StoredFeature("x", (width,), "float32")]
    return filled(out, features, ROWS, values_of, shard_rows, compress=compress, failed=FAILED.tolist()).out


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    """Five shards of 700 rows, of which the third one is compressed."""
    folder = tmp_path_factory.mktemp("batches")
    plain, packed = numbered(folder / "plain", 700), numbered(folder / "packed", 700, "gzip")
    for name in ("000002.h5", "000002.json"):
        shutil.copy(packed / "shards" / name, plain / "shards" / name)
    return FeatureReader(plain)


@pytest.fixture(scope="module")
def one_shard() -> Iterator[Path]:
    """The folder, on a disk, of the rows in one shard of several chunks."""
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        yield numbered(Path(folder) / "out")


def passes(reader: FeatureReader, *arguments: object, **settings: object) -> tuple[np.ndarray, list[int]]:
    """All rows of a pass, after a look at each batch, and the batches' sizes."""
    batches_of_rows, sizes = [], []
    for x, rows in reader.batches("x", *arguments, **settings):  # type: ignore[arg-type]
        assert (x == rows[:, None]).all()
        assert x.shape == (len(rows), WIDTH)
        batches_of_rows.append(rows)
        sizes.append(len(rows))
    return np.concatenate(batches_of_rows), sizes


@settings(max_examples=40, deadline=None)
@given(
    batch_size=st.integers(1, 4000), shuffle=st.sampled_from([None, "chunks", "rows"]), seed=st.integers(0, 2**32),
    memory=st.integers(2 * CHUNK_BYTES, 2_500_000), split=st.sampled_from([None, "train", "val"]),
)  # fmt: skip
def test_a_pass_has_each_good_row_once(
    reader: FeatureReader, batch_size: int, shuffle: str | None, seed: int, memory: int, split: str | None
) -> None:
    rows, sizes = passes(reader, batch_size, shuffle=shuffle, seed=seed, memory_bytes=memory, split=split)
    expected = GOOD[(GOOD % 3 == 0) == (split == "val")] if split else GOOD
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
    for shuffle, least in (("rows", 0.3), ("chunks", 0.1)):
        rows, _ = passes(reader, 64, shuffle=shuffle, seed=0, memory_bytes=4 * CHUNK_BYTES)  # three at a time
        place = np.empty(ROWS)
        place[rows] = np.arange(len(rows))
        good = np.setdiff1d(np.arange(ROWS - 1), np.concatenate([FAILED, FAILED - 1]))
        assert np.abs(place[good] - place[good + 1]).mean() > least * ROWS


def test_wrong_arguments_are_told_before_anything_is_read(reader: FeatureReader) -> None:
    for arguments, message in (
        ({"batch_size": 0}, "batch_size is 0"), ({"shuffle": "yes"}, "shuffle is 'yes'"),
        ({"memory_bytes": 1000}, f"memory_bytes is 1000; it must be at least {2 * CHUNK_BYTES} .two chunks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            reader.batches("x", **{"batch_size": 4, **arguments})  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="layer 'y' not found"):
        reader.batches("y", 4)
    with pytest.raises(UnknownNameError, match="split 'test' not found"):
        reader.batches("x", 4, split="test")


@pytest.mark.slow
def test_a_pass_holds_no_more_than_it_says(tmp_path: Path) -> None:
    """200 MB of features in batches of 256, with 32 MB of memory, in processes forked from a fresh one."""
    width, count = 1024, 50_000
    out = filled(
        tmp_path / "out", [StoredFeature("x", (width,), "float32")], count,
        lambda rows: {"x": np.ones((len(rows), width), "float32")}, 20_000,
    ).out  # fmt: skip
    code = f"""
import os
from extract import FeatureReader
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith(("RssAnon", "RssFile")):
            yield int(line.split()[1]) // 1024
for shuffle in (None, "chunks", "rows"):
    if not (child := os.fork()):
        reader = FeatureReader({str(out)!r})
        reader.status, reader.splits
        list(reader.batches("x", 256, memory_bytes=32 << 20, shuffle=shuffle).__next__())
        base, peak, files = sum(anonymous()), 0, 0
        for x, rows in reader.batches("x", 256, memory_bytes=32 << 20, shuffle=shuffle):
            own, mapped = anonymous()
            peak, files = max(peak, own), max(files, mapped)
        print(peak, files, base, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for shuffle, line in zip((None, "chunks", "rows"), run.stdout.splitlines(), strict=True):
        private, files, base = map(int, line.split())
        # The order of the rows is 8 bytes each, three times; batches of 1 MB; and the allocator's own needs.
        assert private < base + 32 + 2 * 1 + 3 * 8 * count / 1e6 + 8
        if shuffle != "rows":  # whose pages of the file are everywhere, and the kernel's to take back
            assert files < base + 40


def test_an_empty_split_of_a_small_set(tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", failed=tuple(range(23)))
    with FeatureReader(data.out) as reader:
        assert list(reader.batches("vector", 4, shuffle="chunks")) == []
        assert list(reader.batches("vector", 4, shuffle="rows")) == []
        assert len(reader.dataset("vector")) == 0


def read_through_the_buffer(array: FeatureArray, rows: np.ndarray) -> None:
    """Takes the place of `FeatureArray.mapped`."""


@needs_cache_state
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("split", [None, "val"])
@pytest.mark.parametrize("shuffle", [None, "chunks", "rows"])
def test_rows_in_the_file_cache_are_not_buffered_and_come_in_the_same_order(
    one_shard: Path, shuffle: str | None, split: str | None, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"shuffle": shuffle, "seed": 5, "split": split, "memory_bytes": 4 * CHUNK_BYTES}
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
            assert len(passes(reader, 100, shuffle=shuffle)[0]) == len(GOOD)


@pytest.fixture
def own() -> Iterator[Path]:
    """Such a folder that may be changed, larger than what the system reads ahead."""
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        yield numbered(Path(folder) / "out", width=WIDE)


@needs_cache_state
def test_a_changed_row_is_noticed_in_the_file_cache(own: Path) -> None:
    with FeatureReader(own) as reader:
        offset = reader._index.files[0].shard.offsets["/features/x"] + 1234 * WIDE * 4
    flip(own / "shards/000000.h5", offset)
    for shuffle in (None, "chunks", "rows"):
        with FeatureReader(own, check=True) as reader, pytest.raises(InputError, match="row 1234 .* is damaged"):
            list(reader.batches("x", 100, shuffle=shuffle))


@needs_cache_state
def test_rows_that_are_not_in_the_file_cache_are_buffered(own: Path) -> None:
    shard = own / "shards/000000.h5"
    with shard.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with FeatureReader(own) as reader:
        rows = np.arange(100, 200)
        assert reader["x"].mapped(rows) is None
        shard.read_bytes()
        mapped = reader["x"].mapped(rows)
        assert mapped is not None
        assert np.array_equal(mapped[:, 0], rows)
        shard.rename(shard.with_suffix(".moved"))  # nothing is known about the cache; the map stays valid
        assert reader["x"].mapped(rows) is None
        assert sum(len(rows) for _, rows in reader.batches("x", 100, shuffle="rows")) == len(GOOD)


def test_rows_of_several_shards_and_compressed_rows_are_buffered(reader: FeatureReader) -> None:
    array = reader["x"]
    assert array.mapped(np.array([699, 700])) is None
    assert array.mapped(np.array([1500, 1501])) is None  # of the compressed shard


def read_while_it_is_closed(path: Path, shuffle: str | None, closed: str) -> None:
    reader = FeatureReader(path)
    if closed == "thread":
        threading.Timer(0.05, reader.close).start()
    batches = reader.batches("x", 1, shuffle=shuffle)  # type: ignore[arg-type]
    next(batches)
    if closed == "here":
        reader.close()
    else:
        batches = (batch for _ in range(1000) for batch in reader.batches("x", 1))
    other = bytes(50_000_000)  # takes the addresses of the map if it is unmapped
    for x, rows in batches:
        assert (x == rows[:, None]).all(), rows
    assert len(other)


@needs_cache_state
@pytest.mark.parametrize(
    ("shuffle", "closed"), [(None, "here"), ("chunks", "here"), ("rows", "here"), (None, "thread")]
)
def test_after_a_reader_is_closed_batches_are_right_or_an_error(
    one_shard: Path, shuffle: str | None, closed: str
) -> None:
    """In a process of its own: an array over a map that is gone ends the process, or has the bytes of another file."""
    error = result_of(read_while_it_is_closed, one_shard, shuffle, closed)
    assert error is None or (isinstance(error, LayertapError) and "is closed" in str(error))
