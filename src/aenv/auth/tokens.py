"""Tokens: whose they are, what they open, and when they end. Only their digests are kept.

A token that was made with another one lives no longer than that one. Its record names all that are above it, and when
one of them is gone it opens nothing: so a revocation is the removal of one record, whatever is being made meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from aenv.auth.callers import Caller, Scope
from aenv.errors import AEnvError, Conflict, Forbidden, Invalid, InvalidConfig, NetworkError, NotFound, Unauthorized
from aenv.models import NAME, parse_duration
from aenv.store.base import PAGE, Delete, Put, Record, Store
from aenv.wire import Token, TokenRequest, timestamp

LOCAL = "local"
"""Owner and id of the token that a server on the loopback shares with its user."""
GIVEN = "given"
"""Id of a token that a server has from its settings."""
LONGEST_TTL = 10 * 365 * 86400.0
MOST = 1000
"""Tokens of one owner."""
DEEPEST = 8
"""Tokens that one token may have above it."""
ID = re.compile(r"[0-9a-f]{16}")
TOKEN = re.compile(r"aenv_[A-Za-z0-9_-]{43}")
_KIND = "token"
_FRESH = 1.0
"""Seconds for which the answer to a token is remembered."""
_REMEMBERED = 10_000
"""Answers that are remembered at a time: so many good ones, and so many others."""
_BRIEF = 1.0
"""Seconds in which the store may say something of a token of the settings. Whoever reads metrics waits for no store,
least of all for one that is away."""
_LABEL = 128
_SWEEP = 600.0
"""Seconds between two removals of tokens that have expired."""
_SHOWN = 86400.0
"""Seconds for which an expired token is still listed."""
_RENEW = "ask for a new one, or make one with 'aenv token create'"
_REMAKE = "remove it; a server makes a new one"
_HINT = "set AENV_API_KEY, or send it as 'Authorization: Bearer ...'"
_SHAPE = "it is 'aenv_' and 43 letters, digits, '-' or '_' that nobody can guess"

Found = tuple[list[Token], int]


class Kept(Struct, frozen=True, kw_only=True):
    """A token as it is in the store, under its digest."""

    id: str
    name: str = ""
    owner: str
    scopes: list[str]
    created_at: float
    expires_at: float | None = None
    made_by: str = ""
    """Id of the token that it was made with."""
    above: list[str] = []
    """Digests of that one, and of those that were above it."""

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()

    def shown(self, token: str = "") -> Token:
        return Token(
            id=self.id,
            name=self.name,
            owner=self.owner,
            scopes=self.scopes,
            created_at=timestamp(self.created_at),
            expires_at="" if self.expires_at is None else timestamp(self.expires_at),
            made_by=self.made_by,
            token=token,
        )


class _Answer(Struct, frozen=True):
    """What a token was answered, and until when that counts."""

    until: float
    caller: Caller | None = None
    expires_at: float | None = None


class Tokens:
    """The tokens in a store. Several servers may share it: a revocation counts everywhere within two seconds.

    ``local`` is the loopback token, where it is accepted. ``given`` are tokens of this server's settings, by digest,
    with whom each is: they count where the store says nothing of them, are in no list, and end with the setting.
    """

    def __init__(self, store: Store, *, local: str | None = None, given: Mapping[str, Caller] | None = None) -> None:
        self._store = store
        self._local = None if local is None else digest(local)
        self._given = given or {}
        self._good: dict[str, _Answer] = {}
        self._bad: dict[str, _Answer] = {}
        """Apart, so that who tries many tokens drives out none that is in use."""
        self._revocations = 0
        self._sweep_at = 0.0

    async def create(self, caller: Caller, request: TokenRequest) -> Token:
        """A new token: for what the caller may do, for as long as the caller's own lasts, or less."""
        owner = self._owner(caller, request.owner)
        scopes = _scopes(caller, request.scopes)
        if len(request.name) > _LABEL or not request.name.isprintable():
            raise Invalid(
                f"the token's name is not a line of at most {_LABEL} characters",
                hint="say in a few words what it is for",
            )
        ttl = None if request.ttl is None else _seconds(request.ttl)
        above, latest = await self._above(caller)
        now = time.time()
        expires_at = latest if ttl is None else now + ttl
        if latest is not None and expires_at is not None and expires_at > latest:
            raise Forbidden(
                f"the new token would outlive yours, which ends at {timestamp(latest)}",
                hint="ask for a shorter ttl; without one it ends with yours",
            )
        await self._make_room(owner)
        made = Kept(
            id=secrets.token_hex(8),
            name=request.name,
            owner=owner,
            scopes=scopes,
            created_at=now,
            expires_at=expires_at,
            made_by=caller.token_id,
            above=[record.key for record in above],
        )
        token = new_token()
        await self._store.change(_put(token, made, [_kept(record).id for record in above]))
        return made.shown(token)

    async def first(self, given: str | None = None) -> str | None:
        """The first admin's token, made when nobody has one that opens everything; told this once.

        ``given`` is one that the operator has made, and knows: it is not told. It counts once for a store, so that it
        does not come back when it was revoked.
        """
        if given:
            check_given("AENV_FIRST_TOKEN", given)
        marker = await self._store.get("platform", "first-token")
        if await self._has_admin():
            return None
        given = given if marker is None else None
        made = Kept(
            id=secrets.token_hex(8),
            name="first",
            owner="admin",
            scopes=[scope.value for scope in Scope],
            created_at=time.time(),
        )
        token = given or new_token()
        expect = 0 if marker is None else marker.revision
        try:
            await self._store.change(
                Put("platform", "first-token", msgspec.json.encode(made.id), expect=expect), _put(token, made, [])
            )
        except Conflict:  # another server made it
            return None
        return None if given else token

    async def list(self, caller: Caller, *, owner: str | None = None, limit: int = PAGE, offset: int = 0) -> Found:
        """The caller's tokens, or, for an admin, everybody's; the newest first, and how many there are."""
        if owner is not None or not caller.admin:
            owner = self._owner(caller, owner)
        page = await self._store.find(_KIND, {"owner": owner} if owner else None, limit=limit, offset=offset)
        return [_kept(record).shown() for record in page.records], page.total

    async def revoke(self, caller: Caller, id: str) -> None:
        """End a token, and all that were made with it or with one of those."""
        if id == LOCAL:
            raise Invalid(
                "the token of this machine is no entry that could be revoked",
                hint="stop the server, remove the file 'token' in ~/.aenv, and start it again",
            )
        known = ID.fullmatch(id) is not None
        found = (await self._store.find(_KIND, {"id": id})).records if known else []
        # A revocation that was cut off has left some that are below it, and may be asked for again.
        left = (await self._store.find(_KIND, {"above": id}, limit=1)).records if known and not found else []
        mine = [kept for kept in map(_kept, found or left) if caller.owns(kept.owner)]
        if not mine:
            shown = repr(id) if known else "of that id"
            raise NotFound(f"there is no token {shown}", hint="see 'aenv token list' for the ids of yours")
        for kept in mine:
            if not all(caller.has(scope) for scope in Scope if scope in kept.scopes):
                raise Forbidden(
                    f"token {id!r} may do more than yours, which cannot end it",
                    hint=f"use a token with the scopes {', '.join(kept.scopes)}",
                )
        try:
            await self._store.change(*(Delete(_KIND, record.key) for record in found))
            while below := (await self._store.find(_KIND, {"above": id}, limit=PAGE)).records:
                await self._store.change(*(Delete(_KIND, record.key) for record in below))
        finally:
            self._revocations += 1
            self._good.clear()

    async def authenticate(self, token: str | None) -> Caller:
        """Whose token this is. ``Unauthorized`` when it is none, has expired or was revoked."""
        if not token:
            raise Unauthorized("this needs a token", hint=_HINT)
        if not TOKEN.fullmatch(token):
            raise Unauthorized("that is no token of this platform", hint="it begins with 'aenv_'; " + _HINT)
        key = digest(token)
        if self._local is not None and hmac.compare_digest(key, self._local):
            return Caller(LOCAL, frozenset(Scope), LOCAL)
        now = time.monotonic()
        answer = self._good.get(key) or self._bad.get(key)
        if answer is None or answer.until <= now:
            try:
                async with asyncio.timeout(_BRIEF if key in self._given else None):
                    answer = await self._ask(key, now + _FRESH)
            except (NetworkError, TimeoutError):
                if key not in self._given:
                    raise
                return self._given[key]
        if answer.caller is None and key in self._given:
            return self._given[key]
        if answer.caller is None:
            raise Unauthorized(
                "this token is not known here: it was revoked, has ended long ago, or is another platform's",
                hint=_RENEW,
            )
        if answer.expires_at is not None and answer.expires_at <= time.time():
            raise Unauthorized(f"this token ended at {timestamp(answer.expires_at)}", hint=_RENEW)
        return answer.caller

    async def _ask(self, key: str, until: float) -> _Answer:
        """What the store says, remembered for a while."""
        revocations = self._revocations
        answer = _Answer(until)
        record = await self._store.get(_KIND, key)
        if record is not None:
            kept = _kept(record)
            if await self._there(kept.above):
                scopes = frozenset(scope for scope in Scope if scope in kept.scopes)
                answer = _Answer(until, Caller(kept.owner, scopes, kept.id), kept.expires_at)
        self._good.pop(key, None)
        self._bad.pop(key, None)
        if revocations == self._revocations:  # else it may be what was true before
            answers = self._bad if answer.caller is None else self._good
            answers[key] = answer
            if len(answers) > _REMEMBERED:
                del answers[next(iter(answers))]
        return answer

    async def _there(self, keys: Sequence[str]) -> bool:
        """Whether all of these tokens still are."""
        return None not in await asyncio.gather(*(self._store.get(_KIND, key) for key in keys))

    async def _above(self, caller: Caller) -> tuple[Sequence[Record], float | None]:
        """The caller's token and those above it, and when the first of them ends."""
        if caller.token_id in ("", LOCAL):
            return [], None
        if caller.token_id == GIVEN:
            raise Forbidden("a token of the server's settings makes no other one", hint="use one of a person's")
        found = (await self._store.find(_KIND, {"id": caller.token_id})).records
        if not found:
            raise Unauthorized("your token was revoked", hint="ask for a new one")
        kept = _kept(found[0])
        if len(kept.above) >= DEEPEST:
            raise Forbidden(
                f"your token is the last in a row of {DEEPEST + 1}, each made with the one before",
                hint="make the new one with an earlier one of them",
            )
        records = await asyncio.gather(*(self._store.get(_KIND, key) for key in kept.above))
        if kept.expired or None in records:
            raise Unauthorized("your token has ended", hint="ask for a new one")
        return [found[0], *(record for record in records if record is not None)], kept.expires_at

    async def _has_admin(self) -> bool:
        offset = 0
        while records := (
            await self._store.find(_KIND, {"scope": Scope.ADMIN.value}, limit=PAGE, offset=offset)
        ).records:
            for kept in map(_kept, records):
                if not kept.expired and await self._there(kept.above):
                    return True
            offset += len(records)
        return False

    async def _make_room(self, owner: str) -> None:
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP
            await self._sweep(time.time() - _SHOWN)
        if await self._count(owner) < MOST:
            return
        await self._sweep(time.time())
        if await self._count(owner) >= MOST:
            raise Conflict(f"{owner} has {MOST} tokens, which is the most", hint="revoke some: see 'aenv token list'")

    async def _count(self, owner: str) -> int:
        return (await self._store.find(_KIND, {"owner": owner}, limit=0)).total

    async def _sweep(self, before: float) -> None:
        """Remove what expired before that time, and what a revocation that was cut off has left."""
        keys, kept = set(), []
        async for record in self._store.scan(_KIND):
            keys.add(record.key)
            kept.append((record.key, _kept(record)))
        dead = []
        for key, token in kept:
            over = token.expires_at is not None and token.expires_at <= before
            # One that came during the scan may not have been seen.
            if over or (not keys.issuperset(token.above) and not await self._there(token.above)):
                dead.append(Delete(_KIND, key))
        for start in range(0, len(dead), PAGE):
            await self._store.change(*dead[start : start + PAGE])

    def _owner(self, caller: Caller, owner: str | None) -> str:
        """Whose tokens are meant."""
        if owner is None:
            return caller.owner
        return checked_owner(caller, owner, "tokens")


