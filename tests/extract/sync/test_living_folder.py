"""A folder that changes in every way, and passes that are killed: what is stored is what a fresh extraction gives."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from extract import FeatureReader
from extract.extraction.settings import ExtractionSettings
from extract.images.part_names import file_of, fragment_of, part_hash
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from tests.extract.sync.tiny import one_pass, picture, planner, same_as_fresh

NAMES = st.sampled_from(
    ["a/1.ppm", "a/2.ppm", "a/b/3.ppm", "c/4.ppm", "c/\udcff.ppm", "6.ppm", "train/7.ppm", "c/8.ppm"]
)
SEEDS = st.integers(0, 5)
CALLS_OF_A_PASS = 40_000  # of Python functions, about


@seed(1)  # the same sequences each time, whatever else is changed here
class LivingFolder(RuleBasedStateMachine):
    """The rules are what people do to the folder; `check` follows each completed pass."""

    parts: ExtractionSettings | None = None

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="living"))
        self.root, self.out = self.home / "root", self.home / "out"
        self.root.mkdir()
        (self.root / "anchor.ppm").write_bytes(picture(99))  # the folder is never quite empty
        self.plan_for = planner()
        self.ahead_ns = 0
        self.stored: set[bytes] = set()  # hashes of all rows that a completed pass has seen
        self.fragments = {b""}  # of their names
        self.deleted: dict[str, bytes] = {}
        self.computed: list[bytes] = []
        self.at_kills: list[dict[Path, bytes]] = []  # since the last completed pass
        self.passes = self.kills = 0
        self.damaged = False  # a table of the published version

    def contents(self) -> dict[Path, bytes]:
        files = (path for path in self.root.rglob("*.ppm") if path.is_file())
        return {path: xxhash.xxh3_128_digest(path.read_bytes()) for path in files}

    def teardown(self) -> None:
        COUNTS.update(sequences=1, passes=self.passes, kills=self.kills)
        shutil.rmtree(self.home)

    def path(self, name: str) -> Path:
        return self.root / name

    def there(self, choice: int) -> Path | None:
        names = ("anchor.ppm", "link.ppm")
        files = sorted(path for path in self.root.rglob("*.ppm") if path.is_file() and path.name not in names)
        return files[choice % len(files)] if files else None

    # What people do

    @rule(name=NAMES, seed=SEEDS, height=st.sampled_from([8, 9]))
    def write(self, name: str, seed: int, height: int) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(picture(seed, height))

    @rule(choice=st.integers(0, 7), seed=SEEDS, keep_mtime=st.booleans())
    def edit_in_place_with_the_same_size(self, choice: int, seed: int, keep_mtime: bool) -> None:
        if (path := self.there(choice)) is None:
            return
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(12)
            file.write(np.random.default_rng(seed).integers(0, 256, 150).astype(np.uint8).tobytes())
        if keep_mtime:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    @rule(choice=st.integers(0, 7))
    def touch(self, choice: int) -> None:
        if path := self.there(choice):
            path.touch()

    @rule(choice=st.integers(0, 7), name=NAMES)
    def rename(self, choice: int, name: str) -> None:
        if path := self.there(choice):
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(self.path(name))

    @rule(first=st.integers(0, 7), second=st.integers(0, 7))
    def swap(self, first: int, second: int) -> None:
        path, other_path = self.there(first), self.there(second)
        if path and other_path and path != other_path:
            path.rename(self.root / "swap")
            other_path.rename(path)
            (self.root / "swap").rename(other_path)

    @rule(choice=st.integers(0, 7), name=NAMES, keep_times=st.booleans())
    def copy(self, choice: int, name: str, keep_times: bool) -> None:
        path = self.there(choice)
        if path and path != self.path(name):
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copy2 if keep_times else shutil.copy)(path, self.path(name))

    @rule(choice=st.integers(0, 7))
    def delete(self, choice: int) -> None:
        if path := self.there(choice):
            self.deleted[str(path.relative_to(self.root))] = path.read_bytes()
            path.unlink()

    @rule(choice=st.integers(0, 7))
    def restore(self, choice: int) -> None:
        if self.deleted:
            name = sorted(self.deleted)[choice % len(self.deleted)]
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            self.path(name).write_bytes(self.deleted.pop(name))

    @rule(choice=st.integers(0, 7))
    def corrupt(self, choice: int) -> None:
        if path := self.there(choice):
            with path.open("r+b") as file:
                file.truncate(100)

    @rule(choice=st.integers(0, 7), seed=SEEDS)
    def mend(self, choice: int, seed: int) -> None:
        if (path := self.there(choice)) and path.stat().st_size == 100:
            path.write_bytes(picture(seed))

    @rule()
    def rename_a_folder(self) -> None:
        if (self.root / "a").is_dir() and not (self.root / "z").exists():
            (self.root / "a").rename(self.root / "z")

    @rule(choice=st.integers(0, 7))
    def link(self, choice: int) -> None:
        path, name = self.there(choice), self.root / "link.ppm"
        if path and path != name:
            name.unlink(missing_ok=True)
            name.symlink_to(path)

    @rule()
    def some_time_passes(self) -> None:
        time.sleep(0.012)  # as the times of files are counted; ten seconds, as far as a pass can tell
        self.ahead_ns += 10_000_000_000

    @rule(choice=st.integers(0, 1), keep_bytes=st.sampled_from([None, 0, 1000]))
    def damage_a_table(self, choice: int, keep_bytes: int | None) -> None:
        tables = sorted((self.out / "versions").glob("*.h5"))
        if tables and self.at_kills == []:
            table = tables[choice % len(tables)]
            if keep_bytes is None:
                table.unlink()
            else:
                os.truncate(table, keep_bytes)
            self.damaged = True

    # Passes

    @rule()
    def complete_a_pass_without_a_reader(self) -> None:
        self.complete_a_pass(reader_open=False)

    @rule(reader_open=st.booleans())
    def complete_a_pass(self, reader_open: bool) -> None:
        published = (self.out / "dataset.json").exists() and not self.damaged
        before = self.snapshot() if reader_open and published else None
        # A pass that was killed is finished first; of its files, those that have changed meanwhile are computed as they
        # are now, though these bytes may be known.
        now = self.contents()
        changed = {now[path] for kill in self.at_kills for path in kill.keys() & now.keys() if kill[path] != now[path]}
        known = self.stored - {part_hash(content, fragment) for content in changed for fragment in self.fragments}
        self.computed.clear()
        report = self.run()
        self.at_kills.clear()
        self.damaged = False
        good = [path for path in self.computed if path not in known]
        assert sorted(good) == sorted(self.computed), "an image was computed again that had not changed"
        self.passes += 1
        if before is not None:
            reader, paths, features = before
            assert reader.paths == paths
            np.testing.assert_array_equal(reader["fc"][:], features)
            reader.close()
        self.check(report)

    @rule(share=st.floats(0, 1.2))
    def kill_a_pass(self, share: float) -> None:
        child = os.fork()
        if child == 0:
            left = int(share * CALLS_OF_A_PASS)

            def count(*_: Any) -> None:
                nonlocal left
                left -= 1
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                sys.setprofile(count)
                self.run()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a pass failed that nobody killed"
        if os.WIFSIGNALED(status):
            self.kills += 1
            self.at_kills.append(self.contents())

    # What must hold

    def run(self) -> Any:
        from extract.extraction import pipeline

        original = pipeline.rows_of

        def noting(batch: Any, *args: Any) -> Any:
            self.computed += [
                batch.source_hash[i].tobytes() for i in range(len(batch.rows)) if batch.status[i] == Status.OK
            ]
            return original(batch, *args)

        pipeline.rows_of = noting
        try:
            now_ns = lambda: time.time_ns() + self.ahead_ns  # noqa: E731
            return one_pass(self.root, self.out, self.plan_for, now_ns=now_ns, parts=self.parts)
        finally:
            pipeline.rows_of = original

    def snapshot(self) -> tuple[FeatureReader, list[str], np.ndarray]:
        reader = FeatureReader(self.out)
        return reader, reader.paths[:], reader["fc"][:]

    def check(self, report: Any) -> None:
        with same_as_fresh(self.root, self.out, parts=self.parts).reader as expected:
            version = DataSet.open(self.out).version
            assert version is not None
            needed = {f"{version.number:06d}.h5"}
            assert {path.name for path in (self.out / "versions").iterdir()} == needed
            assert report.rows == len(expected)
            assert report.added + report.changed + report.renamed + report.unchanged == len(set(expected.files))
            assert set(expected.files) == {str(path.relative_to(self.root)) for path in self.root.rglob("*.ppm")}
            assert report.failed == int((expected.status != Status.OK).sum())
            for path in expected.paths:
                file, fragment = self.root / file_of(path), fragment_of(path).encode()
                content = file.read_bytes() if file.exists() else b""
                self.stored.add(part_hash(xxhash.xxh3_128_digest(content), fragment))
                self.fragments.add(fragment)


class LivingTiles(LivingFolder):
    """The same of the tiles of the pictures: 4 or 6 of each."""

    parts = ExtractionSettings(tiles=4)


COUNTS = Counter[str]()


@pytest.mark.parametrize(
    "count", [3, pytest.param(20, marks=pytest.mark.slow), pytest.param(160, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("living", [LivingFolder, pytest.param(LivingTiles, marks=pytest.mark.slow)])
def test_after_each_pass_the_data_set_is_what_a_fresh_extraction_gives(living: type[LivingFolder], count: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child that is forked has no other threads
    COUNTS.clear()
    try:
        run_state_machine_as_test(
            living,
            settings=settings(
                max_examples=count,
                stateful_step_count=40 if count > 3 else 20,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        torch.set_num_threads(threads)
    assert COUNTS["sequences"] >= count
    assert COUNTS["passes"] > count
    assert COUNTS["kills"] > count // 3 or count == 3  # few sequences may hold no kill by chance
