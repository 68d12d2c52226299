"""Texts beside images: `load_text_tower`, and `layertap search --text`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extract import FeatureReader, InputError, LayertapError, load_backbone, load_text_tower
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds

transformers = pytest.importorskip("transformers", reason="no transformers")

TEXTS = ["a photo of a bee", "an ant!", "Café 猫 on a mat"]
CLIP = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
PLAIN = ["--workers", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small CLIP that open_clip knows by name, and a file with its weights."""
    open_clip = pytest.importorskip("open_clip", reason="no open_clip")
    folder = tmp_path_factory.mktemp("clip")
    (folder / "tiny-clip.json").write_text(json.dumps(CLIP))
    open_clip.add_model_config(folder / "tiny-clip.json")
    torch.manual_seed(1)
    logging.disable(logging.WARNING)
    model = open_clip.create_model("tiny-clip").eval()
    logging.disable(logging.NOTSET)
    torch.save(model.state_dict(), folder / "both.pt")
    visual = {name: value for name, value in model.state_dict().items() if name.startswith("visual.")}
    torch.save(visual, folder / "visual.pt")
    return model, folder / "both.pt"


@pytest.fixture(scope="module")
def out(clip: tuple[Any, Path], _twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("texts") / "out"
    succeeds("embed", _twelve, "-b", "open_clip/tiny-clip", "--weights", clip[1], "-o", out, *PLAIN)
    return out


def tokenizer(folder: Path) -> Any:
    """Of single letters; it is saved beside a model, as those of the hub are."""
    letters = [*map(chr, range(33, 127))]
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters), "a b"]
    # Transformers 4 takes the names of two files, transformers 5 those or the contents.
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    made = transformers.CLIPTokenizer(*files, model_max_length=16)
    made.save_pretrained(folder)
    return made


def of_hf(kind: str, folder: Path) -> Any:
    """A small model with two towers, in a folder."""
    torch.manual_seed(2)
    small = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = {**small, "vocab_size": 256, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**small, "image_size": 64, "patch_size": 16}
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
        model, processor = transformers.CLIPModel(config), transformers.CLIPImageProcessor
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        model, processor = transformers.SiglipModel(config), transformers.SiglipImageProcessor
    model.eval().save_pretrained(folder)
    processor(size={"height": 64, "width": 64}, crop_size={"height": 64, "width": 64}).save_pretrained(folder)
    return model


