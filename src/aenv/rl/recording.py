"""The environment as an agent has it in a rollout: all of ``Environment``, with what is said and done written down.

The first failure of the platform is remembered here, whatever the agent does with the exception: an episode that went
on after it is no episode, and has no score.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec

from aenv.client.environment import Environment
from aenv.client.provision import Provision
from aenv.errors import (
    AEnvError,
    AgentError,
    AuthorError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    ToolError,
    Unsupported,
    did_you_mean,
)
from aenv.models import NOT_JSON, ExecResult, ToolResult, to_json
from aenv.rl import rewards
from aenv.rl.reusing import Reuse
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Call, Failed, Generation, Phase, Tokens, Turn

P = ParamSpec("P")
R = TypeVar("R")
HARMLESS = (Invalid, NotFound, Unsupported, Forbidden, Conflict, AuthorError, ToolError)
"""What an agent's program may catch and go on after: it asked for the wrong thing, and the sandbox is well."""


class Over(BaseException):
    """Ends an agent whose turns are used up, or whose sandbox is no more. No ``Exception``, so that an agent that
    catches everything ends, too."""


class Broken(NamedTuple):
    """What the platform failed at, first."""

    error: AEnvError
    phase: Phase
    turn: int | None


class Listed(NamedTuple):
    """The tools of an environment."""

    digest: str
    names: frozenset[str]


