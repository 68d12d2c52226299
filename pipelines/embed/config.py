"""Configuration of `layertap embed`, and the keys that `layertap sync` shares with it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from extract import defaults
from extract.compute.pooling import pooling_names
from extract.errors import InputError
from extract.system.urls import is_url
from pipelines.terminal.config import COMPRESS_HELP, SHARD_ROWS_HELP, BackboneConfig, name_of

if TYPE_CHECKING:
    from extract.extraction.settings import ExtractionSettings

__all__ = ["EmbedConfig", "FeaturesConfig"]


class FeaturesConfig(BackboneConfig):
    """Features, and how to compute and store them: the keys that `embed` and `sync` share."""

    out: Path | None = Field(None, description="Folder of the data set. [default: outputs/<name of IMAGES>]")
    layers: list[str] = Field(
        list(defaults.LAYERS),
        min_length=1,
        description=f"May be repeated; globs allowed, ** at any depth. Poolings: {' '.join(pooling_names())}.",
    )
    decode: Literal["exact", "fast"] = Field(
        defaults.DECODE, description="fast: resize with torchvision, decode large JPEGs smaller; compared with exact."
    )
    dtype: Literal["float32", "float16", "bfloat16", "int8"] = Field(
        defaults.DTYPE, description="Type of the stored features; int8 has a scale for each row."
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        defaults.PRECISION,
        description="Precision of the computation; bfloat16 and float16 are compared with float32 on the first batch.",
    )
    compile: Literal["auto", "on", "off", "inductor", "openvino"] = Field(
        defaults.COMPILE,
        description="Compile the forward. auto: if it saves time. on: with OpenVINO on a CPU, else inductor.",
    )
    min_cosine: float = Field(
        defaults.MIN_COSINE,
        ge=-1,
        le=1,
        description="Minimum cosine to eager float32 and exact decoding; features below it are refused.",
    )
    axes: Path | None = Field(
        None, description="Data set or file with the principal axes of LAYER:pcaK. [default: fitted to IMAGES]"
    )
    shard_rows: int | None = Field(None, strict=True, ge=1, description=SHARD_ROWS_HELP)
    compress: Literal["gzip", "lzf", "blosc2"] | None = Field(None, description=COMPRESS_HELP)
    sync_s: float = Field(
        defaults.SYNC_S,
        ge=0,
        description="Seconds of work that a power cut may lose; 0: sync each batch to the disk.",
    )
    strict: bool = Field(False, description="Exit with code 3 if a row failed.")

    @field_validator("compile", mode="before")
    @classmethod
    def _read_yaml_boolean(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # YAML's on and off

    @field_validator("layers", "keep", mode="before", check_fields=False)
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def settings(self, **changes: Any) -> ExtractionSettings:
        """Return the extraction settings, with `changes` applied."""
        from extract.extraction.settings import ExtractionSettings

        names = {field.name for field in fields(ExtractionSettings)} & type(self).model_fields.keys()
        return ExtractionSettings(**({name: getattr(self, name) for name in names} | changes))

    @property
    def folder(self) -> Path:
        """Folder of the data set."""
        return self.out or Path("outputs") / name_of(self.images)


class EmbedConfig(FeaturesConfig):
    """Configuration of `layertap embed`."""

    out: str | None = Field(  # type: ignore[assignment]
        None, description="Folder of the data set, or s3://BUCKET/NAME. [default: outputs/<name of IMAGES>]"
    )

    distortion: float = Field(
        defaults.DISTORTION,
        gt=0,
        lt=1,
        description="For LAYER:srp without a number: squared distances change by at most this part.",
    )
    max_distortion: float | None = Field(
        None, ge=0, description="Deprecated, without effect: projections are measured from Python."
    )
    fit_on: int = Field(
        defaults.FIT_ON, strict=True, ge=2, description="Images to fit the principal axes of LAYER:pcaK on."
    )
    fast: bool = Field(
        False,
        description="Use the fastest precision, compile and decode that agree; not for short jobs.",
    )
    limit: int | None = Field(None, strict=True, ge=1, description="Use only the first LIMIT images.")
    keep: list[str] = Field(
        [], description="Further column of a list or dataset to store with the features; may be repeated."
    )
    retry_failed: bool = Field(False, description="Retry images that failed in an earlier run.")
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

    def settings(self, **changes: Any) -> ExtractionSettings:
        """Return the extraction settings, with `changes` applied. Axes are fitted by a single process only."""
        return super().settings(**({"fit_on": None} if self.is_shared else {}), **changes)

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
        if not self.is_shared:
            for key in ("workers_per_gpu", "cpus_per_worker", "scratch"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    flag = f"--{key.replace('_', '-')}"
                    raise InputError(
                        f"{flag} is for several workers, and this run has one", hint="add --engine processes"
                    )
        return self

    @model_validator(mode="after")
    def _check_single_process(self) -> Self:
        if self.is_shared and (self.fast or self.retry_failed):
            flag = "--fast" if self.fast else "--retry-failed"
            remedy = "`layertap bench` prints the fastest flags" if self.fast else "run it later in one process"
            raise InputError(f"{flag} works in one process and on a folder only", hint=remedy)
        return self
