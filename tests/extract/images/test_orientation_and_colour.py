"""EXIF orientation and colour profiles, applied or not; dark 16-bit pictures. See `extract/images/decoding.py`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image, ImageCms

from extract import FeatureReader, extract_features
from extract.compute.backbone import Backbone
from extract.errors import InputError, UnknownNameError
from extract.extraction.reproduce import features_of_file, recheck
from extract.images.decoding import DecodeOptions, decode, header_size, too_dark
from extract.store.format.dataset import DataSet
from pipelines.cli import main
from tests.conftest import make_picture
from tests.extract.images.making import encoded, turned
from tests.extract.images.test_pictures import deep_png, tiff

PICTURE = make_picture(3, 64, 48)
QUIET: dict[str, Any] = {"workers": 0, "progress": False}
TINY = ("-b", "timm/test_resnet", "--weights", "random", "--size", "64", "--crop", "64", "--device", "cpu",
        "--workers", "0", "--compile", "off")  # fmt: skip


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def pixels(picture: Image.Image) -> NDArray[np.uint8]:
    return np.asarray(picture)


# Orientation


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
@pytest.mark.parametrize("how", ["exif", "ignore"])
def test_the_header_states_the_size_of_the_decoded_picture(kind: str, how: str) -> None:
    for orientation in range(1, 9):
        data = turned(PICTURE, orientation, kind)
        assert header_size(data, how) == decode(data, DecodeOptions(orientation=how)).size


def test_a_tiff_of_16_bits_is_as_it_is_stored_though_pillow_turns_it_while_loading() -> None:
    grey = Image.fromarray(np.arange(30 * 20, dtype=np.uint16).reshape(20, 30) * 100)
    for orientation in range(1, 9):
        deep = turned(grey, orientation, "TIFF")
        assert np.array_equal(
            pixels(decode(deep, DecodeOptions(orientation="ignore")))[..., 0], np.asarray(grey) >> 8
        ), orientation


# Colour


def matrix_profile(swapped: bool = True) -> bytes:
    """sRGB; or a profile that calls red what sRGB calls blue."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    if not swapped:
        return profile
    tags = profile[128:260].replace(b"rXYZ", b"----").replace(b"bXYZ", b"rXYZ").replace(b"----", b"bXYZ")
    return profile[:128] + tags + profile[260:]


def grey_profile() -> bytes:
    """Grey with gamma 1 (ICC.1:2022: a header, the tags kTRC and wtpt)."""
    curve, white = b"curv" + bytes(8), b"XYZ " + bytes(4) + bytes.fromhex("0000f6d6000100000000d32d")
    text = b"desc" + bytes(4) + (5).to_bytes(4, "big") + b"grey\0" + bytes(78)
    parts, at, table = [(b"kTRC", curve), (b"wtpt", white), (b"desc", text)], 128 + 4 + 3 * 12, b""
    for name, content in parts:
        table += name + at.to_bytes(4, "big") + len(content).to_bytes(4, "big")
        at += len(content) + -len(content) % 4
    body = b"".join(content + bytes(-len(content) % 4) for _, content in parts)
    head = at.to_bytes(4, "big") + bytes(4) + bytes.fromhex("02400000") + b"mntrGRAYXYZ " + bytes(12) + b"acsp"
    head += bytes(28) + bytes.fromhex("0000f6d6000100000000d32d")
    return head.ljust(128, b"\0") + (3).to_bytes(4, "big") + table + body


def by_image_cms(image: Image.Image, icc: bytes) -> NDArray[np.uint8]:
    """The pixels converted to sRGB by Pillow's own function, with its default intent, which is the perceptual one."""
    srgb = ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, ImageCms.ImageCmsProfile(io.BytesIO(icc)), srgb, outputMode="RGB")
    assert converted is not None
    return pixels(converted)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_srgb_gives_the_pixels_of_image_cms_and_ignore_those_of_the_file(kind: str) -> None:
    icc = matrix_profile()
    data = encoded(PICTURE, kind, icc_profile=icc)
    plain, converted = decode(data), decode(data, DecodeOptions(icc="srgb"))
    assert np.array_equal(pixels(plain), pixels(opened(data).convert("RGB")))
    assert np.array_equal(pixels(converted), by_image_cms(opened(data).convert("RGB"), icc))
    assert np.abs(pixels(plain).astype(int) - pixels(converted)).max() > 50
    assert converted.mode == "RGB"


