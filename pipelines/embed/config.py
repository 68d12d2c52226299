"""Configuration of `layertap embed`, and the keys that `layertap sync` shares with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from extract import defaults
from extract.errors import InputError
from extract.extraction.settings import ExtractionSettings
from extract.system.urls import is_url
from pipelines.terminal.config import BackboneConfig, DataSetKeys, ExtractionKeys, name_of

__all__ = ["EmbedConfig", "FeaturesConfig"]


class FeaturesConfig(BackboneConfig, DataSetKeys):
    """Features, and how to compute and store them: the keys that `embed` and `sync` share."""

    out: Path | None = Field(None, description="Folder of the data set. [default: outputs/<name of IMAGES>]")
    strict: bool = Field(False, description="Exit with code 3 if a row failed.")

    @field_validator("compile", mode="before")
    @classmethod
    def _read_yaml_boolean(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # YAML's on and off

    def settings(self, **changes: Any) -> ExtractionSettings:
        """Return the extraction settings, with `changes` applied."""
        return ExtractionSettings.of(self, **changes)

    @property
    def folder(self) -> Path:
        """Folder of the data set."""
        return self.out or Path("outputs") / name_of(self.images)


class EmbedConfig(FeaturesConfig, ExtractionKeys):
    """Configuration of `layertap embed`."""

    out: str | None = Field(  # type: ignore[assignment]
        None, description="Folder of the data set, or s3://BUCKET/NAME. [default: outputs/<name of IMAGES>]"
    )
    fast: bool = Field(
        False,
        description="Use the fastest precision, compile and decode that agree; not for short jobs.",
    )
    retry_failed: bool = Field(False, description="Retry images that failed in an earlier run.")
    add_layers: bool = Field(False, description="Add layers to the data set of the same images and backbone.")
    device: str = Field(
        defaults.DEVICE, description="auto, cpu, cuda, cuda:N or mps; for several workers cuda:0,cuda:1 or all."
    )
    engine: Literal["processes", "ray"] | None = Field(
        None, description="Run several workers: processes on this machine, or actors on a Ray cluster."
    )
    workers_per_gpu: int = Field(1, strict=True, ge=1, description="Number of workers per GPU.")
    cpus_per_worker: int | None = Field(
        None, strict=True, ge=1, description="Cores per worker. [default: all cores, shared evenly]"
    )
    address: str = Field("auto", min_length=1, description="Address of the Ray cluster; local: start a cluster here.")
    shards_of: str | None = Field(
        None, description="I/N: build shards I, I + N, I + 2N and so on; for a task of a SLURM array."
    )
    scratch: Path | None = Field(
        None, description="Folder in which workers build shards. [default: in OUT; on several machines TMPDIR]"
    )

    @field_validator("shards_of", mode="before")
    @classmethod
    def _parse_share(cls, value: Any) -> Any:
        if value is None:
            return None
        match = re.fullmatch(r"(\d{1,7})/(\d{1,7})", str(value), re.ASCII)
        if not match or int(match[1]) >= int(match[2]):
            raise ValueError("expected I/N with I from 0 to N - 1, such as 0/8")
        return match[0]

    @field_validator("device")
    @classmethod
    def _check_devices(cls, value: str) -> str:
        if "," in value and "all" in map(str.strip, value.split(",")):
            raise ValueError("expected all, or devices separated by commas")
        return value

    def settings(self, **changes: Any) -> ExtractionSettings:
        """Return the extraction settings, with `changes` applied. Axes are fitted by a single process only."""
        return super().settings(**({"fit_on": None} if self.is_shared else {}) | changes)

    @property
    def place(self) -> str:
        """Folder or URL of the data set."""
        return self.out if self.out and is_url(self.out) else str(self.folder)

    @property
    def folder(self) -> Path:
        """Folder of the data set, if `place` is not a URL."""
        return Path(self.out) if self.out else Path("outputs") / name_of(self.images)

    @property
    def is_shared(self) -> bool:
        """Whether shards are built elsewhere and then published: by several workers, or for a bucket."""
        several_workers = self.engine or self.shards_of or self.device == "all" or "," in self.device
        return bool(several_workers) or is_url(self.place)

    @model_validator(mode="after")
    def _check_options_have_an_effect(self) -> Self:
        if self.engine != "ray" and "address" in self.model_fields_set:
            raise InputError("--address is that of a Ray cluster", hint="add --engine ray")
        for key in ("workers_per_gpu", "cpus_per_worker", "scratch"):
            if not self.is_shared and getattr(self, key) != type(self).model_fields[key].default:
                flag = f"--{key.replace('_', '-')}"
                raise InputError(f"{flag} is for several workers, and this run has one", hint="add --engine processes")
        flags = {"--fast": self.fast, "--retry-failed": self.retry_failed, "--add-layers": self.add_layers}
        if self.is_shared and any(flags.values()):
            flag = next(flag for flag, is_set in flags.items() if is_set)
            remedy = "`layertap bench` prints the fastest flags" if self.fast else "run it later in one process"
            raise InputError(f"{flag} works in one process and on a folder only", hint=remedy)
        return self
