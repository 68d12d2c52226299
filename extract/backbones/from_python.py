"""Backbones from a Python file of the user: `python/path/to/file.py:factory`.

The factory takes no arguments and returns the model and its preprocessing:

    def factory():
        model = MyNet()
        model.load_state_dict(torch.load("weights.pth", weights_only=True))
        return model, transform        # RGB picture -> (3, H, W) float32, the same in every call

A vision transformer states the number of tokens before its patch tokens (class token, registers), so that tokens can be
pooled: `model.num_prefix_tokens = 1`. See `extract.backbones.user_code.stated_tokens`.

The code of the file is run: name only files that you trust. This code, and that of the neighbouring files it imports,
is part of the fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extract.backbones.backbone import LoadedBackbone, LoadRequest
from extract.backbones.output_as_embedding import with_own_output
from extract.backbones.preprocessing import Preprocessing, from_transform, overridden
from extract.backbones.user_code import (
    code_sha256,
    evaluated,
    function_from,
    importing_from,
    model_and_transform,
    stated_tokens,
)
from extract.backbones.weights import Weights, build_with_weights, weights_sha256
from extract.errors import InputError
from extract.system.foreign_code import described

__all__ = ["load"]


def load(request: LoadRequest) -> LoadedBackbone:
    """Load FILE.py:FACTORY; weights: a file, or None for those of the factory.

    Raises:
        InputError: the file cannot be imported, the factory fails or does not return (model, transform), or the request
            asks for random weights or a missing head.
        UnknownNameError: the file has no such factory.
    """
    name, weights, seed = request.name, request.weights, request.seed
    if request.allow_missing_head:
        raise InputError(
            f"{request.spec}: the classifier layer is unknown, so --allow-missing-head is not supported",
            hint="the factory must return a model without a classifier",
        )
    file, _, factory_name = name.rpartition(":")
    path = Path(file).resolve()
    if not factory_name.isidentifier() or path.suffix != ".py":
        raise InputError(f"python/{name}: expected python/FILE.py:FACTORY")
    if weights == "random":
        raise InputError(f"python/{name}: the factory chooses the weights; --weights random is not supported")
    files = {path}
    with importing_from(path.parent) as neighbours:
        factory = function_from(path, factory_name, "factory")
    files |= neighbours
    built: list[tuple[nn.Module, Callable[..., Tensor]]] = []

    def build() -> nn.Module:
        with importing_from(path.parent) as neighbours:
            built.append(_run_factory(factory, path, factory_name))
        files.update(neighbours)
        return built[-1][0]

    if weights is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build()
        loaded = Weights(f"as loaded by {path.name}:{factory_name}", weights_sha256(model))
    else:
        model, loaded, _ = build_with_weights(build, weights, seed, f"python/{name}", lambda model: None)
    title = f"{path.name}:{factory_name} of code with sha256 {code_sha256(path.parent, files)}"
    preprocessing = _preprocessing(built[-1][1], title, path, factory_name)
    size = overridden(preprocessing, request.preprocessing).crop_px
    what = f"the model of {path}:{factory_name}()"
    tokens = stated_tokens(model, what)
    model, no_embedding, notes = with_own_output(evaluated(model, what), size)
    return LoadedBackbone(
        spec=f"python/{path}:{factory_name}",
        architecture=f"python/{title}",
        model=model,
        weights=loaded,
        preprocessing=preprocessing,
        no_embedding=no_embedding,
        notes=notes,
        **tokens._asdict(),
    )


def _run_factory(factory: Callable[[], Any], path: Path, name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    try:
        returned = factory()
    except Exception as error:
        raise InputError(f"{path}:{name}() failed: {described(error)}") from error
    expected = "(model, transform), where the transform maps an RGB picture to a (3, H, W) float32 tensor"
    return model_and_transform(returned, f"{path}:{name}()", expected)


def _preprocessing(transform: Callable[..., Tensor], title: str, path: Path, name: str) -> Preprocessing:
    try:
        return from_transform(transform, f"that of {title}")
    except InputError as error:
        raise InputError(f"the transform of {path}:{name}() {error}") from error
