"""Configuration of `sync`: data sets that follow folders, and the times of their passes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo

from pydantic import BaseModel, Field, field_validator, model_validator

from extract.errors import InputError, unknown_name
from extract.extraction.settings import BoxSettings, ExtractionSettings
from extract.images.image_list import are_asked
from extract.images.listing import is_plan
from extract.sync.difference import Guards
from pipelines.embed.config import FeaturesConfig
from pipelines.terminal.config import FROZEN, DerivedPartKeys, Seconds, Words, checked, read_yaml

__all__ = ["ScheduleConfig", "SyncConfig", "SyncFile", "chosen", "load_sync_file"]


_OTHER_FILES = {"masks": "masks", **{field.name: "boxes" for field in fields(BoxSettings)}}  # that tell the parts


class SyncConfig(DerivedPartKeys, FeaturesConfig):
    """Configuration of a data set and the folder that it follows."""

    settle: Seconds = Field(
        Guards.settle_s, ge=0, description="Files changed more recently wait, since they may still be being written."
    )
    max_vanish: float = Field(
        Guards.max_vanish, ge=0, le=1, description="If a larger fraction of the files is gone, nothing is changed."
    )
    retry_after: Seconds = Field(
        Guards.retry_after_s, ge=0, description="Retry failed images after this time, even if they have not changed."
    )
    keep_gone: Seconds = Field(
        Guards.keep_gone_s, ge=0, description="Keep unused features for this time, for files that come back."
    )

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        are_asked(self)  # raises for settings that have no effect
        if "://" in self.images:
            raise ValueError("images: sync follows a folder on this machine, not a URL")
        if "://" in (self.out or ""):
            raise ValueError("out: sync writes to a folder on this machine, not to a URL")
        if is_plan(self.images):
            raise InputError(f"images: {self.images} is a plan, which does not change", hint="name the folder itself")
        if self.folder.resolve().is_relative_to(Path(self.images).resolve()):
            raise InputError(f"out: {self.folder} lies inside {self.images}", hint="name a folder outside the images")
        return self

    def settings(self, **changes: Any) -> ExtractionSettings:
        """Return the extraction settings. Nothing is fitted to images that change."""
        return super().settings(distortion=None, fit_on=None, **changes)

    @property
    def root(self) -> str:
        """Absolute path of the image folder, with symbolic links unresolved."""
        return os.path.abspath(self.images)  # noqa: PTH100  Path.resolve would follow links

    @property
    def guards(self) -> Guards:
        """Safety limits of a pass."""
        return Guards(self.settle, self.max_vanish, self.retry_after, self.keep_gone)


class ScheduleConfig(BaseModel):
    """Times of the passes, and what to do after a failure."""

    model_config = FROZEN

    cron: str | None = Field(None, description="minute hour day month weekday, in local time.")
    every: Seconds | None = Field(None, gt=0, description="Time from one start to the next: 90s, 15m, 6h, 1d.")
    timezone: str | None = Field(
        None, description="Time zone of cron, such as Europe/Berlin. [default: this machine's]"
    )
    catch_up: bool = Field(True, description="Start at once if a pass was due while no scheduler ran.")
    on_failure: Words = Field(
        [], description="Commands that run when a failure starts, changes or ends; stdin has what failed, as JSON."
    )

    @field_validator("timezone")
    @classmethod
    def _check_time_zone(cls, value: str | None) -> str | None:
        try:
            if value:
                ZoneInfo(value)
        except (OSError, ValueError, LookupError) as error:
            raise ValueError("no such time zone; expected a name such as Europe/Berlin") from error
        return value

    @field_validator("cron")
    @classmethod
    def _check_cron_line(cls, value: str | None) -> str | None:
        from cronsim import CronSim, CronSimError

        try:
            if value is not None:
                CronSim(value, datetime.now(UTC))
                if len(value.split()) != 5:
                    raise CronSimError("seconds")
        except CronSimError as error:
            raise ValueError("expected minute, hour, day, month and weekday, such as 30 2 * * *") from error
        return value

    @model_validator(mode="after")
    def _check_cron_or_every(self) -> Self:
        if (self.cron is None) == (self.every is None):
            raise ValueError("expected exactly one of cron and every")
        return self

    @model_validator(mode="after")  # of the model: an error of the field would repeat the URL, which often is a secret
    def _check_on_failure(self) -> Self:
        if any(command.startswith(("http://", "https://")) for command in self.on_failure):
            raise InputError("on_failure: expected commands, not URLs", hint="use the command `curl -d @- URL`")
        return self


class SyncFile(BaseModel):
    """A config file: the keys of a data set, or several data sets under `data_sets`; and `schedule`."""

    model_config = FROZEN

    path: Path
    data_sets: list[SyncConfig] = Field(min_length=1)
    schedule: ScheduleConfig | None = None

    @property
    def required_schedule(self) -> ScheduleConfig:
        """The schedule; InputError if the file has none."""
        if self.schedule is None:
            raise InputError(f"{self.path}: the key `schedule` is missing", hint="add `schedule: {cron: 30 2 * * *}`")
        return self.schedule


def load_sync_file(path: Path) -> SyncFile:
    """Read a config file of `sync`.

    Keys beside `data_sets` apply to all data sets; without `data_sets`, they describe a single data set.

    Raises:
        InputError: the file is not a YAML mapping, a value is wrong, or two data sets have the same `out`; the message
            names every wrong key.
        UnknownNameError: the file has an unknown key.
    """
    values = read_yaml(path)
    items, schedule = values.pop("data_sets", [{}]), values.pop("schedule", None)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items) or not items:
        raise InputError(f"{path}: data_sets: expected a list, with the keys of one data set in each item")
    if schedule is not None and not isinstance(schedule, dict):
        raise InputError(f"{path}: schedule: expected keys such as `cron` or `every`")
    data_sets = []
    for number, item in enumerate(items, 1):
        where = f"{path}" + (f", data set {number}" if len(items) > 1 else "")
        merged = {**values, **item}
        for key in merged:
            if what := _OTHER_FILES.get(key):
                raise InputError(
                    f"{where}: {key}: sync follows files, and {what} change without them",
                    hint=f"compute the parts by {what} into a new data set with `layertap embed`",
                )
            if key not in SyncConfig.model_fields:
                raise unknown_name("key", str(key), [*SyncConfig.model_fields, "data_sets", "schedule"], where)
        data_sets.append(checked(SyncConfig, merged, where))
    for key in schedule or {}:
        if key not in ScheduleConfig.model_fields:
            raise unknown_name("key", str(key), ScheduleConfig.model_fields, f"{path}, schedule")
    outs: dict[Path, SyncConfig] = {}
    for data_set in data_sets:
        if (other := outs.setdefault(data_set.folder.absolute(), data_set)) is not data_set:
            raise InputError(
                f"{path}: {other.images} and {data_set.images} have the same out, {data_set.folder}; "
                "each data set follows one folder"
            )
    timed = None if schedule is None else checked(ScheduleConfig, schedule, f"{path}, schedule")
    return SyncFile(path=path, data_sets=data_sets, schedule=timed)


def chosen(file: SyncFile, only: Sequence[str]) -> list[SyncConfig]:
    """Return the data sets whose `out` is in `only`; all data sets if `only` is empty.

    Raises:
        UnknownNameError: no data set has this `out`.
    """
    by_name = {os.path.normpath(data_set.folder): data_set for data_set in file.data_sets}
    for name in only:
        if os.path.normpath(name) not in by_name:
            raise unknown_name("data set", name, by_name, str(file.path))
    return [by_name[os.path.normpath(name)] for name in only] or file.data_sets
