"""Monitors of a training: what they tell against autograd, that they change nothing, and their alarms."""

from __future__ import annotations

import contextlib
import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from extract.analysis.network.monitors import ActivationMonitor, GradientMonitor
from extract.errors import InputError, LayertapError
from tests.extract.analysis.network.test_inspection import WritesIntoAView


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def train(
    model: nn.Module, steps: int = 8, monitor: Any = None, before_step: Callable[[int], None] = lambda step: None
) -> list[float]:
    """A loop as anybody writes it, with an evaluation in its middle; returns the losses."""
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # of dropout
    losses = []

    def loop() -> None:
        for step in range(steps):
            before_step(step)
            images, labels = torch.randn(12, 3, 8, 8, generator=generator), torch.arange(12) % 3
            loss = F.cross_entropy(model(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
            if step == 3:
                model.eval()
                with torch.no_grad():
                    model(images)
                model.train()

    if monitor is None:
        loop()
    else:
        with monitor:
            loop()
    return losses


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [ActivationMonitor, GradientMonitor])
@pytest.mark.parametrize(("every", "wrap"), [(1, as_it_is), (3, as_it_is), (3, compiled)])
def test_a_training_is_the_same_with_a_monitor_that_sees_each_due_step_once_and_no_evaluations(
    kind: Any, every: int, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    plain, watched = net(), net()
    seen: list[int] = []
    model = wrap(watched)
    monitor = kind(model, every=every, to=lambda step, rows: seen.append(step))
    assert train(model, monitor=monitor) == train(wrap(plain))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    assert seen == list(range(0, 8, every))
    assert monitor.step == 8


def test_gradients_are_those_of_autograd() -> None:
    model, rows = net(), []
    images, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    torch.manual_seed(3)
    with GradientMonitor(model, every=1, to=lambda step, step_rows: rows.extend(step_rows)):
        F.cross_entropy(model(images), labels).backward()
    by_name = {(row["layer"], row["of"]): row for row in rows}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in gradients.items():
        assert gradient is not None
        layer, _, own = name.rpartition(".")
        norm = float(gradient.norm())
        assert by_name[layer, own]["norm"] == pytest.approx(norm, rel=1e-5)
        if size := model.get_parameter(name).norm().item():
            assert by_name[layer, own]["ratio"] == pytest.approx(norm / size, rel=1e-5)
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor) -> None:
        output.retain_grad()
        outputs[name] = output

    for name, layer in model.named_children():
        if hasattr(layer, "inplace"):
            layer.inplace = False
        layer.register_forward_hook(lambda m, a, out, name=name: keep(name, out))
    torch.manual_seed(3)
    model[1].reset_running_stats()
    F.cross_entropy(model(images), labels).backward()
    for name, output in outputs.items():
        if name != "3":  # dropout is watched neither
            assert output.grad is not None
            assert by_name[name, "output"]["norm"] == pytest.approx(float(output.grad.norm()), rel=1e-5)


def test_gradients_may_be_sparse() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    with GradientMonitor(model) as monitor:
        model(torch.tensor([3, 5, 3])).sum().backward()
    gradient = model[0].weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.is_sparse
    (row,) = [row for row in monitor.rows if (row["layer"], row["of"]) == ("0", "weight")]
    assert row["norm"] == pytest.approx(float(gradient.to_dense().norm()))


def test_activations_are_those_of_a_copying_hook() -> None:
    model, rows = net(), []
    kept: dict[str, np.ndarray] = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(
            lambda m, a, out, name=name: kept.update({name: out.detach().double().numpy().copy()})
        )
    with ActivationMonitor(model, every=1, to=lambda step, step_rows: rows.extend(step_rows)):
        model(torch.randn(12, 3, 8, 8))
    assert [row["layer"] for row in rows] == [name for name in kept if name != "3"]
    for row in rows:
        values = kept[row["layer"]]
        for key, expected in {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max(),
                              "zeros": (values == 0).mean(), "rms": np.sqrt((values**2).mean())}.items():  # fmt: skip
            assert row[key] == pytest.approx(expected, rel=1e-4, abs=1e-6), (row["layer"], key)


@pytest.mark.parametrize(("every", "at", "change", "expected"), [
    # By step 6, NaN gradients have reached all weights.
    (2, 4, lambda conv: conv.weight[0].fill_(torch.nan), [(4, "not finite", "4"), (6, "not finite", "0")]),
    (1, 0, lambda conv: conv.bias.fill_(-1e3), [(2, "dead", "5")]),  # after three looks
])  # fmt: skip
def test_nan_raises_one_alarm_that_names_the_first_layer_and_dead_channels_one(
    every: int, at: int, change: Callable[[Any], object], expected: list[tuple[int, str, str]]
) -> None:
    model, alarms = net(), []

    def spoil(step: int) -> None:
        if step == at:
            with torch.no_grad():
                change(model[4])

    train(model, 8, ActivationMonitor(model, every=every, on_alarm=alarms.append), spoil)
    assert [(alarm.step, alarm.kind, alarm.layer) for alarm in alarms] == expected


def test_a_layer_that_dies_later_is_named_though_an_earlier_one_was_half_dead_from_the_start() -> None:
    torch.manual_seed(0)
    model, alarms = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), []
    with torch.no_grad():
        model[0].weight[:4] = 0
    with ActivationMonitor(model, every=1, on_alarm=alarms.append):
        for step in range(12):
            if step == 6:
                nn.init.zeros_(model[2].weight)
            model(torch.randn(64, 4))
    assert [(alarm.step, alarm.kind, alarm.layer) for alarm in alarms] == [(2, "dead", "0"), (8, "dead", "2")]


