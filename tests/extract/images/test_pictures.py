"""Each kind of picture against what it was made from, each broken one as a status; see `extract/images/decoding.py`."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from extract import Status, extract_features
from extract.images.decoding import DecodeOptions, decode
from tests.conftest import make_picture
from tests.extract.images import making
from tests.extract.images.making import TINY, encoded, tiff_with_its_tags_first

Pixels = NDArray[np.uint8]


class Kind(NamedTuple):
    """A file, the (H, W, 3) pixels that it means, and by how much a decoder may differ from them."""

    data: bytes
    pixels: NDArray[np.floating] | Pixels
    tolerance: float = 0.0


# What the files are made from

RGB = np.asarray(make_picture(3, 40, 30))  # (30, 40, 3)
OTHER = np.asarray(make_picture(4, 40, 30))
GREY = RGB[..., 1]
ALPHA = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))
RGBA, GREY_ALPHA = np.dstack([RGB, ALPHA]), np.dstack([GREY, ALPHA])
PREMULTIPLIED = np.dstack([np.rint(RGB * (ALPHA[..., None] / 255)), ALPHA])
DEEP = (np.arange(30 * 40, dtype=np.uint16) * 54).reshape(30, 40)  # 16-bit grey, up to 64,746
DEEP_RGB = np.stack([DEEP, DEEP[::-1], DEEP[:, ::-1]], axis=2)
TWO_COLOURS = np.array([[[1000, 2000, 3000], [40000, 50000, 60000]]] * 3, np.uint16)
BITS = GREY > 128


def heif(picture: Image.Image | NDArray[np.generic], **options: Any) -> bytes:
    pytest.importorskip("pillow_heif").register_heif_opener()
    return encoded(picture, "HEIF", **options)


def as_stored(data: bytes) -> Pixels:
    """Pillow's plain decode, in the file's own mode."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return np.array(image)


def over_white(rgb: NDArray[np.generic], alpha: NDArray[np.generic]) -> NDArray[np.floating]:
    share = alpha[..., None] / 255
    return rgb * share + 255 * (1 - share)


def grey_rgb(grey: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.repeat(grey[..., None], 3, axis=2)


def quantized() -> tuple[Image.Image, Pixels, Pixels]:
    """A picture with a palette, its indices, and its palette (N, 3)."""
    image = Image.fromarray(RGB).quantize(16)
    palette = np.array(image.getpalette(), np.uint8).reshape(-1, 3)
    return image, np.array(image), palette


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, bits: int, colour: int, rows: list[bytes], *extra: bytes) -> bytes:
    """A PNG by its specification: IHDR, other chunks, rows without a filter (ISO/IEC 15948)."""
    header = struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(extra) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def deep_png(samples: NDArray[np.uint16], colour: int, *extra: bytes) -> bytes:
    return png(samples.shape[1], 16, colour, [row.astype(">u2").tobytes() for row in samples], *extra)


def tiff(samples: NDArray[np.generic], meaning: int, bits: int = 0, in_planes: bool = False, **more: int) -> bytes:
    """An uncompressed TIFF of one strip, or of three planes (TIFF 6.0); `meaning`: its PhotometricInterpretation."""
    order, pixels = ">" if samples.dtype.str[0] == ">" else "<", samples.tobytes()
    height, width, count = (*samples.shape, 1)[:3] if not in_planes else (*samples.shape[1:], 3)
    stored = 8 * samples.itemsize
    bits = bits or stored
    tags = {256: [width * stored // bits], 257: [height], 258: [bits] * count, 259: [1], 262: [meaning], 273: [8]}
    tags |= {277: [count], 278: [height], 279: [len(pixels)]}
    tags |= {{"extra": 338, "sample_format": 339}[name]: [value] for name, value in more.items()}
    if "sample_format" in more:
        tags[339] *= count
    if in_planes:
        each = len(pixels) // count
        tags |= {284: [2], 273: [8 + i * each for i in range(count)], 279: [each] * count}
    body = pixels + b"\0" * (len(pixels) % 2)
    after = 8 + len(body) + 2 + 12 * len(tags) + 4
    entries, outside = b"", b""
    for tag, values in sorted(tags.items()):
        long = tag in (256, 257, 273, 278, 279)
        packed = struct.pack(f"{order}{len(values)}{'I' if long else 'H'}", *values)
        if len(packed) > 4:
            packed, outside = struct.pack(order + "I", after + len(outside)), outside + packed
        entries += struct.pack(order + "HHI", tag, 4 if long else 3, len(values)) + packed.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8 + len(body))
    return head + body + struct.pack(order + "H", len(tags)) + entries + bytes(4) + outside


def psd(planes: Pixels) -> bytes:
    """A flat Photoshop file, RGB, uncompressed; planes (3, H, W)."""
    header = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, planes.shape[1], planes.shape[2], 8, 3)
    return header + bytes(12) + struct.pack(">H", 0) + planes.tobytes()


def icon(picture: bytes) -> bytes:
    """An .ico with one picture, which calls itself 256 x 256."""
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(picture), 22) + picture


def icns(picture: bytes) -> bytes:
    """An .icns with one PNG, which calls itself 256 x 256."""
    return b"icns" + struct.pack(">I", 16 + len(picture)) + b"ic08" + struct.pack(">I", 8 + len(picture)) + picture


