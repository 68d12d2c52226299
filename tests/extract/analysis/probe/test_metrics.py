"""Numbers against scikit-learn and scipy, and intervals against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binomtest
from sklearn import metrics as reference

from benchmarks.interval_coverage import of_proportions
from extract.analysis.probe.metrics import (
    average_precision,
    by_class,
    classification_metrics,
    confusion_of,
    effective_rows,
    exact_proportion,
    expected_calibration_error,
    mcnemar,
    multilabel_metrics,
    ranking,
    regression_metrics,
)


@pytest.fixture
def predictions():
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 8, 500)
    truth[truth == 7] = 0  # a class that no test row has
    scores = generator.normal(size=(500, 8)).astype(np.float32)
    scores[np.arange(500), truth] += 1.5
    return scores, truth, (np.exp(scores) / np.exp(scores).sum(1, keepdims=True)).astype(np.float32)


def test_numbers_of_classification_are_those_of_scikit_learn(predictions):
    scores, truth, probabilities = predictions
    metrics = classification_metrics(scores, truth, probabilities, seed=0)
    predicted = scores.argmax(1)
    expected = {
        "top1": reference.accuracy_score(truth, predicted),
        "top5": reference.top_k_accuracy_score(truth, scores, k=5, labels=range(8)),
        "balanced_accuracy": reference.recall_score(truth, predicted, labels=range(7), average="macro"),
        "macro_f1": reference.f1_score(truth, predicted, average="macro"),
        "log_loss": reference.log_loss(truth, probabilities.astype(np.float64), labels=range(8)),
    }
    for name, value in expected.items():
        assert metrics[name].value == pytest.approx(value, rel=1e-5), name
        assert metrics[name].low < value < metrics[name].high
        assert metrics[name].method
    of_rows = exact_proportion(metrics["top1"].value, 500)
    assert (metrics["top1"].low, metrics["top1"].high) == (of_rows.low, of_rows.high)
    assert np.isnan(metrics["calibration_error"].low)  # drawing rows again makes it larger
    each = by_class(predicted, truth, 8)
    precision, recall, f1, n = reference.precision_recall_fscore_support(
        truth, predicted, labels=range(8), zero_division=0
    )
    np.testing.assert_allclose(each["precision"], precision)
    np.testing.assert_allclose(each["recall"], recall)
    np.testing.assert_allclose(each["f1"], f1)
    np.testing.assert_array_equal(each["n"], n)
    np.testing.assert_array_equal(
        confusion_of(predicted, truth, 8), reference.confusion_matrix(truth, predicted, labels=range(8))
    )


def test_the_calibration_error_is_the_mean_distance_of_confidence_and_accuracy():
    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    right = np.array([True, True, True, False, True, False])
    assert expected_calibration_error(confidence, right) == pytest.approx((4 * 0.2 + 2 * 0.05) / 6)
    assert expected_calibration_error(np.array([1.0, 0.0]), np.array([True, False])) == 0


def test_test_classes_that_training_did_not_have_are_always_wrong_and_count_one_by_one(predictions):
    scores, truth, probabilities = predictions
    known = classification_metrics(scores, truth, probabilities, seed=0)["top1"].value
    names = np.where(truth == 5, 105, np.where(truth == 6, 106, truth))
    unseen = np.where(truth == 5, -1, np.where(truth == 6, -2, truth))
    metrics = classification_metrics(scores, unseen, probabilities, seed=0)
    predicted, how = scores.argmax(1), {"average": "macro", "zero_division": 0}
    recall = reference.recall_score(names, predicted, labels=np.unique(names), **how)
    assert metrics["balanced_accuracy"].value == pytest.approx(recall)
    assert metrics["macro_f1"].value == pytest.approx(reference.f1_score(names, predicted, **how))
    assert metrics["top1"].value == (predicted == unseen).mean() < known
    assert metrics["top5"].value < 1
    assert np.isfinite(metrics["log_loss"].value)


def test_the_log_loss_of_sure_and_wrong_answers_is_not_cut_off():
    scores = np.array([[0, 400], [400, 0]], np.float32)
    sure = np.array([[0, 1], [1, 0]], np.float32)
    assert classification_metrics(scores, np.array([0, 0]), sure, seed=0)["log_loss"].value == pytest.approx(200)


def test_equal_scores_give_the_first_class_and_the_same_top1_everywhere():
    scores = np.zeros((4, 7), np.float32)
    metrics = classification_metrics(scores, np.array([0, 1, 4, 5]), None, seed=0)
    assert metrics["top1"].value == 0.25
    assert metrics["top5"].value == 0.75


@pytest.mark.parametrize(("hits", "rows"), [(0, 30), (30, 30), (98, 100), (9_990, 10_000), (450_000, 500_000)])
def test_the_interval_of_a_proportion_is_that_of_scipy(hits, rows):
    expected = binomtest(hits, rows).proportion_ci(0.95, "exact")
    estimate = exact_proportion(hits / rows, rows)
    assert (estimate.low, estimate.high) == (
        pytest.approx(expected.low, abs=1e-9),
        pytest.approx(expected.high, abs=1e-9),
    )
    assert estimate.method == "Clopper-Pearson"


@pytest.mark.parametrize("rows", [30, 200, *(pytest.param(n, marks=pytest.mark.slow) for n in (50, 3000))])
def test_the_interval_of_a_proportion_holds_it_in_94_of_100_cases_and_is_little_wider_than_wilsons(rows):
    result = of_proportions("Clopper-Pearson", rows)
    assert min(result["coverage"]) >= 0.94
    assert max(result["width"]) <= 1.2
    if rows <= 1000:  # with more, the percentile bootstrap is good as well
        assert min(of_proportions("percentile bootstrap", rows)["coverage"]) < 0.92


def test_the_interval_of_a_perfect_score_has_a_width():
    truth = np.arange(60) % 6
    scores = np.eye(6, dtype=np.float32)[truth]
    metrics = classification_metrics(scores, truth, scores, seed=0)
    for name in ("top1", "top5", "balanced_accuracy", "macro_f1"):
        assert metrics[name].value == 1
        assert 0.9 < metrics[name].low < 0.95, name
        assert metrics[name].high == 1
    assert "only 0 rows are wrong" in metrics["log_loss"].method


def test_classes_of_equal_size_and_recall_count_all_rows_and_small_ones_fewer():
    assert effective_rows(np.array([50, 50]), np.array([0.8, 0.8])) == pytest.approx(100)
    # Variance of the mean of two recalls: (0.16 / 10 + 0.16 / 90) / 4 = 0.16 / 36, which is that of 36 rows.
    assert effective_rows(np.array([10, 90]), np.array([0.8, 0.8])) == pytest.approx(36, rel=0.05)
    estimate = exact_proportion(0.8, 36.4)
    assert beta.cdf(estimate.low, 0.8 * 36.4, 0.2 * 36.4 + 1) == pytest.approx(0.025)
    assert beta.cdf(estimate.high, 0.8 * 36.4 + 1, 0.2 * 36.4) == pytest.approx(0.975)
    assert estimate.method == "Clopper-Pearson, 36.4 effective rows"


def test_a_class_of_few_test_rows_is_said_to_make_intervals_too_narrow():
    truth = np.array([0] * 40 + [1] * 40 + [2] * 3)
    scores = np.eye(3, dtype=np.float32)[truth]
    scores[::5] = 0
    metrics = classification_metrics(scores, truth, None, seed=0)
    assert "a class has only 3 test rows" in metrics["balanced_accuracy"].method
    assert "a class has only 3 test rows" in metrics["macro_f1"].method
    assert "narrow" not in metrics["top1"].method


def test_a_calibrated_probe_has_the_calibration_error_that_is_expected_of_it():
    generator = np.random.default_rng(0)
    scores = 2 * generator.normal(size=(300, 4)).astype(np.float32)
    probabilities = (np.exp(scores) / np.exp(scores).sum(1, keepdims=True)).astype(np.float32)
    errors, expected = [], []
    for _ in range(12):
        truth = (probabilities.cumsum(1) < generator.random((300, 1))).sum(1).clip(0, 3)
        metrics = classification_metrics(scores, truth, probabilities, seed=0)
        errors.append(metrics["calibration_error"].value)
        expected.append(metrics["calibration_error_if_calibrated"].value)
    assert np.mean(errors) == pytest.approx(np.mean(expected), rel=0.2)
    assert np.mean(expected) > 0.02
    wrong = classification_metrics(
        3 * scores, truth, probabilities**3 / (probabilities**3).sum(1, keepdims=True), seed=0
    )
    assert wrong["calibration_error"].value > 2 * wrong["calibration_error_if_calibrated"].value


def test_average_precision_is_that_of_scikit_learn_with_ties_and_times():
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 20, (200, 4)).astype(np.float32)  # many are equal
    truth = (generator.random((200, 4)) < 0.3).astype(np.float32)
    truth[:, 3] = 0
    times = generator.integers(0, 3, 200).astype(float)
    for weights in (np.ones(200), times):
        precision = ranking(scores, truth)(weights)
        for label in range(3):
            expected = reference.average_precision_score(truth[:, label], scores[:, label], sample_weight=weights)
            assert precision[label] == pytest.approx(expected)
        assert np.isnan(precision[3])
    mean = multilabel_metrics(scores, truth, seed=0)["mAP"]
    assert mean.value == pytest.approx(np.mean(average_precision(scores, truth)[:3]))
    assert mean.low < mean.value < mean.high


def test_numbers_of_regression_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    truth = generator.normal(size=(100, 2))
    predicted = truth + 0.3 * generator.normal(size=(100, 2))
    metrics = regression_metrics(predicted, truth, seed=0)
    assert metrics["r2"].value == pytest.approx(reference.r2_score(truth, predicted))
    assert metrics["rmse"].value == pytest.approx(np.sqrt(reference.mean_squared_error(truth, predicted)))
    assert metrics["mae"].value == pytest.approx(reference.mean_absolute_error(truth, predicted))


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (5, 5), (1, 9), (30, 12), (40_000, 41_000)])
def test_mcnemar_is_the_binomial_test_of_scipy(only_first, only_second):
    right = np.array([True] * only_first + [False] * only_second + [True, False])
    others = np.array([False] * only_first + [True] * only_second + [True, False])
    expected = binomtest(only_first, only_first + only_second).pvalue if only_first + only_second else 1.0
    assert mcnemar(right, others) == (only_first, only_second, pytest.approx(expected, rel=1e-6))
