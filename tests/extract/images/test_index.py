"""Plans of images against lists of them in memory, and against what may happen to a process or a file."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from extract import FeatureReader, extract_features, load_backbone
from extract.errors import InputError, LayertapError, LockedError
from extract.extraction.run import extract
from extract.images import Decoding, Images, list_images, listed_again, load_batches
from extract.images.csv_lists import rows_in_pieces
from extract.images.folders import files_below
from extract.images.index import external_sort, index_writing
from extract.images.index.image_index import PlannedImages, open_plan
from extract.images.index.index_parts import Part, part_path, read_part, write_part
from extract.images.index.index_writing import write_plan
from extract.images.sources import BrokenListError
from extract.system.folder_lock import locked
from tests.conftest import TINY_INPUT
from tests.extract.images.test_sources import as_tensor
from tests.planning import plan as plan_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts, runs and blocks of a few rows, so that there are many."""
    for module, name, rows in (
        (index_writing, "PART_ROWS", 7),
        (index_writing, "WALKED_ROWS", 5),
        (index_writing, "SORTED_ROWS", 4),
        (external_sort, "BLOCK_ROWS", 2),
    ):
        monkeypatch.setattr(module, name, rows)


def same(found: PlannedImages | Images, expected: Images) -> None:
    """That a plan has everything that the images have."""
    rows = found.slice(0, len(found))
    assert isinstance(found, PlannedImages)
    assert (len(found), rows.paths) == (len(expected), expected.paths)
    assert rows.labels.tolist() == expected.labels.tolist()
    assert rows.labels.dtype == expected.labels.dtype
    assert (rows.splits, rows.ids, found.classes) == (expected.splits, expected.ids, expected.classes)
    assert (found.root, found.left_out, found.notes) == (expected.root, expected.left_out, expected.notes)
    assert found.split_names == expected.split_names
    assert (found.paths_xxh3, found.labels_xxh3) == (expected.paths_xxh3, expected.labels_xxh3)


