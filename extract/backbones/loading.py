"""Load a backbone, or the text tower beside it, by its spec."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from extract.backbones.backbone import Asked, LoadedBackbone
from extract.backbones.preprocessing import overridden
from extract.backbones.sources import SOURCES, Source
from extract.backbones.text_tower import TextTower
from extract.errors import InputError, unknown_name
from extract.system.torch_state import device_named

__all__ = ["load", "load_text_tower", "permitted"]


def load(
    spec: str,
    *,
    weights: str | None,
    device: str,
    seed: int,
    allow_missing_head: bool,
    preprocessing: Mapping[str, Any] | None,
) -> LoadedBackbone:
    """What `extract.load_backbone` wraps; arguments and errors as there."""
    place = device_named(device)
    given = {key: value for key, value in (preprocessing or {}).items() if value is not None}
    source, asked = _asked(spec, weights, seed, allow_missing_head, given)
    backbone = source.load(asked)
    return replace(
        backbone,
        model=backbone.model.eval().to(place),
        preprocessing=overridden(backbone.preprocessing, given),
        device=place,
        notes=(*backbone.notes, *backbone.weights.notes),
        asked={"weights": weights, "seed": seed, "allow_missing_head": allow_missing_head, "preprocessing": given},
    )


def load_text_tower(
    spec: str,
    *,
    weights: str | None = None,
    device: str = "auto",
    seed: int = 0,
) -> TextTower:
    """Load the text tower that stands beside the image tower of a backbone (CLIP, SigLIP and the like).

        tower = load_text_tower("open_clip/ViT-B-32:laion2b_s34b_b79k")
        tower.features(["a photo of a cat"])    # (1, 512), of the space of the images' embeddings

    Args:
        spec: `open_clip/NAME:TAG`, `hf/NAME` or `hf/FOLDER`.
        weights: as of `load_backbone`; a file must hold both towers.
        device: as of `load_backbone`.
        seed: of random weights.

    Raises:
        InputError: the model has no text tower, or its file has not.
        UnknownNameError, LayertapError: as of `load_backbone`.
    """
    place = device_named(device)
    source, asked = _asked(spec, weights, seed, False, {})
    if source.load_text_tower is None:
        having = " and ".join(f"{name}/" for name, other in SOURCES.items() if other.load_text_tower)
        raise InputError(f"{spec} has no text tower; models of {having} have")
    tower = source.load_text_tower(asked)
    return replace(tower, model=tower.model.eval().to(place), device=place)


def permitted(recorded: str, named: str | None, where: Path | str) -> str:
    """The spec of the backbone to load for a file that records one.

    A data set or probe may come from anyone. A spec that it records may name any file of this machine, or any
    repository; so code is run only where the user names the backbone.

    Args:
        recorded: the spec in the file.
        named: the spec that the user has given, or None. It replaces the recorded one; the fingerprint tells whether
            it is the same backbone.
        where: the file or folder, for the error.

    Raises:
        InputError: the recorded backbone is code, and the user has not named it.
    """
    source = SOURCES.get(recorded.partition("/")[0])
    if named is None and source is not None and source.runs_code:
        raise InputError(
            f"{where} records the backbone {recorded!r}, and to load it is to run its code. If you trust it, name it: "
            f"--backbone {shlex.quote(recorded)}"
        )
    return named or recorded


def _asked(
    spec: str, weights: str | None, seed: int, allow_missing_head: bool, preprocessing: Mapping[str, Any]
) -> tuple[Source, Asked]:
    source, _, name = spec.partition("/")
    if source not in SOURCES or not name:
        raise unknown_name("backbone", spec, [f"{known}/..." for known in SOURCES], hint="A spec is SOURCE/NAME")
    return SOURCES[source], Asked(spec, name, weights, seed, allow_missing_head, preprocessing)
