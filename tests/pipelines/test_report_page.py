"""The page of `layertap report` in a browser of the system: what it shows, and how it behaves."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import make_picture
from tests.pipelines.test_cli import SMALL, succeeds
from tests.pipelines.test_report import CLASSES, IMAGE_NAME, Page, hostile, hostile_page, of_every_kind, report

__all__ = ["hostile", "hostile_page"]  # fixtures


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


def opened(browser: Any, page: Path, width: int = 1280, **settings: Any) -> Any:
    """The page; its errors, and what it asks of a network, are in `wrong`. A script that must not run sets `done`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
    view, wrong = context.new_page(), []
    view.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    view.on("pageerror", lambda error: wrong.append(str(error)))
    local = ("file:", "data:", "blob:")
    view.on("request", lambda request: None if request.url.startswith(local) else wrong.append(request.url[:99]))
    view.on("dialog", lambda dialog: wrong.append(dialog.message))
    view.goto(page.as_uri())
    view.wait_for_selector("html[data-ready]", timeout=30_000)
    view.wrong = wrong
    return view


def fine(view: Any) -> None:
    """Nothing went wrong, and nothing is wider than the window, nor than that of a telephone."""
    assert view.wrong == []
    assert view.evaluate("window.done") is None
    for size in (view.viewport_size, {"width": 400, "height": 900}):
        view.set_viewport_size(size)
        assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    view.context.close()


def place_of_point(view: Any, point: int) -> tuple[float, float]:
    """Where a point of the map is in the window."""
    return tuple(view.evaluate(
        """(point) => {
          const map = document.querySelector(".map");
          map.scrollIntoView({block: "center", behavior: "instant"});
          const box = map.getBoundingClientRect(), [x, y] = map.placeOf(point);
          return [box.left + map.clientLeft + x, box.top + map.clientTop + y];
        }""",
        point,
    ))  # fmt: skip


def point_alone(content: dict[str, Any]) -> int:
    """The point of the map that is farthest from any other."""
    x, y = np.array(content["map"]["ways"][0]["x"]), np.array(content["map"]["ways"][0]["y"])
    return int(np.argmax(np.sort(np.hypot(x - x[:, None], y - y[:, None]), 1)[:, 1]))


