"""Write the page of the documentation from the results of a census.

python -m benchmarks.census.page benchmarks/census/results.jsonl > docs/census.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]

# Kind of comparison -> what is compared with what.
COMPARED = {
    "outputs": "output of every call of every layer; equal bits to a clone that a bare hook makes at that moment",
    "inputs": "every tensor among the arguments of every call; equal bits to a clone by a bare pre-hook",
    "gradients": "gradient of every output with `keep(..., \"grad\")`; equal to that of a twin whose layers hand on "
    "clones of their outputs",
    "gradients of parameters": "gradient of every parameter and of the pictures while those gradients are kept; equal "
    "to that without `Taps`",
    "model outputs": "output of the model while outputs, inputs or gradients are kept; equal bits to that without "
    "`Taps`",
    "model outputs under identity edits": "output of the model while every output or input is replaced by itself",
    "gradients under identity edits": "gradient of every parameter while every output is replaced by itself",
    "rows": "outputs whose rows `find_batch_axis` assigns to pictures, for up to 60 layers: five other pictures in "
    "another order; equal to each picture alone",
    "refusals of rows": "outputs for which `find_batch_axis` raises; those of five pictures alone, put together on any "
    "axis, are not that of the batch, or are so in a wrong order, too",
    "embeddings": "rows that `extract_features` stores of four PNG files; equal to the library's own preprocessing "
    "and embedding",
    "state": "state dict, modes, `requires_grad`, hooks and function modes, before and after",
}  # fmt: skip


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Return the versions that were used, and the last result of each network."""
    about: dict[str, Any] = {}
    results: dict[tuple[str, str], Result] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "about" in line:
            about |= line["about"]
        else:
            results[line["library"], line["name"]] = line
    return about, [results[key] for key in sorted(results)]


def page(about: dict[str, Any], results: list[Result]) -> str:
    """Return the page."""
    compared = [result for result in results if "numbers" in result]
    numbers = _sum(result["numbers"] for result in compared)
    wrong = _sum(result.get("wrong", {}) for result in compared)
    families = {(result["library"], result["family"]) for result in compared}
    tried = {(result["library"], result["family"]) for result in results}
    total = about.get("families", len(tried))
    versions = ", ".join(
        f"{name} {version}" for name, version in about.items() if name not in ("date", "families", "note")
    )
    return "\n".join([
        "# Census",
        "",
        f"`Taps`, the assignment of rows and `extract_features` were compared with references on {len(compared):,} "
        f"networks of {len(families):,} families: {numbers['calls']:,} calls of {numbers['layers']:,} layers. "
        f"{sum(wrong.values()):,} values are wrong. A bare hook that keeps `output.detach().cpu()` has "
        f"{numbers['wrong calls of naive hooks']:,} calls wrong.",
        "",
        "`benchmarks/census/results.jsonl` has the result of each network, and the reason where there is none.",
        "",
        f"The libraries have {total:,} families of networks for pictures. Of {len(tried - families):,}, no network ran"
        + (f", and {total - len(tried):,} have not been tried yet." if total > len(tried) else "."),
        "",
        f"Versions: {versions} ({about.get('date', '')}), on a CPU. Of each family, the smallest network that runs is "
        "compared, in eval mode, with two pictures of the smallest size from 32 to 256 that it takes. Weights are "
        "random, and changed so that every layer has an effect (`benchmarks/census/weights.py`)."
        + (f" {about['note']}" if "note" in about else ""),
        "",
        "```bash",
        "python -m benchmarks.census OUT.jsonl --families    # all families; without --families every network",
        "python -m benchmarks.census.page OUT.jsonl > docs/census.md",
        "```",
        "",
        "## What was compared",
        "",
        "| what | compared | equal up to rounding |",
        "|---|---|---|",
        *(
            f"| {text} | {numbers[kind]:,} | {numbers[f'rounded {kind}']:,} |"
            for kind, text in COMPARED.items()
        ),
        "",
        _notes(numbers),
        "",
        *_wrong_table(compared),
        _left_out(results, compared),
        "",
    ])  # fmt: skip


def _notes(numbers: Counter[str]) -> str:
    return (
        f"Of the gradients, {numbers['gradients of zero']:,} are zero. {numbers['outputs with NaN']:,} outputs have "
        f"NaN. {numbers['equal embeddings of different pictures']:,} embeddings are the same for different pictures. "
        "Rounding means a difference of at most 1e-4 of the largest value of the tensor (gradients without edits: "
        "1e-5, rows: 2e-3); for gradients of parameters also of at most 1e-6 of the largest gradient. Networks with "
        "gradients that differ by more "
        f"({numbers['networks whose gradients were compared in double precision']:,}) are compared again in double "
        "precision."
    )


def _wrong_table(compared: list[Result]) -> list[str]:
    wrong = [result for result in compared if result.get("wrong")]
    if not wrong:
        return []
    rows = [
        f"| {_key(result)} | {kind} | {count:,} | {', '.join(f'`{place}`' for place in result['examples'][kind][:1])} |"
        for result in wrong
        for kind, count in result["wrong"].items()
    ]
    return ["## Wrong", "", "| network | what | values | first |", "|---|---|---|---|", *rows, ""]


def _left_out(results: list[Result], compared: list[Result]) -> str:
    refused, uncompared = (_sum(result.get(field, {}) for result in compared) for field in ("refused", "uncompared"))
    not_run = sum("not run" in result for result in results)
    return (
        f"{refused.total():,} values are refused with an error that gives the reason; {uncompared.total():,} have no "
        f"independent reference; {not_run:,} networks did not run."
    )


def _key(result: Result) -> str:
    return f"{result['library']}/{result['name']}"


def _sum(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return total


if __name__ == "__main__":
    sys.stdout.write(page(*read(Path(sys.argv[1]))))
