"""Instances that environments are played in: one has them alone, or several share it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from aenv.client.environment import Environment
from aenv.errors import AEnvError, AuthorError, Unsupported, from_wire

log = logging.getLogger("aenv.integrations")
log.addHandler(logging.NullHandler())
_STALE = 0.25
"""Of its time to live, how much an instance has lived when it gets more of it."""
_Moves = list[tuple[tuple[Any, ...], "asyncio.Future[Any]"]]


class Instance(Environment):
    """An instance with environments in it. Once it is given up, another is in its place, for all who were in it."""

    def _blank(self) -> None:
        super()._blank()
        self.seats = 1
        """How many share it."""
        self.failure: AEnvError | None = None
        """Why it was given up."""
        self._successor: Instance | None = None
        self._starting = asyncio.Lock()
        self._since = 0.0
        """When it was made, or its time to live prolonged."""
        self._moves: _Moves = []
        """Those of this moment."""
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def latest(self) -> Instance:
        """The one in its place."""
        found = self
        while found._successor is not None:
            found = found._successor
        return found

    async def successor(self) -> Instance:
        """The one that is used once this is given up. The first who asks gives this one back."""
        if self._successor is None:
            self._successor = Instance.like(self)
            self._successor.seats = self.seats
            id = self.instance_id
            try:
                await self.release()
            except AEnvError as exc:  # what is left of it ends with its lease
                log.warning("[ENV:%s] could not be released: %s", id, exc)
        return self._successor

    async def prolonged(self) -> None:
        """Let every episode have nearly all of the time that an instance lives."""
        async with self._starting:
            self._check()
            sandbox, now = self.sandbox, time.monotonic()
            if sandbox is None:
                try:
                    await self.initialize()
                except AEnvError as exc:
                    self.failure = exc  # of all who wait for it
                    raise
                self._since = now
            elif sandbox.expires_at is not None:
                life = sandbox.expires_at - sandbox.created_at
                if now - self._since > _STALE * life:
                    with suppress(Unsupported):
                        await self.extend(life)
                    self._since = now

    async def play(self, *move: Any) -> Any:
        """What comes of a move of a published environment. Those of one moment are one call, where several share."""
        self._check()
        if self.seats == 1:
            return (await self._answers([move]))[0]
        loop = asyncio.get_running_loop()
        if not self._moves:
            loop.call_soon(self._send)
        answer = loop.create_future()
        self._moves.append((move, answer))
        return await answer

    def _send(self) -> None:
        moves, self._moves = self._moves, []
        task = asyncio.create_task(self._asked(moves))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _asked(self, moves: _Moves) -> None:
        try:
            self._check()
            for (_, answer), found in zip(moves, await self._answers([move for move, _ in moves]), strict=True):
                if answer.done():  # nobody waits for it any more
                    continue
                if isinstance(found, dict) and "error" in found:
                    answer.set_exception(from_wire(found["error"]))
                else:
                    answer.set_result(found)
        except AEnvError as exc:
            for _, answer in moves:
                if not answer.done():
                    answer.set_exception(exc)
        finally:
            for _, answer in moves:
                answer.cancel()

    async def _answers(self, moves: list[tuple[Any, ...]]) -> list[Any]:
        found = await self.call_function("gymnasium_play", {"moves": moves}, timeout=self.timeout * len(moves))
        if not isinstance(found, list) or len(found) != len(moves):
            raise AuthorError(f"{self.env_name} does not answer {len(moves)} moves with as many results")
        return found

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
