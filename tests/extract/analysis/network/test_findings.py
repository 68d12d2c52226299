"""What findings say, and the numbers that they rest on, against NumPy and PyTorch; the table of `planted_faults`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from extract.analysis.network.findings import first_misfit
from extract.analysis.network.inspection import inspect_model
from extract.analysis.network.reports import AttentionReport, InputReport, WeightReport
from tests.extract.analysis.network.planted_faults import CIFAR, FAULTS, HEALTHY, PHOTOS, chain, is_exact, noise


@pytest.mark.parametrize("depth", [0, 9])
def test_an_explosion_names_its_gain_that_of_other_layers_and_all_layers_behind_once(depth: int) -> None:
    torch.manual_seed(0)
    model, h, gains = chain(10), torch.cat([images for images, _ in noise()]), {}
    with torch.no_grad():
        model.get_submodule(f"conv{depth}").weight.mul_(1e4)  # type: ignore[operator,union-attr]
        [finding] = inspect_model(model, noise()).findings
        assert finding.grave
        for name, layer in model.named_children():
            before, h = h, layer(h)
            if isinstance(layer, nn.Conv2d):
                gains[name] = float((h.double().square().mean() / before.double().square().mean()).sqrt())
    own = gains.pop(f"conv{depth}")
    said = finding.text.split()
    assert float(said[3].replace(",", "")) == pytest.approx(own, rel=1e-3)
    assert finding.text.endswith(f"the median of the other Conv2d layers is {np.median([*gains.values()]):.2g}")
    behind = [name for name, _ in model.named_children()]
    behind = behind[behind.index(f"conv{depth}") + 1 :]
    assert finding.layers == tuple(behind)
    assert str(finding).endswith(f"(relu{depth}, {behind[1]}, {behind[2]} and {len(behind) - 3} more)")


def test_a_normalisation_limits_the_layers_that_an_explosion_affects() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight *= 1e5
    [finding] = inspect_model(model, [torch.randn(64, 8)]).findings
    assert (finding.kind, finding.layer, finding.layers) == ("exploding", "1", ("2",))
    assert str(finding).endswith(" (2)")


def test_inputs_are_those_of_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    images = 3 + 2 * torch.randn(20, 3, 8, 8, generator=generator)
    report = InputReport()
    for batch in images.split(7):
        report.add(batch)
    values = images.double().numpy()
    assert (report.values.min, report.values.max) == (values.min(), values.max())
    assert report.values.mean == pytest.approx(values.mean(), rel=1e-5)
    assert report.values.std == pytest.approx(values.std(), rel=1e-4)
    assert (report.count, report.equal, report.broken) == (20, False, [])
    images[13, 0, 0, 0] = torch.inf
    broken = InputReport()
    for batch in images.split(7):
        broken.add(batch)
    assert broken.broken == [13]
    finite = images.double().numpy()[np.isfinite(images.numpy())]
    assert broken.values.mean == pytest.approx(finite.mean(), rel=1e-5)


@pytest.mark.parametrize(("change", "equal"), [(0.0, True), (1e-5, True), (0.5, False)])
def test_inputs_are_equal_up_to_rounding_in_all_batches(change: float, equal: bool) -> None:
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).repeat(12, 1, 1, 1)
    images[11, 0, 0, 0] += change
    report = InputReport()
    for batch in images.split(5):
        report.add(batch)
    assert report.equal is equal
    single = InputReport()
    single.add(images[:1])
    assert not single.equal


def test_attention_is_summarised_over_heads_and_queries() -> None:
    one_hot = F.one_hot(torch.arange(5), 5).float().expand(2, 3, 5, 5)
    uniform = torch.full((2, 3, 5, 5), 0.2)
    assert AttentionReport.of("a", one_hot) == AttentionReport("a", 5, 1.0, 4.0)
    report = AttentionReport.of("a", torch.cat([one_hot, uniform]))
    assert report.one_hot == pytest.approx(0.5)
    assert AttentionReport.of("a", uniform).deviation == pytest.approx(0, abs=1e-6)


def normalised(std: float, draw: Callable[..., Tensor] = torch.randn) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    for _ in range(60):
        model.train()(std * draw(16, 3, 8, 8))
    return model


@pytest.mark.parametrize(("layer", "factor", "kind"), [(0, 1e4, "exploding"), (4, 1e-8, "running statistics")])
def test_inputs_that_were_never_normalised_are_not_blamed_for_a_layer(layer: int, factor: float, kind: str) -> None:
    model = normalised(1.0, torch.rand)
    with torch.no_grad():
        (model[layer].weight if layer == 0 else model[layer].running_var).mul_(factor)
    [finding] = inspect_model(model, [torch.rand(64, 3, 8, 8)]).findings
    assert (finding.kind, finding.layer) == (kind, str(layer))
    assert finding.layers == tuple("1234"[layer:])


def test_running_statistics_that_fit_are_no_finding_on_any_scale() -> None:
    for std in (1.0, 60.0):
        assert inspect_model(normalised(std), [std * torch.randn(64, 3, 8, 8)]).findings == []


def test_inputs_on_another_scale_than_in_training_are_named_not_the_layers_behind() -> None:
    images = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))  # standard deviation 0.29
    for scale, times in ((255.0, 73.6), (0.5, 0.144)):
        [finding] = inspect_model(normalised(1.0), [scale * images]).findings
        assert (finding.kind, finding.layer, finding.grave) == ("input scale", "input", True)
        said = float(finding.text.rpartition(" vary ")[2].split()[0])
        assert said == pytest.approx(times, rel=0.2)


def test_two_inputs_of_one_picture_are_equal_and_channels_are_not_called_dead() -> None:
    torch.manual_seed(0)
    images = torch.rand(1, 3, 12, 12).repeat(128, 1, 1, 1)
    [finding] = inspect_model(chain(4), [images]).findings
    assert (finding.kind, finding.layer) == ("equal inputs", "input")
    assert inspect_model(chain(4), [images[:1]]).findings == []


def test_layers_that_never_run_are_one_finding() -> None:
    torch.manual_seed(0)
    model = chain(3)
    model.get_submodule("conv1").spare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    [finding] = inspect_model(model, noise(), loss=F.cross_entropy).findings
    assert (finding.kind, finding.layer, finding.layers) == ("no gradient", "conv1.spare.0", ("conv1.spare.1",))
    assert finding.text.endswith("the layer never runs")


@pytest.mark.parametrize(("depth", "value"), [(0, torch.nan), (3, torch.inf)])
def test_a_weight_that_is_not_finite_is_one_finding(depth: int, value: float) -> None:
    torch.manual_seed(0)
    model = chain(5)
    with torch.no_grad():
        model.get_submodule(f"conv{depth}").weight[1, 0, 0, 0] = value  # type: ignore[index,union-attr]
    [finding] = inspect_model(model, noise()).findings
    assert (finding.kind, finding.layer) == ("not finite", f"conv{depth}")
    assert "fc" in finding.layers


@pytest.mark.parametrize(
    "parameter",
    [nn.Parameter(torch.empty(0, 5, 4)), nn.Parameter(torch.empty(5, 0, 4)), nn.Parameter(torch.empty(5, 4, 0)),
     nn.Parameter(torch.empty(20, 20, device="meta")), nn.Parameter(torch.eye(20).to_sparse()),
     nn.LazyLinear(3).weight],
)  # fmt: skip
def test_parameters_without_values_are_passed_over(parameter: nn.Parameter) -> None:
    model = chain(3)
    model.register_parameter("spare", parameter)
    assert inspect_model(model, noise()).findings == []


def test_a_weight_is_counted_whatever_its_type() -> None:
    rows = torch.arange(24.0).reshape(6, 4)
    rows[[1, 4, 5]] = rows[0].clone()
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64):
        report = WeightReport.of("a.weight", nn.Parameter(rows.to(dtype), requires_grad=False))
        assert report == WeightReport("a.weight", "a", 24, 12, 6, 4, False)


def test_patterns_of_parameters_other_than_weights_are_no_finding() -> None:
    model = chain(3)
    model.get_submodule("conv1").spare = spare = nn.LSTM(4, 128)
    model.register_parameter("a_log", nn.Parameter(torch.arange(1.0, 17).log().repeat(64, 1)))  # as in Mamba
    for name, value in spare.named_parameters():
        if "bias" in name:
            value.data.copy_(torch.arange(512) // 128 == 1)  # of the forget gate
    assert inspect_model(model, noise()).findings == []


def test_few_channels_do_not_tell_another_scale_from_other_images() -> None:
    torch.manual_seed(0)
    gate = nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1), nn.Sigmoid())
    for _ in range(60):
        gate.train()(torch.randn(16, 3, 8, 8))
    assert first_misfit(inspect_model(gate, [0.5 * torch.randn(64, 3, 8, 8)]).tensors) is None


# Losses


class ByMean(nn.Module):
    """A trained classifier: whether the first channel is positive, by a factor; batch normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc = nn.BatchNorm1d(2, eps=0.0), nn.Linear(2, 2)
        self.bn.running_mean += 0.01  # type: ignore[operator]
        self.fc.weight.data = torch.tensor([[-9.0, 0.1], [9.0, 0.2]])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(x.mean((2, 3)) * 5))


