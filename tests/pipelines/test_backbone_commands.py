"""`layertap list`, `layertap show A B`, and the options of `embed` that bear on pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
from click.testing import CliRunner, Result
from PIL import Image
from torchvision import models

from extract import FeatureReader
from extract.backbones import sources as catalogue
from extract.errors import LayertapError
from pipelines.cli import main
from pipelines.embed.config import EmbedConfig
from tests.conftest import make_picture

SMALL = ["-b", "timm/test_resnet", "--weights", "random", "--workers", "0", "--device", "cpu"]


def layertap(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_the_sources_are_listed() -> None:
    found = json.loads(layertap("backbones", "--json").stdout)
    assert list(found) == ["bundled", "torchvision", "timm", "open_clip", "hf", "hub", "python"]
    assert found["timm"]["models"] == len(timm.list_models())
    assert "torchvision" in layertap("backbones").stdout


@pytest.mark.parametrize(
    ("pattern", "specs"),
    [
        ("torchvision/resnet1*", ["torchvision/resnet101", "torchvision/resnet152", "torchvision/resnet18"]),
        ("bundled", ["bundled/efficientnet_lite0"]),
        ("timm/test_vit", ["timm/test_vit"]),
        ("*/resnet18", ["torchvision/resnet18", "timm/resnet18"]),
    ],
)
def test_backbones_that_match(pattern: str, specs: list[str]) -> None:
    assert [one["spec"] for one in json.loads(layertap("backbones", pattern, "--json").stdout)] == specs


def test_what_is_told_of_a_backbone_is_true() -> None:
    one = catalogue.describe("timm/vit_tiny_patch16_224")
    model = timm.create_model("vit_tiny_patch16_224")
    assert (one.width, one.input_px) == (model.num_features, (224, 224))
    assert one.parameters == sum(p.numel() for p in model.parameters())
    assert one.licence == (timm.get_pretrained_cfg("vit_tiny_patch16_224").license or "")
    assert one.weights[0] == model.pretrained_cfg["tag"]
    one = catalogue.describe("torchvision/mobilenet_v2")
    assert one.parameters == sum(p.numel() for p in models.mobilenet_v2().parameters())
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
    assert (one["width"], one["parameters"]) == (None, None)
    assert (tuple(one["input_px"]), one["licence"]) == (config.input_size[1:], config.license)
    assert one["weights"][0] == config.tag
    lines = layertap("backbones", "timm/vit*").stdout.splitlines()
    assert next(line.split()[:4] for line in lines if "/vit_base_patch16_384 " in line)[1:] == ["-", "384x384", "-"]


def test_a_folder_of_hf_is_described(tmp_path: Path) -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3, image_size=96
    )
    model = transformers.ViTForImageClassification(config)
    model.save_pretrained(tmp_path)
    one = catalogue.describe(f"hf/{tmp_path}")
    assert (one.width, one.input_px) == (48, (96, 96))


def test_backbones_that_do_not_exist_are_an_error() -> None:
    result = layertap("backbones", "timm/resnet81")
    assert result.exit_code == 2
    assert "nearest: 'timm/resnet" in result.stderr
    assert layertap("backbones", "nosuch/*").exit_code == 2


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    import sys

    from fsspec.registry import _registry

    from extract import load_backbone
    from extract.images import list_images

    for module in ("open_clip", "transformers", "pyarrow", "s3fs"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # where another test has loaded it
    with pytest.raises(LayertapError, match=r"pip install 'open_clip_torch>="):
        load_backbone("open_clip/ViT-B-32:openai")
    with pytest.raises(LayertapError, match=r"pip install 'transformers>="):
        load_backbone("hf/facebook/dinov2-base")
    (tmp_path / "list.parquet").write_bytes(b"x")
    with pytest.raises(LayertapError, match=r"pip install 'pyarrow>="):
        list_images(tmp_path / "list.parquet")
    with pytest.raises(LayertapError, match=r"pip install 's3fs>="):
        list_images("s3://bucket/photos")
    assert "pip install" in json.loads(layertap("backbones", "--json").stdout)["open_clip"]["note"]


def test_preprocessing_of_ones_own_is_told_and_recorded(folder: Path, tmp_path: Path) -> None:
    own = ["--size", "100x90", "--crop", "80", "--interpolation", "bilinear", "--mean", "0,0,0", "--std", "1,1,0.5"]
    result = layertap("embed", str(folder), "-o", str(tmp_path / "out"), *SMALL, *own)
    assert result.exit_code == 0, result.stderr
    assert "input     resize 100x90 bilinear, crop 80x80, mean (0.0, 0.0, 0.0)" in result.stderr
    assert "(set by the user: size crop interpolation mean std)" in result.stderr
    assert "(set by the user: size crop interpolation mean std)" in layertap("show", str(tmp_path / "out")).stdout
    content = json.loads(layertap("show", str(tmp_path / "out"), "--json").stdout)
    assert content["depends_on"]["preprocessing"]["resize_px"] == [100, 90]
    assert content["provenance"]["configuration"]["preprocessing"]["std"] == [1, 1, 0.5]
    assert layertap("verify", str(tmp_path / "out"), "--sample", "12").exit_code == 0
    other = layertap("embed", str(folder), "-o", str(tmp_path / "out"), *SMALL)
    assert other.exit_code == 2
    assert "preprocessing.resize_px" in other.stderr


@pytest.mark.parametrize(
    "words", [["--size", "abc"], ["--crop", "1x2x3"], ["--mean", "1,2"], ["--std", "a,b,c"], ["--max-pixels", "0"]]
)
def test_options_that_make_no_sense_are_wrong_usage(folder: Path, tmp_path: Path, words: list[str]) -> None:
    result = layertap("embed", str(folder), "-o", str(tmp_path / "out"), *SMALL, *words)
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_crop_that_a_backbone_cannot_take_is_an_error(folder: Path, tmp_path: Path) -> None:
    result = layertap(
        "embed", str(folder), "-o", str(tmp_path / "out"), "-b", "timm/vit_tiny_patch16_224", "--weights", "random",
        "--crop", "200", "--workers", "0",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "does not accept pictures of 200x200" in result.stderr


def test_a_limit_of_pixels(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    Image.new("RGB", (120, 100)).save(tmp_path / "p" / "large.png")
    make_picture(1, 90, 100).save(tmp_path / "p" / "small.png")
    words = ["embed", str(tmp_path / "p"), "-o", str(tmp_path / "out"), *SMALL]
    result = layertap(*words, "--max-pixels", "10000", "--strict")
    assert result.exit_code == 3
    assert "12,000 pixels, more than 10,000: a decompression bomb? --max-pixels sets the limit" in result.stdout
    result = layertap(*words, "--retry-failed", "--strict")
    assert result.exit_code == 0, result.output


def test_duplicates_are_counted_in_the_summary(folder: Path, tmp_path: Path) -> None:
    for i in range(3):
        (folder / f"copy{i}.png").write_bytes((folder / "ant" / "00.png").read_bytes())
    result = layertap("embed", str(folder), "-o", str(tmp_path / "out"), *SMALL)
    assert "3 images with the bytes of another: computed once, stored for each row" in result.stdout
    result = layertap("embed", str(folder), "-o", str(tmp_path / "out2"), *SMALL, "--json")
    assert json.loads(result.stdout)["duplicates"] == 3


def test_diff_tells_what_differs(folder: Path, tmp_path: Path) -> None:
    for name in ("bicubic", "bilinear"):
        assert (
            layertap("embed", str(folder), "-o", str(tmp_path / name), *SMALL, "--interpolation", name).exit_code == 0
        )
    one, two = str(tmp_path / "bicubic"), str(tmp_path / "bilinear")
    text = layertap("diff", one, two).stdout
    assert "preprocessing.interpolation: bicubic | bilinear" in text
    assert "images: 12 in both, 0 only in" in text
    found = json.loads(layertap("diff", one, two, "--json").stdout)
    assert not found["same_fingerprint"]
    assert 0 < found["features"]["embedding"]["least"] < 1
    assert "have the same fingerprint" in layertap("diff", one, one).stdout
    assert layertap("diff", one, str(tmp_path / "none")).exit_code == 2


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
    result = layertap("embed", str(tmp_path / "p"), "-o", str(tmp_path / "out"), *SMALL)
    assert result.exit_code == 1
    assert "3 rows without features (3 decode error)" in result.stdout
    assert "no image of 3 rows has features" in result.stderr
    make_picture(1).save(tmp_path / "p" / "0.png")
    result = layertap("embed", str(tmp_path / "p"), "-o", str(tmp_path / "out"), *SMALL, "--retry-failed")
    assert result.exit_code == 0, result.output


def test_the_bytes_of_layers_are_those_that_embed_stores(folder: Path, tmp_path: Path) -> None:
    words = ("list", "timm/test_resnet", "layer?", "embedding", "--bytes", str(folder), "--json")
    listed = json.loads(layertap(*words).stdout)
    layers = [f"-l{row['name']}:none" for row in listed]
    out = tmp_path / "out"
    assert layertap("embed", str(folder), *SMALL, *layers, "-o", str(out)).exit_code == 0
    with FeatureReader(out) as reader:
        for row in listed:
            stored = reader[row["name"]]
            assert list(stored.shape[1:]) == row["shapes"][""]
            assert (stored[:1].nbytes, stored[:].nbytes) == (row["bytes"], row["bytes_in_all"])
    assert {row["images"] for row in listed} == {12}
    assert len(listed) == 5


def test_bytes_are_known_before_there_are_images() -> None:
    result = layertap("list", "torchvision/resnet18", "layer1", "layer4", "--bytes", "2000000")
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()]
    assert [row[:4] for row in rows] == [
        ["layer", "type", "shape", "2,000,000 images"],
        ["layer1", "Sequential", "64x56x56", "1.61 TB"],
        ["layer4", "Sequential", "512x7x7", "201 GB"],
    ]


@pytest.mark.parametrize(("images", "message"), [("0", "expected a number of images"), ("nowhere", "nowhere")])
def test_bytes_of_no_images_are_an_error(images: str, message: str) -> None:
    result = layertap("layers", "timm/test_resnet", "layer1", "--bytes", images)
    assert result.exit_code == 2
    assert message in result.stderr
