"""Networks with one planted fault each, and healthy networks: does `inspect_model` name the fault, and nothing else?

    python -m tests.extract.analysis.network.planted_faults       # the score, and each network that is not exact

A fault is a kind at a depth. It is found exactly if its first finding has the expected kind and layer, and at most two
others follow. A healthy network must give no finding.

Trained networks are trained here on CIFAR-10, for some seconds, with fixed seeds. Without the files of CIFAR-10 beside
the checkout (`../shared/data/cifar10-6k`), faults in trained networks and trained healthy networks are left out.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from extract import load_backbone
from extract.analysis.network.inspection import inspect_model
from extract.analysis.network.monitors import ActivationMonitor, GradientMonitor

CIFAR = Path(__file__).parents[5] / "shared" / "data" / "cifar10-6k"
PHOTOS = CIFAR.parent / "imagenet-200"
CLASSES, IMAGES = 10, 128
FOLLOWING = 2  # findings that may come after the expected one
MEAN, STD = torch.tensor([0.491, 0.482, 0.447])[:, None, None], torch.tensor([0.247, 0.243, 0.262])[:, None, None]

Names = list[tuple[str, str]]  # (kind, layer) of each finding
Batches = list[tuple[Tensor, Tensor]]
Layers = list[tuple[str, nn.Module]]


# Networks


def classifier(layers: Layers, width: int) -> nn.Sequential:
    """The layers, the mean over all pixels, and a linear layer."""
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(width, CLASSES))]
    return nn.Sequential(OrderedDict(layers))


def convolutional(sizes: list[tuple[int, int, int]], inplace: bool) -> nn.Sequential:
    """Convolutions and ReLUs with He's initialisation; no normalisation."""
    layers: Layers = []
    for i, (before, after, stride) in enumerate(sizes):
        conv = nn.Conv2d(before, after, 3, stride, padding=1)
        layers += [(f"conv{i}", conv), (f"relu{i}", nn.ReLU(inplace))]
    model = classifier(layers, sizes[-1][1])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    return model


def chain(depth: int = 16, width: int = 16) -> nn.Sequential:
    return convolutional([(width if i else 3, width, 1) for i in range(depth)], inplace=False)


def plain() -> nn.Module:
    return convolutional([(3, 24, 1), (24, 32, 2), (32, 48, 2), (48, 64, 2)], inplace=True)


