"""What a pass does about a manifest with wrong content: no row of another image, no version that cannot be read."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash

from extract import FeatureReader, InputError, LayertapError
from extract.store.verify import verify
from extract.sync import publishing
from extract.sync.compaction import compact
from extract.sync.passes import Report
from tests.extract.sync.tiny import one_pass, picture, planner, same_as_fresh

HOUR = 3600 * 10**9
BITS = int(os.environ.get("LAYERTAP_FUZZ", "30"))


class Followed:
    """A folder of pictures, and a data set that follows it."""

    def __init__(self, path: Path, count: int):
        self.root, self.out, self.whole = path / "root", path / "out", path / "whole"
        self.manifest = self.out / "manifest.sqlite"
        self.plan_for = planner(layers=["fc"], shard_rows=100_000, batch_size=64)
        for i in range(count):
            self.write(f"{'ab'[i % 2]}/{i:05d}.ppm", i)
        self.sync()
        shutil.copytree(self.out, self.whole)

    def write(self, name: str, seed: int) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed))

    def sync(self, **settings: Any) -> Report:
        # An hour later: a file that has just been written is examined again, which would hide the damage.
        return one_pass(self.root, self.out, self.plan_for, now_ns=lambda: time.time_ns() + HOUR, **settings)

    def restore(self, *, closed: bool) -> None:
        """Restore the data set; with `closed=False`, as if the last pass had been killed."""
        shutil.rmtree(self.out)
        shutil.copytree(self.whole, self.out)
        if not closed:
            self.manifest.with_name("manifest.sqlite.xxh3").unlink()

    def execute(self, *statements: str) -> None:
        """Change the manifest, as a killed process may have left it."""
        sql = sqlite3.connect(self.manifest)
        for statement in statements:
            sql.execute(statement)
        sql.commit()
        sql.close()
        self.manifest.with_name("manifest.sqlite.xxh3").unlink(missing_ok=True)

    def features(self) -> dict[str, bytes]:
        with FeatureReader(self.out, check=True) as reader:
            return dict(zip(reader.paths, (row.tobytes() for row in reader["fc"][:]), strict=True))


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path, 60)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("count", "bits", "closed"),
    [
        (60, BITS // 3, True),
        (60, BITS, False),
        pytest.param(20_000, BITS // 30, True, marks=pytest.mark.slow),
        pytest.param(20_000, BITS // 6, False, marks=pytest.mark.slow),
    ],
)
def test_no_flipped_bit_gives_a_wrong_row_or_a_version_that_cannot_be_read(
    tmp_path: Path, count: int, bits: int, closed: bool
) -> None:
    followed = Followed(tmp_path, count)
    followed.write("b/new.ppm", count)
    followed.sync()
    right = followed.features()
    assert len(right) == count + 1
    size, chosen, rebuilt = (followed.whole / "manifest.sqlite").stat().st_size, random.Random(bits + count), 0
    for _ in range(bits):
        bit = chosen.randrange(8 * size)
        followed.restore(closed=closed)
        flip(followed.manifest, bit)
        report = followed.sync()
        rebuilt += any("was rebuilt" in note for note in report.notes)
        assert followed.features() == right, bit
        assert not verify(followed.out).faults, bit
        again = followed.sync()
        assert (again.notes, again.computed, again.unchanged) == ([], 0, count + 1), bit
    assert rebuilt == bits or not closed  # not all bits of a file matter, but each of them changes its hash


@pytest.mark.parametrize(
    "statements",
    [
        [
            "UPDATE files SET feature = 100 WHERE feature = 3",
            "UPDATE files SET feature = 3 WHERE feature = 4",
            "UPDATE files SET feature = 4 WHERE feature = 100",
        ],
        [
            "UPDATE features SET row = 100 WHERE id = 3",
            "UPDATE features SET row = 2 WHERE id = 4",
            "UPDATE features SET row = 3 WHERE id = 3",
        ],
        ["UPDATE features SET row = 70 WHERE id = 3"],
        ["UPDATE files SET hash = zeroblob(16) WHERE feature = 3"],
    ],
    ids=["features of two files", "rows of two features", "row that does not exist", "hash of a file"],
)
def test_rows_of_other_images_are_not_published(followed: Followed, statements: list[str]) -> None:
    right = followed.features()
    followed.execute(*statements)  # with the indexes: SQLite finds no fault
    followed.write("a/new.ppm", 60)
    assert "was rebuilt" in followed.sync().notes[0]
    assert {path: row for path, row in followed.features().items() if path != "a/new.ppm"} == right
    assert not verify(followed.out).faults
    same_as_fresh(followed.root, followed.out)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE files SET size = 'x' WHERE feature = 9",
        "UPDATE files SET path = 5 WHERE feature = 9",
        "UPDATE features SET tried_ns = x'00' WHERE id = 9",
        "UPDATE features SET hash = x'00' WHERE id = 9",
        "INSERT INTO planned VALUES (0, 1, 1, 1, 1, 1)",
        "UPDATE meta SET value = x'ff' WHERE name = 'configuration'",
        "UPDATE meta SET value = CAST(x'ff' AS TEXT) WHERE name = 'versions'",
        "UPDATE meta SET value = -1 WHERE name = 'version'",
        "UPDATE meta SET value = 999999 WHERE name = 'passes'",
        "UPDATE meta SET name = 5 WHERE name = 'version'",
        "DROP TABLE files",
        "ALTER TABLE files RENAME COLUMN hash TO other",
    ],
)
def test_values_of_other_types_are_noticed(followed: Followed, statement: str) -> None:
    right = followed.features()
    followed.execute(statement)
    followed.write("a/new.ppm", 60)
    if "meta" not in statement:
        assert "was rebuilt" in followed.sync(dry_run=True).notes[0]
    assert "was rebuilt" in followed.sync().notes[0]
    assert {path: row for path, row in followed.features().items() if path != "a/new.ppm"} == right
    assert followed.sync().notes == []


def test_a_started_pass_that_is_a_finished_one_is_not_deleted(followed: Followed) -> None:
    right = followed.features()
    followed.execute(
        "INSERT INTO planned SELECT 0, path, size, mtime_ns, ctime_ns, settled FROM files LIMIT 1",
        "INSERT OR REPLACE INTO meta VALUES ('planned_pass', 1)",
    )
    report = followed.sync()
    assert "its started pass is 1, which is finished" in report.notes[0]
    assert (report.computed, followed.features()) == (0, right)


def not_in_order(columns: Any) -> None:
    columns["row"][0] = 9


def without_splits(columns: Any) -> None:
    del columns["split"]


@pytest.mark.parametrize("damage", [not_in_order, without_splits])
def test_a_published_version_that_cannot_be_read_is_written_again(
    followed: Followed, damage: Callable[[Any], None]
) -> None:
    right, path = followed.features(), followed.out / "versions/000001.h5"
    content = json.loads((followed.out / "dataset.json").read_text())
    with h5py.File(path, "r+") as file:
        damage(file)
    content["version"]["rows_xxh3"] = xxhash.xxh3_128_hexdigest(path.read_bytes())  # as a pass would have published it
    (followed.out / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="not a valid version table|is damaged"):
        followed.features()
    assert followed.sync().version == 2
    assert followed.features() == right


def test_verify_finds_a_row_with_the_features_of_another_image(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.execute(
        "UPDATE files SET feature = 3 WHERE feature = 4", "UPDATE meta SET value = 5 WHERE name = 'version'"
    )
    monkeypatch.setattr(publishing, "_hash_check", lambda out: lambda *_: None)
    followed.sync()
    (fault,) = verify(followed.out).faults
    assert fault.path == "a/00006.ppm"
    assert (fault.file, fault.row) == ("passes/000001/shards/000000.h5", 2)
    assert "features of another image" in fault.what
    monkeypatch.undo()
    followed.manifest.unlink()  # as the message says
    followed.sync()
    assert not verify(followed.out).faults
    same_as_fresh(followed.root, followed.out)


def test_a_table_has_the_hash_of_each_image(followed: Followed) -> None:
    with h5py.File(followed.out / "versions/000001.h5") as file:
        for path, content in zip(file["path"][:], file["source_hash"][:], strict=True):
            image = (followed.root / os.fsdecode(path)).read_bytes()
            assert content.tobytes() == xxhash.xxh3_128_digest(image)


def test_a_manifest_of_format_1_is_rebuilt(followed: Followed) -> None:
    right = followed.features()
    followed.execute(
        "CREATE TABLE other(path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, "
        "ctime_ns INTEGER NOT NULL, settled INTEGER NOT NULL, feature INTEGER NOT NULL) WITHOUT ROWID",
        "INSERT INTO other SELECT path, size, mtime_ns, ctime_ns, settled, feature FROM files",
        "DROP TABLE files",
        "ALTER TABLE other RENAME TO files",
        "CREATE INDEX files_by_feature ON files(feature)",
        "UPDATE meta SET value = 1 WHERE name = 'format'",
    )
    followed.write("a/new.ppm", 60)
    report = followed.sync()
    assert report.notes == ["manifest.sqlite was rebuilt: it has format 1, expected 2"]
    assert (report.computed, report.unchanged) == (1, 60)
    features = followed.features()
    assert {path: features[path] for path in right} == right
    same_as_fresh(followed.root, followed.out)


def test_a_data_set_without_hashes_in_its_table_is_read_verified_and_followed(followed: Followed) -> None:
    right, path = followed.features(), followed.out / "versions/000001.h5"
    with h5py.File(path, "r+") as file:
        del file["source_hash"]
    content = json.loads((followed.out / "dataset.json").read_text())
    content["version"]["rows_xxh3"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    (followed.out / "dataset.json").write_text(json.dumps(content))
    assert not verify(followed.out).faults
    assert followed.features() == right
    followed.manifest.unlink()
    assert followed.sync().computed == 0
    followed.write("a/new.ppm", 60)
    followed.sync()
    same_as_fresh(followed.root, followed.out)


def test_compact_names_a_damaged_manifest(followed: Followed) -> None:
    flip(followed.manifest, 8 * 5000)
    with pytest.raises(LayertapError, match=r"manifest\.sqlite") as error:
        compact(followed.out, 0.0)
    assert "layertap sync" in (error.value.hint or "")
    followed.sync()
    np.testing.assert_equal(verify(followed.out).faults, [])
