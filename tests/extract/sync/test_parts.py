"""A data set of parts of files that follows a folder has, after each pass, the parts that a fresh run would have."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from extract import FeatureReader, InputError, defaults
from extract.extraction import pipeline
from extract.extraction.settings import ExtractionSettings
from extract.images import part_source
from extract.images.part_names import file_of
from extract.images.part_source import Parts
from extract.images.parts import listing
from extract.store.format.dataset import DataSet
from extract.store.format.version import table_path
from extract.store.verify import repair, verify
from extract.sync.compaction import compact
from extract.sync.difference import Guards, Report
from extract.sync.passes import VanishedError
from extract.sync.records import Records
from tests.extract.sync.tiny import one_pass, picture, planner, same_as_fresh

TILES = ExtractionSettings(tiles=4, overlap=0.25, content=0.05)
GREY = b"P6 8 8 255\n" + bytes([128]) * 192  # background, of which no tile is kept


class Home:
    """A folder with pictures, the data set of their tiles that follows it, and a clock that can be put forward."""

    def __init__(self, path: Path, parts: ExtractionSettings = TILES):
        self.path, self.root, self.out, self.parts = path, path / "root", path / "out", parts
        self.plan_for = planner(batch_size=16, shard_rows=32)
        self.ahead_ns = 0
        self.planned: list[str] = []  # names of the rows to compute

    def write(self, name: str, content: bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def sync(self, **settings: Any) -> Report:
        def noting(images: Any, out: Path) -> Any:
            self.planned += images.paths
            return self.plan_for(images, out)

        self.planned.clear()
        now = {"now_ns": lambda: time.time_ns() + self.ahead_ns}
        return one_pass(self.root, self.out, noting, **({"parts": self.parts} | now | settings))

    def check(self) -> None:
        same_as_fresh(self.root, self.out, parts=self.parts)

    @property
    def files_planned(self) -> list[str]:
        return sorted({file_of(name) for name in self.planned})

    def rows_of(self, file: str) -> list[str]:
        with FeatureReader(self.out) as reader:
            return sorted(path for path in reader.paths if file_of(path) == file)


@pytest.fixture(scope="module")
def _after_a_pass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    home = Home(path / "home")
    for i in range(6):
        home.write(f"{'ab'[i % 2]}/{i}.ppm", picture(i, 8 + i % 3))
    home.write("b/grey #1.ppm", GREY)
    report = home.sync()
    assert (report.added, report.rows, report.computed) == (6, len(home.planned), len(home.planned))
    home.check()
    shutil.copytree(path / "home", path / "whole")
    return path


@pytest.fixture
def home(_after_a_pass: Path) -> Home:
    """Six pictures with 6 or 9 tiles and one without, and the data set of a first pass."""
    path = _after_a_pass / "home"
    shutil.rmtree(path)
    shutil.copytree(_after_a_pass / "whole", path)
    return Home(path)


def test_only_the_parts_of_new_and_changed_files_are_computed_and_all_of_these(home: Home) -> None:
    assert len(home.rows_of("a/0.ppm")) == 9
    home.write("a/new.ppm", picture(50))
    report = home.sync()
    assert (report.added, report.unchanged, report.waiting, home.files_planned) == (1, 6, 0, ["a/new.ppm"])
    home.check()
    home.write("a/0.ppm", picture(51))  # the same names
    report = home.sync()
    assert (report.changed, report.unchanged, report.computed) == (1, 6, 9)
    assert home.files_planned == ["a/0.ppm"]
    home.check()
    home.write("a/2.ppm", picture(52, 4))  # fewer tiles
    home.write("a/4.ppm", picture(53, 20))  # more
    home.write("b/1.ppm", GREY)  # none
    home.write("b/grey #1.ppm", picture(54))  # now it has some
    report = home.sync()
    assert (report.changed, report.deleted, report.added, report.unchanged) == (2, 1, 1, 4)
    assert home.files_planned == ["a/2.ppm", "a/4.ppm", "b/grey #1.ppm"]
    home.check()
    assert home.rows_of("b/1.ppm") == []
    assert not verify(home.out).faults


def test_touched_renamed_copied_deleted_and_restored_files_are_not_computed(home: Home) -> None:
    content = (home.root / "a/2.ppm").read_bytes()
    (home.root / "a/0.ppm").touch()
    (home.root / "a/2.ppm").rename(home.root / "b/renamed.ppm")
    shutil.copy(home.root / "a/4.ppm", home.root / "b/copied.ppm")
    (home.root / "b/3.ppm").unlink()
    report = home.sync()
    assert (report.renamed, report.added, report.deleted, report.changed, report.unchanged) == (1, 1, 1, 0, 4)
    assert (report.computed, home.planned) == (0, [])
    home.check()
    home.write("b/restored.ppm", content)
    assert (home.sync().added, home.planned) == (1, [])
    home.check()
    home.ahead_ns = 10**13
    home.sync()  # looks at all once more, since they were young
    before = (home.out / "dataset.json").read_bytes()
    report = home.sync()
    assert (report.unchanged, home.planned, (home.out / "dataset.json").read_bytes()) == (7, [], before)


def test_a_file_without_parts_is_read_again_only_if_it_changes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    listing_of = listing.parts_of

    def noting(images: Any, *args: Any, **more: Any) -> Any:
        listed[:] = images.paths
        return listing_of(images, *args, **more)

    monkeypatch.setattr(listing, "parts_of", noting)
    home.write("b/\udcff.ppm", GREY)
    home.ahead_ns = 10**13
    home.sync()  # all files are settled
    assert {"b/grey #1.ppm", "b/\udcff.ppm"} < set(listed)
    for _ in range(2):
        home.sync()
        assert listed == []
    home.write("b/grey #1.ppm", picture(50))
    (home.root / "b/\udcff.ppm").rename(home.root / "a/\udcff.ppm")
    assert (home.sync().added, listed) == (1, ["a/\udcff.ppm", "b/grey #1.ppm"])
    home.check()


def test_a_dry_run_tells_what_a_pass_then_does(home: Home) -> None:
    home.write("a/0.ppm", picture(51))
    home.write("a/new.ppm", picture(50))
    home.write("b/1.ppm", GREY)
    (home.root / "b/3.ppm").unlink()
    foretold, done = home.sync(dry_run=True), home.sync()
    for name in ("added", "changed", "renamed", "deleted", "unchanged", "computed", "rows"):
        assert getattr(foretold, name) == getattr(done, name), name
    home.check()


@pytest.mark.parametrize("when", ["listed", "computed"])
def test_a_file_that_changes_during_a_pass_waits_with_all_of_its_parts(
    home: Home, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    before, home.plan_for = home.rows_of("a/0.ppm"), planner()  # batches of 4
    with FeatureReader(home.out) as reader:
        values = {path: value for path, value in zip(reader.paths, reader["fc"][:], strict=True) if path in before}
    home.write("a/0.ppm", picture(51, 10))

    def replaced_before(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            home.write("a/0.ppm", picture(52, 12))
            return function(*args, **more)

        return call

    if when == "listed":
        monkeypatch.setattr(listing, "parts_of", replaced_before(listing.parts_of))
    else:
        calls, original = [], pipeline.rows_of

        def rows_of(*args: Any, **more: Any) -> Any:
            calls.append(0)
            if len(calls) == 2:  # of three batches
                home.write("a/0.ppm", picture(52, 12))
            return original(*args, **more)

        monkeypatch.setattr(pipeline, "rows_of", rows_of)
    report = home.sync()
    assert (report.waiting, report.changed) == (1, 0)
    with FeatureReader(home.out) as reader:
        after = {path: value for path, value in zip(reader.paths, reader["fc"][:], strict=True) if "a/0.ppm" in path}
    assert after.keys() == values.keys()
    assert all(np.array_equal(after[path], values[path]) for path in values)
    monkeypatch.undo()
    assert home.sync().changed == 1
    home.check()


def test_a_pass_that_was_killed_is_resumed_without_computing_a_row_again(home: Home) -> None:
    for name, seed in (("a/0.ppm", 51), ("a/new.ppm", 52), ("b/1.ppm", 53)):
        home.write(name, picture(seed))
    home.plan_for = planner()  # batches of 4
    child = os.fork()
    if child == 0:
        calls, original = [], pipeline.rows_of

        def rows_of(*args: Any, **more: Any) -> Any:
            calls.append(0)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **more)

        pipeline.rows_of = rows_of
        home.sync()
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    before = len(home.rows_of("a/0.ppm")), home.rows_of("a/new.ppm")
    assert before == (9, [])  # of the version before
    report = home.sync()
    assert (report.added, report.changed) == (1, 2)
    assert 0 < report.computed < 27
    home.check()


def test_a_first_pass_that_was_stopped_is_not_continued_with_other_parts(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.write("a.ppm", picture(0))
    home.write("b.ppm", picture(1))
    home.plan_for = planner()  # batches of 4
    calls = iter([False] * 3)
    report = home.sync(stop=lambda: next(calls, True))
    assert (report.stopped, report.version) == (True, 0)
    for parts in (ExtractionSettings(tiles=6), None):
        with pytest.raises(InputError, match="holds other parts of files"):
            home.sync(parts=parts)
    report = home.sync()
    assert 0 < report.computed < report.rows == 18
    home.check()


def test_a_file_of_which_a_row_was_lost_gets_it_again(home: Home) -> None:
    home.ahead_ns = 10**13
    home.sync()  # all files are settled
    with h5py.File(home.out / "passes/000001/shards/000000.h5", "r+") as file:
        file["features/fc"][2] += 1
    assert repair(verify(home.out)) == 1
    assert (home.sync().computed, len(home.planned)) == (1, 1)
    home.check()


def test_compaction_keeps_parts_with_their_columns(home: Home) -> None:
    home.write("a/0.ppm", picture(51))
    (home.root / "b/3.ppm").unlink()
    home.sync()
    done = compact(home.out, 0.0)
    assert done.rows
    home.check()
    home.write("b/new.ppm", picture(55))
    assert home.sync().computed == 9
    home.check()
    with FeatureReader(home.out) as reader:
        assert reader.windows.tolist() == [[reader.columns[side][i] for side in "xywh"] for i in range(len(reader))]
        assert set(reader.per_file("fc").files) == {
            str(path.relative_to(home.root)) for path in home.root.rglob("*.ppm") if path.read_bytes() != GREY
        }


def test_other_parts_are_refused_also_where_the_records_are_lost(home: Home) -> None:
    others = ExtractionSettings(tiles=6), None, ExtractionSettings(views="flips")
    for parts, message in zip(others, ("tiles: stored 4, now 6", "now nothing", "views"), strict=True):
        with pytest.raises(InputError, match=message):
            home.sync(parts=parts)
    home.write("a/new.ppm", picture(50))
    version = DataSet.open(home.out).version
    assert version is not None
    table_path(home.out, version.number).write_bytes(b"damaged")
    with pytest.raises(InputError, match="tiles: stored 4, now nothing"):
        home.sync(parts=None)
    assert home.sync().computed == 9
    home.check()
    whole = Home(home.path / "whole")
    whole.root = home.root
    whole.sync(parts=None)
    with pytest.raises(InputError, match="tiles: stored nothing, now 4"):
        whole.sync()
    table_path(whole.out, 1).unlink()
    with pytest.raises(InputError, match="tiles: stored nothing, now 4"):
        whole.sync()
    assert "parts" not in DataSet.open(whole.out).images


def test_rows_of_broken_and_unreadable_files(home: Home) -> None:
    home.write("a/broken.ppm", b"P6 8 8 255\n" + bytes(9))
    (home.root / "a/dangling.ppm").symlink_to("nothing/there.ppm")
    report = home.sync()
    assert (report.added, report.failed) == (2, 10)
    assert len(home.rows_of("a/broken.ppm")) == 9
    assert home.rows_of("a/dangling.ppm") == ["a/dangling.ppm#xywh=0,0,0,0"]
    home.check()
    home.write("a/nothing", b"")  # so that a folder of the link's target is a file
    home.check()
    home.ahead_ns = 10**13
    assert home.sync().unchanged == 8
    assert (home.sync().unchanged, home.planned) == (8, [])
    home.write("a/broken.ppm", picture(60))
    assert home.sync(dry_run=True).changed == 1
    assert (home.sync().changed, home.files_planned) == (1, ["a/broken.ppm"])
    home.check()
    (home.root / "b/1.ppm").rename(home.root / "b/6.ppm")
    (home.root / "b/3.ppm").unlink()
    (home.root / "b/5.ppm").unlink()
    with pytest.raises(VanishedError, match="2 of 8 images are gone"):  # files, not rows
        home.sync(guards=Guards(0, 0.2))


def test_a_part_that_could_not_be_read_is_tried_again_without_the_others(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write("a/new.ppm", picture(50))
    home.plan_for = planner()  # batches of 4
    broken, read = {"a/new.ppm#xywh=3,3,4,4"}, Parts.read

    def read_others(source: Parts, row: int) -> Any:
        if source._names[row] in broken:
            raise OSError(5, "Input/output error")
        return read(source, row)

    monkeypatch.setattr(Parts, "read", read_others)
    report = home.sync()
    assert (report.added, report.computed, report.failed) == (1, 9, 1)
    home.ahead_ns = 10**10
    assert home.sync().failed == 1  # now all is settled
    broken.clear()
    assert (home.sync().failed, home.planned) == (1, [])
    home.ahead_ns = 10**11  # after a minute, a read is tried again
    report = home.sync()
    assert (report.changed, report.computed, report.failed) == (1, 1, 0)
    home.check()


def test_a_table_leaves_out_files_with_all_of_their_parts(home: Home) -> None:
    report = home.sync(without=["a/0.ppm"])
    assert (report.deleted, home.rows_of("a/0.ppm"), home.planned) == (1, [], [])
    assert (home.sync().added, len(home.rows_of("a/0.ppm")), home.planned) == (1, 9, [])
    with pytest.raises(InputError, match="names a part, a/0.ppm#xywh=0,0,4,4; of parts, sync leaves out whole files"):
        home.sync(without=["a/0.ppm#xywh=0,0,4,4"])


def test_frames_are_those_of_the_videos_that_are_there_and_a_broken_one_is_a_row(tmp_path: Path) -> None:
    frames = pytest.importorskip("tests.extract.images.parts.test_frames")
    home = Home(tmp_path, ExtractionSettings(fps=5))
    home.root.mkdir()
    (home.root / "picture.ppm").write_bytes(picture(0))
    with pytest.raises(InputError, match="no videos"):
        home.sync()
    (home.root / "cat").mkdir()
    frames.write(home.root / "cat/a.mp4")
    (home.root / "cat/b #2.mkv").write_bytes(b"broken")
    report = home.sync()
    assert (report.added, report.failed, report.rows) == (2, 1, 8)
    assert "videos that cannot be read, whose rows fail: 1, the first is cat/b #2.mkv" in report.notes[0]
    home.check()
    home.ahead_ns = 10**13
    for _ in range(2):
        report = home.sync(guards=Guards(0, 1, 10**6))
        assert (report.unchanged, home.planned) == (2, [])
    home.ahead_ns += 10**16
    assert home.sync(guards=Guards(0, 1, 10**6)).unchanged == 2
    assert home.planned == ["cat/b #2.mkv"]  # after `retry_after`
    frames.write(home.root / "cat/b #2.mkv", stamps=range(0, 80, 2))
    assert (home.sync().changed, home.files_planned) == (1, ["cat/b #2.mkv"])
    home.check()
    (home.root / "cat/a.mp4").rename(home.root / "a.mp4")
    assert (home.sync().renamed, home.planned) == (1, [])
    home.check()
    os.mkfifo(home.root / "pipe.mp4")
    assert (home.sync().failed, home.planned) == (1, ["pipe.mp4"])  # which is not waited for
    home.check()


def test_slides_that_are_read_in_regions_and_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile = pytest.importorskip("tifffile")
    monkeypatch.setattr(defaults, "MAX_PIXELS", 1000)  # a larger TIFF is only read in regions
    monkeypatch.setattr(defaults, "MAX_FILE_BYTES", 2000)
    slides = Home(tmp_path / "slides", ExtractionSettings(tiles=32))
    views = Home(tmp_path / "views", ExtractionSettings(views="flips"))
    slides.write("a.tif", b"")
    tifffile.imwrite(slides.root / "a.tif", np.arange(64 * 40 * 3, dtype=np.uint8).reshape(40, 64, 3), tile=(16, 16))
    assert (slides.sync().added, len(slides.rows_of("a.tif"))) == (1, 4)
    (slides.root / "a.tif").rename(slides.root / "b.tif")
    report = slides.sync()
    assert (report.renamed, report.failed, slides.planned) == (1, 0, [])
    slides.check()
    slides.ahead_ns = 10**11
    slides.sync()  # "b.tif" is settled
    tifffile.imwrite(slides.root / "c.tif", np.ones((32, 32, 3), np.uint8))
    with monkeypatch.context() as broken:
        broken.setattr(part_source, "OnDisk", Mock(side_effect=OSError(5, "Input/output error")))
        assert slides.sync().failed == 1
    slides.ahead_ns = 10**12
    assert (slides.sync().computed, slides.files_planned) == (1, ["c.tif"])
    slides.check()
    views.write("a.ppm", picture(0))
    assert views.sync().rows == 2
    views.check()


def test_parts_of_files_below_a_path() -> None:
    names = [b"a", b"a.ppm#xywh=0,0,4,4", b"a/x.ppm#xywh=0,0,4,4", b"a#xywh=0,0,4,4", b"a#b.ppm#xywh=0,0,4,4", b"b/a"]
    records = Records(np.zeros(len(names), [("path", "S30")]), parts={"tiles": 4})
    records.array["path"] = names
    assert records.below(b"a").tolist() == [True, False, True, True, False, False]
    assert records.below(b"a.ppm").tolist() == [False, True, False, False, False, False]


def test_a_slide_in_several_files_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openslide")
    tiles = pytest.importorskip("tests.extract.images.parts.test_tiles")
    monkeypatch.setattr(part_source, "_OF_SEVERAL_FILES", (".svs",))  # as if the pixels of this one were elsewhere
    home = Home(tmp_path, ExtractionSettings(tiles=64))
    noise = np.random.default_rng(0).integers(0, 256, (128, 256, 3)).astype(np.uint8)
    home.write("a.svs", tiles.pyramid_of([noise, noise[::2, ::2]], in_one_chain=True))
    home.plan_for = planner()
    calls = iter([False])
    assert home.sync(stop=lambda: next(calls, True)).stopped
    assert 0 < home.sync().computed < 8
    (home.root / "a.svs").rename(home.root / "b.svs")
    assert (home.sync().renamed, home.planned) == (1, [])
    home.check()
