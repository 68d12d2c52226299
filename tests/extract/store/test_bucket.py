from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
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
from extract.store.places.shard_cache import cache_folder
from extract.store.verify import verify
from extract.system.json_files import read_json
from tests.extract.store.bucket_server import Proxy, direct, first
from tests.extract.store.rows import (
    ROWS,
    SHARD_ROWS,
    VALUES,
    complete_data_set,
    create,
    created,
    data_set,
    names_of,
    write,
)

PUBLISH = """
import json
import sys
from pathlib import Path
from extract.store.places import objects as remote
from extract.store.places.bucket import Bucket
remote._ANSWER_S = 60
path = Path(sys.argv[2])
print(Bucket(sys.argv[1]).publish(path, json.loads(path.with_suffix(".json").read_text())))
"""


def receipt_of(path: Path) -> dict[str, object]:
    receipt = read_receipt(path, SHARD_ROWS)
    assert receipt is not None
    return receipt


def published(data: DataSet, url: str) -> Bucket:
    bucket = Bucket(url)
    bucket.open_or_create(data)
    for shard in range(data.n_shards):
        assert bucket.publish(data.path(shard), receipt_of(data.path(shard)))
    return bucket


def put(proxy: Proxy, url: str, content: bytes) -> None:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    direct(proxy).put_object(Bucket=bucket, Key=key, Body=content)


def delete(proxy: Proxy, url: str) -> None:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    direct(proxy).delete_object(Bucket=bucket, Key=key)


def copied(url: str, out: Path) -> DataSet:
    """As `aws s3 sync` does it."""
    for name in remote.names(url):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(remote.read(f"{url}/{name}"))
    return DataSet.open(out)


def test_a_copy_of_the_bucket_is_the_data_set(url: str, complete: Path, tmp_path: Path) -> None:
    data = DataSet.open(complete)
    bucket = Bucket(url + "/")
    assert bucket.open_or_create(data) is None
    assert bucket.published().tolist() == []
    for shard in (2, 0):
        assert bucket.publish(data.path(shard), receipt_of(data.path(shard)))
    assert bucket.published().tolist() == [0, 2]
    assert bucket.publish(data.path(1), receipt_of(data.path(1)))
    copy = copied(url, tmp_path / "copy")
    assert verify(copy.out).faults == []
    for path in (complete / "shards").iterdir():
        assert (copy.out / "shards" / path.name).read_bytes() == path.read_bytes()
    assert read_json(copy.out / "dataset.json") == read_json(complete / "dataset.json")


def test_a_second_writer_finds_what_is_there(url: str, complete: Path) -> None:
    data = DataSet.open(complete)
    published(data, url)
    again = Bucket(url)
    assert again.open_or_create(data) == data
    before = remote.names(url)
    for shard in range(data.n_shards):
        assert not again.publish(data.path(shard), receipt_of(data.path(shard)))
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


def test_other_objects_are_refused(url: str, tmp_path: Path) -> None:
    remote.put(f"{url}/notes.txt", b"")
    with pytest.raises(InputError, match="is not empty and not a layertap data set"):
        Bucket(url).open_or_create(data_set(tmp_path / "out"))
    for call in (lambda: Bucket(url).dataset, lambda: FeatureReader(url)):
        with pytest.raises(InputError, match="is not a layertap data set: it has no dataset.json"):
            call()
    with pytest.raises(InputError, match="is not a location in a bucket"):
        Bucket("outputs/photos")


def test_a_data_set_that_follows_a_folder_is_refused(url: str, complete: Path) -> None:
    content = read_json(complete / "dataset.json")
    version = {"number": 1, "rows_xxh3": "", "passes": [1]}
    remote.put(f"{url}/dataset.json", json.dumps({**content, "version": version}).encode())
    with pytest.raises(InputError, match="is a data set of `layertap sync`, which can only be read from a folder"):
        FeatureReader(url)
    with pytest.raises(InputError, match="is a data set of `layertap sync`"):
        Bucket(url).open_or_create(DataSet.open(complete))


