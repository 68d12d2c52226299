"""On a GPU: the same numbers as on the CPU, in the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract import extract_features, load_backbone
from extract.analysis.probe import linear_probe
from extract.compute import transfers
from extract.compute.agreement import agreement
from extract.images.device_decoding import JpegDecoder
from tests.conftest import make_picture

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


CODE = """
from torch import nn
from torchvision.transforms import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.relu = nn.ReLU(inplace=True)
        self.mixed = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(40)])
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.relu(self.conv(x))
        return self.fc(self.mixed(x).mean((2, 3)))


def net():
    return Net(), lambda picture: functional.to_tensor(picture.resize((16, 16)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile", "pinned"), [("off", transfers.PINNED_BYTES), ("off", 1 << 18), ("inductor", 1 << 22)]
)
def test_none_of_100_000_rows_is_another_or_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile: str, pinned: int
) -> None:
    """The maps of a 1x1 convolution, which a ReLU writes over, against the same by numpy; later layers keep it busy."""
    monkeypatch.setattr(transfers, "PINNED_BYTES", pinned)
    (tmp_path / "nets.py").write_text(CODE)
    pictures = np.random.default_rng(0).integers(0, 256, (100_000, 16, 16, 3), np.uint8)
    np.save(tmp_path / "pictures.npy", pictures)
    backbone = load_backbone(f"python/{tmp_path}/nets.py:net", device="cuda")
    reader = extract_features(
        tmp_path / "pictures.npy",
        out=tmp_path / "out",
        backbone=backbone,
        layers=["conv:none", "mixed.*", "fc"],
        batch_size=500,
        compile=compile,
    )
    conv = backbone.model.get_submodule("conv")
    weight, bias = (value.detach().cpu().numpy() for value in (conv.weight, conv.bias))
    for start in range(0, 100_000, 10_000):
        x = pictures[start : start + 10_000].astype(np.float32) / 255
        expected = np.einsum("nhwc,oc->nohw", x, weight[:, :, 0, 0]) + bias[:, None, None]
        apart = np.abs(reader["conv"][start : start + 10_000] - expected).reshape(10_000, -1).max(1)
        assert apart.max() <= 1e-5, f"row {start + int(apart.argmax())}"
    assert (reader.column("status")[:] == 1).all()


def test_what_is_kept_does_not_pile_up_in_the_memory_of_the_gpu(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("torchvision/resnet18", weights="random", device="cuda")
    peaks = []
    for name, layers in {"one": ["layer1.0.conv1:mean_map"], "all": ["conv1:none", "bn1:none", "layer*:none"]}.items():
        torch.cuda.reset_peak_memory_stats()
        reader = extract_features(
            folder, out=tmp_path / name, backbone=backbone, layers=layers, batch_size=12, workers=0
        )
        peaks.append(torch.cuda.max_memory_allocated())
    kept = sum(reader[layer][:].nbytes for layer in reader.layers)
    assert peaks[1] - peaks[0] < kept / 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_every_gpu_gives_what_the_first_one_gives(folder: Path, tmp_path: Path) -> None:
    one = extract_features(folder, out=tmp_path / "0", device="cuda:0", batch_size=5)
    for number in range(1, torch.cuda.device_count()):
        other = extract_features(folder, out=tmp_path / str(number), device=f"cuda:{number}", batch_size=5)
        assert np.allclose(one["embedding"][:], other["embedding"][:], rtol=1e-5, atol=1e-6)


def test_rows_keep_their_images_under_pinned_memory(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cuda")
    one = extract_features(folder, out=tmp_path / "a", backbone=backbone, batch_size=1, workers=2)
    many = extract_features(folder, out=tmp_path / "b", backbone=backbone, batch_size=12, workers=2)
    assert np.allclose(one["embedding"][:], many["embedding"][:], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_jpeg_files_are_decoded_into_memory_that_no_queued_kernel_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8,000 files, beside a full queue of forwards: bit for bit as by a decoder that waits for all of the GPU."""
    folder = tmp_path / "photos"
    folder.mkdir()
    pictures = [make_picture(seed, 400 + 16 * (seed % 5), 300) for seed in range(100)]
    for number in range(8_000):
        comment = str(number).encode()  # files with the same bytes would be computed once
        pictures[number % 100].save(folder / f"{number:04d}.jpg", quality=85 + number % 10, comment=comment)
    how: Any = {
        "backbone": load_backbone("torchvision/resnet50", weights="random", device="cuda"), "decode": "gpu",
        "layers": ["layer1", "embedding"], "batch_size": 256, "min_cosine": 0.99,
    }  # fmt: skip
    ahead = extract_features(folder, out=tmp_path / "ahead", **how)
    monkeypatch.setattr(JpegDecoder, "drain", lambda self: torch.cuda.synchronize())
    monkeypatch.setattr(JpegDecoder, "hand_over", lambda self, images: torch.cuda.synchronize())
    waits = extract_features(folder, out=tmp_path / "waits", **how)
    assert (ahead.column("status")[:] == 1).all()
    for name in ahead.layers:
        assert ahead[name][:].tobytes() == waits[name][:].tobytes()
    exact = extract_features(folder, out=tmp_path / "exact", limit=200, **(how | {"decode": "exact"}))
    assert agreement({"x": ahead["embedding"][:200]}, {"x": exact["embedding"][:]})["x"].min_cosine > 0.999


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
