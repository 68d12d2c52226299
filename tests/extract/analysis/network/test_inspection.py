"""What is told of networks: against plain hooks and autograd, and of networks with faults that were put there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from extract import load_backbone
from extract.analysis.network.inspection import Inspection, inspect_model
from extract.analysis.network.reports import layer_table
from extract.errors import InputError, UnknownNameError
from tests.extract.html_reader import HtmlReader

IMAGES, CLASSES = 120, 10


class Times(nn.Module):
    """A block whose own code, and no layer in it, makes everything larger."""

    def __init__(self, factor: float):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.factor


class SquareRoot(nn.Module):
    """Harmless, as long as no image is darker than it should be."""

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:
        return x * torch.sqrt(picture.mean((1, 2, 3), keepdim=True) + 0.25)


class Net(nn.Module):
    """A healthy network, with places for faults."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.relu1 = nn.ReLU(inplace=True)
        self.block = Times(1.0)
        self.norm = nn.GroupNorm(4, 16)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(16, 32, 3, stride=2)
        self.gate = nn.Sigmoid()
        self.conv4 = nn.Conv2d(32, 32, 3)
        self.root = SquareRoot()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, CLASSES)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv3(self.relu2(self.norm(self.block(self.relu1(self.conv1(x))))))
        return self.fc(self.pool(self.root(self.conv4(h * self.gate(h)), x)).flatten(1))


def inspected(net: nn.Module, *, dark: int | None = None, grad: bool = True, size: int = 40) -> Inspection:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(IMAGES, 3, 32, 32, generator=generator), torch.arange(IMAGES) % CLASSES
    if dark is not None:
        images[dark] = -0.5
    batches = list(zip(images.split(size), labels.split(size), strict=True))
    return inspect_model(net, batches, loss=F.cross_entropy if grad else None)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def kinds_and_layers(inspection: Inspection) -> list[tuple[str, str]]:
    return [(finding.kind, finding.layer) for finding in inspection.findings]


def test_nothing_is_found_in_a_healthy_network() -> None:
    assert kinds_and_layers(inspected(net())) == []


def test_faults_of_all_kinds_in_one_network_are_each_found_and_nothing_else() -> None:
    model = net()
    with torch.no_grad():
        model.conv1.weight[5], model.conv1.bias[5] = 0, -1.0  # type: ignore[index]
    model.block.factor = 1e5
    model.conv4.requires_grad_(False)
    gate = model.gate.forward
    model.gate.forward = lambda x: gate(x + 40)  # type: ignore[method-assign]
    inspection = inspected(model, dark=57)
    assert sorted(kinds_and_layers(inspection)) == [
        ("dead", "conv1"), ("exploding", "block"), ("frozen", "conv4"), ("not finite", "root"), ("saturated", "gate"),
    ]  # fmt: skip
    assert "first in image 57" in str(inspection.findings[0])


class NanIfLarge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs().sum(1, keepdim=True) > 100, torch.nan, x)


def test_the_image_that_gives_nan_is_named_and_the_layer_where_it_begins() -> None:
    images = torch.ones(16, 4)
    images[13] *= -1e3
    model = nn.Sequential(nn.Linear(4, 4), NanIfLarge(), nn.Linear(4, 4))
    [finding] = inspect_model(model, images.split(8), name_of=lambda position: f"photo-{position:03d}.jpg").findings
    assert str(finding).startswith("1: ")
    assert "first in photo-013.jpg" in finding.text
    images[7, 2] = torch.nan  # it comes in broken
    [finding] = inspect_model(model, [images[:8]]).findings
    assert (finding.kind, finding.layer) == ("not finite", "input")
    assert "image 7" in finding.text


class Steep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 1e5) * 1e-5 + x * 1e4 - (x * 1e4).detach() + x


class DeadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.first, self.between = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
        self.two, self.second = nn.Linear(6, 6), nn.ReLU()
        nn.init.constant_(self.one.bias, -30.0)
        nn.init.constant_(self.two.bias, -30.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(x + self.first(self.one(x)))
        return self.second(self.two(h))


def scaled(factor: float, *layers: nn.Module) -> nn.Module:
    """The layers, with the parameters of the first times a factor."""
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter *= factor
    return nn.Sequential(*layers)


def zero_at_the_end() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    nn.init.zeros_(model[2].weight)
    return model


@pytest.mark.parametrize(("build", "loss", "expected"), [
    (
        lambda: nn.Sequential(nn.Linear(6, 8), Steep(), nn.Linear(8, 3)),
        F.cross_entropy,
        [("exploding gradients", "1")],
    ),
    (zero_at_the_end, F.cross_entropy, [("zero weight", "2")]),  # and not what follows from it
    (DeadTwice, None, [("dead", "first"), ("dead", "second")]),
    (lambda: nn.Sequential(nn.Linear(6, 2)), F.cross_entropy, []),  # not wrong labels: the network is untrained
    # Gates and sure answers are no faults.
    (lambda: scaled(1e3, nn.Linear(6, 8), nn.Sigmoid()), None, []),
    (lambda: scaled(1e-4, nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 2)), None, []),
])  # fmt: skip
def test_small_networks_have_the_findings_that_they_should(
    build: Callable[[], nn.Module], loss: Any, expected: list[tuple[str, Any]]
) -> None:
    torch.manual_seed(0)
    inspection = inspect_model(build(), [(torch.randn(120, 6), torch.arange(120) % 2)], loss=loss)
    assert kinds_and_layers(inspection) == expected
    assert not any(finding.grave for finding in inspection.findings if finding.kind == "zero weight")


