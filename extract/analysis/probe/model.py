"""Fitted linear probe: predict scores, probabilities and classes; save to a file that cannot run code."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from extract.analysis.probe.feature_matrix import FeatureRows, Scaling, Source
from extract.errors import InputError
from extract.system.atomic_files import link_target, open_regular, write_whole

__all__ = ["LinearProbe"]

_FORMAT = "layertap probe"
_VERSION = "1"
_TASKS = ("classification", "multilabel", "regression")


@dataclass(frozen=True)
class LinearProbe:
    """Linear model scale(x) @ coef_.T + intercept_, with the attribute names of scikit-learn.

    Attributes:
        coef_: (K, D) float32, float64 for regression; (1, D) for two classes.
        intercept_: (K,) of the same dtype; (1,) for two classes.
        classes_: (K,) classes that `predict` returns; names of the labels (multilabel) or targets (regression).
        task: "classification", "multilabel" or "regression".
        scaling: scaling of the features, with statistics of the training rows.
        has_probabilities: whether the scores are logits.
        about: metadata saved with the probe: protocol, layers, fingerprint of the features, results.
    """

    coef_: NDArray[Any]
    intercept_: NDArray[Any]
    classes_: NDArray[Any]
    task: str = "classification"
    scaling: Scaling = field(default_factory=Scaling)
    has_probabilities: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_features_in_(self) -> int:
        """Width D of the features."""
        return int(self.coef_.shape[1])

    def decision_function(self, x: Source | FeatureRows) -> NDArray[Any]:
        """Return scores (N, K); for two classes (N,), positive for the second class.

        Args:
            x: (N, D), or (N, *shape) with D values a row, unscaled; this method applies the scaling.

        Raises:
            InputError: the rows have another width, or a value is not finite.
        """
        rows = FeatureRows.of(x)
        if rows.width != self.n_features_in_:
            raise InputError(f"the features have {rows.width} values; the probe was fitted on {self.n_features_in_}")
        scores = np.empty((len(rows), len(self.coef_)), self.coef_.dtype)
        for start, block in rows.scaled(self.scaling).blocks():
            scores[start : start + len(block)] = block @ self.coef_.T + self.intercept_
        return scores[:, 0] if self._one_score else scores

    @property
    def _one_score(self) -> bool:
        return self.task == "classification" and len(self.coef_) == 1

    def scores(self, x: Source | FeatureRows) -> NDArray[Any]:
        """Return scores (N, K) as `decision_function`, but with two columns for two classes: 0 and the score."""
        scores = self.decision_function(x)
        return np.stack([np.zeros_like(scores), scores], 1) if scores.ndim == 1 else scores

    def probabilities(self, scores: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return probabilities (N, K) from `scores`; None if the scores are not logits."""
        if not self.has_probabilities:
            return None
        if self.task == "multilabel":
            return _logistic(scores)
        above = np.exp(scores - scores.max(1, keepdims=True))
        return np.asarray(above / above.sum(1, keepdims=True), np.float32)

    def predict_proba(self, x: Source | FeatureRows) -> NDArray[np.float32]:
        """Return probabilities (N, K); for multilabel tasks, each label has its own.

        Raises:
            InputError: see `decision_function`; or the probe has no probabilities.
        """
        probabilities = self.probabilities(self.scores(x))
        if probabilities is None:
            raise InputError("this probe computes scores, but no probabilities", hint="use decision_function")
        return probabilities

    def predict(self, x: Source | FeatureRows) -> NDArray[Any]:
        """Return classes (N,); labels (N, K), 0 or 1; or, for regression, values (N,) or (N, K)."""
        scores = self.scores(x)
        if self.task == "classification":
            return np.asarray(self.classes_[scores.argmax(1)])
        if self.task == "multilabel":
            return (scores > 0).astype(np.int64)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically: tensors `coef`, `intercept`, `mean`, `scale`, and text metadata."""
        tensors = {"coef": self.coef_, "intercept": self.intercept_}
        if self.scaling.mean is not None and self.scaling.scale is not None:
            tensors |= {"mean": self.scaling.mean, "scale": self.scaling.scale}
        text = {
            "format": _FORMAT,
            "format_version": _VERSION,
            "task": self.task,
            "classes": json.dumps(self.classes_.tolist()),
            "scaling": self.scaling.name,
            "has_probabilities": json.dumps(self.has_probabilities),
            "about": json.dumps(dict(self.about)),
        }
        text["sha256"] = _sha256(tensors, text)
        write_whole(link_target(Path(path)), save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, text))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LinearProbe:
        """Read a file written by `save`. Files of earlier versions have no checksum, and are read without one.

        Raises:
            InputError: the file does not exist, is not a probe, or is damaged.
        """
        try:
            os.close(open_regular(Path(path)))  # a pipe would be waited for
            with safe_open(path, "np") as file:
                text = file.metadata() or {}
                if text.get("format") != _FORMAT or text.get("format_version") != _VERSION:
                    raise InputError(f"{path} is not a probe of `layertap probe --save` (format {_VERSION})")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = text.pop("sha256", None)
            scaling = Scaling(text["scaling"], tensors.get("mean"), tensors.get("scale"))
            classes, about = json.loads(text["classes"]), json.loads(text["about"])
            has_probabilities = json.loads(text["has_probabilities"])
            if not isinstance(has_probabilities, bool):
                raise ValueError(f"has_probabilities is {has_probabilities!r}; expected true or false")
            probe = LinearProbe(
                tensors["coef"], tensors["intercept"], np.array(classes), text["task"], scaling, has_probabilities,
                about,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise InputError(f"{path}: no such file") from error
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
            problem = error.message if isinstance(error, InputError) else f"{path} cannot be read as a probe: {error}"
            raise InputError(problem, hint="name a file that `layertap probe --save` has written") from error
        if problem := _inconsistency(probe):
            raise InputError(f"{path} is not a valid probe: {problem}")
        if expected is not None and expected != _sha256(tensors, text):
            raise InputError(f"{path} is damaged: its content does not match its checksum")
        return probe


def _sha256(tensors: Mapping[str, NDArray[Any]], text: Mapping[str, str]) -> str:
    """Return the checksum of a saved probe: of its metadata and of the name, type, shape and values of each tensor."""
    digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode())
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _inconsistency(probe: LinearProbe) -> str:
    """Return what is wrong with a probe that was read from a file; empty: nothing."""
    classes, coef = probe.classes_, probe.coef_
    columns = [array for array in (probe.scaling.mean, probe.scaling.scale) if array is not None]
    expected_dtype = np.dtype(np.float64 if probe.task == "regression" else np.float32)
    if probe.task not in _TASKS or probe.scaling.name not in ("none", "l2", "standardise"):
        return f"unknown task {probe.task!r} or scaling {probe.scaling.name!r}"
    if classes.ndim != 1 or classes.dtype.kind not in "Uif" or len(set(classes.tolist())) < len(classes):
        return "its classes are not a list of distinct names or numbers"
    if not isinstance(probe.about, dict):
        return "its metadata are not a mapping"
    if probe.has_probabilities and probe.task == "regression":
        return "has_probabilities is true; a regression has none"
    if coef.ndim != 2 or 0 in coef.shape or probe.intercept_.shape != coef.shape[:1]:
        return "its weights are not of shapes (K, D) and (K,)"
    if {coef.dtype, probe.intercept_.dtype} != {expected_dtype}:
        return f"its weights are not {expected_dtype}"
    if len(columns) != (2 if probe.scaling.name == "standardise" else 0):
        return "the statistics of its scaling are missing"
    if any(array.shape != coef.shape[1:] for array in columns):
        return "its scaling and its weights have different widths"
    expected = 2 if probe._one_score else len(coef)
    if len(classes) != expected:
        return f"it has {len(classes)} classes, but weights for {expected}"
    numbers = [coef, probe.intercept_, *columns, *([classes] if classes.dtype.kind == "f" else [])]
    if not all(np.isfinite(array).all() for array in numbers):
        return "a class, a weight or a statistic of its scaling is not finite"
    if probe.scaling.scale is not None and not (probe.scaling.scale > 0).all():
        return "a standard deviation of its scaling is not above zero"
    return ""


def _logistic(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    small = np.exp(-np.abs(scores))  # accurate for tiny probabilities too
    return np.asarray(np.where(scores > 0, 1, small) / (1 + small), np.float32)
