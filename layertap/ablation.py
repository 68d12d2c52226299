"""Layers edited one by one. The same as `extract.ablation`."""

from extract.ablation import *  # noqa: F403
