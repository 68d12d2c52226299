"""Shell examples of the documents run, in the order of their page, and write the files that their comments name.

Weights that a server would send are random ones in the caches of the libraries, where downloads are stored. The
networks that they are of have the names of their layers, and few of their channels and blocks.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import constants, file_download
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file

from extract import extract_features
from extract.analysis.probe import logistic
from pipelines.cli import main
from tests.conftest import TINY_INPUT, make_picture
from tests.test_documents import PAGES, ROOT, blocks

# Lines that are not run here: a pattern that they have, and the reason.
NOT_RUN = {
    r"^pip install": ".ci/run runs the commands that set up",
    r"^git clone": "needs a server",
    r"^clip-retrieval": "another tool",
    r"^embedding-atlas": "another tool, which serves until it is stopped",
    r"^(LAYERTAP_FUZZ=\d+ )?pytest": ".ci/run runs the tests",
    r"^ruff check": ".ci/run runs it",
    r"^\.ci/run": "it is what runs this",
    r"^mkdocs serve": "serves until it is stopped; .ci/run builds the site",
    r"^python ": "tools for developers that take minutes; tests and .ci/run call their parts",
    r"-b open_clip/": "needs 600 MB of weights; tests/extract/backbones/test_libraries.py loads such networks",
    r"photos-clip": "needs 600 MB of weights; tests/pipelines/test_text_search.py searches by a text",
    r"-b hf/facebook": "needs 350 MB of weights; tests/extract/backbones/test_libraries.py loads such networks",
    r"--bench$": "takes minutes; tests/pipelines/test_bench.py runs it on a small network",
    r"outputs/stimuli": "the same commands for photos are run from other pages",
    r"--device all": "needs a GPU",
    r"--cpus-per-worker 8": "needs 8 cores; tests/pipelines/cluster runs it with fewer",
    r"--engine ray": "needs a cluster; tests/pipelines/cluster has one",
    r"sbatch$": "needs SLURM; tests/pipelines/cluster reads the file",
    r"--watch$": "runs until it is stopped; tests/pipelines/cluster and test_watch.py run it",
    r"--schedule$": "runs until it is stopped; tests/pipelines/test_schedule.py runs it",
    r"check features\.npy": "a file of another program; tests/extract/extraction/test_check.py makes such files",
    r"^find .*runs.jsonl": "tests/pipelines/test_schedule.py runs it",
}
# Data sets that a page begins with.
DATA_SETS = {
    "docs/coming-from/thingsvision.md": ("photos",),
    "docs/guides/brains.md": ("photos",),
    "docs/guides/probes.md": ("cifar", "cifar-random", "faces"),
    "docs/guides/search-and-report.md": ("photos", "photos-2"),
    "docs/guides/other-tools.md": ("photos",),
    "docs/guides/verify-and-export.md": ("photos", "2023", "2024"),
}
FEW_PHOTOS = ("docs/guides/inside-a-network.md",)  # an ablation runs the network again for each layer

RANDOM: dict[str, Any] = {"backbone": "timm/test_resnet", "weights": "random"}
NET = """\
from torch import float32, nn
from torch.nn.functional import cross_entropy as loss
from torchvision.transforms import v2


def make():
    layers = nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    return nn.Sequential(*layers), v2.Compose([v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(float32, scale=True)])


def features():
    network, transform = make()
    return network[:4], transform
