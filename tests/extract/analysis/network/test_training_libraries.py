"""Monitors and taps in the training loops of Lightning, accelerate and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from extract import ActivationMonitor, GradientMonitor, Taps

pytestmark = pytest.mark.slow

STEPS, BATCH = 6, 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS * BATCH, 3, 10, 10, generator=generator)
    return TensorDataset(images, torch.arange(STEPS * BATCH) % 2)


def by_hand() -> tuple[list[float], list[float]]:
    """Mean output of the convolution, and norm of the gradient of the last layer, in each step of plain PyTorch."""
    model, means, norms = network(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(), BATCH):
        optimizer.zero_grad()
        means.append(model[0](x).mean().item())
        functional.cross_entropy(model(x), y).backward()
        assert isinstance(model[4].weight.grad, Tensor)
        norms.append(float(model[4].weight.grad.norm()))
        optimizer.step()
    return means, norms


class Seen:
    """Collects the rows of monitors."""

    def __init__(self) -> None:
        self.activations: list[dict[str, Any]] = []
        self.gradients: list[dict[str, Any]] = []

    def monitors(self, model: nn.Module) -> tuple[ActivationMonitor, GradientMonitor]:
        return (
            ActivationMonitor(model, every=1, to=lambda step, rows: self.activations.extend(rows)),
            GradientMonitor(model, every=1, to=lambda step, rows: self.gradients.extend(rows)),
        )

    def check(self) -> None:
        """Compare with the loop by hand."""
        means, norms = by_hand()
        seen = [row["mean"] for row in self.activations if row["layer"] == "0"]
        np.testing.assert_allclose(seen, means, rtol=1e-5)
        of_weight = [row["norm"] for row in self.gradients if (row["layer"], row["of"]) == ("4", "weight")]
        np.testing.assert_allclose(of_weight, norms, rtol=1e-5)


def test_lightning(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            x, y = batch
            return functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, seen = Module(), Seen()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    activations, gradients = seen.monitors(module.net)
    with activations, gradients:
        trainer.fit(module, DataLoader(data(), BATCH))
    seen.check()


def test_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), BATCH))
    seen = Seen()
    activations, gradients = seen.monitors(accelerator.unwrap_model(prepared))
    with activations, gradients:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(prepared(x), y))
            optimizer.step()
    seen.check()


class Pictures(Dataset[dict[str, Any]]):
    """Random pictures for a transformer."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.pixels = torch.randn(12, 3, 16, 16, generator=generator)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[row], "labels": row % 2}


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
    )  # fmt: skip
    model, pictures = ViTForImageClassification(config), Pictures()
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=1, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=pictures)
    seen: list[dict[str, Any]] = []
    with ActivationMonitor(model, every=1, to=lambda step, rows: seen.extend(rows)):
        trainer.train()
    assert {row["step"] for row in seen} == {0, 1, 2}

    kept: list[Tensor] = []
    layer = next(name for name, _ in model.named_modules() if name.endswith("layernorm"))
    taps = Taps(model, on_record=lambda record: kept.append(record[layer]))
    taps.keep(layer)
    with taps:
        trainer.predict(pictures)
    with torch.no_grad():
        model.eval()
        expected = model.vit(pictures.pixels).last_hidden_state
    torch.testing.assert_close(torch.cat(kept), expected)
