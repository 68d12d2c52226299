from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError, Status
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames
from extract.store.format.receipt import read_receipt
from extract.store.format.shard import copy_shard
from extract.store.format.writer import ShardWriter
from extract.store.places import objects as remote
from extract.store.places.bucket import Bucket
from extract.store.verify import verify
from extract.system.json_files import read_json
from tests.extract.store.bucket_server import Proxy, delete, first, get, new_url, put, upload
from tests.extract.store.processes import at_once, started
from tests.extract.store.rows import (
    ROWS,
    SHARD_ROWS,
    VALUES,
    change_a_value,
    complete_data_set,
    create,
    data_set,
    empty_data_set,
    names_of,
    published,
    write,
)


def receipt_of(path: Path) -> dict[str, object]:
    receipt = read_receipt(path, SHARD_ROWS)
    assert receipt is not None
    return receipt


def publish(data: DataSet, url: str, shard: int = 0) -> bool:
    """Publish a shard of a data set that is in the bucket."""
    return Bucket(url).publish(data.path(shard), receipt_of(data.path(shard)))


def copied(url: str, out: Path) -> DataSet:
    """As `aws s3 sync` does it."""
    for name in remote.names(url):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(remote.read(f"{url}/{name}"))
    return DataSet.open(out)


@pytest.fixture
def begun(url: str, complete: Path) -> DataSet:
    """A data set whose description is in the bucket, without a shard."""
    data = DataSet.open(complete)
    Bucket(url).open_or_create(data)
    return data


@pytest.fixture(scope="module")
def whole(server: Proxy, _complete: Path) -> str:
    """A data set in a bucket; tests put back what they change."""
    url = new_url(server)
    upload(server, _complete, url)
    return url


@contextlib.contextmanager
def changed(proxy: Proxy, url: str, content: bytes | None) -> Iterator[None]:
    """An object has another content, or is not there."""
    before = get(proxy, url)
    if content is None:
        delete(proxy, url)
    else:
        put(proxy, url, content)
    try:
        yield
    finally:
        put(proxy, url, before)


def test_a_copy_of_the_bucket_is_the_data_set_and_a_second_writer_finds_what_is_there(
    url: str, complete: Path, tmp_path: Path
) -> None:
    data, bucket = DataSet.open(complete), Bucket(url + "/")
    assert bucket.open_or_create(data) is None
    assert bucket.published().tolist() == []
    for shard in (2, 0):
        assert publish(data, url, shard)
    assert bucket.published().tolist() == [0, 2]
    assert publish(data, url, 1)
    copy = copied(url, tmp_path / "copy")
    assert verify(copy.out).faults == []
    for path in (complete / "shards").iterdir():
        assert (copy.out / "shards" / path.name).read_bytes() == path.read_bytes()
    assert read_json(copy.out / "dataset.json") == read_json(complete / "dataset.json")
    before = remote.names(url)
    assert Bucket(url).open_or_create(data) == data
    assert [publish(data, url, shard) for shard in range(data.n_shards)] == [False] * 3
    assert remote.names(url) == before


def test_another_data_set_is_refused_and_nothing_gives_way(url: str, tmp_path: Path) -> None:
    data = data_set(tmp_path / "one")
    Bucket(url).open_or_create(data)  # it has no shard
    before = remote.read(f"{url}/dataset.json")
    for change, message in (
        ({"depends_on": {"weights": "v"}}, "weights: stored w, now v"),
        ({"shard_rows": 9}, "shard_rows: stored 10, now 9"),
        ({"images": {"root": "/", "count": 23, "paths_xxh3": "other"}}, "images.paths_xxh3"),
        ({"images": {**data.images, "merged_from": []}}, "is not a merged data set"),
    ):
        with pytest.raises(InputError, match=message):
            Bucket(url).open_or_create(data_set(tmp_path / "two", **change))
    assert Bucket(url).open_or_create(data_set(tmp_path / "moved", images={**data.images, "root": "/else"}))
    assert remote.read(f"{url}/dataset.json") == before


