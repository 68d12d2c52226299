"""Configuration of the jobs: one frozen model each, the same keys in YAML as on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from extract import defaults
from extract.errors import InputError, unknown_name
from extract.system.urls import is_url

__all__ = [
    "AblateConfig",
    "BackboneConfig",
    "DrawConfig",
    "EmbedConfig",
    "FeaturesConfig",
    "InspectConfig",
    "LookConfig",
    "ProbeConfig",
    "checked",
    "load_config",
    "name_of",
    "read_yaml",
]


class BackboneConfig(BaseModel):
    """Which images go through which backbone: what all jobs that compute anything are told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: str = Field(
        description="Folder, .csv or .parquet list, .tar or .zip archives, .npy or .h5 array, a URL, or a plan."
    )
    backbone: str = Field(defaults.BACKBONE, description="SOURCE/NAME; see `layertap backbones`.")
    weights: str | None = Field(None, min_length=1, description="Name, file, or 'random'. [default: the source's own]")
    allow_missing_head: bool = Field(False, description="Go on if a weights file lacks the classifier.")
    size: int | list[int] | None = Field(
        None, description="Pixels of the shorter side, or HxW. [default: the model's own]"
    )
    crop: int | list[int] | None = Field(None, description="Pixels of the centre that is cut out; the input.")
    interpolation: str | None = Field(None, description="nearest, bilinear, bicubic, lanczos, box or hamming.")
    mean: list[float] | None = Field(None, description="R,G,B of pixels scaled to 0..1, to be subtracted.")
    std: list[float] | None = Field(None, description="R,G,B, to be divided by.")
    batch_size: int = Field(defaults.BATCH_SIZE, strict=True, ge=1, description="Images a forward.")
    workers: int = Field(defaults.WORKERS, strict=True, ge=0, description="Processes that decode; 0: the main one.")
    device: str = Field(defaults.DEVICE, description="auto, cpu, cuda, cuda:N or mps.")
    max_pixels: int = Field(defaults.MAX_PIXELS, strict=True, ge=1, description="An image of more is not decoded.")
    seed: int = Field(defaults.SEED, strict=True, ge=0, lt=1 << 63, description="Of random weights.")

    @field_validator("images", "out", mode="before", check_fields=False)
    @classmethod
    def _a_path(cls, value: Any) -> Any:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(value, str) and (not value or "\0" in value):
            raise ValueError("a path is neither empty nor has it null characters")
        return value

    @field_validator("size", "crop", mode="before")
    @classmethod
    def _a_size(cls, value: Any) -> Any:
        if isinstance(value, str) and (found := re.fullmatch(r"(\d+)(?:x(\d+))?", value, re.ASCII)):
            value = int(found[1]) if found[2] is None else [int(found[1]), int(found[2])]
        if value is not None and (isinstance(value, str) or (isinstance(value, list) and len(value) != 2)):
            raise ValueError("expected pixels, as 256 or 256x320")
        return value

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _three_numbers(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What is to replace the library's own."""
        names = ("size", "crop", "interpolation", "mean", "std")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class FeaturesConfig(BackboneConfig):
    """Which features of which images, and how they are computed: what `embed` and `sync` are both told."""

    out: Path | None = Field(None, description="Folder of the data set. [default: outputs/<name of IMAGES>]")
    layers: list[str] = Field(
        list(defaults.LAYERS),
        min_length=1,
        description="Repeats, takes globs. Poolings: auto none flatten mean_map max_map cls_token mean_tokens.",
    )
    decode: Literal["exact", "fast"] = Field(
        defaults.DECODE, description="fast: resized by torchvision, large JPEGs decoded smaller; compared with exact."
    )
    dtype: Literal["float32", "float16"] = Field(defaults.DTYPE, description="Of the stored features.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        defaults.PRECISION, description="Of the computation. Other than float32 is compared with it on the first batch."
    )
    compile: Literal["auto", "on", "off", "inductor", "openvino"] = Field(
        defaults.COMPILE,
        description="Compile the forward; auto: if that pays. on: by OpenVINO on a CPU, else inductor.",
    )
    min_cosine: float = Field(
        defaults.MIN_COSINE, ge=-1, le=1, description="Features that are less alike then are refused."
    )
    shard_rows: int | None = Field(None, strict=True, ge=1, description="Images in a file. [default: at most 1 GB]")
    compress: Literal["gzip", "lzf", "blosc2"] | None = Field(
        None, description="Pack each finished file. [default: plain, which is faster to read]"
    )
    sync_s: float = Field(
        defaults.SYNC_S,
        ge=0,
        description="Seconds of work that a power cut may cost; 0: each batch is forced to the disk.",
    )
    strict: bool = Field(False, description="Exit with 3 if a row failed.")

    @field_validator("compile", mode="before")
    @classmethod
    def _not_a_truth(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # as YAML reads them

    @field_validator("layers", mode="before")
    @classmethod
    def _one_layer(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def folder(self) -> Path:
        """Where the data set goes."""
        return self.out or Path("outputs") / name_of(self.images)


class EmbedConfig(FeaturesConfig):
    """What `layertap embed` is told."""

    out: str | None = Field(  # type: ignore[assignment]
        None, description="Folder of the data set, or s3://BUCKET/NAME. [default: outputs/<name of IMAGES>]"
    )

    fast: bool = Field(False, description="Measure precision, compile and decode, and take the fastest that agree.")
    limit: int | None = Field(None, strict=True, ge=1, description="Only the first so many images.")
    retry_failed: bool = Field(False, description="Try images again that failed in an earlier run.")
    device: str = Field(
        defaults.DEVICE, description="auto, cpu, cuda, cuda:N or mps; of several workers cuda:0,cuda:1 or all."
    )
    engine: Literal["processes", "ray"] | None = Field(
        None, description="Several workers at once: processes of this machine, or actors on a Ray cluster."
    )
    workers_per_gpu: int = Field(1, strict=True, ge=1, description="Of these workers.")
    cpus_per_worker: int | None = Field(
        None, strict=True, ge=1, description="Cores of each worker. [default: all of the machine, shared evenly]"
    )
    address: str = Field("auto", min_length=1, description="Of the Ray cluster; local: begin one here.")
    shards_of: str | None = Field(
        None, description="I/N: of every N shards, make the one with the remainder I; a task of a SLURM array."
    )
    scratch: Path | None = Field(
        None, description="Where several workers build shards. [default: in OUT, or of several machines in TMPDIR]"
    )

    @field_validator("shards_of", mode="before")
    @classmethod
    def _a_part(cls, value: Any) -> Any:
        if value is None:
            return None
        found = re.fullmatch(r"(\d{1,7})/(\d{1,7})", str(value), re.ASCII)
        if not found or int(found[1]) >= int(found[2]):
            raise ValueError("expected I/N with I from 0 to N - 1, as 0/8")
        return found[0]

    @property
    def place(self) -> str:
        """Where the data set goes: a folder, or a URL."""
        return self.out if self.out and is_url(self.out) else str(self.folder)

    @property
    def folder(self) -> Path:
        """The same, where it is a folder."""
        return Path(self.out) if self.out else Path("outputs") / name_of(self.images)

    @property
    def is_shared(self) -> bool:
        """Whether shards are built elsewhere and then published: by several workers, or to a bucket."""
        several = self.engine or self.shards_of or self.device == "all" or "," in self.device
        return bool(several) or is_url(self.place)

    @model_validator(mode="after")
    def _of_several_workers(self) -> Self:
        if self.is_shared and (self.fast or self.retry_failed):
            what = "--fast" if self.fast else "--retry-failed"
            instead = "`layertap bench` names the flags that are fastest" if self.fast else "run it afterwards in one"
            raise ValueError(f"{what} is for one process and a folder; {instead}")
        return self


class LookConfig(BackboneConfig):
    """What all jobs are told that look at what a backbone does: `inspect`, `draw` and `ablate`."""

    layers: list[str] | None = Field(None, min_length=1, description="Repeats, takes globs. [default: all]")
    batch_size: int = Field(16, strict=True, ge=1, description="Images a forward.")
    sample: int | None = Field(256, description="So many images, evenly spread; or 'all'.")

    @field_validator("sample", mode="before")
    @classmethod
    def _a_number_or_all(cls, value: Any) -> Any:
        if value == "all":
            return None
        if not re.fullmatch(r"[1-9]\d*", str(value), re.ASCII):
            raise ValueError("expected a number of images, or all")
        return int(value)


class InspectConfig(LookConfig):
    """What `layertap inspect` is told."""

    grad: bool = Field(False, description="Gradients too, of a loss.")
    loss: str = Field(
        "cross_entropy",
        description="Or FILE.py:FUNCTION, of what the model returns and the labels (B,), -1 for none.",
    )
    labels: str | None = Field(
        None, description="FILE.csv[:COLUMN] with `path`; numbers of outputs. [default: the images' classes]"
    )
    csv: Path | None = Field(None, description="Write the table to this file, too.")
    pictures: Path | None = Field(None, description="Draw pictures into this folder.")
    format: Literal["png", "svg", "pdf"] = Field("png", description="Of pictures.")

    @model_validator(mode="after")
    def _of_gradients(self) -> Self:
        if not self.grad and {"loss", "labels"} & self.model_fields_set:
            raise ValueError("--loss and --labels are of gradients: --grad")
        return self


class AblateConfig(LookConfig):
    """What `layertap ablate` is told."""

    layers: list[str] | None = Field(None, min_length=1, description="To edit, one by one; repeats, takes globs.")
    sample: int | None = Field(64, description="So many images, evenly spread; or 'all'.")
    edit: str = Field("zero", description="zero, mean (of all images), noise:STD, scale:FACTOR or prune:FRACTION.")
    channels: str | None = Field(None, description="0,3,17 or all: these channels, one by one. [default: whole layers]")
    labels: str | None = Field(
        None, description="FILE.csv[:COLUMN] with `path`; numbers of outputs. [default: the images' classes]"
    )
    csv: Path | None = Field(None, description="Write the table to this file, too.")
    picture: Path | None = Field(None, description="Draw it; .png, .svg or .pdf.")


class DrawConfig(LookConfig):
    """What `layertap draw` is told."""

    layers: list[str] | None = Field(
        None, min_length=1, description="Of which to draw. [default: the first or last that suits]"
    )
    sample: int | None = Field(9, description="So many images, evenly spread; or 'all'.")
    channels: list[int] | None = Field(None, description="0,3,17: only these. [default: those that differ most]")
    target: int | None = Field(None, ge=0, description="Class to explain. [default: the most likely of each image]")
    out: Path = Field(Path("outputs/pictures"), description="Folder.")
    format: Literal["png", "svg", "pdf"] = Field("png", description="Of the picture.")

    @field_validator("channels", mode="before")
    @classmethod
    def _several_numbers(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


class ProbeConfig(BaseModel):
    """What `layertap probe` is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: list[str] = Field(min_length=1, description="Data sets of `layertap embed`.")
    layers: list[str] | None = Field(
        None,
        min_length=1,
        description="Repeats, takes globs; a+b: two side by side. [default: all that are stored]",
    )
    protocol: Literal["clip", "simclr", "dinov2-logreg", "knn", "centroid", "fewshot", "ridge"] = Field(
        "clip", description="What is fitted, and how its strength is chosen."
    )
    labels: str | None = Field(
        None, description="FILE.csv[:COLUMN] with `path` or `id`; column label. [default: the data set's own classes]"
    )
    multilabel: bool = Field(False, description="An image has any number of labels, with | between them.")
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="Draw test images. [default: the data set's splits, or 0.2 if it has none]"
    )
    drop_leaks: bool = Field(False, description="Leave images out of training whose bytes are in val or test.")
    scaling: Literal["none", "l2", "standardise"] | None = Field(
        None, description="Of the features. [default: the protocol's own]"
    )
    class_weight: Literal["balanced"] | None = Field(None, description="Each class weighs the same.")
    seed: int = Field(defaults.SEED, strict=True, ge=0, lt=1 << 32, description="Of all that is drawn.")
    similarity: bool = Field(False, description="Also how alike the layers are: linear CKA and RSA.")
    results: Path | None = Field(
        None, description="Folder of the results. [default: OUT/probe/PROTOCOL, or PROTOCOL-2 for other settings]"
    )
    save: Path | None = Field(None, description="Keep the probe, for `layertap predict`; of one layer.")
    device: str = Field(defaults.DEVICE, description="auto, cpu, cuda, cuda:N or mps.")
    max_memory_mb: int | None = Field(
        None,
        strict=True,
        ge=64,
        description="Held at once; larger features are streamed. [default: half of what is free]",
    )

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        if self.multilabel and self.protocol == "ridge":
            raise ValueError("--multilabel: ridge predicts numbers, not labels")
        return self

    @field_validator("out", "layers", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def name_of(images: str) -> str:
    """What a data set of these images is called: photos, of photos/, photos.zip and s3://bucket/photos-{00..99}.tar.

    That of a plan is called as if the images themselves were given.
    """
    from extract.images.index.image_index import is_plan, open_plan

    if "://" not in images and is_plan(images):
        images = open_plan(images).root
    images = re.sub(r"(\.(?:h5|hdf5)):.*$", r"\1", images, flags=re.IGNORECASE)  # the name of a data set inside
    path = images if "://" in images else str(Path(images).resolve())
    name = path.rstrip("/").rpartition("/")[2]
    if not Path(images).is_dir():
        name = re.sub(r"\.(csv|tsv|parquet|tar|zip|npy|h5|hdf5)$", "", name, flags=re.IGNORECASE)
        name = re.sub(r"[-_.]*(\{[^{}]*\}|[*?]+|\[[^\]]*\])[-_.]*", "", name)
    return name or "images"


Config = TypeVar("Config", bound=BaseModel)


def load_config(model: type[Config], path: Path | None, flags: dict[str, Any]) -> Config:
    """The configuration of a file, with flags over it.

    Args:
        model: of the job.
        path: a YAML file, or None.
        flags: those that were given.

    Raises:
        InputError: the file is no YAML mapping, or a value is wrong; every wrong key is named.
        UnknownNameError: a key that does not exist.
    """
    values = read_yaml(path) if path else {}
    for key in values:
        if key not in model.model_fields:
            raise unknown_name("key", str(key), model.model_fields, str(path))
    return checked(model, {**values, **flags}, f"{path}" if path and not flags else "")


def checked(model: type[Config], values: dict[str, Any], where: str = "") -> Config:
    """A configuration of these values.

    Raises:
        InputError: a value is wrong; every wrong key is named.
    """
    try:
        return model(**values)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')} (given: {e['input']!r})"
                 if e["loc"] else e["msg"].removeprefix("Value error, ")
                 for e in error.errors()
                 if e["type"] != "missing"]  # fmt: skip
        if len(lines) < error.error_count():
            missing = next(str(e["loc"][0]) for e in error.errors() if e["type"] == "missing")
            lines.append(f"{missing}: none given" + ("" if where else f", neither as {missing.upper()} nor as a key"))
        raise InputError((f"{where}: " if where else "") + "\n".join(lines)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a config file.

    Raises:
        InputError: it is no YAML mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"config file {path} is no YAML: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"config file {path} holds no keys; expected lines such as `images: photos`")
    return content
