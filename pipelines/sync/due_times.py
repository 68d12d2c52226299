"""Due times of passes: the times of a cron line, or a fixed interval."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from cronsim import CronSim
from tzlocal import get_localzone  # distributions keep the zone's name in five files, which may contradict each other

from extract.errors import InputError, first_line
from pipelines.sync.config import ScheduleConfig

__all__ = ["due_after", "time_zone"]


def due_after(config: ScheduleConfig, now: datetime, last: datetime) -> datetime | None:
    """Return the first due time that is later than `now`, in UTC; None if the cron line has none in the next 50 years.

    Args:
        config: the cron line or the interval.
        now: an aware time.
        last: the time from which intervals are counted. It may be later than `now`. Cron lines ignore it.
    """
    now = now.astimezone(UTC)
    if config.cron is not None:
        return _cron_time_after(config.cron, time_zone(config), now)
    assert config.every is not None
    interval = max(timedelta(seconds=config.every), timedelta.resolution)
    return last.astimezone(UTC) + interval * ((now - last) // interval + 1)


def _cron_time_after(line: str, zone: tzinfo, now: datetime) -> datetime | None:
    """Return the first time of a cron line after `now`; None if it has none in the next 50 years.

    cronsim follows Debian's cron when clocks change. A fixed time in a skipped hour is due at the end of that hour. A
    fixed time in a repeated hour is due once, in the first of the two hours.
    """
    for due in CronSim(line, now.astimezone(zone)):
        # If `now` is in the second of the two hours, cronsim starts with times of the first hour, which have passed.
        due_utc: datetime = due.astimezone(UTC)
        if due_utc > now:
            return due_utc
    return None


def time_zone(config: ScheduleConfig) -> tzinfo:
    """Return the time zone in which the cron line is read; UTC for an interval.

    Raises:
        InputError: the config names no time zone, and that of this machine is unknown.
    """
    if config.cron is None:
        return UTC
    if config.timezone:
        return ZoneInfo(config.timezone)
    try:
        return get_localzone()
    except (LookupError, ValueError, OSError) as error:
        raise InputError(
            f"schedule: the time zone of this machine is unknown ({first_line(error)})",
            hint="set it, for example `timezone: Europe/Berlin`",
        ) from error
