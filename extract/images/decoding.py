"""Decode the bytes of an image file to an upright RGB picture, completely or not at all."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError, features

from extract import defaults
from extract.errors import MachineError, first_line, is_of_the_machine
from extract.system.optional_libraries import pip_install

__all__ = [
    "ARRAY_SUFFIX", "AS_DEFAULT", "IMAGE_SUFFIXES", "NOTE", "SLIDES", "SLIDE_SUFFIXES", "VIDEO_SUFFIXES",
    "DecodeOptions", "Jpeg", "PixelTypeError", "check_decoders", "check_whole", "conversion", "decode", "from_pixels",
    "header_size", "pixels_of", "plain_jpeg", "to_picture", "too_dark",
]  # fmt: skip

# Formats that Pillow reads, except those that other programs must render (EPS, PDF, WMF, EMF), measurement data (FITS,
# GRIB, BUFR, HDF5), and video (MPEG).
IMAGE_SUFFIXES = frozenset({
    ".apng", ".avif", ".avifs", ".blp", ".bmp", ".bw", ".cur", ".dcx", ".dds", ".dib", ".flc", ".fli", ".ftc", ".ftu",
    ".gif", ".heic", ".heics", ".heif", ".heifs", ".hif", ".icb", ".icns", ".ico", ".im", ".j2c", ".j2k", ".jfif",
    ".jp2", ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".msp", ".pbm", ".pcx", ".pgm", ".png", ".pnm",
    ".ppm", ".psd", ".pxr", ".qoi", ".ras", ".rgb", ".rgba", ".sgi", ".tga", ".tif", ".tiff", ".vda", ".vst", ".webp",
    ".xbm", ".xpm",
})  # fmt: skip
# Files that are images if parts of them are asked for: slides that OpenSlide reads, with BigTIFF, and videos.
SLIDES = frozenset({".bif", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".vms", ".vmu"})
SLIDE_SUFFIXES = SLIDES | {".btf", ".tf2", ".tf8"}
VIDEO_SUFFIXES = frozenset({
    ".3g2", ".3gp", ".asf", ".avi", ".f4v", ".flv", ".m2ts", ".m2v", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg",
    ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv",
})  # fmt: skip
ARRAY_SUFFIX = ".npy"  # of a picture in an array, in a folder without other images
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})  # ISO/IEC 23008-12
_BACKGROUND = (255, 255, 255)  # colour behind transparent pixels
_PNG = b"\x89PNG\r\n\x1a\n"
_END_OF_JPEG = b"\xff\xd9"
_START_OF_JPEG = b"\xff\xd8\xff"
# Larger files, and pictures with more pixels or longer ones, are left to Pillow: files of some batches wait in memory,
# and decoded and resized, such pictures would take GB on a GPU.
_MOST_BYTES_ON_DEVICE = 4 << 20
_MOST_PIXELS_ON_DEVICE = 50_000_000
_MOST_ASPECT_ON_DEVICE = 20
_RGB_COMPONENTS = {b"RGB", b"rgb"}  # their ids in a JPEG file that does not hold YCbCr
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # TIFF 6.0 tags
_WHITE_IS_ZERO = 0  # a value of _PHOTOMETRIC
_NO_MEMORY = "decoder error -9"  # PIL.ImageFile.ERRORS
_TWELVE_BITS = 1 << 12
_DEEP, _TOO_DARK = "layertap_16_bits", "layertap_too_dark"  # keys of `Image.info`
NOTE = "layertap_note"  # another one: what the user should know of a picture
_ON_THEIR_SIDE = range(5, 9)  # EXIF orientations
_ARRAY_HEADER_BYTES = 1000  # the header is parsed as Python: deep brackets in a longer one exhaust its parser
_MOST_STATED_PIXELS = 1 << 40  # of a picture whose header alone is read
# EXIF orientation -> what gives the stored pixels of a picture that was turned upright.
_AS_STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}  # fmt: skip

# For photographs (ICC.1:2022, 0.4), and the only intent of many profiles. Profiles that are a matrix and curves, as
# those of cameras and screens, give the same pixels with each intent.
_INTENT = ImageCms.Intent.PERCEPTUAL
_SPACES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK", "Lab": "LAB"}  # colour space of a profile -> mode of Pillow
_CACHED_TRANSFORMS = 16  # transforms, of up to a few MB; the pictures of a camera have one profile
_QOI_END = bytes(7) + b"\1"  # specification of QOI, "End marker"

# JPEG (ISO/IEC 10918-1, B.1.1): a marker is FF, any number of further FF, and a code. In a scan, FF is followed by 0
# or by the code of a restart marker. Codes without a segment behind them: TEM, RST0 to RST7, SOI.
_MARKER = re.compile(rb"\xff+([\x01-\xfe])")
_SCAN_END = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = 0xD9

# JPEG 2000 (ISO/IEC 15444-1, A.4): SOC with SIZ behind it, and the end, which compressed data cannot contain. OpenJPEG
# refuses most files that are cut, but it decodes a tile-part that lacks a few of its bytes.
_CODESTREAM = b"\xff\x4f\xff\x51"
_END_OF_CODESTREAM = b"\xff\xd9"

# Compressed data that end in so many zeros are not complete. No encoder that was tried ends its data in zeros, but
# lossy WebP and optimised JPEG do for flat areas. A sound JPEG ends in its marker.
_ZEROS = 16
_COMPRESSED = ("AVIF", "HEIF", "WEBP")
_COMPRESSION = 259  # TIFF 6.0 tag
_JPEG_TABLES = 347  # TIFF Technical Note 2: from SOI to EOI; libtiff writes them behind the strips
_LEAST_ZEROS_IN_TIFF = {7: 2, 8: _ZEROS, 32946: _ZEROS}  # JPEG, which ends in its marker; Deflate, with two numbers


class PixelTypeError(ValueError):
    """An array has pixels of another type than uint8; `what` says which, and `remedy` what to do."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


