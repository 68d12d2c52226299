"""What one pass does about files that come, change, move and go; about folders that cannot be believed; and readers."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import xxhash

from extract import FeatureReader, InputError, LayertapError, LockedError
from extract.extraction import reproduce
from extract.extraction.run import extract
from extract.images import list_images
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.version import table_path
from extract.store.verify import repair, verify
from extract.sync import scan as scanning
from extract.sync.compaction import compact
from extract.sync.difference import Guards, Report
from extract.sync.passes import VanishedError
from extract.sync.records import locate
from extract.sync.scan import Scan, ScannedFile
from tests.extract.images.making import files_of
from tests.extract.sync.changes import write_as_changes
from tests.extract.sync.tiny import EAGER, fresh_of, one_pass, picture, planner, same_as_fresh

HOUR = 3600 * 10**9


class Home:
    """A folder with pictures, the data set that follows it, and a clock that can be put forward."""

    def __init__(self, path: Path):
        self.path, self.root, self.out = path, path / "root", path / "out"
        self.ahead_ns = 0
        self.settings: dict[str, Any] = {"guards": EAGER}
        self.plan_for = planner()
        self.planned: list[int] = []  # how many images each call had to compute

    def write(self, name: str, seed: int, height: int = 8) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed, height))
        return path

    def delete(self, *names: str) -> None:
        for name in names:
            (self.root / name).unlink()

    def sync(self, **settings: Any) -> Report:
        def counting(images: Any, out: Path) -> Any:
            self.planned.append(len(images))
            return self.plan_for(images, out)

        self.planned.clear()
        settings = self.settings | {"now_ns": lambda: time.time_ns() + self.ahead_ns} | settings
        return one_pass(self.root, self.out, counting, **settings)

    def paths(self) -> list[str]:
        with FeatureReader(self.out) as reader:
            return sorted(reader.paths)


def of_ten(path: Path) -> Home:
    home = Home(path)
    for i in range(10):
        home.write(f"{'ab'[i % 2]}/{i}.ppm", i)
    return home


@pytest.fixture
def new(tmp_path: Path) -> Home:
    """Ten pictures, of which there is no data set yet."""
    return of_ten(tmp_path)


@pytest.fixture(scope="module")
def _after_a_pass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("passes")
    of_ten(path / "home").sync()
    shutil.copytree(path / "home", path / "whole")
    return path


@pytest.fixture
def home(_after_a_pass: Path) -> Home:
    """Ten pictures, and the data set of a first pass."""
    path = _after_a_pass / "home"
    shutil.rmtree(path)
    shutil.copytree(_after_a_pass / "whole", path)
    return Home(path)


def test_a_first_pass_takes_all_a_second_loads_nothing_and_a_third_opens_no_image(new: Home, monkeypatch: Any) -> None:
    new.ahead_ns = HOUR  # else a second pass more than 2 s later records that the files are settled, as a version
    report = new.sync()
    assert (report.added, report.computed, report.rows, report.version) == (10, 10, 10, 1)
    before = {path: path.stat().st_mtime_ns for path in new.out.rglob("*.h5")}
    report = new.sync()
    assert (report.unchanged, report.computed, report.version, new.planned) == (10, 0, 1, [])
    assert {path: path.stat().st_mtime_ns for path in new.out.rglob("*.h5")} == before
    new.ahead_ns = 2 * HOUR
    new.sync()  # reads all once more, since they were young
    opened = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **more: opened.append(path) or real_open(path, *args, **more))
    assert new.sync().unchanged == 10
    assert not [path for path in opened if os.fsencode(path).endswith(b".ppm")]


def test_it_is_read_with_plain_h5py_and_its_table_has_the_hash_of_each_image(home: Home) -> None:
    (home.root / "a/0.ppm").rename(home.root / "b/renamed.ppm")
    home.write("a/new.ppm", 50)
    home.sync()
    with h5py.File(table_of(home.out)) as file:
        table = {path.decode(): (int(number), int(row), int(label)) for path, number, row, label in zip(
            file["path"][:], file["pass"][:], file["row"][:], file["label"][:], strict=True)}  # fmt: skip
        assert [name.decode() for name in file["classes"][:]] == ["a", "b"]
        for path, content in zip(file["path"][:], file["source_hash"][:], strict=True):
            assert content.tobytes() == xxhash.xxh3_128_digest((home.root / os.fsdecode(path)).read_bytes())
    assert table["b/renamed.ppm"] == (1, 0, 1)
    assert table["a/new.ppm"] == (2, 0, 0)
    with h5py.File(home.out / "passes/000001/shards/000000.h5") as file:
        first = file["features/fc"][0]
    with FeatureReader(home.out) as reader:
        np.testing.assert_array_equal(reader["fc"][reader.paths.index("b/renamed.ppm")], first)


def test_what_is_renamed_copied_touched_swapped_or_restored_is_not_computed(home: Home) -> None:
    root = home.root
    (root / "a").rename(root / "c")  # a folder, whole
    shutil.copy(root / "b/1.ppm", root / "b/copy.ppm")
    (root / "b/3.ppm").touch()
    (root / "b/5.ppm").rename(root / "x")
    (root / "b/7.ppm").rename(root / "b/5.ppm")
    (root / "x").rename(root / "b/7.ppm")
    content = (root / "b/9.ppm").read_bytes()
    (root / "b/9.ppm").unlink()
    report = home.sync()
    assert (report.renamed, report.added, report.changed, report.deleted) == (5, 1, 2, 1)
    assert report.unchanged == 2
    assert report.computed == 0
    (root / "b/9.ppm").write_bytes(content)
    report = home.sync()
    assert (report.added, report.computed) == (1, 0)
    with FeatureReader(home.out) as reader:
        assert reader.classes == ["b", "c"]
        assert [reader.classes[label] for label in reader.labels] == [path[0] for path in reader.paths]


def test_a_failed_image_is_tried_again_when_it_changes_or_after_a_while(new: Home) -> None:
    new.settings["guards"] = Guards(settle_s=0, retry_after_s=3600)
    bad = new.root / "a/bad.ppm"
    bad.write_bytes(b"P6 8 8 255\n..")
    report = new.sync()
    assert (report.failed, report.added) == (1, 11)
    assert new.sync().computed == 0
    new.ahead_ns = 2 * HOUR
    report = new.sync()
    assert new.planned == [1]
    assert (report.computed, report.failed, report.changed) == (1, 1, 0)  # as before
    assert new.sync().computed == 0  # the time counts from the last try
    shutil.copy(bad, new.root / "a/bad2.ppm")
    report = new.sync()
    assert (report.computed, report.failed, report.added) == (0, 2, 1)  # bytes that are known to be bad
    bad.write_bytes(picture(77))
    report = new.sync()
    assert (report.computed, report.failed, report.changed) == (1, 1, 1)
    with FeatureReader(new.out) as reader:
        assert [path for _, path, _, _ in reader.failures] == ["a/bad2.ppm"]
        assert reader.failures[0][3]


# files that are being written


def test_a_file_waits_until_it_is_left_alone_by_whatever_clock_it_is_changed(new: Home) -> None:
    new.settings["guards"] = Guards(settle_s=60)
    began = iter([-HOUR])  # the scan begins an hour before the files change
    assert new.sync(now_ns=lambda: time.time_ns() + next(began, 0)).waiting == 10
    report = new.sync()
    assert (report.waiting, report.rows, report.version) == (10, 0, 0)
    assert not (new.out / "dataset.json").exists()
    new.ahead_ns = -10 * 10**9  # the clock of the file system is ten seconds ahead of that of the pass
    assert new.sync().waiting == 10
    new.ahead_ns = 61 * 10**9
    assert new.sync().added == 10
    new.write("a/0.ppm", 60)  # now, as the file system says; the pass's clock is ahead
    os.utime(new.write("a/new.ppm", 61), (4e9, 4e9))
    new.ahead_ns = 0
    report = new.sync()
    assert (report.waiting, report.changed, report.unchanged) == (2, 0, 10)  # the row of before stays
    new.ahead_ns = 61 * 10**9
    report = new.sync()
    assert (report.changed, report.added) == (1, 1)
    assert new.sync().added == 0


def test_files_on_a_server_whose_clock_is_ahead_do_not_wait_until_it_is_right(new: Home) -> None:
    new.settings["guards"] = Guards(settle_s=60)
    new.ahead_ns = -HOUR  # the clock of the file system is an hour ahead of that of the pass
    assert new.sync().added == 10
    new.write("a/0.ppm", 60, height=9)
    assert new.sync().changed == 1  # what was read too early is read again
    same_as_fresh(new.root, new.out)


def test_a_file_that_changes_while_it_is_computed_waits_for_the_next_pass(home: Home) -> None:
    home.write("a/0.ppm", 60, height=9)
    home.write("a/grows.ppm", 61, height=10)
    home.write("a/goes.ppm", 62, height=11)

    def meanwhile(plan: Any, count: int) -> None:
        home.write("a/0.ppm", 63, height=12)
        home.write("a/grows.ppm", 64, height=13)
        (home.root / "a/goes.ppm").unlink()

    report = home.sync(on_plan=meanwhile)
    assert (report.changed, report.added, report.waiting, report.rows) == (0, 0, 3, 10)
    report = home.sync()
    assert (report.changed, report.added, report.waiting, report.rows) == (1, 1, 0, 11)
    same_as_fresh(home.root, home.out)


def test_a_change_within_the_steps_of_a_clock_is_found(new: Home, monkeypatch: Any) -> None:
    """On a file system that counts time in steps of two seconds, a second change in a step shows in nothing."""
    step = 2 * 10**9
    real_files, real_fstat = Scan.files, os.fstat

    def coarse_files(self: Scan) -> Any:
        for seen in real_files(self):
            yield ScannedFile(seen.path, seen.size, seen.mtime_ns // step * step, seen.ctime_ns // step * step)

    def coarse_fstat(descriptor: int) -> Any:
        file_stat = real_fstat(descriptor)
        names = {name: getattr(file_stat, name) for name in dir(file_stat) if name.startswith("st_")}
        times = {name: names[name] // step * step for name in ("st_mtime_ns", "st_ctime_ns")}
        return SimpleNamespace(**names | times)

    monkeypatch.setattr(Scan, "files", coarse_files)
    monkeypatch.setattr(os, "fstat", coarse_fstat)
    while True:  # until both changes are in one step
        began = time.time_ns() // step
        new.write("a/0.ppm", 70)
        new.sync()
        new.write("a/0.ppm", 71)
        if time.time_ns() // step == began:
            break
    report = new.sync()
    assert (report.changed, report.computed) == (1, 1)
    same_as_fresh(new.root, new.out)


# folders that cannot be believed


def test_a_folder_that_is_gone_or_empty_takes_nothing_with_it(home: Home) -> None:
    home.root.rename(home.path / "unmounted")
    with pytest.raises(LayertapError, match="cannot read folder .*: No such file.*is the disk mounted"):
        home.sync(force=True)
    home.root.mkdir()
    with pytest.raises(VanishedError, match=r"none of the 10 images was found; is the disk mounted\?"):
        home.sync()
    assert len(home.paths()) == 10
    report = home.sync(force=True)
    assert (report.deleted, report.rows, home.paths()) == (10, 0, [])
    assert verify(home.out).faults == []
    home.root.rmdir()
    (home.path / "unmounted").rename(home.root)
    report = home.sync()
    assert (report.added, report.computed, home.planned) == (10, 0, [])  # every row is taken up again by its hash
    same_as_fresh(home.root, home.out)


def test_a_quarter_gone_is_too_much_unless_it_is_forced_also_where_the_records_were_lost(new: Home) -> None:
    new.settings["guards"] = Guards(settle_s=0)
    new.write("c/10.ppm", 10)
    new.write("c/11.ppm", 11)
    new.sync()
    new.delete("a/0.ppm", "a/2.ppm", "b/1.ppm")
    new.write("c/12.ppm", 12)
    with pytest.raises(VanishedError, match="3 of 12 images are gone, more than 20%"):
        new.sync()
    assert "a/0.ppm" in new.paths()
    assert "c/12.ppm" not in new.paths()
    report = new.sync(force=True)
    assert (report.deleted, report.added, report.rows) == (3, 1, 10)
    (new.root / "c").rename(new.root / "d")  # a rename is no loss
    assert new.sync().renamed == 3
    change_table(new.out, without_records)
    new.delete("a/4.ppm", "a/6.ppm", "a/8.ppm")
    with pytest.raises(VanishedError, match="3 of 10 images are gone"):
        new.sync()
    assert len(new.paths()) == 10
    report = new.sync(force=True)
    assert (report.deleted, report.added, report.changed, report.unchanged, report.computed) == (3, 0, 0, 7, 0)


def test_what_lies_in_a_folder_that_cannot_be_read_stays(home: Home, monkeypatch: Any) -> None:
    real = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    home.write("a/new.ppm", 60)
    report = home.sync()
    assert report.unreadable == {"b": "Permission denied"}
    assert (report.added, report.deleted, report.rows) == (1, 0, 11)
    monkeypatch.undo()
    assert home.sync().unchanged == 11


def test_links_loops_and_strange_names(new: Home) -> None:
    (new.root / "a/loop").symlink_to(new.root)
    (new.root / "linked").symlink_to(new.path / "elsewhere")
    (new.path / "elsewhere").mkdir()
    (new.path / "elsewhere/x.ppm").write_bytes(picture(80))
    (new.root / "a/nowhere.ppm").symlink_to("nothing")
    (new.root / "a/itself.ppm").symlink_to("itself.ppm")
    os.mkfifo(new.root / "a/pipe.ppm")
    for name in (b"a/\xff\xfe.ppm", "a/\u00fc\U0001f600.ppm".encode(), b"a/new\nline.ppm", b"a/'quote\".ppm"):
        Path(os.fsdecode(os.fsencode(new.root) + b"/" + name)).write_bytes(picture(len(name)))
    (new.root / ".hidden.ppm").write_bytes(picture(81))
    report = new.sync()
    assert (report.rows, report.failed) == (18, 3)
    same_as_fresh(new.root, new.out)
    assert new.sync().unchanged == 18
    (new.root / "a/nothing").write_bytes(picture(82))
    assert new.sync().failed == 2
    same_as_fresh(new.root, new.out)


def test_another_folder_is_not_taken_for_the_one_before(home: Home) -> None:
    other = home.path / "other"
    shutil.copytree(home.root, other)
    home.root.rename(home.path / "old")
    home.root = other
    with pytest.raises(InputError, match="is kept in sync with .*, not with .*other"):
        home.sync()
    report = home.sync(force=True)
    assert (report.unchanged, report.computed, report.rows) == (10, 0, 10)
    home.root = home.path / "otter"
    with pytest.raises(InputError, match="not with .*otter, which does not exist; correct `images`"):
        home.sync()
    home.root = other
    assert DataSet.open(home.out).images["root"] == str(other)


def test_a_folder_of_something_else_is_left_alone(new: Home) -> None:
    new.out.mkdir()
    (new.out / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="not empty and not a data set"):
        new.sync()
    (new.out / "letter.txt").unlink()
    shutil.rmtree(new.out)
    extract(planner()(list_images(new.root), new.out))
    with pytest.raises(InputError, match="holds a data set of `layertap embed`"):
        new.sync()
    shutil.rmtree(new.out)
    new.sync()
    with pytest.raises(InputError, match="is kept in sync with .* by `layertap sync`"):
        extract(planner()(list_images(new.root), new.out))


# settings


def test_other_features_do_not_mix(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.plan_for = planner(layers=["conv"])
    assert home.sync().unchanged == 10  # nothing says that it is asked for other ones
    with monkeypatch.context() as patched:
        patched.setattr("tests.extract.sync.tiny.CONFIGURATION", {"layers": "conv"})
        with pytest.raises(InputError, match="holds other features"):
            home.sync()
        home.write("a/new.ppm", 60)
        with pytest.raises(InputError, match="features.fc"):
            home.sync()
    home.plan_for = planner(batch_size=3)
    assert home.sync().added == 1


def test_rows_of_a_first_pass_that_could_not_publish_are_not_published_as_other_features(
    new: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("extract.sync.passes.publish", Mock(side_effect=LayertapError("the disk is full")))
        with pytest.raises(LayertapError, match="the disk is full"):
            new.sync()
    assert not (new.out / "dataset.json").exists()
    new.plan_for = planner(layers=["conv"])
    monkeypatch.setattr("tests.extract.sync.tiny.CONFIGURATION", {"layers": "conv"})
    for _ in range(2):  # without and with images to compute
        with pytest.raises(InputError, match="holds other features"):
            new.sync()
        assert not (new.out / "dataset.json").exists()
        new.write("a/new.ppm", 60)
    new.plan_for = planner()
    assert new.sync().rows == 11
    same_as_fresh(new.root, new.out)


def test_libraries_that_compute_otherwise_are_refused_and_others_are_told(home: Home, monkeypatch: Any) -> None:
    home.write("a/new.ppm", 60)

    def with_versions(number: str) -> Callable[..., Any]:
        def plan_for(images: Any, out: Path) -> Any:
            plan = planner()(images, out)
            versions = plan.provenance["versions"] | {"torch": number}
            return replace(plan, provenance=plan.provenance | {"versions": versions})

        return plan_for

    home.plan_for = with_versions("9.9")
    report = home.sync()
    assert "-> 9.9; 10 stored rows, computed again, differ by" in report.notes[0]
    assert home.sync().notes == []
    home.write("a/newer.ppm", 61)
    home.plan_for = with_versions("9.10")
    real = reproduce.rows_of

    def apart(*args: Any) -> Any:
        features, status, reasons = real(*args)
        return {name: values * 1.1 for name, values in features.items()}, status, reasons

    monkeypatch.setattr(reproduce, "rows_of", apart)
    with pytest.raises(LayertapError, match=r"torch 9.9 -> 9.10\) do not reproduce the stored features"):
        home.sync()
    monkeypatch.undo()
    assert home.sync().added == 1


def counts(report: Report) -> tuple[int, ...]:
    return (report.added, report.changed, report.renamed, report.deleted, report.unchanged, report.computed)


def test_a_dry_run_tells_and_writes_nothing(new: Home) -> None:
    report = new.sync(dry_run=True)
    assert (report.added, report.computed, report.rows) == (10, 10, 10)
    assert not new.out.exists()
    new.sync()
    (new.root / "a/0.ppm").rename(new.root / "a/00.ppm")
    (new.root / "a/2.ppm").unlink()
    new.write("a/4.ppm", 60)
    new.write("a/new.ppm", 61)
    files = files_of(new.out)
    assert counts(new.sync(dry_run=True)) == (1, 1, 1, 1, 7, 2)
    assert new.planned == []
    assert files_of(new.out) == files
    assert counts(new.sync()) == (1, 1, 1, 1, 7, 2)


def test_a_dry_run_after_a_kill_changes_no_file_and_no_time(home: Home) -> None:
    for i in range(8):
        home.write(f"c/{i}.ppm", 100 + i)
    if not (pid := os.fork()):
        home.sync(on_rows=lambda rows, resumed: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    def state() -> list[Any]:
        stats = [(path, path.stat()) for path in sorted([home.out, *home.out.rglob("*")])]
        return [files_of(home.out), *((path, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats)]

    for _ in range(2):  # with the file of the lock, and without
        before = state()
        assert home.sync(dry_run=True).computed < 8  # what was stored is known
        assert state() == before
        (home.out / ".lock").unlink(missing_ok=True)
    assert home.sync().rows == 18


# the records


def table_of(out: Path) -> Path:
    """The table of the published version."""
    version = DataSet.open(out).version
    assert version is not None
    return table_path(out, version.number)


def change_table(out: Path, change: Callable[[h5py.File], None]) -> None:
    """Change the table of the published version, and its hash with it."""
    path = table_of(out)
    with h5py.File(path, "r+") as file:
        change(file)
    description = json.loads((out / "dataset.json").read_text())
    description["version"]["rows_xxh3"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    (out / "dataset.json").write_text(json.dumps(description))


def without_records(file: h5py.File) -> None:
    """Leave what earlier versions of layertap wrote."""
    for name in list(file):
        if name.startswith(("file_", "unused_", "settings")):
            del file[name]


def put(name: str, values: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


DAMAGES: list[Callable[[h5py.File], None]] = [
    without_records,
    put("file_size", np.zeros(9, "<i8")),
    put("file_status", np.zeros(10, "<i8")),
    put("unused_hash", np.zeros((1, 15), "u1")),
    put("unused_pass", np.zeros(1, "<i8")),
    put("settings", np.frombuffer(b"[]", "u1")),
    put("settings", np.frombuffer(b'{"configuration": {}, "versions": {}, "last_pass": -1}', "u1")),
    put("file_size", h5py.SoftLink("/nowhere")),
]


def copies(folder: Path, count: int) -> Iterator[int]:
    """Restore a folder to what it is now before each step."""
    whole = shutil.copytree(folder, folder.with_name("whole"))
    for number in range(count):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        yield number


def test_records_that_are_no_use_are_made_again_without_computing(home: Home) -> None:
    home.write("a/0.ppm", 60)
    home.sync()
    (home.out / "manifest.sqlite").touch()  # of an earlier version
    home.write("a/new.ppm", 61)
    fresh = fresh_of(home.root)
    for number in copies(home.out, len(DAMAGES)):
        change_table(home.out, DAMAGES[number])
        dry = home.sync(dry_run=True)
        report = home.sync()
        for each in (dry, report):
            assert "made again from the passes" in each.notes[0], number
            assert (each.added, each.changed, each.unchanged, each.rows) == (1, 0, 10, 11), number
        assert report.computed == 1
        assert not (home.out / "manifest.sqlite").exists()
        assert home.sync().notes == []
        same_as_fresh(home.root, home.out, fresh)


def test_a_bit_that_flips_in_the_table_gives_no_wrong_row(home: Home) -> None:
    (home.root / "a/0.ppm").unlink()  # so that there is a row that no file needs
    home.sync()
    right, chosen = home.paths(), random.Random(0)
    for _ in copies(home.out, int(os.environ.get("LAYERTAP_FUZZ", "6"))):
        path = table_of(home.out)
        content = bytearray(path.read_bytes())
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        path.write_bytes(content)
        report = home.sync()
        assert "made again from the passes" in report.notes[0]
        assert (report.computed, home.paths()) == (0, right)
    same_as_fresh(home.root, home.out)


def test_verify_finds_a_row_with_the_features_of_another_image_and_the_next_pass_mends_it(home: Home) -> None:
    def swapped(file: h5py.File) -> None:
        for name in ("path", "source_hash"):
            file[name][:2] = file[name][:2][::-1]

    change_table(home.out, swapped)
    faults = verify(home.out).faults
    assert [fault.path for fault in faults] == ["a/2.ppm", "a/0.ppm"]
    assert "features of another image; to repair it, delete the folder versions" in faults[0].what
    shutil.rmtree(home.out / "versions")
    assert home.sync().computed == 0
    assert verify(home.out).faults == []
    same_as_fresh(home.root, home.out)


def test_a_table_of_changes_of_an_earlier_version_is_refused_and_written_whole_by_the_next_pass(home: Home) -> None:
    home.write("a/new.ppm", 60)
    home.sync()
    write_as_changes(home.out)
    with pytest.raises(InputError, match=r"000002\.h5 is not a valid .* \d+ rows, expected") as caught:
        FeatureReader(home.out)
    assert "run `layertap sync`" in (caught.value.hint or "")
    report = home.sync()
    assert (report.computed, report.rows, report.version) == (0, 11, 3)
    assert json.loads((home.out / "dataset.json").read_text())["format_version"] == 1
    same_as_fresh(home.root, home.out)


def test_a_data_set_without_hashes_in_its_table_is_read_verified_and_followed(home: Home) -> None:
    change_table(home.out, lambda file: (without_records(file), file.pop("source_hash")))  # type: ignore[arg-type]
    assert not verify(home.out).faults
    home.write("a/new.ppm", 60)
    assert home.sync().computed == 1
    same_as_fresh(home.root, home.out)


def test_what_is_missing_of_the_data_set_is_made_again(home: Home) -> None:
    home.write("a/new.ppm", 60)
    home.sync()
    shutil.rmtree(home.out / "passes/000002")
    with pytest.raises(LayertapError, match="000002"):
        FeatureReader(home.out)
    assert home.sync().computed == 1
    (home.out / "passes/000001/shards/000001.h5").unlink()
    assert home.sync().computed == 4  # the rows of that file
    fresh = same_as_fresh(home.root, home.out)
    table_of(home.out).write_bytes(b"damaged")
    with pytest.raises(InputError, match="run `layertap sync` to repair it"):
        FeatureReader(home.out)
    assert home.sync().computed == 0
    same_as_fresh(home.root, home.out, fresh)
    (home.out / "dataset.json").unlink()
    assert home.sync().computed == 0
    same_as_fresh(home.root, home.out, fresh)
    change_table(home.out, lambda file: file["row"].write_direct(np.full(11, 11)))
    with pytest.raises(InputError, match="has no row"):
        FeatureReader(home.out)


def test_a_table_that_the_system_cannot_map_is_not_damaged(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    with monkeypatch.context() as patch:
        patch.setattr("extract.store.format.version.mmap.mmap", Mock(side_effect=full))
        with pytest.raises(LayertapError, match="cannot read .*Cannot allocate memory"):
            home.sync()
    assert home.sync().notes == []


def test_a_pass_is_never_given_the_number_of_another(home: Home) -> None:
    for i in range(8):
        home.write(f"c/{i}.ppm", 100 + i, height=9)
    assert home.sync(stop=lambda: (home.out / "passes/000002").exists()).stopped
    table_of(home.out).unlink()
    home.write("c/9.ppm", 110)
    report = home.sync()
    assert report.rows == 19
    assert report.computed < 9  # the batch that was done is known
    same_as_fresh(home.root, home.out)


def test_rows_of_an_interrupted_first_pass_survive_an_error_of_the_settings_and_their_files_may_go(new: Home) -> None:
    new.settings["guards"] = Guards(settle_s=0)
    assert new.sync(stop=lambda: True).stopped
    good, new.plan_for = new.plan_for, Mock(side_effect=InputError("the weights are not there"))
    with pytest.raises(InputError, match="the weights are not there"):
        new.sync()
    new.plan_for = good
    new.delete("a/0.ppm", "a/2.ppm", "b/7.ppm", "b/9.ppm")  # which is no loss: they were never published
    report = new.sync()
    assert (report.rows, report.added, report.deleted, report.unchanged) == (6, 6, 0, 0)
    assert 0 < report.computed < 6
    same_as_fresh(new.root, new.out)


def test_links_whose_targets_are_away_are_gone_or_kept_but_not_failed(new: Home) -> None:
    new.settings["guards"] = Guards(settle_s=0, max_vanish=0.5)
    away = new.path / "disk"
    away.mkdir()
    for i in range(4):
        (away / f"{i}.ppm").write_bytes(picture(200 + i))
        (new.root / f"a/link{i}.ppm").symlink_to(away / f"{i}.ppm")
    (new.root / "linked").symlink_to(away)
    new.sync()
    away.rename(new.path / "unmounted")
    report = new.sync()
    assert report.unreadable == {"linked": "the target of the link no longer exists"}
    assert (report.rows, report.failed, report.deleted) == (18, 4, 0)
    assert (report.computed, report.waiting) == (4, 0)  # the links in `a`; nothing below `linked` is looked for
    new.settings["guards"] = Guards(settle_s=0, max_vanish=0.2)
    (new.path / "unmounted").rename(away)
    assert new.sync().failed == 0
    away.rename(new.path / "unmounted")
    with pytest.raises(VanishedError, match="4 of 18 images are gone"):
        new.sync()


def test_a_link_that_goes_during_the_scan_is_not_there(new: Home, monkeypatch: Any) -> None:
    link = new.root / "a/link.ppm"
    link.symlink_to("nowhere")
    monkeypatch.setattr(scanning, "_is_link", lambda entry: link.unlink(missing_ok=True) or True)
    assert new.sync().rows == 10


# readers


def exit_code(do: Callable[[], None]) -> int | None:
    """That of another process that does this."""
    child = multiprocessing.get_context("fork").Process(target=do)
    child.start()
    child.join()
    return child.exitcode


def test_a_reader_sees_one_version_throughout(home: Home) -> None:
    with FeatureReader(home.out) as reader:
        paths, features = reader.paths[:], reader["fc"][:]
        (home.root / "a/0.ppm").unlink()
        for i in range(3):
            home.write(f"c/{i}.ppm", 100 + i)
            home.sync()
        compact(home.out, max_dead=0)
        assert [folder.name for folder in (home.out / "passes").iterdir()] != ["000001"]
        assert not (home.out / "passes/000001").exists()
        np.testing.assert_array_equal(reader["fc"][:], features)
        np.testing.assert_array_equal(reader["fc"][[3, 1, 3]], features[[3, 1, 3]])
        assert reader.paths == paths
        assert exit_code(lambda: np.testing.assert_array_equal(reader["fc"][:], features)) == 0
    assert len(home.paths()) == 12
    same_as_fresh(home.root, home.out)


def test_a_reader_can_be_pickled_and_goes_on_with_its_version(home: Home) -> None:
    with FeatureReader(home.out) as reader:
        features, frozen = reader["fc"][:], pickle.dumps(reader)
    home.write("a/new.ppm", 60)
    (home.root / "a/0.ppm").unlink()
    home.sync()
    with pickle.loads(frozen) as reader:
        assert "a/0.ppm" in reader.paths
        assert "a/new.ppm" not in reader.paths
        np.testing.assert_array_equal(reader["fc"][:], features)
    compact(home.out, max_dead=0)
    with pickle.loads(frozen) as reader:
        assert "a/0.ppm" in reader.paths
        for column in (lambda: reader["fc"][:], lambda: reader["fc"][0], lambda: reader.status):
            with pytest.raises(InputError, match="was replaced or removed after the reader was opened"):
                column()


def test_a_pickled_reader_finds_no_other_pass_of_the_same_number_after_the_table_was_lost(home: Home) -> None:
    home.write("a/new.ppm", 60)
    home.sync()
    with FeatureReader(home.out) as reader:
        expected, frozen = reader["fc"][reader.paths.index("a/new.ppm")], pickle.dumps(reader)
    (home.root / "a/new.ppm").unlink()
    home.sync()
    compact(home.out, max_dead=0)
    shutil.rmtree(home.out / "versions")
    home.write("a/new.ppm", 61)
    home.sync()
    with pickle.loads(frozen) as reader, contextlib.suppress(InputError):
        np.testing.assert_array_equal(reader["fc"][reader.paths.index("a/new.ppm")], expected)


@pytest.mark.slow
def test_readers_that_open_while_versions_change_always_succeed(home: Home) -> None:
    processes = multiprocessing.get_context("fork")
    stop = processes.Event()
    reader = processes.Process(target=_open_until, args=(home.out, stop))
    reader.start()
    for i in range(10):
        home.write(f"c/{i}.ppm", 100 + i)
        (home.root / f"c/{i - 1}.ppm").unlink(missing_ok=True)
        home.sync()
        if i % 3 == 0:
            compact(home.out, max_dead=0)
    stop.set()
    reader.join()
    assert reader.exitcode == 0


def _open_until(out: Path, stop: Any) -> None:
    opened = 0
    while not stop.is_set():
        with FeatureReader(out) as reader:
            good = reader.status == Status.OK
            assert len(set(reader.paths)) == len(reader) >= 10
            assert np.isfinite(reader["fc"][:][good]).all()
        opened += 1
    assert opened > 5


def test_two_passes_at_once_are_one(new: Home) -> None:
    pid = os.getpid()

    def locked_out() -> None:
        with pytest.raises(LockedError, match=f"locked by pid {pid} on .* since 20"):
            new.sync()
        with pytest.raises(LockedError):
            compact(new.out, 0)

    def second(plan: Any, count: int) -> None:
        assert exit_code(locked_out) == 0

    new.sync()
    new.write("a/new.ppm", 60)
    assert new.sync(on_plan=second).added == 1


# compaction


def test_compacting_removes_rows_that_are_not_needed_and_nothing_else(home: Home) -> None:
    home.delete(*(f"a/{i}.ppm" for i in range(0, 10, 2)))
    home.write("b/1.ppm", 60)
    home.sync()
    done = compact(home.out, max_dead=0.7)
    assert done.removed == 0
    done = compact(home.out, max_dead=0.5)
    assert (done.removed, done.rows) == (6, 4)
    assert verify(home.out).faults == []
    same_as_fresh(home.root, home.out)
    assert home.sync().computed == 0
    assert compact(home.out, max_dead=0).removed == 0


def test_a_compaction_that_was_not_published_is_published_by_the_next(home: Home, monkeypatch: Any) -> None:
    home.delete(*(f"a/{i}.ppm" for i in range(0, 10, 2)))
    home.sync()
    with monkeypatch.context() as patch:
        patch.setattr("extract.sync.compaction.publish", Mock(side_effect=LayertapError("Input/output error")))
        with pytest.raises(LayertapError, match="Input/output error"):
            compact(home.out, max_dead=0)
    fresh = same_as_fresh(home.root, home.out)
    assert compact(home.out, max_dead=0).removed == 5
    same_as_fresh(home.root, home.out, fresh)
    assert sum(part.n_rows for part in DataSet.open(home.out).data_sets_with_shards()) == 5
    assert len(list((home.out / "passes").iterdir())) == len(list((home.out / "versions").iterdir())) == 1


def test_rows_of_images_that_are_gone_are_kept_for_a_while(new: Home) -> None:
    new.settings["guards"] = Guards(settle_s=0, max_vanish=1, keep_gone_s=3600)
    new.sync()
    content = {path: path.read_bytes() for path in new.root.rglob("a/*.ppm")}
    for path in content:
        path.unlink()
    (new.root / "b/1.ppm").unlink()
    new.sync()
    for path, data in content.items():
        path.write_bytes(data)
    assert new.sync().computed == 0
    for path in content:
        path.unlink()
    new.sync()
    new.ahead_ns = 2 * HOUR
    new.sync()  # more than half of the pass has not been needed for more than an hour
    with FeatureReader(new.out) as reader:
        assert sum(part.n_rows for part in DataSet.open(new.out).data_sets_with_shards()) == len(reader) == 4
    for path, data in content.items():
        path.write_bytes(data)
    assert new.sync().computed == 5


@pytest.fixture
def after_small_passes(new: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """After three passes, two of one image each, and before the one that joins them."""
    monkeypatch.setattr("extract.sync.compaction._SMALL_PASSES", 4)
    new.plan_for = planner(shard_rows=1000)
    for i in range(3):
        new.write(f"c/{i}.ppm", 100 + i)
        new.sync()
    assert len(DataSet.open(new.out).version.passes) == 3  # type: ignore[union-attr]
    new.write("c/3.ppm", 103)
    return new


def test_many_small_passes_are_joined(after_small_passes: Home) -> None:
    home = after_small_passes
    home.sync()
    assert len(DataSet.open(home.out).version.passes) == 1  # type: ignore[union-attr]
    assert verify(home.out).faults == []
    same_as_fresh(home.root, home.out)


def test_a_damaged_row_does_not_stop_passes_and_is_computed_again_once_it_was_found(after_small_passes: Home) -> None:
    home = after_small_passes
    with h5py.File(home.out / "passes/000001/shards/000000.h5", "r+") as file:
        file["features/fc"][1] += 1
        path = file["path"][1].decode()
    report = home.sync()
    assert report.rows == 14
    assert "cannot be compacted" in report.notes[0]
    assert "`layertap verify OUT --repair`" in report.notes[0]
    known = {f"{number:06d}" for number in DataSet.open(home.out).version.passes}  # type: ignore[union-attr]
    assert {folder.name for folder in (home.out / "passes").iterdir()} == known
    verification = verify(home.out)
    assert (verification.faults[0].path, verification.faults[0].file) == (path, "passes/000001/shards/000000.h5")
    assert repair(verification) == 1
    report = home.sync()
    assert (report.computed, report.notes) == (1, [])
    assert verify(home.out).faults == []
    same_as_fresh(home.root, home.out)


def test_a_path_that_is_longer_than_all_recorded_ones_is_not_taken_for_its_beginning() -> None:
    recorded = np.array([b"a/1.p", b"a/2.p"])
    at, there = locate(recorded, np.array([b"a/2.ppm", b"a/2.p", b"b"]))
    assert (at[1], there.tolist()) == (1, [False, True, False])
