"""Code that a data set or probe records as its backbone runs only where the user names it, whatever the command."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extract import FeatureReader, InputError
from extract.analysis.probe.model import LinearProbe
from extract.backbones.loading import permitted
from extract.extraction.reproduce import features_of_text, recheck
from extract.store.format.dataset import DataSet
from extract.store.format.layout import StoredFeature
from tests.conftest import make_picture
from tests.pipelines.test_cli import fails, layertap, succeeds

CODE = """
import pathlib
import torch
from torch import nn
from torchvision import transforms
pathlib.Path(__file__).with_name("ran").touch()
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model, transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set `out`, a probe and pictures, made with a backbone in a Python file."""
    place = tmp_path_factory.mktemp("foreign")
    for i in range(12):
        path = place / "pictures" / ("ant", "bee")[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_picture(i, 32, 32).save(path)
    (place / "net.py").write_text(CODE)
    spec = f"python/{place / 'net.py'}:net"
    arguments = ["-b", spec, "-l", "2", "--workers", 0, "--device", "cpu"]
    succeeds("embed", place / "pictures", "-o", place / "out", *arguments)
    options = ["-o", place / "results", "-p", "centroid", "--save", place / "probe.safetensors"]
    succeeds("probe", place / "out", *options)
    (place / "spec").write_text(spec)
    return place


@pytest.fixture
def ran(foreign: Path) -> Path:
    """The file that is there if the code has run."""
    (foreign / "ran").unlink(missing_ok=True)
    return foreign / "ran"


@pytest.mark.parametrize("command", [
    "show OUT", "status OUT", "verify OUT", "diff OUT OUT", "search OUT 3", "export OUT --to npy -o NEW",
    "merge OUT -o NEW", "report OUT -o NEW.html --thumbnails 2 --map pca", "probe OUT -o NEW -p centroid",
    "predict PROBE OUT -o NEW.csv",
])  # fmt: skip
def test_commands_that_compute_no_features_run_no_code(foreign: Path, ran: Path, tmp_path: Path, command: str) -> None:
    names = {"OUT": foreign / "out", "PROBE": foreign / "probe.safetensors", "NEW": tmp_path / "new",
             "NEW.html": tmp_path / "new.html", "NEW.csv": tmp_path / "new.csv"}  # fmt: skip
    succeeds(*(names.get(word, word) for word in command.split()))
    assert not ran.exists()


def arguments_of(command: str, foreign: Path, new: Path, probe: Path | None = None) -> list[object]:
    """A command that computes features."""
    return {
        "verify": ["verify", foreign / "out", "--sample", 3],
        "search": ["search", foreign / "out", foreign / "pictures" / "ant" / "00.png"],
        "predict": ["predict", probe or foreign / "probe.safetensors", foreign / "pictures", "-o", new / "new.csv"],
    }[command]


@pytest.mark.parametrize("command", ["verify", "search", "predict"])
def test_commands_that_compute_features_ask_for_the_backbone(
    foreign: Path, ran: Path, tmp_path: Path, command: str
) -> None:
    spec = (foreign / "spec").read_text()
    arguments = arguments_of(command, foreign, tmp_path)
    assert f"if you trust the code, name the backbone: --backbone {spec}" in fails(*arguments)
    with pytest.raises(InputError, match="loading this backbone runs its code"):
        recheck(foreign / "out", 3, device="cpu")  # from Python
    assert not ran.exists()
    succeeds(*arguments, "--backbone", spec)
    assert ran.exists()


@pytest.fixture
def asked_hosts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts whose addresses were asked for; no connection is made."""
    hosts: list[str] = []

    def refuse(host: object, *arguments: object, **options: object) -> None:
        hosts.append(str(host))
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", lambda address, *more, **options: refuse(address[0]))
    return hosts


