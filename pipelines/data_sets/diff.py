"""Print how two data sets differ: `layertap diff A B`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from extract.analysis.dataset_diff import Comparison, Similarity
from pipelines.terminal.text_output import printable

__all__ = ["as_json", "print_diff"]


def print_diff(found: Comparison, first: Path, second: Path, echo: Callable[[str], None]) -> None:
    """Print the differences."""
    if found.changes:
        echo(f"settings that the features depend on, in {first} and in {second}:")
        for what, before, after in found.changes:
            echo(printable(f"  {what}: {before} | {after}"))
    else:
        echo(f"{first} and {second} have the same fingerprint")
    echo(f"images: {found.same:,} in both, {found.only[0]:,} only in {first}, {found.only[1]:,} only in {second}")
    for name, similarity in found.features.items():
        if isinstance(similarity, str):
            echo(f"  {name}: {similarity}")
            continue
        echo(
            f"  {name}: minimum cosine {similarity.least:.6f} ({printable(similarity.path)}), median "
            f"{similarity.median:.6f}; values differ by at most {similarity.deviation:.1e} of the largest value"
        )


def as_json(found: Comparison) -> dict[str, Any]:
    """Return the differences as JSON-compatible data."""
    return {
        "same_fingerprint": not found.changes,
        "changes": {what: [before, after] for what, before, after in found.changes},
        "images": {"in_both": found.same, "only_in_first": found.only[0], "only_in_second": found.only[1]},
        "features": {
            name: asdict(one) if isinstance(one, Similarity) else {"not_compared": one}
            for name, one in found.features.items()
        },
    }
