"""The examples of the README run, and do what they say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def examples(section: str) -> list[str]:
    text = README.split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for number, code in enumerate(examples("Hooks by example")):
        if "vgg16" in code:  # a test of its own: its 138 million weights take seconds
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, found)
        found[f"printed by {number}"] = printed.getvalue()
    return found


def test_there_are_nine_examples_of_hooks() -> None:
    assert len(examples("Hooks by example")) == 9


def test_the_histogram_holds_every_gradient(names: dict[str, Any]) -> None:
    assert names["counts"].sum() == 600  # one for each of the images


def test_a_smoothed_gradient_is_a_moving_average(names: dict[str, Any]) -> None:
    assert names["smoothed"].shape == (1, 8)
    assert names["smoothed"].abs().sum() > 0


def test_moments_are_of_all_batches(names: dict[str, Any]) -> None:
    assert set(names["moments"]) == {"0", "1", "2"}
    assert names["inspection"].images == 500


def test_the_naive_hook_loses_what_the_inplace_relu_rewrites(names: dict[str, Any]) -> None:
    assert names["lost"] == 0
    assert 50 < names["there"] < 250


def test_layer_shapes_of_resnet50(names: dict[str, Any]) -> None:
    assert names["printed by 0"].splitlines() == [f"layer3.{i} (1, 1024, 14, 14)" for i in range(6)]


def test_inputs_and_outputs_differ_by_nothing_from_what_forward_returned(names: dict[str, Any]) -> None:
    assert names["difference"] == 0
    assert names["passed_on"] == 0


def test_the_clipped_gradient_is_clipped(names: dict[str, Any]) -> None:
    assert names["largest"] == pytest.approx(0.01)


def test_norms_of_the_weights_gradient_are_handed_over(names: dict[str, Any]) -> None:
    assert len(names["norms"]) == 3
    total = names["net"][2].weight.grad  # the sum over the steps, and over the example before them
    assert all(norm > 0 for norm in names["norms"])
    assert total is not None


@pytest.mark.slow
def test_doubling_the_first_layer_changes_its_gradients(names: dict[str, Any]) -> None:
    (code,) = (code for code in examples("Hooks by example") if "vgg16" in code)
    torch.manual_seed(0)
    exec(code, names)
    one, two = names["gradients"]
    assert not torch.allclose(one, two)
    assert 1.5 < two.norm() / one.norm() < 2.5


def test_the_reading_example_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from extract import extract_features
    from tests.conftest import make_picture

    monkeypatch.chdir(tmp_path)
    for i in range(11):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_picture(i).save(path)
    extract_features("photos", out="outputs/photos", progress=False)
    found: dict[str, Any] = {"__name__": "__main__"}
    for code in examples("Reading"):
        exec(code, found)
    assert tuple(found["x"].shape) == (11, 1280)
    assert sorted(found["y"].tolist()) == sorted(found["labels"].tolist())
    assert sorted(found["rows"].tolist()) == list(range(11))
    assert found["features"].shape == (11, 1280)
    assert found["ok"].all()
    assert list(found["classes"]) == ["a", "b"]


def test_the_probe_example_probes() -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 150)
    x = (generator.normal(size=(150, 8)) + 2 * np.eye(3, 8)[y]).astype(np.float32)
    found: dict[str, Any] = {"x_train": x[:100], "y_train": y[:100], "x_test": x[100:], "y_test": y[100:]}
    for code in examples("Linear probes"):
        exec(code, found)
    assert found["result"].value > 0.7
    assert len(found["result"].curve) == 45
