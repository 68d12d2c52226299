"""Backbones that code builds: `python/FILE.py:FACTORY` of a user, and `hub/REPOSITORY:ENTRY` of torch.hub.

The code is imported separate from all other code. `extract.backbones.loading.permitted` decides when it may run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError

import torch
from torch import nn
from torch.jit import ScriptModule

from extract.backbones.backbone import LoadedBackbone, LoadRequest, downloading
from extract.backbones.output_as_embedding import with_own_output
from extract.backbones.preprocessing import OVERRIDES, Preprocessing, from_transform, overridden
from extract.backbones.weights import build_with_weights, is_named
from extract.errors import InputError, unknown_name
from extract.system.foreign_code import described

__all__ = ["function_from", "importing_from", "load_hub", "load_python", "stated_tokens"]

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


def _model_and_transform(
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


def _backbone_of_code(
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


def _code_sha256(folder: Path, files: Iterable[Path]) -> str:
    """Return the sha256 over files of a folder, sorted by path: relative path, a zero byte, content, a zero byte."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def load_python(request: LoadRequest) -> LoadedBackbone:
    """Load FILE.py:FACTORY; weights: a file, or None for those of the factory.

    The factory takes no arguments and returns the model and its preprocessing:

        def factory():
            model = MyNet()
            model.load_state_dict(torch.load("weights.pth", weights_only=True))
            return model, transform        # RGB picture -> (3, H, W) float32, the same in every call

    A vision transformer states the number of tokens before its patch tokens, see `stated_tokens`. The code of the file
    is run: name only files that you trust. This code, and that of the neighbouring files it imports, is part of the
    fingerprint.

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
            built = _model_and_transform(returned, where, expected)
        files.update(neighbours)
        return built

    return _backbone_of_code(
        request,
        build,
        f"{path.name}:{factory_name}",
        lambda: f"{path.name}:{factory_name} of code with sha256 {_code_sha256(path.parent, files)}",
        f"python/{path}:{factory_name}",
        model_name=f"the model of {where}",
        transform_name=f"the transform of {where}",
    )


def load_hub(request: LoadRequest) -> LoadedBackbone:
    """Load OWNER/REPO[:BRANCH]:ENTRY or FOLDER:ENTRY of torch.hub; weights: a file, or None for those of the entry.

    An entry of `hubconf.py` returns the model, or a tuple of the model and its transform.
    """
    spec, weights = request.spec, request.weights
    repository, _, entry = request.name.rpartition(":")
    if not repository or not entry.isidentifier():
        raise InputError(f"{spec}: expected hub/OWNER/REPO:ENTRY or hub/FOLDER:ENTRY")
    local = Path(repository).expanduser().is_dir()
    folder = str(Path(repository).expanduser().resolve())
    if local and not (Path(folder) / "hubconf.py").is_file():
        raise InputError(f"{spec}: {folder} has no hubconf.py")
    if not local and repository.count("/") != 1:
        raise InputError(f"{spec}: {repository} is not a folder, and not a repository OWNER/REPO or OWNER/REPO:BRANCH")
    if weights is not None and is_named(weights):
        raise InputError(f"{spec}: an entry loads its own weights; --weights must be a file, not {weights!r}")
    if weights == "random":
        raise InputError(f"{spec}: the entry chooses the weights; --weights random is not supported")
    options: dict[str, Any] = {"source": "local"} if local else {"source": "github", "trust_repo": True}

    def build() -> tuple[nn.Module, Callable[..., Any] | None]:
        if local:
            with importing_from(Path(folder)):
                returned = _run(request, folder, entry, options)
        else:
            returned = downloading(
                request, lambda: _run(request, repository, entry, options), lambda: _by_hand(repository)
            )
        return _model_and_transform(returned, spec, "a model, or a tuple (model, transform)", may_be_alone=True)

    def title() -> str:
        code = Path(folder) if local else _cached(repository)
        name = Path(folder).name if local else repository
        return f"{name}:{entry} of code with sha256 {_code_sha256(code, code.rglob('*.py'))}"

    return _backbone_of_code(
        request,
        build,
        f"hub/{repository}:{entry}",
        title,
        f"hub/{folder}:{entry}" if local else spec,
        model_name=f"the model of {spec}",
        transform_name=f"{spec}: the transform of the entry",
    )


def _run(request: LoadRequest, repository: str, entry: str, options: dict[str, Any]) -> Any:
    hub: Any = torch.hub  # its functions have no type annotations
    try:
        return hub.load(repository, entry, skip_validation=True, verbose=False, **options)
    except URLError:
        raise
    except Exception as error:  # third-party code may raise anything
        if options["source"] == "github" and "internet connection" in str(error):
            raise
        if "Cannot find callable" in str(error):
            folder = Path(repository) if options["source"] == "local" else _cached(repository)
            code = (folder / "hubconf.py").read_text(encoding="utf-8", errors="replace")
            known = re.findall(r"^def ([a-zA-Z]\w*)", code, re.MULTILINE)
            raise unknown_name("entry", entry, known, f"hub/{request.name.rpartition(':')[0]}") from error
        raise InputError(f"{request.spec} failed: {described(error)}") from error


def _cached(repository: str) -> Path:
    """Return the folder in torch.hub's cache for a repository: OWNER_REPO_BRANCH; the newest if BRANCH is not given."""
    name, _, branch = repository.partition(":")
    branches = [branch] if branch else ["main", "master"]
    folders = [Path(torch.hub.get_dir()) / f"{name}_{branch}".replace("/", "_") for branch in branches]
    existing = [folder for folder in folders if folder.is_dir()]
    return max(existing, key=lambda folder: folder.stat().st_mtime) if existing else folders[0]


def _by_hand(repository: str) -> str:
    return f"clone the repository {repository.partition(':')[0]}, and name its folder: -b hub/FOLDER:ENTRY"


def _is_of_library(module: ModuleType, folder: Path) -> bool:
    """Return whether a loaded module is part of Python, of an installed library, or of the folder."""
    file = getattr(module, "__file__", None)
    return file is None or any(Path(file).is_relative_to(parent) for parent in (sys.prefix, sys.base_prefix, folder))


def _is_in_folder(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)
