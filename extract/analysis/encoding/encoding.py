"""Predict responses to images from features, layer by layer: `encoding`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from extract.analysis.encoding.fits import RidgeFolds, band_draws, fit_pls
from extract.analysis.encoding.responses import Floats, Responses, known_mean
from extract.analysis.encoding.scores import q_values, scores
from extract.analysis.probe.feature_matrix import FeatureRows, Source, row_products
from extract.analysis.probe.probing import probe_resources
from extract.analysis.row_groups import first_rows_of
from extract.errors import InputError, unknown_name

__all__ = ["FITS", "STRENGTHS", "Encoding", "LayerScores", "encoding"]

FITS = ("ridge", "banded", "pls")
STRENGTHS = tuple(np.logspace(-1, 8, 20).tolist())
_BLOCK_BYTES = 32 << 20  # of features read at once, at most
_BAND_DRAWS = 20  # of weights of bands, besides equal ones and each band alone
_FEWEST = 2  # images of a fold: one has no correlation
_NEGLIGIBLE = 1e-12  # of the largest variance: the rest is rounding


@dataclass(frozen=True)
class LayerScores:
    """Predictions of T targets from one layer, in F folds.

    Attributes:
        name: name of the layer.
        width: number D of values for an image.
        r: (T,) Pearson's r, the mean over folds; NaN for constant targets.
        r2: (T,) R^2, the mean over folds.
        fold_r: (F, T) the r of each fold.
        validation: (F, T) mean squared error on the other folds, by which strengths and layers are chosen; NaN for PLS
            of one layer.
        strengths: (F, T) chosen strength; NaN for PLS.
        band_weights: (F, T, B) chosen weights of the bands; None without bands.
        low, high: (T,) 95 % interval of r, by bootstrap over images; NaN without draws, or if a fold has one group.
        p: (T,) p-value of r, one-sided, by permutation of images; NaN without draws, or if each fold has one group.
        q: (T,) the same, corrected for the false discovery rate over targets. As p is at least 1 / (1 + draws), 0.05
            is reached only if 20 T / (1 + draws) targets are predicted.
    """

    name: str
    width: int
    r: Floats
    r2: Floats
    fold_r: Floats
    validation: Floats
    strengths: Floats
    band_weights: Floats | None
    low: Floats
    high: Floats
    p: Floats
    q: Floats


@dataclass(frozen=True)
class Encoding:
    """Predictions of T targets from each layer.

    Attributes:
        layers: scores of each layer.
        joint: scores of two layers side by side, if their variance is partitioned.
        ceiling: (T,) noise ceiling of R^2 by `ncsnr`; like the others, NaN without repeated trials.
        ncsnr: (T,) noise ceiling signal-to-noise ratio (Allen et al. 2022).
        split_half: (T,) noise ceiling of R^2 by split halves, with Spearman-Brown; it may be negative.
        folds: (N,) fold of each image that has a trial, in the order of their rows.
    """

    layers: list[LayerScores]
    joint: LayerScores | None
    ceiling: Floats
    ncsnr: Floats
    split_half: Floats
    folds: NDArray[np.int64]

    @property
    def best(self) -> NDArray[np.int64]:
        """(T,) number of the layer with the least error on validation rows; -1 for constant targets."""
        errors = np.stack([layer.validation.mean(0) for layer in self.layers])
        return np.asarray(np.where(np.isnan(self.layers[0].r2), -1, np.nan_to_num(errors, nan=np.inf).argmin(0)))

    @property
    def best_r(self) -> Floats:
        """(T,) r of the best layer, which is chosen anew for each fold on the other folds."""
        errors, r = (np.stack([getattr(layer, name) for layer in self.layers]) for name in ("validation", "fold_r"))
        return known_mean(np.take_along_axis(r, np.nan_to_num(errors, nan=np.inf).argmin(0)[None], 0)[0])

    def normalised(self, r: Floats) -> Floats:
        """Return r (T,) divided by its noise ceiling, the root of that of R^2; NaN without trials."""
        return np.asarray(r / np.sqrt(np.where(self.ceiling > 0, self.ceiling, np.nan)))

    @property
    def partition(self) -> dict[str, Floats]:
        """R^2 (T,) that only the first layer explains, only the second, and either; empty without `joint`.

        They add up to that of both. R^2 below 0 count as 0, or what one layer misses would seem unique to the other.
        """
        if self.joint is None:
            return {}
        both, first, second = (np.maximum(layer.r2, 0) for layer in (self.joint, *self.layers))
        return {"unique_first": both - second, "unique_second": both - first, "shared": first + second - both}


def encoding(
    features: Mapping[str, Source | FeatureRows | Sequence[Source | FeatureRows]], targets: Any, *,
    images: ArrayLike | None = None, names: list[str] | None = None, groups: ArrayLike | None = None,
    fit: str = "ridge", folds: int = 5, strengths: Sequence[float] = STRENGTHS,
    n_components: int = 25, partition: bool = False, draws: int = 1000, seed: int = 0, device: str = "auto",
    memory_bytes: int | None = None, on_layer: Callable[[str], None] = lambda name: None,
) -> Encoding:  # fmt: skip
    """Predict responses to images, such as voxels, neurons or ratings, from each layer, by nested cross-validation.

        with FeatureReader("outputs/photos") as reader:
            result = encoding({layer: reader[layer] for layer in reader.layers}, responses, images=rows)
        result.layers[0].r, result.best, result.best_r

    Each image is predicted once, by a fit on the other folds. The strength of a target is chosen on these folds alone.

    Args:
        features: layer -> (N, D) or (N, *shape), an array or a feature of a `FeatureReader`; several arrays of a layer
            are put side by side, and are the bands of "banded".
        targets: (P, T) numbers, such as a memory map; NaN or masked: a trial that was not measured.
        images: (P,) row of the features for each row of targets, which are trials where it repeats; -1: none. None: row
            i is image i.
        names: (T,) names of the targets, for errors; None: their numbers.
        groups: (N,) rows of features that share a value are in one fold: subjects, sessions, categories, or copies;
            None or NaN: no group.
        fit: "ridge"; "banded": ridge with weights of bands; "pls": partial least squares.
        folds: number F of folds, at least 3.
        strengths: penalties of ridge to choose from, |X w - y|^2 + strength |w|^2, with X minus the means of fitted
            rows, and scaled by one factor so that its columns have the mean variance 1.
        n_components: components of PLS.
        partition: whether to fit two layers side by side too, as bands, for `Encoding.partition`.
        draws: draws of the bootstrap and of the permutation test; 0: neither.
        seed: seed of the folds and of all draws.
        device: "auto", "cpu", "cuda", ...
        memory_bytes: limit for features and products held at once; None: half of the free memory.
        on_layer: called with the name of each layer before it is fitted.

    Raises:
        InputError: shapes do not match, a value is not finite, there are fewer groups than folds, or fewer than two
            images in a fold, or a layer is too wide for the memory.
        UnknownNameError: the fit or device does not exist.
    """
    if fit not in FITS:
        raise unknown_name("fit", fit, FITS)
    strengths = tuple(map(float, strengths))
    if not strengths or not all(0 < strength < math.inf for strength in strengths):
        raise InputError(f"strengths are {list(strengths)}; expected numbers above 0")
    if not features or (partition and len(features) != 2):
        raise InputError(f"there are {len(features)} layers; expected {'two to partition' if partition else 'some'}")
    bands = {name: _bands(layer, fit) for name, layer in features.items()}
    counts = {len(parts[0]) for parts in bands.values()}
    targets = _in_numpy(targets)
    rows = np.arange(min(counts)) if images is None else np.asarray(images)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        hint = "the row of the features for each row of targets, or -1"
        raise InputError(f"images are {rows.dtype} of shape {rows.shape}; expected whole numbers (P,)", hint=hint)
    group = np.arange(min(counts)) if groups is None else _groups(groups)
    if {*counts, len(group)} != {min(counts)} or len(rows) != len(targets) or rows.max(initial=-1) >= min(counts):
        found_counts = (
            f"{', '.join(map(str, sorted(counts)))} rows, groups {len(group)}, and the targets {len(targets)}"
        )
        hint = "expected as many, or the row of the features for each row of targets (images)"
        raise InputError(f"features have {found_counts}", hint=hint)
    responses = Responses(targets, rows, names)
    torch_device, memory_bytes = probe_resources(device, memory_bytes)
    group = np.unique(group[responses.images], return_inverse=True)[1]
    of_images = _fold_of_groups(group, folds, seed)

    def predicted(name: str, parts: list[FeatureRows], fit: str) -> LayerScores:
        on_layer(name)
        parts = [part.subset(responses.images) for part in parts]
        bands = _in_few_columns(name, parts, folds, memory_bytes)
        x, block_bytes = FeatureRows.of(bands), min(_BLOCK_BYTES, memory_bytes // 32)
        x = x.held() if x.nbytes <= memory_bytes // 4 else x
        sizes = [(band.width, part.width) for band, part in zip(bands, parts, strict=True)]
        weights = band_draws(len(parts), _BAND_DRAWS, seed) if fit == "banded" and len(parts) > 1 else []
        ridge = None if fit == "pls" else RidgeFolds(x, sizes, of_images, block_bytes, torch_device)
        scored = []
        for chosen in _blocks(responses, folds * (len(strengths) + x.width), memory_bytes, fit == "pls"):
            _, y = responses.read(chosen)
            predictions, *settings = (
                fit_pls(x, sizes, y, of_images, n_components, len(features) > 1) if ridge is None
                else ridge.fit(y, strengths, weights)
            )  # fmt: skip
            scored.append((*scores(predictions, y, of_images, group, draws, seed), *settings))
        joined = (np.concatenate(part, -1) for part in zip(*scored, strict=True))
        r, r2, low, high, p, validation, chosen_strengths, drawn = joined
        return LayerScores(
            name, sum(part.width for part in parts), known_mean(r), known_mean(r2), r, validation, chosen_strengths,
            np.array(weights)[drawn] if weights else None, low, high, p, q_values(p),
        )  # fmt: skip

    found, joint = [predicted(name, parts, fit) for name, parts in bands.items()], None
    if partition:
        both = [band for parts in bands.values() for band in parts]
        # One strength for both would shrink both as much, and understate what they explain together.
        joint = predicted(" + ".join(bands), both, "pls" if fit == "pls" else "banded")
    ceilings = [responses.ceilings(chosen, seed) for chosen in _blocks(responses, 0, memory_bytes, False)]
    ceiling, ncsnr, split_half = np.concatenate(ceilings, 1)
    return Encoding(found, joint, ceiling, ncsnr, split_half, of_images)


def _bands(layer: Any, fit: str) -> list[FeatureRows]:
    parts = layer if fit == "banded" and isinstance(layer, list | tuple) else [layer]
    return [FeatureRows.of(part) for part in parts]


def _in_numpy(targets: Any) -> Any:
    """Return an array as it is, and lists, tables and tensors as one; masked values become NaN."""
    if isinstance(targets, np.ma.MaskedArray):
        return np.ma.filled(targets.astype(np.float64), np.nan)
    if isinstance(targets, torch.Tensor):
        return targets.detach().cpu().double().numpy()
    return targets if isinstance(getattr(targets, "dtype", None), np.dtype) else np.asarray(targets)


def _groups(groups: ArrayLike) -> NDArray[np.int64]:
    """Return the first row (N,) of the group of each row; None and NaN are no group."""
    return first_rows_of(value if value == value else None for value in np.asarray(groups).ravel().tolist())


def _fold_of_groups(groups: NDArray[np.int64], n_folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold (N,) of each row: each group, the largest first, goes into the fold with the fewest rows."""
    sizes = np.bincount(groups)
    order = np.random.default_rng(seed).permutation(len(sizes))  # of groups of equal size
    rows_in, fold_of = [0] * max(1, n_folds), np.empty(len(sizes), np.int64)
    for group in order[np.argsort(-sizes[order], kind="stable")].tolist():
        fold_of[group] = fewest = rows_in.index(min(rows_in))
        rows_in[fewest] += int(sizes[group])
    if n_folds < 3 or min(rows_in) < _FEWEST:
        found = f"{n_folds} folds of {len(groups):,} images in {len(sizes):,} groups that stay together"
        found = f"{found}, at least {min(rows_in):,} in each"
        hint = "copies, parts of a file, and images of one value of --group, form a group"
        raise InputError(f"{found}; expected at least 3 folds (--folds), of {_FEWEST} images or more", hint=hint)
    return np.asarray(fold_of[groups])


