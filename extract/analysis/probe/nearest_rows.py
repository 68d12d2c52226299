"""Search for the nearest rows by cosine, in blocks that fit into memory.

Products in float32 select candidates. For an exact search, the cosine of every row that could be among the nearest
within the rounding error is computed again in float64. The result is that of float64 at the speed of float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.analysis.probe.feature_matrix import FeatureRows, Source
from extract.errors import InputError, LayertapError, unknown_name
from extract.system.torch_state import full_float32

__all__ = ["MEMORY_BYTES", "Neighbours", "layer_to_search", "nearest", "overlap"]

# Why no index: on 1 million x 256, FAISS's flat index takes 0.2 s for one query and 4.8 s for 100, after 1.2 s to fill
# it, in 2.1 GB; this takes 1.2 and 3.7 s, in 0.7 GB, reading included. HNSW and IVF sometimes answer wrongly, would be
# built again after each `sync`, and are read by code that trusts their files. `export --to npy` serves FAISS.
# All cosines in float64, without candidates, take 2.5 (a hundred queries) to 5 times (one query) as long.
MEMORY_BYTES = 256 << 20
_QUERIES = 1024  # compared at once
TEMPERATURE = 0.07  # from DINO's eval_knn.py and DINOv2's eval/knn.py
_DECIMALS = 12  # of a cosine: rows in the same direction tie despite the float64 rounding of their lengths
_DENSE = 16  # if more than 1 in 16 cosines is a candidate, all are computed in float64
_FEW = 1 << 16  # up to this number, candidates are always computed pair by pair
_SAFE = 1e-15, 1e15  # lengths whose squares neither underflow nor overflow in float32


@dataclass(frozen=True)
class Neighbours:
    """Nearest rows of each query, nearest first; ties are in the order of row numbers.

    Attributes:
        rows: (Q, K) int64; -1 where there are fewer rows.
        cosines: (Q, K) float64, rounded to 12 decimals; NaN where there are fewer rows.
    """

    rows: NDArray[np.int64]
    cosines: NDArray[np.float64]


def nearest(
    bank: Source,
    queries: NDArray[np.floating],
    k: int,
    *,
    among: NDArray[np.int64] | None = None,
    without: NDArray[np.int64] | None = None,
    device: str | torch.device = "cpu",
    memory_bytes: int = MEMORY_BYTES,
) -> Neighbours:
    """Find the k rows nearest to each query by cosine. A zero vector has cosine 0 to every vector.

    Args:
        bank: (N, *shape): an array, a memory map, or a feature of a `FeatureReader`; rows that are not finite are
            skipped.
        queries: (Q, *shape) or (Q, D), finite.
        k: number of rows for each query.
        among: numbers of the rows to search, ascending; None: all rows.
        without: (Q,) row to exclude for each query, such as its own; None: no row is excluded.
        device: device to compute on.
        memory_bytes: limit for the rows and cosines held at once, besides queries and results.

    Returns:
        `Neighbours` with K = min(k, number of rows searched).

    Raises:
        InputError: k is less than 1, a query is not finite, or the queries are not as wide as the rows.
    """
    rows = FeatureRows.of(bank, among)
    numbers = np.arange(len(rows)) if among is None else among
    flat = np.asarray(queries).reshape(len(queries), -1).astype(np.float32)
    if k < 1:
        raise InputError(f"k is {k}; it must be at least 1")
    if flat.shape[1] != rows.width:
        raise InputError(f"queries have {flat.shape[1]:,} values each, but rows have {rows.width:,}")
    if not np.isfinite(flat).all():
        raise InputError("a query contains NaN or infinity")
    # The excluded row may be any of several equally near rows: search for one row more, then drop the excluded row.
    n_nearest = min(k, len(rows)) + (without is not None)
    near = nearest_in(rows, flat, n_nearest, device, memory_bytes)
    found, cosines = np.where(near.rows < 0, -1, numbers[near.rows] if len(numbers) else -1), near.cosines
    if without is not None:
        excluded = (found == np.asarray(without)[:, None]) & (found >= 0)
        excluded[~excluded.any(1), -1] = True
        found, cosines = (table[~excluded].reshape(len(flat), n_nearest - 1) for table in (found, cosines))
    return Neighbours(found[:, :k], cosines[:, :k])


def nearest_in(
    rows: FeatureRows,
    queries: NDArray[np.float32],
    k: int,
    device: str | torch.device = "cpu",
    memory_bytes: int = MEMORY_BYTES,
    *,
    exact: bool = True,
) -> Neighbours:
    """Find the k rows nearest to each query, as `nearest` does.

    Args:
        rows: (N, D).
        queries: (Q, D), finite.
        k: number of rows for each query.
        device: device to compute on.
        memory_bytes: limit for the rows and cosines held at once, besides queries and results.
        exact: compute cosines in float64 where float32 cannot tell which rows are nearest. Without, the search for 200
            rows takes a third of the time; rows whose float32 cosines are equal tie, and rows must be finite.

    Raises:
        InputError: a row is not finite, in a search that is not exact.
    """
    found, cosines = np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), np.nan)
    group = max(1, min(_QUERIES, memory_bytes // (16 * 4 * rows.width)))
    with torch.inference_mode(), full_float32():
        for start in range(0, len(queries), group):
            best_rows, best_cosines = _scan(rows, queries[start : start + group], k, device, memory_bytes, exact)
            found[start : start + group] = best_rows.cpu().numpy()
            cosines[start : start + group] = best_cosines.cpu().numpy()
    cosines[found < 0] = np.nan
    return Neighbours(found, cosines)


def overlap(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (Q,) the share of each query's neighbours that are in both of two (Q, K) tables of rows."""
    pairs = zip(first, second, strict=True)
    n_shared = [len(np.intersect1d(ours[ours >= 0], theirs[theirs >= 0])) for ours, theirs in pairs]
    return np.asarray(np.array(n_shared, np.float64) / max(1, first.shape[1]))


