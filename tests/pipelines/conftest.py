"""What tests of commands share."""

from __future__ import annotations

import importlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from extract.backbones import sources
from extract.backbones.backbone import LoadedBackbone, LoadRequest

_FIGURES = ("pipelines.probe.probe_figures", "pipelines.probe.layer_similarity")


@pytest.fixture(scope="module", autouse=True)
def drawing() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Figures of probes are made and not drawn, which takes longer than the probes do; `with drawing():` draws them."""
    draw = {name: importlib.import_module(name).save_figure for name in _FIGURES}

    @contextmanager
    def drawn() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for name in _FIGURES:
                patched.setattr(f"{name}.save_figure", draw[name])
            yield

    def empty(figure: Figure, path: Path) -> Path:
        path.touch()
        return path

    with pytest.MonkeyPatch.context() as patched:
        for name in _FIGURES:
            patched.setattr(f"{name}.save_figure", empty)
        yield drawn


@pytest.fixture
def figures(drawing: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """For tests in which the figures of probes are drawn."""
    with drawing():
        yield


@pytest.fixture(scope="module", autouse=True)
def _small_networks_are_made_once() -> Iterator[None]:
    """Small networks of timm with random weights are made once for the tests of a module."""
    source, made = sources.SOURCES["timm"], dict[str, LoadedBackbone]()

    def load(request: LoadRequest) -> LoadedBackbone:
        if request.weights != "random" or not request.name.startswith("test_"):
            return source.load(request)
        if repr(request) not in made:
            made[repr(request)] = source.load(request)
        return made[repr(request)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sources.SOURCES, "timm", replace(source, load=load))
        yield


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