# A PNG that says that it has 200 million pixels.
BOMB = encoded(BITS, "PNG")
BOMB = BOMB[:8] + chunk(b"IHDR", struct.pack(">II", 20000, 10000) + BOMB[24:29]) + BOMB[33:]

# JPEG tells no decoder more than its coefficients: pictures of flat blocks come back within rounding.
BLOCKS = np.kron(
    np.array([[[200, 40, 60], [30, 180, 90]], [[60, 80, 220], [240, 220, 40]]]), np.ones((8, 8, 1), np.int64)
).astype(np.uint8)  # (16, 16, 3)
# BLOCKS by libjpeg-turbo's `cjpeg -arithmetic -quality 95 -sample 1x1`.
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAIBAQEBAQIBAQECAgICAgQDAgICAgUEBAMEBgUGBgYFBgYGBwkIBgcJBwYGCAsICQoKCgoKBggLDAsKDAkK"
    "Cgr/2wBDAQICAgICAgUDAwUKBwYHCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgr/yQARCAAQABADAREAAhEB"
    "AxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/ANvKqBuI6JXq8+KMKyfaLB2kyl+wFDDY/9k="
)


def ycc(rgb: NDArray[np.generic]) -> NDArray[np.floating]:
    """Y, Cb, Cr (JFIF 1.02)."""
    matrix = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
    return rgb @ matrix.T + [0, 128, 128]


def adobe_jpeg(stored: Pixels, transform: int) -> bytes:
    """A JPEG of four components, stored as given (H, W, 4), whose APP14 marker names the transform."""
    data = encoded(_cmyk(255 - stored), "JPEG", quality=100)
    at = data.index(b"Adobe") + 11
    return data[:at] + bytes([transform]) + data[at + 1 :]


def _cmyk(inks: Pixels) -> Image.Image:
    return Image.merge("CMYK", [Image.fromarray(np.ascontiguousarray(inks[..., i])) for i in range(4)])


def of_inks(inks: NDArray[np.generic]) -> NDArray[np.floating]:
    """What light four inks let through, each of 0 to 255."""
    light = 255 - inks.astype(float)
    return light[..., :3] * light[..., 3:] / 255


BLOCK_INKS = np.dstack([255 - BLOCKS, np.kron([[0, 60], [120, 20]], np.ones((8, 8), np.int64))]).astype(np.uint8)


def cielab(rgb: Pixels) -> NDArray[np.floating]:
    """L*, a*, b* under D50 of sRGB pixels (IEC 61966-2-1; Bradford, as in ICC profiles)."""
    value = rgb / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4360747, 0.3850649, 0.1430804], [0.2225045, 0.7168786, 0.0606169],
                       [0.0139322, 0.0971045, 0.7141733]])  # fmt: skip
    share = linear @ to_xyz.T / [0.96422, 1.0, 0.82521]
    root = np.where(share > (6 / 29) ** 3, np.cbrt(share), share / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = root[..., 0], root[..., 1], root[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


# EXIF orientation -> what a camera stores of an upright picture (EXIF 2.32, table 5).
STORED: dict[int, Callable[[NDArray[np.generic]], NDArray[np.generic]]] = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: upright.swapaxes(0, 1)[::-1],
    7: lambda upright: upright.swapaxes(0, 1)[::-1, ::-1],
    8: lambda upright: upright.swapaxes(0, 1)[:, ::-1],
}
# And back: those that turn by a quarter are each other's inverse.
UPRIGHT = {orientation: STORED[{6: 8, 8: 6}.get(orientation, orientation)] for orientation in STORED}


def turned(orientation: int, kind: str, **options: Any) -> bytes:
    """What a camera stores of RGB."""
    return making.turned(STORED[orientation](RGB), orientation, kind, **options)


# Every kind, made when it is asked for. Those whose pixels are computed need no decoder to compare with; of lossy ones,
# Pillow's own decode in the file's own mode is turned into RGB by hand.


def _lossy(data: bytes) -> Kind:
    return Kind(data, as_stored(data))


def _gif_with_transparency() -> Kind:
    image, indices, palette = quantized()
    pixels = palette[indices]
    pixels[indices == 3] = 255
    return Kind(encoded(image, "GIF", transparency=3), pixels)


def _palette_with_alpha(kind: str) -> Kind:
    image, indices, palette = quantized()
    alpha = np.linspace(0, 255, len(palette)).astype(np.uint8)
    if kind == "PNG":
        data = encoded(image, "PNG", transparency=alpha.tobytes())
    else:
        image.putpalette(np.hstack([palette, alpha[:, None]]).tobytes(), "RGBA")
        data = encoded(image, kind)
    return Kind(data, over_white(palette[indices], alpha[indices]), 1)


def _mpo() -> Kind:
    data = encoded(RGB, "MPO", save_all=True, append_images=[Image.fromarray(OTHER)])
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.n_frames) == ("MPO", 2)
    return _lossy(data)


def _ycck() -> Kind:
    # What Adobe stores, with its inks inverted: YCC of what C, M and Y hold back, and the light that K lets through.
    stored = np.dstack([ycc(BLOCK_INKS[..., :3]), 255 - BLOCK_INKS[..., 3]])
    return Kind(adobe_jpeg(np.rint(stored).clip(0, 255).astype(np.uint8), 2), of_inks(BLOCK_INKS), 4)


