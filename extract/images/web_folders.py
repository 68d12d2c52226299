"""Folders of a web server, which are pages with links.

A link is percent-encoded; the name of its file is decoded, so that a folder has the same names as on the server's disk.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from extract.errors import InputError
from extract.images.decoding import IMAGE_SUFFIXES
from extract.images.image_list import is_litter
from extract.system.urls import file_system, without_query

__all__ = ["Link", "decoded", "links_below", "links_of"]

_HREF = re.compile(r"""<a\s[^>]*?\bhref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d+|#x[0-9a-f]+|\w+);", re.IGNORECASE)  # only with `;`: `&copy=1` is part of a query


class Link(NamedTuple):
    """A link to a file or folder below a page.

    Attributes:
        path: decoded path relative to the page's folder, without a final `/`; bytes that are not UTF-8 as by
            `os.fsdecode`.
        is_folder: whether the link ends in `/`.
        query: what follows `?`, as written; empty if there is none.
        reference: the link as written, percent-encoded, with its query, relative to the page's folder.
    """

    path: str
    is_folder: bool
    query: str
    reference: str

    @property
    def key(self) -> tuple[str, bool, str]:
        """What two links to the same file or folder share, however they are encoded."""
        return self.path, self.is_folder, self.query

    @property
    def name(self) -> str:
        """The path, with `?` and the query if there is one."""
        return f"{self.path}?{self.query}" if self.query else self.path


def links_below(url: str) -> Iterator[Link]:
    """Yield the links to files below a URL, each once; references are relative to the URL.

    Hidden files and litter are skipped.

    Raises:
        InputError, FileNotFoundError, Exception: see `links_of`; not FileNotFoundError for a folder below the URL.
    """
    waiting, seen = [("", "")], set[tuple[str, bool, str]]()
    while waiting:
        folder, reference = waiting.pop()
        try:
            links = links_of(f"{without_query(url).rstrip('/')}/{reference}" if reference else url)
        except FileNotFoundError:
            if folder:  # removed meanwhile
                continue
            raise
        for link in links:
            below = link._replace(path=folder + link.path, reference=reference + link.reference)
            if below.key in seen:
                continue
            seen.add(below.key)
            if link.is_folder:
                waiting.append((below.path + "/", below.reference))
            else:
                yield below


def links_of(url: str) -> list[Link]:
    """Return the links of a page to files and folders below it, without hidden files and litter.

    Raises:
        InputError: the URL is not a page, or links to an image whose name cannot be a file name.
        FileNotFoundError: the server answers 404.
        Exception: another error of aiohttp; see `extract.system.urls.server_answer`.
    """
    from fsspec.asyn import sync

    fs, address = file_system(url)
    page = sync(fs.loop, _fetch, fs, address)
    if page is None:
        raise InputError(f"{url}: not a folder, list or archive")
    location, text = page
    links = filter(None, (_link(url, location, "".join(match.groups(""))) for match in _HREF.finditer(text)))
    each_once = {link.key: link for link in links}
    return [link for link in each_once.values() if not any(is_litter(part) for part in link.path.split("/"))]


async def _fetch(fs: Any, url: str) -> tuple[str, str] | None:
    """Return the final URL of a page, and its text; None if the URL is not an HTML page."""
    session = await fs.set_session()
    async with session.get(fs.encode_url(url)) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        answer.raise_for_status()
        if "Content-Type" in answer.headers and answer.content_type not in ("text/html", "application/xhtml+xml"):
            return None
        return str(answer.url), await answer.text(errors="surrogateescape")


def _link(url: str, location: str, written: str) -> Link | None:
    """Return a link of a page; None if it does not lead to a file or folder below the page.

    Args:
        url: URL of the page as the user gave it, for errors.
        location: URL of the page after redirects.
        written: the link as it stands in the page.
    """
    page = urlsplit(location)
    base = page.path.rstrip("/") + "/"
    reference = _ENTITY.sub(lambda match: html.unescape(match[0]), written).strip()
    try:
        target = urlsplit(urljoin(page._replace(path=base, query="", fragment="").geturl(), reference))
    except ValueError:  # a bracket without the other in the place of the host
        return None
    if target.scheme not in ("http", "https") or target.netloc != page.netloc:
        return None
    above, parts = base.split("/")[:-1], target.path.split("/")
    if [_bytes(part) for part in parts[: len(above)]] != [_bytes(part) for part in above]:
        return None
    parts = parts[len(above) :]
    is_folder = parts[-1:] == [""]
    parts = parts[:-1] if is_folder else parts
    if not parts or "" in parts:
        return None
    names = [decoded(part) for part in parts]
    if any("/" in name or "\0" in name for name in names):
        if not names[-1].lower().endswith(tuple(IMAGE_SUFFIXES)):
            return None
        raise InputError(
            f"{url}: the link {reference!r} has %2F or %00, which a file name cannot contain",
            hint="write a list with the complete URL of each image",
        )
    suffix = ("/" if is_folder else "") + (f"?{target.query}" if target.query else "")
    return Link("/".join(names), is_folder, target.query, "/".join(parts) + suffix)


def decoded(reference: str) -> str:
    """Return a percent-encoded name decoded; bytes that are not UTF-8 as by `os.fsdecode`.

    >>> decoded("a%20%C3%A4%2520.jpg")
    'a ä%20.jpg'
    """
    return os.fsdecode(_bytes(reference))


def _bytes(reference: str) -> bytes:
    return unquote_to_bytes(reference.encode("utf-8", "surrogateescape"))
