"""Say what to write in place of a spec that names no source, or a source without a name."""

from __future__ import annotations

import difflib

from extract import defaults
from extract.backbones.sources import SOURCES
from extract.errors import LayertapError, UnknownNameError, unknown_name

__all__ = ["unknown_spec"]

_WEIGHTS_FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


def unknown_spec(spec: str) -> UnknownNameError:
    """Return an error for a spec that is not SOURCE/NAME; nothing is downloaded.

    The name is looked up in the catalogues of the installed sources: `resnet50` is in those of torchvision and timm.
    """
    source, slash, name = spec.partition("/")
    if not spec.strip("/ "):
        example = f"such as {defaults.BACKBONE}"
        return UnknownNameError(
            f"the backbone is empty; expected SOURCE/NAME, {example}", hint="list them: layertap list"
        )
    if source in SOURCES:
        note = f" ({SOURCES[source].note})" if SOURCES[source].note else ""
        listed = f"list them: layertap list {source}" if SOURCES[source].describe else ""
        return UnknownNameError(f"backbone {spec!r} has no name; expected {source}/NAME{note}", hint=listed)
    if spec.endswith(_WEIGHTS_FILES):
        return UnknownNameError(
            f"backbone {spec!r} is a file of weights",
            hint="give it with --weights, and its network with -b SOURCE/NAME",
        )
    if ".py:" in spec:
        return UnknownNameError(f"backbone {spec!r} not found", hint=f"your own function is python/{spec}")
    specs = _called(name if slash else spec)
    if specs:
        return UnknownNameError(f"backbone {spec!r} not found", hint=f"did you mean {' or '.join(specs)}?")
    near = difflib.get_close_matches(source, SOURCES, n=1) if slash else []
    if slash and not near:
        return UnknownNameError(
            f"backbone {spec!r} not found: {source!r} is not a source ({', '.join(SOURCES)})",
            hint=f"a model of the Hugging Face hub is hf/{spec}",
        )
    if near:
        return UnknownNameError(f"backbone {spec!r} not found", hint=f"did you mean {near[0]}/{name}?")
    return unknown_name(
        "backbone",
        spec,
        [f"{known}/..." for known in SOURCES],
        hint="a spec is SOURCE/NAME. List the sources: layertap list",
    )


def _called(name: str) -> list[str]:
    """Return up to four specs with this name; if there are none, those with the most similar names."""
    known = {source: _names(source, name) for source, entry in SOURCES.items() if not entry.library}
    if exact := [f"{source}/{name}" for source, names in known.items() if name in names]:
        return exact
    every = {other for names in known.values() for other in names}
    near = difflib.get_close_matches(name.lower(), every, n=2, cutoff=0.8)
    if near:
        return [f"{source}/{other}" for other in near for source, names in known.items() if other in names][:4]
    # Last, as these libraries take seconds to import. Where a name may be a path, any name is accepted.
    others = [source for source, entry in SOURCES.items() if entry.library and not entry.name_is_path]
    return [f"{source}/{name}" for source in others if name in _names(source, name)]


def _names(source: str, pattern: str) -> list[str]:
    try:
        return SOURCES[source].names(pattern)
    except LayertapError:  # its library is not installed
        return []
