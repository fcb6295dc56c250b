"""The two credentials of an instance.

The owner token is a secret of the engine and the client; the sandbox holds only its digest. The agent token
follows from that digest, so an agent that reads everything in its sandbox learns no more than it was given. Of several
agents each has a token of its own, which begins with its name.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import IntEnum
from functools import cached_property


class Access(IntEnum):
    """What a request may do; each level includes the one before it."""

    NONE = 0
    AGENT = 1
    """Tools: ``/mcp`` and ``/tools``."""
    OWNER = 2
    """The rest: reward, functions, reset, files, commands, history."""


def new_owner_token() -> str:
    return secrets.token_urlsafe(32)


def digest(owner_token: str) -> str:
    """What a sandbox is given to check an owner token with."""
    return hashlib.sha256(owner_token.encode()).hexdigest()


def agent_token(owner_digest: str, agent: str = "") -> str:
    """The token that opens the tools of the instance whose owner token has this digest: those of one of its agents."""
    if agent:
        secret = hmac.new(owner_digest.encode(), f"aenv agent {agent}".encode(), hashlib.sha256).hexdigest()
        return f"{agent}.{secret}"
    return hmac.new(owner_digest.encode(), b"aenv agent", hashlib.sha256).hexdigest()


def agent_of(token: str, owner_digest: str) -> str:
    """Whose it is of several agents; nobody's where it is none of theirs."""
    agent, dot, _ = token.partition(".")
    return agent if dot and hmac.compare_digest(token.encode(), agent_token(owner_digest, agent).encode()) else ""


class Gate:
    """Decides what a presented token may do. Without a digest everybody is the owner.

    ``engine_digest`` is of a token that opens as much: the one the engine itself comes with.
    """

    def __init__(self, owner_digest: str | None, engine_digest: str | None = None) -> None:
        self._owner = owner_digest.lower() if owner_digest else None
        self._engine = engine_digest

    @cached_property
    def _agent(self) -> str:
        return agent_token(self._owner or "")

    @property
    def open(self) -> bool:
        """Whether everybody is let in."""
        return self._owner is None

    def agent(self, token: str | None) -> str:
        """Which of several agents it names. One may be named where everybody is let in, too."""
        return agent_of(token, self._owner or "") if token and "." in token else ""

    def access(self, token: str | None) -> Access:
        if self._owner is None:
            return Access.AGENT if self.agent(token) else Access.OWNER
        if not token:
            return Access.NONE
        given = digest(token)
        if hmac.compare_digest(given, self._owner) or (self._engine and hmac.compare_digest(given, self._engine)):
            return Access.OWNER
        is_agent = hmac.compare_digest(token.encode(), self._agent.encode()) or self.agent(token)
        return Access.AGENT if is_agent else Access.NONE
