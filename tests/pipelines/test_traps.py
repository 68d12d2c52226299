"""Traps of configuration files and the command line: home folders, options without effect, advice, permissions."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from extract import defaults, load_backbone
from extract.compute.feature_choice import choose_features
from extract.errors import InputError
from extract.extraction.pipeline import Summary
from extract.images import list_images
from extract.images.listing import is_plan
from extract.images.plan_writing import write_plan
from pipelines.embed import job
from pipelines.embed.config import EmbedConfig, listed_images
from pipelines.embed.job import EmbedResult, bottleneck, plan_of
from pipelines.sync.config import load_sync_file
from pipelines.terminal.config import load_config, read_yaml, with_home
from tests.conftest import TINY_INPUT, make_picture
from tests.pipelines.test_cli import SMALL, succeeds

# Home folders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_a_home_folder_in_a_config_file_is_that_of_the_user(folder: Path, home: Path) -> None:
    """And that of an argument that the shell did not expand: it leaves `--out=~/features` as it is."""
    (home / "photos").symlink_to(folder)
    Path("c.yaml").write_text("images: ~/photos\nout: ~/features\nlimit: 1\n")
    succeeds("embed", "--config", "c.yaml", *SMALL)
    succeeds("embed", "~/photos", "--out=~/typed", "--limit", 1, *SMALL)
    assert all((home / name / "dataset.json").is_file() for name in ("features", "typed"))
    assert sorted(path.name for path in Path().iterdir()) == ["c.yaml"]  # no folder called ~


def test_every_text_of_a_config_file_that_starts_with_a_home_folder_is_expanded(home: Path) -> None:
    Path("s.yaml").write_text(
        "data_sets:\n- images: ~/a\n  out: ~/out-a\n- {images: './~/b', out: out-b, weights: ~/w.pth}\n"
        "schedule: {every: 1d, on_failure: ['~/bin/hook ~/x']}\n"
    )
    file = load_sync_file(Path("s.yaml"))
    assert [(item.images, str(item.out)) for item in file.data_sets] == [
        (f"{home}/a", f"{home}/out-a"), ("./~/b", "out-b"),
    ]  # fmt: skip
    assert file.data_sets[1].weights == f"{home}/w.pth"
    assert file.schedule is not None
    # The shell that runs a command expands the rest.
    assert file.schedule.on_failure == [f"{home}/bin/hook ~/x"]


@pytest.mark.parametrize("text", ["a~/b", "~x/z", "photos/~", "~*", "s3://b/~/c", "layer~", "~", "", "./~/x"])
def test_only_a_leading_home_folder_is_expanded(home: Path, text: str) -> None:
    assert with_home(text) == (str(home) if text == "~" else text)
    Path("c.yaml").write_text(f"images: {text!r}\n")
    assert read_yaml(Path("c.yaml")) == {"images": str(home) if text == "~" else text}


# Config files


def test_aliases_of_a_config_file_are_expanded(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: &x {mean: [1, 2], std: ~/y}\nb: {<<: *x, std: z}\nc: *x\n")
    values = read_yaml(tmp_path / "c.yaml")
    assert (values["b"], values["c"]) == ({"mean": [1, 2], "std": "z"}, values["a"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("images: &b [*b]", "is nested too deep"),
        ("images: " + "[" * 1_500, "is nested too deep"),
        ("images: photos\nbatch_size: [3\nworkers: 2\n", "line 3, column 8: expected ',' or ']', but got ':'"),
        ("images: photos\n\tworkers: 2\n",
         "line 2, column 1: found character '\\t' that cannot start any token; indent with"),
        ("images: 'photos\n", "line 2, column 1: found unexpected end of stream"),
        ("images: a: b\n", "line 1, column 10: mapping values are not allowed here"),
        ("images: a\nsize: 8\nimages: b\n", "line 3, column 1: the key 'images' is given twice"),
        ("images: *x\n", "line 1, column 9: found undefined alias"),
        ("images: !!python/name:os.system\n", "line 1, column 9: could not determine a constructor"),
        ("images: \udcff\n", "c.yaml is not YAML: 'utf-8' codec can't decode byte 0xff"),
        ("- a", "has no keys"),
        ("backbone: timm/test_resnet", "the key `images` is missing"),
        ('images: ""', "expected a path that is not empty"),
        ('images: "a\\0b"', "expected a path that is not empty"),
        ("images: x\nlimit: true", "limit: expected a valid integer"),
        ("images: x\nsize: 0", "size: expected pixels, such as 256 or 256x320; got 0"),
    ],
)  # fmt: skip
def test_a_wrong_config_file_is_refused_in_one_line_with_the_place(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(content, errors="surrogateescape")
    with pytest.raises(InputError) as raised:
        load_config(EmbedConfig, tmp_path / "c.yaml", {})
    assert message in str(raised.value)
    assert ("c.yaml is not YAML: " in str(raised.value)) == message.startswith(("line ", "c.yaml"))
    assert "c.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_error_names_the_key_and_the_file_of_what_stands_in_a_file_and_the_option_of_what_was_typed(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text("images: x\naddress: local\nbatch_size: 0\n")
    with pytest.raises(InputError) as raised:
        load_config(EmbedConfig, tmp_path / "c.yaml", {"workers": -1})
    in_file, typed = str(raised.value).splitlines()
    assert in_file.startswith(f"{tmp_path / 'c.yaml'}: batch_size: ")
    assert typed.startswith("workers: ")
    with pytest.raises(InputError) as raised:
        load_config(EmbedConfig, tmp_path / "c.yaml", {"batch_size": 1, "address": "auto"})
    assert str(raised.value) == "--address is that of a Ray cluster; add --engine ray"


# Options that have no effect


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"address": "auto"}, "--address is that of a Ray cluster; add --engine ray"),
        ({"address": "local", "engine": "processes"}, "--address is that of a Ray cluster; add --engine ray"),
        ({"workers_per_gpu": 2}, "--workers-per-gpu is for several workers"),
        ({"cpus_per_worker": 2}, "--cpus-per-worker is for several workers"),
        ({"scratch": "/tmp/x"}, "--scratch is for several workers"),
        ({"fast": True, "engine": "processes"}, "--fast works in one process"),
        ({"engine": "ray", "address": "local", "cpus_per_worker": 2, "workers_per_gpu": 2}, ""),
        ({"engine": "processes", "cpus_per_worker": 1, "scratch": "/tmp/x"}, ""),
        ({"out": "s3://bucket/x", "scratch": "/tmp/x"}, ""),
        ({"shards_of": "0/2", "cpus_per_worker": 1}, ""),
        ({"device": "cuda:0,cuda:1", "workers_per_gpu": 2}, ""),
        ({"device": "all", "workers_per_gpu": 2}, ""),
        ({"workers_per_gpu": 1}, ""),
    ],
)
def test_an_option_of_several_workers_is_refused_for_one(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("images: x\n" + "".join(f"{key}: {value}\n" for key, value in values.items()))
    for path, typed, start in ((file, {}, f"{file}: {message}"), (None, {"images": "x", **values}, message)):
        with pytest.raises(InputError) if message else contextlib.nullcontext() as raised:
            load_config(EmbedConfig, path, typed)
        assert not message or str(raised.value).startswith(start)


def test_a_number_of_processes_far_above_the_cores_is_refused() -> None:
    most = max(128, 4 * defaults.CORES)
    assert load_config(EmbedConfig, None, {"images": "x", "workers": most}).workers == most
    with pytest.raises(InputError, match=f"workers: expected at most {most} processes"):
        load_config(EmbedConfig, None, {"images": "x", "workers": most + 1})


# What a run was bound by


def summary_of(images: float, forward: float, write: float, wait: float = 0.0) -> Summary:
    stages = {"images": images, "forward": forward, "write": write}
    return Summary(n_rows=1, computed=1, seconds=sum(stages.values()), stages=stages, write_wait_s=wait)


@pytest.mark.parametrize(
    ("summary", "stage"),
    [
        (summary_of(5, 73, 22), "forward"),  # a disk without any cost would save 22 %, a forward twice as fast 36 %
        (summary_of(5, 40, 55), "write"),  # completing and packing the files
        (summary_of(5, 50, 45, wait=40), "write"),  # the forward waits for the disk, however fast it is
        (summary_of(5, 73, 22, wait=10), "forward"),
        (summary_of(30, 60, 10), "images"),  # decoding cannot keep up with the forward
        (summary_of(19, 61, 20), "forward"),
        (summary_of(30, 30, 40, wait=35), "write"),
        (summary_of(0, 0, 0), "forward"),
    ],
)
def test_a_run_is_bound_by_what_its_forward_waits_for_and_else_by_the_largest_stage(
    summary: Summary, stage: str
) -> None:
    assert bottleneck(summary) == stage


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> EmbedResult:
    root = tmp_path_factory.mktemp("outcome")
    (root / "in").mkdir()
    make_picture(0).save(root / "in" / "0.png")
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    config = EmbedConfig(images=str(root / "in"), out=str(root / "out"), workers=defaults.CORES)
    plan = plan_of(config, backbone, listed_images(config))
    return EmbedResult(plan, summary_of(0, 1, 0), [], {}, 0)


def test_a_run_with_fast_is_not_advised_to_use_what_it_has_tried(outcome: EmbedResult) -> None:
    for summary in (summary_of(0, 9, 1), summary_of(9, 9, 1), summary_of(0, 1, 9)):
        for tuned in (False, True):
            lines: list[str] = []
            job.print_summary(replace(outcome, summary=summary, tuned=tuned), lines.append)
            (advice,) = [line for line in lines if line.startswith(f"bound by {bottleneck(summary)}: ")]
            tried = [flag for flag in ("--fast", "--compile", "--decode") if flag in advice]
            assert bool(tried) == (not tuned and bottleneck(summary) != "write")


def test_the_result_of_a_fast_run_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_fastest", lambda *_: [{}])
    config = EmbedConfig(
        images=str(folder), out=str(tmp_path / "out"), backbone="timm/test_resnet", weights="random", workers=0,
        size=64, crop=64, device="cpu", fast=True, limit=2,
    )  # fmt: skip
    result = job.embed(config)
    assert result.tuned
    assert 0 <= result.summary.write_wait_s <= result.summary.stages["write"]


# Permissions


@pytest.fixture
def closed(folder: Path) -> Iterator[Path]:
    """A folder that this process, as another user, may not read."""
    if os.getuid():
        pytest.skip("only root can become another user")
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    shutil.copytree(folder, root / "closed")
    (root / "closed").chmod(0o700)
    os.seteuid(65534)
    try:
        yield root / "closed"
    finally:
        os.seteuid(0)
        shutil.rmtree(root)


def test_a_folder_without_permission_is_named_with_what_is_needed(closed: Path) -> None:
    assert not is_plan(closed)
    needed = rf"^{closed}/?: the folder cannot be read: Permission denied; reading needs the permissions r and x"
    with pytest.raises(InputError, match=needed):
        list_images(closed)
    with pytest.raises(InputError, match=needed):
        write_plan(closed, Path(tempfile.gettempdir()) / f"plan-{os.getpid()}")


# Backbones without a single classifier


class ManyHeads(nn.Module):
    """Its classifier is a list, of which each item is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 6, 8, 8)
        self.head = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.body(images).mean((2, 3))
        return torch.stack([head(pooled) for head in self.head]).mean(0)


def test_an_embedding_of_a_list_of_classifiers_is_refused_in_terms_of_the_embedding() -> None:
    loaded = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    backbone = replace(loaded, model=ManyHeads().eval(), classifier="head", spec="timm/heads")
    with pytest.raises(InputError, match="timm/heads has no embedding: its classifier 'head' is not called as a whole"):
        choose_features(backbone, ["embedding"])
    assert [feature.name for feature in choose_features(backbone, ["body"]).features] == ["body"]
    with pytest.raises(InputError, match=r"name each layer by itself \(-l body -l head\.0:none"):
        choose_features(backbone, ["body,head.0:none"])
    with pytest.raises(InputError, match="a layer name is empty"):
        choose_features(backbone, [""])
