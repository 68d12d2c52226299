"""URLs of files and folders: the fsspec file systems that read them, and their text without credentials.

A URL is fetched as it was given. Whatever stores, prints or hashes it uses `without_credentials`; a message of another
library may contain any URL, and goes through `text_without_credentials`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import pip_install

__all__ = [
    "errors_without_credentials",
    "file_system",
    "is_url",
    "reason_of",
    "text_without_credentials",
    "without_credentials",
    "without_query",
]

_ANSWER_S = 30  # limit for connecting to a server, and for each read

# Protocol -> extra with the library that fsspec needs for it.
_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}

# In URLs of these protocols, the text before "@" is a container.
_CONTAINERS = {"abfs", "abfss", "wasb", "wasbs"}

_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?|arn:.*")  # host and port, or an access point of S3

# Names of parameters, in lower case, without other characters than letters and digits.
_CREDENTIAL = re.compile(
    r"^(xamz|xgoog|xoss|xcos|xobs|xtos|qsign|qak$|qkeytime|qheaderlist|qurlparamlist)"
    r"|signature|token|secret|credential|passw|accesskey|accessid|apikey|accountkey|sharedkey|privatekey|keypairid"
    r"|subscriptionkey|authorization|authkey|oauth|bearer|jwt|hmac|sessionid|sessid"
    r"|^(sig|sign|auth|hdnea|hdnts|hdntl|gda|rlkey|tempauth|pw|pwd|pass|functionkey)$"
)
_EXPIRY = {"expires", "expire", "expiry", "expiration", "exp"}
_BESIDE_CREDENTIALS = _EXPIRY | {"policy", "hashalgorithm", "nonce", "ttl"}  # dropped with a credential only
_AZURE = (
    *("sv", "ss", "srt", "sp", "st", "se", "spr", "sr", "si", "sip", "ses", "sdd", "scid", "saoid", "suoid"),
    *("skoid", "sktid", "skt", "ske", "sks", "skv"),
)
# Marks of a signature -> parameters that belong to it; both are dropped if all marks are present.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("sig",): _AZURE,
    ("ex", "is", "hm"): (),  # Discord
    ("oh", "oe"): (),  # Facebook and Instagram
}
_IDENTIFIER = re.compile(r"(?<!^s)(id|name|file|path|image|img|photo|src|url|version|etag)$|^(hash|md5|sha1|sha256)$")
_HASH = re.compile(r"^(hash|md5|sha1|sha256)$")  # of the file, or the signature of a link that expires
_OPAQUE = re.compile(r"(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{16,}")
_FILE_NAME = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")
_SEPARATORS = re.compile(r"&amp;|&|;(?=[^&;=]+=)")
# A path of the local disk that was made from a URL has one slash.
_IN_TEXT = re.compile(r"(?:[A-Za-z][A-Za-z0-9+]*://|\b(?:https?|ftp|s3a?|gs|gcs|abfss?|wasbs?):/)[^\s\"'<>`]+")


def is_url(text: str) -> bool:
    """Whether the text starts with a protocol, as `s3://bucket/photos` does."""
    protocol, separator, _ = text.partition("://")
    return bool(separator) and protocol.replace("+", "").isalnum()


def without_credentials(url: str) -> str:
    """Return a URL, or a relative reference such as `cat.jpg?token=...`, without what gives access to the file.

    Removed are the user name and password; the parameters of a query or fragment that sign the request, carry a token
    or say when it expires; and, in a signed URL, other opaque values. In a URL without a signature, the opaque value of
    a parameter whose name says nothing is replaced by `hidden:` and 16 digits of its hash. All other parameters stay as
    they are, so that `?id=1` and `?id=2` remain two images. The result is the same on each day's signature of a file,
    and for itself.

    >>> without_credentials("https://me:secret@host:8080/cat.jpg?id=7&X-Amz-Date=20260101&X-Amz-Signature=0f3a")
    'https://host:8080/cat.jpg?id=7'
    """
    protocol, separator, location = url.partition("://")
    if not (separator and is_url(url)):
        protocol, separator, location = "", "", url
    elif "@" in location:
        end, has_password = _user_info(location)
        if has_password or protocol.lower() not in _CONTAINERS:
            location = location[end:]
    if "?" not in location and "#" not in location:
        return protocol + separator + location
    before, fragment_mark, fragment = location.partition("#")
    path, query_mark, query = before.partition("?")
    if query_mark:
        kept = _kept(query)
        path += query_mark + kept if kept or not query else ""
    if fragment_mark:
        kept = _kept(fragment)
        path += fragment_mark + kept if kept or not fragment else ""
    return protocol + separator + path


def without_query(url: str) -> str:
    """Return a URL up to its query; a `?` that does not start parameters belongs to the path, as in `s3://bucket/a?.png`.

    >>> without_query("https://host/photos.tar?version=2")
    'https://host/photos.tar'
    """
    path, mark, query = url.partition("?")
    return path if mark and "=" in query else url


def text_without_credentials(text: str) -> str:
    """Return a text, such as a message of another library, with `without_credentials` applied to each URL in it.

    A URL ends at white space or a quotation mark; punctuation after it stays.
    """
    if ":/" not in text:
        return text

    def cleaned(match: re.Match[str]) -> str:
        url = match[0].rstrip(".,:;!)]}\\")
        behind = match[0][len(url) :]
        if is_url(url):
            return without_credentials(url) + behind
        return without_credentials(url.replace(":/", "://", 1)).replace("://", ":/", 1) + behind

    return _IN_TEXT.sub(cleaned, text)


def reason_of(error: BaseException) -> str:
    """Return `first_line` of another library's error, without credentials."""
    return text_without_credentials(first_line(error))


