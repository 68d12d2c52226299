"""A web server of this process that has pictures, some of them only for those with a secret."""

from __future__ import annotations

import base64
import contextlib
import http.server
import re
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path


class WebServer(http.server.BaseHTTPRequestHandler):
    """Sends the files of a folder, in part where a range is asked for, and pages with the links of its folders.

    /signed/NAME is sent only with the secret in the query or as the user's name, /open/NAME and /NAME to all.
    """

    folder: Path
    host: str
    secret: str
    requests: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path, _, query = self.path.partition("?")
        user = base64.b64decode(self.headers.get("Authorization", "Basic ").partition(" ")[2]).decode()
        if path.startswith("/signed/") and self.secret not in urllib.parse.unquote(query) + user:
            self.send_error(403)
            return
        file = self.folder / re.sub("^/(signed/|open/)?", "", path)
        if file.is_dir():
            links = "".join(f'<a href="{entry.name}{"/" * entry.is_dir()}">x</a>' for entry in sorted(file.iterdir()))
            self._send(200, links.encode(), "text/html")
        elif not file.is_file():
            self.send_error(404)
        else:
            data = file.read_bytes()
            if wanted := self.headers.get("Range"):
                first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
                part = data[first : last + 1]
                self._send(206, part, "image/png", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
            else:
                self._send(200, data, "image/png")

    def _send(self, code: int, data: bytes, kind: str, content_range: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path, secret: str = "") -> Iterator[type[WebServer]]:
    """A server of a folder; what it serves, its secret and the requests to it are attributes of the class."""

    class Here(WebServer):
        pass

    Here.folder, Here.secret, Here.requests = folder, secret, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as running:
        Here.host = f"127.0.0.1:{running.server_port}"
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield Here
        running.shutdown()


def names(folder: Path) -> list[str]:
    """Paths of the files of a folder, from the one that it is in."""
    return sorted(path.relative_to(folder.parent).as_posix() for path in folder.rglob("*.*"))
