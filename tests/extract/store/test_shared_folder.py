"""Shards published by several writers to one folder: one wins, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError
from extract.store.format.dataset import DataSet
from extract.store.places import shared_folder
from extract.store.places.shared_folder import SharedFolder
from extract.store.verify import verify
from extract.system.json_files import read_json
from tests.extract.store.processes import at_once, failing, kill_itself, killed
from tests.extract.store.rows import VALUES, complete_data_set, data_set


@pytest.fixture
def built(tmp_path: Path) -> DataSet:
    """A data set whose shards are finished, somewhere else, with a failed row in shard 1."""
    return complete_data_set(tmp_path / "scratch", failed=(12,))


@pytest.fixture
def folder(tmp_path: Path, built: DataSet) -> SharedFolder:
    """Where it is published; no shard is there yet."""
    folder = SharedFolder(tmp_path / "out")
    assert folder.open_or_create(built) is None
    return folder


def receipt_of(built: DataSet, shard: int) -> dict[str, object]:
    return read_json(built.path(shard).with_suffix(".json"))


def copied(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be on another file system than all others."""
    link = os.link

    def not_across(source: Path, target: Path) -> None:
        if Path(source).parents[1] != Path(target).parents[1] and Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, target)

    monkeypatch.setattr(os, "link", not_across)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_is_published_is_the_data_set(
    folder: SharedFolder, built: DataSet, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere:
        copied(folder.out, monkeypatch)
    for shard in (2, 0, 1):
        assert folder.publish(built.path(shard), receipt_of(built, shard))
        assert not folder.publish(built.path(shard), receipt_of(built, shard)) or not elsewhere
    assert folder.published().tolist() == [0, 1, 2]
    assert verify(folder.out).faults == []
    with FeatureReader(folder.out) as reader:
        assert reader.failures[0][0::3] == (12, "row 12 failed")
        good = np.setdiff1d(np.arange(23), [12])
        assert np.array_equal(reader["vector"][good], VALUES["vector"][good])
    assert sorted(path.name for path in folder.out.rglob("*") if path.is_file()) == [
        *(f"00000{shard}.{kind}" for shard in range(3) for kind in ("h5", "json")), "dataset.json",
    ]  # fmt: skip


def test_of_many_that_publish_a_shard_at_once_one_wins(
    folder: SharedFolder, tmp_path: Path, built: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(tmp_path / "out", monkeypatch)
    sources = []
    for number in range(8):  # each of them differs, as features of other machines do
        source = tmp_path / f"machine-{number}"
        shutil.copytree(built.out, source)
        receipt = receipt_of(built, 0) | {"made": {"host": str(number)}}
        sources.append((source / "shards" / "000000.h5", receipt))
    barrier, won = threading.Barrier(len(sources), timeout=20), []

    def publish(number: int) -> None:
        folder.open_or_create(built)
        barrier.wait()
        if folder.publish(*sources[number]):
            won.append(str(number))

    at_once(publish, range(len(sources)))
    assert len(won) == 1
    assert read_json(folder.out / "shards" / "000000.json")["made"] == {"host": won[0]}
    assert sorted(path.name for path in (folder.out / "shards").iterdir()) == ["000000.h5", "000000.json"]


def publish_and_be_killed(folder: SharedFolder, built: DataSet, step: str) -> None:
    """Publish shard 1 in a process that is killed right after a step."""
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(shared_folder, step)
        patch.setattr(shared_folder, step, lambda *given, **options: kill_itself(original(*given, **options)))
        killed(folder.publish, built.path(1), receipt_of(built, 1))


@pytest.mark.parametrize("step", ["write_json", "_copy", "_link"])
def test_killed_at_any_step_another_can_publish_and_nothing_stays_behind(
    folder: SharedFolder, built: DataSet, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        copied(folder.out, patch)
        publish_and_be_killed(folder, built, step)
    before = sorted(path.name for path in (folder.out / "shards").iterdir())
    assert before
    won = folder.publish(built.path(1), receipt_of(built, 1))
    assert won == (step != "_link")
    SharedFolder(folder.out).open_or_create(built)  # as the next worker does
    assert sorted(path.name for path in (folder.out / "shards").iterdir()) == ["000001.h5", "000001.json"]
    receipt = read_json(folder.out / "shards" / "000001.json")
    assert {name: receipt[name] for name in ("sha256", "reasons", "status")} == {
        name: receipt_of(built, 1)[name] for name in ("sha256", "reasons", "status")
    }


@pytest.mark.parametrize("elsewhere", [False, True])
def test_killed_right_after_it_published_a_shard_its_receipt_is_there_in_the_next_run(
    folder: SharedFolder, built: DataSet, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other worker builds the shard again: it is published."""
    if elsewhere:
        copied(folder.out, monkeypatch)
    for shard in (0, 2):
        folder.publish(built.path(shard), receipt_of(built, shard))
    other = folder.out / "shards" / "000001.json.node7-12-ab.copy"
    other.write_text(json.dumps(receipt_of(built, 1) | {"sha256": "0" * 64}))  # of a worker that was not first
    publish_and_be_killed(folder, built, "_link")
    assert folder.published().tolist() == [0, 1, 2]
    for _ in range(2):
        SharedFolder(folder.out).open_or_create(built)
    assert read_json(folder.out / "shards" / "000001.json") == receipt_of(built, 1)
    assert verify(folder.out).faults == []
    assert len(list((folder.out / "shards").iterdir())) == 6


def test_a_link_in_place_of_a_receipt_is_not_taken_for_one(
    folder: SharedFolder, tmp_path: Path, built: DataSet
) -> None:
    folder.publish(built.path(1), receipt_of(built, 1))
    elsewhere = tmp_path / "elsewhere.json"
    (folder.out / "shards" / "000001.json").rename(elsewhere)
    link = folder.out / "shards" / "000001.json.node7-12-ab.copy"
    link.symlink_to(elsewhere)
    folder.clean()
    assert not (folder.out / "shards" / "000001.json").is_symlink()
    assert not link.is_symlink()
    assert elsewhere.exists()


def test_a_shard_that_has_changed_since_it_was_finished_is_not_published(
    folder: SharedFolder, built: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(folder.out, monkeypatch)
    content = bytearray(built.path(0).read_bytes())
    content[-1] ^= 1
    built.path(0).write_bytes(content)
    with pytest.raises(LayertapError, match=r"000000\.h5 is damaged"):
        folder.publish(built.path(0), receipt_of(built, 0))
    assert list((folder.out / "shards").iterdir()) == []


def test_a_link_whose_answer_was_lost_and_that_was_sent_again_has_won(
    folder: SharedFolder, built: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS sends a request again when no answer comes; then the server says that the name exists."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert folder.publish(built.path(0), receipt_of(built, 0))
    assert (folder.out / "shards" / "000000.json").exists()


def test_without_hard_links_or_space_the_shard_stays_where_it_was(
    folder: SharedFolder, built: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(LayertapError, match="has no hard links"):
        patch.setattr(os, "link", failing(errno.EPERM))
        folder.publish(built.path(0), receipt_of(built, 0))
    copied(folder.out, monkeypatch)
    full = pytest.raises(LayertapError, match=r"No space left on device; the shard is safe in .*000000\.h5")
    with monkeypatch.context() as patch, full:
        patch.setattr(shared_folder.os, "fsync", failing(errno.ENOSPC))
        folder.publish(built.path(0), receipt_of(built, 0))
    assert list((folder.out / "shards").iterdir()) == []
    assert folder.publish(built.path(0), receipt_of(built, 0))


@pytest.mark.parametrize("rows", [False, True])
def test_another_data_set_is_not_mixed_with_it(tmp_path: Path, built: DataSet, rows: bool) -> None:
    folder = SharedFolder(tmp_path / "out")
    folder.open_or_create(data_set(tmp_path / "other", depends_on={"weights": "others"}))
    if rows:
        (folder.out / "shards" / "000000.h5").write_bytes(b"")
    match = "weights: stored others, now w" if rows else "was created for other images or features and has no rows"
    with pytest.raises(InputError, match=match):
        folder.open_or_create(built)
    assert json.loads((folder.out / "dataset.json").read_text())["depends_on"] == {"weights": "others"}


def test_of_two_different_data_sets_that_are_begun_at_once_one_is_refused(tmp_path: Path) -> None:
    sets = [data_set(tmp_path / name, depends_on={"weights": name}) for name in ("a", "b")]
    barrier, refused = threading.Barrier(2, timeout=20), []

    def begin(number: int) -> None:
        barrier.wait()
        try:
            SharedFolder(tmp_path / "out").open_or_create(sets[number])
        except InputError:
            refused.append(number)

    at_once(begin, range(2))
    assert len(refused) == 1
    assert DataSet.open(tmp_path / "out").depends_on == sets[1 - refused[0]].depends_on
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dataset.json", "shards"]


def test_a_worker_that_was_killed_while_it_began_is_no_hindrance(tmp_path: Path, built: DataSet) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "dataset.json.node7-12-ab.new").write_text("{")
    SharedFolder(out).open_or_create(built)
    assert sorted(path.name for path in out.iterdir()) == ["dataset.json", "shards"]
