"""One episode after the other in instances of one environment; what the platform fails at is no part of any."""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from aenv.client.environment import Environment
from aenv.errors import AEnvError, AuthorError, Forbidden, Invalid, NotFound, Unauthorized, Unsupported
from aenv.integrations.gymnasium import spaces
from aenv.integrations.gymnasium.faces import Face, Seen, Tools, face_of

log = logging.getLogger("aenv.integrations")
log.addHandler(logging.NullHandler())
RETRIES = 3
"""How often an episode is begun again, or brought back, in another instance."""
_DEFINITE = (Invalid, Unsupported, Unauthorized, Forbidden, NotFound)
"""What another instance would answer, too."""
_STALE = 0.25
"""Of its time to live, how much an instance has lived when it gets more of it."""


class Player:
    """Plays in one instance at a time.

    Trainers that have no mask would learn from a failure as if it were a reward. So an episode that fails to begin is
    begun again, in another instance; and one that loses its instance is played again there up to where it was, if all
    that is seen on the way is the same. Otherwise the failure is raised.
    """

    def __init__(self, env: Environment, face: Face | None = None, *, retries: int = RETRIES) -> None:
        self._env = env
        self.face = face
        self._retries = retries
        self._is_used = False
        """Whether the instance has been played in."""
        self._has_reset = True
        self._since = 0.0
        """When the instance was made, or its time to live prolonged."""
        self._begun: tuple[int, Mapping[str, Any]] | None = None
        """What the episode under way was begun with."""
        self._done: list[Any] = []
        """What was done in it."""
        self._seen: list[bytes] = []
        """Digests of what came of it, and of its beginning."""

    @property
    def instance(self) -> Environment:
        """The instance that it is in."""
        return self._env

    async def open(self) -> Face:
        """Have an instance, and know its spaces."""
        for left in range(self._retries, -1, -1):
            try:
                await self._prolonged()
                if self.face is None:
                    self.face = await face_of(self._env)
                await self.face.meet(self._env)
                return self.face
            except AEnvError as exc:
                await self._another(exc, left)
        raise AssertionError("the last try raises")

    async def reset(self, seed: int, options: Mapping[str, Any]) -> Seen:
        """Begin an episode."""
        self._begun, given = None, copy.deepcopy(dict(options))
        for left in range(self._retries, -1, -1):
            try:
                seen = await self._begin(seed, given)
            except AEnvError as exc:
                await self._another(exc, left)
            else:
                self._begun, self._done, self._seen = (seed, given), [], [self._digest(seen)]
                return seen
        raise AssertionError("the last try raises")

    async def step(self, given: Any) -> Seen:
        """Go on with it. Whatever fails ends the episode: where it would go on is not where it was."""
        if self._begun is None:
            raise Invalid("no episode is under way: call reset")
        action = self._face.action(given)
        try:
            seen = await self._stepped(action)
        except BaseException:
            self._begun = None
            raise
        if self._retries:
            self._done.append(action)
            self._seen.append(self._digest(seen))
        if seen.terminated or seen.truncated:
            self._begun = None
        return seen

    async def _stepped(self, action: Any) -> Seen:
        failed: AEnvError | None = None
        for left in range(self._retries, -1, -1):
            try:
                if failed is not None:
                    await self._again(failed)
                return await self._face.step(self._env, action)
            except (AuthorError, _Other):
                raise
            except AEnvError as exc:
                failed = failed or exc
                await self._another(exc, left)
        raise AssertionError("the last try raises")

    async def close(self) -> None:
        """Give the instance back."""
        self._begun = None
        await self._env.release()

    @property
    def _face(self) -> Face:
        assert self.face is not None
        return self.face

    async def _begin(self, seed: int, options: Mapping[str, Any]) -> Seen:
        face = self._face
        await self._prolonged()
        if self._has_reset:
            try:
                seen = await face.reset(self._env, seed, options)
            except Unsupported:
                if not isinstance(face, Tools) or options or face.task.reset:
                    raise
                self._has_reset = False
            else:
                self._is_used = True
                return seen
        assert isinstance(face, Tools)
        if self._is_used:
            await self._replaced()
            await self._prolonged()
        self._is_used = True
        return await face.begin(self._env)

    async def _prolonged(self) -> None:
        """Let every episode have nearly all of the time that an instance lives."""
        sandbox, now = self._env.sandbox, time.monotonic()
        if sandbox is None:
            await self._env.initialize()
            self._since = now
        elif sandbox.expires_at is not None:
            life = sandbox.expires_at - sandbox.created_at
            if now - self._since > _STALE * life:
                with suppress(Unsupported):
                    await self._env.extend(life)
                self._since = now

    async def _again(self, failed: AEnvError) -> None:
        """Be where the episode was, in a new instance."""
        assert self._begun is not None
        seen = [await self._begin(*self._begun)]
        for place, before in enumerate(self._seen):
            if self._digest(seen[-1]) != before:
                hint = "catch the failure and call reset, or have the environment depend on its seed alone"
                raise _Other(
                    f"{failed.message}; in another instance, step {place} went otherwise", hint=hint
                ) from failed
            if place < len(self._done):
                seen.append(await self._face.step(self._env, self._done[place]))

    async def _another(self, failed: AEnvError, left: int) -> None:
        """Have another instance after a failure, unless no try is left, or the answer would be the same."""
        if not left or isinstance(failed, _DEFINITE):
            raise failed
        log.warning("[ENV:%s] goes on in another instance: %s", self._env.instance_id, failed)
        await self._replaced()

    async def _replaced(self) -> None:
        before, self._env = self._env, Environment.like(self._env)
        self._is_used = False
        try:
            await before.release()
        except AEnvError as exc:  # what is left of it ends with its lease
            log.warning("[ENV:%s] could not be released: %s", before.instance_id, exc)

    def _digest(self, seen: Seen) -> bytes:
        told = spaces.written(self._face.observation_space, seen.observation)
        whole = msgspec.json.encode([told, seen.reward, seen.terminated, seen.truncated], order="deterministic")
        return hashlib.blake2b(whole, digest_size=16).digest()


class _Other(AEnvError):
    """An episode that cannot be played again."""
