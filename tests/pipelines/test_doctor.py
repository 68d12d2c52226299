"""`layertap doctor`: what it sees, its exit code, and that it leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
import torch
from PIL import Image

from extract.backbones import sources
from extract.images.listing import list_images
from extract.system import optional_libraries
from extract.system.atomic_files import locked
from pipelines.doctor import checks
from tests.pipelines.test_cli import layertap


def examined(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = layertap("doctor", *arguments, "--json")
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == code, report["problems"]
    assert report["ok"] == (code == 0)
    return report


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_a_good_machine_has_no_problems_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "outputs" / "pictures"
    before = contents(tmp_path)
    report = examined(folder, "-o", out)
    after = contents(tmp_path)
    assert before.keys() == after.keys()
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["versions"]["HDF5"] == h5py.version.hdf5_version
    assert report["devices"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert len(report["devices"]["gpus"]) == torch.cuda.device_count()
    assert report["images"]["count"] == len(list_images(folder)) == 12
    with Image.open(folder / list_images(folder).paths[0]) as picture:
        assert report["images"]["size"] == list(picture.size)
    assert report["output"]["lines"][-1]["text"].startswith(f"{out} can be written and locked; ")
    assert report["output"]["data_set"] is None
    assert abs(report["output"]["free_bytes"] - shutil.disk_usage(tmp_path).free) < 1e9


def test_the_report_is_on_stdout_and_marks_each_problem(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "00.png").write_bytes(b"not a picture")
    result = layertap("doctor", folder, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == ""
    marked = [line for line in result.stdout.splitlines() if line.startswith("!!")]
    assert marked == ["!! ant/00.png cannot be decoded: not an image in a known format"]
    assert "   hint: replace such files" in result.stdout
    assert result.stdout.endswith("1 problem, marked with !!\n")


def test_a_library_that_the_backbone_needs_and_that_is_missing_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    (problem,) = examined("-b", "open_clip/ViT-B-32:openai", "-o", tmp_path / "out", code=1)["problems"]
    assert problem["text"] == "open_clip/ needs open_clip"
    assert problem["hint"].endswith("install 'open_clip_torch>=2.30'")


def test_a_library_that_is_too_old_or_missing_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"a": "2.9.0", "b": "10.1+cpu", "c": "0.9", "e": "3.0.dev1"}
    monkeypatch.setattr(checks, "installed_version", installed.get)
    needed = ("a>=2.9", "b[x]>=9", "a==2.9", "a", "c>=0.10", "b==10", "d>=1", "e>=2,<4")
    versions: dict[str, Any] = {}
    assert [checks._installed(text, versions) for text in needed] == [
        ("a", ""), ("b", ""), ("a", ""), ("a", ""), ("c", "0.9 is installed, expected >=0.10"),
        ("b", "10.1+cpu is installed, expected ==10"), ("d", "is missing"), ("e", ""),
    ]  # fmt: skip
    assert versions == {**installed, "d": None}


def test_the_requirements_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert optional_libraries.requirements() == project["dependencies"]


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = SimpleNamespace(total=10**9, used=10**9 - 10**6, free=10**6)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda place: usage)
    (problem,) = examined("-o", tmp_path / "out", code=1)["problems"]
    assert problem["text"].partition(" on the disk")[0] == "only 1.0 MB free"
    assert "free disk space" in problem["hint"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_on_which_nothing_can_be_written_is_found_by_writing(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        (place / "fill").write_bytes(bytes(60 << 10))
        report = examined("-o", place / "out", code=1)
        assert any("No space left on device" in problem["text"] for problem in report["problems"])
        assert [path.name for path in place.iterdir()] == ["fill"]
    finally:
        subprocess.run(["umount", place], check=True)


def test_an_output_that_cannot_be_used_is_a_problem(folder: Path, tmp_path: Path) -> None:
    problems = examined("-o", "/proc/layertap", code=1)["problems"]
    assert problems[-1]["text"].endswith(": No such file or directory")
    assert problems[-1]["hint"] == "choose another output folder with -o"
    (problem,) = examined("-o", folder, code=1)["problems"]
    assert problem["text"] == f"{folder} is not empty and not a layertap data set"
    assert problem["hint"] == "choose another output folder"
    (tmp_path / "file").touch()
    report = examined("-o", tmp_path / "file", code=1)
    assert [problem["text"] for problem in report["problems"]] == [f"{tmp_path / 'file'} is a file"]
    assert "can be written" not in json.dumps(report["output"])


def test_a_data_set_in_the_output_folder_is_described_and_who_holds_it_is_named(out: Path, folder: Path) -> None:
    before = contents(out)
    assert examined("-o", out)["output"]["data_set"] == {"rows": 12, "images": str(folder)}
    assert contents(out) == before
    with locked(out):
        report = examined("-o", out, code=1)
    assert report["output"]["locked_by"] == "another thread of this process"
    (problem,) = report["problems"]
    assert problem["text"] == f"{out} is locked by another thread of this process"
    assert examined("-o", out)["output"].get("locked_by") is None


def test_a_folder_that_does_not_exist_has_the_hint_of_embed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = examined("picturs", code=1)
    (problem,) = report["problems"]
    assert set(report) == {"ok", "problems", "images"}, "no more is checked for a misspelt path"
    assert (problem["text"], problem["hint"]) == ("picturs: no such folder or file", "did you mean pictures?")


def test_weights_are_looked_for_and_never_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    connected: list[tuple[object, ...]] = []

    def connect(address: tuple[object, ...], *_: object) -> socket.socket:
        connected.append(address)
        return socket.socket()  # fails if it is used

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    backbone = examined("-b", "torchvision/resnet18", "-o", tmp_path / "out")["backbone"]
    assert backbone["path"] is None
    assert backbone["url"] == "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    assert [line["state"] for line in backbone["lines"]] == ["note"]
    assert connected == [("download.pytorch.org", 443)]

    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    (problem,) = examined("-b", "torchvision/resnet18", "-o", tmp_path / "out", code=1)["problems"]
    assert "not on this machine, and download.pytorch.org cannot be reached: Connection refused" in problem["text"]
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    file.touch()
    assert examined("-b", "torchvision/resnet18", "-o", tmp_path / "out")["backbone"]["path"] == str(file)
    problems = examined("-b", "torchvision/resnet181", "-o", tmp_path / "out", code=1)["problems"]
    assert problems[0]["hint"] == "list them: layertap list torchvision"


def test_code_of_a_backbone_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("raise SystemExit('run')")
    report = examined("-b", f"python/{tmp_path / 'net.py'}:make", "-o", tmp_path / "out")
    assert [line["state"] for line in report["backbone"]["lines"]] == ["note"]


def test_sources_whose_names_are_known_say_where_their_weights_are() -> None:
    for name, source in sources.SOURCES.items():
        assert (source.locate is None) == source.runs_code, name


def test_a_gpu_that_cannot_be_used_is_a_problem_and_others_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(number: int) -> tuple[int, int]:
        if number == 0:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nMore lines")
        return 60 * 10**9, 80 * 10**9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Model")
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    facts: dict[str, Any] = {}
    _, *lines = checks.check_devices(facts)
    assert [line.state for line in lines] == ["wrong", "ok"]
    assert "busy or unavailable" in lines[0].text
    assert lines[1].text == "cuda:1 Model, 60.0 of 80.0 GB free"
    assert [gpu["device"] for gpu in facts["gpus"]] == ["cuda:1"]
