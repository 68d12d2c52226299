"""Edits for `Taps.edit`. The same names as `extract.edits`."""

from extract.edits import *  # noqa: F403