@contextlib.contextmanager
def errors_without_credentials(url: str) -> Iterator[None]:
    """Context manager: remove the credentials of `url`, and of other URLs, from the message of a LayertapError."""
    try:
        yield
    except LayertapError as error:
        message = str(error)
        clean = text_without_credentials(message.replace(url, without_credentials(url)) if is_url(url) else message)
        if clean != message:
            error.args = (clean,)
        raise


def _user_info(location: str) -> tuple[int, bool]:
    """Return the length of a URL's user info with its "@", and whether it has a password.

    A password may contain "@", "/", "?" and "#" that should have been written as %40 and so on. With a password, the
    last "@" of the URL is therefore taken for the end of the user info.
    """
    match = re.match(r"[^/?#]*", location)
    authority = match[0] if match else ""
    user, at, _ = authority.rpartition("@")
    if (at and ":" not in user) or (not at and _HOST.fullmatch(authority)):
        return len(user) + len(at), False
    return location.rindex("@") + 1, True


def _kept(query: str) -> str:
    """Return the parameters of a query or fragment that are no credentials."""
    parameters = _SEPARATORS.split(query)
    names = [re.sub(r"[^a-z0-9]", "", unquote(parameter.partition("=")[0]).lower()) for parameter in parameters]
    present = set(names)
    dropped = {name for name in present if _CREDENTIAL.search(name)}
    for marks, others in _FAMILIES.items():
        if present.issuperset(marks):
            dropped.update(marks, others)
    is_signed = bool(dropped or present & _EXPIRY)
    if is_signed:
        dropped |= _BESIDE_CREDENTIALS
    kept = []
    for name, parameter in zip(names, parameters, strict=True):
        key, equals, value = parameter.partition("=") if "=" in parameter else ("", "", parameter)
        if equals and name in dropped:
            continue
        plain = unquote(value)
        if "://" in plain:  # the URL of another file, as image proxies take it
            clean = without_credentials(plain)
            if clean != plain:
                value = quote(clean, safe="")
        elif _is_opaque(name if equals else "", plain, is_signed):
            if is_signed:
                continue
            digest = hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
            value = f"hidden:{digest[:8]}-{digest[8:]}"
        kept.append(key + equals + value)
    return query if kept == parameters else "&".join(kept)


def _is_opaque(name: str, value: str, is_signed: bool) -> bool:
    """Whether a value may be a secret: it has 16 letters and digits in a row, and is not said to name a file."""
    if not _OPAQUE.search(value) or _FILE_NAME.search(value):
        return False
    return not _IDENTIFIER.search(name) or (is_signed and bool(_HASH.search(name)))


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
    if "@" in location and _user_info(location)[1]:
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
        remedy = pip_install(extra) if extra else reason_of(error)
        raise LayertapError(
            f"{without_credentials(url)}: reading {protocol}:// needs another library: {remedy}"
        ) from error
    except Exception as error:  # each protocol's library raises its own errors
        raise LayertapError(f"{without_credentials(url)}: {reason_of(error)}") from error
