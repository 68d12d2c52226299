"""The schedule of a config file in the format of another scheduler: systemd or cron."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from extract.errors import InputError
from pipelines.sync.config import SyncFile
from pipelines.terminal.text_output import LAYERTAP

__all__ = ["as_cron", "as_systemd"]


def as_systemd(file: SyncFile) -> str:
    """Return a service that runs the schedule, below a comment with its path.

    It has no timer, which would read the cron line in its own way, and could not express all of them. The service runs
    as the user of this process. Without `User=` it would run as root, and so own the features. When it is stopped, the
    running pass finishes its batch first.
    """
    _ = file.required_schedule  # raises without one
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in file.path.stem)
    name = f"layertap-{letters.strip('-') or 'sync'}"
    command = [*LAYERTAP, "sync", _path(file), "--schedule"]
    return "\n".join([
        f"# /etc/systemd/system/{name}.service",
        "[Unit]",
        f"Description=layertap: synchronise features with folders, {_escaped(file.path.name)}",
        "",
        "[Service]",
        f"User={os.geteuid()}",
        f"WorkingDirectory={str(Path.cwd()).replace('%', '%%')}",
        "ExecStart=" + " ".join(f'"{_escaped(word)}"' for word in command),
        "Restart=always",
        "RestartSec=1min",
        "RestartPreventExitStatus=2",  # the config file is wrong
        "KillMode=mixed",
        "TimeoutStopSec=10min",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
        f"# then: systemctl enable --now {name}.service",
    ])  # fmt: skip


def as_cron(file: SyncFile) -> str:
    """Return the lines of a crontab."""
    schedule = file.required_schedule
    if schedule.cron is None:
        raise InputError(
            f"{file.path}: cron runs passes at the times of the key `cron`, not after `every`",
            hint="write, for every 15 minutes, `cron: '*/15 * * * *'`",
        )
    if schedule.on_failure:
        raise InputError(
            f"{file.path}: cron runs a pass, not the commands of on_failure",
            hint="use --print systemd; or leave them out, since cron sends by mail what a failed pass prints",
        )
    command = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([*LAYERTAP, 'sync', _path(file)])}".replace("%", r"\%")
    lines = ["# cron skips passes that were due while the machine was off; `layertap sync --schedule` catches up"]
    if schedule.timezone:
        lines += ["# cronie reads CRON_TZ; other crons use the machine's time zone", f"CRON_TZ={schedule.timezone}"]
    return "\n".join([*lines, f"{schedule.cron} {command}"])


def _path(file: SyncFile) -> str:
    path = str(file.path.resolve())
    if "\n" in f"{Path.cwd()}{path}":  # what follows would be a line of the unit or of the crontab
        raise InputError(f"{file.path}: a unit or a crontab cannot name a file or a folder with a line break")
    return path


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
