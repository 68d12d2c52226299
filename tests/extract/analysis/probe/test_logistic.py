"""The solver against scikit-learn: the same objective, reached as well or better."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression as Reference

from extract.analysis.probe import feature_matrix as rows
from extract.analysis.probe import logistic
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.logistic import LogisticRegression

STRENGTHS = [1e-6, 1e-3, 1.0, 100.0]


def data(n=400, d=30, k=4, seed=0, scale=1.0):
    """Overlapping classes; columns of very different size, and a mean far from zero."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, k, n)
    x = generator.normal(size=(n, d)) + generator.normal(size=(k, d))[y] * 0.5
    return (x * np.logspace(-1.5, 1.5, d) * scale + 3).astype(np.float32), y


def objective(weights, biases, x, y, strength, times=None):
    """C * sum of the loss + |W|^2 / 2, written out in double precision."""
    scores = x.astype(np.float64) @ weights.astype(np.float64).T + biases
    if len(biases) == 1:
        loss = np.logaddexp(0, np.where(y == 1, -1, 1) * scores[:, 0])
    else:
        loss = np.logaddexp.reduce(scores, axis=1) - scores[np.arange(len(y)), y]
    loss = loss if times is None else loss * times
    return strength * loss.sum() + (weights.astype(np.float64) ** 2).sum() / 2


