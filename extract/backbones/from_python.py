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

from torch import nn

from extract.backbones.backbone import LoadedBackbone, LoadRequest
from extract.backbones.user_code import (
    backbone_of_code,
    code_sha256,
    function_from,
    importing_from,
    model_and_transform,
)
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
    name = request.name
    if request.allow_missing_head:
        raise InputError(
            f"{request.spec}: the classifier layer is unknown, so --allow-missing-head is not supported",
            hint="the factory must return a model without a classifier",
        )
    file, _, factory_name = name.rpartition(":")
    path = Path(file).resolve()
    if not factory_name.isidentifier() or path.suffix != ".py":
        raise InputError(f"python/{name}: expected python/FILE.py:FACTORY")
    if request.weights == "random":
        raise InputError(f"python/{name}: the factory chooses the weights; --weights random is not supported")
    where = f"{path}:{factory_name}()"
    files = {path}
    with importing_from(path.parent) as neighbours:
        factory = function_from(path, factory_name, "factory")
    files |= neighbours

    def build() -> tuple[nn.Module, Callable[..., Any] | None]:
        expected = "(model, transform), where the transform maps an RGB picture to a (3, H, W) float32 tensor"
        with importing_from(path.parent) as neighbours:
            try:
                returned = factory()
            except Exception as error:
                raise InputError(f"{where} failed: {described(error)}") from error
            built = model_and_transform(returned, where, expected)
        files.update(neighbours)
        return built

    return backbone_of_code(
        request,
        build,
        f"{path.name}:{factory_name}",
        lambda: f"{path.name}:{factory_name} of code with sha256 {code_sha256(path.parent, files)}",
        f"python/{path}:{factory_name}",
        model_name=f"the model of {where}",
        transform_name=f"the transform of {where}",
    )
