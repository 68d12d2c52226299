"""Compare the embedding that `extract_features` stores with the one that the library itself gives of the same files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.census.comparison import Report, reason_of
from benchmarks.census.gradients import agree
from benchmarks.census.networks import Network, NotRunError, transformers_config
from benchmarks.census.weights import shake
from extract import Backbone, extract_features, load_backbone
from extract.errors import LayertapError
from tests.conftest import make_picture

# timm's forward_head(pre_logits=True) leaves out the norm in the head; the embedding is the input of the classifier.
_NORM_BEHIND = "unlike timm's pre_logits, but equal to the input of timm's classifier, which follows a norm"

TOLERANCE = 1e-4  # of the largest value

Transform = Callable[[Image.Image], Tensor]  # a picture to (3, H, W)
Embed = Callable[[Tensor], Tensor]  # (B, 3, H, W) to (B, ...)


def compare_embedding(network: Network, scratch: Path, report: Report) -> None:
    """Embed four pictures with `extract_features`, and with the library's own preprocessing and functions."""
    folder = scratch / "pictures"
    folder.mkdir()
    for number in range(4):
        make_picture(number, 300 + 20 * number, 280).save(folder / f"{number}.png")
    spec = f"{network.library}/{network.name}"
    try:
        if network.library == "transformers":
            spec = f"hf/{_folder_of(network, scratch / 'model')}"
        backbone = load_backbone(spec, weights="random", device="cpu")
        prepared = backbone.preprocessing
        others = torch.stack([prepared.cpu_transform(make_picture(seed, 300, 280)) for seed in range(10, 14)])
        shake(backbone.model, prepared.to_input(others))
        reader = extract_features(
            folder, out=scratch / "features", backbone=backbone, layers="embedding", batch_size=4, workers=0,
            compile="off", progress=False,
        )  # fmt: skip
    except LayertapError as error:
        report.refused[f"embedding: {reason_of(error, spec)}"] += 1
        return
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:  # of the library
        report.refused[f"embedding: {type(error).__name__}: {reason_of(error, spec)}"] += 1
        report.examples["errors that are not layertap's"] = [repr(error)[:300]]
        return
    with reader:
        stored = torch.from_numpy(np.asarray(reader["embedding"][:]))
        paths = list(reader.paths)
    reference = {"timm": _by_timm, "torchvision": _by_torchvision, "transformers": _by_transformers}[network.library]
    transform, *ways = reference(network, backbone, scratch / "model")
    with torch.no_grad():
        pictures = torch.stack([transform(Image.open(folder / path).convert("RGB")) for path in paths])
        wrong = _wrong_rows(stored, ways[0](pictures))
        way = ways[0]
        for way in ways[1:] if wrong else []:
            wrong = _wrong_rows(stored, way(pictures))
            report.uncompared[f"embedding: {_NORM_BEHIND}"] += not wrong
        if doubtful := wrong:
            wrong = _beyond_rounding(stored, backbone.model, way, pictures, doubtful)
            report.numbers["rounded embeddings"] += len(doubtful) - len(wrong)
    report.compare("embeddings", [paths[row] for row in wrong], 4)
    if len({row.numpy().tobytes() for row in stored}) < 4:
        report.numbers["equal embeddings of different pictures"] += 4


def _wrong_rows(stored: Tensor, expected: Tensor) -> list[int]:
    expected = expected.flatten(1).float()
    if expected.shape != stored.shape:
        return list(range(len(stored)))
    return [row for row in range(len(stored)) if not agree(stored[row], expected[row], TOLERANCE)]


def _beyond_rounding(stored: Tensor, model: nn.Module, embed: Embed, pictures: Tensor, rows: list[int]) -> list[int]:
    """Return those rows that differ from double precision by more than four times what the reference does."""
    if not rows or embed(pictures).flatten(1).shape != stored.shape:
        return rows
    expected = embed(pictures).flatten(1)
    model.double()
    exact = embed(pictures.double()).flatten(1)
    model.float()
    rounding = (expected - exact).abs().amax()
    return [row for row in rows if not (stored[row] - exact[row]).abs().amax() <= 4 * rounding]


def _by_timm(network: Network, backbone: Backbone, folder: Path) -> tuple[Transform, Embed, Embed]:
    """The documented embedding, and what layertap's documentation calls the embedding."""
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    model: Any = backbone.model
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    return (
        transform,
        lambda x: model.forward_head(model.forward_features(x), pre_logits=True),
        lambda x: _input_of(model.get_classifier(), model, x),
    )


def _by_torchvision(network: Network, backbone: Backbone, folder: Path) -> tuple[Transform, Embed]:
    from torchvision import models

    linear = [module for module in backbone.model.modules() if isinstance(module, nn.Linear)]
    transform = models.get_model_weights(network.name).DEFAULT.transforms()
    return transform, lambda x: _input_of(linear[-1], backbone.model, x)


def _input_of(layer: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    """Return the input of a layer in a forward, by a plain hook."""
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    model(x)
    handle.remove()
    return inputs[0]


def _by_transformers(network: Network, backbone: Backbone, folder: Path) -> tuple[Transform, Embed]:
    """The pooled output if the model documents one, else the class token, else the mean over tokens or map."""
    import transformers

    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    children = dict(backbone.model.named_children())
    model: Any = children.get("_inside", backbone.model)

    def embed(x: Tensor) -> Tensor:
        if backbone.classifier is not None:
            return _input_of(model.get_submodule(backbone.classifier), model, x)
        if hasattr(model, "get_image_features"):
            output = model.get_image_features(pixel_values=x)
            return output if isinstance(output, Tensor) else output.pooler_output
        output = (model.base_model if "ForImageClassification" in type(model).__name__ else model)(pixel_values=x)
        for name in ("image_embeds", "pooler_output"):
            if getattr(output, name, None) is not None:
                return getattr(output, name)
        tokens = output.last_hidden_state
        if tokens.ndim == 4:
            return tokens.mean((2, 3))
        has_class_token = any(name.endswith("cls_token") for name, _ in model.named_parameters())
        return tokens[:, 0] if has_class_token else tokens.mean(1)

    return lambda picture: processor(images=picture, return_tensors="pt")["pixel_values"][0], embed


def _folder_of(network: Network, folder: Path) -> Path:
    """Write the configuration and the image processor of a class of transformers, as `save_pretrained` does."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    transformers.logging.set_verbosity(logging.ERROR)
    config, _ = transformers_config(network.name, None)
    config.architectures = [network.name]
    config.save_pretrained(folder)
    kind = config.model_type
    names = next(
        (IMAGE_PROCESSOR_MAPPING_NAMES[key] for key in (kind, network.family) if key in IMAGE_PROCESSOR_MAPPING_NAMES),
        None,
    )
    if names is None:
        raise NotRunError("no image processor belongs to this configuration")
    name = names if isinstance(names, str) else names.get("torchvision") or names["pil"]
    getattr(transformers, name)().save_pretrained(folder)
    return folder
