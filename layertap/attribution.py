"""Grad-CAM, attention rollout, tokens as colours. The same names as `extract.attribution`."""

from extract.attribution import *  # noqa: F403
