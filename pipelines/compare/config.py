"""Configuration of `layertap compare`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from extract import defaults
from extract.extraction.settings import ExtractionSettings
from pipelines.probe.config import LinearIsClip
from pipelines.terminal.config import FeatureKeys, Words, name_of

__all__ = ["CompareConfig"]


class CompareConfig(FeatureKeys, BaseModel):
    """Configuration of `layertap compare`."""

    images: str = Field(min_length=1, description="See `layertap embed`.")
    backbones: Words = Field([], description="Backbone, or glob of backbones; may be repeated.")
    table: Path | None = Field(
        None, description="FILE.csv with the columns `backbone` and optionally `weights` and `name`."
    )
    protocol: LinearIsClip[Literal["linear", "clip", "simclr", "dinov2-logreg", "knn", "centroid"]] = Field(
        "clip", description="Classifier, and how its hyperparameter is chosen; linear is clip. See `layertap probe`."
    )
    labels: str | None = Field(
        None, description="FILE.csv[:COLUMN], a table of images. [default: the classes of the images]"
    )
    tasks: Words = Field(
        [], description="NAME=FILE.csv[:COLUMN]: labels of one of several tasks, in place of --labels; may be repeated."
    )
    out: Path | None = Field(None, description="Folder of the comparison. [default: outputs/<name of IMAGES>-compared]")
    workers: int = Field(defaults.WORKERS, strict=True, ge=0)
    device: str = defaults.DEVICE
    limit: int | None = Field(None, strict=True, ge=1)
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="Fraction to draw for testing. [default: the splits of the images, or 0.2]"
    )
    seed: int = Field(
        defaults.SEED, strict=True, ge=0, lt=1 << 32, description="Seed of random weights and random choices."
    )

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, value: list[str]) -> list[str]:
        names = [task.partition("=")[0].lower() for task in value]  # some file systems ignore case
        for task, name in zip(value, names, strict=True):
            if not re.fullmatch(r"[\w.-]+=.+", task) or name.startswith("."):
                raise ValueError(
                    f"expected NAME=FILE.csv[:COLUMN], where NAME has letters, digits, '-', '_' and '.'; got {task!r}"
                )
            if names.count(name) > 1:
                raise ValueError(f"two tasks are called {name}")
        return value

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if self.tasks and self.labels is not None:
            raise ValueError("--labels and --task cannot be used together: name each task with --task")
        return self

    @property
    def folder(self) -> Path:
        """Folder of the comparison."""
        return self.out or Path("outputs") / f"{name_of(self.images)}-compared"

    @property
    def labels_of_tasks(self) -> dict[str, str | None]:
        """Name of each task -> its labels; None: the classes of the images. Without --task, the name is "labels"."""
        if not self.tasks:
            return {"labels": self.labels}
        return {name: labels for name, _, labels in (task.partition("=") for task in self.tasks)}

    def settings(self) -> ExtractionSettings:
        """Return the settings of all extractions."""
        return ExtractionSettings.of(self, fit_on=None)