def _noting(
    method: Callable[Concatenate[Environment, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Episode, P], Coroutine[Any, Any, R]]:
    """A way to the sandbox on which failures are remembered, and which is closed after one."""

    @functools.wraps(method)
    async def call(self: Episode, /, *args: P.args, **kwargs: P.kwargs) -> R:
        await self.still()
        with self._reaching():
            return await method(self, *args, **kwargs)

    return call


class Episode(Environment):
    """One episode's environment. Agents call it like any other, and may tell what a model said and heard.

    Calls after ``say`` belong to the turn that it began. An agent that never says anything has a turn with each call.
    """

    task: Task
    rules: Rules
    sample_seed: int | None
    """For what the agent draws itself: another for each sample of a group, where the environment's seed is the same."""

    def begin(self, task: Task, rules: Rules, sample_seed: int | None) -> None:
        """What it is about; before anything is called."""
        self.task = task
        self.rules = rules
        self.sample_seed = sample_seed
        self.messages: list[dict[str, Any]] = []
        self.turns: list[Turn] = []
        self.tools: list[dict[str, Any]] = []
        self.listed = Listed("", frozenset())
        """What there is of tools, once they were listed."""
        self.observation: Any = None
        """What the environment's reset returned."""
        self.phase: Phase = "create"
        self.broken: Broken | None = None
        self.model_seconds = self.tool_seconds = 0.0
        self.patience: asyncio.Timeout | None = None
        """Of the turn under way."""
        self.time: asyncio.Timeout | None = None
        """Of all that the agent does."""
        self.began = asyncio.get_running_loop().time()
        self._spoken = False
        self._turning = asyncio.Lock()
        self._calling = 0
        """Tool calls under way."""
        self._under_way = 0
        self._reached = 0
        """Ways to the sandbox on which something is under way."""
        self._touched = False
        self._at: Phase = "agent"
        """What the agent does at the moment, or did when it was cut short."""

    async def initialize(self) -> bool:
        """Once. An instance that was given back is not replaced by another, in which nobody has played."""
        if self._sandbox is None and self.phase != "create":
            hint = "the rollout gives it back itself: an agent neither releases it nor uses it in 'async with'"
            error = AgentError("the episode's instance was given back before its end", hint=hint)
            self.note(error)
            raise error
        return await super().initialize()

    # What an agent tells

    @property
    def turns_left(self) -> int | None:
        """How many turns there may still be; None where there is no limit."""
        return None if self.rules.max_turns is None else self.rules.max_turns - len(self.turns)

    def hear(self, *messages: Mapping[str, Any]) -> None:
        """Messages that the model is given: of the system, the user, or a tool."""
        self.messages += [_message(message) for message in messages]

    async def say(
        self,
        message: Mapping[str, Any],
        *,
        model: str = "",
        finish_reason: str = "",
        seconds: float = 0.0,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """What the model said, which begins a turn; with what is known of how it came to that."""
        said = _message(message)
        async with self._turning:
            await self._turn()
        self._spoken = True
        self.messages.append(said)
        self.model_seconds += seconds
        self.turns[-1].generation = Generation(
            message=len(self.messages) - 1,
            model=model,
            finish_reason=finish_reason,
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            tokens=tokens,
        )

    def go_on(self) -> None:
        """Ends the agent, by an exception, when there may be no further turn. Ask it before asking a model."""
        if self.is_over or self.turns_left == 0:
            raise Over

    @property
    def is_over(self) -> bool:
        """Whether nothing may be called any more: the sandbox is lost, or the agent's time is."""
        return self.broken is not None or any(limit and limit.expired() for limit in (self.time, self.patience))

    async def still(self) -> None:
        """Ends the agent, by an exception, when nothing may be called any more."""
        if self.is_over:
            await asyncio.sleep(0)  # an agent that catches everything and tries again lets others live
            raise Over

    # What is written down

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None, *, id: str = ""
    ) -> ToolResult:
        """As in ``Environment``; ``id`` is what the model called it."""
        await self.still()
        await self._ready()
        async with self._turning:
            if not self._spoken and not self._calling:  # what is called at the same time is one turn
                await self._turn()
            self._calling += 1
        calls, place = self.turns[-1].calls, len(self.turns[-1].calls)
        loop = asyncio.get_running_loop()
        at = loop.time()
        call = Call(name=name, arguments=_kept(arguments), id=id, at=round(at - self.began, 6))
        calls.append(call)
        result = None
        try:
            with self._reaching(), self.doing("tool"):
                result = self._not_offered(name) or await super().call_tool(name, arguments, timeout)
            return result
        finally:
            self._calling -= 1
            seconds = loop.time() - at
            self.tool_seconds += seconds
            calls[place] = msgspec.structs.replace(call, result=result, seconds=round(seconds, 6))

    def _not_offered(self, name: str) -> ToolResult | None:
        """What comes of calling a tool that the task does not have: what a model is told of one that is not there."""
        offered = self.task.tools
        if not offered or self._sandbox is None or (tool := self._tool_name(name, self._sandbox)) in offered:
            return None
        said = f"there is no tool {tool!r}; {did_you_mean(tool, offered)}"
        return ToolResult(content=[{"type": "text", "text": said}], is_error=True)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Something is asked of the sandbox in the block. What the platform fails at there is remembered."""
        self._reached += 1
        try:
            yield
        except AEnvError as exc:
            self.note(exc)
            raise
        except BaseException:  # given up, and perhaps still going on inside
            self._touched = True
            raise
        finally:
            self._reached -= 1
            self.breathe()

    @property
    def is_untouched(self) -> bool:
        """Whether all that was asked of the sandbox has been answered, and nobody else was given a way to it."""
        return not self._touched and not self._reached

    @property
    def provision(self) -> Provision:
        """Where sandboxes come from in which nobody has played."""
        return self._provision.plain if isinstance(self._provision, Reuse) else self._provision

    # What no reset of the author's knows of. The instance ends with the episode then.

    async def agent_url(self) -> str:
        """As in ``Environment``. Whoever has it sees all tools, and may call them after the episode, too."""
        self._touched = True
        return await super().agent_url()

    async def expose(self, port: int, ttl: str | float | None = None) -> str:
        """As in ``Environment``."""
        self._touched = True
        return await self._exposed(port, ttl)

    async def exec(
        self,
        command: str | Sequence[str],
        timeout: float = 60.0,
        *,
        directory: str | None = None,
        stdin: str | None = None,
    ) -> ExecResult:
        """As in ``Environment``."""
        self._touched = True
        return await super().exec(command, timeout, directory=directory, stdin=stdin)

    async def upload(self, path: str, content: bytes | str | os.PathLike[str], timeout: float | None = None) -> None:
        """As in ``Environment``."""
        self._touched = True
        await self._uploaded(path, content, timeout)

    async def extend(self, ttl: str | float) -> None:
        """As in ``Environment``."""
        self._touched = True
        await self._extended(ttl)

    @contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        """What the agent does in the block; what fails or is cut short there did so in that."""
        self._under_way += 1
        self._at = phase
        try:
            yield
        finally:
            self._under_way -= 1
        if not self._under_way:
            self._at = "agent"

    async def list_openai_tools(self) -> list[dict[str, Any]]:
        """As in ``Environment``: what a model is offered, which is kept, too."""
        self.tools = await super().list_openai_tools()
        return self.tools

    _tools_found = _noting(Environment._tools)
    _data = _noting(Environment._data)
    _get = _noting(Environment._get)
    _fetch = _noting(Environment._fetch)
    wait_for_ready = _noting(Environment.wait_for_ready)
    _extended = _noting(Environment.extend)
    _exposed = _noting(Environment.expose)
    _uploaded = _noting(Environment.upload)
    download = _noting(Environment.download)

    async def _tools(self) -> list[dict[str, Any]]:
        found = await self._tools_found()
        self.listed = Listed(digest(found), frozenset(tool["name"] for tool in found))
        self.check_offered(self.listed)
        there = {tool["name"]: tool for tool in found}
        return [there[name] for name in self.task.tools] or found

    def check_offered(self, listed: Listed) -> None:
        """Raises ``Invalid`` for a task that offers a tool which the environment does not have."""
        for name in self.task.tools:
            if name not in listed.names:
                message = f"task {self.task.id} offers {name!r}, which {self.env_name} does not have"
                raise Invalid(message, hint=did_you_mean(name, listed.names))

    async def close_turn(self) -> None:
        """Take the rewards of the turn that is over."""
        if not self.turns or self.turns[-1].rewards:
            return
        turn = self.turns[-1]
        try:
            taken = [reward for reward in self.rules.taken if reward.every_turn]
            with self.doing("reward"):
                found = {reward.key: await rewards.of_turn(reward, turn, self, self.task.reward) for reward in taken}
        except AEnvError as exc:  # whatever the agent does with it: a sum with a part missing is no reward
            self.fail(exc, "reward")
            raise
        turn.rewards.update(found)

    async def _turn(self) -> None:
        await self.close_turn()
        if self.turns_left == 0:
            await asyncio.sleep(0)
        self.go_on()
        self.turns.append(Turn(calls=[], rewards={}))
        self.breathe()

    def breathe(self) -> None:
        """Something new has come: from here on, the time of a turn counts again."""
        if self.patience is not None and self.rules.turn_timeout is not None and not self.patience.expired():
            self.patience.reschedule(asyncio.get_running_loop().time() + self.rules.turn_timeout)

    # What fails

    @property
    def stage(self) -> Phase:
        """What is under way; of the agent's time, what the agent does."""
        return self._at if self.phase == "agent" else self.phase

    def note(self, error: AEnvError) -> None:
        """Remember the first failure that leaves no episode to go on with."""
        if not isinstance(error, HARMLESS):
            self.fail(error, self.stage)

    def fail(self, error: AEnvError, phase: Phase) -> None:
        """There is no episode to go on with, whatever kind of error it is."""
        if self.broken is None:
            self.broken = Broken(error, phase, len(self.turns) - 1 if self.turns else None)

    def failed(self, error: AEnvError, phase: Phase | None = None) -> Failed:
        """The outcome of an episode that ended with that error, or with the failure that came before it."""
        error, stage, turn = self.broken or (error, phase or self.stage, len(self.turns) - 1 if self.turns else None)
        return Failed(kind=error.code, phase=stage, reason=error.message, hint=error.hint, turn=turn)


def digest(tools: Sequence[Mapping[str, Any]]) -> str:
    """sha256 over what tools say of themselves, whatever their order."""
    said = sorted((tool["name"], tool.get("description") or "", tool["inputSchema"]) for tool in tools)
    return f"sha256:{hashlib.sha256(msgspec.json.encode(said, order='deterministic')).hexdigest()}"


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message as it is now, and as a file keeps it."""
    try:
        found: dict[str, Any] = msgspec.json.decode(to_json(dict(given)))
    except NOT_JSON as exc:
        raise Invalid(f"a message cannot be kept: {exc}", hint="a message holds what JSON can carry") from exc
    return found


def _kept(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments as they are now, and as they are sent."""
    if not arguments:
        return {}
    try:
        found: dict[str, Any] = msgspec.json.decode(to_json(dict(arguments)))
    except Exception:  # what cannot be sent is refused with words when it is to be sent
        return {}
    return found
