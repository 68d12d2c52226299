"""Edits for `Taps.edit`. The same as `extract.edits`."""

from extract.edits import *  # noqa: F403
