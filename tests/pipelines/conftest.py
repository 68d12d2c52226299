"""What tests of commands share."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def figures() -> None:
    """For tests in which the figures of probes are drawn."""


@pytest.fixture(autouse=True)
def _figures_of_probes_are_made_but_not_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the probes do."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("pipelines.probe.probe_figures.save_figure", lambda figure, path: path)


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def copy_of(data_set: Path, copy: Path, images: Path) -> Path:
    """A copy of a data set that says that its images lie in another folder, with the same names."""
    shutil.copytree(data_set, copy)
    content = json.loads((copy / "dataset.json").read_text())
    content["images"]["root"] = str(images)
    (copy / "dataset.json").write_text(json.dumps(content))
    return copy


@pytest.fixture(scope="session")
def twelve_embedded(_twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pipelines.test_cli import SMALL, layertap

    out = tmp_path_factory.mktemp("embedded") / "out"
    assert layertap("embed", _twelve, "-o", out, *SMALL, "--shard-rows", 5).exit_code == 0
    return out


@pytest.fixture
def out(twelve_embedded: Path, folder: Path, tmp_path: Path) -> Path:
    """A data set of the twelve pictures of `folder`, in three shards."""
    return copy_of(twelve_embedded, tmp_path / "out", folder)
