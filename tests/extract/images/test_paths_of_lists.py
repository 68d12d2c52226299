"""Paths in lists: several spellings of a path are one image; what names another file stays another file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from pyarrow import parquet

from extract import FeatureReader, extract_features
from extract.errors import InputError
from extract.images import list_images, listed_again
from extract.images.csv_lists import plain_path
from extract.images.plan_writing import write_plan
from tests.extract.images.making import TINY


def write_list(folder: Path, paths: list[str], name: str = "list.csv") -> Path:
    (folder / name).write_text("path\n" + "\n".join(f'"{path}"' for path in paths) + "\n")
    return folder / name


@pytest.mark.parametrize("other", ["./ant/00.png", "ant//00.png", "ant/./00.png", ".//ant///./00.png"])
@pytest.mark.parametrize("read", [list_images, lambda where: write_plan(where, where.parent.parent / "plan")])
def test_two_spellings_of_a_path_are_the_same_image(folder: Path, other: str, read: object) -> None:
    where = write_list(folder, ["bee/01.jpg", other, "cat/02.png", "ant/00.png"])
    message = r"(ant/00\.png is already in .*line 3|ant/00\.png is listed twice); expected each path only once"
    with pytest.raises(InputError, match=message):
        read(where)  # type: ignore[operator]


@pytest.mark.parametrize("distinct", [1, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_small_parquet_file_of_equal_paths_takes_little_memory(tmp_path: Path, distinct: int) -> None:
    """1,000,000 paths of 2,000 characters, of which Parquet stores only the different ones; measured by the kernel."""
    texts = pa.array([f"{i:05d}/" + "y" * 2000 for i in range(distinct)])
    numbers = pa.array(np.arange(1_000_000, dtype=np.int32) % distinct)
    table = pa.table({"path": pa.DictionaryArray.from_arrays(numbers, texts)})
    parquet.write_table(table, tmp_path / "list.parquet", compression="zstd")
    assert (tmp_path / "list.parquet").stat().st_size < 3 << 20
    code = f"""
import resource
import pyarrow.parquet
from extract.images import csv_lists
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    csv_lists.list_table({str(tmp_path / "list.parquet")!r})
except csv_lists.InputError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, megabytes = ended.stdout.splitlines()
    assert f"row {distinct}: 00000/yyy" in message
    assert "is already in" in message
    assert "list.parquet: row 0; expected each path only once" in message
    assert int(megabytes) < 400


def test_a_list_of_find_gives_the_rows_of_the_folder(folder: Path, tmp_path: Path) -> None:
    local = list_images(folder)
    for number, prefix in enumerate((".//", "./././")):
        listed = list_images(write_list(folder, [prefix + path for path in reversed(local.paths)], f"{number}.csv"))
        assert (listed.paths, listed.paths_xxh3) == (local.paths, local.paths_xxh3)
        assert [listed.source.read(row) for row in range(12)] == [local.source.read(row) for row in range(12)]
    absolute = list_images(write_list(tmp_path, [f"/{folder}//{path}" for path in local.paths]))
    assert absolute.paths == [f"{folder}/{path}" for path in local.paths]


def test_a_folder_above_a_link_is_not_taken_for_the_folder_before_it(folder: Path, tmp_path: Path) -> None:
    """`link/../a.png` is beside the target of the link, and another file than `a.png`."""
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    (tmp_path / "elsewhere" / "a.png").write_bytes((folder / "bee" / "01.jpg").read_bytes())
    (folder / "a.png").write_bytes((folder / "ant" / "00.png").read_bytes())
    (folder / "link").symlink_to(tmp_path / "elsewhere" / "inside")
    listed = list_images(write_list(folder, ["link/../a.png", "a.png"]))
    assert listed.paths == ["a.png", "link/../a.png"]
    read = [listed.source.read(row)[0] for row in (0, 1)]
    assert read == [(folder / "ant" / "00.png").read_bytes(), (folder / "bee" / "01.jpg").read_bytes()]


@pytest.mark.parametrize(
    ("path", "where", "plain"),
    [
        ("a/../b.jpg", "https://host/x/list.csv", "b.jpg"),
        ("../b.jpg", "https://host/x/list.csv", "../b.jpg"),
        ("./../../b.jpg", "https://host/x/list.csv", "../../b.jpg"),
        ("./b.jpg", "s3://bucket/list.csv", "./b.jpg"),  # another key than b.jpg
        ("a//b.jpg", "s3://bucket/list.csv", "a//b.jpg"),
        ("https://host//a/./b.jpg", "/x/list.csv", "https://host//a/./b.jpg"),
        ("./a.jpg/", "/x/list.csv", "a.jpg/"),
        ("//x//a.jpg", "/x/list.csv", "/x/a.jpg"),
    ],
)
def test_only_what_names_the_same_file_is_made_plain(path: str, where: str, plain: str) -> None:
    assert plain_path(path, where) == plain


@hypothesis.given(st.lists(st.sampled_from(["", ".", "..", "a", "b.jpg", ".c", "d."]), min_size=1, max_size=6))
def test_a_plain_path_is_that_of_normpath_without_its_folders_above(parts: list[str]) -> None:
    path = "/".join(parts)
    kept = [part if part != ".." else "\0" for part in parts]  # not resolved, so hidden from normpath
    if parts[-1] in ("", ".", "..") or path.startswith("//"):
        return  # no file has such a name
    expected = os.path.normpath("/".join(kept)).replace("\0", "..")
    assert plain_path(path) == expected
    assert plain_path(plain_path(path)) == plain_path(path)


def test_a_data_set_with_paths_as_they_stood_in_the_list_is_not_resumed(folder: Path, tmp_path: Path) -> None:
    where = write_list(folder, ["./ant/00.png", "bee//01.jpg"])
    settings = TINY | {"out": tmp_path / "out"}
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr("extract.images.csv_lists.plain_path", lambda path, where="": path)
        with extract_features(where, **settings) as reader:
            assert reader.paths[:] == ["./ant/00.png", "bee//01.jpg"]
    with pytest.raises(InputError, match="names of the images"):
        extract_features(where, **settings)
    with FeatureReader(tmp_path / "out") as reader:
        assert np.isfinite(reader["embedding"][:]).all()
        with pytest.raises(InputError, match="no longer lists ./ant/00.png"):
            listed_again(str(where), reader.paths[:])