def test_a_server_that_leaves_out_the_condition_is_found_out(proxy: Proxy, url: str, complete: Path) -> None:
    data = DataSet.open(complete)
    Bucket(url).open_or_create(data)
    careless = proxy.handed_on_without
    careless.append("if-none-match")
    try:
        with pytest.raises(LayertapError, match="ignores If-None-Match: . and overwrites existing objects"):
            Bucket(url).open_or_create(data)
        with pytest.raises(LayertapError, match="overwrites existing objects"):
            Bucket(url).publish(data.path(0), receipt_of(data.path(0)))
    finally:
        careless.clear()
    assert remote.names(f"{url}/shards") == {}


# Between the object and its receipt


def test_our_own_file_without_a_receipt_is_published(url: str, complete: Path) -> None:
    data = DataSet.open(complete)
    bucket = Bucket(url)
    bucket.open_or_create(data)
    receipt = receipt_of(data.path(0))
    remote.put_file(f"{url}/shards/000000.h5", data.path(0), str(receipt["sha256"]))
    assert bucket.published().tolist() == []
    assert bucket.publish(data.path(0), receipt)
    assert json.loads(remote.read(f"{url}/shards/000000.json")) == receipt


@pytest.mark.slow
def test_another_writers_whole_shard_is_published_with_a_receipt_of_its_own(url: str, tmp_path: Path) -> None:
    """The other one was killed; its file differs in its provenance, and in a row that failed."""
    ours = complete_data_set(tmp_path / "ours", failed=(2, 3))
    theirs = complete_data_set(tmp_path / "theirs", "gzip", failed=(3,))
    bucket = Bucket(url)
    bucket.open_or_create(ours)
    remote.put_file(f"{url}/shards/000000.h5", theirs.path(0), str(receipt_of(theirs.path(0))["sha256"]))
    assert bucket.publish(ours.path(0), receipt_of(ours.path(0)))
    expected = receipt_of(theirs.path(0))
    assert json.loads(remote.read(f"{url}/shards/000000.json")) == expected
    assert expected["reasons"] == {"3": "row 3 failed"}
    with FeatureReader(url, partial=True) as reader:
        assert reader.status.tolist() == [1, 1, 1, 2, *[1] * 6]
        assert reader.failures == [(3, reader.paths[3], "decode error", "row 3 failed")]
    assert [path.name for path in ours.path(0).parent.iterdir() if "new" in path.name] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "cut", "row", "pending", "other shard", "other data set"])
def test_what_is_no_whole_shard_is_left_and_named(url: str, tmp_path: Path, kind: str) -> None:
    data = complete_data_set(tmp_path / "ours", failed=(1,))
    other = complete_data_set(tmp_path / "other")
    content = bytearray(other.path(0).read_bytes())
    if kind == "text":
        content = bytearray(b"not a shard")
    elif kind == "cut":
        content = content[:-10]
    elif kind == "row":
        with other.open_shard(0, other.path(0)) as shard:
            content[shard.offsets["/features/vector"] + 30] ^= 1
    elif kind == "pending":
        unfinished = data_set(tmp_path / "unfinished")
        unfinished.open_or_create()
        content = bytearray(create(unfinished, 0).read_bytes())
    elif kind == "other shard":
        content = bytearray(other.path(1).read_bytes())
    else:
        content = bytearray(complete_data_set(tmp_path / "x", depends_on={"weights": "v"}).path(0).read_bytes())
    bucket = Bucket(url)
    bucket.open_or_create(data)
    remote.put(f"{url}/shards/000000.h5", bytes(content))
    with pytest.raises(LayertapError, match=f"{url}/shards/000000.h5 has no receipt and is not a complete shard"):
        bucket.publish(data.path(0), receipt_of(data.path(0)))
    assert remote.names(f"{url}/shards") == {"000000.h5": len(content)}
    assert remote.read(f"{url}/shards/000000.h5") == content


