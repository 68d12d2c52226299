"""Backbones from a Python file of the user: `python/path/to/file.py:factory`.

The factory takes no arguments and returns the model and its preprocessing:

    def factory():
        model = MyNet()
        model.load_state_dict(torch.load("weights.pth", weights_only=True))
        return model, transform        # RGB picture -> (3, H, W) float32

The code of the file is run: name only files that you trust. This code, and that of the neighbouring files it imports,
is part of the fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extract.backbones.backbone import Asked, LoadedBackbone
from extract.backbones.output_as_embedding import with_own_output
from extract.backbones.preprocessing import Preprocessing, from_transform, overridden
from extract.backbones.user_code import code_sha256, function_from, importing_from
from extract.backbones.weights import Weights, given_weights, weights_sha256
from extract.errors import InputError, first_line

__all__ = ["load"]


def load(asked: Asked) -> LoadedBackbone:
    """Load FILE.py:FACTORY; weights: a file, or None for those of the factory.

    Raises:
        InputError: the file cannot be imported, the factory fails or does not return (model, transform), or the request
            asks for random weights or a missing head.
        UnknownNameError: the file has no such factory.
    """
    name, weights, seed = asked.name, asked.weights, asked.seed
    if asked.allow_missing_head:
        raise InputError(
            f"{asked.spec}: the classifier layer is unknown, so --allow-missing-head is not supported; the factory "
            "must return a model without a classifier"
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
    made: list[tuple[nn.Module, Callable[..., Tensor]]] = []

    def make() -> nn.Module:
        with importing_from(path.parent) as neighbours:
            made.append(_made(factory, path, factory_name))
        files.update(neighbours)
        return made[-1][0]

    if weights is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make()
        loaded = Weights(f"as loaded by {path.name}:{factory_name}", weights_sha256(model))
    else:
        model, loaded, _ = given_weights(make, weights, seed, f"python/{name}", lambda model: None)
    title = f"{path.name}:{factory_name} of code with sha256 {code_sha256(path.parent, files)}"
    preprocessing = _preprocessing(made[-1][1], title, path, factory_name)
    size = overridden(preprocessing, asked.preprocessing).crop_px
    model, why, notes = with_own_output(model.eval(), size)
    return LoadedBackbone(
        spec=f"python/{path}:{factory_name}",
        architecture=f"python/{title}",
        model=model,
        weights=loaded,
        preprocessing=preprocessing,
        no_embedding=why,
        notes=notes,
    )


def _made(factory: Callable[[], Any], path: Path, name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    try:
        made = factory()
    except Exception as error:
        raise InputError(f"{path}:{name}() failed: {type(error).__name__}: {first_line(error)}") from error
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made
    found = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
    raise InputError(
        f"{path}:{name}() returned {found}; expected (model, transform), where the transform maps an RGB picture to a "
        "(3, H, W) float32 tensor"
    )


def _preprocessing(transform: Callable[..., Tensor], title: str, path: Path, name: str) -> Preprocessing:
    try:
        return from_transform(transform, f"that of {title}")
    except InputError as error:
        raise InputError(f"the transform of {path}:{name}() {error}") from error
