"""The sparse random projection: its matrix, and its results against scikit-learn and NumPy."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim

from extract.compute import sparse_projection as module
from extract.compute.sparse_projection import SparseProjection, entries, sparse_projection, values_for_distortion
from extract.errors import InputError

FIRST = [(0, 42, True), (0, 46, True), (0, 169, True), (0, 173, True), (0, 247, True), (0, 302, False)]
TOTALS = (4076, 8493165, 2098)
LARGE = (14358, 5811539496, 7269)


def matrix_of(projection: SparseProjection) -> csr_array:
    rows, columns, positive = entries(projection.inputs, projection.outputs, projection.seed)
    scale = math.sqrt(math.sqrt(projection.inputs) / projection.outputs)
    shape = projection.outputs, projection.inputs
    return csr_array((np.where(positive, scale, -scale), (rows, columns)), shape=shape)


def by_hand(inputs: int, outputs: int, seed: int) -> list[tuple[int, int, bool]]:
    """The entries by the definition, with the integers of Python: one word for each gap, one bit for each sign."""
    one, words, place = 1 << 128, np.random.PCG64([seed, 0]), -1
    zero = one - math.isqrt((1 << 256) // inputs)
    table, remaining = [], zero
    while remaining >> 64:
        table.append(remaining >> 64)
        remaining = remaining * zero >> 128
    places = []
    while True:
        word = int(words.random_raw())
        place += 1 + sum(word < chance for chance in table)
        if place >= inputs * outputs:
            break
        places.append(place)
    bits = np.random.PCG64([seed, 1])
    signs = [int(word) for word in bits.random_raw(len(places) // 64 + 1)]
    return [(p // inputs, p % inputs, bool(signs[i // 64] >> i % 64 & 1)) for i, p in enumerate(places)]


@pytest.mark.parametrize(("inputs", "outputs", "seed"), [(100, 20, 0), (50, 50, 1), (1000, 3, 7), (2, 1, 0), (1, 1, 3)])
def test_entries_are_those_of_the_definition(inputs: int, outputs: int, seed: int) -> None:
    rows, columns, positive = entries(inputs, outputs, seed)
    assert list(zip(rows, columns, positive, strict=True)) == by_hand(inputs, outputs, seed)


def test_entries_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = entries(900, 40, 5)
    monkeypatch.setattr(module, "_DRAWN", 7)
    assert all(np.array_equal(a, b) for a, b in zip(whole, entries(900, 40, 5), strict=True))


def test_the_matrix_is_the_same_on_each_machine_and_with_each_version_of_numpy() -> None:
    """Fixed values: other ones would give stored features another meaning."""
    rows, columns, positive = entries(4096, 64, 1)
    assert list(zip(rows[:6].tolist(), columns[:6].tolist(), positive[:6].tolist(), strict=True)) == FIRST
    assert (len(rows), int(columns.sum()), int(positive.sum())) == TOTALS
    rows, columns, positive = entries(802_816, 16, 0)
    assert (len(rows), int(columns.sum()), int(positive.sum())) == LARGE


def test_entries_are_independent_and_have_the_density_of_li_hastie_and_church() -> None:
    inputs, outputs = 2500, 2000  # density 1/50
    rows, columns, positive = entries(inputs, outputs, 0)
    expected = inputs * outputs / 50
    assert abs(len(rows) - expected) < 5 * math.sqrt(expected)
    assert abs(positive.sum() - len(rows) / 2) < 5 * math.sqrt(len(rows) / 4)
    for counts, mean in ((np.bincount(rows, minlength=outputs), 50), (np.bincount(columns, minlength=inputs), 40)):
        assert 0.85 < counts.var() / (mean * (1 - 1 / 50)) < 1.15  # binomial, as no fixed number in each row would be
    assert np.all(np.diff(rows * inputs + columns) > 0)  # sorted, each place once


@pytest.mark.parametrize(("inputs", "outputs"), [(40_000, 60), (16_384, 64), (16_385, 64), (1000, 1000), (7, 3)])
def test_the_projection_is_that_of_scikit_learn_with_the_same_matrix(inputs: int, outputs: int) -> None:
    projection = SparseProjection(inputs, outputs, 2)
    x = np.random.default_rng(0).normal(size=(9, inputs)).astype(np.float32)
    reference = SparseRandomProjection(outputs).fit(np.zeros((2, inputs)))
    assert set(np.abs(reference.components_.data).round(9)) <= set(np.abs(matrix_of(projection).data).round(9))
    reference.components_ = matrix_of(projection)
    expected = reference.transform(x.astype(np.float64))
    projected = projection(torch.from_numpy(x)).numpy()
    assert projected.dtype == np.float32
    assert np.abs(projected - expected).max() <= 1e-5 * np.abs(expected).max()


def test_sums_of_integers_are_exact() -> None:
    projection = SparseProjection(30_000, 50, 0)
    x = np.random.default_rng(0).integers(-500, 500, (20, 30_000))
    rows, columns, positive = entries(30_000, 50, 0)
    signs = csr_array((np.where(positive, 1, -1), (rows, columns)), shape=(50, 30_000))
    expected = (x @ signs.T).astype(np.float32) * np.float32(math.sqrt(math.sqrt(30_000) / 50))
    assert np.array_equal(projection(torch.from_numpy(x).float()).numpy(), expected)


def test_the_result_of_an_image_does_not_depend_on_the_batch() -> None:
    """Bit for bit, for each number of images and threads; another layout in memory changes the rounding only."""
    projection = SparseProjection(40_000, 100, 0)
    x = torch.randn(70, 4, 100, 100, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([projection(image[None]) for image in x])
    last = x.to(memory_format=torch.channels_last)
    alone_last = torch.cat([projection(last[number : number + 1]) for number in range(len(x))])
    assert torch.allclose(alone_last, alone, rtol=0, atol=1e-6 * float(alone.abs().max()))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for size in (1, 2, 3, 4, 5, 15, 16, 17, 33, 70):
                assert torch.equal(projection(x[-size:]), alone[-size:]), (count, size)
                assert torch.equal(projection(last[-size:]), alone_last[-size:]), (count, size)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        assert torch.equal(projection(x), alone)


def test_distances_are_kept_as_the_bound_says() -> None:
    x = torch.randn(60, 20_000, generator=torch.Generator().manual_seed(0))
    outputs = values_for_distortion(60, 0.3)
    ratios = (torch.pdist(SparseProjection(20_000, outputs, 0)(x)) / torch.pdist(x)) ** 2
    assert ratios.min() > 0.7
    assert ratios.max() < 1.3


def test_the_number_of_values_is_that_of_scikit_learn() -> None:
    for images, distortion in ((1797, 0.1), (10**7, 0.1), (100, 0.5), (2, 0.99), (50_000, 0.25)):
        assert values_for_distortion(images, distortion) == johnson_lindenstrauss_min_dim(images, eps=distortion)
    assert values_for_distortion(1, 0.1) == 1


@pytest.mark.parametrize("outputs", [4, 400])  # most inputs have no entry; nearly all have some
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_image_with_a_value_that_is_not_finite_becomes_nan_and_no_other(value: float, outputs: int) -> None:
    x = torch.ones(6, 5000)
    x[2, 4321] = value
    projected = SparseProjection(5000, outputs, 0)(x)
    assert projected[2].isnan().all()
    assert projected[[0, 1, 3, 4, 5]].isfinite().all()


def test_layers_of_equal_size_share_a_matrix_while_it_is_in_use() -> None:
    first = sparse_projection(600, 20, 3)
    assert sparse_projection(600, 20, 3) is first
    assert sparse_projection(600, 20, 4) is not first
    assert sparse_projection(600, 21, 3) is not first
    key = (600, 20, 3)
    del first
    gc.collect()
    assert key not in module._shared


def test_other_types_are_projected_in_float32() -> None:
    projection = SparseProjection(5000, 30, 0)
    x = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(projection(x.to(dtype)), projection(x.to(dtype).float()))


def test_more_values_than_the_activation_has_are_refused() -> None:
    with pytest.raises(InputError, match="srp11 of 10 values: .* use srpK with K up to 10, or none"):
        SparseProjection(10, 11, 0)
    with pytest.raises(InputError, match="more than 2..31 entries"):
        SparseProjection(1 << 30, 1 << 20, 0)
