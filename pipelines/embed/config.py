"""Configuration of `layertap embed`, and the keys that `layertap sync` shares with it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from extract import defaults
from extract.errors import InputError, separated_by_commas
from extract.extraction.settings import OUTPUT, RARE, SAFETY, SPEED, WORKERS, ExtractionSettings
from extract.system.urls import is_url
from pipelines.terminal.config import BackboneConfig, DataSetKeys, ExtractionKeys, name_of

if TYPE_CHECKING:
    from extract.images import Images

__all__ = ["EmbedConfig", "FeaturesConfig", "check_output", "images_of", "listed_images"]


class FeaturesConfig(BackboneConfig, DataSetKeys):
    """Features, and how to compute and store them: the keys that `embed` and `sync` share."""

    out: Annotated[str | None, OUTPUT] = Field(
        None,
        description="Folder of the data set; `embed` also takes s3://BUCKET/NAME. [default: outputs/<name of IMAGES>]",
    )
    strict: Annotated[bool, SAFETY] = Field(False, description="Exit with code 3 if a row failed.")

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        for text in self.layers:
            if not text.partition(":")[0]:
                raise InputError(
                    f"layer {text!r} has no name; expected LAYER[:POOLING]...",
                    hint=f"list them: layertap list {self.backbone}",
                )
            if error := separated_by_commas(text, self.backbone):  # before PyTorch is imported
                raise error
        return self

    @field_validator("compile", mode="before")
    @classmethod
    def _read_yaml_boolean(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # YAML's on and off

    def settings(self, **changes: Any) -> ExtractionSettings:
        """Return the extraction settings, with `changes` applied."""
        return ExtractionSettings.of(self, **changes)

    @property
    def folder(self) -> Path:
        """Folder of the data set, if it is not in a bucket."""
        return Path(self.out) if self.out else Path("outputs") / name_of(self.images)


class EmbedConfig(FeaturesConfig, ExtractionKeys):
    """Configuration of `layertap embed`."""

    fast: Annotated[bool, SPEED] = Field(
        False,
        description="Use the fastest precision, compile and decode that agree; not for short jobs.",
    )
    retry_failed: Annotated[bool, SAFETY] = Field(False, description="Retry images that failed in an earlier run.")
    add_layers: Annotated[bool, SAFETY] = Field(
        False, description="Add layers to the data set of the same images and backbone."
    )
    device: str = Field(
        defaults.DEVICE, description="auto, cpu, cuda, cuda:N or mps; for several workers cuda:0,cuda:1 or all."
    )
    engine: Annotated[Literal["processes", "ray"] | None, WORKERS] = Field(
        None, description="Run several workers: processes on this machine, or tasks on a Ray cluster."
    )
    workers_per_gpu: Annotated[int, WORKERS, RARE] = Field(
        1, strict=True, ge=1, description="Number of workers per GPU."
    )
    cpus_per_worker: Annotated[int | None, WORKERS, RARE] = Field(
        None, strict=True, ge=1, description="Cores per worker. [default: all cores, shared evenly]"
    )
    address: Annotated[str, WORKERS, RARE] = Field(
        "auto", min_length=1, description="Address of the Ray cluster; local: start a cluster here."
    )
    shards_of: Annotated[str | None, WORKERS] = Field(
        None, description="I/N: build shards I, I + N, I + 2N and so on; for a task of a SLURM array."
    )
    scratch: Annotated[Path | None, WORKERS, RARE] = Field(
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
        return super().settings(**({"fit_on": None} if self.is_shared else {}) | changes)

    @property
    def place(self) -> str:
        """Folder or URL of the data set."""
        return self.out if self.out and is_url(self.out) else str(self.folder)

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
            remedy = (
                "`layertap doctor --bench` prints the fastest flags" if self.fast else "run it later in one process"
            )
            raise InputError(f"{flag} works in one process and on a folder only", hint=remedy)
        return self


def check_output(config: EmbedConfig) -> None:
    """Check that the folder of a run holds a data set, or that one can be created there; nothing stays.

    Raises:
        InputError: it cannot.
    """
    from extract.store.format.dataset import check_usable

    if is_url(config.place):
        return
    folder = config.folder.absolute()
    check_usable(config.folder)
    if folder.is_dir():  # of tasks that start together, none may see a temporary folder of another in it
        return
    place = next(parent for parent in folder.parents if parent.exists())
    try:
        Path(
            tempfile.mkdtemp(prefix=".layertap-", dir=place)
        ).rmdir()  # permissions do not tell whether this can be done
    except OSError as error:
        raise InputError(
            f"{config.folder}: the folder cannot be created in {place}: {error.strerror}",
            hint="choose another output folder with -o",
        ) from error


def listed_images(config: EmbedConfig) -> Images:
    """List the images of a run, after its output is checked. Neither PyTorch nor a backbone is loaded for it.

    Raises:
        InputError: the images, or the folder of the data set, cannot be used.
    """
    check_output(config)
    return images_of(config)


def images_of(config: EmbedConfig) -> Images:
    """List the images of a run, or the parts of images that it asks for."""
    from extract.images import list_images

    return list_images(config.images, config.limit, config.keep, config.without, config)
