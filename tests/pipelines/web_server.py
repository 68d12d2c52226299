"""A web server of this process that has pictures, some of them only for those with a secret."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.extract.images.making import Quiet, served


class WebServer(Quiet):
    """Sends the files of a folder, in part where a range is asked for, and pages with the links of its folders.

    /signed/NAME is sent only with the secret in the query or as the user's name, /open/NAME and /NAME to all.
    """

    folder: Path
    host: str
    secret: str
    requests: list[str]

    def __init__(self, *arguments: Any):
        super().__init__(*arguments, directory=str(self.folder))

    def send_head(self) -> Any:
        self.requests.append(self.path)
        path, _, query = self.path.partition("?")
        user = base64.b64decode(self.headers.get("Authorization", "Basic ").partition(" ")[2]).decode()
        if path.startswith("/signed/") and self.secret not in urllib.parse.unquote(query) + user:
            return self.send_error(403)
        name = re.sub("^/(signed/|open/)?", "", path).rstrip("/")
        file, wanted = self.folder / name, self.headers.get("Range")
        self.path = f"/{name}/" if file.is_dir() else f"/{name}"
        if wanted is None or not file.is_file():
            return super().send_head()
        data = file.read_bytes()
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.end_headers()
        return io.BytesIO(part)

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


@contextlib.contextmanager
def serving(folder: Path, secret: str = "") -> Iterator[type[WebServer]]:
    """A server of a folder; what it serves, its secret and the requests to it are attributes of the class."""

    class Here(WebServer):
        pass

    Here.folder, Here.secret, Here.requests = folder, secret, []
    with served(Here) as url:
        Here.host = url.removeprefix("http://")
        yield Here


def names(folder: Path) -> list[str]:
    """Paths of the files of a folder, from the one that it is in."""
    return sorted(path.relative_to(folder.parent).as_posix() for path in folder.rglob("*.*"))