@pytest.mark.parametrize("kind", [ActivationMonitor, GradientMonitor])
def test_explosions_raise_an_alarm(kind: Any) -> None:
    model, alarms = net(), []

    def blow_up(step: int) -> None:
        if step == 5:
            with torch.no_grad():
                model[4].weight.mul_(1e6)

    train(model, 7, kind(model, every=1, on_alarm=alarms.append), blow_up)
    assert alarms[0].step == 5
    assert alarms[0].kind == "exploding"
    assert kind is GradientMonitor or alarms[0].layer == "4"


def test_alarms_are_warnings_where_nobody_takes_them() -> None:
    model = net()
    with torch.no_grad():
        model[8].bias[0] = torch.inf
    with pytest.warns(RuntimeWarning, match=r"step 0: 8: 12 values are not finite"):
        train(model, 1, ActivationMonitor(model))


def test_a_csv_file_grows_and_other_columns_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "gradients.csv"
    for _ in range(2):
        model = net()
        train(model, 3, GradientMonitor(model, every=2, to=file))
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["step"] for row in rows if (row["layer"], row["of"]) == ("8", "weight")] == ["0", "2", "0", "2"]
    model = net()
    with pytest.raises(InputError, match="other columns"):
        train(model, 1, ActivationMonitor(model, to=file))
    with pytest.raises(InputError, match="expected a .csv file"):
        GradientMonitor(net(), to=tmp_path / "runs")


def test_tensorboard_gets_a_scalar_for_each_number(tmp_path: Path) -> None:
    writer_of = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = net()
    with writer_of.SummaryWriter(str(tmp_path)) as writer:
        train(model, 3, GradientMonitor(model, every=2, to=writer))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("8/weight/norm")] == [0, 2]
    assert "8/output/std" in events.Tags()["scalars"]


def test_hooks_are_gone_afterwards_also_after_an_error() -> None:
    model = net()
    with pytest.raises(RuntimeError), GradientMonitor(model, every=1):
        model(torch.randn(2, 3, 8, 8))
        model(torch.randn(2, 5, 8, 8))
    monitor = GradientMonitor(model, every=1)
    monitor.__enter__()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    monitor.__exit__()  # as callbacks of trainers do
    assert len(monitor.rows) > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_wrong_use_is_refused() -> None:
    model = net()
    with pytest.raises(InputError, match="at least 1"):
        ActivationMonitor(model, every=0)
    monitor = ActivationMonitor(model)
    with monitor, pytest.raises(LayertapError, match="already in use"):
        monitor.__enter__()
    compiled = net()
    compiled.compile(backend="eager")
    with pytest.raises(InputError, match=r"torch.compile\(model\)"):
        ActivationMonitor(compiled).__enter__()


