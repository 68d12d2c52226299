"""URLs of files and folders, and the fsspec file systems that read them."""

from __future__ import annotations

from typing import Any

from extract.credentials import user_info, without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import pip_install

__all__ = ["file_system", "is_url", "without_query"]

_ANSWER_S = 30  # limit for connecting to a server, and for each read

# Protocol -> extra with the library that fsspec needs for it.
_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}


def is_url(text: str) -> bool:
    """Whether the text starts with a protocol, as `s3://bucket/photos` does."""
    protocol, separator, _ = text.partition("://")
    return bool(separator) and protocol.replace("+", "").isalnum()


def without_query(url: str) -> str:
    """Return a URL up to its query; a `?` that does not start parameters belongs to the path, as in `s3://bucket/a?.png`.

    >>> without_query("https://host/photos.tar?version=2")
    'https://host/photos.tar'
    """
    path, mark, query = url.partition("?")
    return path if mark and "=" in query else url


def file_system(url: str, **settings: Any) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it; the protocol's library finds the credentials.

    Args:
        url: URL of a file or folder.
        settings: further options of the file system.

    Raises:
        InputError: the URL contains a password.
        LayertapError: the protocol is unknown, or its library is not installed or fails.
    """
    import fsspec

    protocol, _, location = url.partition("://")
    if user_info(location)[1]:
        raise InputError(
            f"{without_credentials(url)}: a password in a URL is not accepted; set it in the environment or in "
            "the configuration file of the protocol's library"
        )
    try:
        fs_class: Any = fsspec.get_filesystem_class(protocol)
        # Not `url_to_fs`: it treats "::" in a name as a chain of file systems.
        options = {**fs_class._get_kwargs_from_urls(url), **settings}
        if protocol in ("http", "https"):
            import aiohttp

            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(sock_connect=_ANSWER_S, sock_read=_ANSWER_S)}
        return fs_class(**options), str(fs_class._strip_protocol(url))
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = pip_install(extra) if extra else first_line(error)
        raise LayertapError(f"{url}: reading {protocol}:// needs another library: {remedy}") from error
    except Exception as error:  # each protocol's library raises its own errors
        raise LayertapError(f"{url}: {first_line(error)}") from error
