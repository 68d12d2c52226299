from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from extract import FeatureReader, InputError, LayertapError
from extract.store.format.dataset import DataSet
from extract.store.places import block_cache, remote_shard
from extract.store.places import objects as remote
from extract.store.places.block_cache import BlockCache, RemoteFile, cache_folder
from tests.extract.store.bucket_server import Proxy
from tests.extract.store.rows import PATHS, ROWS, VALUES, complete_data_set
from tests.extract.store.test_bucket import direct, published, put
from tests.extract.store.test_reader import indices

pytestmark = pytest.mark.slow

SMALL = 2048  # bytes of a block, so that small shards have many


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr(remote_shard, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr(block_cache, "_PAGE_BYTES", 256)


def stored(url: str, content: bytes) -> RemoteFile:
    remote.put(url, content)
    return RemoteFile(url, len(content), "0" * 64)


def blocks() -> list[Path]:
    return sorted(path for path in cache_folder().glob("*/*"))


def bytes_of(cache: BlockCache, file: RemoteFile, start: int, stop: int) -> bytes:
    out = bytearray(stop - start)
    cache.read(file, start, stop, memoryview(out))
    return bytes(out)


CONTENT = np.random.default_rng(0).bytes(20 * SMALL + 77)


# The reader


@pytest.fixture(params=[None, "gzip", "lzf", "blosc2"])
def readers(
    request: pytest.FixtureRequest, tmp_path: Path, small: None
) -> Iterator[tuple[FeatureReader, FeatureReader]]:
    data = complete_data_set(tmp_path / "out", request.param, failed=(7,))
    url = f"memory://property/{tmp_path.name}"
    published(data, url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        with FeatureReader(data.out) as local, FeatureReader(url) as in_bucket:
            yield local, in_bucket


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=indices, layer=st.sampled_from(list(VALUES)))
def test_indexing_is_as_of_a_folder(readers: tuple[FeatureReader, FeatureReader], index: object, layer: str) -> None:
    local, in_bucket = readers
    expected, actual = local[layer][index], in_bucket[layer][index]
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(actual, expected, equal_nan=True)


def test_everything_else_is_as_of_a_folder(readers: tuple[FeatureReader, FeatureReader]) -> None:
    local, in_bucket = readers
    for name in ("paths", "splits", "classes", "provenance", "failures", "fingerprint", "layers", "compression", "ids"):
        assert getattr(in_bucket, name) == getattr(local, name), name
    assert in_bucket.paths == PATHS
    for name in ("status", "row_hash", "record_hash", "source_size", "source_hash"):
        assert np.array_equal(in_bucket.column(name), local.column(name))
    assert np.array_equal(in_bucket.labels, local.labels)
    assert np.array_equal(in_bucket.checked(np.arange(7))["vector"], VALUES["vector"][:7])
    for shuffle in (None, "rows", "chunks"):
        batches = [rows.tolist() for _, rows in in_bucket.batches("vector", 4, shuffle=shuffle)]
        assert batches == [rows.tolist() for _, rows in local.batches("vector", 4, shuffle=shuffle)]
        for x, rows in in_bucket.batches("map:none", 4, shuffle=shuffle):
            assert np.array_equal(x, VALUES["map:none"][rows])


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_a_server_gives_the_same(proxy: Proxy, url: str, small: None, tmp_path: Path, compress: str | None) -> None:
    data = complete_data_set(tmp_path / "out", compress)
    published(data, url)
    with FeatureReader([data.out, url]) as reader:
        assert reader.paths == PATHS * 2
        assert np.array_equal(reader["vector"][:], np.concatenate([VALUES["vector"]] * 2))
        rows = [ROWS + 3, 0, ROWS + 22, 5, ROWS + 3]
        assert np.array_equal(reader["map:none"][rows], VALUES["map:none"][np.array(rows) % ROWS])
    before = len(proxy.ranges(".h5"))
    assert before
    with FeatureReader(url) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"])
    assert len(proxy.ranges(".h5")) == before  # all of it was in the cache
    with pytest.raises(LayertapError, match="000000.h5 is closed"):
        reader["vector"][0]


@pytest.mark.parametrize("compress", [None, "gzip"])
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 2)])
def test_workers_read_through_the_cache(
    proxy: Proxy, url: str, tmp_path: Path, method: str, workers: int, compress: str | None
) -> None:
    published(complete_data_set(tmp_path / "out", compress), url)
    with FeatureReader(url) as reader:
        assert len(reader["vector"][:2]) == 2  # threads, connections and handles are there when workers are forked
        for path in blocks():
            path.unlink()
        loader = DataLoader(
            reader.dataset("vector"), 4, num_workers=workers, multiprocessing_context=method, timeout=120
        )
        assert np.array_equal(torch.cat([x for x, _ in loader]).numpy(), VALUES["vector"])


