"""Effects of edits, against forwards of a model that is edited by hand."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from extract import Backbone, load_backbone
from extract.analysis.network.ablation import ablation, mean_activations
from extract.errors import InputError, UnknownNameError
from extract.taps import edits
from tests.conftest import TINY_INPUT, make_picture


@pytest.fixture(scope="module")
def small() -> Backbone:
    return load_backbone("timm/test_efficientnet", weights="random", device="cpu", preprocessing=TINY_INPUT)


@pytest.fixture(scope="module")
def inputs(small: Backbone) -> Tensor:
    prepared = [small.preprocessing.cpu_transform(make_picture(seed, 300, 260)) for seed in range(4)]
    return small.preprocessing.to_input(torch.stack(prepared))


class Changed(nn.Module):
    """A layer, and something behind it."""

    def __init__(self, layer: nn.Module, change: object):
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer(x))  # type: ignore[operator, no-any-return]


def by_hand(model: nn.Module, name: str, change: object, inputs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Embedding, scores, and what the blocks give, of a copy in which one layer is another."""
    model = copy.deepcopy(model).eval()
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, Changed(model.get_submodule(name), change))
    kept: dict[str, Tensor] = {}
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.register_forward_hook(lambda m, a, out, number=number: kept.update({f"blocks.{number}": out.clone()}))
    model.classifier.register_forward_pre_hook(lambda m, args: kept.update(embedding=args[0].clone()))  # type: ignore[union-attr]
    with torch.no_grad():
        scores = model(inputs)
    return kept.pop("embedding"), scores, kept


def cosine(value: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(value.flatten(1).double(), other.flatten(1).double()).mean())


@pytest.mark.parametrize(("edit", "change"), [
    (edits.ablate(), torch.zeros_like),
    (edits.scale(1.3), lambda h: 1.3 * h),
    (edits.prune(0.5), edits.prune(0.5)),
])  # fmt: skip
def test_effects_are_those_of_a_model_changed_by_hand(
    small: Backbone, inputs: Tensor, edit: edits.Edit, change: object
) -> None:
    targets = torch.tensor([1, 2, -1, 3])
    plain = by_hand(small.model, "blocks.2", lambda h: h, inputs)
    targets[0] = plain[1][0].argmax()  # one is right
    batches = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
    result = ablation(small, batches, ["blocks.4", "blocks.2"], edit)
    assert [effect.layer for effect in result.effects] == ["blocks.2", "blocks.4"]  # in the order of computing
    assert (result.images, result.targets, result.accuracy) == (4, 3, pytest.approx(1 / 3))
    for effect in result.effects:
        embedding, scores, later = by_hand(small.model, effect.layer, change, inputs)
        assert effect.cosine == pytest.approx(cosine(embedding, plain[0]), abs=1e-4)
        same = (scores.argmax(1) == plain[1].argmax(1)).float().mean()
        assert effect.same_class == pytest.approx(float(same))
        right = (scores.argmax(1) == targets)[targets >= 0].float().mean()
        assert effect.accuracy == pytest.approx(float(right))
        wanted = {"blocks.4"} if effect.layer == "blocks.2" else set()
        assert set(effect.later) == wanted
        for name in wanted:
            assert effect.later[name] == pytest.approx(cosine(later[name], plain[2][name]), abs=1e-4)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2, self.head = nn.Conv2d(1, 4, 5), nn.Conv2d(4, 6, 5, stride=3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv2(self.conv1(x).relu()).relu().mean((2, 3)))


