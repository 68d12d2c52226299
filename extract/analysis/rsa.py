"""Representational similarity analysis (RSA): dissimilarity matrices (RDMs) of layers and of brains or behaviour.

Kriegeskorte, Mur and Bandettini 2008. Comparisons, noise ceilings and the bootstrap are those of rsatoolbox (Schuett et
al. 2023, "Statistical inference on representational geometries"), without its loops over resampled matrices: a sample
of images is a weight of each pair, the product of the counts of its two images, and pairs that are not known weigh 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extract.analysis.probe.metrics import student_quantile
from extract.errors import InputError, unknown_name

__all__ = ["RdmComparison", "compare_rdms", "odd_one_out"]

COMPARISONS = ("spearman", "kendall", "cosine", "whitened")
CHANCE = 1 / 3  # accuracy of odd_one_out
_FEWEST = 3  # images
_ROUNDING = 1e-12  # of dissimilarities that are equal
_ASYMMETRY = 1e-6  # relative to the largest value: matrices may have been stored in float32

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RdmComparison:
    """How similar K model RDMs are to the RDMs of S subjects.

    Attributes:
        values: (K, S) similarity of each model to each subject.
        mean: (K,) mean over subjects.
        low: (K,) lower end of the 95 % interval of `mean`, over images and subjects; of one subject, over images.
        high: (K,) upper end.
        behind: (K, 2) 95 % interval of the largest mean minus that of each model; 0 for the best. The value of the
            best is descriptive: it is chosen on the images and subjects that it is measured with.
        ceiling: lower and upper noise ceiling: the mean similarity of a subject to the mean of the others, and to the
            mean of all, which contains it. NaN for one subject.
        n_pairs: number of pairs of images that are known in all RDMs, and are compared.
    """

    values: Floats
    mean: Floats
    low: Floats
    high: Floats
    behind: Floats
    ceiling: tuple[float, float]
    n_pairs: int


def compare_rdms(
    models: ArrayLike, data: ArrayLike, *, by: str = "spearman", draws: int = 1_000, seed: int = 0,
    names: Sequence[str] | None = None,
) -> RdmComparison:  # fmt: skip
    """Compare RDMs of models with those of subjects, with noise ceilings and bootstrap intervals.

    Pairs of images that are NaN in any RDM are left out of all. The bootstrap draws images and subjects together, and
    its variance is corrected by those over images and over subjects alone, as `eval_dual_bootstrap` of rsatoolbox does.
    Intervals are those of Student's t, with one degree of freedom less than the smaller number of images and subjects.

    Args:
        models: RDMs (K, N, N), or the condensed form (K, N (N - 1) / 2); or one of either. See `FeatureReader.rdm`.
        data: RDMs of S subjects of the same images in the same order, in the same forms.
        by: "spearman"; "kendall": tau-a, right for models that predict ties; "cosine"; "whitened": the whitened
            unbiased cosine, for squared distances (Diedrichsen et al. 2021).
        draws: number of bootstrap samples, at least 2.
        seed: seed of the bootstrap.
        names: names of the models, for errors.

    Raises:
        UnknownNameError: there is no such comparison.
        InputError: an RDM is not one or is constant, the numbers of images differ or are below 3, or no pair is known.
    """
    if by not in COMPARISONS:
        raise unknown_name("comparison", by, COMPARISONS)
    first, second = condensed(models, "the models"), condensed(data, "the data")
    if first.shape[1] != second.shape[1]:
        raise InputError(f"the models have {first.shape[1]:,} pairs of images, and the data {second.shape[1]:,}")
    known = np.isfinite(np.concatenate([first, second])).all(0)
    names = names or [f"model {i}" for i in range(len(first))]
    _check_varied(first[:, known], names)
    _check_varied(second[:, known], [f"subject {i}" for i in range(len(second))])
    images, subjects = images_of_pairs(len(known)), len(second)
    similarity, generator = _Similarity(first, second, known, by), np.random.default_rng(seed)
    values = similarity(np.ones(images))
    counts = (generator.multinomial(number, [1 / number] * number, draws) for number in (images, subjects))
    samples, mean = _samples(similarity, values, *counts), values.mean(1)
    t = student_quantile((min(subjects, images) if subjects > 1 else images) - 1)
    best = int(mean.argmax())
    leads = samples[..., [best]] - samples
    error, of_lead = (t * np.sqrt(_variance(each, subjects, images)) for each in (samples, leads))
    behind = np.stack([mean[best] - mean - of_lead, mean[best] - mean + of_lead], 1)
    ceiling = _ceiling(second, known, by) if subjects > 1 else (math.nan, math.nan)
    return RdmComparison(values, mean, mean - error, mean + error, behind, ceiling, int(known.sum()))


def odd_one_out(rdm: ArrayLike, triplets: ArrayLike) -> tuple[float, float]:
    """Return the accuracy of an RDM in odd-one-out choices, and its standard error over triplets.

    The choice is the image that is not in the pair with the least dissimilarity. Ties are broken by chance: of two or
    three equal pairs, the right one counts 1/2 or 1/3. Chance level: 1/3 (Hebart et al. 2020, THINGS).

    Args:
        rdm: (N, N), without NaN.
        triplets: (T, 3) numbers of images, of which the third was chosen as the odd one.
    """
    matrix, (a, b, odd) = np.asarray(rdm), np.asarray(triplets).T
    lead = np.stack([matrix[a, odd], matrix[b, odd]]) - matrix[a, b]
    credit = np.where((lead >= -_ROUNDING).all(0), 1 / (1 + (np.abs(lead) <= _ROUNDING).sum(0)), 0)
    return float(credit.mean()), float(credit.std() / math.sqrt(len(credit)))


def condensed(rdms: ArrayLike, what: str = "the RDM") -> Floats:
    """Return RDMs of any form as (S, N (N - 1) / 2), the dissimilarities of pairs in the order of `np.triu_indices`.

    Args:
        rdms: (N, N), (S, N, N), (N, N, S), (N (N - 1) / 2,) or (S, N (N - 1) / 2). Values may be NaN.
        what: what they are, for errors.

    Raises:
        InputError: it has another form, is not symmetric, has a diagonal other than 0, or is of fewer than 3 images.
    """
    array = np.asarray(rdms)
    if array.ndim == 3 and array.shape[0] == array.shape[1] != array.shape[2]:
        array = np.moveaxis(array, 2, 0)
    is_square = array.ndim in (2, 3) and array.shape[-1] == array.shape[-2]
    images = array.shape[-1] if is_square else images_of_pairs(array.shape[-1]) if array.ndim in (1, 2) else 0
    if array.dtype.kind not in "fiub" or not array.size or images < _FEWEST:
        forms = "(N, N), (N (N - 1) / 2,), or subjects x either"
        raise InputError(f"{what}: {array.dtype} {array.shape}; expected RDMs of {_FEWEST} or more images: {forms}")
    array = array.astype(np.float64)
    size = _ASYMMETRY * float(np.nanmax(np.abs(array), initial=0.0))
    if not math.isfinite(size):
        raise InputError(f"{what}: a value is infinite; expected numbers, or NaN for pairs that are not known")
    if not is_square:
        return np.atleast_2d(array)
    matrices = array.reshape(-1, images, images)
    if (np.abs(np.nan_to_num(np.diagonal(matrices, axis1=1, axis2=2))) > size).any():
        raise InputError(
            f"{what}: the diagonal is not 0; expected dissimilarities", hint="of similarities s, give 1 - s"
        )
    equal = np.isclose(matrices, matrices.transpose(0, 2, 1), rtol=0, atol=size, equal_nan=True)
    if not equal.all():
        subject, row, column = (int(place[0]) for place in np.nonzero(~equal))
        place = f"matrix {subject}, row {row} and column {column}"
        raise InputError(f"{what}: not symmetric: {place}", hint="give a symmetric matrix, such as (rdm + rdm.T) / 2")
    return np.asarray(matrices[:, *np.triu_indices(images, 1)])


def images_of_pairs(pairs: int) -> int:
    """Return the number of images that have so many pairs; 0 if there is none."""
    images = (1 + math.isqrt(1 + 8 * pairs)) // 2
    return images if images * (images - 1) // 2 == pairs else 0


def _check_varied(vectors: Floats, names: Sequence[str]) -> None:
    if not vectors.shape[1]:
        raise InputError("no pair of images is known in all RDMs", hint="leave out RDMs with many NaN")
    for vector, name in zip(vectors, names, strict=True):
        if np.ptp(vector) <= _ROUNDING * np.abs(vector).max():
            raise InputError(f"the RDM of {name} is constant: it ranks no pair of images before another")


class _Similarity:
    """Similarities of K RDMs (K, M) to S RDMs (S, M), of which some pairs are known, on any sample of their images."""

    def __init__(self, first: Floats, second: Floats, known: NDArray[np.bool_], by: str):
        rows: Any = np.where(known, np.concatenate([first, second]), 0)
        self._rows = rows if by in ("cosine", "whitened") else _levels(rows)
        self._models, self._known, self._by = len(first), known, by
        self._pairs = np.triu_indices(images_of_pairs(len(known)), 1)

    def __call__(self, counts: NDArray[Any]) -> Floats:
        """Return (K, S), of a sample in which each image is `counts` (N,) times; 0 for an RDM constant in it."""
        i, j = self._pairs
        weights = np.asarray(counts[i] * counts[j] * self._known, np.float64)
        rows, models = self._rows, self._models
        if self._by == "kendall":
            rows, weights = rows[:, weights > 0], weights[weights > 0]
            return np.array([[_tau_a(one, other, weights) for other in rows[models:]] for one in rows[:models]])
        rows = np.array([_ranks(row, weights) for row in rows]) if self._by == "spearman" else rows
        weighted = rows * weights
        raw = weighted @ rows.T
        products = raw - self._centring(weighted, weights, counts)
        lengths = np.where(np.diag(products) > _ROUNDING * np.diag(raw), np.diag(products), np.inf)
        return np.asarray((products / np.sqrt(np.outer(lengths, lengths)))[:models, models:])

    def _centring(self, weighted: Floats, weights: Floats, counts: NDArray[Any]) -> Any:
        """Return what centring takes away from the products of RDMs.

        The whitened product of two RDMs is that of their double-centred matrices, as in linear CKA. With pairs that are
        not known, row effects are fitted by weighted least squares, with diagonals of 0 that are always known.
        """
        if self._by == "spearman":
            return np.outer(weighted.sum(1), weighted.sum(1)) / max(weights.sum(), 1)
        if self._by == "cosine":
            return 0
        i, j = self._pairs
        system = np.zeros((len(counts), len(counts)))
        system[i, j] = system[j, i] = weights
        np.fill_diagonal(system, system.sum(0) + np.where(counts > 0, 2 * counts, 1))
        sums = np.stack([np.bincount(i, row, len(counts)) + np.bincount(j, row, len(counts)) for row in weighted])
        return sums @ np.linalg.solve(system, sums.T)


def _levels(rows: Floats) -> NDArray[np.int64]:
    """Return the number of each value among the different values of its row, ascending."""
    return np.stack([np.unique(row, return_inverse=True)[1] for row in rows])


def _ranks(levels: NDArray[np.int64], weights: Floats) -> Floats:
    """Return the ranks of values given by their levels, each `weights` times; ties share a mean rank."""
    counts = np.bincount(levels, weights)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[levels])


def _tau_a(x: NDArray[np.int64], y: NDArray[np.int64], weights: Floats) -> float:
    """Return Kendall's tau-a of levels, each `weights` times: (concordant - discordant) / all pairs."""
    if not len(x):  # no pair that is known
        return 0.0
    order = np.lexsort((y, x))
    x, y, weights = x[order], y[order], weights[order]
    both = np.cumsum(np.append(True, (np.diff(x) != 0) | (np.diff(y) != 0)))
    all_pairs, in_x, in_y, in_both = (
        float((counts * (counts - 1)).sum()) / 2
        for counts in (weights.sum(), *(np.bincount(each, weights) for each in (x, y, both)))
    )
    return (all_pairs - in_x - in_y + in_both - 2 * _discordant(y, weights)) / max(all_pairs, 1)


