"""Print how two data sets differ: `layertap show A B`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from extract.analysis.dataset_diff import Comparison, Similarity
from pipelines.terminal.text_output import printable

__all__ = ["as_json", "print_diff"]


def print_diff(comparison: Comparison, echo: Callable[[str], None], first: Path, second: Path) -> None:
    """Print the differences."""
    if comparison.changes:
        echo(f"settings that the features depend on, in {first} and in {second}:")
        for setting, before, after in comparison.changes:
            echo(printable(f"  {setting}: {before} | {after}"))
    else:
        echo(f"{first} and {second} have the same fingerprint")
    only_first, only_second = comparison.only
    echo(f"images: {comparison.same:,} in both, {only_first:,} only in {first}, {only_second:,} only in {second}")
    for name, similarity in comparison.features.items():
        if isinstance(similarity, str):
            echo(f"  {name}: {similarity}")
            continue
        echo(
            f"  {name}: minimum cosine {similarity.least:.6f} ({printable(similarity.path)}), median "
            f"{similarity.median:.6f}; values differ by at most {similarity.deviation:.1e} of the largest value"
        )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the differences as JSON-compatible data."""
    return {
        "same_fingerprint": not comparison.changes,
        "changes": {setting: [before, after] for setting, before, after in comparison.changes},
        "images": {
            "in_both": comparison.same,
            "only_in_first": comparison.only[0],
            "only_in_second": comparison.only[1],
        },
        "features": {
            name: asdict(similarity) if isinstance(similarity, Similarity) else {"not_compared": similarity}
            for name, similarity in comparison.features.items()
        },
    }
