"""Nearest-neighbour search between rows, and between tokens. Aliases of names in `extract.analysis`."""

from extract.analysis.nearest_patches import NearestPatches, nearest_patches, patch_similarity
from extract.analysis.probe.nearest_rows import MEMORY_BYTES, Neighbours, layer_to_search, nearest, overlap

__all__ = [
    "MEMORY_BYTES", "NearestPatches", "Neighbours", "layer_to_search", "nearest", "nearest_patches", "overlap",
    "patch_similarity",
]  # fmt: skip
