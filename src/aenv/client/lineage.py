"""Other sandboxes in the place that one is in. There are three ways: they are forks of its process, they are given its
files and what its author's code says, or what it was asked is asked of them and each answer is compared."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
from msgspec import Struct

from aenv.cleanup import finish
from aenv.client import answers, mcp
from aenv.client.handle import Handle
from aenv.comparing import shown, unlike, unlike_results
from aenv.errors import AEnvError, Conflict, Diverged, NotFound, SandboxLost, StartFailed, TooLarge, Unsupported
from aenv.journal import Entry, Journal, Mark
from aenv.models import Sandbox, ToolResult

if TYPE_CHECKING:
    from aenv.client.environment import Environment
    from aenv.http import Response

_NEVER = 1e9
"""Seconds without a call after which a checkpoint ends."""
PARENT, GROUP = "aenv.parent", "aenv.group"
"""Labels of an instance that was forked: from which one, and together with which."""
_ELSEWHERE = "the environment was released or replaced meanwhile"


class Forked(Struct, frozen=True, kw_only=True):
    """How an environment was forked."""

    parent: str
    """The instance that it was forked from."""
    group: str
    """What all have in common that were forked at once."""
    place: int
    """Which of them it is, from 0."""
    calls: int
    """How many calls the parent had had."""
    how: str = "journal"
    """``live``: it is a fork of the parent's process, with its memory and files. ``saved``: it has the parent's files,
    and went on from what the author's code said. ``journal``: all that the parent was asked was asked of it, too, and
    gave the same."""
    why: str = ""
    """Why it is no live one."""


class Place(NamedTuple):
    """Where an instance is: what it is made of, and all that it was asked."""

    env: str
    digest: str
    entries: Sequence[Entry]

    @classmethod
    def of(cls, sandbox: Sandbox, entries: Sequence[Entry]) -> Self:
        return cls(sandbox.env, sandbox.digest, entries)

    def check(self, sandbox: Sandbox | None) -> None:
        """Raises ``Diverged`` for a sandbox of something else, as there is when a new version was published."""
        if sandbox is None:
            return
        others = self.digest and sandbox.digest and self.digest != sandbox.digest
        if sandbox.env != self.env or others:
            raise Diverged(
                f"it was {self.env}{self.digest and f' ({self.digest})'}, and now it is "
                f"{sandbox.env}{sandbox.digest and f' ({sandbox.digest})'}",
                hint="name the version, as in name@version",
            )


class Saved(NamedTuple):
    """Where an instance is, as its runtime and its author's code say it."""

    place: Place
    """What it is made of; without what it was asked, which need not be known."""
    journal: Journal
    content: bytes


class Kept(NamedTuple):
    """A place to go back to: by the first of these that there is, or, when that cannot be had any more, by another."""

    fork: Environment | None
    saved: Saved | None
    place: Place | None
    mark: Mark
    """How far the journal had come by then."""


class Origin(NamedTuple):
    """An environment in the sandbox that it has at the moment. One that is released has none, and can get another."""

    env: Environment
    sandbox: Sandbox
    journal: Journal

    @classmethod
    def of(cls, env: Environment) -> Self:
        """Of one that is started. ``Unsupported`` where no other can be made like its sandbox."""
        sandbox = env.sandbox
        if sandbox is None:
            raise Conflict(_ELSEWHERE)
        if sandbox.attached or sandbox.shared:
            raise Unsupported(
                "this sandbox is somebody else's, and no other can be made like it",
                hint="name the environment, without DUMMY_INSTANCE_IP, instance_id or service_id",
            )
        return cls(env, sandbox, env.journal)

    def check(self) -> None:
        """Raises ``Conflict`` where the environment does not have that sandbox any more."""
        if self.env.sandbox is not self.sandbox:
            raise Conflict(_ELSEWHERE)

    @contextmanager
    def said(self) -> Iterator[None]:
        """What fails in the block because the environment does not have that sandbox any more says so."""
        try:
            yield
        except AEnvError as exc:
            if self.env.sandbox is self.sandbox or isinstance(exc, Conflict):
                raise
            raise Conflict(_ELSEWHERE) from exc

    async def says(self, promise: str) -> bool:
        """As the environment's ``_says``, which is not started anew for it."""
        self.check()
        found = await self.env._says(promise)
        self.check()
        return found


