"""Findings about what is given to a network: its inputs and labels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from extract.analysis.network.reports import Evidence, Finding
from extract.analysis.network.signal_findings import first_misfit

__all__ = ["broken_inputs", "equal_inputs", "input_scale", "wrong_labels"]

# Inputs normalised by mean and standard deviation have negative values, and a root mean square of about 1.
_NORMALISED_RMS = (0.3, 3.0)
_PIXELS = (100.0, 255.5)  # range of the largest value of 8-bit pixels that are not scaled
_GROWTH_BEFORE = 100.0  # of outputs by inputs; that of layers with usual weights is about 1
_IMAGES_FOR_LABELS = 100
# Predictions of an untrained network are nearly uniform, and nearly the same for all images. A network that gives its
# classes three times the probability of a guess, and half of the classes in turn, has learned.
_SURE, _SURE_AT_MOST, _CLASSES_IN_USE = 3.0, 0.5, 0.5
_CHANCE_DEVIATIONS = 2.0  # standard deviations of the number of right guesses


def broken_inputs(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find inputs with values that are not finite."""
    broken = evidence.inputs.broken
    if not broken:
        return []
    first = evidence.name_of(min(broken))
    return [Finding("not finite", "input", f"{len(broken):,} inputs are not finite, first {first}")]


def equal_inputs(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find that all inputs are the same, which explains channels that look dead, and everything behind them."""
    inputs = evidence.inputs
    if not inputs.equal:
        return []
    value = f", and all values are {inputs.low:.3g}" if inputs.low == inputs.high else ""
    text = f"all {inputs.count:,} inputs are equal{value}: nothing that depends on the input can be judged"
    return [Finding("equal inputs", "input", text, layers=tuple(tensor.name for tensor in evidence.tensors))]


def input_scale(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find inputs on another scale than in training: pixels of 0 to 255, or of 0 to 1 without normalisation.

    The running statistics of the first batch normalisation say what the inputs were in training. Without a batch
    normalisation, only pixels of 0 to 255 that a convolution gets directly are a finding.
    """
    inputs, tensors = evidence.inputs, evidence.tensors
    if "input" in explained or not tensors or len(inputs.shape) != 3:
        return []
    now = f"the inputs have mean {inputs.mean:.3g}, standard deviation {inputs.std:.3g}"
    now = f"{now} and range {inputs.low:.3g} to {inputs.high:.3g}"
    affected = tuple(tensor.name for tensor in tensors)
    normalised = inputs.low < 0 and _NORMALISED_RMS[0] < inputs.rms < _NORMALISED_RMS[1]
    looks_like = ""
    if inputs.low >= 0:
        looks_like = ": they look like pixels that were not normalised"
    if all(tensor.running is None for tensor in tensors):
        pixels = inputs.low >= 0 and _PIXELS[0] < inputs.high <= _PIXELS[1]
        if pixels and tensors[0].type.startswith("Conv"):
            text = f"{now}{looks_like}; networks are usually trained on inputs of mean 0 and standard deviation 1"
            return [Finding("input scale", "input", text, layers=affected)]
        return []
    misfit = first_misfit(tensors)
    if misfit is None or misfit.variance_is_zero or misfit.position != misfit.first_position or normalised:
        return []
    if any(tensor.norm_ratio > _GROWTH_BEFORE for tensor in tensors[: misfit.position]):
        return []  # a layer before the batch normalisation is at fault
    text = (
        f"{now}{looks_like}; the values at {tensors[misfit.position].name} vary {misfit.ratio_in_words} as in training"
    )
    return [Finding("input scale", "input", text, layers=affected)]


def wrong_labels(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find labels that predictions agree with no better than guesses, although the network has learned something."""
    predictions = evidence.predictions
    if predictions is None or "input" in explained:
        return []
    images, classes = int(predictions.labels.sum()), len(predictions.labels)
    if images < _IMAGES_FOR_LABELS or classes < 2:
        return []
    in_use = _effective_number(predictions.predicted)
    sure = predictions.sure / images
    learned = sure >= min(_SURE_AT_MOST, _SURE / classes) and in_use >= _CLASSES_IN_USE * min(
        classes, _effective_number(predictions.labels)
    )
    # Guesses that follow the predicted frequencies, on labels of these frequencies.
    chance = float(predictions.predicted @ predictions.labels) / images**2
    limit = images * chance + _CHANCE_DEVIATIONS * math.sqrt(images * chance * (1 - chance))
    loss, guess = predictions.log_loss / images, math.log(classes)
    if not learned or predictions.right > limit or loss < guess:
        return []
    text = (
        f"the network prefers different classes for different images (mean probability {sure:.0%}), but "
        f"{predictions.right:,} of {images:,} predictions agree with the labels, as guesses would "
        f"({images * chance:.0f}); the cross-entropy is {loss:.3g}, that of guesses {guess:.3g}. "
        "The labels may be shuffled, or numbered in another order"
    )
    return [Finding("labels", "loss", text)]


def _effective_number(counts: NDArray[np.int64]) -> float:
    """Return the exponential of the entropy: the number of classes, if they are equally frequent."""
    shares = counts[counts > 0] / counts.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
