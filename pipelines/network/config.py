"""Configuration of `layertap inspect` and `draw`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from extract.errors import InputError
from pipelines.terminal.config import BackboneConfig, split_numbers

__all__ = ["AblateConfig", "DrawConfig", "InspectConfig", "LookConfig"]


def _sample(value: Any) -> int | None:
    if value == "all":
        return None
    if not re.fullmatch(r"[1-9]\d*", str(value), re.ASCII):
        raise ValueError("expected a number of images, or all")
    return int(value)


SampleSize = Annotated[int | None, BeforeValidator(_sample)]
_SAMPLE = "Number of images, evenly spread; or 'all'."


class LookConfig(BackboneConfig):
    """Configuration that `inspect` and `draw` share."""

    layers: list[str] | None = Field(None, min_length=1, description="May be repeated; globs allowed. [default: all]")
    batch_size: int = Field(16, strict=True, ge=1)
    sample: SampleSize = Field(256, description=_SAMPLE)


class _TableConfig(LookConfig):
    """Configuration that `inspect` has with and without `--edit`."""

    labels: str | None = Field(
        None,
        description="FILE.csv[:COLUMN], a table of images and output numbers, WordNet ids or label names. "
        "[default: the images' classes]",
    )
    csv: Path | None = Field(None, description="Also write the table to this file.")
    pictures: Path | None = Field(None, description="Draw figures into this folder; with --edit, or into a file.")
    format: Literal["png", "svg", "pdf"] = Field("png", description="Format of the figures.")

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.pictures is None and "format" in self.model_fields_set:
            raise InputError("--format is that of figures", hint="add --pictures FOLDER")
        return self


class InspectConfig(_TableConfig):
    """Configuration of `layertap inspect`."""

    grad: bool = Field(False, description="Also inspect the gradients of a loss.")
    loss: str = Field(
        "cross_entropy",
        description="Or FILE.py:FUNCTION, called with the model's output and the labels (B,), -1 if unlabelled.",
    )

    @model_validator(mode="after")
    def _check_gradient_options(self) -> Self:
        if not self.grad and {"loss", "labels"} & self.model_fields_set:
            raise ValueError("--loss and --labels need --grad")
        return self


class AblateConfig(_TableConfig):
    """Configuration of `layertap inspect --edit`."""

    layers: list[str] | None = Field(
        None, min_length=1, description="Layers to edit, one at a time; may be repeated, globs allowed."
    )
    sample: SampleSize = Field(64, description=_SAMPLE)
    edit: str = Field("zero", description="zero, mean (of all images), noise:STD, scale:FACTOR or prune:FRACTION.")
    channels: str | None = Field(None, description="0,3,17 or all: edit channels one at a time. [default: layers]")


class DrawConfig(LookConfig):
    """Configuration of `layertap draw`."""

    layers: list[str] | None = Field(
        None, min_length=1, description="May be repeated; globs allowed. [default: the first or last suitable layer]"
    )
    sample: SampleSize = Field(9, description=_SAMPLE)
    channels: Annotated[list[int] | None, BeforeValidator(split_numbers)] = Field(
        None, description="0,3,17: draw only these. [default: those that vary most]"
    )
    target: int | None = Field(None, ge=0, description="Class to explain. [default: the most likely of each image]")
    out: Path = Field(Path("outputs/pictures"), description="Folder of the figures.")
    format: Literal["png", "svg", "pdf"] = Field("png", description="Format of the figures.")
