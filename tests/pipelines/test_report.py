"""layertap report: what the page says; `test_report_page.py` has how it behaves in a browser."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from extract import FeatureReader, Status, findings
from extract.analysis.probe import metrics
from extract.analysis.row_findings import near_duplicate_cosine
from pipelines.data_sets import report as report_room
from pipelines.data_sets.report.page import PAGE_BYTES, _histogram
from pipelines.data_sets.report.probe_results import probes
from pipelines.data_sets.show import describe, print_description
from pipelines.terminal.page.thumbnail_sheets import thumbnail_sheets
from pipelines.terminal.text_output import data_set_name
from tests.conftest import make_picture
from tests.extract.analysis.test_row_findings import stored
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds
from tests.pipelines.test_sync import SMALL as SYNC
from tests.pipelines.test_sync import write

Page = tuple[Path, dict[str, Any]]  # and what it holds
IMAGE_NAME = "<img src=x onerror=window.done=1>.png"
CLASSES = ["</script><script>window.done=2</script>", "<b>bold</b> $x^2$ %{x} &amp;", "<!-- \u2028"]


def told(page: Path) -> dict[str, Any]:
    """The content of a report."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def n_thumbnails(page: Path) -> int:
    """The number of pictures in a report."""
    return len(told(page)["thumbnails"]["tiles"])


def report(*arguments: object) -> Page:
    """A report, with a map by principal axes unless another is asked for."""
    result = succeeds("report", *arguments, *(() if "--map" in arguments else ("--map", "pca")))
    page = Path(result.stdout.rpartition(",")[0])
    assert page.stat().st_size < PAGE_BYTES
    return page, told(page)


def hostile_images(root: Path) -> Path:
    """A list of pictures whose names and classes would like to be more than text; some cannot be decoded."""
    root.mkdir()
    names = [IMAGE_NAME, "الصورة.png", "😀.png", os.fsdecode(b"\xff\xfe.png"), "line\nbreak.png", "‮evil.png"]
    names += [f"{i:02d}.png" for i in range(24)]
    for i, name in enumerate(names):
        make_picture(i, 120, 90).save(root / name)
    shutil.copy(root / "00.png", root / "copy.png")
    make_picture(3, 200, 200).save(root / "cut.jpg")
    (root / "cut.jpg").write_bytes((root / "cut.jpg").read_bytes()[:1500])
    (root / "<svg onload=window.done=3>.jpg").write_bytes(b"text")
    with (root / "list.csv").open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        write = csv.writer(file).writerow
        write(["path", "label"])
        for i, name in enumerate([*names, "cut.jpg", "copy.png", "<svg onload=window.done=3>.jpg"]):
            write([name, CLASSES[i % 3]])
    return root / "list.csv"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    images = hostile_images(folder / "images")
    layers = ["-l", "layer4", "-l", "embedding"]
    succeeds("embed", images, "-o", folder / "out", *SMALL, *layers)
    return folder / "out"


@pytest.fixture(scope="module")
def hostile_page(hostile: Path) -> Page:
    return report(hostile)


# What it says


