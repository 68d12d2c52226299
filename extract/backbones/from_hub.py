"""Backbones of torch.hub: an entry of the `hubconf.py` of a repository or of a local folder. Its code is run.

An entry returns the model, or a tuple of the model and its transform. For a model without a transform, the
preprocessing of DINO and DINOv2 is assumed, and the assumption is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import nn

from extract.backbones.backbone import LoadedBackbone, LoadRequest, downloading
from extract.backbones.user_code import backbone_of_code, code_sha256, importing_from, model_and_transform
from extract.backbones.weights import is_named
from extract.errors import InputError, unknown_name
from extract.system.foreign_code import described

__all__ = ["load"]


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

    def build() -> tuple[nn.Module, Callable[..., Any] | None]:
        if local:
            with importing_from(Path(folder)):
                returned = _run(request, folder, entry, options)
        else:
            returned = downloading(
                request, lambda: _run(request, repository, entry, options), lambda: _by_hand(repository)
            )
        return model_and_transform(returned, spec, "a model, or a tuple (model, transform)", may_be_alone=True)

    def title() -> str:
        code = Path(folder) if local else _cached(repository)
        name = Path(folder).name if local else repository
        return f"{name}:{entry} of code with sha256 {code_sha256(code, code.rglob('*.py'))}"

    return backbone_of_code(
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
