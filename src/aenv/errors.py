"""Every failure AEnvironment raises, with the code and HTTP status it has on the wire.

    AEnvError                     code               http
      Invalid                     invalid            422   what the caller sent or wrote is wrong
        InvalidConfig             invalid_config     422   a config file or setting is wrong
        TooLarge                  too_large          413
      Unauthorized                unauthorized       401
      Forbidden                   forbidden          403
      NotFound                    not_found          404
        NotServed                 not_served         404   the server has no such route
      Conflict                    conflict           409
        Diverged                  diverged           409   what was done again came to something else than before
      RateLimited                 rate_limited       429
      Unsupported                 unsupported        501
      StorageFull                 storage_full       507   no room is left where it was to be kept
      AuthorError                 author_failed      500   the author's reward, function or hook raised
      ToolError                   tool_failed        500   what ToolResult.raise_for_error() raises
      NetworkError                network            502   nobody answered
      SandboxError                sandbox_failed     502   the sandbox is of no more use
        StartFailed               start_failed       502   it never became ready; the reason is in the message
        SandboxLost               sandbox_lost       502   it was there and is gone
          OutOfMemory             out_of_memory      502   it wanted more memory than it may have
          Expired                 expired            502   its time to live was over
        CallTimeout               call_timeout       504   one call took too long; the sandbox may be well
      EpisodeError                episode_failed     500   an episode has no score; what reading it raises
        AgentError                agent_failed       500   the agent's own code raised
        ModelError                model_failed       502   the model gave no answer, or none that can be used
        TurnTimeout               turn_timeout       504   the agent or the tool took too long for one turn
        EpisodeTimeout            episode_timeout    504   the whole episode took too long
        Abandoned                 abandoned          504   it was given up, since the others of its group were done

A tool that fails is *not* here: it is a ``ToolResult`` with ``is_error=True``, which a model may read.
Everything here is for programs: a trainer never takes it for an observation or for reward 0.
A server answers with ``to_wire``; a client turns that back into the same class with ``from_wire``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar


class AEnvError(Exception):
    """Base of everything this package raises."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        """What the reader can do about it; printed on a line of its own."""

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.hint:
            wire["hint"] = self.hint
        return wire


class Invalid(AEnvError):
    code, status = "invalid", 422


class InvalidConfig(Invalid):
    code = "invalid_config"


class TooLarge(Invalid):
    code, status = "too_large", 413


class Unauthorized(AEnvError):
    code, status = "unauthorized", 401


class Forbidden(AEnvError):
    code, status = "forbidden", 403


class NotFound(AEnvError):
    code, status = "not_found", 404


class NotServed(NotFound):
    code = "not_served"


class Conflict(AEnvError):
    code, status = "conflict", 409


class Diverged(Conflict):
    code = "diverged"


class RateLimited(AEnvError):
    code, status = "rate_limited", 429

    def __init__(self, message: str, *, hint: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after
        """Seconds after which it may be asked again, when whoever refused it knows."""


class Unsupported(AEnvError):
    code, status = "unsupported", 501


class StorageFull(AEnvError):
    code, status = "storage_full", 507


class AuthorError(AEnvError):
    code = "author_failed"


class ToolError(AEnvError):
    code = "tool_failed"


class NetworkError(AEnvError):
    code, status = "network", 502


class SandboxError(AEnvError):
    code, status = "sandbox_failed", 502


class StartFailed(SandboxError):
    code = "start_failed"


class SandboxLost(SandboxError):
    code = "sandbox_lost"


class OutOfMemory(SandboxLost):
    code = "out_of_memory"


class Expired(SandboxLost):
    code = "expired"


class CallTimeout(SandboxError):
    code, status = "call_timeout", 504


class EpisodeError(AEnvError):
    code = "episode_failed"


class AgentError(EpisodeError):
    code = "agent_failed"


class ModelError(EpisodeError):
    code, status = "model_failed", 502


class TurnTimeout(EpisodeError):
    code, status = "turn_timeout", 504


class EpisodeTimeout(EpisodeError):
    code, status = "episode_timeout", 504


class Abandoned(EpisodeError):
    code, status = "abandoned", 504


EnvironmentError = SandboxError
UnrecoverableEnvironmentError = SandboxLost
ToolTimeoutError = CallTimeout


_LOSSES = {"out of memory": OutOfMemory, "its time to live": Expired}
"""What the reasons of engines begin with, where the kind of loss matters."""


def loss(reason: str) -> type[SandboxLost]:
    """The kind of error for a sandbox that ended for that reason, in its engine's words."""
    return next((kind for words, kind in _LOSSES.items() if reason.startswith(words)), SandboxLost)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant, whatever its case."""
    from difflib import get_close_matches

    names = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), names, 1, 0.65)
    return names[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not among the known ones."""
    known = list(known)
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"available: {', '.join(sorted(known)) or 'none'}"


def _tree(cls: type[AEnvError]) -> list[type[AEnvError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _tree(sub))]


def from_wire(wire: dict[str, Any]) -> AEnvError:
    """The exception that ``to_wire`` described; an unknown code is a plain ``AEnvError``."""
    classes = {cls.code: cls for cls in _tree(AEnvError) if cls.__module__ == __name__ and "code" in vars(cls)}
    cls = classes.get(str(wire.get("code")), AEnvError)
    return cls(str(wire.get("message", "unknown error")), hint=wire.get("hint"))
