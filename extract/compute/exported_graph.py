"""The backbone, its taps and the pooling as one graph, for compilers.

`torch.export` runs the model once, on tensors without values, under the same `Taps` as an eager forward, and records
the operations. One implementation therefore decides which tensors are kept. The graph run node by node gives
the features of the eager forward to the last bit; compilers change the order of sums (1e-7 to 5e-6 of the largest
value). The graph has no in-place operations. Its outputs are the features; operations that no output depends on
are removed, so later layers cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from extract.backbones import LoadedBackbone
from extract.compute.feature_choice import Choice
from extract.system.torch_state import lower_precision
from extract.taps.record import Reduce, Site
from extract.taps.taps import Variant, taps_of

__all__ = ["graph_of"]


def graph_of(backbone: LoadedBackbone, choice: Choice, dtype: str, precision: str, images: Tensor) -> ExportedProgram:
    """Export the computation from a batch of `Preprocessing.cpu_transform` to a tuple of features in order.

    Args:
        backbone: backbone in eval mode.
        choice: features to compute.
        dtype: dtype of the features.
        precision: "float32", "tf32" (with which the graph is run), or the dtype of PyTorch's autocast.
        images: batch on the backbone's device; the graph accepts only batches of this shape.

    Raises:
        Exception: of any type, if the code of the model cannot be exported.
    """
    backbone.preprocessing.to_input(images[:1])  # creates its cached constants, as tensors with values
    with torch.no_grad():
        return torch.export.export(_Features(backbone, choice, dtype, precision), (images,), strict=False)


class _Features(nn.Module):
    """Module that returns the features."""

    def __init__(self, backbone: LoadedBackbone, choice: Choice, dtype: str, precision: str):
        super().__init__()
        self.model = backbone.model
        self._to_input: Callable[[Tensor], Tensor] = backbone.preprocessing.to_input
        self._choice, self._dtype = choice, getattr(torch, dtype)
        self._lower = lower_precision(precision, backbone.device)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the features of a batch."""
        with self._lower, self._choice.kept_by(taps_of(self.model, _TRACED), self._dtype) as taps:
            taps(self._to_input(images))
            return tuple(taps.record[feature.site][feature.name] for feature in self._choice.features)


def _traced_copy(tensor: Tensor, reduce: Reduce | None, site: Site) -> dict[str, Tensor]:
    """Reduce a tensor, and copy the results on their device."""
    assert reduce is not None
    # Two layers may return one tensor, and OpenVINO refuses a graph with one tensor as two outputs: `movedim` makes
    # another of the same values. Copies, because the model may write into the tensor later.
    return {name: part.clone() for name, part in reduce(tensor.detach().movedim(0, 0)).items()}


_TRACED = Variant(_traced_copy, has_other_callers=False)  # the export itself is the call of the model
