"""Sources of backbones. To add a source, write `from_X.py` and add a record to `SOURCES`; if it needs a library, add
an extra to `pyproject.toml`.

Below, the backbones that can be named are listed, and described without their weights.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from extract import defaults
from extract.backbones import from_hf, from_open_clip, from_timm, from_torchvision, user_code
from extract.backbones.backbone import Entry, LoadedBackbone, LoadRequest, TextTower, quiet
from extract.backbones.weights import WEIGHTS_FILES, WeightsFile
from extract.errors import InputError, LayertapError, UnknownNameError, unknown_name

__all__ = [
    "SOURCES", "BackboneSource", "Entry", "SourceListing", "describe", "list_sources", "match_specs", "unknown_spec",
]  # fmt: skip


def _no_names(pattern: str) -> list[str]:
    return []


@dataclass(frozen=True)
class BackboneSource:
    """A source of backbones. Its functions import optional libraries when they are called.

    Attributes:
        load: loads a backbone.
        runs_code: whether loading a backbone runs code that its name points to. Such a backbone is loaded only if the
            user names it, never because a data set or a probe records it. No default: each source states it.
        names: returns the known names that may match a pattern; raises LayertapError if a library is missing.
        describe: maps (spec, name, whether to build the model) to a description without the weights; None if the source
            has no descriptions, and then `names` returns no names.
        locate: says where the published weights are, or would be downloaded from, without loading them; None if only
            running the code of a backbone tells.
        load_text_tower: loads the text tower of a backbone; None if no backbone of the source has a text tower.
        note: which other names are accepted; printed by `layertap list`.
        same_layers_at_random: whether a model has the same layers with random weights as with published weights; then
            `layertap list` downloads no weights.
        name_is_path: whether a name, up to the first colon, may be a path.
        library: name of an optional package whose version the provenance of features records; empty if there is none.
    """

    load: Callable[[LoadRequest], LoadedBackbone]
    runs_code: bool
    names: Callable[[str], list[str]] = _no_names
    describe: Callable[[str, str, bool], Entry] | None = None
    locate: Callable[[LoadRequest], WeightsFile] | None = None
    load_text_tower: Callable[[LoadRequest], TextTower] | None = None
    note: str = ""
    same_layers_at_random: bool = False
    name_is_path: bool = False
    library: str = ""


def _of_library(module: Any, **properties: Any) -> BackboneSource:
    """Return the source of a library, for which a module has `load`, `names`, `describe` and `locate`."""
    return BackboneSource(module.load, False, module.names, module.describe, module.locate, **properties)


SOURCES: dict[str, BackboneSource] = {
    "bundled": BackboneSource(
        from_timm.load_bundled,
        runs_code=False,
        names=lambda pattern: ["efficientnet_lite0"],
        describe=from_timm.describe_bundled,
        locate=from_timm.locate_bundled,
        note="included in the installation",
    ),
    "torchvision": _of_library(from_torchvision, same_layers_at_random=True),
    "timm": _of_library(from_timm, note="a tag may follow, such as timm/resnet50.a1_in1k", same_layers_at_random=True),
    "open_clip": _of_library(
        from_open_clip,
        load_text_tower=from_open_clip.load_text_tower,
        library="open_clip_torch",
        note="a tag must follow, such as open_clip/ViT-B-32:openai",
        same_layers_at_random=True,
    ),
    "hf": _of_library(
        from_hf,
        load_text_tower=from_hf.load_text_tower,
        library="transformers",
        note="any vision model of the hub, such as hf/facebook/dinov2-base, or a folder; listed: the local cache",
        name_is_path=True,
    ),
    "hub": BackboneSource(
        user_code.load_hub,
        runs_code=True,
        note="hub/OWNER/REPO:ENTRY or hub/FOLDER:ENTRY, such as hub/facebookresearch/dino:dino_vits16",
        name_is_path=True,
    ),
    "python": BackboneSource(
        user_code.load_python,
        runs_code=True,
        note="python/FILE.py:FACTORY, your own function that returns (model, transform)",
        name_is_path=True,
    ),
}


def unknown_spec(spec: str) -> UnknownNameError:
    """Return an error for a spec that is not SOURCE/NAME; nothing is downloaded.

    The name is looked up in the catalogues of the installed sources: `resnet50` is in those of torchvision and timm.
    """
    source, slash, name = spec.partition("/")
    if source in SOURCES:
        note = f" ({SOURCES[source].note})" if SOURCES[source].note else ""
        listed = f"list them: layertap list {source}" if SOURCES[source].describe else ""
        return UnknownNameError(f"backbone {spec!r} has no name; expected {source}/NAME{note}", hint=listed)
    if spec.endswith(WEIGHTS_FILES):
        problem, hint = "is a file of weights", "give it with --weights, and its network with -b SOURCE/NAME"
        return UnknownNameError(f"backbone {spec!r} {problem}", hint=hint)
    near = difflib.get_close_matches(source, SOURCES, n=1) if name else []
    specs = _called(name if slash else spec)
    if ".py:" in spec:
        hint = f"your own function is python/{spec}"
    elif near and f"{near[0]}/{name}" not in specs:
        hint = f"did you mean {near[0]}/{name}?"
    elif specs:
        hint = f"did you mean {' or '.join(specs)}?"
    elif name:
        hint = f"the sources are {', '.join(SOURCES)}; a model of the Hugging Face hub is hf/{spec}"
    else:
        hint = f"a spec is SOURCE/NAME, such as {defaults.BACKBONE}. List the sources: layertap list"
    return UnknownNameError(f"backbone {spec!r} not found", hint=hint)


def _called(name: str) -> list[str]:
    """Return the specs with this name; if there are none, those with the most similar names."""
    # Libraries of other sources take seconds to import.
    known = {source: entry.names(name) for source, entry in SOURCES.items() if not entry.library}
    exact = [f"{source}/{name}" for source, names in known.items() if name in names]
    return exact or [
        f"{source}/{other}"
        for source, names in known.items()
        for other in difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
    ]


@dataclass(frozen=True)
class SourceListing:
    """The backbones of one source whose names are known on this machine.

    Attributes:
        names: specs; for `hf`, those in its local cache.
        note: which other names are accepted, or why the list is empty.
    """

    names: list[str]
    note: str = ""


def list_sources() -> dict[str, SourceListing]:
    """Return source -> its backbones."""
    return {source: _list_source(source) for source in SOURCES}


def match_specs(pattern: str) -> list[str]:
    """Return the specs that match a pattern; an exact name of `hf` need not be in the cache.

    Args:
        pattern: SOURCE, SOURCE/NAME or a glob.

    Raises:
        UnknownNameError: the source does not exist, or no backbone matches.
        LayertapError: the library of the source is not installed.
    """
    source, _, name = pattern.partition("/")
    if source in SOURCES:
        known = [f"{source}/{known_name}" for known_name in SOURCES[source].names(name or "*")]
    elif set("*?[") & set(source):
        known = [spec for group in SOURCES if fnmatchcase(group, source) for spec in _list_source(group).names]
    elif difflib.get_close_matches(source, SOURCES, n=1):
        raise unknown_name("source", source, SOURCES)
    else:
        raise unknown_spec(pattern)
    specs = [spec for spec in known if fnmatchcase(spec, pattern if name else f"{pattern}/*")]
    if not specs:
        raise unknown_name("backbone", pattern, known)
    return specs


def describe(spec: str, built: bool = True) -> Entry:
    """Describe a backbone; nothing is downloaded except the configuration of a model of `hf`.

    Args:
        spec: a spec that `match_specs` returned.
        built: whether to build the model, without weights, for its number of parameters and its width.

    Raises:
        InputError: backbones of this source cannot be described before they are loaded.
        LayertapError: a library is missing, or a configuration cannot be read.
    """
    source, _, name = spec.partition("/")
    describe_spec = SOURCES[source].describe
    if describe_spec is None:
        raise InputError(f"{spec}: backbones of {source}/ cannot be described before they are loaded")
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        return describe_spec(spec, name, built)


def _list_source(source: str) -> SourceListing:
    try:
        names = SOURCES[source].names("*")
    except LayertapError as error:  # the library of the source is not installed
        return SourceListing([], str(error))
    return SourceListing([f"{source}/{name}" for name in names], SOURCES[source].note)