def test_a_parameter_that_the_loss_does_not_depend_on_is_named() -> None:
    linear = nn.Linear(6, 3)
    linear.spare = nn.Parameter(torch.ones(2))
    batch = torch.randn(30, 6), torch.arange(30) % 3
    [finding] = inspect_model(nn.Sequential(linear), [batch], loss=F.cross_entropy).findings
    assert (finding.kind, finding.layer, finding.text.split()[0]) == ("no gradient", "0", "spare")


def test_one_huge_channel_does_not_make_the_others_dead() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3))
    with torch.no_grad():
        model[0].weight[3] *= 1e10
    assert "dead" not in dict(kinds_and_layers(inspect_model(model, [torch.randn(30, 3, 8, 8)])))


def test_numbers_are_those_of_plain_hooks_and_autograd() -> None:
    model = net().eval()
    images = torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(24) % CLASSES
    inspection = inspect_model(model, [(images, labels)], loss=F.cross_entropy)
    outputs: dict[str, Tensor] = {}
    model.relu1.inplace = False  # a bare hook would see conv1 overwritten

    def keep(name: str, output: Tensor) -> None:
        output.retain_grad()
        outputs[name] = output

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda m, a, out, name=name: keep(name, out))
    loss = F.cross_entropy(model(images.clone().requires_grad_()), labels)
    loss.backward()
    assert inspection.loss == pytest.approx(loss.item(), rel=1e-5)
    assert {tensor.name for tensor in inspection.tensors} == set(outputs)
    for tensor in inspection.tensors:
        values = outputs[tensor.name].detach().double().numpy()
        gradients = outputs[tensor.name].grad.double().numpy()  # type: ignore[union-attr]
        np.testing.assert_allclose(tensor.activations.std, values.std(), rtol=1e-4)
        assert tensor.activations.max == pytest.approx(values.max(), rel=1e-5)
        norms = np.sqrt((gradients.reshape(24, -1) ** 2).sum(1))
        assert tensor.gradient_norm == pytest.approx(np.sqrt((norms**2).mean()), rel=1e-4)
    for parameter in inspection.parameters:
        gradient = model.get_parameter(parameter.name).grad
        assert gradient is not None
        assert parameter.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-4)
        assert parameter.norm == pytest.approx(model.get_parameter(parameter.name).norm().item(), rel=1e-5)


def test_the_size_of_batches_does_not_matter() -> None:
    first, second = inspected(net(), size=40, grad=False), inspected(net(), size=7, grad=False)
    shapes = {tensor.name: tensor.shape for tensor in first.tensors}  # of one image
    assert (shapes["conv1"], shapes["pool"], shapes["fc"]) == ((16, 32, 32), (32, 1, 1), (CLASSES,))
    for a, b in zip(first.tensors, second.tensors, strict=True):
        assert a.name == b.name
        np.testing.assert_allclose(a.activations.channel_mean, b.activations.channel_mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(a.activations.std, b.activations.std, rtol=1e-5)
        assert a.norm_ratio == pytest.approx(b.norm_ratio, rel=1e-4)


def test_the_model_comes_out_as_it_went_in() -> None:
    model = net().train()
    model.conv4.requires_grad_(False)
    inspected(model)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["conv4.weight", "conv4.bias"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    inspection = inspected(model.requires_grad_(False))  # a frozen network has gradients of activations
    assert kinds_and_layers(inspection) == []
    assert all(tensor.gradients is not None for tensor in inspection.tensors)


class AlwaysTraining(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> AlwaysTraining:
        super().train(True)
        return self


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_layers_in_training_mode_are_named_and_do_not_change() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), AlwaysTraining(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    ).eval()
    before = copy.deepcopy(model.state_dict())
    assert kinds_and_layers(inspect_model(model, [torch.randn(32, 3, 8, 8)])) == [("training mode", "1")]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shifted = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    shifted[1].running_mean += 30  # is found although the layer is left in training mode
    shifted[1].train()
    found = kinds_and_layers(inspect_model(shifted, [torch.randn(32, 3, 8, 8)]))
    assert found[:2] == [("running statistics", "1"), ("training mode", "1")]
    attention = Attention().eval()
    attention.attention.train()
    assert kinds_and_layers(inspect_model(attention, [torch.randn(32, 5, 8)])) == [("training mode", "attention")]


def test_rows_that_are_not_images_count_by_batch() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True)

    inspection = inspect_model(nn.Sequential(Mixed(), nn.Linear(4, 2)), [torch.randn(6, 4), torch.randn(6, 4)])
    assert [tensor.by_image for tensor in inspection.tensors] == [False, False]
    assert inspection.tensors[0].activations.images == 2


def test_wrong_input_is_refused_with_reasons() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(InputError, match="there are no batches"):
        inspect_model(model, [])
    with pytest.raises(InputError, match="a batch is str"):
        inspect_model(model, ["photo.jpg"])
    with pytest.raises(UnknownNameError, match="'fc'"):
        inspect_model(model, [torch.zeros(2, 4)], "fc")
    with pytest.raises(InputError, match=r"the loss returned \(2, 2\)"):
        inspect_model(model, [torch.zeros(2, 4)], loss=lambda output, targets: output)


def test_a_model_that_writes_into_its_input_is_seen_as_it_is() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.mul_(2.0))

    torch.manual_seed(0)
    model, images = Scaled(), torch.randn(20, 3, 8, 8)
    given = images.clone()
    inspection = inspect_model(model, [images], loss=lambda output, targets: output.square().mean())
    assert torch.equal(images, given)
    [conv] = inspection.tensors
    assert conv.by_image
    assert conv.activations.std == pytest.approx(model.conv(2 * given).std(correction=0).item(), rel=1e-4)
    assert conv.gradients is not None


