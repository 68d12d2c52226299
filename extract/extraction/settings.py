"""The settings of a run: how features are computed and stored. Each has its name, type, default and meaning here only.

`extract_features` has its parameters from here, and `layertap embed`, `sync` and `compare` their options, the keys of
their config files and their pages of reference. A setting is added to the class of those that are to have it.

Dataclasses, because a pydantic model has no positional parameters and refuses an integer of NumPy; with
`Unpack[TypedDict]`, each setting would be named twice. Models of config files are made from the fields and do not
inherit: where a base model overrides a default, pydantic takes the one of the dataclass.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, wraps
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import Field
from pydantic.fields import FieldInfo

from extract import defaults
from extract.compute.pooling import pooling_names
from extract.errors import InputError, unknown_name

__all__ = [
    "BACKBONE", "HEADINGS", "IMAGES", "OUTPUT", "PARTS", "RARE", "SAFETY", "SPEED", "WORKERS",
    "BackboneSettings", "BoxSettings", "DataSetSettings", "DecodingSettings", "DerivedPartSettings",
    "ExtractionSettings", "FeatureSettings", "Heading", "PartSettings", "choices_of", "fields_of", "taking",
    "values_of",
]  # fmt: skip


class Heading(str):
    """Metadata of a setting: the heading below which a help text lists it."""


IMAGES = Heading("Images")
PARTS = Heading("Parts of images")
BACKBONE = Heading("Backbone and layers")
OUTPUT = Heading("Output")
SPEED = Heading("Speed")
WORKERS = Heading("Several workers")
SAFETY = Heading("Safety")
HEADINGS = (IMAGES, PARTS, BACKBONE, OUTPUT, SPEED, WORKERS, SAFETY)
RARE = object()  # metadata of a setting that few need: `--help-all` lists it, `--help` does not

Precision = Literal["float32", "tf32", "bfloat16", "float16", "bfloat16-weights"]

_LIMITS = {
    "ge": (operator.ge, "at least"), "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"), "lt": (operator.lt, "below"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BackboneSettings:
    """How a backbone is loaded; see `load_backbone`.

    Attributes:
        weights: Name, file, or 'random'. [default: the source's own]
        allow_missing_head: Accept a weights file that lacks the classifier.
        device: auto, cpu, cuda, cuda:N or mps.
        seed: Seed of random weights.
    """

    weights: Annotated[str | None, Field(min_length=1), BACKBONE] = None
    allow_missing_head: Annotated[bool, BACKBONE] = False
    device: Annotated[str, SPEED] = defaults.DEVICE
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63), BACKBONE] = defaults.SEED


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How images are decoded.

    Attributes:
        workers: Decoding processes; 0: main process, as in workers of `multiprocessing.Pool` and joblib.
        max_pixels: Larger images count as decompression bombs: they are not decoded, and their rows fail.
        orientation: exif: apply the EXIF orientation of images; ignore: pixels as stored.
        icc: srgb: convert from the embedded colour profile (ICC) to sRGB, with the perceptual intent; the row of an
            image with a damaged profile fails.
    """

    workers: Annotated[int, Field(strict=True, ge=0), SPEED] = defaults.WORKERS
    max_pixels: Annotated[int, Field(strict=True, ge=1), IMAGES, RARE] = defaults.MAX_PIXELS
    orientation: Annotated[Literal["exif", "ignore"], IMAGES] = defaults.ORIENTATION
    icc: Annotated[Literal["ignore", "srgb"], IMAGES] = defaults.ICC


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """Which features are computed, and how.

    Attributes:
        layers: Several are possible; globs allowed, ** at any depth. Poolings: {poolings}.
        batch_size: Images per forward. [default: 256 on a GPU with 12 GB or more, otherwise 64]
        decode: exact: the pixels of the library's own preprocessing. fast: resize with torchvision, decode large JPEGs
            smaller. gpu: decode and resize JPEGs on an NVIDIA GPU, other files exactly. Both are compared with exact on
            the first images, and refused below the minimum cosine.
        dtype: Type of the stored features; int8 has a scale for each row. bfloat16 and int8 are compared with the
            values of the first batch, and refused below the minimum cosine.
        precision: Precision of the computation; all but float32 are compared with it on the first batch, and refused
            below the minimum cosine. tf32: convolutions and matrix products, on an NVIDIA GPU. bfloat16-weights: the
            weights too, without autocast.
        compile: Compile the forward. on: with OpenVINO on a CPU, else inductor. auto: if it saves time and the first
            batch agrees; in lower precision, as for the existing rows, else not.
    """

    layers: Annotated[str | Sequence[str], Field(min_length=1), BACKBONE] = defaults.LAYERS
    batch_size: Annotated[int | None, Field(strict=True, ge=1, le=100_000), SPEED] = None
    decode: Annotated[Literal["exact", "fast", "gpu"], SPEED] = "exact"
    dtype: Annotated[Literal["float32", "float16", "bfloat16", "int8"], OUTPUT] = "float32"
    precision: Annotated[Precision, SPEED] = defaults.PRECISION
    compile: Annotated[Literal["auto", "on", "off", "inductor", "openvino"], SPEED] = "auto"


@dataclass(frozen=True, kw_only=True)
class DataSetSettings(DecodingSettings, FeatureSettings):
    """Settings of a data set, also of one that follows a folder.

    Attributes:
        min_cosine: Minimum cosine to eager float32 and exact decoding; features below it are refused.
        axes: Data set, or file of its folder `axes`, with the principal axes of LAYER:pcaK and pcawK. [default: those
            of the data set, or fitted to the images]
        without: Leave out the images that this file names: a table of `layertap findings -o`, of which rows whose
            `keep` is true stay, or a text with a path on each line. In Python, also a DataFrame, findings or paths.
        shard_rows: Rows per shard file. [default: as many as fit into 1 GB]
        compress: Compress each finished file. [default: no compression, which is faster to read]
        sync_s: Seconds of work that a power cut may lose; 0: sync each batch to the disk.
    """

    min_cosine: Annotated[float, Field(ge=-1, le=1), SAFETY, RARE] = defaults.MIN_COSINE
    axes: Annotated[str | os.PathLike[str] | None, BACKBONE] = None
    without: Annotated[str | os.PathLike[str] | Iterable[Any] | None, IMAGES] = None
    shard_rows: Annotated[int | None, Field(strict=True, ge=1), OUTPUT, RARE] = None
    compress: Annotated[Literal["gzip", "lzf", "blosc2"] | None, OUTPUT] = None
    sync_s: Annotated[float, Field(ge=0), SAFETY, RARE] = defaults.SYNC_S


@dataclass(frozen=True, kw_only=True)
class BoxSettings:
    """Rows that are boxes, which a list names.

    Attributes:
        boxes: Boxes, each of which becomes a row: a table with the columns path, x, y, w, h and perhaps label, id and
            split, in pixels or fractions; a .json file of COCO; or a folder of YOLO or Pascal VOC files.
        context: Part of the width and height of a box to add on each side.
        box_shape: square: the square around each box, so that the preprocessing cuts nothing off; exact: the box.
    """

    boxes: Annotated[str | os.PathLike[str] | None, PARTS] = None
    context: Annotated[float, Field(ge=0, le=10), PARTS] = 0.0
    box_shape: Annotated[Literal["square", "exact"], PARTS] = "square"


@dataclass(frozen=True, kw_only=True)
class DerivedPartSettings:
    """Rows that are parts which follow from a file itself: tiles, views, frames; also of files that change.

    Attributes:
        tiles: Side in pixels of tiles, each of which becomes a row: of pictures, large TIFF, and slides.
        overlap: Part of a tile that the next one covers too.
        level: Level of a pyramid that tiles are read from; 0 is the largest. The columns x, y, w and h are in pixels
            of level 0.
        content: Least part of a tile that is not background, which has little saturation (Otsu's threshold), or is 0
            in a mask.
        views: Views of each image, each of which becomes a row. five, ten: crops of the resized image, as FiveCrop and
            TenCrop of torchvision; flips: the image and its mirror image.
        fps: Frames of videos: the first in each interval of 1/FPS seconds, counted from the first frame.
        every: Frames of videos: each EVERY-th, from the first.
        keyframes: Frames of videos: those that the file marks as key frames.
    """

    tiles: Annotated[int | None, Field(strict=True, ge=1), PARTS] = None
    overlap: Annotated[float, Field(ge=0, le=0.9), PARTS] = 0.0
    level: Annotated[int, Field(strict=True, ge=0, le=99), PARTS] = 0
    content: Annotated[float, Field(ge=0, le=1), PARTS] = 0.0
    views: Annotated[Literal["five", "ten", "flips"] | None, PARTS] = None
    fps: Annotated[float | None, Field(gt=0, le=1000), PARTS] = None
    every: Annotated[int | None, Field(strict=True, ge=1), PARTS] = None
    keyframes: Annotated[bool, PARTS] = False

    def asked(self) -> dict[str, Any]:
        """Return the settings that are not at their defaults."""
        names = {field.name: field.default for field in fields(DerivedPartSettings)}
        return {name: getattr(self, name) for name, default in names.items() if getattr(self, name) != default}


@dataclass(frozen=True, kw_only=True)
class PartSettings(DerivedPartSettings, BoxSettings):
    """Rows that are parts of images. The name of each says which part (`extract.images.part_names`).

    Attributes:
        masks: Folder of masks, of any size, for `content`: of a/1.svs, the mask is a/1.png or a/1.tif.
    """

    masks: Annotated[str | os.PathLike[str] | None, PARTS] = None


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings(PartSettings, DataSetSettings):
    """Settings of a run, checked on creation.

    Without `distortion`, `srp` without a number of values is refused; without `fit_on`, axes are not fitted.

    Attributes:
        limit: Use only the first LIMIT images.
        keep: Further column of a list or dataset, such as captions, to store with the features; several are possible.
        distortion: For LAYER:srp without a number of values, which is chosen so that squared distances between the
            images are likely to change by at most this part.
        fit_on: Images to fit the principal axes of LAYER:pcaK on, spread evenly over all.

    Raises:
        UnknownNameError: the value of a setting does not exist.
        InputError: a number is out of range.
        LayertapError: the compression needs a library that is not installed.
    """

    limit: Annotated[int | None, Field(strict=True, ge=1), IMAGES] = None
    keep: Annotated[str | Sequence[str], IMAGES] = ()
    distortion: Annotated[float | None, Field(gt=0, lt=1), BACKBONE, RARE] = 0.1  # that of scikit-learn
    fit_on: Annotated[int | None, Field(strict=True, ge=2), BACKBONE, RARE] = 2000

    def __post_init__(self) -> None:
        for name, field in fields_of(cast(Any, type(self))).items():
            _check(name, getattr(self, name), field)
        if self.compress is not None:
            from extract.store.format.untrusted import need_libraries  # slow to import, and rarely needed

            need_libraries(self.compress)

    @classmethod
    def of(cls, holder: object, **changes: Any) -> ExtractionSettings:
        """Return the settings that an object has as attributes, with `changes` applied; defaults for all others."""
        return cls(**(values_of(cls, holder) | changes))

    @property
    def layer_list(self) -> list[str]:
        """The layers as a list, also if only one was given."""
        return [self.layers] if isinstance(self.layers, str) else list(self.layers)

    @property
    def keep_list(self) -> list[str]:
        """The columns to keep as a list, also if only one was given."""
        return [self.keep] if isinstance(self.keep, str) else list(self.keep)

    def recorded(self) -> dict[str, Any]:
        """Return the settings for the provenance of a data set.

        `keep` and `sync_s` do not affect features. `distortion` affects them by the numbers in the resolved layers
        only, `axes` and `fit_on` by the axes that the data set keeps, and `without` and those of parts by the names
        that it lists.
        """
        left_out = ["keep", "sync_s", "distortion", "axes", "fit_on", "without"]
        left_out += [field.name for field in fields(PartSettings)]
        settings = {name: value for name, value in values_of(ExtractionSettings, self).items() if name not in left_out}
        return settings | {"layers": self.layer_list}


def values_of(model: type, holder: object) -> dict[str, Any]:
    """Return the settings of a class that an object has as attributes: name -> value."""
    return {field.name: getattr(holder, field.name) for field in fields(model) if hasattr(holder, field.name)}


def described(model: Any) -> dict[str, str]:
    """Return what the settings of a class mean, from its docstring and those of its bases: name -> text."""
    texts: dict[str, str] = {}
    for each in reversed(model.__mro__):
        section = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return {name: text.replace("{poolings}", " ".join(pooling_names())) for name, text in texts.items()}


@cache
def fields_of(model: Any) -> dict[str, FieldInfo]:
    """Return the settings of a class: name -> type, default, limits and meaning."""
    hints, texts = get_type_hints(model, include_extras=True), described(model)
    settings = {}
    for field in fields(model):
        settings[field.name] = FieldInfo.from_annotated_attribute(hints[field.name], field.default)
        settings[field.name].description = texts.get(field.name)  # `python -OO` has no docstrings
    return settings


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the words that a type permits; none if it permits other values than words and None."""
    literals = (part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal)
    return next((get_args(literal) for literal in literals), ())


Parameters = ParamSpec("Parameters")
Model = TypeVar("Model")
Result = TypeVar("Result")


def taking(model: Callable[Parameters, Model]) -> Callable[[Callable[[Model], Result]], Callable[Parameters, Result]]:
    """Decorator for a function of an object of a class: the fields of the class become its parameters.

    Type checkers and editors know them from the constructor of the class. What they mean becomes the section `Args` of
    the docstring.
    """
    cls: Any = model

    def decorate(function: Callable[[Model], Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(model(*args, **kwargs))

        settings, signature = fields_of(cls), inspect.signature(cls)
        names = sorted(signature.parameters, key=lambda name: name not in vars(cls)["__annotations__"])
        parameters = [signature.parameters[name].replace(annotation=settings[name].annotation) for name in names]
        result = inspect.signature(function).return_annotation
        vars(call)["__signature__"] = signature.replace(parameters=parameters, return_annotation=result)
        entries = (f"    {name}: {settings[name].description}" for name in names)
        args = "\n".join(textwrap.fill(entry, 116, subsequent_indent=" " * 8) for entry in entries)
        text = inspect.getdoc(function) or ""
        call.__doc__ = re.sub("\n(?=Returns:|Raises:)", lambda _: f"\nArgs:\n{args}\n\n", text, count=1)
        return call

    return decorate


def _check(name: str, value: Any, field: FieldInfo) -> None:
    """Refuse a value that is not among the choices of a setting, or out of its range."""
    if value is None and type(None) in get_args(field.annotation):
        return
    choices = choices_of(field.annotation)
    if choices and value not in choices:
        raise unknown_name(name, str(value), choices)
    if isinstance(value, float) and int in (field.annotation, *get_args(field.annotation)):
        raise InputError(f"{name} is {value!r}; expected a whole number")
    limits = [(key, getattr(limit, key)) for limit in field.metadata for key in _LIMITS if hasattr(limit, key)]
    try:
        is_within = all(_LIMITS[key][0](value, limit) for key, limit in limits)
    except TypeError:
        raise InputError(f"{name} is {value!r}; expected a number") from None
    if not is_within:
        expected = " and ".join(f"{_LIMITS[key][1]} {limit}" for key, limit in limits)
        raise InputError(f"{name} is {value}; it must be {expected}")
