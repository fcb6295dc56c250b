"""One episode after the other in instances of one environment; what the platform fails at is no part of any."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from aenv.errors import AEnvError, AuthorError, Forbidden, Invalid, NotFound, Unauthorized, Unsupported
from aenv.integrations.gymnasium import spaces
from aenv.integrations.gymnasium.faces import Face, Seen, Tools, face_of
from aenv.integrations.gymnasium.instances import Instance

log = logging.getLogger("aenv.integrations")
RETRIES = 3
"""How often an episode is begun again, or brought back, in another instance."""
_DEFINITE = (Invalid, Unsupported, Unauthorized, Forbidden, NotFound)
"""What another instance would answer, too."""


class Player:
    """Plays in one instance at a time, alone or beside others.

    Trainers that have no mask would learn from a failure as if it were a reward. So an episode that fails to begin is
    begun again, in another instance; and one that loses its instance is played again there up to where it was, if all
    that is seen on the way is the same. Otherwise the failure is raised.
    """

    def __init__(self, env: Instance, face: Face | None = None, seat: int = 0, *, retries: int = RETRIES) -> None:
        """``seat``: which of the environments in the instance it plays in."""
        self._env = env
        self.face = face
        self._seat = seat
        self._retries = retries
        self._is_used = False
        """Whether the instance has been played in."""
        self._has_reset = True
        self._begun: tuple[int, Mapping[str, Any]] | None = None
        """What the episode under way was begun with."""
        self._done: list[Any] = []
        """What was done in it."""
        self._seen: list[bytes] = []
        """Digests of what came of it, and of its beginning."""

    @property
    def instance(self) -> Instance:
        """The instance that it is in."""
        return self._env.latest

    async def open(self) -> Face:
        """Have an instance, and know its spaces."""
        for left in range(self._retries, -1, -1):
            try:
                await self._follow()
                await self._env.prolonged()
                if self.face is None:
                    self.face = await face_of(self._env, self._seat)
                await self.face.meet(self._env)
                return self.face
            except AEnvError as exc:
                self._leave(exc, left)
        raise AssertionError("the last try raises")

    async def reset(self, seed: int, options: Mapping[str, Any]) -> Seen:
        """Begin an episode."""
        self._begun, given = None, copy.deepcopy(dict(options))
        for left in range(self._retries, -1, -1):
            try:
                await self._follow()
                seen = await self._begin(seed, given)
            except AEnvError as exc:
                self._leave(exc, left)
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
                failed = await self._follow() or failed
                if failed is not None:
                    await self._again(failed)
                return await self._face.step(self._env, action)
            except (AuthorError, _Other):
                raise
            except AEnvError as exc:
                self._leave(exc, left)
        raise AssertionError("the last try raises")

    async def close(self) -> None:
        """Give the instance back."""
        self._begun = None
        await self.instance.release()

    @property
    def _face(self) -> Face:
        assert self.face is not None
        return self.face

    async def _begin(self, seed: int, options: Mapping[str, Any]) -> Seen:
        face = self._face
        await self._env.prolonged()
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
            self._env = await self._env.successor()
            await self._env.prolonged()
        self._is_used = True
        return await face.begin(self._env)

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

    def _leave(self, failed: AEnvError, left: int) -> None:
        """Give the instance up after a failure, unless no try is left, or the answer would be the same in another."""
        if not left or isinstance(failed, _DEFINITE):
            raise failed
        if self._env.seats > 1 and isinstance(failed, AuthorError):
            return  # the others that play there have none
        if self._env.failure is None:
            log.warning("[ENV:%s] goes on in another instance: %s", self._env.instance_id, failed)
            self._env.failure = failed

    async def _follow(self) -> AEnvError | None:
        """Be in an instance that is not given up; why the one before was, if it was."""
        failed = None
        while (why := self._env.failure) is not None:
            failed, self._env, self._is_used = why, await self._env.successor(), False
        return failed

    def _digest(self, seen: Seen) -> bytes:
        told = seen.told
        if told is None:
            told = spaces.written(self._face.observation_space, seen.observation)
        whole = msgspec.json.encode([told, seen.reward, seen.terminated, seen.truncated], order="deterministic")
        return hashlib.blake2b(whole, digest_size=16).digest()


class _Other(AEnvError):
    """An episode that cannot be played again."""
