"""The positions of the images of a batch in the outputs of layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from extract.taps.batch_axis import BatchAxis, Trial


def find_batch_axis(model: nn.Module, pictures: Tensor, layers: Sequence[str]) -> dict[str, BatchAxis]:
    """Return the text form of each tensor -> position of the images in it; errors as in `Trial`."""
    trial = Trial(model, pictures, [(layer, "output") for layer in layers])
    return {name: trial.rows(site) for name, site in trial.record.sites.items()}
