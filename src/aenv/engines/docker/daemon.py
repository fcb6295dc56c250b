"""Docker's Engine API over ``aenv.http``: where the daemon is, questions and answers, streams, and the 8-byte frames
of what a container prints. Podman serves the same API. Every failure is one of ``aenv.errors``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from aenv import config, http
from aenv.errors import (
    AEnvError,
    Conflict,
    Forbidden,
    Invalid,
    InvalidConfig,
    NetworkError,
    NotFound,
    RateLimited,
    SandboxError,
    StorageFull,
    TooLarge,
    Unauthorized,
    Unsupported,
)
from aenv.project.images import architecture

NEWEST = (1, 41)
"""The version of the API that is spoken, where the daemon has it. Podman 4 has this one."""
OLDEST = (1, 24)
SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
OWN_SOCKETS = ("docker.sock", "podman/podman.sock")
"""Of a daemon that is not root's, in ``XDG_RUNTIME_DIR``."""
HINT = "start Docker or Podman, or set AENV_DOCKER_HOST"
MOST_ANSWER = 64 * 1024 * 1024
MOST_LINE = 4 * 1024 * 1024
MOST_MESSAGE = 4096
GREETING = 10.0
"""Seconds in which a daemon that is well says that it is there."""
FIRST_WORD = 300.0
"""Seconds in which a stream has begun, however long its silences are then."""

