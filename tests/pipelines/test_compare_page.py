"""The page of `layertap compare` in a browser of the system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.test_compare import compare, compared, made, tasks
from tests.pipelines.test_report_page import browser, fine, opened

__all__ = ["browser", "compared", "made", "tasks"]  # fixtures

pytestmark = pytest.mark.slow


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


def test_names_are_text(browser: Any, made: Path, tmp_path: Path) -> None:
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


def test_several_tasks_have_a_part_each(browser: Any, made: Path, tasks: list[str], tmp_path: Path) -> None:
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
