"""Logistic regression with an L2 penalty, for many strengths at once, over rows in memory or in a file.

For each C, minimise the objective of scikit-learn's `LogisticRegression(C=C)` over W (K, D) and b (K,):

    C * sum_i weight_i * loss(W x_i + b, y_i) + |W|^2 / 2

The solver is L-BFGS over all rows (Liu and Nocedal 1989). All C share each pass over the rows, which may be a file
larger than memory. The variables are preconditioned: they lie along the principal axes of the features, each scaled by
the curvature of the objective at the start. Without this, a few axes have all of the curvature, and the solver needs
hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.errors import LayertapError
from extract.system.torch_state import full_float32

__all__ = ["MAX_ITERATIONS", "Fit", "LogisticRegression"]

MAX_ITERATIONS = 1000  # from CLIP (appendix A.3) and DINOv2 (eval/log_regression.py)
_TOLERANCE = 1e-6  # stop if the next step promises at most this share of the gain so far
_HISTORY = 10  # steps used to estimate the curvature, as in scikit-learn
_VECTORS = 4 * _HISTORY + 12  # vectors of variables needed per strength; the history is copied at times
_BLOCK_BYTES = 4 << 20  # of scores computed at once: about the size of a core's cache
_LEAST_ROWS = 512  # in a block; with fewer, reading the weights takes longer than computing with them
_MOST_SHRINKS = 30  # of a step that does not decrease the objective enough
_ENOUGH = 1e-4  # required share of the decrease promised by the slope (Nocedal and Wright, section 3.1)
_ROUNDING = 1e-7  # relative rounding error of the objective in float32
_FLATTEST = 1e-7  # of the largest variance; axes below it are rounding errors and are not stretched further
_WIDEST = 6000  # columns for which principal axes are computed; wider features are scaled column by column


@dataclass(frozen=True)
class Fit:
    """Solutions for M values of C.

    Attributes:
        weights: (M, K, D) float32; K is 1 for two classes.
        biases: (M, K) float32.
        objectives: (M,) values of the objective in the module docstring.
        iterations: (M,) numbers of steps.
        converged: (M,) whether the next step promised at most a millionth of the gain so far, or no step along the
            slope gained anything in float32.
    """

    weights: NDArray[np.float32]
    biases: NDArray[np.float32]
    objectives: NDArray[np.float64]
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]


class LogisticRegression:
    """Logistic regression on a set of rows, whose principal axes are computed once.

    Args:
        rows: (N, D), read again in every pass if they do not fit into memory.
        targets: (N,) int64 classes, or (N, K) float32 of 0 and 1 for labels that do not exclude each other.
        n_classes: K; two classes have one vector of weights, as in scikit-learn.
        sample_weight: (N,) float32; None: all 1.
        device: device to compute on.
        memory_bytes: limit for features and variables, half for each. A (D, D) matrix in double precision is extra,
            up to D = 6,000.
    """

    def __init__(
        self,
        rows: FeatureRows,
        targets: NDArray[Any],
        n_classes: int,
        *,
        sample_weight: NDArray[np.float32] | None = None,
        device: str | torch.device = "cpu",
        memory_bytes: int = 4 << 30,
    ):
        self._device, self._memory_bytes = torch.device(device), memory_bytes // 2
        if targets.ndim == 1 and n_classes == 2:
            targets = targets[:, None].astype(np.float32)
        weight = None if sample_weight is None else torch.from_numpy(sample_weight).to(self._device)
        with torch.inference_mode(), full_float32():
            features = _features(rows, self._device, self._memory_bytes)
            self._problem = _Problem(features, torch.from_numpy(targets).to(self._device), n_classes, weight)

    def fit(self, strengths: Sequence[float], max_iterations: int = MAX_ITERATIONS) -> Fit:
        """Minimise the objective for every strength.

        Args:
            strengths: values of C, in any order.
            max_iterations: maximum number of steps for each C.

        Raises:
            LayertapError: the objective is not finite at the start: the features are too large for float32.
        """
        order = np.argsort(strengths, kind="stable")
        scores = _LEAST_ROWS * self._problem.n_outputs * 4 * 4  # four arrays of scores are held at a time
        at_once = max(1, self._memory_bytes // (4 * self._problem.n_variables * _VECTORS + scores))
        solved = []
        with torch.inference_mode(), full_float32():
            for first in range(0, len(order), at_once):
                chunk = np.asarray(strengths, np.float64)[order[first : first + at_once]]
                solved.append(_minimise(self._problem, torch.from_numpy(chunk).to(self._device), max_iterations))
        place = np.argsort(order)  # position of each strength among the solved ones
        weights, biases, objectives, iterations, converged = (
            np.concatenate([solution[i] for solution in solved])[place] for i in range(5)
        )
        return Fit(weights, biases, objectives, iterations, converged)


@dataclass(frozen=True)
class _Features:
    """The rows, and the axes along which the variables lie.

    Attributes:
        rows: (N, D) rows to read in every pass; None if they are held.
        held: (N, R) centred rows along the axes; None if they do not fit into memory or have no principal axes.
        mean: (D,) of the rows.
        axes: (D, R) orthonormal principal axes; None: the columns.
        variances: (R,) of the rows along the axes, at least 1e-7 of the largest.
        count: N.
    """

    rows: FeatureRows | None
    held: Tensor | None
    mean: Tensor
    axes: Tensor | None
    variances: Tensor
    count: int

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, block) over all rows; a block is (n, R) if the rows are held, else (n, D)."""
        if self.held is not None:
            for start in range(0, self.count, size):
                yield start, self.held[start : start + size]
        elif self.rows is not None:
            for first, array in self.rows.blocks():  # read large blocks, compute on small ones
                block = torch.from_numpy(array).to(self.mean.device)
                for start in range(0, len(block), size):
                    yield first + start, block[start : start + size]

    def along(self, weights: Tensor) -> Tensor:
        """Convert weights along the axes (..., R) to weights of the columns (..., D)."""
        return weights if self.axes is None else weights @ self.axes.T


