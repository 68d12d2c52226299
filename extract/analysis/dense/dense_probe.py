"""What all dense probes have in common: checked arguments, and the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extract.analysis.dense.protocols import DenseProtocol
from extract.analysis.dense.token_images import image_sets, same_grid
from extract.analysis.probe.intervals import Estimate
from extract.analysis.probe.memory import free_bytes
from extract.analysis.probe.probing import ProbeResult, probe_device
from extract.analysis.probe.protocols import Fitted, Settings
from extract.errors import InputError, unknown_name
from extract.store.tokens.token_array import TokenArray

__all__ = ["DenseProbe"]


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
            swept=fitted.swept,
            chosen=fitted.chosen,
            chosen_on=fitted.chosen_on,
            curve=fitted.curve,
            objective=fitted.objective,
            notes=[*notes, *fitted.notes],
            seconds=time.perf_counter() - self.started,
            **tables,
        )
