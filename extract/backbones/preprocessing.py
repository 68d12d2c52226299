"""Convert a decoded picture to the input of a backbone: resize, crop, scale, normalise.

The parameters come from the library that publishes the weights. They are plain data, so that they can be stored with
the features. Pillow resizes and crops uint8 pixels in the workers; scaling and normalisation run on the device.
"""

from __future__ import annotations

import functools
import json
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as tensors

from extract import defaults
from extract.errors import InputError, first_line, unknown_name
from extract.system.foreign_code import exits_refused

__all__ = [
    "IDENTITY", "INTERPOLATIONS", "OVERRIDES", "Preprocessing", "check_normalisation", "described", "from_hf",
    "from_open_clip", "from_timm", "from_torchvision", "from_transform", "overridden",
]  # fmt: skip

_LIBRARY_RESIZES = 1.15  # the side to which a library's transform resizes, as a ratio to that of the input
_SHOWN = 120  # characters of a library's own transform in messages
_MAX_SIDE_PX = 8192  # of an input; a larger value is taken for a typing error
# Values that the user may give in place of the library's own.
OVERRIDES = {"size", "crop", "interpolation", "mean", "std"}

# Pillow's number (Image.Resampling) -> torchvision's name (InterpolationMode).
_OF_PILLOW = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
INTERPOLATIONS = tuple(_OF_PILLOW.values())
_CROPS: dict[str, Callable[..., Any]] = {"five": F.five_crop, "ten": F.ten_crop}  # kind of views -> crops of a picture

