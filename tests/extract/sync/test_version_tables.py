"""Tables of versions, compared with a model of the manifest; tables of changes, which earlier versions wrote."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sqlite3
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from extract import InputError
from extract.images.image_list import labels_from_folders
from extract.store.format import version as version_module
from extract.store.format.dataset import DataSet
from extract.store.format.layout import StoredFeature
from extract.store.format.version import table_path
from extract.sync import manifest as manifest_module
from extract.sync import publishing
from extract.sync.difference import Guards, difference
from extract.sync.manifest import Manifest, StoredRow
from extract.sync.manifest_file import ManifestFile
from extract.sync.publishing import publish, remove_unneeded
from extract.sync.scan import ScannedFile
from tests.extract.sync.changes import write_as_changes

ROOT = "/images"


class Model:
    """A manifest, and what it should hold: path -> (pass, row). No features are stored."""

    def __init__(self, out: Path):
        self.out, self.manifest = out, Manifest(out)
        self.files: dict[str, int] = {}  # path -> id of its row
        self.rows: dict[int, tuple[int, int]] = {}  # id -> pass and row
        self.passes = 0
        self.published: DataSet | None = None
        self.template = DataSet(out, {}, [StoredFeature("fc", (4,), "float32")], {"root": ROOT, "count": 0}, 10)

    def add_pass(self, count: int) -> list[int]:
        """Add a pass of rows that no file needs yet; return their ids."""
        self.passes += 1
        self.describe_pass(count)
        rows = [StoredRow(bytes(15) + bytes([i % 251]), 9, 9, i, 1) for i in range(count)]
        with self.manifest.transaction():
            ids = list(self.manifest.add_pass(self.passes, rows, 1))
        self.rows |= {row_id: (self.passes, row) for row, row_id in enumerate(ids)}
        return ids

    def describe_pass(self, count: int) -> None:
        """Write the description of the last pass."""
        folder = self.out / "passes" / f"{self.passes:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        replace(self.template, out=folder, images={"root": ROOT, "count": count, "paths_xxh3": ""}).write()

    def apply(self, files: dict[str, int], removed: list[str]) -> None:
        """Record files with their rows, and delete paths."""
        scanned = {path: ScannedFile(os.fsencode(path), 9, 9, 9) for path in files}
        with self.manifest.transaction():
            self.manifest.set_files((scanned[path], True, row_id) for path, row_id in files.items())
            self.manifest.remove_files(map(os.fsencode, removed))
            self.manifest.record_unused(1)
            self.manifest.version += 1
        self.files |= files
        for path in removed:
            del self.files[path]

    def join(self, passes: list[int]) -> None:
        """Move the rows that files need to a new pass, and forget the other rows of the passes."""
        needed = set(self.files.values())
        ids = [row_id for row_id, (number, _) in sorted(self.rows.items(), key=lambda item: item[1])
               if number in passes and row_id in needed]  # fmt: skip
        self.passes += 1
        self.describe_pass(len(ids))
        number = self.passes
        with self.manifest.transaction():
            self.manifest.replace_passes(passes, ids, number)
            self.manifest.version += 1
        self.rows = {row_id: place for row_id, place in self.rows.items() if place[0] not in passes}
        self.rows |= {row_id: (number, row) for row, row_id in enumerate(ids)}

    def publish(self) -> None:
        """Publish the manifest, and delete what is not needed."""
        self.published = publish(self.out, ROOT, self.manifest, self.published)
        remove_unneeded(self.out, self.manifest, self.published)

    def check(self) -> None:
        """The published version has exactly the rows of the model, in order."""
        dataset = DataSet.open(self.out)
        assert dataset.version is not None
        expected = sorted((*self.rows[row_id], os.fsencode(path)) for path, row_id in self.files.items())
        paths = [os.fsdecode(path) for _, _, path in expected]
        labels, classes, splits = labels_from_folders(paths)
        table = dataset.version_rows()
        assert list(table.paths) == paths
        assert [(number, row) for number, row, _ in expected] == list(
            zip(table.passes.tolist(), table.rows.tolist(), strict=True)
        )
        assert (list(table.splits), list(table.classes)) == (splits, classes)
        assert table.labels.tolist() == labels.tolist()
        assert list(table.paths[2:5]) == paths[2:5]
        assert [table.paths[i] for i in range(-2, 2) if paths] == [paths[i] for i in range(-2, 2) if paths]
        assert dataset.version.passes == tuple(sorted({number for number, _, _ in expected}))
        digest = xxhash.xxh3_128_hexdigest(b"\0".join(sorted(map(os.fsencode, paths))))
        assert (dataset.n_rows, dataset.images["paths_xxh3"]) == (len(paths), digest)
        names = {path.name for path in (self.out / "versions").iterdir()}
        assert names == {f"{dataset.version.number:06d}.h5"}
        assert json.loads((self.out / "dataset.json").read_text())["format_version"] == 1


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few texts are decoded at once."""
    monkeypatch.setattr(version_module, "_TEXTS_AT_ONCE", 5)


