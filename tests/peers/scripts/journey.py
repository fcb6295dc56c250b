"""What every client does to a sandbox, written once. A script beside this one adapts its client and calls ``main``.

The order comes as JSON in the first argument, the report goes out as one JSON object on the last line.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

PATIENCE = 20.0
"""Seconds after which something that has to happen counts as absent."""
SESSION = "mcp-session-id"


class Result(dict[str, Any]):
    """A tool's result: ``content``, ``structured``, ``error``, and ``data`` where the client makes objects of it."""


class Peer(Protocol):
    """A connected client."""

    logs: list[list[str]]
    """Log messages that arrived: level and text."""
    changes: int
    """How often it heard that the tools changed."""

    @property
    def revision(self) -> str: ...
    @property
    def server(self) -> str: ...
    async def tools(self) -> dict[str, dict[str, Any]]: ...
    async def call(
        self,
        name: str,
        arguments: dict[str, Any],
        progress: list[list[Any]] | None = None,
        timeout: float | None = None,
    ) -> Result: ...
    async def set_level(self, level: str) -> None: ...
    async def resources(self) -> list[str]: ...
    async def read(self, uri: str) -> str: ...
    async def prompts(self) -> list[str]: ...
    async def prompt(self, name: str, arguments: dict[str, str]) -> str: ...
    def listening(self) -> AbstractAsyncContextManager[None]: ...


class Trace:
    """The HTTP exchanges of a client."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.sessions: set[str] = set()

    async def note(self, response: Any) -> None:
        """An httpx event hook."""
        self.seen.append((response.request.method, response.status_code))
        for headers in (response.headers, response.request.headers):
            if SESSION in headers:
                self.sessions.add(headers[SESSION])

    def statuses(self, method: str) -> list[int]:
        return [status for seen, status in self.seen if seen == method]


Connect = Callable[[str, dict[str, str], Trace], AbstractAsyncContextManager[Peer]]


async def until(condition: Callable[[], bool]) -> bool:
    """Wait for something that the event loop brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.01)
    return True


async def failure(work: Any) -> str:
    """The class of what was raised; groups of one are opened."""
    try:
        await work
    except BaseException as exc:
        found: BaseException = exc
        while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
            found = found.exceptions[0]
        return type(found).__name__
    return ""


async def tools(connect: Connect, order: dict[str, Any]) -> dict[str, Any]:
    """Everything about tools, on one connection."""
    trace = Trace()
    report: dict[str, Any] = {}
    async with connect(order["url"], {}, trace) as peer:
        report["revision"], report["server"] = peer.revision, peer.server
        listed = await peer.tools()
        report["tools"] = sorted(listed)
        report["add"] = listed["add"]
        report["renamed"] = listed["renamed"]
        report["text"] = await peer.call("echo", {"text": "héllo ✓"})
        report["number"] = await peer.call("add", {"a": 1})
        report["object"] = await peer.call("point", {"x": 1, "y": 2})
        report["nested"] = await peer.call("search", {"query": {"text": "a", "limit": 2}})
        report["image"] = await peer.call("picture", {})
        report["big"] = len((await peer.call("big", {"size": 3_000_000}))["content"][0]["text"])
        report["failed"] = await peer.call("fail", {"message": "broken"})
        report["bad"] = await peer.call("add", {"a": "x"})
        report["unknown"] = await peer.call("addd", {"a": 1})
        report["progress"] = await progress(peer)
        report["logs"] = await logs(peer)
        report["timeout"] = await timeout(peer)
        report["many"] = await many(peer)
    report["end"] = end(order["url"], trace)
    return report


async def progress(peer: Peer) -> list[list[Any]]:
    heard: list[list[Any]] = []
    await peer.call("steps", {"n": 3}, progress=heard)
    await until(lambda: len(heard) >= 3)
    return heard


async def logs(peer: Peer) -> dict[str, list[list[str]]]:
    report = {}
    for level in ("info", "error"):
        peer.logs.clear()
        await peer.set_level(level)
        await peer.call("steps", {"n": 2})
        if level == "info":
            await until(lambda: len(peer.logs) >= 2)
        report[level] = list(peer.logs)
    return report


async def timeout(peer: Peer) -> dict[str, Any]:
    """One call is given up while another, begun before it, goes on to its end."""
    other = asyncio.create_task(peer.call("sleep", {"seconds": 0.6}))
    begun = time.monotonic()
    refused = await failure(peer.call("sleep", {"seconds": 600.0}, timeout=0.3))
    report = {"raised": refused, "soon": time.monotonic() - begun < 5}
    report["other"] = (await other)["content"][0]["text"]
    return report


async def many(peer: Peer) -> bool:
    texts = [f"call {n}" for n in range(50)]
    found = await asyncio.gather(*(peer.call("echo", {"text": text}) for text in texts))
    return [result["content"][0]["text"] for result in found] == texts


def end(url: str, trace: Trace) -> dict[str, Any]:
    """How the session ended, and what the server says to somebody who still uses it."""
    afterwards = []
    parts = urlsplit(url)
    for session in trace.sessions:
        connection = http.client.HTTPConnection(parts.netloc, timeout=10)
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        connection.request("POST", f"{parts.path}?{parts.query}", body, {**headers, SESSION: session})
        afterwards.append(connection.getresponse().status)
        connection.close()
    return {"sessions": len(trace.sessions), "deleted": trace.statuses("DELETE"), "afterwards": afterwards}


