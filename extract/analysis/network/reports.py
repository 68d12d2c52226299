"""What is known of one tensor that a layer gives, and of one parameter, after an inspection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from extract.analysis.network.activation_statistics import Statistics

__all__ = ["ParameterReport", "TensorReport"]


@dataclass
class TensorReport:
    """One tensor that a layer gives: all that is known of it.

    Attributes:
        name: text form of its site.
        layer: its name.
        type: class of the module.
        leaf: whether no other layer ran inside it.
        by_image: whether its rows were proved to be the images; otherwise each batch counts as one image.
        shape: of an image's activation, or of a batch's.
        activations: of what it gives.
        input_rms: root mean square of what it was given; NaN if it was given no tensor.
        gradients: of the loss with respect to it; None where none was asked for, or none came.
        bounded: whether it is a function whose bounds are known, such as a sigmoid.
        zero_weight: whether the layer's weight is zero, as that of some layers is before a training.
    """

    name: str
    layer: str
    type: str
    leaf: bool
    by_image: bool
    shape: tuple[int, ...]
    activations: Statistics = field(default_factory=Statistics)
    input_rms: float = math.nan
    gradients: Statistics | None = None
    bounded: bool = False
    zero_weight: bool = False

    @property
    def norm_ratio(self) -> float:
        """Root mean square of what it gives, by that of what it was given."""
        return self.activations.rms / self.input_rms if self.input_rms else math.nan

    @property
    def gradient_norm(self) -> float:
        """L2 norm of an image's gradient: the root of the mean square over images."""
        if self.gradients is None or not self.gradients.images:
            return math.nan
        return self.gradients.rms * math.sqrt(self.gradients.total / self.gradients.images)


@dataclass
class ParameterReport:
    """One parameter.

    Attributes:
        name: with its layer's in front.
        layer: that it belongs to.
        norm: L2.
        trainable: whether it takes gradients.
        reached: whether the loss depends on it.
        gradient_norm: L2, of the gradient of a batch's loss: the root of the mean square over the batches whose
            gradients are finite.
    """

    name: str
    layer: str
    norm: float
    trainable: bool
    reached: bool = False
    gradient_norm: float = math.nan

    @property
    def gradient_to_weight(self) -> float:
        """Norm of the gradient by that of the parameter."""
        return self.gradient_norm / self.norm if self.norm else math.nan
