"""Configuration of the jobs: one frozen model per job, with the same keys in YAML as on the command line.

A text that starts with `~/` is a path below the home folder, in a config file and on the command line: a
shell expands neither the values of a file nor `--out=~/features`, and a folder called `~` may be removed with
`rm -rf ~`. All texts are treated alike: a list of the keys that are paths would be forgotten by the next key. `./~`
names a file called `~`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo

from extract import defaults
from extract.credentials import without_credentials
from extract.errors import InputError, first_line, unknown_name
from extract.extraction import settings
from extract.extraction.settings import BACKBONE, IMAGES
from extract.system.json_files import mapped
from extract.system.similar_paths import did_you_mean
from pipelines.terminal.commands import GONE_OPTIONS

__all__ = [
    "FROZEN",
    "BackboneConfig",
    "DataSetKeys",
    "DerivedPartKeys",
    "ExtractionKeys",
    "FeatureKeys",
    "Seconds",
    "Words",
    "checked",
    "keys_of",
    "load_config",
    "name_of",
    "read_yaml",
    "split_numbers",
    "with_home",
]

# A decoding process takes some hundred MB: with 1,000, a machine swaps before the first batch. More than one for each
# core pays only while they wait for a server.
_MOST_WORKERS = max(128, 4 * defaults.CORES)

# Pydantic's words for limits, and ours.
_SHORTER = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "more than",
            ", unable to parse string as a number": ""}  # fmt: skip

_FIRST = ("images", "backbone", "backbones", "layers", "out", "weights")  # in help texts and pages of reference

# A device as PyTorch names it, or several; PyTorch itself takes seconds to import.
_DEVICE = r"(auto|cpu|cuda|mps|xpu|hpu|mtia|xla)(:\d+)?"
_DEVICES = re.compile(rf"all|{_DEVICE}( *, *{_DEVICE})*", re.ASCII)

FROZEN = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # most commands use one configuration at most

Words = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]

# Types of settings that are others in config files.
_IN_FILES: dict[Any, Any] = {
    str | Sequence[str]: Words,
    str | os.PathLike[str] | None: Path | None,
    str | os.PathLike[str] | Iterable[Any] | None: str | None,
}


def _keys(model: Any) -> type[BaseModel]:
    """Return a configuration whose keys are the settings of a class."""
    keys: dict[str, Any] = {}
    for name, field in settings.fields_of(model).items():
        key = copy(field)
        key.default = list(field.default) if isinstance(field.default, tuple) else field.default
        keys[name] = (_IN_FILES.get(field.annotation, field.annotation), key)
    return create_model("Keys", __config__=FROZEN, **keys)


if TYPE_CHECKING:  # a configuration has the attributes of the settings
    BackboneKeys = settings.BackboneSettings
    DecodingKeys = settings.DecodingSettings
    FeatureKeys = settings.FeatureSettings
    DataSetKeys = settings.DataSetSettings
    DerivedPartKeys = settings.DerivedPartSettings
    ExtractionKeys = settings.ExtractionSettings
else:
    BackboneKeys, DecodingKeys = _keys(settings.BackboneSettings), _keys(settings.DecodingSettings)
    DerivedPartKeys = _keys(settings.DerivedPartSettings)
    FeatureKeys, DataSetKeys = _keys(settings.FeatureSettings), _keys(settings.DataSetSettings)
    ExtractionKeys = _keys(settings.ExtractionSettings)


def split_numbers(value: Any) -> Any:
    """Return the parts of text such as 0,3,17; other types are returned unchanged."""
    return value.split(",") if isinstance(value, str) else value


class BackboneConfig(BackboneKeys, DecodingKeys, BaseModel):
    """Images, backbone and preprocessing: the keys that all computing jobs share."""

    images: Annotated[str, IMAGES] = Field(
        description="Folder, .csv or .parquet list, .tar or .zip archives, .npy or .h5 array, a URL, or a plan."
    )
    backbone: Annotated[str, BACKBONE] = Field(defaults.BACKBONE, description="SOURCE/NAME; see `layertap list`.")
    size: Annotated[int | list[int] | None, IMAGES] = Field(
        None, description="Resize the shorter side to these pixels, or to HxW. [default: the model's own]"
    )
    crop: Annotated[int | list[int] | None, IMAGES] = Field(
        None, description="Pixels of the centre crop, the input of the model."
    )
    interpolation: Annotated[str | None, IMAGES] = Field(
        None, description="nearest, bilinear, bicubic, lanczos, box or hamming."
    )
    mean: Annotated[list[float] | None, BeforeValidator(split_numbers), IMAGES] = Field(
        None, description="R,G,B to subtract from pixels scaled to 0..1."
    )
    std: Annotated[list[float] | None, BeforeValidator(split_numbers), IMAGES] = Field(
        None, description="R,G,B to divide by afterwards."
    )

    @field_validator("images", "out", "without", mode="before", check_fields=False)
    @classmethod
    def _check_path(cls, value: Any) -> Any:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(value, str) and (not value or "\0" in value):
            raise ValueError("expected a path that is not empty and has no null characters")
        return value

    @field_validator("size", "crop", mode="before")
    @classmethod
    def _parse_size(cls, value: Any) -> Any:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d+)(?:x(\d+))?", value, re.ASCII)):
            value = int(match[1]) if match[2] is None else [int(match[1]), int(match[2])]
        pixels = value if isinstance(value, list) else [value, value]
        if value is not None and (isinstance(value, str) or len(pixels) != 2 or 0 in pixels):
            raise ValueError("expected pixels, such as 256 or 256x320")
        return value

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not _DEVICES.fullmatch(value):
            raise InputError("expected auto, cpu, cuda, cuda:N or mps", hint="a GPU is cuda (NVIDIA) or mps (Apple)")
        return value

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: int) -> int:
        if value > _MOST_WORKERS:
            raise ValueError(f"expected at most {_MOST_WORKERS} processes on this machine; each takes some hundred MB")
        return value

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The preprocessing values that were given; they replace those of the weights' library."""
        names = ("size", "crop", "interpolation", "mean", "std")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def keys_of(model: Any) -> dict[str, FieldInfo]:
    """Return the keys of a configuration, or the settings of a class, with descriptions; the most needed ones first."""
    keys = model.model_fields if issubclass(model, BaseModel) else settings.fields_of(model)
    shared = settings.fields_of(settings.BackboneSettings) | settings.fields_of(settings.ExtractionSettings)
    for key, field in keys.items():
        if key in shared:
            field.description = field.description or shared[key].description
            if not any(isinstance(each, settings.Heading) for each in field.metadata):
                field.metadata += [each for each in shared[key].metadata if isinstance(each, settings.Heading)]
    return {key: keys[key] for key in dict.fromkeys((*_FIRST, *keys)) if key in keys}