def reference(x, y, strength):
    fitted = Reference(C=strength, solver="newton-cholesky", max_iter=1000, tol=1e-8).fit(x.astype(np.float64), y)
    return fitted.coef_, fitted.intercept_


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that every pass is over several blocks."""
    monkeypatch.setattr(logistic, "_LEAST_ROWS", 7)
    monkeypatch.setattr(logistic, "_BLOCK_BYTES", 20_000)
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 10_000)


held_or_streamed = pytest.mark.parametrize("memory_bytes", [1 << 30, 10_000], ids=["held", "streamed"])


@pytest.mark.parametrize("k", [2, 4])
@held_or_streamed
def test_every_strength_reaches_the_objective_of_scikit_learn(k, memory_bytes):
    x, y = data(k=k)
    fit = LogisticRegression(FeatureRows.of(x), y, k, memory_bytes=memory_bytes).fit(STRENGTHS[::-1])
    for i, strength in enumerate(STRENGTHS[::-1]):
        best = objective(*reference(x, y, strength), x, y, strength)
        value = objective(fit.weights[i], fit.biases[i], x, y, strength)
        assert value <= best * (1 + 1e-4)
        assert fit.objectives[i] == pytest.approx(value, rel=1e-5)
        assert fit.converged[i]


@pytest.mark.parametrize(("n", "d", "k"), [(15, 40, 3), (100, 10, 2), (100, 10, 3), (300, 30, 5)])
def test_small_problems_reach_the_objective_to_a_millionth(n, d, k):
    x, y = data(n, d, k)
    strengths = [1e-6, 1e-4, 1e-2]
    fit = LogisticRegression(FeatureRows.of(x), y, k).fit(strengths)
    for i, strength in enumerate(strengths):
        best = objective(*reference(x, y, strength), x, y, strength)
        assert objective(fit.weights[i], fit.biases[i], x, y, strength) <= best * (1 + 1e-6)


def test_a_direction_is_that_of_the_two_loops_of_l_bfgs():
    """Nocedal and Wright, algorithm 7.4, in double precision, also after the ring of steps is full."""
    generator = torch.Generator().manual_seed(0)
    fits, n = 3, 40
    root = torch.randn(fits, n, n, generator=generator)
    hessian = root @ root.mT / n + torch.eye(n)
    curvature, pairs = logistic._Curvature(torch.zeros(fits, n)), []
    for number in range(13):
        gradient, step = torch.randn(2, fits, n, generator=generator)
        change = (hessian @ step[..., None])[..., 0]
        change[0] *= 1 if number != 5 else -1  # no curvature along this step of one fit
        curvature.add(step, change)
        pairs = [*pairs, (step.double(), change.double())][-logistic._HISTORY :]
        found = curvature.direction(gradient)
    for i in range(fits):
        known = [(s[i], y[i]) for s, y in pairs if s[i] @ y[i] > 0]
        result, shares = gradient[i].double(), []
        for s, y in reversed(known):
            shares.append(s @ result / (s @ y))
            result = result - shares[-1] * y
        result = result * (known[-1][0] @ known[-1][1]) / known[-1][1].square().sum()
        for (s, y), share in zip(known, reversed(shares), strict=True):
            result = result + s * (share - y @ result / (s @ y))
        np.testing.assert_allclose(found[i], -result, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strength", [1.0, 1e3])
def test_about_as_many_rows_as_columns_take_few_steps_to_the_objective_of_scikit_learn(strength):
    generator = np.random.default_rng(0)  # the least variance along an axis is a ten-thousandth of the largest
    y = np.arange(220) % 5
    x = (generator.normal(size=(5, 200))[y] + 2 * generator.normal(size=(220, 200))).astype(np.float32)
    fit = LogisticRegression(FeatureRows.of(x), y, 5).fit([strength])
    best = objective(*reference(x, y, strength), x, y, strength)
    assert objective(fit.weights[0], fit.biases[0], x, y, strength) == pytest.approx(best, rel=1e-4)
    assert fit.converged.all()
    assert fit.iterations[0] < 60  # with the scales of the start: 77 and 135


def test_a_column_of_large_values_does_not_stop_a_fit_whose_losses_are_small():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6000, 40))
    y = (x[:, 0] > 0).astype(np.int64)
    x[:, 0] += np.sign(x[:, 0]) / 2
    x[:, 3] *= 1e4
    y[5] = 1 - y[5]
    x = x.astype(np.float32)
    fit = LogisticRegression(FeatureRows.of(x), y, 2).fit([1e4])
    best = objective(*reference(x, y, 1e4), x, y, 1e4)
    assert objective(fit.weights[0], fit.biases[0], x, y, 1e4) == pytest.approx(best, rel=1e-4)  # was twice as large


def test_rare_labels_take_few_steps_to_the_objective_of_scikit_learn():
    generator = np.random.default_rng(0)
    x = (generator.normal(size=(20_000, 60)) * np.arange(1.0, 61) ** -1.5).astype(np.float32)
    rare = x / x.std(0) @ generator.normal(size=60) / 60**0.5 * 3 + generator.logistic(size=len(x)) > 11
    fit = LogisticRegression(FeatureRows.of(x), rare.astype(np.int64), 2).fit([1e6])
    best = objective(*reference(x, rare, 1e6), x, rare, 1e6)
    assert objective(fit.weights[0], fit.biases[0], x, rare, 1e6) == pytest.approx(best, rel=1e-5)
    assert fit.iterations[0] < 60


def test_weak_regularisation_of_separable_classes_does_not_stop_early():
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 60)
    x = (generator.normal(size=(60, 200)) + 3 * np.eye(3, 200)[y]).astype(np.float32)  # fewer rows than columns
    fit = LogisticRegression(FeatureRows.of(x), y, 3).fit([1e4])
    best = objective(*reference(x, y, 1e4), x, y, 1e4)
    assert objective(fit.weights[0], fit.biases[0], x, y, 1e4) <= best * (1 + 1e-3)


@held_or_streamed
def test_labels_that_do_not_exclude_each_other_are_as_many_problems_of_one_label(memory_bytes):
    x, _ = data()
    labels = (x[:, :3] + np.random.default_rng(1).normal(size=(len(x), 3)) > 3).astype(np.float32)
    fit = LogisticRegression(FeatureRows.of(x), labels, 3, memory_bytes=memory_bytes).fit([0.1])
    for label in range(3):
        y, own = labels[:, label].astype(int), slice(label, label + 1)
        best = objective(*reference(x, y, 0.1), x, y, 0.1)
        assert objective(fit.weights[0, own], fit.biases[0, own], x, y, 0.1) <= best * (1 + 1e-4)


@held_or_streamed
def test_rows_may_weigh_differently(memory_bytes):
    x, y = data(n=300)
    times = np.random.default_rng(2).uniform(0.1, 4, len(x)).astype(np.float32)
    fit = LogisticRegression(FeatureRows.of(x), y, 4, sample_weight=times, memory_bytes=memory_bytes).fit([0.1])
    fitted = Reference(C=0.1, solver="newton-cholesky", tol=1e-8).fit(x.astype(np.float64), y, sample_weight=times)
    best = objective(fitted.coef_, fitted.intercept_, x, y, 0.1, times)
    assert objective(fit.weights[0], fit.biases[0], x, y, 0.1, times) <= best * (1 + 1e-4)


def test_columns_that_are_constant_or_copies_do_no_harm():
    x, y = data(n=200, d=10)
    x = np.concatenate([x, x[:, :2], np.full((200, 1), 7, np.float32), np.zeros((200, 1), np.float32)], 1)
    fit = LogisticRegression(FeatureRows.of(x), y, 4).fit([1.0])
    best = objective(*reference(x, y, 1.0), x, y, 1.0)
    assert objective(fit.weights[0], fit.biases[0], x, y, 1.0) <= best * (1 + 1e-4)


def test_rows_that_are_all_the_same_give_the_frequencies_of_the_classes():
    y = np.array([0] * 30 + [1] * 60 + [2] * 10)
    fit = LogisticRegression(FeatureRows.of(np.ones((100, 5), np.float32)), y, 3).fit([1.0])
    scores = np.ones(5, np.float32) @ fit.weights[0].T + fit.biases[0]
    shares = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(shares, [0.3, 0.6, 0.1], atol=2e-3)


def test_only_a_problem_of_a_certain_size_is_solved_on_another_device(monkeypatch):
    """A tensor on "meta" has no values, so nothing can be solved there."""
    x, y = data()
    alone = LogisticRegression(FeatureRows.of(x), y, 4).fit([1.0])
    small = LogisticRegression(FeatureRows.of(x), y, 4, device="meta").fit([1.0])
    assert np.array_equal(small.weights, alone.weights)
    monkeypatch.setattr(logistic, "_ON_GPU_FROM", 400 * 31 * 4)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        LogisticRegression(FeatureRows.of(x), y, 4, device="meta").fit([1.0])
