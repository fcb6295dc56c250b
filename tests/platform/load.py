"""Calls of a service at a steady rate, whatever comes of them, and a counter of those that ran; for tests.

Each call has a name of its own. What it came to is kept by that name, and the counter hears the name from the tool
itself, however soon after that the sandbox ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import shutil
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from aenv import Environment, http
from aenv.client.hub import HubClient
from aenv.errors import AEnvError, NetworkError, from_wire
from aenv.project import read
from aenv.project.archive import pack
from aenv.wire import EnvRequest
from tests.platform.support import PATIENCE, Platform, eventually

COUNTED = Path(__file__).parent / "counted"
"""A project whose tools tell the counter of every call."""
RATE = 200
"""Calls a second that are begun, as far as the machine keeps up."""
MOST = 48
"""Calls that are under way at the same time; more wait for their turn."""
NAP = 0.03
"""Seconds that each takes, so that some are always under way."""
REVISION = "2025-11-25"
"""Of MCP, with sessions."""
_CALLS = 4
"""How many are begun at once."""


def push(found: Platform, folder: Path, *versions: str, **editions: str) -> None:
    """Push versions of the project, each of which says its own name, or the edition that is given for it."""

    async def upload(root: Path) -> None:
        project = read(root)
        hub = HubClient(found.control, found.token)
        request = EnvRequest(name=project.name, version=project.version, deploy_config=project.config["deployConfig"])
        await hub.create(request)
        await hub.upload(project.name, project.version, pack(project))
        await http.close()

    for version, edition in {**{version: version for version in versions}, **editions}.items():
        root = shutil.copytree(COUNTED, folder / version / "counted", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "src" / "edition.py").write_text(f"EDITION = {edition!r}\n")
        config = json.loads((root / "config.json").read_text())
        (root / "config.json").write_text(json.dumps(config | {"version": version}))
        asyncio.run(upload(root))


# What ran


class Counted:
    """Hears from tools what they did."""

    def __init__(self) -> None:
        self.port = 0
        self.ran: Counter[str] = Counter()
        """How often each call ran."""
        self.at: dict[str, str] = {}
        """The replica that ran it."""
        self.killed: list[str] = []
        """Replicas that were told to die."""

    def hear(self, lines: Iterator[bytes]) -> None:
        who = ""
        for line in lines:
            word, _, rest = line.decode().strip().partition(" ")
            if word == "at":
                who = rest
            elif word == "ran":
                self.ran[rest] += 1
                self.at[rest] = who
            elif word == "dies":
                self.killed.append(who)


@contextmanager
def counted(host: str = "127.0.0.1") -> Iterator[Counted]:
    """A counter for the length of a block, at an address of this machine."""
    found = Counted()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            found.hear(iter(self.rfile))

        def finish(self) -> None:
            """Nothing is told to those who count."""

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    with Server((host, 0), Handler) as server:
        found.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


# What came of each call


class Call(NamedTuple):
    """A call that is over."""

    began: float
    answer: dict[str, Any]
    error: AEnvError | None

    @property
    def is_unknown(self) -> bool:
        """Whether it failed in the one way in which a call may whose replica or server is killed."""
        return isinstance(self.error, NetworkError) and "not known" in f"{self.error.hint}"


class Traffic:
    """Calls of a service for the length of a block, of every kind in turn. What fails is kept, not raised."""

    def __init__(
        self, served: Platform, id: str, counter: Counted, *, data: str = "", sessions: int = 3, rate: int = RATE
    ) -> None:
        """``data`` is where those are sent that do not come from the SDK; the platform's data port by default."""
        self.calls: dict[str, Call] = {}
        self._counter = counter
        self._step = _CALLS / rate
        self._name = secrets.token_hex(3)
        self._numbers = itertools.count()
        self._plain = _Plain(f"{data or served.data}/env-service/{id}", served.token)
        self._environment = Environment(service_id=id, aenv_url=served.control, api_key=served.token)
        self._kinds: list[Callable[[str], Awaitable[Any]]] = []
        for _ in range(sessions):
            self._kinds += [self.by_sdk, self.plainly, self.under_an_id, _Session(self._plain).in_session]
        self._room = asyncio.Semaphore(MOST)
        self._running: set[asyncio.Task[None]] = set()
        self._beginning: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._environment.initialize()
        self._beginning = asyncio.create_task(self._begin())
        await self.more(20)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._beginning is not None
        self._beginning.cancel()
        await asyncio.wait((self._beginning,))
        hanging: set[asyncio.Task[None]] = set()
        if self._running:
            _, hanging = await asyncio.wait(set(self._running), timeout=2 * PATIENCE)
            for task in hanging:
                task.cancel()
        self._plain.close()
        await self._environment.release()
        await http.close()
        assert not hanging, f"{len(hanging)} calls hang"

    async def _begin(self) -> None:
        """Begin calls by the clock, and not when others end."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            for number in itertools.islice(self._numbers, _CALLS):
                await self._room.acquire()
                task = asyncio.create_task(self._call(number))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            due = max(due + self._step, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _call(self, number: int) -> None:
        kind = self._kinds[number % len(self._kinds)]
        id, began = f"{self._name}-{number}-{kind.__name__}", time.monotonic()
        try:
            answer = await kind(id)
            assert answer["id"] == id, f"{id} was answered with {answer}"
            self.calls[id] = Call(began, answer, None)
        except AEnvError as exc:
            self.calls[id] = Call(began, {}, exc)
        except Exception as exc:
            self.calls[id] = Call(began, {}, AEnvError(repr(exc)))
        finally:
            self._room.release()

    # The kinds of calls

    async def by_sdk(self, id: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                result = await self._environment.call_tool("count", {"id": id, "nap": NAP}, timeout=2 * PATIENCE)
                return result.raise_for_error().structured
            except http.NotSent:
                if time.monotonic() > deadline:
                    raise

    async def plainly(self, id: str, **headers: str) -> Any:
        reply = await self._plain.post("/tools/count", {"id": id, "nap": NAP}, **headers)
        if reply.status != 200:
            raise reply.error
        return reply.json["data"]

    async def under_an_id(self, id: str) -> Any:
        """On a connection of its own."""
        return await self.plainly(id, AEnv_Call_Id=id, Connection="close")

    # What came of it

    async def more(self, count: int = 100) -> None:
        """Wait for so many more calls to be over."""
        wanted, deadline = len(self.calls) + count, time.monotonic() + PATIENCE
        while len(self.calls) < wanted:
            assert time.monotonic() < deadline, f"no more calls end; {len(self._running)} are under way"
            await asyncio.sleep(0.02)

    @property
    def failed(self) -> dict[str, Call]:
        return {id: call for id, call in self.calls.items() if call.error is not None}

    def _told(self, failed: dict[str, Call]) -> str:
        """How calls failed, in words."""
        kinds = Counter((id.rpartition("-")[2], repr(call.error), call.is_unknown) for id, call in failed.items())
        return f"{len(failed)} of {len(self.calls)} calls: {kinds}"

    def once_each(self) -> None:
        """See that each call that was answered ran once, and none twice."""
        answered = {id: call.answer["replica"] for id, call in self.calls.items() if call.error is None}
        eventually("the counter to hear of all", lambda: answered.keys() <= self._counter.at.keys())
        assert {id: count for id, count in dict(self._counter.ran).items() if count > 1} == {}
        assert {id: self._counter.at[id] for id in answered} == answered

    def all_well(self) -> None:
        """See that no call failed, and that each ran once."""
        assert not self.failed, self._told(self.failed)
        self.once_each()

    def lost(self, before: float, at: set[str] | None = None) -> None:
        """See that no call failed but those that were under way before that moment in what was killed, of which is not
        known whether they ran; and that each ran once, if at all. ``at`` are the replicas that were killed."""
        wrong = {
            id: call
            for id, call in self.failed.items()
            if not call.is_unknown
            or call.began > before
            or (at is not None and id in self._counter.at and self._counter.at[id] not in at)
        }
        assert not wrong, self._told(wrong)
        self.once_each()


class _Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """What it says; of an event stream, in its last message."""
        if self.headers["content-type"].startswith("text/event-stream"):
            return json.loads([line[5:] for line in self.body.split(b"\n") if line.startswith(b"data:")][-1])
        return json.loads(self.body)

    @property
    def error(self) -> AEnvError:
        told = self.json
        return from_wire({**told, "message": f"{self.status}: {told['error']}"})


class _Plain:
    """Requests as any client of HTTP makes them: connections are kept, and one whose end was heard is not used again.

    What did not run is asked again: what could not be sent, and what was answered by 503.
    """

    def __init__(self, base: str, token: str) -> None:
        self._place = urlsplit(base)
        self._token = token
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: Any, **headers: str) -> _Reply:
        deadline = time.monotonic() + PATIENCE
        while True:
            reply = await self._posted(path, json.dumps(body).encode(), headers)
            if reply is not None and reply.status != 503:
                return reply
            if time.monotonic() > deadline:
                raise NetworkError("nobody listens") if reply is None else reply.error
            await asyncio.sleep(0.1)

    async def _posted(self, path: str, body: bytes, headers: dict[str, str]) -> _Reply | None:
        kept = None if "Connection" in headers else self._taken()
        try:
            reader, writer = kept or await asyncio.open_connection(self._place.hostname, self._place.port)
        except OSError:
            return None
        try:
            reply = await self._exchanged(reader, writer, path, body, headers)
        except (OSError, asyncio.IncompleteReadError) as exc:
            raise NetworkError(f"cut: {exc!r}", hint="whether it ran is not known") from exc
        else:
            if reply.headers.get("connection") != "close":
                self._idle.append((reader, writer))
            return reply
        finally:
            if (reader, writer) not in self._idle:
                writer.transport.abort()

    def _taken(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.transport.abort()
        return None

    async def _exchanged(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: bytes,
        headers: dict[str, str],
    ) -> _Reply:
        sent = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items())
        head = f"POST {self._place.path}{path} HTTP/1.1\r\nHost: {self._place.netloc}\r\n{lines}"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        told = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
        if told.get("transfer-encoding") == "chunked":
            return _Reply(int(first.split()[1]), told, await self._chunks(reader))
        return _Reply(int(first.split()[1]), told, await reader.readexactly(int(told.get("content-length", "0"))))

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return body

    def close(self) -> None:
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()


class _Session:
    """A session of MCP. When it is gone a new one is begun, as MCP has it, and what was asked is asked there."""

    def __init__(self, client: _Plain) -> None:
        self._client = client
        self._id = ""
        self._numbers = itertools.count(2)
        self._opening = asyncio.Lock()

    async def in_session(self, id: str) -> Any:
        while True:
            session = await self._opened()
            params = {"name": "count", "arguments": {"id": id, "nap": NAP}}
            reply = await self._said("tools/call", params, next(self._numbers), Mcp_Session_Id=session)
            if reply.status == 200:
                return reply.json["result"]["structuredContent"]
            if reply.status != 404:
                raise reply.error
            self._gone(session)

    def _gone(self, session: str) -> None:
        if self._id == session:
            self._id = ""

    async def _opened(self) -> str:
        async with self._opening:
            while not self._id:
                about = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
                reply = await self._said("initialize", about, 1)
                if reply.status != 200:
                    raise reply.error
                self._id = reply.headers["mcp-session-id"]
                reply = await self._said("notifications/initialized", {}, None, Mcp_Session_Id=self._id)
                if reply.status == 404:
                    self._id = ""
                elif reply.status != 202:
                    raise reply.error
            return self._id

    async def _said(self, method: str, params: Any, id: int | None, **headers: str) -> _Reply:
        message = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if id is None else {"id": id})
        return await self._client.post(
            "/mcp", message, Accept="application/json, text/event-stream", MCP_Protocol_Version=REVISION, **headers
        )