class DecodeOptions(NamedTuple):
    """How a file is decoded.

    Attributes:
        max_pixels: a larger picture is refused as a decompression bomb.
        min_decode_px: a JPEG may be decoded at a half, a quarter or an eighth of its size if its shorter side keeps at
            least this many pixels; 0: at full size.
        orientation: "exif": apply the EXIF orientation; "ignore": leave the pixels as stored. The rotation of HEIC is
            not EXIF's, and always applied.
        icc: "ignore": take all pixels for sRGB; "srgb": convert pixels with an embedded colour profile (ICC) to sRGB,
            with the perceptual intent.
    """

    max_pixels: int = defaults.MAX_PIXELS
    min_decode_px: int = 0
    orientation: str = defaults.ORIENTATION
    icc: str = defaults.ICC


AS_DEFAULT = DecodeOptions()


def decode(data: bytes, options: DecodeOptions = AS_DEFAULT) -> Image.Image:
    """Decode the bytes of an image file to an RGB picture.

    Transparent pixels are composited over white. 16-bit pixels are reduced to their upper 8 bits; `too_dark` tells if
    they look like 12-bit pixels. Of an animation, the first frame is decoded. An `.npy` file is an image, too: uint8
    pixels (H, W, 3), (3, H, W) or (H, W).

    Args:
        data: content of the file.
        options: see `DecodeOptions`.

    Raises:
        PixelTypeError: the pixels of an array are not uint8.
        ValueError: the file is not an image, truncated, too large, of pixels without a known range (float, 32-bit or
            signed), or damaged, as far as its format has checks: PNG has checksums, JPEG has none; or `icc` is "srgb"
            and its colour profile is damaged.
        MachineError: a decoder library is installed but cannot be loaded.
        MemoryError, ImportError, OSError: this machine cannot decode the file (`is_of_the_machine`).
    """
    if not data:
        raise ValueError("empty file")
    _formats()  # outside the try: its errors are not the file's
    try:
        if data.startswith(np.lib.format.MAGIC_PREFIX):
            return _from_array(data, options.max_pixels)
        with opened(data, options.max_pixels) as image:
            if image.format != "JPEG" or not data.endswith(_END_OF_JPEG):  # which nearly all files are
                check_whole(data, image)
            if options.min_decode_px and image.format == "JPEG":
                shrunk = options.min_decode_px / min(image.size)  # by the inverse DCT
                image.draft(None, (math.ceil(image.width * shrunk), math.ceil(image.height * shrunk)))
            stored = _orientation_of_tiff(image)
            # torchvision's decoder of JPEG on a CPU gave the same pixels in 920 of 920 files (all subsamplings,
            # progressive, grey, CMYK, restart markers), in 0.74 to 0.93 of the time. But the resize that libraries
            # use takes a picture of Pillow: with the conversion it took 0.93 to 1.10 of the time.
            image.load()  # reads all pixels: a truncated file fails here
            _mend_transparency(image, data)
            picture = to_picture(image, options.orientation, options.icc)
            return picture if options.orientation == "exif" else _turned_back(picture, stored)
    except (MemoryError, PixelTypeError):
        raise
    except Image.DecompressionBombError as error:
        size = re.search(r"\d+", str(error))
        count = f"{int(size[0]):,} pixels, " if size else ""
        raise ValueError(
            f"{count}more than {options.max_pixels:,}: a decompression bomb? --max-pixels sets the limit"
        ) from None
    except UnidentifiedImageError:
        raise ValueError(_unknown(data)) from None
    except Exception as error:  # Pillow's decoders raise many types on damaged files: SyntaxError, struct.error
        if is_of_the_machine(error):
            raise
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error  # some have several lines


