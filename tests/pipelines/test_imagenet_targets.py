"""Which output of a network a class of images is: by its name, never by its position."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn
from torch.nn import functional as F

from extract.compute.backbone import Backbone, load_backbone
from extract.errors import InputError
from extract.images import Images
from pipelines.cli import main
from pipelines.network.image_sample import class_name, targets_of

NUMBERED = [str(number) for number in range(11)]  # "10" sorts before "2"


def network(width: int, labels: Sequence[str] = (), architecture: str = "timm/net") -> Backbone:
    """A stand-in for a network with so many outputs, and labels as transformers has them."""
    model = nn.Sequential(OrderedDict(fc=nn.Linear(2, width)))
    if labels:
        model.config = SimpleNamespace(id2label=dict(enumerate(labels)))  # type: ignore[assignment]
    return cast(Backbone, SimpleNamespace(model=model, classifier="fc", spec="a/net", architecture=architecture))


def images_of(*classes: str) -> Images:
    """One image of each class, in the order of the folders."""
    ordered = sorted(classes)
    paths = [f"{name}/a.png" for name in ordered]
    return cast(
        Images, SimpleNamespace(classes=ordered, labels=np.arange(len(ordered)), paths=paths, ids=None, root="photos")
    )


def outputs(backbone: Backbone, *classes: str) -> dict[str, int]:
    images = images_of(*classes)
    targets = targets_of(backbone, images)
    assert targets is not None
    return dict(zip(images.classes, targets.numbers.tolist(), strict=True))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of transformers with 11 outputs, `net`, that is right about all `photos`, in folders 0 to 10."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("numbered")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=11
    )
    model = transformers.ResNetForImageClassification(config).eval()
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size).save_pretrained(root / "net")
    model.save_pretrained(root / "net")
    random = np.random.default_rng(0)
    for name in NUMBERED:
        (root / "photos" / name).mkdir(parents=True)
        coarse = random.integers(0, 255, (4, 4, 3)).astype(np.uint8)
        Image.fromarray(coarse.repeat(8, 0).repeat(8, 1)).save(root / "photos" / name / "a.png")
    inputs = pixels(root)
    with torch.no_grad():
        features = model.resnet(inputs).pooler_output.flatten(1)
        mean, scale = features.mean(0), 1 / (features - features.mean(0)).std()
        near = (features - mean) * scale  # output k is the largest for picture k: the nearest of the pictures
        model.classifier[1].weight.copy_(2 * near * scale)
        model.classifier[1].bias.copy_(-near.square().sum(1) - 2 * scale * near @ mean)
        assert model(inputs).logits.argmax(1).tolist() == list(range(11))
    model.save_pretrained(root / "net")
    return root


def pixels(root: Path) -> torch.Tensor:
    pictures = [np.asarray(Image.open(root / "photos" / name / "a.png"), np.float32) for name in NUMBERED]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1


def run(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


def test_folders_named_by_number_are_those_outputs_in_ablate_and_in_the_loss_of_inspect(numbered: Path) -> None:
    net, photos = f"hf/{numbered / 'net'}", numbered / "photos"
    of = ("ablate", net, photos, "-l", "resnet.embedder", "--edit", "scale:1", "--workers", 0, "--device", "cpu")
    assert json.loads(run(*of, "--json").stdout)["accuracy"] == 1.0
    assert "which are output numbers, counted from 0" in run(*of).stdout
    of = ("inspect", net, photos, "--grad", "--json", "--workers", 0, "--device", "cpu")
    with torch.no_grad():
        logits = load_backbone(net, device="cpu").model(pixels(numbered)).logits
    expected = float(F.cross_entropy(logits, torch.arange(11)))
    seen = json.loads(run(*of).stdout)["loss"]
    assert seen["mean"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert seen["of"].endswith("which are output numbers, counted from 0")


def test_a_loss_of_own_code_gets_the_numbers_of_folders(numbered: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\nfrom torchvision import transforms\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 2, 3, 8), nn.Flatten()), transforms.Compose(\n"
        "        [transforms.Resize((32, 32)), transforms.ToTensor()])\n"
        "def told(output, labels):\n"
        "    print('labels', labels.tolist())\n"
        "    return output.square().mean()\n"
    )
    of = (f"python/{tmp_path}/own.py:make", numbered / "photos", "--grad", "--loss", f"{tmp_path}/own.py:told")
    output = run("inspect", *of, "--workers", 0, "--device", "cpu").output
    assert f"labels {sorted(range(11), key=str)}" in output  # images are in the order of their paths
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{name}/a.png,{50 - int(name)}\n" for name in NUMBERED))
    output = run("inspect", *of, "--labels", table, "--workers", 0, "--device", "cpu").output
    assert f"labels {[50 - number for number in sorted(range(11), key=str)]}" in output
    refused = run("ablate", of[0], of[1], "-l", "0", "--labels", table, "--workers", 0, code=2).output
    assert "gives no classes, which --labels needs" in refused


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (network(11), {name: int(name) for name in NUMBERED}),
        (network(1000), {"007": 7, "10": 10, "2": 2}),
        (network(11, [f"LABEL_{number}" for number in range(11)]), {"3": 3, "10": 10}),
        (network(3, ["0", "1", "2"]), {"2": 2, "0": 0}),
        (network(3, ["zebra", "Golden Retriever", "ant"]), {"ant": 2, "golden_retriever": 1, "zebra": 0}),
        (network(1000), {"n01443537": 1, "n01440764": 0}),
        (network(1000), {"goldfish": 1, "Great_White_Shark": 2, "tench": 0}),
        (network(1000, architecture="torchvision/resnet18"), {"crane bird": 134, "crane": 517, "tench": 0}),
        (network(1000, [f"n{number}" for number in range(999, -1, -1)]), {"n999": 0, "n0": 999}),
    ],
)
def test_a_class_is_the_output_that_it_is_called(backbone: Backbone, expected: dict[str, int]) -> None:
    assert outputs(backbone, *expected) == expected


@pytest.mark.parametrize(
    ("backbone", "classes", "says"),
    [
        (network(1000), [str(number) for number in range(1, 1001)], "'1000' is not an output of a/net, while 999 of"),
        (network(11), ["1", "10", "11"], "'11' is not an output of a/net, while 2 of 3 are output numbers"),
        (network(11), ["7", "007"], "'007' and '7' are the same output of a/net, 7"),
        (network(1000), ["crane", "tench"], "'crane' is the label of several outputs of a/net: 134, 517"),
        (network(1000), ["maillot", "tench"], "'maillot' is the label of several outputs of a/net: 638, 639"),
        (network(2, ["a b", "A_B"]), ["A b", "a b"], "'A b' is the label of several outputs of a/net: 0, 1"),
        (network(3, ["2", "1", "0"]), ["0", "1", "2"], "'0' may be the output of this number or of this label"),
        (network(1000), ["n01440764", "n99999999"], "'n99999999' is not an output of a/net, while 1 of 2 are WordNet"),
    ],
)
def test_classes_that_may_be_other_outputs_are_refused_by_name(
    backbone: Backbone, classes: Sequence[str], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        targets_of(backbone, images_of(*classes))
    assert caught.value.message.startswith(f"the classes of the images: {says}")
    assert "give --labels FILE.csv" in caught.value.hint


@pytest.mark.parametrize(
    ("labels", "classes"),
    [([], ["ant", "bee", "cat"]), ([], ["2021", "2022", "2023"]), ([], ["0", "1", "cat"]),
     (["ant", "bee", "cat"], ["ant", "bee", "dog"])],
)  # fmt: skip
def test_as_many_classes_as_outputs_are_not_matched_by_position_nor_by_some_of_their_names(
    labels: Sequence[str], classes: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert targets_of(network(3, labels), images_of(*classes)) is None
    error = capsys.readouterr().err
    assert f"note: the classes of the images ({', '.join(map(repr, classes))}) are not outputs of a/net" in error
    assert "give --labels FILE.csv" in error


def test_a_table_of_labels_has_output_numbers_ids_or_label_names(tmp_path: Path) -> None:
    table, images = tmp_path / "labels.csv", images_of("x", "y")

    def of(backbone: Backbone, *labels: str) -> list[int]:
        table.write_text(
            "path,label\n" + "".join(f"{path},{label}\n" for path, label in zip(images.paths, labels, strict=True))
        )
        targets = targets_of(backbone, images, str(table))
        assert targets is not None
        return cast(list[int], targets.numbers.tolist())

    named = network(3, ["ant", "bee", "cat"])
    assert of(named, "Cat", "bee") == [2, 1]
    assert of(named, "", "2") == [-1, 2]
    assert of(network(3, ["2", "1", "0"]), "0", "2") == [0, 2]  # numbers are output numbers, whatever the labels are
    assert of(network(1000), "n01443537", "") == [1, -1]
    for labels, says in (
        (("ant", "dog"), "'dog' is not an output"), (("1", "3"), "'3' is not an output"), (("x", "y"), "'x' is not"),
        (("1" * 5000, "1"), "is not an output"), (("ant", "1"), "'1' is not an output"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"labels.csv: .*{says}"):
            of(named, *labels)


def test_captions_name_an_output_by_the_labels_of_its_network() -> None:
    assert class_name(network(3, ["ant", "bee, honeybee", "cat"]), 1) == "bee (class 1)"
    assert class_name(network(1000, [f"thing {number}" for number in range(1000)]), 3) == "thing 3 (class 3)"
    assert class_name(network(1000), 0) == "tench (class 0)"
    assert class_name(network(3), 2) == "class 2"
