"""Hooks: commands and URLs that are called after a scheduled pass."""

from __future__ import annotations

import http.client
import logging
import os
import re
import subprocess
import urllib.request
from collections.abc import Sequence

from extract.credentials import text_without_credentials
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
            log.error("%s: %s", _shown(hook), _reason_of(error))


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
        shown = text_without_credentials(output)[-500:]
        log.error("%s: exit code %d: %s", _shown(command), process.returncode, shown)


def _shown(hook: str) -> str:
    """Return a hook for the log: of a URL only protocol and host, since the path of a webhook often is its secret."""
    public = text_without_credentials(hook)
    if not hook.startswith(("http://", "https://")):
        return public
    host = re.match(r"https?://(\[[^\]]*\]|[^:/?#]*)(:\d+(?![^/?#]))?", public)
    return f"{host[0] if host else ''}/..."


def _reason_of(error: Exception) -> str:
    """Return why a hook failed; the message of a URL that is not valid may repeat any part of it."""
    return type(error).__name__ if isinstance(error, http.client.InvalidURL) else first_line(error)
