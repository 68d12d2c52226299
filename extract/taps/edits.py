"""Edits for `Taps.edit`: functions of one tensor that return a new one.

    Taps(model).edit("layer2", scale(2))              # activations
    Taps(model).edit("fc", clip(1.0), what="grad")    # gradients

Each function here returns such an edit. `Taps.edit` accepts any function of one tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from extract.errors import InputError
from extract.taps.copies import edited_by
from extract.taps.layer_names import match_layers, named_layers
from extract.taps.record import Site

__all__ = [
    "Edit",
    "ablate",
    "apply_edit",
    "clamp",
    "clip",
    "freeze",
    "mix",
    "noise",
    "prune",
    "replace",
    "scale",
    "smooth",
]

Edit = Callable[[Tensor], Tensor]


def scale(factor: float) -> Edit:
    """Multiply by a number: `factor * h`."""
    return lambda h: h * factor


def clamp(low: float | None = None, high: float | None = None) -> Edit:
    """Clamp every value to the range from `low` to `high`; None is no bound."""
    return lambda h: h.clamp(low, high)


def replace(value: Tensor | float) -> Edit:
    """Replace the activation by `value`, broadcast to its shape; no gradient flows to earlier layers."""
    return lambda h: torch.as_tensor(value, dtype=h.dtype, device=h.device).expand_as(h).clone()


def ablate(by: Literal["zero", "mean"] = "zero", channels: Sequence[int] | None = None, axis: int = 1) -> Edit:
    """Replace a layer's values, or those of some channels, by zero or the batch mean.

    Args:
        by: "zero", or "mean": each value becomes the mean at its position over the batch.
        channels: indices on `axis`; None means all.
        axis: the channel axis: 1 for maps (B, C, H, W), -1 for tokens (B, T, C).
    """
    if by not in ("zero", "mean"):
        raise InputError(f"ablate by {by!r}; expected 'zero' or 'mean'")

    def edit(h: Tensor) -> Tensor:
        instead = torch.zeros_like(h) if by == "zero" else h.mean(0, keepdim=True).expand_as(h)
        if channels is None:
            return instead
        places = torch.zeros(h.shape[axis], dtype=torch.bool, device=h.device)
        places[list(channels)] = True
        return torch.where(places.view([-1 if a == axis % h.ndim else 1 for a in range(h.ndim)]), instead, h)

    return edit


def noise(std: float) -> Edit:
    """Add noise: `h + std * N(0, 1)`, drawn from PyTorch's default generator."""
    return lambda h: h + std * torch.randn_like(h)


def mix(permutation: Tensor, lam: float) -> Edit:
    """Manifold mixup: `lam * h + (1 - lam) * h[permutation]` (Verma et al. 2019, arXiv:1806.05236, equation 1).

    Args:
        permutation: (B,) int64, index of each image's partner.
        lam: weight of the image itself, from 0 to 1.
    """
    return lambda h: lam * h + (1 - lam) * h[permutation.to(h.device)]


def prune(fraction: float) -> Edit:
    """Set each image's values of smallest magnitude to zero: `fraction` of the values, rounded down."""
    if not 0 <= fraction <= 1:
        raise InputError(f"prune fraction {fraction}; expected 0 to 1")

    def edit(h: Tensor) -> Tensor:
        flat = h.flatten(1)
        smallest = flat.abs().argsort(1)[:, : int(fraction * flat.shape[1])]
        return torch.ones_like(flat).scatter(1, smallest, 0).mul(flat).view_as(h)

    return edit


def clip(limit: float, by: Literal["value", "norm"] = "value") -> Edit:
    """Clamp each value to [-limit, limit]; or, by norm, scale a whole tensor of larger L2 norm down to `limit`."""
    if by not in ("value", "norm"):
        raise InputError(f"clip by {by!r}; expected 'value' or 'norm'")
    if by == "value":
        return lambda g: g.clamp(-limit, limit)
    return lambda g: g * (limit / g.norm().clamp(min=limit))


class smooth:  # noqa: N801  used as the other verbs are
    """Exponential moving average over calls: `m = beta * m + (1 - beta) * g`, starting with the first `g`.

    Each tensor has its own average. Gradients flow to the `g` of the same call, not to those before.
    """

    def __init__(self, beta: float):
        self._beta = beta
        self._means: dict[Any, Tensor] = {}

    def __call__(self, g: Tensor) -> Tensor:
        """Update and return the average for calls without a site."""
        return self.at(None)(g)

    def at(self, site: Any) -> Edit:
        """Return the edit for the tensor at this site; called by `Taps`."""

        def edit(g: Tensor) -> Tensor:
            mean = self._means.get(site)
            if mean is not None and mean.shape != g.shape:
                raise InputError(
                    f"smooth: the tensor has shape {tuple(g.shape)}; in earlier calls it had {tuple(mean.shape)}"
                )
            smoothed = g if mean is None else self._beta * mean + (1 - self._beta) * g
            self._means[site] = smoothed.detach()
            return smoothed

        return edit


@contextlib.contextmanager
def freeze(model: nn.Module, layers: str | Sequence[str]) -> Iterator[None]:
    """Context manager: turn `requires_grad` off for the parameters of these layers, and restore it afterwards."""
    named = named_layers(model)
    matches = match_layers(named, layers)
    changed = [p for layer in matches for p in named[layer].parameters() if p.requires_grad]
    try:
        for parameter in changed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


def apply_edit(tensor: Tensor, edit: Edit, site: Site) -> Tensor:
    """Call an edit on a copy of the tensor, and return a result that nothing else can read or change.

    Raises:
        InputError: see `edited_by`.
    """
    return edited_by(tensor, edit, site, may_change=False)
