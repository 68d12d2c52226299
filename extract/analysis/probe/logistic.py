"""Logistic regression with an L2 penalty, for many strengths at once, over rows in memory or in a file.

For each C, minimise the objective of scikit-learn's `LogisticRegression(C=C)` over W (K, D) and b (K,):

    C * sum_i weight_i * loss(W x_i + b, y_i) + |W|^2 / 2

The solver is L-BFGS over all rows (Liu and Nocedal 1989). All C share each pass over the rows, which may be a file
larger than memory. The variables are preconditioned: they lie along the principal axes of the features, each scaled by
the curvature of the objective at the start. Without this, a few axes have all of the curvature, and the solver needs
hundreds of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from extract.analysis.probe.feature_matrix import FeatureRows, moments
from extract.compute.principal_axes import RowBlocks, principal_axes, too_large
from extract.system.torch_state import full_float32, limited_threads

__all__ = ["MAX_ITERATIONS", "Fit", "LogisticRegression"]

# Why not scikit-learn: it fits one C after the other, and stops by the size of the gradient, which is small long before
# the solution if a few axes have most of the variance. At C = 1,000 on 5,000 embeddings of CIFAR-10, its objective was
# three times as large. Warm starts saved a tenth of the steps, a history of 20 to 80 nothing; a looser tolerance for
# strong penalties was 1.7 times faster, and changed accuracy by up to 3 points.

MAX_ITERATIONS = 1000  # from CLIP (appendix A.3) and DINOv2 (eval/log_regression.py)
_TOLERANCE = 1e-6  # stop if the next step promises at most this share of the gain so far
# Separated classes have no optimum without a penalty: on the demo, lambda = 1e-6 took 1,000 iterations (5.1 s of CPU),
# and takes 81 (0.4 s). Against 2,000 iterations, up to 19 of 359 test predictions differ, in both directions. Fits on a
# tenth or a `val` split run to their tolerance: they are compared with scikit-learn to 0.005 of a probability.
_SETTLED_STEPS = 50  # consecutive small steps on separated rows after which predictions have settled
_SMALL_GAIN = 1e-6  # upper limit of the gain of a small step, in nats per row
_HISTORY = 10  # steps used to estimate the curvature, as in scikit-learn
_VECTORS = 4 * _HISTORY + 12  # vectors of variables needed per strength; the history is copied at times
_BLOCK_BYTES = 4 << 20  # of scores computed at once: about the size of a core's cache
_LEAST_ROWS = 512  # in a block; with fewer, reading the weights takes longer than computing with them
_MOST_SHRINKS = 30  # of a step that does not decrease the objective enough
_ENOUGH = 1e-4  # required share of the decrease promised by the slope (Nocedal and Wright, section 3.1)
_ROUNDING = 1e-7  # relative rounding error of the objective in float32
_FLATTEST = 1e-7  # of the largest variance; axes below it are rounding errors and are not stretched further
_WIDEST = 6000  # columns for which principal axes are computed; wider features are scaled column by column
# Multiplications of a pass over the rows for each thread, about 4 ms. On a busy machine of 2 cores, 240 rows took 16 s
# of CPU with two threads, which spun most of the time, and take 1.0 s.
_PER_THREAD = 100_000_000
# Multiplications of a pass over the rows for one C from which the device computes. A step launches about a hundred
# kernels, however small they are: the 150 few-shot problems of 4 to 80 rows took over 100 s on an H200, and take 1 s
# on a CPU. Estimated, not measured: such a pass for 45 C takes 4 ms of 4 cores, as long as the launches.
_ON_GPU_FROM = 10_000_000


@dataclass(frozen=True)
class Fit:
    """Solutions for M values of C.

    Attributes:
        weights: (M, K, D) float32; K is 1 for two classes.
        biases: (M, K) float32.
        objectives: (M,) values of the objective in the module docstring.
        iterations: (M,) numbers of steps.
        converged: (M,) whether the next step promised at most a millionth of the gain so far, or no step along the
            slope gained anything in float32, or predictions had settled.
        separated: (M,) whether all rows are classified correctly, with losses below log 2 in sum. Without a penalty,
            such classes have no optimum: the loss goes to zero as the weights grow (Albert and Anderson 1984).
        deviation: largest standard deviation of the features along an axis.
    """

    weights: NDArray[np.float32]
    biases: NDArray[np.float32]
    objectives: NDArray[np.float64]
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]
    separated: NDArray[np.bool_]
    deviation: float


class LogisticRegression:
    """Logistic regression on a set of rows, whose principal axes are computed once.

    Args:
        rows: (N, D), read again in every pass if they do not fit into memory.
        targets: (N,) int64 classes, or (N, K) float32 of 0 and 1 for labels that do not exclude each other.
        n_classes: K; two classes have one vector of weights, as in scikit-learn.
        sample_weight: (N,) float32; None: all 1.
        device: device to compute on; problems that are too small for a GPU are solved on the CPU.
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
        self._memory_bytes = memory_bytes // 2
        pays = len(rows) * (rows.width + 1) * n_classes >= _ON_GPU_FROM
        self._device = torch.device(device if pays else "cpu")
        if targets.ndim == 1 and n_classes == 2:
            targets = targets[:, None].astype(np.float32)
        self._weight = None if sample_weight is None else torch.from_numpy(sample_weight[:, None]).to(self._device)
        self._targets, self._n_classes = torch.from_numpy(targets).to(self._device), n_classes
        with torch.inference_mode(), full_float32():
            self._features = _rows_along_axes(rows, self._device, self._memory_bytes)

    def fit(self, strengths: Sequence[float], until_settled: bool = False) -> Fit:
        """Minimise the objective for every strength.

        Args:
            strengths: values of C, in any order.
            until_settled: whether to stop on separated rows too, after 50 consecutive steps that gained less than 1e-6
                nats per row each. No row changed its class during these steps; the optimum may be a thousand steps
                away.

        Raises:
            LayertapError: the objective is not finite at the start: the features are too large for float32.
        """
        order = np.argsort(strengths, kind="stable")
        place = np.argsort(order)  # position of each strength among the solved ones
        with torch.inference_mode(), full_float32():
            problem, solved = self._problem(self._weight), []
            for chunk in self._chunks(np.asarray(strengths, np.float64)[order], problem):
                whole = torch.zeros_like(chunk, dtype=torch.int64)
                with limited_threads(problem.threads(len(chunk))):
                    best, scales, *others = _minimise(problem, chunk, whole, until_settled)
                solved.append([tensor.cpu().numpy() for tensor in (*problem.solution(best, scales), *others)])
        weights, biases, objectives, iterations, converged, separated = (
            np.concatenate(column)[place] for column in zip(*solved, strict=True)
        )
        deviation = float(self._features.variances.max()) ** 0.5
        return Fit(weights, biases, objectives, iterations, converged, separated, deviation)

    def left_out_scores(self, strengths: Sequence[float], folds: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
        """Yield for each strength the scores of rows by fits without these rows.

        The axes of the variables, and a scaling, are those of all rows: they do not depend on the targets. The fits
        are those of `fit` with `until_settled`.

        Args:
            strengths: values of C.
            folds: (N, R) numbers 0 to F - 1 of the fold of each row, in R draws; -1: never left out.

        Yields:
            (R, N, K) scores; two classes have one column, and rows with the fold -1 have zeros.
        """
        n_folds, draws = int(folds.max()) + 1, folds.shape[1]
        fold_of = torch.from_numpy(folds).to(self._device)
        fitted = torch.cat([fold_of != number for number in range(n_folds)], 1)  # (N, F * R): the draw varies fastest
        weights = fitted.float() if self._weight is None else fitted * self._weight
        with torch.inference_mode(), full_float32():
            problem = self._problem(weights)
            for chunk in self._chunks(np.asarray(strengths, np.float64), problem, n_folds * draws, draws):
                fold = torch.arange(n_folds * draws, device=self._device).repeat(len(chunk))
                fits = chunk.repeat_interleave(n_folds * draws)
                with limited_threads(problem.threads(len(fits))):
                    best, scales, *_ = _minimise(problem, fits, fold, until_settled=True)
                scores = problem.left_out_scores(best, scales, fold_of, n_folds)
                yield from scores.cpu().numpy()

    def _problem(self, weights: Tensor | None) -> _Problem:
        return _Problem(self._features, self._targets, self._n_classes, weights)

    def _chunks(
        self, strengths: NDArray[np.float64], problem: _Problem, n_fits: int = 1, n_kept: int = 0
    ) -> Iterator[Tensor]:
        """Yield the strengths that are fitted side by side, each `n_fits` times; `n_kept` scores of a row are kept."""
        scores = _LEAST_ROWS * problem.n_outputs * 4 * 4  # four arrays of scores are held at a time
        kept = n_kept * problem.count * problem.n_outputs * 4
        at_once = max(1, self._memory_bytes // (n_fits * (4 * problem.n_variables * _VECTORS + scores) + kept))
        for first in range(0, len(strengths), at_once):
            yield torch.from_numpy(strengths[first : first + at_once]).to(self._device)


class _Problem:
    """The objective of each C, divided by C and N, in scaled variables.

    Rows may have several columns of weights (N, F), one for each set of rows to fit on; M fits are then described by M
    values of C and M columns.

    The variables of one C are a row of K * (R + 1) values: Z (K, R) and c (K, 1). With the scales s (R + 1,) of that
    C, W = (Z * s) along the axes, and the bias at the mean of the features is c * s.
    """

    def __init__(self, features: _RowsAlongAxes, targets: Tensor, n_classes: int, weights: Tensor | None):
        self.features, self.targets, self.weights = features, targets, weights
        self.device, self.count = targets.device, features.count
        self.n_outputs = n_classes if targets.ndim == 1 else targets.shape[1]
        self.n_variables = self.n_outputs * (len(features.variances) + 1)
        # Curvature of softmax at equal scores, or of the logistic function at 0, times the mean weight of a row.
        outputs = n_classes if targets.ndim == 1 else 2
        mean_weight = 1.0 if weights is None else float(weights.mean())
        self.least_weight = 1.0 if weights is None else float(weights[weights > 0].min())
        self.curvature = mean_weight * (1 - 1 / outputs) / outputs

    def threads(self, n_fits: int) -> int:
        """Return the number of threads that pay for so many fits side by side."""
        return self.count * self.n_variables * n_fits // _PER_THREAD

    def penalty(self, strengths: Tensor) -> Tensor:
        """Return the factors (M,) float64 of |W|^2 / 2."""
        return 1 / (strengths * self.count)

    def scales(self, strengths: Tensor) -> Tensor:
        """Return (M, R + 1): one over the square root of the curvature along each axis, and of the bias."""
        along_axes = self.curvature * self.features.variances + self.penalty(strengths)[:, None].float()
        bias = torch.full((len(strengths), 1), self.curvature, device=self.device)
        return torch.cat([along_axes, bias], 1).rsqrt()

    def start(self, scales: Tensor, fold: Tensor) -> Tensor:
        """Return the start (M, V): zero weights, and the biases that fit best with them, smoothed by half a row."""
        each = torch.ones(self.count, 1, device=self.device) if self.weights is None else self.weights
        if self.targets.ndim == 1:
            counts = torch.zeros(self.n_outputs, each.shape[1], device=self.device).index_add_(0, self.targets, each)
            bias = (counts + 0.5).log()
            bias = bias - bias.mean(0)
        else:
            ones = self.targets.T @ each
            bias = ((ones + 0.5) / (each.sum(0) - ones + 0.5)).log()
        variables = torch.zeros(len(scales), self.n_outputs, scales.shape[1], device=self.device)
        variables[..., -1] = bias.T[fold] / scales[:, -1:]
        return variables.flatten(1)

    def left_out_scores(self, variables: Tensor, scales: Tensor, folds: Tensor, n_folds: int) -> Tensor:
        """Return the scores (S, R, N, K) of each row by the fit without its fold; see `LogisticRegression`."""
        draws, k = folds.shape[1], self.n_outputs
        flat, shift = self._weights_and_biases(variables, scales)
        flat, shift = flat.flatten(0, 1), shift.flatten()
        n_strengths = len(variables) // (n_folds * draws)
        result = torch.zeros(n_strengths, draws, self.count, k, device=self.device)
        for start, block in self.features.blocks(_LEAST_ROWS):
            scores = torch.addmm(shift, block, flat.T).view(-1, n_strengths, n_folds, draws, k)
            own = folds[start : start + len(block)]
            index = own.clamp(min=0)[:, None, None, :, None].expand(-1, n_strengths, 1, -1, k)
            own_scores = scores.gather(2, index)[:, :, 0] * (own >= 0)[:, None, :, None]
            result[:, :, start : start + len(block)] = own_scores.permute(1, 2, 0, 3)
        return result

    def solution(self, variables: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (M, K, D) and biases (M, K) for the features as given."""
        weights, biases = self._scaled(variables, scales)
        weights = self.features.along(weights)
        return weights, biases - (weights.double() @ self.features.mean.double()).float()

    def separates(self, variables: Tensor, objectives: Tensor, scales: Tensor, penalty: Tensor) -> Tensor:
        """Return whether (M,) the losses of all rows add up to less than log 2, the loss of a row on the boundary."""
        weights, _ = self._scaled(variables, scales)
        losses = objectives - penalty * weights.flatten(1).square().sum(1, dtype=torch.float64) / 2
        return losses * self.count < math.log(2) * self.least_weight

    def _scaled(self, variables: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (M, K, R) along the axes, and biases (M, K) at the mean of the features."""
        scaled = variables.view(len(variables), self.n_outputs, -1) * scales[:, None, :]
        return scaled[..., :-1], scaled[..., -1]

    def _weights_and_biases(self, variables: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (M, K, R or D) and biases (M, K) for the blocks of the features."""
        weights, biases = self._scaled(variables, scales)
        if self.features.held is not None:
            return weights, biases
        weights = self.features.along(weights)
        return weights, biases - weights @ self.features.mean

    def evaluate(self, variables: Tensor, scales: Tensor, penalty: Tensor, fold: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the objectives (M,) float64 and their gradients (M, V) in one pass over the rows."""
        n, k = len(variables), self.n_outputs
        along_axes, _ = self._scaled(variables, scales)
        weights, biases = self._weights_and_biases(variables, scales)
        flat, shift = weights.flatten(0, 1), biases.flatten()
        losses = torch.zeros(n, dtype=torch.float64, device=self.device)
        by_weights, by_biases = torch.zeros_like(flat), torch.zeros_like(shift)
        size = max(_LEAST_ROWS, _BLOCK_BYTES // (4 * max(n * k, flat.shape[1] // 4)))
        for start, block in self.features.blocks(size):
            stop = start + len(block)
            scores = torch.addmm(shift, block, flat.T).view(-1, n, k)
            loss, by_scores = _loss(scores, self.targets[start:stop])
            if self.weights is not None:
                row_weights = self.weights[start:stop, fold]
                loss, by_scores = loss * row_weights, by_scores * row_weights[..., None]
            losses += loss.sum(0, dtype=torch.float64)
            by_scores = by_scores.flatten(1)
            by_weights.addmm_(by_scores.T, block)
            by_biases += by_scores.sum(0)
        by_weights, by_biases = by_weights.view(n, k, -1) / self.count, by_biases.view(n, k, 1) / self.count
        if self.features.held is None:
            by_weights = by_weights - by_biases * self.features.mean
            if self.features.axes is not None:
                by_weights = by_weights @ self.features.axes.T
        by_weights = by_weights + penalty[:, None, None].float() * along_axes
        gradient = torch.cat([by_weights, by_biases], 2) * scales[:, None, :]
        squares = along_axes.flatten(1).square().sum(1, dtype=torch.float64)
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


def _minimise(problem: _Problem, strengths: Tensor, fold: Tensor, until_settled: bool) -> tuple[Tensor, ...]:
    """Run L-BFGS for all fits side by side, with separate steps; converged fits are left out of further passes.

    Args:
        problem: the objective.
        strengths: (M,) values of C.
        fold: (M,) columns of the weights of rows.
        until_settled: see `LogisticRegression.fit`.

    Returns:
        variables (M, V), their scales (M, R + 1), and the other arrays of `Fit`.
    """
    scales, penalty = problem.scales(strengths), problem.penalty(strengths)
    best = problem.start(scales, fold)
    objectives, gradient = problem.evaluate(best, scales, penalty, fold)
    if not bool(objectives.isfinite().all()):
        raise too_large()
    first_objectives = objectives.clone()
    iterations = torch.zeros(len(strengths), dtype=torch.int64, device=problem.device)
    converged = torch.zeros(len(strengths), dtype=torch.bool, device=problem.device)
    settled = torch.zeros_like(iterations)  # small steps in a row on separated classes
    active = torch.arange(len(strengths), device=problem.device)
    point, value = best.clone(), objectives.clone()
    steps: list[Tensor] = []
    changes: list[Tensor] = []
    for _ in range(MAX_ITERATIONS):
        direction = -_times_inverse_hessian(gradient, steps, changes)
        slope = (direction * gradient).sum(1, dtype=torch.float64)
        # Compare with the gain too: at a small C, it is a small part of the objective, but decides the predictions.
        gained = (first_objectives[active] - value).clamp(min=0)
        done = -slope <= _TOLERANCE * (torch.minimum(value, gained) if steps else 0)
        done |= settled[active] >= _SETTLED_STEPS
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
        new_point, new_value, new_gradient, moved = _line_search(
            problem, point, value, direction, slope, scales[active], penalty[active], fold[active]
        )
        iterations[active] += 1
        small = value - new_value < _SMALL_GAIN
        if until_settled and bool(small.any()):
            small &= problem.separates(new_point, new_value, scales[active], penalty[active])
            settled[active] = torch.where(small, settled[active] + 1, 0)
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
    whole = objectives * strengths * problem.count
    return best, scales, whole, iterations, converged, problem.separates(best, objectives, scales, penalty)


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
    problem: _Problem, point: Tensor, value: Tensor, direction: Tensor, slope: Tensor, scales: Tensor, penalty: Tensor,
    fold: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Move each row along its direction by a step that decreases its objective enough.

    Returns:
        the new points, their objectives and gradients, and whether each point has moved.
    """
    step = torch.ones_like(slope)
    new_point = point + direction
    new_value, new_gradient = problem.evaluate(new_point, scales, penalty, fold)
    for shrinks in range(_MOST_SHRINKS + 1):
        short = ~(new_value <= value + _ENOUGH * step * slope + _ROUNDING * value)
        if shrinks == _MOST_SHRINKS or not bool(short.any()):
            break
        # The minimum of the parabola through both values and the slope, kept away from both ends.
        fall = slope[short] * step[short]
        least = -fall / (2 * (new_value[short] - value[short] - fall))
        step[short] *= torch.where(least.isfinite(), least.clamp(0.1, 0.5), 0.1)
        new_point[short] = point[short] + step[short, None].float() * direction[short]
        new_value[short], new_gradient[short] = problem.evaluate(
            new_point[short], scales[short], penalty[short], fold[short]
        )
    new_point[short], new_value[short] = point[short], value[short]
    return new_point, new_value, new_gradient, ~short


@dataclass(frozen=True)
class _RowsAlongAxes:
    """The rows, and the axes along which the variables lie.

    Attributes:
        rows: (N, D) rows to read in every pass; None if they are held.
        held: (N, R) centred rows along the axes; None if they do not fit into memory or have no principal axes.
        mean: (D,) of the rows.
        axes: (R, D) orthonormal principal axes; None: the columns.
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
        return weights if self.axes is None else weights @ self.axes


def _rows_along_axes(rows: FeatureRows, device: torch.device, memory_bytes: int) -> _RowsAlongAxes:
    """Compute the principal axes of rows, and hold the rows along them if they fit.

    Args:
        rows: (N, D).
        device: device to compute on.
        memory_bytes: limit for the held rows.

    Raises:
        LayertapError: the features are too large for float32.
    """
    count, width = len(rows), rows.width
    are_held = 4 * count * min(count, width) <= memory_bytes
    source: Tensor | RowBlocks = rows
    if count < width and are_held and 4 * rows.nbytes <= memory_bytes:
        source = torch.from_numpy(rows.array())
    elif width > _WIDEST:
        mean, variances = (torch.from_numpy(values).float().to(device) for values in moments(rows))
        return _RowsAlongAxes(rows, None, mean, None, _with_floor(variances), count)
    fitted = principal_axes(source, device=device)
    varying = fitted.squares > 0
    varying[0] = True  # all rows are equal
    mean, axes, variances = fitted.mean.float(), fitted.axes[varying], _with_floor(fitted.squares[varying] / count)
    if not are_held:
        return _RowsAlongAxes(rows, None, mean, axes, variances, count)
    held = torch.empty(count, len(axes), device=device)
    for start, array in rows.blocks():
        held[start : start + len(array)] = (torch.from_numpy(array).to(device) - mean) @ axes.T
    return _RowsAlongAxes(None, held, mean, axes, variances, count)


def _with_floor(variances: Tensor) -> Tensor:
    return torch.maximum(variances, _FLATTEST * variances.max()).float()
