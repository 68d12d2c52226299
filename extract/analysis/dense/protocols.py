"""Protocols of dense probes by name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEPTH", "SEGMENTATION", "DenseProtocol"]


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
