"""`layertap list`, `layertap show A B`, and the options of `embed` that bear on pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models

from extract import FeatureReader
from extract.backbones import sources as catalogue
from extract.errors import LayertapError
from extract.taps.layer_names import named_layers
from pipelines.embed.config import EmbedConfig
from pipelines.network.listing import LayerRow, layer_table
from tests.conftest import make_picture
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds


def test_the_sources_and_backbones_that_match_are_listed() -> None:
    found = json.loads(layertap("backbones", "--json").stdout)
    assert list(found) == list(catalogue.SOURCES)
    assert found["timm"]["models"] == len(timm.list_models())
    assert "torchvision" in layertap("backbones").stdout
    for pattern, specs in (
        ("bundled", ["bundled/efficientnet_lite0"]),
        ("timm/test_vit", ["timm/test_vit"]),
        ("*/resnet18", ["torchvision/resnet18", "timm/resnet18"]),
    ):
        assert [one["spec"] for one in json.loads(layertap("backbones", pattern, "--json").stdout)] == specs


def test_what_is_told_of_a_backbone_is_true() -> None:
    one, name = catalogue.describe("timm/test_vit"), "test_vit"
    with torch.device("meta"):  # without memory for weights
        model: Any = timm.create_model(name)
        other = models.mobilenet_v2()
    assert (one.width, one.input_px) == (model.num_features, (160, 160))
    assert one.parameters == sum(p.numel() for p in model.parameters())
    assert one.licence == model.pretrained_cfg["license"]
    assert one.weights[0] == model.pretrained_cfg["tag"]
    one = catalogue.describe("torchvision/mobilenet_v2")
    assert one.parameters == sum(p.numel() for p in other.parameters())
    assert (one.width, one.licence, one.weights) == (1280, "", ("IMAGENET1K_V2", "IMAGENET1K_V1"))
    one = catalogue.describe("open_clip/ViT-S-32")
    assert (one.width, one.input_px) == (384, (224, 224))
    assert catalogue.describe("timm/resnet18.fb_ssl_yfcc100m_ft_in1k").licence == "cc-by-nc-4.0"


def test_a_long_list_of_backbones_builds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", None)
    listed = {one["spec"]: one for one in json.loads(layertap("backbones", "timm/vit*", "--json").stdout)}
    assert listed.keys() == {f"timm/{name}" for name in timm.list_models("vit*")}
    assert len(listed) > 100
    one, config = listed["timm/vit_base_patch16_384"], timm.get_pretrained_cfg("vit_base_patch16_384")
    assert config
    assert (one["width"], one["parameters"]) == (None, None)
    assert (tuple(one["input_px"]), one["licence"]) == (config.input_size[1:], config.license)
    assert one["weights"][0] == config.tag
    lines = layertap("backbones", "timm/vit*").stdout.splitlines()
    assert next(line.split()[:4] for line in lines if "/vit_base_patch16_384 " in line)[1:] == ["-", "384x384", "-"]


def test_a_folder_of_hf_is_described(tmp_path: Path) -> None:
    import transformers

    config = transformers.ViTConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, image_size=96)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    one = catalogue.describe(f"hf/{tmp_path}")
    assert (one.width, one.input_px) == (48, (96, 96))


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    import sys

    from fsspec.registry import _registry

    from extract import load_backbone
    from extract.images import list_images

    (tmp_path / "list.parquet").write_bytes(b"x")
    monkeypatch.delitem(_registry, "s3", raising=False)  # where another test has loaded it
    for module, package, read, what in (
        ("open_clip", "open_clip_torch", load_backbone, "open_clip/ViT-B-32:openai"),
        ("transformers", "transformers", load_backbone, "hf/facebook/dinov2-base"),
        ("pyarrow", "pyarrow", list_images, str(tmp_path / "list.parquet")),
        ("s3fs", "s3fs", list_images, "s3://bucket/photos"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(LayertapError, match=rf"pip install '{package}>="):
            read(what)
    assert "pip install" in json.loads(layertap("backbones", "--json").stdout)["open_clip"]["note"]


def test_preprocessing_of_ones_own_is_told_and_recorded(folder: Path, tmp_path: Path) -> None:
    own = ["--size", "100x90", "--crop", "80", "--interpolation", "bilinear", "--mean", "0,0,0", "--std", "1,1,0.5"]
    out = tmp_path / "out"
    result = succeeds("embed", folder, "-o", out, *SMALL, *own)
    assert "input     resize 100x90 bilinear, crop 80x80, mean (0.0, 0.0, 0.0)" in result.stderr
    assert "(set by the user: size crop interpolation mean std)" in result.stderr
    assert "(set by the user: size crop interpolation mean std)" in layertap("show", out).stdout
    content = json.loads(layertap("show", out, "--json").stdout)
    assert content["depends_on"]["preprocessing"]["resize_px"] == [100, 90]
    assert content["provenance"]["configuration"]["preprocessing"]["std"] == [1, 1, 0.5]
    succeeds("verify", out, "--sample", 12)
    assert "preprocessing.resize_px" in fails("embed", folder, "-o", out, *SMALL)


def test_a_limit_of_pixels(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    Image.new("RGB", (120, 100)).save(tmp_path / "p" / "large.png")
    make_picture(1, 90, 100).save(tmp_path / "p" / "small.png")
    words = ["embed", tmp_path / "p", "-o", tmp_path / "out", *SMALL]
    result = layertap(*words, "--max-pixels", 10000, "--strict")
    assert result.exit_code == 3
    assert "12,000 pixels, more than 10,000: a decompression bomb? --max-pixels sets the limit" in result.stdout
    result = succeeds(*words, "--retry-failed", "--strict")


def test_duplicates_are_counted_in_the_summary(folder: Path, tmp_path: Path) -> None:
    for i in range(3):
        (folder / f"copy{i}.png").write_bytes((folder / "ant" / "00.png").read_bytes())
    result = layertap("embed", folder, "-o", tmp_path / "out", *SMALL)
    assert "3 images with the bytes of another: computed once, stored for each row" in result.stdout
    assert json.loads(layertap("embed", folder, "-o", tmp_path / "out2", *SMALL, "--json").stdout)["duplicates"] == 3


def test_diff_tells_what_differs(out: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "bicubic"
    succeeds("embed", folder, "-o", other, *SMALL, "--interpolation", "bicubic")
    text = layertap("diff", out, other).stdout
    assert "preprocessing.interpolation: bilinear | bicubic" in text
    assert "images: 12 in both, 0 only in" in text
    found = json.loads(layertap("diff", out, other, "--json").stdout)
    assert not found["same_fingerprint"]
    assert 0 < found["features"]["embedding"]["least"] < 1
    assert "have the same fingerprint" in layertap("diff", out, out).stdout


@pytest.mark.parametrize(
    ("images", "name"),
    [
        ("photos.zip", "photos"), ("s3://bucket/photos/", "photos"), ("memory://x/shards-{000..099}.tar", "shards"),
        ("/data/list.CSV", "list"), ("a/b.h5:train/images", "b"), ("parts/*.tar", "images"), ("/", "images"),
    ],
)  # fmt: skip
def test_the_default_folder_is_called_as_the_images(images: str, name: str) -> None:
    assert EmbedConfig(images=images).folder == Path("outputs") / name


def test_a_run_in_which_every_row_failed_has_failed(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for i in range(3):
        (tmp_path / "p" / f"{i}.png").write_bytes(b"no picture")
    arguments = ["embed", tmp_path / "p", "-o", tmp_path / "out", *SMALL]
    result = layertap(*arguments)
    assert result.exit_code == 1
    assert "3 rows without features (3 decode error)" in result.stdout
    assert "no image of 3 rows has features" in result.stderr
    make_picture(1).save(tmp_path / "p" / "0.png")
    succeeds(*arguments, "--retry-failed")


def test_the_bytes_of_layers_are_those_that_embed_stores(folder: Path, tmp_path: Path) -> None:
    words = ("list", "timm/test_resnet", "layer?", "embedding", "--bytes", folder, "--json")
    listed = json.loads(layertap(*words).stdout)
    layers = [f"-l{row['name']}:none" for row in listed]
    out = tmp_path / "out"
    succeeds("embed", folder, *SMALL[:-4], *layers, "-o", out)
    with FeatureReader(out) as reader:
        for row in listed:
            stored = reader[row["name"]]
            assert list(stored.shape[1:]) == row["shapes"][""]
            assert (stored[:1].nbytes, stored[:].nbytes) == (row["bytes"], row["bytes_in_all"])
    assert {row["images"] for row in listed} == {12}
    assert len(listed) == 5


def test_bytes_are_known_before_there_are_images() -> None:
    result = layertap("list", "timm/test_resnet", "layer1", "layer4", "--bytes", 20_000_000)
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()]
    assert [row[:4] for row in rows] == [
        ["layer", "type", "shape", "20,000,000 images"],
        ["layer1", "Sequential", "32x40x40", "4.1 TB"],
        ["layer4", "Sequential", "96x5x5", "192 GB"],
    ]


# tables of layers


def table(model: nn.Module, *layers: str, size: int = 64, operations: bool = False) -> dict[str, LayerRow]:
    names = layers or list(named_layers(model))
    rows = layer_table(model.eval(), torch.randn(2, 3, size, size), names, operations=operations)
    return {row.name: row for row in rows}


def test_shapes_bytes_calls_and_parameters_of_resnet() -> None:
    model = models.resnet18()
    rows = table(model, operations=True)
    assert [name for name in rows if "/" not in name] == [name for name, _ in model.named_modules() if name]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert rows["layer2"].shapes == {"": (128, 8, 8)}
    assert rows["layer2"].bytes == 128 * 8 * 8 * 4
    assert rows["layer2"].parameters == sum(p.numel() for p in model.layer2.parameters())
    assert rows["layer2"].notes == []
    assert rows["layer1.0.relu"].calls == 2
    assert rows["layer1.0.relu"].bytes == 2 * 64 * 16 * 16 * 4
    assert rows["layer1.0.relu"].notes == ["runs 2 times: layer1.0.relu#0 to layer1.0.relu#1"]
    assert rows["layer1.0/add"].shapes == {"": (64, 16, 16)}
    assert rows["/flatten"].shapes == {"": (512,)}
    assert not any(name.startswith("conv1/") for name in rows)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never, self.flips, self.windows, self.first = (nn.Identity() for _ in range(4))
        self.lstm, self.attn = nn.LSTM(3, 5, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.flips(x.flip(0).mean((2, 3)))
        self.windows(x.reshape(-1, 3, 32, 32))
        self.first(x.mean(3).permute(2, 0, 1))
        self.lstm(x.mean(3).transpose(1, 2))
        tokens = x.mean((2, 3))[:, :, None].expand(-1, -1, 4)
        return self.attn(tokens, tokens, tokens)[0]


def test_notes_tell_where_a_hook_cannot_be_trusted() -> None:
    rows = table(Odd())
    notes = {name: row.notes for name, row in rows.items()}
    assert notes["never"] == ["never called, or returns no tensor"]
    assert notes["flips"] == ["its rows are not the images"]
    assert notes["windows"] == ["4 rows per image"]
    assert notes["first"] == ["the batch is on axis 1"]
    assert notes["lstm"] == ["1.0: the batch is on axis 1", "1.1: the batch is on axis 1"]
    assert notes["attn.out_proj"] == ["never called: nn.MultiheadAttention uses its weights directly"]
    assert rows["lstm"].shapes == {"0": (64, 5), "1.0": (1, 5), "1.1": (1, 5)}
    assert rows["windows"].shapes == {"": (4, 3, 32, 32)}
