"""The documents: examples run and do what they say, commands and keys exist, links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image
from pyarrow import parquet

import layertap
from extract import FeatureReader
from extract.analysis.probe import logistic
from extract.backbones import from_timm
from extract.backbones.sources import SOURCES
from extract.store.export import export
from pipelines.cli import main
from pipelines.embed.config import EmbedConfig
from pipelines.probe import report
from pipelines.sync.config import ScheduleConfig, SyncConfig, load_sync_file
from tests.conftest import make_picture

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
SET_UP = ("pip install -e '.[demo]' && layertap demo", "pip install -e '.[test]' && pytest")

# Examples that are not run here: the page, the first words of the example (all examples: ""), and the reason.
NOT_RUN = {
    ("docs/file-format.md", ""): "tests/pipelines/test_golden.py runs it on data sets of each format version",
    (
        "docs/guides/hooks.md",
        'x = torch.randn(6, 4)\nwith torch.no_grad(), Taps(net, "0").compile',
    ): "test_graphs.py runs it",
    ("docs/guides/other-tools.md", "import lance"): "test_export.py of the store runs it in its own process",
    ("docs/guides/search-and-report.md", "from layertap import load_text_tower"): "needs weights from a server",
}


def blocks(page: str, language: str) -> list[str]:
    return [textwrap.dedent(code) for code in re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)]


def examples(page: str) -> list[str]:
    """Python examples of a page, without those that are not run."""
    omitted = [start for name, start in NOT_RUN if name == page]
    return [code for code in blocks(page, "python") if not any(code.startswith(start) for start in omitted)]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for number, code in enumerate(examples("docs/guides/hooks.md")):
        if "vgg16" in code:  # a test of its own: its 138 million weights take seconds
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, found)
        found[f"printed by {number}"] = printed.getvalue()
    return found


@pytest.fixture(scope="module")
def place(small_inputs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, their data set, one with tokens of the whole input, and another picture."""
    from extract import extract_features

    place = tmp_path_factory.mktemp("documents")
    for i in range(11):
        path = place / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_picture(i).save(path)
    make_picture(11).save(place / "cat.jpg")
    how: dict[str, Any] = {"workers": 0, "progress": False}
    extract_features(place / "photos", out=place / "outputs" / "photos", **how)
    whole = {"size": 224, "crop": 224}
    tokens = place / "outputs" / "photos-tokens"
    extract_features(place / "photos", out=tokens, layers="blocks.4:tokens", preprocessing=whole, **how)
    return place


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs the examples of a page, one after the other, and returns their names and output."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(logistic, "MAX_ITERATIONS", 20)  # classes of random pictures are not separable

    def run(page: str, **given: Any) -> tuple[dict[str, Any], str]:
        names: dict[str, Any] = {"__name__": "__main__", **given}
        assert examples(page)
        for code in examples(page):
            exec(code, names)
        return names, capsys.readouterr().out

    return run


HOOKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "there are twelve examples": lambda names: len(examples("docs/guides/hooks.md")) == 12,
    "shapes of the blocks of ResNet-50 are printed": lambda names: (
        names["printed by 0"].splitlines() == [f"layer3.{i} (1, 1024, 14, 14)" for i in range(6)]
    ),
    "an output is what forward returned": lambda names: names["difference"] == 0,
    "an input is what the layer before returned": lambda names: names["passed_on"] == 0,
    "the value before an edit is collected": lambda names: torch.equal(names["after"], 2 * names["before"][0]),
    "a frozen model has gradients behind an edit": lambda names: torch.equal(
        names["gradient"], names["frozen"][1].weight.expand(6, 8)
    ),
    "a tensor without a layer is seen": lambda names: torch.equal(names["seen"], torch.ones(3)),
    "and changed": lambda names: torch.equal(names["changed"], torch.full((3,), 3.2)),
    "the histogram holds the gradient of each image": lambda names: names["counts"].sum() == 600,
    "a smoothed gradient is a moving average": lambda names: (
        names["smoothed"].shape == (1, 8) and names["smoothed"].abs().sum() > 0
    ),
    "moments are of all layers and batches": lambda names: (
        set(names["moments"]) == {"0", "1", "2"} and names["inspection"].images == 500
    ),
    "a naive hook loses what an in-place ReLU rewrites": lambda names: names["lost"] == 0 and 50 < names["there"] < 250,
    "a clipped gradient is clipped": lambda names: names["largest"] == pytest.approx(0.01),
    "norms of a weight's gradient are handed over": lambda names: (
        len(names["norms"]) == 3 and all(norm > 0 for norm in names["norms"])
    ),
}