class FirstColumns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


class WritesIntoAView(nn.Module):
    """Writes in place, under another name, into what a layer handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.part, self.two = nn.Linear(4, 4), FirstColumns(), nn.Linear(4, 4)
        for layer in (self.one, self.two):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        part = self.part(h)
        part += 1.0
        return self.two(h)


def test_a_loss_is_taken_and_a_tensor_whose_gradient_cannot_be_had_is_left_out() -> None:
    batch = torch.ones(6, 4)
    inspection = inspect_model(WritesIntoAView(), [batch], loss=lambda output, targets: output.square().mean())
    assert inspection.loss == pytest.approx((4 + 1) / 2)
    assert {tensor.name for tensor in inspection.tensors if tensor.gradients is None} == {"part"}


def test_lists_of_layers_and_what_attention_does_not_call_are_not_said_to_be_silent() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])
            self.spare = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    assert inspect_model(Net(), [torch.randn(6, 5, 8)]).never_ran == ["spare"]


def test_a_loss_of_a_model_whose_forward_computes_no_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    batches = [torch.ones(6, 4)]
    with torch.inference_mode():  # around the call, it has no effect
        assert inspect_model(model, batches, loss=lambda output, _: output.sum()).tensors[0].gradients is not None
    model.forward = torch.no_grad()(model.forward)  # type: ignore[method-assign]
    with pytest.raises(InputError, match="the loss has no gradient; it must depend on the model's output, which"):
        inspect_model(model, batches, loss=lambda output, _: output.sum())


def test_an_inspection_prints_as_a_line_and_in_a_notebook_as_tables() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0, -1
    inspection = inspect_model(model, [torch.randn(200, 4)])
    assert repr(inspection) == "Inspection(200 images, 2 tensors, findings: 0 serious, 1 minor)"
    page = HtmlReader(inspection._repr_html_())
    assert page.other[0] == repr(inspection)
    assert [row for row in page.rows if row[0] in ("serious", "minor")] == [
        ["serious" if finding.grave else "minor", str(finding)] for finding in inspection.findings
    ]
    layers = {row[0]: row for row in page.rows if row[0] in ("0", "1")}
    assert layers["0"][1:3] == ["Linear", "8"]
    assert layers["1"][9] == "1/8"  # dead


def test_uint8_inputs_are_inspected_as_the_same_pixels_in_float32() -> None:
    class Floating(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    torch.manual_seed(0)
    bn = nn.BatchNorm2d(4)
    bn.num_batches_tracked.fill_(1)  # it has seen inputs of variance 1
    bn.running_mean.fill_(0.1)
    model = nn.Sequential(Floating(), nn.Conv2d(3, 4, 3), bn, nn.Flatten(), nn.Linear(144, 2))
    pixels, seen = torch.randint(0, 256, (30, 3, 8, 8), dtype=torch.uint8), []
    for inputs in (pixels, pixels.float()):
        inspection = inspect_model(model, [(inputs, torch.arange(30) % 2)], loss=F.cross_entropy)
        table = layer_table(inspection.tensors)
        assert inspection.findings[0].kind == "input scale"
        assert "nan" not in str([table, *map(str, inspection.findings)])
        seen.append((list(map(str, inspection.findings)), [row[:11] for row in table]))
    assert seen[0] == seen[1]


def test_a_backbone_is_inspected_as_its_model() -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    inputs = torch.rand(4, 3, 64, 64)
    tables = [layer_table(inspect_model(model, [inputs], "layer?").tensors) for model in (backbone, backbone.model)]
    assert tables[0] == tables[1]
