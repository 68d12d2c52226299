"""A data set may come from anyone: links in it never carry a change to a file elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from extract import FeatureReader, InputError
from extract.system.atomic_files import atomic_write, locked, open_own
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds
from tests.pipelines.test_sync import SMALL as SYNC
from tests.pipelines.test_sync import write

ROOT = Path(__file__).parents[2]
PRECIOUS = b"somebody's only copy\n"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "precious"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def out(out: Path) -> Path:
    """Twelve pictures in three shards, the last of which is to be computed again."""
    for path in (out / "shards").glob("000002.*"):
        path.unlink()
    return out


def symbolic(name: Path, target: Path) -> None:
    name.unlink(missing_ok=True)
    name.symlink_to(target)


def hard(name: Path, target: Path) -> None:
    name.unlink(missing_ok=True)
    os.link(target, name)


@pytest.mark.parametrize("name", [".lock", "runs.jsonl", "shards/000002.h5.part"])
@pytest.mark.parametrize("link", [symbolic, hard])
def test_embed_changes_no_file_through_a_link(
    out: Path, folder: Path, precious: Path, link: Callable[[Path, Path], None], name: str
) -> None:
    link(out / name, precious)
    result = layertap("embed", folder, "-o", out, *SMALL)
    assert precious.read_bytes() == PRECIOUS
    if link is symbolic:
        assert result.exit_code == 2
        assert str(out / name) in result.stderr
        assert "nothing was written" in result.stderr
        assert sorted(path.name for path in (out / "shards").glob("*.h5")) == ["000000.h5", "000001.h5"]
    if link is symbolic or name.endswith(".part"):  # what is in it is no shard
        assert result.exit_code != 0
        (out / name).unlink()  # as the message says
        result = layertap("embed", folder, "-o", out, *SMALL)
    assert result.exit_code == 0
    succeeds("verify", out)
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize("link", [symbolic, hard])
def test_repair_changes_no_file_through_the_lock_or_a_receipt(
    out: Path, precious: Path, link: Callable[[Path, Path], None]
) -> None:
    receipt = out / "shards" / "000000.json"
    link(receipt, precious)
    layertap("verify", out, "--repair")
    assert precious.read_bytes() == PRECIOUS
    assert not receipt.is_symlink()
    assert json.loads(receipt.read_text())["n_rows"] == 5
    receipt.unlink()  # a fault that can be repaired
    link(out / ".lock", precious)
    assert (str(out / ".lock") in layertap("verify", out, "--repair").stderr) == (link is symbolic)
    assert precious.read_bytes() == PRECIOUS


def test_a_backup_of_hard_links_stays_as_it_is_and_both_go_on(out: Path, folder: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(out, backup, copy_function=os.link)  # as `cp -al` does
    before = {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()}
    succeeds("embed", folder, "-o", out, *SMALL)
    assert {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()} == before
    succeeds("embed", folder, "-o", backup, *SMALL)
    for one in (out, backup):
        succeeds("verify", one)


def test_a_lock_with_two_names_is_a_lock(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").write_bytes(PRECIOUS)
    hard(tmp_path / "out" / ".lock", tmp_path / "elsewhere")
    code = (
        "import sys; from pathlib import Path; from extract.system.atomic_files import locked\n"
        "with locked(Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with locked(tmp_path / "out"):
        assert "LockedError" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stderr
    assert (tmp_path / "elsewhere").read_bytes() == PRECIOUS


@pytest.fixture(scope="module")
def synced_once(_twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("synced")
    config = write(place / "sync.yaml", images=str(_twelve), out=str(place / "out"), **SYNC)
    succeeds("sync", config)
    return place / "out"


@pytest.fixture
def synced(synced_once: Path, _twelve: Path, tmp_path: Path) -> list[object]:
    """The command that updates the data set `synced`, of whose pictures one has been renamed since."""
    shutil.copytree(synced_once, tmp_path / "synced")
    pictures = shutil.copytree(_twelve, tmp_path / "synced pictures")
    (pictures / "ant" / "00.png").rename(pictures / "bee" / "moved.png")
    values = {"images": str(pictures), "out": str(tmp_path / "synced"), "max_vanish": 1}
    return ["sync", write(tmp_path / "sync.yaml", **values, **SYNC), "--force"]  # the pictures are elsewhere


def test_a_dry_run_of_sync_writes_nothing(synced: list[object], tmp_path: Path) -> None:
    def files() -> dict[Path, tuple[bytes, int]]:
        below = (path for path in (tmp_path / "synced").rglob("*") if path.is_file())
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in below}

    before = files()
    assert "1 renamed" in layertap(*synced, "--dry-run").stdout
    assert files() == before


def test_a_folder_that_is_a_link_is_not_written_into(out: Path, folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(out / "shards", elsewhere)
    (out / "shards").symlink_to(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    for arguments in (["embed", folder, "-o", out, *SMALL], ["verify", out, "--repair"],
                      ["embed", folder, "-o", out, *SMALL, "--engine", "processes", "--shard-rows", 5]):  # fmt: skip
        assert f"{out / 'shards'} is a link to {elsewhere}" in fails(*arguments)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    with FeatureReader(out, partial=True) as reader:  # reading is harmless
        assert (reader.status[:10] == 1).all()


def test_the_data_set_itself_may_be_a_link(out: Path, folder: Path, tmp_path: Path) -> None:
    shutil.move(out, tmp_path / "large disk")
    out.symlink_to(tmp_path / "large disk")
    succeeds("embed", folder, "-o", out, *SMALL)
    succeeds("verify", out)
    assert out.is_symlink()


@pytest.mark.parametrize("name", ["versions/000001.h5", "runs.jsonl", ".lock"])
def test_sync_changes_no_file_through_a_link(synced: list[object], tmp_path: Path, precious: Path, name: str) -> None:
    symbolic(tmp_path / "synced" / name, precious)
    for options in (["--dry-run"], []):
        result = layertap(*synced, *options)
        assert precious.read_bytes() == PRECIOUS
        if name.startswith("versions"):  # it is written again, elsewhere
            assert result.exit_code == 0
        elif name != "runs.jsonl" or not options:
            assert result.exit_code == 2
            assert f"{tmp_path / 'synced' / name} is a link to" in result.output


def test_sync_writes_no_version_into_a_linked_folder(synced: list[object], tmp_path: Path) -> None:
    out = tmp_path / "synced"
    for place in (out / "versions", out / "passes", out / "passes" / "000001" / "shards"):
        elsewhere = tmp_path / f"elsewhere-{place.name}"
        shutil.move(place, elsewhere)
        place.symlink_to(elsewhere)
        before = sorted(path.name for path in elsewhere.iterdir())
        assert f"{place} is a link to" in layertap(*synced).output
        assert sorted(path.name for path in elsewhere.iterdir()) == before
        place.unlink()
        shutil.move(elsewhere, place)


def test_reports_and_results_of_probes_do_not_go_through_a_link(twelve_embedded: Path, tmp_path: Path) -> None:
    out, kept = shutil.copytree(twelve_embedded, tmp_path / "whole"), tmp_path / "kept.html"
    report = ["report", out, "--thumbnails", 0, "--map", "pca"]
    succeeds(*report, "-o", kept)
    before = kept.read_bytes()
    (out / "report.html").symlink_to(kept)
    succeeds(*report, "--seed", 1)
    assert kept.read_bytes() == before
    assert not (out / "report.html").is_symlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = out / "probe"
    link.symlink_to(elsewhere)
    assert f"{link} is a link to" in fails("probe", out, "--protocol", "knn")
    link.unlink()
    link.mkdir()
    (link / "knn").symlink_to(elsewhere)
    assert f"{link / 'knn'} is a link to" in fails("probe", out, "--protocol", "knn")
    assert not any(elsewhere.iterdir())


def test_a_name_that_a_temporary_file_would_have_is_not_followed(tmp_path: Path, precious: Path) -> None:
    path = tmp_path / "dataset.json"
    symbolic(tmp_path / f"dataset.json.{os.getpid()}.new", precious)
    with atomic_write(path) as file:
        file.write(b"{}")
    assert path.read_bytes() == b"{}"
    assert precious.read_bytes() == PRECIOUS


def test_a_pipe_in_place_of_the_lock_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(InputError, match="is not a regular file"), locked(tmp_path):
        pass


def test_a_link_that_takes_the_place_of_a_file_at_the_last_moment_is_refused(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbolic(tmp_path / "runs.jsonl", precious)
    monkeypatch.setattr("extract.system.atomic_files.check_regular", lambda path: None)
    monkeypatch.setattr("extract.system.atomic_files.make_own", lambda path: None)
    with pytest.raises(OSError, match="symbolic links"):
        open_own(tmp_path / "runs.jsonl", os.O_RDWR)
