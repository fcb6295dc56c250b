"""A small web app, built file by file, and served inside the sandbox while it grows."""

import os
import re
import shutil
import signal
import subprocess
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit

from aenv import (
    Context,
    ToolError,
    register_function,
    register_reset,
    register_reward,
    register_setup,
    register_teardown,
    register_tool,
)

MOST_BYTES, MOST_FILES, MOST_PRINTED = 256 * 1024, 100, 16 * 1024
here = {"app": Path("app"), "server": None}


class Preview(SimpleHTTPRequestHandler):
    """The app as it is now: a browser asks again each time."""

    def end_headers(self):
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *told):
        pass


@register_setup
def begin(ctx: Context):
    here["app"] = Path(ctx.working_directory).resolve() / "app"
    here["app"].mkdir(exist_ok=True)
    here["server"] = ThreadingHTTPServer(("127.0.0.1", 0), partial(Preview, directory=str(here["app"])))
    threading.Thread(target=here["server"].serve_forever, args=(0.05,), daemon=True).start()


@register_teardown
def end():
    here["server"].shutdown()
    here["server"].server_close()


@register_reset
def empty():
    shutil.rmtree(here["app"])
    here["app"].mkdir()


@register_tool
def write_file(path: str, content: str) -> str:
    """Write a file of the app, whole. It begins at index.html.

    Args:
        path: Where, below the app's folder, such as index.html or js/game.js.
        content: The text of the file, at most 256 KiB.
    """
    file = inside(path)
    if len(content.encode()) > MOST_BYTES:
        raise ToolError(f"{path} would be larger than {MOST_BYTES} bytes; make several files of it")
    if not file.exists() and len(names()) >= MOST_FILES:
        raise ToolError(f"the app has {MOST_FILES} files, which is the most; delete some first")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as exc:
        raise ToolError(f"{path} cannot be written: {exc.strerror}") from exc
    return f"{path}: {len(content.splitlines())} lines"


@register_tool(annotations={"readOnlyHint": True})
def read_file(path: str) -> str:
    """Read a file of the app."""
    try:
        return inside(path).read_text(encoding="utf-8", errors="replace")[:MOST_BYTES]
    except OSError as exc:
        raise ToolError(
            f"{path} cannot be read: {exc.strerror}; the app has {', '.join(names()) or 'no files'}"
        ) from exc


@register_tool(annotations={"readOnlyHint": True})
def list_files() -> list[str]:
    """List the files of the app."""
    return names()


@register_tool
def delete_file(path: str) -> str:
    """Delete a file of the app."""
    try:
        inside(path).unlink()
    except OSError as exc:
        raise ToolError(f"{path} cannot be deleted: {exc.strerror}") from exc
    return f"{path} is gone"


@register_tool
def run(command: str, timeout: float = 20) -> dict:
    """Run a command of bash in the app's folder, such as a Python script that makes a file or checks one.

    Args:
        command: What to run. Nothing can be asked of it while it runs.
        timeout: Seconds after which it is ended, at most 60.
    """
    bounded = f'(eval "$1") 2>&1 | head -c {MOST_PRINTED}; exit "${{PIPESTATUS[0]}}"'
    process = subprocess.Popen(
        ["bash", "-c", bounded, "-", command],
        cwd=here["app"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    limit = threading.Timer(min(timeout, 60), os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        printed = process.communicate()[0]
    finally:
        limit.cancel()
    return {"exit_code": process.returncode, "output": printed.decode(errors="replace")}


@register_function
def preview() -> dict:
    """The port inside that serves the app."""
    return {"port": here["server"].server_port}


@register_function
def files() -> dict:
    """Every file of the app, for whoever watches it grow."""
    return {name: read_file(name) for name in names()}


@register_reward
def complete() -> dict:
    """The share of what the app's page refers to that is there; nothing where there is no page."""
    if "index.html" not in names():
        return {"score": 0.0, "missing": ["index.html"]}
    wanted = Links.of(read_file("index.html"))
    missing = sorted(wanted - set(names()))
    return {"score": 1.0 - len(missing) / (len(wanted) + 1), "missing": missing}


class Links(HTMLParser):
    """What a page loads from its own folder."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            url = urlsplit(value or "")
            if name in ("src", "href") and url.path and not url.scheme and not url.netloc:
                self.found.add(normpath(unquote(url.path).lstrip("/")))

    @classmethod
    def of(cls, page: str) -> set[str]:
        parser = cls()
        parser.feed(page)
        return parser.found - {"."}


def names() -> list[str]:
    return sorted(str(file.relative_to(here["app"])) for file in here["app"].rglob("*") if is_of_app(file))


def is_of_app(file: Path) -> bool:
    """Whether it can be read and leads nowhere else: a command may have made anything."""
    return file.is_file() and here["app"] in file.resolve().parents and os.access(file, os.R_OK)


def inside(path: str) -> Path:
    """A path of the app, which leads nowhere else, whatever it says and whatever links are there."""
    if not path or re.search(r"[\x00-\x1f]", path):
        raise ToolError(f"{path!r} is no path")
    file = (here["app"] / path).resolve()
    if here["app"] not in file.parents:
        raise ToolError(f"{path} is outside of the app; use a path such as index.html")
    return file
