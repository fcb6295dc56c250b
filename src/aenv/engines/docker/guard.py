"""Between an engine and a Docker that is not its own: ``python -m aenv.engines.docker.guard SOCKET``.

What an engine asks for is passed on, and nothing else. Containers and volumes of others do not exist for it, and those
that it makes take nothing of the host: no privilege, device, namespace or path. Everything is refused that no rule
names. What was looked at is written anew, so Docker reads what the guard has read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from aenv.engines.docker import asked
from aenv.engines.docker.asked import KEEPERS, RUNNING
from aenv.engines.docker.containers import KIND
from aenv.engines.docker.daemon import SOCKETS, Daemon
from aenv.errors import AEnvError, Forbidden, Invalid, NotFound, TooLarge

log = logging.getLogger("aenv.guard")
MOST_HEAD = 64 * 1024
MOST_BODY = 4 * 1024 * 1024
"""Bytes that may describe a container: its variables may have 2 MiB."""
PATIENCE = 60.0
"""Seconds in which a request has come as a whole, or its next piece, where it is passed on as it comes."""
_PIECE = 64 * 1024
_LINE = re.compile(r"(GET|POST|PUT|DELETE) (?:/v1\.\d+)?(/[A-Za-z0-9/_.:@-]*)(?:\?(\S*))? HTTP/1\.1")
"""The version of the API is not passed on: older ones tell more, and let a start say what a container has."""
_FIELD = re.compile(r"([A-Za-z0-9-]+):[ \t]*([\x20-\x7e]*)")
_JSON, _ARCHIVE = "application/json", "application/x-tar"
_CREDENTIALS = "x-registry-auth"
_TURNED = re.compile(rb"HTTP/1\.1 101 ")
_NAME = "([A-Za-z0-9][A-Za-z0-9_.-]*)"
_AWAY = 5.0
"""Seconds in which whoever was refused hangs up."""


class Request(NamedTuple):
    """A request, of which the body is still to come."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    size: int


class Passed(NamedTuple):
    """What Docker is asked instead."""

    path: str
    query: Mapping[str, str]
    body: bytes | None = b""
    """None for one that is passed on as it comes."""
    content: str = _JSON
    """What the body is. What the engine calls it does not count: Docker would take a form for the query."""
    turns: bool = False
    """Whether the connection becomes a stream of bytes."""


Rule = Callable[["Guard", Request, "re.Match[str]", bytes], Awaitable[Passed]]