def _from_array(data: bytes, max_pixels: int) -> Image.Image:
    """Return the picture in the bytes of an `.npy` file; objects in it are never unpickled."""
    file = io.BytesIO(data)
    is_short = np.lib.format.read_magic(file) == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if is_short else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read_header(file, _ARRAY_HEADER_BYTES)
    is_last = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    is_first = len(shape) == 3 and shape[0] in (1, 3) and not is_last
    if dtype.kind not in "fiu" or 0 in shape or not (is_first or is_last):
        raise ValueError(f"an array of {dtype} {shape}; expected uint8 (H, W, 3), (3, H, W) or (H, W)")
    if len(data) != file.tell() + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"truncated: its array of {dtype} {shape} has another number of bytes")
    pixels = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if by_columns else "C")
    if dtype != np.uint8:
        remedy = conversion("np.load(path)", "np.save(path, {})", float(pixels.min()), float(pixels.max()))
        raise PixelTypeError(f"an array of {dtype} {shape}; expected uint8", remedy)
    return from_pixels(pixels.transpose(1, 2, 0) if is_first else pixels, max_pixels)


def conversion(array: str, save: str, low: float, high: float) -> str:
    """Return the Python that converts pixels to uint8, if they are in 0..1 or 0..255, otherwise what to do.

    Args:
        array: expression for the pixels.
        save: statement that stores {}.
        low: smallest pixel.
        high: largest pixel.
    """
    if not (low >= 0 and high <= 255):  # also NaN
        return f"its values are {low:.4g} to {high:.4g}: store the pictures as they were before they were normalised"
    scaled = f"({array} * 255)" if high <= 1 else array
    return save.replace("{}", f"{scaled}.round().astype('uint8')")


def from_pixels(pixels: NDArray[np.uint8], max_pixels: int) -> Image.Image:
    """Return an RGB picture of pixels (H, W) or (H, W, C); raises ValueError if it is larger than `max_pixels`."""
    height, width = pixels.shape[:2]
    if height * width > max_pixels:
        raise ValueError(f"{width}x{height} pixels; --max-pixels sets the limit")
    return to_picture(Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels)))


class Jpeg(NamedTuple):
    """A JPEG file that is to be decoded on a device.

    Attributes:
        data: content of the file.
        size: (height, width) as stored.
        orientation: EXIF orientation to apply, 1 to 8.
    """

    data: bytes
    size: tuple[int, int]
    orientation: int


