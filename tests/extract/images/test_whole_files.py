"""Files whose tail was never written, against sound files that look alike; see `check_whole`."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter, JpegImagePlugin

from extract.images.decoding import decode
from tests.conftest import make_picture
from tests.extract.images.making import encoded, tiff_with_its_tags_first

END = b"\xff\xd9"


@functools.cache
def photo(seed: int = 0, width: int = 160, height: int = 120) -> Image.Image:
    """A picture with noise in it: its data are no pattern that repeats."""
    noise = np.random.default_rng(seed).normal(0, 12, (height, width, 3))
    pixels = np.asarray(make_picture(seed, width, height)) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.7))


def with_alpha(picture: Image.Image) -> Image.Image:
    return Image.merge("RGBA", [*picture.split(), picture.convert("L")])


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """Pillow's own decode."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def decoded_by_pillow(data: bytes) -> bool:
    try:
        pixels_of(data)
    except (OSError, SyntaxError):
        return False
    return True


def filled_up(data: bytes, share: float, byte: int = 0) -> bytes:
    kept = int(len(data) * share)
    return data[:kept] + bytes([byte]) * (len(data) - kept)


def with_thumbnail(picture: Image.Image) -> bytes:
    """A JPEG whose EXIF segment has a small JPEG in it (EXIF 2.32, 4.5.5)."""
    small = encoded(picture.resize((16, 12)))
    entries = b"".join(struct.pack("<HHII", *e) for e in ((259, 3, 1, 6), (513, 4, 1, 56), (514, 4, 1, len(small))))
    ifds = struct.pack("<HI", 0, 14) + struct.pack("<H", 3) + entries + bytes(4)
    data = encoded(picture, quality=95, subsampling=0, exif=b"Exif\0\0II*\0\x08\0\0\0" + ifds + small)
    assert data.count(b"\xff\xd8\xff") == 2
    return data


def multi_picture(first: Image.Image, second: Image.Image) -> tuple[bytes, int]:
    """An MPO of two pictures, and the offset of the second."""
    data = encoded(first, "MPO", quality=95, subsampling=0, save_all=True, append_images=[second])
    with Image.open(io.BytesIO(data)) as image:
        assert isinstance(image, JpegImagePlugin.JpegImageFile)
        assert image.n_frames == 2  # type: ignore[attr-defined]
    return data, data.rindex(b"\xff\xd8\xff")


JPEGS: dict[str, Callable[[], bytes]] = {
    "baseline": lambda: encoded(photo(), quality=95, subsampling=0),
    "baseline, 4:2:0": lambda: encoded(photo()),
    "optimised": lambda: encoded(photo(), optimize=True),
    "progressive": lambda: encoded(photo(), progressive=True),
    "restart markers": lambda: encoded(photo(), quality=95, restart_marker_rows=2),
    "grey": lambda: encoded(photo().convert("L"), quality=95),
    "CMYK": lambda: encoded(photo().convert("CMYK"), quality=95),
    "EXIF thumbnail": lambda: with_thumbnail(photo()),
    "MPO of one": lambda: encoded(photo(), "MPO", quality=95, subsampling=0),
    "many tails that Pillow decodes": lambda: encoded(photo(3, 40, 30), quality=98, subsampling=0, optimize=True),
}


@pytest.mark.parametrize(("kind", "fill"), [*((kind, 0) for kind in JPEGS), *(("baseline", n) for n in (85, 246, 255))])
def test_a_jpeg_whose_tail_is_zeros_or_another_byte_is_refused_at_any_cut(kind: str, fill: int) -> None:
    data = JPEGS[kind]()
    assert np.array_equal(decode(data), pixels_of(data))
    for share in np.linspace(0.02, 0.99, 24):
        with pytest.raises(ValueError, match="."):
            decode(filled_up(data, share, fill))


def test_of_the_zero_tailed_jpegs_pillow_decodes_some_and_the_reason_names_the_marker() -> None:
    tailed = [filled_up(JPEGS["baseline"](), share) for share in np.linspace(0.3, 0.95, 20)]
    passed = [data for data in tailed if decoded_by_pillow(data)]
    assert passed
    for data in passed:
        with pytest.raises(ValueError, match="^truncated: the end-of-image marker is missing$"):
            decode(data)