def _lab() -> Kind:
    rgb = (RGB // 3 + 80).astype(np.uint8)  # no colours at the border of sRGB
    lab = cielab(rgb)
    codes = np.stack([lab[..., 0] * 2.55, lab[..., 1], lab[..., 2]], axis=-1).round().astype(np.int16)
    return Kind(tiff((codes % 256).astype(np.uint8), 8), rgb, 5)  # a, b in steps of 1


def _xpm() -> Kind:
    text = (
        '/* XPM */\nstatic char *x[] = {\n"3 2 3 1",\n"a c #102030",\n"b c #C0D0E0",\n". c None",\n"ab.",\n"bba"\n};\n'
    )
    a, b, clear = (16, 32, 48), (192, 208, 224), (255, 255, 255)
    return Kind(text.encode(), np.array([[a, b, clear], [b, b, a]], np.uint8))


def _gif_of_part() -> Kind:
    """A first frame that covers a part of the picture; the rest is transparent."""
    image = Image.fromarray(np.tile(np.array([1, 2], np.uint8), (5, 4)))
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette([10, 20, 30, 200, 100, 50, 60, 70, 220, 9, 9, 9])
    data = bytearray(encoded(image, "GIF", transparency=0, optimize=False))
    at = data.index(b",", data.index(b"\x21\xf9"))  # image descriptor
    data[6:10] = struct.pack("<HH", 12, 9)  # of the screen
    data[at + 1 : at + 5] = struct.pack("<HH", 3, 2)
    pixels = np.full((9, 12, 3), 255, np.uint8)
    pixels[2:7, 3:11:2], pixels[2:7, 4:11:2] = (200, 100, 50), (60, 70, 220)
    return Kind(bytes(data), pixels)


def _frames(kind: str, **options: Any) -> bytes:
    return encoded(
        RGB, kind, save_all=True, append_images=[Image.fromarray(OTHER), Image.fromarray(RGB[::-1])], **options
    )


def _animated_gif() -> Kind:
    first, indices, palette = quantized()
    others = [Image.fromarray(frame).quantize(16) for frame in (OTHER, RGB[::-1])]
    return Kind(encoded(first, "GIF", save_all=True, append_images=others, duration=50), palette[indices])


def from_16_bits(value: NDArray[np.generic]) -> NDArray[np.floating]:
    return grey_rgb(value) / 257  # 16 bits to 8


GOOD: dict[str, Callable[[], Kind]] = {
    # Lossless ones, in 8-bit RGB
    "apng.png": lambda: Kind(_frames("PNG"), RGB),
    "webp_animated.webp": lambda: Kind(_frames("WEBP", lossless=True), RGB),
    "gif_animated.gif": _animated_gif,
    "gif_of_part.gif": _gif_of_part,
    "palette.gif": lambda: Kind(encoded(quantized()[0], "GIF"), quantized()[2][quantized()[1]]),
    "jpeg2000_bare.j2k": lambda: Kind(encoded(RGB, "JPEG2000", no_jp2=True), RGB),
    "tga_packed.tga": lambda: Kind(encoded(RGB, "TGA", compression="tga_rle"), RGB),
    "psd.psd": lambda: Kind(psd(RGB.transpose(2, 0, 1)), RGB),
    "icon.ico": lambda: Kind(encoded(RGB, "ICO", sizes=[(40, 30)]), RGB),
    "icon_bmp.ico": lambda: Kind(encoded(RGB[:, :32], "ICO", sizes=[(32, 30)], bitmap_format="bmp"), RGB[:, :32]),
    "xpm.xpm": _xpm,
    "tiff_lzw.tif": lambda: Kind(encoded(RGB, "TIFF", compression="tiff_lzw"), RGB),
    "tiff_deflate.tif": lambda: Kind(encoded(RGB, "TIFF", compression="tiff_adobe_deflate"), RGB),
    "tiff_packbits.tiff": lambda: Kind(encoded(RGB, "TIFF", compression="packbits"), RGB),
    "tiff_in_planes.tif": lambda: Kind(tiff(RGB.transpose(2, 0, 1), 2, in_planes=True), RGB),
    "tiff_pages.tif": lambda: Kind(_frames("TIFF"), RGB),
    "png_gamma.png": lambda: Kind(
        png(40, 8, 2, [row.tobytes() for row in RGB], chunk(b"gAMA", struct.pack(">I", 100_000))), RGB
    ),
    # Grey
    "grey.png": lambda: Kind(encoded(GREY, "PNG"), grey_rgb(GREY)),
    "grey.pgm": lambda: Kind(encoded(GREY, "PPM"), grey_rgb(GREY)),
    "grey_white_is_zero.tif": lambda: Kind(tiff(255 - GREY, 0), grey_rgb(GREY)),
    "grey16.png": lambda: Kind(deep_png(DEEP, 0), from_16_bits(DEEP), 1),
    "grey16_little.tif": lambda: Kind(tiff(DEEP.astype("<u2"), 1), from_16_bits(DEEP), 1),
    "grey16_big.tif": lambda: Kind(tiff(DEEP.astype(">u2"), 1), from_16_bits(DEEP), 1),
    "grey16.pgm": lambda: Kind(b"P5 40 30 65535\n" + DEEP.astype(">u2").tobytes(), from_16_bits(DEEP), 1),
    "grey10.pgm": lambda: Kind(b"P5 40 30 1023\n" + (DEEP >> 6).astype(">u2").tobytes(), from_16_bits(DEEP), 1),
    "grey16.jp2": lambda: Kind(encoded(DEEP, "JPEG2000"), from_16_bits(DEEP), 1),
    "one_bit_fax.tif": lambda: Kind(encoded(BITS, "TIFF", compression="group4"), grey_rgb(BITS * np.uint8(255))),
    "two_bit.png": lambda: Kind(
        png(4, 2, 0, [b"\x1b"] * 3), np.tile(grey_rgb(np.array([[0, 85, 170, 255]])), (3, 1, 1))
    ),
    # 16-bit RGB
    "rgb16.png": lambda: Kind(deep_png(DEEP_RGB, 2), DEEP_RGB / 257, 1),
    "rgb16_little.tif": lambda: Kind(tiff(DEEP_RGB.astype("<u2"), 2), DEEP_RGB / 257, 1),
    "rgb16_big.tif": lambda: Kind(tiff(DEEP_RGB.astype(">u2"), 2), DEEP_RGB / 257, 1),
    "rgb16.ppm": lambda: Kind(b"P6 40 30 65535\n" + DEEP_RGB.astype(">u2").tobytes(), DEEP_RGB / 257, 1),
    # Transparency
    "rgba.webp": lambda: Kind(encoded(RGBA, "WEBP", lossless=True, exact=True), over_white(RGB, ALPHA), 1),
    "rgba.ico": lambda: Kind(encoded(RGBA, "ICO", sizes=[(40, 30)]), over_white(RGB, ALPHA), 1),
    "rgba_premultiplied.tif": lambda: Kind(tiff(PREMULTIPLIED.astype(np.uint8), 2, extra=1), over_white(RGB, ALPHA), 2),
    "rgbx.tif": lambda: Kind(tiff(RGBA, 2, extra=0), RGB),
    "rgba16.png": lambda: Kind(
        deep_png(np.dstack([DEEP_RGB, DEEP.T.reshape(30, 40)]), 6),
        over_white(DEEP_RGB / 257, DEEP.T.reshape(30, 40) / 257),
        3,
    ),
    "grey_alpha.png": lambda: Kind(encoded(GREY_ALPHA, "PNG"), over_white(grey_rgb(GREY), ALPHA), 1),
    "grey_alpha.tif": lambda: Kind(tiff(GREY_ALPHA, 1, extra=2), over_white(grey_rgb(GREY), ALPHA), 1),
    "palette_alpha.png": lambda: _palette_with_alpha("PNG"),
    "palette_alpha.tga": lambda: _palette_with_alpha("TGA"),
    "palette_clear.gif": _gif_with_transparency,
    "grey_key.png": lambda: Kind(
        png(4, 8, 0, [bytes([0, 100, 200, 255])] * 3, chunk(b"tRNS", struct.pack(">H", 100))),
        np.tile(grey_rgb(np.array([[0, 255, 200, 255]])), (3, 1, 1)),
    ),
    "rgb_key.png": lambda: Kind(
        png(2, 8, 2, [bytes([0, 100, 200, 255, 1, 2])] * 3, chunk(b"tRNS", struct.pack(">HHH", 255, 1, 2))),
        np.tile(np.array([[[0, 100, 200], [255, 255, 255]]]), (3, 1, 1)),
    ),
    "grey16_key.png": lambda: Kind(
        deep_png(np.array([[0, 1000, 30000, 65535]] * 3, np.uint16), 0, chunk(b"tRNS", struct.pack(">H", 1000))),
        np.tile(grey_rgb(np.array([[0, 255, 30000 / 257, 255]])), (3, 1, 1)),
        1,
    ),
    "rgb16_key.png": lambda: Kind(
        deep_png(TWO_COLOURS, 2, chunk(b"tRNS", struct.pack(">HHH", 1000, 2000, 3000))),
        np.array([[[255, 255, 255], TWO_COLOURS[0, 1] / 257]] * 3),
        1,
    ),
    # Inks and other colours
    "cmyk.jpg": lambda: Kind(adobe_jpeg(255 - BLOCK_INKS, 0), of_inks(BLOCK_INKS), 4),
    "ycck.jpg": _ycck,
    "cmyk.tif": lambda: Kind(encoded(_cmyk(BLOCK_INKS), "TIFF"), of_inks(BLOCK_INKS), 1),
    "cmyk16.tif": lambda: Kind(tiff(BLOCK_INKS.astype("<u2") * np.uint16(257), 5), of_inks(BLOCK_INKS), 1),
    "ycbcr.tif": lambda: Kind(tiff(np.rint(ycc(RGB)).clip(0, 255).astype(np.uint8), 6), RGB, 3),
    "lab.tif": _lab,
    # Lossy
    "jpeg_progressive.jpg": lambda: _lossy(encoded(RGB, "JPEG", progressive=True)),
    "jpeg_arithmetic.jpg": lambda: Kind(ARITHMETIC, BLOCKS, 2),
    "jpeg_rgb.jpg": lambda: Kind(encoded(BLOCKS, "JPEG", quality=100, keep_rgb=True), BLOCKS, 2),
    "jpeg_called_png.png": lambda: _lossy(encoded(RGB, "JPEG")),
    "mpo.jpg": _mpo,
    "avif_sequence.avif": lambda: _lossy(_frames("AVIF")),
    "heic.heic": lambda: _lossy(heif(RGB)),
    "heic_lossless.heic": lambda: Kind(heif(RGB, quality=-1, chroma=444, matrix_coefficients=0), RGB),
    "heic_sequence.heic": lambda: _lossy(heif(RGB, save_all=True, append_images=[Image.fromarray(OTHER)])),
    "tiff_jpeg.tif": lambda: _lossy(encoded(RGB, "TIFF", compression="jpeg")),
}
GOOD |= {
    f"rgb.{suffix}": lambda kind=kind: Kind(encoded(RGB, kind), RGB)  # type: ignore[misc]
    for suffix, kind in {
        "png": "PNG", "bmp": "BMP", "dib": "DIB", "ppm": "PPM", "tiff": "TIFF", "jp2": "JPEG2000", "qoi": "QOI",
        "dds": "DDS", "pcx": "PCX", "sgi": "SGI", "tga": "TGA", "png_called.jpg": "PNG",
    }.items()
}  # fmt: skip
GOOD |= {
    f"rgba.{suffix}": lambda kind=kind: Kind(encoded(RGBA, kind), over_white(RGB, ALPHA), 1)  # type: ignore[misc]
    for suffix, kind in {
        "png": "PNG", "tga": "TGA", "tif": "TIFF", "jp2": "JPEG2000", "qoi": "QOI", "dds": "DDS",
    }.items()
}  # fmt: skip
GOOD |= {
    f"one_bit.{suffix}": lambda kind=kind: Kind(encoded(BITS, kind), grey_rgb(BITS * np.uint8(255)))  # type: ignore[misc]
    for suffix, kind in {"png": "PNG", "pbm": "PPM", "bmp": "BMP", "msp": "MSP", "xbm": "XBM"}.items()
}
GOOD |= {
    f"lossy.{suffix}": lambda kind=kind: _lossy(encoded(RGB, kind))  # type: ignore[misc]
    for suffix, kind in {"jpg": "JPEG", "webp": "WEBP", "avif": "AVIF"}.items()
}
# Right, or refused.
PERHAPS: dict[str, Callable[[], Kind]] = {
    "grey16_white_is_zero.tif": lambda: Kind(tiff((65535 - DEEP).astype("<u2"), 0), from_16_bits(DEEP), 1),
    "grey16_white_is_zero_big.tif": lambda: Kind(tiff((65535 - DEEP).astype(">u2"), 0), from_16_bits(DEEP), 1),
    "grey12.tif": lambda: Kind(tiff(_twelve_bits(), 1, bits=12), from_16_bits(DEEP), 1),
    "grey_premultiplied.tif": lambda: Kind(
        tiff(np.array([[[100, 128], [50, 255], [0, 0]]], np.uint8), 1, extra=1),
        grey_rgb(np.array([[100 + 127, 50, 255]])),
        1,
    ),
}


def _twelve_bits() -> Pixels:
    pairs = (DEEP >> 4).reshape(-1, 2)  # 12 bits each; two are three bytes
    packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] << 4 | pairs[:, 1] >> 8) & 255, pairs[:, 1] & 255], axis=1)
    return packed.astype(np.uint8).reshape(30, 60)