"""


def lines_of(page: str) -> list[tuple[str, str]]:
    """Lines of the shell examples of a page: (commands, comment)."""
    lines = [line for code in blocks(page, "bash") for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    parts = [line.partition(" #") for line in lines]
    return [(command.strip(), comment.strip()) for command, _, comment in parts]


def reason_not_to_run(command: str) -> str | None:
    return next((pattern for pattern in NOT_RUN if re.search(pattern, command)), None)


PAGES_TO_RUN = [page for page in PAGES if any(reason_not_to_run(command) is None for command, _ in lines_of(page))]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the examples name."""
    start = tmp_path_factory.mktemp("examples")
    names = [f"{split}/{kind}/{n:03}.jpg" for split, kind, n in [
        *(("train", kind, n) for kind in ("cat", "dog") for n in range(38, 46)),
        *(("test", kind, n) for kind in ("cat", "dog") for n in range(4)),
    ]]  # fmt: skip
    folders = {
        "photos": names,
        "new-photos": [f"{n}.jpg" for n in range(3)],
        "street": [f"{n}.jpg" for n in range(2)],
        "cifar": [f"{split}/{n % 10}/{n}.png" for split, count in (("train", 60), ("test", 20)) for n in range(count)],
        **{year: [f"{year}-{n}.jpg" for n in range(4)] for year in ("2023", "2024")},
    }
    for folder, paths in folders.items():
        for number, path in enumerate(paths):
            (start / folder / path).parent.mkdir(parents=True, exist_ok=True)
            make_picture(number).save(start / folder / path)
            os.utime(start / folder / path, (1e9, 1e9))  # `sync` waits for files that were changed just now
    generator = np.random.default_rng(0)
    for path in names:  # masks of `photos`
        (start / "masks" / path).parent.mkdir(parents=True, exist_ok=True)
        with Image.open(start / "photos" / path) as picture:
            mask = generator.integers(0, 3, (picture.height // 40 + 1, picture.width // 40 + 1), np.uint8)
            cells = Image.fromarray(mask).resize(picture.size, Image.Resampling.NEAREST)
        cells.save((start / "masks" / path).with_suffix(".png"))
        (start / "depth-maps" / path).parent.mkdir(parents=True, exist_ok=True)
        np.save((start / "depth-maps" / path).with_suffix(".npy"), np.asarray(cells) + 1.5)
    save_for_hugging_face(start, names)
    for number, name in enumerate(("cat.jpg", "new.jpg")):
        make_picture(100 + number).save(start / name)
    shutil.copytree(ROOT / "configs", start / "configs")
    (start / "boxes.csv").write_text("path,x,y,w,h,label\n0.jpg,1,1,20,30,car\n0.jpg,5,5,9,9,bus\n1.jpg,2,3,20,9,car\n")
    boxes = [{"id": 1, "image_id": 1, "bbox": [1, 2, 20, 30], "category_id": 3, "area": 600}]
    described = {"images": [{"id": 1, "file_name": "1.jpg"}], "categories": [{"id": 3, "name": "car"}]}
    (start / "instances.json").write_text(json.dumps(described | {"annotations": boxes}))
    rows = [f"{path},{20 + number % 50}" for number, path in enumerate(folders["cifar"])]
    (start / "ages.csv").write_text("\n".join(["path,age", *rows, ""]))
    classes = [f"{path},{path.split('/')[1]}" for path in folders["photos"]]
    (start / "kinds.csv").write_text("\n".join(["path,label", *classes, ""]))
    places = [f"{row},{'here' if number % 3 else 'there'}" for number, row in enumerate(classes)]
    (start / "labels.csv").write_text("\n".join(["path,label,place", *places, ""]))
    ratings = [f"{path},{len(path) + n % 7}" for n, path in enumerate(names)]
    (start / "ratings.csv").write_text("\n".join(["path,rating", *ratings, ""]))
    np.save(start / "voxels.npy", generator.normal(size=(2 * len(names), 3)))
    trials = [f"{path},{n % 6}" for n, path in enumerate(names)]
    (start / "trials.csv").write_text("\n".join(["path,category", *trials, *trials, ""]))
    captions = {"path": [f"photos/{path}" for path in names], "caption": names, "age": [*range(len(names))]}
    parquet.write_table(pa.table(captions), start / "list.parquet")
    (start / "backbones.csv").write_text(
        "backbone,weights,name\npython/net.py:features,first.pth,mine\npython/net.py:features,,untrained\n"
    )
    (start / "net.py").write_text(NET)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2), *[torch.nn.Identity()] * 3, torch.nn.Linear(8, 2))
    torch.save(model.state_dict(), start / "last.pth")
    torch.save(model[:4].state_dict(), start / "first.pth")
    return start


def save_for_hugging_face(start: Path, names: list[str]) -> None:
    """Save the photos as a dataset of Hugging Face, with their splits."""
    import datasets  # takes seconds

    splits = {}
    for split in ("train", "test"):
        paths = [path for path in names if path.startswith(split)]
        images = [{"bytes": (start / "photos" / path).read_bytes(), "path": path} for path in paths]
        features = datasets.Features({"image": datasets.Image()})
        splits[split] = datasets.Dataset.from_dict({"image": images}, features)
    datasets.DatasetDict(splits).save_to_disk(str(start / "saved"))


@pytest.fixture(scope="module")
def data_sets(start: Path, small_inputs: None) -> Path:
    """Data sets that the pages begin with."""
    out = start / "data-sets"
    layers = ["blocks.0", "blocks.5", "blocks.6", "embedding"]
    for name, images, options in (
        ("photos", "photos", {"layers": layers}),
        ("photos-2", "photos", {"layers": layers, "limit": 20}),
        ("cifar", "cifar", {"layers": layers}),
        ("cifar-random", "cifar", {**RANDOM, "layers": ["layer1", "embedding"]}),
        ("faces", "cifar", {}),
        ("2023", "2023", {}),
        ("2024", "2024", {}),
    ):
        options |= {"progress": False, "device": "cpu", "preprocessing": TINY_INPUT}
        extract_features(str(start / images), out=out / name, **options)
    return out


