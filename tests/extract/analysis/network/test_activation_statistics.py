"""Running statistics against NumPy on all the values at once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from extract.analysis.feature_statistics import statistics_of
from extract.analysis.network.activation_statistics import Statistics, norm_of, summarise
from extract.analysis.probe import feature_matrix
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.errors import InputError
from extract.store.reader import FeatureReader
from tests.extract.store.rows import VALUES, complete_data_set


def added(values: Tensor, positions: list[int], sizes: list[int], **how: object) -> Statistics:
    statistics = Statistics()
    for part in torch.split(values, sizes):
        statistics.add(summarise(part, positions, **how))  # type: ignore[arg-type]
    return statistics


def close(values: object, expected: object) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=0)


def check(statistics: Statistics, values: Tensor, channel_axis: int) -> None:
    """Every number against NumPy, in float64, of the finite values."""
    array = values.double().numpy()
    by_channel = np.moveaxis(array, channel_axis, 0).reshape(array.shape[channel_axis], -1)
    finite = array[np.isfinite(array)]
    close(statistics.total, finite.size)
    close(statistics.mean, finite.mean()) if abs(finite.mean()) > 1e-3 * finite.std() else None
    assert abs(statistics.mean - finite.mean()) <= 1e-5 * np.abs(finite).mean()
    close(statistics.std, finite.std())
    close(statistics.rms, np.sqrt((finite**2).mean()))
    assert statistics.min == finite.min()
    assert statistics.max == finite.max()
    close(statistics.zeros, (finite == 0).mean())
    assert statistics.nan == np.isnan(array).sum()
    assert statistics.infinite == np.isinf(array).sum()
    for channel, row in enumerate(by_channel):
        own = row[np.isfinite(row)]
        assert statistics.count[channel] == own.size
        if own.size:
            assert abs(statistics.channel_mean[channel] - own.mean()) <= 1e-5 * np.abs(own).mean()
            close(statistics.channel_std[channel], own.std())
            assert statistics.low[channel] == own.min()
            assert statistics.high[channel] == own.max()
    for part in (0.0, 0.01, 0.3, 0.5, 0.9, 1.0):
        exact = np.quantile(finite, part, method="lower"), np.quantile(finite, part, method="higher")
        slack = 1 / 128
        low, high = exact[0] - slack * abs(exact[0]), exact[1] + slack * abs(exact[1])
        assert low <= statistics.quantile(part) <= high


MAPS = {
    "ordinary": lambda g: torch.randn(9, 5, 6, 7, generator=g) * 3 + 1,
    "after a relu": lambda g: torch.randn(9, 5, 6, 7, generator=g).relu(),
    "huge offset": lambda g: torch.randn(9, 5, 6, 7, generator=g) + 1e6,
    "offsets that differ": lambda g: torch.randn(9, 5, 6, 7, generator=g) + 10.0 ** torch.arange(5).view(5, 1, 1),
    "near the end of float32": lambda g: torch.randn(9, 5, 6, 7, generator=g) * 1e37,
    "tiny": lambda g: torch.randn(9, 5, 6, 7, generator=g) * 1e-25,
    "images of very different size": lambda g: (
        torch.randn(9, 5, 6, 7, generator=g) * 10.0 ** torch.arange(-20, 16, 4).view(9, 1, 1, 1)
    ),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_statistics_in_one_pass_are_numpys_in_two(name: str, channels_last: bool) -> None:
    values = MAPS[name](torch.Generator().manual_seed(0))
    if channels_last:
        values = values.contiguous(memory_format=torch.channels_last)
    check(added(values, [2, 3], [2, 3, 4]), values, 1)


def test_values_that_are_not_finite_are_counted_and_named_and_left_out() -> None:
    values = torch.randn(9, 5, 6, 7)
    values[4, 2, 0, 0] = torch.nan
    values[4, 3] = torch.inf
    values[7, :, 1, 1] = -torch.inf
    statistics = added(values, [2, 3], [3, 3, 3])
    check(statistics, values, 1)
    assert statistics.not_finite_images == [4, 7]  # their places among all
    values[:, 1] = torch.nan  # a channel without any finite value leaves the others alone
    statistics = added(values, [2, 3], [3, 3, 3])
    check(statistics, values, 1)
    assert statistics.count[1] == 0
    assert statistics.dead.tolist() == []


def test_tokens_vectors_and_lower_precision() -> None:
    tokens = torch.randn(6, 11, 8) + 2
    check(added(tokens, [1], [1, 5]), tokens, 2)
    vectors = torch.randn(40, 8)
    check(added(vectors, [], [7, 33]), vectors, 1)
    half = torch.randn(6, 4, 5, 5).half()
    check(added(half, [2, 3], [3, 3]), half, 1)
    double = torch.randn(6, 4, 5, 5, dtype=torch.float64)
    statistics = added(double, [2, 3], [3, 3])
    close(statistics.std, double.std(correction=0))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_however_images_are_cut_into_batches_the_numbers_are_the_same(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)))
    seed = data.draw(st.integers(0, 1000))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10 ** data.draw(st.floats(-12, 12))
    values = values + data.draw(st.sampled_from([0.0, 1.0, -1e4])) * values.abs().max()
    whole = added(values, [2, 3], [len(values)])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    edges = [0, *cuts, len(values)]
    merged = added(values, [2, 3], [end - start for start, end in itertools.pairwise(edges) if end > start])
    assert merged.images == whole.images
    np.testing.assert_array_equal(merged.bins, whole.bins)
    np.testing.assert_array_equal(merged.low, whole.low)
    np.testing.assert_array_equal(merged.high, whole.high)
    scale = float(values.abs().max())
    np.testing.assert_allclose(merged.channel_mean, whole.channel_mean, rtol=1e-9, atol=1e-12 * scale)
    np.testing.assert_allclose(merged.m2, whole.m2, rtol=1e-6, atol=1e-12 * scale**2)


def test_a_dead_channel_is_one_that_never_changes() -> None:
    values = torch.randn(6, 4, 5, 5).relu()
    values[:, 1] = 0
    values[:, 3] = 7.0
    assert added(values, [2, 3], [2, 4]).dead.tolist() == [1, 3]
    values[5, 1, 4, 4] = 0.5  # once, on the last image
    assert added(values, [2, 3], [2, 4]).dead.tolist() == [3]


def test_units_near_the_bounds_are_counted() -> None:
    values = torch.full((10, 3, 4, 4), 0.5)
    values[:, 0] = 0.999
    values[:5, 1] = 0.001
    statistics = added(values, [2, 3], [5, 5], bounds=(0.0, 1.0))
    np.testing.assert_allclose(statistics.saturated, [1, 0.5, 0])


def test_the_histogram_counts_what_numpy_counts() -> None:
    values = torch.randn(20, 3, 16, 16) * 4
    edges = np.array([-16.0, -4, -1, -0.25, 0, 0.25, 1, 4, 16])  # edges of bins of bfloat16
    counts = added(values, [2, 3], [20]).histogram(edges)
    np.testing.assert_array_equal(counts, np.histogram(values.numpy(), edges)[0])


class OfMps(Tensor):
    """A tensor that is not in double precision until it is on the CPU, as on mps."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is Tensor.cpu:
            return result.as_subclass(Tensor)
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30, float("inf")])
def test_a_device_without_double_precision_gives_the_same_numbers(factor: float) -> None:
    values = torch.randn(3, 4, 5)
    values[1, 2, 3] *= factor
    of_mps = values.as_subclass(OfMps)
    with pytest.raises(TypeError, match="float64"):
        of_mps.double()
    for name, column in summarise(values, [2], (-1.0, 1.0)).items():
        np.testing.assert_array_equal(summarise(of_mps, [2], (-1.0, 1.0))[name], column, name)
    for name, number in norm_of(values).items():
        assert float(norm_of(of_mps)[name]) == float(number)


