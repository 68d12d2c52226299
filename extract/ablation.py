"""Ablation of layers, one layer at a time. Aliases of names in `extract.analysis.network.ablation`."""

from extract.analysis.network.ablation import Ablation, Effect, ablation, mean_activations

__all__ = ["Ablation", "Effect", "ablation", "mean_activations"]
