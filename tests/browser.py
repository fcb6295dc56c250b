"""Pages in a real browser: what is there when a page is open, and after something was done on it."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--dump-dom",
)
_EMPTY = {"meta", "input", "img", "br", "rect", "line"}


class Element:
    """A part of the page as it then is."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.parts: list[Element | str] = []

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    def all(self, tag: str = "", **wanted: str) -> Iterator[Element]:
        """Those within it of that tag, class (``kind``) or attribute."""
        for part in self.parts:
            if isinstance(part, Element):
                kinds = (part.attributes.get("class") or "").split()
                named = {name: part.attributes.get(name) for name in wanted if name != "kind"}
                fits = all(named[name] == wanted[name] for name in named)
                if fits and tag in ("", part.tag) and wanted.get("kind", "") in ("", *kinds):
                    yield part
                yield from part.all(tag, **wanted)

    def one(self, tag: str = "", **wanted: str) -> Element:
        (found,) = self.all(tag, **wanted)
        return found


class Tree(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self._open[-1].parts.append(element)
        if tag not in _EMPTY:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while tag not in _EMPTY and len(self._open) > 1 and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        self._open[-1].parts.append(data)


class Seen(NamedTuple):
    root: Element
    console: list[str]

    def texts(self, tag: str = "", **wanted: str) -> list[str]:
        return [element.text for element in self.root.all(tag, **wanted)]

    @property
    def episode(self) -> Element:
        return self.root.one("main")


Open = Callable[..., Seen]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Opens a page, carries out what is to be done on it, and tells what is there then."""

    def run(source: str, id: str = "", *, then: str = "") -> Seen:
        file = tmp_path / "page.html"
        file.write_text(_driven(source, then) if then else source, encoding="utf-8")
        address = f"{file.as_uri()}{'#' if id else ''}{quote(id, safe='')}"
        command = [CHROMIUM or "", *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", address]
        done = subprocess.run(command, capture_output=True, timeout=240, check=True)
        console = re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr.decode(errors="replace"))
        return Seen(Tree(done.stdout.decode()).root, console)

    return run


def _driven(source: str, script: str) -> str:
    """The page with one more script, which its policy is told of."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert source.count("script-src '") == 1
    return source.replace("script-src '", f"script-src 'sha256-{digest}' '").replace(
        "</body>", f"<script>{script}</script></body>"
    )
