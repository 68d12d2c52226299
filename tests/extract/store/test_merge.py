from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError, Status
from extract.store.export import FORMATS, export
from extract.store.format.dataset import DataSet
from extract.store.merge import merge
from extract.store.verify import repair, verify
from tests.extract.store.processes import kill_itself, killed
from tests.extract.store.rows import PATHS, ROWS, VALUES, change, change_a_value, complete_data_set


def made(out: Path, root: str, failed: tuple[int, ...] = ()) -> Path:
    images = {"root": root, "count": ROWS, "paths_xxh3": "0" * 32}
    return complete_data_set(out, failed=failed, images=images).out


@pytest.fixture(scope="module")
def _sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    made(folder / "zoo", "/photos/zoo")
    made(folder / "ark", "/photos/ark", (5,))
    return folder


@pytest.fixture
def sources(_sources: Path, tmp_path: Path) -> list[Path]:
    """Two data sets of the same pictures below two folders; row 5 of the second has failed."""
    return [shutil.copytree(_sources / name, tmp_path / name) for name in ("zoo", "ark")]


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_two_data_sets_become_one_sorted_by_path(sources: list[Path], tmp_path: Path, compress: str | None) -> None:
    counted: list[int] = []
    merge(sources, tmp_path / "all", shard_rows=17, compress=compress, on_rows=lambda rows, _: counted.append(rows))
    assert sum(counted) == 2 * ROWS
    assert verify(tmp_path / "all").faults == []
    rows = sorted(
        (os.fsencode(f"{name}/{path}"), row, name) for name in ("zoo", "ark") for row, path in enumerate(PATHS)
    )
    with FeatureReader(tmp_path / "all") as reader:
        assert [os.fsencode(path) for path in reader.paths] == [path for path, _, _ in rows]
        good = [i for i, (_, row, name) in enumerate(rows) if (row, name) != (5, "ark")]
        order = [row for _, row, _ in rows]
        assert np.array_equal(reader["map:none"][good], VALUES["map:none"][order][good])
        assert np.array_equal(reader["vector"][good], VALUES["vector"][order][good])
        assert reader.labels.tolist() == [row % 3 for row in order]
        assert reader.column("source_size")[good].tolist() == np.array(order)[good].tolist()
        assert [(path, status, why) for _, path, status, why in reader.failures] == [
            (f"ark/{PATHS[5]}", "decode error", "row 5 failed")
        ]
        assert len(reader.provenance["merged_from"]) == 2
    content = DataSet.open(tmp_path / "all")
    assert content.images["root"] == "/photos"
    assert content.fingerprint == DataSet.open(sources[0]).fingerprint
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "all" / "shards").iterdir())]
    merge(sources, tmp_path / "all")  # again: nothing to do, and cut as it is
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "all" / "shards").iterdir())] == before


def test_a_merge_that_was_killed_goes_on_and_a_damaged_one_is_repaired_by_merging_again(
    sources: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "all"
    # Three shards of 17, 17 and 12 rows: it dies when the last one is written and not yet published.
    killed(lambda: merge(sources, out, shard_rows=17, on_rows=lambda rows, stored: rows == 12 and kill_itself()))
    assert [path.name for path in sorted((out / "shards").glob("*.h5*"))] == [
        "000000.h5", "000001.h5", "000002.h5.part"
    ]  # fmt: skip
    merge(sources, out, shard_rows=17)
    assert verify(out).faults == []
    change_a_value(out, 1, "vector", 3)
    assert repair(verify(out)) == 1
    merge(sources, out)
    assert verify(out).faults == []
    assert (out / "shards" / "000001-r1.h5").exists()


def test_what_cannot_be_merged_is_refused(sources: list[Path], tmp_path: Path) -> None:
    other, (a, b) = complete_data_set(tmp_path / "other", depends_on={"weights": "v"}).out, sources
    same = [complete_data_set(tmp_path / name).out for name in ("one", "two")]
    calls: list[tuple[list[Path], Path, int | None, str]] = [
        ([a, other], tmp_path / "all", None,
         "have different fingerprints.*`layertap show .*zoo .*other` compares them"),
        (same, tmp_path / "all", None, r"class 0/ü0.jpg \(below /photos\) is in .*one and in .*two"),
        (sources, a, None, "zoo is one of the data sets to merge"),
        (sources, a / "sub", None, "or inside one"),
        (sources, tmp_path / "all", 0, "shard_rows is 0; it must be at least 1"),
        (sources, tmp_path / "all", -5, "shard_rows is -5; it must be at least 1"),
    ]  # fmt: skip
    for given, out, shard_rows, message in calls:
        with pytest.raises(InputError, match=message):
            merge(given, out, shard_rows=shard_rows)
    (b / "shards" / "000001.h5").unlink()
    with pytest.raises(LayertapError, match="000001.h5 is missing"):
        merge(sources, tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_classes_are_united(sources: list[Path], tmp_path: Path) -> None:
    for shard in (sources[0] / "shards").glob("*.h5"):
        change(shard, lambda file: file["classes"].__setitem__(2, b"animals"))
    merge(sources, tmp_path / "all")
    with FeatureReader(tmp_path / "all") as reader:
        assert reader.classes == ["animals", "class 0", "class 1", "class 2"]
        named = dict(zip(reader.paths, (reader.classes[label] for label in reader.labels), strict=True))
        assert (reader.status == Status.OK).sum() == 2 * ROWS - 1
    assert named[f"zoo/{PATHS[2]}"] == "animals"
    assert named[f"ark/{PATHS[2]}"] == "class 2"


def test_damage_of_a_source_is_not_laundered(sources: list[Path], tmp_path: Path) -> None:
    change_a_value(sources[0], 1, "vector", 3)
    with pytest.raises(InputError, match=r"row 13 \(class 1/ü13.jpg\) of .* is damaged: it does not match"):
        merge(sources, tmp_path / "all")
    with FeatureReader(sources[0]) as reader:
        for to in FORMATS:
            with pytest.raises(InputError, match="row 13 .*does not match its hashes"):
                export(reader, tmp_path / "exported", to, ["map:none"])
    assert not (tmp_path / "exported").exists()


def test_other_sources_do_not_go_into_the_same_folder(sources: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all"
    merge(sources, out)
    # The same names of images, below another root.
    others = [made(tmp_path / f"other {name}", f"/other/{name}") for name in ("zoo", "ark")]
    with pytest.raises(InputError, match="holds other features; .*\n  images.merged_from: "):
        merge(others, out)
    # The same sources, of which one was made anew by now: its fifth row has not failed any more.
    mended = made(tmp_path / "mended", "/photos/ark")
    with pytest.raises(InputError, match="the stored row of ark/class 2/ü5.jpg differs from the data sets to merge"):
        merge([sources[0], mended], out)
