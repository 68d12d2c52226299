"""Checkpoints as training leaves them, made here in the layouts that their authors publish."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

from extract import Backbone, InputError, Taps, load_backbone

State = dict[str, Tensor]


def under(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def without(state: State, *beginnings: str) -> State:
    return {name: value for name, value in state.items() if not name.startswith(beginnings)}


def other(state: State) -> State:
    """Another network of the same shape, which must not be taken."""
    return {name: torch.full_like(value, 7) for name, value in state.items()}


SHUFFLENET, RESNET, VIT = "torchvision/shufflenet_v2_x0_5", "timm/test_resnet", "timm/test_vit"
SETTINGS = argparse.Namespace(lr=0.1, output_dir=pathlib.PosixPath("/tmp/x"))

# Name, backbone, what the file holds of a state dict, words of the note.
LAYOUTS: list[tuple[str, str, Callable[[State], Any], str]] = [
    ("lightning", SHUFFLENET, lambda s: {"state_dict": under("model.", s), "epoch": 3, "global_step": 9},
     "its 'state_dict' was loaded; the prefix 'model.' was removed"),
    ("data parallel", RESNET, lambda s: {"model": under("module.", s), "optimizer": {"lr": 0.1}, "args": SETTINGS},
     "its 'model' was loaded; the prefix 'module.' was removed"),
    ("compiled", SHUFFLENET, lambda s: under("_orig_mod.", s), "the prefix '_orig_mod.' was removed"),
    ("ema", RESNET, lambda s: {"state_dict": other(s), "state_dict_ema": s, "arch": "resnet"},
     "its 'state_dict_ema' was loaded, and not its 'state_dict'"),
    ("detector", RESNET, lambda s: {"state_dict": {**under("backbone.", s), "neck.weight": torch.zeros(3)}},
     "the prefix 'backbone.' was removed, and 1 tensors without this prefix were left out"),
    ("without counters", RESNET, lambda s: {n: v for n, v in s.items() if "num_batches" not in n}, ""),
]  # fmt: skip

# The same, without a classifier that fits.
HEADLESS: list[tuple[str, str, Callable[[State], Any], str]] = [
    ("dino convolutional", SHUFFLENET, lambda s: without(s, "fc."),
     "without its classifier 'fc', which is replaced by an identity"),
    ("dino full", VIT, lambda s: {
        "student": {**under("module.backbone.", other(s)), "module.head.mlp.0.weight": torch.zeros(3)},
        "teacher": {**under("backbone.", without(s, "head.")), "head.mlp.0.weight": torch.zeros(3)},
        "epoch": 100, "args": SETTINGS,
     }, "its 'teacher' was loaded, and not its 'student'; the prefix 'backbone.' was removed, and 1 tensors"),
    ("moco v2", RESNET, lambda s: {"epoch": 200, "arch": "resnet", "state_dict": {
        **under("module.encoder_q.", without(s, "fc.")), "module.encoder_q.fc.0.weight": torch.zeros(3),
        **under("module.encoder_k.", without(other(s), "fc.")), "module.queue": torch.zeros(3),
     }}, "the prefix 'module.encoder_q.' was removed"),
    ("moco v3", VIT, lambda s: {"state_dict": {
        **under("module.base_encoder.", without(s, "head.")), "module.base_encoder.head.0.weight": torch.zeros(3),
        **under("module.momentum_encoder.", without(other(s), "head.")), "module.predictor.0.weight": torch.zeros(3),
     }}, "the prefix 'module.base_encoder.' was removed"),
    ("mae", VIT, lambda s: {"model": {
        **without(s, "head."), "mask_token": torch.zeros(3), "decoder_embed.weight": torch.zeros(3),
     }, "args": SETTINGS}, "2 tensors were left out: mask_token, decoder_embed.weight"),
    ("fine-tuned on ten", SHUFFLENET, lambda s: {**s, "fc.weight": torch.zeros(10, 1024), "fc.bias": torch.zeros(10)},
     "without its classifier 'fc'"),
]  # fmt: skip


def reference(spec: str) -> nn.Module:
    torch.manual_seed(3)
    model = models.shufflenet_v2_x0_5() if spec == SHUFFLENET else timm.create_model(spec.partition("/")[2])
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.01, 0.1)
    return model.eval()


def pictures_for(backbone: Backbone) -> Tensor:
    return torch.rand(2, 3, *(backbone.preprocessing.crop_px if backbone.spec == VIT else (64, 64)))


def saved(path: Path, spec: str, wrapped: Callable[[State], Any]) -> nn.Module:
    """A model whose weights are in the file, in the layout of a checkpoint."""
    model = reference(spec)
    torch.save(wrapped(model.state_dict()), path)
    return model


@pytest.mark.parametrize("layout", LAYOUTS, ids=[name for name, *_ in LAYOUTS])
def test_a_wrapped_checkpoint_is_taken_apart(
    tmp_path: Path, layout: tuple[str, str, Callable[[State], Any], str]
) -> None:
    _, spec, wrapped, note = layout
    model = saved(tmp_path / "w.pth", spec, wrapped)
    backbone = load_backbone(spec, weights=str(tmp_path / "w.pth"), device="cpu")
    assert note in backbone.weights.source
    assert all(note.startswith("w.pth: ") for note in backbone.notes[-1:]) or not note
    pictures = pictures_for(backbone)
    with torch.no_grad():
        assert torch.equal(backbone.model(pictures), model(pictures))


@pytest.mark.parametrize("layout", HEADLESS, ids=[name for name, *_ in HEADLESS])
def test_a_checkpoint_without_a_head_needs_leave(
    tmp_path: Path, layout: tuple[str, str, Callable[[State], Any], str]
) -> None:
    _, spec, wrapped, note = layout
    model = saved(tmp_path / "w.pth", spec, wrapped)
    with pytest.raises(InputError, match="(?s)do not fit .*--allow-missing-head loads the model without it"):
        load_backbone(spec, weights=str(tmp_path / "w.pth"), device="cpu")
    backbone = load_backbone(spec, weights=str(tmp_path / "w.pth"), device="cpu", allow_missing_head=True)
    assert note in backbone.weights.source
    head = "head" if spec == VIT else "fc"
    assert backbone.classifier == head
    pictures = pictures_for(backbone)
    with torch.no_grad(), Taps(model).keep(head, "input") as taps:
        taps(pictures)
        embedding = taps.record[f"{head}:0@input"]
        assert torch.equal(backbone.model(pictures), embedding)  # the head hands on its input
    # No number of a random head can be stored, and none is part of the fingerprint.
    assert not [name for name in backbone.model.state_dict() if name.startswith(f"{head}.")]
    again = load_backbone(spec, weights=str(tmp_path / "w.pth"), device="cpu", seed=5, allow_missing_head=True)
    assert again.weights.sha256 == backbone.weights.sha256


def test_two_networks_of_which_none_is_known_to_be_the_one(tmp_path: Path) -> None:
    state = reference(RESNET).state_dict()
    torch.save({**under("left.", state), **under("right.", other(state))}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"hold several networks that fit, under 'left.', 'right.'; save only one"):
        load_backbone(RESNET, weights=str(tmp_path / "w.pth"), device="cpu")


def test_another_architecture_is_refused_with_its_keys(tmp_path: Path) -> None:
    state = {**models.shufflenet_v2_x1_0().state_dict(), "neck.weight": torch.zeros(3)}
    torch.save({"state_dict": under("module.", state)}, tmp_path / "w.pth")
    for allow in (False, True):
        with pytest.raises(InputError) as raised:
            load_backbone(SHUFFLENET, weights=str(tmp_path / "w.pth"), device="cpu", allow_missing_head=allow)
        assert "unexpected: neck.weight" in str(raised.value)
        assert "stage2.0.branch1.2.weight (58, 24, 1, 1) for (24, 24, 1, 1)" in str(raised.value)
        assert "allow-missing-head" not in str(raised.value)


def test_a_file_without_a_state_dict_says_what_it_holds(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "loss": torch.zeros(2), "optimizer": {"lr": 1}}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="holds no state dict .* its content is: epoch, loss, optimizer"):
        load_backbone(RESNET, weights=str(tmp_path / "w.pth"), device="cpu")


class Malicious:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_network_that_asks_for_the_version_of_its_tensors_is_loaded(tmp_path: Path) -> None:
    model = models.mnasnet0_5()
    torch.save(model.state_dict(), tmp_path / "mnasnet.pth")
    loaded = load_backbone("torchvision/mnasnet0_5", weights=str(tmp_path / "mnasnet.pth"), device="cpu").model
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_malicious_pickle_does_not_run(tmp_path: Path) -> None:
    bad = Malicious(f"touch {tmp_path / 'run'}")
    path, state = tmp_path / "w.pth", reference(RESNET).state_dict()
    for content in ({"state_dict": state, "x": bad}, {"state_dict": state, "args": argparse.Namespace(x=bad)}, bad):
        torch.save(content, path)
        with pytest.raises(InputError, match="holds objects other than tensors, and loading them could run code"):
            load_backbone(RESNET, weights=str(path), device="cpu")
    assert not (tmp_path / "run").exists()


def test_embed_records_how_a_checkpoint_was_taken_apart(folder: Path, tmp_path: Path) -> None:
    from extract import FeatureReader
    from tests.pipelines.test_cli import fails, layertap

    state = timm.create_model("test_resnet").state_dict()
    torch.save({"state_dict": under("module.", without(state, "fc."))}, tmp_path / "w.pth")
    arguments = ["embed", folder, "-o", tmp_path / "out", "-b", "timm/test_resnet", "--weights", tmp_path / "w.pth",
                 "--workers", 0, "--device", "cpu"]  # fmt: skip
    assert "--allow-missing-head loads the model without it" in fails(*arguments)
    result = layertap(*arguments, "--allow-missing-head")
    assert result.exit_code == 0
    assert "note: w.pth: without its classifier 'fc'" in result.stderr
    with FeatureReader(tmp_path / "out") as reader:
        assert "the prefix 'module.' was removed" in reader.provenance["weights"]
    assert layertap("verify", tmp_path / "out", "--sample", 3, "--device", "cpu").exit_code == 0
