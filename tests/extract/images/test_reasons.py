"""The reasons why a file is no picture: in words, on one line, and not on stderr."""

from __future__ import annotations

import io
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extract.images import decode
from extract.images.tiff_messages import errors_of_libtiff
from tests.extract.images.test_whole_files import encoded, photo, tiff_with_its_tags_first, zero_tailed


def of_compression(number: int) -> bytes:
    """A TIFF whose tag says that its strip has another compression."""
    data = tiff_with_its_tags_first(photo(), "tiff_lzw")
    at = data.index(struct.pack("<HHI", 259, 4, 1)) + 8
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


WEBP = "libtiff cannot decode it: it is damaged, or this build of Pillow lacks its compression (webp)"


@pytest.mark.parametrize("number", [50001, 34661, 34887])  # WebP, JBIG, LERC
def test_a_tiff_of_a_codec_that_is_not_built_has_a_reason_in_words(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"^(?!.*decoder error)") as error:
        decode(of_compression(number))
    assert "Pillow" in str(error.value)
    assert "compression" in str(error.value)
    if number == 50001:
        assert str(error.value) == WEBP
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"])
def test_damaged_tiffs_have_reasons_in_words_and_print_nothing(
    compression: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tiff_with_its_tags_first(photo(), compression)
    reasons = set()
    for share in np.linspace(0.3, 0.9, 15):
        for damaged in (zero_tailed(data, share), data[: int(len(data) * share)]):
            with pytest.raises(ValueError, match=".") as error:
                decode(damaged)
            reasons.add(str(error.value))
    assert not [reason for reason in reasons if "decoder error" in reason or "\n" in reason]
    assert capfd.readouterr().err == ""


def test_a_program_that_decodes_by_itself_has_the_messages_of_libtiff_as_before(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = of_compression(50001)
    with pytest.raises(ValueError, match="webp"):
        decode(data)
    assert capfd.readouterr().err == ""
    with pytest.raises(OSError, match="decoder error -2"), Image.open(io.BytesIO(data)) as image:
        image.load()
    assert "WEBP compression support is not configured" in capfd.readouterr().err


def test_threads_decode_beside_one_that_fails() -> None:
    bad, good, found = of_compression(50001), encoded(photo(), "TIFF", compression="tiff_lzw"), []

    def work(data: bytes) -> None:
        for _ in range(20):
            try:
                decode(data)
                found.append("")
            except ValueError as error:
                found.append(str(error))

    threads = [threading.Thread(target=work, args=(data,)) for data in (bad, good, bad, good)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count("") == 40
    assert set(found) == {"", WEBP}


def test_without_libtiff_in_the_process_the_reason_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extract.images.tiff_messages._libtiff", lambda: None)  # as where it is not found
    tiff = Image.open(io.BytesIO(encoded(photo(), "TIFF")))
    with pytest.raises(ValueError, match="libtiff cannot decode it"), errors_of_libtiff(tiff):
        raise OSError("decoder error -2")
    with pytest.raises(MemoryError), errors_of_libtiff(tiff):
        raise OSError("decoder error -9")
    with pytest.raises(OSError, match="another"), errors_of_libtiff(tiff):
        raise OSError("another")


def test_a_tiff_that_pillow_does_not_open_is_said_to_be_one() -> None:
    with pytest.raises(ValueError, match="a TIFF that is damaged, or of pixels or a compression unknown to Pillow"):
        decode(of_compression(34712))  # JPEG 2000


def test_no_reason_of_a_damaged_heic_has_a_line_break() -> None:
    pytest.importorskip("pillow_heif").register_heif_opener()
    data, reasons = encoded(photo(), "HEIF"), set()
    random = np.random.default_rng(0)
    for _ in range(150):
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
