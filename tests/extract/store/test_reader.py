from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset

from extract import FeatureReader, InputError, LayertapError, Status, UnknownNameError
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, create_shard
from extract.store.format.shard import copy_shard
from extract.store.format.writer import ShardWriter
from tests.extract.html_reader import HtmlReader
from tests.extract.store.processes import at_once, started
from tests.extract.store.rows import (
    FEATURES,
    PATHS,
    ROWS,
    VALUES,
    change,
    change_a_value,
    complete_data_set,
    empty_data_set,
    filled,
    new_shard,
    published,
    write,
)
from tests.pipelines.test_cli import fails, layertap


def test_the_reader_goes_over_all_shards(complete: Path, tmp_path: Path) -> None:
    moved = complete.rename(tmp_path / "else where")
    with FeatureReader(moved) as reader:
        assert len(reader) == ROWS
        assert reader.layers == ["vector", "map:none"]
        assert reader["vector"].shape == (ROWS, 6)
        assert reader["map:none"].dtype == np.float16
        assert reader["vector"].attributes == {"layer": "fc"}
        assert reader.paths == PATHS
        assert reader.labels.tolist() == [i % 3 for i in range(ROWS)]
        assert reader.classes == ["class 0", "class 1", "class 2"]
        assert reader.splits == ["train"] * ROWS
        assert reader.status.tolist() == [1] * ROWS
        assert reader.provenance == {"weights": "w"}
        assert reader.failures == []
        assert np.array_equal(np.asarray(reader["vector"]), VALUES["vector"])
        assert "vector" in reader
        with pytest.raises(UnknownNameError, match="'vectr' not found.*nearest: 'vector'"):
            reader["vectr"]


def test_a_reader_in_a_notebook_lists_its_features_and_counts_its_rows(complete: Path) -> None:
    with FeatureReader(complete) as reader:
        page = HtmlReader(reader._repr_html_())
        assert repr(reader["vector"]) == f"FeatureArray('vector', ({ROWS}, 6), {VALUES['vector'].dtype})"
    assert page.rows[0] == ["feature", "shape", "dtype", "MB", "pooling", "axes"]
    assert [row[:3] for row in page.rows[1:]] == [
        [name, str(VALUES[name].shape), str(VALUES[name].dtype)] for name in ("vector", "map:none")
    ]
    assert page.other[1] == f"{ROWS} ok"
    counts = [sum(i % 3 == label for i in range(ROWS)) for label in range(3)]
    assert page.other[2] == "3 classes: " + ", ".join(f"class {label} ({n})" for label, n in enumerate(counts))
    closed = HtmlReader(reader._repr_html_())
    assert (closed.rows, closed.other) == (page.rows, page.other[:1])  # nothing is read from closed files


indices = st.one_of(
    st.integers(-ROWS, ROWS - 1),
    st.slices(ROWS),
    st.lists(st.integers(-ROWS, ROWS - 1), max_size=40),
    st.lists(st.integers(-ROWS, ROWS - 1), max_size=40).map(lambda rows: np.array(rows, np.int32)),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(np.array),
)


@pytest.fixture(scope="module", params=[None, "gzip", "lzf", "blosc2"])
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> FeatureReader:
    return FeatureReader(complete_data_set(tmp_path_factory.mktemp("read") / "out", request.param).out)


@settings(max_examples=40, deadline=None)
@given(index=indices, layer=st.sampled_from(list(VALUES)))
def test_indexing_equals_numpy(shared: FeatureReader, index: object, layer: str) -> None:
    expected = VALUES[layer][np.array(index, int) if isinstance(index, list) else index]
    values = shared[layer][index]
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    assert np.array_equal(values, expected)


def test_an_index_that_means_no_rows_raises(shared: FeatureReader) -> None:
    for index in (ROWS, -ROWS - 1, True, [0, ROWS], np.array([True]), 1.5, "a", [[1]], (1, 2)):
        with pytest.raises(IndexError):
            shared["vector"][index]