Box = tuple[float, float, float, float]
Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """Parameters that convert a picture to input; equal values give equal input.

    Attributes:
        resize_px: the shorter side after resizing, or (height, width) regardless of aspect ratio.
        crop_px: (height, width) of the centre crop and of the input.
        interpolation: "nearest", "bilinear", "bicubic" or another name in torchvision's `InterpolationMode`.
        mean, std: per channel, for pixels scaled to 0..1.
        library_transform: the library's own transform, used instead of the values above if they do not reproduce it; it
            maps an RGB picture to a (3, H, W) float32 tensor.
        name: name of `library_transform`; if empty, its `str()` is used.
        fast: whether torchvision resizes instead of Pillow, which changes some pixels by one or two levels, and large
            JPEG files are decoded at reduced size.
        device: the GPU that decodes JPEG files and resizes their pictures with torchvision; empty: none does.
        orientation, icc: how files are decoded, see `extract.images.decoding.decode`; not part of `describe`.
        input_dtype: dtype of the backbone's input; not part of `describe`.
        of_boxes: whether boxes are pooled of whole pictures, so that pictures are prepared whole; not part of
            `describe`.
    """

    resize_px: int | tuple[int, int]
    crop_px: tuple[int, int]
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    library_transform: Transform | None = None
    name: str = ""
    fast: bool = False
    device: str = ""
    orientation: str = defaults.ORIENTATION
    icc: str = defaults.ICC
    input_dtype: torch.dtype = torch.float32
    of_boxes: bool = False

    @property
    def min_decode_px(self) -> int:
        """Smallest shorter side to which a picture may be reduced while decoding; 0 if only full size is allowed."""
        # Twice the resized side: JPEG's own scaling averages blocks, and the remaining reduction corrects this. Pillow
        # could resize and crop in one step in half the time, but its box is in float32: 3 % of the values differ.
        is_reduced = self.fast and not self.of_boxes  # boxes are in pixels of the full size
        return 2 * (self.resize_px if isinstance(self.resize_px, int) else max(self.resize_px)) if is_reduced else 0

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Shape of what `cpu_transform` returns, if it returns uint8; None for a library's own transform."""
        return (*self.crop_px, 3) if self.library_transform is None else None

    @property
    def is_exact(self) -> bool:
        """Whether the pixels are those of the library's own preprocessing."""
        return not self.fast and not self.device

    def exact(self) -> Preprocessing:
        """Return a copy whose pixels are those of the library's own preprocessing."""
        return replace(self, fast=False, device="")

    def on_gpu(self, device: torch.device) -> Preprocessing:
        """Return a copy for which a GPU decodes JPEG files.

        Raises:
            InputError: the device is not an NVIDIA GPU, or the preprocessing cannot run on it.
        """
        if device.type != "cuda":
            raise InputError(f"decode gpu needs an NVIDIA GPU; the device is {device}", hint="set decode to fast")
        return replace(self.faster(), fast=False, device=str(device))

    @property
    def can_be_faster(self) -> bool:
        """Whether `fast` is supported."""
        return self.library_transform is None and self.interpolation in ("nearest", "bilinear", "bicubic")

    def faster(self) -> Preprocessing:
        """Return a copy with `fast` set.

        Raises:
            InputError: `fast` is not supported.
        """
        if not self.can_be_faster:
            raise InputError(f"fast decoding is not supported for {self}", hint="set decode to exact")
        return replace(self, fast=True)

    def for_boxes(self) -> Preprocessing:
        """Return a copy with `of_boxes` set.

        Raises:
            InputError: the place of a box in the input is not known, or a GPU decodes.
        """
        if self.library_transform is not None or self.device:
            give = "use --decode exact" if self.device else "give --size, --crop, --interpolation, --mean and --std"
            raise InputError(f"roi needs the place of a box in the input, which is not known for {self}", hint=give)
        return replace(self, of_boxes=True)

    def in_input(self, size: tuple[int, int], box: Box | None) -> tuple[Box, str]:
        """Return the part of a box that lies in the input.

        Args:
            size: (width, height) of the picture.
            box: left, upper, right and lower edge in pixels of it; None: all of it.

        Returns:
            The edges in pixels of the input, and what the user should know: that the crop cuts a part of the box off.

        Raises:
            ValueError: no part of the box lies in the input.
        """
        # The arithmetic of torchvision's functions, which pad a picture that is smaller than the crop.
        full, crop = np.array(size), np.array(self.crop_px[::-1])
        squashed = not isinstance(self.resize_px, int)
        resized = np.array(self.resize_px)[::-1] if squashed else (self.resize_px * full / full.min()).astype(int)
        start = np.where(resized < crop, -((crop - resized) // 2), np.round((resized - crop) / 2))
        edges = np.reshape(box or (0, 0, *size), (2, 2)) * resized / full - start
        inside = edges.clip(0, crop)
        remedy = f"--size {crop[1]}x{crop[0]} squashes pictures, and crops nothing"
        if (inside[0] >= inside[1]).any():
            raise ValueError(f"the box lies outside the centre crop of the picture; {remedy}")
        note = f"the box reaches over the border of the centre crop; the part inside is used. {remedy}"
        left, upper, right, lower = inside.ravel().tolist()
        return (left, upper, right, lower), note if box and (inside != edges).any() else ""

    def cpu_transform(self, picture: Image.Image, view: tuple[str, int] | None = None) -> Tensor:
        """Resize and crop an RGB picture in a worker.

        Args:
            picture: the picture.
            view: kind and number of a view; None: the centre crop. "five" and "ten": of the resized picture, as by
                `torchvision.transforms.FiveCrop` and `TenCrop`: upper left, upper right, lower left, lower right,
                centre; of ten, then those of the mirrored picture. "flips": the picture, and its mirror image.

        Returns:
            (H, W, 3) uint8, or (3, H, W) float32 from a library's own transform.

        Raises:
            ValueError: the picture is so thin that it would be resized to more than `defaults.MAX_PIXELS`, or the crop
                is larger than the resized picture.
            InputError: a user's transform called `sys.exit`, or crops are asked of a library's own transform.
        """
        self._check_not_thin(picture)
        kind, number = view or ("", 0)
        if kind in _CROPS:
            return self._crops(picture, kind)[number]
        if kind:  # a transform may change the picture, which the next view needs
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number else picture.copy()
        if self.library_transform is None:
            return self._resized_and_cropped(picture)
        with exits_refused():
            return self.library_transform(picture).detach()  # worker processes cannot send a tensor with a graph

    def _check_not_thin(self, picture: Image.Image) -> None:
        """Raise ValueError if a picture of this shape would take too much memory when its shorter side is resized.

        CLIP's transform of 1x8000 pixels took 3.6 GB. A transform that squashes pictures would take less, but a picture
        whose sides differ by a factor of 2,700 (for inputs of 224 pixels) has nothing to show.
        """
        shorter = self.resize_px
        if self.library_transform is not None:  # resizes in an unknown way; the usual way is to the input or 1/7 more
            shorter = round(min(self.crop_px) * _LIBRARY_RESIZES)
        pixels = shorter**2 * max(picture.size) / min(picture.size) if isinstance(shorter, int) else 0
        if pixels > defaults.MAX_PIXELS:
            raise ValueError(
                f"{picture.width}x{picture.height} pixels: too thin; with a shorter side of {shorter}, it would have "
                f"{pixels:,.0f} pixels; the limit is {defaults.MAX_PIXELS:,}"
            )

    def transform_pixels(self, pixels: Tensor, antialias: bool = True) -> Tensor:
        """Resize with torchvision and crop pictures (..., 3, H, W) uint8 to (..., h, w, 3)."""
        cropped: Tensor = tensors.center_crop(self._resized(pixels, antialias), list(self.crop_px))
        return cropped.movedim(-3, -1).contiguous()

    def _resized(self, pixels: Any, antialias: bool = True) -> Any:
        """Return resized pixels, or a picture resized by Pillow."""
        size = [self.resize_px] if isinstance(self.resize_px, int) else list(self.resize_px)
        return (tensors if isinstance(pixels, Tensor) else F).resize(
            pixels, size, InterpolationMode(self.interpolation), antialias=antialias
        )

    def _resized_and_cropped(self, picture: Image.Image) -> Tensor:
        if self.fast:
            return self.transform_pixels(_as_pixels(picture))
        return torch.from_numpy(np.array(F.center_crop(self._resized(picture), list(self.crop_px))))

    def _crops(self, picture: Image.Image, kind: str) -> list[Tensor]:
        """Return the crops of a picture; those of the last one are kept, so that it is resized once for all of them."""
        for last, what, crops in _last_crops:
            if last is picture and what == (kind, self):
                return crops
        if self.library_transform is not None:
            hint = "use --views flips, or give size, crop, interpolation, mean and std"
            raise InputError(f"views {kind} are crops of the resized picture, which {self} does not give", hint=hint)
        cut = _CROPS[kind](self._resized(_as_pixels(picture) if self.fast else picture), list(self.crop_px))
        crops = [each.movedim(-3, -1) if self.fast else torch.from_numpy(np.array(each)) for each in cut]
        _last_crops.append((picture, (kind, self), [each.contiguous() for each in crops]))
        return _last_crops[-1][2]

    def to_input(self, images: Tensor) -> Tensor:
        """Convert results of `cpu_transform` to the backbone's input, (B, 3, H, W), on their device."""
        if images.dtype != torch.uint8:
            return images.to(self.input_dtype)
        # Convolutions follow the memory of their input; converting the weights as well is not faster. Sums in another
        # order differ by rounding from timm's contiguous example (resnet18: 2e-7 of the largest value), and equal its
        # model for an input with memory_format=torch.channels_last in every bit.
        scaled = images.permute(0, 3, 1, 2).to(torch.float32).div_(255)  # (B, 3, H, W), channels last in memory
        normalised = scaled.sub_(_of_channels(self.mean, images.device)).div_(_of_channels(self.std, images.device))
        return normalised.to(self.input_dtype)

    def describe(self) -> dict[str, Any]:
        """Return the parameters as plain data for the fingerprint."""
        if self.library_transform is not None:
            return {"library_transform": self.name or " ".join(str(self.library_transform).split())}
        resize = self.resize_px if isinstance(self.resize_px, int) else list(self.resize_px)
        return {
            "resize_px": resize,
            "crop_px": list(self.crop_px),
            "interpolation": self.interpolation,
            "mean": list(self.mean),
            "std": list(self.std),
            "resized_by": "torchvision on a GPU" if self.device else "torchvision" if self.fast else "pillow",
        }

    def __str__(self) -> str:
        if self.library_transform is not None:
            if self.name:
                return self.name
            text = " ".join(str(self.library_transform).split())
            return f"the library's own transform: {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}"
        resize = self.resize_px if isinstance(self.resize_px, int) else "x".join(map(str, self.resize_px))
        crop = "x".join(map(str, self.crop_px))
        how = ", JPEG decoded on the GPU" if self.device else ", fast decoding" if self.fast else ""
        return f"resize {resize} {self.interpolation}, crop {crop}, mean {self.mean}, std {self.std}{how}"


# The last picture of which crops were taken, kind and preprocessing, and the crops.
_last_crops: deque[tuple[Image.Image, tuple[str, Preprocessing], list[Tensor]]] = deque(maxlen=1)


def _as_pixels(picture: Image.Image) -> Tensor:
    """Return the pixels of a picture, (3, H, W)."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


@functools.cache
def _of_channels(values: tuple[float, float, float], device: torch.device) -> Tensor:
    """Return the values as a (3, 1, 1) tensor, copied to each device once."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device).view(3, 1, 1)


IDENTITY = Preprocessing(1, (1, 1), "bilinear", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # base for a full set of overrides


def from_timm(model: torch.nn.Module) -> Preprocessing:
    """Return timm's preprocessing for the weights of a model (`timm.data.resolve_model_data_config`)."""
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    config: dict[str, Any] = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
    transform: Transform = create_transform(**config, is_training=False)
    _, height, width = config["input_size"]
    # timm resizes the shorter side to input size / crop_pct, rounded down (timm.data.transforms_factory).
    resize = int(height / config["crop_pct"])
    return _checked(transform, resize, (height, width), config["interpolation"], config["mean"], config["std"])


def from_torchvision(transform: Any) -> Preprocessing:
    """Return the preprocessing of a torchvision weights entry (`weights.transforms()`)."""
    resize, crop = transform.resize_size[0], transform.crop_size[0]
    return _checked(transform, resize, (crop, crop), transform.interpolation.value, transform.mean, transform.std)


def from_open_clip(settings: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing of an image tower of open_clip (its `preprocess_cfg`)."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    transform: Transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)
    height, width = [settings["size"]] * 2 if isinstance(settings["size"], int) else settings["size"]
    resize = (height, width) if settings.get("resize_mode") == "squash" else min(height, width)
    return _checked(transform, resize, (height, width), settings["interpolation"], settings["mean"], settings["std"])


_NO_SETTINGS = {"image_processor_type", "feature_extractor_type", "processor_class"}  # these only repeat the class


@dataclass(frozen=True)
class _HfTransform:
    """An image processor of transformers as a function of one picture."""

    processor: Any

    def __call__(self, picture: Image.Image) -> Tensor:
        values = self.processor(images=picture, return_tensors="pt")["pixel_values"]
        return torch.as_tensor(values[0])

    def __str__(self) -> str:
        settings = self.processor.to_dict()
        chosen = {key: value for key, value in settings.items() if value is not None and key not in _NO_SETTINGS}
        return f"{type(self.processor).__name__} {json.dumps(chosen, sort_keys=True, default=str)}"


def from_hf(processor: Any) -> Preprocessing:
    """Return the preprocessing of an image processor of transformers."""
    transform = _HfTransform(processor)
    size, crop = (dict(getattr(processor, name, None) or {}) for name in ("size", "crop_size"))
    try:
        resize: Any = size.get("shortest_edge") or _height_width(size)
        cropped = _height_width(crop if processor.do_center_crop else size)
        interpolation = _OF_PILLOW[int(processor.resample)]
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    except (AttributeError, KeyError, TypeError, ValueError):  # the processor has other settings
        return from_transform(transform, str(transform))
    return _checked(transform, resize, cropped, interpolation, mean, std)


def described(transform: Any) -> Preprocessing:
    """Return the preprocessing of a user's transform: its steps as values if these reproduce it, else a call of it.

    Args:
        transform: a torchvision `Compose`, as timm and open_clip make them too; the `transforms()` of torchvision
            weights; an image processor of transformers; or any function of a picture.

    Raises:
        InputError: see `from_transform`.
    """
    if hasattr(transform, "image_mean"):
        return from_hf(transform)
    steps = {type(step).__name__: step for step in getattr(transform, "transforms", ())}
    try:
        if hasattr(transform, "resize_size"):
            return from_torchvision(transform)
        resize, crop, scale = steps["Resize"], steps.get("CenterCrop"), steps.get("Normalize")
        sides = [resize.size] if isinstance(resize.size, int) else list(resize.size)
        cropped = sides if crop is None else [crop.size] if isinstance(crop.size, int) else list(crop.size)
        mean, std = ((0.0,) * 3, (1.0,) * 3) if scale is None else (scale.mean, scale.std)
        return _checked(
            transform, sides[0] if len(sides) == 1 else (sides[0], sides[1]), (cropped[0], cropped[-1]),
            InterpolationMode(resize.interpolation).value, map(float, mean), map(float, std),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # it has other steps
        if isinstance(error, InputError):
            raise
        return from_transform(transform, "")


def _height_width(size: Mapping[str, Any]) -> tuple[int, int]:
    return int(size["height"]), int(size["width"])


def check_normalisation(given: Mapping[str, Any]) -> None:
    """Check the `mean` and `std` of the user's values, if they are given.

    Raises:
        InputError: one of them is not three numbers for pixels scaled to 0..1: a mean from 0 to 1, a standard deviation
            above 0 and up to 1.
    """
    for name, lowest in (("mean", "from 0"), ("std", "above 0")):
        if name not in given:
            continue
        try:
            values = tuple(map(float, given[name]))
        except (TypeError, ValueError):
            values = ()
        if len(values) == 3 and all(0 <= value <= 1 for value in values) and (name == "mean" or min(values) > 0):
            continue
        problem = f"{name} {given[name]}: expected three numbers {lowest} to 1, since pixels are scaled to 0..1"
        hint = ""
        if len(values) == 3 and all(1 <= value <= 255 for value in values):
            scaled = ",".join(f"{value / 255:.4g}" for value in values)
            hint = f"these look like values for pixels from 0 to 255; divide them by 255: {scaled}"
        raise InputError(problem, hint=hint)


def overridden(preprocessing: Preprocessing, given: Mapping[str, Any]) -> Preprocessing:
    """Return preprocessing with some values replaced by the user's.

    Args:
        preprocessing: the library's preprocessing.
        given: any of `size`, `crop`, `interpolation`, `mean` and `std`. `size` alone keeps the crop; `crop` alone keeps
            the size.

    Raises:
        UnknownNameError: the interpolation does not exist.
        InputError: a value is out of range; or the preprocessing is a library's own transform, which only a full set of
            values can replace.
    """
    if not given:
        return preprocessing
    if preprocessing.library_transform is not None and given.keys() < OVERRIDES:
        missing = ", ".join(f"--{name}" for name in sorted(OVERRIDES) if name not in given)
        raise InputError(
            f"the preprocessing is {preprocessing}, which can only be replaced as a whole", hint=f"also give {missing}"
        )
    interpolation = given.get("interpolation", preprocessing.interpolation)
    if interpolation not in _OF_PILLOW.values():
        raise unknown_name("interpolation", interpolation, _OF_PILLOW.values())
    size, crop = given.get("size", preprocessing.resize_px), given.get("crop", preprocessing.crop_px)
    crop = (crop, crop) if isinstance(crop, int) else (int(crop[0]), int(crop[1]))
    size = size if isinstance(size, int) else (int(size[0]), int(size[1]))
    sides = (size, size) if isinstance(size, int) else size
    if min(*crop, *sides) < 1 or max(*crop, *sides) > _MAX_SIDE_PX:
        raise InputError(f"size {size}, crop {crop}; expected 1 to {_MAX_SIDE_PX:,} pixels")
    if any(side < cut for side, cut in zip(sides, crop, strict=True)):
        raise InputError(
            f"crop {crop} is larger than the picture after resizing to {size}", hint="give a larger --size"
        )
    red, green, blue = map(float, given.get("mean", preprocessing.mean))
    mean = red, green, blue
    red, green, blue = map(float, given.get("std", preprocessing.std))
    return Preprocessing(size, crop, interpolation, mean, (red, green, blue))


def from_transform(transform: Transform, name: str) -> Preprocessing:
    """Return preprocessing that calls a transform; only its name goes into the fingerprint.

    Raises:
        InputError: the transform fails, does not map RGB pictures to (3, H, W) float32 tensors of one size, or is
            random.
    """
    sizes = set()
    for size in ((361, 247), (57, 83)):
        try:
            tensor = transform(_test_picture(size))
        except Exception as error:
            raise InputError(f"failed on an RGB picture: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.ndim != 3 or tensor.shape[0] != 3:
            found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"maps an RGB picture to {found}; expected (3, H, W) float32")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise InputError("maps an RGB picture to a tensor that is not dense or has no values")
        sizes.add((int(tensor.shape[1]), int(tensor.shape[2])))
    if len(sizes) > 1:
        raise InputError(f"returns tensors of several sizes, {sorted(sizes)}; expected the same size for all pictures")
    if why := _why_random(transform):
        raise InputError(
            f"{why}, so features would differ from run to run",
            hint="use the transform of the evaluation, without random crops, flips and colours",
        )
    height, width = sizes.pop()
    return Preprocessing((height, width), (height, width), "", (0.0,) * 3, (1.0,) * 3, transform, name)


def _why_random(transform: Transform) -> str:
    """Return why the results of a transform are not the same in every run; empty if they are.

    Two calls with one picture may agree by chance, if a change of the picture is improbable. A transform that draws
    from a random generator of the process is found nevertheless: the second call changes the state of the generator. A
    transform that seeds the generator itself leaves the same state each time. Names of classes say less: `RandomCrop`
    to the size of the picture is not random. A flip with p = 0 draws a number, too, and can be left out.
    """
    picture = _test_picture((57, 83))
    first, states = transform(picture), _random_states()
    second = transform(picture)
    if not torch.allclose(first, second, rtol=0, atol=1e-6, equal_nan=True):
        return "gives other pixels for the same picture at each call"
    return "draws random numbers" if _random_states() != states else ""


def _random_states() -> tuple[bytes, str, str]:
    """Return the states of the random generators that transforms use: those of torch, NumPy and Python."""
    numpy_state: Any = np.random.get_state()
    numpy_text = numpy_state[1].tobytes().hex() + str(numpy_state[2:])
    return bytes(torch.get_rng_state().numpy()), numpy_text, str(random.getstate())


def _checked(
    transform: Transform, resize: Any, crop: tuple[int, int], interpolation: str, mean: Any, std: Any
) -> Preprocessing:
    """Return the described preprocessing if it reproduces a library's transform, else one that calls the transform.

    Most image processors of transformers resize tensors with torchvision. Pillow would give other pixels.
    """
    described = Preprocessing(resize, crop, interpolation, tuple(mean), tuple(std))
    for size in ((361, 247), (57, 83)):  # one picture is reduced, one enlarged; neither is square
        picture = _test_picture(size)
        try:
            ours = described.to_input(described.cpu_transform(picture).unsqueeze(0))[0]
        except (ValueError, TypeError, RuntimeError):
            break
        theirs = transform(picture)
        # Both scale and normalise in float32, and differ by one rounding at most.
        if (
            ours.shape != theirs.shape
            or ours.dtype != theirs.dtype
            or not torch.allclose(ours, theirs, rtol=0, atol=1e-5)
        ):
            break
    else:
        return described
    return from_transform(transform, "")


def _test_picture(size: tuple[int, int]) -> Image.Image:
    """Return noise on a gradient, on which different resizing methods do not agree by chance."""
    noise = np.random.default_rng(0).integers(0, 128, (size[1], size[0], 3))
    slope = np.linspace(0, 127, size[0])[None, :, None]
    return Image.fromarray((noise + slope).astype(np.uint8))