def _discordant(values: NDArray[np.int64], weights: Floats) -> float:
    """Return the sum of the products of the weights of all pairs in which the larger value stands before the smaller.

    From the highest bit, as in a radix sort: of values that agree in all higher bits, those with a 1 before a 0.
    """
    total = 0.0
    for bit in reversed(range(int(values.max()).bit_length())):
        ones = weights * (values >> bit & 1)
        before = np.cumsum(ones)
        starts = np.append(True, np.diff(values >> bit + 1) != 0)
        of_group = (before - ones)[starts][np.cumsum(starts) - 1]
        total += float((before - of_group) @ (weights - ones))
        order = np.argsort(values >> bit, kind="stable")
        values, weights = values[order], weights[order]
    return total


def _ceiling(data: Floats, known: NDArray[np.bool_], by: str) -> tuple[float, float]:
    """Return the lower and upper noise ceiling; subjects are pooled as the mean of ranks, or of scaled RDMs."""
    data = np.where(known, data, 0)
    if by in ("spearman", "kendall"):
        pooled = np.stack([_ranks(row, known.astype(np.float64)) for row in _levels(data)])
    else:
        pooled = data / np.linalg.norm(data, axis=1, keepdims=True)
    others = pooled.sum(0) - pooled
    found = _Similarity(np.concatenate([pooled.sum(0, keepdims=True), others]), data, known, by)(
        np.ones(images_of_pairs(len(known)))
    )
    return float(np.diag(found[1:]).mean()), float(found[0].mean())