class Siblings(list["Environment"]):
    """Environments that were forked at once. Leaving an ``async with`` block gives all of them back."""

    async def release(self) -> None:
        """Give all of them back, also when the caller is cancelled meanwhile."""
        await finish(self._released())

    async def _released(self) -> None:
        results = await asyncio.gather(*(env.release() for env in self), return_exceptions=True)
        for failed in results:
            if isinstance(failed, BaseException):
                raise failed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


async def fork(env: Environment, n: int, *, same_random: bool) -> Siblings:
    """Siblings of an environment, each in the place that it is in: forks of its process, or, where there can be none,
    others that are brought there."""
    origin = await _origin(env)
    with origin.said():
        why = await _why_not_live(origin)
        if not why:
            try:
                return await _siblings(origin, n, None, "", same_random=same_random)
            except (Unsupported, StartFailed) as exc:
                why = exc.message
        saved, place = await _remembered(origin, why)
        way = saved or place
        assert way is not None
        return await _siblings(origin, n, way, why, same_random=same_random)


async def _origin(env: Environment) -> Origin:
    """An environment, started where it is not."""
    await env.initialize()
    with Origin.of(env).said():
        await env._says("forkable")  # meanwhile, another sandbox can take the place of one that turns out to be lost
    return Origin.of(env)


async def _siblings(origin: Origin, n: int, way: Saved | Place | None, why: str, *, same_random: bool) -> Siblings:
    """Siblings that are brought to a place, or, without one, forks of the process."""
    env, parent, group, calls = origin.env, origin.sandbox.id, secrets.token_hex(8), origin.journal.begun
    turn, env._forked = env._forked, env._forked + 1
    how = "live" if way is None else "saved" if isinstance(way, Saved) else "journal"
    siblings = Siblings()
    for number in range(n):
        sibling = _like(env, labels={**env.spec.labels, PARENT: parent, GROUP: group})
        sibling._descent = (*env._descent, turn, number)
        sibling.forked = Forked(parent=parent, group=group, place=number, calls=calls, how=how, why=why)
        siblings.append(sibling)

    async def bring(sibling: Environment) -> None:
        if way is None:
            await _branch(origin, sibling)
        else:
            sibling._openai_names, sibling._mirrored = dict(env._openai_names), dict(env._mirrored)
            await (_load(way, sibling) if isinstance(way, Saved) else repeat(way, sibling))
        if not same_random:
            await sibling.reseed(_seed(env.spec.seed, sibling._descent))

    try:
        async with asyncio.TaskGroup() as tasks:
            for sibling in siblings:
                tasks.create_task(bring(sibling))
        origin.check()
    except BaseException as exc:
        with suppress(AEnvError):  # what is left of them ends with their leases
            await siblings.release()
        if isinstance(exc, BaseExceptionGroup):
            raise exc.exceptions[0] from None
        raise
    return siblings


async def _branch(origin: Origin, sibling: Environment) -> None:
    """Make an environment that is not started yet a fork of another's process."""
    origin.check()
    if not origin.sandbox.id:  # without a name, it would be no fork but another at its beginning
        raise Unsupported("the sandbox has no name by which it could be forked")
    env, given, journal = origin.env, sibling.spec, origin.journal.copied()
    sibling.spec = msgspec.structs.replace(given, forked_from=origin.sandbox.id)
    try:
        await sibling.initialize()
    finally:
        sibling.spec = given  # one that is started anew begins at the beginning
    origin.check()
    if origin.journal.under_way or origin.journal.begun != journal.begun:
        raise Conflict("it was called while it was forked", hint="wait for the answers of calls first")
    sibling.journal = journal
    if sibling.sandbox is not None:
        sibling._promises = sibling.sandbox, env._promises[1]
    sibling._openai_names, sibling._mirrored = dict(env._openai_names), dict(env._mirrored)


