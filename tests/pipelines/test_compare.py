"""`layertap compare` as a user meets it, and its page in a browser."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from extract import FeatureReader, InputError
from extract.analysis.probe.metrics import mcnemar
from extract.analysis.similarity import feature_similarity
from extract.store.format.writer import ShardWriter
from layertap import compare as layertap_compare
from pipelines.compare import job
from pipelines.compare.job import Candidate, candidates_of, forward_rate
from tests.pipelines.test_cli import fails, layertap, succeeds
from tests.pipelines.test_report_page import browser, fine, opened

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.usefixtures("frozen")

COLOURS = ((200, 60, 60), (60, 60, 200), (60, 170, 60))
QUICK = ("--workers", 0, "--compile", "off", "-p", "centroid")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety pictures in three classes that overlap, in two splits, and a table of three backbones."""
    root = tmp_path_factory.mktemp("compare")
    generator = np.random.default_rng(0)
    for number in range(90):
        label = number % 3
        pixels = np.array(COLOURS[label]) + generator.normal(0, 90, (40, 40, 3)) + generator.normal(0, 60, 3)
        split = "test" if number % 2 else "train"
        path = root / "pictures" / split / "abc"[label] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    (root / "backbones.csv").write_text(
        "backbone,weights,name\ntimm/test_resnet,random,resnet\ntimm/test_vit,random,\ntimm/nothing,,\n"
    )
    return root


@pytest.fixture(scope="module")
def compared(made: Path) -> Path:
    """The folder of a comparison."""
    result = compare(made, made / "out", "-l", "embedding")
    assert "timm-nothing is left out: backbone 'timm/nothing' not found" in result.stderr
    assert "timm-nothing: backbone 'timm/nothing' not found" in result.stdout
    return made / "out"


@pytest.fixture
def copied(compared: Path, tmp_path: Path) -> Path:
    """A copy of the comparison, which may be changed."""
    return shutil.copytree(compared, tmp_path / "out")


def compare(made: Path, out: Path, *options: object, images: Path | None = None, table: Path | None = None) -> Any:
    """Compare backbones of a table, that of the fixture unless another is given."""
    of = ("compare", images or made / "pictures", "--from", table or made / "backbones.csv", *QUICK, "-o", out)
    result = layertap(*of, *options)
    assert result.exit_code == ("is left out" in result.stderr), result.output
    return result


