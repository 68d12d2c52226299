"""On a GPU: the same numbers as on the CPU, in the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from extract import extract_features, load_backbone
from extract.probe import linear_probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_features_equal_those_of_the_cpu_in_full_float32(folder: Path, tmp_path: Path) -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    readers = [
        extract_features(folder, out=tmp_path / device, layers=["blocks.*", "embedding"], batch_size=5, device=device)
        for device in ("cpu", "cuda")
    ]
    for layer in readers[0].layers:
        cpu, gpu = (reader[layer][:] for reader in readers)
        assert np.abs(gpu - cpu).max() <= 1e-4 * np.abs(cpu).max()
    assert torch.backends.cudnn.conv.fp32_precision == before


def test_rows_keep_their_images_under_pinned_memory(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cuda")
    one = extract_features(folder, out=tmp_path / "a", backbone=backbone, batch_size=1, workers=2)
    many = extract_features(folder, out=tmp_path / "b", backbone=backbone, batch_size=12, workers=2)
    assert np.allclose(one["embedding"][:], many["embedding"][:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("protocol", ["simclr", "knn", "fewshot"])
def test_probes_give_what_they_give_on_the_cpu(protocol: str) -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 4, 600)
    x = (generator.normal(size=(600, 30)) + generator.normal(size=(4, 30))[y]).astype(np.float32)
    cpu, gpu, streamed = (
        linear_probe(x[:400], y[:400], x[400:], y[400:], protocol=protocol, device=device, memory_bytes=memory)
        for device, memory in (("cpu", 1 << 30), ("cuda", 1 << 30), ("cuda", 20_000))
    )
    for found in (gpu, streamed):
        assert found.value == pytest.approx(cpu.value, abs=0.015)
        assert [value for _, value in found.curve] == pytest.approx([value for _, value in cpu.curve], abs=0.03)
    if protocol == "simclr":
        assert gpu.objective == pytest.approx(cpu.objective, rel=1e-3) or gpu.chosen != cpu.chosen
