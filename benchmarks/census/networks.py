"""The networks of timm, torchvision and transformers, built with random weights for the smallest pictures they take."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.census.values import digest, tensors_of
from benchmarks.census.weights import shake

LIBRARIES = ("timm", "torchvision", "transformers")
SIZES = (32, 64, 96, 128, 160, 192, 224, 256)
MOST_PARAMETERS = 400_000_000
MANY_PARAMETERS = 100_000_000  # default configurations of transformers with more get four hidden layers

# Mappings of transformers' auto classes whose models take pictures, from plain trunks to heads for one task.
_MAPPINGS = (
    "IMAGE", "BACKBONE", "IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "IMAGE_TO_IMAGE",
    "IMAGE_SEGMENTATION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION", "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING", "MASKED_IMAGE_MODELING", "MASK_GENERATION", "IMAGE_MATTING", "VIDEO_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION",
)  # fmt: skip


class NotRunError(Exception):
    """The network cannot be compared; the message gives the reason."""


@dataclass(frozen=True)
class Network:
    """An architecture: library, name and family (timm's and torchvision's module, the folder of transformers)."""

    library: str
    name: str
    family: str

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


def named(key: str) -> Network:
    """Return the network LIBRARY/NAME, without its family."""
    library, _, name = key.partition("/")
    return Network(library, name, "")


def networks(library: str) -> list[Network]:
    """Return all networks of a library that are to be compared."""
    return {"timm": _of_timm, "torchvision": _of_torchvision, "transformers": _of_transformers}[library]()


def build(network: Network, size: int | None) -> tuple[nn.Module, bool]:
    """Build a network with random weights, for pictures of this size if that is part of the architecture.

    Returns:
        The model in eval mode, and whether it was built for that size.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_with = {"timm": _build_timm, "torchvision": _build_torchvision, "transformers": _build_transformers}
        model, is_sized = build_with[network.library](network.name, size)
        return model.eval(), is_sized


def count_parameters(network: Network) -> int:
    """Return the number of parameters; the network is built on the meta device where that is possible."""
    try:
        with torch.device("meta"):
            model = build(network, None)[0]
    except RuntimeError:  # RegNet computes its widths with tensors
        if network.library != "torchvision":
            raise
        model = build(network, None)[0]
    return sum(parameter.numel() for parameter in model.parameters())


def prepare(network: Network, batch: int = 2) -> tuple[nn.Module, Tensor]:
    """Return a network with random weights, and pictures (batch, 3, size, size) of the smallest size that it takes.

    Raises:
        NotRunError: it takes no batch of pictures, or is not deterministic.
    """
    try:
        with torch.device("meta"):
            start = _smallest(network, SIZES, batch)[1].shape[-1]
    except NotRunError:  # some networks compute values while they are built
        start = SIZES[0]
    torch.manual_seed(0)
    model, pictures = _smallest(network, tuple(size for size in SIZES if size >= start), batch)
    pictures = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(3)
    shake(model, torch.randn(8, *pictures.shape[1:], generator=generator))
    if _digests(model, pictures) != _digests(model, pictures):
        raise NotRunError("computes other values in a second forward of the same pictures with the same seed")
    return model, pictures


def _digests(model: nn.Module, pictures: Tensor) -> list[str]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [digest(tensor) for _, tensor in tensors_of(model(pictures.clone()))]


def _smallest(network: Network, sizes: tuple[int, ...], batch: int) -> tuple[nn.Module, Tensor]:
    unsized: nn.Module | None = None
    reasons: list[str] = []
    for size in (*sizes, None):
        step = "built"
        try:
            model, is_sized = (unsized, False) if unsized is not None else build(network, size)
            if not is_sized:
                unsized = model
            step = "run"
            pictures = torch.zeros(batch, 3, *_pixels(model, size))
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(pictures.clone())
        except NotRunError:
            raise
        except Exception as error:  # the libraries raise errors of all kinds
            message = str(error).strip() or "no message"
            reasons.append(f"cannot be {step}: {type(error).__name__}: {message.splitlines()[0]}")
            continue
        return model, pictures
    raise NotRunError(reasons[-1])