def test_every_kind_of_picture_has_the_pixels_it_was_made_from() -> None:
    differences = {}
    for name, make in (GOOD | PERHAPS).items():
        kind = make()
        try:
            picture = decode(kind.data)
        except ValueError:
            assert name in PERHAPS, name
            continue
        assert picture.mode == "RGB", name
        assert picture.size == kind.pixels.shape[1::-1], name
        difference = np.abs(np.asarray(picture).astype(float) - kind.pixels).max()
        if difference > kind.tolerance:
            differences[name] = difference
    assert differences == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["cmyk.jpg", "ycck.jpg", "lossy.jpg", "jpeg_progressive.jpg"])
def test_another_decoder_gives_the_same_pixels(name: str) -> None:
    torchvision_io = pytest.importorskip("torchvision.io")
    if not hasattr(torchvision_io, "decode_image"):
        pytest.skip("this torchvision decodes no images")
    data = GOOD[name]().data
    given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    theirs = torchvision_io.decode_image(given, mode=torchvision_io.ImageReadMode.RGB)
    assert np.abs(np.asarray(decode(data)).astype(int) - theirs.permute(1, 2, 0).numpy()).max() <= 2


# Orientation


@pytest.mark.parametrize(
    ("kind", "options", "rounding"),
    [("WEBP", {"lossless": True}, 0), ("TIFF", {}, 0), ("PNG", {}, 0),
     ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, 4)],
)  # fmt: skip
def test_each_orientation_is_applied_once(kind: str, options: dict[str, Any], rounding: int) -> None:
    for orientation in STORED:
        data = turned(orientation, kind, **options)
        assert np.abs(np.asarray(decode(data)).astype(int) - RGB).max() <= rounding, orientation
        stored = np.asarray(decode(data, DecodeOptions(orientation="ignore"))).astype(int)
        assert np.abs(stored - STORED[orientation](RGB)).max() <= rounding, orientation


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_orientation_is_applied_once_in_jpeg(kind: str) -> None:
    more = {"save_all": True, "append_images": [Image.fromarray(OTHER)]} if kind == "MPO" else {}
    for orientation in STORED:
        data = turned(orientation, kind, **more)
        assert np.array_equal(decode(data), UPRIGHT[orientation](as_stored(data))), orientation
        assert np.array_equal(decode(data, DecodeOptions(orientation="ignore")), as_stored(data)), orientation
        # Upright, not just some way round.
        assert np.abs(np.asarray(decode(data)).astype(int) - RGB).mean() < 12, orientation


