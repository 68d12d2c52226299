"""Ridge regression against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from extract.analysis.probe import protocols
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.protocols import fit_ridge
from extract.errors import InputError


@pytest.mark.parametrize(("n", "d"), [(200, 12), (12, 200)])
def test_weights_are_those_of_scikit_learn_for_every_alpha(n, d):
    generator = np.random.default_rng(0)
    x = (generator.normal(size=(n, d)) + 5).astype(np.float32)
    y = x[:, :2].astype(np.float64) @ [[1.0, 0.5], [2.0, -1.0]] + generator.normal(size=(n, 2)) + 100
    alphas = [1e-3, 1.0, 1e4]
    weights, biases = fit_ridge(FeatureRows.of(x), y, alphas)
    for i, alpha in enumerate(alphas):
        expected = Ridge(alpha=alpha, solver="svd").fit(x.astype(np.float64), y)
        np.testing.assert_allclose(weights[i], expected.coef_, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(
            x @ weights[i].T.astype(np.float64) + biases[i], expected.predict(x.astype(np.float64)), rtol=1e-4
        )


def test_what_needs_too_large_a_matrix_is_refused(monkeypatch):
    monkeypatch.setattr(protocols, "_WIDEST_RIDGE", 10)
    with pytest.raises(InputError, match="store the layer with a pooling"):
        fit_ridge(FeatureRows.of(np.ones((20, 30), np.float32)), np.ones((20, 1)), [1.0])
