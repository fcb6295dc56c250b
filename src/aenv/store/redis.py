"""Records in a Redis that several processes share.

Every call is one script in the server (``scripts``), so nobody sees half of it. A server that is away for a moment is
asked again, for ten seconds. That is safe for a change too: it has a number, and a change whose answer was lost is
answered again instead of being made again.

What was acknowledged survives this process; whether it survives the server is for the server's own settings to say.
With ``appendonly yes`` a crash of the system takes at most the last second.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from aenv.errors import AEnvError, Invalid, InvalidConfig, NetworkError, Unsupported
from aenv.store import checks, scripts
from aenv.store.base import PAGE, Add, Change, Full, Page, Put, Record, Store

try:
    from redis import exceptions
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ModuleNotFoundError:
    raise Unsupported("the redis package is not installed", hint="pip install 'aenvironment[redis]'") from None

log = logging.getLogger("aenv.store")

SCHEMA = 1
"""The version of what the scripts keep."""
_PREFIX = "aenv:{store}:"
_PORT = 6379
_PATIENCE = 10.0
"""Seconds for which a server that does not answer is asked again."""
_TIMEOUT = 4.0
"""Seconds for one try."""
_CONNECTIONS = 32
_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_HINT = "use redis://host:port/0 or redis://user:password@host:port/0, with special characters percent-encoded"

T = TypeVar("T")
_Packed = tuple[bytes, dict[str, list[str]], float, str, float | None]
_unpack = msgspec.msgpack.Decoder(_Packed).decode
_unpack_numbers = msgspec.msgpack.Decoder(dict[str, float]).decode
_unpack_heads = msgspec.msgpack.Decoder(tuple[list[str], list[str], list[int]]).decode


class Address(NamedTuple):
    """Where a URL points."""

    host: str
    port: int
    database: int
    secure: bool
    user: str | None
    password: str | None

    @property
    def shown(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def open(url: str) -> RedisStore:
    """The store in the Redis of ``redis://[user:password@]host:port/db``; ``rediss`` is the same over TLS."""
    address = _address(url)
    client = Redis(
        host=address.host,
        port=address.port,
        db=address.database,
        username=address.user,
        password=address.password,
        ssl=address.secure,
        socket_timeout=_TIMEOUT,
        socket_connect_timeout=_TIMEOUT,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    store = RedisStore(client, address.shown)
    try:
        await store.begin()
    except BaseException:
        await store.close()
        raise
    return store


class Refused(AEnvError):
    """The server answered, but with an error."""


class RedisStore(Store):
    """Records in a Redis."""

    shared = True

    def __init__(self, client: Redis, shown: str) -> None:
        self._client = client
        self._command: Callable[..., Awaitable[Any]] = client.execute_command
        self._shown = shown
        self._closed = False
        self._free = asyncio.Semaphore(_CONNECTIONS)

    async def begin(self) -> None:
        """See whether the records there are ours to read, and whether the server keeps them."""
        version = int(await self._run(scripts.OPEN, SCHEMA))
        if version > SCHEMA:
            message = f"the store at {self._shown} has version {version} of the schema; this package knows {SCHEMA}"
            raise Unsupported(message, hint="upgrade aenvironment, or use another database")
        try:
            kept = await self._answer(lambda: self._client.info("persistence"))
        except Refused:
            return  # who may not ask need not know
        if not kept.get("aof_enabled"):
            log.warning("the store at %s loses records when it is restarted: set 'appendonly yes' there", self._shown)

    async def get(self, kind: str, key: str) -> Record | None:
        checks.name(kind, key)
        revision, packed = await self._run(scripts.GET, kind, key)
        return None if packed is None else _record(kind, key, revision, packed)

    async def find(
        self,
        kind: str,
        tags: Mapping[str, str | Sequence[str]] | None = None,
        *,
        containing: str = "",
        limit: int = PAGE,
        offset: int = 0,
    ) -> Page:
        wanted = checks.query(kind, tags, containing, limit, offset)
        if not all(values for _, values in wanted):
            return Page([], 0)
        packed = msgspec.msgpack.encode([[f"{name}\0{value}" for value in values] for name, values in wanted])
        total, found = await self._run(scripts.FIND, kind, containing.casefold(), limit, offset, packed)
        return Page(_records(kind, found), total)

    async def change(self, *changes: Change) -> list[int]:
        checks.changes(changes)
        if not changes:
            return []
        number = secrets.token_bytes(12)
        heads = msgspec.msgpack.encode([_head(change) for change in changes])
        outcome, *answer = await self._run(scripts.CHANGE, number, scripts.REMEMBERED, heads, *map(_packed, changes))
        if outcome == b"conflict":
            place, there = answer
            refused = changes[place - 1]
            assert not isinstance(refused, Add)
            checks.expected(refused, int(there))
        if outcome == b"full":
            place, name = answer
            raise Full(changes[place - 1].kind, changes[place - 1].key, name.decode())
        [revisions] = answer
        return [int(revision) for revision in revisions]

    async def scan(self, kind: str) -> AsyncIterator[Record]:
        checks.kind(kind)
        after = ""
        while True:
            records = _records(kind, await self._run(scripts.SCAN, kind, after, PAGE))
            for record in records:
                yield record
            if len(records) < PAGE:
                return
            after = records[-1].key

    async def counts(self, kind: str) -> dict[str, dict[str, float]]:
        checks.kind(kind)
        found = iter(await self._run(scripts.COUNTS, kind))
        return {key.decode(): _unpack_numbers(numbers) for key, numbers in sorted(zip(found, found, strict=True))}

    async def since(self, kind: str, revision: int, limit: int = PAGE) -> list[Record]:
        checks.kind(kind)
        return _records(kind, await self._run(scripts.SINCE, kind, revision, limit))

    async def kinds(self) -> list[str]:
        return [kind.decode() for kind in await self._run(scripts.KINDS)]

    async def close(self) -> None:
        self._closed = True
        await self._client.aclose()

    async def _run(self, script: scripts.Script, *arguments: str | bytes | int) -> Any:
        """What a script answers."""

        async def ask() -> Any:
            try:
                return await self._command("EVALSHA", script.sha, 1, _PREFIX, *arguments)
            except exceptions.NoScriptError:  # it is new to the server, or was forgotten in a restart
                return await self._command("EVAL", script.text, 1, _PREFIX, *arguments)

        return await self._answer(ask)

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the server answers, asked again while there is none. Only what may be asked twice may come here."""
        if self._closed:
            raise NetworkError(f"the store at {self._shown} is closed")
        deadline = time.monotonic() + _PATIENCE
        pause = _PAUSE
        task = asyncio.current_task()
        cancelled = task.cancelling() if task is not None else 0
        while True:
            try:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()), self._free:
                        return await ask()
                finally:  # the client loses a cancellation that comes while it looks whether a connection is open
                    if task is not None and task.cancelling() > cancelled:
                        raise asyncio.CancelledError
            except exceptions.AuthenticationError as exc:
                message = f"the store at {self._shown} does not accept the user or password"
                raise InvalidConfig(message, hint="set them in the store's address: " + _HINT) from exc
            except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as exc:
                if time.monotonic() + pause >= deadline:
                    hint = "a change that was under way may have been made or not"
                    raise NetworkError(f"the store at {self._shown} does not answer", hint=hint) from exc
            except exceptions.RedisError as exc:
                raise Refused(f"the store at {self._shown} refuses: {exc}", hint="see the log of that server") from exc
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311
            pause = min(pause * 2, _LONGEST_PAUSE)


def _address(url: str) -> Address:
    """Take a URL apart. What is wrong with it is not shown, because a password may be in any part of it."""
    try:
        parts = urlsplit(url)
        host, port, path = parts.hostname, parts.port, parts.path.removeprefix("/")
    except ValueError:
        host, port, path = None, None, ""
    if not host or "?" in url or "#" in url or (path and not re.fullmatch("[0-9]{1,5}", path)):
        raise Invalid("the store's address is none of a Redis", hint=_HINT)
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    return Address(host, port or _PORT, int(path or 0), parts.scheme == "rediss", user, password)


def _head(change: Change) -> dict[str, Any]:
    """What the script reads of a change."""
    if isinstance(change, Add):
        return {"kind": change.kind, "key": change.key, "adds": _adds(change)}
    head: dict[str, Any] = {
        "kind": change.kind,
        "key": change.key,
        "expect": "" if change.expect is None else str(change.expect),
    }
    if isinstance(change, Put):
        head["rank"] = repr(-float(change.order))
        head["tags"] = sorted({f"{name}\0{value}" for name, values in change.tags.items() for value in values})
        head["search"] = change.search.casefold()
        head["expires"] = "" if change.expires_at is None else repr(float(change.expires_at))
    return head


def _adds(add: Add) -> list[tuple[str, float, float | bool, float | bool]]:
    """Each number's name, what is added to it, its floor and the most that it may be; False where there is none."""

    def given(numbers: Mapping[str, float], name: str) -> float | bool:
        return float(numbers[name]) if name in numbers else False

    return [
        (name, float(add.amounts.get(name, 0)), given(add.floors, name), given(add.most, name))
        for name in {**add.amounts, **add.floors}
    ]


def _packed(change: Change) -> bytes:
    """What the script keeps of a change; nothing of a deletion or of what is added."""
    if not isinstance(change, Put):
        return b""
    tags = {name: list(values) for name, values in change.tags.items()}
    record: _Packed = (change.value, tags, float(change.order), change.search, change.expires_at)
    return msgspec.msgpack.encode(record)


def _records(kind: str, found: tuple[bytes, bytes]) -> list[Record]:
    """A page as the scripts answer it."""
    heads, packed = found
    records, start = [], 0
    for key, revision, size in zip(*_unpack_heads(heads), strict=True):
        records.append(_record(kind, key, revision, packed[start : start + size]))
        start += size
    return records


def _record(kind: str, key: str, revision: bytes | str, packed: bytes) -> Record:
    value, tags, order, search, expires_at = _unpack(packed)
    return Record(kind, key, value, int(revision), tags, order, search, expires_at)