def _pixels(model: Any, size: int | None) -> tuple[int, int]:
    """Return height and width: `size`, or what the model was made for."""
    if size is not None:
        return size, size
    config = getattr(model, "pretrained_cfg", None) or {}
    if "input_size" in config:
        return tuple(config["input_size"][1:])
    side = getattr(getattr(model, "config", None), "image_size", None) or 224
    return (side, side) if isinstance(side, int) else tuple(side)[:2]


def _of_timm() -> list[Network]:
    import timm

    return [Network("timm", name, family) for family in timm.list_modules() for name in timm.list_models(module=family)]


def _build_timm(name: str, size: int | None) -> tuple[nn.Module, bool]:
    import timm

    try:
        return timm.create_model(name, img_size=size), size is not None
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        return timm.create_model(name), False


def _of_torchvision() -> list[Network]:
    from torchvision import models

    modules = (models, models.segmentation, models.detection, models.video)
    return [
        Network("torchvision", name, models.get_model_builder(name).__module__.removeprefix("torchvision.models."))
        for module in modules
        for name in models.list_models(module=module)
    ]


def _build_torchvision(name: str, size: int | None) -> tuple[nn.Module, bool]:
    from torchvision import models

    family = models.get_model_builder(name).__module__
    options: dict[str, Any] = {"weights": None}
    if ".segmentation" in family or ".detection" in family:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # the initialisation of these two takes minutes
    if ".detection" in family:  # without a threshold, a network with random weights detects something
        is_one_stage = name.startswith(("retinanet", "fcos", "ssd"))
        options["score_thresh" if is_one_stage else "box_score_thresh"] = 0.0
        if not name.startswith("ssd"):
            options |= {"min_size": 64, "max_size": 128}
    is_sized = name.startswith("vit_") and size is not None
    if is_sized:
        options["image_size"] = size
    return models.get_model(name, **options), is_sized


def _of_transformers() -> list[Network]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    names = [name for name in _class_names() if isinstance(getattr(transformers, name, None), type)]
    folders = {name: getattr(transformers, name).__module__.split(".")[2] for name in names}
    return [Network("transformers", name, folders[name]) for name in names]


@functools.cache
def _class_names() -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    def classes() -> Iterator[str]:
        for mapping in _MAPPINGS:
            for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
                yield from [names] if isinstance(names, str) else names
        for kind, names in modeling_auto.MODEL_MAPPING_NAMES.items():
            if kind.endswith(("vision", "vision_model")):
                yield from [names] if isinstance(names, str) else names

    return tuple(dict.fromkeys(classes()))


def transformers_config(name: str, size: int | None) -> tuple[Any, bool]:
    """Return the default configuration of a class of transformers, and whether it was changed to this picture size."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class()
    for part in (config, getattr(config, "backbone_config", None)):
        if getattr(part, "use_pretrained_backbone", False):
            part.use_pretrained_backbone = False
    if hasattr(config, "num_hidden_layers") and _count(cls, config) > MANY_PARAMETERS:
        config.num_hidden_layers = min(4, config.num_hidden_layers)
    parts = [config, *(getattr(config, part, None) for part in ("backbone_config", "vision_config"))]
    sized = [part for part in parts if size is not None and getattr(part, "image_size", None)]
    for part in sized:
        part.image_size = size if isinstance(part.image_size, int) else type(part.image_size)((size, size))
    return config, bool(sized)


def _count(cls: Callable[[Any], nn.Module], config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cls(config).parameters())


def _build_transformers(name: str, size: int | None) -> tuple[nn.Module, bool]:
    import transformers

    if name.startswith("Timm"):
        raise NotRunError("a model of timm, which is compared there")
    config, is_sized = transformers_config(name, size)
    return getattr(transformers, name)(config), is_sized
