"""Import Python code of users and hubs, separate from all other code. `loading.permitted` decides when it may run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from extract.backbones.backbone import LoadedBackbone
from extract.backbones.output_as_embedding import with_own_output
from extract.backbones.preprocessing import OVERRIDES, Preprocessing, from_transform, overridden
from extract.backbones.weights import LoadRequest, build_with_weights
from extract.errors import InputError, unknown_name
from extract.system.foreign_code import described

__all__ = ["backbone_of_code", "code_sha256", "function_from", "importing_from", "model_and_transform"]

# The preprocessing of DINO and DINOv2: `eval_linear.py` of facebookresearch/dino, `dinov2/data/transforms.py` of
# facebookresearch/dinov2.
_ASSUMED = Preprocessing(256, (224, 224), "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@contextlib.contextmanager
def importing_from(folder: Path) -> Iterator[set[Path]]:
    """Context manager: let code in a folder import its neighbours, not modules of the same names from other folders.

    On exit, the folder's modules are removed from `sys.modules`, and their files are added to the yielded set. Objects
    that use these modules keep them alive.
    """
    files: set[Path] = set()
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    here = {top for top in tops if (folder / f"{top}.py").exists() or (folder / top / "__init__.py").exists()}
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in here and not _is_of_library(module, folder)
    }
    for name in hidden:
        del sys.modules[name]
    loaded_before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield files
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - loaded_before:
            if name.partition(".")[0] not in loaded_before and _is_in_folder(sys.modules[name], folder):
                files.add(Path(str(sys.modules.pop(name).__file__)).resolve())
        sys.modules.update(hidden)


def function_from(path: Path, name: str, kind: str = "function") -> Callable[..., Any]:
    """Run a Python file and return one of its functions; any callable is accepted.

    Args:
        path: the file.
        name: name of the function.
        kind: kind of function, named in errors.

    Raises:
        InputError: the file cannot be read or imported.
        UnknownNameError: the file has no such function.
    """
    try:
        path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    module_name = f"layertap_python_file_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # so that its classes can be pickled for worker processes
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} cannot be imported: {described(error)}") from error
    functions = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    if name not in functions:
        raise unknown_name(kind, name, functions, str(path))
    function: Callable[..., Any] = functions[name]
    return function


def model_and_transform(
    returned: object, what: str, expected: str, may_be_alone: bool = False
) -> tuple[nn.Module, Callable[..., Any] | None]:
    """Return the result of a user's function if it is (model, transform).

    Args:
        returned: the result.
        what: the function, named in errors.
        expected: the expected result, named in errors.
        may_be_alone: whether it may be a model, without a transform.

    Raises:
        InputError: it is something else, or the model is not one that hooks can be registered on.
    """
    alone = may_be_alone and isinstance(returned, nn.Module)
    pair = (returned, None) if alone else returned
    if isinstance(pair, tuple) and len(pair) == 2:
        model, transform = pair
        if isinstance(model, ScriptModule):
            raise InputError(
                f"{what} returned a scripted or traced model, whose code ignores hooks",
                hint="return the Python module that it was created from",
            )
        if isinstance(model, nn.Module) and (alone or callable(transform)):
            return model, transform
    kinds = [_kind(part) for part in returned] if isinstance(returned, tuple) else []
    found = f"({', '.join(kinds)})" if kinds else _kind(returned)
    raise InputError(f"{what} returned {found}; expected {expected}")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def backbone_of_code(
    request: LoadRequest,
    build: Callable[[], tuple[nn.Module, Callable[..., Any] | None]],
    origin: str,
    title: Callable[[], str],
    spec: str,
    *,
    model_name: str,
    transform_name: str,
) -> LoadedBackbone:
    """Load a backbone that code builds. A model without a transform has the assumed preprocessing, which is reported.

    Args:
        request: its weights are a file, or None for those that the code loads.
        build: runs the code; returns the model and its transform.
        origin: what loads the weights.
        title: returns the name and hash of the code, once it has run.
        spec: spec of the backbone, valid in any folder.
        model_name: what the model is called in errors.
        transform_name: what the transform is called in errors.

    Raises:
        InputError: the weights do not fit, or the model or the transform has a fault.
    """
    built: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def build_model() -> nn.Module:
        built.append(build())
        return built[-1][0]

    model, weights, _ = build_with_weights(request, build_model, origin=origin)
    code, transform = title(), built[-1][1]
    notes: tuple[str, ...] = ()
    preprocessing = _ASSUMED
    if request.preprocessing.keys() >= OVERRIDES:
        pass
    elif transform is None:
        notes = (
            f"{request.spec} has no transform; assumed preprocessing: {_ASSUMED}. If this is wrong, give --size --crop "
            "--interpolation --mean --std",
        )
    else:
        try:
            preprocessing = from_transform(transform, f"that of {code}")
        except InputError as error:
            raise InputError(f"{transform_name} {error}") from error
    size = overridden(preprocessing, request.preprocessing).crop_px
    tokens = stated_tokens(model, model_name)
    model.eval()
    if model.training:
        raise InputError(
            f"eval() of {model_name} left the model in training mode",
            hint="an override of eval() or train() must call the method of nn.Module, and return the model",
        )
    model, no_embedding, embedding_notes = with_own_output(model, size)
    return LoadedBackbone(
        spec=spec,
        architecture=f"{spec.partition('/')[0]}/{code}",
        model=model,
        weights=weights,
        preprocessing=preprocessing,
        no_embedding=no_embedding,
        notes=(*notes, *embedding_notes),
        **tokens,
    )


def stated_tokens(model: nn.Module, what: str) -> dict[str, Any]:
    """Return the attributes of `LoadedBackbone` about tokens, from attributes of a model, named as in timm.

    `num_prefix_tokens`: number of tokens before the patch tokens; 0 if absent. `has_class_token`: whether the first of
    them is a class token; True if absent. `global_pool`: "token" if the embedding is the class token.
    `patch_embed.num_patches`: number of patches, needed for unusual patch sizes only. The position of tokens cannot be
    measured, so nothing is inferred from the number of tokens: of 197 tokens, the class token may be the first, the
    last or, in Vision Mamba, in the middle.

    Args:
        model: the model.
        what: the model, named in errors.

    Raises:
        InputError: `num_prefix_tokens` is not an integer from 0.
    """
    count = getattr(model, "num_prefix_tokens", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise InputError(f"num_prefix_tokens of {what} is {count!r}; expected an integer from 0")
    class_token = count > 0 and bool(getattr(model, "has_class_token", True))
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    return {
        "prefix_tokens": count,
        "class_token": class_token,
        "reads_class_token": class_token and getattr(model, "global_pool", None) == "token",
        "patches": patches if isinstance(patches, int) else None,
    }


def code_sha256(folder: Path, files: Iterable[Path]) -> str:
    """Return the sha256 over files of a folder, sorted by path: relative path, a zero byte, content, a zero byte."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _is_of_library(module: ModuleType, folder: Path) -> bool:
    """Return whether a loaded module is part of Python, of an installed library, or of the folder."""
    file = getattr(module, "__file__", None)
    return file is None or any(Path(file).is_relative_to(parent) for parent in (sys.prefix, sys.base_prefix, folder))


def _is_in_folder(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)
