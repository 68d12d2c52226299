"""The reasons why a file is no picture: in words, on one line."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extract.images.decoding import decode
from tests.extract.images.making import encoded
from tests.extract.images.test_whole_files import photo, tiff_with_its_tags_first, zero_tailed


def of_compression(number: int) -> bytes:
    """A TIFF whose tag says that its strip has another compression."""
    data = tiff_with_its_tags_first(photo(), "tiff_lzw")
    at = data.index(struct.pack("<HHI", 259, 4, 1)) + 8
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


WEBP = "libtiff cannot decode it: it is damaged, or this build of Pillow lacks its compression (webp)"


@pytest.mark.parametrize("number", [50001, 34661, 34887])  # WebP, JBIG, LERC
def test_a_tiff_of_a_codec_that_is_not_built_has_a_reason_in_words(number: int) -> None:
    with pytest.raises(ValueError, match=r"^(?!.*decoder error)") as error:
        decode(of_compression(number))
    assert "Pillow" in str(error.value)
    assert "compression" in str(error.value)
    if number == 50001:
        assert str(error.value) == WEBP


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"])
def test_damaged_tiffs_have_reasons_in_words(compression: str) -> None:
    data = tiff_with_its_tags_first(photo(), compression)
    reasons = set()
    for share in np.linspace(0.3, 0.9, 15):
        for damaged in (zero_tailed(data, share), data[: int(len(data) * share)]):
            with pytest.raises(ValueError, match=".") as error:
                decode(damaged)
            reasons.add(str(error.value))
    assert not [reason for reason in reasons if "decoder error" in reason or "\n" in reason]


def test_a_tiff_for_which_the_memory_is_short_is_no_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(image: Image.Image) -> None:
        raise OSError("decoder error -9")

    data = encoded(photo(), "TIFF", compression="tiff_lzw")
    monkeypatch.setattr("PIL.TiffImagePlugin.TiffImageFile.load", load)
    with pytest.raises(MemoryError):
        decode(data)


def test_a_tiff_that_pillow_does_not_open_is_said_to_be_one() -> None:
    with pytest.raises(ValueError, match="a TIFF that is damaged, or of pixels or a compression unknown to Pillow"):
        decode(of_compression(34712))  # JPEG 2000


def test_no_reason_of_a_damaged_heic_has_a_line_break() -> None:
    pytest.importorskip("pillow_heif").register_heif_opener()
    data, reasons = encoded(photo(), "HEIF"), set()
    random = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(data)
        for position in random.integers(0, len(data), 6):
            damaged[position] = random.integers(256)
        try:
            decode(bytes(damaged))
        except ValueError as error:
            reasons.add(str(error))
    assert reasons
    assert not [reason for reason in reasons if "\n" in reason or "  " in reason]


def test_a_reason_of_several_lines_becomes_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(image: Image.Image) -> None:
        raise RuntimeError("Decoder plugin generated an error:\n  Unspecified\n")

    data = encoded(photo(), "BMP")
    monkeypatch.setattr("PIL.BmpImagePlugin.BmpImageFile.load", load)
    with pytest.raises(ValueError, match="^Decoder plugin generated an error: Unspecified$"):
        decode(data)
