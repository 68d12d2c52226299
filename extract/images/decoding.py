"""Decode the bytes of an image file to an upright RGB picture, whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from extract import defaults

__all__ = ["IMAGE_SUFFIXES", "decode", "to_picture"]

# What Pillow reads, but for formats that other programs must draw (EPS, PDF, WMF, EMF), measurements that are no
# pictures (FITS, GRIB, BUFR, HDF5), and films (MPEG).
IMAGE_SUFFIXES = frozenset({
    ".apng", ".avif", ".avifs", ".blp", ".bmp", ".bw", ".cur", ".dcx", ".dds", ".dib", ".flc", ".fli", ".ftc", ".ftu",
    ".gif", ".heic", ".heics", ".heif", ".heifs", ".hif", ".icb", ".icns", ".ico", ".im", ".j2c", ".j2k", ".jfif",
    ".jp2", ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".msp", ".pbm", ".pcx", ".pgm", ".png", ".pnm",
    ".ppm", ".psd", ".pxr", ".qoi", ".ras", ".rgb", ".rgba", ".sgi", ".tga", ".tif", ".tiff", ".vda", ".vst", ".webp",
    ".xbm", ".xpm",
})  # fmt: skip
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})  # ISO/IEC 23008-12
_BACKGROUND = (255, 255, 255)  # what transparent pixels are laid over


def decode(data: bytes, max_pixels: int = defaults.MAX_PIXELS) -> Image.Image:
    """Decode the bytes of an image file to an upright RGB picture.

    The EXIF orientation is applied. Transparent pixels are laid over white. 16-bit grey is scaled to 8 bits. Of an
    animation, the first frame counts. Colour profiles (ICC) are not applied.

    Args:
        data: of the file.
        max_pixels: a picture of more is taken for a decompression bomb.

    Raises:
        ValueError: not an image, truncated, damaged, of a kind without a known range (float pixels), or too large.
    """
    if not data:
        raise ValueError("empty file")
    try:
        with warnings.catch_warnings(), _limit_of_pillow(max_pixels):
            warnings.simplefilter("ignore")  # of odd metadata, and of images that are merely large
            with Image.open(io.BytesIO(data), formats=_formats()) as image:
                image.load()  # the whole picture: a truncated file fails here
                return to_picture(image)
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error} --max-pixels sets the limit") from None
    except UnidentifiedImageError:
        raise ValueError(_unknown(data)) from None
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files: SyntaxError, struct.error
        raise ValueError(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def _limit_of_pillow(max_pixels: int) -> Iterator[None]:
    """Pillow checks it for each picture inside a file, too, as in icons; it is an error from twice its setting on."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels / 2  # type: ignore[assignment]
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _unknown(data: bytes) -> str:
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        return "HEIC needs another library: pip install 'layertap[heic]'"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"):
        return "AVIF needs a Pillow that was built with it, as those on PyPI are"
    return "not an image in a known format"


def to_picture(image: Image.Image) -> Image.Image:
    """An upright RGB picture, by the rules of `decode`.

    Raises:
        ValueError: of a kind without a known range (float pixels).
    """
    return _to_rgb(_upright(image))


@functools.cache
def _formats() -> list[str]:
    """Pillow's names of the formats in `IMAGE_SUFFIXES` that it was built with.

    No others: a file that calls itself .jpg must not reach, say, the EPS plugin, which runs a PostScript interpreter.
    """
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    known = Image.registered_extensions()
    return sorted({known[suffix] for suffix in IMAGE_SUFFIXES if known.get(suffix) in Image.OPEN})


def _upright(image: Image.Image) -> Image.Image:
    """The picture as its EXIF orientation asks for it; metadata that cannot be read ask for nothing."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except Exception:  # Pillow raises nearly everything on damaged metadata; the pixels are whole
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")  # 16-bit grey
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no known range; convert the file to 8 or 16 bits")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        background = Image.new("RGBA", layer.size, (*_BACKGROUND, 255))
        return Image.alpha_composite(background, layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
