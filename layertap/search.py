"""The rows nearest to others. The same as `extract.search`."""

from extract.search import *  # noqa: F403
