"""What was said to agents and what they answered: conversations, by agent and session, within bounds.

The messages of one conversation are answered one after the other. A turn that fails leaves everything as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

from aenv.errors import AuthorError, Conflict, Invalid, NotFound, TooLarge, did_you_mean
from aenv.models import to_json

MOST = 1000
"""Conversations of one sandbox."""
MOST_BYTES, MOST_TOGETHER = 4 * 1024 * 1024, 64 * 1024 * 1024
"""Bytes of one: its messages, and what its agent keeps."""
MOST_NAME = 255
IDLE = 3600.0
"""Seconds after which a conversation that nobody went on with may make room for a new one."""

_Key = tuple[str, str]
"""The agent, and the session."""


class Conversation:
    """Annotate a parameter of an agent with this class and it is filled in; callers never see it.

    >>> @register_agent
    ... def counting(message: str, conversation: Conversation) -> str:
    ...     conversation.state["heard"] = conversation.state.get("heard", 0) + 1
    ...     return f"{len(conversation.messages)} messages before this one"

    A reward has the only conversation that there is, or all of them as ``list[Conversation]``.
    """

    def __init__(
        self,
        session: str = "",
        messages: Iterable[Mapping[str, str]] = (),
        state: Mapping[str, Any] | None = None,
        *,
        agent: str = "",
    ) -> None:
        self.agent = agent
        """Which agent it is with."""
        self.session = session
        """What the caller calls it."""
        self.messages = [dict(message) for message in messages]
        """What was said before, oldest first, each ``{"role": "user" or "assistant", "content": ...}``."""
        self.state = dict(state or {})
        """Whatever else the agent must remember until the next message, as far as JSON can carry it. It is saved and
        forked with the conversation, and changes only when the agent answers."""


class Said(Struct):
    """A conversation as it is kept."""

    agent: str
    session: str
    messages: list[dict[str, str]] = []
    state: msgspec.Raw = msgspec.Raw(b"{}")
    size: int = 0
    """Bytes of the messages."""

    def shown(self) -> Conversation:
        """A copy, which whoever gets it may change."""
        return Conversation(self.session, self.messages, msgspec.json.decode(self.state), agent=self.agent)


class Conversations:
    """Those of one sandbox."""

    def __init__(self) -> None:
        self._kept: dict[_Key, Said] = {}
        self._used: dict[_Key, float] = {}
        self._turns: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        """Held while a message is answered. There is one only as long as somebody holds it or waits for it."""

    def __iter__(self) -> Iterator[Conversation]:
        """All in which something was answered, the oldest first."""
        return (said.shown() for said in self._kept.values() if said.messages)

    def only(self) -> Conversation:
        """The only one there is; an empty one before anything was said."""
        found = list(self)
        if len(found) > 1:
            raise AuthorError(
                f"there are {len(found)} conversations, and a Conversation is the only one",
                hint="take all of them: annotate the parameter with list[Conversation]",
            )
        return found[0] if found else Conversation()

    def get(self, agent: str, session: str) -> Conversation:
        """One of them. That without a name is always there."""
        if said := self._kept.get((agent, session)):
            return said.shown()
        if session:
            known = [name for of, name in self._kept if of == agent]
            raise NotFound(f"there is no conversation {session!r}"[:400], hint=did_you_mean(session, known))
        return Conversation(agent=agent)

    @asynccontextmanager
    async def turn(self, agent: str, session: str) -> AsyncIterator[Conversation]:
        """The conversation, for as long as a message in it is answered; others wait."""
        if len(session) > MOST_NAME:
            raise Invalid(f"session must be at most {MOST_NAME} characters, found {len(session)}")
        key = (agent, session)
        async with self._turns.setdefault(key, asyncio.Lock()):
            said = self._kept.get(key)
            if said is None:
                self._make_room()
                said = self._kept[key] = Said(*key)
            try:
                yield said.shown()
            finally:
                self._used[key] = monotonic()
                if not said.messages and self._kept.get(key) is said:
                    self._forget(key)

    async def forget(self, agent: str, session: str) -> int:
        """Forget a conversation, once what is asked in it is answered; how many messages it had."""
        self.get(agent, session)
        async with self._turns.setdefault((agent, session), asyncio.Lock()):
            said = self._forget((agent, session))
        return 0 if said is None else len(said.messages)

    def check(self, conversation: Conversation, message: str) -> None:
        """Raises ``TooLarge`` where a message does not fit in any more."""
        said = self._kept.get((conversation.agent, conversation.session))
        _check_size((0 if said is None else said.size + len(said.state)) + len(message.encode()))

    def keep(self, conversation: Conversation, message: str, answer: str) -> None:
        """Note what was answered in a turn, and what the agent made of its state. A conversation that was forgotten
        meanwhile stays so."""
        said = self._kept.get((conversation.agent, conversation.session))
        try:
            state = to_json(conversation.state)
        except Exception as exc:  # an author's own type may raise anything
            raise AuthorError(
                f"the state of the conversation cannot be kept: {exc}", hint="keep what JSON has"
            ) from exc
        pair = [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        size = sum(len(one["content"].encode()) for one in pair)
        if said is not None:
            _check_size(said.size + size + len(state))
            together = sum(other.size + len(other.state) for other in self._kept.values() if other is not said)
            if together + said.size + size + len(state) > MOST_TOGETHER:
                hint = "end some with chat_reset"
                raise TooLarge(f"the conversations are over {MOST_TOGETHER} bytes together", hint=hint)
            said.messages.extend(pair)
            said.state, said.size = msgspec.Raw(state), said.size + size

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self._used.clear()

    def saved(self) -> list[Said]:
        """All of them, for another sandbox."""
        return [said for said in self._kept.values() if said.messages]

    def load(self, saved: Iterable[Said]) -> None:
        """Have those, and no others."""
        self.clear()
        self._kept = {(said.agent, said.session): said for said in saved}

    def _forget(self, key: _Key) -> Said | None:
        self._used.pop(key, None)
        return self._kept.pop(key, None)

    def _make_room(self) -> None:
        if len(self._kept) < MOST:
            return
        free = [key for key in self._kept if key not in self._turns]
        oldest = min(free, key=lambda key: self._used.get(key, 0.0), default=None)
        if oldest is None or monotonic() - self._used.get(oldest, 0.0) < IDLE:
            raise Conflict(f"there are {MOST} conversations, as many as there may be", hint="end one with chat_reset")
        self._forget(oldest)


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise TooLarge(f"the conversation is over {MOST_BYTES} bytes", hint="go on in another session")