@pytest.mark.parametrize("pattern", [0, 4])
def test_few_jpegs_pass_whose_tail_is_garbage_without_an_end_marker(pattern: int) -> None:
    data, passed, accepted = JPEGS["baseline"](), 0, 0
    for share in np.linspace(0.1, 0.95, 60):
        kept = int(len(data) * share)
        noise = np.random.default_rng(kept).integers(0, 255, pattern or len(data), np.uint8).tobytes()  # without FF
        tailed = data[:kept] + (noise * (len(data) // len(noise) + 1))[: len(data) - kept]
        passed += decoded_by_pillow(tailed)
        with contextlib.suppress(ValueError):
            decode(tailed)
            accepted += 1
    assert passed > 20
    assert accepted <= passed // 10


@pytest.mark.parametrize("kind", JPEGS)
def test_bytes_behind_the_end_of_a_jpeg_are_ignored(kind: str) -> None:
    data = JPEGS[kind]()
    pixels = pixels_of(data)
    start_of_scan, start_of_picture = b"\xff\xda\0\x0c" + bytes(99), b"\xff\xd8\xff\xe0\0"
    for behind in (b"\0", bytes(5000), b"\xff" * 100, b"written by a camera\n", start_of_scan, start_of_picture):
        assert np.array_equal(decode(data + behind), pixels), behind[:20]


@pytest.mark.parametrize("fill", [True, False])
def test_a_second_picture_that_is_cut_or_zeros_does_not_matter_to_the_first(fill: bool) -> None:
    data, second = multi_picture(photo(1), photo(2))
    for share in (0.0, 0.01, 0.3, 0.9):
        kept = second + int((len(data) - second) * share)
        changed = data[:kept] + bytes(len(data) - kept if fill else 0)
        assert np.array_equal(decode(changed), pixels_of(data)), share


def test_a_first_picture_that_is_zeros_is_refused_though_its_thumbnail_and_the_garbage_have_end_markers() -> None:
    data = with_thumbnail(photo())
    start_of_picture = data.rindex(b"\xff\xda")
    assert END in data[:start_of_picture]
    kept = start_of_picture + (len(data) - start_of_picture) // 2
    tailed = data[:kept] + bytes(len(data) - kept)
    assert decoded_by_pillow(tailed)
    with pytest.raises(ValueError, match="end-of-image"):
        decode(tailed)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {"optimize": True}), ("JPEG", {}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("WEBP", {"quality": 100}),
     ("AVIF", {"speed": 10}), ("HEIF", {}), ("TIFF", {"compression": "packbits"}), ("TIFF", {"compression": "jpeg"}),
     ("TIFF", {"compression": "tiff_lzw"}), ("QOI", {}), ("JPEG2000", {}), ("BMP", {})],
)  # fmt: skip
def test_flat_pictures_whose_data_are_zeros_are_decoded(kind: str, options: dict[str, Any]) -> None:
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    for colour in ("black", "white", "grey", "red"):
        data = encoded(Image.new("RGB", (60, 50) if kind == "QOI" else (600, 500), colour), kind, **options)
        assert np.array_equal(decode(data), pixels_of(data)), colour


COMPRESSED: dict[str, Callable[[], bytes]] = {
    "AVIF": lambda: encoded(photo(), "AVIF", speed=10),
    "AVIF with alpha": lambda: encoded(with_alpha(photo()), "AVIF", speed=10),
    "HEIC": lambda: encoded(photo(), "HEIF"),
    "WebP": lambda: encoded(photo(), "WEBP"),
    "WebP with alpha": lambda: encoded(with_alpha(photo()), "WEBP"),
    "WebP animated": lambda: encoded(photo(), "WEBP", save_all=True, append_images=[photo(2)]),
    "WebP lossless": lambda: encoded(photo(), "WEBP", lossless=True),
    "QOI": lambda: encoded(photo(), "QOI"),
    "JPEG 2000": lambda: encoded(photo(), "JPEG2000"),
    "JPEG 2000, lossy": lambda: encoded(
        photo(), "JPEG2000", irreversible=True, quality_mode="rates", quality_layers=[20]
    ),
    "GIF": lambda: encoded(photo(), "GIF"),
    "PNG": lambda: encoded(photo(), "PNG"),
    "TIFF, LZW": lambda: tiff_with_its_tags_first(photo(), "tiff_lzw"),
    "TIFF, deflate": lambda: tiff_with_its_tags_first(photo(), "tiff_adobe_deflate"),
    "TIFF, PackBits": lambda: tiff_with_its_tags_first(photo(), "packbits"),
    "TIFF, JPEG": lambda: tiff_with_its_tags_first(photo(), "jpeg"),
}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_zeros_in_place_of_compressed_data_are_refused(kind: str) -> None:
    if kind == "HEIC":
        pytest.importorskip("pillow_heif").register_heif_opener()
    data, reasons = COMPRESSED[kind](), []
    whole = np.asarray(decode(data))
    for share in np.linspace(0.05, 0.98, 16):
        tailed = filled_up(data, share)
        try:
            pixels = np.asarray(decode(tailed))
        except ValueError as error:
            reasons.append(str(error))
            continue
        assert np.array_equal(pixels, whole), share  # the zeros replaced metadata
    assert [reason for reason in reasons if re.search("decoder error|\n", reason)] == []


