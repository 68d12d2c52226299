"""Edits: each verb against its formula, and their place in the forward and the backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from extract import InputError, Site, Taps
from extract.taps.edits import ablate, clamp, clip, freeze, mix, noise, prune, replace, scale, smooth

H = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
PERMUTATION = torch.tensor([2, 0, 3, 1])


def mean_over_batch(h: Tensor) -> Tensor:
    return torch.stack([h[:, c].sum(0) / 4 for c in range(3)]).expand(4, -1, -1, -1)


def channel_zeroed(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 1] = 0
    return h


def smallest_zeroed(h: Tensor) -> Tensor:
    rows = []
    for row in h:
        limit = row.abs().flatten().sort().values[22]  # 0.3 * 75 = 22.5: the 22 smallest go
        rows.append(torch.where(row.abs() < limit, 0.0, row))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("verb", "formula"),
    [
        (scale(-1.5), lambda h: -1.5 * h),
        (clamp(-0.2, 0.3), lambda h: torch.minimum(torch.maximum(h, torch.tensor(-0.2)), torch.tensor(0.3))),
        (clamp(high=0.0), lambda h: torch.where(h > 0, 0.0, h)),
        (replace(2.5), lambda h: torch.full((4, 3, 5, 5), 2.5)),
        (replace(H[:1] + 1), lambda h: torch.cat([H[:1] + 1] * 4)),
        (ablate(), torch.zeros_like),
        (ablate("mean"), mean_over_batch),
        (ablate(channels=[1]), channel_zeroed),
        (ablate(channels=[1], axis=-3), channel_zeroed),
        (ablate("mean", channels=[0, 1, 2]), mean_over_batch),
        (mix(PERMUTATION, 0.7), lambda h: torch.stack([0.7 * h[i] + 0.3 * h[j] for i, j in enumerate([2, 0, 3, 1])])),
        (prune(0.3), smallest_zeroed),
        (prune(0), lambda h: h),
        (prune(1), torch.zeros_like),
        (clip(0.5), lambda g: torch.where(g > 0.5, 0.5, torch.where(g < -0.5, -0.5, g))),
        (clip(2.0, "norm"), lambda g: g * 2 / (g**2).sum().sqrt()),
        (clip(1e6, "norm"), lambda g: g),
    ],
)
def test_a_verb_is_its_formula(verb, formula) -> None:
    conv = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), conv)
    with torch.no_grad(), Taps(model, ["0"]).edit("0", verb) as taps:
        given = H.clone()
        output = taps(given)
    expected = formula(H)
    assert torch.allclose(taps.record["0"], expected, atol=1e-6)
    assert torch.allclose(output, conv(F.relu(expected)), atol=1e-5)  # what later layers see
    assert torch.equal(given, H)  # the caller's own tensor


def test_noise_has_its_spread_and_comes_from_the_default_generator() -> None:
    h = torch.zeros(1000, 100)
    torch.manual_seed(3)
    first = noise(0.5)(h)
    torch.manual_seed(3)
    assert torch.equal(first, noise(0.5)(h))
    assert abs(first.std() - 0.5) < 0.01
    assert abs(first.mean()) < 0.01


def test_smoothed_gradients_are_a_moving_average() -> None:
    layer = nn.Linear(2, 1, bias=False)
    model = nn.Sequential(layer, nn.Identity())
    expected = None
    with Taps(model).edit("0", smooth(0.9), what="grad").keep("0", "grad") as taps:
        for step in range(4):
            (taps(torch.ones(3, 2)) * (step + 1)).sum().backward()
            raw = torch.full((3, 1), step + 1.0)
            expected = raw if expected is None else 0.9 * expected + 0.1 * raw
            assert torch.allclose(taps.record["0@grad"], expected)


def test_freeze_gives_every_parameter_its_setting_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1][0].weight.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), freeze(model, ["1", "1.*"]):
        assert [p.requires_grad for p in model.parameters()] == [True] * 2 + [False] * 4
        raise ZeroDivisionError
    assert [p.requires_grad for p in model.parameters()] == before


class Doubled(nn.Module):
    """ResNet-18 with the doubling of layer2 written into its forward."""

    def __init__(self, net: models.ResNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        n = self.net
        x = n.layer1(n.maxpool(n.relu(n.bn1(n.conv1(x)))))
        x = n.layer4(n.layer3(2 * n.layer2(x)))
        return n.fc(torch.flatten(n.avgpool(x), 1))


def test_doubling_a_layer_is_doubling_written_into_forward() -> None:
    torch.manual_seed(0)
    edited = models.resnet18().eval()
    written = Doubled(copy.deepcopy(edited))
    x = torch.randn(2, 3, 64, 64)
    with Taps(edited).edit("layer2", scale(2)) as taps:
        logits = taps(x)
        logits.square().sum().backward()
    expected = written(x)
    expected.square().sum().backward()
    assert torch.equal(logits, expected)
    assert logits.std() > 0
    for (name, ours), theirs in zip(edited.named_parameters(), written.net.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6 * float(theirs.grad.abs().max())), name
    plain = copy.deepcopy(written.net)
    assert not torch.allclose(plain(x), expected)


def test_edits_by_call_by_input_and_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 3), relu := nn.ReLU(), nn.Linear(3, 3), relu)
    x = torch.randn(5, 3)
    with torch.no_grad():
        with Taps(model).edit("1", scale(3), call=0).edit("1", lambda h: h + 1, call=0).keep("2", "input") as taps:
            output = taps(x)
        expected = F.relu(model[0](x)) * 3 + 1
        assert torch.equal(taps.record["2:0@input"], expected)
        assert torch.equal(output, F.relu(model[2](expected)))
        with Taps(model).edit("2", torch.zeros_like, what="input") as taps:
            assert torch.equal(taps(x), F.relu(model[2](torch.zeros(5, 3))))


def test_a_site_names_the_part_to_edit() -> None:
    lstm = nn.LSTM(2, 3, batch_first=True)
    model, x = nn.Sequential(lstm), torch.randn(2, 4, 2)
    with torch.no_grad():
        out, (h, c) = lstm(x)
        with Taps(model).edit(Site("0", 0, (1, 0)), scale(2)) as taps:
            edited, (h2, c2) = taps(x)
        assert torch.equal(h2, 2 * h)
        assert torch.equal(edited, out)
        assert torch.equal(c2, c)
        with Taps(model).edit("0", scale(2)) as taps:
            edited, (h2, c2) = taps(x)
        assert torch.equal(edited, 2 * out)
        assert torch.equal(c2, 2 * c)


def test_an_edit_cannot_reach_the_tensors_of_others() -> None:
    mine = torch.full((2, 3), -1.0)
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    x = torch.randn(2, 3)
    given = x.clone()
    with torch.no_grad(), Taps(model).edit("0", lambda h: h.mul_(0), what="input") as taps:
        taps(given)
    assert torch.equal(given, x)
    with torch.no_grad(), Taps(model).edit("0", lambda h: mine) as taps:
        taps(given)
    assert (mine == -1).all()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h[:1], r"edit of 0 returned \(1, 4\) torch.float32 on cpu; expected, as given, \(2, 4\)"),
        (lambda h: h.half(), "returned .* torch.float16"),
        (lambda h: None, "returned NoneType; it must return a tensor"),
    ],
)
def test_an_edit_that_changes_shape_or_dtype_is_refused(edit, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InputError, match=message), Taps(model).edit("0", edit) as taps:
        taps(torch.ones(2, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_edit_that_raises_names_the_layer_and_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ZeroDivisionError) as raised, Taps(model).edit("1", lambda h: h / (1 // 0)) as taps:
        taps(torch.ones(2, 4))
    assert raised.value.__notes__ == ["while editing 1 of shape (2, 4)"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_functions_without_a_module_can_be_edited() -> None:
    net = models.resnet18().eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad(), Taps(net, "layer1.0/add").edit("layer1.0/add", ablate()).keep("layer1.0") as taps:
        taps(x)
    assert (taps.record["layer1.0/add"] == 0).all()
    assert (taps.record["layer1.0"] == 0).all()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ablate("median"), "by 'median'"),
    (lambda: prune(1.5), "prune fraction 1.5"),
    (lambda: clip(1, "max"), "by 'max'"),
])  # fmt: skip
def test_wrong_settings(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
