"""Each mistake of `mistakes.py`: a short message, its exit code, no traceback."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner, Result

from pipelines.cli import main
from pipelines.embed.cluster import driver, processes
from tests.conftest import make_picture
from tests.pipelines.mistakes import MISTAKES

SMALL = "-b timm/test_resnet --weights random"
CUDA = "embed photos SMALL --device cuda"  # a mistake on a machine without a GPU
OPEN_CLIP = "embed photos -b open_clip/ViT-B-32:openai"  # which is not installed
OFFLINE = "embed photos -b torchvision/resnet18"
LONG_MESSAGES = {
    "embed photos -b timm/test_resnet --weights last.pth": 4, "embed photos SMALL -o outputs/photos -l layer1": 5,
    "embed photos -b timm/test_vit --weights random -o outputs/photos": 12,
}  # fmt: skip
FILES = {
    "names.csv": "file,label\nant/0.png,ant\n",
    "photos/twice.csv": "path\nant/0.png\n./ant//0.png\n",
    "photos.yaml": "images: photos\n",
    "key.yaml": "images: photos\nbacbone: timm/test_resnet\n",
    "notes/a.txt": "x",
    "notes/b.docx": "x",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands name, and two data sets."""
    root = tmp_path_factory.mktemp("mistakes")
    for folder in ("photos/ant", "photos/bee", "flat", "notes", "tars", "outputs", "my photos", "exported"):
        (root / folder).mkdir(parents=True)
    for number in range(4):
        make_picture(number, 24, 18).save(root / "photos" / ["ant", "bee"][number % 2] / f"{number}.png")
    for number in range(3):
        make_picture(number, 24, 18).save(root / "flat" / f"{number}.png")
    for name, content in FILES.items():
        (root / name).write_text(content)
    (root / "photos" / "twice.csv").rename(root / "twice.csv")
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


def invoke(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command.replace("SMALL", f"{SMALL} --workers 0")))