def neighbour_shares(
    bank: FeatureRows,
    targets: NDArray[np.int64] | NDArray[np.float32],
    n_classes: int,
    queries: FeatureRows,
    ks: Sequence[int],
    device: str | torch.device = "cpu",
    memory_bytes: int = 1 << 30,
) -> list[NDArray[np.float32]]:
    """Return each class's share of the votes of the k rows nearest by cosine, for each k (Wu et al. 2018).

    The vote of a neighbour has the weight exp(cosine / 0.07). Of equally near rows, the first counts as nearer.

    Args:
        bank: (N, D).
        targets: (N,) classes, or (N, K) labels of 0 and 1.
        n_classes: K.
        queries: (Q, D).
        ks: numbers of neighbours, at most N.
        device: device to compute on.
        memory_bytes: limit for the rows and cosines held at once.

    Returns:
        (Q, K) for each k; if each row of the bank has one class, the shares of a query sum to 1.
    """
    results = {k: np.zeros((len(queries), n_classes), np.float32) for k in ks}
    for start, array in queries.blocks(min(4 * queries.width * _QUERIES, memory_bytes // 8)):
        near = nearest_in(bank, array, max(ks), device, memory_bytes // 2, exact=False)
        # Subtract the largest cosine, which prevents overflow and does not change the shares.
        votes = np.exp((near.cosines - near.cosines[:, :1]) / TEMPERATURE)
        total, query_numbers = np.zeros((len(array), n_classes)), np.arange(len(array))
        for rank, neighbours in enumerate(near.rows.T):
            if targets.ndim == 1:
                total[query_numbers, targets[neighbours]] += votes[:, rank]
            else:
                total += votes[:, rank, None] * targets[neighbours]
            if (k := rank + 1) in results:
                results[k][start : start + len(array)] = total / votes[:, :k].sum(1, keepdims=True)
    return [results[k] for k in ks]


def layer_to_search(layers: Sequence[str], asked: str | None, where: str) -> str:
    """Return the requested layer; without a request, `embedding` or the only layer.

    Raises:
        UnknownNameError: the requested layer does not exist.
        InputError: there are several layers, and none of them is `embedding`.
        LayertapError: there are no layers.
    """
    if asked is not None:
        if asked not in layers:
            raise unknown_name("layer", asked, list(layers), where)
        return asked
    if "embedding" in layers:
        return "embedding"
    if len(layers) > 1:
        raise InputError(
            f"{where} has {len(layers)} layers but no embedding", hint=f"name a layer: -l {', -l '.join(layers)}"
        )
    if not layers:
        raise LayertapError(f"{where} has no layers")
    return layers[0]


def _scan(
    rows: FeatureRows, queries: NDArray[np.float32], k: int, device: str | torch.device, memory_bytes: int, exact: bool
) -> tuple[Tensor, Tensor]:
    """Read all rows once and compare them with a group of queries (q, D).

    Returns:
        rows (q, k), -1 where there are fewer, and their cosines (q, k), nearest first.
    """
    n, width = queries.shape
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True)
    unit = np.divide(queries, lengths, out=np.zeros(queries.shape), where=lengths > 0)
    wide = torch.from_numpy(unit.astype(np.float32)).to(device)
    # Error bound of float32, for the product and the length: 16 * sqrt(D) roundings, which is exceeded with a
    # probability below 1e-50 (Higham and Mary 2019, theorem 2.4). The margin is twice the error of two cosines. To rank
    # the 4 k best of float32 again, whatever their distance, found other rows for copies of other lengths, and for
    # rows within 1e-4 of one direction.
    margin = 4 * (16 * math.sqrt(width) * 2**-24 + 2**-20) if exact else 0.0
    home = torch.device("cpu") if exact else wide.device  # some devices have no float64
    best_rows = torch.full((n, k), -1, device=home)
    best_cosines = torch.full((n, k), -torch.inf, dtype=torch.float64 if exact else torch.float32, device=home)
    step = max(1, min(memory_bytes // (8 * 4 * width), memory_bytes // (8 * 8 * n)))
    every_row = ((start, rows.between(start, min(start + step, len(rows)))) for start in range(0, len(rows), step))
    for start, block in every_row if exact else rows.blocks(4 * width * step):
        cosines, good = _approximate_cosines(wide, block)
        least = best_cosines[:, -1].to(cosines)
        if k <= len(block) and bool(torch.isinf(least).any()):
            least = torch.maximum(least, cosines.topk(k, 1)[0][:, -1])
        near = (cosines >= (least - margin)[:, None]) & good
        query_numbers, row_numbers = (numbers.to(home) for numbers in near.nonzero(as_tuple=True))
        if not len(query_numbers):
            continue
        if exact:
            pairs = query_numbers.numpy(), row_numbers.numpy()
            values = torch.from_numpy(_exact_cosines(unit, block, *pairs, memory_bytes))
        else:
            values = cosines[near]
        del cosines, near
        new_rows, new_cosines = _table(query_numbers, (row_numbers + start, values), n)
        # A stable sort: of equal cosines, those found in earlier rows stand first.
        merged, order = torch.cat([best_cosines, new_cosines], 1).sort(dim=1, descending=True, stable=True)
        best_cosines = merged[:, :k].contiguous()
        best_rows = torch.cat([best_rows, new_rows], 1).gather(1, order[:, :k])
    return best_rows, best_cosines


def _table(query_numbers: Tensor, found: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Return rows and cosines (P,) of ascending queries as tables (n, most), filled up with -1 and -inf."""
    counts = query_numbers.bincount(minlength=n)
    places = torch.arange(len(query_numbers), device=counts.device) - (counts.cumsum(0) - counts)[query_numbers]
    rows = torch.full((n, int(counts.max())), -1, device=counts.device)
    cosines = torch.full(rows.shape, -torch.inf, dtype=found[1].dtype, device=counts.device)
    rows[query_numbers, places], cosines[query_numbers, places] = found
    return rows, cosines


def _approximate_cosines(unit: Tensor, block: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Return the cosines (q, b) in float32, and (b,) whether each row is finite; other rows have cosine -2."""
    values = torch.from_numpy(block).to(unit.device)
    lengths = torch.linalg.vector_norm(values, dim=1)
    good = torch.ones_like(lengths, dtype=torch.bool)
    odd = ~((lengths > _SAFE[0]) & (lengths < _SAFE[1]))  # also true for NaN
    if bool(odd.any()):
        odd_values = values[odd]
        good[odd] = odd_values.isfinite().all(1)
        odd_values = torch.nan_to_num(odd_values / odd_values.abs().amax(1, keepdim=True).clamp(min=1e-45), 0, 0, 0)
        # A copy: `_exact_cosines` uses the unscaled block, which float64 can hold.
        values = values.index_put((odd,), odd_values)
        lengths[odd] = torch.linalg.vector_norm(odd_values, dim=1)
    cosines = unit @ values.T
    cosines /= lengths.where(lengths > 0, 1.0)
    if not bool(good.all()):
        cosines[:, ~good] = -2.0
    return cosines, good


def _exact_cosines(
    unit: NDArray[np.float64], block: NDArray[np.float32], query_numbers: NDArray[np.int64],
    row_numbers: NDArray[np.int64], memory_bytes: int,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the cosines (P,) of pairs of a query and a row of the block, in float64.

    The sum over a row does not depend on the row's position in the block, so equal rows tie.
    """
    values = np.empty(len(query_numbers))
    step = max(1, memory_bytes // (4 * 16 * unit.shape[1]))
    if len(query_numbers) > _FEW and len(query_numbers) * _DENSE > len(unit) * len(block):
        # Nearly all rows are equally near, as in a dead layer: computing pair by pair would take hours.
        distinct_rows = np.unique(row_numbers)
        for start in range(0, len(distinct_rows), step):
            chunk = distinct_rows[start : start + step]
            in_chunk = np.isin(row_numbers, chunk)
            rows = block[chunk].astype(np.float64)
            lengths = np.linalg.norm(rows, axis=1)
            dots = unit @ (rows / np.where(lengths > 0, lengths, 1)[:, None]).T
            values[in_chunk] = dots[query_numbers[in_chunk], np.searchsorted(chunk, row_numbers[in_chunk])]
    else:
        for start in range(0, len(query_numbers), step):
            pairs = slice(start, start + step)
            rows = block[row_numbers[pairs]].astype(np.float64)
            dots = np.einsum("pd,pd->p", unit[query_numbers[pairs]], rows)
            lengths = np.sqrt(np.einsum("pd,pd->p", rows, rows))
            values[pairs] = np.divide(dots, lengths, out=np.zeros(len(dots)), where=lengths > 0)
    exact: NDArray[np.float64] = np.round(values, _DECIMALS).clip(-1, 1) + 0.0  # no -0
    return exact
