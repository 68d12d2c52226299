"""The nearest rows of features by cosine, exactly, in blocks that fit into memory.

Products in float32 find candidates; whatever rounding could have moved past the last of the nearest is computed again
in float64, and decides. So the result is that of float64 at the speed of float32.
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

MEMORY_BYTES = 256 << 20
_QUERIES = 1024  # that are compared at once
_DECIMALS = 12  # of a cosine: rows of one direction tie, whatever rounding in float64 makes of their lengths
_DENSE = 16  # where more than one cosine of so many is a candidate, all are computed in float64
_FEW = 1 << 16  # candidates that are always computed one by one
_SAFE = 1e-15, 1e15  # lengths whose squares neither vanish nor overflow in float32


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows of each query, the nearest first; of equally near ones, the lower row.

    Attributes:
        rows: (Q, K) int64; -1 where there are fewer.
        cosines: (Q, K) float64, to 12 decimals; NaN where there are fewer.
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
    """The k rows nearest to each query by cosine. A vector of zeros has cosine 0 to everything.

    Args:
        bank: (N, *shape): an array, a memory map, or a feature of a `FeatureReader`; rows that are not finite are left
            out.
        queries: (Q, *shape) or (Q, D), finite.
        k: rows for each query.
        among: only these rows, ascending; None: all.
        without: (Q,) for each query a row that it does not return, its own; None: none is left out.
        device: to compute on.
        memory_bytes: of rows and cosines that are held at once, apart from queries and results.

    Returns:
        `Neighbours` with K = min(k, rows that there are).

    Raises:
        InputError: k is less than 1, or the queries do not fit the rows.
    """
    rows = FeatureRows.of(bank, among)
    numbers = np.arange(len(rows)) if among is None else among
    flat = np.asarray(queries).reshape(len(queries), -1).astype(np.float32)
    if k < 1:
        raise InputError(f"k is {k}; it must be at least 1")
    if flat.shape[1] != rows.width:
        raise InputError(f"queries have {flat.shape[1]:,} values, and rows {rows.width:,}")
    if not np.isfinite(flat).all():
        raise InputError("a query has NaN or infinity")
    # Its own row may be any of those that are equally near, so one more is looked for, and then left out.
    wanted = min(k, len(rows)) + (without is not None)
    found_rows, cosines = np.full((len(flat), wanted), -1, np.int64), np.full((len(flat), wanted), np.nan)
    group = max(1, min(_QUERIES, memory_bytes // (16 * 4 * rows.width)))
    with torch.inference_mode(), full_float32():
        for start in range(0, len(flat) if len(rows) else 0, group):
            here = slice(start, min(start + group, len(flat)))
            best = _Best(here.stop - start, wanted)
            _scan(rows, flat[here], best, device, memory_bytes)
            found_rows[here], cosines[here] = best.rows, best.cosines
    found_rows[found_rows >= 0] = numbers[found_rows[found_rows >= 0]]
    cosines[found_rows < 0] = np.nan
    if without is not None:
        found_rows, cosines = _left_out(found_rows, cosines, without)
    return Neighbours(found_rows[:, :k], cosines[:, :k])


def overlap(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
    """(Q,) the share of the neighbours of each query that it has in both of two (Q, K) tables of rows."""
    both = [len(np.intersect1d(one[one >= 0], other[other >= 0])) for one, other in zip(first, second, strict=True)]
    shares: NDArray[np.float64] = np.array(both, np.float64) / max(1, first.shape[1])
    return shares


def layer_to_search(layers: Sequence[str], asked: str | None, where: str) -> str:
    """The layer asked for; else `embedding`, or the only one.

    Raises:
        UnknownNameError: there is no such layer.
        LayertapError: there are several, and none of them is `embedding`.
    """
    if asked is not None:
        if asked not in layers:
            raise unknown_name("layer", asked, list(layers), where)
        return asked
    if "embedding" in layers:
        return "embedding"
    if len(layers) > 1:
        raise InputError(f"{where} has {len(layers)} layers and no embedding; name one by -l: {', '.join(layers)}")
    if not layers:
        raise LayertapError(f"{where} has no layer")
    return layers[0]


class _Best:
    """The nearest rows of some queries so far.

    Attributes:
        rows: (q, k), -1 where there are fewer.
        cosines: (q, k), -inf where there are fewer.
    """

    def __init__(self, queries: int, k: int):
        self.rows, self.cosines = np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf)

    @property
    def least(self) -> NDArray[np.float64]:
        """(q,) the cosine of the last of them; -inf where there are fewer."""
        return self.cosines[:, -1]

    def add(self, queries: NDArray[np.int64], rows: NDArray[np.int64], cosines: NDArray[np.float64]) -> None:
        """Take over those of (query, row, cosine) that are among the nearest."""
        n, k = self.rows.shape
        there = self.rows.reshape(-1) >= 0
        who = np.concatenate([np.repeat(np.arange(n), k)[there], queries])
        which = np.concatenate([self.rows.reshape(-1)[there], rows])
        near = np.concatenate([self.cosines.reshape(-1)[there], cosines])
        order = np.lexsort((which, -near, who))
        who, which, near = who[order], which[order], near[order]
        rank = np.arange(len(who)) - np.searchsorted(who, who)
        kept = rank < k
        self.rows[who[kept], rank[kept]] = which[kept]
        self.cosines[who[kept], rank[kept]] = near[kept]


def _scan(
    rows: FeatureRows, queries: NDArray[np.float32], best: _Best, device: str | torch.device, memory_bytes: int
) -> None:
    """Go over all rows once, for some queries (q, D)."""
    n, width = queries.shape
    k = best.rows.shape[1]
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
    unit = np.divide(queries, lengths[:, None], out=np.zeros(queries.shape), where=lengths[:, None] > 0)
    wide = torch.from_numpy(unit.astype(np.float32)).to(device)
    # How far float32 may be off: 16 roundings times the root of their number, which rounding errors exceed with a
    # probability below 1e-50 (Higham and Mary 2019, theorem 2.4), in the product and in the length.
    off = 2 * (16 * math.sqrt(width) * 2**-24 + 2**-20)
    step = max(1, min(memory_bytes // (8 * 4 * width), memory_bytes // (4 * 8 * n)))
    for start in range(0, len(rows), step):
        block = rows.between(start, min(start + step, len(rows)))  # (b, D)
        cosines, good = _approximate(wide, block)
        least = torch.from_numpy(best.least).to(cosines)
        if k <= len(block) and bool(torch.isinf(least).any()):
            least = torch.maximum(least, cosines.topk(k, 1)[0][:, -1])
        near = (cosines >= (least - 2 * off)[:, None]) & good
        del cosines
        who, which = (one.cpu().numpy() for one in near.nonzero(as_tuple=True))
        if len(who):
            best.add(who, which + start, _exact(unit, block, who, which, memory_bytes))


def _approximate(unit: Tensor, block: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """(q, b) cosines in float32, and (b,) which rows are finite; of the others, -2."""
    values = torch.from_numpy(block).to(unit.device)
    lengths = torch.linalg.vector_norm(values, dim=1)
    good = torch.ones_like(lengths, dtype=torch.bool)
    odd = ~((lengths > _SAFE[0]) & (lengths < _SAFE[1]))  # NaN too
    if bool(odd.any()):
        some = values[odd]
        good[odd] = some.isfinite().all(1)
        some = torch.nan_to_num(some / some.abs().amax(1, keepdim=True).clamp(min=1e-45), 0, 0, 0)
        values = values.index_put((odd,), some)  # the block itself stays: float64 has room for its values
        lengths[odd] = torch.linalg.vector_norm(some, dim=1)
    cosines = unit @ values.T
    cosines /= lengths.where(lengths > 0, 1.0)
    if not bool(good.all()):
        cosines[:, ~good] = -2.0
    return cosines, good


def _exact(
    unit: NDArray[np.float64], block: NDArray[np.float32], who: NDArray[np.int64], which: NDArray[np.int64],
    memory_bytes: int,
) -> NDArray[np.float64]:  # fmt: skip
    """(P,) cosines of pairs of a query and a row of the block, in float64.

    The sum of a row does not depend on where in the block it is, so that equal rows tie.
    """
    found = np.empty(len(who))
    step = max(1, memory_bytes // (4 * 16 * unit.shape[1]))
    if len(who) > _FEW and len(who) * _DENSE > len(unit) * len(block):
        # Nearly all rows are equally near, as where a layer has died: pair by pair would take hours.
        used = np.unique(which)
        for start in range(0, len(used), step):
            some = used[start : start + step]
            here = np.isin(which, some)
            rows = block[some].astype(np.float64)
            lengths = np.linalg.norm(rows, axis=1)
            dots = unit @ (rows / np.where(lengths > 0, lengths, 1)[:, None]).T
            found[here] = dots[who[here], np.searchsorted(some, which[here])]
    else:
        for start in range(0, len(who), step):
            pairs = slice(start, start + step)
            rows = block[which[pairs]].astype(np.float64)
            dots = np.einsum("pd,pd->p", unit[who[pairs]], rows)
            lengths = np.sqrt(np.einsum("pd,pd->p", rows, rows))
            found[pairs] = np.divide(dots, lengths, out=np.zeros(len(dots)), where=lengths > 0)
    exact: NDArray[np.float64] = np.round(found, _DECIMALS).clip(-1, 1) + 0.0  # no -0
    return exact


def _left_out(
    rows: NDArray[np.int64], cosines: NDArray[np.float64], without: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Without each query's own row, or, where that is not among them, without the last."""
    own = (rows == np.asarray(without)[:, None]) & (rows >= 0)
    own[~own.any(1), -1] = True
    shape = len(rows), rows.shape[1] - 1
    return rows[~own].reshape(shape), cosines[~own].reshape(shape)
