"""layertap report: what the page says, and how it behaves in a browser of the system."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from extract import FeatureReader, Status
from extract.store.format.layout import StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from pipelines.data_sets.report.page import PAGE_BYTES, _as_data
from tests.conftest import make_picture
from tests.extract.store.rows import RowNames, data_set, no_files
from tests.pipelines.test_cli import SMALL, fails, layertap

IMAGE_NAME = "<img src=x onerror=window.done=1>.png"
CLASSES = ["</script><script>window.done=2</script>", "<b>bold</b> $x^2$ %{x} &amp;", "<!-- \u2028"]


def told(page: Path) -> dict[str, Any]:
    """The content of a report."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def report(*arguments: object) -> tuple[Path, dict[str, Any]]:
    result = layertap("report", *arguments)
    assert result.exit_code == 0, result.output
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
        for i, name in enumerate([*names, "copy.png", "cut.jpg", "<svg onload=window.done=3>.jpg"]):
            write([name, CLASSES[i % 3]])
    return root / "list.csv"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    images = hostile_images(folder / "images")
    layers = ["-l", "layer4", "-l", "embedding"]
    made = layertap("embed", images, "-o", folder / "out", *SMALL, *layers)
    assert made.exit_code == 0, made.output
    return folder / "out"


# What it says


def test_the_page_tells_what_show_tells_and_more(hostile: Path) -> None:
    page, content = report(hostile)
    assert page == hostile / "report.html"
    assert content["counts"] == {"rows": 33, "good": 31, "failed": 2, "classes": 3}
    facts = dict(content["facts"])
    assert facts["Backbone"] == "timm/test_resnet"
    assert facts["Rows"] == "33, complete"
    with FeatureReader(hostile) as reader:
        assert facts["Fingerprint"] == reader.fingerprint
        good = np.flatnonzero(reader.status == Status.OK)
        x = reader["embedding"][good].astype(np.float64)
        copies = sorted(reader.paths.index(name) for name in ("00.png", "copy.png"))
        failed = {row: reason for row, _, _, reason in reader.failures}
    assert {row: reason for row, _, reason in content["failures"]} == failed
    (cut,) = [row for row, reason in failed.items() if "truncated" in reason]
    assert str(cut) in content["thumbnails"]  # its upper part
    assert len(content["thumbnails"]) == 32
    layer = next(one for one in content["layers"] if one["name"] == "embedding")
    assert (layer["mean"], layer["std"]) == pytest.approx((x.mean(), x.std()), rel=1e-5)
    assert content["copies"]["groups"][0]["rows"] == copies
    assert content["alike"]["among"] == content["alike"]["queries"] == 30  # of the copies, one
    (run,) = content["runs"]
    assert (run["how"], run["rows"]) == ("ended", 33)
    assert set(content["stages"]) == {"images", "forward", "write"}
    assert sorted(content["map"]["rows"]) == good.tolist()


def test_neighbours_and_outliers_are_those_of_numpy(hostile: Path) -> None:
    _, content = report(hostile)
    with FeatureReader(hostile) as reader:
        good = np.flatnonzero(reader.status == Status.OK)
        good = good[good != content["copies"]["groups"][0]["rows"][1]]
        x = reader["embedding"][good].astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    cosines = x @ x.T
    np.fill_diagonal(cosines, -2)
    for query in content["alike"]["gallery"]:
        mine = cosines[np.searchsorted(good, query["row"])]
        assert [row for row, _ in query["hits"]] == good[np.argsort(-mine)[:10]].tolist()
    means = np.sort(cosines, 1)[:, -10:].mean(1)
    assert [row for row, _ in content["alike"]["outliers"]] == good[np.argsort(means)[:24]].tolist()
    pairs = [(int(good[i]), int(good[j])) for i, j in np.argwhere(np.triu(cosines >= 0.95, 1))]
    shown = {tuple(pair[:2]) for pair in content["alike"]["pairs"]}
    assert shown <= set(pairs)
    assert content["alike"]["n_pairs"] <= len(pairs)


def test_data_cannot_end_the_script_that_it_stands_in() -> None:
    text = _as_data({"a": "</script><!--\u2028\u2029&", "b": [float("nan"), 1.5]})
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == {"a": "</script><!--\u2028\u2029&", "b": [None, 1.5]}