def files_of(plan: Path) -> dict[str, bytes]:
    return {
        path.relative_to(plan).as_posix(): path.read_bytes()
        for path in sorted(plan.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def touch(root: Path, names: list[str]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


# Names whose order is easily got wrong: bytes below and above the slash, names that begin as others do, any bytes.
PIECES = st.sampled_from(
    [
        "a",
        "b",
        "a-b",
        "a.b",
        "a b",
        "a0",
        "ab",
        "A",
        "train",
        "test",
        "val",
        "ä",
        "😀",
        "\udcff",
        "\udc80",
        "x\ny",
        "\ue000",
    ]
)
FOLDERS = st.lists(PIECES, max_size=3).map("/".join)
FILES = st.builds(
    lambda folder, name, ending: f"{folder}/{name}{ending}".lstrip("/"),
    FOLDERS, PIECES, st.sampled_from([".jpg", ".png", ".txt", ".jpg/c.jpg", "-0.jpg", ""]),
)  # fmt: skip


def tree(names: list[str]) -> list[str]:
    """Without those that would need a file and a folder of the same name."""
    kept: list[str] = []
    for name in names:
        taken = [one for one in kept if one.startswith(name + "/") or name.startswith(one + "/")]
        kept += [] if taken or name in kept else [name]
    return kept


TREES = st.lists(FILES, min_size=1, max_size=40).map(tree)
UNHURRIED = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@given(names=TREES)
@UNHURRIED
def test_a_walk_is_in_the_order_of_the_bytes_and_goes_on_anywhere(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = touch(tmp_path_factory.mktemp("walk"), names)
    ordered = sorted(names, key=os.fsencode)
    assert list(files_below(str(root))) == ordered
    for after in [*ordered, "a", "a/", "a/b/c", "b", "\udcff"]:
        behind = [name for name in ordered if os.fsencode(name) > os.fsencode(after)]
        assert list(files_below(str(root), os.fsencode(after))) == behind
    shutil.rmtree(root)


@given(names=TREES)
@UNHURRIED
def test_the_plan_of_a_folder_is_its_list(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    scratch = tmp_path_factory.mktemp("plan")
    root = touch(scratch / "images", [*names, "a/last.jpg" if "a" not in names else "zz.jpg", ".hidden/a.jpg"])
    found = write_plan(root, scratch / "plan")
    same(found, list_images(root))
    for count in {1, 7, 8, max(1, len(found) - 1), len(found) + 5}:
        same(found.head(count), list_images(root, count))
    shutil.rmtree(scratch)


def test_train_is_a_class_where_another_folder_is_beside_it(tmp_path: Path) -> None:
    names = [f"train/{letter}/{i}.jpg" for letter in "abc" for i in range(5)]
    root = touch(tmp_path / "images", names)
    found = write_plan(root, tmp_path / "plan")
    assert (found.classes, found.split_names) == (["a", "b", "c"], ["train"])
    same(found, list_images(root))
    touch(root, ["zebra/1.jpg"])
    found = write_plan(root, tmp_path / "plan-2")
    assert (found.classes, found.split_names) == (["train", "zebra"], [])
    same(found, list_images(root))


def test_links_loops_and_litter_are_as_in_a_list(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", ["a/2.jpg", "Thumbs.db", "b/.c.jpg", "b/n.txt", "z.jpg"])
    touch(tmp_path / "other", ["1.jpg", "deep/3.jpg"])
    (root / "a" / "loop").symlink_to(root)
    (root / "twice").symlink_to(tmp_path / "other")
    (root / "self").symlink_to(root / "self")
    (root / "gone.jpg").symlink_to(tmp_path / "nothing")
    same(write_plan(root, tmp_path / "plan"), list_images(root))


TEXTS = st.one_of(st.none(), st.sampled_from(["", "cat", "dog", "-1", "7", "ä", "a,b", "x\ny", '"', "01"]))
ROWS = st.lists(
    st.tuples(
        FILES,
        TEXTS,
        st.sampled_from(["", "train", "valid", "TEST", " val "]),
        st.one_of(st.none(), st.sampled_from(["", "5", "id", "ü"])),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda row: row[0],
)


def write_csv(path: Path, rows: list[Any], columns: list[str], delimiter: str = ",", end: str = "\r\n") -> Path:
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=end)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


@given(
    rows=ROWS,
    columns=st.permutations(["path", "label", "split", "id"]),
    kept=st.integers(1, 4),
    delimiter=st.sampled_from([",", ";", "\t"]),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
@UNHURRIED
def test_the_plan_of_a_list_is_its_list(
    rows: list[Any], columns: list[str], kept: int, delimiter: str, end: str, encoding: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    scratch = tmp_path_factory.mktemp("list")
    columns = columns[:kept] if "path" in columns[:kept] else ["path", *columns[:kept]]
    values = [[row[["path", "label", "split", "id"].index(name)] for name in columns] for row in rows]
    if encoding == "utf-16":
        values = [[value.encode(errors="replace").decode() if value else value for value in row] for row in values]
        if len({row[columns.index("path")] for row in values}) < len(values):
            return
    listed = write_csv(scratch / "list.csv", values, columns, delimiter, end)
    if encoding != "utf-8":
        listed.write_bytes(listed.read_bytes().decode(errors="surrogateescape").encode(encoding, "surrogateescape"))
    same(write_plan(listed, scratch / "plan"), list_images(listed))
    shutil.rmtree(scratch)


@given(rows=ROWS, group=st.integers(1, 9), numbers=st.booleans(), packed=st.booleans())
@UNHURRIED
def test_the_plan_of_parquet_is_its_list(
    rows: list[Any], group: int, numbers: bool, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("list")
    paths, labels, splits, ids = map(list, zip(*rows, strict=True))
    paths = [f"{i}{path.encode(errors='replace').decode()}" for i, path in enumerate(paths)]
    if numbers:
        labels = [len(label) - 1 if label is not None else None for label in labels]
    table = pa.table({"Path": paths, "label": labels, "split": splits, "id": ids})
    if packed:
        table = table.set_column(2, "split", table.column("split").dictionary_encode())
    parquet.write_table(table, scratch / "list.parquet", row_group_size=group)
    same(write_plan(scratch / "list.parquet", scratch / "plan"), list_images(scratch / "list.parquet"))
    shutil.rmtree(scratch)


@given(rows=ROWS, size=st.integers(1, 9), encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
@UNHURRIED
def test_a_list_is_gone_on_with_behind_every_piece(
    rows: list[Any], size: int, encoding: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("pieces")
    rows = [
        [i, *(value.encode(errors="replace").decode() if value else value for value in row)]
        for i, row in enumerate(rows)
    ]
    rows = [[f"{i}{path}", *others] for i, path, *others in rows]
    file = write_csv(scratch / "list.csv", rows, ["path", "label", "split", "id"], end="\n\n")
    file.write_bytes(file.read_bytes().decode().encode(encoding))
    parquet.write_table(pa.table({"path": [row[0] for row in rows]}), scratch / "list.parquet", row_group_size=4)
    for where in (file, scratch / "list.parquet"):
        pieces = list(rows_in_pieces(str(where), where, size, {}))
        for place, (_, behind) in enumerate(pieces):
            rest = [
                row
                for piece, _ in rows_in_pieces(str(where), where, size, json.loads(json.dumps(behind)))
                for row in piece
            ]
            assert rest == [row for piece, _ in pieces[place + 1 :] for row in piece]
    shutil.rmtree(scratch)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_path_that_is_twice_in_a_list_is_an_error_of_the_same_words(tmp_path: Path, resumed: bool) -> None:
    names = [f"{i:02d}.jpg" for i in range(20)]
    listed = write_csv(tmp_path / "list.csv", [[name] for name in [*names, "06.jpg"]], ["path"], end="\n")
    with pytest.raises(InputError) as expected:
        list_images(listed)
    if resumed:  # the first part ends with the first of the two
        with pytest.raises(KeyboardInterrupt):
            write_plan(listed, tmp_path / "plan", stop_at("written", 1))
        assert part_path(tmp_path / "plan", 0).exists()
    with pytest.raises(InputError) as found:
        write_plan(listed, tmp_path / "plan")
    assert str(found.value) == str(expected.value)
    assert "line 22: 06.jpg is already in" in str(found.value)
    assert not (tmp_path / "plan" / "plan.json").exists()


def stop_at(stage: str, count: int) -> Callable[[str, int], None]:
    """Ctrl-C, when something has happened so many times."""
    left = [count]

    def on_rows(what: str, rows: int) -> None:
        left[0] -= what == stage and rows > 0
        if not left[0]:
            raise KeyboardInterrupt

    return on_rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\n,cat\n", "line 2: the path is empty"),
        ("name\na.jpg\n", "no column 'path' among 'name'"),
        ("path,split\na.jpg,dev\n", "line 2: split 'dev'; expected train"),
        ("path,label\na.jpg\n", "line 2 has 1 values, but the header has 2"),
        ("path,path\na.jpg,b\n", "two columns have the name 'path'"),
        ("path\n", "no images; it is empty"),
        ("path,label\na.jpg,caf\udce9\n", "line 2: the label is not UTF-8"),
    ],
)
def test_errors_of_a_list_are_the_same(tmp_path: Path, text: str, message: str) -> None:
    listed = tmp_path / "list.csv"
    listed.write_bytes(text.encode(errors="surrogateescape"))
    for read in (list_images, lambda where: write_plan(where, tmp_path / "plan")):
        with pytest.raises(InputError, match=message):
            read(listed)


def test_what_is_behind_a_url_is_the_same(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    names = [f"{top}/{i}.jpg" for top in ("a", "a-b", "a.b", "b/c", "B") for i in range(4)]
    for name in [*names, "a/notes.txt", ".git/x.jpg", "top.png"]:
        fs.pipe_file(f"/{tmp_path.name}/{name}", b"x")
    where = f"memory://{tmp_path.name}"
    same(write_plan(where, tmp_path / "plan"), list_images(where))
    fs.pipe_file(
        f"/{tmp_path.name}-lists/x.csv", "\n".join(["path,label", *(f"{name},{name[0]}" for name in names)]).encode()
    )
    where = f"memory://{tmp_path.name}-lists/x.csv"
    same(write_plan(where, tmp_path / "plan-of-list"), list_images(where))
    for wrong in (f"memory://{tmp_path.name}-none", f"memory://{tmp_path.name}-none/x.csv"):
        with pytest.raises(InputError, match="no such"):
            write_plan(wrong, tmp_path / "plan-3")


# Going on


@pytest.mark.parametrize("kind", ["folder", "csv", "parquet"])
def test_a_plan_that_was_stopped_anywhere_is_the_same_in_the_end(tmp_path: Path, kind: str) -> None:
    names = [f"{top}/{i:02d}.{ending}" for top in ("a", "a-b", "c/d") for i in range(9) for ending in ("jpg", "txt")]
    where = touch(tmp_path / "images", names)
    if kind != "folder":
        images = [name for name in names if name.endswith("jpg")]
        random.Random(0).shuffle(images)
        rows = [[name, name[0], ["train", ""][i % 2], i] for i, name in enumerate(images)]
        where = write_csv(tmp_path / "list.csv", rows, ["path", "label", "split", "id"])
        if kind == "parquet":
            where = tmp_path / "list.parquet"
            columns = dict(zip(("path", "label", "split", "id"), map(list, zip(*rows, strict=True)), strict=True))
            parquet.write_table(pa.table(columns), where, row_group_size=5)
    events: list[str] = []
    write_plan(where, tmp_path / "plan", lambda stage, rows: events.append(stage))
    assert {"listed", "written"} <= set(events)
    expected = files_of(tmp_path / "plan")
    assert set(expected) == {"plan.json", *(f"parts/{i:06d}.npz" for i in range(4))}
    for place in range(1, len(events) + 1):
        out = tmp_path / f"stopped-{place}"
        with pytest.raises(KeyboardInterrupt):
            write_plan(where, out, stop_after(place))
        assert not (out / "plan.json").exists()
        with pytest.raises(InputError, match="is an unfinished plan"):
            list_images(out)
        again: list[tuple[str, int]] = []
        write_plan(where, out, lambda stage, rows, again=again: again.append((stage, rows)))
        assert files_of(out) == expected
        listed = sum(rows for stage, rows in again if stage == "listed")
        found = sum(rows for stage, rows in again if stage == "found")
        assert listed + found == 27
        if place > 2:
            assert found
    same(open_plan(tmp_path / "plan"), list_images(where))


def stop_after(count: int) -> Callable[[str, int], None]:
    calls = itertools.count(1)

    def on_rows(what: str, rows: int) -> None:
        if next(calls) == count:
            raise KeyboardInterrupt

    return on_rows


def test_a_folder_that_changes_meanwhile_gives_each_file_once_and_in_order(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", [f"{letter}/{i}.jpg" for letter in "bdf" for i in range(8)])
    with pytest.raises(KeyboardInterrupt):
        write_plan(root, tmp_path / "plan", stop_at("listed", 2))
    touch(root, ["a/new.jpg", "c/new.jpg", "e/new.jpg", "f/new.jpg", "d/0-new.jpg"])
    (root / "f" / "0.jpg").unlink()
    found = write_plan(root, tmp_path / "plan")
    paths = found.slice(0, len(found)).paths
    assert paths == sorted(set(paths))
    assert "a/new.jpg" not in paths
    assert {"e/new.jpg", "f/new.jpg"} <= set(paths)
    assert "f/0.jpg" not in paths
    assert found.classes == sorted({path[0] for path in paths})


def test_a_list_that_changed_meanwhile_is_listed_anew(tmp_path: Path) -> None:
    listed = write_csv(tmp_path / "list.csv", [[f"{i:02d}.jpg"] for i in range(30)], ["path"])
    for stage, count in (("listed", 3), ("written", 2)):
        with pytest.raises(KeyboardInterrupt):
            write_plan(listed, tmp_path / "plan", stop_at(stage, count))
        write_csv(listed, [[f"{stage}{i:02d}.jpg"] for i in range(25)], ["path"])
    same(write_plan(listed, tmp_path / "plan"), list_images(listed))


RUN = """
import sys
from extract.images.index import external_sort, index_writing
index_writing.PART_ROWS, index_writing.WALKED_ROWS, index_writing.SORTED_ROWS = 70, 50, 40
external_sort.BLOCK_ROWS = 10
print("begins", flush=True)
index_writing.write_plan(sys.argv[1], sys.argv[2])
"""


def run_plan(where: Path, out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", RUN, str(where), str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "list"])
def test_a_killed_plan_goes_on_and_has_the_same_bytes(tmp_path: Path, kind: str) -> None:
    names = [f"{i % 7}/{i:04d}.jpg" for i in range(1500)]
    if kind == "folder":
        where = touch(tmp_path / "images", names)
    else:
        random.Random(1).shuffle(names)
        where = write_csv(tmp_path / "list.csv", [[name, name[0]] for name in names], ["path", "label"])
    start = time.perf_counter()
    undisturbed = run_plan(where, tmp_path / "plan")
    assert undisturbed.wait() == 0
    seconds = time.perf_counter() - start
    expected = files_of(tmp_path / "plan")
    generator, kills = random.Random(2), 0
    for _ in range(100):
        out = tmp_path / "killed"
        process = run_plan(where, out)
        try:
            process.wait(generator.uniform(0, seconds / 4))
            assert process.returncode == 0
            assert files_of(out) == expected
            shutil.rmtree(out)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            (tmp_path / "killed").mkdir(exist_ok=True)
            assert not (out / "plan.json").exists() or open_plan(out)
        if kills >= 5 and not out.exists():
            break
    assert kills >= 5
    same(open_plan(tmp_path / "plan"), list_images(where))


def test_rows_listed_by_an_older_version_are_listed_again(tmp_path: Path) -> None:
    root, other = (touch(tmp_path / name, ["a/1.jpg", "a/2.jpg"]) for name in ("images", "other"))
    begun = {"format": "layertap plan", "version": 1, "kind": "folder", "root": str(root), "part_rows": 7}
    touch(tmp_path / "plan", ["listing/000000-000000.jsonl", "parts/000000.npz"])
    (tmp_path / "plan" / "listing" / "begun.json").write_text(json.dumps(begun))
    with pytest.raises(InputError, match="is an unfinished plan"):
        list_images(tmp_path / "plan")
    with pytest.raises(InputError, match=r"is a plan of .*images; choose another folder"):
        write_plan(other, tmp_path / "plan")
    same(write_plan(root, tmp_path / "plan"), list_images(root))
    assert set(files_of(tmp_path / "plan")) == {"plan.json", "parts/000000.npz"}


def test_a_finished_plan_is_left_as_it_is_and_another_is_refused(tmp_path: Path) -> None:
    one, other = (touch(tmp_path / name, ["a/1.jpg", "a/2.jpg"]) for name in ("one", "other"))
    write_plan(one, tmp_path / "plan")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "plan").rglob("*") if path.name != ".lock"}
    calls: list[str] = []
    assert len(write_plan(one, tmp_path / "plan", lambda stage, rows: calls.append(stage))) == 2
    assert not calls
    assert before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(InputError, match=r"is a plan of .*one; choose another folder for one of .*other"):
        write_plan(other, tmp_path / "plan")
    with pytest.raises(KeyboardInterrupt):
        write_plan(one, tmp_path / "begun", stop_at("listed", 1))
    with pytest.raises(InputError, match=r"is a plan of .*one; choose another"):
        write_plan(other, tmp_path / "begun")


def test_a_folder_that_is_no_plan_is_not_touched(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", ["a/1.jpg"])
    mine = touch(tmp_path / "mine", ["listing/000000-000000.jsonl", "listing/x.new"])
    for out, message in (
        (mine, "not empty, and not a plan"),
        (root / "a" / "1.jpg", "lies in the folder"),
        (root / "plan", "lies in the folder"),
        (mine / "listing" / "x.new", "is a file"),
    ):
        with pytest.raises(InputError, match=message):
            write_plan(root, out)
    assert sorted(path.name for path in mine.rglob("*")) == ["000000-000000.jsonl", "listing", "x.new"]


def test_one_process_at_a_time_makes_a_plan(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", ["a/1.jpg"])
    with locked(tmp_path / "plan"), pytest.raises(LockedError, match="is locked by"):
        write_plan(root, tmp_path / "plan")
    assert len(write_plan(root, tmp_path / "plan")) == 1


def test_a_wrong_name_does_not_keep_the_place(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/a.jpg", b"x")
    with pytest.raises(InputError, match="no such folder"):
        write_plan(f"memory://{tmp_path.name}-none", tmp_path / "plan")
    assert len(write_plan(f"memory://{tmp_path.name}", tmp_path / "plan")) == 1


def test_nothing_to_list_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", ["a.txt"])
    with pytest.raises(InputError, match=r"no images; its only file is not an image \(.txt 1\)"):
        write_plan(root, tmp_path / "plan")
    touch(root, ["a.jpg"])
    assert len(write_plan(root, tmp_path / "plan")) == 1


def test_archives_arrays_and_plans_need_no_plan(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 4, 3), np.uint8))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zipped:
        zipped.writestr("a.jpg", b"x")
    write_plan(touch(tmp_path / "images", ["a.jpg"]), tmp_path / "plan")
    for name, message in (
        ("x.npy", "an array needs no list"), ("x.zip", "archives contain their own lists"),
        ("plan", "is already a plan"), ("nothing", "no such folder or file"), ("images/a.jpg", "not a folder or list"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            write_plan(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = touch(tmp_path / "images", [f"{i}.jpg" for i in range(30)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(index_writing, "write_part", full)
        with pytest.raises(LayertapError, match="No space left on device. The images listed so far are kept; run"):
            write_plan(root, tmp_path / "plan")
    same(write_plan(root, tmp_path / "plan"), list_images(root))


# Reading


@pytest.fixture
def planned(folder: Path, tmp_path: Path) -> PlannedImages:
    return write_plan(folder, tmp_path / "plan")


def test_images_of_a_plan_are_read_by_workers_and_travel_light(folder: Path, planned: PlannedImages) -> None:
    expected = list_images(folder)
    assert len(pickle.dumps(planned.source)) < 1000
    rows = [list(range(5)), list(range(5, 12))]
    for one, other in zip(
        load_batches(planned, rows, Decoding(as_tensor, workers=2)),
        load_batches(expected, rows, Decoding(as_tensor, workers=0)),
        strict=True,
    ):
        assert one.source_hash.tolist() == other.source_hash.tolist()
        assert one.images.equal(other.images)
    assert planned.select([1, 6, 7, 11]).paths == [expected.paths[row] for row in (1, 6, 7, 11)]
    middle = planned.slice(5, 9)
    assert middle.source.read(2) == expected.source.read(7)
    assert expected.slice(5, 9).source.read(2) == expected.source.read(7)


def test_rows_are_found_by_their_paths(folder: Path, planned: PlannedImages) -> None:
    paths = list_images(folder).paths
    assert planned.rows_of([paths[9], "0", paths[0], paths[6], paths[7], "zzz"]) == [9, None, 0, 6, 7, None]
    some = listed_again(str(planned.folder), [paths[8], paths[3]])
    assert some.source.read(0) == planned.source.read(8)
    with pytest.raises(InputError, match="no longer lists nothing.jpg"):
        listed_again(str(planned.folder), [paths[0], "nothing.jpg"])


SETTINGS: dict[str, Any] = {"batch_size": 4, "workers": 0, "shard_rows": 5, "progress": False}


def data_set(out: Path) -> tuple[dict[str, Any], list[Any]]:
    with FeatureReader(out) as reader:
        rows = [
            reader["embedding"][:].tobytes(), reader.paths[:], reader.labels.tolist(), reader.splits[:], reader.classes,
            reader.column("row_hash")[:].tobytes(), reader.column("source_hash")[:].tobytes(),
        ]  # fmt: skip
    return json.loads((out / "dataset.json").read_text()), rows


def test_features_from_a_plan_are_those_from_the_folder(folder: Path, planned: PlannedImages, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    extract_features(folder, out=tmp_path / "one", backbone=backbone, **SETTINGS).close()
    extract_features(planned.folder, out=tmp_path / "two", backbone=backbone, **SETTINGS | {"workers": 2}).close()
    assert data_set(tmp_path / "one") == data_set(tmp_path / "two")
    extract_features(folder, out=tmp_path / "three", backbone=backbone, limit=9, **SETTINGS).close()
    extract_features(planned.folder, out=tmp_path / "four", backbone=backbone, limit=9, **SETTINGS).close()
    assert data_set(tmp_path / "three") == data_set(tmp_path / "four")


@pytest.mark.parametrize("begun_with", ["folder", "plan"])
def test_a_data_set_goes_on_from_the_plan_and_from_the_folder(
    folder: Path, planned: PlannedImages, tmp_path: Path, begun_with: str
) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    extract_features(folder, out=tmp_path / "whole", backbone=backbone, **SETTINGS).close()
    wheres = [folder, planned.folder] if begun_with == "folder" else [planned.folder, folder]
    options = {name: value for name, value in SETTINGS.items() if name != "progress"}
    begun = plan_of(wheres[0], out=tmp_path / "out", backbone=backbone, **options)
    stopped = extract(begun, stop=iter([False, False, True]).__next__)
    assert stopped.stopped
    summary = extract(plan_of(wheres[1], out=tmp_path / "out", backbone=backbone, **options))
    assert (summary.found, summary.computed) == (stopped.computed, 12 - stopped.computed)
    assert data_set(tmp_path / "out") == data_set(tmp_path / "whole")


def test_a_plan_that_breaks_ends_a_run_and_makes_no_failed_rows(
    folder: Path, planned: PlannedImages, tmp_path: Path
) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    for workers in (0, 2):
        out, options = tmp_path / f"out-{workers}", {"batch_size": 4, "workers": workers}
        extract(plan_of(planned.folder, out=out, backbone=backbone, **options), stop=lambda: True)
        part = part_path(planned.folder, 1)
        whole = part.read_bytes()
        part.write_bytes(whole[:-1] + b"x")
        with pytest.raises(InputError, match=r"000001.npz is damaged: its hash .* run `layertap plan` again") as error:
            extract(plan_of(planned.folder, out=out, backbone=backbone, **options))
        assert "Traceback" not in str(error.value)
        part.write_bytes(whole)
        summary = extract(plan_of(planned.folder, out=out, backbone=backbone, **options))
        assert summary.found >= 4
        assert set(summary.status) == {"ok"}


# Damage


def test_every_changed_byte_of_a_part_is_found(planned: PlannedImages) -> None:
    part = part_path(planned.folder, 0)
    whole = part.read_bytes()
    for place in range(0, len(whole), 41):
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(BrokenListError, match="000000.npz is damaged"):
            open_plan(planned.folder).slice(0, 1)
    part.write_bytes(whole[:-7])
    with pytest.raises(BrokenListError, match="000000.npz is damaged"):
        open_plan(planned.folder).slice(0, 1)
    part.unlink()
    with pytest.raises(BrokenListError, match="000000.npz is damaged: no such file"):
        open_plan(planned.folder).slice(0, 1)


def of_strangers() -> Iterator[tuple[str, bytes]]:
    """Parts whose hash agrees, and whose content does not."""

    def packed(method: int = zipfile.ZIP_STORED, **changed: Any) -> bytes:
        columns: dict[str, Any] = {
            "names": np.frombuffer(b"a.jpgb.jpg", np.uint8), "name_ends": np.array([5, 10], "<i8"),
            "labels": np.array([0, -1], "<i4"), "splits": np.array([0, 1], np.uint8),
        } | changed  # fmt: skip
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", method) as zipped:
            for name, values in columns.items():
                if isinstance(values, bytes):
                    zipped.writestr(f"{name}.npy", values)
                elif values is not None:
                    member = io.BytesIO()
                    np.lib.format.write_array(member, values, (1, 0))
                    zipped.writestr(f"{name}.npy", member.getvalue())
        return content.getvalue()

    def named(*names: bytes) -> dict[str, Any]:
        ends = np.cumsum([len(name) for name in names], dtype="<i8")
        return {"names": np.frombuffer(b"".join(names), np.uint8), "name_ends": ends}

    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "|u1", "fortran_order": False, "shape": (1 << 60,)})
    yield "", packed()
    yield "names is uint8", packed(names=huge.getvalue())
    yield "names is object", packed(names=huge.getvalue().replace(b"'|u1'", b"'|O' "))
    yield "is compressed", packed(zipfile.ZIP_DEFLATED)
    yield "not in order", packed(**named(b"b.jpg", b"a.jpg"))
    yield "not in order", packed(**named(b"a.jpg", b"a.jpg"))
    yield "null character", packed(**named(b"a.jpg", b"b\0c.jpg"))
    yield "is empty", packed(**named(b"", b"b.jpg"))
    yield "leads outside", packed(**named(b"../a.jpg", b"b.jpg"))
    yield "leads outside", packed(**named(b"/etc/a.jpg", b"b.jpg"))
    yield "leads outside", packed(**named(b"a/..", b"b.jpg"))
    yield "ends of its texts", packed(name_ends=np.array([5, 11], "<i8"))
    yield "ends of its texts", packed(name_ends=np.array([-5, 10], "<i8"))
    yield "ends of its texts", packed(name_ends=np.array([12, 10], "<i8"))
    yield "ends of its texts", packed(name_ends=np.array([5], "<i8"))
    yield "a label or split", packed(labels=np.array([0, 3], "<i4"))
    yield "a label or split", packed(labels=np.array([-2, 0], "<i4"))
    yield "a label or split", packed(splits=np.array([0, 4], np.uint8))
    yield "1 labels", packed(labels=np.array([0], "<i4"))
    yield "labels is", packed(labels=np.array([0, 1], ">i4"))
    yield "it contains", packed(splits=None)
    yield "it contains", packed(more=np.zeros(2, np.uint8))
    yield "damaged", b"no zip at all"
    yield "damaged", b""


@pytest.mark.parametrize(("message", "content"), list(of_strangers()))
def test_a_part_of_a_stranger_is_not_believed(tmp_path: Path, message: str, content: bytes) -> None:
    path = tmp_path / "plan" / "parts" / "000000.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    tracemalloc.start()
    if not message:
        assert read_part(path, 2, 1, False, True, None).names == [b"a.jpg", b"b.jpg"]
    else:
        with pytest.raises(BrokenListError, match=message):
            read_part(path, 2, 1, False, True, None)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"count": 10**15}, {"count": 0}, {"count": "12"}, {"count": True}, {"part_rows": 0},
        {"part_rows": 10**9}, {"kind": "archives"}, {"root": "images"}, {"root": 5}, {"root": "/a\0b"},
        {"classes": "abc"}, {"classes": [1]}, {"splits": ["dev"]}, {"parts_xxh3": ["x" * 32, "x" * 32]},
        {"parts_xxh3": []}, {"left_out": {".txt": -1}}, {"left_out": []}, {"notes": None}, {"ids": 1},
        {"paths_xxh3": "x"}, {"labels_xxh3": None},
    ],
)  # fmt: skip
def test_a_damaged_description_is_an_error(planned: PlannedImages, change: dict[str, Any]) -> None:
    path = planned.folder / "plan.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | change))
    with pytest.raises(InputError, match=r"plan.json is damaged"):
        list_images(planned.folder)
    for name in content:
        path.write_text(json.dumps({key: value for key, value in content.items() if key != name}))
        if name != "format":
            with pytest.raises(InputError, match=f"'{name}' is missing"):
                list_images(planned.folder)


def test_a_folder_with_a_plan_of_somebody_else_is_a_folder(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", ["parts/1.jpg", "a/2.jpg"])
    (root / "plan.json").write_text('{"rooms": 3}')
    assert list_images(root).slice(0, 2).paths == ["a/2.jpg", "parts/1.jpg"]


@given(names=st.lists(st.binary(min_size=1, max_size=9).filter(lambda one: b"\0" not in one), min_size=1, unique=True))
@settings(UNHURRIED, max_examples=8)
def test_parts_come_back_as_they_were(names: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("part") / "plan" / "parts" / "000000.npz"
    path.parent.mkdir(parents=True)
    names = sorted(names)
    labels, splits = np.arange(len(names), dtype=np.int32) - 1, np.arange(len(names)).astype(np.uint8) % 4
    ids = [f"é{i}".encode() for i in range(len(names))]
    write_part(path, Part(names, labels, splits, ids))
    found = read_part(path, len(names), len(names), True, False, None)
    assert (found.names, found.ids) == (names, ids)
    assert found.labels.tolist() == labels.tolist()
    assert found.splits.tolist() == splits.tolist()
    assert list(np.load(path)["labels"]) == labels.tolist()  # numpy itself reads it


# Memory


LISTED = """
import os, sys
from pathlib import Path
from extract.images import folders; from extract.images.index import index_writing
count, kind, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
where = sys.argv[4]
if kind == "folder":
    def made(root, after=b""):
        return (f"{i // 100000:04d}/{i // 1000:06d}/picture-{i:09d}.jpg" for i in range(count))
    index_writing.files_below = made
found = index_writing.write_plan(where, out)
assert len(found) == count, len(found)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "list"])
def test_three_million_names_need_the_memory_of_one(tmp_path: Path, kind: str) -> None:
    peaks = []
    for millions in (1, 3):
        count, where = millions * 1_000_000, tmp_path
        if kind == "list":
            where = tmp_path / f"{millions}.csv"
            with where.open("w") as file:
                file.write("path,label\n")
                for i in range(count):
                    number = i * 7_919 % count
                    file.write(f"{number // 1000:06d}/picture-{number:09d}.jpg,class {number % 100}\n")
        else:
            where = tmp_path / "images"
            where.mkdir(exist_ok=True)
        command = [sys.executable, "-c", LISTED, str(count), kind, str(tmp_path / f"plan-{millions}"), str(where)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(f"peak memory of a {kind}, kB: {peaks} for 1 and 3 million names")
    assert peaks[1] <= 1.1 * peaks[0]