def normalised() -> nn.Module:
    layers: Layers = []
    sizes = [(3, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 2)]
    for i, (before, after, stride) in enumerate(sizes):
        layers += [(f"conv{i}", nn.Conv2d(before, after, 3, stride, padding=1, bias=False)),
                   (f"bn{i}", nn.BatchNorm2d(after)), (f"relu{i}", nn.ReLU(inplace=True))]  # fmt: skip
    return classifier(layers, 64)


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if before != after else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.relu = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        self.blocks = nn.Sequential(Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2))
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.relu(self.bn(self.stem(x)))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 48, blocks: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(16, dim))
        self.blocks = nn.Sequential(*[Block(dim, 3) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions  # (B, 16, dim)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def fully_connected(function: type[nn.Module], depth: int, gain: float | None, inputs: int = 3 * 16 * 16) -> nn.Module:
    """Layers of 64 units; with PyTorch's default initialisation, unless a gain is given."""
    layers: Layers = [("flatten", nn.Flatten())]
    for i in range(depth):
        linear = nn.Linear(64 if i else inputs, 64)
        if gain is not None:
            nn.init.xavier_normal_(linear.weight, gain)
        layers += [(f"linear{i}", linear), (f"{function.__name__.lower()}{i}", function())]
    return nn.Sequential(OrderedDict([*layers, ("fc", nn.Linear(64, CLASSES))]))


def mobile() -> nn.Module:
    """Depthwise separable convolutions, with ReLU6."""
    layers: Layers = [("stem", nn.Conv2d(3, 16, 3, 2, 1, bias=False)), ("bn", nn.BatchNorm2d(16))]
    for i, (before, after, stride) in enumerate([(16, 32, 1), (32, 64, 2), (64, 64, 1)]):
        layers += [(f"dw{i}", nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)),
                   (f"dw_bn{i}", nn.BatchNorm2d(before)), (f"dw_relu{i}", nn.ReLU6()),
                   (f"pw{i}", nn.Conv2d(before, after, 1, bias=False)),
                   (f"pw_bn{i}", nn.BatchNorm2d(after)), (f"pw_relu{i}", nn.ReLU6())]  # fmt: skip
    return classifier(layers, 64)


class Recurrent(nn.Module):
    """An LSTM over the rows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3 * 16, 64, batch_first=True), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class SeveralLabels(nn.Module):
    """Independent probabilities: a sigmoid comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.sigmoid = normalised(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.sigmoid(self.body(x))


def of_each_label(output: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy(output, F.one_hot(labels, CLASSES).float())


class Amplify(nn.Module):
    """The identity, whose gradient is larger by a factor."""

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 1e6

    def forward(self, x: Tensor) -> Tensor:
        return self._Function.apply(x)


# Data and training


@functools.cache
def cifar(split: str, every: int) -> tuple[Tensor, Tensor]:
    """Return pixels (N, 3, 16, 16) in 0..1 and labels (N,) of every so many pictures of a split, in a fixed shuffle."""
    pictures, labels = [], []
    for label, folder in enumerate(sorted((CIFAR / split).iterdir())):
        for path in sorted(folder.iterdir())[::every]:
            with Image.open(path) as picture:
                pictures.append(torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).permute(2, 0, 1))
            labels.append(label)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = F.avg_pool2d(torch.stack(pictures)[order] / 255, 2)  # a quarter of the time
    return pixels, torch.tensor(labels)[order]


def batches_of(images: Tensor, labels: Tensor, size: int = 64) -> Batches:
    return list(zip(images.split(size), labels.split(size), strict=True))


def photos(scale: Callable[[Tensor], Tensor] = lambda pixels: (pixels - MEAN) / STD) -> Batches:
    """Test pictures of CIFAR-10, normalised as for training or otherwise scaled."""
    pixels, labels = cifar("test", 5)
    return batches_of(scale(pixels[:IMAGES]), labels[:IMAGES])


def noise(*shape: int) -> Batches:
    """Images of 12 x 12 pixels, or inputs of another shape."""
    inputs = torch.randn(IMAGES, *shape or (3, 12, 12), generator=torch.Generator().manual_seed(0))
    return batches_of(inputs, torch.arange(IMAGES) % CLASSES)


TRAINED: dict[str, tuple[Callable[[], nn.Module], float, Callable[[Tensor, Tensor], Tensor]]] = {
    "plain": (plain, 2e-3, F.cross_entropy),
    "batch norm": (normalised, 3e-3, F.cross_entropy),
    "residual": (ResNet, 3e-3, F.cross_entropy),
    "transformer": (VisionTransformer, 2e-3, F.cross_entropy),
    "tanh": (lambda: fully_connected(nn.Tanh, 6, 5 / 3), 5e-4, F.cross_entropy),
    "sigmoid": (lambda: fully_connected(nn.Sigmoid, 4, 2.0), 1e-3, F.cross_entropy),
    "mobile": (mobile, 3e-3, F.cross_entropy),
    "recurrent": (Recurrent, 2e-3, F.cross_entropy),
    "several labels": (SeveralLabels, 3e-3, of_each_label),
}


@functools.cache
def training(name: str, rate: float | None = None, steps: int = 200, every: int = 10) -> tuple[nn.Module, Names]:
    """Train a network with Adam, watched by both monitors; return it with their alarms in the order of the steps."""
    make, right_rate, loss_of = TRAINED[name]
    torch.manual_seed(0)
    model, alarms = make().train(), list[tuple[int, str, str]]()
    images, labels = cifar("train", 2)
    images, optimizer = (images - MEAN) / STD, torch.optim.Adam(model.parameters(), rate or right_rate)
    how: dict[str, Any] = {
        "every": every, "on_alarm": lambda alarm: alarms.append((alarm.step, alarm.kind, alarm.layer))
    }  # fmt: skip
    with ActivationMonitor(model, **how), GradientMonitor(model, **how):
        for _ in range(steps):
            chosen = torch.randint(len(images), (64,))
            optimizer.zero_grad()
            loss_of(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model.eval(), [(kind, layer) for _, kind, layer in sorted(alarms, key=lambda alarm: alarm[0])]


def trained(name: str) -> nn.Module:
    return copy.deepcopy(training(name)[0])


def names_of(model: nn.Module, batches: Batches, loss: Any = None) -> Names:
    inspection = inspect_model(model, batches, loss=loss)
    return [(finding.kind, finding.layer) for finding in inspection.findings]


# Faults


@dataclass(frozen=True)
class Fault:
    """A planted fault: how it is looked for, and the first finding that is expected."""

    name: str
    look: Callable[[], Names]
    kind: str
    layer: str | Callable[[], str]
    needs_cifar: bool = False

    @property
    def expected(self) -> tuple[str, str]:
        return self.kind, self.layer if isinstance(self.layer, str) else self.layer()


def in_chain(change: Callable[[nn.Sequential], None], loss: Any = None) -> Names:
    torch.manual_seed(0)
    model = chain()
    with torch.no_grad():
        change(model)
    return names_of(model, noise(), loss)


def in_trained(name: str, change: Callable[[nn.Module], None], loss: Any = None) -> Names:
    model = trained(name)
    with torch.no_grad():
        change(model)
    return names_of(model, photos(), loss)


def times(model: nn.Module, layer: str, factor: float, values: str = "weight") -> None:
    getattr(model.get_submodule(layer), values).mul_(factor)


def put(model: nn.Module, layer: str, parameter: str, value: float, at: Any = ...) -> None:
    getattr(model.get_submodule(layer), parameter)[at] = value


def kill_channel(model: nn.Module, layer: str) -> None:
    put(model, layer, "weight", 0.0, 5)
    put(model, layer, "bias", -1.0, 5)


def freeze(model: nn.Module, layer: str) -> None:
    model.get_submodule(layer).requires_grad_(False)


def scale_queries_and_keys(model: nn.Module, layer: str, factor: float) -> None:
    dim = model.get_submodule(layer).qkv.in_features  # type: ignore[union-attr]
    for parameter in model.get_submodule(layer).qkv.parameters():  # type: ignore[union-attr]
        parameter[: 2 * dim] *= factor  # type: ignore[index]


def amplify(model: nn.Sequential, depth: int) -> None:
    relu = model.get_submodule(f"relu{depth}")
    setattr(model, f"relu{depth}", nn.Sequential(OrderedDict(relu=relu, amplify=Amplify())))


def shift_mean(model: nn.Module, layer: str) -> None:
    norm = model.get_submodule(layer)
    norm.running_mean += 3 * norm.running_var.sqrt()  # type: ignore[operator, union-attr]


class AlwaysDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x)  # as if training


def put_behind(model: nn.Module, layer: str, module: nn.Module) -> None:
    setattr(model, layer, nn.Sequential(OrderedDict(inner=model.get_submodule(layer), dropout=module)))


def quantise(model: nn.Module, bits: int) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            step = parameter.abs().max() / 2 ** (bits - 1)
            parameter.copy_((parameter / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step)


def scale_both(model: nn.Module, layer: str, factor: float) -> None:
    for parameter in model.get_submodule(layer).parameters():
        parameter.mul_(factor)


def repeat_filter(model: nn.Module, layer: str) -> None:
    weight = model.get_submodule(layer).weight
    weight.copy_((weight[:1] - weight[:1].mean()).expand_as(weight))  # type: ignore[operator, index]


def rotate_head(model: nn.Module, layer: str) -> None:
    for parameter in model.get_submodule(layer).parameters():
        parameter.copy_(parameter.roll(3, 0))


def add_spare(model: nn.Sequential) -> None:
    model.get_submodule("conv3").spare = nn.Linear(4, 4)


def with_broken_image(image: int) -> Names:
    torch.manual_seed(0)
    [first, second] = noise()
    images = torch.cat([first[0], second[0]])
    images[image, 1, 3, 3] = torch.nan
    return names_of(chain(), batches_of(images, torch.arange(IMAGES) % CLASSES))


def default_relus() -> nn.Module:
    """As deep as its signal, which shrinks from layer to layer, allows for."""
    torch.manual_seed(0)
    return fully_connected(nn.ReLU, 31, None, 64)


def default_sigmoids() -> nn.Module:
    torch.manual_seed(0)
    return fully_connected(nn.Sigmoid, 21, None, 64)


def first_relu_with_a_dead_unit() -> str:
    model = default_relus()
    x = torch.cat([images for images, _ in noise(64)])
    for name, layer in model.named_children():
        x = layer(x)
        if isinstance(layer, nn.ReLU) and bool((x == 0).all(0).any()):
            return name
    raise AssertionError("no unit is dead")


def first_with_a_gradient() -> str:
    """First layer of the sigmoids whose gradient reaches 1e-5 of the largest."""
    model, outputs = default_sigmoids(), []
    x = torch.cat([images for images, _ in noise(64)]).requires_grad_()
    for name, layer in model.named_children():
        x = layer(x)
        x.retain_grad()
        outputs.append((name, x))
    F.cross_entropy(x, torch.arange(IMAGES) % CLASSES).backward()
    norms = [float(output.grad.norm()) for _, output in outputs]  # type: ignore[union-attr]
    return next(name for (name, _), norm in zip(outputs, norms, strict=True) if norm >= 1e-5 * max(norms))


def with_rate(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Names:
    """Train for some steps, watched by a monitor."""
    torch.manual_seed(0)
    model, alarms = chain(4).train(), []
    watched = optimizer(model.parameters())
    with GradientMonitor(model, every=1, on_alarm=lambda alarm: alarms.append((alarm.kind, alarm.layer))):
        for images, labels in noise() * 6:
            watched.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            watched.step()
    return alarms


def faults() -> list[Fault]:
    loss = F.cross_entropy
    made: list[Fault] = []

    def add(
        name: str, kind: str, layer: str | Callable[[], str], look: Callable[[], Names], cifar: bool = True
    ) -> None:
        made.append(Fault(name, look, kind, layer, cifar))

    def add_to_chain(
        name: str, kind: str, layer: str, change: Callable[..., None], *args: Any, loss: Any = None
    ) -> None:
        add(f"{name} in {layer}", kind, layer, lambda: in_chain(lambda model: change(model, *args), loss), False)

    def add_to_trained(name: str, kind: str, net: str, layer: str, change: Callable[..., None], *args: Any) -> None:
        add(f"{name} in {layer} of {net}", kind, layer, lambda: in_trained(net, lambda model: change(model, *args)))

    def add_with_loss(
        name: str, kind: str, layer: str, net: str, change: Callable[[nn.Module], Any], loss: Any = loss
    ) -> None:
        add(name, kind, layer, lambda: in_trained(net, change, loss))

    def add_inputs(name: str, kind: str, scale: Callable[[Tensor], Tensor], *nets: str) -> None:
        for net in nets:
            look = functools.partial(lambda net: names_of(trained(net), photos(scale)), net)
            add(f"{name} into {net}", kind, "input", look)

    def add_training(name: str, kind: str, layer: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        add(name, kind, layer, lambda: with_rate(optimizer), False)

    for i in (0, 2, 4, 6, 8, 10, 14):
        add_to_chain("weights x 1e4", "exploding", f"conv{i}", times, f"conv{i}", 1e4)
    for i in (0, 7, 15):
        add_to_chain("NaN weight", "not finite", f"conv{i}", put, f"conv{i}", "weight", torch.nan, (0, 0, 0, 0))
        add_to_chain("infinite weight", "not finite", f"conv{i}", put, f"conv{i}", "weight", torch.inf, (1, 0, 0, 0))
    for i in (0, 7, 14):
        add_to_chain("bias of -30", "dead", f"relu{i}", put, f"conv{i}", "bias", -30.0)
    for i in (1, 9):
        add_to_chain("dead filter", "dead", f"conv{i}", kill_channel, f"conv{i}")
    for layer in ("conv0", "conv5", "fc"):
        add_to_chain("zero weights", "zero weight", layer, times, layer, 0.0)
    for layer in ("conv3", "conv9"):
        add_to_chain("frozen", "frozen", layer, freeze, layer, loss=loss)
    add_to_chain("layer without use", "no gradient", "conv3.spare", add_spare, loss=loss)
    for i in (2, 9):
        add_to_chain("gradient x 1e6", "exploding gradients", f"relu{i}.amplify", amplify, i, loss=loss)
    for image in (3, 100):
        add(f"NaN in image {image}", "not finite", "input", functools.partial(with_broken_image, image), False)
    add("31 default ReLUs", "dead", first_relu_with_a_dead_unit, lambda: names_of(default_relus(), noise(64)), False)
    add("21 default sigmoids", "vanishing gradients", first_with_a_gradient,
        lambda: names_of(default_sigmoids(), noise(64), loss), False)  # fmt: skip

    for net, layer in (
        ("residual", "blocks.0.conv1"), ("residual", "blocks.2.conv2"), ("transformer", "blocks.0.mlp.0"),
        ("transformer", "blocks.3.mlp.0"), ("mobile", "dw2"), ("plain", "fc"),
    ):  # fmt: skip
        add_to_trained("weights x 1e4", "exploding", net, layer, times, layer, 1e4)
    for net, i in (("tanh", 0), ("tanh", 2), ("tanh", 4), ("sigmoid", 0), ("sigmoid", 2)):
        add_to_trained("weights x 40", "saturated", net, f"{net}{i}", times, f"linear{i}", 40.0)
    for name, kind, factor, blocks in (
        ("logits x 900", "saturated attention", 30.0, (0, 2, 3)), ("logits 0", "uniform attention", 0.0, (0, 2)),
    ):  # fmt: skip
        for i in blocks:
            layer = f"blocks.{i}.attn"
            add_to_trained(name, kind, "transformer", layer, scale_queries_and_keys, layer, factor)

    for layer in ("bn0", "bn2", "bn4"):
        for name, value in (("running variance 0", 0.0), ("running variance x 1e8", 1e8), ("running variance x 4", 4)):
            add_to_trained(name, "running statistics", "batch norm", layer, times, layer, value, "running_var")
        if layer != "bn2":  # which leaves channels constant in three layers behind it
            add_to_trained("scale 0", "zero weight", "batch norm", layer, times, layer, 0.0)
        add_to_trained("training mode", "training mode", "batch norm", layer,
                       lambda m, layer: m.get_submodule(layer).train(), layer)  # fmt: skip
        add_to_trained("running mean + 3 deviations", "running statistics", "batch norm", layer, shift_mean, layer)
        add_to_trained("initial statistics", "running statistics", "batch norm", layer,
                       lambda m, layer: m.get_submodule(layer).reset_running_stats(), layer)  # fmt: skip
    for i in (0, 1, 2):
        layer = f"blocks.{i}.bn2"
        add_to_trained("branch x 1e-4", "faint", "residual", layer, scale_both, layer, 1e-4)
    layer = "blocks.2.conv2"
    add_to_trained("the same filter 64 times", "equal filters", "residual", layer, repeat_filter, layer)
    for net, bits, layer in (("batch norm", 2, "conv0"), ("batch norm", 3, "conv0"), ("transformer", 3, "positions")):
        add_to_trained(f"{bits} bits", "few values", net, layer, quantise, bits)
    add_to_trained("position embeddings 0", "zero weight", "transformer", "positions",
                   lambda m: m.positions.zero_())  # fmt: skip

    nets = ("batch norm", "residual", "mobile", "plain", "transformer")
    add_inputs("pixels 0..255", "input scale", lambda x: 255 * x, "batch norm", "residual", "plain")
    add_inputs("pixels 0..1", "input scale", lambda x: x, "batch norm", "residual")
    add_inputs("black pictures", "equal inputs", lambda x: (0 * x - MEAN) / STD, "plain", "batch norm", "transformer")
    add_inputs("mean and deviation 0.5", "input scale", lambda x: (x - 0.5) / 0.5, *nets[:3])
    add_inputs("normalised twice", "input scale", lambda x: ((x - MEAN) / STD - MEAN) / STD, *nets)
    add_inputs("mean of 0..1 from 0..255", "input scale", lambda x: (255 * x - MEAN) / STD, *nets)

    for net, layer in (("batch norm", "fc"), ("plain", "fc"), ("transformer", "head")):
        rotate = functools.partial(rotate_head, layer=layer)
        add_with_loss(f"head rotated by 3 classes in {net}", "labels", "loss", net, rotate)
    add_with_loss("head rotated by 3 classes, and a dead filter, in batch norm", "labels", "loss", "batch norm",
                  lambda m: (rotate_head(m, "fc"), kill_channel(m, "bn1")))  # fmt: skip
    add_with_loss("head initialised again in batch norm", "labels", "loss", "batch norm",
                  lambda m: m.fc.reset_parameters())  # fmt: skip
    add_with_loss("loss that does not see the labels", "targets", "loss", "batch norm", lambda m: None,
                  lambda output, _: output.mean())  # fmt: skip
    add_with_loss("loss x 1e-9", "vanishing gradients", "loss", "batch norm", lambda m: None,
                  lambda output, labels: 1e-9 * loss(output, labels))  # fmt: skip
    for i in (0, 3):
        for name, kind, dropout in (
            ("training mode", "training mode", nn.Dropout(0.5)), ("both modes", "random", AlwaysDropout()),
        ):  # fmt: skip
            change = functools.partial(put_behind, layer=f"relu{i}", module=dropout)
            add_with_loss(f"dropout behind relu{i} in {name}", kind, f"relu{i}.dropout", "batch norm", change)
    add_with_loss("softmax before cross-entropy", "probabilities", "fc", "batch norm",
                  lambda m: put_behind(m, "fc", nn.Softmax(1)))  # fmt: skip

    for net, rate in (("plain", 0.1), ("plain", 0.3), ("transformer", 0.3)):
        add(f"Adam, learning rate {rate}, {net}", "learning rate", "optimizer",
            lambda net=net, rate=rate: training(net, rate, 30, 1)[1])  # fmt: skip
    for n, name in ((2, "first layer"), (8, "body")):
        add_training(f"{name} not in the optimiser", "not updated", "conv0",
                     lambda p, n=n: torch.optim.SGD(list(p)[n:], 0.01))  # fmt: skip
    add_training("Adam, learning rate 1", "learning rate", "optimizer", lambda p: torch.optim.Adam(p, 1.0))
    for rate in (100.0, 1e-10):
        add_training(f"SGD, learning rate {rate:g}", "learning rate", "optimizer",
                     functools.partial(torch.optim.SGD, lr=rate))  # fmt: skip
    return made


FAULTS = {fault.name: fault for fault in faults()}


# Healthy networks


def at_random(make: Callable[..., nn.Module], *name: str, **how: Any) -> Names:
    """Findings in a network of a library, with the weights of its initialisation, on pictures of 64 pixels."""
    torch.manual_seed(0)
    model = make(*name, **how)
    batches = [(F.interpolate(images, size=64, mode="bilinear"), labels) for images, labels in photos()]
    return names_of(model, batches, F.cross_entropy)


def after_training(name: str) -> Names:
    model, alarms = training(name)
    return alarms + names_of(model, photos(), TRAINED[name][2])


def bundled() -> Names:
    """Findings in the bundled backbone, but for its dead channels, which have no weights."""
    backbone = load_backbone("bundled/efficientnet_lite0")
    inputs = []
    for path in sorted(PHOTOS.rglob("*.JPEG"))[::5]:
        with Image.open(path) as picture:
            inputs.append(torch.as_tensor(backbone.preprocessing.cpu_transform(picture.convert("RGB"))))
    pixels = backbone.preprocessing.to_input(torch.stack(inputs))
    found = names_of(backbone.model, batches_of(pixels, torch.zeros(len(pixels), dtype=torch.long), 20),
                     lambda output, _: F.cross_entropy(output, output.argmax(1)))  # fmt: skip
    return [finding for finding in found if finding[0] != "dead"]


HEALTHY: dict[str, Callable[[], Names]] = {
    **{f"trained {name}": functools.partial(after_training, name) for name in TRAINED},
    "trained batch norm in training mode": lambda: names_of(trained("batch norm").train(), photos()),
    "bundled efficientnet_lite0": bundled,
    "torchvision resnet18": lambda: at_random(torchvision.models.resnet18),
    "torchvision mobilenet_v2": lambda: at_random(torchvision.models.mobilenet_v2),
    "timm vit_tiny": lambda: at_random(timm.create_model, "vit_tiny_patch16_224", img_size=64),
    "timm convnext_atto": lambda: at_random(timm.create_model, "convnext_atto"),
    "timm deit_tiny": lambda: at_random(timm.create_model, "deit_tiny_patch16_224", img_size=64),
    "timm swin_tiny": lambda: at_random(timm.create_model, "swin_tiny_patch4_window7_224", img_size=64, window_size=2),
    "torchvision shufflenet_v2": lambda: at_random(torchvision.models.shufflenet_v2_x0_5),
    "torchvision densenet121": lambda: at_random(torchvision.models.densenet121),
    "timm mobilenetv3": lambda: at_random(timm.create_model, "mobilenetv3_small_050"),
    "chain with He's initialisation": lambda: in_chain(lambda model: None, F.cross_entropy),
}


# Score


def is_exact(fault: Fault, found: Names) -> bool:
    return found[:1] == [fault.expected] and len(found) <= 1 + FOLLOWING


def main() -> None:
    exact = 0
    for fault in FAULTS.values():
        found = fault.look() if CIFAR.is_dir() or not fault.needs_cifar else []
        exact += is_exact(fault, found)
        if not is_exact(fault, found):
            print(f"{fault.name}: expected {fault.expected}, {len(found)} findings {found[:4]}", flush=True)
    print(f"{exact} of {len(FAULTS)} faults are exact", flush=True)
    wrong = 0
    for name, look in HEALTHY.items():
        if (PHOTOS if name.startswith("bundled") else CIFAR).is_dir():
            found = look()
            wrong += len(found)
            if found:
                print(f"false: {name}: {len(found)} findings {found[:4]}", flush=True)
    print(f"{len(HEALTHY)} healthy networks: {wrong} false findings")


if __name__ == "__main__":
    main()
