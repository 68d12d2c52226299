"""Logistic regression with an L2 penalty, for many strengths at once, over rows in memory or in a file.

For each C, minimise the objective of scikit-learn's `LogisticRegression(C=C)` over W (K, D) and b (K,):

    C * sum_i weight_i * loss(W x_i + b, y_i) + |W|^2 / 2

The solver is L-BFGS over all rows (Liu and Nocedal 1989). All C share each pass over the rows, which may be a file
larger than memory. The variables are preconditioned: they lie along the principal axes of the features, each scaled by
the curvature of the objective at the start. Without this, a few axes have all of the curvature, and the solver needs
hundreds of steps. The scales are chosen again where the losses become small; the solution goes on with the first ones.
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
from torch.nn.functional import pad, softplus

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
_MOST_DONE = 0.125  # share of converged fits that are evaluated still: leaving fits out copies the history
_HISTORY = 10  # steps used to estimate the curvature, as in scikit-learn
# Multiplications of a pass up to which a problem is solved in double precision, which costs such a problem nothing. In
# float32, an almost separated fit of 60 rows and 33 variables took 5,000 passes instead of 300: its directions and
# objectives were rounding errors.
_IN_DOUBLE_TO = 200_000
_VECTORS = 4 * _HISTORY + 12  # vectors of variables needed per strength; the history is copied at times
_BLOCK_BYTES = 4 << 20  # of scores computed at once: about the size of a core's cache
_LEAST_ROWS = 512  # in a block; with fewer, reading the weights takes longer than computing with them
_MOST_SHRINKS = 30  # of a step that does not decrease the objective enough
_ENOUGH = 1e-4  # required share of the decrease promised by the slope (Nocedal and Wright, section 3.1)
_ROUNDING = 1e-7  # relative rounding error of the objective in float32
_FLATTEST = 1e-7  # of the largest variance; axes below it are rounding errors and are not stretched further
# Where nearly all rows have small losses, the curvature of the losses has vanished, and the penalty has most of what is
# left: axes should hardly be stretched. With the scales of the start, 45 strengths on 4,500 embeddings of CIFAR-10
# took 3.5 times as long, and the weakest penalties ended 0.6 % above the objective, after 1,000 steps.
_SMALL_LOSS = 0.01  # of the loss at the start, which is small itself where nearly all rows have one label
# Flat scales alone, by the largest variance alone, stopped at twice the objective beside a column times 10,000: what
# they find goes on with the scales of the start, and an axis far larger than the others does not decide.
_FLATTEST_AT_SMALL_LOSS = 0.1  # of the largest variance, and at most
_FLATTEST_OF_MEDIAN = 10.0
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
    """

    weights: NDArray[np.float32]
    biases: NDArray[np.float32]
    objectives: NDArray[np.float64]
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]
    separated: NDArray[np.bool_]


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

    Attributes:
        deviation: largest standard deviation of the features along an axis.
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
            in_double = len(rows) * (min(len(rows), rows.width) + 1) * n_classes <= _IN_DOUBLE_TO
            dtype = torch.float64 if in_double else torch.float32
            self._features = _rows_along_axes(rows, self._device, self._memory_bytes, dtype)
            self.deviation = float(self._features.variances.max()) ** 0.5

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
            problem, solved = _Problem(self._features, self._targets, self._n_classes, self._weight), []
            for chunk in self._chunks(np.asarray(strengths, np.float64)[order], problem):
                whole = torch.zeros_like(chunk, dtype=torch.int64)
                with limited_threads(problem.threads(len(chunk))):
                    best, scales, *others = _minimise(problem, chunk, whole, until_settled)
                solution = (part.float() for part in problem.solution(best, scales))
                solved.append([tensor.cpu().numpy() for tensor in (*solution, *others)])
        return Fit(*(np.concatenate(column)[place] for column in zip(*solved, strict=True)))

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
            problem = _Problem(self._features, self._targets, self._n_classes, weights)
            for chunk in self._chunks(np.asarray(strengths, np.float64), problem, n_folds * draws, draws):
                fold = torch.arange(n_folds * draws, device=self._device).repeat(len(chunk))
                fits = chunk.repeat_interleave(n_folds * draws)
                with limited_threads(problem.threads(len(fits))):
                    best, scales, *_ = _minimise(problem, fits, fold, until_settled=True)
                scores = problem.left_out_scores(best, scales, fold_of, n_folds)
                yield from scores.cpu().numpy()

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
        self.device, self.count, self.dtype = targets.device, len(features.rows), features.variances.dtype
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

    def scales(self, strengths: Tensor, is_flat: bool = False) -> Tensor:
        """Return (M, R + 1): one over the square root of the curvature along each axis, and of the bias.

        Args:
            strengths: (M,) values of C.
            is_flat: whether axes of small variance are stretched less; see `_SMALL_LOSS`.
        """
        variances = self.features.variances
        if is_flat:
            largest, median = float(variances.max()), float(variances.median())
            variances = variances.clamp(min=min(_FLATTEST_AT_SMALL_LOSS * largest, _FLATTEST_OF_MEDIAN * median))
        along_axes = self.curvature * variances + self.penalty(strengths)[:, None].to(self.dtype)
        bias = along_axes.new_full((len(strengths), 1), self.curvature)
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
        variables = scales.new_zeros(len(scales), self.n_outputs, scales.shape[1])
        variables[..., -1] = bias.T[fold] / scales[:, -1:]
        return variables.flatten(1)

    def left_out_scores(self, variables: Tensor, scales: Tensor, folds: Tensor, n_folds: int) -> Tensor:
        """Return the scores (S, R, N, K) of each row by the fit without its fold; see `LogisticRegression`."""
        draws, k = folds.shape[1], self.n_outputs
        flat = self.features.for_blocks(self._scaled(variables, scales)).flatten(0, 1)
        n_strengths = len(variables) // (n_folds * draws)
        result = torch.zeros(n_strengths, draws, self.count, k, device=self.device)
        for start, block in self.features.blocks(_LEAST_ROWS):
            scores = (block @ flat.T).view(-1, n_strengths, n_folds, draws, k)
            own = folds[start : start + len(block)]
            index = own.clamp(min=0)[:, None, None, :, None].expand(-1, n_strengths, 1, -1, k)
            own_scores = scores.gather(2, index)[:, :, 0] * (own >= 0)[:, None, :, None]
            result[:, :, start : start + len(block)] = own_scores.permute(1, 2, 0, 3)
        return result

    def solution(self, variables: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (M, K, D) and biases (M, K) for the features as given."""
        scaled = self._scaled(variables, scales)
        weights = self.features.along(scaled[..., :-1])
        return weights, scaled[..., -1] - (weights.double() @ self.features.mean.double()).to(self.dtype)

    def separates(self, losses: Tensor) -> Tensor:
        """Return whether (M,) the losses of all rows add up to less than log 2, the loss of a row on the boundary."""
        return losses * self.count < math.log(2) * self.least_weight

    def _scaled(self, variables: Tensor, scales: Tensor) -> Tensor:
        """Return (M, K, R + 1): weights along the axes, and biases at the mean of the features."""
        return variables.view(len(variables), self.n_outputs, -1) * scales[:, None, :]

    def evaluate(self, variables: Tensor, scales: Tensor, penalty: Tensor, fold: Tensor) -> tuple[Tensor, ...]:
        """Compute in one pass over the rows the objectives and their mean losses (M,) float64, and gradients (M, V)."""
        n, k = len(variables), self.n_outputs
        scaled = self._scaled(variables, scales)
        flat = self.features.for_blocks(scaled).flatten(0, 1)
        losses = torch.zeros(n, dtype=torch.float64, device=self.device)
        by_flat = torch.zeros_like(flat)
        size = max(_LEAST_ROWS, _BLOCK_BYTES // (4 * max(n * k, flat.shape[1] // 4)))
        for start, block in self.features.blocks(size):
            stop = start + len(block)
            loss, by_scores = _loss((block @ flat.T).view(-1, n, k), self.targets[start:stop])
            if self.weights is not None:
                row_weights = self.weights[start:stop, fold]
                loss, by_scores = loss * row_weights, by_scores.mul_(row_weights[..., None])
            losses += loss.sum(0, dtype=torch.float64)
            by_flat.addmm_(by_scores.flatten(1).T, block)
        losses /= self.count
        gradient = self.features.from_blocks(by_flat.view(n, k, -1)).div_(self.count)
        scaled[..., -1] = 0  # the bias has no penalty
        gradient = gradient.addcmul_(scaled, penalty[:, None, None].to(self.dtype)).mul_(scales[:, None, :])
        squares = torch.linalg.vector_norm(scaled.flatten(1), dim=1, dtype=torch.float64).square()
        return losses + penalty * squares / 2, losses, gradient.flatten(1)


def _loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (n, M) and their derivatives (n, M, K) by the scores, accurate near zero too."""
    if targets.ndim == 2:
        signs = (1 - 2 * targets)[:, None, :]  # -1 where the label is present
        signed = scores * signs
        return softplus(signed).sum(2), torch.sigmoid(signed) * signs
    own_class = targets[:, None, None].expand(-1, scores.shape[1], 1)
    largest = scores.amax(2, keepdim=True)
    below = largest - scores.gather(2, own_class)
    parts = scores.sub_(largest).exp_()
    own = parts.gather(2, own_class)
    others = parts.scatter_(2, own_class, 0).sum(2, keepdim=True)
    # If the own class is the largest, `own` is exactly 1, and a small sum of the others is not rounded.
    loss = below + ((own - 1) + others).log1p()
    by_scores = parts.scatter_(2, own_class, -others).div_(own + others)
    return loss[..., 0], by_scores


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
    all_scales, penalty = problem.scales(strengths), problem.penalty(strengths)
    scales, point = all_scales, problem.start(all_scales, fold)
    value, loss, gradient = problem.evaluate(point, scales, penalty, fold)
    if not bool(value.isfinite().all()):
        raise too_large()
    active = torch.arange(len(strengths), device=problem.device)
    iterations, settled = torch.zeros_like(active), torch.zeros_like(active)  # settled: small steps in a row
    first, first_loss, done = value, loss, torch.zeros_like(active, dtype=torch.bool)
    rescaled, changes = torch.full_like(active, -_HISTORY), torch.zeros_like(active)  # of the scales: when, how often
    results = [part.clone() for part in (point, value, loss, iterations, done)]
    curvature = _Curvature(point)
    for number in range(MAX_ITERATIONS + 1):
        direction = curvature.direction(gradient)
        slope = (direction * gradient).sum(1, dtype=torch.float64)
        # Compare with the gain too: at a small C, it is a small part of the objective, but decides the predictions.
        promised = _TOLERANCE * torch.minimum(value, (first - value).clamp(min=0))
        knows_curvature = number - rescaled > _HISTORY // 2  # without earlier steps, a short slope tells nothing
        done |= ((-slope <= promised * (number > 0)) & knows_curvature) | (settled >= _SETTLED_STEPS)
        to_flat = (changes == 0) & ~done & (loss < _SMALL_LOSS * first_loss) & (number >= _HISTORY)
        to_first = (changes == 1) & done & (settled < _SETTLED_STEPS)
        if bool((changing := to_flat | to_first).any()):
            changes, done = changes + changing.long(), done & ~changing
            rescaled[changing] = number
            flat, start = problem.scales(strengths[active], is_flat=True), problem.scales(strengths[active])
            chosen = flat.where(to_flat[:, None], start).where(changing[:, None], scales)
            ratio = (scales / chosen).repeat(1, problem.n_outputs)
            point, gradient, scales = point * ratio, gradient / ratio, chosen
            all_scales[active] = scales
            curvature.forget(changing)
            direction = curvature.direction(gradient)
            slope = (direction * gradient).sum(1, dtype=torch.float64)
        n_done = int(done.sum())
        if n_done > _MOST_DONE * len(done) or number == MAX_ITERATIONS:
            for whole, part in zip(results, (point, value, loss, iterations, done), strict=True):
                whole[active] = part
            if n_done == len(done) or number == MAX_ITERATIONS:
                break
            left = ~done
            curvature.keep(left)
            active, first, first_loss, settled, iterations, done, rescaled, changes = (
                tensor[left] for tensor in (active, first, first_loss, settled, iterations, done, rescaled, changes)
            )
            scales, penalty, fold, point, value, loss, gradient, direction, slope = (
                tensor[left] for tensor in (scales, penalty, fold, point, value, loss, gradient, direction, slope)
            )
        direction, slope = direction.masked_fill_(done[:, None], 0), slope.masked_fill(done, 0)
        how = (scales, penalty, fold)
        step, found, moved = _line_search(problem, point, (value, loss, gradient), direction, slope, how)
        new_value, loss, new_gradient = found
        iterations += ~done
        if until_settled:
            small = (value - new_value < _SMALL_GAIN) & problem.separates(loss)
            settled = (settled + 1) * small
        done |= ~moved  # rounding is larger than the possible gain
        curvature.add(step, new_gradient - gradient)
        point, value, gradient = point + step, new_value, new_gradient
    best, objectives, losses, iterations, converged = results
    return best, all_scales, objectives * strengths * problem.count, iterations, converged, problem.separates(losses)


class _Curvature:
    """The inverse Hessian of M fits by their last steps, in the compact form of Byrd, Nocedal and Schnabel (1994).

    It equals the two loops of L-BFGS, and reads the steps twice instead of four times.
    """

    def __init__(self, point: Tensor):
        fits, n = point.shape
        self._used, self._last = 0, -1
        # A ring of steps and changes of the gradient, and the products of both with the changes.
        self._vectors = point.new_empty(fits, _HISTORY, 2, n)
        self._products = point.new_zeros(fits, 2, _HISTORY, _HISTORY, dtype=torch.float64)
        self._scale = point.new_ones(fits, 1)

    def keep(self, chosen: Tensor) -> None:
        """Leave out other fits."""
        self._vectors, self._products, self._scale = (
            tensor[chosen] for tensor in (self._vectors, self._products, self._scale)
        )

    def add(self, step: Tensor, change: Tensor) -> None:
        """Add a step (M, V), and the change of the gradient along it, in place of the oldest one."""
        along, size = torch.linalg.vecdot(step, change), torch.linalg.vecdot(change, change)
        # A step along which the gradient did not grow gives no information about the curvature.
        useful = (along > 1e-10 * size)[:, None]
        self._last = (self._last + 1) % _HISTORY
        self._used = max(self._used, self._last + 1)
        torch.mul(step, useful, out=self._vectors[:, self._last, 0])
        torch.mul(change, useful, out=self._vectors[:, self._last, 1])
        self._scale = torch.where(useful, (along / size)[:, None], self._scale)

    def forget(self, chosen: Tensor) -> None:
        """Leave out all steps of some fits."""
        self._vectors[chosen], self._products[chosen], self._scale[chosen] = 0, 0, 1

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the negative product (M, V) of the inverse Hessian and the gradient."""
        used = self._used
        if not used:
            return -gradient
        vectors = self._vectors[:, :used].flatten(1, 2)
        both = torch.stack([self._vectors[:, self._last, 1], gradient], 1) @ vectors.mT
        both = both.double().view(-1, 2, used, 2).transpose(2, 3)  # (M, change and gradient, steps and changes, used)
        self._products[:, :, :used, self._last] = both[:, 0]
        self._products[:, 1, self._last, :used] = both[:, 0, 1]
        shift = -(self._last + 1) % used  # puts the oldest step first
        products = self._products[:, :, :used, :used].roll((shift, shift), (2, 3))
        by_steps, by_changes = both[:, 1].roll(shift, 2).unbind(1)
        curved = products[:, 0].diagonal(dim1=1, dim2=2)
        upper = products[:, 0].triu() + torch.diag_embed((curved == 0).double())
        scale = self._scale.double()
        along = torch.linalg.solve_triangular(upper, by_steps[..., None], upper=True)
        rest = curved * along[..., 0] + scale * ((products[:, 1] @ along)[..., 0] - by_changes)
        of_steps = torch.linalg.solve_triangular(upper.mT, rest[..., None], upper=False)[..., 0]
        shares = torch.stack([of_steps, -scale * along[..., 0]], 2).roll(-shift, 1).flatten(1)
        scaled = gradient[:, None] * self._scale[..., None]
        return torch.baddbmm(scaled, shares[:, None].to(gradient.dtype), vectors)[:, 0].neg_()


def _line_search(
    problem: _Problem, point: Tensor, before: Sequence[Tensor], direction: Tensor, slope: Tensor, how: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Find for each row a step along its direction that decreases its objective enough.

    Args:
        problem: the objective.
        point: (M, V) variables.
        before: what `evaluate` returns there.
        direction: (M, V), changed in place.
        slope: (M,) derivative of the objective along the direction.
        how: further arguments of `evaluate`.

    Returns:
        the steps (M, V); the objectives, losses and gradients there; and whether each row moves.
    """
    length, value = torch.ones_like(slope), before[0]
    found = list(problem.evaluate(point + direction, *how))
    for shrinks in range(_MOST_SHRINKS + 1):
        short = ~(found[0] <= value + _ENOUGH * length * slope + _ROUNDING * value) & (slope < 0)
        rows = short.nonzero()[:, 0]
        if not len(rows):
            break
        if shrinks == _MOST_SHRINKS:
            direction[rows] = 0
            for now, values in zip(found, before, strict=True):
                now[rows] = values[rows]
            break
        # The minimum of the parabola through both values and the slope, kept away from both ends.
        fall = slope[rows] * length[rows]
        least = -fall / (2 * (found[0][rows] - value[rows] - fall))
        factor = torch.where(least.isfinite(), least.clamp(0.1, 0.5), 0.1)
        length[rows] *= factor
        direction[rows] *= factor[:, None].to(direction.dtype)
        again = problem.evaluate(point[rows] + direction[rows], *(part[rows] for part in how))
        for now, values in zip(found, again, strict=True):
            now[rows] = values
    return direction, found, ~short


@dataclass(frozen=True)
class _RowsAlongAxes:
    """The rows, and the axes along which the variables lie.

    Attributes:
        rows: (N, R + 1) centred rows along the axes, and ones; of rows that do not fit into memory or have no principal
            axes, (N, D) rows to read in every pass.
        mean: (D,) of the rows.
        axes: (R, D) orthonormal principal axes; None: the columns.
        variances: (R,) of the rows along the axes, at least 1e-7 of the largest.
    """

    rows: FeatureRows | Tensor
    mean: Tensor
    axes: Tensor | None
    variances: Tensor

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, block) over all rows; a block has a column of ones after the R axes, or D columns."""
        if isinstance(self.rows, Tensor):
            for start in range(0, len(self.rows), size):
                yield start, self.rows[start : start + size]
        else:
            for first, array in self.rows.blocks():  # read large blocks, compute on small ones
                block = torch.from_numpy(array).to(self.mean.device)
                for start in range(0, len(block), size):
                    yield first + start, pad(block[start : start + size], (0, 1), value=1.0)

    def for_blocks(self, scaled: Tensor) -> Tensor:
        """Convert weights along the axes and biases (..., R + 1) to those for the columns of blocks."""
        if isinstance(self.rows, Tensor):
            return scaled
        weights = self.along(scaled[..., :-1])
        return torch.cat([weights, scaled[..., -1:] - weights @ self.mean[:, None]], -1)

    def from_blocks(self, by_columns: Tensor) -> Tensor:
        """Convert derivatives by the result of `for_blocks` to derivatives by its argument."""
        if isinstance(self.rows, Tensor):
            return by_columns
        by_biases = by_columns[..., -1:]
        by_weights = by_columns[..., :-1] - by_biases * self.mean
        return torch.cat([by_weights if self.axes is None else by_weights @ self.axes.T, by_biases], -1)

    def along(self, weights: Tensor) -> Tensor:
        """Convert weights along the axes (..., R) to weights of the columns (..., D)."""
        return weights if self.axes is None else weights @ self.axes


def _rows_along_axes(rows: FeatureRows, device: torch.device, memory_bytes: int, dtype: torch.dtype) -> _RowsAlongAxes:
    """Compute the principal axes of rows, and hold the rows along them if they fit.

    Args:
        rows: (N, D).
        device: device to compute on.
        memory_bytes: limit for the held rows.
        dtype: type of the held rows, and of the variables.

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
        return _RowsAlongAxes(rows, mean, None, _with_floor(variances))
    fitted = principal_axes(source, device=device)
    varying = fitted.squares > 0
    varying[0] = True  # all rows are equal
    mean, axes, variances = fitted.mean.float(), fitted.axes[varying], _with_floor(fitted.squares[varying] / count)
    if not are_held:
        return _RowsAlongAxes(rows, mean, axes, variances)
    mean, axes, variances = mean.to(dtype), axes.to(dtype), variances.to(dtype)
    held = torch.ones(count, len(axes) + 1, device=device, dtype=dtype)
    for start, array in rows.blocks():
        held[start : start + len(array), :-1] = (torch.from_numpy(array).to(device) - mean) @ axes.T
    return _RowsAlongAxes(held, mean, axes, variances)


def _with_floor(variances: Tensor) -> Tensor:
    return torch.maximum(variances, _FLATTEST * variances.max()).float()
