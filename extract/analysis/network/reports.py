"""Inspection results for one output tensor of a layer, and for one parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from extract.analysis.network.activation_statistics import Statistics

__all__ = ["ParameterReport", "TensorReport"]


@dataclass
class TensorReport:
    """Inspection results for one output tensor of a layer.

    Attributes:
        name: text form of the tensor's site.
        layer: name of the layer.
        type: class name of the module.
        leaf: whether the layer contains no other inspected layer.
        by_image: whether the rows were proved to be the images; otherwise each batch counts as one image.
        shape: shape of one image's activation, or of the whole batch's if not `by_image`.
        activations: statistics of the tensor.
        input_rms: root mean square of the layer's input; NaN without finite floating-point values.
        gradients: statistics of the loss gradient with respect to the tensor; None if not requested or not computed.
        bounded: whether the layer is a function with known bounds, such as a sigmoid.
        zero_weight: whether the layer's weight is zero, as in some layers before training.
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
        """Root mean square of the output divided by that of the input."""
        return self.activations.rms / self.input_rms if self.input_rms else math.nan

    @property
    def gradient_norm(self) -> float:
        """L2 norm of an image's gradient, as root mean square over images."""
        if self.gradients is None or not self.gradients.images:
            return math.nan
        return self.gradients.rms * math.sqrt(self.gradients.total / self.gradients.images)


@dataclass
class ParameterReport:
    """Inspection results for one parameter.

    Attributes:
        name: full name, including the layer.
        layer: name of the layer that owns the parameter.
        norm: L2 norm.
        trainable: whether the parameter requires gradients.
        reached: whether the loss depends on the parameter.
        gradient_norm: L2 norm of the gradient of a batch's loss, as root mean square over the batches with finite
            gradients.
    """

    name: str
    layer: str
    norm: float
    trainable: bool
    reached: bool = False
    gradient_norm: float = math.nan

    @property
    def gradient_to_weight(self) -> float:
        """Gradient norm divided by the parameter norm."""
        return self.gradient_norm / self.norm if self.norm else math.nan