PICTURES = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def test_noise_is_the_same_each_time_differs_from_batch_to_batch_and_leaves_the_generator_alone() -> None:
    model, seen = Own(), []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    [first], [second] = (ablation(model, [PICTURES], ["conv1"], edits.noise(1.0)).effects for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert first.cosine == second.cosine < 0.9999

    def noisy(h: Tensor) -> Tensor:
        seen.append(torch.randn(3))
        return h

    ablation(model, [PICTURES[:1], PICTURES[1:2]], ["conv1"], noisy)
    assert not torch.equal(seen[0], seen[1])


def test_one_edit_for_each_layer_by_its_name() -> None:
    result = ablation(Own(), [PICTURES], ["conv1", "conv2"], {"conv1": edits.ablate(), "conv2": edits.scale(1)})
    assert [effect.cosine > 0.999 for effect in result.effects] == [False, True]


def test_wrong_layers_and_channels_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="conv9"):
        ablation(Own(), [PICTURES], ["conv9"], edits.ablate())
    with pytest.raises(InputError, match="expected 0 to 3"):
        ablation(Own(), [PICTURES], ["conv1"], edits.ablate(), channels=[4])
    with pytest.raises(InputError, match="there are no batches"):
        ablation(Own(), [], ["conv1"], edits.ablate())


class Twice(Own):
    """One activation for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.conv2(self.relu(self.conv1(x)))).mean((2, 3)))


def test_each_call_of_a_layer_gets_its_own_mean() -> None:
    model = Twice()
    means = mean_activations(model, [PICTURES[:2], PICTURES[2:]], ["relu"])
    with torch.no_grad():
        first = model.conv1(PICTURES).relu()
        second = model.conv2(first).relu()
        replaced = model.head(second.mean(0, keepdim=True).mean((2, 3)))
        plain = model(PICTURES)
    assert list(means) == ["relu#0", "relu#1"]
    for mean, call in zip(means.values(), (first, second), strict=True):
        np.testing.assert_allclose(mean, call.mean(0, keepdim=True), atol=1e-4)
    edit = {name: edits.replace(mean) for name, mean in means.items()}
    [effect] = ablation(model, [PICTURES], ["relu"], edit).effects
    assert effect.layer == "relu"
    assert effect.cosine == pytest.approx(cosine(replaced.expand_as(plain), plain), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_an_own_module_is_ablated_by_layer_and_by_channel(dtype: torch.dtype) -> None:
    class Net(Own):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    model, pictures = Net(), torch.randint(0, 9, (6, 1, 28, 28)).to(dtype)
    with torch.no_grad():
        plain = model(pictures)
        targets = plain.argmax(1)
        targets[0] = (targets[0] + 1) % 5
        hidden = model.conv1(pictures.float()).relu()
        halved = model.head(model.conv2(hidden).mul(0.5).relu().mean((2, 3)))
        hidden = model.conv2(hidden)
        hidden[:, 3] = 0
        without = model.head(hidden.relu().mean((2, 3)))
    halving = ablation(model, [(pictures[:2], targets[:2]), (pictures[2:], targets[2:])], "conv2", edits.scale(0.5))
    by_channel = ablation(model, [pictures], ["conv2"], edits.ablate(), channels=[3])
    assert halving.accuracy == pytest.approx(5 / 6)
    for effect, scores in ((halving.effects[0], halved), (by_channel.effects[0], without)):
        assert effect.cosine == pytest.approx(cosine(scores, plain), abs=1e-6)
        same = (scores.argmax(1) == plain.argmax(1)).float().mean()
        assert effect.same_class == pytest.approx(float(same))
    assert math.isnan(by_channel.effects[0].accuracy)
    means = mean_activations(model, [pictures[:2], pictures[2:]], "conv1")
    with torch.no_grad():
        np.testing.assert_allclose(means["conv1"], model.conv1(pictures.float()).mean(0, keepdim=True), atol=1e-5)


def test_scores_in_a_mapping_count_as_the_output() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.body(x)}

    model, pictures = Scores().eval(), torch.rand(3, 3, 8, 8)
    with torch.no_grad():
        scores = model.body(pictures)
        edited = model.body[1:](model.body[0](pictures) * 0)
    result = ablation(model, [(pictures, scores.argmax(1).tolist())], "body.0", edits.scale(0))
    assert result.accuracy == 1
    assert result.effects[0].cosine == pytest.approx(cosine(edited, scores))
    with pytest.raises(InputError, match=r"targets of shape \(1,\); expected a class, or -1, for each of 3 images"):
        ablation(model, [(pictures, torch.tensor([1]))], "body.0", edits.scale(0))