def test_the_page_tells_what_show_tells_and_the_neighbours_of_numpy(hostile: Path, hostile_page: Page) -> None:
    page, content = hostile_page
    assert page == hostile / "report.html"
    assert content["counts"] == {"rows": 33, "good": 31, "failed": 2, "classes": 3}
    lines: list[str] = []
    print_description(describe(hostile), lines.append)
    assert content["description"] == lines
    with FeatureReader(hostile) as reader:
        good = np.flatnonzero(reader.status == Status.OK)
        x = reader["embedding"][good].astype(np.float64)
        copies = sorted(reader.paths.index(name) for name in ("00.png", "copy.png"))
        failed = {row: reason for row, _, _, reason in reader.failures}
    listed = content["findings"]["listed"]
    assert {found[1]: found[4].partition(": ")[2] for found in listed if found[0] == "failed"} == failed
    assert sorted(map(int, content["thumbnails"]["tiles"])) == good.tolist()
    layer = next(one for one in content["layers"] if one["name"] == "embedding")
    assert (layer["mean"], layer["std"]) == pytest.approx((x.mean(), x.std()), rel=1e-5)
    assert [found[1] for found in listed if found[0] == "copy"] == copies
    assert content["alike"]["among"] == content["alike"]["queries"] == 30  # of the copies, one
    assert content["map"]["rows"] == good.tolist()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    cosines = x @ x.T
    np.fill_diagonal(cosines, -2)
    apart = np.setdiff1d(np.arange(len(good)), np.searchsorted(good, copies))  # copies are equally near
    near = np.take_along_axis(cosines, np.array(content["map"]["near"]), 1)
    np.testing.assert_allclose(near[apart], -np.sort(-cosines, 1)[apart, :10], atol=1e-6)
    left_out = next(row for kind, row, *_, keep, _ in listed if keep is False)
    cosines[:, np.searchsorted(good, left_out)] = -2  # a copy is no neighbour of other images
    assert content["alike"]["gallery"]
    for query in content["alike"]["gallery"]:
        mine = cosines[np.searchsorted(good, query["row"])]
        assert [row for row, _ in query["hits"]] == good[np.argsort(-mine)[:10]].tolist()


def test_the_page_has_the_table_of_findings_and_its_csv_file(hostile: Path, hostile_page: Page, tmp_path: Path) -> None:
    _, content = hostile_page
    succeeds("findings", hostile, "-o", tmp_path / "findings.csv")
    assert base64.b64decode(content["findings"]["csv"]) == (tmp_path / "findings.csv").read_bytes()
    with FeatureReader(hostile) as reader:
        table = findings(reader)
    assert [found[:2] for found in content["findings"]["listed"]] == [[found.kind, found.row] for found in table]
    assert sum(content["findings"]["counts"].values()) == len(table)


def test_the_title_of_a_folder_named_features_is_the_folder_above() -> None:
    paths = ("/a/photos", "/a/demo/features", "s3://bucket/photos/features/")
    assert [data_set_name(path) for path in paths] == ["photos", "demo", "photos"]


def test_near_duplicates_are_unusually_near_and_at_most_half_as_far_as_others() -> None:
    distances = np.random.default_rng(0).uniform(0.25, 0.35, 500)
    threshold = near_duplicate_cosine(1 - distances)
    assert threshold == pytest.approx(1 - np.median(distances) / 2)  # 3.5 deviations would be 0.78
    spread = np.exp(np.random.default_rng(0).normal(-2, 0.5, 2001))
    threshold = near_duplicate_cosine(1 - spread)
    deviation = np.median(np.abs(np.log(spread) - np.median(np.log(spread)))) / 0.6745
    assert threshold == pytest.approx(1 - np.exp(np.median(np.log(spread)) - 3.5 * deviation))
    assert near_duplicate_cosine(np.full(29, 0.5)) is None


def test_lengths_that_differ_by_rounding_are_counted() -> None:
    for value in (0.0, 1.0, 2.0**53, 1e-30):
        values = np.array([value, np.nextafter(value, 2 * value + 1)])
        counts, edges = _histogram(values)
        assert (counts.sum(), len(edges), np.isfinite(edges).all()) == (2, 41, True)
    counts, edges = _histogram(np.arange(81.0))
    np.testing.assert_array_equal(counts, np.histogram(np.arange(81.0), 40)[0])


