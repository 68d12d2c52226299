"""Encoding models against scikit-learn, scipy and himalaya, and on simulated responses whose answers are known."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import false_discovery_control, pearsonr
from sklearn.cross_decomposition import PLSRegression
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import PredefinedSplit
from sklearn.preprocessing import StandardScaler

from extract.analysis.encoding.encoding import Encoding, _fold_of_groups, encoding
from extract.analysis.encoding.fits import RidgeFolds
from extract.analysis.encoding.scores import q_values
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.errors import InputError

N, FEW = 90, (0.1, 10.0, 1e2, 1e4)


def features(seed: int, width: int, count: int = N) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.normal(1, np.linspace(0.3, 3, width), (count, width)).astype(np.float32)


def responses(x: np.ndarray, noise: tuple[float, ...], seed: int = 0) -> np.ndarray:
    """Targets that read the features, each with its own noise, as part of the standard deviation of the signal."""
    generator = np.random.default_rng(seed)
    signal = x @ generator.normal(size=(x.shape[1], len(noise)))
    signal = (signal - signal.mean(0)) / signal.std(0)
    return 5 + signal + generator.normal(size=signal.shape) * noise


def encoded(x: dict, y: np.ndarray, **settings: object) -> Encoding:
    return encoding(x, y, **{"draws": 0, "strengths": FEW, **settings})


def chosen_ridge(x, y, folds):
    """A function that predicts as Ridge of scikit-learn with the strength of the least error in the folds."""
    x = x.astype(np.float64)

    def fitted(train, alpha, target):
        # Strengths are in units of the mean variance of the columns of the training set.
        scaler = StandardScaler(with_std=False).fit(x[train])
        unit = scaler.transform(x[train]).var(0).mean()
        model = Ridge(alpha=alpha * unit, solver="cholesky").fit(scaler.transform(x[train]), target[train])
        return lambda test: model.predict(scaler.transform(test))

    def best(target):
        errors = [
            np.mean([((fitted(folds != fold, alpha, target)(x[folds == fold]) - target[folds == fold]) ** 2).mean()
                     for fold in np.unique(folds)])
            for alpha in FEW
        ]  # fmt: skip
        return fitted(slice(None), FEW[int(np.argmin(errors))], target)

    models = [best(target) for target in y.T]
    return lambda test: np.stack([model(test) for model in models], 1)


def folded(x: np.ndarray, y: np.ndarray, folds: np.ndarray, fit) -> tuple[np.ndarray, np.ndarray]:
    """r and R^2 (F, T) of predictions of each fold by `fit(x_train, y_train, folds_train)(x_test)`."""
    scores = []
    for fold in range(folds.max() + 1):
        test = folds == fold
        predicted = fit(x[~test], y[~test], folds[~test])(x[test])
        scores.append([(pearsonr(p, t).statistic, r2_score(t, p)) for p, t in zip(predicted.T, y[test].T, strict=True)])
    r, r2 = np.moveaxis(np.array(scores), -1, 0)
    return r, r2


@pytest.mark.parametrize("width", [12, 150])
def test_ridge_is_that_of_scikit_learn_in_nested_folds(width):
    x, y = features(0, width), responses(features(0, width), (0.3, 30))
    found = encoded({"a": x}, y)

    r, r2 = folded(x, y, found.folds, chosen_ridge)
    np.testing.assert_allclose(found.layers[0].fold_r, r, atol=1e-5)
    np.testing.assert_allclose(found.layers[0].r2, r2.mean(0), atol=1e-5)
    np.testing.assert_allclose(found.layers[0].r, r.mean(0), atol=1e-5)
    assert len(np.unique(found.layers[0].strengths)) > 1


def test_weights_are_those_of_scikit_learn():
    x, y = features(0, 12), responses(features(0, 12), (0.3, 1))
    folds = _fold_of_groups(np.arange(N), 5, 0)
    ridge = RidgeFolds(FeatureRows.of(x), [(12, 12)], folds, 1 << 10, torch.device("cpu"))
    strengths = torch.tensor([0.5, 20.0]).double()
    biases, *weights = ridge.weights(2, ridge.products(torch.from_numpy(y)), strengths, None)
    train = x[folds != 2].astype(np.float64)
    expected = Ridge(alpha=strengths.numpy() * train.var(0).mean()).fit(train, y[folds != 2])
    np.testing.assert_allclose(torch.stack(weights, 1), expected.coef_, atol=1e-6)
    np.testing.assert_allclose(biases, expected.intercept_, atol=1e-6)


def test_pls_is_that_of_scikit_learn():
    x, y = features(1, 20), responses(features(1, 20), (0.3, 1, 3))
    found = encoded({"a": x}, y, fit="pls", n_components=5)

    def pls(x, y, folds):
        return PLSRegression(5, scale=False, tol=1e-14, max_iter=5000).fit(x, y).predict

    r, r2 = folded(x.astype(np.float64), y, found.folds, pls)
    np.testing.assert_allclose(found.layers[0].fold_r, r, atol=1e-5)
    np.testing.assert_allclose(found.layers[0].r2, r2.mean(0), atol=1e-5)
    parts = [encoded({"a": x, "b": scale * features(2, 20)}, y, fit="pls", n_components=5, partition=True).partition
             for scale in (1, 1e4)]  # fmt: skip
    np.testing.assert_allclose(parts[0]["unique_first"], parts[1]["unique_first"], atol=1e-4)
    with pytest.raises(InputError, match="PLS of 25 components: 72 training images of 20 values have at most 20"):
        encoded({"a": x}, y, fit="pls")
    for few in (x[:, :3] @ features(3, 30, 3), np.full((N, 30), 0.1)):
        with pytest.raises(InputError, match="PLS of 5 components: 72 training images vary along fewer axes"):
            encoded({"a": few}, y, fit="pls", n_components=5)


def test_ridge_chooses_and_predicts_as_himalaya_does():
    himalaya = pytest.importorskip("himalaya.ridge")
    x, y = features(2, 15), responses(features(2, 15), (0.3, 1, 3, 30))
    found = encoded({"a": x}, y)

    def cross_validated(x, y, folds):
        shift, scale = x.mean(0), np.sqrt(x.var(0).mean())
        # One factor for all folds; ours is that of each training set, which may tip a choice between equal strengths.
        model = himalaya.RidgeCV(np.array(FEW), cv=PredefinedSplit(folds), fit_intercept=True).fit(
            (x - shift) / scale, y
        )
        return lambda test: model.predict((test - shift) / scale)

    r, r2 = folded(x.astype(np.float64), y, found.folds, cross_validated)
    np.testing.assert_allclose(found.layers[0].fold_r, r, atol=1e-5)
    np.testing.assert_allclose(found.layers[0].r2, r2.mean(0), atol=1e-5)


def test_a_group_is_in_one_fold_where_leaks_would_show():
    """Responses and features tell the subject apart, and nothing else."""
    generator = np.random.default_rng(0)
    subject = np.arange(N) // 9
    x = generator.normal(size=(10, 40))[subject] + 0.1 * generator.normal(size=(N, 40))
    y = generator.normal(size=(10, 30))[subject] + 0.1 * generator.normal(size=(N, 30))
    leaking, found = encoded({"a": x}, y), encoded({"a": x}, y, groups=subject)
    assert np.median(leaking.layers[0].r2) > 0.8
    assert np.median(found.layers[0].r2) < 0
    assert all(len(set(found.folds[subject == each])) == 1 for each in range(10))
    assert sorted(np.bincount(found.folds)) == [18] * 5


def test_folds_are_even():
    assert np.bincount(_fold_of_groups(np.arange(23), 5, 0)).tolist() == [5, 5, 5, 4, 4]
    joined = np.array([0] * 9 + [1] * 9 + [2])
    for count, least in ((2, 9), (3, 1), (4, 0)):
        found = f"{count} folds of 19 images in 3 groups that stay together, at least {least} in each; expected at lea"
        with pytest.raises(InputError, match=found):
            _fold_of_groups(joined, count, 0)


def test_ceilings_are_those_of_the_simulation_and_of_the_formulas():
    generator = np.random.default_rng(0)
    count, repeats = 4000, 3
    noise = np.array([0.5, 1.0, 2.0])
    signal = generator.normal(size=(count, 3))
    image = np.repeat(np.arange(count), repeats)
    trials = signal[image] + noise * generator.normal(size=(len(image), 3))
    found = encoded({"a": signal}, trials, images=image)
    explainable = 1 / (1 + noise**2 / repeats)
    np.testing.assert_allclose(found.ceiling, explainable, atol=0.02)
    np.testing.assert_allclose(found.ncsnr, 1 / noise, rtol=0.03)
    by_image = trials.reshape(count, repeats, 3)
    within = by_image.var(1, ddof=1).mean(0)
    signal_variance = trials.var(0, ddof=1) - within
    np.testing.assert_allclose(found.ncsnr, np.sqrt(signal_variance / within), rtol=1e-5)
    np.testing.assert_allclose(found.ceiling, found.ncsnr**2 / (found.ncsnr**2 + 1 / repeats), rtol=1e-5)
    # Halves of one trial each, of three.
    halves = [pearsonr(by_image[:, 0, t], by_image[:, 1, t]).statistic for t in range(3)]
    np.testing.assert_allclose(found.split_half, [3 * r / (1 + 2 * r) for r in halves], atol=0.03)
    np.testing.assert_allclose(found.split_half, explainable, atol=0.03)


def test_ceilings_of_images_with_different_numbers_of_trials_are_those_of_the_formula():
    generator = np.random.default_rng(0)
    signal, counts = generator.normal(size=(60, 1)), np.arange(60) % 4 + 1
    image = np.repeat(np.arange(60), counts)
    trials = signal[image] + generator.normal(size=(len(image), 1))
    found = encoded({"a": signal}, trials, images=image)
    of_images = [trials[image == i, 0] for i in range(60)]
    noise = np.mean([each.var(ddof=1) for each in of_images if len(each) > 1])
    signal_variance = trials.var(ddof=1) - noise
    assert found.ncsnr[0] == pytest.approx(np.sqrt(signal_variance / noise))
    assert found.ceiling[0] == pytest.approx(signal_variance / (signal_variance + noise * np.mean(1 / counts)))


def test_ceilings_of_split_halves_are_those_of_all_images_also_if_few_have_several_trials():
    generator = np.random.default_rng(0)
    counts = np.where(np.arange(3000) < 600, 10, 1)
    image = np.repeat(np.arange(3000), counts)
    signal = generator.normal(size=(3000, 3))
    trials = signal[image] + generator.normal(size=(len(image), 3))
    trials[:600, 2][np.arange(600) % 10 > 3] = np.nan  # the first 60 images have four trials of one target
    found = encoded({"a": signal}, trials, images=image)
    explainable = 1 / (1 + np.array([0.82, 0.82, 0.823]))
    np.testing.assert_allclose(found.ceiling, explainable, atol=0.02)
    np.testing.assert_allclose(found.split_half, explainable, atol=0.03)


def test_trials_are_averaged_and_those_that_were_not_measured_left_out():
    x = features(3, 8)
    y = responses(x, (0.5, 1))
    image = np.concatenate([np.arange(N), np.arange(0, N, 2), [-1]])[::-1]
    trials = np.concatenate([y + 0.1, np.where(np.arange(45)[:, None] % 3, y[::2] - 0.1, np.nan), [[np.inf, 0]]])[::-1]
    found = encoded({"a": x}, trials, images=image)
    means = y + 0.1
    means[::2] -= np.where(np.arange(45)[:, None] % 3, 0.1, 0)
    plain = encoded({"a": x}, means)
    np.testing.assert_allclose(found.layers[0].r, plain.layers[0].r)
    assert np.isnan(plain.ceiling).all()
    assert (found.ceiling > 0.9).all()
    trials[image == 4, 1] = np.nan
    with pytest.raises(InputError, match="target 1 is nan for the image of row 43; expected a number"):
        encoded({"a": x}, trials, images=image)


def test_constant_targets_have_no_score_and_leave_the_others_as_they_are():
    x, y = features(4, 8), responses(features(4, 8), (0.5, 0.5))
    with_constant = np.insert(y, 1, 0.1, axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, plain = encoded({"a": x}, with_constant, draws=20), encoded({"a": x}, y, draws=20)
    (layer,), (other,) = found.layers, plain.layers
    for name in ("r", "r2", "p", "q", "low"):
        assert np.isnan(getattr(layer, name)).tolist() == [False, True, False]
        np.testing.assert_allclose(np.delete(getattr(layer, name), 1), getattr(other, name))
    assert found.best.tolist() == [0, -1, 0]


def test_targets_of_other_kinds_and_their_masks():
    x, y = features(4, 8), responses(features(4, 8), (0.5, 0.5))
    expected = encoded({"a": x}, y).layers[0].r
    for same in (torch.from_numpy(y).requires_grad_(), y.tolist(), np.ma.masked_array(y)):
        np.testing.assert_allclose(encoded({"a": x}, same, strengths=np.array(FEW)).layers[0].r, expected)
    masked = np.ma.masked_array(np.concatenate([y, y + 9]), np.repeat([False, True], N)[:, None] & np.ones(2, bool))
    np.testing.assert_allclose(encoded({"a": x}, masked, images=np.tile(np.arange(N), 2)).layers[0].r, expected)


def test_groups_without_a_value_are_none_and_intervals_need_several_groups_in_a_fold():
    x, y = features(4, 8), responses(features(4, 8), (0.5, 0.5))
    unknown = [None if row % 2 else row // 9 for row in range(N)]
    assert sorted(np.bincount(encoded({"a": x}, y, groups=unknown).folds)) == [18] * 5
    found = encoded({"a": x}, y, groups=np.arange(N) // 18, draws=20).layers[0]
    assert np.isnan([found.low, found.high, found.p]).all()
    found = encoded({"a": x}, y, groups=np.maximum(np.arange(N) // 9, 1), draws=20).layers[0]
    assert np.isnan([found.low, found.high]).all()
    assert (found.p < 0.5).all()


def test_features_and_targets_that_are_read_in_parts_give_the_same():
    x, y = {"a": features(5, 20, 150), "b": features(6, 200, 150)}, responses(features(5, 20, 150), (1,) * 60)
    found, parted = encoded(x, y), encoded(x, y, memory_bytes=8 << 20)
    for layer, other in zip(found.layers, parted.layers, strict=True):
        np.testing.assert_allclose(layer.r, other.r, atol=1e-6)
    with pytest.raises(InputError, match=r"layer b of 150 images needs 3 MB for products of 150 columns"):
        encoded(x, y, memory_bytes=2 << 20)
    with pytest.raises(InputError, match="layer a of 150 images needs 0 MB"):
        encoded(x, y, memory_bytes=0)


def test_the_best_layer_is_chosen_without_the_images_that_score_it():
    noise = {str(i): features(10 + i, 5) for i in range(30)}
    y = np.random.default_rng(0).normal(size=(N, 200))
    found = encoded(noise, y)
    of_layers = np.stack([layer.r for layer in found.layers])
    assert abs(found.best_r.mean()) < 0.05
    assert of_layers.max(0).mean() > 0.15  # a choice on the scores
    x = {"a": features(7, 10), "b": features(8, 10)}
    known = encoded(x, np.concatenate([responses(x["a"], (1,) * 20), responses(x["b"], (1,) * 20)], 1))
    assert known.best.tolist() == [0] * 20 + [1] * 20
    np.testing.assert_allclose(known.best_r[:20], known.layers[0].r[:20], atol=0.02)


def test_bands_and_the_variance_that_each_alone_explains():
    count = 1200
    first, second = features(1, 10, count), features(2, 10, count)
    shared = features(3, 10, count)
    x = {"a": np.concatenate([first, shared], 1), "b": np.concatenate([second, shared], 1)}

    def read(parts: np.ndarray) -> np.ndarray:
        return responses(parts, (0.0,) * 2) - 5

    y = np.sqrt(0.3) * read(first) + np.sqrt(0.2) * read(second) + np.sqrt(0.1) * read(shared)
    y = np.concatenate([y + np.sqrt(0.4) * np.random.default_rng(0).normal(size=y.shape), 2 * read(first)], 1)
    found = encoded(x, y, partition=True)
    variance = y.var(0)
    explained = {name: values * variance for name, values in found.partition.items()}
    np.testing.assert_allclose(explained["unique_first"][:2], 0.3, atol=0.06)
    np.testing.assert_allclose(explained["unique_second"][:2], 0.2, atol=0.06)
    np.testing.assert_allclose(explained["shared"][:2], 0.1, atol=0.06)
    np.testing.assert_allclose(found.partition["unique_second"][2:], 0, atol=0.01)
    few = encoded({name: values[:60] for name, values in x.items()}, y[:60], partition=True)
    assert (few.layers[1].r2[2:] < 0).all()
    np.testing.assert_allclose(sum(few.partition.values()), few.joint.r2)
    np.testing.assert_allclose(few.partition["unique_first"][2:], few.joint.r2[2:])
    weights = found.joint.band_weights
    assert weights.shape == (5, 4, 2)
    assert (weights[:, 2:, 0] > 0.9).all()
    # Chosen weights scale the bands, of the mean variance 1 in the training set.
    train, factors = found.folds != 0, np.sqrt(weights[0, 0])
    scaled = [x[band] * factor / np.sqrt(x[band][train].var(0).mean())
              for band, factor in zip("ab", factors, strict=True)]  # fmt: skip
    scaled = np.concatenate(scaled, 1).astype(np.float64)
    model = Ridge(alpha=found.joint.strengths[0, 0]).fit(scaled[train], y[train, 0])
    r = pearsonr(model.predict(scaled[~train]), y[~train, 0]).statistic
    assert found.joint.fold_r[0, 0] == pytest.approx(r, abs=1e-5)
    noise = features(9, 60, count)
    banded, plain = (encoded({"a": [first, noise]}, y[:, :2], fit=fit).layers[0].r2 for fit in ("banded", "ridge"))
    assert (banded > plain + 0.005).all()


def test_p_values_are_even_without_an_effect_and_small_with_one():
    x = features(0, 5)
    y = np.concatenate([np.random.default_rng(1).normal(size=(N, 300)), responses(x, (1,) * 20)], 1)
    (layer,) = encoded({"a": x}, y, draws=199).layers
    null, true = layer.p[:300], layer.p[300:]
    assert 0.02 < (null <= 0.05).mean() < 0.09
    assert 0.42 < null.mean() < 0.58
    assert (true == 1 / 200).all()
    np.testing.assert_allclose(layer.q, false_discovery_control(layer.p))
    assert np.isnan(q_values(np.array([0.1, np.nan]))).tolist() == [False, True]
    # Fits stay as they are, so the interval is as wide as that of a correlation of N rows with itself.
    widths = (layer.high - layer.low)[300:] / (2 * 1.96 * (1 - layer.r[300:] ** 2) / np.sqrt(N))
    assert 0.8 < widths.mean() < 1.25
    assert ((layer.low < layer.r) & (layer.r < layer.high)).all()


def test_draws_keep_groups_together():
    """Features and targets are those of the group, and independent of each other: 120 rows tell as much as 40."""
    generator, group = np.random.default_rng(0), np.arange(120) % 40
    x, y = (generator.normal(size=(40, width))[group] for width in (3, 400))
    (layer,) = encoded({"a": x}, y, groups=group, draws=199).layers
    assert (layer.p <= 0.05).mean() < 0.09
    (first,) = encoded({"a": x[:40]}, y[:40], draws=199).layers
    np.testing.assert_allclose((layer.high - layer.low).mean(), (first.high - first.low).mean(), rtol=0.1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fit": "ols"}, "fit 'ols' not found"),
        ({"strengths": (1.0, 0.0)}, "strengths are [1.0, 0.0]; expected numbers above 0"),
        ({"strengths": (np.nan,)}, "strengths are [nan]; expected numbers above 0"),
        ({"groups": np.arange(2 * N)}, "features have 90 rows, groups 180, and the targets 90"),
        ({"images": np.arange(N) + 0.5}, "images are float64 of shape (90,); expected whole numbers"),
        ({"folds": 46}, "at least 1 in each; expected at least 3 folds (--folds), of 2 images or more"),
        ({"partition": True}, "there are 1 layers; expected two to partition"),
        ({"images": np.arange(89)}, "features have 90 rows, groups 90, and the targets 90"),
        ({"groups": np.arange(8)}, "features have 90 rows, groups 8, and the targets 90"),
        ({"images": np.full(N, -1)}, "no row of targets has an image"),
        ({"images": np.arange(N) % 4}, "5 folds of 4 images in 4 groups that stay together, at least 0 in each"),
    ],
)
def test_what_cannot_be_encoded_is_refused_by_name(settings, said):
    with pytest.raises((InputError, KeyError), match=re.escape(said)):
        encoded({"a": features(0, 5)}, np.zeros((N, 2)), **settings)
    with pytest.raises(InputError, match=re.escape("the targets are float64 of shape (90,)")):
        encoded({"a": features(0, 5)}, np.zeros(N))
    with pytest.raises(InputError, match="row 3 of the features contains NaN"):
        broken = np.where(np.arange(N) == 3, np.nan, features(0, 1)[:, 0])[:, None]
        encoded({"a": broken}, np.zeros((N - 2, 2)), images=np.arange(2, N))
