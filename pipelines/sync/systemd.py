"""The schedule of a config file in the format of another scheduler: systemd or cron."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from cronsim import CronSim

from extract.errors import InputError
from pipelines.sync.config import SyncFile
from pipelines.terminal.text_output import LAYERTAP

__all__ = ["as_cron", "as_systemd"]

_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")


def as_systemd(file: SyncFile) -> str:
    """Return a service and its timer as a single text, each below a comment with its path.

    The service runs as the user of this process. Without `User=` it would run as root, and so own the features. A pass
    that is stopped finishes its batch first, and exits with 143; 4: another process is at work.
    """
    schedule = file.required_schedule
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in file.path.stem)
    name = f"layertap-{letters.strip('-') or 'sync'}"
    times = ["OnActiveSec=0", f"OnUnitActiveSec={schedule.every or 0:g}s"]
    if schedule.cron is not None:
        times = [f"OnCalendar={event}" for event in _calendar(schedule.cron, schedule.timezone, file.path)]
        times += ["Persistent=true"] if schedule.catch_up else []
    return "\n".join([
        f"# /etc/systemd/system/{name}.service",
        "[Unit]",
        f"Description=layertap: synchronise features with folders, {_escaped(file.path.name)}",
        "",
        "[Service]",
        "Type=oneshot",
        f"User={os.geteuid()}",
        f"WorkingDirectory={str(Path.cwd()).replace('%', '%%')}",
        "ExecStart=" + " ".join(f'"{_escaped(word)}"' for word in _command(file)),
        "KillMode=mixed",
        "SuccessExitStatus=143 4",
        "TimeoutStopSec=10min",
        "",
        f"# /etc/systemd/system/{name}.timer",
        "[Unit]",
        f"Description=When {name}.service runs",
        "",
        "[Timer]",
        *times,
        "",
        "[Install]",
        "WantedBy=timers.target",
        "",
        f"# then: systemctl enable --now {name}.timer",
    ])  # fmt: skip


def as_cron(file: SyncFile) -> str:
    """Return the lines of a crontab."""
    schedule = file.required_schedule
    if schedule.cron is None:
        raise InputError(
            f"{file.path}: cron runs passes at the times of the key `cron`, not after `every`",
            hint="write, for every 15 minutes, `cron: '*/15 * * * *'`",
        )
    command = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(_command(file))}".replace("%", r"\%")
    lines = [
        "# cron skips passes that were due while the machine was off; `layertap sync --schedule` and systemd catch up",
    ]
    if schedule.timezone:
        lines += ["# cronie reads CRON_TZ; other crons use the machine's time zone", f"CRON_TZ={schedule.timezone}"]
    return "\n".join([*lines, f"{schedule.cron} {command}"])


def _command(file: SyncFile) -> list[str]:
    """Return the command of a pass; with `on_failure`, one that also runs its commands."""
    path = str(file.path.resolve())
    if "\n" in f"{Path.cwd()}{path}":  # what follows would be a line of the unit or of the crontab
        raise InputError(f"{file.path}: a unit or a crontab cannot name a file or a folder with a line break")
    alarmed = [*LAYERTAP[:-1], "pipelines.sync.schedule"]
    command = alarmed if file.required_schedule.on_failure else [*LAYERTAP, "sync"]
    return [*command, path]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")


def _calendar(line: str, timezone: str | None, path: Path) -> list[str]:
    """Return the systemd calendar events of a cron line; two if it restricts days of the month and of the week."""
    parsed = CronSim(line, datetime(2024, 1, 1, tzinfo=UTC))
    minutes, hours = _calendar_list(parsed.minutes, range(60)), _calendar_list(parsed.hours, range(24))
    months = _calendar_list(parsed.months, range(1, 13))
    month_days, week_days = line.split()[2], line.split()[4]
    of_week = [day for day in parsed.weekdays if isinstance(day, int)]
    if min(parsed.days) < 1 or len(of_week) < len(parsed.weekdays):  # such as L, 5#2
        raise InputError(f"{path}: systemd cannot express the days of {line!r}", hint="use `layertap sync --schedule`")
    days = _calendar_list(parsed.days, range(1, 32))
    week = ",".join(_DAYS[day] for day in sorted({day % 7 for day in of_week}))
    time = f"{hours}:{minutes}:00" + (f" {timezone}" if timezone else "")
    week = "" if len(set(of_week) - {7}) == 7 else f"{week} "
    if month_days.startswith("*") or week_days.startswith("*"):  # both days must match; otherwise, either
        return [f"{week}*-{months}-{days} {time}"]
    return [f"*-{months}-{days} {time}", f"{week}*-{months}-* {time}"]


def _calendar_list(values: Iterable[int], every: range) -> str:
    ordered = sorted(values)
    return "*" if ordered == list(every) else ",".join(map(str, ordered))
