"""What findings say, and the numbers that they rest on, against NumPy and PyTorch; the table of `planted_faults`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from extract.analysis.network.inspection import inspect_model
from extract.analysis.network.reports import AttentionReport, InputReport
from tests.extract.analysis.network.planted_faults import CIFAR, FAULTS, HEALTHY, PHOTOS, chain, noise, score


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
    assert AttentionReport.of("a", one_hot) == AttentionReport("a", 5, 1.0, 1.0, 4.0)
    report = AttentionReport.of("a", torch.cat([one_hot, uniform]))
    assert (report.largest, report.one_hot) == (pytest.approx(0.6), pytest.approx(0.5))
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
    assert score(fault, found) == "exact", f"expected {fault.expected}, found {found}"


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
