"""An S3 server of moto on this machine, and between it and the client a proxy that makes chosen requests fail."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import http.client
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

KEY, SECRET, TOKEN = "AKIATESTONLY", "hidden+secret/key", "hidden-session-token"

Fault = str  # 500, 503, SlowDown, reset, hang, lost, cut, slow, echo, late
Rule = Callable[[str, str, int], "Fault | None"]  # method, path, how manyeth request of this method and path -> fault


def first(fault: Fault, method: str, inside: str, times: int = 1) -> Rule:
    """The first requests of a method to paths that contain a text fail."""
    return lambda kind, path, count: fault if kind == method and inside in path and count < times else None


@dataclass
class Proxy:
    """Hands requests on to a server.

    Attributes:
        rule: which of them fail.
        seen: method, path and Range of each, as it came.
    """

    target: tuple[str, int]
    rule: Rule = lambda method, path, count: None
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    port: int = 0
    # moto looks for an object and then stores another, in two steps; a store does it in one.
    creating: Any = field(default_factory=threading.Lock)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    slow_s: float = 3.0
    handed_on_without: list[str] = field(default_factory=list)  # names of headers, as a careless server ignores them
    _listening: Any = None  # the server; None while connections are refused

    def ranges(self, inside: str = ".h5") -> list[str]:
        """The ranges that were asked for of objects whose paths contain a text."""
        return [byte_range for method, path, byte_range in self.seen if method == "GET" and inside in path]

    def accept(self) -> None:
        """Accept connections, on the same port as before."""
        self._listening = _Server(("127.0.0.1", self.port), _handler(self))
        self.port = self._listening.server_port
        threading.Thread(target=self._listening.serve_forever, args=(0.01,), daemon=True).start()

    def refuse(self) -> None:
        """Refuse new connections, and drop open ones at their next request."""
        server, self._listening = self._listening, None
        server.shutdown()
        server.server_close()

    @property
    def is_refusing(self) -> bool:
        """Whether connections are refused."""
        return self._listening is None

    def forget(self) -> None:
        """Count anew, and let everything pass."""
        self.seen.clear()
        self.counts.clear()
        self.rule = lambda method, path, count: None


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            if proxy.is_refusing:
                return self.drop()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            name = self.command, self.path.partition("?")[0]
            with proxy.creating:
                proxy.seen.append((*name, self.headers.get("Range", "")))
                count = proxy.counts[name] = proxy.counts.get(name, -1) + 1
            fault = proxy.rule(self.command, self.path, count)
            if fault in ("500", "503", "SlowDown", "echo"):
                text = "".join(f"{key}: {value}; " for key, value in self.headers.items()) if fault == "echo" else fault
                code = {"500": "InternalError", "503": "ServiceUnavailable", "echo": "AccessDenied"}.get(fault, fault)
                status = {"500": 500, "echo": 403}.get(fault, 503)
                return self.send(status, f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode(), {})
            if fault == "reset":
                return self.drop()
            if fault == "hang":
                time.sleep(proxy.slow_s)
                return self.drop()
            expected = self.headers.get("x-amz-checksum-sha256")
            if expected and base64.b64encode(hashlib.sha256(body).digest()).decode() != expected:  # moto does not look
                return self.send(400, b"<Error><Code>BadDigest</Code><Message>no</Message></Error>", {})
            status, headers, content = self.handed_on(body)
            if fault == "late":
                time.sleep(proxy.slow_s)
            if fault == "lost":
                return self.drop()
            return self.send(status, content, headers, fault)

        def handed_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(*proxy.target, timeout=30)
            left_out = {"expect", *proxy.handed_on_without}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
            with contextlib.closing(connection), proxy.creating if self.command == "PUT" else contextlib.nullcontext():
                connection.request(self.command, self.path, body, headers)
                reply = connection.getresponse()
                return reply.status, dict(reply.getheaders()), reply.read()

        def send(self, status: int, content: bytes, headers: dict[str, str], fault: Fault | None = None) -> None:
            self.send_response(status)
            length = headers.get("Content-Length", headers.get("content-length", str(len(content))))
            dropped = {"content-length", "connection", "date", "server", "transfer-encoding"}
            for name, value in headers.items():
                if name.lower() not in dropped:
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return None
            if fault == "cut":
                self.wfile.write(content[: len(content) // 2])
                return self.drop()
            if fault == "slow":
                for start in range(0, len(content), max(1, len(content) // 4)):
                    self.wfile.write(content[start : start + max(1, len(content) // 4)])
                    self.wfile.flush()
                    time.sleep(0.05)
                return None
            self.wfile.write(content)
            return None

        def drop(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass  # clients that go away are part of the tests


@contextlib.contextmanager
def served() -> Iterator[Proxy]:
    """A server with a proxy before it, on free ports."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    proxy = Proxy(moto.get_host_and_port())
    proxy.accept()
    try:
        yield proxy
    finally:
        if not proxy.is_refusing:
            proxy.refuse()
        moto.stop()


def direct(proxy: Proxy) -> Any:
    """A client of another library, past the proxy."""
    return _client(*proxy.target)


@functools.cache
def _client(host: str, port: int) -> Any:
    return boto3.client(
        "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1",
        aws_access_key_id=KEY, aws_secret_access_key=SECRET,
    )  # fmt: skip


def object_at(url: str) -> dict[str, str]:
    """A URL as arguments of the client."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


def new_url(proxy: Proxy) -> str:
    """A place in a new bucket."""
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    direct(proxy).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/sets/photos"


def put(proxy: Proxy, url: str, content: bytes) -> None:
    direct(proxy).put_object(**object_at(url), Body=content)


def get(proxy: Proxy, url: str) -> bytes:
    return bytes(direct(proxy).get_object(**object_at(url))["Body"].read())


def delete(proxy: Proxy, url: str) -> None:
    direct(proxy).delete_object(**object_at(url))


def upload(proxy: Proxy, out: Path, url: str) -> None:
    """A copy of a data set, as `aws s3 sync` makes it."""
    for path in (out / "dataset.json", *(out / "shards").iterdir()):
        put(proxy, f"{url}/{path.relative_to(out)}", path.read_bytes())