@pytest.mark.parametrize("claim", HOOKS)
def test_the_examples_of_hooks_do_what_they_say(claim: str, names: dict[str, Any]) -> None:
    assert HOOKS[claim](names)


@pytest.mark.slow
def test_doubling_the_first_layer_changes_its_gradients(names: dict[str, Any]) -> None:
    (code,) = (code for code in examples("docs/guides/hooks.md") if "vgg16" in code)
    torch.manual_seed(0)
    exec(code, names)
    one, two = names["gradients"]
    assert not torch.allclose(one, two)
    assert 1.5 < two.norm() / one.norm() < 2.5


def test_the_first_examples_and_the_reading_example_read_features_and_labels(run: Any) -> None:
    found, printed = run("README.md")
    assert found["x"].shape == (11, 1280)
    assert sorted(text.split("/")[1] for text in found["paths"]) == sorted(f"{i}.png" for i in range(11))
    assert len(found["loader"]) == 1
    assert "'layer2': (2, 128, 8, 8)" in printed
    assert found["taps"].record["layer1@grad"].abs().sum() > 0
    found, _ = run("docs/index.md")
    assert (found["x"].shape, found["y"].tolist()) == ((11, 1280), [0] * 6 + [1] * 5)
    found, _ = run("docs/guides/reading.md")
    assert tuple(found["x"].shape) == (11, 1280)
    assert sorted(found["y"].tolist()) == [0] * 6 + [1] * 5
    assert sorted(found["rows"].tolist()) == list(range(11))
    assert found["dataset"].residency == "memory"
    assert sorted(found["paths"]) == sorted(found["reader"].paths)


def test_the_example_of_a_check_names_the_order(run: Any) -> None:
    found, printed = run("docs/guides/verify-and-export.md")
    assert found["result"].agrees
    assert "cause: order: the rows are in reverse order" in printed


def test_the_examples_of_an_own_loop_store_texts_and_states(run: Any, place: Path) -> None:
    assert all(len(code.splitlines()) <= 40 for code in examples("docs/guides/your-own-loop.md"))
    found, printed = run("docs/guides/your-own-loop.md")
    assert found["reader"].paths == list(found["texts"])
    assert np.array_equal(found["reader"]["vector"][:], found["embed"](found["texts"].values()).detach().numpy())
    assert found["reader"].classes == ["cats", "dogs"]
    states = found["states"]
    assert np.allclose(states["state"][:17][:, 0], np.sin(np.arange(17) / 9))
    assert [failure[0] for failure in states.failures] == [17, 41]
    assert "'the simulator reports a collision'" in printed
    assert [path.name for path in found["shards"]] == ["000000.h5", "000001.h5"]


def test_the_example_for_users_of_thingsvision_returns_dissimilarities(run: Any) -> None:
    found, _ = run("docs/coming-from/thingsvision.md")
    np.testing.assert_allclose(found["rdm"], 1 - np.corrcoef(found["x"].astype(np.float64)), atol=1e-12)