def test_heic_is_turned_by_its_own_property_and_not_again_by_exif() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = np.asarray(make_picture(1, 128, 64))  # sides of whole coding blocks: no crop is stored beside it
    plain = heif(stored, quality=100, chroma=444, exif=exif)
    at = plain.index(b"pixi")  # a property nobody needs; `irot` turns to the left (ISO/IEC 23008-12, 6.5.10)
    for quarters in range(4):
        data = plain[:at] + b"irot" + bytes([quarters]) + bytes(7) + plain[at + 12 :]
        assert np.abs(np.asarray(decode(data)).astype(int) - np.rot90(stored, quarters)).max() <= 6, quarters


# Sizes


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_odd_sizes_are_whole(kind: str) -> None:
    for size in ((20000, 10), (10, 20000), (1, 1), (1, 500)):
        data = encoded(make_picture(2, *size), kind)
        picture = decode(data)
        assert picture.size == size
        assert np.array_equal(picture, as_stored(data))


@pytest.mark.parametrize("wrap", [bytes, icon, icns])
def test_a_bomb_is_refused_wherever_it_lies(wrap: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match=r"decompression bomb.*--max-pixels"):
        decode(wrap(BOMB))


@pytest.mark.parametrize(
    "kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "AVIF", "JPEG2000", "ICO", "QOI", "HEIF"]
)
def test_the_limit_of_pixels_is_the_last_number_that_is_let_through(kind: str) -> None:
    picture = make_picture(2, 64, 64)
    data = heif(picture) if kind == "HEIF" else encoded(picture, kind)
    assert decode(data, DecodeOptions(max_pixels=64 * 64)).size == (64, 64)
    with pytest.raises(ValueError, match="decompression bomb"):
        decode(data, DecodeOptions(max_pixels=64 * 64 - 1))