def results(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return content


def by_name(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in content["backbones"]}


def flat_copies(made: Path, folder: Path, every: int) -> list[str]:
    """Every so manieth picture in a folder without folders; returns `name,class` of each."""
    folder.mkdir()
    lines = []
    for path in sorted((made / "pictures").rglob("*.png"))[::every]:
        shutil.copy(path, folder / path.name)
        lines.append(f"{path.name},{path.parent.name}")
    return lines


def test_the_numbers_are_those_of_separate_runs(made: Path, compared: Path, tmp_path: Path) -> None:
    content = results(compared)
    (task,) = content["tasks"]
    assert task["layers_chosen_on"] == ""  # one layer each
    assert content["images"] == 90
    assert task["test_images"] == 45
    how = ("-b", "timm/test_resnet", "--weights", "random", "--workers", 0, "--compile", "off")
    succeeds("embed", made / "pictures", *how, "-o", tmp_path / "alone")
    with FeatureReader(tmp_path / "alone") as alone, FeatureReader(compared / "resnet") as together:
        np.testing.assert_array_equal(alone["embedding"][:], together["embedding"][:])
        assert alone.fingerprint == together.fingerprint
    values = {}
    for name in ("resnet", "timm-test_vit-random"):
        succeeds("probe", compared / name, "-p", "centroid", "-o", tmp_path / f"{name}-probe")
        (probe,) = json.loads((tmp_path / f"{name}-probe" / "results.json").read_text())["probes"]
        entry = by_name(content)[name]
        for key in ("value", "low", "high"):
            assert entry[key] == probe["metrics"]["top1"][key]
        values[name] = entry["value"]
        lines = csv.DictReader((tmp_path / f"{name}-probe" / "predictions.csv").open())
        values[f"{name} right"] = np.array([line["label"] == line["predicted"] for line in lines])
    order = [entry["name"] for entry in content["backbones"]]
    assert order == [*sorted(("resnet", "timm-test_vit-random"), key=lambda name: -values[name]), "timm-nothing"]
    best, second, failed = content["backbones"]
    assert (best["p"], best["behind"], best["distinguishable"]) == (None, None, None)
    assert second["behind"] == best["value"] - second["value"]
    *_, p = mcnemar(values[f"{order[0]} right"], values[f"{order[1]} right"])
    assert second["p"] == pytest.approx(p)
    assert second["distinguishable"] == (p <= 0.05)
    assert failed["error"].startswith("backbone 'timm/nothing' not found")
    assert failed["value"] is None


def test_what_a_backbone_costs_is_in_the_table(compared: Path) -> None:
    lines = {line["name"]: line for line in csv.DictReader((compared / "backbones.csv").open())}
    resnet = lines["resnet"]
    from timm import create_model

    model = create_model("test_resnet")
    assert int(resnet["parameters"]) == sum(parameter.numel() for parameter in model.parameters())
    assert (int(resnet["width"]), int(resnet["row_bytes"])) == (model.num_features, 4 * model.num_features)
    assert float(resnet["images_per_s"]) > 0
    assert resnet["weights"] == "random (seed 0)"
    runs = map(json.loads, (compared / "resnet" / "runs.jsonl").open())
    (ended,) = [line for line in runs if line["event"] == "ended"]
    assert float(resnet["images_per_s"]) >= 90 / ended["stages"]["forward"]
    assert lines["timm-nothing"]["images_per_s"] == ""


def test_rates_are_those_of_runs_that_ended(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [
        {"event": "started", "started": "1", "found_done": 0},
        {"event": "computing", "started": "1", "computation": {"prepared_in_s": 50.0}},  # killed
        {"event": "started", "started": "2", "found_done": 0},
        {"event": "computing", "started": "2", "computation": {"prepared_in_s": 2.0}},
        {"event": "ended", "started": "2", "rows": 80, "seconds": 12.0, "stages": {"images": 1.0, "forward": 10.0}},
        {"event": "ended", "started": "3", "rows": 40, "seconds": 5.0, "stages": {"images": 1.0, "forward": 4.0}},
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    assert forward_rate(tmp_path) == pytest.approx(120 / (10 - 2 + 4))
    assert forward_rate(tmp_path / "none") is None


def test_similarity_is_that_of_the_features(compared: Path) -> None:
    content = results(compared)["alikeness"]
    names = [tuple(feature) for feature in content["features"]]
    with FeatureReader(compared / "resnet") as first, FeatureReader(compared / "timm-test_vit-random") as second:
        expected = feature_similarity([first["embedding"][:], second["embedding"][:]])
    assert names == [("resnet", "embedding"), ("timm-test_vit-random", "embedding")]
    for measure in ("cka", "procrustes", "mutual_knn", "rsa"):
        np.testing.assert_allclose(content[measure], getattr(expected, measure), atol=1e-9)
        lines = list(csv.reader((compared / f"{measure}.csv").open()))
        assert lines[0] == [measure, "resnet:embedding", "timm-test_vit-random:embedding"]
        assert float(lines[1][2]) == content[measure][0][1]
    resnet = by_name(results(compared))["resnet"]
    assert resnet["alignment"] == pytest.approx(expected.mutual_knn[0, 1])
    assert resnet["effective_rank"] == pytest.approx(expected.effective_rank[0])


def test_a_second_run_computes_nothing_and_adds_backbones_also_from_a_file_of_settings_and_from_python(
    made: Path, copied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (copied / "compare.json").read_bytes()
    files = {file: file.stat().st_mtime_ns for file in copied.rglob("*.h5")}
    (tmp_path / "compare.yaml").write_text(
        f"images: {made / 'pictures'}\ntable: {made / 'backbones.csv'}\nprotocol: knn\nworkers: 0\ncompile: 'off'\n"
        f"out: {copied}\n"
    )
    assert layertap("compare", "--config", tmp_path / "compare.yaml", "-p", "centroid").exit_code == 1  # timm/nothing
    assert (copied / "compare.json").read_bytes() == before
    capfd.readouterr()
    comparison = layertap_compare(
        made / "pictures", table=made / "backbones.csv", protocol="centroid", out=copied, workers=0, compile="off",
        progress=False,
    )  # fmt: skip
    assert capfd.readouterr().err == ""
    assert (copied / "compare.json").read_bytes() == before
    assert {file: file.stat().st_mtime_ns for file in copied.rglob("*.h5")} == files
    assert comparison.best.name == results(copied)["backbones"][0]["name"]
    assert [line["value"] for line in comparison.table] == [entry["value"] for entry in results(copied)["backbones"]]
    with (copied / "backbones.csv").open() as lines:
        assert [line["name"] for line in csv.DictReader(lines)] == [line["name"] for line in comparison.table]
    with pytest.raises(InputError, match="protocol"):
        layertap_compare(made / "pictures", "timm/test_vit", protocol="psychic", out=tmp_path / "no")
    result = compare(made, copied, "-b", "timm/nope", "--json")
    assert [entry["name"] for entry in json.loads(result.stdout)["backbones"]][2:] == ["timm-nope", "timm-nothing"]


def test_without_labels_there_are_rates_and_similarity_and_labels_may_be_in_a_table(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines = flat_copies(made, tmp_path / "flat", 4)
    result = compare(made, out, "-l", "layer*", "-l", "embedding", images=tmp_path / "flat")
    content = results(out)
    assert "23 images, no labels" in result.stdout
    assert content["tasks"] == []
    assert not (out / "probe").exists()
    assert by_name(content)["resnet"]["layer"] == "embedding"
    assert "layer*" in by_name(content)["timm-test_vit-random"]["error"]  # a ViT has no such layers
    assert len(content["alikeness"]["features"]) > 2
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *lines]))
    compare(made, out, "-l", "embedding", "--labels", tmp_path / "labels.csv", images=tmp_path / "flat")
    assert results(out)["tasks"][0]["test_images"] == 5  # of 23, a fifth of each class
    result = compare(made, tmp_path / "one", "--limit", 12, images=made / "pictures" / "train")
    note = "the classes of the images are not used: the images have only 1 class; a probe needs at least two"
    assert f"note: {note}" in result.stderr
    assert "12 images, no labels" in result.stdout
    assert note in results(tmp_path / "one")["notes"]


def test_the_best_layer_is_never_chosen_on_test_images(made: Path, tmp_path: Path) -> None:
    for protocol, chosen_on in (
        ("knn", "a tenth of the training rows"),
        ("centroid", "5 folds of the training rows, drawn 4 times"),
    ):  # the second call computes no features
        # Of these layers, the best on the folds is conv1, and the best on the test rows is layer1.
        result = compare(made, tmp_path / "out", "-p", protocol, "-l", "layer?", "-l", "conv1")
        content = results(tmp_path / "out")
        (task,) = content["tasks"]
        assert task["layers_chosen_on"] == chosen_on
        assert f"layers are chosen on {chosen_on}" in result.stdout
        for entry in content["backbones"]:
            layers = [line for line in task["layers"] if line["backbone"] == entry["name"]]
            if layers:
                best = max(layers, key=lambda line: line["chosen_by"])
                assert (entry["layer"], entry["value"]) == (best["layer"], best["value"])
        assert len(task["layers"]) == 5


def test_wide_layers_are_left_out_of_the_matrices_alone(
    made: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "MOST_COLUMNS", 70)
    told = compare(made, copied).stdout
    assert "too wide to be compared with other features: resnet: embedding; pool them" in told
    content = results(copied)
    assert content["alikeness"]["features"] == [["timm-test_vit-random", "embedding"]]
    entries = by_name(content)
    assert entries["resnet"]["effective_rank"] is None
    assert entries["resnet"]["value"] is not None
    assert entries["timm-test_vit-random"]["alignment"] is None


@pytest.fixture(scope="module")
def tasks(made: Path) -> list[str]:
    """Three tasks on the pictures: their classes, whether they are of the first class, and their numbers by half."""
    paths = sorted(path.relative_to(made / "pictures").as_posix() for path in (made / "pictures").rglob("*.png"))
    labels = {
        "class": [path.split("/")[1] for path in paths],
        "first": [str(path.split("/")[1] == "a") for path in paths],
        "half": [str(int(Path(path).stem) >= 45) for path in paths],
    }
    for name, column in labels.items():
        (made / f"{name}.csv").write_text("path,label\n" + "\n".join(map(",".join, zip(paths, column, strict=True))))
    return [option for name in labels for option in ("--task", f"{name}={made / name}.csv:label")]


@pytest.mark.slow
def test_several_tasks_are_ranked(made: Path, compared: Path, copied: Path, tasks: list[str]) -> None:
    result, content = compare(made, copied, *tasks), results(copied)
    assert [task["name"] for task in content["tasks"]] == ["class", "first", "half"]
    names = ["resnet", "timm-test_vit-random"]
    values = np.array([[task["scores"][name]["value"] for name in names] for task in content["tasks"]])
    ranks = np.where(values == values.max(1, keepdims=True), 1.0, 2.0)
    ranks[(values[:, :1] == values[:, 1:])[:, 0]] = 1.5
    assert [by_name(content)[name]["rank"] for name in names] == pytest.approx(ranks.mean(0).tolist())
    assert content["critical_difference"] == pytest.approx(1.95996 * np.sqrt(2 * 3 / (6 * 3)), rel=1e-4)
    (alone,) = results(compared)["tasks"]
    assert content["tasks"][0]["scores"] == alone["scores"]  # the classes of the folders, as a table
    best, second, failed = content["backbones"]
    assert best["rank"] <= second["rank"]
    assert (best["p"], best["value"], failed["rank"]) == (None, None, None)
    assert f"not distinguishable from {best['name']}: {second['name']}" in result.stdout
    assert "class top-1" in result.stdout
    lines = list(csv.DictReader((copied / "tasks.csv").open()))
    assert [line["task"] for line in lines] == ["class", "class", "first", "first", "half", "half"]
    assert float(lines[0]["value"]) == max(task["value"] for task in content["tasks"][0]["scores"].values())
    for name in ("class", "first", "half"):
        assert (copied / "probe" / name / "results.json").is_file()
    compare(made, copied)
    assert results(copied) == results(compared)
    assert not (copied / "tasks.csv").exists()


def test_labels_and_tasks_are_checked_before_features_are_computed(made: Path, tmp_path: Path) -> None:
    of = ("compare", made / "pictures", "-b", "timm/test_vit", "-o", tmp_path / "out")
    (tmp_path / "other.csv").write_text("path,label\nelsewhere.png,a\n")
    paths = sorted(path.relative_to(made / "pictures").as_posix() for path in (made / "pictures").rglob("*.png"))
    (tmp_path / "one.csv").write_text(f"path,label\n{paths[0]},a\n{paths[-1]},a\n")
    for options, why in (
        (("--labels", tmp_path / "none.csv"), "no such file"),
        (("--task", f"a={tmp_path / 'other.csv'}:kind"), "a column 'kind'"),
        (("--labels", tmp_path / "other.csv"), "none of its 1 values of 'path' names an image"),
        (("--labels", tmp_path / "one.csv"), "one.csv has only 1 class"),
        (("--task", "labels.csv"), "expected NAME=FILE.csv[:COLUMN]"),
        (("--task", "a=1.csv", "--task", "a=2.csv"), "two tasks are called a"),
        (("--task", "a=1.csv", "--labels", "2.csv"), "cannot be used together"),
    ):
        assert why in fails(*of, *options)
    assert not (tmp_path / "out").exists()


def test_wrong_input_and_wrong_tables_are_refused(made: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "backbones.csv", tmp_path / "out"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    (tmp_path / "compare.yaml").write_text("budget: 30m\n")
    for options, why in (
        ((), "no backbones to compare"),
        (("-b", "timm/x", "-o", tmp_path / "mine"), "not a comparison"),
        (("-b", "timm/zzz*"), "backbone 'timm/zzz*' not found"),
        (("-b", "timm/test_vit", "--budget", "30m"), "use --limit N"),
        (("-b", "timm/test_vit", "--config", tmp_path / "compare.yaml"), "use --limit N"),
    ):
        assert why in fails("compare", made / "pictures", "-o", out, *options)
    with pytest.raises(TypeError, match="budget"):
        layertap_compare(made / "pictures", "timm/test_vit", out=out, budget="30m")
    for text, why in (
        ("name\nx\n", "expected a column 'backbone'"),
        ("backbone,weight\ntimm/x,random\n", "has the column weight"),
        ("backbone,name\n,x\n", "line 2: no backbone"),
        ("backbone,name\ntimm/x\n", "line 2 has 1 values, but the header has 2"),
        ("backbone,name\ntimm/x,../y\n", "line 2: the name"),
        ("backbone,name\ntimm/x,probe\n", "line 2: the name"),
        ("backbone,name\ntimm/x,a\ntimm/y,A\n", "two backbones are called"),
        ("backbone\n", "no backbones to compare"),
    ):
        table.write_text(text)
        assert why in fails("compare", tmp_path, "--from", table, "-o", out)
    assert not out.exists()
    message = fails("compare", made / "pictures", "-o", out, "-b", "timm/nothing")
    assert "no backbone could be used" in message
    assert "timm-nothing: backbone 'timm/nothing' not found" in message


def test_a_single_backbone_has_rank_one_and_disputes_nothing(
    made: Path, copied: Path, tasks: list[str], tmp_path: Path
) -> None:
    (tmp_path / "one.csv").write_text("backbone,weights\ntimm/test_vit,random\n")
    result, content = compare(made, copied, *tasks, table=tmp_path / "one.csv"), results(copied)
    assert content["critical_difference"] is None
    assert [entry["rank"] for entry in content["backbones"]] == [1]
    assert "distinguishable" not in result.stdout
    assert [task["disputed"] for task in content["tasks"]] == [[], [], []]
    assert (copied / "compare.html").is_file()


def test_a_backbone_with_other_images_is_left_out_with_each_difference_on_its_line(made: Path, copied: Path) -> None:
    of = ("compare", made / "pictures", "--from", made / "backbones.csv", *QUICK, "-o", copied)
    result = layertap(*of, "-l", "embedding", "--limit", 60)
    assert "cannot be mixed:\n  images.count: stored 90, now 60\n" in result.stderr.split("error:")[0]


BROKEN = """
import torch
from torch import nn
from torchvision.transforms import v2

class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.embedding_layer = fault, nn.Linear(3, 4)
    def forward(self, x):
        if self.fault == "raises" and len(x) > 2:
            raise RuntimeError("boom in forward")
        if self.fault == "memory" and len(x) > 2:
            raise MemoryError
        return self.embedding_layer(x.mean((2, 3)) * (float("nan") if self.fault == "nan" else 1))

def transform():
    return v2.Compose([v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

def raises(): return Net("raises"), transform()
def memory(): return Net("memory"), transform()
def nan(): return Net("nan"), transform()
def fine(): return Net(""), transform()
"""


def test_a_backbone_that_fails_while_it_computes_is_a_line_with_the_reason(made: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(BROKEN)
    names = [
        option for name in ("raises", "memory", "nan", "fine") for option in ("-b", f"python/{tmp_path}/net.py:{name}")
    ]
    result = layertap("compare", made / "pictures", *names, *QUICK, "-l", "embedding_layer", "-o", tmp_path / "out")
    assert result.exit_code == 1
    errors = {entry["backbone"].rpartition(":")[2]: entry["error"] for entry in results(tmp_path / "out")["backbones"]}
    assert errors["fine"] == ""
    assert errors["raises"].startswith("RuntimeError: boom in forward")
    assert "net.py, line 12" in errors["raises"]
    assert errors["memory"] == "out of memory"
    assert errors["nan"].startswith("no image has features")
    for reason in errors.values():
        assert reason in result.stdout


def test_a_comparison_that_was_interrupted_gives_the_same_results(
    made: Path, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, out, written = ShardWriter.write, tmp_path / "out", []

    def interrupted(*arguments: Any) -> None:
        written.append(arguments)
        if len(written) in (2, 5):  # in the middle of the first backbone, and of the second
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(ShardWriter, "write", interrupted)
    of = ("compare", made / "pictures", "--from", made / "backbones.csv", "-l", "embedding", *QUICK, "-o", out)
    codes = [layertap(*of, "--batch-size", 32).exit_code for _ in range(3)]
    assert codes == [130, 130, 1]
    contents = [results(folder) for folder in (out, compared)]
    for entry in contents[0]["backbones"] + contents[1]["backbones"]:
        del entry["images_per_s"]
    assert contents[0] == contents[1]


def test_candidates_are_specs_globs_and_lines_of_tables(tmp_path: Path) -> None:
    (tmp_path / "last.pth").write_bytes(b"")
    (tmp_path / "t.csv").write_text("backbone,weights\ntimm/resnet18,last.pth\ntimm/resnet18,random\ntimm/resnet18,\n")
    found = candidates_of(["timm/test_resn*", "open_clip/ViT-B-32:laion2b", "timm/resnet18"], tmp_path / "t.csv")
    assert Candidate("timm-test_resnet", "timm/test_resnet") in found
    assert Candidate("open_clip-ViT-B-32-laion2b", "open_clip/ViT-B-32:laion2b") in found
    assert found[-3:] == [
        Candidate("timm-resnet18", "timm/resnet18"),
        Candidate("timm-resnet18-last", "timm/resnet18", str(tmp_path / "last.pth")),
        Candidate("timm-resnet18-random", "timm/resnet18", "random"),
    ]


# the page, in a browser of the system


@pytest.mark.slow
def test_the_page_shows_the_comparison(browser: Any, compared: Path) -> None:
    content = json.loads((compared / "compare.json").read_text())
    view = opened(browser, compared / "compare.html")
    best, second, failed = content["backbones"]
    tables = view.locator("table")
    rows = tables.nth(0).locator("tbody tr")
    assert rows.count() == 2
    assert best["name"] in rows.nth(0).inner_text()
    assert f"{100 * best['value']:.1f} %" in rows.nth(0).inner_text()
    assert failed["error"] in tables.nth(1).inner_text()
    view.get_by_role("button", name="Top-1").click()  # sorts up
    assert second["name"] in rows.nth(0).inner_text()
    for measure, name in (("cka", "Linear CKA"), ("rsa", "RSA"), ("mutual_knn", "Mutual nearest neighbours")):
        view.get_by_label("Measure").select_option(label=name)
        shown = view.locator(".confusion tbody tr").nth(0).locator("td").nth(1).inner_text()
        assert shown == f"{content['alikeness'][measure][0][1]:.2f}"
    cards = view.locator(".card.disputed")
    (task,) = content["tasks"]
    assert cards.count() == len(task["disputed"]) > 0
    assert view.locator(".card.disputed .tile-image").count() == cards.count()  # all have their picture
    text = cards.nth(0).inner_text()
    for name, predicted in task["disputed"][0]["predictions"]:
        assert name in text
        assert predicted in text
    for note in task["notes"]:
        assert note in view.locator("main").inner_text()
    fine(view)


@pytest.mark.slow
def test_names_in_the_page_are_text(browser: Any, made: Path, tmp_path: Path) -> None:
    flat = tmp_path / "<img src=x onerror=window.done=1>"
    flat.mkdir()
    lines = ["path,label"]
    for number, path in enumerate(sorted((made / "pictures").rglob("*.png"))):
        name = f"<img src=x onerror='window.done=1'>{number}.png"
        (flat / name).write_bytes(path.read_bytes())
        lines.append(f"{name},<b>{path.parent.name}</b>")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    compare(made, tmp_path / "out", "--labels", tmp_path / "labels.csv", images=flat)
    view = opened(browser, tmp_path / "out" / "compare.html")
    assert "<b>" in view.locator(".card.disputed").nth(0).inner_text()
    fine(view)


@pytest.mark.slow
def test_several_tasks_have_a_part_of_the_page_each(browser: Any, made: Path, tasks: list[str], tmp_path: Path) -> None:
    compare(made, tmp_path / "out", "-l", "embedding", "-l", "*.0", *tasks)
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    view = opened(browser, tmp_path / "out" / "compare.html")
    assert f"differ by more than {content['critical_difference']:.2f}" in view.locator(".verdict").inner_text()
    row = view.locator("table").nth(0).locator("tbody tr").nth(0).inner_text()
    best = content["backbones"][0]
    assert f"{best['rank']:.2f}" in row
    for task in content["tasks"]:
        assert f"{100 * task['scores'][best['name']]['value']:.1f} %" in row
    names = [task["name"] for task in content["tasks"]]
    assert [text for text in view.locator("h3").all_inner_texts() if text in names] == 2 * names  # layers, and images
    assert view.locator(".card.disputed").count() == sum(len(task["disputed"]) for task in content["tasks"])
    fine(view)