def _blocks(responses: Responses, columns: int, memory_bytes: int, is_whole: bool) -> Iterator[slice]:
    """Yield the numbers of as many targets as are fitted at once: each needs `columns` numbers besides its rows."""
    of_target = 8 * (8 * len(responses.images) + 3 * responses.n_trials + 6 * columns)
    at_once, count = max(1, memory_bytes // 3 // of_target), responses.n_targets
    if is_whole and at_once < count:
        hint = "give some of the targets, more --max-memory-mb (memory_bytes), or use ridge"
        raise InputError(f"PLS of {count:,} targets needs {3 * of_target * count >> 20:,} MB", hint=hint)
    yield from (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


def _in_few_columns(name: str, bands: list[FeatureRows], n_folds: int, memory_bytes: int) -> list[FeatureRows]:
    """Return bands of at most as many columns as images.

    Raises:
        InputError: the products of columns do not fit into the memory.
    """
    count = len(bands[0])
    width = sum(min(count, band.width) for band in bands)
    of_pair = 8 * (2 * n_folds + 4) + 4 * n_folds * (n_folds - 1) // 2  # bytes for each pair of columns
    if (needed := width**2 * of_pair) > memory_bytes // 2:
        most = max(1, math.isqrt(memory_bytes // 2 // of_pair))
        found = f"layer {name} of {count:,} images needs {needed >> 20:,} MB for products of {width:,} columns"
        hint = f"at most {most:,} values or images fit: pool the layer, such as by srp{1 << most.bit_length() - 1}"
        raise InputError(found, hint=f"{hint}, or give more --max-memory-mb (memory_bytes)")
    return [_rotated(band, memory_bytes // 4) if band.width > count else band for band in bands]


def _rotated(rows: FeatureRows, work_bytes: int) -> FeatureRows:
    """Return rows in the axes that they span, at most N columns: products of rows, and so all fits, stay the same."""
    values, vectors = np.linalg.eigh(row_products(rows, work_bytes))
    varying = values > _NEGLIGIBLE * max(values[-1], 1e-300)
    varying[-1] = True  # of equal rows
    return FeatureRows.of(vectors[:, varying] * np.sqrt(np.maximum(values[varying], 0)))
