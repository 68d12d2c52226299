"""The log of `layertap schedule`: text or JSON lines, on stderr or in a file that is rotated."""

from __future__ import annotations

import json
import logging
import logging.handlers
from datetime import UTC, datetime

from extract.errors import LayertapError
from pipelines.sync.config import ScheduleConfig

__all__ = ["open_log"]


def open_log(config: ScheduleConfig) -> None:
    """Send the log of `layertap.schedule` to the configured file or to stderr, and nowhere else.

    A rotated file is renamed, and all lines are flushed: a scheduler that is killed while it rotates loses no line of a
    file that is kept.

    Raises:
        LayertapError: the file cannot be written; the log stays where it was.
    """
    handler: logging.Handler = logging.StreamHandler()
    if config.log is not None:
        try:
            handler = logging.handlers.RotatingFileHandler(
                config.log, maxBytes=config.log_max_bytes, backupCount=config.log_backup_count
            )
        except OSError as error:
            raise LayertapError(f"cannot write the log {config.log}: {error.strerror}") from error
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonFormatter() if config.log_json else text)
    logger = logging.getLogger("layertap.schedule")
    for old in logger.handlers[:]:
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _JsonFormatter(logging.Formatter):
    """Format each record as a line of JSON; `result` is what a pass printed about a data set."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if hasattr(record, "result"):
            line["result"] = record.result
        return json.dumps(line)
