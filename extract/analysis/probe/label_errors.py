"""Labels that are probably wrong, by the probabilities of probes that have not seen the image.

Confident learning (Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels", 2021).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.logistic import LogisticRegression
from extract.analysis.probe.memory import free_bytes
from extract.analysis.probe.probing import probe_device
from extract.analysis.probe.strength_choice import N_FOLDS, stratified_folds

__all__ = ["confident_classes", "left_out_probabilities"]

# Penalties, from the strongest, which takes the fewest steps. On 6,000 embeddings of CIFAR-10, the protocol `clip` took
# 146 s of CPU, most of it for penalties below 1, which are far from the best; this takes 22 s.
_LAMBDAS = 10 ** np.arange(6, -6.5, -0.5)
_WORSE = 1e-3  # nats per row: once the log loss has grown by this, weaker penalties are not tried
_ROUNDING = 1e-6  # as in cleanlab: a class whose images all have the same probability reaches its threshold


def left_out_probabilities(
    rows: FeatureRows, labels: NDArray[np.int64], images: NDArray[np.int64], seed: int = 0, device: str = "auto"
) -> NDArray[np.float64]:
    """Return the probabilities (N, K) of each row by logistic regression on four fifths of the images, without its own.

    The penalty is the one with the smallest log loss of these probabilities.

    Args:
        rows: (N, D).
        labels: (N,) classes, 0 to K - 1; at least one row.
        images: (N,) number of the image of each row, 0 to I - 1; its rows, which are copies, are left out together.
        seed: seed of the folds.
        device: device to compute on.

    Returns:
        NaN for rows of classes with less than five images: too few to say what the class looks like.
    """
    n_classes = int(labels.max()) + 1
    _, first = np.unique(images, return_index=True)
    n_images = np.bincount(labels[first], minlength=n_classes)
    folds = stratified_folds(labels[first], seed)[images, 0]
    probabilities = np.full((len(labels), n_classes), np.nan)
    judged = (folds >= 0) & (n_images[labels] >= N_FOLDS)  # copies with a rare label are left out, but not judged
    if len(np.unique(labels[judged])) < 2:
        return probabilities
    memory_bytes = free_bytes() // 2
    if rows.nbytes <= memory_bytes // 3:
        rows = rows.held()
    problem = LogisticRegression(rows, labels, n_classes, device=probe_device(device), memory_bytes=memory_bytes)
    least = math.inf
    for penalty in _LAMBDAS:
        (scores,) = problem.left_out_scores([1 / penalty], folds[:, None])
        logits = torch.from_numpy(scores[0, judged].astype(np.float64))
        if logits.shape[1] == 1:  # two classes
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        loss = float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels[judged])))
        if loss < least:
            least, probabilities[judged] = loss, torch.softmax(logits, 1).numpy()
        elif loss > least + _WORSE:
            break
    return probabilities


def confident_classes(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class (N,) that each row confidently belongs to: its label, or another one if the label is suspect.

    A row confidently belongs to the most probable of the classes whose probability is at least the mean of the rows
    with that label. The label of a row without such a class, and the most probable label, are not suspect.

    Args:
        probabilities: (N, K), NaN for rows that are not judged.
        labels: (N,).
    """
    judged = np.flatnonzero(np.isfinite(probabilities).all(1))
    values, its_labels = probabilities[judged], labels[judged]
    thresholds = np.full(values.shape[1], np.inf)
    for label in np.unique(its_labels):
        thresholds[label] = values[its_labels == label, label].mean()
    confident = np.where(values >= thresholds - _ROUNDING, values, -1)
    suspect = (confident.max(1) >= 0) & (values[np.arange(len(judged)), its_labels] < values.max(1))
    classes = labels.copy()
    classes[judged[suspect]] = confident.argmax(1)[suspect]
    return classes