def test_workers_are_forked_while_threads_read(proxy: Proxy, url: str, small: None, complete: Path) -> None:
    published(DataSet.open(complete), url)
    stop, errors = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            for path in blocks():
                path.unlink(missing_ok=True)
            if not np.array_equal(reader["vector"][[3, 11, 21]], VALUES["vector"][[3, 11, 21]]):
                errors.append(1)

    with FeatureReader(url) as reader:
        threads = [threading.Thread(target=read) for _ in range(3)]
        [thread.start() for thread in threads]
        try:
            for _ in range(3):
                loader = DataLoader(
                    reader.dataset("vector"), 4, num_workers=2, multiprocessing_context="fork", timeout=60
                )
                assert np.array_equal(torch.cat([x for x, _ in loader]).numpy(), VALUES["vector"])
        finally:
            stop.set()
            [thread.join() for thread in threads]
    assert errors == []


def test_a_pickled_reader_shares_the_cache(proxy: Proxy, url: str, complete: Path) -> None:
    published(DataSet.open(complete), url)
    with FeatureReader(url, cache_bytes=50_000_000) as reader:
        again = pickle.loads(pickle.dumps(reader))
    assert np.array_equal(again["vector"][:], VALUES["vector"])
    caches = {id(file.shard._cache) for file in again._index.files}
    assert len(caches) == 1
    assert again._index.files[0].shard._cache.cache_bytes == 50_000_000
    put(proxy, f"{url}/shards/000000.h5", b"x" * 100)  # its content is known, and here
    assert np.array_equal(pickle.loads(pickle.dumps(again))["vector"][:], VALUES["vector"])


def test_a_row_costs_one_block_at_most(proxy: Proxy, url: str, small: None, tmp_path: Path) -> None:
    published(complete_data_set(tmp_path / "out", shard_rows=23), url)
    with FeatureReader(url) as reader:
        for path in blocks():
            path.unlink()
        reader.close()
    with FeatureReader(url) as reader:
        reader._cache.close()
        for path in blocks():
            path.unlink()
        before = len(proxy.ranges(".h5"))
        assert np.array_equal(reader["map:none"][17], VALUES["map:none"][17])
        assert len(proxy.ranges(".h5")) - before == 1
        assert np.array_equal(reader["map:none"][17], VALUES["map:none"][17])
        assert len(proxy.ranges(".h5")) - before == 1


def test_an_object_that_is_gone_or_shorter_is_told(proxy: Proxy, url: str, complete: Path) -> None:
    published(DataSet.open(complete), url)
    with FeatureReader(url) as reader:
        for path in blocks():
            path.unlink()
        reader._cache.close()
        put(proxy, f"{url}/shards/000000.h5", b"x" * 100)
        with pytest.raises(LayertapError, match=r"000000.h5 cannot be read: .*received 100 of"):
            reader["vector"][0]
        bucket, _, key = f"{url}/shards/000001.h5".removeprefix("s3://").partition("/")
        direct(proxy).delete_object(Bucket=bucket, Key=key)
        with pytest.raises(LayertapError, match="000001.h5 was removed after it was opened"):
            reader["vector"][12]


# The cache


