"""A recorded episode, run again: the same calls in a fresh instance, each result compared with the recorded one.

What the platform fails at while it is replayed is no verdict on the episode: it is neither the same nor different.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import msgspec
from msgspec import Struct

from aenv.client.environment import Environment
from aenv.comparing import unlike, unlike_results
from aenv.errors import AEnvError, EpisodeError, Invalid, from_wire
from aenv.models import ToolResult
from aenv.rl.comparing import Difference
from aenv.rl.playing import Attempt, Draw, Plan, template
from aenv.rl.recording import HARMLESS, Episode
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Call, Component, Failed, Trajectory

Verdict = Literal["same", "differs", "failed"]
_CLOCK = 1e-5
"""Seconds by which recorded times may be wrong, which are rounded."""
_LEAST, _MOST = 1.0, 3600.0
"""Seconds that a call gets at least, and at most, whatever a file says that it took."""


class Replayed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of replaying one episode."""

    id: str
    """Of the trajectory."""
    verdict: Verdict
    """``failed`` when the platform failed before there was an answer: that says nothing of the episode."""
    steps: int = 0
    """Calls that were made again, the one that differs among them."""
    difference: Difference | None = None
    notes: list[str] = []
    """What was not the same, or was not compared, and is no difference of the episode."""
    failure: Failed | None = None

    @property
    def same(self) -> bool:
        """Whether it was reproduced. Raises ``EpisodeError`` when that is not known."""
        if self.failure is not None:
            raise EpisodeError(f"whether episode {self.id} is the same is not known: {self.failure}")
        return self.verdict == "same"


class Judge:
    """Who looks at the instance while an episode is run again. This one wants nothing of it."""

    notes: Sequence[str] = ()
    """What it did not compare."""

    async def after_turn(self, episode: Episode, turn: int) -> Difference | None:
        """After the calls of a turn."""
        return None

    async def at_end(self, episode: Episode) -> Difference | None:
        """After all calls."""
        return None


class Rewarded(Judge):
    """Takes the recorded rewards again, where they were taken then, and compares them."""

    def __init__(self, trajectory: Trajectory) -> None:
        local = trajectory.provenance.local_rewards
        scored = {} if trajectory.failure else getattr(trajectory.outcome, "components", {})
        every_turn = {key for turn in trajectory.turns for key in turn.rewards}
        self._of_turns = [_without(turn.rewards, local) for turn in trajectory.turns]
        self._at_end = _without(scored, {*local, *every_turn})
        self._arguments = trajectory.task.reward
        self._names: list[str] | None = None
        self.notes = [f"reward {key} was worked out by the program that ran it, and was not compared" for key in local]

    async def after_turn(self, episode: Episode, turn: int) -> Difference | None:
        return await self._compared(episode, self._of_turns[turn], turn)

    async def at_end(self, episode: Episode) -> Difference | None:
        return await self._compared(episode, self._at_end, None)

    async def _compared(
        self, episode: Episode, recorded: Mapping[str, Component], turn: int | None
    ) -> Difference | None:
        for key, component in recorded.items():
            expected: Any = component.score if component.details is None else component.details
            try:
                found = await self._taken(episode, key)
            except HARMLESS as exc:
                return Difference(what="reward", name=key, expected=expected, found=str(exc), turn=turn)
            if isinstance(found, Mapping) and component.details is None:
                found = found.get("score")
            if different := unlike(expected, found):
                return Difference(what="reward", name=key, turn=turn, **different._asdict())
        return None

    async def _taken(self, episode: Episode, key: str) -> Any:
        """The reward of that name, or, when it was taken without one, the only one."""
        if self._names is None:
            self._names = await reward_names(episode)
        is_named = key in self._names or key != "reward"
        return await episode.call_reward(self._arguments or None, key if is_named else None)


async def reward_names(env: Environment) -> list[str]:
    """The rewards that an environment has."""
    listed = (await env.list_functions())["reward"] or ()
    entries = listed if isinstance(listed, list) else [listed]
    return [str(entry["name"] if isinstance(entry, dict) else entry) for entry in entries]


async def replay(trajectory: Trajectory, env: str | Environment | None = None, *, rewards: bool = True) -> Replayed:
    """Run a recorded episode again, up to the first difference.

    ``env`` is another environment than the recorded one: a name, or an ``Environment`` that is not started. Calls are
    made in the order in which they were begun, one after the other. The environment's own rewards are compared, too,
    unless ``rewards`` is false: then none is taken, also not those of turns. Raises ``Invalid`` for an episode that
    failed before it began.
    """
    return await Replay(trajectory, env, Rewarded(trajectory) if rewards else Judge()).run()


def is_replayable(trajectory: Trajectory) -> bool:
    """Whether it came so far that there is something to run again."""
    return trajectory.failure is None or trajectory.failure.phase not in ("create", "reset")