@pytest.mark.parametrize("quality", [75, 95, 100])
def test_zeros_in_place_of_jpeg_tables_behind_the_strips_of_a_tiff_change_no_pixel(quality: int) -> None:
    data = encoded(photo(), "TIFF", compression="jpeg", quality=quality)
    whole = decode(data)
    assert np.array_equal(decode(data + bytes(40)), whole)
    for count in range(2, 400):
        with contextlib.suppress(ValueError):
            assert np.array_equal(decode(data[:-count] + bytes(count)), whole), count


@pytest.mark.parametrize("compression", ["tiff_adobe_deflate", "jpeg"])
def test_a_profile_behind_the_data_of_a_tiff_may_end_in_zeros(compression: str) -> None:
    data = encoded(photo(), "TIFF", compression=compression, icc_profile=bytes(60))
    assert data.endswith(bytes(16))
    assert np.array_equal(decode(data), pixels_of(data))


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("options", [{}, {"quality": 5}, {"quality": 100, "method": 0}, {"method": 6}], ids=str)
def test_lossy_webp_that_ends_in_a_flat_area_is_decoded(options: dict[str, Any], rows: int) -> None:
    """Its data end in zeros, which no decoder can tell from zeros that were never written but by their number."""
    in_question = 0
    for colour, animated in (((0, 0, 0), False), ((0, 0, 0), True), ((3, 200, 77), False)):
        picture = Image.new("RGB", (700, 900), colour)
        picture.paste(photo(1, 700, rows or 1), (0, 0))
        more = {"save_all": True, "append_images": [Image.new("RGB", picture.size)]} if animated else {}
        data = encoded(picture, "WEBP", **options, **more)
        in_question += data.endswith(bytes(16))
        assert np.array_equal(decode(data), pixels_of(data))
    assert in_question or options == {"quality": 5}


@pytest.mark.parametrize(
    "kind", ["AVIF", "HEIC", "WebP", "WebP lossless", "QOI", "JPEG 2000", "GIF", "PNG", "TIFF, LZW"]
)
def test_zeros_behind_a_compressed_picture_are_no_reason_to_refuse_it(kind: str) -> None:
    if kind == "HEIC":
        pytest.importorskip("pillow_heif").register_heif_opener()
    data = COMPRESSED[kind]()
    if not decoded_by_pillow(data + bytes(3000)):
        pytest.skip("Pillow refuses them")
    assert np.array_equal(decode(data + bytes(3000)), pixels_of(data))


@pytest.mark.slow
def test_no_photo_is_refused_and_no_photo_is_accepted_whose_tail_is_zeros(photos: Path) -> None:
    random = np.random.default_rng(0)
    ways = {"quality": 95, "subsampling": 0}, {}, {"optimize": True}, {"restart_marker_rows": 3}, {"progressive": True}
    passed = 0
    for i, path in enumerate(sorted(photos.rglob("*.*"))[::2]):
        with Image.open(path) as image:
            files = [path.read_bytes(), encoded(image.convert("RGB"), **ways[i % len(ways)])]
        for data in files:
            assert decode(data + bytes(i)).size
            for share in random.uniform(0.02, 0.99, 5):
                tailed = filled_up(data, share)
                passed += decoded_by_pillow(tailed)
                with pytest.raises(ValueError, match="."):
                    decode(tailed)
    assert passed > 25