_ERRORS: Mapping[int, type[AEnvError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    406: Conflict,
    409: Conflict,
    413: TooLarge,
    422: Invalid,
    429: RateLimited,
    501: Unsupported,
    507: StorageFull,
}
_HEADER = 8
_CHANNELS = {0: 1, 1: 1, 2: 2, 3: 2}
"""What the daemon itself has to say, 3, is told with what went to standard error."""


class About(NamedTuple):
    """What a daemon is, and can do."""

    name: str
    """``docker`` or ``podman``."""
    version: str
    api: str
    os: str
    architecture: str
    """As images name it: amd64, arm64."""
    root: str
    """Directory, on the daemon's machine, of all that it keeps."""
    rootless: bool
    storage: str
    runtimes: frozenset[str]
    networks: frozenset[str]
    """Drivers: ``bridge`` is among them where a container can have a network of its own."""
    log_drivers: frozenset[str]

    @property
    def platform(self) -> str:
        """As images name it: linux/amd64."""
        return f"{self.os}/{self.architecture}"


class Demultiplexer:
    """Takes apart what a container without a terminal prints: frames of a channel, a size and that many bytes."""

    def __init__(self) -> None:
        self._head = b""
        self._channel, self._left = 1, 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The pieces that are in this: 1 for standard output, 2 for standard error. A frame may come in many."""
        view = self._head + data
        start = 0
        while start < len(view):
            if not self._left:
                head = view[start : start + _HEADER]
                if len(head) < _HEADER:
                    break
                if head[0] not in _CHANNELS or head[1:4] != b"\0\0\0":
                    raise NetworkError("what the container printed did not come in the daemon's frames")
                self._channel, self._left = _CHANNELS[head[0]], int.from_bytes(head[4:], "big")
                start += _HEADER
                continue
            piece = view[start : start + self._left]
            start += len(piece)
            self._left -= len(piece)
            yield self._channel, piece
        self._head = view[start:]


def demultiplex(data: bytes) -> list[tuple[int, bytes]]:
    """Take apart the whole of what was printed, as ``GET /containers/x/logs`` answers it."""
    return list(Demultiplexer().feed(data))


class Hijacked:
    """A connection to what runs in a container: its standard input, and, by iterating, its output as it comes."""

    def __init__(self, connection: http.Upgraded, where: str) -> None:
        self._connection, self._where = connection, where

    async def send(self, data: bytes) -> None:
        """Write to its standard input, at the pace at which it reads."""
        with _told(self._where):
            await self._connection.send(data)

    def end_input(self) -> None:
        """Close its standard input; its output is read on."""
        with _told(self._where):
            self._connection.end_input()

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        """The raw bytes: of a terminal as they are, else in frames."""
        with _told(self._where):
            async for piece in self._connection:
                yield piece

    async def output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """Its output, taken out of the frames: 1 for standard output, 2 for standard error."""
        frames = Demultiplexer()
        async for data in self:
            for piece in frames.feed(data):
                yield piece


class Daemon:
    """One Docker or Podman."""

    def __init__(self, address: str) -> None:
        self.base = _base(address)
        """For ``aenv.http``."""
        self.shown = http.target(self.base).shown
        self._version = ""
        self._about: About | None = None

    @classmethod
    async def find(cls, address: str | None = None) -> Daemon:
        """The one at that address, or where the settings say, or at its usual place; one that answers."""
        tried = []
        for candidate in _candidates(address):
            daemon = cls(candidate)
            try:
                await daemon.greet()
                return daemon
            except NetworkError as exc:
                tried.append(exc.message)
        raise NetworkError(f"neither Docker nor Podman answers: {'; '.join(tried)}", hint=HINT)

    async def greet(self) -> None:
        """Ask whether it is there, and agree on the version of the API."""
        answer = await self._request("GET", "/_ping", timeout=GREETING, retries=0)
        found = _version(answer.headers.get(b"api-version", b"").decode("latin-1"))
        if answer.status != 200 or found is None:
            raise NetworkError(f"{self.shown} is neither Docker nor Podman, by its answer", hint=HINT)
        if found < OLDEST:
            hint = "install Docker 20.10 or Podman 4.3, or a later one"
            raise Unsupported(f"the daemon at {self.shown} is too old: it speaks {found[0]}.{found[1]}", hint=hint)
        version = min(found, NEWEST)
        self._version = f"/v{version[0]}.{version[1]}"
        if found > NEWEST:  # then it may not know ours any more
            told = await self._request("GET", "/version", timeout=GREETING, retries=0)
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                least = max(version, _version(json.loads(told.body).get("MinAPIVersion")) or version)
                self._version = f"/v{least[0]}.{least[1]}"

    async def is_there(self) -> bool:
        """Whether it takes new connections: one that is about to end still answers on those that it has."""
        try:
            async with asyncio.timeout(GREETING), http.stream("GET", self.base, "/_ping") as answer:
                return answer.status == 200
        except (AEnvError, OSError, TimeoutError):
            return False

    async def about(self) -> About:
        """What it is and can do; asked once."""
        if self._about is None:
            version, info = await self.ask("GET", "/version"), await self.ask("GET", "/info")
            with _told(self.shown):
                self._about = _about(version, info, self._version.removeprefix("/v"))
        return self._about

    async def ask(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None, timeout: float = 60.0
    ) -> Any:
        """Ask with JSON, and take the JSON of the answer; None when it is empty.

        What is not a string in ``query`` is sent as JSON, as Docker has its filters; a tuple is a name that comes
        again and again; None is left out.
        """
        content = b"" if body is None else json.dumps(body).encode()
        headers = b"" if body is None else b"Content-Type: application/json\r\n"
        where = await self._place(path, query)
        answer = await self._request(method, where, headers=headers, body=content, timeout=timeout)
        self._check(answer.status, answer.body, method, path)
        if not answer.body.strip() or answer.status == 304:
            return None
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError) as exc:
            raise NetworkError(f"{self.shown} answered {method} {path} with what is not JSON", hint=HINT) from exc

    async def inspect(self, container: str) -> dict[str, Any]:
        """What it knows of a container; ``NotFound`` also of one that it is removing, which Podman tells otherwise."""
        try:
            found = await self.ask("GET", f"/containers/{container}/json")
        except AEnvError as exc:
            if not is_unknown(exc):
                raise
            raise NotFound(exc.message) from exc
        return found if isinstance(found, dict) else {}

    async def make_volume(self, name: str, driver: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, Any]:
        """A volume of that name, as the daemon describes it: the one that there is, whatever that is, before a new
        one."""
        body = {"Name": name, "Driver": "local", "DriverOpts": driver, "Labels": labels}
        try:
            made = await self.ask("POST", "/volumes/create", body=body)
        except SandboxError as exc:  # Podman, when two ask for the same at once
            if "volume already exists" not in exc.message:
                raise
            made = await self.ask("GET", f"/volumes/{name}")
        return made or {}

    async def put(
        self, path: str, *, query: Mapping[str, Any] | None = None, content: bytes, timeout: float = 60.0
    ) -> None:
        """Bring a tar archive."""
        headers = b"Content-Type: application/x-tar\r\n"
        where = await self._place(path, query)
        answer = await self._request("PUT", where, headers=headers, body=content, timeout=timeout)
        self._check(answer.status, answer.body, "PUT", path)

    async def fetch(
        self, path: str, *, query: Mapping[str, Any] | None = None, most: int, timeout: float = 60.0
    ) -> bytes:
        """Bytes as they are: an archive, what was printed. More than ``most`` is ``TooLarge``."""
        answer = await self._request("GET", await self._place(path, query), timeout=timeout, most=most)
        self._check(answer.status, answer.body, "GET", path)
        return answer.body

    async def pieces(self, path: str, *, query: Mapping[str, Any] | None = None) -> AsyncGenerator[bytes, None]:
        """Bytes as they come, for as long as they come: what a container prints."""
        where = await self._place(path, query)
        with _told(self.shown):
            async with http.stream("GET", self.base, where, patience=None) as answer:
                if answer.status >= 300:
                    self._check(answer.status, await answer.read(MOST_LINE), "GET", path)
                async with aclosing(answer.__aiter__()) as pieces:
                    async for piece in pieces:
                        yield piece

    async def lines(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        content: bytes | AsyncIterable[bytes] = b"",
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """JSON objects as they come: events, the progress of a pull, of a build, of a push.

        ``patience`` is the longest silence, in seconds; None is for ever, once the stream has begun. What fails on
        the way is an object with ``error`` in it, see ``failure``.
        """
        where = await self._place(path, query)
        sent = b"".join(f"{name}: {value}\r\n".encode() for name, value in (headers or {}).items())
        async with AsyncExitStack() as stack:
            with _told(self.shown):
                async with asyncio.timeout(None if content else FIRST_WORD):
                    answer = await stack.enter_async_context(
                        http.stream(method, self.base, where, headers=sent, body=content, patience=patience)
                    )
                if answer.status >= 300:
                    self._check(answer.status, await answer.read(MOST_LINE), method, path)
                rest = b""
                async with aclosing(answer.__aiter__()) as pieces:
                    async for piece in pieces:
                        *whole, rest = (rest + piece).split(b"\n")
                        for line in whole:
                            for found in self._objects(line):
                                yield found
                        if len(rest) > MOST_LINE:
                            raise NetworkError(f"{self.shown} sends a line without an end")
                for found in self._objects(rest):
                    yield found

    @asynccontextmanager
    async def hijack(
        self, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> AsyncIterator[Hijacked]:
        """Attach to a container, or start an exec: bytes both ways. Leaving ends the connection."""
        where = await self._place(path, query)
        content = b"" if body is None else json.dumps(body).encode()
        headers = b"Content-Type: application/json\r\n"
        async with AsyncExitStack() as stack:
            with _told(self.shown):
                connection = await stack.enter_async_context(
                    http.upgrade(self.base, where, "tcp", headers=headers, body=content, patience=60.0)
                )
                if connection.status not in (200, http.SWITCHED):
                    self._check(connection.status, await connection.read(MOST_LINE), "POST", path)
                connection.endless()
            yield Hijacked(connection, self.shown)

    async def _place(self, path: str, query: Mapping[str, Any] | None) -> str:
        """The path with the version before it, unless it has one of its own, as Podman's own API has."""
        if not self._version:
            await self.greet()
        pairs = [(name, one) for name, value in (query or {}).items() for one in _values(value)]
        version = "" if re.match(r"/v\d", path) else self._version
        return f"{version}{path}?{urlencode(pairs)}" if pairs else version + path

    async def _request(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        headers: bytes = b"",
        body: bytes = b"",
        most: int = MOST_ANSWER,
        retries: int = 2,
    ) -> http.Response:
        with _told(self.shown):
            try:
                async with asyncio.timeout(timeout) as limit:
                    return await http.request(
                        method,
                        self.base,
                        path,
                        headers=headers,
                        body=body,
                        retries=retries,
                        repeatable=method == "GET",
                        most=most,
                    )
            except TimeoutError as exc:
                if not limit.expired():
                    raise
                raise NetworkError(f"{self.shown} did not answer within {timeout:g} s", hint=HINT) from exc

    def _check(self, status: int, body: bytes, method: str, path: str) -> None:
        if status < 300 or status == 304:  # 304: it is so already
            return
        message = _message(body)
        if full(message):
            raise out_of_space(message)
        kind = _ERRORS.get(status, SandboxError)
        raise kind(message or f"{self.shown} answered {method} {path} with status {status}")

    def _objects(self, line: bytes) -> Iterator[dict[str, Any]]:
        text, start = line.decode(errors="replace").strip(), 0
        while start < len(text):
            try:
                found, start = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError) as exc:
                raise NetworkError(f"{self.shown} sends what is not JSON: {text[:200]!r}") from exc
            if isinstance(found, dict):
                yield found
            while start < len(text) and text[start].isspace():
                start += 1