@pytest.mark.parametrize("weights", [None, "main", "random"])
@pytest.mark.parametrize("command", ["verify", "search", "text", "predict"])
def test_a_repository_that_only_a_stranger_names_is_not_asked(
    foreign: Path, tmp_path: Path, command: str, weights: str | None, monkeypatch: pytest.MonkeyPatch,
    asked_hosts: list[str],
) -> None:  # fmt: skip
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    spec = "hf/evil/model"

    def forged(provenance: dict[str, Any]) -> dict[str, Any]:
        return {**provenance, "backbone": spec, "configuration": {**provenance["configuration"], "weights": weights}}

    original = FeatureReader.provenance.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(FeatureReader, "provenance", property(lambda reader: forged(original(reader))))
    probe = LinearProbe.load(foreign / "probe.safetensors")
    about = {**probe.about, "provenance": forged(probe.about["provenance"])}
    replace(probe, about=about).save(tmp_path / "probe.safetensors")
    if command == "text":
        dataset = replace(DataSet.open(foreign / "out"), features=[StoredFeature("embedding", (8,), "float32")])
        with pytest.raises(InputError, match="to allow this, name the backbone: --backbone hf/evil/model"):
            features_of_text(dataset, forged(about["provenance"]), "an ant")
    else:
        arguments = arguments_of(command, foreign, tmp_path, tmp_path / "probe.safetensors")
        assert f"to allow this, name the backbone: --backbone {spec}" in fails(*arguments)
    assert asked_hosts == []
    if command == "predict":
        assert layertap(*arguments, "--backbone", spec).exit_code != 0
        assert asked_hosts  # where the user names it


@pytest.mark.parametrize("name", ["evil model!", "a--b", "a" * 300, "evil/\x1b]0;PWN\x07"])
def test_a_name_that_no_repository_can_have_is_refused(name: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match="out records the backbone .*, which is no name: "):
        permitted(f"hf/{name}", None, "out")


def test_recorded_weights_that_are_no_text_are_refused(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FeatureReader.provenance.fget  # type: ignore[attr-defined]

    def forged(reader: FeatureReader) -> dict[str, Any]:
        provenance = original(reader)
        return {**provenance, "configuration": {**provenance["configuration"], "weights": 3}}

    monkeypatch.setattr(FeatureReader, "provenance", property(forged))
    message = fails("verify", foreign / "out", "--sample", 3, "-b", "timm/test_resnet")
    assert "does not record how it was computed: it has no 'weights'" in message


def test_a_repository_in_the_cache_needs_no_word_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    snapshot = tmp_path / "models--me--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--me--model" / "refs").mkdir()
    (tmp_path / "models--me--model" / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (snapshot / "config.json").touch()
    assert permitted("hf/me/model", None, "out", "random") == "hf/me/model"
    with pytest.raises(InputError, match="a repository that only out names"):
        permitted("hf/me/model", None, "out")
    (snapshot / "model.safetensors").touch()
    assert permitted("hf/me/model", None, "out") == "hf/me/model"
    with pytest.raises(InputError, match="a repository that only out names"):
        permitted("hf/me/model", None, "out", "other-revision")
    assert permitted("timm/resnet18", None, "out") == "timm/resnet18"  # timm lists it


def test_code_of_a_hub_is_asked_for_too(foreign: Path, ran: Path, tmp_path: Path) -> None:
    """A probe that records a repository in a folder, whose `hubconf.py` would be run."""
    (tmp_path / "hubconf.py").write_text(CODE.replace("__file__", repr(str(ran))))
    spec = f"hub/{tmp_path}:net"
    content = (foreign / "probe.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    recorded = (foreign / "spec").read_text()
    del head["__metadata__"]["sha256"]  # as in a probe of an earlier version
    head["__metadata__"] = {key: value.replace(recorded, spec) for key, value in head["__metadata__"].items()}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "probe.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    message = fails("predict", tmp_path / "probe.safetensors", foreign / "pictures", "-o", tmp_path / "new.csv")
    assert f"name the backbone: --backbone {spec}" in message
    assert not ran.exists()


def test_another_backbone_than_the_recorded_one_is_refused_by_its_fingerprint(foreign: Path) -> None:
    (foreign / "other.py").write_text(CODE.replace("manual_seed(0)", "manual_seed(1)"))
    other = f"python/{foreign / 'other.py'}:net"
    image = foreign / "pictures" / "ant" / "00.png"
    assert "would not be comparable" in fails("search", foreign / "out", image, "-b", other)
    assert "computed with another" in layertap("verify", foreign / "out", "--sample", 3, "-b", other).stdout
