"""List the available backbones: `layertap list [GLOB]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from extract.backbones.sources import Entry, describe, list_sources, match_specs

__all__ = ["as_json", "entries", "print_entries", "print_sources", "sources"]

_SHOWN = 4  # names of weights per line
_MOST_BUILT = 100


def sources() -> dict[str, Any]:
    """Return source -> number of its backbones, and its note for the user."""
    return {
        source: {"models": len(catalogue.names), "note": catalogue.note} for source, catalogue in list_sources().items()
    }


def print_sources(listing: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the sources."""
    for source, entry in listing.items():
        models = f"{entry['models']:>5,} {'model ' if entry['models'] == 1 else 'models'}"
        echo(f"{source:12} {models}  {entry['note']}".rstrip())


def entries(pattern: str) -> Iterator[Entry]:
    """Yield the entries of matching backbones; each is looked up when it is reached.

    Models are built for their width and parameters if at most `_MOST_BUILT` match: building all of timm takes minutes.
    """
    specs = match_specs(pattern)
    return (describe(spec, len(specs) <= _MOST_BUILT) for spec in specs)


def print_entries(entries: Iterator[Entry], echo: Callable[[str], None]) -> None:
    """Print the entries."""
    echo(f"{'backbone':48} {'width':>6} {'input':>9} {'parameters':>14}  {'licence':16} weights")
    for entry in entries:
        size = "x".join(map(str, entry.input_px)) if entry.input_px else "?"
        more = ", ..." if len(entry.weights) > _SHOWN else ""
        weights = ", ".join(entry.weights[:_SHOWN]) + more
        licence = entry.licence or "-"
        parameters = "-" if entry.parameters is None else f"{entry.parameters:,}"
        numbers = f"{entry.width or '-':>6} {size:>9} {parameters:>14}"
        echo(f"{entry.spec:48} {numbers}  {licence:16} {weights}".rstrip())


def as_json(entries: Iterator[Entry]) -> list[dict[str, Any]]:
    """Return the entries as JSON-compatible data."""
    return [asdict(entry) for entry in entries]