def checked_owner(caller: Caller, owner: str, what: str) -> str:
    """The name of an owner whose ``what`` the caller may see and touch."""
    if not NAME.fullmatch(owner):
        raise Invalid(f"{owner[:64]!r} is not an owner's name", hint="use letters, digits, '-', '_' and '.'")
    if not caller.owns(owner):
        raise Forbidden(f"{what} of {owner!r} are not yours", hint="only an admin's token opens other owners' things")
    return owner


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def check_given(variable: str, token: str) -> str:
    """A token that the operator gave by a variable, when it is one."""
    if not TOKEN.fullmatch(token):
        raise InvalidConfig(f"{variable} is no token", hint=_SHAPE)
    return token


def new_token() -> str:
    return f"aenv_{secrets.token_urlsafe(32)}"


def local_token(home: Path) -> str:
    """The token in ``home``, which a server on the loopback and its user's programs share; made if there is none."""
    file = home / "token"
    if (found := find_local_token(home)) is not None:
        return found
    temporary = home / f".token.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w") as writing:
                writing.write(new_token() + "\n")
                writing.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):  # somebody else was faster
                os.link(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise AEnvError(
            f"{file} cannot be written: {exc.strerror or exc}", hint="make room there, or set AENV_HOME"
        ) from exc
    return local_token(home)


def find_local_token(home: Path) -> str | None:
    """The token in ``home``, None when there is none. One that others could have read or written is refused."""
    file = home / "token"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise InvalidConfig(f"{file} cannot be read: {exc.strerror or exc}", hint=_REMAKE) from exc
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise InvalidConfig(f"{file} is not a file of this user", hint=_REMAKE)
        if facts.st_mode & 0o077:
            raise InvalidConfig(
                f"{file} is open to others (mode {stat.S_IMODE(facts.st_mode):04o})",
                hint=f"remove it and restart the server; if nobody has read it: chmod 600 {file}",
            )
        token = os.read(descriptor, 256).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if not TOKEN.fullmatch(token):
        raise InvalidConfig(f"{file} holds no token", hint=_REMAKE)
    return token


def _scopes(caller: Caller, names: Sequence[str] | None) -> list[str]:
    """What a new token is for: what is asked for, else what the caller may do of what people do."""
    if names is None:
        usual = {scope for scope in Scope if caller.has(scope)} - {Scope.ADMIN, Scope.ENGINE, Scope.FETCH}
        return [scope.value for scope in Scope if scope in usual]
    wanted = Scope.parse(names)
    if not wanted:
        raise Invalid("a token without scopes opens nothing", hint=f"give some of {', '.join(Scope)}")
    if beyond := [scope.value for scope in Scope if scope in wanted and not caller.has(scope)]:
        raise Forbidden(
            f"your token has no scope {', '.join(beyond)} to give away",
            hint=f"ask for {', '.join(sorted(caller.scopes))}",
        )
    return [scope.value for scope in Scope if scope in wanted]


def _seconds(ttl: str | float) -> float:
    shown = ttl[:64] if isinstance(ttl, str) else ttl
    seconds = parse_duration(shown)
    if seconds > LONGEST_TTL:
        raise Invalid(f"ttl {shown!r} is longer than ten years", hint="leave it out for a token without end")
    return seconds


def _put(token: str, kept: Kept, above: Sequence[str]) -> Put:
    tags = {"id": [kept.id], "owner": [kept.owner], "scope": kept.scopes, "above": above}
    return Put(_KIND, digest(token), msgspec.json.encode(kept), expect=0, tags=tags, order=kept.created_at)


def _kept(record: Record) -> Kept:
    return msgspec.json.decode(record.value, type=Kept)
