"""Random weights that hide nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def shake(model: nn.Module, pictures: Tensor) -> None:
    """Change the random weights so that every layer has an effect, and pictures differ in every layer.

    Libraries initialise the last layer of residual branches, LayerScale and some classifiers with zeros: every
    parameter that has one value only gets noise. Some initialise weights with a standard deviation of 0.02 whatever the
    size of the layer, and activations vanish layer by layer: weights of convolutions and linear layers get the standard
    deviation of He et al. 2015 (arXiv:1502.01852, equation 10), if theirs is less than half of it, and batch norms get
    the statistics of these pictures.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.is_floating_point() and (parameter == parameter.flatten()[0]).all():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for module in model.modules():
            weight = module._parameters.get("weight")
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and weight is not None and weight.numel() > 1:
                expected, deviation = (2 / weight[0].numel()) ** 0.5, float(weight.std())
                if 0 < deviation < 0.5 * expected:
                    weight *= expected / deviation
    norms = [
        (module, module.momentum)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    for norm, _ in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model(pictures.clone())
    for norm, momentum in norms:
        norm.eval()
        norm.momentum = momentum
        assert norm.running_var is not None
        norm.running_var.clamp_(min=0.1 * float(norm.running_var.mean()) + 1e-5)