def test_probes_and_another_data_set_are_told(folder: Path, tmp_path: Path) -> None:
    for i in range(12, 60):
        make_picture(i).save(folder / ["ant", "bee", "cat"][i % 3] / f"{i:02d}.png")
    for name, dtype in (("a", "float32"), ("b", "float16")):
        assert layertap("embed", folder, "-o", tmp_path / name, *SMALL, "--dtype", dtype).exit_code == 0
    assert layertap("probe", tmp_path / "a", "-p", "centroid").exit_code == 0
    (tmp_path / "a" / "probe" / "broken").mkdir()
    (tmp_path / "a" / "probe" / "broken" / "results.json").write_text('{"probes": 1, "configuration": {}}')
    _, content = report(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "page.html")
    (probe,) = content["probes"]
    results = json.loads((tmp_path / "a" / "probe" / "centroid" / "results.json").read_text())
    top1 = results["probes"][0]["metrics"]["top1"]
    assert probe["layers"][0]["metrics"]["top1"] == [top1["value"], top1["low"], top1["high"]]
    assert "cannot be read as results of a probe" in content["notes"][0]
    assert content["other"]["changes"] == [["stored_as", "float32", "float16"]]
    assert content["other"]["images"] == {"in_both": 60, "only_in_first": 0, "only_in_second": 0}
    ((layer, share, chance),) = content["other"]["neighbours"]
    assert (layer, share > 0.95, chance) == ("embedding", True, pytest.approx(10 / 59))