async def _why_not_live(origin: Origin) -> str:
    """Why the process of an environment's sandbox cannot be forked, as far as it is known; empty where it may be."""
    origin.journal.check_quiet()
    if not await origin.says("forkable"):
        return f"{origin.env.env_name} does not say that it is forkable"
    return ""


async def keep(env: Environment, *, elsewhere: bool = False) -> Kept:
    """Keep the place that an environment is in, as far as that can be had: as a fork of its process that nobody asks
    anything, else as what its author's code says, and as what it was asked. ``elsewhere``: a fork, which is lost with
    its parent's machine, only where there is nothing else."""
    origin = await _origin(env)
    with origin.said():
        return await _kept(origin, elsewhere=elsewhere)


async def _kept(origin: Origin, *, elsewhere: bool) -> Kept:
    why = await _why_not_live(origin)
    mark, fork = origin.journal.mark, None
    if elsewhere and await origin.says("saves"):
        try:
            return Kept(None, await save(origin), None, mark)
        except (Unsupported, TooLarge) as exc:
            why = why or exc.message
    if not why:
        kept = _like(origin.env, idle=_NEVER)
        try:
            await _branch(origin, kept)
            fork = kept
        except (Unsupported, StartFailed) as exc:
            why = exc.message
        finally:
            if fork is None:
                await finish(kept.release())
    if fork is None:
        return Kept(None, *await _remembered(origin, why), mark)
    try:
        return Kept(fork, None, await known(origin), mark)
    except Unsupported:
        return Kept(fork, None, None, mark)
    except BaseException:
        await finish(fork.release())
        raise


async def bring_back(env: Environment, kept: Kept, since: Sequence[Entry] = ()) -> None:
    """Have an environment be where it was when that was kept, or after what it was asked ``since``."""
    before = env.sandbox
    if (fork := kept.fork) is not None:
        try:
            origin = Origin.of(fork)
            await _replaced(env, lambda fresh: _branch(origin, fresh), since)
        except (Unsupported, StartFailed, SandboxLost, NotFound) as exc:
            if env.sandbox is not before:
                raise Conflict(_ELSEWHERE) from exc
            if kept.place is None:
                raise
        else:
            return
    if (saved := kept.saved) is not None:
        await _replaced(env, lambda fresh: _load(saved, fresh), since)
        return
    assert kept.place is not None
    await replace(env, kept.place._replace(entries=(*kept.place.entries, *since)), checked=True)


async def _replaced(
    env: Environment, bring: Callable[[Environment], Awaitable[None]], since: Sequence[Entry] = ()
) -> None:
    """Have another sandbox instead of an environment's own, brought to where that is to be, and asked what was asked
    ``since``."""
    fresh, before = _like(env), env.sandbox
    try:
        await bring(fresh)
        if since:
            await _ask_again(since, fresh)
        await env._take_over(fresh, before)
    finally:
        await fresh.release()


async def _remembered(origin: Origin, why: str) -> tuple[Saved | None, Place | None]:
    """What an environment's author's code says of where it is, or else what it was asked; ``why`` its process cannot be
    forked is said where neither is a way."""
    if await origin.says("saves"):
        try:
            return await save(origin), None
        except (Unsupported, TooLarge) as exc:
            why = f"{why}; and it cannot be saved: {exc.message}"
    try:
        return None, await known(origin)
    except Unsupported as exc:
        raise Unsupported(f"{exc.message}; and its process cannot be forked: {why}", hint=exc.hint) from exc


