"""What a comparison of backbones has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from extract.analysis.alikeness import Alikeness

__all__ = ["Compared", "Comparison", "Disputed"]

_LEVEL = 0.05  # of corrected p-values


@dataclass
class Compared:
    """A backbone of a comparison. Numbers are None where they are not known.

    Attributes:
        name: name of the backbone and of its data set.
        backbone: spec.
        weights: source of the weights.
        error: why the backbone could not be compared; empty: it was.
        layer: its best layer: on validation images if the protocol has them, otherwise on test images.
        value: metric of this layer on the test images.
        low, high: 95 % interval of it.
        chosen_by: metric on validation images, by which the layer was chosen.
        behind: metric of the best backbone minus this one.
        p: corrected p-value of the difference to the best backbone; None for the best one.
        images_per_s: rate of the forwards in this comparison, with images in memory.
        parameters: number of parameters.
        width: values of the layer for an image.
        row_bytes: bytes of the layer for an image.
        licence: licence of the weights, if their source states it.
        effective_rank: see `Alikeness`.
        alignment: mean of `Alikeness.mutual_knn` with the best layers of all other backbones.
    """

    name: str
    backbone: str
    weights: str = ""
    error: str = ""
    layer: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    chosen_by: float | None = None
    behind: float | None = None
    p: float | None = None
    images_per_s: float | None = None
    parameters: int | None = None
    width: int | None = None
    row_bytes: int | None = None
    licence: str = ""
    effective_rank: float | None = None
    alignment: float | None = None

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether it differs from the best backbone; None for the best one, or without labels."""
        return None if self.p is None else self.p <= _LEVEL


@dataclass(frozen=True)
class Disputed:
    """A test image on which backbones disagree.

    Attributes:
        row: row of the data sets.
        path: path of the image.
        label: its class.
        share: share of the pairs of backbones that predict different classes.
        predictions: (backbone, predicted class) of each backbone.
    """

    row: int
    path: str
    label: str
    share: float
    predictions: list[tuple[str, str]]


@dataclass
class Comparison:
    """Result of a comparison.

    Attributes:
        backbones: the best one first; those with errors last.
        metric: metric that the backbones are compared by; empty without labels.
        protocol: protocol of the probe; empty without labels.
        n_images: number of images.
        n_test: number of test images; 0 without labels.
        chosen_on: images on which layers were chosen, in words; empty: there was no choice.
        features: (backbone, layer) of each row and column of `alikeness`.
        alikeness: how alike features are; None if fewer than two can be compared.
        why_not_alike: why it is None.
        layers: of each feature that was probed: backbone, layer, value, low, high, chosen_by, chosen.
        disputed: the test images on which backbones disagree most.
        notes: warnings.
        signal: number of the signal that stopped the run; 0: none.
    """

    backbones: list[Compared]
    metric: str = ""
    protocol: str = ""
    n_images: int = 0
    n_test: int = 0
    chosen_on: str = ""
    features: list[tuple[str, str]] = field(default_factory=list)
    alikeness: Alikeness | None = None
    why_not_alike: str = ""
    layers: list[dict[str, Any]] = field(default_factory=list)
    disputed: list[Disputed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signal: int = 0
