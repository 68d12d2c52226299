"""Linear probes and other measures of feature quality, on arrays. The same names as `extract.probe`."""

from extract.probe import *  # noqa: F403