def test_a_profile_is_applied_to_all_modes_as_by_image_cms_and_without_one_nothing_changes() -> None:
    icc, of_grey, grey, transparent = matrix_profile(), grey_profile(), PICTURE.convert("L"), PICTURE.copy()
    transparent.putalpha(grey)
    share, palette = np.asarray(grey)[..., None] / 255, PICTURE.quantize(16)
    expected_grey = by_image_cms(grey, of_grey)
    assert np.abs(expected_grey.astype(int) - pixels(grey.convert("RGB"))).max() > 30
    for picture, profile, expected, tolerance in (
        (grey, of_grey, expected_grey, 0),
        (Image.fromarray(np.asarray(grey).astype(np.uint16) * 257), of_grey, expected_grey, 0),
        (grey, icc, by_image_cms(grey.convert("RGB"), icc), 0),
        (palette, icc, by_image_cms(palette.convert("RGB"), icc), 0),
        (transparent, icc, by_image_cms(PICTURE, icc) * share + 255 * (1 - share), 1),
        (PICTURE, matrix_profile(swapped=False), pixels(PICTURE), 1),
        (PICTURE, None, pixels(PICTURE), 0),
    ):
        converted = decode(encoded(picture, "PNG", icc_profile=profile), DecodeOptions(icc="srgb"))
        assert np.abs(pixels(converted) - expected.astype(float)).max() <= tolerance, picture.mode


def test_orientation_and_colour_work_together() -> None:
    icc = matrix_profile()
    data = turned(PICTURE, 6, icc_profile=icc)
    converted = Image.fromarray(by_image_cms(opened(data), icc))
    assert np.array_equal(pixels(decode(data, DecodeOptions(orientation="ignore", icc="srgb"))), pixels(converted))
    assert np.array_equal(pixels(decode(data, DecodeOptions(icc="srgb"))), np.rot90(pixels(converted), 3))


@pytest.mark.parametrize("damage", ["noise", "cut", "empty header", "another space"])
def test_a_damaged_profile_is_an_image_error_only_if_it_is_to_be_applied(damage: str) -> None:
    icc = matrix_profile()
    icc = {"noise": bytes(range(256)), "cut": icc[:200], "empty header": bytes(128) + icc[128:],
           "another space": icc[:16] + b"CMYK" + icc[20:]}[damage]  # fmt: skip
    data = encoded(PICTURE, "JPEG", icc_profile=icc)
    assert np.array_equal(pixels(decode(data)), pixels(opened(data)))
    with pytest.raises(ValueError, match=r"its colour profile \(ICC\) cannot be used: .*; --icc ignore"):
        decode(data, DecodeOptions(icc="srgb"))


# The fingerprint


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i, orientation in enumerate((1, 6, 3, 8)):
        data = turned(make_picture(i, 90, 60), orientation, icc_profile=matrix_profile())
        (folder / f"{i}.jpg").write_bytes(data)
    return folder


def run(*words: str) -> str:
    result = CliRunner().invoke(main, list(words))
    return f"{result.exit_code} {result.output}"


