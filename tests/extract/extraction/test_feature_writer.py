"""Rows of a program's own loop are stored, resumed, shared and read as those of a run; compared with plain h5py."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from extract import FeatureReader, FeatureWriter, InputError, LayertapError, Status, Taps
from extract.store.export import export
from extract.store.format.writer import ShardWriter
from extract.store.merge import merge
from extract.store.verify import repair, verify
from pipelines.cli import main
from tests.extract.extraction import kill_writer
from tests.extract.store.processes import killed, result_of, started
from tests.extract.store.rows import change_a_value

COUNT = 50
IDS = [f"text {row} ü" for row in range(COUNT)][::-1]  # not sorted
VECTORS = np.random.default_rng(0).normal(size=(COUNT, 6)).astype("float32")
MAPS = np.random.default_rng(1).normal(size=(COUNT, 2, 3)).astype("float16")
VALUES = {"vector": VECTORS, "map": MAPS}
LAYERS = {"vector": (6, "float32"), "map": ((2, 3), np.float16)}
IDENTITY = {"model": "small", "settings": {"length": 128}}


def opened(out: Path, **changes: Any) -> FeatureWriter:
    given: dict[str, Any] = {"ids": IDS, "layers": LAYERS, "identity": IDENTITY, "shard_rows": 16}
    return FeatureWriter(out, **{**given, **changes})


def batches(size: int = 4, rows: Any = range(COUNT)) -> Iterator[SimpleNamespace]:
    rows = list(rows)
    for start in range(0, len(rows), size):
        here = rows[start : start + size]
        yield SimpleNamespace(ids=[IDS[row] for row in here], values={name: VALUES[name][here] for name in VALUES})


def loop(out: Path, before: Callable[[int], object] = int, loader: Any = None, **changes: Any) -> list[int]:
    """The loop of a user; the numbers of rows of its batches."""
    seen = []
    with opened(out, **changes) as writer:
        for number, batch in enumerate(writer.todo(batches() if loader is None else loader)):
            before(number)
            writer.write(batch.ids, batch.values)
            seen.append(len(batch.ids))
    return seen


def plain(out: Path) -> dict[str, np.ndarray]:
    """All columns, by h5py alone, in the order of the shards."""
    parts: dict[str, list[np.ndarray]] = {}
    for path in sorted((out / "shards").glob("*.h5")):
        with h5py.File(path) as file:
            for name in ("path", "status", "label", "split", "features/vector", "features/map", "source_hash"):
                parts.setdefault(name, []).append(file[name][:])
            if "columns" in file:
                for name in file["columns"]:
                    parts.setdefault(f"columns/{name}", []).append(file["columns"][name][:])
    return {name: np.concatenate(each) for name, each in parts.items()}


def assert_whole(out: Path) -> None:
    columns = plain(out)
    assert [text.decode() for text in columns["path"]] == IDS
    assert np.array_equal(columns["features/vector"], VECTORS)
    assert np.array_equal(columns["features/map"], MAPS)
    assert set(columns["status"]) == {1}
    assert verify(out).faults == []
    assert sorted(path.name for path in out.iterdir()) == ["dataset.json", "shards"]


def test_rows_have_the_order_of_the_ids_whatever_the_order_of_the_batches(tmp_path: Path) -> None:
    order = np.random.default_rng(2).permutation(COUNT)
    assert sum(loop(tmp_path / "out", loader=batches(7, order))) == COUNT
    assert_whole(tmp_path / "out")


def test_a_reader_has_layers_labels_splits_and_columns(tmp_path: Path) -> None:
    labels = [None if row == 5 else "ab"[row % 2] for row in range(COUNT)]
    columns = {"length": range(COUNT), "score": np.linspace(0, 1, COUNT, dtype="float32"), "note": ["x"] * COUNT}
    splits = ["valid" if row % 5 == 0 else "train" for row in range(COUNT)]
    loop(tmp_path / "out", labels=labels, splits=splits, columns=columns)
    with FeatureReader(tmp_path / "out", check=True) as reader:
        assert reader.layers == ["vector", "map"]
        assert np.array_equal(reader["vector"][:], VECTORS)
        assert reader.paths == IDS
        assert [reader.classes[label] if label >= 0 else None for label in reader.labels] == labels
        assert reader.splits == [split.replace("valid", "val") for split in splits]
        assert reader.columns["length"].tolist() == list(range(COUNT))
        assert reader.columns["score"].dtype == np.float64
        assert reader.columns["note"] == ["x"] * COUNT
        assert reader.provenance["depends_on"]["identity"] == IDENTITY
        assert len({bytes(each) for each in reader.column("source_hash")}) == COUNT


def test_labels_of_a_tensor_are_numbers_of_classes(tmp_path: Path) -> None:
    numbers = torch.arange(COUNT) % 3
    loop(tmp_path / "out", labels=numbers, columns={"age": numbers.float().requires_grad_()}, shard_rows=np.int64(16))
    with FeatureReader(tmp_path / "out") as reader:
        assert (reader.classes, reader.labels.tolist()) == (["0", "1", "2"], numbers.tolist())
        assert reader.columns["age"].tolist() == numbers.tolist()


def test_types_are_those_of_the_layers(tmp_path: Path) -> None:
    layers = {"bf": (6, torch.bfloat16), "half": (6, "float16"), "small": (6, "int8"), "whole": ((), torch.int64)}
    exact = torch.from_numpy(VECTORS).bfloat16()
    with opened(tmp_path / "out", layers=layers) as writer:
        values = {
            "bf": exact,
            "half": VECTORS.astype("float64"),
            "small": VECTORS,
            "whole": np.arange(COUNT, dtype="i4"),
        }
        writer.write(IDS, values)
    with FeatureReader(tmp_path / "out") as reader:
        assert np.array_equal(reader["bf"][:], exact.float().numpy())
        assert np.array_equal(reader["half"][:], VECTORS.astype("float16"))
        assert np.abs(reader["small"][:] - VECTORS).max() <= np.abs(VECTORS).max() / 254 * 1.01
        assert reader["whole"][:].tolist() == list(range(COUNT))
    assert verify(tmp_path / "out").faults == []


def test_a_record_of_taps_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    layers = {"0": (5, "float32"), "2": (3, "float32")}
    with opened(tmp_path / "out", layers=layers) as writer, Taps(model, ["0", "1", "2"]) as taps, torch.no_grad():
        for batch in writer.todo(batches(8)):
            model(torch.from_numpy(batch.values["vector"]))
            writer.write(batch.ids, taps.record)
    with FeatureReader(tmp_path / "out") as reader, torch.no_grad():
        assert np.allclose(reader["0"][:], model[0](torch.from_numpy(VECTORS)).numpy(), atol=1e-6)
        assert np.allclose(reader["2"][:], model(torch.from_numpy(VECTORS)).numpy(), atol=1e-6)


def test_arrays_may_be_changed_after_they_were_written(tmp_path: Path) -> None:
    buffers = {name: np.empty_like(values[:5]) for name, values in VALUES.items()}
    with opened(tmp_path / "out") as writer:
        for start in range(0, COUNT, 5):
            for name, buffer in buffers.items():
                buffer[:] = VALUES[name][start : start + 5]
            writer.write(IDS[start : start + 5], buffers)
            for buffer in buffers.values():
                buffer[:] = 7
    assert_whole(tmp_path / "out")


def test_rows_without_values_and_values_that_are_not_finite_have_a_status(tmp_path: Path) -> None:
    vectors, maps = VECTORS.copy(), MAPS.astype("float32")
    vectors[3, 2], maps[20, 0, 0] = np.nan, 1e6
    with opened(tmp_path / "out") as writer:
        good = [row for row in range(COUNT) if row not in (7, 8)]
        writer.write([IDS[row] for row in good], {"vector": vectors[good], "map": maps[good]})
        writer.fail([IDS[7]], "empty text")
        writer.fail([IDS[8]], ValueError("gone \ud800"), Status.MISSING)
        with pytest.raises(InputError, match="DECODE_ERROR, MISSING, IO_ERROR"):
            writer.fail([IDS[9]], "fine", Status.OK)
    with FeatureReader(tmp_path / "out") as reader:
        failures = [(row, status, reason) for row, _, status, reason in reader.failures]
        assert failures == [
            (3, "not finite", "vector has NaN or infinite values"), (7, "decode error", "empty text"),
            (8, "missing", "gone \\ud800"),
            (20, "not finite", "map has NaN or infinite values; the largest float16 is 65504, use float32"),
        ]  # fmt: skip
        assert np.isnan(reader["vector"][7]).all()
    assert verify(tmp_path / "out").faults == []


def test_a_repeated_loop_has_nothing_to_do_and_shards_are_reported_once(tmp_path: Path) -> None:
    out, shards = tmp_path / "out", list[Path]()
    loop(out, on_shard=shards.append)
    assert shards == [out / "shards" / f"{number:06d}.h5" for number in range(4)]
    assert [json.loads(path.with_suffix(".json").read_text())["status"] for path in shards] == [
        {"ok": 16}, {"ok": 16}, {"ok": 16}, {"ok": 2},
    ]  # fmt: skip
    assert loop(out, on_shard=shards.append, shard_rows=None) == []
    assert len(shards) == 4


def test_an_interrupted_loop_is_resumed_where_it_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fails_at_6(number: int) -> None:
        if number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(out, fails_at_6)
    assert [path.name for path in (out / "shards").glob("*.h5")] == ["000000.h5"]
    with opened(out) as writer:
        assert writer.unfinished == IDS[16:]
        batch = next(iter(writer.todo(batches())))
        assert batch.ids == IDS[24:28]
        for rest in [batch, *writer.todo(batches(4, range(28, COUNT)))]:
            writer.write(rest.ids, rest.values)
    assert_whole(out)


def test_a_loop_that_gives_all_batches_again_stores_the_missing_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), opened(out) as writer:
        first = next(batches())
        writer.write(first.ids, first.values)
        raise KeyboardInterrupt
    with opened(out) as writer:
        for batch in batches():  # not by `todo`: of the first, all rows are stored, and its shard is unfinished
            writer.write(batch.ids, batch.values)
    assert_whole(out)


def test_a_batch_of_stored_and_missing_rows_keeps_the_stored_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(LayertapError, match="40 of 50 ids have no row"), opened(out) as writer:
        batch = next(batches(10))
        writer.write(batch.ids, batch.values)
    with opened(out) as writer:
        for batch in writer.todo(batches(15)):
            wrong = {name: np.where(np.isin(batch.ids, IDS[:10]).reshape(-1, *[1] * (values.ndim - 1)), 9, values)
                     for name, values in batch.values.items()}  # fmt: skip
            writer.write(batch.ids, wrong)
    assert_whole(out)


def test_ids_that_never_came_are_named_and_their_shard_stays_unfinished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = re.escape("2 of 50 ids have no row: 'text 30 ü', 'text 27 ü'")
    with pytest.raises(LayertapError, match=names) as raised:
        loop(out, loader=batches(1, [row for row in range(COUNT) if row not in (19, 22)]))
    assert "\n" not in str(raised.value)
    assert [path.stem for path in sorted((out / "shards").glob("*.h5"))] == ["000000", "000002", "000003"]
    with pytest.raises(LayertapError, match="shard 1 of 4"):
        FeatureReader(out)
    assert "to resume, run the same program again" in layertap("status", out)
    assert loop(out, loader=batches(1)) == [1, 1]
    assert_whole(out)


WRONG: dict[str, tuple[Callable[[FeatureWriter], object], str]] = {
    "an id that is not listed": (lambda w: w.write(["x"], {"vector": VECTORS[:1], "map": MAPS[:1]}), "'x' is not one"),
    "an id twice in a batch": (
        lambda w: w.write([IDS[3]] * 2, {"vector": VECTORS[:2], "map": MAPS[:2]}), "'text 46 ü'"
    ),
    "a layer that is missing": (
        lambda w: w.write(IDS[:2], {"vector": VECTORS[:2]}), "'map' of id 'text 49 ü' and 1 more"
    ),
    "an array for a mapping": (lambda w: w.write(IDS[:2], VECTORS[:2]), "'vector' of id 'text 49 ü'.*mapping"),  # type: ignore[arg-type]
    "another shape": (
        lambda w: w.write(IDS[:2], {"vector": VECTORS[:2, :5], "map": MAPS[:2]}), r"'vector'.*got \(2, 5\)"
    ),
    "another number of rows": (
        lambda w: w.write(IDS[:2], {"vector": VECTORS[:3], "map": MAPS[:2]}), r"got \(3, 6\) float32, expected \(2, 6\)"
    ),
    "whole numbers for floats": (
        lambda w: w.write(IDS[:1], {"vector": np.ones((1, 6), int), "map": MAPS[:1]}), "int64, expected"
    ),
    "a list of tensors with gradients": (
        lambda w: w.write(IDS[:1], {"vector": [torch.ones(6, requires_grad=True)], "map": MAPS[:1]}), "no array"
    ),
    "masked values": (
        lambda w: w.write(IDS[:1], {"vector": np.ma.masked_less(VECTORS[:1], 9), "map": MAPS[:1]}), "are masked"
    ),
    "ids of a generator": (lambda w: w.fail((id for id in ["z"]), ""), "'z' is not one"),  # type: ignore[arg-type]
    "a list as id": (lambda w: w.fail([["z"]], ""), "is not one"),  # type: ignore[list-item]
    "text": (lambda w: w.write(IDS[:1], {"vector": [["a"] * 6], "map": MAPS[:1]}), "expected"),
    "ragged lists": (lambda w: w.write(IDS[:2], {"vector": [[1.0], [1.0, 2.0]], "map": MAPS[:2]}), "no array"),
    "a batch without ids": (lambda w: list(w.todo([3])), "batch of type int has no `ids`"),
    "an unknown id in a batch": (lambda w: list(w.todo([{"ids": ["y"]}])), "'y' is not one"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_rows_are_refused_in_one_line_that_names_them(what: str, tmp_path: Path) -> None:
    call, message = WRONG[what]
    with pytest.raises(InputError, match=message) as raised, opened(tmp_path / "out") as writer:
        call(writer)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "out" / "shards").iterdir()) == []
    loop(tmp_path / "out")
    assert_whole(tmp_path / "out")


def test_an_id_that_was_written_is_refused_and_the_rows_stay(tmp_path: Path) -> None:
    batch = next(batches(3))
    with pytest.raises(InputError, match="'text 49 ü' was written before"), opened(tmp_path / "out") as writer:
        writer.write(batch.ids, batch.values)
        writer.write(batch.ids, batch.values)
    assert loop(tmp_path / "out")[0] == 4
    assert_whole(tmp_path / "out")


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"ids": []}, "ids is empty"),
    "the same id": ({"ids": ["a", "b", "a"]}, "'a' occurs more than once"),
    "a number as id": ({"ids": ["a", 3]}, r"ids\[1\] is 3"),
    "a null character": ({"ids": ["a\0"]}, r"ids\[0\]"),
    "a text that cannot be stored": ({"ids": ["\ud800"]}, "cannot be encoded"),
    "an identity that cannot be stored": ({"identity": {"model": "\ud800"}}, "identity has '.ud800'"),
    "a layer that cannot be stored": ({"layers": {"\ud800": (3, "float32")}}, "cannot be encoded"),
    "no layers": ({"layers": {}}, "layers is empty"),
    "no shape": ({"layers": {"v": "float32"}}, "layer 'v' is 'float32'"),
    "no size": ({"layers": {"v": ((0,), "float32")}}, "layer 'v' has shape"),
    "an unknown dtype": ({"layers": {"v": (3, "float64")}}, "dtype 'float64' not found in layer 'v'"),
    "a slash": ({"layers": {"a/b": (3, "float32")}}, "layer 'a/b'"),
    "no identity": ({"identity": {}}, "identity is empty"),
    "an object in the identity": ({"identity": {"model": nn.ReLU()}}, "identity cannot be written as JSON"),
    "too few labels": ({"labels": ["a"]}, "labels has 1 values for 50 ids"),
    "labels that are missing in a table": ({"labels": ["a", float("nan")] * 25}, r"labels\[1\] is nan"),
    "labels that are bytes": ({"labels": [b"a"] * COUNT}, r"labels\[0\] is b'a'"),
    "labels with a null character": ({"labels": ["a\0"] * COUNT}, "labels has a null character"),
    "an unknown split": ({"splits": ["dev"] * COUNT}, "splits has 'dev'"),
    "a short column": ({"columns": {"n": [1]}}, "column 'n' has 1 values"),
    "a column of a data set": ({"columns": {"Label": [1] * COUNT}}, "'Label'"),
    "a column of objects": ({"columns": {"n": [None] * COUNT}}, "column 'n' has values of object"),
    "a column of lists": ({"columns": {"n": [[1], [1, 2]] * 25}}, "column 'n' has values of several lengths"),
    "a column of numbers that are too large": (
        {"columns": {"n": np.full(COUNT, 2**63, "u8")}},
        "'n' has 92233720368547",
    ),
    "a text of a column that cannot be stored": ({"columns": {"n": ["\ud800"] * COUNT}}, "cannot be encoded"),
    "a column with the name of a layer": ({"columns": {"map": [1] * COUNT}}, "layer 'map'"),
    "a URL": ({"out": "s3://bucket/x"}, "written to a folder"),
    "no rows in a shard": ({"shard_rows": 0}, "shard_rows is 0"),
    "a part of a row": ({"shard_rows": 2.5}, "shard_rows is 2.5"),
    "no sides": ({"layers": {"v": (None, "float32")}}, "layer 'v' has shape None"),
    "an unknown compression": ({"compress": "zip"}, "zip"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_wrong_arguments_are_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    changes, message = ARGUMENTS[what]
    with pytest.raises(LayertapError, match=message) as raised:
        opened(**{"out": tmp_path / "out", **changes})
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"identity": {"model": "large", "settings": {"length": 128}}}, "identity.model"),
        ({"layers": {"vector": (6, "float16"), "map": ((2, 3), "float16")}}, "features.vector"),
        ({"ids": IDS[1:]}, "paths_xxh3"),
        ({"labels": [1] * COUNT}, "labels_xxh3"),
    ],
)
def test_another_identity_needs_another_folder(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    loop(tmp_path / "out")
    with pytest.raises(InputError, match="choose another output folder") as raised, opened(tmp_path / "out", **changes):
        pass
    assert named in str(raised.value)
    assert_whole(tmp_path / "out")


def test_at_most_four_shards_are_filled_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="begins shard 4, and shards 0, 1, 2, 3 are unfinished.*larger shard_rows"):
        loop(tmp_path / "out", loader=batches(1, range(0, COUNT, 10)), shard_rows=10)
    loop(tmp_path / "out", shard_rows=10)
    assert_whole(tmp_path / "out")


def test_rows_outside_a_with_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayertapError, match="with FeatureWriter"):
        opened(tmp_path / "out").write(IDS[:1], {"vector": VECTORS[:1], "map": MAPS[:1]})


def test_a_writer_can_be_opened_again_but_not_twice_at_once(tmp_path: Path) -> None:
    writer = opened(tmp_path / "out")
    with pytest.raises(LayertapError, match="47 of 50 ids"), writer:
        batch = next(batches(3))
        writer.write(batch.ids, batch.values)
        with pytest.raises(LayertapError, match="is open already"):
            writer.__enter__()
    assert writer.unfinished == IDS
    with writer:
        for batch in writer.todo(batches(1)):
            writer.write(batch.ids, batch.values)
    assert writer.unfinished == []
    assert_whole(tmp_path / "out")


@pytest.mark.parametrize("compress", ["gzip", "lzf"])
def test_shards_are_compressed(tmp_path: Path, compress: str) -> None:
    loop(tmp_path / "out", compress=compress)
    with h5py.File(tmp_path / "out" / "shards" / "000001.h5") as file:
        assert file["features/vector"].compression == compress
    assert_whole(tmp_path / "out")


# Kills and processes


@pytest.mark.parametrize("batch", [0, 5, 12])
def test_a_killed_loop_loses_at_most_the_batch_in_work(tmp_path: Path, batch: int) -> None:
    out = tmp_path / "out"

    def dies(number: int) -> None:
        if number == batch:
            os.kill(os.getpid(), 9)

    killed(lambda: loop(out, dies, sync_s=0))
    done = result_of(lambda: sum(loop(out)))
    assert COUNT - 4 * batch <= done <= COUNT - 4 * max(0, batch - 1)
    assert_whole(out)


def test_a_loop_is_resumed_after_its_folder_was_moved(tmp_path: Path) -> None:
    def fails_at_2(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "out", fails_at_2)
    (tmp_path / "out").rename(tmp_path / "moved")
    assert sum(loop(tmp_path / "moved")) == COUNT - 8
    assert_whole(tmp_path / "moved")


def test_a_shard_that_is_not_published_is_told_although_the_program_has_caught_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LayertapError, match="shard 0 could not be published"), opened(tmp_path / "out") as writer:
        with monkeypatch.context() as full, pytest.raises(LayertapError, match="no space"):
            full.setattr(ShardWriter, "publish", lambda *_: (_ for _ in ()).throw(LayertapError("no space")))
            writer.write(IDS[:16], {name: values[:16] for name, values in VALUES.items()})
            writer._wait(0)
        writer.write(IDS[16:], {name: values[16:] for name, values in VALUES.items()})
    assert loop(tmp_path / "out") == []
    assert_whole(tmp_path / "out")


def test_several_threads_may_write(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with opened(tmp_path / "out") as writer, ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda batch: writer.write(batch.ids, batch.values), batches(1)))
    finally:
        sys.setswitchinterval(interval)
    assert_whole(tmp_path / "out")


def test_a_process_that_was_forked_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as writer:
        values = {name: each[:1] for name, each in VALUES.items()}
        assert "was opened by another process" in str(result_of(lambda: writer.write(IDS[:1], values)))
        writer.write(IDS, VALUES)
    assert_whole(tmp_path / "out")


def test_two_processes_share_the_shards(tmp_path: Path) -> None:
    out, begun = tmp_path / "out", tmp_path / "begun"

    def waits(number: int) -> None:
        if number == 0:
            begun.touch()
            while not (tmp_path / "go").exists():
                pass

    def first() -> None:
        (tmp_path / "rows of the first").write_text(str(sum(loop(out, waits))))

    process = started(first)
    while not begun.exists():
        pass
    rows = sum(loop(out))  # all shards but that of the other process
    assert rows == COUNT - 16
    (tmp_path / "go").touch()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "rows of the first").read_text() == "16"
    assert_whole(out)


def test_rows_of_a_process_that_died_meanwhile_are_missing(tmp_path: Path) -> None:
    out, begun = tmp_path / "out", tmp_path / "begun"

    def waits(number: int) -> None:
        begun.touch()
        while True:
            pass

    process = started(lambda: loop(out, waits))
    while not begun.exists():
        pass

    def kills(number: int) -> None:
        if number == 0:
            process.kill()
            process.join()

    with pytest.raises(LayertapError, match="16 of 50 ids have no row: 'text 49 ü'"):
        loop(out, kills)
    assert sum(loop(out)) == 16
    assert_whole(out)


def test_a_full_disk_is_told_and_stored_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        if number == 5:
            monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    with pytest.raises(LayertapError, match="No space left on device; rows stored earlier are safe"):
        loop(tmp_path / "out", full)
    monkeypatch.undo()
    assert sum(loop(tmp_path / "out")) in (COUNT - 16, COUNT - 20)
    assert_whole(tmp_path / "out")


def test_damaged_rows_are_written_again_after_a_repair(tmp_path: Path) -> None:
    out = tmp_path / "out"
    loop(out)
    change_a_value(out, 1, "vector", 5)
    assert repair(verify(out)) == 1
    assert loop(out, loader=batches(1)) == [1]
    (out / ".lock").unlink()
    for name in ("000001.h5.damaged", "000001.json.damaged"):
        (out / "shards" / name).unlink()
    assert not list((out / "shards").glob("*.part"))
    assert_whole(out)


@pytest.mark.slow
def test_a_dozen_kills_change_nothing() -> None:
    kill_writer.main(12, 1)


@pytest.mark.soak
def test_a_hundred_kills_change_nothing() -> None:
    kill_writer.main(100, 2)


# What reads data sets reads these


def layertap(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of probes are made and not drawn."""
    monkeypatch.setattr("pipelines.probe.probe_figures.save_figure", lambda figure, path: path)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("labelled") / "out"
    labels = ["left" if value < 0 else "right" for value in VECTORS[:, 0]]
    splits = ["test" if row % 3 == 0 else "train" for row in range(COUNT)]
    loop(out, labels=labels, splits=splits)
    return out