def _features(rows: FeatureRows, device: torch.device, memory_bytes: int) -> _Features:
    count, width = len(rows), rows.width
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    for _, array in rows.blocks():
        mean += torch.from_numpy(array).to(device).sum(0, dtype=torch.float64)
    mean = (mean / count).float()
    in_memory = 4 * count * min(count, width) <= memory_bytes
    if count < width and in_memory and 4 * rows.nbytes <= memory_bytes:
        return _features_of_few_rows(rows, mean)
    if width > _WIDEST:
        variances = torch.zeros(width, dtype=torch.float64, device=device)
        for _, array in rows.blocks():
            variances += (torch.from_numpy(array).to(device) - mean).square().sum(0, dtype=torch.float64)
        return _Features(rows, None, mean, None, _with_floor(variances / count), count)
    moments = torch.zeros(width, width, dtype=torch.float64, device=device)
    for _, array in rows.blocks():
        centred = torch.from_numpy(array).to(device) - mean
        moments += centred.T @ centred
    if not bool(moments.isfinite().all()):
        raise LayertapError("the features are too large to be summed in float32", hint="scale the features")
    eigenvalues, axes = torch.linalg.eigh(moments / count)
    axes, variances = axes.float(), _with_floor(eigenvalues)
    if not in_memory:
        return _Features(rows, None, mean, axes, variances, count)
    held = torch.empty(count, width, device=device)
    for start, array in rows.blocks():
        held[start : start + len(array)] = (torch.from_numpy(array).to(device) - mean) @ axes
    return _Features(None, held, mean, axes, variances, count)


def _features_of_few_rows(rows: FeatureRows, mean: Tensor) -> _Features:
    """Compute the features for fewer rows than columns: the axes lie in the span of the rows."""
    centred = torch.from_numpy(rows.between(0, len(rows))).to(mean.device).double() - mean
    eigenvalues, vectors = torch.linalg.eigh(centred @ centred.T)
    kept = eigenvalues > 1e-12 * eigenvalues[-1].clamp(min=torch.finfo(torch.float64).tiny)
    if not bool(kept.any()):  # all rows are equal
        kept[-1] = True
    lengths = eigenvalues[kept].clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    axes = centred.T @ (vectors[:, kept] / lengths)
    held = (vectors[:, kept] * lengths).float()
    return _Features(None, held, mean, axes.float(), _with_floor(eigenvalues[kept] / len(rows)), len(rows))


def _with_floor(variances: Tensor) -> Tensor:
    return torch.maximum(variances, _FLATTEST * variances.max()).float()