VITS = ("vit_small_patch16_224", "vit_small_patch16_384")


@pytest.fixture(scope="module")
def small_networks() -> Iterator[None]:
    """The networks that the pages name have two blocks, or a block of four channels in each of four layers."""
    import timm.models._registry as of_timm
    from torchvision.models import _api, resnet

    def small_resnet(builder: Any) -> Any:
        @functools.wraps(builder)  # the entries of its weights are found by its signature
        def build(*, weights: Any = None, progress: bool = True, **options: Any) -> Any:
            network = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], width_per_group=4, **options)
            if weights is not None:
                network.load_state_dict(weights.get_state_dict(progress=progress))
            return network

        return build

    with pytest.MonkeyPatch.context() as patch:
        for name in ("resnet18", "resnet50"):
            patch.setitem(_api.BUILTIN_MODELS, name, small_resnet(_api.BUILTIN_MODELS[name]))
        for name in VITS:
            small = functools.partial(of_timm.model_entrypoint(name), depth=2, embed_dim=48, num_heads=3)
            patch.setitem(of_timm._model_entrypoints, name, small)
        yield


@pytest.fixture(scope="module")
def caches(small_networks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of PyTorch and of the Hugging Face hub, with random weights for the names that the pages use."""
    import timm
    from torchvision import models

    caches = tmp_path_factory.mktemp("caches")
    torch.manual_seed(0)
    checkpoints = caches / "torch" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("resnet18", "resnet50"):
        url = models.get_model_weights(name).DEFAULT.url
        torch.save(models.get_model(name).state_dict(), checkpoints / url.rpartition("/")[2])
    for name in VITS:
        tag = timm.get_pretrained_cfg(name).tag
        repository, commit = caches / "hub" / f"models--timm--{name}.{tag}", "0" * 40
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        save_file(timm.create_model(name).state_dict(), repository / "snapshots" / commit / "model.safetensors")
    return caches


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_TO_RUN)
@pytest.mark.usefixtures("few_strengths")
def test_the_shell_examples_of_a_page_run(
    page: str, start: Path, data_sets: Path, caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Classes of random pictures are not separable, and fits of all strengths would take 1,000 steps.
    monkeypatch.setattr(logistic, "MAX_ITERATIONS", 20)
    monkeypatch.setattr("pipelines.probe.probe_figures.save_figure", lambda figure, path: path)  # not drawn
    monkeypatch.setenv("TORCH_HOME", str(caches / "torch"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(caches / "hub"), raising=False)
    place = tmp_path / "place"
    shutil.copytree(start, place, ignore=shutil.ignore_patterns("data-sets"))
    for name in DATA_SETS.get(page, ()):
        shutil.copytree(data_sets / name, place / "outputs" / name)
    if page in FEW_PHOTOS:
        shutil.rmtree(place / "photos" / "train")
    monkeypatch.chdir(place)
    for line, comment in lines_of(page):
        if reason_not_to_run(line) is not None:
            continue
        for command in line.split("&&"):
            words = shlex.split(command)
            assert words[0] == "layertap", f"{page}: {command} is neither run nor listed in NOT_RUN"
            result = CliRunner().invoke(main, words[1:])
            assert result.exit_code == 0, f"{page}: {command}: {result.output}"
            check_table(page, words, result.stdout)
        for path in re.findall(r"outputs/[\w./-]*\w", comment):
            assert Path(path).exists(), f"{page}: {line} did not write {path}"


def check_table(page: str, words: list[str], printed: str) -> None:
    """Compare the heads of the table that a page shows below `layertap probe` with those that are printed."""
    if page != "docs/guides/probes.md" or words[1:] != ["probe", "outputs/cifar"]:
        return
    shown: Any = next(line for line in blocks(page, "text")[0].splitlines() if line.split()[:1] == ["layer"])
    heads = next(line for line in printed.splitlines() if line.split()[:1] == ["layer"])
    assert re.split(r"  +", heads) == re.split(r"  +", shown)


def test_every_reason_not_to_run_a_line_is_used() -> None:
    commands = [command for page in PAGES for command, _ in lines_of(page)]
    assert {reason_not_to_run(command) for command in commands} == {None, *NOT_RUN}
