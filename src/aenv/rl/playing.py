"""One episode: an instance, an agent in it, a reward, and the trajectory that is left of it."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import platform
import random
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from aenv import __version__
from aenv.cleanup import finish
from aenv.client.environment import Environment
from aenv.errors import (
    Abandoned,
    AEnvError,
    AgentError,
    EpisodeError,
    EpisodeTimeout,
    Invalid,
    ToolError,
    TurnTimeout,
    Unsupported,
)
from aenv.models import NOT_JSON, to_json
from aenv.rl import rewards
from aenv.rl.recording import Episode, Listed, Over
from aenv.rl.reusing import Reuse
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Ending, Failed, Phase, Provenance, Scored, Trajectory

log = logging.getLogger("aenv.rl")
log.addHandler(logging.NullHandler())
Agent = Callable[[Episode, Task], Awaitable[Any]]
"""Plays one episode: calls tools until it is done. What it returns is kept as its answer."""
VERSIONS = {"aenv": __version__, "python": platform.python_version()}
UNSCORED = Failed(kind=EpisodeError.code, phase="reward", reason="it is not scored yet")
"""The outcome of an episode whose agent is done, until there is another."""
GRACE = 5.0
"""Seconds that an agent has to end when its time is over."""
_drawn = random.SystemRandom().uniform
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds before an episode is begun again: at first, and at most."""


async def rollout(
    env: str | Environment,
    agent: Agent,
    task: Task | str | Mapping[str, Any] | None = None,
    seed: int | None = None,
    *,
    rules: Rules | None = None,
    group: str = "",
    sample: int = 0,
) -> Trajectory:
    """Run one episode in an instance of its own, and give the trajectory, scored or failed.

    ``env`` is a name, or an ``Environment`` that is not started, whose settings each instance has. ``agent`` is an
    async function of the environment and the task, or an ``OpenAIAgent``. Whatever fails is in
    ``trajectory.outcome``; only a cancellation is raised.
    """
    plan = Plan(template(env), agent, rules or Rules())
    return await plan.play(Draw(Task.of(task), seed, group, sample))


def template(env: str | Environment) -> Environment:
    """What every instance is made like."""
    if isinstance(env, str):
        return Environment(env)
    if not isinstance(env, Environment):
        raise Invalid(f"{env!r} is no environment", hint="give a name, or Environment(...)")
    if env.instance_id is not None:
        raise Invalid(
            f"{env.env_name} runs already, and an episode needs an instance of its own",
            hint="give its name, or an Environment that is not started",
        )
    return env


class Draw:
    """One episode that is wanted: a task, its seed, and its place in a group."""

    __slots__ = ("group", "sample", "sample_seed", "seed", "task")

    def __init__(self, task: Task, seed: int | None, group: str = "", sample: int = 0) -> None:
        self.task = task
        self.seed = task.seed if task.seed is not None else seed
        self.group = group
        self.sample = sample
        self.sample_seed = None if self.seed is None else derived(self.seed, sample)

    @property
    def key(self) -> tuple[str, int]:
        """Tells it from every other of its run."""
        return (self.group or self.task.id, self.sample)


