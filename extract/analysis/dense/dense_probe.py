"""What all dense probes have in common: the protocols, checked arguments, a classifier of tokens, and the result."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extract.analysis.dense.token_images import held, image_sets, same_grid, token_numbers
from extract.analysis.probe.intervals import Estimate
from extract.analysis.probe.memory import free_bytes
from extract.analysis.probe.probing import ProbeResult, probe_device
from extract.analysis.probe.protocols import PROTOCOLS, Fitted, Labelled, Settings
from extract.errors import InputError, unknown_name
from extract.store.tokens.token_array import TokenArray

__all__ = ["DEPTH", "SEGMENTATION", "DenseProbe", "DenseProtocol"]

_MOST_TOKENS = 500_000  # that a classifier is fitted on


@dataclass(frozen=True)
class DenseProtocol:
    """How the pixels of pictures are predicted from tokens.

    Attributes:
        of_tokens: the protocol of `extract.analysis.probe` that predicts single tokens; None: a head that is trained on
            upsampled predictions.
        scaling: scaling of the tokens.
        about: short description.
    """

    of_tokens: str | None
    scaling: str
    about: str


# A classifier of tokens, whose scores are upsampled to pixels, gives the mean IoU of DINOv3's head within 0.3 points in
# a fortieth of its time (docs/guides/tokens.md). Depth is classified too: it is not linear in the tokens (see `depth`).
SEGMENTATION = {
    "segmentation": DenseProtocol(
        "clip", "standardise", "logistic regression of tokens, 96 lambdas searched from coarse to fine"
    ),
    "segmentation-knn": DenseProtocol("knn", "l2", "10, 20, 100 or 200 nearest tokens by cosine, temperature 0.07"),
    "segmentation-dinov3": DenseProtocol(
        None, "standardise", "batch norm and a linear layer, trained on upsampled logits"
    ),
}
DEPTH = {
    "depth": DenseProtocol(
        "clip", "standardise", "logistic regression of tokens to 16 bins of depth, and the mean of the bins"
    ),
    "depth-dinov3": DenseProtocol(
        None, "standardise", "batch norm and a linear layer to 256 bins of depth, trained on upsampled depths"
    ),
}


@dataclass(frozen=True)
class DenseProbe:
    """Checked arguments of a probe.

    Attributes:
        protocol: name of the protocol.
        definition: the protocol.
        features: tokens of the concatenated features.
        train: numbers of the training images, ascending; likewise `val` and `test`.
        settings: settings of a protocol that classifies tokens; the classes are those of the caller.
        iterations: see `segmentation_probe`, `depth_probe`.
        started: time of the start.
    """

    protocol: str
    definition: DenseProtocol
    features: list[TokenArray]
    train: NDArray[np.int64]
    val: NDArray[np.int64]
    test: NDArray[np.int64]
    settings: Settings
    iterations: int | None
    started: float

    @staticmethod
    def of(
        protocols: Mapping[str, DenseProtocol],
        protocol: str,
        tokens: TokenArray | Sequence[TokenArray],
        sets: tuple[ArrayLike, ArrayLike | None, ArrayLike],
        iterations: int | None,
        seed: int,
        device: str,
        memory_bytes: int | None,
    ) -> DenseProbe:
        """Check arguments; `sets` are the training, validation and test images.

        Raises:
            InputError: see `segmentation_probe`.
            UnknownNameError: there is no such protocol.
        """
        started = time.perf_counter()
        if protocol not in protocols:
            raise unknown_name("protocol", protocol, protocols)
        definition = protocols[protocol]
        if iterations is not None and (definition.of_tokens is not None or iterations < 1):
            trained = " or ".join(name for name, other in protocols.items() if other.of_tokens is None)
            raise InputError(f"iterations={iterations}; expected a positive number for the protocol {trained}")
        features = same_grid([tokens] if isinstance(tokens, TokenArray) else list(tokens))
        train, val, test = image_sets(len(features[0].rows), *sets)
        settings = Settings(
            "classification", np.array([]), definition.scaling, False, seed, probe_device(device),
            free_bytes() // 2 if memory_bytes is None else memory_bytes,
        )  # fmt: skip
        return DenseProbe(protocol, definition, features, train, val, test, settings, iterations, started)

    @property
    def learned(self) -> NDArray[np.int64]:
        """Numbers of the training and validation images."""
        return np.union1d(self.train, self.val)

    def with_validation(self) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
        """Return the images to fit on, the images for choosing the strength, and what these are, in words.

        Raises:
            InputError: a single training image leaves none for choosing.
        """
        if len(self.val):
            return self.train, self.val, "validation images"
        if len(self.train) < 2:
            raise InputError("a single training image leaves none for choosing the strength; expected at least two")
        count = max(1, len(self.train) // 10)
        order = np.random.default_rng(self.settings.seed).permutation(self.train)
        return np.sort(order[count:]), np.sort(order[:count]), "a tenth of the training images"

    def fit_tokens(
        self, labels: NDArray[np.int64], classes: NDArray[Any], known: str
    ) -> tuple[Fitted, NDArray[np.int64], list[str]]:
        """Fit a classifier of tokens by the protocol.

        Args:
            labels: (N, per_image) numbers of classes of the `learned` images; -1 for tokens that are not used.
            classes: names of all classes.
            known: what a token that is used has, in words.

        Returns:
            the classifier, the numbers of its classes, and notes.

        Raises:
            InputError: the training tokens have fewer than two classes, or those for choosing have none of them.
        """
        train, val, chosen_on = self.with_validation()
        chosen, settings = np.flatnonzero(labels >= 0), self.settings
        count = f"{len(chosen):,} of {labels.size:,} tokens of the training images"
        notes = [f"{count} have {known} for half of their pixels"]
        numbers, of_tokens = token_numbers(self.learned, labels.shape[1])[chosen], labels.reshape(-1)[chosen]
        if len(numbers) > _MOST_TOKENS:
            notes.append(f"{_MOST_TOKENS:,} of them are drawn, with seed {settings.seed}")
            drawn = np.sort(np.random.default_rng(settings.seed).permutation(len(numbers))[:_MOST_TOKENS])
            numbers, of_tokens = numbers[drawn], of_tokens[drawn]
        held_out = np.isin(numbers // labels.shape[1], val)
        present = np.unique(of_tokens[~held_out])
        if len(present) < 2:
            raise InputError(
                f"classes among the tokens of {len(train)} training images: {len(present)}; expected at least two",
                hint="check the values in the files; a token has a class if half of its pixels have",
            )
        for_choice = held_out & np.isin(of_tokens, present)
        if not for_choice.any():
            raise InputError("no token of the images for choosing the strength has a label that training tokens have")
        train_tokens, val_tokens = (
            Labelled(held(self.features, numbers[some], settings), np.searchsorted(present, of_tokens[some]))
            for some in (~held_out, for_choice)
        )
        fit = PROTOCOLS[str(self.definition.of_tokens)].fit
        assert fit is not None
        fitted = fit(train_tokens, val_tokens, replace(settings, classes=classes[present]))
        return replace(fitted, chosen_on=chosen_on), present, notes

    def result(
        self, task: str, classes: NDArray[Any], metrics: dict[str, Estimate], fitted: Fitted, notes: Sequence[str],
        **tables: Any,
    ) -> ProbeResult:  # fmt: skip
        """Return the result; `tables` are more of its attributes."""
        return ProbeResult(
            protocol=self.protocol,
            task=task,
            scaling=self.definition.scaling,
            metrics=metrics,
            classes=classes,
            n_train=len(self.learned),
            n_val=len(self.val) if fitted.curve else 0,
            n_test=len(self.test),
            truth=np.empty(0),
            notes=[*notes, *fitted.notes],
            seconds=time.perf_counter() - self.started,
            **(fitted.choice | {"validation": math.nan}),  # on tokens, whose labels depend on the grid
            **tables,
        )
