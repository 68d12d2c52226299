"""Backbones of torch.hub: an entry of the `hubconf.py` of a repository or of a local folder. Its code is run.

An entry returns the model, or a tuple of the model and its transform. For a model without a transform, the
preprocessing of DINO and DINOv2 is assumed (shorter side 256, bicubic, centre crop 224, ImageNet mean and standard
deviation; `eval_linear.py` of facebookresearch/dino, `dinov2/data/transforms.py` of facebookresearch/dinov2), and the
assumption is reported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import nn

from extract.backbones.backbone import LoadedBackbone, LoadRequest, downloading
from extract.backbones.output_as_embedding import with_own_output
from extract.backbones.preprocessing import OVERRIDES, Preprocessing, from_transform, overridden
from extract.backbones.user_code import code_sha256, evaluated, importing_from, model_and_transform, stated_tokens
from extract.backbones.weights import Weights, build_with_weights, is_named, weights_sha256
from extract.errors import InputError, unknown_name
from extract.system.foreign_code import described

__all__ = ["load"]

_ASSUMED = Preprocessing(256, (224, 224), "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def load(request: LoadRequest) -> LoadedBackbone:
    """Load OWNER/REPO[:BRANCH]:ENTRY or FOLDER:ENTRY; weights: a file, or None for those that the entry loads."""
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
    built: list[tuple[nn.Module, Any]] = []

    def build() -> nn.Module:
        if local:
            with importing_from(Path(folder)):
                returned = _run(request, folder, entry, options)
        else:
            returned = downloading(
                request, lambda: _run(request, repository, entry, options), lambda: _by_hand(repository)
            )
        built.append(_parts(spec, returned))
        return built[-1][0]

    if weights is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            model = build()
        loaded = Weights(f"as loaded by hub/{repository}:{entry}", weights_sha256(model))
    else:
        model, loaded, _ = build_with_weights(build, weights, request.seed, spec, lambda model: None)
    code_folder = Path(folder) if local else _cached(repository)
    code = code_sha256(code_folder, code_folder.rglob("*.py"))
    title = f"{Path(folder).name if local else repository}:{entry} of code with sha256 {code}"
    transform = built[-1][1]
    notes: tuple[str, ...] = ()
    preprocessing = _ASSUMED
    if transform is not None and request.preprocessing.keys() < OVERRIDES:
        try:
            preprocessing = from_transform(transform, f"that of {title}")
        except InputError as error:
            raise InputError(f"{spec}: the transform of the entry {error}") from error
    elif request.preprocessing.keys() < OVERRIDES:
        notes = (
            f"{spec} has no transform; assumed preprocessing: {_ASSUMED}. If this is wrong, give --size --crop "
            "--interpolation --mean --std",
        )
    size = overridden(preprocessing, request.preprocessing).crop_px
    tokens = stated_tokens(model, f"the model of {spec}")
    model, no_embedding, embedding_notes = with_own_output(evaluated(model, f"the model of {spec}"), size)
    return LoadedBackbone(
        spec=f"hub/{folder}:{entry}" if local else spec,
        architecture=f"hub/{title}",
        model=model,
        weights=loaded,
        preprocessing=preprocessing,
        no_embedding=no_embedding,
        notes=(*notes, *embedding_notes),
        **tokens._asdict(),
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


def _parts(spec: str, returned: Any) -> tuple[nn.Module, Any]:
    pair = (returned, _no_transform) if isinstance(returned, nn.Module) else returned
    model, transform = model_and_transform(pair, spec, "a model, or a tuple (model, transform)")
    return model, None if transform is _no_transform else transform


def _no_transform(picture: Any) -> Any:
    """Stand for the transform of an entry that returns only a model."""
    raise NotImplementedError


def _cached(repository: str) -> Path:
    """Return the folder in torch.hub's cache for a repository: OWNER_REPO_BRANCH; the newest if BRANCH is not given."""
    name, _, branch = repository.partition(":")
    branches = [branch] if branch else ["main", "master"]
    folders = [Path(torch.hub.get_dir()) / f"{name}_{branch}".replace("/", "_") for branch in branches]
    existing = [folder for folder in folders if folder.is_dir()]
    return max(existing, key=lambda folder: folder.stat().st_mtime) if existing else folders[0]


def _by_hand(repository: str) -> str:
    return f"clone the repository {repository.partition(':')[0]}, and name its folder: -b hub/FOLDER:ENTRY"