def test_a_higher_limit_lets_a_larger_picture_through_and_leaves_pillow_s_own_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow refuses twice as many
    picture = encoded(Image.new("RGB", (60, 50)), "PNG")
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(picture))
    assert decode(picture, DecodeOptions(max_pixels=3000)).size == (60, 50)
    assert Image.MAX_IMAGE_PIXELS == 1000


# Broken files


# Kinds whose files are cut, zeroed and damaged: the usual ones, all others (in slow tests), and some made for this.
QUICK = {
    "JPEG": "lossy.jpg", "PNG": "rgb.png", "GIF": "palette.gif", "WEBP": "lossy.webp", "TIFF": "rgb.tiff",
    "BMP": "rgb.bmp", "AVIF": "lossy.avif", "HEIC": "heic.heic", "JPEG2000": "rgb.jp2", "PPM": "rgb.ppm",
}  # fmt: skip
OTHERS = {
    "JPEG progressive": "jpeg_progressive.jpg", "JPEG arithmetic": "jpeg_arithmetic.jpg", "JPEG CMYK": "cmyk.jpg",
    "MPO": "mpo.jpg", "PNG with alpha": "rgba.png", "PNG with palette": "palette_alpha.png", "PNG 16-bit": "grey16.png",
    "APNG": "apng.png", "GIF animated": "gif_animated.gif", "WEBP animated": "webp_animated.webp",
    "TIFF LZW": "tiff_lzw.tif", "TIFF deflate": "tiff_deflate.tif", "TIFF JPEG": "tiff_jpeg.tif",
    "TIFF fax": "one_bit_fax.tif", "JPEG2000 bare": "jpeg2000_bare.j2k", "PBM": "one_bit.pbm", "TGA": "rgb.tga",
    "TGA packed": "tga_packed.tga", "ICO BMP": "icon_bmp.ico", "PSD": "psd.psd", "QOI": "rgb.qoi", "DDS": "rgb.dds",
    "PCX": "rgb.pcx", "SGI": "rgb.sgi", "MSP": "one_bit.msp", "XBM": "one_bit.xbm", "XPM": "xpm.xpm",
}  # fmt: skip
TRUNCATED: dict[str, Callable[[], bytes]] = {
    kind: lambda name=name: GOOD[name]().data  # type: ignore[misc]
    for kind, name in (QUICK | OTHERS).items()
}
TRUNCATED |= {
    "JPEG with restarts": lambda: encoded(RGB, "JPEG", restart_marker_rows=1),
    "GIF interlaced": lambda: encoded(quantized()[0], "GIF", interlace=1),
    "WEBP lossless": lambda: encoded(RGB, "WEBP", lossless=True),
    "WEBP with alpha": lambda: encoded(RGBA, "WEBP"),
    "AVIF with alpha": lambda: encoded(RGBA, "AVIF"),
    "HEIC with alpha": lambda: heif(RGBA),
    "JPEG2000 lossy": lambda: encoded(RGB, "JPEG2000", irreversible=True, quality_mode="rates", quality_layers=[20]),
    "JPEG2000 in tiles": lambda: encoded(RGB, "JPEG2000", tile_size=(16, 16)),
    # The last number has one digit: where it had more, a cut within it would leave another whole picture.
    "PPM in digits": lambda: b"P3 40 30 255\n" + b" ".join(b"%d" % value for value in RGB.ravel()[:-1]) + b" 7",
    "ICO": lambda: encoded(RGB, "ICO", sizes=[(40, 30), (20, 15)]),
    "DDS DXT1": lambda: encoded(RGBA, "DDS", pixel_format="DXT1"),
    "BLP": lambda: encoded(quantized()[0], "BLP"),
}
EACH_KIND = pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in TRUNCATED]
)


