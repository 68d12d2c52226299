"""Plans of images against lists of them in memory, and against what may happen to a process or a file."""

from __future__ import annotations

import csv
import errno
import json
import os
import pickle
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from extract import FeatureReader, extract_features
from extract.compute.backbone import Backbone
from extract.errors import InputError, LayertapError, LockedError
from extract.extraction.run import extract
from extract.images import Decoding, Images, list_images, listed_again, load_batches, plan_writing
from extract.images.listing import files_below, is_plan
from extract.images.plan_writing import write_plan
from extract.images.plans import PLAN_FILE, VERSION, open_plan
from extract.images.sources import BrokenListError
from extract.system.atomic_files import locked
from tests.extract.images.making import as_tensor, touch
from tests.planning import plan as plan_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of a few rows, so that there are many."""
    monkeypatch.setattr(plan_writing, "GROUP_ROWS", 7)
    monkeypatch.setattr(plan_writing, "_REPORTED_ROWS", 5)


def same(found: Images, expected: Images) -> None:
    """That a plan has everything that the images have."""
    rows = found.slice(0, len(found))
    assert not isinstance(found.paths, list)
    assert (len(found), rows.paths) == (len(expected), expected.paths)
    assert rows.labels.tolist() == expected.labels.tolist()
    assert rows.labels.dtype == expected.labels.dtype
    assert (rows.splits, rows.ids, found.classes) == (expected.splits, expected.ids, expected.classes)
    assert (found.root, found.left_out, found.notes) == (expected.root, expected.left_out, expected.notes)
    for images in (found, rows):
        assert images.split_names == expected.split_names
        assert (images.paths_xxh3, images.labels_xxh3) == (expected.paths_xxh3, expected.labels_xxh3)


def same_in_memory(found: Images, expected: Images) -> None:
    assert (found.paths, found.labels.tolist()) == (expected.paths, expected.labels.tolist())
    assert (found.splits, found.ids, found.classes) == (expected.splits, expected.ids, expected.classes)
    assert (found.paths_xxh3, found.labels_xxh3) == (expected.paths_xxh3, expected.labels_xxh3)


def files_of(plan: Path) -> dict[str, bytes]:
    return {
        path.relative_to(plan).as_posix(): path.read_bytes()
        for path in sorted(plan.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


# Names whose order is easily got wrong: bytes below and above the slash, names that begin as others do, any bytes.
PIECES = st.sampled_from([
    "a", "b", "a-b", "a.b", "a b", "a0", "ab", "A", "train", "test", "val", "ä", "😀", "\udcff", "\udc80", "x\ny",
    "\ue000",
])  # fmt: skip
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
UNHURRIED = settings(max_examples=25, suppress_health_check=list(HealthCheck))


@given(names=TREES)
@UNHURRIED
def test_a_walk_is_in_the_order_of_the_bytes_and_the_plan_of_a_folder_is_its_list(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("plan")
    root = touch(scratch / "images", *names, "zz.jpg" if "a" in names else "a/last.jpg", ".hidden/a.jpg")
    assert [path for path in files_below(str(root)) if path in names] == sorted(names, key=os.fsencode)
    found = write_plan(root, scratch / "plan")
    same(found, list_images(root))
    for count in {1, 7, 8, len(found) - 1} & {*range(1, len(found))}:
        same_in_memory(found.head(count), list_images(root, count))
    same(found.head(len(found) + 5), list_images(root))
    shutil.rmtree(scratch)


def test_links_loops_and_litter_are_as_in_a_list(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", "a/2.jpg", "Thumbs.db", "b/.c.jpg", "b/n.txt", "z.jpg")
    touch(tmp_path / "other", "1.jpg", "deep/3.jpg")
    (root / "a" / "loop").symlink_to(root)
    (root / "twice").symlink_to(tmp_path / "other")
    (root / "self").symlink_to(root / "self")
    (root / "gone.jpg").symlink_to(tmp_path / "nothing")
    same(write_plan(root, tmp_path / "plan"), list_images(root))


TEXTS = st.one_of(st.none(), st.sampled_from(["", "cat", "dog", "-1", "7", "ä", "a,b", "x\ny", '"', "01"]))
SPLITS = st.sampled_from(["", "train", "valid", "TEST", " val "])
IDS = st.one_of(st.none(), st.sampled_from(["", "5", "id", "ü"]))
ROWS = st.lists(st.tuples(FILES, TEXTS, SPLITS, IDS), min_size=1, max_size=40, unique_by=lambda row: row[0])


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
    encoding=st.sampled_from(["utf-8", "utf-8-sig"]),
)
@UNHURRIED
def test_the_plan_of_a_list_is_its_list(
    rows: list[Any], columns: list[str], kept: int, delimiter: str, end: str, encoding: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    scratch = tmp_path_factory.mktemp("list")
    columns = columns[:kept] if "path" in columns[:kept] else ["path", *columns[:kept]]
    values = [[row[["path", "label", "split", "id"].index(name)] for name in columns] for row in rows]
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


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_path_that_is_twice_in_a_list_is_an_error(tmp_path: Path, kind: str) -> None:
    names = [*(f"{i:02d}.jpg" for i in range(20)), "06.jpg"]  # the 7th and 8th in order lie in two row groups
    listed = tmp_path / f"list.{kind}"
    if kind == "csv":
        write_csv(listed, [[name] for name in names], ["path"], end="\n")
    else:
        parquet.write_table(pa.table({"path": names}), listed, row_group_size=4)
    with pytest.raises(InputError, match="06.jpg is already in"):
        list_images(listed)
    with pytest.raises(InputError, match="06.jpg is listed twice"):
        write_plan(listed, tmp_path / "plan")
    assert not (tmp_path / "plan").exists() or not list((tmp_path / "plan").glob("*parquet*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\n,cat\n", "line 2: the path is empty"),
        ("name\na.jpg\n", "no column 'path' among 'name'"),
        ("path,split\na.jpg,dev\n", "line 2: split 'dev'; expected train"),
        ("path,label\na.jpg\n", "line 2 has 1 values, but the header has 2"),
        ("path,path\na.jpg,b\n", "two columns have the name 'path'"),
        ("path\n", "no images; it is empty"),
        ("", "no column 'path' among none"),
        ("path,label\na.jpg,caf\udce9\n", "line 2: the label is not UTF-8"),
        ('path,split\n\n"a\nb.png",train\n\nc.png,dev\n', "line 6: split 'dev'"),
        ("\udcff\udcfep\0a\0t\0h\0\n\0", "line 1 is not text; expected a table as text in UTF-8"),
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
    listed = "\n".join(["path,label", *(f"{name},{name[0]}" for name in names)])
    fs.pipe_file(f"/{tmp_path.name}-lists/x.csv", listed.encode())
    where = f"memory://{tmp_path.name}-lists/x.csv"
    same(write_plan(where, tmp_path / "plan-of-list"), list_images(where))
    for wrong in (f"memory://{tmp_path.name}-none", f"memory://{tmp_path.name}-none/x.csv"):
        with pytest.raises(InputError, match="no such"):
            write_plan(wrong, tmp_path / "plan-3")


# Interruptions


def stop_at(stage: str, count: int) -> Callable[[str, int], None]:
    """Ctrl-C, when something has happened so many times."""
    left = [count]

    def on_rows(what: str, rows: int) -> None:
        left[0] -= what == stage and rows > 0
        if not left[0]:
            raise KeyboardInterrupt

    return on_rows


@pytest.mark.parametrize(("stage", "count"), [("listed", 1), ("listed", 3), ("written", 1), ("written", 4)])
def test_a_plan_that_was_stopped_anywhere_is_no_plan_and_the_next_is_the_same(
    tmp_path: Path, stage: str, count: int
) -> None:
    names = [f"{top}/{i:02d}.{ending}" for top in ("a", "a-b", "c/d") for i in range(9) for ending in ("jpg", "txt")]
    root = touch(tmp_path / "images", *names)
    write_plan(root, tmp_path / "plan")
    expected = files_of(tmp_path / "plan")
    assert set(expected) == {PLAN_FILE}
    with pytest.raises(KeyboardInterrupt):
        write_plan(root, tmp_path / "stopped", stop_at(stage, count))
    assert not is_plan(tmp_path / "stopped")
    assert files_of(tmp_path / "stopped") == {}
    calls: list[tuple[str, int]] = []
    write_plan(root, tmp_path / "stopped", lambda stage, rows: calls.append((stage, rows)))
    assert files_of(tmp_path / "stopped") == expected
    for name in ("listed", "written"):
        assert sum(rows for stage, rows in calls if stage == name) == 27


RUN = """
import sys
import pyarrow.parquet
from extract.images import plan_writing
plan_writing.GROUP_ROWS = 20
print("begins", flush=True)
plan_writing.write_plan(sys.argv[1], sys.argv[2])
"""


def run_plan(where: Path, out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", RUN, str(where), str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "list"])
def test_a_killed_process_leaves_no_plan_and_the_next_one_writes_the_same_bytes(tmp_path: Path, kind: str) -> None:
    names = [f"{i % 7}/{i:04d}.jpg" for i in range(2000)]
    if kind == "folder":
        where = touch(tmp_path / "images", *names)
    else:
        random.Random(1).shuffle(names)
        where = write_csv(tmp_path / "list.csv", [[name, name[0]] for name in names], ["path", "label"])
    start = time.perf_counter()
    assert run_plan(where, tmp_path / "plan").wait() == 0
    seconds = time.perf_counter() - start
    expected = files_of(tmp_path / "plan")
    generator, kills = random.Random(2), 0
    out = tmp_path / "killed"
    for _ in range(8):
        process = run_plan(where, out)
        try:
            process.wait(generator.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        left = files_of(out) if out.exists() else {}
        assert all(name == PLAN_FILE or name.endswith(".new") for name in left)
        assert left.get(PLAN_FILE) in (None, expected[PLAN_FILE])
        if PLAN_FILE in left:
            shutil.rmtree(out)
    assert kills >= 2
    for left in out.glob("*.new"):
        os.utime(left, (1e9, 1e9))  # leftovers are removed when nobody has changed them for ten minutes
    assert run_plan(where, out).wait() == 0
    assert files_of(out) == expected  # and nothing that the killed processes left
    same(open_plan(out), list_images(where))


def test_a_finished_plan_is_left_as_it_is_and_another_is_refused(tmp_path: Path) -> None:
    one, other = (touch(tmp_path / name, "a/1.jpg", "a/2.jpg") for name in ("one", "other"))
    write_plan(one, tmp_path / "plan")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "plan").rglob("*") if path.name != ".lock"}
    calls: list[str] = []
    assert len(write_plan(one, tmp_path / "plan", lambda stage, rows: calls.append(stage))) == 2
    assert not calls
    assert before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(InputError, match=r"is a plan of .*one; choose another folder for one of .*other"):
        write_plan(other, tmp_path / "plan")


def test_a_folder_that_is_no_plan_is_not_touched(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", "a/1.jpg")
    mine = touch(tmp_path / "mine", "listing/000000-000000.jsonl", "listing/x.new")
    for out, message in (
        (mine, "not empty, and not a plan"),
        (root / "a" / "1.jpg", "lies in the folder"),
        (root / "plan", "lies in the folder"),
        (mine / "listing" / "x.new", "is a file"),
    ):
        with pytest.raises(InputError, match=message):
            write_plan(root, out)
    assert sorted(path.name for path in mine.rglob("*")) == ["000000-000000.jsonl", "listing", "x.new"]


def test_a_lock_a_wrong_name_and_nothing_to_list_do_not_keep_the_place(tmp_path: Path) -> None:
    root, plan = touch(tmp_path / "images", "a.txt"), tmp_path / "plan"
    with pytest.raises(InputError, match=r"no images; its only file is not an image \(.txt 1\)"):
        write_plan(root, plan)
    with pytest.raises(InputError, match="no such folder"):
        write_plan(f"memory://{tmp_path.name}-none", plan)
    touch(root, "a.jpg")
    with locked(plan), pytest.raises(LockedError, match="is locked by"):
        write_plan(root, plan)
    assert len(write_plan(root, plan)) == 1


def test_archives_arrays_and_plans_need_no_plan(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 4, 3), np.uint8))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zipped:
        zipped.writestr("a.jpg", b"x")
    write_plan(touch(tmp_path / "images", "a.jpg"), tmp_path / "plan")
    only = "a plan is written for a folder or a list only; use it directly: layertap embed"
    for name, message in (
        ("x.npy", only), ("x.zip", only), ("images/a.jpg", only), ("{x,y}.tar", only), ("plan", only),
        ("nothing", "no such folder or file"), ("nothing.csv", "no such folder or file"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            write_plan(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_in_a_hint_can_be_run_by_a_shell(tmp_path: Path) -> None:
    one = touch(tmp_path / "my images", "it's.jpg") / "it's.jpg"
    write_plan(one.parent, tmp_path / "my plan")
    for where in (one, tmp_path / "my plan"):
        with pytest.raises(InputError) as raised:
            write_plan(where, tmp_path / "out")
        assert shlex.split(raised.value.hint.partition(": ")[2]) == ["layertap", "embed", str(where)]


def test_a_full_disk_is_named_and_leaves_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = touch(tmp_path / "images", *(f"{i}.jpg" for i in range(30)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(parquet.ParquetWriter, "write_table", full)
        with pytest.raises(LayertapError, match="cannot write .*plan.parquet: No space left on device"):
            write_plan(root, tmp_path / "plan")
    assert files_of(tmp_path / "plan") == {}
    same(write_plan(root, tmp_path / "plan"), list_images(root))


# Reading


@pytest.fixture
def plan(folder: Path, tmp_path: Path) -> Path:
    write_plan(folder, tmp_path / "plan")
    return tmp_path / "plan"


def test_images_of_a_plan_are_read_by_workers_and_travel_light(folder: Path, plan: Path) -> None:
    expected, planned = list_images(folder), open_plan(plan)
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
    assert planned.select([0, 11]).labels.tolist() == expected.labels[[0, 11]].tolist()
    middle = planned.slice(5, 9)
    assert middle.source.read(2) == expected.source.read(7)
    assert expected.slice(5, 9).source.read(2) == expected.source.read(7)


def test_rows_are_found_by_their_paths(folder: Path, plan: Path) -> None:
    paths, planned = list_images(folder).paths, open_plan(plan)
    assert planned.rows_of([paths[9], "0", paths[0], paths[6], paths[7], "zzz"]) == [9, None, 0, 6, 7, None]
    some = listed_again(str(plan), [paths[8], paths[3]])
    assert some.source.read(0) == planned.source.read(8)
    with pytest.raises(InputError, match="no longer lists nothing.jpg"):
        listed_again(str(plan), [paths[0], "nothing.jpg"])


SETTINGS: dict[str, Any] = {"batch_size": 4, "workers": 0, "shard_rows": 5}


def data_set(out: Path) -> tuple[dict[str, Any], list[Any]]:
    with FeatureReader(out) as reader:
        rows = [
            reader["embedding"][:].tobytes(), reader.paths[:], reader.labels.tolist(), reader.splits[:], reader.classes,
            reader.column("row_hash")[:].tobytes(), reader.column("source_hash")[:].tobytes(),
        ]  # fmt: skip
    return json.loads((out / "dataset.json").read_text()), rows


@pytest.fixture
def whole(folder: Path, tmp_path: Path, backbone: Backbone) -> Path:
    """The data set of the folder."""
    extract(plan_of(folder, out=tmp_path / "whole", backbone=backbone, **SETTINGS))
    return tmp_path / "whole"


def test_features_from_a_plan_are_those_from_the_folder(
    plan: Path, whole: Path, tmp_path: Path, backbone: Backbone
) -> None:
    extract_features(plan, out=tmp_path / "out", backbone=backbone, progress=False, **SETTINGS | {"workers": 1}).close()
    assert data_set(tmp_path / "out") == data_set(whole)


@pytest.mark.parametrize("begun_with", ["folder", "plan"])
def test_a_data_set_goes_on_from_the_plan_and_from_the_folder(
    folder: Path, plan: Path, whole: Path, tmp_path: Path, backbone: Backbone, begun_with: str
) -> None:
    begin, end = (folder, plan) if begun_with == "folder" else (plan, folder)
    begun = plan_of(begin, out=tmp_path / "out", backbone=backbone, **SETTINGS)
    stopped = extract(begun, stop=iter([False, False, True]).__next__)
    assert stopped.stopped
    summary = extract(plan_of(end, out=tmp_path / "out", backbone=backbone, **SETTINGS))
    assert (summary.found, summary.computed) == (stopped.computed, 12 - stopped.computed)
    assert data_set(tmp_path / "out") == data_set(whole)


def test_a_plan_that_breaks_ends_a_run_and_makes_no_failed_rows(plan: Path, tmp_path: Path, backbone: Backbone) -> None:
    file = plan / PLAN_FILE
    whole = file.read_bytes()
    column = parquet.read_metadata(file).row_group(1).column(0)  # paths of rows 7 to 11
    place = column.data_page_offset + column.total_compressed_size - 2
    for workers in (0, 1):
        out, options = tmp_path / f"out-{workers}", {"batch_size": 4, "workers": workers}
        extract(plan_of(plan, out=out, backbone=backbone, **options), stop=lambda: True)
        file.write_bytes(whole[:place] + b"?" + whole[place + 1 :])
        damaged = r"layertap-plan.parquet is damaged: .* run `layertap embed --plan` again"
        with pytest.raises(InputError, match=damaged) as error:
            extract(plan_of(plan, out=out, backbone=backbone, **options))
        assert "Traceback" not in str(error.value)
        file.write_bytes(whole)
        summary = extract(plan_of(plan, out=out, backbone=backbone, **options))
        assert summary.found >= 4
        assert set(summary.status) == {"ok"}


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_plan_that_the_system_cannot_read_is_not_said_to_be_damaged(
    plan: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_plan(plan)

    def refuse(path: Path) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr("extract.images.plans.open_regular", refuse)
    for read in (lambda: images.paths[0], lambda: open_plan(plan)):
        with pytest.raises(BrokenListError) as raised:
            read()
        assert raised.value.message == f"{plan.resolve() / PLAN_FILE} cannot be read: {os.strerror(code)}"
        assert "delete" not in raised.value.hint


# Damage


def everything(plan: Path) -> tuple[Any, ...]:
    found = open_plan(plan)
    rows = found.slice(0, len(found))
    return (
        rows.paths, rows.labels.tolist(), rows.splits, rows.ids, found.classes, found.root, found.left_out,
        found.split_names, found.paths_xxh3, found.labels_xxh3,
    )  # fmt: skip


@pytest.fixture
def plan_of_list(tmp_path: Path) -> Path:
    rows = [[f"{i:02d}.jpg", f"class {i % 3}", ["train", "test"][i % 2], f"id {i}"] for i in range(20)]
    write_plan(write_csv(tmp_path / "list.csv", rows, ["path", "label", "split", "id"]), tmp_path / "plan")
    return tmp_path / "plan"


def test_no_changed_byte_of_a_plan_changes_what_is_read(plan_of_list: Path) -> None:
    file, expected = plan_of_list / PLAN_FILE, everything(plan_of_list)
    whole, refused = file.read_bytes(), list[InputError]()
    for place in range(0, len(whole), 23):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            assert everything(plan_of_list) == expected, place
        except InputError as error:
            refused.append(error)
    assert all("layertap-plan.parquet is damaged: " in str(error) for error in refused)
    assert len(refused) > len(whole) / 46
    file.write_bytes(whole[:-7])
    with pytest.raises(InputError, match="is damaged"):
        open_plan(plan_of_list)
    file.unlink()
    with pytest.raises(InputError, match="is not a plan: it has no layertap-plan.parquet"):
        open_plan(plan_of_list)


def test_a_plan_whose_file_is_replaced_is_not_read_as_the_new_one(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", *(f"{i}.jpg" for i in range(9)))
    found = write_plan(root, tmp_path / "plan")
    touch(root, "0-new.jpg")
    write_plan(root, tmp_path / "new")
    (tmp_path / "new" / PLAN_FILE).rename(tmp_path / "plan" / PLAN_FILE)
    with pytest.raises(BrokenListError, match="is damaged: it was replaced by another plan"):
        found.slice(7, 9)


def forge(plan: Path, columns: dict[str, Any] | None = None, **changes: Any) -> None:
    """Write a plan of two rows whose hashes agree, as anybody can."""
    given: dict[str, Any] = {
        "path": pa.array([b"a.jpg", b"b.jpg"]), "label": pa.array([0, -1], pa.int32()),
        "split": pa.array([0, 1], pa.uint8()),
    } | (columns or {})  # fmt: skip
    table = pa.table({name: values for name, values in given.items() if values is not None})
    description: dict[str, Any] = {
        "version": VERSION, "kind": "folder", "root": "/photos", "ends": [2], "classes": ["a"], "splits": ["train"],
        "left_out": {}, "paths_xxh3": "0" * 32, "labels_xxh3": "0" * 32,
    } | changes  # fmt: skip
    content = json.dumps({key: value for key, value in description.items() if value is not None}).encode()
    digest = xxhash.xxh3_128_hexdigest(content)
    plan.mkdir()
    table = table.replace_schema_metadata({"layertap_plan": content, "layertap_plan_xxh3": digest})
    parquet.write_table(table, plan / PLAN_FILE, use_dictionary=False)


@pytest.mark.parametrize(
    ("message", "columns"),
    [
        ("", {}),
        ("it has the columns {'path': 'string'", {"path": pa.array(["a.jpg", "b.jpg"])}),
        ("a label is out of range", {"label": pa.array([0, 3], pa.int32())}),
        ("a label is out of range", {"label": pa.array([-2, 0], pa.int32())}),
        ("tuple index out of range", {"split": pa.array([0, 4], pa.uint8())}),
        ("'label': 'int64'", {"label": pa.array([0, 1], pa.int64())}),
        ("it has the columns {'path': 'binary', 'label': 'int32'}", {"split": None}),
        ("'more': 'binary'", {"more": pa.array([b"x", b"y"])}),
        ("can't decode byte", {"id": pa.array([b"x", b"\xff"])}),
        ("NoneType", {"split": pa.array([0, None], pa.uint8())}),
        ("NoneType", {"label": pa.array([0, None], pa.int32())}),
        ("NoneType", {"path": pa.array([b"a", None])}),
    ],
)  # fmt: skip
def test_rows_of_a_stranger_are_not_believed(tmp_path: Path, message: str, columns: dict[str, Any]) -> None:
    forge(tmp_path / "plan", columns)
    if not message:
        assert everything(tmp_path / "plan")[:3] == (["a.jpg", "b.jpg"], [0, -1], ["", "train"])
        return
    with pytest.raises(BrokenListError, match=message):
        everything(tmp_path / "plan")


def test_paths_of_a_stranger_that_are_no_files_are_failed_rows(tmp_path: Path) -> None:
    forge(tmp_path / "plan", {"path": pa.array([b"", b"b\0c.jpg"])}, root=str(tmp_path))
    [batch] = load_batches(list_images(tmp_path / "plan"), [[0, 1]], Decoding(as_tensor))
    assert batch.reasons == {0: "Is a directory", 1: "embedded null byte"}


def test_a_description_of_a_stranger_is_not_believed(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"version": VERSION + 1}, {"version": 2}, {"kind": "archives"}, {"root": "images"}, {"root": 5},
        {"root": "/a\0b"}, {"classes": "abc"}, {"classes": [1]}, {"splits": [1]}, {"left_out": {".txt": -1}},
        {"left_out": []}, {"labels_xxh3": None}, {"classes": None}, {"ends": []}, {"ends": [0, 2]}, {"ends": [2, 1]},
        {"ends": None},
    ]  # fmt: skip
    for number, change in enumerate(changes):
        forge(tmp_path / f"plan-{number}", **change)
        with pytest.raises(InputError, match=r"plan.parquet is damaged"):
            list_images(tmp_path / f"plan-{number}")
    for ends in ([1], [3], [1, 2]):
        forge(tmp_path / f"ends-{ends}", ends=ends)
        with pytest.raises(BrokenListError, match="row group 0 has 2 rows"):
            everything(tmp_path / f"ends-{ends}")


@pytest.mark.parametrize("content", [b"", b"no Parquet", b"PAR1" * 9])
def test_a_file_that_is_no_parquet_is_a_damaged_plan(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / PLAN_FILE).write_bytes(content)
    with pytest.raises(InputError, match=r"layertap-plan.parquet is damaged: .* run `layertap embed --plan` again"):
        list_images(tmp_path / "plan")
    parquet.write_table(pa.table({"path": ["a.jpg"]}), tmp_path / "plan" / PLAN_FILE)
    with pytest.raises(InputError, match="layertap-plan.parquet is damaged: its description has another hash"):
        list_images(tmp_path / "plan")


def test_a_folder_with_a_plan_of_somebody_else_is_a_folder(tmp_path: Path) -> None:
    root = touch(tmp_path / "images", "parts/1.jpg", "a/2.jpg", "listing/begun.json")
    (root / "plan.json").write_text('{"rooms": 3}')
    assert list_images(root).slice(0, 2).paths == ["a/2.jpg", "parts/1.jpg"]


def test_plans_name_what_to_install(tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for job in (lambda: write_plan(tmp_path / "pictures", tmp_path / "new"), lambda: list_images(plan)):
        with pytest.raises(LayertapError, match="plan.* needs pyarrow; to install it: .*pyarrow") as raised:
            job()
        assert not isinstance(raised.value, InputError)


# Memory


LISTED = """
import os, sys
import pyarrow.compute, pyarrow.parquet
from extract.images import plan_writing
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
count, kind, out, where = int(sys.argv[1]), *sys.argv[2:]
if kind == "folder":
    def made(root):
        return (f"{i // 100000:04d}/{i // 1000:06d}/picture-{i:09d}.jpg" for i in range(count))
    plan_writing.files_below = made
before = peak()
found = plan_writing.write_plan(where, out)
assert len(found) == count, len(found)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "list"])
def test_a_name_takes_at_most_100_bytes_of_memory_while_it_is_listed(tmp_path: Path, kind: str) -> None:
    peaks = []
    for count in (500_000, 1_500_000):
        where = tmp_path / "images"
        where.mkdir(exist_ok=True)
        if kind == "list":
            where = tmp_path / f"{count}.csv"
            with where.open("w") as file:
                file.write("path,label\n")
                for i in range(count):
                    number = i * 7_919 % count
                    file.write(f"{number // 1000:06d}/picture-{number:09d}.jpg,class {number % 100}\n")
        command = [sys.executable, "-c", LISTED, str(count), kind, str(tmp_path / f"plan-{count}"), str(where)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(f"peak memory of a {kind}, kB: {peaks} for 0.5 and 1.5 million names")
    assert peaks[1] - peaks[0] <= 1_000_000 * 100 / 1024
