"""Hooks: commands and URLs that are called after a scheduled pass."""

from __future__ import annotations

import http.client
import logging
import os
import subprocess
import urllib.request
from collections.abc import Sequence

from extract.errors import first_line

__all__ = ["call_hooks"]

_TIMEOUT_S = 60

log = logging.getLogger("layertap.schedule")


def call_hooks(hooks: Sequence[str], content: str, code: int) -> None:
    """Call hooks in order; log failures.

    Args:
        hooks: shell commands, which read the content from stdin; or URLs, to which it is posted.
        content: JSON.
        code: the exit code of the pass; commands read it from LAYERTAP_EXIT_CODE.
    """
    for hook in hooks:
        try:
            if hook.startswith(("http://", "https://")):
                _post(hook, content)
            else:
                _run(hook, content, code)
        except (OSError, ValueError, subprocess.SubprocessError, http.client.HTTPException) as error:
            log.error("%s: %s", hook, first_line(error))


def _post(url: str, content: str) -> None:
    request = urllib.request.Request(url, content.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
        pass


def _run(command: str, content: str, code: int) -> None:
    environment = {**os.environ, "LAYERTAP_EXIT_CODE": str(code)}
    process = subprocess.run(
        command, shell=True, input=content, text=True, capture_output=True, timeout=_TIMEOUT_S, env=environment
    )
    if process.returncode:
        output = (process.stderr or process.stdout).strip()
        log.error("%s: exit code %d: %s", command, process.returncode, output[-500:])