def derived(*parts: object) -> int:
    """A seed that follows from others, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])


class Facts:
    """What is the same for all instances of one environment, and therefore asked once."""

    def __init__(self) -> None:
        self.tools: dict[tuple[str, str, str, tuple[str, ...]], Listed] = {}
        self.asking = asyncio.Lock()
        self.no_reset: set[tuple[str, str]] = set()


class Plan:
    """What all episodes of a run have in common."""

    def __init__(
        self, env: Environment, agent: Agent, rules: Rules, *, alone: bool = True, reuse: Reuse | None = None
    ) -> None:
        """``alone``: whether one episode is played after the other, and never two at a time. ``reuse``: where instances
        are taken from that play several of them."""
        if not callable(agent):
            raise Invalid(f"{agent!r} cannot be called", hint="an agent is an async function of (env, task)")
        self.env = env
        self.agent = agent
        self.rules = rules
        self.alone = alone
        self.reuse = reuse
        self.facts = Facts()
        self.agent_name = agent_name(agent)

    async def play(self, draw: Draw) -> Trajectory:
        """One episode, begun again as often as the rules say."""
        retried: list[Failed] = []
        while True:
            trajectory = await self.attempt(draw, retried)
            if not await self.again(trajectory, retried):
                return trajectory

    async def attempt(self, draw: Draw, retried: list[Failed]) -> Trajectory:
        """One attempt at an episode, after those that ended so."""
        attempt = Attempt(self, draw)
        try:
            await attempt.open()
            await attempt.run()
        finally:
            await attempt.close()
        return attempt.trajectory(retried)

    async def again(self, trajectory: Trajectory, retried: list[Failed]) -> bool:
        """Whether to begin anew, after a pause, what ended so. ``retried`` are the earlier ends, and get this one."""
        failed = trajectory.failure
        if failed is not None and failed.phase == "reset" and trajectory.provenance.earlier:
            return True  # by what an earlier episode left, or while nobody played: this one has not begun
        if failed is None or not self.rules.may_retry(failed, retried):
            return False
        retried.append(failed)
        pause = min(_PAUSE * 2 ** (len(retried) - 1), _LONGEST_PAUSE)
        await asyncio.sleep(pause * _drawn(0.5, 1.0))
        return True


class Attempt:
    """One instance, and what happens in it. ``open``, ``run`` and ``close`` raise nothing but a cancellation."""

    def __init__(self, plan: Plan, draw: Draw, *, fresh: bool = False) -> None:
        """``fresh``: whether it gets an instance in which nobody has played, also where others do not."""
        self._plan = plan
        self._draw = draw
        task = draw.task
        self.episode = Episode.like(
            plan.env,
            None if fresh else plan.reuse,
            seed=draw.seed,
            datasource=task.datasource or plan.env.spec.datasource,
            arguments=task.arguments or plan.env.spec.arguments,
        )
        self.episode.begin(task, plan.rules, draw.sample_seed)
        self.outcome: Scored | Failed | None = None
        self._given_up: tuple[float, str] | None = None
        """When it is to be given up, in the loop's time, and why."""
        self._ended: Ending | None = None
        self._answer: Any = None
        self._provenance = Provenance()
        self._began = time.monotonic()
        self._began_at = time.time()
        self._seconds: dict[str, float] = {}

    async def open(self) -> None:
        """Start the instance."""
        with self.during("create"):
            await self.episode.initialize()
            self._check_own()
            self._provenance = await self._facts()

    def _check_own(self) -> None:
        """One that others use, too, has a state that nobody knows."""
        sandbox = self.episode.sandbox
        if sandbox is not None and (sandbox.shared or (sandbox.attached and not self._plan.alone)):
            raise Invalid(
                f"{sandbox.url} is one sandbox for all, and each episode needs an instance of its own",
                hint="unset DUMMY_INSTANCE_IP, and name no instance; only one episode after the other may use one",
            )

    async def run(self) -> None:
        """Play the episode in the instance, and score it."""
        await self.play()
        if self.outcome is None:
            with self.during("reward"):
                await self.episode.close_turn()
                if all(reward.function is not None for reward in self._plan.rules.taken):
                    await self.episode.check_health()  # nobody else would notice that it is gone
                scored = await rewards.score(self.trajectory([]), self._plan.rules.taken, self.episode)
                if self.episode.broken is None:
                    self.outcome = scored

    async def play(self) -> None:
        """Play the episode, without scoring it."""
        if self.outcome is None:
            with self.during("reset"):
                await self._reset()
        if self.outcome is None:
            with self.during("agent"):
                await self._play()

    async def close(self) -> None:
        """Give the instance back, whatever happened."""
        begun = time.monotonic()
        if self._plan.reuse is not None and isinstance(self.outcome, Scored) and self.episode.is_untouched:
            self._plan.reuse.keep(self.episode.sandbox)  # a reset is all that it needs for another episode
        try:
            await self.episode.release()
        except Exception as exc:  # the episode is over, and what is left of the instance ends with its lease
            log.warning("[ENV:%s] could not be released: %s", self.episode.instance_id, exc)
        self._seconds["release"] = time.monotonic() - begun

    def give_up(self, at: float, why: str) -> None:
        """Let the agent play until then, in the loop's time, and no longer."""
        if self._given_up is None or at < self._given_up[0]:
            self._given_up = (at, why)
            self._hurry()

    def _hurry(self) -> None:
        time_left = self.episode.time
        if self._given_up is not None and time_left is not None and not time_left.expired():
            when = time_left.when()
            if when is None or self._given_up[0] < when:
                time_left.reschedule(self._given_up[0])

    def trajectory(self, retried: list[Failed]) -> Trajectory:
        """What there is of it."""
        episode, draw = self.episode, self._draw
        return Trajectory(
            id=secrets.token_hex(8),
            env=str(self._plan.env.spec.env),
            task=draw.task,
            outcome=self.outcome or UNSCORED,
            ended=self._ended,
            seed=draw.seed,
            group=draw.group,
            sample=draw.sample,
            messages=list(episode.messages),
            turns=list(episode.turns),
            tools=episode.tools,
            observation=episode.observation,
            answer=self._answer,
            retried=list(retried),
            began_at=self._began_at,
            seconds=self._times(),
            provenance=self._forwarded(),
        )

    def _forwarded(self) -> Provenance:
        """With the instance that the episode ended in, where that is not the one that it began in."""
        found, episode = self._provenance, self.episode
        if not episode.forwards:
            return found
        return msgspec.structs.replace(found, forwarded=episode.forwards, instance=episode.forwarded_to)

    # Phases

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """What fails in the block is the outcome. Only a cancellation leaves it."""
        episode = self.episode
        episode.phase = phase
        begun = time.monotonic()
        error: AEnvError | None = None
        try:
            yield
        except Over:
            error = AgentError("the agent went on after its end") if episode.broken is None else episode.broken.error
        except AEnvError as exc:
            error = AgentError(f"ToolError: {exc.message}") if isinstance(exc, ToolError) else exc
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as exc:  # also of an agent that calls sys.exit(): one episode ends, and not the run
            log.info("an episode failed", exc_info=exc)
            error = AgentError(_told(exc)) if phase == "agent" else AEnvError(f"unexpected {_told(exc)}")
        finally:
            self._seconds[phase] = time.monotonic() - begun
        if error is not None or episode.broken is not None:
            own = phase if isinstance(error, AgentError) else None  # and not what the agent had done before it raised
            self.outcome = episode.failed(error or EpisodeError("it failed"), own)

    async def _reset(self) -> None:
        episode, known = self.episode, self._plan.facts.no_reset
        key = (self._provenance.env, self._provenance.digest)
        given, reuse = self._draw.task.reset, self._plan.reuse
        if given and not self._plan.rules.reset:
            raise Invalid(f"task {self._draw.task.id} is begun by a reset, and the rules say that there is none")
        if self._plan.rules.reset and key not in known:
            try:
                episode.observation = await episode.reset(self._draw.seed, given)
                self._provenance = msgspec.structs.replace(self._provenance, reset=True)
            except Unsupported:
                if given:  # without it, the episode would be about something else
                    raise
                if reuse is not None:
                    hint = "register one with @register_reset, or play each episode in an instance of its own"
                    raise Invalid("without a reset, an instance cannot play several episodes", hint=hint) from None
                known.add(key)
        for path, text in self._draw.task.files.items():
            await episode.upload(path, text)

    async def _play(self) -> None:
        """Let the agent play, in a task of its own: what ends that task is nothing that an agent could catch."""
        rules, episode = self._plan.rules, self.episode
        agent = asyncio.create_task(self._act())
        try:
            async with asyncio.timeout(rules.episode_timeout) as episode.time:
                self._hurry()
                async with asyncio.timeout(rules.turn_timeout) as episode.patience:
                    await asyncio.wait((agent,))
        except TimeoutError:
            log.info("the time of an episode is over")
        finally:
            late = self._time_over()
            if not agent.done():
                agent.cancel()
                await finish(_ended(agent))
            episode.time = episode.patience = None
        error = agent.result() if agent.done() else None
        if isinstance(error, Over) and episode.broken is not None:
            raise error
        if late is not None:
            if not agent.done() or not rules.score_late or isinstance(late, Abandoned):
                raise late
            self._ended = "time"
        elif isinstance(error, Over):
            self._ended = "max_turns"
        elif isinstance(error, asyncio.CancelledError):
            raise AgentError("it waited for something that was cancelled, and nobody had cancelled the episode")
        elif error is not None:
            raise error
        else:
            self._ended = "done"

    async def _act(self) -> BaseException | None:
        """What the agent raised, if anything: also what would otherwise end the loop that it runs in."""
        try:
            playing = self._plan.agent(self.episode, self._draw.task)
            if not inspect.isawaitable(playing):
                hint = "write it as 'async def agent(env, task)'"
                return AgentError(f"{self._plan.agent_name} is not async", hint=hint)
            answer = await playing
        except BaseExceptionGroup as failures:  # of an agent that does several things at a time
            over, others = failures.split(Over)
            return failures if over is None else others or Over()
        except BaseException as exc:
            return exc
        try:
            self._answer = msgspec.json.decode(to_json(answer))
        except NOT_JSON:
            self._answer = repr(answer)
        return None

    def _time_over(self) -> AEnvError | None:
        """Whose time is over, when it is one of ours."""
        rules, whole, patience = self._plan.rules, self.episode.time, self.episode.patience
        if whole is not None and whole.expired():
            limit = rules.episode_timeout
            if self._given_up is not None and (limit is None or whole.when() == self._given_up[0]):
                return Abandoned(self._given_up[1])
            return EpisodeTimeout(f"the episode took longer than {limit:g} s")
        if patience is not None and patience.expired():
            return TurnTimeout(f"nothing new came for {rules.turn_timeout:g} s")
        return None

    # What is known

    async def _facts(self) -> Provenance:
        episode, task = self.episode, self._draw.task
        package = await episode.package()
        kind = (package.env, package.digest, task.datasource, tuple(task.arguments))
        facts = self._plan.facts
        if not package.digest:
            await episode.list_tools()
        elif kind not in facts.tools:
            async with facts.asking:  # one asks, and the others of its kind wait for the answer
                if kind not in facts.tools:
                    await episode.list_tools()
                    facts.tools[kind] = episode.listed
        listed = facts.tools.get(kind, episode.listed)
        episode.check_offered(listed)
        return Provenance(
            env=package.env,
            digest=package.digest,
            image=package.image,
            task_digest=task.digest(),
            tools_digest=listed.digest,
            agent=self._plan.agent_name,
            instance=episode.instance_id or "",
            earlier=self._plan.reuse.earlier(episode.sandbox) if self._plan.reuse is not None else 0,
            local_rewards=[reward.key for reward in self._plan.rules.taken if reward.is_local],
            versions=VERSIONS,
        )

    def _times(self) -> dict[str, float]:
        episode = self.episode
        inside = {"model": episode.model_seconds, "tool": episode.tool_seconds}
        found = {**self._seconds, **inside, "total": time.monotonic() - self._began}
        return {name: round(seconds, 6) for name, seconds in found.items()}


async def _ended(agent: asyncio.Task[Any]) -> None:
    """Wait for the end of an agent that was told to end."""
    await asyncio.wait((agent,), timeout=GRACE)
    if not agent.done():
        log.warning("an agent goes on after its end was asked for; what it calls is refused")


def agent_name(agent: object) -> str:
    """What an agent is called: by itself, or by where it is written."""
    if own := getattr(agent, "name", ""):
        return str(own)
    kind = agent if inspect.isfunction(agent) else type(agent)
    return f"{kind.__module__}:{kind.__qualname__}"


def _told(exc: BaseException) -> str:
    """An exception of the agent's own code, and where it was raised."""
    frames = traceback.extract_tb(exc.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(exc).__name__}: {exc}{where}"[:1000]