async def cancelled(connect: Connect, order: dict[str, Any]) -> dict[str, Any]:
    """A call whose task is cancelled, while another goes on; how often the tool heard of it."""
    async with connect(order["url"], {}, Trace()) as peer:
        other = asyncio.create_task(peer.call("sleep", {"seconds": 0.6}))
        heard: list[list[Any]] = []
        task = asyncio.create_task(peer.call("sleep", {"seconds": 600.0}, progress=heard))
        await peer.call("echo", {"text": "both have begun"})
        task.cancel()
        raised = await failure(task)
        report = {"raised": raised, "other": (await other)["content"][0]["text"]}
        report["heard"] = (await peer.call("cancelled", {}))["content"][0]["text"]
    async with connect(order["url"], {}, Trace()) as peer:
        report["heard at the end"] = (await peer.call("cancelled", {}))["content"][0]["text"]
    return report


async def content(connect: Connect, order: dict[str, Any]) -> dict[str, Any]:
    """A tool that puts a picture into a declared list; the client knows the tool's schema by then."""
    async with connect(order["url"], {}, Trace()) as peer:
        await peer.tools()
        return {"mixed": await peer.call("mixed", {})}


async def guarded(connect: Connect, order: dict[str, Any]) -> dict[str, Any]:
    """The two ways to present a token, and none."""

    async def attempt(url: str, headers: dict[str, str]) -> bool:
        async with connect(url, headers, Trace()) as peer:
            return bool(await peer.tools())

    url, token = order["url"], order["token"]
    return {
        "query": await attempt(f"{url}?token={token}", {}),
        "header": await attempt(url, {"Authorization": f"Bearer {token}"}),
        "none": bool(await failure(attempt(url, {}))),
        "wrong": bool(await failure(attempt(url, {"Authorization": "Bearer wrong"}))),
    }


async def reloaded(connect: Connect, order: dict[str, Any]) -> dict[str, Any]:
    """The tools change while the client listens."""
    async with connect(order["url"], {}, Trace()) as peer:
        before = sorted(await peer.tools())
        async with peer.listening():
            Path(order["file"]).write_text(order["text"])
            heard = await until(lambda: peer.changes > 0)
        return {"before": before, "heard": heard, "after": sorted(await peer.tools())}


async def wrapped(connect: Connect, order: dict[str, Any]) -> dict[str, Any]:
    """A sandbox whose project brings its own server: two clients of it at once."""
    trace = Trace()
    report: dict[str, Any] = {}
    async with connect(order["url"], {}, trace) as peer, connect(order["url"], {}, Trace()) as second:
        report["revision"] = peer.revision
        report["tools"] = sorted(await peer.tools())
        heard: list[list[Any]] = []
        worked = await peer.call("work", {"n": 2}, progress=heard)
        report["worked"] = worked["content"][0]["text"]
        await until(lambda: len(heard) >= 2)
        report["progress"] = heard
        report["point"] = (await peer.call("point", {"x": 1, "y": 2}))["structured"]
        report["failed"] = (await peer.call("fail", {}))["error"]
        report["shout"] = (await peer.call("shout", {"text": "hey", "mark": "?"}))["content"]
        report["picture"] = (await peer.call("picture", {}))["content"]
        heard = []
        report["about"] = (await peer.call("about", {}, progress=heard))["structured"]
        await until(lambda: len(heard) >= 1)
        report["ours"] = heard
        refused = await peer.call("refuse", {})
        report["refused"] = [refused["error"], "ask for less" in refused["content"][0]["text"]]
        report["resources"] = await peer.resources()
        report["read"] = [await peer.read("data://greeting"), await peer.read("data://item/7")]
        report["prompts"] = await peer.prompts()
        report["prompt"] = await peer.prompt("ask", {"topic": "rain"})
        slow = asyncio.create_task(peer.call("sleep", {"seconds": 0.5}))
        report["second"] = (await second.call("greet", {"name": "Bo"}))["content"][0]["text"]
        report["slow"] = [slow.done(), (await slow)["content"][0]["text"]]
    report["end"] = end(order["url"], trace)
    return report


async def hold(connect: Connect, order: dict[str, Any]) -> dict[str, Any]:
    """Keep an event stream open until the other side ends it."""
    async with connect(order["url"], {}, Trace()) as peer:
        async with peer.listening():
            print("listening", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return {}


JOURNEYS = {
    "tools": tools,
    "cancelled": cancelled,
    "content": content,
    "guarded": guarded,
    "reloaded": reloaded,
    "wrapped": wrapped,
    "hold": hold,
}


def main(connect: Callable[[dict[str, Any]], Connect]) -> None:
    order = json.loads(sys.argv[1])

    async def travel() -> dict[str, Any]:
        report: dict[str, Any] = {}
        for name, stop in order["journeys"].items():
            try:
                report[name] = await JOURNEYS[name](connect(order), stop)
            except Exception:
                report[name] = {"raised": traceback.format_exc()}
        return report

    print(json.dumps(asyncio.run(travel())), flush=True)