def test_a_shard_that_was_written_anew_takes_the_place_of_the_old_one(complete: Path) -> None:
    data = DataSet.open(complete)
    old = data.path(1).read_bytes()
    with data.open_shard(1, data.path(1)) as shard:
        copy_shard(shard, data.path(1, 1, part=True), pending=np.array([2, 5]))
    with FeatureReader(complete) as reader:  # the old one, until the new one is whole
        assert np.array_equal(reader["vector"][:], VALUES["vector"])
        with ShardWriter(data, 1, 1) as writer:
            assert np.flatnonzero(writer.status == Status.PENDING).tolist() == [2, 5]
            write(writer, [12, 15])
            writer.publish()
        assert np.array_equal(reader["vector"][10:20], VALUES["vector"][10:20])  # what was open stays readable
    names = sorted(path.name for path in (complete / "shards").iterdir())
    assert names == ["000000.h5", "000000.json", "000001-r1.h5", "000001-r1.json", "000002.h5", "000002.json"]
    data.path(1).write_bytes(old)  # as if the run had been killed before it removed the old one
    with FeatureReader(complete) as reader:
        assert np.array_equal(reader["map:none"][:], VALUES["map:none"])
        assert reader.paths == PATHS
    data.open_or_create()
    assert sorted(path.name for path in (complete / "shards").iterdir()) == names


@pytest.mark.parametrize("compress", ["gzip", "blosc2"])
def test_a_compressed_shard_that_is_written_anew_stays_readable_for_who_has_it(tmp_path: Path, compress: str) -> None:
    data = complete_data_set(tmp_path / "out", compress)
    with FeatureReader(data.out) as reader:  # nothing is unpacked yet
        with data.open_shard(1, data.path(1)) as shard:
            copy_shard(shard, data.path(1, 1, part=True), pending=np.array([2]))
        with ShardWriter(data, 1, 1) as writer:
            write(writer, [12])
            writer.publish(compress)
        assert not data.path(1).exists()
        assert np.array_equal(reader["vector"][:], VALUES["vector"])


# While it is written


def test_a_partial_reader_has_the_rows_that_are_done_and_no_others(data: DataSet) -> None:
    published(data)
    with new_shard(data, 2) as writer:
        write(writer, [21], Status.DECODE_ERROR)
        write(writer, [22])
        with FeatureReader(data.out, partial=True) as reader:
            assert reader.rows.tolist() == [*range(10), 21, 22]
        write(writer, [20])
        assert len(reader) == 12  # it is what was done when it was opened
    with FeatureReader(data.out, partial=True) as reader:
        expected = [*range(10), 20, 21, 22]
        assert reader.rows.tolist() == expected
        assert reader.paths == [PATHS[row] for row in expected]
        assert reader.labels.tolist() == [row % 3 for row in expected]
        assert np.array_equal(reader["vector"][[12, 0, 10]], VALUES["vector"][[22, 0, 20]])
        assert np.array_equal(reader["map:none"][8:11], VALUES["map:none"][[8, 9, 20]])
        assert reader.failures == [(11, PATHS[21], "decode error", "")]
        again = pickle.loads(pickle.dumps(reader))
        assert again.rows.tolist() == expected


def test_an_empty_partial_reader_has_columns(data: DataSet) -> None:
    with FeatureReader(data.out, partial=True) as reader:
        assert len(reader) == 0
        assert reader["vector"][:].shape == (0, 6)
        assert reader.labels.tolist() == reader.paths == reader.failures == []
        assert reader.column("source_hash").shape == (0, 16)
        assert reader.column("row_hash").dtype == np.uint64
        with pytest.raises(UnknownNameError, match="column 'row_hsh' not found.*nearest: 'row_hash'"):
            reader.column("row_hsh")
        assert list(reader.batches("vector", 4)) == []


def test_a_torn_row_of_an_unfinished_shard_is_not_done(data: DataSet) -> None:
    """As after a power cut: the status has reached the disk, the features have not."""
    with new_shard(data) as writer:
        write(writer, list(range(6)))
        writer._put("/features/vector", np.array([2]), np.zeros((1, 6), "float32"))
        writer._put("/status", np.array([8]), np.array([1], "uint8"))
    with FeatureReader(data.out, partial=True) as reader:
        assert reader.rows.tolist() == [0, 1, 3, 4, 5]


