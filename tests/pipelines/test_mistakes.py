"""Each mistake of `tests/pipelines/mistakes.py`: a short message, its exit code, no traceback; and the page of them."""

from __future__ import annotations

import shlex
import socket
import sys
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner

from pipelines.cli import main
from tests.conftest import make_picture
from tests.pipelines.mistakes import PAGE, SECTIONS, SMALL, Mistake, page

MISTAKES = [mistake for mistakes in SECTIONS.values() for mistake in mistakes]
FILES = {
    "names.csv": "file,label\nant/0.png,ant\n",
    "photos/twice.csv": "path\nant/0.png\n./ant//0.png\n",
    "photos/split.csv": "path,split\nant/0.png,dev\n",
    "photos.yaml": "images: photos\n",
    "key.yaml": "images: photos\nbacbone: timm/test_resnet\n",
    "type.yaml": "images: photos\nbatch_size: many\n",
    "broken.yaml": "images: photos\nbatch_size: [3\nworkers: 2\n",
    "home.yaml": "images: photos\nout: ~nobody-here/features\n",
    "notes/a.txt": "x",
    "notes/b.docx": "x",
    "photos.tar.gz": "x",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands name, and two data sets."""
    root = tmp_path_factory.mktemp("mistakes")
    for folder in ("photos/ant", "photos/bee", "flat", "empty", "notes", "tars", "outputs"):
        (root / folder).mkdir(parents=True)
    for number in range(4):
        make_picture(number, 24, 18).save(root / "photos" / ["ant", "bee"][number % 2] / f"{number}.png")
    for number in range(3):
        make_picture(number, 24, 18).save(root / "flat" / f"{number}.png")
    for name, content in FILES.items():
        (root / name).write_text(content)
    for name in ("twice.csv", "split.csv"):
        (root / "photos" / name).rename(root / name)
    with tarfile.open(root / "tars" / "a.tar", "w") as tar:
        tar.add(root / "photos" / "ant" / "0.png", "0.png")
    with h5py.File(root / "floats.h5", "w") as file:
        file["x"] = np.zeros((4, 8, 8, 3), np.float32)
    state = timm.create_model("test_resnet").state_dict()
    state["head.weight"] = state.pop("fc.weight")
    torch.save(state, root / "last.pth")
    for name in ("photos", "flat"):
        options = ["-o", str(root / "outputs" / name), "--workers", "0", "--device", "cpu", *shlex.split(SMALL)]
        result = CliRunner().invoke(main, ["embed", str(root / name), *options])
        assert result.exit_code == 0, result.output
    return root


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.command for mistake in MISTAKES])
def test_a_mistake_gets_a_short_message_and_its_exit_code(
    place: Path, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake.no_gpu and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.chdir(place)
    if mistake.without:
        monkeypatch.setitem(sys.modules, mistake.without, None)
    if mistake.offline:
        monkeypatch.setenv("TORCH_HOME", str(place / "torch"))
        monkeypatch.setattr(socket, "getaddrinfo", _no_server)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    command = shlex.split(mistake.command.replace("SMALL", f"{SMALL} --workers 0"))
    result = CliRunner().invoke(main, command)
    assert isinstance(result.exception, SystemExit), result.exception  # any other exception is a traceback
    message = result.stderr[result.stderr.rfind("error: ") :].partition(": ")[2].strip()
    assert mistake.pattern.fullmatch(message), message
    assert result.exit_code == mistake.code
    assert message.partition("\n\nhint: ")[0].count("\n") < mistake.lines
    assert max(map(len, message.splitlines())) < 400
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert before == {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file() and path in before}


def _no_server(*_: object) -> None:
    raise socket.gaierror(-3, "Temporary failure in name resolution")


def test_a_pattern_of_a_message_matches_the_whole_message_only() -> None:
    pattern = Mistake("", "", "layer '...' not found (a.b)").pattern
    assert pattern.fullmatch("layer 'x' not found (a.b)")
    for other in ("layer 'x' not found (aab)", "layer 'x' not found (a.b) here", "a layer 'x' not found (a.b)"):
        assert not pattern.fullmatch(other)


def test_the_page_of_mistakes_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.pipelines.mistakes"
    assert len(MISTAKES) >= 30
    assert len({mistake.command for mistake in MISTAKES}) == len(MISTAKES)