def test_other_objects_are_refused(url: str, data: DataSet) -> None:
    remote.put(f"{url}/notes.txt", b"")
    with pytest.raises(InputError, match="is not empty and not a layertap data set"):
        Bucket(url).open_or_create(data)
    for call in (lambda: Bucket(url).dataset, lambda: FeatureReader(url)):
        with pytest.raises(InputError, match="is not a layertap data set: it has no dataset.json"):
            call()
    with pytest.raises(InputError, match="is not a location in a bucket"):
        Bucket("outputs/photos")


def test_a_data_set_that_follows_a_folder_is_refused(proxy: Proxy, whole: str, complete: Path) -> None:
    version = {"number": 1, "rows_xxh3": "", "passes": [1]}
    content = {**read_json(complete / "dataset.json"), "version": version}
    with changed(proxy, f"{whole}/dataset.json", json.dumps(content).encode()):
        with pytest.raises(InputError, match="is a data set of `layertap sync`, which can only be read from a folder"):
            FeatureReader(whole)
        with pytest.raises(InputError, match="is a data set of `layertap sync`"):
            Bucket(whole).open_or_create(DataSet.open(complete))


def test_a_server_that_leaves_out_the_condition_is_found_out(
    proxy: Proxy, url: str, begun: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "handed_on_without", ["if-none-match"])
    with pytest.raises(LayertapError, match="ignores If-None-Match: . and overwrites existing objects"):
        Bucket(url).open_or_create(begun)
    with pytest.raises(LayertapError, match="overwrites existing objects"):
        publish(begun, url)
    assert remote.names(f"{url}/shards") == {}


# Between the object and its receipt


def test_our_own_file_without_a_receipt_is_published(url: str, begun: DataSet) -> None:
    receipt = receipt_of(begun.path(0))
    remote.put_file(f"{url}/shards/000000.h5", begun.path(0), str(receipt["sha256"]))
    assert Bucket(url).published().tolist() == []
    assert publish(begun, url)
    assert json.loads(remote.read(f"{url}/shards/000000.json")) == receipt


@pytest.mark.slow
def test_another_writers_whole_shard_is_published_with_a_receipt_of_its_own(url: str, tmp_path: Path) -> None:
    """The other one was killed; its file differs in its provenance, and in a row that failed."""
    ours = complete_data_set(tmp_path / "ours", failed=(2, 3))
    theirs = complete_data_set(tmp_path / "theirs", "gzip", failed=(3,))
    Bucket(url).open_or_create(ours)
    remote.put_file(f"{url}/shards/000000.h5", theirs.path(0), str(receipt_of(theirs.path(0))["sha256"]))
    assert publish(ours, url)
    expected = receipt_of(theirs.path(0))
    assert json.loads(remote.read(f"{url}/shards/000000.json")) == expected
    assert expected["reasons"] == {"3": "row 3 failed"}
    with FeatureReader(url, partial=True) as reader:
        assert reader.status.tolist() == [1, 1, 1, 2, *[1] * 6]
        assert reader.failures == [(3, reader.paths[3], "decode error", "row 3 failed")]
    assert [path.name for path in ours.path(0).parent.iterdir() if "new" in path.name] == []


def flipped(out: Path) -> bytes:
    data = complete_data_set(out)
    change_a_value(out, 0, "vector", 1)
    return data.path(0).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("other", [
    lambda out: b"not a shard",
    lambda out: complete_data_set(out).path(0).read_bytes()[:-10],
    flipped,
    lambda out: create(empty_data_set(out), 0).read_bytes(),  # rows are pending
    lambda out: complete_data_set(out).path(1).read_bytes(),
    lambda out: complete_data_set(out, depends_on={"weights": "v"}).path(0).read_bytes(),
])  # fmt: skip
def test_what_is_no_whole_shard_is_left_and_named(url: str, tmp_path: Path, other: Callable[[Path], bytes]) -> None:
    data, content = complete_data_set(tmp_path / "ours", failed=(1,)), other(tmp_path / "other")
    Bucket(url).open_or_create(data)
    remote.put(f"{url}/shards/000000.h5", content)
    with pytest.raises(LayertapError, match=f"{url}/shards/000000.h5 has no receipt and is not a complete shard"):
        publish(data, url)
    assert remote.names(f"{url}/shards") == {"000000.h5": len(content)}
    assert remote.read(f"{url}/shards/000000.h5") == content