def test_features_of_texts_are_those_of_open_clip(clip: tuple[Any, Path]) -> None:
    import open_clip  # a second to import

    model, weights = clip
    tower = load_text_tower("open_clip/tiny-clip", weights=str(weights), device="cpu")
    with torch.no_grad():
        expected = model.encode_text(open_clip.get_tokenizer("tiny-clip")(TEXTS)).numpy()
    assert np.abs(tower.features(TEXTS) - expected).max() <= 1e-6 * np.abs(expected).max()
    assert np.abs(tower.features(TEXTS[1]) - expected[1:2]).max() <= 1e-6 * np.abs(expected).max()
    assert np.abs(expected[0] - expected[1]).max() > 1e-2 * np.abs(expected).max()
    backbone = load_backbone("open_clip/tiny-clip", weights=str(weights), device="cpu")
    assert (tower.architecture, tower.weights_sha256) == (backbone.architecture, backbone.weights.sha256)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_features_of_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, words = of_hf(kind, tmp_path), tokenizer(tmp_path)
    tower = load_text_tower(f"hf/{tmp_path}", device="cpu")
    texts = ["a bee", "an ant!", "the cat"]
    padding = "max_length" if kind == "siglip" else True  # as the documentation of each has it
    with torch.no_grad():
        found = model.get_text_features(**words(texts, padding=padding, return_tensors="pt"))
    expected = (found if isinstance(found, torch.Tensor) else found.pooler_output).numpy()
    assert np.abs(tower.features(texts) - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(expected[0] - expected[1]).max() > 1e-2 * np.abs(expected).max()
    backbone = load_backbone(f"hf/{tmp_path}", device="cpu")
    assert (tower.architecture, tower.weights_sha256) == (backbone.architecture, backbone.weights.sha256)


def test_a_text_finds_the_images_that_the_model_puts_nearest(
    clip: tuple[Any, Path], out: Path, folder: Path, tmp_path: Path
) -> None:
    import open_clip

    model, _ = clip
    transform = open_clip.image_transform(32, is_train=False, resize_mode=model.visual.preprocess_cfg["resize_mode"])
    with FeatureReader(out) as reader:
        paths = reader.paths[:]
    with torch.no_grad():
        images = torch.stack([transform(Image.open(folder / path).convert("RGB")) for path in paths])
        text = model.encode_text(open_clip.get_tokenizer("tiny-clip")(TEXTS[:1]), normalize=True)
        cosines = (model.encode_image(images, normalize=True) @ text.T)[:, 0].numpy()
    picture = tmp_path / "found.png"
    content = json.loads(layertap("search", out, "--text", TEXTS[0], "-k", 5, "--json", "-o", picture).stdout)
    assert content["query"] == {"row": None, "path": None, "text": TEXTS[0], "class": None}
    assert content["searched"] == 12
    assert [one["row"] for one in content["results"]] == np.argsort(-cosines)[:5].tolist()
    assert [one["cosine"] for one in content["results"]] == pytest.approx(np.sort(cosines)[::-1][:5], abs=1e-5)
    assert picture.stat().st_size > 10_000
    told = layertap("search", out, "--text", TEXTS[0]).stdout
    assert f'nearest to the text "{TEXTS[0]}" by cosine of embedding' in told


def test_texts_that_cannot_be_searched_for_are_told(
    clip: tuple[Any, Path], out: Path, folder: Path, tmp_path: Path
) -> None:
    fits = " ".join(["bee"] * 14)  # and two that begin and end it
    succeeds("search", out, "--text", fits)
    visual, other = clip[1].with_name("visual.pt"), tmp_path / "other.pt"
    torch.save(clip[0].state_dict() | {"visual.proj": clip[0].visual.proj * 2}, other)
    layer, timm = tmp_path / "layer", tmp_path / "timm"
    succeeds("embed", folder, "-o", timm, *SMALL, "--limit", 2)
    how = ["-l", "transformer.resblocks.1", "-b", "open_clip/tiny-clip", "--weights", clip[1], "--limit", 2, *PLAIN]
    succeeds("embed", folder, "-o", layer, *how)
    one_thing = "expected exactly one query: a row number, a path, an image file, or --text TEXT"
    for arguments, why in (
        ((out,), one_thing),
        ((out, 3, "--text", "a bee"), one_thing),
        ((out, "--text", " "), "a text is empty"),
        ((out, "--text", f"{fits} bee"), "has more than 16 tokens, the limit of the model; shorten the text"),
        ((out, "--text", "a bee", "--weights", visual), "do not fit open_clip/tiny-clip with its text tower"),
        ((out, "--text", "a bee", "--weights", other), "texts would not be comparable with the images"),
        ((out, "--text", "a bee", "--weights", other), "weights_sha256"),
        ((timm, "--text", "a bee"), "timm/test_resnet has no text tower; only models of open_clip/ and hf/"),
        ((layer, "--text", "a bee"), f"texts are compared with embeddings, but {layer} has none"),
        ((layer, "--text", "a bee", "-l", "transformer.resblocks.1"), "not with transformer.resblocks.1; leave out"),
    ):
        assert why in fails("search", *arguments)


def test_models_without_texts_or_tokenizer_are_told(tmp_path: Path) -> None:
    of_hf("clip", tmp_path / "clip")
    with pytest.raises(InputError, match=r"no matching tokenizer in \S+clip \(it has . tokens, the model 256"):
        load_text_tower(f"hf/{tmp_path / 'clip'}", device="cpu")
    tokenizer(tmp_path / "clip")
    tower = load_text_tower(f"hf/{tmp_path / 'clip'}", device="cpu")
    with pytest.raises(InputError, match="more than 16 tokens"):
        tower.features(["short", "a text of more than sixteen letters"])
    with pytest.raises(InputError, match="no texts were given"):
        tower.features([])
    config = transformers.ViTConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, image_size=64)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "vit")
    with pytest.raises(LayertapError, match="is a ViTModel, which has no text tower"):
        load_text_tower(f"hf/{tmp_path / 'vit'}", device="cpu")