def test_thumbnails_are_their_pictures_at_the_largest_size_that_fits() -> None:
    pictures = [(10 * i, make_picture(i, 64, 32 + i % 30)) for i in range(300)]
    whole = thumbnail_sheets(iter(pictures), 300, 10_000_000)
    assert (whole.side, len(whole.sheets), len(whole.tiles)) == (64, 2, 300)
    room = sum(map(len, whole.sheets)) * 3 // 4
    small = thumbnail_sheets(iter(pictures), 300, room)
    assert small.side == 48
    assert sum(map(len, small.sheets)) <= room
    assert len(small.tiles) > 250
    for sheets in (whole, small):
        images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text))), np.float32) for text in sheets.sheets]
        for i in (0, 17, 255, 256, 299):
            if 10 * i not in sheets.tiles:
                continue
            number, width, height = sheets.tiles[10 * i]
            assert max(width, height) == sheets.side
            line, column = divmod(number % 256, 16)
            part = np.s_[line * sheets.side :, column * sheets.side :]
            tile = images[number // 256][part][:height, :width]
            picture = np.asarray(pictures[i][1].resize((width, height), Image.Resampling.BICUBIC), np.float32)
            assert np.abs(tile - picture).mean() < 12, i
    few = thumbnail_sheets(iter(pictures), 300, 5_000)
    assert 0 < len(few.tiles) < 300
    assert len(few.sheets[0]) <= 5_000
    assert thumbnail_sheets(iter([(0, make_picture(0, 32, 20))]), 1, 10_000).tiles == {0: (0, 32, 20)}


# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency", 2009:
# severity 1, of linear RGB. OKLab: Ottosson, "A perceptual color space for image processing", 2020.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
LMS = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
       [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
LAB = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
       [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip


def test_colours_of_classes_are_told_apart_by_every_eye_and_seen_on_light_and_dark_paper() -> None:
    linear = np.stack([linear_colours(f"class-{number}") for number in range(10)], 1)
    for vision in VISION.values():
        seen = np.clip(linear @ np.transpose(vision), 0, 1)
        lab = np.cbrt(seen @ np.transpose(LMS)) @ np.transpose(LAB)
        distances = np.linalg.norm(lab[:, :, None] - lab[:, None], axis=-1)[:, *np.triu_indices(10, 1)]
        assert distances.min() >= 0.129  # 0.018 for the seven of Okabe and Ito, 0.007 for matplotlib's ten
    *of_classes, paper, panel = (luminances(name) for name in [*(f"class-{k}" for k in range(10)), "paper", "panel"])
    for behind in (paper, panel):
        for own in of_classes:
            for colour, back in zip(own, behind, strict=True):  # light, dark
                assert (max(colour, back) + 0.05) / (min(colour, back) + 0.05) >= 3


def linear_colours(name: str) -> np.ndarray:
    """The linear RGB (2, 3) of a colour of the page, in light and dark."""
    style = (resources.files("pipelines.terminal.page") / "page.css").read_text()
    texts = re.findall(f"--{name}: #([0-9a-f]{{6}})", style)[:2]  # the third is that of printed pages
    values = np.array([[int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)] for text in texts])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminances(name: str) -> np.ndarray:
    return linear_colours(name) @ [0.2126, 0.7152, 0.0722]  # WCAG 2.2


def test_probes_are_told(folder: Path, tmp_path: Path) -> None:
    for i in range(12, 60):
        make_picture(i).save(folder / ["ant", "bee", "cat"][i % 3] / f"{i:02d}.png")
    out, page = tmp_path / "a", tmp_path / "page.html"
    succeeds("embed", folder, "-o", out, *SMALL)
    succeeds("probe", out, "-p", "centroid")
    (out / "probe" / "broken").mkdir()
    (out / "probe" / "broken" / "results.json").write_text('{"probes": 1, "configuration": {}}')
    _, content = report(out, "-o", page)
    (probe,) = content["probes"]
    (result,) = json.loads((out / "probe" / "centroid" / "results.json").read_text())["probes"]
    top1 = result["metrics"]["top1"]
    assert probe["layers"][0]["metrics"]["top1"] == [top1["value"], top1["low"], top1["high"]]
    assert probe["layers"][0]["confusion"] == result["confusion"]
    predictions, rows = content["predictions"], content["rows"]
    file = out / "probe" / "centroid" / "predictions.csv"
    with file.open() as text:
        lines = list(csv.DictReader(text))
    wrong = {line["path"]: line["predicted"] for line in lines if line["predicted"] != line["label"]}
    assert (predictions["layer"], predictions["tested"]) == ("embedding", len(lines))
    assert {rows[str(row)][0]: rows[str(row)][5] for row in predictions["wrong"]} == wrong
    assert sum(len(row) > 4 for row in rows.values()) == len(lines)
    assert "cannot be read as results of a probe" in content["notes"][0]
    confidences = {line["path"]: i % 5 / 5 for i, line in enumerate(lines)}
    with file.open("w", newline="") as text:
        writer = csv.DictWriter(text, lines[0])
        writer.writeheader()
        writer.writerows({**line, "probability": confidences[line["path"]]} for line in lines)
    _, content = report(out, "-o", page)
    shown = [confidences[content["rows"][str(row)][0]] for row in content["predictions"]["wrong"]]
    assert shown == sorted((confidences[path] for path in wrong), reverse=True)
    file.write_text("data_set,layer\na,embedding\n")
    _, content = report(out, "-o", page)
    assert "centroid/predictions.csv cannot be read as predictions: no column 'label'" in " ".join(content["notes"])
    assert content["predictions"] == {"tested": 0, "wrong": [], "n_wrong": 0}
    file.unlink()
    os.mkfifo(file)  # of a stranger's data set: it is not waited for
    _, content = report(out, "-o", page)
    assert "centroid/predictions.csv is not a regular file" in " ".join(content["notes"])


def test_training_rows_of_a_probe_are_those_of_its_final_fit(tmp_path: Path) -> None:
    rows = {"train": 50, "val": 50, "test": 9}  # chosen on folds of the training rows
    probe = {"data_set": "a", "layer": "x", "width": 4, "chosen": {}, "metrics": {}, "rows": rows}
    data_sets = {"a": {"fingerprint": "f", "task": "classification"}}
    content = {"configuration": {"protocol": "clip"}, "probes": [probe], "data_sets": data_sets}
    (tmp_path / "results.json").write_text(json.dumps(content))
    results, notes = probes(tmp_path / "none", [tmp_path])
    assert notes == []
    assert (results[tmp_path]["layers"][0]["train"], results[tmp_path]["layers"][0]["test"]) == (50, 9)


def test_a_file_that_is_no_report_is_not_written_over(hostile: Path, hostile_page: Page, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    for options, why in (
        (("-o", mine), "mine.html already exists and is not a layertap report"),
        (("-o", tmp_path / "none" / "page.html"), "no such folder"),
        (("-o", "/proc/page.html"), "results cannot be written to /proc: "),
        (("-l", "x"), "layer 'x' not found"),
    ):
        assert why in fails("report", hostile, *options)
    assert mine.read_text() == "<p>mine</p>"
    assert report(hostile)[0] == hostile_page[0]  # its own, it does write over


@pytest.mark.slow
def test_a_data_set_with_a_report_in_it_is_as_good_as_without(folder: Path, tmp_path: Path) -> None:
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL)
    report(tmp_path / "out")
    succeeds("verify", tmp_path / "out")
    assert "nothing to do" in layertap("embed", folder, "-o", tmp_path / "out", *SMALL).stdout
    config = write(tmp_path / "sync.yaml", images=str(folder), out=str(tmp_path / "synced"), **SYNC)
    succeeds("sync", config)
    make_picture(70).save(folder / "ant" / "new.png")
    report(tmp_path / "synced")
    succeeds("sync", config)
    _, content = report(tmp_path / "synced")
    assert re.search("13 rows in .*, version 2, .*, complete", content["description"][0])
    succeeds("verify", tmp_path / "synced")


def made(out: Path, rows: int, width: int, classes: int, failed: bool = False, unlabelled: bool = False) -> Path:
    """A data set of random features, without images."""
    values = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    labels = [-1] * rows if unlabelled else [row % classes for row in range(rows)]
    images = [*range(-rows, 0)] if failed else None
    stored(out, values, [f"class {i}" for i in range(classes)], labels, images).close()
    return out


def of_every_kind(folder: Path, tmp_path: Path) -> dict[str, str]:
    """Data sets in `tmp_path`, and what a report says of each; their images are not where they were."""
    made(tmp_path / "failed", 7, 4, 2, failed=True)
    made(tmp_path / "one", 1, 4, 1)
    made(tmp_path / "unlabelled", 40, 4, 0, unlabelled=True)
    made(tmp_path / "many classes", 3000, 8, 1000)
    layers = ["-l", "layer2:none", "-l", "layer3:none", "--size", 160, "--crop", 160]  # more numbers than a map is of
    succeeds("embed", folder, "-o", tmp_path / "maps", *SMALL, *layers)
    folder.rename(tmp_path / "moved")
    return {
        "failed": "7 images have no features",
        "one": "Too few images to tell",
        "unlabelled": "No thumbnails: the images are not in /nowhere any more",
        "many classes": "970 other classes are grey",
        "maps": "There is no layer embedding; images are compared by the last layer, layer3.",
    }


def test_data_sets_of_every_kind_have_a_report(folder: Path, tmp_path: Path) -> None:
    found = {name: report(tmp_path / name)[1] for name in of_every_kind(folder, tmp_path)}
    assert report(tmp_path / "one", "--map", "tsne")[1]["map"]["ways"][0]["x"] == [0]
    assert found["failed"]["counts"]["good"] == 0
    assert len(found["failed"]["findings"]["listed"]) == 7
    assert found["failed"]["layers"][0]["mean"] is None
    assert len(found["one"]["map"]["rows"]) == 1
    assert found["unlabelled"]["unlabelled"] == 40
    assert len(found["many classes"]["classes"]) == 1000
    with FeatureReader(tmp_path / "maps") as reader:
        assert found["maps"]["layers"][0]["shape"] == list(reader["layer2"].shape[1:])
    assert "not in" in found["maps"]["about_thumbnails"]
    _, content = report(tmp_path / "maps", "--images", tmp_path / "moved")
    assert len(content["thumbnails"]["tiles"]) == 12
    few = report(tmp_path / "maps", "--images", tmp_path / "moved", "--thumbnails", 5)[1]["thumbnails"]["tiles"]
    assert list(few) == list(content["thumbnails"]["tiles"])[:5]
    none = report(tmp_path / "maps", "--images", tmp_path / "moved", "--thumbnails", 0)[1]
    assert (none["thumbnails"]["sheets"], none["about_thumbnails"]) == ([], "No thumbnails, as requested.")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    peaks = {}
    for rows in (10_000, 50_000):
        out = made(tmp_path / str(rows), rows, 1024, 10)
        code = (
            "import re, sys; from pathlib import Path; from pipelines.data_sets.report.page import run_report\n"
            "run_report(Path(sys.argv[1]), maps=['pca'])\n"
            "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
        )
        one = os.environ | {"OMP_NUM_THREADS": "1"}  # threads add memory that differs from run to run
        found = subprocess.run([sys.executable, "-c", code, out], env=one, check=True, capture_output=True, text=True)
        peaks[rows] = int(found.stdout.split()[-1]) / 1000
        shutil.rmtree(out)
    print(f"peak memory, MB: {peaks}")
    assert peaks[50_000] < peaks[10_000] + 60  # the features are 164 MB more


def test_the_page_writes_the_same_metrics_as_percentages_as_the_terminal() -> None:
    text = (Path(report_room.__file__).parent / "sections.js").read_text(encoding="utf-8")
    shares = json.loads(re.search(r"const SHARES = (\[[^\]]*\])", text)[1])  # type: ignore[index]
    assert {metric for metric in shares if metrics.format_metric(metric, 0.5) == "50.0 %"} == set(shares)
    assert set(shares) == metrics._PERCENT_METRICS
    names = re.search(r"const METRICS = \{(.*?)\};", text, re.DOTALL)[1]  # type: ignore[index]
    assert set(re.findall(r"(\w+): \"", names)) >= metrics._PERCENT_METRICS