def test_one_that_reads_while_another_writes_never_sees_a_wrong_row(tmp_path: Path) -> None:
    allowed = multiprocessing.Semaphore(0)

    def in_turn(rows: np.ndarray) -> dict[str, np.ndarray]:
        allowed.acquire(timeout=60)
        return {f.name: np.multiply.outer(rows, np.ones(f.shape)).astype(f.dtype) for f in FEATURES}

    count = 1500
    writing = started(lambda: filled(tmp_path / "out", FEATURES, count, in_turn, 600, batch_rows=10))
    while not (tmp_path / "out/dataset.json").exists():
        time.sleep(0.001)
    seen, looks, grew = 0, 0, True
    while seen < count:
        assert writing.exitcode in (None, 0)
        for _ in range(10 * grew):  # batches that are written during the next looks
            allowed.release()
        with FeatureReader(tmp_path / "out", partial=True) as reader:
            rows = reader.rows
            assert len(rows) >= seen
            assert np.array_equal(rows, np.arange(len(rows)))  # they are written in order
            assert (reader["vector"][:] == rows[:, None]).all()
            assert (reader["map:none"][:].reshape(len(rows), 24) == rows[:, None].astype("float16")).all()
            grew, seen = len(rows) > seen, len(rows)
            looks += grew
    writing.join()
    assert (writing.exitcode, seen) == (0, count)
    assert looks > 5


# Damage, and readers that are closed


READS: list[Callable[[FeatureReader], object]] = [
    lambda reader: reader["vector"][12],
    lambda reader: reader["vector"][np.int64(12)],
    lambda reader: reader["vector"][-11],
    lambda reader: reader["vector"][5:20],
    lambda reader: reader["vector"][::-2],
    lambda reader: reader["vector"][[3, 12, 4]],
    lambda reader: reader["vector"][np.arange(23) == 12],
    lambda reader: np.asarray(reader["vector"]),
    lambda reader: list(reader.batches("vector", 4)),
    lambda reader: list(reader.batches("vector", 4, shuffle="chunks")),
    lambda reader: list(reader.batches("vector", 4, shuffle="rows")),
    lambda reader: [reader.dataset("vector")[i] for i in range(23)],
    lambda reader: reader.dataset("vector", residency="memory"),
    lambda reader: pickle.loads(pickle.dumps(reader))["vector"][12],
    lambda reader: reader.to_arrow("vector"),
    lambda reader: reader.without([PATHS[22]])["vector"][:],
]  # fmt: skip


@pytest.mark.parametrize("changed", ["vector", "map:none"])
def test_a_changed_value_is_refused_however_it_is_read(complete: Path, changed: str) -> None:
    for read in READS:
        with FeatureReader(complete, check=True) as reader:
            read(reader)
    change_a_value(complete, 1, changed, 2)
    for read in READS:
        with FeatureReader(complete) as reader:
            read(reader)  # only with `check`
        with FeatureReader(complete, check=True) as reader:
            for _ in range(2):
                with pytest.raises(InputError, match=r"row 12 \(.*\) of .* is damaged: it does not match its hashes"):
                    read(reader)
            assert np.array_equal(reader["vector"][[0, 22]], VALUES["vector"][[0, 22]])