def plain_jpeg(data: bytes, options: DecodeOptions = AS_DEFAULT) -> Jpeg | None:
    """Return a file that `decode` and a device's decoder give the same picture of; None for all others.

    These are complete JPEG files of 8 bits, grey or YCbCr, of at most 50 megapixels and 4 MiB, without a profile to
    convert. For the arguments, see `decode`, which says what is wrong with a file.
    """
    is_whole = data.startswith(_START_OF_JPEG) and data.endswith(_END_OF_JPEG)
    if not is_whole or len(data) > _MOST_BYTES_ON_DEVICE:
        return None
    try:
        with opened(data, options.max_pixels) as image:
            is_converted = options.icc == "srgb" and "icc_profile" in image.info
            if image.format != "JPEG" or image.mode not in ("L", "RGB") or is_converted:
                return None
            layers: Any = getattr(image, "layer", ())
            is_rgb = image.info.get("adobe_transform") == 0 or bytes(layer[0] for layer in layers) in _RGB_COMPONENTS
            if getattr(image, "bits", 0) != 8 or len(layers) != len(image.mode) or (is_rgb and image.mode == "RGB"):
                return None
            shorter, longer = sorted(image.size)
            if shorter * longer > _MOST_PIXELS_ON_DEVICE or longer > _MOST_ASPECT_ON_DEVICE * shorter:
                return None
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) if options.orientation == "exif" else 1
            return Jpeg(data, image.size[::-1], turned if turned in range(2, 9) else 1)
    except Exception:  # see `decode`
        return None


def header_size(data: bytes | BinaryIO, orientation: str = defaults.ORIENTATION) -> tuple[int, int] | None:
    """Return (width, height) of a picture as `decode` would give it, from the file's header; None if unreadable.

    Args:
        data: content of the file, or the open file, of which only the header is read.
        orientation: see `decode`.
    """
    try:
        with opened(data, _MOST_STATED_PIXELS) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _ON_THEIR_SIDE
            is_upright = image.format == "TIFF"  # Pillow states its size after turning it
            return image.size[::-1] if turned and is_upright != (orientation == "exif") else image.size
    except Exception:  # see `decode`
        return None


def pixels_of(data: bytes) -> int:
    """Return the number of pixels stated in a file's header; 0 if unreadable."""
    width, height = header_size(data) or (0, 0)
    return width * height


