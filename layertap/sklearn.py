"""A transformer of scikit-learn from images to features. The same names as `extract.sklearn`."""

from extract.sklearn import *  # noqa: F403
