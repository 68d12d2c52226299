"""Pictures and models that several tests use."""

from __future__ import annotations

import copy
import functools
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

# Processes of pytest-xdist share the cores, and so do the processes that their tests start. NumPy's OpenBLAS reads this
# when it is loaded: threads of two processes that wait for each other on two cores take ten times the computation.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for commands that set the number of threads themselves

import hypothesis
import numpy as np
import pytest
from PIL import Image
from torch import nn

from extract import defaults

# A script that starts the tests in the background has SIGINT ignored, and every process that a test starts would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# OpenVINO's telemetry sends a report of each conversion, from a process that it forks.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

# Caches of tests are not the user's.
for _folder, _variable in (("torch", "TORCH_HOME"), ("huggingface", "HF_HOME")):  # these have weights that tests use
    _cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    os.environ.setdefault(_variable, str(Path(_cache) / _folder))
_own_cache = tempfile.TemporaryDirectory(prefix="layertap-tests-")
os.environ["XDG_CACHE_HOME"] = _own_cache.name


# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections: imports and tests stay, and each took a third of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what the imports have made out of garbage collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Let default tests write into memory, where an fsync costs nothing; slow ones write to the disk."""
    memory, sizes = Path("/dev/shm"), Path("/proc/meminfo")
    if "not slow" not in config.option.markexpr or not memory.is_dir() or not sizes.is_file():
        return
    available = re.search(r"MemAvailable: *(\d+) kB", sizes.read_text())
    if available and min(int(available[1]) << 10, shutil.disk_usage(memory).free) > 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes share the default tests: one a core, at most four, since each takes more than a GB.

    Files that are named, output that is to be seen (`-s`), and tests that are slow have no other process beside them.
    """
    named = any(Path(argument.split("::")[0]).is_file() for argument in config.args)
    if named or config.option.capture == "no" or "not slow" not in config.option.markexpr:
        return 0
    return min(4, defaults.CORES) if defaults.CORES > 1 else 0


@pytest.fixture(scope="session", autouse=True)
def _versions_of_libraries_are_looked_up_once() -> Iterator[None]:
    """Each run asks for seven of them, and each takes milliseconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metadata, "version", functools.cache(metadata.version))
        yield


@pytest.fixture
def frozen() -> None:
    """Leave what is there out of the garbage collections of a run of several backbones, which makes one after each."""
    gc.collect()
    gc.freeze()


SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def photos() -> Path:
    """200 ImageNet photos, one of every fifth class, beside the checkout; the test is skipped where they are absent."""
    folder = SHARED / "imagenet-200"
    if not folder.is_dir():
        pytest.skip(f"no photos in {folder}")
    return folder


@pytest.fixture
def openvino_in_bfloat16() -> None:
    """The test is skipped where OpenVINO is not installed, or the CPU has no instructions for bfloat16."""
    pytest.importorskip("openvino")
    from extract.compute import backends  # with torchvision, which many test files do without

    if not backends.openvino_computes_in("bfloat16"):
        pytest.skip("OpenVINO does not compute in bfloat16 on this CPU")


@pytest.fixture
def few_strengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strength of a probe is chosen from three, in tests that are not about the choice."""
    from extract.analysis.probe import protocols

    compare_all, three = protocols._compare_all, np.logspace(-4, 0, 3)
    monkeypatch.setattr(protocols, "_coarse_to_fine", lambda compare, **_: compare_all(compare, three))


# Preprocessing for tests that need a network and not its pictures: its forward takes a sixth of the time.
TINY_INPUT = {"size": 64, "crop": 64}


@pytest.fixture(scope="module")
def small_inputs() -> Iterator[None]:
    """The bundled backbone is loaded once, and takes pictures of 64 pixels."""
    from extract.backbones import sources
    from extract.backbones.backbone import LoadedBackbone, LoadRequest

    source = sources.SOURCES["bundled"]
    loaded: list[LoadedBackbone] = []

    def load(request: LoadRequest) -> LoadedBackbone:
        loaded.extend([] if loaded else [source.load(request)])
        small = replace(loaded[0].preprocessing, resize_px=64, crop_px=(64, 64))
        return replace(loaded[0], preprocessing=small)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sources.SOURCES, "bundled", replace(source, load=load))
        yield


def make_picture(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """A smooth random picture, different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def _twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("twelve")
    for i in range(12):
        path = root / ["ant", "bee", "cat"][i % 3] / f"{i:02d}.{['png', 'jpg'][i % 2]}"
        path.parent.mkdir(exist_ok=True)
        make_picture(i, 40 + 5 * i, 70 - 3 * i).save(path)
    return root


@pytest.fixture
def folder(_twelve: Path, tmp_path: Path) -> Path:
    """Twelve pictures in three classes, of several sizes and formats."""
    return shutil.copytree(_twelve, tmp_path / "pictures", copy_function=shutil.copyfile)


def out_of_place(model: nn.Module) -> nn.Module:
    """A copy of a model whose in-place modules are made out-of-place: what it computes, nothing rewrites."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return twin