class Replay:
    """One replay, once."""

    def __init__(self, trajectory: Trajectory, env: str | Environment | None, judge: Judge) -> None:
        if not is_replayable(trajectory):
            raise Invalid(f"episode {trajectory.id} has nothing to replay: {trajectory.outcome}")
        self._recorded = trajectory
        self._judge = judge
        self._had_reset = trajectory.provenance.reset or trajectory.observation is not None
        made_like = template(trajectory.provenance.env or trajectory.env if env is None else env)
        plan = Plan(made_like, self._again, Rules(reset=self._had_reset))
        self._attempt = Attempt(plan, Draw(trajectory.task, trajectory.seed, trajectory.group, trajectory.sample))
        self._notes: list[str] = []
        self._difference: Difference | None = None
        self._steps = 0
        self._turn: int | None = None

    async def run(self) -> Replayed:
        attempt = self._attempt
        try:
            await attempt.open()
            await attempt.play()
            if attempt.outcome is None and self._difference is None:
                with attempt.during("reward"):
                    self._difference = await self._judge.at_end(attempt.episode)
        finally:
            await attempt.close()
        failure = self._failure()
        verdict: Verdict = "failed" if failure else "differs" if self._difference else "same"
        return Replayed(
            id=self._recorded.id,
            verdict=verdict,
            steps=self._steps,
            difference=None if failure else self._difference,
            notes=[*self._told(), *self._notes, *self._judge.notes],
            failure=failure,
        )

    # The agent

    async def _again(self, episode: Episode, task: Task) -> None:
        """Do what the recorded agent did, up to the first difference."""
        if self._recorded.tools:  # it had them under the names that OpenAI's API takes
            await episode.list_openai_tools()
        self._difference = self._unlike_reset(episode)
        calls = self._recorded.calls
        last = max((at for at, call in enumerate(calls) if call.result is not None), default=-1)
        for turn, made in enumerate(self._recorded.turns):
            self._turn = turn
            for call in made.calls:
                if self._difference is not None:
                    return
                if call.result is None:
                    await self._as_long_as_then(episode, call, is_needed=self._steps < last or self._recorded.ok)
                else:
                    self._difference = await self._compared(episode, call, call.result)
                self._steps += 1
            if self._difference is None:
                with _in_reward(episode):
                    self._difference = await self._judge.after_turn(episode, turn)

    def _unlike_reset(self, episode: Episode) -> Difference | None:
        if self._had_reset and not self._attempt.trajectory([]).provenance.reset:
            return Difference(what="call", name="reset", expected=self._recorded.observation, found="it has no reset")
        if self._had_reset and (different := unlike(self._recorded.observation, episode.observation)):
            return Difference(what="observation", name="reset", **different._asdict())
        return None

    async def _compared(self, episode: Episode, call: Call, expected: ToolResult) -> Difference | None:
        place: dict[str, Any] = {"name": call.name, "step": self._steps, "turn": self._turn}
        try:
            found = await episode.call_tool(
                _bare(call.name), call.arguments, min(max(episode.timeout, 2 * call.seconds), _MOST), id=call.id
            )
        except HARMLESS as exc:
            return Difference(what="call", expected=expected, found=str(exc), **place)
        different = unlike_results(expected, found)
        return different and Difference(what="observation", **different._asdict(), **place)

    async def _as_long_as_then(self, episode: Episode, call: Call, *, is_needed: bool) -> None:
        """A call that had no result: it was refused, given up, or the end. What came of it then is not known, so it is
        made where something follows that may depend on it, and given up after the time that it had."""
        self._notes.append(f"step {self._steps}, {call.name}: it had no result, and was not compared")
        if not is_needed:
            return
        try:
            async with asyncio.timeout(min(max(call.seconds, _LEAST), _MOST)):
                await episode.call_tool(_bare(call.name), call.arguments, id=call.id)
        except (*HARMLESS, TimeoutError):
            return

    # What comes of it

    def _failure(self) -> Failed | None:
        """What the platform failed at. What author code refuses now is a difference."""
        failed = self._attempt.outcome
        if not isinstance(failed, Failed):
            return None
        if failed.phase == "reset" and self._attempt.episode.broken is None:
            observation = self._recorded.observation
            self._difference = Difference(what="call", name="reset", expected=observation, found=failed.reason)
            return None
        return msgspec.structs.replace(failed, turn=self._turn)

    def _told(self) -> Iterator[str]:
        """What is not as it was, or was not done as it was."""
        recorded = self._recorded
        before, now = recorded.provenance, self._attempt.trajectory([]).provenance
        for what, old, new in (
            ("package has another digest", before.digest, now.digest),
            ("image is another", before.image, now.image),
            ("tools have another digest", before.tools_digest, now.tools_digest),
        ):
            if old and new and old != new:
                yield f"the {what}: {_short(old)} then, {_short(new)} now"
        if recorded.failure is not None:
            yield f"the episode itself has no score: {recorded.failure}"
        spans = sorted((call.at, call.at + call.seconds) for call in recorded.calls)
        if any(begin + _CLOCK < end for (_, end), (begin, _) in pairwise(spans)):
            yield "calls were made at the same time, and are made one after the other here"


@contextmanager
def _in_reward(episode: Episode) -> Iterator[None]:
    """What fails in the block fails as a reward does."""
    before, episode.phase = episode.phase, "reward"
    try:
        yield
    finally:
        if episode.broken is None:
            episode.phase = before


def _bare(name: str) -> str:
    """A tool's own name: the environment may be called something else here."""
    return name.partition("/")[2] or name


def _without(components: Mapping[str, Component], keys: Any) -> dict[str, Component]:
    return {key: component for key, component in components.items() if key not in keys}


def _short(digest: str) -> str:
    return digest[:19] if digest.startswith("sha256:") else digest


def raise_unless_same(replayed: Replayed) -> None:
    """For who needs the episode as it was: the failure, or an ``EpisodeError`` that names the difference."""
    if replayed.failure is not None:
        failed = replayed.failure
        message = f"episode {replayed.id} failed when it was replayed, during {failed.phase}: {failed.reason}"
        error: AEnvError = from_wire({"code": failed.kind, "message": message, "hint": failed.hint})
        raise error
    if replayed.difference is not None:
        hint = "'aenv replay' shows it; an environment that depends on more than its seed cannot be rescored"
        message = f"episode {replayed.id} is not the same when it is replayed: {replayed.difference}"
        raise EpisodeError(message, hint=hint)
