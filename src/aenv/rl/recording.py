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
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec

from aenv.client import lineage
from aenv.client.agents import Agent
from aenv.client.environment import Environment
from aenv.client.lineage import Siblings
from aenv.client.provision import Provision
from aenv.errors import (
    AEnvError,
    AgentError,
    AuthorError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    SandboxLost,
    ToolError,
    Unsupported,
    did_you_mean,
)
from aenv.http import Response
from aenv.models import NOT_JSON, ExecResult, Sandbox, ToolResult, to_json
from aenv.rl import rewards
from aenv.rl.reusing import Reuse
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Call, Failed, Generation, Phase, Tokens, Turn

if TYPE_CHECKING:
    from aenv.rl.model_gateway.episodes import ModelEpisode

P = ParamSpec("P")
R = TypeVar("R")
HARMLESS = (Invalid, NotFound, Unsupported, Forbidden, Conflict, AuthorError, ToolError)
"""What an agent's program may catch and go on after: it asked for the wrong thing, and the sandbox is well."""


FORWARDS = 8
"""How often an episode goes on in another sandbox, at most."""
_LATEST = "latest"
"""The checkpoint that an episode goes on from."""


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
    method: Callable[Concatenate[Episode, P], Coroutine[Any, Any, R]],
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
        self.models: ModelEpisode | None = None
        """The episode's own way to a model, where the agent plays behind a model gateway."""
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
        self.forwards = 0
        """How often another sandbox was brought to the place of one that was lost."""
        self._siblings = Siblings()
        self.forwarded_to = ""
        """The last of these."""
        self._forwarding = asyncio.Lock()
        self._keeping = asyncio.Lock()
        self._not_kept = ""
        """Why the place that the sandbox is in could not be kept."""
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

    # Another sandbox for one that is lost

    async def _call(
        self, path: str, headers: bytes, body: bytes, timeout: float | None, what: str, method: str = "POST"
    ) -> Response:
        call = super()._call
        response = await self._surely(lambda: call(path, headers, body, timeout, what, method))
        if self.rules.fast_forward and self.phase != "reward":
            await self._remember()
        return response

    async def _query(self, path: str, headers: bytes, body: bytes, what: str) -> Response:
        query = super()._query
        return await self._surely(lambda: query(path, headers, body, what))

    async def _surely(self, ask: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
        """What the sandbox answers, or, where that is lost, another in the same place."""
        while True:
            before = self._sandbox
            try:
                return await ask()
            except SandboxLost as exc:
                if type(exc) is not SandboxLost or not self.rules.fast_forward or before is None:
                    raise  # also where it used up its memory or its time, and would again
                await self._forward(before, exc)

    async def _forward(self, before: Sandbox, lost: SandboxLost) -> None:
        """Go on in another sandbox. Once, however many calls were under way; raises the loss where that cannot be."""
        async with self._forwarding:
            if self._sandbox is not before:
                return
            try:
                with self._unhurried():
                    if self.forwards >= FORWARDS:
                        raise Unsupported(f"it was lost {self.forwards} times before")
                    await self.journal.quiet()  # what is under way ends in an answer from before, or in the loss
                    await self._go_on(before)
            except AEnvError as exc:
                raise SandboxLost(f"{lost.message}; no other can take its place: {exc.message}", hint=exc.hint) from exc
            finally:
                if self._sandbox is not None and self._sandbox is not before:
                    self.forwards += 1
                    self.forwarded_to = self._sandbox.id

    async def _go_on(self, before: Sandbox) -> None:
        """Have another sandbox in the place that the one ``before`` was in."""
        if (kept := self._checkpoints.get(_LATEST)) is not None:
            await lineage.bring_back(self, kept, self.journal.since(kept.mark))
            return
        place = lineage.Place.of(before, self.journal.answers())
        try:
            await lineage.replace(self, place, checked=not place.entries)  # any environment begins at its beginning
        except Unsupported as exc:
            raise Unsupported(f"{exc.message}{self._not_kept and f', and {self._not_kept}'}", hint=exc.hint) from exc

    async def _remember(self) -> None:
        """Keep the place that the sandbox is in, where no journal leads there."""
        if self.journal.under_way:  # whoever is answered last does it
            return
        async with self._keeping:
            if self.journal.under_way or (await self._says("deterministic") and not self.journal.gap):
                return
            if not (await self._says("saves") or await self._says("forkable")):
                return
            before = self._checkpoints.get(_LATEST)
            try:
                with self._unhurried():
                    self._checkpoints[_LATEST] = await lineage.keep(self, elsewhere=True)
            except AEnvError as exc:  # the one before is as good as it was
                self._not_kept = exc.message
                return
            if before is not None and before.fork is not None:
                await before.fork.release()

    @contextmanager
    def _unhurried(self) -> Iterator[None]:
        """What the platform does in the block is no time of the agent's."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stopped = []
        for limit in (self.time, self.patience):
            if limit is not None and not limit.expired() and (when := limit.when()) is not None:
                limit.reschedule(None)
                stopped.append((limit, when))
        try:
            yield
        finally:
            for limit, when in stopped:
                if limit.when() is None and not limit.expired():  # nobody has set it meanwhile
                    limit.reschedule(when + loop.time() - begun)

    async def restore(self, checkpoint: str) -> None:
        """As in ``Environment``. What the episode would have gone on from is left with the place that it was in."""
        await super().restore(checkpoint)
        left = self._checkpoints.pop(_LATEST, None)
        if left is not None and left.fork is not None:
            await left.fork.release()
        if self.rules.fast_forward:
            await self._remember()

    async def fork(self, n: int = 1, *, same_random: bool = False) -> Siblings:
        """As in ``Environment``. What the agent does with siblings is not written down; they end with the episode."""
        siblings = await super().fork(n, same_random=same_random)
        self._siblings += siblings
        return siblings

    async def release(self) -> None:
        """As in ``Environment``, with all siblings."""
        siblings, self._siblings = self._siblings, Siblings()
        try:
            await siblings.release()
        finally:
            await super().release()

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

    async def _fetched(self, path: str, retries: int | None = None, timeout: float | None = None) -> Response:
        fetch = super()._fetch
        return await self._surely(lambda: fetch(path, retries, timeout))

    _fetch = _noting(_fetched)
    _tools_found = _noting(Environment._tools)
    _data = _noting(Environment._data)
    _get = _noting(Environment._get)
    wait_for_ready = _noting(Environment.wait_for_ready)
    _extended = _noting(Environment.extend)
    _exposed = _noting(Environment.expose)
    _uploaded = _noting(Environment.upload)
    download = _noting(Environment.download)

    def agent(self, name: str) -> Agent:
        """As in ``Environment``, but not in an episode: what several agents do is not told apart in a trajectory."""
        raise Unsupported("an episode has one agent", hint="play with several in an Environment of your own")

    async def _tools(self, acting: bytes = b"") -> list[dict[str, Any]]:
        found = await self._tools_found(acting)
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
