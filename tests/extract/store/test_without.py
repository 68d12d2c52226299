"""A reader without the rows that a table names."""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError
from tests.extract.store.rows import PATHS, ROWS, VALUES, complete_data_set
from tests.pipelines.test_cli import fails, layertap

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


def test_a_table_of_all_rows_leaves_none(out: Path) -> None:
    with FeatureReader(out) as reader, pytest.raises(InputError, match="the table names all images; none is left"):
        reader.without(reader.paths)


def test_it_checks_the_hashes_of_its_rows_if_the_whole_reader_does(out: Path) -> None:
    with h5py.File(out / "shards/000000.h5", "r+") as file:
        file["features/vector"][5, 0] += 1
    with FeatureReader(out, check=True) as reader, pytest.raises(InputError, match=r"row 4 .* is damaged"):
        reader.without([PATHS[0]])["vector"][:]