def test_a_file_that_is_not_that_of_its_receipt_is_not_published(url: str, begun: DataSet) -> None:
    with pytest.raises(InputError, match=r"000000.h5 has .* bytes, its receipt says"):
        Bucket(url).publish(begun.path(0), receipt_of(begun.path(1)) | {"size": 12})
    assert remote.names(f"{url}/shards") == {}


@pytest.mark.slow
@pytest.mark.parametrize("inside", [".h5", "000000.json"])
def test_publishing_gets_through_where_an_answer_is_lost(proxy: Proxy, url: str, begun: DataSet, inside: str) -> None:
    proxy.rule = first("lost", "PUT", inside)
    assert publish(begun, url)
    assert get(proxy, f"{url}/shards/000000.h5") == begun.path(0).read_bytes()
    assert json.loads(get(proxy, f"{url}/shards/000000.json")) == receipt_of(begun.path(0))


@pytest.mark.parametrize("same", [True, False])
def test_of_writers_of_one_shard_one_wins(proxy: Proxy, url: str, tmp_path: Path, same: bool) -> None:
    sets = [complete_data_set(tmp_path / str(i), failed=() if same else (i,)) for i in range(3)]
    Bucket(url).open_or_create(sets[0])
    barrier, results = threading.Barrier(3), []

    def publish_with_others(data: DataSet) -> None:
        bucket = Bucket(url)
        bucket.open_or_create(data)
        barrier.wait()
        results.append(bucket.publish(data.path(0), receipt_of(data.path(0))))

    at_once(publish_with_others, sets)
    assert sorted(results) == [False, False, True]
    copy = copied(url, tmp_path / "copy")
    verification = verify(copy.out)
    assert {fault.shard for fault in verification.faults} == {1, 2}  # which nobody has published
    assert copy.path(0).read_bytes() in [data.path(0).read_bytes() for data in sets]


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "fault", "left"), [
    (".h5", "hang", []), (".h5", "late", ["000000.h5"]), ("000000.json", "hang", ["000000.h5"]),
    ("000000.json", "late", ["000000.h5", "000000.json"]),
])  # fmt: skip
def test_who_is_killed_while_publishing_has_harmed_nothing(
    proxy: Proxy, url: str, begun: DataSet, inside: str, fault: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the object or the receipt was stored (hang), or after it, without having been told (late)."""
    monkeypatch.setattr(remote, "_STORED_S", 5)  # longer than it lives
    proxy.seen.clear()
    proxy.slow_s = 1
    proxy.rule = first(fault, "PUT", inside)
    run = started(publish, begun, url)
    while not any(kind == "PUT" and inside in path for kind, path, _ in proxy.seen):
        assert run.is_alive()
        time.sleep(0.02)
    time.sleep(0.3)
    run.kill()
    run.join()
    proxy.forget()
    assert sorted(remote.names(f"{url}/shards")) == left
    is_done = "000000.json" in left
    assert Bucket(url).published().tolist() == ([0] if is_done else [])
    assert publish(begun, url) is not is_done
    assert Bucket(url).published().tolist() == [0]
    assert remote.read(f"{url}/shards/000000.h5") == begun.path(0).read_bytes()


# What readers make of it


def test_an_object_without_a_receipt_is_not_there(proxy: Proxy, whole: str) -> None:
    with changed(proxy, f"{whole}/shards/000001.json", None):
        assert Bucket(whole).published().tolist() == [0, 2]
        with pytest.raises(LayertapError, match=f"{whole}/shards/000001.h5 is missing \\(shard 1 of 3\\)"):
            FeatureReader(whole)
        with FeatureReader(whole, partial=True) as reader:
            assert reader.rows.tolist() == [*range(10), *range(20, 23)]
            assert np.array_equal(reader["vector"][:], VALUES["vector"][reader.rows])


def test_a_receipt_without_its_object_is_an_error(proxy: Proxy, whole: str) -> None:
    reads: list[Callable[[], object]] = [
        lambda: FeatureReader(whole), lambda: FeatureReader(whole, partial=True), lambda: Bucket(whole).published()
    ]  # fmt: skip
    with changed(proxy, f"{whole}/shards/000001.h5", None):
        for call in reads:
            with pytest.raises(LayertapError, match=f"{whole}/shards/000001.h5 is missing, but its receipt exists"):
                call()


@pytest.mark.parametrize(("name", "content", "message"), [
    ("000001.h5", b"x", "000001.h5 has .* bytes, its receipt says"),
    ("000001.json", b"{", "000001.json is damaged"),
    ("000001.json", b'{"size": 3}', "000001.json is damaged"),
])  # fmt: skip
def test_a_damaged_receipt_is_named(proxy: Proxy, whole: str, name: str, content: bytes, message: str) -> None:
    with changed(proxy, f"{whole}/shards/{name}", content), pytest.raises(LayertapError, match=f"{whole}/.*{message}"):
        FeatureReader(whole)


def test_a_shard_of_another_data_set_is_refused(proxy: Proxy, whole: str, tmp_path: Path) -> None:
    other = complete_data_set(tmp_path / "other", depends_on={"weights": "v"}).path(1)
    receipt = other.with_suffix(".json").read_bytes()
    message = f"{whole}/shards/000001.h5 is not shard 1 of this data set: its 'fingerprint'"
    with (
        changed(proxy, f"{whole}/shards/000001.h5", other.read_bytes()),
        changed(proxy, f"{whole}/shards/000001.json", receipt),
        pytest.raises(InputError, match=message),
    ):
        FeatureReader(whole)


@pytest.mark.slow
def test_the_last_revision_with_a_receipt_is_read(proxy: Proxy, url: str, tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", failed=(12,))
    upload(proxy, data.out, url)
    with data.open_shard(1, data.path(1)) as shard:
        copy_shard(shard, data.path(1, 1, part=True), pending=np.array([2]))
    with FeatureReader(url) as reader:
        assert reader.status[12] == Status.DECODE_ERROR
    with ShardWriter(data, 1, 1) as writer:
        write(writer, [12])
        writer.publish()
    remote.put(f"{url}/shards/000001-r2.h5", b"without a receipt")
    assert Bucket(url).publish(data.path(1, 1), receipt_of(data.path(1, 1)))
    assert Bucket(url).published().tolist() == [0, 1, 2]
    with FeatureReader(url) as reader:
        assert reader.status.tolist() == [1] * 23
        assert np.array_equal(reader["vector"][:], VALUES["vector"])


def test_a_bucket_is_read_while_it_is_written(url: str, data: DataSet) -> None:
    Bucket(url).open_or_create(data)
    with FeatureReader(url, partial=True) as reader:
        assert len(reader) == 0
        assert reader["vector"][:].shape == (0, 6)
    published(data, 1)
    publish(data, url, 1)
    with FeatureReader(url, partial=True) as reader:
        assert reader.rows.tolist() == list(range(10, 20))
    with pytest.raises(InputError, match="000001.h5 is a shard; in a bucket, only whole data sets are read; name the"):
        FeatureReader(f"{url}/shards/000001.h5")


def test_kept_columns_are_read_from_a_bucket(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_captions(shard_rows: range) -> RowNames:
        return replace(names_of(shard_rows), columns={"caption": [f"the {row}" for row in shard_rows]})

    monkeypatch.setattr("tests.extract.store.rows.names_of", with_captions)
    upload(proxy, complete_data_set(tmp_path / "one", shard_rows=SHARD_ROWS).out, url)
    with FeatureReader(url) as reader:
        assert reader.columns["caption"] == [f"the {row}" for row in range(ROWS)]
