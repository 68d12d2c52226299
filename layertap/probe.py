"""How good features are: linear probes and others on arrays. The same as `extract.probe`."""

from extract.probe import *  # noqa: F403