def test_defaults_have_the_fingerprint_of_data_sets_without_the_options(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    decoders = {}
    for name, how in {"default": {}, "stored": {"orientation": "ignore"}, "srgb": {"icc": "srgb"}}.items():
        with extract_features(photos, out=tmp_path / name, backbone=backbone, **QUIET, **how) as reader:
            decoders[name] = reader.provenance["depends_on"]["decoder"]
    assert decoders == {
        "default": "pillow: EXIF orientation applied, transparency over white",
        "stored": "pillow: EXIF orientation ignored, transparency over white",
        "srgb": "pillow: EXIF orientation applied, transparency over white; ICC profiles converted to sRGB, perceptual",
    }
    for name, how in {"default": {"icc": "srgb"}, "stored": {}, "srgb": {"orientation": "ignore"}}.items():
        with pytest.raises(InputError, match="EXIF orientation"):
            extract_features(photos, out=tmp_path / name, backbone=backbone, **QUIET, **how)
    with pytest.raises(UnknownNameError, match="orientation 'upright'"):
        extract_features(photos, out=tmp_path / "x", backbone=backbone, orientation="upright")
    with pytest.raises(UnknownNameError, match="icc 'adobe'"):
        extract_features(photos, out=tmp_path / "x", backbone=backbone, icc="adobe")


def test_features_are_those_of_the_pixels_that_the_options_give(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    for how in ({"orientation": "ignore"}, {"icc": "srgb"}, {"orientation": "ignore", "icc": "srgb"}):
        out = tmp_path / "-".join(how)
        with extract_features(photos, out=out, backbone=backbone, **QUIET, **how) as reader:
            stored = reader["embedding"][:]
        expected = []
        for i in range(4):
            picture = Image.open(photos / f"{i}.jpg")
            given = by_image_cms(picture, matrix_profile()) if "icc" in how else pixels(picture)
            picture = Image.fromarray(given)
            if "orientation" not in how:
                picture = Image.fromarray(np.rot90(given, (0, 3, 2, 1)[i]))
            expected.append(backbone.features([picture])["embedding"][0])
        assert np.abs(stored - np.stack(expected)).max() <= 1e-5 * np.abs(stored).max()


def test_commands_compute_again_as_it_is_recorded(photos: Path, tmp_path: Path) -> None:
    out, others = tmp_path / "out", tmp_path / "others"
    words = ("embed", str(photos), "-o", str(out), *TINY, "--orientation", "ignore", "--icc", "srgb")
    printed = run(*words)
    assert printed.startswith("0 ")
    assert "decoder   pillow: EXIF orientation ignored" in printed
    assert "nothing to do" in run(*words)
    refused = run("embed", str(photos), "-o", str(out), *TINY)
    assert refused.startswith("2 ")
    assert "EXIF orientation ignored" in refused
    assert run("verify", str(out), "--sample", "4").startswith("0 ")
    assert run("embed", str(photos), "-o", str(others), *TINY).startswith("0 ")
    dataset = DataSet.open(out)
    with FeatureReader(out) as reader, FeatureReader(others) as plain:
        found = features_of_file(dataset, reader.provenance, photos / "1.jpg")["embedding"]
        assert np.abs(found - reader["embedding"][1]).max() <= 1e-5 * np.abs(found).max()
        assert np.abs(found - plain["embedding"][1]).max() > 1e-3 * np.abs(found).max()
    assert not recheck(out, 4, workers=0).faults


# Dark 16-bit pictures


def twelve_in_sixteen(dark: bool, kind: str) -> bytes:
    samples = (np.arange(30 * 40, dtype=np.uint16) * 3).reshape(30, 40) * (1 if dark else 16)
    if kind == "RGB PNG":
        return deep_png(np.stack([samples] * 3, axis=2), 2)
    if kind == "RGB TIFF":
        return tiff(np.stack([samples] * 3, axis=2).astype("<u2"), 2)
    return encoded(Image.fromarray(samples), kind)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG2000", "RGB PNG", "RGB TIFF"])
def test_twelve_bits_in_sixteen_are_noticed(kind: str) -> None:
    assert too_dark(decode(twelve_in_sixteen(True, kind)))
    assert not too_dark(decode(twelve_in_sixteen(False, kind)))


def test_black_and_8_bit_pictures_are_not_taken_for_twelve_bits() -> None:
    assert not too_dark(decode(encoded(Image.fromarray(np.zeros((9, 9), np.uint16)), "PNG")))
    assert not too_dark(decode(encoded(Image.new("RGB", (9, 9), (3, 3, 3)), "PNG")))
    assert not too_dark(decode(encoded(Image.new("RGB", (9, 9), (3, 3, 3)), "TIFF")))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_says_once_which_file_looks_like_twelve_bits(tmp_path: Path, workers: int, backbone: Backbone) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    PICTURE.save(folder / "a.png")
    for name in ("b.png", "c.png", "d.png"):
        (folder / name).write_bytes(twelve_in_sixteen(True, "PNG") + name.encode())
    words = [word if word != "0" else str(workers) for word in TINY]
    printed = run("embed", str(folder), "-o", str(tmp_path / "out"), *words, "--batch-size", "1")
    assert printed.count("16-bit pixels") == 1
    assert "note: b.png: all of its 16-bit pixels are below 4,096" in printed
    assert "multiply them by 16" in printed
    assert "16-bit" not in run("embed", str(folder), "-o", str(tmp_path / "out"), *words)  # nothing to do
    with pytest.warns(UserWarning, match=r"b\.png: all of its 16-bit pixels") as warned:
        extract_features(folder, out=tmp_path / "x", backbone=backbone, workers=workers, progress=False).close()
    assert len([warning for warning in warned if "16-bit" in str(warning.message)]) == 1
