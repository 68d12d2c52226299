"""Features of layers as a transformer of scikit-learn."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract import defaults
from extract.compute.backbone import Backbone, load_backbone
from extract.errors import InputError, first_line
from extract.images.decoding import decode
from extract.images.pictures import each_picture
from extract.system.optional_libraries import library

__all__ = ["LayerFeatures"]

_base, _validation = (library(f"sklearn.{name}", "sklearn", "LayerFeatures") for name in ("base", "utils.validation"))


class LayerFeatures(_base.TransformerMixin, _base.BaseEstimator):  # type: ignore[misc,name-defined]
    """Transformer from images to features of layers, the numbers that `layertap embed` stores.

        make_pipeline(LayerFeatures("timm/resnet18", ["layer3", "embedding"]), LogisticRegression()).fit(paths, y)

    X is a sequence of paths, or of pictures as `backbone.features` takes them. Nothing is learned from it. A pickled
    transformer, and a clone, load the backbone again when it is first used.

    Args:
        backbone: spec of the backbone.
        layers: `LAYER[:POOLING]...`, or several; the features of all layers are flattened and joined.
        weights: see `load_backbone`.
        batch_size: images per forward.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        seed: seed of random weights.

    Attributes:
        n_features_out_: values of a row, after `fit`.
        feature_names_out_: their names: layer and position.
    """

    def __init__(
        self,
        backbone: str = defaults.BACKBONE,
        layers: str | Sequence[str] = defaults.LAYERS,
        *,
        weights: str | None = None,
        batch_size: int = defaults.BATCH_SIZE,
        device: str = defaults.DEVICE,
        seed: int = defaults.SEED,
    ):
        self.backbone = backbone
        self.layers = layers
        self.weights = weights
        self.batch_size = batch_size
        self.device = device
        self.seed = seed

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803
        """Load the backbone, and find the number of features from the first image.

        Raises:
            InputError: there are no images, or the first one cannot be decoded.
            UnknownNameError: the backbone, a layer or a pooling does not exist.
        """
        first = next(iter(self._pictures(X)), None)
        if first is None:
            raise InputError("there are no images to fit on")
        values = self._loaded().features(first, self.layers)
        self.feature_names_out_ = np.array(
            [f"{name}_{number}" for name, feature in values.items() for number in range(feature.size)], object
        )
        self.n_features_out_ = len(self.feature_names_out_)
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:  # noqa: N803
        """Return the features (N, n_features_out_) of N images.

        Raises:
            InputError: an image cannot be decoded.
        """
        _validation.check_is_fitted(self)
        values = self._loaded().features(self._pictures(X), self.layers, batch_size=self.batch_size)
        rows = [feature.reshape(len(feature), math.prod(feature.shape[1:])) for feature in values.values()]
        return np.concatenate(rows, axis=1)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return the names of the features; `input_features` has no effect."""
        _validation.check_is_fitted(self)
        return self.feature_names_out_

    def _loaded(self) -> Backbone:
        wanted = (self.backbone, self.weights, self.device, self.seed)
        if getattr(self, "_opened_for", None) != wanted:
            self._opened = load_backbone(self.backbone, weights=self.weights, device=self.device, seed=self.seed)
            self._opened_for = wanted
        return self._opened

    def _pictures(self, images: Any) -> Iterator[Any]:
        """Yield pictures in order; files are decoded by threads."""
        if isinstance(images, str | os.PathLike):
            raise InputError(f"X is one path, {os.fspath(images)}; expected a sequence of paths or pictures")
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it must be at least 1")
        if isinstance(images, np.ndarray) and images.dtype.kind in "OU":  # of paths, or of pictures of several sizes
            images = images.tolist()
        given = iter(each_picture(images))
        with ThreadPoolExecutor(defaults.CORES) as pool:
            while batch := list(islice(given, self.batch_size)):
                yield from pool.map(_opened, batch)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if not name.startswith("_opened")}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        tags.no_validation = True
        tags.requires_fit = True
        return tags


def _opened(given: Any) -> Any:
    """Return the picture of a path; pictures unchanged."""
    if not isinstance(given, str | os.PathLike):
        return given
    try:
        picture: Image.Image = decode(Path(given).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{os.fspath(given)}: {reason}") from error
    return picture
