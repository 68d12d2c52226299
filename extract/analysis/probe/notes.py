"""Notes on the choice and the fit of a probe, in words."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["on_few_rows", "on_iterations", "on_range", "on_scale", "on_ties"]

_FEW = 50  # rows; on fewer, the error of an accuracy exceeds 14 points


def on_iterations(chosen: str, iterations: int, separated: bool) -> str:
    """Return what it means that the final fit reached the limit of iterations."""
    if separated:
        return (
            f"the classes of the training rows are separated completely: with {chosen} all of these rows are right, "
            f"and further iterations than {iterations:,} would only make the probabilities more extreme"
        )
    return f"{chosen} had not converged after {iterations:,} iterations; --scaling standardise usually converges sooner"


def on_scale(swept: str, deviation: float, weight: float) -> list[str]:
    """Return a note if even the weakest penalty exceeds the curvature of the loss, deviation^2 / 4, on every axis."""
    if weight * deviation**2 / 4 >= 1:
        return []
    return [
        f"the features vary so little (standard deviation {deviation:.1g}) that every {swept} keeps the weights near "
        "zero; use --scaling standardise (scaling='standardise')"
    ]


def on_range(swept: str, chosen: float, curve: Sequence[tuple[float, float]]) -> list[str]:
    """Return a note if the chosen value is the first or the last."""
    values = [value for value, _ in curve]
    return [f"{swept} = {chosen:.3g} is at the end of its range"] if chosen in (min(values), max(values)) else []


def on_ties(swept: str, curve: Sequence[tuple[float, float]]) -> list[str]:
    """Return a note if more than a third of the values are equally good on the validation rows."""
    values = [value for _, value in curve]
    n_equal = values.count(max(values))
    if n_equal <= len(values) // 3 or len(values) < 3:
        return []
    return [
        f"{n_equal} of {len(values)} values of {swept} are equally good on the validation rows; "
        + ("the strongest penalty is chosen" if swept == "alpha" else "the value with the least log loss is chosen")
    ]


def on_few_rows(count: int) -> list[str]:
    """Return a note if the choice is made on fewer than 50 rows."""
    return [f"chosen on only {count} rows"] if count < _FEW else []
