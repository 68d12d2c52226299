"""Nearest-neighbour search between rows. The same names as `extract.search`."""

from extract.search import *  # noqa: F403