def name_of(images: str) -> str:
    """Return the default name of a data set: photos for photos/, photos.zip and s3://bucket/photos-{00..99}.tar.

    The data set of a plan is named after the images that the plan lists.
    """
    from extract.images.listing import SUFFIXES, is_plan
    from extract.images.plans import open_plan
    from extract.images.sources import suffix_of

    if "://" not in images and is_plan(images):
        images = open_plan(images).root
    images = re.sub(r"(\.(?:h5|hdf5)):.*$", r"\1", images, flags=re.IGNORECASE)  # cut off the name of the HDF5 data set
    images = without_credentials(images)
    path = images if "://" in images else str(Path(images).resolve())
    name = path.rstrip("/").rpartition("/")[2]
    if images.startswith("hfds://"):
        name = name.replace(":", "-")  # NAME:SPLIT:COLUMN
    if not Path(images).is_dir():
        suffix = suffix_of(name, SUFFIXES)
        name = name[: -len(suffix)] if suffix in SUFFIXES else name
        name = re.sub(r"[-_.]*(\{[^{}]*\}|[*?]+|\[[^\]]*\])[-_.]*", "", name)
    return name or "images"


_LONGEST_S = 86400.0 * 36500
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    """Return the seconds of text such as 90, 90s, 15m, 36h or 30d; other types are returned unchanged."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip(), re.ASCII)):
        return float(match[1]) * _UNITS[match[2] or "s"]
    if isinstance(value, str):
        raise ValueError("expected seconds, or a time such as 90s, 15m, 36h or 30d")
    return value


def _finite(value: float) -> float:
    """Return the value; raise ValueError if it is NaN or more than 36,500 days in seconds."""
    if not value <= _LONGEST_S:
        raise ValueError(f"expected at most {_LONGEST_S / 86400:.0f}d")
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), AfterValidator(_finite)]  # as a key of a config: 90, 90s, 15m


Config = TypeVar("Config", bound=BaseModel)


def load_config(model: type[Config], path: Path | None, flags: dict[str, Any]) -> Config:
    """Load a configuration from a file; flags override the file.

    Args:
        model: configuration class of the job.
        path: YAML file, or None.
        flags: values given on the command line.

    Raises:
        InputError: the file is not a YAML mapping, or a value is wrong; the message names every wrong key.
        UnknownNameError: the file has an unknown key.
    """
    values = read_yaml(path) if path else {}
    for key in values:
        if key not in model.model_fields:
            hint = GONE_OPTIONS.get(f"--{str(key).replace('_', '-')}", "")
            raise unknown_name("key", str(key), model.model_fields, str(path), hint=hint)
    return checked(model, {**values, **flags}, f"{path}" if path else "", flags)


def checked(model: type[Config], values: dict[str, Any], where: str = "", flags: Collection[str] = ()) -> Config:
    """Return a configuration with these values.

    Args:
        model: configuration class of the job.
        values: key -> value.
        where: config file, and place in it; empty if there is none.
        flags: keys that were given on the command line.

    Raises:
        InputError: a value is wrong; the message names every wrong key.
    """
    try:
        return model(**values)
    except ValidationError as error:
        lines, hints = [], []
        for e in error.errors():
            if e["type"] == "missing":
                continue
            refused = e.get("ctx", {}).get("error")
            text, hint = e["msg"].removeprefix("Value error, ").replace("Input should be", "expected"), ""
            for long, short in _SHORTER.items():
                text = text.replace(long, short)
            if str(e["input"]).endswith("%"):
                hint = "write a share as a number, such as 0.2"
            if isinstance(refused, InputError):
                text, hint = refused.message, refused.hint
            key = str(e["loc"][0]) if e["loc"] else ""
            in_file = where and (not flags or (key in values and key not in flags))
            if key:
                name = ".".join(map(str, e["loc"])) if in_file else _as_typed(key)
                text = f"{name}: {text}; got {e['input']!r}"
            lines.append(f"{where}: {text}" if in_file else text)
            hints.append(hint)
        if len(lines) < error.error_count():
            missing = next(str(e["loc"][0]) for e in error.errors() if e["type"] == "missing")
            only_file = where and not flags
            lines.append(f"{where}: the key `{missing}` is missing" if only_file else f"no {missing} given")
            if not only_file:
                hints.append(f"name {missing.upper()}, or set the key `{missing}` in a config file (--config FILE)")
        raise InputError("\n".join(lines), hint="\n".join(filter(None, hints))) from None


def _as_typed(key: str) -> str:
    """Return the option or argument of the running command that sets a key; the key itself if there is none."""
    context = click.get_current_context(silent=True)
    for parameter in context.command.params if context else ():
        if parameter.name == key:
            return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
    return key


class _Loader(yaml.SafeLoader):
    """A loader that refuses a key that is given twice; the others take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a config file.

    Raises:
        InputError: the file cannot be read, or is not a YAML mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        if not isinstance(content, dict):
            raise InputError(f"config file {path} has no keys; expected lines such as `images: photos`")
        values: dict[str, Any] = mapped(content, str, with_home)
    except OSError as error:
        reason, hint = error.strerror, did_you_mean(path) if isinstance(error, FileNotFoundError) else ""
        if isinstance(error, IsADirectoryError):
            reason = "it is a folder; expected a YAML file, which names the folder"
            name = path.resolve().name or "photos"
            lines = shlex.join([f"images: {path}", f"out: outputs/{name}-sync"])
            hint = f"to make one: printf '%s\\n' {lines} > {shlex.quote(f'{name}.yaml')}"
        raise InputError(f"config file {path}: {reason}", hint=hint) from None
    except RecursionError:
        raise InputError(f"config file {path} is nested too deep") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        hint = "indent with spaces" if "\\t" in str(error) else ""
        raise InputError(f"config file {path} is not YAML: {_problem(error)}", hint=hint) from None
    return values


def _problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Return in one line what is wrong in a config file, and where."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return first_line(error)


def with_home(text: str) -> str:
    """Return a text with a leading `~/` expanded; any other text unchanged."""
    if text != "~" and not text.startswith("~/"):
        return text
    return os.path.expanduser(text)  # noqa: PTH111  Path would drop a final slash
