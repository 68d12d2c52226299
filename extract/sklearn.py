"""A transformer of scikit-learn from images to features. An alias of a name in `extract.compute`."""

from extract.compute.sklearn_transformer import LayerFeatures

__all__ = ["LayerFeatures"]
