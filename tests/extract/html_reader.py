"""A reader of the HTML that results show in notebooks."""

from __future__ import annotations

from html.parser import HTMLParser


class HtmlReader(HTMLParser):
    """The cells of all tables, all other text, and a check that tags are closed."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.other: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif data.strip():
            self.other.append(data)
