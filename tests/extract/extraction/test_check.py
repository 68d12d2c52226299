"""Planted mismatches between stored rows, a model and images, computed by plain torch and Pillow, are each named."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms import InterpolationMode, v2

from extract import FeatureReader, InputError, UnknownNameError, check, extract_features, load_backbone
from tests.conftest import make_picture

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
N = 24


class Net(nn.Module):
    """A small network with batch normalisation, whose layers react to every pixel."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.norm = nn.Conv2d(3, 24, 4, 4), nn.BatchNorm2d(24)
        self.two, self.fc = nn.Conv2d(24, 32, 3, 2), nn.Linear(32, 10)
        with torch.no_grad():
            self.norm.running_var.fill_(0.2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.two(self.norm(self.one(x)).relu()).relu().mean((2, 3)))


def steps(
    size: Any = 72, crop: int | None = 64, how: str = "bilinear", mean: Any = IMAGENET[0], std: Any = IMAGENET[1]
) -> Any:
    """A transform of torchvision, as a user writes it."""
    cropped = [v2.CenterCrop(crop)] if crop else []
    scaled = [v2.Normalize(mean, std)] if mean else []
    return v2.Compose([
        v2.Resize(size, InterpolationMode(how)), *cropped, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True),
        *scaled,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pictures with fine detail, whose names sort in two ways; one in eight is turned by EXIF."""
    folder = tmp_path_factory.mktemp("pictures")
    turned = Image.Exif()
    turned[0x0112] = 6
    for i in range(N):
        noise = np.random.default_rng(i).integers(0, 90, (90 + 2 * i, 150 - i, 3))
        plain = np.asarray(make_picture(i, 150 - i, 90 + 2 * i)).astype(int)
        picture = Image.fromarray((plain * 0.65 + noise).astype(np.uint8))
        picture.save(folder / f"{i}.png", exif=turned if i % 8 == 7 else Image.Exif())
    return sorted(folder.iterdir())


def loop(
    net: nn.Module, files: list[Path], transform: Any = None, swap: bool = False, exif: bool = True, **how: Any
) -> Any:
    """A hand-written loop in batches of 16: the output of the network."""
    transform = transform or steps(**how)
    tensors = []
    for path in files:
        picture = Image.open(path)
        picture = (_upright(picture) if exif else picture).convert("RGB")
        picture = Image.fromarray(np.asarray(picture)[:, :, ::-1].copy()) if swap else picture
        tensors.append(transform(picture))
    with torch.no_grad():
        return torch.cat([net(torch.stack(tensors[i : i + 16])).float() for i in range(0, len(tensors), 16)]).numpy()


def _upright(picture: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(picture)


def without_antialias(picture: Image.Image, how: str = "bilinear") -> Tensor:
    pixels = v2.functional.pil_to_tensor(picture)
    resized = v2.functional.resize(pixels, [72], InterpolationMode(how), antialias=False)
    scaled = v2.functional.center_crop(resized, [64]).float() / 255
    return v2.functional.normalize(scaled, list(IMAGENET[0]), list(IMAGENET[1]))


def in_training(net: nn.Module, files: list[Path]) -> Any:
    return loop(copy.deepcopy(net).train(), files)


def in_bfloat16(net: nn.Module, files: list[Path]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return loop(net, files)


def in_half(net: nn.Module, files: list[Path]) -> Any:
    half = copy.deepcopy(net).half()
    with torch.no_grad():
        return torch.cat([half(steps()(_upright(Image.open(path))).half()[None]).float() for path in files]).numpy()


def unit(rows: NDArray[Any]) -> NDArray[Any]:
    scaled: NDArray[Any] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


def by_number(files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda path: int(path.stem))


Made = Callable[[nn.Module, list[Path]], Any]
PLANTED: dict[str, tuple[Made, list[tuple[str, str]]]] = {
    "squashed": (lambda net, files: loop(net, files, size=(64, 64), crop=None), [("crop", "resize 64x64, crop 64x64")]),
    "resized to the crop": (lambda net, files: loop(net, files, size=64), [("crop", "resize 64, crop 64x64")]),
    "nearest": (lambda net, files: loop(net, files, how="nearest"), [("interpolation", "nearest")]),
    "bicubic": (lambda net, files: loop(net, files, how="bicubic"), [("interpolation", "bicubic")]),
    "no antialiasing": (
        lambda net, files: loop(net, files, without_antialias), [("interpolation", "bilinear without antialiasing")]
    ),
    "bicubic, no antialiasing": (
        lambda net, files: loop(net, files, lambda picture: without_antialias(picture, "bicubic")),
        [("interpolation", "bicubic without antialiasing; given: bilinear")],
    ),
    "mean and std of ViT": (
        lambda net, files: loop(net, files, mean=(0.5,) * 3, std=(0.5,) * 3), [("normalisation", "of Inception")]
    ),
    "no normalisation": (
        lambda net, files: loop(net, files, mean=None), [("normalisation", "none: pixels from 0 to 1")]
    ),
    "pixels to 255": (
        lambda net, files: loop(net, files, mean=(0.0,) * 3, std=(1 / 255,) * 3), [("normalisation", "0 to 255")]
    ),
    "BGR": (lambda net, files: loop(net, files, swap=True), [("BGR", "blue, green, red")]),
    "mirrored": (
        lambda net, files: loop(net, files, v2.Compose([v2.RandomHorizontalFlip(1.0), steps()])),
        [("mirror", "mirrored")],
    ),
    "EXIF ignored": (lambda net, files: loop(net, files, exif=False), [("EXIF", "orientation is ignored")]),
    "training mode": (in_training, [("training mode", "batches of 16")]),
    "bfloat16": (in_bfloat16, [("precision", "bfloat16")]),
    "float16": (in_half, [("precision", "half precision")]),
    "shuffled": (
        lambda net, files: loop(net, files)[np.random.default_rng(1).permutation(N)],
        [("order", "no sorting of the paths")],
    ),
    "reversed": (lambda net, files: loop(net, files)[::-1], [("order", "in reverse order")]),
    "sorted by number": (lambda net, files: loop(net, by_number(files)), [("order", "numbers by value")]),
    "shifted by one": (lambda net, files: np.roll(loop(net, files), 1, 0), [("order", "shifted by +1")]),
    "two rows swapped": (
        lambda net, files: loop(net, files)[[*range(9), 10, 9, *range(11, N)]], [("order", "in other places")]
    ),
    "one image left out": (
        lambda net, files: np.delete(loop(net, files), N // 2, 0),
        [("order", f"{N - 1} rows"), ("order", "shifted by -1")],
    ),
    "unit length": (lambda net, files: unit(loop(net, files)), [("length", "length 1")]),
    "BGR and no normalisation": (
        lambda net, files: loop(net, files, swap=True, mean=None), [("BGR", ""), ("normalisation", "0 to 1")]
    ),
    "by number, bicubic, unit length": (
        lambda net, files: unit(loop(net, by_number(files), how="bicubic")),
        [("length", ""), ("order", "numbers by value"), ("interpolation", "bicubic")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mismatch_is_named(name: str, paths: list[Path]) -> None:
    net = Net().eval()
    made, expected = PLANTED[name]
    result = check(made(net, paths), model=net, transform=steps(), images=paths, sample=N)
    print(f"{name}: {'; '.join(f'{cause.kind}: {cause.what}' for cause in result.causes)} ({result.remaining:.1e})")
    if name == "float16":  # as small a difference as other machines make
        assert "half precision (float16)" in str(result)
        return
    assert not result
    assert len(result.causes) == len(expected), result
    for kind, words in expected:
        assert any(cause.kind == kind and words in cause.what for cause in result.causes), result


def kinds(result: Any) -> list[str]:
    return [cause.kind for cause in result.causes]


def test_right_rows_agree_in_each_kind_of_file_and_list(paths: list[Path], tmp_path: Path) -> None:
    net = Net().eval()
    right = loop(net, paths)
    with torch.no_grad():
        inputs = torch.stack([steps()(_upright(Image.open(path)).convert("RGB")) for path in paths])
        pooled = net.two(net.norm(net.one(inputs)).relu()).relu().mean((2, 3)).numpy()
    folder = paths[0].parent
    (tmp_path / "list.csv").write_text("path\n" + "".join(f"{path}\n" for path in paths))
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in paths))
    np.save(tmp_path / "right.npy", right)
    np.save(tmp_path / "half.npy", right.astype(np.float16))
    with h5py.File(tmp_path / "right.h5", "w") as file:
        file["out"], file["ids"] = right, np.arange(N)
    given: dict[str, Any] = {"model": net, "transform": steps()}
    for features, images, layer in (
        (right, paths, None),
        (pooled, paths, None),  # of the two, the width tells which
        (pooled, paths, "embedding"),
        (right, folder, "output"),
        (tmp_path / "right.npy", tmp_path / "list.csv", None),
        (tmp_path / "half.npy", tmp_path / "list.txt", None),
        (f"{tmp_path}/right.h5:out", str(tmp_path / "list.csv"), None),
    ):
        result = check(features, **given, images=images, layer=layer)
        assert result, (features, result)
        assert result.causes == ()
        assert result.deviation < 1e-3
        assert f"{N} rows agree" in str(result)
    assert "32 rows agree" in str(check(np.tile(right, (2, 1)), **given, images=[*paths, *paths]))  # of more, a sample
    assert net.norm.training is False
    assert check(right, model=net.train(), transform=steps(), images=paths)  # it is evaluated, and left as it was
    assert net.norm.training is True
    assert net.norm.num_batches_tracked == 0


def test_features_of_nothing_that_is_tried_fit_nothing(paths: list[Path]) -> None:
    net = Net().eval()
    for features in (
        np.random.default_rng(0).normal(size=(N, 10)).astype(np.float32),
        loop(Net(5).eval(), paths),  # other weights, of which nothing is known
    ):
        result = check(features, model=net, transform=steps(), images=paths, sample=12)
        assert not result
        assert result.causes == ()
        assert "no preprocessing, order, precision or mode that was tried fits" in str(result)


def test_rows_in_the_order_of_file_names_are_named(tmp_path: Path) -> None:
    net, files = Net().eval(), list[Path]()
    for i in range(12):
        files.append(tmp_path / "ab"[i % 2] / f"{i:02}.png")
        files[-1].parent.mkdir(exist_ok=True)
        make_picture(i, 100, 90).save(files[-1])
    result = check(loop(net, files), model=net, transform=steps(), images=sorted(files))
    assert [cause.what for cause in result.causes] == ["the rows are sorted by file name, not by folder"]


def test_the_usual_sizes_are_tried_for_a_transform_whose_steps_are_unknown(paths: list[Path]) -> None:
    net, as_given = Net().eval(), steps()
    for size, crop, words in (((64, 64), None, "resize 64x64, crop 64x64"), (64, 64, "resize 64, crop 64x64")):
        features = loop(net, paths, size=size, crop=crop)
        result = check(features, model=net, transform=lambda picture: as_given(picture), images=paths)
        assert kinds(result) == ["preprocessing"]
        assert words in result.causes[0].what


def test_one_bad_row_is_named_and_no_change_of_all_rows_is_the_nearest(paths: list[Path]) -> None:
    net = Net().eval()
    features = loop(net, paths)
    features[3] *= 1.5
    result = check(torch.from_numpy(features).requires_grad_(), model=net, transform=steps(), images=paths, sample=N)
    assert not result
    assert result.nearest.startswith(f"as given, with which 1 of {N} rows, the first is row 3 ({paths[3]}), differ by")


def test_an_order_is_told_beside_a_difference_that_nothing_explains(paths: list[Path]) -> None:
    net = Net().eval()
    features = loop(net, paths)[::-1] * (1 + 5e-3 * (np.arange(10) % 2))  # more than rounding
    result = check(features, model=net, transform=steps(), images=paths)
    assert not result
    assert result.causes == ()
    assert result.nearest.startswith("order: the rows are in reverse order, with which they differ by up to")


def test_other_weights_are_named_by_the_first_parameter_that_differs(paths: list[Path], tmp_path: Path) -> None:
    net, other = Net().eval(), Net().eval()
    with torch.no_grad():
        other.two.bias += 0.5
    torch.save({"model": other.state_dict()}, tmp_path / "other.pth")
    features = loop(other, paths, swap=True)
    result = check(features, model=net, transform=steps(), images=paths, other_weights=str(tmp_path / "other.pth"))
    assert kinds(result) == ["weights", "BGR"]
    assert "1 of 11 tensors differ, the first is two.bias" in result.causes[0].what
    assert result.remaining < 1e-3


def test_weights_that_a_data_set_records_are_loaded_and_compared(paths: list[Path], tmp_path: Path) -> None:
    spec, out = "timm/test_resnet", tmp_path / "out"
    random: dict[str, Any] = {"weights": "random", "device": "cpu"}
    extract_features(
        paths[0].parent, out=out, backbone=spec, **random, limit=8, progress=False, workers=0, compile="off"
    ).close()
    assert check(out, device="cpu")
    result = check(out, model=load_backbone(spec, **random, seed=1))
    assert kinds(result) == ["weights"]
    assert "records random (seed 0): 17 of 92 tensors differ, the first is conv1.0.weight" in result.causes[0].what
    assert result.remaining < 1e-3


FACTORY = """
import sys
sys.path.insert(0, {root!r})
from tests.extract.extraction.test_check import Net, steps

def net():
    return Net(3).eval(), steps()
"""


@pytest.fixture
def out(paths: list[Path], tmp_path: Path) -> Path:
    """A data set of a backbone in a file, whose network has other weights than `Net()`, of copied images."""
    (tmp_path / "net.py").write_text(FACTORY.format(root=str(Path(__file__).parents[3])))
    (tmp_path / "images").mkdir()
    for path in paths:
        (tmp_path / "images" / path.name).write_bytes(path.read_bytes())
    extract_features(
        tmp_path / "images", out=tmp_path / "out", backbone=f"python/{tmp_path}/net.py:net",
        layers=["fc", "one"],
        progress=False, workers=0, compile="off",
    ).close()  # fmt: skip
    return tmp_path / "out"


def test_a_data_set_is_compared_with_a_model_and_with_changed_files(out: Path) -> None:
    spec = f"python/{out.parent}/net.py:net"
    embedding: dict[str, Any] = {"transform": steps(), "layer": "fc"}
    assert check(out, model=spec, layer="fc")
    assert check(out, model=spec, layer="one")
    with FeatureReader(out) as reader:
        assert check(reader["one"][:], model=Net(3), transform=steps(), images=out.parent / "images", layer="one")
    with pytest.raises(InputError, match="loading this backbone runs its code"):
        check(out, layer="fc")
    result = check(out, model=Net(), **embedding, images=out.parent / "images")
    assert kinds(result) == ["weights"]
    assert "cannot be loaded" in result.causes[0].what  # its code is not run
    make_picture(99, 140, 100).save(out.parent / "images" / "12.png")
    result = check(out, model=spec, layer="fc", sample=N)
    assert kinds(result) == ["files"]
    assert f"1 of {N} images have changed since: row 4 (12.png)" in result.causes[0].what


def test_a_file_that_is_newer_than_a_wrong_row_is_named(paths: list[Path], tmp_path: Path) -> None:
    net = Net().eval()
    features = loop(net, paths)
    features[7] = loop(net, [paths[8]])[0] * 0.9
    np.save(tmp_path / "features.npy", features)
    os.utime(tmp_path / "features.npy", (time.time() - 100,) * 2)
    for i, path in enumerate(paths):
        os.utime(path, (time.time() - (0 if i == 7 else 200),) * 2)
    result = check(tmp_path / "features.npy", model=net, transform=steps(), images=paths, sample=N)
    assert kinds(result) == ["files"]
    assert f"row 7 ({paths[7]})" in result.causes[0].what


def test_what_cannot_be_compared_is_refused_in_one_line(paths: list[Path], tmp_path: Path) -> None:
    net, right = Net().eval(), np.zeros((N, 10), np.float32)
    given: dict[str, Any] = {"model": net, "transform": steps(), "images": paths}
    (tmp_path / "damaged.npy").write_bytes(b"no array")
    (tmp_path / "two.txt").write_text("")
    with h5py.File(tmp_path / "two.h5", "w") as file:
        file["a"], file["b"] = right, right
    for features, changed, expected in (
        (tmp_path / "none.npy", {}, "none.npy: no such file"),
        (tmp_path / "damaged.npy", {}, "damaged.npy cannot be read"),
        (tmp_path / "two.txt", {}, "expected a data set, .npy, .h5 or .parquet; in Python, pass the array"),
        (tmp_path / "two.h5", {}, "no data set ''; it has .*two.h5:a, .*two.h5:b"),
        (right[0], {}, r"expected numbers \(N, ...\)"),
        (
            right[:, :7],
            {},
            "the array has 7 values in a row, but embedding of the model gives 10 or 32; name the layer",
        ),
        (right, {"images": None}, "does not name its images; name them: images=PATHS"),
        (right[:1], {"images": [tmp_path / "no.png"]}, "no row can be compared: row 0 .*no.png.: no such file"),
        (right, {"images": paths[:5]}, f"the array has {N} rows, but there are 5 images"),
        (right, {"model": None}, "does not name its model; name it"),
        (right, {"transform": None}, "a module needs its transform"),
        (right, {"sample": 0}, "sample is 0"),
        (right, {"transform": v2.Compose([v2.RandomCrop(32), steps()])}, "features would differ from run to run"),
    ):
        with pytest.raises(InputError, match=expected) as caught:
            check(features, **{**given, **changed})
        assert "\n" not in str(caught.value)
    with pytest.raises(UnknownNameError, match="'two'"):
        check(right, **given, layer="tow")


def test_a_row_that_cannot_be_compared_does_not_agree_unless_its_image_fails_too(
    paths: list[Path], tmp_path: Path
) -> None:
    net = Net().eval()
    features = loop(net, paths)
    features[[3, 9]] = np.nan
    for i in (5, 9):
        (tmp_path / f"{i}.png").write_bytes(paths[i].read_bytes()[:200])
    files = [tmp_path / f"{i}.png" if i in (5, 9) else path for i, path in enumerate(paths)]
    result = check(features, model=net, transform=steps(), images=files, sample=N)
    assert not result
    assert (result.n_rows, result.causes, result.nearest) == (N - 3, (), "")
    assert result.deviation < 1e-3
    assert [text.split(" (")[0] for text in result.unreadable] == ["row 3", "row 5"]
    first, *others = str(result).splitlines()
    assert first.startswith(f"{N - 3} rows agree")
    assert others[0].startswith("not compared: row 3 ")
    assert others[0].endswith("its stored features are not finite")
    assert others[1].startswith("not compared: row 5 ")
    assert check(features[[*range(3), 9]], model=net, transform=steps(), images=[*files[:3], files[9]])


def test_a_reader_requires_what_the_features_are_of(out: Path) -> None:
    with FeatureReader(out) as reader:
        spec, sha256 = reader.provenance["backbone"], reader.provenance["depends_on"]["weights_sha256"]
        reader.require(backbone=spec, layer="one", weights=sha256[:12])
        reader.require(weights=reader.provenance["weights"])
        for wanted, error in (
            ({"backbone": "timm/resnet50"}, "not of timm/resnet50"),
            ({"weights": "a1_in1k"}, "not of a1"),
        ):
            with pytest.raises(InputError, match=error):
                reader.require(**wanted)
        with pytest.raises(UnknownNameError, match="layer 'two' not found"):
            reader.require(layer="two")


@pytest.mark.slow
def test_a_check_of_a_real_network_takes_seconds(photos: Path) -> None:
    """Photos, and the network and transform of torchvision; the time of the check beside that of the loop."""
    torch.manual_seed(0)
    net, files = models.mobilenet_v3_small().eval(), sorted(photos.rglob("*.JPEG"))[:64]
    transform = models.MobileNet_V3_Small_Weights.DEFAULT.transforms()
    features = loop(net, files, transform)
    began = time.process_time()
    loop(net, files[:32], transform)
    loop_s, began = time.process_time() - began, time.process_time()
    assert check(features, model=net, transform=transform, images=files)
    check_s = time.process_time() - began
    print(f"32 rows: {check_s:.2f} s of CPU time, a hand-written loop {loop_s:.2f} s")
    assert check_s < 3 * loop_s + 2
    wrong = loop(net, files, v2.Compose([v2.Resize((224, 224)), transform.__class__(crop_size=224, resize_size=224)]))
    assert "crop" in kinds(check(wrong, model=net, transform=transform, images=files))
