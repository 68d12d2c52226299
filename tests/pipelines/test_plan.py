"""`layertap embed --plan`, and the jobs that are given a plan in place of images."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from extract.images import list_images
from extract.images.listing import is_plan
from pipelines.terminal.config import name_of
from tests.conftest import make_picture
from tests.extract.images.making import touch
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds


@pytest.fixture
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `pictures`, and a plan of them where it goes by default."""
    monkeypatch.chdir(tmp_path)
    (folder / "notes.txt").write_text("x")
    succeeds("plan", "pictures")
    return tmp_path


def test_it_tells_what_it_listed(here: Path) -> None:
    shutil.rmtree("outputs")
    result = layertap("plan", "pictures")
    assert f"outputs/pictures-plan: 12 images in {here / 'pictures'}, 3 classes" in result.stdout
    assert "1 other files left out (.txt 1)" in result.stdout
    assert "images/s" in result.stdout
    assert "layertap embed outputs/pictures-plan" in result.stdout
    assert name_of("outputs/pictures-plan") == "pictures"  # the data set of the plan has the name of that of the folder
    assert "outputs/pictures-plan is already complete; nothing was listed" in succeeds("plan", "pictures").stdout


def test_json_is_all_that_is_on_stdout(here: Path) -> None:
    content = json.loads(layertap("plan", "pictures", "-o", "new", "--json").stdout)
    size = sum(path.stat().st_size for path in (here / "new").rglob("*") if path.is_file())
    seconds = content.pop("seconds")
    assert 0 < seconds < 60
    assert content == {
        "out": "new", "root": str(here / "pictures"), "images": 12, "classes": ["ant", "bee", "cat"], "splits": [],
        "left_out": {".txt": 1}, "paths_xxh3": list_images(here / "pictures").paths_xxh3, "found_done": False,
        "listed": 12, "bytes": size,
    }  # fmt: skip
    assert json.loads(layertap("plan", "pictures", "-o", "new", "--json").stdout)["found_done"] is True


def test_what_is_no_plan_or_not_for_one_is_refused(here: Path) -> None:
    assert "outputs/pictures-plan is not empty and not a layertap data set" in fails(
        "embed", "pictures", "-o", "outputs/pictures-plan", *SMALL
    )
    (here / "other").mkdir()
    make_picture(0).save(here / "other" / "a.png")
    assert "is a plan of" in fails("plan", "other", "-o", "outputs/pictures-plan")
    config = here / "sync.yaml"
    config.write_text("images: outputs/pictures-plan\nout: outputs/x\n")
    assert "is a plan, which does not change; name the folder itself" in fails("sync", config)


@pytest.mark.slow
def test_jobs_that_look_at_images_take_a_plan(here: Path) -> None:
    plan = "outputs/pictures-plan"
    settings = ["--weights", "random", "--workers", "0", "--device", "cpu"]
    for job, *flags in (("inspect", "--sample", "5", "-l", "layer4"), ("ablate", "--sample", "5", "-l", "layer4")):
        expected, found = (
            layertap(job, "timm/test_resnet", where, *flags, *settings, "--json") for where in ("pictures", plan)
        )
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout.replace(plan, "pictures")) == json.loads(expected.stdout)
    for where in ("pictures", plan):
        out = where.replace("/", "-") + "-drawn"
        succeeds("draw", "maps", "timm/test_resnet", where, *settings, "--out", out)
    drawn = [path.name for path in Path("outputs-pictures-plan-drawn").iterdir()]
    assert drawn
    for name in drawn:
        assert Path("outputs-pictures-plan-drawn", name).read_bytes() == Path("pictures-drawn", name).read_bytes()


def test_rows_are_checked_on_the_images_of_a_plan(here: Path) -> None:
    succeeds("embed", "pictures", *SMALL)
    of = ("--sample", 5, "--images", "outputs/pictures-plan", "--device", "cpu")
    succeeds("verify", "outputs/pictures", *of)
    succeeds("search", "outputs/pictures", 3, "--images", "outputs/pictures-plan", "-o", "found.png")
    assert Path("found.png").stat().st_size > 1000


STOPPED = """
import os, signal, sys
from extract.images import plan_writing
from pipelines.cli import main
take = plan_writing._rows_of_folder
def rows(where, left_out):
    for i, row in enumerate(take(where, left_out)):
        if i == 250:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        yield row
plan_writing._rows_of_folder = rows
main(sys.argv[1:], prog_name="layertap")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    touch(tmp_path / "images", *(f"{i % 3}/{i:03d}.jpg" for i in range(400)))
    command = ["plan", str(tmp_path / "images"), "-o", str(tmp_path / "a plan")]
    environment = os.environ | {"SIGNAL": str(int(number))}
    script = [sys.executable, "-c", STOPPED, *command]
    stopped = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert stopped.returncode == code, stopped.stderr
    assert "stopped: no plan was written. To list the images again:" in stopped.stderr
    assert shlex.join(command) in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not is_plan(tmp_path / "a plan")
    assert "a plan: 400 images in" in layertap(*command).stdout