def test_a_row_is_verified_once(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[int] = []
    checked = FeatureReader.checked

    def count(reader: FeatureReader, rows: NDArray[np.int64]) -> object:
        verified.extend(rows.tolist())
        return checked(reader, rows)

    monkeypatch.setattr(FeatureReader, "checked", count)
    with FeatureReader(complete, check=True) as reader:
        for rows in ([3, 3, 1], [1, 4], slice(0, 6), slice(0, 6)):
            reader["vector"][rows]
            reader["map:none"][rows]
    assert sorted(verified) == list(range(6))


def test_arrays_outlive_their_reader(complete: Path) -> None:
    with FeatureReader(complete) as reader:
        rows, label = reader["vector"][2:4], reader.labels
    assert np.array_equal(rows, VALUES["vector"][2:4])
    assert label[1] == 1
    assert rows.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        label[0] = 9  # it is handed out more than once


# Several data sets


def test_a_list_of_folders_is_read_as_one(tmp_path: Path) -> None:
    first, second = complete_data_set(tmp_path / "one"), complete_data_set(tmp_path / "two", failed=(3,))
    for shard in range(second.n_shards):
        change(second.path(shard), lambda file: file["classes"].__setitem__(0, b"animals"))
    with FeatureReader([first.out, second.out]) as reader:
        assert len(reader) == 2 * ROWS
        assert reader.sets.tolist() == [0] * ROWS + [1] * ROWS
        assert np.array_equal(reader["map:none"][ROWS - 2 : ROWS + 2], VALUES["map:none"][[-2, -1, 0, 1]])
        assert reader.paths == PATHS * 2
        assert reader.failures == [(ROWS + 3, PATHS[3], "decode error", "row 3 failed")]
        # Labels are numbered anew.
        assert reader.classes == ["animals", "class 0", "class 1", "class 2"]
        before = [f"class {row % 3}" for row in range(ROWS)]
        after = ["animals" if name == "class 0" else name for name in before]
        assert [reader.classes[label] for label in reader.labels] == before + after
    other = complete_data_set(tmp_path / "other", depends_on={"weights": "v"})
    with pytest.raises(InputError, match="have different fingerprints"):
        FeatureReader([first.out, other.out])


# For PyTorch


@pytest.mark.parametrize(("workers", "compress", "is_sent"), [(0, None, False), (2, "gzip", False), (0, "gzip", True)])
def test_a_data_loader_gives_the_stored_rows_in_a_seeded_order(
    tmp_path: Path, workers: int, compress: str | None, is_sent: bool
) -> None:
    data = complete_data_set(tmp_path / "out", compress, failed=(7,))
    good = np.array([row for row in range(ROWS) if row != 7])
    with FeatureReader(data.out) as reader:
        assert len(reader["vector"][:2]) == 2  # handles are open when the workers are forked
        # A function that cannot be pickled, where nothing is.
        dataset = reader.dataset(["vector", "map:none"], transform=None if is_sent else (lambda sample: sample))
        if is_sent:  # as to a worker that is spawned
            dataset = pickle.loads(pickle.dumps(dataset))
        loader = DataLoader(
            dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5), num_workers=workers,
            multiprocessing_context="fork" if workers else None, timeout=120 if workers else 0,
        )  # fmt: skip
        batches = list(loader)
        numbers = DataLoader(range(len(good)), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
        order = torch.cat(list(numbers)).numpy()
    vectors = torch.cat([features["vector"] for features, _ in batches]).numpy()
    maps = torch.cat([features["map:none"] for features, _ in batches]).numpy()
    labels = torch.cat([label for _, label in batches]).numpy()
    rows = np.array([int(np.flatnonzero((VALUES["vector"] == vector).all(1))[0]) for vector in vectors])
    assert sorted(rows) == good.tolist()
    assert rows.tolist() == good[order].tolist()
    assert np.array_equal(maps, VALUES["map:none"][rows])
    assert labels.tolist() == [row % 3 for row in rows]


@pytest.fixture
def without_row_0(tmp_path: Path) -> Iterator[FeatureReader]:
    with FeatureReader(complete_data_set(tmp_path / "out", failed=(0,)).out) as reader:
        yield reader


def test_a_torch_data_set_of_one_layer_gives_tensors(without_row_0: FeatureReader) -> None:
    dataset = without_row_0.dataset("vector", split="train", transform=lambda x: x * 2)
    x, y = dataset[-1]
    assert np.array_equal(x.numpy(), VALUES["vector"][-1] * 2)
    assert (y, len(dataset)) == ((ROWS - 1) % 3, ROWS - 1)
    assert dataset.rows.tolist() == list(range(1, ROWS))
    with pytest.raises(UnknownNameError, match="split 'vall' not found"):
        without_row_0.dataset("vector", split="vall")
    with pytest.raises(UnknownNameError, match="layer 'x' not found"):
        without_row_0.dataset("x")
    with pytest.raises(InputError, match="at least one layer"):
        without_row_0.dataset([])


def test_positions_that_a_torch_data_set_does_not_have_are_refused(without_row_0: FeatureReader) -> None:
    dataset = without_row_0.dataset("vector")
    with pytest.raises(IndexError, match=f"{ROWS - 1} is out of range for 22 samples; rows of the reader"):
        list(DataLoader(Subset(dataset, [0, ROWS - 1]), 2))
    batches = DataLoader(dataset, batch_sampler=[(0, 1), (2, 3)])  # type: ignore[arg-type]
    assert [len(labels) for _, labels in batches] == [2, 2]
    labels = without_row_0.labels
    for mask in (labels == 1, torch.from_numpy(labels == 1)):
        with pytest.raises(IndexError, match="chosen by positions, got a mask"):
            list(DataLoader(Subset(dataset, mask), 2))  # type: ignore[arg-type]
    chosen: Any = torch.tensor([3, 21])  # tensors, as `torch.nonzero` gives them
    assert [label for _, label in Subset(dataset, chosen)] == dataset.labels[[3, 21]].tolist()


def unlabelled(out: Path, rows: list[int]) -> FeatureReader:
    """Without the labels of some rows, and with two rows that have failed."""
    data = complete_data_set(out, failed=(1, 7))
    for shard in range(data.n_shards):
        chosen = [row - data.shard_range(shard).start for row in rows if row in data.shard_range(shard)]
        change(data.path(shard), lambda file, chosen=chosen: file["label"].__setitem__(chosen, -1))
    return FeatureReader(data.out)


def test_rows_without_a_class_are_left_out_of_a_torch_data_set_where_others_have_one(tmp_path: Path) -> None:
    with unlabelled(tmp_path / "out", [2, 15]) as reader:
        with pytest.warns(UserWarning, match="2 of 21 rows have no class and are left out; unlabelled=True") as warned:
            dataset = reader.dataset("vector")
        assert warned[0].filename == __file__
        good = [row for row in range(ROWS) if row not in (1, 2, 7, 15)]
        assert dataset.rows.tolist() == good
        assert dataset.labels.tolist() == [row % 3 for row in good]
        x, y = next(iter(DataLoader(dataset, len(dataset))))
        assert np.array_equal(x.numpy(), VALUES["vector"][good])
        torch.nn.functional.cross_entropy(torch.zeros(len(y), 3), y)
        with warnings.catch_warnings(action="error"):
            everything = reader.dataset("vector", unlabelled=True)
            assert len(reader.dataset("vector", targets=np.zeros(ROWS))) == 21  # no class is needed
        assert (len(everything), everything[1][1]) == (21, -1)
        # A subset by labels has the rows of a class.
        subset = Subset(dataset, np.flatnonzero(dataset.labels == 1).tolist())
        rows = [row for row in good if row % 3 == 1]
        assert [label for _, label in subset] == [1] * len(rows)
        assert np.array_equal(torch.stack([x for x, _ in subset]).numpy(), VALUES["vector"][rows])


def test_a_torch_data_set_without_any_class_has_all_rows(tmp_path: Path) -> None:
    with unlabelled(tmp_path / "out", list(range(ROWS))) as reader, warnings.catch_warnings(action="error"):
        dataset = reader.dataset("vector")
        assert (len(dataset), set(dataset.labels.tolist())) == (21, {-1})


# Threads, processes, limits


@pytest.mark.parametrize("compress", [None, "lzf"])
def test_threads_share_a_reader(tmp_path: Path, compress: str | None) -> None:
    data, wrong_rows = complete_data_set(tmp_path / "out", compress), []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            rows = random.integers(0, ROWS, 5)
            if not np.array_equal(reader["vector"][rows], VALUES["vector"][rows]):
                wrong_rows.append(rows)

    with FeatureReader(data.out) as reader:
        at_once(read, range(4))
    assert wrong_rows == []


def check_workers_forked_while_threads_read(
    reader: FeatureReader, before_each_read: Callable[[], object] = lambda: None
) -> None:
    """A lock that a thread holds at that moment would be held for ever in the child."""
    stop, errors = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            before_each_read()
            if not np.array_equal(reader["vector"][[3, 11, 21]], VALUES["vector"][[3, 11, 21]]):
                errors.append(1)

    threads = [threading.Thread(target=read) for _ in range(3)]
    [thread.start() for thread in threads]
    try:
        for _ in range(2):
            dataset = reader.dataset("vector")
            loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork", timeout=60)
            assert np.array_equal(torch.cat([x for x, _ in loader]).numpy(), VALUES["vector"])
    finally:
        stop.set()
        [thread.join() for thread in threads]
    assert errors == []


@pytest.mark.parametrize("compress", [pytest.param("gzip", marks=pytest.mark.slow), "blosc2"])
def test_workers_are_forked_while_threads_read(tmp_path: Path, compress: str) -> None:
    with FeatureReader(complete_data_set(tmp_path / "out", compress).out) as reader:
        check_workers_forked_while_threads_read(reader)


@pytest.mark.slow
def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """In processes that have opened nothing else; the second one has two readers, which share the limit."""
    out = complete_data_set(tmp_path / "out", shard_rows=1).out
    code = f"""
import os, resource
import extract.store.row_selection as row_selection
from extract import FeatureReader
for soft, hard, count in ((20, 4096, 1), (20, 22, 1), (45, 45, 2)):  # which may be raised, or not
    if not (child := os.fork()):
        if count > 1:
            row_selection.OPENED_AT_ONCE, row_selection._OTHER_FILES = 0, 8
        readers = [FeatureReader({str(out)!r}) for _ in range(count)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        held = [reader["vector"][:] for reader in readers]
        print([values.shape for values in held], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines() == [str([(ROWS, 6)] * count) for count in (1, 1, 2)], run.stderr


# What is no data set, or another one


def test_any_name_comes_back_as_it_was(tmp_path: Path) -> None:
    names = [
        "line\nbreak.png", os.fsdecode(b"\xff\xfe.png"), "b" * 251 + ".png", "emoji \U0001f98a/\u00fc.png",
        "tab\t\"quote\".png", " lead and trail .png", "\u202egnp.txt",
    ]  # fmt: skip
    data = empty_data_set(tmp_path / "out", images={"root": "/p", "count": len(names), "paths_xxh3": ""})
    part, splits = data.path(0, part=True), ["", "val", *["train"] * 5]
    create_shard(part, data.features, data.identity(0), RowNames(names, range(7), splits, names), {})
    with ShardWriter(data, 0) as writer:
        write(writer, list(range(7)))
        writer.publish()
    with FeatureReader(data.out) as reader:
        assert reader.paths == reader.classes == names
        assert reader.splits == splits
        assert (reader.failures, reader.provenance) == ([], {})


def test_a_missing_or_unfinished_shard_and_one_with_other_features_are_named(complete: Path) -> None:
    shard, described = complete / "shards" / "000001.h5", complete / "dataset.json"
    part = shard.rename(shard.with_name(shard.name + ".part"))
    with pytest.raises(LayertapError, match="000001.h5.part is unfinished"):
        FeatureReader(complete)
    part.unlink()
    with pytest.raises(LayertapError, match=r"000001.h5 is missing \(shard 1 of 3\)"):
        FeatureReader(complete)
    content = json.loads(described.read_text())
    content["features"][0]["shape"] = [7]
    described.write_text(json.dumps(content))
    with pytest.raises(LayertapError, match=r"its 'features.vector' is \(\(6,\), 'float32'\), expected \(\(7,\)"):
        FeatureReader(complete)


@pytest.mark.parametrize(
    ("attribute", "value"), [("fingerprint", "f" * 64), ("images", "1" * 32), ("first_row", 3), ("shard", 7)]
)
def test_a_shard_of_another_data_set_is_neither_read_nor_written(complete: Path, attribute: str, value: object) -> None:
    data = DataSet.open(complete)
    change(data.path(0), lambda file: file.attrs.__setitem__(attribute, value))
    with pytest.raises(LayertapError, match=f"000000.h5 is not shard 0 of this data set: its '{attribute}' is"):
        FeatureReader(complete)
    data.path(0).rename(data.path(0, part=True))
    with pytest.raises(LayertapError, match=f"its '{attribute}' is .*; delete the file, and its rows will be computed"):
        ShardWriter(data, 0)


def test_pending_rows_are_not_read(complete: Path) -> None:
    shard = complete / "shards" / "000002.h5"
    with h5py.File(shard, "r+") as file:  # status is written in place: the structure stays as it was signed
        file["status"][1] = Status.PENDING
    message = "000002.h5 is damaged: 1 rows are pending in a finished file; run `layertap verify OUT --repair`"
    for path in (complete, shard):
        with pytest.raises(LayertapError, match=message):
            FeatureReader(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        FeatureReader(tmp_path / "nothing")
    with pytest.raises(InputError, match="is not a layertap data set"):
        FeatureReader(tmp_path)
    (tmp_path / "a.h5").write_bytes(b"no HDF5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = 1
    for name in "ab":
        with pytest.raises(InputError, match="is not a layertap shard"):
            FeatureReader(tmp_path / f"{name}.h5")
    with pytest.raises(InputError, match="the list of folders is empty"):
        FeatureReader([])


# Without the rows that a table names


GONE = [0, 4, 9, *range(10, 20), 22]  # some of the first shard, all of the second, the end of the third
STAY = [row for row in range(ROWS) if row not in GONE]
FAILED = 3


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return complete_data_set(tmp_path / "out", failed=(FAILED,)).out


@pytest.mark.parametrize("check", [False, True])
def test_it_has_the_other_rows_in_every_way_of_reading(out: Path, check: bool) -> None:
    notes: list[str] = []
    with FeatureReader(out, check=check) as whole:
        some = whole.without([*(PATHS[row] for row in GONE), "x.jpg"], notes.append)
        assert notes == [
            "images left out by the table: 14; paths in it without an image: 1 of 15, the first is 'x.jpg'"
        ]
        for reader in (some, pickle.loads(pickle.dumps(some)), some.without([PATHS[1]]), whole.without([PATHS[1]])):
            rows = reader.rows.tolist()
            assert reader.paths == [PATHS[row] for row in rows]
            assert reader.labels.tolist() == [row % 3 for row in rows]
            assert reader.failures == [(rows.index(FAILED), PATHS[FAILED], "decode error", reader.failures[0][3])]
            good = [row for row in rows if row != FAILED]
            for name, values in VALUES.items():
                features, mask = reader[name], np.array(rows) != FAILED
                assert np.array_equal(features[:][mask], values[good])
                batches = [x for x, _ in reader.batches(name, 4, shuffle="rows")]
                assert np.array_equal(np.sort(np.concatenate(batches), 0), np.sort(values[good], 0))
            table = reader.to_arrow("vector")
            assert (table["row"].to_pylist(), len(reader.dataset("vector"))) == (rows, len(good))
        assert some.rows.tolist() == STAY
        with pytest.raises(InputError, match="the table names all images; none is left"):
            whole.without(whole.paths)
        assert len(whole) == ROWS
    with pytest.raises(LayertapError, match="closed"):
        some["vector"][:]


def test_an_export_leaves_rows_out_and_a_wrong_table_writes_nothing(out: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_bytes("".join(f"{PATHS[row]}\n" for row in GONE if row != 4).encode())
    (tmp_path / "other.txt").write_text("x.jpg")
    command = ("export", out, "--to", "h5", "-o", tmp_path / "a.h5", "--without")
    assert "other.txt names no image: its first path is 'x.jpg'" in fails(*command, tmp_path / "other.txt")
    assert not (tmp_path / "a.h5").exists()
    done = layertap(*command, tmp_path / "names.txt")
    assert f"images left out by {tmp_path / 'names.txt'}: 13\n" in done.stderr
    stay = sorted([*STAY, 4])
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["path"].asstr(errors="surrogateescape")[:].tolist() == [PATHS[row] for row in stay]
        assert np.array_equal(file["features/vector"][:][1], VALUES["vector"][2])
        assert np.array_equal(file["features/map:none"][:][-1], VALUES["map:none"][21])