def test_a_file_that_is_no_report_is_not_written_over(hostile: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    assert "mine.html already exists and is not a layertap report" in fails_to_report(hostile, "-o", mine)
    assert mine.read_text() == "<p>mine</p>"
    assert "no such folder" in fails_to_report(hostile, "-o", tmp_path / "none" / "page.html")
    assert "layer 'x' not found" in fails_to_report(hostile, "-l", "x")
    report(hostile)
    report(hostile)  # its own, it does write over


def fails_to_report(*arguments: object) -> str:
    return fails("report", *arguments)


@pytest.mark.slow
def test_a_data_set_with_a_report_in_it_is_as_good_as_without(folder: Path, tmp_path: Path) -> None:
    assert layertap("embed", folder, "-o", tmp_path / "out", *SMALL).exit_code == 0
    report(tmp_path / "out")
    assert layertap("verify", tmp_path / "out").exit_code == 0
    assert "nothing to do" in layertap("embed", folder, "-o", tmp_path / "out", *SMALL).stdout
    config = tmp_path / "sync.yaml"
    small = {"backbone": "timm/test_resnet", "weights": "random", "workers": 0, "device": "cpu", "settle": 0}
    config.write_text(yaml.safe_dump({"images": str(folder), "out": str(tmp_path / "synced"), **small}))
    assert layertap("sync", config).exit_code == 0
    make_picture(70).save(folder / "ant" / "new.png")
    report(tmp_path / "synced")
    assert layertap("sync", config).exit_code == 0
    _, content = report(tmp_path / "synced")
    assert dict(content["facts"])["Rows"] == "13, complete, version 2, synchronised with a folder"
    assert [run["how"] for run in content["runs"]] == ["1 added", "12 added"]
    assert content["stages"]["forward"] > 0
    assert layertap("verify", tmp_path / "synced").exit_code == 0


def made(out: Path, rows: int, width: int, classes: int, failed: bool = False, unlabelled: bool = False) -> Path:
    """A data set of random features, without images."""
    features = [StoredFeature("embedding", (width,), "float32", {"layer": "x", "pooling": "none"})]
    data = data_set(out, features=features, images={"root": "/nowhere", "count": rows, "paths_xxh3": ""},
                    shard_rows=rows)  # fmt: skip
    data.open_or_create()
    labels = np.full(rows, -1) if unlabelled else np.arange(rows) % max(1, classes)
    names = RowNames([f"{i}.png" for i in range(rows)], labels, [""] * rows, [f"class {i}" for i in range(classes)])
    create_shard(data.path(0, part=True), features, data.identity(0), names, {})
    generator = np.random.default_rng(0)
    with ShardWriter(data, 0) as writer:
        for start in range(0, rows, 10_000):
            here = np.arange(start, min(start + 10_000, rows))
            values = generator.normal(size=(len(here), width)).astype(np.float32)
            status = np.full(len(here), Status.DECODE_ERROR if failed else Status.OK, np.uint8)
            reasons = dict.fromkeys(here.tolist(), "made to fail") if failed else {}
            values[status != Status.OK] = np.nan
            writer.write(here, {"embedding": values}, status, no_files(len(here)), reasons)
        writer.publish()
    return out


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on this system")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, page: Path, width: int = 1200, **settings: Any) -> Any:
    """The page; its errors, and what it asks of a network, are in `wrong`. A script that must not run sets `done`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
    view, wrong = context.new_page(), []
    view.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("request", lambda one: wrong.append(one.url[:99]) if not one.url.startswith(("file:", "data:")) else None)
    view.on("dialog", lambda dialog: wrong.append(dialog.message))
    view.goto(page.as_uri())
    view.wait_for_selector("html[data-ready]", timeout=30_000)
    view.wrong = wrong
    return view


def fine(view: Any) -> None:
    assert view.wrong == []
    assert view.evaluate("window.done") is None
    assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    view.context.close()


def place_of_point(view: Any, point: int) -> tuple[float, float]:
    return tuple(view.evaluate(
        """(point) => {
          const plot = document.querySelector(".map .plot"), {xaxis, yaxis} = plot._fullLayout;
          plot.scrollIntoView({block: "center", behavior: "instant"});
          const box = plot.getBoundingClientRect(), {x, y} = plot.data[0];
          return [box.left + xaxis._offset + xaxis.l2p(x[point]), box.top + yaxis._offset + yaxis.l2p(y[point])];
        }""",
        point,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def hostile_page(hostile: Path) -> tuple[Path, dict[str, Any]]:
    return report(hostile, "-o", hostile.parent / "page.html")


def test_names_are_text_and_do_nothing(browser: Any, hostile_page: tuple[Path, dict[str, Any]]) -> None:
    view = opened(browser, hostile_page[0])
    text = view.inner_text("main")
    assert IMAGE_NAME in text
    assert "<svg onload=window.done=3>.jpg" in text
    for name in CLASSES[:2]:
        assert name in text
    assert "\\u202e" in text  # what would turn the line around is shown as what it is
    assert "\\udcff\\udcfe.png" in text
    assert view.locator("main script, main svg[onload], main b:not(.tile b)").count() == 0
    ticks = view.locator(".ytick text").all_text_contents()
    assert any("<b>bold</b>" in tick for tick in ticks)
    fine(view)


def test_a_script_that_got_into_the_page_all_the_same_would_not_run(
    browser: Any, hostile_page: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    text = hostile_page[0].read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(text.replace("<footer", "<script>window.done=1</script><img src=x onerror=window.done=1><footer"))
    view = opened(browser, page)
    view.wait_for_timeout(200)
    assert view.evaluate("window.done") is None
    assert any("Content Security Policy" in one for one in view.wrong)
    view.context.close()


@pytest.mark.slow
def test_pointing_at_the_map_shows_the_image(browser: Any, hostile_page: tuple[Path, dict[str, Any]]) -> None:
    page, content = hostile_page
    view = opened(browser, page)
    assert view.locator(".about-point").is_hidden()
    x, y = np.array(content["map"]["ways"][0]["x"]), np.array(content["map"]["ways"][0]["y"])
    alone = int(np.argmax(np.sort(np.hypot(x - x[:, None], y - y[:, None]), 1)[:, 1]))
    row = content["map"]["rows"][alone]
    left, top = place_of_point(view, alone)
    view.mouse.move(left - 60, top - 60)
    view.mouse.move(left, top, steps=4)
    view.wait_for_selector(".about-point:not([hidden])")
    assert view.locator(".about-point img").get_attribute("src") == content["thumbnails"][str(row)]
    assert view.locator(".about-point img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 50
    assert content["rows"][str(row)][0] in view.inner_text(".about-point")
    fine(view)


@pytest.mark.slow
def test_the_map_is_walked_by_keys(browser: Any, hostile_page: tuple[Path, dict[str, Any]]) -> None:
    view = opened(browser, hostile_page[0])
    view.locator(".map").focus()
    view.keyboard.press("ArrowRight")
    view.keyboard.press("ArrowRight")
    first = view.inner_text("[aria-live]")
    assert re.fullmatch(r"Row \d+: .*, class .*", first, re.DOTALL)
    assert view.locator(".about-point img").count() == 1
    view.keyboard.press("ArrowLeft")
    assert view.inner_text("[aria-live]") != first
    view.keyboard.press("Escape")
    assert view.locator(".about-point").is_hidden()
    legend = view.locator(".legend button").first
    legend.focus()
    view.keyboard.press("Enter")
    assert legend.get_attribute("aria-pressed") == "true"
    opacity = view.evaluate("document.querySelector('.map .plot').data[0].marker.opacity")
    assert sorted(set(opacity)) == [0.3, 0.85]
    fine(view)


@pytest.mark.slow
def test_tables_sort_by_click_and_by_enter(browser: Any, hostile_page: tuple[Path, dict[str, Any]]) -> None:
    view = opened(browser, hostile_page[0])
    table = view.get_by_role("region", name="Statistics by layer")
    heading = table.get_by_role("columnheader", name="Mean")

    def column() -> list[float]:
        return [float(text) for text in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column() == sorted(column())
    heading.locator("button").focus()
    view.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert column() == sorted(column(), reverse=True)
    assert table.locator("th[aria-sort=none]").count() == table.locator("th").count() - 1
    view.keyboard.press("Home")
    view.evaluate("document.activeElement.blur()")
    view.keyboard.press("Tab")
    assert view.evaluate("document.activeElement.className || document.activeElement.tagName") != "BODY"
    fine(view)


@pytest.mark.slow
def test_dark_narrow_and_printed_pages_are_drawn(browser: Any, hostile_page: tuple[Path, dict[str, Any]]) -> None:
    view = opened(browser, hostile_page[0], 400, color_scheme="dark", reduced_motion="reduce")
    dark = view.evaluate("getComputedStyle(document.body).backgroundColor")
    tick = view.evaluate("document.querySelector('.plots .xtick text').style.fill")
    view.emulate_media(color_scheme="light")
    view.wait_for_timeout(300)
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert view.evaluate("document.querySelector('.plots .xtick text').style.fill") != tick  # plots follow
    assert view.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert len(view.pdf()) > 10_000
    view.emulate_media(media="print")
    assert view.locator("nav").is_hidden()
    view.emulate_media(media="screen")
    fine(view)


def of_every_kind(folder: Path, tmp_path: Path) -> dict[str, str]:
    """Data sets in `tmp_path`, and what a report says of each; their images are not where they were."""
    made(tmp_path / "failed", 7, 4, 2, failed=True)
    made(tmp_path / "one", 1, 4, 1)
    made(tmp_path / "unlabelled", 40, 4, 0, unlabelled=True)
    made(tmp_path / "many classes", 3000, 8, 1000)
    layers = ["-l", "layer2:none", "-l", "layer3:none", "--size", 160, "--crop", 160]  # more numbers than a map is of
    assert layertap("embed", folder, "-o", tmp_path / "maps", *SMALL, *layers).exit_code == 0
    folder.rename(tmp_path / "moved")
    return {
        "failed": "7 images have no features",
        "one": "Too few images to tell",
        "unlabelled": "No thumbnails: the images are not in /nowhere any more",
        "many classes": "979 other classes are grey",
        "maps": "There is no layer `embedding`; images are compared by the last layer, layer3.",
    }


def test_data_sets_of_every_kind_have_a_report(folder: Path, tmp_path: Path) -> None:
    found = {name: report(tmp_path / name)[1] for name in of_every_kind(folder, tmp_path)}
    assert found["failed"]["counts"]["good"] == 0
    assert len(found["failed"]["failures"]) == 7
    assert found["failed"]["layers"][0]["mean"] is None
    assert len(found["one"]["map"]["rows"]) == 1
    assert found["unlabelled"]["unlabelled"] == 40
    assert len(found["many classes"]["classes"]) == 1000
    with FeatureReader(tmp_path / "maps") as reader:
        assert found["maps"]["layers"][0]["shape"] == list(reader["layer2"].shape[1:])
    assert "not in" in found["maps"]["about_thumbnails"]
    _, content = report(tmp_path / "maps", "--images", tmp_path / "moved")
    assert len(content["thumbnails"]) == 12
    few = report(tmp_path / "maps", "--images", tmp_path / "moved", "--thumbnails", 5)[1]["thumbnails"]
    assert list(few) == list(content["thumbnails"])[:5]
    none = report(tmp_path / "maps", "--images", tmp_path / "moved", "--thumbnails", 0)[1]
    assert (none["thumbnails"], none["about_thumbnails"]) == ({}, "No thumbnails, as requested.")


@pytest.mark.slow
def test_data_sets_of_every_kind_are_shown(browser: Any, folder: Path, tmp_path: Path) -> None:
    for name, says in of_every_kind(folder, tmp_path).items():
        page, _ = report(tmp_path / name)
        for width in (400, 1200):
            view = opened(browser, page, width)
            assert says in view.inner_text("main")
            fine(view)


@pytest.mark.slow
def test_several_maps_are_chosen_by_buttons(browser: Any, hostile: Path) -> None:
    pytest.importorskip("sklearn")
    page, content = report(hostile, "-o", hostile.parent / "maps.html", "--map", "pca", "--map", "tsne")
    assert [way["name"] for way in content["map"]["ways"]] == ["PCA", "t-SNE"]
    view = opened(browser, page)
    view.get_by_role("button", name="t-SNE").click()
    assert view.evaluate("document.querySelector('.map .plot').data[0].x") == content["map"]["ways"][1]["x"]
    assert view.get_by_role("button", name="t-SNE").get_attribute("aria-pressed") == "true"
    fine(view)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    import subprocess
    import sys

    peaks = {}
    for rows in (20_000, 200_000):
        out = made(tmp_path / str(rows), rows, 1280, 10)
        code = (
            "import re, sys; from pathlib import Path; from pipelines.data_sets.report import run_report\n"
            "run_report(Path(sys.argv[1]))\n"
            "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
        )
        found = subprocess.run([sys.executable, "-c", code, out], check=True, capture_output=True, text=True)
        peaks[rows] = int(found.stdout.split()[-1]) / 1000
        shutil.rmtree(out)
    print(f"peak memory, MB: {peaks}")
    assert peaks[200_000] < peaks[20_000] + 400  # the features are 1,024 MB
