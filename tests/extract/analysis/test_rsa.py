"""RSA of matrices with known answers, against SciPy, the definitions by loops, and rsatoolbox where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr, t

from extract.analysis import rsa
from extract.analysis.rsa import COMPARISONS, compare_rdms, condensed, odd_one_out
from extract.errors import InputError, UnknownNameError

N, M = 9, 36


def world(missing: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three models and four subjects, with ties; the first `missing` pairs are NaN in all."""
    generator = np.random.default_rng(0)
    truth = generator.random(M)
    data = np.round(truth + generator.normal(0, 0.4, (4, M)), 1) + 1
    models = np.round(truth + generator.normal(0, [[0.3], [0.6], [2]], (3, M)), 1)
    data[:, :missing] = models[:, :missing] = np.nan
    return models, data


def tau_a(x: np.ndarray, y: np.ndarray) -> float:
    signs = np.sign(x[:, None] - x) * np.sign(y[:, None] - y)
    return float(signs.sum() / (len(x) * (len(x) - 1)))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def similarity(x: np.ndarray, y: np.ndarray, by: str, images: int = N) -> float:
    """By the definitions; whitened: by the covariance of distances (Diedrichsen et al. 2021)."""
    known = ~np.isnan(x + y)
    i, j = np.triu_indices(images, 1)
    contrasts = np.eye(images)[i] - np.eye(images)[j]
    inverse = np.linalg.inv(((contrasts @ contrasts.T) ** 2)[np.ix_(known, known)])
    x, y = x[known], y[known]
    if by == "whitened":
        return float(x @ inverse @ y / np.sqrt((x @ inverse @ x) * (y @ inverse @ y)))
    return {"spearman": lambda: spearmanr(x, y).statistic, "kendall": lambda: tau_a(x, y)}.get(
        by, lambda: cosine(x, y)
    )()


def pooled(data: np.ndarray, by: str) -> np.ndarray:
    known = ~np.isnan(data).any(0)
    mean = np.full(data.shape[1], np.nan)
    ready = [rankdata(row[known]) if by in ("spearman", "kendall") else row[known] / np.sqrt((row[known] ** 2).mean())
             for row in data]  # fmt: skip
    mean[known] = np.mean(ready, 0)
    return mean


@pytest.mark.parametrize("missing", [0, 5])
@pytest.mark.parametrize("by", COMPARISONS)
def test_similarities_and_ceilings_are_those_of_the_definitions(by: str, missing: int) -> None:
    models, data = world(missing)
    found = compare_rdms(models, data, by=by, draws=2)
    np.testing.assert_allclose(found.values, [[similarity(x, y, by) for y in data] for x in models], atol=1e-10)
    lower = np.mean([similarity(pooled(np.delete(data, s, 0), by), data[s], by) for s in range(4)])
    upper = np.mean([similarity(pooled(data, by), data[s], by) for s in range(4)])
    np.testing.assert_allclose(found.ceiling, [lower, upper], atol=1e-10)
    assert found.n_pairs == M - missing