@contextlib.contextmanager
def opened(data: bytes | BinaryIO, max_pixels: int) -> Iterator[Image.Image]:
    """Context manager: open an image file with Pillow, whose process-wide settings are those of layertap inside.

    Args:
        data: content of the file, or the open file.
        max_pixels: limit for each picture in the file, as in icons.

    Raises:
        ValueError: libtiff cannot decode the file. Pillow says "decoder error -2" of all such faults.
    """
    # Set for each file: many training scripts set LOAD_TRUNCATED_IMAGES, and another limit of pixels may be set. Pillow
    # raises an error above twice MAX_IMAGE_PIXELS, and warns above it.
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = max_pixels / 2, False  # type: ignore[assignment]
    image = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, and pictures of over half of max_pixels
            file = io.BytesIO(data) if isinstance(data, bytes) else data
            with Image.open(file, formats=_formats()) as image:
                yield image
    except OSError as error:
        if image is None or image.format != "TIFF" or not str(error).startswith("decoder error"):
            raise
        if str(error) == _NO_MEMORY:
            raise MemoryError from error
        compression = image.info.get("compression", "unknown")
        raise ValueError(
            f"libtiff cannot decode it: it is damaged, or this build of Pillow lacks its compression ({compression})"
        ) from error
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def _mend_transparency(image: Image.Image, data: bytes) -> None:
    """Scale a PNG's transparent colour to 8 bits: Pillow scales the pixels, but not this colour. Note 16-bit pixels."""
    key = image.info.get("transparency")
    if image.format != "PNG" or not data.startswith(_PNG):
        return
    bits = data[24]
    image.info[_DEEP] = bits == 16
    if image.mode == "L" and isinstance(key, int) and bits < 8:
        image.info["transparency"] = key * 255 // ((1 << bits) - 1)
    elif image.mode == "RGB" and isinstance(key, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _unknown(data: bytes) -> str:
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        return "damaged or truncated HEIC" if _has_heif() else f"HEIC needs another library: {pip_install('heic')}"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"):
        return "damaged or truncated AVIF" if features.check("avif") else "AVIF needs a Pillow build that supports it"
    if data[:4] in (b"II*\0", b"MM\0*"):
        return "not an image in a known format: a TIFF that is damaged, or of pixels or a compression unknown to Pillow"
    return "not an image in a known format"


def to_picture(image: Image.Image, orientation: str = defaults.ORIENTATION, icc: str = defaults.ICC) -> Image.Image:
    """Convert to an RGB picture, by the rules of `decode`.

    Pillow turns a TIFF picture when it loads it, so `orientation` has no effect on one that is loaded.

    Raises:
        ValueError: pixels without a known range (float, 32-bit or signed), or a damaged colour profile.
    """
    return _to_rgb(_upright(image) if orientation == "exif" else image, icc)


def too_dark(picture: Image.Image) -> bool:
    """Whether a decoded picture has 16-bit pixels below 4,096 only, as 12-bit pixels have that were not scaled."""
    return bool(picture.info.get(_TOO_DARK))


def check_decoders() -> None:
    """Load and test the decoders before the first image, so that later errors can be attributed to images.

    Raises:
        MachineError: a decoder cannot be loaded, or does not decode a picture written by Pillow.
    """
    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        try:
            Image.new("RGB", (16, 16)).save(file, kind)
            decode(file.getvalue())
        except MachineError:
            raise
        except Exception as error:
            raise MachineError(f"Pillow cannot decode {kind} on this machine: {first_line(error)}") from error


@functools.cache
def _has_heif() -> bool:
    """Return whether HEIC can be decoded; the library is optional.

    Raises:
        MachineError: the library is installed but cannot be loaded.
    """
    try:
        if importlib.util.find_spec("pillow_heif") is None:
            return False
        import pillow_heif

        pillow_heif.register_heif_opener()
    except Exception as error:  # a shared library is missing, or there is not enough memory to map it
        raise MachineError(
            f"pillow_heif, which decodes HEIC, is installed but cannot be loaded: {type(error).__name__}: "
            f"{first_line(error)}",
            hint="fix it, or remove it (pip uninstall pillow-heif) if there are no HEIC images",
        ) from error
    return True


@functools.cache
def _formats() -> list[str]:
    """Return Pillow's names of the formats in `IMAGE_SUFFIXES` that it was built with.

    Other formats are excluded: a file named .jpg must not reach the EPS plugin, which runs a PostScript interpreter.
    """
    _has_heif()
    known = Image.registered_extensions()
    return sorted({known[suffix] for suffix in IMAGE_SUFFIXES if known.get(suffix) in Image.OPEN})


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; ignore unreadable metadata."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except Exception:  # Pillow raises many types on damaged metadata; the pixels are intact
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _orientation_of_tiff(image: Image.Image) -> int:
    """Return the orientation of a TIFF picture, which Pillow turns when it loads it; 1 for other formats."""
    return int(getattr(image, "tag_v2", {}).get(ExifTags.Base.Orientation, 1)) if image.format == "TIFF" else 1


def _turned_back(picture: Image.Image, orientation: int) -> Image.Image:
    return picture.transpose(_AS_STORED[orientation]) if orientation in _AS_STORED else picture


def _to_rgb(image: Image.Image, icc: str) -> Image.Image:
    tags = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    profile = image.info.get("icc_profile") if icc == "srgb" else None
    if 2 in _as_tuple(tags.get(_SAMPLE_FORMAT, 1)):
        raise ValueError("signed pixels have no known range; convert the file to unsigned pixels")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _from_16_bits(image, tags, profile)
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no known range; convert the file to 8 or 16 bits")
    if image.mode == "La":  # grey with premultiplied alpha
        image = image.convert("LA")
    converted = _to_srgb(image, profile) if profile else image
    if converted.has_transparency_data:
        layer = converted.convert("RGBA")
        background = Image.new("RGBA", layer.size, (*_BACKGROUND, 255))
        converted = Image.alpha_composite(background, layer)
    picture = converted if converted.mode == "RGB" else converted.convert("RGB")
    if image.info.pop(_DEEP, False) or 16 in _as_tuple(tags.get(_BITS, 8)):  # Pillow gives the upper 8 bits
        brightest = max(high for _, high in picture.getextrema())  # type: ignore[misc]
        picture.info[_TOO_DARK] = 0 < brightest < _TWELVE_BITS >> 8
    return picture


def _from_16_bits(image: Image.Image, tags: Any, profile: bytes | None) -> Image.Image:
    """Return the RGB picture of a grey 16-bit picture, or of a TIFF of 9 to 15 bits."""
    deep = np.asarray(image).astype(np.int64) << 16 - min(16, _as_tuple(tags.get(_BITS, 16))[0])
    white_is_zero = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    grey = 255 - (deep >> 8) if white_is_zero else deep >> 8
    shades = Image.fromarray(grey.astype(np.uint8))
    picture = _to_srgb(shades, profile) if profile else shades.convert("RGB")
    if isinstance(key := image.info.get("transparency"), int):
        picture.paste(_BACKGROUND, mask=Image.fromarray(deep == key))
    picture.info[_TOO_DARK] = not white_is_zero and 0 < int(deep.max(initial=0)) < _TWELVE_BITS
    return picture


def _as_tuple(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _to_srgb(image: Image.Image, icc: bytes) -> Image.Image:
    """Return a picture in sRGB, of mode RGB, or RGBA if the picture has transparency.

    A damaged profile is an error: pixels of another colour space among the rest are not what the user asked for.

    Args:
        image: 8-bit picture.
        icc: its colour profile.

    Raises:
        ValueError: the profile is damaged, or is not one for the pixels.
    """
    try:
        mode = _SPACES.get(_profile(icc).profile.xcolor_space.strip(), "")
        own = image.mode if image.mode in ("CMYK", "LAB") else "RGB"
        grey = image.mode in ("1", "L", "LA", "La")
        if mode != own and not (mode == "L" and grey):
            raise ValueError(f"it is for {mode or 'other'} pixels, and these are {image.mode}")
        alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
        converted = _transform(icc, mode).apply(image if image.mode == mode else image.convert(mode))
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        raise ValueError(
            f"its colour profile (ICC) cannot be used: {error}; --icc ignore decodes it without"
        ) from error
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


@functools.lru_cache(_CACHED_TRANSFORMS)
def _profile(icc: bytes) -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(io.BytesIO(icc))


@functools.lru_cache(_CACHED_TRANSFORMS)
def _transform(icc: bytes, mode: str) -> ImageCms.ImageCmsTransform:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    return ImageCms.buildTransform(_profile(icc), srgb, mode, "RGB", renderingIntent=_INTENT)


def check_whole(data: bytes, image: Image.Image) -> None:
    """Check what decoders do not: that a file with checksums or an end mark is whole, and does not end in zeros.

    A crash of a file system, or a download into a preallocated file, leaves a file of the right size whose tail is
    zeros. Many decoders take zeros for pixels: Pillow decoded 548 of 5,000 such JPEG files of 18 encoders, and 83 %
    (HEIC) to 100 % (WebP) of others. So a JPEG needs its end marker: of complete files that lack it, Pillow decodes one
    in sixteen, and all if other bytes follow, but also many that are cut. In other formats the tail is replaced by
    another byte, and the file is refused if its pixels change. A hole before an intact end is not looked for: optimised
    JPEG of flat areas has up to 375 KB of zeros. In formats without compression (BMP, PPM, TGA, most TIFF) zeros are
    black areas. Pillow refuses TIFF with LZW or PackBits itself.

    Args:
        data: content of the file.
        image: the file as opened by Pillow; it is not loaded here.

    Raises:
        ValueError: the file is damaged or truncated.
    """
    kind = image.format
    if kind in ("PNG", "ICO", "ICNS"):
        start = data.find(_PNG)
        while start >= 0:
            start = data.find(_PNG, _end_of_png(data, start + len(_PNG)))
    elif kind in ("JPEG", "MPO"):
        if not data.endswith(_END_OF_JPEG) and not _has_end_of_jpeg(data):
            raise ValueError("truncated: the end-of-image marker is missing")
    elif kind == "JPEG2000" and _END_OF_CODESTREAM not in data[data.find(_CODESTREAM) :]:
        raise ValueError("truncated: the end of the codestream is missing")
    elif kind == "QOI" and data.endswith(b"\0\0") and _QOI_END not in data:
        raise ValueError("truncated: the end marker is missing")
    elif kind in _COMPRESSED:
        _check_zeros(data, range(len(data.rstrip(b"\0")), len(data)), _ZEROS, kind)
    elif kind == "TIFF" and data.endswith(b"\0\0"):
        _check_tiff(data, getattr(image, "tag_v2", {}))


def _check_tiff(data: bytes, tags: Any) -> None:
    """Check the data of a compressed TIFF; its tags may lie behind them, and end in zeros."""
    tables = tags.get(_JPEG_TABLES)
    if isinstance(tables, bytes) and _END_OF_JPEG not in tables:
        raise ValueError("truncated: its JPEG tables end in zeros")
    stop = 0
    for offsets, counts in ((273, 279), (324, 325)):  # TIFF 6.0 tags of strips, and of tiles
        extents = zip(tags.get(offsets, ()), tags.get(counts, ()), strict=False)
        stop = max([stop, *(int(offset) + int(count) for offset, count in extents)])
    zeros = range(len(data.rstrip(b"\0")), min(len(data), stop))
    _check_zeros(data, zeros, _LEAST_ZEROS_IN_TIFF.get(tags.get(_COMPRESSION), len(data)), "TIFF")


def _check_zeros(data: bytes, zeros: range, least: int, kind: str) -> None:
    """Raise ValueError if pixels come from zeros at these offsets, unless there are too few of them."""
    if len(zeros) < least or not _is_decoded(data, zeros, kind):
        return
    # Flat areas of lossy WebP are zeros up to the last one; of a cut file, the decoder leaves some zeros unread.
    if kind != "WEBP" or not _is_decoded(data, zeros[-_ZEROS:], kind):
        raise ValueError(f"truncated: it ends in {len(zeros):,} zeros in place of compressed data")


def _end_of_png(data: bytes, start: int) -> int:
    """Return the offset after the IEND chunk. `start` is the offset of the first chunk.

    Raises:
        ValueError: a critical, tRNS or fdAT chunk has a wrong checksum (PNG specification, 5.3), or IEND is missing.
    """
    while start + 12 <= len(data):
        length, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        stop = start + 12 + length
        if stop > len(data):
            break
        needed = not kind[0] & 0x20 or kind in (b"tRNS", b"fdAT")
        if needed and zlib.crc32(data[start + 4 : stop - 4]) != int.from_bytes(data[stop - 4 : stop], "big"):
            raise ValueError(f"damaged: its part {kind.decode('latin-1')} does not match its checksum")
        if kind == b"IEND":
            return stop
        start = stop
    raise ValueError("truncated: the end is missing")


def _has_end_of_jpeg(data: bytes) -> bool:
    """Return whether the first picture of a JPEG or MPO file has an end-of-image marker.

    The segments are followed as libjpeg does: markers of an EXIF thumbnail, of later pictures and of bytes behind the
    picture do not count.
    """
    position = 2
    while marker := _MARKER.search(data, position):
        code, position = marker[1][0], marker.end()
        if code == _END_OF_IMAGE:
            return True
        if code in _ALONE:
            continue
        position += int.from_bytes(data[position : position + 2], "big")
        if code == _START_OF_SCAN:
            end = _SCAN_END.search(data, position)
            if end is None:
                return False
            position = end.start()
    return False


def _is_decoded(data: bytes, zeros: range, kind: str) -> bool:
    """Return whether the pixels depend on the zeros at these offsets."""
    changed = data[: zeros.start] + b"\x55" * len(zeros) + data[zeros.stop :]
    expected = _hash_of_pixels(data, kind)
    try:
        return _hash_of_pixels(changed, kind) != expected
    except Exception:  # see `decode`
        return True


def _hash_of_pixels(data: bytes, kind: str) -> bytes:
    with Image.open(io.BytesIO(data), formats=[kind]) as image:
        return xxhash.xxh3_128_digest(np.asarray(image).tobytes())
