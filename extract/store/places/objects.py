"""Objects in a bucket: the only module that calls a store's library for data sets.

Supported are `s3://BUCKET/NAME` and `gs://BUCKET/NAME`. Other protocols are refused because their libraries cannot
create an object atomically only if it does not exist.

The libraries find the credentials: for S3 in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, `~/.aws/credentials`,
`AWS_PROFILE`, or the role of the machine; for Google in `GOOGLE_APPLICATION_CREDENTIALS`, or in the files of `gcloud`.
They are never part of a URL. The address of another S3-compatible server comes from `AWS_ENDPOINT_URL_S3`,
`AWS_ENDPOINT_URL`, `endpoint_url` in `~/.aws/config` (botocore, "Service-specific endpoints"), or
`FSSPEC_S3_ENDPOINT_URL`.

Every request has a time limit. After a transient error (5xx, throttling, time-out, broken connection, truncated body)
it is sent again, with growing, randomised pauses, for a minute and at least five times in all. After ten seconds, or a
request without an answer, a warning goes to the logger `layertap.store`. A listing of several pages, of 1,000 objects
each, is one request. Permanent errors (403, 404) are not retried. The retries of s3fs and botocore are disabled, so
that only this module decides; those of gcsfs cannot be disabled and come on top.

obstore 0.12.1 retries as well and would save about 200 lines, but its threads do not survive a fork (the first request
of a forked `DataLoader` worker never returns), its errors have no status or code as values, and it does not read
`~/.aws/config`. Names of s3fs and fsspec that are used here: `call_s3`, `split_path`, `retries`,
`timeout=`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import logging
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from extract.errors import InputError, LayertapError, first_line
from extract.system.json_files import JSON_BYTES
from extract.system.urls import file_system

__all__ = ["ObjectInfo", "download", "info", "names", "put", "put_file", "read", "read_range"]

T = TypeVar("T")

_S3 = {"s3", "s3a"}
_GOOGLE = {"gs", "gcs"}

# With 30 % of 503, the 12 attempts of a minute fail for one request in two million; 5 attempts, for one in 400. A
# listing of 30 pages, of 15,000 shards, is one request: with 10 % of 503, it fails in 9 of 10 runs.
_ATTEMPTS = 5  # at least
_GIVE_UP_S = 60  # the last attempt ends later than this after the start of the first
_WAIT_S = 0.5  # mean pause before the second attempt; doubled before each further attempt
_LONGEST_WAIT_S = 8  # mean
_REPORT_S = 10  # time without success after which a warning is logged
_CONNECT_S = 10
_ANSWER_S = 10  # longest wait for the first or the next bytes of an answer
_STORED_S = 60  # longest wait for the answer to an upload, which the server gives when it has stored the object
_SLOWEST = 128 << 10  # bytes a second; a slower transfer times out
_CONNECTIONS = 32

_PIECE_BYTES = 16 << 20  # of a large object, for each request
_AT_ONCE = 8  # requests for pieces of one object
_PUT_BYTES = 5 << 30  # limit of S3 for one request (Amazon S3 user guide, "Uploading objects")

# Metadata of each object: its sha256, and an id of the request that created it, by which a writer recognises its own.
_SHA256 = "layertap-sha256"
_PUT = "layertap-put"

_log = logging.getLogger("layertap.store")
_reports: dict[tuple[str, int], object] = {}  # bucket and minute -> mark of the request that has logged a warning

# Exception classes for network and server errors; by name, because their libraries are optional.
_TRANSIENT = {
    "HTTPClientError", "ConnectionError", "ResponseParserError", "IncompleteReadError", "IncompleteRead",  # botocore
    "ClientError", "RequestException", "ChecksumError",  # aiohttp, requests, gcsfs
}  # fmt: skip


@dataclass(frozen=True)
class ObjectInfo:
    """Metadata of an object.

    Attributes:
        size: bytes of the object.
        sha256: sha256 recorded by its writer; empty if not recorded.
        put: id of the request that created it; empty if unknown.
    """

    size: int
    sha256: str = ""
    put: str = ""


def names(url: str) -> dict[str, int]:
    """Return name -> size of each object below a URL; names are relative to the URL.

    Raises:
        LayertapError: there is no such bucket, or the store does not answer.
    """

    def send() -> dict[str, int]:
        fs, path = _at(url)
        start = f"{path.rstrip('/')}/"
        found = fs.find(path, detail=True, **_limit(1 << 30))  # a million names take thousands of requests
        # A name that ends with a slash is a folder, which consoles and some programs create.
        return {
            name.removeprefix(start): int(entry["size"])
            for name, entry in found.items()
            if entry.get("type", "file") == "file" and name.startswith(start) and not name.endswith("/")
        }

    try:
        return _request_with_retries(url, "listed", send)
    except FileNotFoundError:
        return {}


def info(url: str) -> ObjectInfo | None:
    """Return the metadata of an object; None if there is no such object.

    Raises:
        LayertapError: there is no such bucket, or the store does not answer.
    """

    def send() -> ObjectInfo | None:
        fs, path = _at(url)
        if _protocol(url) in _S3:
            bucket, key, _ = fs.split_path(path)
            head = fs.call_s3("head_object", Bucket=bucket, Key=key, **_limit())
            size, metadata = head["ContentLength"], head.get("Metadata", {})
        else:
            entry = fs.info(path, **_limit())
            if entry["type"] != "file":
                return None
            size, metadata = entry["size"], entry.get("metadata") or {}
        return ObjectInfo(int(size), metadata.get(_SHA256, ""), metadata.get(_PUT, ""))

    try:
        return _request_with_retries(url, "accessed", send)
    except FileNotFoundError:
        return None


def read(url: str, size: int | None = None, most_bytes: int = JSON_BYTES) -> bytes:
    """Read a small object completely.

    Args:
        url: URL of the object.
        size: bytes of the object; None if unknown.
        most_bytes: size that the object may have; a larger object is not read.

    Raises:
        FileNotFoundError: there is no such object.
        InputError: the object is too large.
        LayertapError: the store does not answer.
    """
    if size is None:
        metadata = info(url)
        if metadata is None:
            raise FileNotFoundError(url)
        size = metadata.size
    if size > most_bytes:
        raise InputError(f"{url} is damaged: it has {size:,} bytes, expected at most {most_bytes:,}")
    return read_range(url, 0, size)


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` (exclusive) of an object, never fewer.

    Raises:
        FileNotFoundError: there is no such object.
        LayertapError: the object is shorter, or the store does not answer.
    """
    if start == stop:
        return b""

    def send() -> bytes:
        fs, path = _at(url)
        content = bytes(fs.cat_file(path, start=start, end=stop, **_limit(stop - start)))
        if len(content) != stop - start:
            raise EOFError(f"received {len(content):,} of {stop - start:,} bytes from byte {start:,}")
        return content

    return _request_with_retries(url, "read", send)