def test_a_file_that_is_not_that_of_its_receipt_is_not_published(url: str, complete: Path) -> None:
    data = DataSet.open(complete)
    bucket = Bucket(url)
    bucket.open_or_create(data)
    with pytest.raises(InputError, match=r"000000.h5 has .* bytes, its receipt says"):
        bucket.publish(data.path(0), receipt_of(data.path(1)) | {"size": 12})
    assert remote.names(f"{url}/shards") == {}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "inside", "fault"), [
    *(("PUT", ".h5", fault) for fault in ("500", "SlowDown", "reset", "lost", "hang")),
    ("PUT", "000000.json", "lost"), ("PUT", "000000.json", "hang"), ("HEAD", ".h5", "500"),
    ("HEAD", "000000.json", "reset"),
])  # fmt: skip
def test_publishing_gets_through(proxy: Proxy, url: str, complete: Path, fault: str, inside: str, method: str) -> None:
    proxy.slow_s = 1.2
    data = DataSet.open(complete)
    bucket = Bucket(url)
    bucket.open_or_create(data)
    proxy.rule = first(fault, method, inside)
    assert bucket.publish(data.path(0), receipt_of(data.path(0)))
    assert remote.read(f"{url}/shards/000000.h5") == data.path(0).read_bytes()
    assert json.loads(remote.read(f"{url}/shards/000000.json")) == receipt_of(data.path(0))


@pytest.mark.slow
def test_faults_at_random_harm_nothing(proxy: Proxy, url: str, complete: Path) -> None:
    random = np.random.default_rng(0)
    kinds = ["500", "503", "SlowDown", "reset", "lost", "cut"]
    proxy.rule = lambda method, path, count: kinds[random.integers(6)] if random.random() < 0.2 else None
    data = DataSet.open(complete)
    published(data, url)
    for _ in range(3):
        with FeatureReader(url) as reader:
            assert np.array_equal(reader["vector"][:], VALUES["vector"])
        for block in cache_folder().iterdir():
            block.unlink()
    proxy.forget()
    assert verify(copied(url, complete.parent / "copy").out).faults == []


@pytest.mark.parametrize("same", [True, False])
def test_of_writers_of_one_shard_one_wins(proxy: Proxy, url: str, tmp_path: Path, same: bool) -> None:
    sets = [complete_data_set(tmp_path / str(i), failed=() if same else (i,)) for i in range(4)]
    Bucket(url).open_or_create(sets[0])
    barrier, results = threading.Barrier(4), []

    def publish(data: DataSet) -> None:
        bucket = Bucket(url)
        bucket.open_or_create(data)
        barrier.wait()
        results.append(bucket.publish(data.path(0), receipt_of(data.path(0))))

    threads = [threading.Thread(target=publish, args=(data,)) for data in sets]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(results) == [False, False, False, True]
    copy = copied(url, tmp_path / "copy")
    verification = verify(copy.out)
    assert {fault.shard for fault in verification.faults} == {1, 2}  # which nobody has published
    assert copy.path(0).read_bytes() in [data.path(0).read_bytes() for data in sets]


@pytest.mark.slow
def test_of_two_processes_one_wins(proxy: Proxy, url: str, complete: Path) -> None:
    data = DataSet.open(complete)
    Bucket(url).open_or_create(data)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISH, url, str(data.path(0))],
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    assert sorted(run.communicate(timeout=120)[0].strip() for run in runs) == [b"False", b"True"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["PUT .h5", "PUT 000000.json"])
@pytest.mark.parametrize("fault", ["hang", "late"])
def test_who_is_killed_while_publishing_has_harmed_nothing(
    proxy: Proxy, url: str, complete: Path, where: str, fault: str
) -> None:
    """Killed before the object or the receipt was stored (hang), or after it, without having been told (late)."""
    data = DataSet.open(complete)
    Bucket(url).open_or_create(data)
    proxy.seen.clear()
    proxy.slow_s = 3
    method, inside = where.split()
    proxy.rule = first(fault, method, inside)
    run = subprocess.Popen([sys.executable, "-c", PUBLISH, url, str(data.path(0))], cwd=Path(__file__).parents[3])
    while not any(kind == method and inside in path for kind, path, _ in proxy.seen):
        assert run.poll() is None
        time.sleep(0.02)
    time.sleep(0.5)
    run.kill()
    run.wait()
    proxy.forget()
    is_done = where == "PUT 000000.json" and fault == "late"
    assert Bucket(url).published().tolist() == ([0] if is_done else [])
    assert Bucket(url).publish(data.path(0), receipt_of(data.path(0))) is not is_done
    assert Bucket(url).published().tolist() == [0]
    assert remote.read(f"{url}/shards/000000.h5") == data.path(0).read_bytes()