def test_nothing_gives_nan_and_no_error() -> None:
    statistics = Statistics()
    assert np.isnan([statistics.mean, statistics.std, statistics.min, statistics.quantile(0.5)]).all()
    for shape in ((0, 3, 2, 2), (2, 3, 0, 2), (2, 0, 2, 2)):
        statistics = Statistics()
        statistics.add(summarise(torch.zeros(shape), [2, 3]))
        assert (statistics.images, statistics.total, statistics.nan) == (shape[0], 0, 0)


def test_what_cannot_be_summed_up_is_refused() -> None:
    with pytest.raises(InputError, match=r"torch.int64"):
        summarise(torch.zeros(2, 3, dtype=torch.int64), [])
    with pytest.raises(InputError, match=r"at most one channel axis"):
        summarise(torch.zeros(2, 3, 4, 4), [3])
    statistics = added(torch.zeros(2, 3), [], [2])
    with pytest.raises(InputError, match="the batch has 4 channels; earlier batches have 3"):
        statistics.add(summarise(torch.zeros(2, 4), []))


def test_stored_features_are_summed_up_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_matrix, "_BLOCK_BYTES", 10_000)
    with FeatureReader(complete_data_set(tmp_path / "out").out) as reader:
        for layer in reader.layers:
            statistics, lengths = statistics_of(FeatureRows.of(reader[layer]))
            values = VALUES[layer].astype(np.float64).reshape(23, -1)
            expected = values.mean(), values.std(), values.min(), values.max()
            assert (statistics.mean, statistics.std, statistics.min, statistics.max) == pytest.approx(
                expected, rel=1e-5
            )
            np.testing.assert_allclose(statistics.channel_mean, values.mean(0), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lengths, np.linalg.norm(values, axis=1))
    generator = np.random.default_rng(0)
    values = (1000 + generator.normal(size=(900, 70))).astype(np.float32)  # more than one block
    values[:, 5] = 7
    statistics, lengths = statistics_of(FeatureRows.of(values))
    assert (statistics.mean, statistics.std) == pytest.approx(
        (values.mean(dtype=float), values.std(dtype=float)), rel=1e-6
    )
    assert statistics.dead.tolist() == [5]
    statistics, lengths = statistics_of(FeatureRows.of(np.empty((0, 3), np.float32)))
    assert np.isnan(statistics.mean)
    assert not len(lengths)
