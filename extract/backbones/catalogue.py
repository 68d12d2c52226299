"""Which backbones can be named, and what is known of them without their weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase

from extract.backbones.catalogue_entry import Entry, quiet
from extract.backbones.sources import SOURCES
from extract.errors import InputError, LayertapError, unknown_name
from extract.taps.layer_names import is_glob

__all__ = ["Entry", "Listed", "describe", "listed", "matching"]


@dataclass(frozen=True)
class Listed:
    """The backbones of one source that are known here by name.

    Attributes:
        names: specs; of `hf` those in its cache here.
        note: what else can be named, or why there are none.
    """

    names: list[str]
    note: str = ""


def listed() -> dict[str, Listed]:
    """Source -> its backbones."""
    return {source: _listed(source) for source in SOURCES}


def matching(pattern: str) -> list[str]:
    """The specs that match a pattern; an exact name of `hf` need not be in the cache.

    Args:
        pattern: SOURCE, SOURCE/NAME or a glob.

    Raises:
        UnknownNameError: none matches.
        LayertapError: the library of the source is not installed.
    """
    source, _, name = pattern.partition("/")
    if source in SOURCES:
        known = [f"{source}/{one}" for one in SOURCES[source].names(name or "*")]
    elif is_glob(source):
        known = [spec for group in SOURCES if fnmatchcase(group, source) for spec in _listed(group).names]
    else:
        raise unknown_name("source", source, SOURCES)
    specs = [spec for spec in known if fnmatchcase(spec, pattern if name else f"{pattern}/*")]
    if not specs:
        raise unknown_name("backbone", pattern, known)
    return specs


def describe(spec: str) -> Entry:
    """What is known of one backbone; at most the settings of a model of `hf` are downloaded.

    Args:
        spec: as `matching` returns it.

    Raises:
        InputError: nothing is known of a backbone of this source before it is loaded.
        LayertapError: a library is missing, or settings cannot be read.
    """
    source, _, name = spec.partition("/")
    of_source = SOURCES[source].describe
    if of_source is None:
        raise InputError(f"{spec}: nothing is known of it before it is loaded")
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        return of_source(spec, name)


def _listed(source: str) -> Listed:
    try:
        names = SOURCES[source].names("*")
    except LayertapError as error:  # its library is not installed
        return Listed([], str(error))
    return Listed([f"{source}/{name}" for name in names], SOURCES[source].note)