def _version(text: Any) -> tuple[int, int] | None:
    """A version of the API, ``1.41``; None for what is none."""
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", str(text))
    return (int(found[1]), int(found[2])) if found else None


def failure(line: Mapping[str, Any]) -> str:
    """The reason in one object of a stream that ends badly; empty when it tells of progress."""
    detail = line.get("errorDetail")
    told = detail.get("message") if isinstance(detail, Mapping) else None
    return str(told or line.get("error") or "").strip()


def is_unknown(exc: AEnvError) -> bool:
    """Whether a daemon means that there is no such container. Podman says so otherwise while it removes one."""
    return isinstance(exc, NotFound) or "no such container" in exc.message.lower()


def full(message: str) -> bool:
    """Whether the daemon says that its disk is full."""
    return "no space left on device" in message.lower() or "disk quota exceeded" in message.lower()


def out_of_space(message: str) -> StorageFull:
    """The error for that."""
    return StorageFull(f"the disk of the daemon is full: {message}", hint="docker system df says what takes the room")


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Nothing but our own errors, and the hint with those that mean that nobody is there."""
    try:
        yield
    except NetworkError as exc:
        if exc.hint:
            raise
        raise type(exc)(exc.message, hint=HINT) from exc
    except TimeoutError as exc:
        raise NetworkError(f"{where} does not answer", hint=HINT) from exc
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise NetworkError(f"{where} cannot be understood: {exc}", hint=HINT) from exc


def _message(body: bytes) -> str:
    """What the daemon says is wrong, without the words that it repeats."""
    try:
        found = json.loads(body)
        message = str(found["message"])
        cause = str(found.get("cause") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return body[:MOST_MESSAGE].decode(errors="replace").strip()
    return (message if cause in message else f"{message}: {cause}").strip()[:MOST_MESSAGE]


def _values(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, tuple):
        return [str(one) for one in value]
    return [value if isinstance(value, str) else json.dumps(value)]


def _about(version: Any, info: Any, api: str) -> About:
    components = {str(found.get("Name", "")).lower() for found in version.get("Components") or ()}
    machine = str(version.get("Arch") or info.get("Architecture") or "")
    plugins = info.get("Plugins") or {}
    rootless = bool(info.get("Rootless")) or "name=rootless" in (info.get("SecurityOptions") or ())
    return About(
        name="podman" if any("podman" in name for name in components) else "docker",
        version=str(version.get("Version", "")),
        api=api,
        os=str(version.get("Os") or info.get("OSType") or "linux").lower(),
        architecture=architecture(machine),
        root=str(info.get("DockerRootDir") or ""),
        rootless=rootless,
        storage=str(info.get("Driver") or ""),
        runtimes=frozenset(info.get("Runtimes") or ()),
        networks=frozenset(plugins.get("Network") or ()),
        log_drivers=frozenset(plugins.get("Log") or ()),
    )


def _candidates(address: str | None) -> list[str]:
    told = config.get("docker_host", address) or config.get("docker_default")
    if told:
        return [str(told)]
    own = config.environment().get("XDG_RUNTIME_DIR", "")
    return [*SOCKETS, *(str(Path(own) / name) for name in OWN_SOCKETS if own.startswith("/"))]


def _base(address: str) -> str:
    """The address as ``aenv.http`` takes it."""
    address = address.strip()
    hint = "use unix:///path/to/docker.sock or tcp://host:port"
    if address.startswith("/"):
        address = f"unix://{address}"
    scheme, _, rest = address.partition(":")
    if scheme == "ssh":
        hint = (
            "forward its socket: ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST, then unix:///tmp/docker.sock"
        )
        raise InvalidConfig("Docker over ssh:// is not supported", hint=hint)
    if not address.isprintable() or (" " in address and scheme != "unix"):
        raise InvalidConfig(f"{address!r} is not the address of Docker or Podman", hint=hint)
    if scheme == "unix":
        path = rest.removeprefix("//")
        if not path.startswith("/"):
            raise InvalidConfig(
                f"{address!r} is not the address of Docker or Podman: its path begins with /", hint=hint
            )
        return f"unix:{path}"
    if scheme not in ("tcp", "http", "https"):
        raise InvalidConfig(f"{address!r} is not the address of Docker or Podman", hint=hint)
    try:
        url = urlsplit(address)
        port = url.port or {"tcp": 2375, "http": 80, "https": 443}[scheme]
    except ValueError as exc:
        raise InvalidConfig(f"{address!r} is not the address of Docker or Podman: {exc}", hint=hint) from exc
    if not url.hostname or "@" in url.netloc:
        raise InvalidConfig(f"{address!r} is not the address of Docker or Podman", hint=hint)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{'https' if scheme == 'https' else 'http'}://{host}:{port}{url.path.rstrip('/')}"