class Guard:
    """The rules, and the Docker behind them."""

    def __init__(self, docker: str, runtime: str = "") -> None:
        """``runtime`` is the one that containers may have besides the daemon's own."""
        self._daemon, self._runtime = Daemon(docker), runtime

    # Rules

    async def plain(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        _nothing(body)
        return Passed(request.path, request.query)

    async def listed(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        """A list, or events: of ours alone."""
        _nothing(body)
        filters = asked.parsed(request.query.get("filters", "{}").encode())
        labels = filters.get("label", [])
        if not isinstance(labels, list):
            raise Forbidden("labels to look for are a list")
        query = {**request.query, "filters": json.dumps({**filters, "label": [*labels, KIND]})}
        return Passed(request.path, query)

    async def ours(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        """Something about a container, or to do to it."""
        _nothing(body)
        id = await self._container(found[1])
        return Passed(f"/containers/{id}{found[2] or ''}", request.query)

    async def run(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        """Start a container, or attach to it."""
        _nothing(body)
        id = await self._container(found[1], *RUNNING)
        return Passed(f"/containers/{id}{found[2]}", request.query, turns=found[2] == "/attach")

    async def fill(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        """Bring files into a container that never runs: no other changes what a path leads to."""
        id = await self._container(found[1], *KEEPERS)
        return Passed(f"/containers/{id}/archive", request.query, None, _ARCHIVE)

    async def create(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        wanted = asked.container(asked.parsed(body), self._runtime)
        for volume in wanted.volumes:
            await self._volume(volume)
        keepers = [await self._container(name, *KEEPERS) for name in wanted.keepers]
        if keepers:  # by what cannot become another's name
            wanted.body["HostConfig"]["VolumesFrom"] = [f"{id}:ro" for id in keepers]
        return Passed(request.path, request.query, json.dumps(wanted.body).encode())

    async def make_volume(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        return Passed(request.path, request.query, json.dumps(asked.volume(asked.parsed(body))).encode())

    async def volume(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        _nothing(body)
        await self._volume(found[1])
        return Passed(request.path, request.query)

    async def command(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        """A command in a container."""
        id = await self._container(found[1], *RUNNING)
        return Passed(f"/containers/{id}/exec", {}, json.dumps(asked.command(asked.parsed(body))).encode())

    async def start_command(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        told = await self._daemon.ask("GET", f"/exec/{found[1]}/json")
        await self._container(str(told.get("ContainerID") or ""), *RUNNING)
        start = asked.only(asked.parsed(body), {"Detach": asked.IS_FALSE, "Tty": asked.IS_FALSE}, "a start")
        return Passed(request.path, {}, json.dumps(start).encode(), turns=True)

    async def image(self, request: Request, found: re.Match[str], body: bytes) -> Passed:
        """Pull an image, or bring that of the agent."""
        if "fromSrc" not in request.query:
            _nothing(body)
            return Passed(request.path, request.query)
        if request.query["fromSrc"] != "-" or not re.fullmatch(asked.AGENT_IMAGE, request.query.get("repo", "")):
            raise Forbidden("no image may be brought but the agent's")
        return Passed(request.path, {**request.query, "fromImage": ""}, body, _ARCHIVE)

    async def _container(self, name: str, *kinds: str) -> str:
        """The id of a container of ours. Others do not exist."""
        found = await self._daemon.ask("GET", f"/containers/{name}/json")
        kind = ((found.get("Config") or {}).get("Labels") or {}).get(KIND)
        if not kind:
            raise NotFound(f"no such container: {name}")
        if kinds and kind not in kinds:
            raise Forbidden(f"{name} is a {kind}, and this is for a {' or '.join(kinds)}")
        return str(found["Id"])

    async def _volume(self, name: str) -> None:
        found = await self._daemon.ask("GET", f"/volumes/{name}")
        if not (found.get("Labels") or {}).get(KIND):
            raise NotFound(f"no such volume: {name}")

    # Connections

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, and the end of its connection."""
        try:
            async with asyncio.timeout(PATIENCE):
                request = _read(await reader.readuntil(b"\r\n\r\n"))
                passed = await self._decide(request, reader)
            async with self._docker() as (theirs, to_them):
                to_them.write(_head(request, passed))
                if passed.body is None:
                    await _send(reader, to_them, request.size)
                head = await theirs.readuntil(b"\r\n\r\n") if passed.turns else b""
                writer.write(head)
                await _join(reader, writer, theirs, to_them, both=_TURNED.match(head) is not None)
        except AEnvError as exc:
            if isinstance(exc, Forbidden):
                log.warning("refused: %s", exc.message)
            await _answer(reader, writer, exc)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as exc:
            log.debug("a connection ended: %s", exc)
        finally:
            with suppress(OSError):
                writer.close()
                await writer.wait_closed()

    async def _decide(self, request: Request, reader: asyncio.StreamReader) -> Passed:
        for method, path, names, rule in RULES:
            found = re.fullmatch(path, request.path)
            if found is None or method != request.method:
                continue
            if unknown := request.query.keys() - names:
                raise Forbidden(f"{request.method} {request.path} may not have {', '.join(sorted(unknown))}")
            body = b""
            if rule is not Guard.fill:
                if request.size > MOST_BODY:
                    raise TooLarge(f"a request may have {MOST_BODY} bytes, and this one has {request.size}")
                body = await reader.readexactly(request.size)
            return await rule(self, request, found, body)
        raise Forbidden(f"the guard does not let {request.method} {request.path} through")

    @asynccontextmanager
    async def _docker(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        theirs, to_them = await asyncio.open_unix_connection(self._daemon.base.removeprefix("unix:"))
        try:
            yield theirs, to_them
        finally:
            to_them.transport.abort()


RULES: tuple[tuple[str, str, frozenset[str], Rule], ...] = tuple(
    (method, path, frozenset(names.split()), rule)
    for method, path, names, rule in (
        ("GET", "/_ping|/version|/info", "", Guard.plain),
        ("GET", "/networks", "filters", Guard.plain),
        ("GET", "/images/[A-Za-z0-9][A-Za-z0-9/_.:@-]*/json", "", Guard.plain),
        ("GET", "/containers/json", "all filters", Guard.listed),
        ("GET", "/volumes", "filters", Guard.listed),
        ("GET", "/events", "filters since", Guard.listed),
        ("GET", f"/containers/{_NAME}(/json)", "size", Guard.ours),
        ("GET", f"/containers/{_NAME}(/logs)", "stdout stderr follow tail", Guard.ours),
        ("GET", f"/containers/{_NAME}(/stats)", "stream one-shot", Guard.ours),
        ("POST", "/containers/create", "name", Guard.create),
        ("POST", f"/containers/{_NAME}(/start)", "", Guard.run),
        ("POST", f"/containers/{_NAME}(/attach)", "stream stdin", Guard.run),
        ("POST", f"/containers/{_NAME}(/kill)", "", Guard.ours),
        ("POST", f"/containers/{_NAME}(/stop)", "t", Guard.ours),
        ("POST", f"/containers/{_NAME}(/wait)", "", Guard.ours),
        ("POST", f"/containers/{_NAME}(/rename)", "name", Guard.ours),
        ("PUT", f"/containers/{_NAME}/archive", "path", Guard.fill),
        ("DELETE", f"/containers/{_NAME}()", "force v", Guard.ours),
        ("POST", f"/containers/{_NAME}/exec", "", Guard.command),
        ("POST", "/exec/([0-9a-f]+)/start", "", Guard.start_command),
        ("POST", "/volumes/create", "", Guard.make_volume),
        ("GET", f"/volumes/{_NAME}", "", Guard.volume),
        ("DELETE", f"/volumes/{_NAME}", "force", Guard.volume),
        ("POST", "/images/create", "fromImage tag fromSrc repo", Guard.image),
        ("DELETE", f"/images/{asked.AGENT_IMAGE}", "", Guard.plain),
    )
)
"""Method, path, what may be in the query, and who looks at it."""


def _nothing(body: bytes) -> None:
    if body:
        raise Forbidden("this request has no body")


def _read(head: bytes) -> Request:
    """The head of a request."""
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    line, fields = _LINE.fullmatch(first), [_FIELD.fullmatch(each) for each in lines]
    if line is None or not all(fields):
        raise Forbidden("this is not a request as an engine writes it")
    headers = {found[1].lower(): found[2] for found in fields if found}
    size = headers.get("content-length", "0")
    if len(headers) != len(lines) or "transfer-encoding" in headers or not re.fullmatch(r"\d{1,15}", size):
        raise Forbidden("a header comes twice, or the size of the body is not told")
    if ".." in line[2] or "//" in line[2]:
        raise Forbidden("the path is not plain")
    try:
        pairs = parse_qsl(line[3] or "", keep_blank_values=True, strict_parsing=bool(line[3]), max_num_fields=20)
    except ValueError as exc:
        raise Invalid(f"the query cannot be read: {exc}") from exc
    if len(dict(pairs)) != len(pairs):
        raise Forbidden("something comes twice in the query")
    return Request(line[1], line[2], dict(pairs), headers, int(size))


def _head(request: Request, passed: Passed) -> bytes:
    """The request as Docker gets it, with its body where that is known."""
    query = f"?{urlencode(passed.query)}" if passed.query else ""
    size = request.size if passed.body is None else len(passed.body)
    lines = [f"{request.method} {passed.path}{query} HTTP/1.1", "Host: docker", f"Content-Length: {size}"]
    lines += [f"Content-Type: {passed.content}"] if size else []
    lines += [f"{_CREDENTIALS}: {request.headers[_CREDENTIALS]}"] if _CREDENTIALS in request.headers else []
    lines += ["Connection: close, Upgrade", "Upgrade: tcp"] if passed.turns else ["Connection: close"]
    return "\r\n".join((*lines, "", "")).encode() + (passed.body or b"")


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> None:
    while size:
        async with asyncio.timeout(PATIENCE):
            piece = await reader.read(min(_PIECE, size))
            if not piece:
                raise EOFError("the body ended early")
            writer.write(piece)
            await writer.drain()
        size -= len(piece)


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    theirs: asyncio.StreamReader,
    to_them: asyncio.StreamWriter,
    *,
    both: bool,
) -> None:
    """Pass on the answer until it ends, or nobody is there to read it; and, of a stream of bytes, what comes the other
    way."""

    async def back() -> None:
        while piece := await theirs.read(_PIECE):
            writer.write(piece)
            await writer.drain()

    async def forth() -> None:
        while piece := await reader.read(_PIECE):
            if not both:
                raise EOFError("a second request on one connection")
            to_them.write(piece)
            await to_them.drain()
        if both:
            to_them.write_eof()
            await asyncio.Event().wait()  # the output goes on

    tasks = [asyncio.create_task(back()), asyncio.create_task(forth())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exc: AEnvError) -> None:
    """Say why not, as Docker does, and wait until it was read: what is still being sent would end the connection."""
    body = json.dumps({"message": exc.message}).encode()
    head = f"HTTP/1.1 {exc.status} {HTTPStatus(exc.status).phrase}\r\nContent-Type: application/json\r\n"
    with suppress(OSError, TimeoutError):
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(_AWAY):
            await writer.drain()
            writer.write_eof()
            while await reader.read(_PIECE):
                pass


async def listen(path: Path, docker: str, runtime: str = "") -> asyncio.AbstractServer:
    """Guard a Docker, at a socket that whoever sees it may use."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    server = await asyncio.start_unix_server(Guard(docker, runtime).serve, str(path), limit=MOST_HEAD, backlog=1024)
    os.chmod(path, 0o666)  # noqa: S103
    return server


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aenv.engines.docker.guard", description=__doc__)
    parser.add_argument("socket", type=Path, help="where to listen")
    parser.add_argument("--docker", default=SOCKETS[0], help="the socket of Docker")
    parser.add_argument("--runtime", default="", help="one of Docker's that containers may have, such as runsc")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")

    async def run() -> None:
        server = await listen(given.socket, given.docker, given.runtime)
        log.info("guarding %s at %s", given.docker, given.socket)
        over = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # the first process of a container ends by no other
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        await over.wait()
        server.close()

    asyncio.run(run())


if __name__ == "__main__":
    main()