def step(model: Model, generator: np.random.Generator, folders: list[str]) -> None:
    """Change some files of the model at random."""
    count = int(generator.integers(0, 5))
    ids = model.add_pass(count) + [int(i) for i in generator.choice([*model.rows] or [0], 2) if i]
    used = [*model.files]
    names = [f"{folders[int(generator.integers(len(folders)))]}{int(generator.integers(12))}.png" for _ in ids]
    names += [used[int(generator.integers(len(used)))] for _ in range(2) if used]
    files = dict(zip(names, map(int, generator.choice(ids or [0], len(names))), strict=True)) if ids else {}
    removed = [path for path in used if path not in files and generator.random() < 0.1]
    model.apply(files, removed)
    needed = set(model.files.values())  # the manifest keeps the others, as images may come back
    if generator.random() < 0.2 and needed:
        passes = sorted({model.rows[row_id][0] for row_id in needed})
        model.join([int(number) for number in generator.choice(passes, min(2, len(passes)), replace=False)])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_a_version_has_the_rows_of_the_manifest_after_any_changes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, model = np.random.default_rng(seed), Model(tmp_path)
    folders = ["train/a/", "train/b/", "val/a/", "", "train/\udcff/"]
    model.apply({f"train/a/{i}.png": row_id for i, row_id in enumerate(model.add_pass(30))}, [])
    model.publish()
    for number in range(25):
        if number == 15:
            folders.append("other/")  # first folders are no longer splits
        assert model.published is not None
        held = model.published.version_rows()
        paths, splits = list(held.paths), list(held.splits)
        step(model, generator, folders)
        how = generator.random()
        with monkeypatch.context() as patches:
            if how < 0.15:  # killed between the table and dataset.json
                patches.setattr(DataSet, "write", killed)
                with pytest.raises(Killed):
                    model.publish()
            elif how < 0.3:  # killed while the table is written
                patches.setattr(publishing, "write_table", killed)
                with pytest.raises(Killed):
                    model.publish()
        if how < 0.2:
            step(model, generator, folders)
        if how < 0.5:  # the next process
            model.manifest.__exit__(None, None, None)
            model.manifest = Manifest(tmp_path)
            model.published = DataSet.open(tmp_path)
        model.publish()
        model.check()
        assert (list(held.paths), list(held.splits)) == (paths, splits)  # its files may be deleted now
    model.manifest.__exit__(None, None, None)


class Killed(BaseException):
    """Stands for the end of the process."""


def killed(*_: Any) -> Any:
    raise Killed


def of_changes(out: Path, seed: int = 0) -> Model:
    """A version with a table of changes."""
    model = Model(out)
    ids = model.add_pass(40)
    model.apply({f"train/a/{i:02d}.png": row_id for i, row_id in enumerate(ids)}, [])
    model.publish()
    model.apply({"train/b/new.png": ids[0], "train/a/03.png": ids[7], "val/\udcff/x.png": ids[7]}, ["train/a/39.png"])
    model.publish()
    write_as_changes(out, seed)
    model.published = DataSet.open(out)
    return model


@pytest.mark.parametrize("seed", range(5))
def test_changes_of_an_earlier_version_of_layertap_are_refused_and_written_whole_by_the_next_pass(
    tmp_path: Path, seed: int
) -> None:
    model = of_changes(tmp_path, seed)
    assert model.published is not None
    with pytest.raises(InputError, match=r"000002\.h5 is not a valid .* \d+ rows, expected") as caught:
        model.published.version_rows()
    assert "run `layertap sync`" in caught.value.hint
    model.manifest.__exit__(None, None, None)
    with contextlib.closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as sql, sql:  # as that version left it
        sql.execute("CREATE TABLE changes(path BLOB PRIMARY KEY, pass INTEGER, row INTEGER) WITHOUT ROWID")
        sql.execute("INSERT INTO changes VALUES (CAST('train/a/03.png' AS BLOB), 1, 3)")
    (tmp_path / "manifest.sqlite.xxh3").unlink()
    model.manifest = Manifest(tmp_path)
    assert not model.manifest.rebuilt_because
    model.publish()
    model.check()
    assert model.published is not None
    assert model.published.version is not None
    assert model.published.version.number == 3
    before = (tmp_path / "dataset.json").read_bytes()
    model.publish()
    assert (tmp_path / "dataset.json").read_bytes() == before


