"""Nearest-neighbour search between rows. Aliases of names in `extract.analysis.nearest_rows`."""

from extract.analysis.nearest_rows import MEMORY_BYTES, Neighbours, layer_to_search, nearest, overlap

__all__ = ["MEMORY_BYTES", "Neighbours", "layer_to_search", "nearest", "overlap"]
