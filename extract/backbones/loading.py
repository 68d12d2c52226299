"""Load a backbone or its text tower by spec."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from extract.backbones.backbone import LoadedBackbone, LoadRequest, TextTower
from extract.backbones.preprocessing import check_normalisation, overridden
from extract.backbones.sources import SOURCES, BackboneSource, unknown_spec
from extract.backbones.weights import WeightsFile
from extract.errors import InputError, LayertapError, first_line
from extract.system.foreign_code import described, exits_refused
from extract.system.torch_state import device_named

__all__ = ["load", "load_text_tower", "locate_weights", "permitted"]


def load(
    spec: str,
    *,
    weights: str | None,
    device: str,
    seed: int,
    allow_missing_head: bool,
    preprocessing: Mapping[str, Any] | None,
) -> LoadedBackbone:
    """Implement `extract.load_backbone`, with the same arguments and errors."""
    torch_device = device_named(device)
    overrides = {key: value for key, value in (preprocessing or {}).items() if value is not None}
    check_normalisation(overrides)
    source, request = _request(spec, weights, seed, allow_missing_head, overrides)
    backbone = _load(source, request)
    backbone.model.eval()
    backbone.model.to(torch_device)  # in place; the model's own method may return something else
    return replace(
        backbone,
        preprocessing=overridden(backbone.preprocessing, overrides),
        device=torch_device,
        notes=(*backbone.notes, *backbone.weights.notes),
        asked={"weights": weights, "seed": seed, "allow_missing_head": allow_missing_head, "preprocessing": overrides},
    )


def _load(source: BackboneSource, request: LoadRequest) -> LoadedBackbone:
    """Load a backbone; any fault of a user's own code is an error of one line."""
    if not source.runs_code:
        return source.load(request)
    with exits_refused():
        try:
            return source.load(request)
        except (LayertapError, MemoryError):
            raise
        except Exception as error:
            raise InputError(f"{request.spec} cannot be loaded: {described(error)}") from error


def locate_weights(spec: str) -> WeightsFile | None:
    """Say where the published weights of a backbone are; nothing is loaded or downloaded.

    Returns:
        the file; None if only running the code of the backbone tells.

    Raises:
        UnknownNameError, InputError: the backbone does not exist, or has no published weights.
        LayertapError: a library is missing.
    """
    source, request = _request(spec, None, 0, False, {})
    return source.locate(request) if source.locate is not None else None


def load_text_tower(spec: str, *, weights: str | None = None, device: str = "auto", seed: int = 0) -> TextTower:
    """Load the text tower that was trained with the image tower of a backbone (CLIP, SigLIP and similar models).

        tower = load_text_tower("open_clip/ViT-B-32:laion2b_s34b_b79k")
        tower.features(["a photo of a cat"])    # (1, 512), in the same space as image embeddings

    Args:
        spec: `open_clip/NAME:TAG`, `hf/NAME` or `hf/FOLDER`.
        weights: see `load_backbone`; a file must hold both towers.
        device: see `load_backbone`.
        seed: seed of random weights.

    Raises:
        InputError: the model or its weights file has no text tower.
        UnknownNameError, LayertapError: see `load_backbone`.
    """
    torch_device = device_named(device)
    source, request = _request(spec, weights, seed, False, {})
    if source.load_text_tower is None:
        sources = " and ".join(f"{name}/" for name, other in SOURCES.items() if other.load_text_tower)
        raise InputError(f"{spec} has no text tower; only models of {sources} have a text tower")
    tower = source.load_text_tower(request)
    return replace(tower, model=tower.model.eval().to(torch_device), device=torch_device)


def permitted(recorded: str, named: str | None, where: Path | str, weights: str | None = None) -> str:
    """Return the spec of the backbone to load for a file that records a spec.

    A data set or probe may come from an untrusted source. The spec in it may name any file on this machine or any
    repository. So code is run, and a repository that is not in the cache is asked, with the token of the user, only
    if the user names the backbone. Weights of backbones that an installed library lists are downloaded.

    Args:
        recorded: the spec in the file.
        named: the spec given by the user, or None. It replaces the recorded spec; the fingerprint shows whether both
            name the same backbone.
        where: the file or folder, named in errors.
        weights: as in `load_backbone`.

    Raises:
        InputError: loading the recorded backbone runs code or asks a repository, and the user has not named a backbone.
        LayertapError: as in `locate_weights`.
    """
    source = SOURCES.get(recorded.partition("/")[0])
    if named is not None or source is None:
        return named or recorded
    if source.runs_code:
        raise InputError(
            f"{where} records the backbone {recorded!r}, and loading this backbone runs its code",
            hint=f"if you trust the code, name the backbone: --backbone {shlex.quote(recorded)}",
        )
    if source.locate is not None and source.name_is_path:
        try:
            file = source.locate(_request(recorded, weights, 0, False, {})[1])
        except LayertapError:
            raise
        except (OSError, ValueError) as error:  # of the hub's library
            raise InputError(
                f"{where} records the backbone {recorded!r}, which is no name: {first_line(error)}"
            ) from error
        if file.path is None and file.url:
            raise InputError(
                f"{where} records the backbone {recorded!r}, which would be downloaded from a repository that only "
                f"{where} names",
                hint=f"to allow this, name the backbone: --backbone {shlex.quote(recorded)}",
            )
    return recorded


def _request(
    spec: str, weights: str | None, seed: int, allow_missing_head: bool, preprocessing: Mapping[str, Any]
) -> tuple[BackboneSource, LoadRequest]:
    source, _, name = spec.partition("/")
    if source not in SOURCES or not name:
        raise unknown_spec(spec)
    return SOURCES[source], LoadRequest(spec, name, weights, seed, allow_missing_head, preprocessing)
