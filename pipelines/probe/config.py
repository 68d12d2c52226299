"""Configuration of `layertap probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from extract import defaults

__all__ = ["ProbeConfig"]


class ProbeConfig(BaseModel):
    """Configuration of `layertap probe`."""

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
