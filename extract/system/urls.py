"""URLs of files and folders, and the fsspec file systems that read them."""

from __future__ import annotations

import os
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from extract.credentials import is_url, user_info, without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import pip_install

__all__ = [
    "file_system",
    "http_status",
    "is_http",
    "is_missing",
    "is_url",
    "reference",
    "server_answer",
    "without_query",
]

_ANSWER_S = 30  # limit for connecting to a server, and for each read

# Protocol -> extra with the library that fsspec needs for it.
_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}


def is_http(text: str) -> bool:
    """Whether the text is a URL of a web server."""
    return is_url(text) and text.partition("://")[0].lower() in ("http", "https")


def reference(folder: str, name: str) -> str:
    """Return the end of a file's URL, behind the URL of its folder: percent-encoded for a web server.

    A web server would take `#`, `?` and `%` in a name for a fragment, a query and an escape. Object stores take a key
    unchanged.

    Args:
        folder: URL of the folder.
        name: file name, with `/`; bytes that are not UTF-8 as by `os.fsdecode`.

    >>> reference("https://host/photos", "a #1.jpg"), reference("s3://bucket", "a #1.jpg")
    ('a%20%231.jpg', 'a #1.jpg')
    """
    return quote(os.fsencode(name)) if is_http(folder) else name


def without_query(url: str) -> str:
    """Return a URL up to its query; a `?` that does not start parameters belongs to the path, as in `s3://bucket/a?.png`.

    >>> without_query("https://host/photos.tar?version=2")
    'https://host/photos.tar'
    """
    path, mark, query = url.partition("?")
    return path if mark and "=" in query else url


def http_status(error: BaseException) -> int:
    """Return the HTTP status of an error of aiohttp, or of the error that caused it; 0 if it has none."""
    cause: BaseException | None = error
    while cause is not None:
        # By name, as aiohttp is optional; its other errors have a `status` of 400 that no server sent.
        if any(base.__name__ == "ClientResponseError" for base in type(cause).__mro__):
            return int(getattr(cause, "status", 0))
        cause = cause.__cause__
    return 0


def is_missing(url: str, error: BaseException) -> bool:
    """Whether an error says that the file behind a URL does not exist.

    fsspec raises FileNotFoundError whenever it cannot learn the size of a file on a web server; the cause says why.
    """
    if is_http(url) and error.__cause__ is not None:
        return http_status(error) == 404 or is_missing(url, error.__cause__)
    return isinstance(error, FileNotFoundError)


def server_answer(error: BaseException) -> str:
    """Return what went wrong: "the server answered 403 Forbidden", or the class and message of the error.

    URLs in it lose their credentials.
    """
    if status := http_status(error):
        phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
        return f"the server answered {status} {phrase}".rstrip()
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
    return f"{type(cause).__name__}: {first_line(cause)}"


def file_system(url: str, **settings: Any) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it; the protocol's library finds the credentials.

    Args:
        url: URL of a file or folder.
        settings: further options of the file system.

    Raises:
        InputError: the URL contains a password.
        LayertapError: the protocol is unknown, or its library is not installed or fails.
    """
    from fsspec import core

    protocol, _, location = url.partition("://")
    if user_info(location)[1]:
        raise InputError(
            f"{without_credentials(url)}: a password in a URL is not accepted",
            hint="set it in the environment or in the configuration file of the protocol's library",
        )
    try:
        if protocol in ("http", "https"):
            import aiohttp

            settings["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(sock_connect=_ANSWER_S, sock_read=_ANSWER_S)}
        # fsspec takes "::" in a name for a chain of file systems.
        fs, _ = core.url_to_fs(url.partition("::")[0], **settings)
        return fs, str(core.strip_protocol(url))
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        if not extra:
            raise LayertapError(f"{url}: reading {protocol}:// needs another library: {first_line(error)}") from error
        remedy = f"to install it: {pip_install(extra)}"
        raise LayertapError(f"{url}: reading {protocol}:// needs another library", hint=remedy) from error
    except Exception as error:  # each protocol's library raises its own errors
        raise LayertapError(f"{url}: {first_line(error)}") from error