def put(url: str, content: bytes) -> bool:
    """Create an object if there is none with this name; return whether this call created it.

    If the process dies inside this call, the object is complete or absent.

    Raises:
        LayertapError: the store refuses, or does not answer, or does not support conditional creation.
    """
    return _put(url, content, len(content), hashlib.sha256(content).hexdigest())


def put_file(url: str, path: Path, sha256: str) -> bool:
    """Like `put`, with the content of a local file and its sha256; S3 verifies the sha256."""
    return _put(url, path, path.stat().st_size, sha256)


def _put(url: str, content: bytes | Path, size: int, sha256: str) -> bool:
    request_id = uuid.uuid4().hex
    metadata = {_SHA256: sha256, _PUT: request_id}
    if _protocol(url) in _S3 and size > _PUT_BYTES:
        raise InputError(f"{url}: {size:,} bytes; S3 accepts at most {_PUT_BYTES:,}", hint="set a smaller shard_rows")

    def send() -> None:
        fs, path = _at(url, _STORED_S)
        limit = _limit(size, _STORED_S)
        if _protocol(url) in _S3:
            # One request instead of a multipart upload: the object is complete or absent, the server verifies its
            # sha256, and a killed writer leaves no parts behind, which would cost storage.
            bucket, key, _ = fs.split_path(path)
            digest = base64.b64encode(bytes.fromhex(sha256)).decode()
            with contextlib.ExitStack() as stack:
                body = content if isinstance(content, bytes) else stack.enter_context(content.open("rb"))
                fs.call_s3(
                    "put_object", Bucket=bucket, Key=key, Body=body, Metadata=metadata, ChecksumSHA256=digest,
                    IfNoneMatch="*", **limit,
                )  # fmt: skip
        elif isinstance(content, bytes):
            fs.pipe_file(path, content, mode="create", metadata=metadata, **limit)
        else:
            fs.put_file(str(content), path, mode="create", metadata=metadata, **limit)

    try:
        _request_with_retries(url, "written", send)
        return True
    except FileExistsError:
        # The answer to an earlier attempt may have been lost: then the object is from this call.
        stored = info(url)
        return stored is not None and stored.put == request_id


