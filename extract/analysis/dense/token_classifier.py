"""A classifier of single tokens, fitted by a protocol for rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from extract.analysis.dense.dense_probe import DenseProbe
from extract.analysis.dense.token_images import held, token_numbers
from extract.analysis.probe.protocols import PROTOCOLS, Fitted, Labelled, Settings
from extract.errors import InputError

__all__ = ["fit_token_classifier", "with_validation"]

_MOST_TOKENS = 500_000  # that a classifier is fitted on


def with_validation(
    train: NDArray[np.int64], val: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return the images to fit on, the images for choosing the strength, and what these are, in words.

    Raises:
        InputError: a single training image leaves none for choosing.
    """
    if len(val):
        return train, val, "validation images"
    if len(train) < 2:
        raise InputError("a single training image leaves none for choosing the strength; expected at least two")
    count = max(1, len(train) // 10)
    order = np.random.default_rng(seed).permutation(train)
    return np.sort(order[count:]), np.sort(order[:count]), "a tenth of the training images"


def fit_token_classifier(
    probe: DenseProbe,
    images: NDArray[np.int64],
    labels: NDArray[np.int64],
    val: NDArray[np.int64],
    settings: Settings,
) -> tuple[Fitted, NDArray[np.int64], list[str]]:
    """Fit a classifier of tokens.

    Args:
        probe: probe whose protocol classifies tokens.
        images: (N,) numbers of images, of which some are for choosing the strength.
        labels: (N, per_image) numbers of classes; -1 for tokens that are not used.
        val: numbers of the images for choosing the strength.
        settings: settings with the names of all classes.

    Returns:
        the classifier, the numbers of its classes, and notes.

    Raises:
        InputError: the training tokens have fewer than two classes, or those for choosing have none of them.
    """
    chosen = np.flatnonzero(labels >= 0)
    numbers, of_tokens, notes = token_numbers(images, labels.shape[1])[chosen], labels.reshape(-1)[chosen], []
    if len(numbers) > _MOST_TOKENS:
        notes.append(f"{_MOST_TOKENS:,} of them are drawn, with seed {settings.seed}")
        drawn = np.sort(np.random.default_rng(settings.seed).permutation(len(numbers))[:_MOST_TOKENS])
        numbers, of_tokens = numbers[drawn], of_tokens[drawn]
    held_out = np.isin(numbers // labels.shape[1], val)
    present = np.unique(of_tokens[~held_out])
    if len(present) < 2:
        raise InputError(
            f"classes among the tokens of {len(images) - len(val)} training images: {len(present)}; expected at least "
            "two",
            hint="check the values in the files; a token has a class if half of its pixels have",
        )
    for_choice = held_out & np.isin(of_tokens, present)
    if not for_choice.any():
        raise InputError("no token of the images for choosing the strength has a label that training tokens have")
    train_tokens, val_tokens = (
        Labelled(held(probe.features, numbers[some], settings), np.searchsorted(present, of_tokens[some]))
        for some in (~held_out, for_choice)
    )
    assert probe.definition.of_tokens is not None
    fit = PROTOCOLS[probe.definition.of_tokens].fit
    assert fit is not None
    return fit(train_tokens, val_tokens, replace(settings, classes=settings.classes[present])), present, notes