@pytest.mark.parametrize("many", [False, True])
def test_any_range_is_read(proxy: Proxy, url: str, small: None, many: bool) -> None:
    file, cache = stored(url, CONTENT), BlockCache()
    random = np.random.default_rng(1)
    edges = [0, 1, SMALL - 1, SMALL, SMALL + 1, 20 * SMALL, len(CONTENT) - 1, len(CONTENT)]
    random_ranges = [sorted(random.choice(len(CONTENT) + 1, 2).tolist()) for _ in range(40)]
    for start, stop in [[a, b] for a in edges for b in edges if a <= b] + random_ranges:
        if many:
            cache = BlockCache()
        assert bytes_of(cache, file, start, stop) == CONTENT[start:stop], (start, stop)
    ranges = proxy.ranges("sets")
    assert len(set(ranges)) == 21
    if not many:  # what one has begun to fetch ahead, the next one does not know
        assert len(ranges) == 21


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "swap", "other object", "folder"])
def test_a_damaged_block_is_fetched_again(proxy: Proxy, url: str, small: None, damage: str) -> None:
    file = stored(url, CONTENT)
    assert bytes_of(BlockCache(), file, 0, len(CONTENT)) == CONTENT
    other = RemoteFile(url, len(CONTENT), "1" * 64)
    victim, second = blocks()[5:7]
    content = victim.read_bytes()
    if damage == "flip":
        for place in (0, 300, SMALL - 1, SMALL, len(content) - 1):  # of a page, or of its checksum
            victim.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert bytes_of(BlockCache(), file, 0, len(CONTENT)) == CONTENT
            assert victim.read_bytes() == content
        return
    if damage == "swap":
        victim.write_bytes(second.read_bytes())
    elif damage == "other object":
        assert bytes_of(BlockCache(), other, 5 * SMALL, 6 * SMALL) == CONTENT[5 * SMALL : 6 * SMALL]
        BlockCache()._path(other, 5).rename(victim)
    elif damage == "folder":
        victim.unlink()
        victim.mkdir()
        assert bytes_of(BlockCache(), file, 0, len(CONTENT)) == CONTENT
        return
    else:
        victim.write_bytes({"cut": content[:-1], "empty": b"", "longer": content + b"x"}[damage])
    assert bytes_of(BlockCache(), file, 0, len(CONTENT)) == CONTENT
    assert victim.read_bytes() == content


def test_another_content_of_the_same_url_is_never_taken_from_the_cache(proxy: Proxy, url: str, small: None) -> None:
    file, cache = stored(url, CONTENT), BlockCache()
    assert bytes_of(cache, file, 0, 9000) == CONTENT[:9000]
    changed = CONTENT[::-1]
    put(proxy, url, changed)
    assert bytes_of(cache, file, 0, 9000) == CONTENT[:9000]
    assert bytes_of(cache, RemoteFile(url, len(changed), "1" * 64), 0, 9000) == changed[:9000]


def test_the_bound_is_kept_and_what_was_used_last_stays(
    proxy: Proxy, url: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "_FRESH_S", 0)
    file, block_bytes = stored(url, CONTENT), SMALL + 8 * 8
    most = 0
    for number in range(20):
        cache = BlockCache(6 * block_bytes)
        bytes_of(cache, file, number * SMALL, number * SMALL + 1)
        bytes_of(BlockCache(6 * block_bytes), file, 0, 1)  # the first one is used all the time
        most = max(most, sum(path.stat().st_size for path in blocks()))
    assert 4 * block_bytes <= most <= 6 * block_bytes
    numbers = [int(path.name[-6:]) for path in blocks()]
    assert {0, 19} <= set(numbers)
    assert proxy.ranges("sets").count(f"bytes=0-{SMALL - 1}") == 1
    with pytest.raises(InputError, match="cache_bytes is 100; it must be at least 2,112 .one block"):
        BlockCache(100)
    with pytest.raises(InputError, match="cache_bytes is 100; it must be at least 2,112 .one block"):
        FeatureReader("s3://bucket/set", cache_bytes=100)


