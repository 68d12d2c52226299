"""Ablation of layers, one layer at a time. The same names as `extract.ablation`."""

from extract.ablation import *  # noqa: F403
