"""The notebook of the documents runs, and prints what its file says; bars and results look right in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_picture
from tests.notebook import NOTEBOOK, run_notebook

DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")


def outputs(cell: Any) -> list[str]:
    """Return the text and HTML of the output of a cell."""
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        texts += [output["text"]] if "text" in output else []
        texts += [str(data[kind]) for kind in sorted(data) if kind.startswith("text/")]
        texts += [kind for kind in sorted(data) if kind.startswith("image/")]
    return texts


@pytest.mark.slow
def test_the_notebook_prints_what_its_file_says(tmp_path: Path) -> None:
    import nbformat

    stored = nbformat.read(NOTEBOOK, as_version=4)
    executed = run_notebook(NOTEBOOK, tmp_path)
    for before, after in zip(stored.cells, executed.cells, strict=True):
        assert len(outputs(before)) == len(outputs(after)), before.source
        for expected, text in zip(outputs(before), outputs(after), strict=True):
            assert DECIMAL.sub("#", text) == DECIMAL.sub("#", expected)
            numbers, expected_numbers = ([float(n) for n in DECIMAL.findall(each)] for each in (text, expected))
            assert numbers == pytest.approx(expected_numbers, rel=0.1, abs=0.05)  # processors round differently


@pytest.mark.slow
def test_a_progress_bar_in_a_notebook_is_a_widget_that_ends_full(tmp_path: Path) -> None:
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    (tmp_path / "photos").mkdir()
    for number in range(3):
        make_picture(number).save(tmp_path / "photos" / f"{number}.png")
    path = tmp_path / "bar.ipynb"
    code = "from layertap import extract_features\nreader = extract_features('photos', out='outputs/x')"
    nbformat.write(new_notebook(cells=[new_code_cell(code)]), path)
    executed = run_notebook(path, tmp_path)
    (output,) = executed.cells[0].outputs
    assert "application/vnd.jupyter.widget-view+json" in output["data"]
    models = executed.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    widgets = [model["state"] for model in models]
    (bar,) = [state for state in widgets if state.get("_view_name") == "ProgressView"]
    assert (bar["value"], bar["max"], bar["bar_style"]) == (3, 3, "success")
    texts = [state["value"] for state in widgets if isinstance(state.get("value"), str)]
    rate = r"3/3.*(images/s|s/\s*images)"  # where an image takes more than a second, seconds an image
    assert any(re.search(rate, text) for text in texts)
