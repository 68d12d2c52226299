"""Whether the servers of weights can be reached.

The libraries of the Hugging Face hub retry for a minute before they give up, also for files that are in its cache.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

__all__ = ["hub_offline_if_unreachable", "why_unreachable"]

_CONNECT_S = 10


def why_unreachable(url: str) -> str:
    """Return why the server of a URL cannot be connected to; empty if it can, or if a proxy connects to it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(host):
        return ""
    try:
        socket.create_connection((host, parts.port or (80 if parts.scheme == "http" else 443)), _CONNECT_S).close()
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror or error}"
    return ""


@contextlib.contextmanager
def hub_offline_if_unreachable() -> Iterator[str]:
    """Context manager: set the hub's offline mode if its server cannot be reached, and yield why; empty if it can.

    In offline mode, the libraries of the hub take files from its cache at once.
    """
    from huggingface_hub import constants

    reason = "" if constants.HF_HUB_OFFLINE else why_unreachable(constants.ENDPOINT)
    if not reason:
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = False