@pytest.mark.parametrize("by", COMPARISONS)
def test_a_sample_of_images_is_the_matrix_with_copies_whose_pairs_are_not_known(by: str) -> None:
    models, data = world(3)
    counts = np.array([2, 0, 1, 3, 1, 0, 1, 1, 0])
    drawn = np.repeat(np.arange(N), counts)

    def resampled(vector: np.ndarray) -> np.ndarray:
        matrix = np.full((N, N), np.nan)
        matrix[np.triu_indices(N, 1)] = vector
        matrix = np.where(np.isnan(matrix), matrix.T, matrix)
        return matrix[np.ix_(drawn, drawn)][np.triu_indices(len(drawn), 1)]

    known = ~np.isnan(data).any(0)
    found = rsa._Similarity(models, data, known, by)(counts)
    expected = [[similarity(resampled(x), resampled(y), by, len(drawn)) for y in data] for x in models]
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("by", COMPARISONS)
def test_rsatoolbox_finds_the_same(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rsatoolbox")
    from rsatoolbox.inference import boot_noise_ceiling, eval_dual_bootstrap, evaluate
    from rsatoolbox.model import ModelFixed
    from rsatoolbox.rdm import RDMs, compare

    models, data = world()
    method = {"spearman": "spearman", "kendall": "tau-a", "cosine": "cosine", "whitened": "cosine_cov"}[by]
    found = compare_rdms(models, data, by=by, draws=2)
    np.testing.assert_allclose(found.values, compare(RDMs(models), RDMs(data), method), atol=1e-5)
    np.testing.assert_allclose(found.ceiling, boot_noise_ceiling(RDMs(data), method=method), atol=1e-5)
    draws: list[Any] = []
    original = evaluate.bootstrap_sample

    def noted(*given: Any, **more: Any) -> Any:
        draws.append(original(*given, **more))
        return draws[-1]

    monkeypatch.setattr(evaluate, "bootstrap_sample", noted)
    fixed = [ModelFixed(str(i), RDMs(model[None])) for i, model in enumerate(models)]
    theirs = eval_dual_bootstrap(fixed, RDMs(data), method=method, N=40)
    subjects, images = (
        np.array([np.bincount(draw[i], minlength=size) for draw in draws]) for i, size in ((1, 4), (2, N))
    )
    samples = rsa._samples(rsa._Similarity(models, data, np.ones(M, bool), by), found.values, images, subjects)
    np.testing.assert_allclose(samples, theirs.evaluations[:, :, 0, 0].transpose(2, 0, 1), atol=1e-5)
    np.testing.assert_allclose(rsa._variance(samples, 4, N), theirs.model_var, atol=1e-5)
    differences = samples[..., [0, 0, 1]] - samples[..., [1, 2, 2]]
    np.testing.assert_allclose(rsa._variance(differences, 4, N), theirs.diff_var, atol=1e-5)


def test_the_model_that_made_the_data_lies_between_the_ceilings_and_is_the_best() -> None:
    generator = np.random.default_rng(0)
    truth = generator.random(20 * 19 // 2)
    data = truth + generator.normal(0, 0.5, (6, len(truth)))
    models = truth + generator.normal(0, 1, (3, len(truth))) * [[0.5], [0], [0.2]]
    for by in ("spearman", "cosine", "whitened"):
        found = compare_rdms(models, data, by=by, draws=200)
        assert found.ceiling[0] < found.mean[1] < found.ceiling[1]
        assert found.mean.argmax() == 1
        assert found.low[1] < found.mean[1] < found.high[1]
        assert found.behind[0, 0] > 0  # the noisiest is worse


@pytest.mark.parametrize("by", COMPARISONS)
def test_samples_without_a_known_pair_do_not_stop_the_bootstrap(by: str) -> None:
    data = np.full(10, np.nan)  # of five images
    data[[0, 1, 9]] = 1, 2, 4
    found = compare_rdms(data**2, data, by=by, draws=300)
    assert found.n_pairs == 3
    assert np.isfinite(found.low).all()


def test_intervals_are_of_students_t_and_hold_the_differences_to_the_best() -> None:
    models, data = world()
    found = compare_rdms(models, data, seed=3)
    again = compare_rdms(models, data, seed=3)
    np.testing.assert_array_equal(found.low, again.low)
    assert found.mean.argmax() == 0
    assert (found.behind[0] == 0).all()
    np.testing.assert_allclose(found.behind[1:].mean(1), found.mean[0] - found.mean[1:], atol=1e-12)
    one = compare_rdms(models, data[0], seed=3)  # over images alone
    assert np.isnan(one.ceiling).all()
    images = np.random.default_rng(3).multinomial(N, [1 / N] * N, 1000)
    assert ((images > 0).sum(1) >= 3).all()
    values = [similarity_of_sample(models[0], data[0], counts) for counts in images]
    error = np.std(values, ddof=1) * np.sqrt(N / (N - 1))
    np.testing.assert_allclose(one.high[0] - one.mean[0], error * t.ppf(0.975, N - 1), rtol=1e-9)


def similarity_of_sample(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> float:
    times = (counts[:, None] * counts)[np.triu_indices(N, 1)]
    return float(spearmanr(np.repeat(x, times), np.repeat(y, times)).statistic)


def test_odd_ones_out_count_ties_by_chance() -> None:
    rdm = np.array([[0, 1, 2, 2], [1, 0, 2, 1], [2, 2, 0, 1], [2, 1, 1, 0.0]])
    for triplet, credit in (((0, 1, 2), 1), ((0, 2, 1), 0), ((0, 1, 3), 1 / 2), ((0, 2, 3), 0), ((2, 3, 1), 1 / 2)):
        assert odd_one_out(rdm, [triplet]) == (credit, 0)
    assert odd_one_out(np.ones((3, 3)) + 1e-15 * np.arange(9).reshape(3, 3), [(0, 1, 2)])[0] == 1 / 3
    accuracy, error = odd_one_out(rdm, [(0, 1, 2), (0, 2, 1), (0, 1, 3), (2, 3, 1)])
    assert (accuracy, error) == (0.5, pytest.approx(np.std([1, 0, 0.5, 0.5]) / 2))


SQUARE = np.array([[0, 1, 2], [1, 0, 3], [2, 3, 0.0]])


def test_every_form_of_a_matrix_is_read() -> None:
    stack = np.stack([SQUARE, 2 * SQUARE])
    for form in (stack, np.moveaxis(stack, 0, 2), stack[:, *np.triu_indices(3, 1)]):
        np.testing.assert_array_equal(condensed(form), [[1, 2, 3], [2, 4, 6]])
    np.testing.assert_array_equal(condensed(SQUARE + np.diag([np.nan] * 3)), [[1, 2, 3]])
    np.testing.assert_array_equal(condensed(np.array([1, 2, 3])), [[1, 2, 3]])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "asymmetric": (
        lambda: condensed(np.stack([SQUARE, np.triu(SQUARE)]), "x.npy"),
        "x.npy: not symmetric: matrix 1, row 0 and column 1; give a symmetric matrix",
    ),
    "NaN on one side": (
        lambda: condensed(np.where(np.tri(3, k=-1) > 0, np.nan, SQUARE)), "not symmetric: matrix 0, row 0 and column 1",
    ),
    "similarities": (lambda: condensed(1 - SQUARE), "the diagonal is not 0; expected dissimilarities"),
    "infinite": (lambda: condensed(np.array([1, 2, np.inf])), "a value is infinite"),
    "two images": (lambda: condensed(SQUARE[:2, :2]), r"\(2, 2\); expected RDMs of 3 or more images"),
    "one pair": (lambda: condensed(np.ones(1)), r"\(1,\); expected RDMs of 3 or more images"),
    "no number of pairs": (lambda: condensed(np.ones((2, 4))), r"\(2, 4\); expected RDMs"),
    "text": (lambda: condensed(np.array(["a"] * 3)), "<U1"),
    "constant": (lambda: compare_rdms([1, 2, 3], [[1, 2, 3], [4, 4, 4]]), "the RDM of subject 1 is constant"),
    "a constant model": (lambda: compare_rdms([2, 2, 2], [1, 2, 3], names=["conv1"]), "the RDM of conv1 is constant"),
    "other images": (lambda: compare_rdms([1, 2, 3], np.arange(6)), "models have 3 pairs of images, and the data 6"),
    "NaN": (lambda: compare_rdms([1, 2, 3], [[1, np.nan, np.nan], [np.nan, 1, 2]]), "no pair of images is known"),
    "name": (lambda: compare_rdms([1, 2, 3], [1, 2, 3], by="spearmann"), "nearest: 'spearman'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_matrix_of_dissimilarities_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises((InputError, UnknownNameError), match=message):
        call()