@EACH_KIND
def test_a_file_cut_at_any_tenth_byte_is_refused_or_whole(kind: str) -> None:
    data = TRUNCATED[kind]()
    whole = np.asarray(decode(data))
    step = 1 if len(data) < 1000 else 10
    refused, others = 0, []
    for length in sorted({*range(0, len(data), step), *range(max(0, len(data) - 30), len(data))}):
        try:
            pixels = np.asarray(decode(data[:length]))
        except ValueError:
            refused += 1
            continue
        if not np.array_equal(pixels, whole):
            others.append(length)
    assert refused
    assert not others, f"{kind} of {len(data)} bytes gives other pixels when cut to {others}"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "BMP", "ICO"])
def test_a_program_that_asks_pillow_for_truncated_files_gets_none(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    picture = make_picture(5, 160, 120)
    data = encoded(picture, "TIFF", compression="tiff_lzw") if kind == "TIFF" else encoded(picture, kind)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ValueError, match="."):
        decode(data[: len(data) * 4 // 5])


@pytest.mark.parametrize("wrap", [bytes, icon, icns])
def test_a_png_that_disagrees_with_its_checksums_is_refused(wrap: Callable[[bytes], bytes]) -> None:
    data = wrap(encoded(make_picture(3, 256, 256), "PNG"))
    whole = np.asarray(decode(data))
    start, others = data.index(b"IDAT") + 6, []
    for position in range(start, len(data) - 24, 997):
        damaged = bytearray(data)
        damaged[position] ^= 1
        try:
            pixels = np.asarray(decode(bytes(damaged)))
        except ValueError:
            continue
        if not np.array_equal(pixels, whole):
            others.append(position)
    assert not others, f"a bit changed at {others} gives other pixels"


@EACH_KIND
def test_damage_raises_nothing_but_value_errors(kind: str) -> None:
    data = TRUNCATED[kind]()
    random = np.random.default_rng(0)
    reasons, modes = [], set()
    for _ in range(60):
        damaged = bytearray(data)
        for position in random.integers(0, min(len(data), 300), 3):
            damaged[position] = random.integers(256)
        try:
            modes.add(decode(bytes(damaged), DecodeOptions(max_pixels=100_000)).mode)
        except ValueError as error:
            reasons.append(str(error))
    assert [reason for reason in reasons if not reason or re.search("decoder error|\n|  ", reason)] == []
    assert modes <= {"RGB"}


SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>'
HTML = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body>P6 GIF89a</body></html>\n"

# What is no picture, or none of a known range, and what is said of it.
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty.jpg": (lambda: b"", "empty file"),
    "zeros.jpg": (lambda: bytes(4096), "not an image in a known format"),
    "text.jpg": (lambda: b"Buy milk.\nImage type: none\n" * 40, "not an image in a known format"),
    "page.png": (lambda: HTML, "not an image in a known format"),
    "drawing.png": (lambda: SVG, "not an image in a known format"),
    "postscript.jpg": (lambda: encoded(RGB, "EPS"), "not an image in a known format"),
    "document.jpg": (lambda: encoded(RGB, "PDF"), "not an image in a known format"),
    "float.tif": (lambda: encoded(RGB[..., 0].astype(np.float32), "TIFF"), "no known range"),
    "double.tif": (lambda: tiff(np.ones((2, 2)), 1, sample_format=3), "not an image in a known format"),
    "int32.tif": (lambda: encoded(RGB[..., 0].astype(np.int32), "TIFF"), "no known range"),
    "uint32.tif": (lambda: tiff(np.ones((2, 2), "<u4"), 1), "no known range"),
    "float.pfm.ppm": (lambda: b"Pf 2 2 -1.0\n" + np.ones(4, "<f4").tobytes(), "no known range"),
    "no_pixels.png": (lambda: png(1, 8, 0, []), "."),
    "bomb.png": (lambda: BOMB, "decompression bomb"),
}


def _half(kind: str) -> bytes:
    data = TRUNCATED[kind]()
    return data[: len(data) // 2]


HALVES = dict.fromkeys(["JPEG", "JPEG progressive", "PNG", "GIF", "BMP", "PPM", "TGA"], "(?i)truncated")
HALVES |= dict.fromkeys(["WEBP", "TIFF", "AVIF", "HEIC", "JPEG2000", "PSD", "QOI", "DDS", "ICO"], ".")
REFUSED |= {f"half {kind}.jpg": (partial(_half, kind), reason) for kind, reason in HALVES.items()}


def test_what_is_no_whole_picture_is_refused_with_a_reason() -> None:
    told = {}
    for name, (make, _) in REFUSED.items():
        try:
            decode(make())
        except ValueError as error:
            told[name] = str(error)
    assert [name for name, (_, reason) in REFUSED.items() if not re.search(reason, told.get(name, ""))] == []


def test_a_cut_heic_or_avif_file_is_not_said_to_need_another_library() -> None:
    for kind in ("HEIC", "AVIF"):
        data = TRUNCATED[kind]()
        for length in range(24, len(data), 20):
            with pytest.raises(ValueError, match=r"^(?!.*(needs another library|needs a Pillow))"):
                decode(data[:length])


# Kinds that Pillow opens without a word about what their numbers mean


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_of_few_bits_with_a_transparent_value_is_laid_over_white(bits: int) -> None:
    row = {1: b"\x50", 2: b"\x11", 4: b"\x01\x01"}[bits]  # 0, 1, 0, 1
    for clear in (0, 1):
        pixels = np.asarray(decode(png(4, bits, 0, [row] * 3, chunk(b"tRNS", struct.pack(">H", clear)))))
        values = [0, 255 // (2**bits - 1)] * 2
        assert pixels[0, :, 0].tolist() == [255 if i % 2 == clear else value for i, value in enumerate(values)]


def test_signed_samples_are_refused() -> None:
    for dtype in ("i1", "<i2", "<i4"):
        samples = np.linspace(-100, 100, 16).astype(dtype).reshape(4, 4)
        with pytest.raises(ValueError, match="no known range|not an image"):
            decode(tiff(samples, 1, sample_format=2))


# Reasons in words, on one line


def of_compression(number: int) -> bytes:
    """A TIFF whose tag says that its strip has another compression."""
    data = tiff_with_its_tags_first(make_picture(3, 160, 120), "tiff_lzw")
    at = data.index(struct.pack("<HHI", 259, 4, 1)) + 8
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (50001, "^libtiff cannot decode it: it is damaged, or this build of Pillow lacks its compression .webp.$"),
        (34661, "compression unknown to Pillow|build of Pillow lacks its compression"),  # JBIG
        (34887, "compression unknown to Pillow|build of Pillow lacks its compression"),  # LERC
        (34712, "a TIFF that is damaged, or of pixels or a compression unknown to Pillow"),  # JPEG 2000
    ],
)
def test_a_tiff_of_a_codec_that_is_not_built_has_a_reason_in_words(number: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(of_compression(number))


def test_a_tiff_for_which_the_memory_is_short_is_no_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(RGB, "TIFF", compression="tiff_lzw")
    monkeypatch.setattr("PIL.TiffImagePlugin.TiffImageFile.load", Mock(side_effect=OSError("decoder error -9")))
    with pytest.raises(MemoryError):
        decode(data)


def test_a_reason_of_several_lines_becomes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = RuntimeError("Decoder plugin generated an error:\n  Unspecified\n")
    monkeypatch.setattr("PIL.BmpImagePlugin.BmpImageFile.load", Mock(side_effect=lines))
    with pytest.raises(ValueError, match="^Decoder plugin generated an error: Unspecified$"):
        decode(encoded(RGB, "BMP"))


# Many of them in one run


def test_a_run_over_many_of_them_ends_with_the_right_counts_and_features(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    kinds = {name: make() for i, (name, make) in enumerate(GOOD.items()) if i % 4 == 0 or name.endswith(".jpg")}
    kinds |= {f"turned_{i}.jpg": Kind(turned(i, "JPEG"), UPRIGHT[i](as_stored(turned(i, "JPEG")))) for i in STORED}
    kinds["wide.png"] = Kind(encoded(make_picture(2, 6000, 10), "PNG"), np.asarray(make_picture(2, 6000, 10)))
    for name, kind in kinds.items():
        (folder / name).write_bytes(kind.data)
    for name, (make, _) in REFUSED.items():
        (folder / name).write_bytes(make())
    (folder / "round.jpg").symlink_to(folder / "round.jpg")
    (folder / "gone.jpg").symlink_to(tmp_path / "nothing.jpg")
    (folder / "folder.jpg").mkdir()
    for litter in (".DS_Store", "Thumbs.db", "._a.jpg", "__MACOSX/x.jpg", "@eaDir/x.jpg"):
        (folder / litter).parent.mkdir(exist_ok=True)
        (folder / litter).write_bytes(kinds["lossy.jpg"].data)

    broken = {*REFUSED, "round.jpg", "gone.jpg"}
    with extract_features(folder, out=tmp_path / "out", **TINY | {"workers": 2}) as reader:
        assert sorted(reader.paths) == sorted({*kinds, *broken})
        count = {status: int((reader.status == status).sum()) for status in Status}
        assert count == {
            Status.PENDING: 0, Status.OK: len(kinds), Status.DECODE_ERROR: len(REFUSED) + 1, Status.NOT_FINITE: 0,
            Status.MISSING: 1, Status.IO_ERROR: 0,
        }  # fmt: skip
        failures = {path: (status, reason) for _, path, status, reason in reader.failures}
        good = [row for row, path in enumerate(reader.paths) if path in kinds]
        features, names = reader["embedding"][good], [reader.paths[row] for row in good]
        assert np.isnan(reader["embedding"][[row for row in range(len(reader)) if row not in good]]).all()
    with extract_features([decode(kinds[name].data) for name in names], out=tmp_path / "again", **TINY) as reader:
        expected = reader["embedding"][:]
    assert np.isfinite(features).all()
    difference = np.abs(features - expected).max(axis=1) / np.abs(expected).max()
    assert {name: share for name, share in zip(names, difference, strict=True) if share > 1e-4} == {}
    assert np.abs(expected - expected[0]).max() > 1e-2 * np.abs(expected).max()  # features tell pictures apart
    assert set(failures) == broken
    assert failures.pop("gone.jpg") == ("missing", "no such file")
    assert failures.pop("round.jpg") == ("decode error", "Too many levels of symbolic links")
    for path, (status, reason) in failures.items():
        assert status == "decode error"
        assert re.search(REFUSED[path][1], reason), path