@pytest.fixture(scope="module")
def probed_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A report of 90 pictures of three classes, with a probe that is often wrong."""
    folder = tmp_path_factory.mktemp("probed")
    for i in range(90):
        path = folder / "images" / ["ant", "bee", "cat"][i % 3] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_picture(i, 60, 40).save(path)
    succeeds("embed", folder / "images", "-o", folder / "out", *SMALL)
    succeeds("probe", folder / "out", "-p", "centroid")
    return report(folder / "out")


@pytest.fixture
def hostile_view(browser: Any, hostile_page: Page) -> Iterator[tuple[Any, Any]]:
    """The page in the browser, and what it holds; after the test it is fine."""
    view = opened(browser, hostile_page[0])
    yield view, hostile_page[1]
    fine(view)


@pytest.fixture
def probed_view(browser: Any, probed_page: Page) -> Iterator[tuple[Any, Any]]:
    view = opened(browser, probed_page[0])
    yield view, probed_page[1]
    fine(view)


@pytest.mark.slow
def test_names_are_text_and_do_nothing(hostile_view: tuple[Any, Any]) -> None:
    view, _ = hostile_view
    view.get_by_label("Path").fill(".png")  # shows them all
    text = view.inner_text("main") + view.evaluate("document.querySelector('main').textContent")
    titles = view.evaluate("[...document.querySelectorAll('[title]')].map((element) => element.title).join(' ')")
    assert IMAGE_NAME in titles
    assert "<svg onload=window.done=3>.jpg" in text
    assert f"copy.png [{CLASSES[1]}]" in view.locator(".pair", has_text="copies, in several classes").text_content()
    assert "`layertap" not in text  # marks of code are not drawn
    for name in CLASSES[:2]:
        assert name in text
    assert "\\u202e" in titles  # a character that turns the line around is shown as its code
    assert "\\udcff\\udcfe.png" in titles
    assert view.locator("main script, main svg[onload], main b:not(.tile b)").count() == 0


@pytest.mark.slow
def test_a_script_that_got_into_the_page_all_the_same_would_not_run(
    browser: Any, hostile_page: Page, tmp_path: Path
) -> None:
    text = hostile_page[0].read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(text.replace("<footer", "<script>window.done=1</script><img src=x onerror=window.done=1><footer"))
    view = opened(browser, page)
    view.wait_for_timeout(200)
    assert view.evaluate("window.done") is None
    assert any("Content Security Policy" in message for message in view.wrong)
    view.context.close()


def test_pointing_shows_an_image_and_a_click_its_nearest(hostile_view: tuple[Any, Any]) -> None:
    view, content = hostile_view
    assert view.locator(".about-point").is_hidden()
    alone = point_alone(content)
    row = content["map"]["rows"][alone]
    left, top = place_of_point(view, alone)
    view.mouse.move(left - 60, top - 60)
    view.mouse.move(left, top, steps=4)
    view.wait_for_selector(".about-point:not([hidden])")
    assert view.locator(".about-point .tile-image").get_attribute("data-row") == str(row)
    assert content["rows"][str(row)][0] in view.locator(".about-point").text_content()
    view.mouse.click(left, top)
    shown = view.locator(".panel .tile-image")
    near = [content["map"]["rows"][point] for point in content["map"]["near"][alone]]
    assert [int(shown.nth(i).get_attribute("data-row")) for i in range(shown.count())] == [row, *near]


@pytest.mark.slow
def test_a_thumbnail_is_the_picture_of_its_row(probed_view: tuple[Any, Any], probed_page: Page) -> None:
    view, content = probed_view
    image = view.locator(".row-strip .tile-image").last
    row = int(image.get_attribute("data-row"))
    image.scroll_into_view_if_needed()
    seen = Image.open(BytesIO(image.screenshot())).convert("RGB")
    path = probed_page[0].parents[1] / "images" / content["rows"][str(row)][0]
    real = Image.open(path).convert("RGB").resize(seen.size)
    assert np.abs(np.asarray(seen, np.float32) - np.asarray(real, np.float32)).mean() < 25


@pytest.mark.slow
def test_map_and_legend_fit_the_first_screen_and_findings_are_linked(
    probed_view: tuple[Any, Any], probed_page: Page, tmp_path: Path
) -> None:
    view, content = probed_view
    for width, height in ((1920, 1080), (1280, 900)):
        view.set_viewport_size({"width": width, "height": height})
        view.wait_for_function(f"innerHeight === {height}")
        view.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        for part in (".map", ".legend", ".panel"):
            box = view.locator(part).bounding_box()
            assert box["height"] > 20
            assert box["y"] + box["height"] <= height
    assert view.locator(".panel .card").count() > 0  # before anything is chosen
    links = view.locator(".verdict p a")
    assert links.count() >= len(content["findings"]["counts"]) > 0
    for link in links.all():
        assert view.locator(link.get_attribute("href")).count() == 1
    names = view.locator(".panel .card .path")
    titles = [name.get_attribute("title") for name in names.all()]
    assert all(title.endswith(text) for title, text in zip(titles, names.all_inner_texts(), strict=True))
    with view.expect_download() as download:
        view.get_by_role("button", name="Save findings as CSV").click()
    download.value.save_as(tmp_path / "saved.csv")
    succeeds("findings", probed_page[0].parent, "-o", tmp_path / "written.csv")
    assert (tmp_path / "saved.csv").read_bytes() == (tmp_path / "written.csv").read_bytes()


@pytest.mark.slow
def test_what_scrolls_sideways_shows_an_arrow(browser: Any, probed_page: Page) -> None:
    view = opened(browser, probed_page[0], 400)
    strip = view.locator(".sideways:has(> .row-strip)").first
    assert strip.get_attribute("class") == "sideways more"
    strip.locator(".row-strip").evaluate("(element) => element.scrollTo({left: 9999, behavior: 'instant'})")
    view.wait_for_timeout(200)
    assert strip.get_attribute("class") == "sideways before"
    fine(view)


@pytest.mark.slow
def test_the_map_is_walked_by_keys(hostile_view: tuple[Any, Any]) -> None:
    view, _ = hostile_view
    view.locator(".map").focus()
    view.keyboard.press("ArrowRight")
    view.keyboard.press("ArrowRight")
    first = view.inner_text("[aria-live]")
    assert re.fullmatch(r"Row \d+: .*, class .*", first, re.DOTALL)
    assert view.locator(".panel .chosen .tile-image").count() == 1
    view.keyboard.press("ArrowLeft")
    assert view.inner_text("[aria-live]") != first
    view.keyboard.press("Escape")
    assert view.locator(".panel .chosen").count() == 0
    before = place_of_point(view, 0)
    view.keyboard.press("+")
    assert place_of_point(view, 0) != before
    view.keyboard.press("-")
    assert place_of_point(view, 0) == pytest.approx(before)
    legend = view.locator(".legend button").first
    legend.focus()
    view.keyboard.press("Enter")
    assert legend.get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_images_are_selected_by_path_and_by_drawing(probed_view: tuple[Any, Any], tmp_path: Path) -> None:
    view, content = probed_view
    view.get_by_label("Path").fill("BEE/")
    bees = [row for row in content["map"]["rows"] if content["rows"][str(row)][0].startswith("bee/")]
    assert view.locator(".panel h3").inner_text() == f"{len(bees)} images selected"
    with view.expect_download() as download:
        view.get_by_role("button", name="Save CSV").click()
    download.value.save_as(tmp_path / "selection.csv")
    with (tmp_path / "selection.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["row"]) for line in lines] == bees
    assert {line["class"] for line in lines} == {"bee"}
    view.get_by_role("button", name="Clear").click()
    assert "selected" not in view.locator(".panel").inner_text()

    alone = point_alone(content)
    view.get_by_role("button", name="Select by drawing").click()
    x, y = place_of_point(view, alone)
    box = view.locator(".map").bounding_box()
    corners = [(x - 6, y - 6), (x + 6, y - 6), (x + 6, y + 6), (x - 6, y + 6)]
    assert all(box["x"] < left < box["x"] + box["width"] for left, _ in corners)
    view.mouse.move(*corners[0])
    view.mouse.down()
    for corner in corners[1:]:
        view.mouse.move(*corner, steps=3)
    view.mouse.up()
    assert view.locator(".panel h3").inner_text() == "1 image selected"
    shown = view.locator(".panel .tile-image")
    assert int(shown.get_attribute("data-row")) == content["map"]["rows"][alone]


@pytest.mark.slow
def test_dots_become_pictures_and_are_coloured_by_what_the_probe_got_wrong(probed_view: tuple[Any, Any]) -> None:
    view, content = probed_view
    drawn = view.locator(".map")
    # `wait_for_function` would need eval, which the page forbids, if the first look is too early.
    view.locator(".map[data-drawn=pictures]").wait_for()  # 90 points have room
    view.get_by_label("Points").select_option("dots")
    view.locator(".map[data-drawn=dots]").wait_for()
    view.get_by_label("Colour").select_option(label="right or wrong by the probe")
    legend = view.locator(".legend button").all_inner_texts()
    assert [text.strip() for text in legend] == ["right", "wrong"]
    wrong = content["predictions"]["wrong"]
    options = view.get_by_label("Show").locator("option").all_inner_texts()
    on_map = [row for row in wrong if row in content["map"]["rows"]]
    assert f"wrong ({len(on_map)})" in options
    assert drawn.get_attribute("data-drawn") == "dots"


@pytest.mark.slow
def test_a_cell_of_the_confusion_matrix_shows_its_images(probed_view: tuple[Any, Any]) -> None:
    view, content = probed_view
    layer = content["probes"][0]["layers"][0]
    cells = view.locator(".confusion tbody td").all_inner_texts()
    assert [int(text) for text in cells] == [count for line in layer["confusion"] for count in line]
    button = view.locator(".confusion button").first
    truth, predicted = re.fullmatch(r"(\w+) taken for (\w+): \d+", button.get_attribute("aria-label")).groups()
    button.click()
    rows = [row for row in content["predictions"]["wrong"] if content["rows"][str(row)][4:6] == [truth, predicted]]
    shown = view.locator(".card.prediction .tile-image")
    assert [int(shown.nth(i).get_attribute("data-row")) for i in range(shown.count())] == rows
    assert len(rows) == int(button.inner_text())


@pytest.mark.slow
def test_tables_sort_by_click_and_by_enter(hostile_view: tuple[Any, Any]) -> None:
    view, _ = hostile_view
    view.get_by_text("Statistics of 2 layers").click()
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


@pytest.mark.slow
def test_dark_narrow_and_printed_pages_are_drawn(browser: Any, hostile_page: Page) -> None:
    view = opened(browser, hostile_page[0], 400, color_scheme="dark", reduced_motion="reduce")
    pixels = "document.querySelector('.map canvas').toDataURL()"
    dark = view.evaluate("getComputedStyle(document.body).backgroundColor")
    bar = view.evaluate("getComputedStyle(document.querySelector('.chart .bar')).fill")
    view.wait_for_timeout(300)
    map_dark = view.evaluate(pixels)
    view.emulate_media(color_scheme="light")
    view.wait_for_timeout(300)
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert view.evaluate("getComputedStyle(document.querySelector('.chart .bar')).fill") != bar
    assert view.evaluate(pixels) != map_dark  # the map follows
    assert view.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert len(view.pdf()) > 10_000
    view.emulate_media(media="print")
    assert view.locator("nav").is_hidden()
    view.emulate_media(media="screen")
    fine(view)


@pytest.mark.slow
def test_data_sets_of_every_kind_are_shown(browser: Any, folder: Path, tmp_path: Path) -> None:
    for name, says in of_every_kind(folder, tmp_path).items():
        view = opened(browser, report(tmp_path / name)[0])
        assert says in view.inner_text("main")
        assert name != "one" or "the same for all images" not in view.inner_text("main")
        fine(view)


@pytest.mark.slow
def test_the_page_opens_on_tsne_and_has_principal_axes(browser: Any, hostile: Path) -> None:
    pytest.importorskip("sklearn")
    page, content = report(hostile, "-o", hostile.parent / "maps.html", "--map", "tsne", "--map", "pca")
    assert [way["name"] for way in content["map"]["ways"]] == ["t-SNE", "PCA"]
    view = opened(browser, page)
    before = place_of_point(view, 0)
    assert "t-SNE by cosine" in view.inner_text("main")
    view.locator(".controls").get_by_label("Map", exact=True).select_option("PCA")
    assert "principal axes explain" in view.inner_text("main")
    assert place_of_point(view, 0) != before
    fine(view)


@pytest.mark.slow
def test_a_page_has_no_fault_that_axe_finds(browser: Any, probed_page: Page) -> None:
    axe = pytest.importorskip("axe_core_python", reason="no axe-core-python")
    (script,) = Path(axe.__file__).parent.rglob("axe.min.js")
    for scheme, width in (("light", 1280), ("dark", 400)):
        view = opened(browser, probed_page[0], width, color_scheme=scheme, bypass_csp=True)
        view.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
        view.evaluate(script.read_text(encoding="utf-8"))
        result = view.evaluate("axe.run()")
        assert [rule["id"] for rule in result["violations"]] == []
        assert [rule["id"] for rule in result["incomplete"] if rule["nodes"]] == []
        view.context.close()