def test_a_wrong_count_of_bytes_is_put_right(proxy: Proxy, url: str, small: None) -> None:
    """As after a kill between counting and writing, or after somebody emptied the folder."""
    file, block_bytes = stored(url, CONTENT), SMALL + 8 * 8
    bytes_of(BlockCache(6 * block_bytes), file, 0, 1)
    for content in (b"999999999", b"junk", b""):
        (cache_folder() / "bytes").write_bytes(content)
        bytes_of(BlockCache(6 * block_bytes), file, 3 * SMALL, 3 * SMALL + 1)
        bytes_of(BlockCache(6 * block_bytes), file, 4 * SMALL, 4 * SMALL + 1)
        assert int((cache_folder() / "bytes").read_bytes()) >= sum(path.stat().st_size for path in blocks())
        assert len(blocks()) == 3
        [path.unlink() for path in blocks()[1:]]


def test_two_processes_share_a_cache(proxy: Proxy, url: str, small: None, tmp_path: Path) -> None:
    stored(url, CONTENT)
    code = f"""
import sys, os
import numpy as np
from extract.store.places import block_cache
block_cache.BLOCK_BYTES, block_cache._PAGE_BYTES = {SMALL}, 256
from extract.store.places.block_cache import BlockCache, RemoteFile
file = RemoteFile({url!r}, {len(CONTENT)}, "0" * 64)
content = open({str(tmp_path / "content")!r}, "rb").read()
random = np.random.default_rng(int(sys.argv[1]))
for _ in range(40):
    cache = BlockCache({8 * (SMALL + 64)})
    start, stop = sorted(random.integers(0, len(content), 2).tolist())
    stop = min(stop, start + 5000)
    out = bytearray(stop - start)
    cache.read(file, start, stop, memoryview(out))
    assert out == content[start:stop], (start, stop)
"""
    (tmp_path / "content").write_bytes(CONTENT)
    root = Path(__file__).parents[3]
    runs = [subprocess.Popen([sys.executable, "-c", code, str(i)], cwd=root) for i in range(3)]
    most = 0
    while any(run.poll() is None for run in runs):
        if (cache_folder() / "bytes").exists():
            with (cache_folder() / "bytes").open("r+") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX)
                most = max(most, sum(path.stat().st_size for path in blocks()))
        time.sleep(0.01)
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert SMALL < most <= 8 * (SMALL + 64)
    assert not any(path.suffix == ".new" for path in blocks())


def test_blocks_are_fetched_ahead_side_by_side(proxy: Proxy, url: str, small: None) -> None:
    """Each answer takes a while; one after the other, 21 would take 21 times as long."""
    file = stored(url, CONTENT)
    bytes_of(BlockCache(), file, 0, 1)
    proxy.slow_s = 0.3
    proxy.rule = lambda method, path, count: "late" if method == "GET" else None
    start = time.monotonic()
    assert bytes_of(BlockCache(), file, SMALL, len(CONTENT)) == CONTENT[SMALL:]
    assert time.monotonic() - start < 20 * 0.3 / 2
    [path.unlink() for path in blocks()]
    cache, start = BlockCache(), time.monotonic()
    for number in range(21):  # read in small steps, as a pass over rows does
        bytes_of(cache, file, number * SMALL, number * SMALL + 70)
    assert time.monotonic() - start < 21 * 0.3 / 2


def test_what_could_not_be_fetched_is_tried_again_when_it_is_asked_for_again(
    proxy: Proxy, url: str, small: None
) -> None:
    file, cache = stored(url, CONTENT), BlockCache()
    proxy.rule = lambda method, path, count: "503"
    with pytest.raises(LayertapError, match="HTTP 503"):
        bytes_of(cache, file, 0, 5 * SMALL)
    proxy.forget()
    assert bytes_of(cache, file, 0, 5 * SMALL) == CONTENT[: 5 * SMALL]


def test_no_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home folder
    with pytest.raises(LayertapError, match="set XDG_CACHE_HOME"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "x")
    assert cache_folder() == Path("/x/layertap/blocks")