@pytest.mark.usefixtures("undrawn")
def test_commands_read_the_rows(labelled: Path, tmp_path: Path) -> None:
    assert "no faults; rows: 50 ok" in layertap("verify", labelled)
    shown = layertap("show", labelled)
    assert '"length": 128' in shown
    assert "unknown" not in shown
    found = json.loads(layertap("search", labelled, "0", "-l", "vector", "-k", "1", "--json"))
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    nearest = int(np.argsort(-(unit @ unit[0]))[1])
    assert found["results"][0]["path"] == IDS[nearest]
    page = tmp_path / "report.html"
    layertap("report", labelled, "-l", "vector", "-o", page, "--map", "pca")
    assert "came from the memory of a program" in page.read_text()
    probed = json.loads(layertap("probe", labelled, "-l", "vector", "--json", "-o", tmp_path / "probe"))
    assert probed["why_not_probed"] is None


@pytest.mark.usefixtures("undrawn")
def test_layers_of_one_number_are_reported_and_probed(tmp_path: Path) -> None:
    labels = ["low", "high"] * (COUNT // 2)
    with opened(tmp_path / "out", layers={"score": ((), "float32"), "mark": (1, "int64")}, labels=labels) as writer:
        writer.write(IDS, {"score": VECTORS[:, 0], "mark": np.arange(COUNT).reshape(-1, 1) % 2})
    layertap("report", tmp_path / "out", "-l", "score", "-o", tmp_path / "report.html")
    mean = re.search(r'"mean": ?([^,]+)', (tmp_path / "report.html").read_text())
    assert mean
    assert float(mean[1]) == pytest.approx(VECTORS[:, 0].mean(), abs=1e-4)
    probed = json.loads(layertap("probe", tmp_path / "out", "-l", "mark", "--json", "-o", tmp_path / "probe"))
    assert probed["why_not_probed"] is None


def test_merge_and_export_read_the_rows(labelled: Path, tmp_path: Path) -> None:
    half = COUNT // 2
    for name, rows in (("a", slice(0, half)), ("b", slice(half, COUNT))):
        with opened(tmp_path / name, ids=IDS[rows]) as writer:
            writer.write(IDS[rows], {layer: values[rows] for layer, values in VALUES.items()})
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    with FeatureReader(tmp_path / "merged") as reader:
        order = sorted(range(COUNT), key=lambda row: IDS[row].encode())
        assert reader.paths == [IDS[row] for row in order]
        assert np.array_equal(reader["vector"][:], VECTORS[order])
    assert verify(tmp_path / "merged").faults == []
    with FeatureReader(labelled) as reader:
        export(reader, tmp_path / "rows.h5", "h5", ["vector"])
    with h5py.File(tmp_path / "rows.h5") as file:
        assert np.array_equal(file["features/vector"][:], VECTORS)
