"""Grad-CAM, attention rollout, tokens as colours. Aliases of names in `extract.analysis.network.attribution`."""

from extract.analysis.network.attribution import (
    activations_of,
    attentions,
    grad_cam,
    map_of,
    principal_colours,
    rollout,
)

__all__ = ["activations_of", "attentions", "grad_cam", "map_of", "principal_colours", "rollout"]
