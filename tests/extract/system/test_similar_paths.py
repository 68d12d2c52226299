"""The path that a message suggests in place of one that does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from extract.system.similar_paths import did_you_mean, folders_with


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("photos/ant", "photos/bee", "notes", ".photo", "Images"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "list.csv").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("phtos", "photos"),
        ("photos/atn", "photos/ant"),
        ("phtos/ant", "photos/ant"),
        ("images", "Images"),
        ("lst.csv", "list.csv"),
        ("./phtos", "photos"),
        ("../nowhere-at-all/x", ""),
        ("phtos/ant/deeper", ""),  # photos/ant/deeper does not exist either
        ("zebra", ""),
        (".phto", "photos"),  # never a hidden name
        ("photos", ""),  # exists
        ("a\0b", ""),
        ("", ""),
    ],
)
def test_a_similar_path_that_exists_is_suggested(place: Path, given: str, suggested: str) -> None:
    assert did_you_mean(given) == (f"did you mean {suggested}?" if suggested else "")


def test_a_path_is_suggested_as_it_was_given_relative_or_absolute(place: Path) -> None:
    assert did_you_mean(place / "phtos") == f"did you mean {place / 'photos'}?"
    assert (place / "photos").is_dir()


def test_a_folder_that_cannot_be_read_gives_no_suggestion(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", refused)
    assert did_you_mean("phtos") == ""


def test_folders_with_a_file_are_named_up_to_three(tmp_path: Path) -> None:
    assert folders_with(tmp_path, "x.json") == folders_with(tmp_path / "none", "x.json") == ""
    for name in "dbca":
        (tmp_path / name).mkdir()
    assert folders_with(tmp_path, "x.json") == ""
    for name in "cab":
        (tmp_path / name / "x.json").touch()
    assert folders_with(tmp_path, "x.json") == "name one of its folders: " + ", ".join(str(tmp_path / n) for n in "abc")
    (tmp_path / "d" / "x.json").touch()
    assert folders_with(tmp_path, "x.json").endswith(f"{tmp_path / 'c'}, ...")
