"""Servers of weights that cannot be reached: found out at once, and the cache of the hub is used without them."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import timm
from huggingface_hub import constants, file_download
from safetensors.torch import save_file

from extract import LayertapError, load_backbone
from extract.backbones.backbone import hub_offline_if_unreachable, why_unreachable


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A machine without a name server: the names that it was asked for."""
    names: list[object] = []

    def no_server(host: object, *_: object, **__: object) -> None:
        names.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_server)
    return names


def test_a_proxy_is_trusted_to_reach_the_server(monkeypatch: pytest.MonkeyPatch, lookups: list[object]) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert why_unreachable("https://hub.example/x") == ""
    assert not lookups
    monkeypatch.setenv("no_proxy", "hub.example")
    assert why_unreachable("https://hub.example/x") == "hub.example cannot be reached: Name or service not known"


def test_offline_mode_is_set_only_while_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, lookups: list[object]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_offline_if_unreachable() as reason:
        assert reason
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(socket, "getaddrinfo", _local)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with hub_offline_if_unreachable() as reason:
            assert not reason
            assert not constants.HF_HUB_OFFLINE


def _local(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]


def test_weights_in_the_cache_load_without_a_network_and_others_fail_with_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookups: list[object]
) -> None:
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waited {seconds} s for the network"))
    with pytest.raises(
        LayertapError, match="could not be downloaded: huggingface.co cannot be reached: Name"
    ) as caught:
        load_backbone("timm/test_resnet")
    assert "test_resnet.r160_in1k/resolve/main/model.safetensors" in (caught.value.hint or "")
    assert lookups == ["huggingface.co"]

    repository, commit = tmp_path / "models--timm--test_resnet.r160_in1k", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    weights = timm.create_model("test_resnet", num_classes=1000).state_dict()
    save_file(weights, repository / "snapshots" / commit / "model.safetensors")
    loaded = load_backbone("timm/test_resnet").model.state_dict()
    assert all(loaded[name].equal(weights[name]) for name in weights)
    assert len(lookups) == 2


def test_cached_weights_of_another_model_are_not_reported_as_a_missing_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookups: list[object]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def wrong(*_: object, **__: object) -> None:
        raise RuntimeError("Error(s) in loading state_dict for ResNet")

    monkeypatch.setattr(timm, "create_model", wrong)
    with pytest.raises(LayertapError, match="Error.s. in loading state_dict") as caught:
        load_backbone("timm/test_resnet")
    assert "cannot be reached" not in str(caught.value)