class _Problem:
    """The objective of each C, divided by C and N, in scaled variables.

    The variables of one C are a row of K * (R + 1) values: Z (K, R) and c (K, 1). With the scales s (R + 1,) of that
    C, W = (Z * s) along the axes, and the bias at the mean of the features is c * s.
    """

    def __init__(self, features: _Features, targets: Tensor, n_classes: int, sample_weight: Tensor | None):
        self.features, self.targets, self.sample_weight = features, targets, sample_weight
        self.device, self.count = targets.device, features.count
        self.n_outputs = n_classes if targets.ndim == 1 else targets.shape[1]
        self.n_variables = self.n_outputs * (len(features.variances) + 1)
        # Curvature of softmax at equal scores, or of the logistic function at 0, times the mean weight of a row.
        outputs = n_classes if targets.ndim == 1 else 2
        mean_weight = 1.0 if sample_weight is None else float(sample_weight.mean())
        self.curvature = mean_weight * (1 - 1 / outputs) / outputs

    def penalty(self, strengths: Tensor) -> Tensor:
        """Return the factors (M,) float64 of |W|^2 / 2."""
        return 1 / (strengths * self.count)

    def scales(self, strengths: Tensor) -> Tensor:
        """Return (M, R + 1): one over the square root of the curvature along each axis, and of the bias."""
        along_axes = self.curvature * self.features.variances + self.penalty(strengths)[:, None].float()
        bias = torch.full((len(strengths), 1), self.curvature, device=self.device)
        return torch.cat([along_axes, bias], 1).rsqrt()

    def start(self, scales: Tensor) -> Tensor:
        """Return the start (M, V): zero weights, and the biases that fit best with them, smoothed by half a row."""
        each = torch.ones(self.count, device=self.device) if self.sample_weight is None else self.sample_weight
        if self.targets.ndim == 1:
            counts = torch.zeros(self.n_outputs, device=self.device).index_add_(0, self.targets, each) + 0.5
            bias = counts.log() - counts.log().mean()
        else:
            ones = (self.targets * each[:, None]).sum(0)
            bias = ((ones + 0.5) / (each.sum() - ones + 0.5)).log()
        variables = torch.zeros(len(scales), self.n_outputs, scales.shape[1], device=self.device)
        variables[..., -1] = bias / scales[:, -1:]
        return variables.flatten(1)

    def solution(self, variables: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (M, K, D) and biases (M, K) for the features as given."""
        scaled = variables.view(len(variables), self.n_outputs, -1) * scales[:, None, :]
        weights = self.features.along(scaled[..., :-1])
        return weights, scaled[..., -1] - (weights.double() @ self.features.mean.double()).float()

    def evaluate(self, variables: Tensor, scales: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the objectives (M,) float64 and their gradients (M, V) in one pass over the rows."""
        n, k = len(variables), self.n_outputs
        scaled = variables.view(n, k, -1) * scales[:, None, :]
        weights, biases = scaled[..., :-1], scaled[..., -1]
        raw = self.features.held is None
        if raw:
            weights = self.features.along(weights)
            biases = biases - weights @ self.features.mean
        flat, shift = weights.flatten(0, 1), biases.flatten()
        losses = torch.zeros(n, dtype=torch.float64, device=self.device)
        by_weights, by_biases = torch.zeros_like(flat), torch.zeros_like(shift)
        size = max(_LEAST_ROWS, _BLOCK_BYTES // (4 * max(n * k, flat.shape[1] // 4)))
        for start, block in self.features.blocks(size):
            stop = start + len(block)
            scores = torch.addmm(shift, block, flat.T).view(-1, n, k)
            loss, by_scores = _loss(scores, self.targets[start:stop])
            if self.sample_weight is not None:
                row_weights = self.sample_weight[start:stop, None]
                loss, by_scores = loss * row_weights, by_scores * row_weights[..., None]
            losses += loss.sum(0, dtype=torch.float64)
            by_scores = by_scores.flatten(1)
            by_weights.addmm_(by_scores.T, block)
            by_biases += by_scores.sum(0)
        by_weights, by_biases = by_weights.view(n, k, -1) / self.count, by_biases.view(n, k, 1) / self.count
        if raw:
            by_weights = by_weights - by_biases * self.features.mean
            if self.features.axes is not None:
                by_weights = by_weights @ self.features.axes
        by_weights = by_weights + penalty[:, None, None].float() * scaled[..., :-1]
        gradient = torch.cat([by_weights, by_biases], 2) * scales[:, None, :]
        squares = scaled[..., :-1].flatten(1).square().sum(1, dtype=torch.float64)
        return losses / self.count + penalty * squares / 2, gradient.flatten(1)


def _loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (n, M) and their derivatives (n, M, K) by the scores, accurate near zero too."""
    if targets.ndim == 2:
        signs = (1 - 2 * targets)[:, None, :]  # -1 where the label is present
        signed = scores * signs
        return softplus(signed).sum(2), torch.sigmoid(signed) * signs
    own_class = targets[:, None, None].expand(-1, scores.shape[1], 1)
    above = scores - scores.gather(2, own_class)
    above.scatter_(2, own_class, -torch.inf)
    others = above.logsumexp(2)
    loss = softplus(others)
    by_scores = above.sub_(loss[..., None]).exp_()
    by_scores.scatter_(2, own_class, -torch.sigmoid(others)[..., None])
    return loss, by_scores


def _minimise(
    problem: _Problem, strengths: Tensor, max_iterations: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Run L-BFGS for all C side by side, with separate steps; converged C are left out of further passes."""
    scales, penalty = problem.scales(strengths), problem.penalty(strengths)
    best = problem.start(scales)
    objectives, gradient = problem.evaluate(best, scales, penalty)
    if not bool(objectives.isfinite().all()):
        raise LayertapError("the features are too large to be summed in float32", hint="scale the features")
    first_objectives = objectives.clone()
    iterations = torch.zeros(len(strengths), dtype=torch.int64, device=problem.device)
    converged = torch.zeros(len(strengths), dtype=torch.bool, device=problem.device)
    active = torch.arange(len(strengths), device=problem.device)
    point, value = best.clone(), objectives.clone()
    steps: list[Tensor] = []
    changes: list[Tensor] = []
    for _ in range(max_iterations):
        direction = -_times_inverse_hessian(gradient, steps, changes)
        slope = (direction * gradient).sum(1, dtype=torch.float64)
        # Compare with the gain too: at a small C, it is a small part of the objective, but decides the predictions.
        gained = (first_objectives[active] - value).clamp(min=0)
        done = -slope <= _TOLERANCE * (torch.minimum(value, gained) if steps else 0)
        if bool(done.any()):
            best[active[done]], objectives[active[done]], converged[active[done]] = point[done], value[done], True
            remaining = ~done
            active, point, value, gradient, direction, slope = (
                tensor[remaining] for tensor in (active, point, value, gradient, direction, slope)
            )
            steps = [tensor[remaining] for tensor in steps]
            changes = [tensor[remaining] for tensor in changes]
        if not len(active):
            break
        step = torch.ones_like(slope)
        new_point, new_value, new_gradient, moved = _line_search(
            problem, point, value, direction, slope, step, scales[active], penalty[active]
        )
        iterations[active] += 1
        steps.append(new_point - point)
        changes.append(new_gradient - gradient)
        del steps[:-_HISTORY], changes[:-_HISTORY]
        point, value, gradient = new_point, new_value, new_gradient
        best[active], objectives[active] = point, value
        if not bool(moved.all()):  # rounding is larger than the possible gain
            converged[active[~moved]] = True
            active, point, value, gradient = (tensor[moved] for tensor in (active, point, value, gradient))
            steps = [tensor[moved] for tensor in steps]
            changes = [tensor[moved] for tensor in changes]
        if not len(active):
            break
    weights, biases = problem.solution(best, scales)
    whole = (strengths * problem.count).cpu().numpy()
    return (
        weights.cpu().numpy(), biases.cpu().numpy(), objectives.cpu().numpy() * whole, iterations.cpu().numpy(),
        converged.cpu().numpy(),
    )  # fmt: skip


def _times_inverse_hessian(gradient: Tensor, steps: list[Tensor], changes: list[Tensor]) -> Tensor:
    """Run the two loops of L-BFGS (Nocedal and Wright, algorithm 7.4) for each row separately."""
    if not steps:
        return gradient.clone()
    along = [(step * change).sum(1, keepdim=True) for step, change in zip(steps, changes, strict=True)]
    sizes = [change.square().sum(1, keepdim=True) for change in changes]
    # A step along which the gradient did not grow gives no information about the curvature.
    useful = [a > 1e-10 * size for a, size in zip(along, sizes, strict=True)]
    inverses = [torch.where(use, 1 / a, 0) for a, use in zip(along, useful, strict=True)]
    result, parts = gradient.clone(), []
    for step, change, inverse in zip(reversed(steps), reversed(changes), reversed(inverses), strict=True):
        part = inverse * (step * result).sum(1, keepdim=True)
        result -= part * change
        parts.append(part)
    result *= torch.where(useful[-1], along[-1] / sizes[-1].clamp(min=1e-30), 1)
    for step, change, inverse, part in zip(steps, changes, inverses, reversed(parts), strict=True):
        result += step * (part - inverse * (change * result).sum(1, keepdim=True))
    return result


def _line_search(
    problem: _Problem, point: Tensor, value: Tensor, direction: Tensor, slope: Tensor, step: Tensor, scales: Tensor,
    penalty: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Move each row along its direction by a step that decreases its objective enough.

    Returns:
        the new points, their objectives and gradients, and whether each point has moved.
    """
    new_point = point + step[:, None].float() * direction
    new_value, new_gradient = problem.evaluate(new_point, scales, penalty)
    for shrinks in range(_MOST_SHRINKS + 1):
        short = ~(new_value <= value + _ENOUGH * step * slope + _ROUNDING * value)
        if shrinks == _MOST_SHRINKS or not bool(short.any()):
            break
        # The minimum of the parabola through both values and the slope, kept away from both ends.
        fall = slope[short] * step[short]
        least = -fall / (2 * (new_value[short] - value[short] - fall))
        step[short] *= torch.where(least.isfinite(), least.clamp(0.1, 0.5), 0.1)
        new_point[short] = point[short] + step[short, None].float() * direction[short]
        new_value[short], new_gradient[short] = problem.evaluate(new_point[short], scales[short], penalty[short])
    new_point[short], new_value[short] = point[short], value[short]
    return new_point, new_value, new_gradient, ~short
