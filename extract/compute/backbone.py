"""A backbone that computes features of pictures in memory: `load_backbone`, `backbone.features`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from extract import defaults
from extract.backbones import LoadedBackbone, loading
from extract.compute.backends import open_forward
from extract.compute.feature_choice import choose_features
from extract.compute.forward import check_rows
from extract.compute.principal_axes import axes_in, find_axes
from extract.errors import InputError
from extract.images.pictures import Picture, as_picture, each_picture
from extract.system.torch_state import evaluating, full_float32

__all__ = ["Backbone", "Picture", "load_backbone"]


@dataclass(frozen=True)
class Backbone(LoadedBackbone):
    """A frozen network, ready to run: in eval mode, on its device. Its attributes are those of `LoadedBackbone`."""

    def features(
        self,
        pictures: Picture | Iterable[Picture],
        layers: str | Sequence[str] = defaults.LAYERS,
        *,
        batch_size: int = defaults.BATCH_SIZE,
        axes: str | os.PathLike[str] | None = None,
    ) -> dict[str, NDArray[np.float32]]:
        """Compute features of pictures in memory, the same numbers that `embed` stores. Nothing is written.

            backbone.features([Image.open("cat.jpg")], ["layer4", "embedding"])["layer4"]    # (1, 2048)

        Args:
            pictures: one or several: PIL pictures; uint8 arrays (H, W, 3) or (H, W), or (N, H, W, 3); uint8 tensors
                (3, H, W) or (N, 3, H, W), or float tensors with 8-bit values scaled to 0..1. An iterator is read
                lazily.
            layers: `LAYER[:POOLING]...` each; see `extract_features`.
            batch_size: pictures per forward.
            axes: data set or file with the principal axes of the poolings `pcaK` and `pcawK`.

        Returns:
            name -> (N, *shape) float32.

        Raises:
            UnknownNameError: a layer or pooling does not exist.
            InputError: a layer, a pooling or the axes do not fit, or a picture does not have 8-bit pixels.
        """
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; it must be at least 1")
        with evaluating(self.model), full_float32():
            choice = choose_features(self, [layers] if isinstance(layers, str) else layers)
        for feature in choice.features if axes is not None else ():
            if feature.principal_axes is not None:
                files = axes_in(Path(str(axes)))
                feature.principal_axes.load(find_axes(feature.name, feature.axes_source(self), files))
        parts: dict[str, list[NDArray[np.float32]]] = {
            feature.name: [np.empty((0, *feature.shape), np.float32)] for feature in choice.features
        }
        images = (
            self.preprocessing.cpu_transform(as_picture(picture, f"picture {number}"))
            for number, picture in enumerate(each_picture(pictures))
        )
        is_first = True
        with open_forward(self, choice, "float32") as forward:
            while batch := list(itertools.islice(images, batch_size)):
                features = forward(torch.stack(batch))
                if is_first:
                    check_rows(forward, torch.stack(batch), features)
                is_first = False
                for name, values in features.items():
                    parts[name].append(values)
        return {name: np.concatenate(values) for name, values in parts.items()}


def load_backbone(
    spec: str,
    *,
    weights: str | None = None,
    device: str = "auto",
    seed: int = 0,
    allow_missing_head: bool = False,
    preprocessing: Mapping[str, Any] | None = None,
) -> Backbone:
    """Load a backbone by its spec.

    Args:
        spec: `bundled/efficientnet_lite0`, `torchvision/NAME`, `timm/NAME`, `open_clip/NAME:TAG`, `hf/NAME` or
            `hf/FOLDER`, `hub/OWNER/REPO:ENTRY` or `hub/FOLDER:ENTRY`, `python/FILE.py:FACTORY`.
        weights: a name in the source (torchvision: `IMAGENET1K_V2`; timm: a tag such as `a1_in1k`; open_clip: a
            tag; hf: a revision), a file (`.safetensors`, or `.pth`, `.pt`, `.bin` holding tensors and settings), or
            `random`. None uses the source's default.
        device: `cpu`, `cuda`, `cuda:1`, `mps`; `auto` uses a GPU if there is one.
        seed: seed of random weights.
        allow_missing_head: accept a file without the classifier, such as one from self-supervised training.
        preprocessing: replaces values of the library's own: any of `size` (the shorter side, or (height, width)),
            `crop`, `interpolation`, `mean` and `std`. `mean` and `std` are for pixels scaled to 0..1.

    Raises:
        UnknownNameError: the source, model or weights do not exist.
        InputError: a value of `preprocessing` is out of range, the weights do not fit the model, or their file cannot
            be read safely.
        LayertapError: the weights cannot be downloaded, or a library or the device is missing.
    """
    if not isinstance(spec, str):
        raise InputError(
            f"the backbone is a {type(spec).__name__}; expected a spec, or what load_backbone returns",
            hint="return your own module and its transform from a function in a file: python/FILE.py:FUNCTION",
        )
    loaded = loading.load(
        spec,
        weights=weights,
        device=device,
        seed=seed,
        allow_missing_head=allow_missing_head,
        preprocessing=preprocessing,
    )
    return Backbone(**{field.name: getattr(loaded, field.name) for field in fields(loaded)})
