"""List the backbones that can be named, and describe them without their weights."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase

from extract.backbones.backbone import Entry, quiet
from extract.backbones.sources import SOURCES, unknown_spec
from extract.errors import InputError, LayertapError, unknown_name

__all__ = ["Entry", "SourceListing", "describe", "list_sources", "match_specs"]


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
