"""Findings about the loss: its labels, and gradients that are too small for an optimizer."""

from __future__ import annotations

import math

from extract.analysis.network.activation_statistics import effective_number
from extract.analysis.network.reports import Evidence, Finding

__all__ = ["probabilities", "tiny_gradients", "unused_targets", "wrong_labels"]

_IMAGES_FOR_LABELS = 100
# Predictions of an untrained network are nearly uniform, and nearly the same for all images. A network has learned if
# it gives three times the probability of a guess to half of the classes in turn, or has trained batch normalisations;
# of more than ten classes, three times for each factor of ten, as the largest of many random outputs is larger. With
# two classes, untrained ones give up to 0.65.
_SURE = 3.0
_SURE_AT_MOST = 0.8
_CLASSES_IN_USE = 0.5
_CHANCE_AT_MOST = 0.6  # if most images are of one class, guesses are right as often as a trained network
_CHANCE_DEVIATIONS = 2.0  # standard deviations of the number of right guesses
_TINY = 1e-8  # gradient divided by weight, and the epsilon of Adam


def probabilities(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find that the loss takes the softmax of outputs that are probabilities already."""
    if not evidence.loss_takes_probabilities:
        return []
    text = "the outputs are probabilities, and cross-entropy takes their softmax again: leave out the model's softmax"
    return [Finding("probabilities", evidence.tensors[-1].name, text)]


def unused_targets(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find that the loss is the same with the targets of other images."""
    if not evidence.loss_ignores_targets:
        return []
    return [Finding("targets", "loss", "the loss is the same with the targets of other images: it does not use them")]


def wrong_labels(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find that the predictions of a trained classifier agree with the labels no better than guesses."""
    predictions = evidence.predictions
    if predictions is None or predictions.images < _IMAGES_FOR_LABELS or evidence.tensors[-1].name in explained:
        return []
    images, classes = predictions.images, len(predictions.labels)
    sure = predictions.sure / images >= min(_SURE_AT_MOST, _SURE ** max(1.0, math.log10(classes)) / classes)
    in_use = effective_number(predictions.predicted) >= _CLASSES_IN_USE * effective_number(predictions.labels)
    normalised = any(tensor.running is not None and not tensor.running.initial for tensor in evidence.tensors)
    # Guesses that follow the predicted frequencies, on labels of these frequencies.
    chance = float(predictions.predicted @ predictions.labels) / images**2
    limit = images * chance + _CHANCE_DEVIATIONS * math.sqrt(images * chance * (1 - chance))
    if chance > _CHANCE_AT_MOST or predictions.right > limit or not (normalised or (sure and in_use)):
        return []
    text = (
        f"{predictions.right:,} of {images:,} predictions agree with the labels, as guesses would "
        f"({images * chance:.0f}): the labels are shuffled or numbered in another order, or the last layer is untrained"
    )
    return [Finding("labels", "loss", text)]


def tiny_gradients(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find that the gradients of all weights are too small for an optimizer."""
    reached = [parameter for parameter in evidence.parameters if parameter.reached and parameter.norm]
    largest = max((parameter.gradient_to_weight for parameter in reached), default=math.inf)
    if evidence.untrained or not 0 < largest < _TINY:
        return []
    text = (
        f"the gradient of each parameter is at most {largest:.1g} times its size; Adam adds an epsilon of 1e-8 to it, "
        "and steps of other optimizers are lost in rounding: the loss is too small"
    )
    return [Finding("vanishing gradients", "loss", text)]
