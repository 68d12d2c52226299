from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extract import FeatureReader, InputError, LayertapError
from extract.store.format import layout
from extract.store.format.dataset import DataSet
from extract.store.format.shard import Shard
from extract.store.places import objects as remote
from extract.store.places import shard_cache
from extract.store.places.shard_cache import RemoteFile, ShardCache, cache_folder
from tests.extract.store.bucket_server import Proxy, delete, put, upload
from tests.extract.store.processes import started
from tests.extract.store.rows import PATHS, ROWS, VALUES, complete_data_set
from tests.extract.store.test_bucket import receipt_of
from tests.extract.store.test_reader import check_workers_forked_while_threads_read, indices

pytestmark = pytest.mark.slow
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shards have many pieces, and more than their head."""
    monkeypatch.setattr(shard_cache, "_HEAD_BYTES", 512)
    monkeypatch.setattr(remote, "_PIECE_BYTES", 2048)


@pytest.fixture
def data(proxy: Proxy, url: str, complete: Path) -> DataSet:
    """The data set that is in the bucket."""
    upload(proxy, complete, url)
    return DataSet.open(complete)


@pytest.fixture
def file(data: DataSet, url: str) -> RemoteFile:
    """Its first shard in the bucket."""
    return RemoteFile(f"{url}/shards/000000.h5", receipt_of(data.path(0)))


def kept(kind: str = "h5") -> list[Path]:
    return sorted(cache_folder().glob(f"*.{kind}"))


def empty_cache() -> None:
    for path in cache_folder().iterdir():
        path.unlink(missing_ok=True)


# The reader


@pytest.fixture(params=[None, "gzip"])
def readers(
    request: pytest.FixtureRequest, tmp_path: Path, small: None, proxy: Proxy, url: str
) -> Iterator[tuple[FeatureReader, FeatureReader]]:
    out = complete_data_set(tmp_path / "out", request.param, failed=(7,)).out
    upload(proxy, out, url)
    with FeatureReader(out) as local, FeatureReader(url) as in_bucket:
        yield local, in_bucket


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=indices, layer=st.sampled_from(list(VALUES)))
def test_indexing_is_as_of_a_folder(readers: tuple[FeatureReader, FeatureReader], index: object, layer: str) -> None:
    local, in_bucket = readers
    expected, actual = local[layer][index], in_bucket[layer][index]
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(actual, expected, equal_nan=True)


def check_columns(in_bucket: FeatureReader, local: FeatureReader) -> None:
    """Everything but the features is the same."""
    for name in ("paths", "splits", "classes", "provenance", "failures", "fingerprint", "layers", "compression", "ids"):
        assert getattr(in_bucket, name) == getattr(local, name), name
    for name in ("status", "row_hash", "record_hash", "source_size", "source_mtime_ns", "source_hash"):
        assert np.array_equal(in_bucket.column(name), local.column(name))
    assert np.array_equal(in_bucket.labels, local.labels)


def test_everything_else_is_as_of_a_folder(readers: tuple[FeatureReader, FeatureReader]) -> None:
    local, in_bucket = readers
    check_columns(in_bucket, local)
    assert in_bucket.paths == PATHS
    assert np.array_equal(in_bucket.checked(np.arange(7))["vector"], VALUES["vector"][:7])
    for shuffle in (None, "rows", "chunks"):
        batches = [rows.tolist() for _, rows in in_bucket.batches("vector", 4, shuffle=shuffle)]
        assert batches == [rows.tolist() for _, rows in local.batches("vector", 4, shuffle=shuffle)]
        for x, rows in in_bucket.batches("map:none", 4, shuffle=shuffle):
            assert np.array_equal(x, VALUES["map:none"][rows])


def test_a_server_gives_the_same(proxy: Proxy, url: str, small: None, data: DataSet) -> None:
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


def test_workers_are_forked_while_threads_read(url: str, small: None, data: DataSet) -> None:
    with FeatureReader(url) as reader:
        check_workers_forked_while_threads_read(reader, before_each_read=empty_cache_of_shards)


def empty_cache_of_shards() -> None:
    for path in kept():
        path.unlink(missing_ok=True)


def test_a_pickled_reader_shares_the_cache(proxy: Proxy, url: str, data: DataSet) -> None:
    with FeatureReader(url, cache_bytes=50_000_000) as reader:
        again = pickle.loads(pickle.dumps(reader))
    assert np.array_equal(again["vector"][:], VALUES["vector"])
    put(proxy, f"{url}/shards/000000.h5", b"x" * 100)  # its content is known, and here
    assert np.array_equal(pickle.loads(pickle.dumps(again))["vector"][:], VALUES["vector"])


# What is downloaded


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_opening_downloads_everything_but_the_features(
    proxy: Proxy, url: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str | None
) -> None:
    monkeypatch.setattr(layout, "_CHUNK_BYTES", 64)  # many chunks, and an index among them
    data = complete_data_set(tmp_path / "out", compress, failed=(7,), shard_rows=23)
    upload(proxy, data.out, url)
    with FeatureReader(data.out) as local, FeatureReader(url) as reader:
        check_columns(reader, local)
        assert "22 ok, 1 decode error" in reader._repr_html_()
        ranges = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for text in proxy.ranges(".h5")]
        with data.open_shard(0, data.path(0)) as shard:
            features = sum(shard.stored_bytes.values())
        assert 0 < sum(last + 1 - first for first, last in ranges) < data.path(0).stat().st_size - features // 2
        assert [path.suffix for path in cache_folder().iterdir() if path.suffix != ".lock"] == [".rows"]
        (rows,) = kept("rows")
        with Shard(rows, with_features=False) as shard, pytest.raises((LayertapError, OSError)):
            shard.read("vector", 3, 4)  # zeros are never taken for features
        assert np.array_equal(reader["vector"][:7], VALUES["vector"][:7])
    assert kept()[0].read_bytes() == data.path(0).read_bytes()


def test_a_row_costs_its_shard_and_each_shard_is_downloaded_once(
    proxy: Proxy, url: str, small: None, data: DataSet
) -> None:
    with FeatureReader(url) as reader:
        before = len(proxy.ranges(".h5"))
        assert np.array_equal(reader["map:none"][17], VALUES["map:none"][17])
        requests = proxy.ranges("000001.h5")
        assert len(proxy.ranges(".h5")) - before == len(kept()) * -(-kept()[0].stat().st_size // 2048)
        assert np.array_equal(reader["map:none"][[12, 17]], VALUES["map:none"][[12, 17]])
        assert proxy.ranges("000001.h5") == requests
        assert len(kept()) == 1


def test_an_object_that_is_gone_or_another_one_is_told(proxy: Proxy, url: str, data: DataSet) -> None:
    with FeatureReader(url) as reader:
        put(proxy, f"{url}/shards/000000.h5", b"x" * 100)
        with pytest.raises(LayertapError, match=r"000000.h5 cannot be read: .*received 100 of"):
            reader["vector"][0]
        delete(proxy, f"{url}/shards/000001.h5")
        with pytest.raises(LayertapError, match="000001.h5 was removed after it was opened"):
            reader["vector"][12]
        content = bytearray(data.path(2).read_bytes())
        with data.open_shard(2, data.path(2)) as shard:
            content[shard.offsets["/features/vector"]] ^= 1
        put(proxy, f"{url}/shards/000002.h5", bytes(content))
        with pytest.raises(LayertapError, match="000002.h5 does not match its receipt"):
            reader["vector"][22]
    assert kept() == []


def test_empty_objects_with_receipts_that_say_so_are_told(proxy: Proxy, url: str, data: DataSet) -> None:
    for shard in range(3):
        receipt = data.path(shard).with_suffix(".json").read_text()
        size = data.path(shard).stat().st_size
        put(proxy, f"{url}/shards/{shard:06d}.h5", b"")
        put(proxy, f"{url}/shards/{shard:06d}.json", receipt.replace(f'"size": {size}', '"size": 0').encode())
    with pytest.raises(InputError, match="000000.h5 is not a layertap shard"):
        FeatureReader(url)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "pipe"])
@pytest.mark.parametrize("kind", ["h5", "rows"])
def test_a_damaged_file_is_downloaded_again(url: str, data: DataSet, damage: str, kind: str) -> None:
    with FeatureReader(url) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"])
    if kind == "rows":
        empty_cache_of_shards()
    victim = kept(kind)[1]
    content = victim.read_bytes()
    victim.unlink()
    if damage == "pipe":
        os.mkfifo(victim)
    else:
        flipped = content[:600] + bytes([content[600] ^ 1]) + content[601:]
        victim.write_bytes({"flip": flipped, "cut": content[:-1], "empty": b"", "longer": content + b"x"}[damage])
    with FeatureReader(url) as reader:
        assert reader.paths == PATHS
        assert np.array_equal(reader["vector"][:], VALUES["vector"])
    assert victim.read_bytes() == content


def test_the_bound_is_kept_and_what_was_opened_last_stays(proxy: Proxy, url: str, data: DataSet) -> None:
    size = max(data.path(shard).stat().st_size for shard in range(3)) + 8192  # a file takes whole blocks of the disk
    files = [RemoteFile(f"{url}/shards/{i:06d}.h5", receipt_of(data.path(i))) for i in range(3)]
    for number in (0, 1, 0, 2, 0, 1, 0):  # the first one is used all the time
        ShardCache(2 * size).open(files[number], with_features=True).close()
        assert len(kept()) <= 2
        time.sleep(0.02)
    assert {path.stem for path in kept()} == {files[0].key, files[1].key}
    assert len(proxy.ranges("000000.h5")) == 1
    with FeatureReader(url, cache_bytes=size) as reader:  # it holds one shard open, and no file that is removed
        order = np.random.default_rng(0).permutation(23)
        assert np.array_equal(np.array([reader["vector"][int(row)] for row in order]), VALUES["vector"][order])
        assert sum(file.opened is not None for file in reader._index.files) == 1
        assert len(kept()) <= 1


def check_a_row(file: RemoteFile) -> None:
    assert np.array_equal(ShardCache().open(file, with_features=True).read("vector", 3, 4)[0], VALUES["vector"][3])


def test_processes_that_need_one_shard_download_it_once(proxy: Proxy, file: RemoteFile) -> None:
    proxy.slow_s = 0.5
    proxy.rule = lambda method, path, count: "late" if method == "GET" else None
    runs = [started(check_a_row, file) for _ in range(3)]
    [run.join() for run in runs]
    assert [run.exitcode for run in runs] == [0] * 3
    assert len(proxy.ranges("000000.h5")) == 1
    assert not any(path.suffix == ".new" for path in cache_folder().iterdir())


def test_rows_are_opened_while_the_whole_shard_is_downloaded(file: RemoteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    original, waits = shard_cache._download, []

    def download(file: RemoteFile, path: Path) -> Shard:
        other = threading.Thread(target=lambda: ShardCache().open(file, with_features=False), daemon=True)
        other.start()
        other.join(5)
        waits.append(other.is_alive())
        return original(file, path)

    monkeypatch.setattr(shard_cache, "_download", download)
    check_a_row(file)
    assert waits == [False]


def test_a_killed_download_leaves_nothing_that_is_read(proxy: Proxy, url: str, small: None, data: DataSet) -> None:
    proxy.slow_s = 1
    proxy.rule = lambda method, path, count: "late" if method == "GET" and count > 40 else None
    run = started(lambda: FeatureReader(url)["vector"][:])
    while not any(path.name.endswith(".new") for path in cache_folder().glob("*")):
        assert run.is_alive()
        time.sleep(0.01)
    run.kill()
    run.join()
    for left in cache_folder().glob("*.new"):
        os.utime(left, (0, 0))
    proxy.forget()
    with FeatureReader(url) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"])
    assert not any(path.suffix == ".new" for path in cache_folder().iterdir())


def test_pieces_are_downloaded_side_by_side(proxy: Proxy, small: None, file: RemoteFile) -> None:
    """Each answer takes a while; one after the other, 12 pieces would take 12 times as long."""
    proxy.slow_s = 0.3
    proxy.rule = lambda method, path, count: "late" if method == "GET" else None
    start = time.monotonic()
    ShardCache().open(file, with_features=True)
    assert len(proxy.ranges(".h5")) == 12
    assert time.monotonic() - start < 12 * 0.3 / 2


def test_what_could_not_be_downloaded_is_tried_again_when_it_is_asked_for_again(
    proxy: Proxy, url: str, data: DataSet
) -> None:
    with FeatureReader(url) as reader:
        proxy.rule = lambda method, path, count: "503"
        with pytest.raises(LayertapError, match="HTTP 503"):
            reader["vector"][0]
        proxy.forget()
        assert np.array_equal(reader["vector"][0], VALUES["vector"][0])


def test_no_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home folder
    with pytest.raises(LayertapError, match="set XDG_CACHE_HOME"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "x")
    assert cache_folder() == Path("/x/layertap/shards")


# Whoever can write to the folder can put other features there.


@pytest.mark.parametrize("how", ["others", "group", pytest.param("owner", marks=needs_root), "file", "read-only"])
def test_a_folder_that_others_can_write_or_this_user_cannot_is_refused(url: str, data: DataSet, how: str) -> None:
    if how == "read-only" and os.geteuid() == 0:
        pytest.skip("root can write everywhere")
    folder = cache_folder()
    folder.parent.mkdir(parents=True)
    if how == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod({"others": 0o777, "group": 0o770, "owner": 0o700, "read-only": 0o500}[how])
    if how == "owner":
        os.chown(folder, 65534, 65534)
    with pytest.raises(LayertapError, match="cannot be used") as caught:
        FeatureReader(url)
    assert str(folder) in caught.value.message
    assert caught.value.hint == "set XDG_CACHE_HOME to another folder"
    assert folder.is_file() or list(folder.iterdir()) == []


def test_only_files_of_the_cache_are_removed(url: str, data: DataSet, tmp_path: Path) -> None:
    victim = tmp_path / "letter.txt"
    victim.write_text("dear")
    with FeatureReader(url, cache_bytes=1) as reader:
        (cache_folder() / "letter.txt").write_text("dear")
        (cache_folder() / f"{'a' * 40}.h5").symlink_to(victim)
        assert np.array_equal(reader["vector"][:], VALUES["vector"])
    assert victim.read_text() == (cache_folder() / "letter.txt").read_text() == "dear"
    assert kept() == []