async def save(origin: Origin) -> Saved:
    """Where an environment is, as its files and what its author's code says."""
    origin.check()
    origin.journal.check_quiet()
    journal = origin.journal.copied()
    response = await Handle._fetch(origin.env, "/state")  # what an agent asks is looked at, and this is not of it
    origin.check()
    if response.status != 200:
        raise answers.error(response)
    if origin.journal.under_way or origin.journal.begun != journal.begun:
        raise Conflict("it was called while it was saved", hint="wait for the answers of calls first")
    return Saved(Place.of(origin.sandbox, ()), journal, response.body)


async def _load(saved: Saved, env: Environment) -> None:
    """Have an environment that is not started yet be where another was."""
    await env.initialize()
    saved.place.check(env.sandbox)
    kind = b"Content-Type: application/octet-stream\r\n"
    answers.data(await env._ask("/state", kind, saved.content, None, "load", "PUT"))
    env.journal = saved.journal.copied()


async def known(origin: Origin) -> Place:
    """All that an environment was asked, where another can be brought to the same place by it; ``Unsupported`` says why
    it cannot."""
    entries = origin.journal.whole()
    _check_deterministic(origin.env, await origin.says("deterministic"))
    return Place.of(origin.sandbox, entries)


async def replace(env: Environment, place: Place, *, checked: bool) -> None:
    """Have another sandbox instead of an environment's own, brought to that place.
    ``checked``: whether the environment is known to be deterministic."""

    async def bring(fresh: Environment) -> None:
        await fresh.initialize()
        if not checked:
            _check_deterministic(fresh, await fresh._says("deterministic"))
        await repeat(place, fresh)

    await _replaced(env, bring)


async def repeat(place: Place, env: Environment) -> None:
    """Ask of an environment all that was asked of another. ``Diverged`` at the first answer that is not the same."""
    await env.initialize()
    place.check(env.sandbox)
    await _ask_again(place.entries, env)


async def _ask_again(entries: Sequence[Entry], env: Environment) -> None:
    for number, entry in enumerate(entries):
        answer = await env._again(entry)
        if found := _difference(entry, answer):
            raise Diverged(
                f"call {number + 1} of {len(entries)}, {entry.what}, came to something else than before: {found}",
                hint="what draws needs a seed, as in Environment(..., seed=1); 'aenv validate --determinism' tells "
                "what else is not the same twice",
            )


def _like(env: Environment, **changes: Any) -> Environment:
    from aenv.client.environment import Environment

    return Environment.like(env, **changes)


def _check_deterministic(env: Environment, says: bool) -> None:
    if not says:
        raise Unsupported(
            f"{env.env_name} does not say that the same calls always come to the same",
            hint="once 'aenv validate --determinism' agrees, set deployConfig.deterministic to true",
        )


def _difference(entry: Entry, answer: Response) -> str:
    """Where an answer is not what it was, in words; empty where it is the same."""
    assert entry.answer is not None
    before, now = _told(entry, entry.answer), _told(entry, answer)
    if isinstance(before, ToolResult) and isinstance(now, ToolResult):
        found = unlike_results(before, now)
    else:
        found = unlike(before, now)
    if found is None:
        return ""
    expected, seen = shown(found.expected, found.found)
    return f"{f'at {found.path}, ' if found.path else ''}expected {expected}, found {seen}"


def _told(entry: Entry, answer: Response) -> Any:
    """What an answer says, without how it is written."""
    if entry.path == "/mcp":
        try:
            return mcp.tool_result(answer)
        except AEnvError as exc:
            return exc.to_wire()
    try:
        return {"status": answer.status, "body": msgspec.json.decode(answer.body)}
    except msgspec.DecodeError:
        return {"status": answer.status, "body": answer.body.decode("latin-1")}


def _seed(seed: int | None, descent: tuple[int, ...]) -> int:
    """For what a sibling draws: follows from the seed of all of them, where there is one."""
    if seed is None:
        return secrets.randbits(32)
    return int.from_bytes(hashlib.sha256(repr((seed, descent)).encode()).digest()[:4])
