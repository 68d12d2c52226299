"""A probe that is kept is the same when it is read, and damage is named."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from extract.analysis.probe import LinearProbe, linear_probe
from extract.errors import InputError


@pytest.fixture(scope="module")
def fitted():
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 200)
    x = (generator.normal(size=(200, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    names = np.array(["ant", "bee|", "<b>"])[y]
    return x, linear_probe(x[:150], names[:150], x[150:], names[150:], scaling="standardise").model


def test_a_kept_probe_gives_the_same_probabilities(tmp_path, fitted):
    x, model = fitted
    model.save(tmp_path / "probe.safetensors")
    again = LinearProbe.load(tmp_path / "probe.safetensors")
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    assert again.classes_.tolist() == sorted(["ant", "bee|", "<b>"])
    tensors = load_file(tmp_path / "probe.safetensors")
    assert {name: value.shape for name, value in tensors.items()} == {
        "coef": (3, 6), "intercept": (3,), "mean": (6,), "scale": (6,)
    }  # fmt: skip
    expected = (x - tensors["mean"]) / tensors["scale"] @ tensors["coef"].T + tensors["intercept"]
    np.testing.assert_allclose(again.decision_function(x), expected, rtol=1e-5, atol=1e-5)


def test_features_of_another_width_are_refused(fitted):
    _, model = fitted
    with pytest.raises(InputError, match="the features have 5 values; the probe was fitted on 6"):
        model.predict(np.ones((2, 5), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: (t, {}), "is not a probe"),
        (lambda t, m: (t, {**m, "format_version": "2"}), "is not a probe"),
        (lambda t, m: ({k: v for k, v in t.items() if k != "intercept"}, m), "intercept"),
        (lambda t, m: ({k: v for k, v in t.items() if k != "mean"}, m), "statistics of its scaling are missing"),
        (lambda t, m: ({**t, "mean": t["mean"][:3].copy()}, m), "different widths"),
        (lambda t, m: ({**t, "coef": t["coef"] * np.nan}, m), "not finite"),
        (lambda t, m: (t, {**m, "classes": json.dumps(["a"])}), "1 classes"),
        (lambda t, m: (t, {**m, "classes": "[["}), "cannot be read as a probe"),
        (lambda t, m: (t, {**m, "task": "magic"}), "unknown task"),
        (lambda t, m: (t, {**m, "has_probabilities": "3"}), "has_probabilities is 3; expected true or false"),
        (lambda t, m: (t, {**m, "has_probabilities": "null"}), "has_probabilities is None; expected true or false"),
        (lambda t, m: (t, {**m, "classes": "[1, 2, NaN]"}), "a class, a weight or a statistic"),
        (lambda t, m: (t, {**m, "about": "[]"}), "metadata are not a mapping"),
        (
            lambda t, m: (
                {**t, "coef": t["coef"][:0].copy(), "intercept": t["intercept"][:0].copy()},
                {**m, "classes": "[]"},
            ),
            "weights are not of shapes",
        ),
        (
            lambda t, m: ({k: v.astype(np.float64) for k, v in t.items()}, {**m, "task": "regression"}),
            "a regression has none",
        ),
    ],
)
def test_what_is_no_whole_probe_is_refused(tmp_path, fitted, change, message):
    from safetensors import safe_open

    path = tmp_path / "probe.safetensors"
    fitted[1].save(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors, metadata = change(load_file(path), metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match=message):
        LinearProbe.load(path)


def test_a_single_flipped_bit_of_a_kept_probe_is_found(tmp_path, fitted):
    x, model = fitted
    path = tmp_path / "probe.safetensors"
    model.save(path)
    whole = path.read_bytes()
    expected = model.predict_proba(x)
    for place in np.random.default_rng(0).choice(8 * len(whole), 300, replace=False).tolist():
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            np.testing.assert_array_equal(LinearProbe.load(path).predict_proba(x), expected)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017


def test_a_probe_of_an_earlier_version_without_a_checksum_is_read(tmp_path, fitted):
    from safetensors import safe_open

    x, model = fitted
    path = tmp_path / "probe.safetensors"
    model.save(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    del metadata["sha256"]
    save_file(load_file(path), path, metadata)
    np.testing.assert_array_equal(LinearProbe.load(path).predict_proba(x), model.predict_proba(x))


def test_other_files_are_no_probes_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "a").write_bytes(b"no")
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("a", ""), ("b", ""), (".", ""), ("pipe", " is not a regular file")):
        with pytest.raises(InputError, match=f"{tmp_path / name}{why}"):
            LinearProbe.load(tmp_path / name)