def labelled(positive: float) -> tuple[Tensor, Tensor]:
    """Return 200 images and their labels, of which this part is 1."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(200) < 200 * positive).long()
    images = torch.randn(200, 3, 5, 5, generator=generator)[:, :2]
    images[:, 0] += (2.0 * labels - 1)[:, None, None] * (1 - images[:, 0].mean((1, 2)).abs())[:, None, None]
    return images, labels


@pytest.mark.parametrize("positive", [0.0, 0.5])
def test_images_of_mostly_one_class_do_not_make_right_labels_look_wrong(positive: float) -> None:
    images, labels = labelled(positive)
    for given in (labels, labels.roll(50)) if positive == 0.5 else (labels,):
        kinds = [finding.kind for finding in inspect_model(ByMean(), [(images, given)], loss=F.cross_entropy).findings]
        assert ("labels" in kinds) == (given is not labels)


def scatter(embeddings: Tensor, labels: Tensor) -> Tensor:
    distances = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels
    return distances[same].mean() - distances[~same].mean()


def test_embeddings_are_not_taken_for_predictions() -> None:
    images, labels = labelled(0.5)
    assert inspect_model(ByMean(), [(images, labels.roll(50))], loss=scatter).findings == []


def test_outputs_of_a_varying_number_of_columns_are_inspected() -> None:
    class Flat(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(1)

    model = Flat(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))
    batches = [(torch.randn(30, 3, height, 8), torch.arange(30) % 6) for height in (8, 9)]
    assert inspect_model(model, batches, loss=F.cross_entropy).images == 60


def test_a_loss_in_bfloat16_uses_its_targets_though_rounding_may_hide_it() -> None:
    model = chain(2).bfloat16()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(10, (128,), generator=generator)
        images = torch.randn(128, 3, 8, 8, generator=generator).bfloat16()
        kinds = [finding.kind for finding in inspect_model(model, [(images, labels)], loss=F.cross_entropy).findings]
        assert "targets" not in kinds


def test_targets_that_matter_in_a_later_batch_are_used() -> None:
    images = noise()[0][0]
    batches = [(images, torch.arange(len(images)) % 3 + first) for first in (0, 8)]  # 8 to 10: two kinds
    kinds = [
        finding.kind
        for finding in inspect_model(chain(2), batches, loss=lambda o, t: F.cross_entropy(o, t // 9)).findings
    ]
    assert "targets" not in kinds


# The table: each fault is named first, at its layer; healthy networks have no finding


QUICK = {"31 default ReLUs", "21 default sigmoids", "zero weights in conv5"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_planted_fault_is_named_first_at_its_layer(name: str) -> None:
    fault = FAULTS[name]
    if fault.needs_cifar and not CIFAR.is_dir():
        pytest.skip(f"no pictures in {CIFAR}")
    found = fault.look()
    assert is_exact(fault, found), f"expected {fault.expected}, found {found}"


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_network_has_no_finding(name: str) -> None:
    folder = PHOTOS if name.startswith("bundled") else CIFAR
    if not folder.is_dir():
        pytest.skip(f"no pictures in {folder}")
    assert HEALTHY[name]() == []


def test_the_quick_faults_are_in_the_table() -> None:
    assert set(FAULTS) >= QUICK
    assert len(FAULTS) >= 40
    assert len(HEALTHY) >= 12