def download(url: str, ranges: Iterable[tuple[int, int]], path: Path) -> None:
    """Copy byte ranges (start, stop) of an object to the same places of a local file, several at once.

    Raises:
        OSError: the file does not exist or cannot be written.
        FileNotFoundError, LayertapError: see `read_range`.
    """

    def copy(piece: tuple[int, int]) -> None:
        content = read_range(url, *piece)
        with path.open("r+b") as file:
            file.seek(piece[0])
            file.write(content)

    pieces = [
        (first, min(first + _PIECE_BYTES, stop)) for start, stop in ranges for first in range(start, stop, _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(copy, pieces))


def _protocol(url: str) -> str:
    return url.partition("://")[0]


def _at(url: str, answer_s: float | None = None) -> tuple[Any, str]:
    """Return the file system and the path in it; created on each call, because fsspec caches one for each process.

    Args:
        url: URL of an object, or of a location in a bucket.
        answer_s: longest wait for an answer, `_ANSWER_S` by default.
    """
    protocol = _protocol(url)
    settings: dict[str, Any] = {"use_listings_cache": False}  # objects that other processes publish must be listed
    if protocol in _S3:
        settings["config_kwargs"] = {
            "connect_timeout": _CONNECT_S,
            "read_timeout": answer_s or _ANSWER_S,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": _CONNECTIONS,
        }
    elif protocol not in _GOOGLE:
        raise InputError(
            f"{url}: data sets cannot be stored on {protocol}://, which cannot create an object only if it does not "
            "exist",
            hint="use s3:// or gs://, or a folder",
        )
    fs, path = file_system(url, **settings)
    if protocol in _S3:
        fs.retries = 1
    return fs, path


def _limit(size: int = 0, answer_s: float | None = None) -> dict[str, float]:
    """Return the time limit of a request that transfers `size` bytes, for calls that run in fsspec's own thread."""
    return {"timeout": _CONNECT_S + (answer_s or _ANSWER_S) + size / _SLOWEST}


def _request_with_retries(url: str, participle: str, send: Callable[[], T]) -> T:
    """Send a request, retry it after transient errors, and return its result.

    Args:
        url: URL of the object.
        participle: what is done, for the error message, such as "read".
        send: sends the request once.

    Raises:
        FileNotFoundError, FileExistsError: the store reports this.
        LayertapError: the store refuses, or does not answer.
    """
    start = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return send()
        except LayertapError:
            raise
        except Exception as error:
            status, code = _status_and_code(error)
            if code == "NoSuchBucket":
                raise LayertapError(f"{url}: the bucket does not exist") from None
            if isinstance(error, FileExistsError) or status == 412:
                raise FileExistsError(url) from None
            if isinstance(error, FileNotFoundError) or status == 404:
                raise FileNotFoundError(url) from None
            reason = _reason(error, status, code)
            if not _is_transient(error, status, code):
                # The server's message is left out, here and in the exception chain: it may echo the request.
                raise LayertapError(f"{url} cannot be {participle}: {reason}") from None
            passed_s = time.monotonic() - start
            if attempt >= _ATTEMPTS and passed_s >= _GIVE_UP_S:
                raise LayertapError(
                    f"{url} cannot be {participle}: {reason}, {attempt} times in {passed_s:.0f} s. Stored objects are "
                    "safe",
                    hint="run again when the server answers",
                ) from None
            if _is_timeout(error):
                _report(url, "does not answer")
            elif passed_s >= _REPORT_S:
                _report(url, f"cannot be {participle} yet ({reason})")
        time.sleep(min(_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S) * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


def _report(url: str, what: str) -> None:
    """Log a warning, once for each bucket and minute: many requests may fail at the same time."""
    mark = object()
    if _reports.setdefault((url.split("/")[2], int(time.monotonic() // 60)), mark) is mark:
        _log.warning("%s %s; retrying", url, what)


def _status_and_code(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status and the S3 error code of an error; 0 and "" if it has none."""
    for source in (error, error.__cause__):
        response = getattr(source, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
    for name in ("code", "status"):  # not of a cause: aiohttp reports a truncated body as 400
        if re.fullmatch(r"[1-5]\d\d", str(value := getattr(error, name, ""))):
            return int(value), ""
    return 0, ""


def _is_transient(error: Exception, status: int, code: str) -> bool:
    if status:
        # 409: two conditional requests at the same time (Amazon S3 user guide, "Conditional writes").
        return status >= 500 or status in (408, 409, 425, 429) or code in ("RequestTimeout", "IncompleteBody")
    if {base.__name__ for base in type(error).__mro__} & _TRANSIENT:
        return True
    if isinstance(error, PermissionError) or first_line(error).startswith("Forbidden"):  # gcsfs
        return False
    return isinstance(error, OSError | EOFError | asyncio.TimeoutError)


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError | asyncio.TimeoutError) or "Timeout" in type(error).__name__


def _reason(error: Exception, status: int, code: str) -> str:
    if status:
        # 403 and 401 have a specific code only if the answer has a body.
        status_text = f"HTTP {status}" + ("" if code in ("", str(status)) else f" {code}")
        hint = "; check that the credentials are correct and allow this" if status in (401, 403) else ""
        return status_text + hint
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if _is_timeout(error):
        return f"no answer ({type(error).__name__})"
    return f"{type(error).__name__}: {first_line(error)}"
