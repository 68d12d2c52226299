"""Edits for `Taps.edit`. Aliases of names in `extract.taps.edits`."""

from extract.taps.edits import Edit, ablate, apply_edit, clamp, clip, freeze, mix, noise, prune, replace, scale, smooth

__all__ = [
    "Edit",
    "ablate",
    "apply_edit",
    "clamp",
    "clip",
    "freeze",
    "mix",
    "noise",
    "prune",
    "replace",
    "scale",
    "smooth",
]