@pytest.mark.parametrize("how", ["missing", "cut", "changed", "folder"])
def test_a_table_that_is_missing_or_damaged_is_refused_and_written_again(tmp_path: Path, how: str) -> None:
    model = of_changes(tmp_path)
    model.publish()
    assert model.published is not None
    assert model.published.version is not None
    path = table_path(tmp_path, model.published.version.number)
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(content[:-9] if how == "cut" else content[:-9] + b"\xff" + content[-8:])
    with pytest.raises((InputError, FileNotFoundError), match=path.name):
        model.published.version_rows()
    if how == "folder":
        path.rmdir()
    model.publish()
    model.check()


def test_a_version_of_changes_is_refused_by_readers_of_format_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_changes(tmp_path)
    monkeypatch.setattr("extract.store.format.dataset.CHANGES_VERSION", 1)
    with pytest.raises(InputError, match="format_version 2"):
        DataSet.open(tmp_path)


# What does not grow with the table


def many(count: int) -> Iterator[tuple[ScannedFile, int]]:
    """Files and the row of each."""
    for i in range(count):
        yield ScannedFile(b"camera/%03d/%07d.png" % (i // 1000, i), 9, 9, 9), i


def filled(out: Path, count: int) -> Model:
    """A published version with many rows."""
    model = Model(out)
    model.passes = 1
    model.describe_pass(count)
    with model.manifest.transaction():
        ids = model.manifest.add_pass(1, (StoredRow(i.to_bytes(16), 9, 9, i, 1) for i in range(count)), 1)
        model.manifest.set_files((file, True, ids[row]) for file, row in many(count))
        model.manifest.record_unused(1)
        model.manifest.version = 1
    model.publish()
    return model


def pass_of_few_changes(model: Model, count: int) -> None:
    """Scan, compare and publish, with 20 deleted and 20 added files, copies of others, that are spread evenly."""
    apart = count // 20
    gone = set(range(0, count, apart))
    files = (file for file, row in many(count) if row not in gone)
    assert model.manifest.record_scan(files) == count - len(gone)
    folder_changes = difference(ROOT, model.manifest, Guards(settle_s=0, retry_after_s=1e9), 10**18, 10**18)
    assert len(folder_changes.gone) == len(gone)
    assert not folder_changes.resolved + folder_changes.todo
    copies = {f"camera/{i:03d}/copy.png": i * apart + 2 for i in range(20)}
    model.apply(copies, [])
    with model.manifest.transaction():
        model.manifest.remove_files(folder_changes.gone)
        model.manifest.record_unused(1)
    model.publish()
    assert model.published is not None
    assert model.published.n_rows == count - len(gone) + len(copies)


@pytest.mark.slow
def test_the_memory_of_a_pass_with_few_changes_does_not_grow_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "_ROWS_AT_ONCE", 500)
    peaks = []
    for count in (4_000, 16_000):
        (tmp_path / f"{count}").mkdir()
        model = filled(tmp_path / f"{count}", count)
        gc.collect()
        tracemalloc.start()
        pass_of_few_changes(model, count)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        model.manifest.__exit__(None, None, None)
    assert peaks[1] < peaks[0] + 200_000, peaks  # 12,000 rows as tuples take 2 MB


def test_a_manifest_that_could_not_be_read_once_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Manifest(tmp_path) as manifest, manifest.transaction():
        manifest.version = 7
    opened, calls = ManifestFile._open, []

    def failing_first(self: ManifestFile) -> None:
        calls.append(1)
        if len(calls) == 1:  # as SQLite reports some reads that failed
            raise sqlite3.DatabaseError("database disk image is malformed")
        opened(self)

    monkeypatch.setattr(ManifestFile, "_open", failing_first)
    with Manifest(tmp_path) as manifest:
        assert (manifest.version, manifest.rebuilt_because) == (7, "")
    assert not (tmp_path / "manifest.sqlite.damaged").exists()


def test_an_error_that_is_kept_does_not_keep_the_manifest_locked(tmp_path: Path) -> None:
    def files() -> Iterator[ScannedFile]:
        yield ScannedFile(b"a.png", 1, 1, 1)
        raise OSError("the disk was unmounted")

    with Manifest(tmp_path) as manifest:
        manifest.record_scan([ScannedFile(b"%c.png" % letter, 1, 1, 1) for letter in b"abcdef"])
        manifest._sql.execute("INSERT INTO files SELECT path, 1, 1, 1, 1, 1, zeroblob(16) FROM found")
    with pytest.raises(OSError, match="unmounted") as kept, Manifest(tmp_path) as manifest:
        manifest.record_scan(files())
    with Manifest(tmp_path) as manifest:  # as the next pass of a process that follows a folder
        assert manifest.record_scan([]) == 0
    assert kept.value.__traceback__ is not None
