"""Findings about gradients: where they vanish or explode, and which layers do not learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from extract.analysis.network.reports import Evidence, Finding, ParameterReport, TensorReport

__all__ = ["exploding_gradients", "frozen_layers", "layers_without_gradient", "vanishing_gradients"]

# Gradients of the first layers are 0.0002 to 8 times those of the last (efficientnet_lite0, ConvNeXt, MobileNetV3, ViT,
# Swin, ResNets).
_VANISHED, _EXPLODED = 1e-5, 1e3


def _with_gradients(evidence: Evidence) -> list[TensorReport]:
    """Return the tensors with gradients; none if activations are not finite or equal for all inputs."""
    broken = any(tensor.activations.nan + tensor.activations.infinite for tensor in evidence.tensors)
    if evidence.inputs.equal or broken:
        return []
    return [tensor for tensor in evidence.tensors if tensor.gradients is not None]


def vanishing_gradients(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find where gradients vanish, or are not finite, on the way from the loss to the first layers.

    A branch may have small gradients by design while the rest of the network has larger gradients. A place counts only
    if the largest gradient of all tensors before it is small.
    """
    reached = _with_gradients(evidence)
    broken = [tensor for tensor in reached if tensor.gradients and tensor.gradients.nan + tensor.gradients.infinite]
    if broken:
        return [Finding("not finite", broken[-1].name, "the gradient of its output has values that are not finite")]
    # With initial running statistics, a batch normalisation does not normalise, as it will in training.
    if not reached or any(tensor.running is not None and tensor.running.initial for tensor in evidence.tensors):
        return []
    norms = np.array([tensor.gradient_norm for tensor in reached])
    if not norms.any():
        if reached[-1].name in explained:
            return []
        return [Finding("vanishing gradients", reached[-1].name, "all gradients are zero: the loss does not change")]
    largest_before = np.maximum.accumulate(norms)
    small = np.flatnonzero(largest_before < _VANISHED * norms.max())
    if not len(small) or reached[small[-1] + 1].name in explained:
        return []
    tensor, before = reached[small[-1] + 1], reached[: small[-1] + 1]
    text = (
        f"gradients vanish: their norm is {tensor.gradient_norm:.1e} at its output, and at most "
        f"{largest_before[small[-1]]:.1e} in the {len(before):,} layers before it"
    )
    return [Finding("vanishing gradients", tensor.name, text, layers=tuple(other.name for other in reversed(before)))]


def exploding_gradients(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find where gradients grow on the way from the loss to the first layers."""
    reached = _with_gradients(evidence)
    norms = np.array([tensor.gradient_norm for tensor in reached])
    if not np.isfinite(norms).all() or not norms.any():
        return []
    end = float(norms[-1]) or float(norms[np.flatnonzero(norms)[-1]])
    large = np.flatnonzero(norms > _EXPLODED * end)
    if not len(large) or large[-1] + 1 >= len(reached):
        return []
    tensor, before = reached[large[-1] + 1], reached[large[-1]]
    if tensor.name in explained:
        return []
    text = (
        f"gradients explode: their norm is {tensor.gradient_norm:.1e} at its output, {before.gradient_norm:.1e} "
        f"before it, and {norms.max():.1e} at most"
    )
    names = tuple(reached[position].name for position in reversed(large))
    return [Finding("exploding gradients", tensor.name, text, layers=names)]


def frozen_layers(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find parameters that do not require gradients while others do."""
    frozen = [parameter for parameter in evidence.parameters if not parameter.trainable]
    if not frozen or len(frozen) == len(evidence.parameters):
        return []
    names, verb = _parameters_of_first(frozen)
    return _by_layer("frozen", frozen, f"frozen: {names} do{verb} not require gradients")


def layers_without_gradient(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find parameters that the loss does not depend on."""
    unused = [parameter for parameter in evidence.parameters if parameter.trainable and not parameter.reached]
    if not unused:
        return []
    if unused[0].layer in evidence.never_ran:
        return _by_layer("no gradient", unused, "the layer never runs, so it gets no gradient")
    names, verb = _parameters_of_first(unused)
    has, it = ("has", "it") if verb else ("have", "them")
    text = f"{names} {has} no gradient: in eval mode, the loss does not depend on {it}"
    return _by_layer("no gradient", unused, text)


def _parameters_of_first(parameters: Sequence[ParameterReport]) -> tuple[str, str]:
    """Return the names of the parameters of the first layer, and the ending of a verb for them."""
    names = [parameter.name.rpartition(".")[2] for parameter in parameters if parameter.layer == parameters[0].layer]
    return " and ".join(names), "es" if len(names) == 1 else ""


def _by_layer(kind: str, parameters: Sequence[ParameterReport], text: str) -> list[Finding]:
    first, *others = dict.fromkeys(parameter.layer for parameter in parameters)
    also = f"; the same in {len(others):,} other layers" if others else ""
    return [Finding(kind, first, text + also, grave=False, layers=tuple(others))]