# What readers make of it


def test_an_object_without_a_receipt_is_not_there(proxy: Proxy, url: str, complete: Path) -> None:
    data = DataSet.open(complete)
    published(data, url)
    delete(proxy, f"{url}/shards/000001.json")
    assert Bucket(url).published().tolist() == [0, 2]
    with pytest.raises(LayertapError, match=f"{url}/shards/000001.h5 is missing \\(shard 1 of 3\\)"):
        FeatureReader(url)
    with FeatureReader(url, partial=True) as reader:
        assert reader.rows.tolist() == [*range(10), *range(20, 23)]
        assert np.array_equal(reader["vector"][:], VALUES["vector"][reader.rows])


def test_a_receipt_without_its_object_is_an_error(proxy: Proxy, url: str, complete: Path) -> None:
    published(DataSet.open(complete), url)
    delete(proxy, f"{url}/shards/000001.h5")
    for call in (lambda: FeatureReader(url), lambda: FeatureReader(url, partial=True), lambda: Bucket(url).published()):
        with pytest.raises(LayertapError, match=f"{url}/shards/000001.h5 is missing, but its receipt exists"):
            call()


def test_an_object_of_another_size_is_an_error(proxy: Proxy, url: str, complete: Path) -> None:
    data = DataSet.open(complete)
    published(data, url)
    put(proxy, f"{url}/shards/000001.h5", data.path(1).read_bytes() + b"x")
    with pytest.raises(LayertapError, match=f"{url}/shards/000001.h5 has .* bytes, its receipt says"):
        FeatureReader(url)


@pytest.mark.parametrize("content", [
    b"{", b'{"size": 3}',
    *(pytest.param(one, marks=pytest.mark.slow) for one in (b"", b"[]", b"\xff", b'{"size": -1, "sha256": "0"}')),
])  # fmt: skip
def test_a_damaged_receipt_is_named(proxy: Proxy, url: str, complete: Path, content: bytes) -> None:
    published(DataSet.open(complete), url)
    put(proxy, f"{url}/shards/000001.json", content)
    with pytest.raises(InputError, match=f"{url}/shards/000001.json is damaged"):
        FeatureReader(url)


def test_a_shard_of_another_data_set_is_refused(proxy: Proxy, url: str, complete: Path, tmp_path: Path) -> None:
    data, other = DataSet.open(complete), complete_data_set(tmp_path / "other", depends_on={"weights": "v"})
    published(data, url)
    for suffix in (".h5", ".json"):
        put(proxy, f"{url}/shards/000001{suffix}", other.path(1).with_suffix(suffix).read_bytes())
    with pytest.raises(InputError, match=f"{url}/shards/000001.h5 is not shard 1 of this data set: its 'fingerprint'"):
        FeatureReader(url)


@pytest.mark.slow
def test_the_last_revision_with_a_receipt_is_read(url: str, tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", failed=(12,))
    published(data, url)
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


def test_a_bucket_is_read_while_it_is_written(url: str, tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    Bucket(url).open_or_create(data)
    with FeatureReader(url, partial=True) as reader:
        assert len(reader) == 0
        assert reader["vector"][:].shape == (0, 6)
    with ShardWriter(*created(data, 1)) as writer:
        write(writer, list(range(10, 20)))
        writer.publish()
    Bucket(url).publish(data.path(1), receipt_of(data.path(1)))
    with FeatureReader(url, partial=True) as reader:
        assert reader.rows.tolist() == list(range(10, 20))
    with pytest.raises(InputError, match="000001.h5 is a shard; in a bucket, only whole data sets are read; name the"):
        FeatureReader(f"{url}/shards/000001.h5")


def test_kept_columns_are_read_from_a_bucket(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_captions(shard_rows: range) -> RowNames:
        return replace(names_of(shard_rows), columns={"caption": [f"the {row}" for row in shard_rows]})

    monkeypatch.setattr("tests.extract.store.rows.names_of", with_captions)
    published(complete_data_set(tmp_path / "one", shard_rows=SHARD_ROWS), url)
    with FeatureReader(url) as reader:
        assert reader.columns["caption"] == [f"the {row}" for row in range(ROWS)]