def pattern_of(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_gets_a_short_message_and_its_exit_code(
    place: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == CUDA and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["layertap"])  # a hint repeats the command line, here that of pytest
    if command == OPEN_CLIP:
        monkeypatch.setitem(sys.modules, "open_clip", None)
    if command == OFFLINE:
        monkeypatch.setenv("TORCH_HOME", str(place / "torch"))
        monkeypatch.setattr(socket, "getaddrinfo", _no_server)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    monkeypatch.setattr(processes, "Worker", None)  # none is started
    result = invoke(command)
    assert isinstance(result.exception, SystemExit), result.exception  # any other exception is a traceback
    message = result.stderr[result.stderr.rfind("error: ") :].partition(": ")[2].strip()
    assert pattern_of(MISTAKES[command]).fullmatch(message), message
    assert result.exit_code == (1 if command in (CUDA, OPEN_CLIP, OFFLINE) else 2)
    assert message.partition("\n\nhint: ")[0].count("\n") < LONG_MESSAGES.get(command, 3)
    assert max(map(len, message.splitlines())) < 400
    assert result.stderr.count("error: ") == 1
    assert result.stdout == ""
    entries = (path for path in place.rglob("*") if path not in before)
    assert [path for path in entries if not path.is_dir() or path.name == "out"] == []
    assert before == {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file() and path in before}


def _no_server(*_: object) -> None:
    raise socket.gaierror(-3, "Temporary failure in name resolution")


# What a new process does, in this order, and then prints: the modules that it has loaded at each step.
STEPS = """
import json, os, sys
from click.testing import CliRunner, Result
from pipelines.cli import main
def step(modules, *commands):
    printed = [CliRunner().invoke(main, command).output for command in commands]
    told.append([sorted(set(modules) & set(sys.modules)), printed])
told, (refused, reading, completion) = [], json.loads(sys.argv[1])
step(("torch", "h5py", "timm", "numpy"), ["--help"])
os.environ.update(completion)
told.append([[], [CliRunner().invoke(main, [], prog_name="layertap").output]])
for name in completion:
    del os.environ[name]
step(("torch", "timm", "numpy"))
step(("torch",), *refused)
step(("torch", "timm", "matplotlib", "pandas"), *reading)
print(json.dumps(told))
"""


def test_commands_that_need_no_backbone_import_no_pytorch(place: Path, tmp_path: Path) -> None:
    """Help, completion in a shell, refusals, and commands that read a finished data set."""
    refused = {
        "embed Photos": "Photos: no such folder or file",
        "embed notes": "notes: no images",
        "embed photos --device gpu": "--device: expected",
        "embed photos -l layer1,layer2": "a name has no commas",
        "embed photos -l ''": "has no name",
        "embed photos -o names.csv": "names.csv is a file",
        "embed photos -o photos": "photos is not empty and not a layertap data set",
        "embed photos -o /proc/layertap": "cannot be created in /proc",
        "embed Photos --engine processes": "Photos: no such folder or file",
        "embed photos --engine processes -o names.csv": "names.csv is a file",
    }
    data_set = "outputs/photos"
    reading = {
        f"show {data_set}": "4 rows",
        f"status {data_set}": "complete",
        f"verify {data_set}": "no faults",
        f"diff {data_set} {data_set}": "same fingerprint",
        f"export {data_set} --to npy -o {tmp_path}/npy": "4 rows",
    }
    words = {"_LAYERTAP_COMPLETE": "bash_complete", "COMP_WORDS": "layertap embed --dtype bfl", "COMP_CWORD": "3"}
    given = json.dumps([[shlex.split(command) for command in commands] for commands in (refused, reading)] + [words])
    before = sorted(place.rglob("*"))
    run = subprocess.run([sys.executable, "-c", STEPS, given], cwd=place, capture_output=True, text=True, check=True)
    steps = json.loads(run.stdout)
    assert [modules for modules, _ in steps] == [[], [], [], [], []]
    (_, [help_text]), (_, [completed]), _, (_, messages), (_, told) = steps
    assert "Start with:" in help_text
    assert completed.split() == ["plain,bfloat16"]
    for message, (command, expected) in zip(messages, refused.items(), strict=True):
        assert message.startswith("error: "), command
        assert expected in message, command
    for text, (command, expected) in zip(told, reading.items(), strict=True):
        assert expected in text, command
    assert sorted(place.rglob("*")) == before


def test_a_device_that_is_not_there_is_refused_before_there_is_an_output_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver.SharedRun, "run", lambda run: pytest.fail("a worker was started"))
    result = CliRunner().invoke(main, ["embed", "photos", "--device", "cpu,cuda:0", "-o", "outputs/shared"])
    assert result.exit_code == 1
    assert "error: device 'cuda:0' cannot be used: this machine has no CUDA device" in result.output
    assert not Path("outputs/shared").exists()


@pytest.mark.parametrize(
    ("mistake", "written", "then"),
    [
        ("embed photos/ant/0.png photos/ant/2.png", "list.csv", "embed list.csv -o outputs/of-list SMALL"),
        ("sync photos", "photos.yaml", "sync photos.yaml --dry-run"),
    ],
)
def test_the_line_that_a_hint_gives_to_a_shell_works(
    place: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, written: str, then: str
) -> None:
    monkeypatch.chdir(place)
    (place / written).unlink(missing_ok=True)
    hint = invoke(mistake).stderr.partition("hint: ")[2].strip()
    line = hint.rpartition("to make one: " if written == "photos.yaml" else "or a list: ")[2]
    subprocess.run(["sh", "-c", line], check=True)
    result = invoke(then)
    assert result.exit_code == 0, result.output
    assert ("2 rows" in result.stdout) == (written == "list.csv")


def test_one_image_is_counted_in_the_singular(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert "outputs/one: 1 row\n" in invoke("embed photos/ant/0.png -o outputs/one SMALL").stdout
    assert invoke("show outputs/one").stdout.startswith("outputs/one: 1 row in 1 shard,")


def test_thousands_of_names_in_place_of_a_folder_get_the_hint_of_two(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    names = " ".join(f"photos/ant/{number:05}.png" for number in range(3000))
    told = invoke(f"embed photos/ant/0.png {names}").stderr
    assert "hint: name their folder: photos/ant; or a list: " in told
    assert "(photos/ant/00000.png photos/ant/00001.png " in told
    assert len(told) < 500
