"""List the available backbones: `layertap backbones [GLOB]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from extract.backbones.catalogue import Entry, describe, listed, matching

__all__ = ["as_json", "entries", "print_entries", "print_sources", "sources"]

_SHOWN = 4  # names of weights per line


def sources() -> dict[str, Any]:
    """Return source -> number of its backbones, and its note for the user."""
    return {source: {"models": len(one.names), "note": one.note} for source, one in listed().items()}


def print_sources(found: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the sources."""
    for source, one in found.items():
        echo(f"{source:12} {one['models']:>5,} {'model ' if one['models'] == 1 else 'models'}  {one['note']}".rstrip())
    echo("\nlayertap backbones 'timm/vit_*' lists the matching backbones with width, input, parameters and licence")


def entries(pattern: str) -> Iterator[Entry]:
    """Yield the entries of matching backbones; each is looked up when it is reached."""
    return map(describe, matching(pattern))


def print_entries(found: Iterator[Entry], echo: Callable[[str], None]) -> None:
    """Print the entries."""
    echo(f"{'backbone':48} {'width':>6} {'input':>9} {'parameters':>14}  {'licence':16} weights")
    for one in found:
        size = "x".join(map(str, one.input_px)) if one.input_px else "?"
        more = ", ..." if len(one.weights) > _SHOWN else ""
        weights = ", ".join(one.weights[:_SHOWN]) + more
        licence = one.licence or "-"
        echo(f"{one.spec:48} {one.width or '-':>6} {size:>9} {one.parameters:>14,}  {licence:16} {weights}".rstrip())


def as_json(found: Iterator[Entry]) -> list[dict[str, Any]]:
    """Return the entries as JSON-compatible data."""
    return [asdict(one) for one in found]