def _samples(similarity: _Similarity, values: Floats, images: NDArray[np.int64], subjects: NDArray[np.int64]) -> Floats:
    """Return (3, B, K) means over subjects, of samples of images and subjects, of subjects, and of images.

    Args:
        similarity: see the class.
        values: (K, S) of all images and subjects.
        images: (B, N) how often each image was drawn; samples of fewer than 3 different ones are left out.
        subjects: (B, S) how often each subject was drawn.
    """
    enough = (images > 0).sum(1) >= _FEWEST
    shares = subjects[enough] / values.shape[1]
    of_images = np.array([similarity(counts) for counts in images[enough]]).reshape(-1, *values.shape)
    return np.stack([np.einsum("bks,bs->bk", of_images, shares), shares @ values.T, of_images.mean(2)])


def _variance(samples: Floats, subjects: int, images: int) -> Floats:
    """Return the variance (K,) of means that are sampled as in `_samples`, corrected as in rsatoolbox.

    Drawn together, both factors count the variance of the measurement twice. Of one subject, only images are drawn.
    """
    both, of_subjects, of_images = samples.var(1, ddof=1)
    alone = images / (images - 1) * of_images
    if subjects == 1:
        return np.asarray(alone)
    excess = images * subjects / ((images - 1) * (subjects - 1)) * (both - of_subjects - of_images)
    of_subjects = subjects / (subjects - 1) * of_subjects
    return np.asarray(np.minimum(np.maximum(of_subjects + alone - excess, np.maximum(of_subjects, alone)), both))