def test_the_tokens_example_reads_probes_streams_and_trains(place: Path, run: Any) -> None:
    from extract import extract_features

    for path in (place / "photos").rglob("*.png"):  # the left half of a picture, the right half, and a border
        picture = Image.open(path)
        mask = np.zeros((picture.height, picture.width), np.uint8)
        mask[:, picture.width // 2 :], mask[: picture.height // 4] = 1, 255
        (place / "masks" / path.parent.name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(place / "masks" / path.relative_to(place / "photos"))
    layers, whole = ["blocks.3:none", "blocks.4:none"], {"size": 224, "crop": 224}
    how: dict[str, Any] = {"preprocessing": whole, "workers": 0, "progress": False}
    extract_features(place / "photos", out=place / "outputs" / "photos-maps", layers=layers, **how).close()
    found, _ = run("docs/guides/tokens.md")
    assert found["tokens"].shape == (11 * 196, 112)
    assert found["values"].shape == (6 * 196, 112)  # the last batch of the second worker
    assert found["segmented"].metrics["mIoU"].value > 0.4
    assert found["tokens"].boxes((640, 480)).shape == (196, 4)
    assert len(found["head_losses"]) == 20 * 3
    assert np.mean(found["head_losses"][-3:]) < 0.8 * np.mean(found["head_losses"][:3])
    assert len(found["losses"]) == 3 * 9
    assert np.mean(found["losses"][-9:]) < 0.8 * np.mean(found["losses"][:3])


def test_the_probe_example_probes(run: Any) -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 90)
    x = (generator.normal(size=(90, 8)) + 2 * np.eye(3, 8)[y]).astype(np.float32)
    found, _ = run("docs/guides/probes.md", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    assert found["result"].value > 0.7
    assert len(found["result"].curve) == 45


def test_the_examples_of_brains_compare_and_predict(run: Any) -> None:
    pairs, voxels = np.random.default_rng(0).random((3, 55)), np.random.default_rng(1).normal(size=(22, 3))
    found, _ = run("docs/guides/brains.md", subjects=pairs, voxels=voxels, rows=np.tile(np.arange(11), 2))
    assert [layer.name for layer in found["result"].layers] == ["embedding"]
    assert found["result"].ceiling.shape == found["result"].best_r.shape == (3,)
    cosines = pairs @ found["rdm"] / np.linalg.norm(pairs, axis=1) / np.linalg.norm(found["rdm"])
    np.testing.assert_allclose(found["found"].mean, [cosines.mean()])


def test_the_example_of_comparing_features_compares(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw", lambda outcome, folder: [])
    found, _ = run("docs/guides/compare.md")
    assert 0.3 < found["found"].cka[0, 1] < 1
    assert found["found"].mutual_knn.shape == (2, 2)


def test_the_example_of_further_columns_reads_them(run: Any, place: Path) -> None:
    from extract import extract_features

    paths = sorted(map(str, (place / "photos").rglob("*.png")))
    columns = {"path": paths, "caption": [f"the number {i}" for i in range(11)], "age": list(range(0, 110, 10))}
    parquet.write_table(pa.table(columns), place / "list.parquet")
    how: dict[str, Any] = {"keep": ["caption", "age"], "workers": 0, "progress": False}
    extract_features(place / "list.parquet", out=place / "outputs" / "list", **how).close()
    found, _ = run("docs/guides/images.md")
    assert found["reader"].columns["caption"] == [f"the number {i}" for i in range(11)]
    assert found["older"].shape == (6, 1280)


@pytest.mark.slow
def test_the_examples_of_other_tools_run(run: Any, place: Path) -> None:
    with FeatureReader(place / "outputs" / "photos") as reader:
        if not (place / "outputs" / "photos.parquet").exists():
            export(reader, place / "outputs" / "photos.parquet", "parquet")
        x, paths = reader["embedding"][:], reader.paths[:]
    found, printed = run("docs/guides/other-tools.md")
    cosines = x @ x[0] / np.linalg.norm(x, axis=1) / np.linalg.norm(x[0])
    order = np.argsort(-cosines)
    assert found["rows"].tolist() == [order[:5].tolist()]
    assert paths[order[1]] in printed  # of DuckDB
    assert found["frame"].height == 11
    np.testing.assert_array_equal(np.stack(found["table"]["embedding"].to_numpy()), x)
    with FeatureReader(place / "outputs" / "from-dicts") as pairs:
        np.testing.assert_array_equal(pairs["embedding"][:], x[:4])
        assert pairs.classes == ["a", "b"]
    (tensors,) = (place / "outputs" / "projector").rglob("tensors.tsv")
    assert np.loadtxt(tensors).shape == x.shape
    with FeatureReader(place / "outputs" / "from-paths") as again:
        np.testing.assert_array_equal(again["embedding"][:], x)
    assert found["model"].score(found["paths"], found["y"]) == 1


@pytest.mark.slow
def test_the_search_example_finds_each_query_itself(run: Any) -> None:
    found, _ = run("docs/guides/search-and-report.md")
    assert found["found"].rows.shape == (2, 10)
    assert found["found"].rows[:, 0].tolist() == [0, 1]


@pytest.mark.slow
def test_the_extraction_example_stores_and_computes_the_same_features(run: Any) -> None:
    found, _ = run("docs/guides/extraction.md", images=torch.randn(2, 3, 224, 224))
    assert found["reader"].layers == ["blocks.5", "blocks.6"]
    assert found["reader"]["blocks.6"].shape == (11, 320)
    assert found["taps"].record["conv_stem"].shape == (2, 32, 112, 112)


@pytest.mark.slow
def test_the_example_of_a_difference_prints_none_between_a_vector_and_itself(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_inputs = replace(SOURCES["bundled"], load=from_timm.load_bundled)
    monkeypatch.setitem(SOURCES, "bundled", whole_inputs)
    found, printed = run("docs/concepts/why-features-differ.md")
    assert found["pixels"].shape == (224, 224, 3)
    assert found["pixels"].dtype == torch.uint8
    assert printed == "0.0\n"


@pytest.mark.slow
def test_the_example_of_diagnosis_inspects_ablates_and_explains(run: Any) -> None:
    from extract import load_backbone

    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    backbone = load_backbone("bundled/efficientnet_lite0", device="cpu")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    pictures, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    looks: list[bool] = []
    pixels = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)
    batches: dict[str, Any] = {"batches": [(pictures, labels)]}

    def train() -> None:
        net(pictures).sum().backward()
        looks.append(True)

    given = {"model": net, "backbone": backbone, "pixels": pixels, "train": train, "F": torch.nn.functional}
    _, code = examples("docs/guides/inside-a-network.md")
    of_backbone = code.replace("ablation(backbone, batches", "ablation(backbone, inputs")
    given["inputs"] = [(backbone.preprocessing.to_input(pixels), None)]
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as opened:  # a writer that is left open would write when its folder is gone
        given["SummaryWriter"] = lambda folder: opened.enter_context(tensorboard.SummaryWriter(folder))
        exec(of_backbone, given | batches, found)
    assert found["inspection"].images == 4
    assert len(found["effects"]) == 7
    assert found["cam"].shape == (2, 7, 7)
    assert looks == [True]


@pytest.mark.slow
def test_the_example_of_an_own_network_explains_two_modules() -> None:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    exec(examples("docs/guides/inside-a-network.md")[0], found)
    assert {layer: cam.shape for layer, cam in found["maps"].items()} == {"0.1": (4, 24, 24), "0.3": (4, 20, 20)}
    assert found["classes"].shape == (4,)
    assert found["cam"].shape == (2, 14, 14)
    section = PAGES["docs/guides/inside-a-network.md"].partition("## Your own network")[2].partition("\n## ")[0]
    assert len(re.sub(r"(?s)```.*?```", "", section).split()) <= 150


def test_the_recipe_for_an_own_network_records_edits_and_explains_it(run: Any) -> None:
    torch.manual_seed(0)
    found, printed = run("docs/guides/recipes.md")
    net, images = found["net"], found["images"]
    with torch.no_grad():
        hidden = net[0](images)
        torch.testing.assert_close(found["activations"], hidden)
        changed = (net[1:](hidden.index_fill(1, torch.tensor([3]), 0)) - net(images)).abs().max()
    assert printed == f"{changed!r}\n"
    assert (found["maps"].shape, found["classes"].shape) == ((4, 30, 30), (4,))


@pytest.mark.slow
def test_the_hand_written_loop_and_layertap_give_rows_of_all_images(run: Any) -> None:
    found, _ = run("docs/coming-from/hand-written-loop.md")
    assert torch.cat(found["rows"]).shape == (11, 512)
    assert found["x"].shape == (11, 1280)


@pytest.mark.slow
def test_the_examples_of_feature_extractors_agree_but_beside_an_in_place_layer(run: Any) -> None:
    found, _ = run("docs/coming-from/create-feature-extractor.md")
    assert (found["theirs"] < 0).sum() == 0
    negative = (found["taps"].record["bn1"] < 0).float().mean()
    assert 0.3 < negative < 0.7


@pytest.mark.slow
def test_the_example_of_hook_libraries_gives_the_values_of_bare_hooks_and_autograd(run: Any) -> None:
    found, _ = run("docs/coming-from/hook-libraries.md")
    vit, images, others = found["vit"], found["images"], found["others"]
    blocks: list[torch.Tensor] = []  # no layer of this network works in place: a bare hook is right
    with contextlib.ExitStack() as hooks:
        for block in vit.blocks:
            hooks.callback(block.register_forward_hook(lambda layer, args, output: blocks.append(output)).remove)
        logits = vit(others)
        outputs = blocks[:]
        blocks.clear()
        (gradient,) = torch.autograd.grad(vit(images)[:, 0].sum(), blocks[1])
    assert {name: tuple(value.shape) for name, value in found["layers"].items()} == {
        f"blocks.{i}": tuple(outputs[i].shape) for i in range(3)
    }
    for i in range(3):
        torch.testing.assert_close(found["layers"][f"blocks.{i}"], outputs[i].detach())
    torch.testing.assert_close(found["patch"], outputs[1].detach())
    torch.testing.assert_close(found["patched"], logits.detach())
    torch.testing.assert_close(found["gradient"], gradient)
    block = vit.blocks[1]
    with torch.no_grad():
        normed = block.norm1(outputs[0])
        images_, tokens, width = normed.shape
        q, k, _ = block.attn.qkv(normed).view(images_, tokens, 3, 3, width // 3).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / (width // 3) ** 0.5).softmax(-1)
        torch.testing.assert_close(found["attention"], weights)
        torch.testing.assert_close(found["inputs"], block.norm2(outputs[0] + block.attn(normed)))
        stem = found["resnet"].maxpool(found["resnet"].relu(found["resnet"].bn1(found["resnet"].conv1(images))))
        layer = found["resnet"].layer1[0]
        first = layer.bn1(layer.conv1(stem)).clamp(min=0)
        second = (layer.bn2(layer.conv2(first)) + stem).clamp(min=0)
    assert list(found["calls"]) == ["layer1.0.relu#0", "layer1.0.relu#1"]
    torch.testing.assert_close(found["calls"]["layer1.0.relu#0"], first)
    torch.testing.assert_close(found["calls"]["layer1.0.relu#1"], second)


@pytest.mark.slow
def test_the_folder_for_clip_retrieval_has_unit_vectors_and_paths_of_all_rows_with_features(
    place: Path, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import h5py
    import pyarrow.parquet

    from extract import extract_features

    shutil.copytree(place / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"no image")
    extract_features(str(tmp_path / "photos"), out=tmp_path / "outputs" / "photos-clip", progress=False)
    monkeypatch.chdir(tmp_path)
    run("docs/coming-from/clip-retrieval.md")
    with h5py.File(tmp_path / "outputs" / "photos-clip" / "shards" / "000000.h5") as file:
        stored, paths = file["features/embedding"][:].astype(np.float64), file["path"].asstr()[:]
    good = [row for row, path in enumerate(paths) if path != "a/broken.png"]
    assert len(good) == 11
    written = np.load(tmp_path / "embeddings" / "img_emb" / "img_emb_0.npy")
    table = pyarrow.parquet.read_table(tmp_path / "embeddings" / "metadata" / "metadata_0.parquet")
    assert table.to_pydict() == {"image_path": [f"photos/{paths[row]}" for row in good]}
    assert written.dtype == np.float16
    units = stored[good] / np.sqrt((stored[good] ** 2).sum(1, keepdims=True))
    np.testing.assert_allclose(written, units, atol=1e-3 * units.max())


def test_every_page_with_examples_is_run_or_exempt() -> None:
    run_here = set(re.findall(r'(?:run|examples)\("([^"]+\.md)"', Path(__file__).read_text(encoding="utf-8")))
    with_examples = {page for page in PAGES if examples(page)}
    assert with_examples == run_here
    for page, start in NOT_RUN:
        assert any(code.startswith(start) for code in blocks(page, "python")), (page, start)


def commands(page: str) -> Iterator[tuple[str, bool]]:
    """Commands of layertap on a page, and whether each is a line of a shell example or text between backticks."""
    for code in blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            yield from ((part.strip(), True) for part in re.split(r"&&|;|\||>", line.partition(" #")[0]))
    without_blocks = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    yield from ((text, False) for text in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", without_blocks))


def problem(words: list[str]) -> str | None:
    """What is wrong with a command, without running it: an unknown command, option or choice."""
    if words[0] not in main.commands:
        return f"no command {words[0]!r}"
    command = main.commands[words[0]]
    context = click.Context(command)
    try:
        values, rest, _ = command.make_parser(context).parse_args(words[1:])
        for param in command.params:
            if isinstance(param.type, click.Choice) and isinstance(values.get(str(param.name)), str):
                param.type.convert(values[str(param.name)], param, context)
    except click.UsageError as error:
        return error.format_message()
    return f"unexpected {rest}" if rest else None


def test_every_command_of_a_page_exists_with_its_options() -> None:
    unknown = []
    for page in PAGES:
        for text, is_example in commands(page):
            words = shlex.split(text) if re.match(r"layertap [a-z]+( |$)", text) else []
            if words and (wrong := problem(words[1:])) is not None:
                mentions_an_option = not is_example and words[-1].startswith("-") and "requires an argument" in wrong
                unknown += [] if mentions_an_option else [f"{page}: {text}: {wrong}"]
    assert unknown == []


def test_a_wrong_command_option_or_choice_is_noticed() -> None:
    assert problem(["emded", "photos"]) == "no command 'emded'"
    assert "--layer5" in str(problem(["embed", "photos", "--layer5", "x"]))
    assert "'jpg' is not one of" in str(problem(["export", "outputs/photos", "--to", "jpg"]))
    assert "unexpected" in str(problem(["verify", "outputs/photos", "outputs/other"]))
    assert problem(["export", "outputs/photos", "--to", "npy"]) is None


def test_configuration_files_of_the_pages_are_valid(tmp_path: Path) -> None:
    texts = [text for page in PAGES for text in blocks(page, "yaml")]
    assert len(texts) >= 2
    for text in texts:
        (tmp_path / "run.yaml").write_text(text)
        if {"settle", "schedule", "data_sets"} & yaml.safe_load(text).keys():
            assert load_sync_file(tmp_path / "run.yaml").data_sets, text
        else:
            EmbedConfig(**yaml.safe_load(text))


def test_every_link_of_a_page_leads_to_a_file() -> None:
    generated = {"docs/reference/command-line.md", "docs/reference/configuration.md"}
    links = [
        (page, target)
        for page, text in PAGES.items()
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
        if "://" not in target and not target.startswith("#")
    ]
    assert len(links) > 100
    paths = {link: os.path.normpath(Path(link[0]).parent / link[1].partition("#")[0]) for link in links}
    assert [link for link, path in paths.items() if path not in generated and not (ROOT / path).is_file()] == []


def test_the_readme_is_short_and_has_the_set_up_commands() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 150
    assert set(SET_UP) <= set(lines)
    assert max(len(line) for line in lines[:24]) <= 100  # the first screen


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The module that MkDocs takes for its hooks."""
    return importlib.import_module("docs.hooks")


def test_the_page_for_programs_is_what_the_program_has() -> None:
    page = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    assert page == importlib.import_module("docs.summary").summary(), "run `python docs/summary.py`"
    for name, command in main.commands.items():
        if command.hidden:
            continue
        (line,) = re.findall(rf"^- `layertap {name}[ `].*", page.partition("## Commands")[2], re.MULTILINE)
        options = [option for option in command.params if option.param_type_name == "option"]
        assert all(f"`{max(option.opts, key=len)}`" in line for option in options)
    for name in layertap.__all__:
        assert re.search(rf"^- `{name}[(`]", page, re.MULTILINE), name


def test_the_page_of_commands_has_every_command_and_option(hooks: ModuleType) -> None:
    parts = re.split(r"^## ", "\n".join(hooks.command_line()), flags=re.MULTILINE)[1:]
    by_name = {part.partition("\n")[0]: part for part in parts}
    assert by_name.keys() - {"Names of earlier versions"} == main.commands.keys()
    for name, command in main.commands.items():
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert all(option in by_name[name] for option in param.opts), (name, param.name)


def test_the_page_of_keys_has_every_key_of_the_models(hooks: ModuleType) -> None:
    page = "\n".join(hooks.configuration())
    for model in (EmbedConfig, SyncConfig, ScheduleConfig, hooks.ProbeConfig):
        for name, field in model.model_fields.items():
            assert f"`{name}`" in page
            assert field.description, name
            assert hooks._cell(field.description) in page, name
