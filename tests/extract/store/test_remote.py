from __future__ import annotations

import hashlib
import logging
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from extract.errors import InputError, LayertapError
from extract.store.places import objects as remote
from tests.extract.store.bucket_server import SECRET, TOKEN, Proxy, get, put

pytestmark = pytest.mark.slow

CONTENT = bytes(range(256)) * 5000


def test_what_is_put_is_read_back(proxy: Proxy, url: str, tmp_path: Path) -> None:
    assert remote.names(url) == {}
    assert remote.info(f"{url}/a") is None
    with pytest.raises(FileNotFoundError):
        remote.read(f"{url}/a")
    assert remote.put(f"{url}/a", CONTENT)
    (tmp_path / "file").write_bytes(CONTENT * 3)
    sha256 = hashlib.sha256(CONTENT * 3).hexdigest()
    assert remote.put_file(f"{url}/shards/ü b", tmp_path / "file", sha256)
    assert remote.names(url) == {"a": len(CONTENT), "shards/ü b": 3 * len(CONTENT)}
    assert remote.read(f"{url}/a") == get(proxy, f"{url}/a") == CONTENT
    assert remote.read_range(f"{url}/a", 1000, 3001) == CONTENT[1000:3001]
    assert remote.read_range(f"{url}/a", 7, 7) == b""
    metadata = remote.info(f"{url}/shards/ü b")
    assert metadata is not None
    assert (metadata.size, metadata.sha256) == (3 * len(CONTENT), sha256)
    (tmp_path / "copy").touch()
    remote.download(f"{url}/shards/ü b", [(0, metadata.size)], tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT * 3


@pytest.mark.parametrize("url", ["memory://x/y", "file:///tmp/x", "https://example.org/x", "ftp://host/x"])
def test_stores_that_cannot_create_only_where_there_is_none_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="cannot create an object only if it does not exist; use s3:// or gs://"):
        remote.put(url, b"")


@pytest.mark.parametrize("fault", ["500", "503", "SlowDown", "reset", "hang", "lost", "cut", "slow", "late"])
def test_each_request_gets_through(proxy: Proxy, url: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ANSWER_S", 0.5)
    monkeypatch.setattr(remote, "_STORED_S", 0.5)
    proxy.slow_s = 0.8
    times = 1 if fault in ("hang", "late") else 2  # of each method and path
    proxy.rule = lambda method, path, count: fault if count < times else None
    assert remote.put(url, CONTENT)
    assert get(proxy, url) == CONTENT
    assert remote.read_range(url, 5, 900_000) == CONTENT[5:900_000]
    assert remote.read(url) == CONTENT
    assert remote.names(url.rpartition("/")[0]) == {"photos": len(CONTENT)}
    proxy.counts.clear()
    assert remote.info(url) is not None


# Writing


@pytest.mark.parametrize("size", [3, 6 << 20])
def test_an_object_is_never_written_over(proxy: Proxy, url: str, tmp_path: Path, size: int) -> None:
    old, new = b"o" * size, b"n" * size
    assert remote.put(url, old)
    assert not remote.put(url, new)
    assert not remote.put(url, old)  # the same content, but not ours
    (tmp_path / "file").write_bytes(new)
    assert not remote.put_file(url, tmp_path / "file", hashlib.sha256(new).hexdigest())
    assert get(proxy, url) == old


def test_an_answer_that_is_lost_does_not_make_another_writers_object_ours(proxy: Proxy, url: str) -> None:
    """The first attempt reaches nobody, and before the second another writer comes with the same content."""

    def rule(method: str, path: str, count: int) -> str | None:
        if method == "PUT" and count == 0:
            put(proxy, url, CONTENT)
            return "reset"
        return None

    proxy.rule = rule
    assert not remote.put(url, CONTENT)


def test_a_file_that_is_not_what_its_sha256_says_is_not_stored(proxy: Proxy, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with pytest.raises(LayertapError, match="HTTP 400 BadDigest"):
        remote.put_file(url, tmp_path / "file", "0" * 64)
    assert remote.info(url) is None


# Errors


@pytest.mark.parametrize(("fault", "what"), [
    ("500", "HTTP 500 InternalError, 5 times"), ("reset", ", 5 times"), ("cut", ", 5 times"),
])  # fmt: skip
def test_in_the_end_it_is_an_error(proxy: Proxy, url: str, fault: str, what: str) -> None:
    put(proxy, url, CONTENT)
    proxy.rule = lambda method, path, count: fault
    message = f"^{url} cannot be read: .*{what} in .* s. Stored objects are safe; run again"
    with pytest.raises(LayertapError, match=message):
        remote.read_range(url, 0, 1000)
    # A connection that breaks is tried again by aiohttp once, where it had been used before.
    assert 5 <= len(proxy.ranges("sets")) <= (10 if fault == "reset" else 5)


def test_a_server_that_trickles_is_given_up(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends a byte before each time-out of the socket, so that only the limit of the whole request ends it."""
    put(proxy, url, CONTENT)
    monkeypatch.setattr(remote, "_ATTEMPTS", 1)
    monkeypatch.setattr(remote, "_limit", lambda fs, size=0: {"timeout": 0.15})
    proxy.rule = lambda method, path, count: "slow"
    start = time.monotonic()
    with pytest.raises(LayertapError, match="no answer"):
        remote.read_range(url, 0, 1000)
    assert time.monotonic() - start < 3


def test_a_range_behind_the_end_and_a_bucket_that_is_not_there_are_errors_at_once(proxy: Proxy, url: str) -> None:
    put(proxy, url, b"123")
    with pytest.raises(LayertapError, match="HTTP 416"):
        remote.read_range(url, 5, 9)
    assert len(proxy.seen) == 1
    for call in (remote.names, lambda url: remote.put(url, b"")):
        with pytest.raises(LayertapError, match="s3://no-such-bucket/x: the bucket does not exist"):
            call("s3://no-such-bucket/x")


@pytest.mark.usefixtures("new_clients")
def test_nobody_there_is_an_error(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(LayertapError, match="EndpointConnectionError.*5 times"):
        remote.names(url)


# Credentials


def everything(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def test_no_error_and_no_log_tells_the_credentials(
    proxy: Proxy, url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server is one that repeats everything it was sent."""
    caplog.set_level(logging.INFO)
    proxy.rule = lambda method, path, count: "echo"
    messages = []
    calls: list[Any] = [
        lambda: remote.put(url, b""), lambda: remote.read_range(url, 0, 1), lambda: remote.names(url),
        lambda: remote.info(url),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(LayertapError, match="HTTP 403.*check that the credentials are correct") as caught:
            call()
        messages.append(everything(caught.value))
    for text in (*messages, caplog.text, *capfd.readouterr()):
        assert SECRET not in text
        assert TOKEN not in text
    assert len(proxy.seen) == len(calls)  # none of them was tried again


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(InputError) as caught:
        remote.names(f"s3://AKIA:{SECRET.replace('/', '')}@bucket/set")
    assert SECRET.replace("/", "") not in everything(caught.value)


@pytest.mark.usefixtures("new_clients")
def test_without_credentials_the_error_says_where_they_come_from(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(LayertapError, match="no credentials found; set AWS_ACCESS_KEY_ID"):
        remote.names(url)
    assert proxy.seen == []