def test_copies_of_a_monitored_model_are_not_monitored_and_it_can_be_saved(tmp_path: Path) -> None:
    model, seen = net(), []
    with ActivationMonitor(model, every=1, to=lambda step, rows: seen.append(step)):
        model(torch.randn(4, 3, 8, 8))
        copied = copy.deepcopy(model)
        copied(torch.randn(4, 3, 8, 8))
        torch.save(model, tmp_path / "model.pt")
        model(torch.randn(4, 3, 8, 8))
    copied(torch.randn(4, 3, 8, 8))
    assert seen == [0, 1]
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    loaded(torch.randn(4, 3, 8, 8))
    assert seen == [0, 1]


def test_one_image_a_batch_makes_nothing_dead() -> None:
    model, alarms = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)), []
    with ActivationMonitor(model, every=1, on_alarm=alarms.append):
        for _ in range(6):
            model(torch.randn(1, 3, 8, 8))
    assert alarms == []


def test_parameters_of_layers_with_layers_inside_and_of_the_model_are_watched() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.ones(1, 1, 8))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.token
            return self.attention(x, x, x)[0]

    rows: list[dict[str, Any]] = []
    with GradientMonitor(model := Net(), every=1, to=lambda step, step_rows: rows.extend(step_rows)):
        model(torch.randn(2, 5, 8)).square().mean().backward()
    assert {(row["layer"], row["of"]) for row in rows} >= {("", "token"), ("attention", "in_proj_weight")}


def test_a_model_that_writes_under_another_name_is_trained_as_without_a_monitor() -> None:
    def losses(monitored: bool) -> list[float]:
        torch.manual_seed(0)
        model, seen = WritesIntoAView(), []
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        monitor = GradientMonitor(model, every=1) if monitored else contextlib.nullcontext()
        with monitor:
            for _ in range(4):
                loss = model(torch.randn(8, 4)).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                seen.append(loss.item())
        if monitored:
            assert {row["layer"] for row in monitor.rows} >= {"one", "two"}  # type: ignore[union-attr]
        return seen

    assert losses(True) == losses(False)


def test_updates_are_the_changes_of_the_parameters_by_the_optimizer() -> None:
    model, rows = net(), []
    images, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with GradientMonitor(model, every=1, to=lambda step, step_rows: rows.extend(step_rows)):
        F.cross_entropy(model(images), labels).backward()
        optimiser.step()
    updates = {f"{row['layer']}.{row['of']}": row["update"] for row in rows if row["of"] != "output"}
    for name, parameter in model.named_parameters():
        if size := float(before[name].norm()):
            assert updates[name] == pytest.approx(float((parameter.detach() - before[name]).norm()) / size, rel=1e-5)


@pytest.mark.parametrize(("rate", "said"), [(0.05, []), (50.0, ["high?"]), (1e-9, ["low?"])])
def test_learning_rates_far_from_the_rule_of_thumb_raise_one_alarm(rate: float, said: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    images, labels, alarms = torch.randn(30, 6), torch.arange(30) % 3, []
    optimiser = torch.optim.SGD(model.parameters(), rate)
    with GradientMonitor(model, every=1, on_alarm=alarms.append):
        for step in range(9):
            F.cross_entropy(model(images), labels).backward()
            if step % 2:  # gradients are accumulated over two steps
                optimiser.step()
                optimiser.zero_grad()
        for _ in range(9):
            F.cross_entropy(model(images), labels).backward()
            optimiser.step()
            optimiser.zero_grad()
    about = [alarm for alarm in alarms if alarm.kind == "learning rate"]
    assert [alarm.text.split()[-1] for alarm in about][:1] == said
    assert all(alarm.layer == "optimizer" for alarm in about)
