"""Convert pixels from the colour profile (ICC) that a picture has to sRGB."""

from __future__ import annotations

import functools
import io

from PIL import Image, ImageCms

__all__ = ["INTENT", "to_srgb"]

# For photographs (ICC.1:2022, 0.4), and the only intent of many profiles. Profiles that are a matrix and curves, as
# those of cameras and screens, give the same pixels with each intent.
INTENT = ImageCms.Intent.PERCEPTUAL
_SPACES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK", "Lab": "LAB"}  # colour space of a profile -> mode of Pillow
_CACHED = 16  # transforms, of up to a few MB; the pictures of a camera have one profile


def to_srgb(image: Image.Image, icc: bytes) -> Image.Image:
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


@functools.lru_cache(_CACHED)
def _profile(icc: bytes) -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(io.BytesIO(icc))


@functools.lru_cache(_CACHED)
def _transform(icc: bytes, mode: str) -> ImageCms.ImageCmsTransform:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    return ImageCms.buildTransform(_profile(icc), srgb, mode, "RGB", renderingIntent=INTENT)
