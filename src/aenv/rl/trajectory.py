"""What is known of an episode when it is over: who said and did what, what came back, and a score or a typed failure.

One ``Trajectory`` is one line of JSON; ``docs/reference/trajectory.md`` explains the fields, ``rl.files`` reads and
writes them. Only a ``Scored`` outcome has a number, and nothing makes one out of a ``Failed``.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from msgspec import Struct

from aenv.errors import AgentError, CallTimeout, EpisodeError, EpisodeTimeout, OutOfMemory, TurnTimeout
from aenv.models import ToolResult
from aenv.rl.tasks import Task

SCHEMA: Literal["aenv.trajectory/1"] = "aenv.trajectory/1"
"""The format, and its version: a reader that knows another one migrates it, or says that it cannot."""

Phase = Literal["create", "reset", "agent", "model", "tool", "reward"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Ending = Literal["done", "max_turns", "time"]
"""Why the agent stopped: it was done, its turns were used up, or its time was over and what there was got scored."""


_OF_AGENTS = frozenset(kind.code for kind in (AgentError, TurnTimeout, EpisodeTimeout, CallTimeout, OutOfMemory))


class Failed(Struct, frozen=True, kw_only=True, tag_field="type", tag="failed", omit_defaults=True):
    """The episode has no score. That says nothing of the policy: the row is to be masked."""

    kind: str
    """The code of the error, such as ``sandbox_lost``, ``network`` or ``model_failed``."""
    phase: Phase
    """What was under way."""
    reason: str
    hint: str | None = None
    turn: int | None = None
    """In which turn, from 0; None when it had not come to that."""

    def __str__(self) -> str:
        return f"{self.kind} during {self.phase}: {self.reason}"

    @property
    def by_agent(self) -> bool:
        """Whether the agent brought it about, or may have. No trainer learns from such a row either; but an evaluation
        that left it out would rate an agent the higher the more often it breaks down."""
        return self.kind in _OF_AGENTS and self.phase in ("agent", "tool")


class Component(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one reward gave, before its weight."""

    score: float
    weight: float = 1.0
    details: Any = None
    """All that it returned, where that was more than a number."""

    def __post_init__(self) -> None:
        _finite("score", self.score)
        _finite("weight", self.weight)


class Scored(Struct, frozen=True, kw_only=True, tag_field="type", tag="scored", omit_defaults=True):
    """The episode has a score: the sum of its components by their weights."""

    score: float
    components: dict[str, Component] = {}

    def __post_init__(self) -> None:
        _finite("score", self.score)


def _finite(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"a {what} is a finite number, not {value!r}")


class Call(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call, and what came of it."""

    name: str
    arguments: dict[str, Any]
    result: ToolResult | None = None
    """None when the platform failed before there was one."""
    id: str = ""
    """What the model called it."""
    at: float = 0.0
    """Seconds after the episode began."""
    seconds: float = 0.0


class Tokens(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model read and wrote, in its own tokens, as far as its server tells."""

    prompt: list[int] | None = None
    completion: list[int] | None = None
    logprobs: list[float] | None = None
    """Of the completion, one for each token."""


class Generation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a model."""

    message: int
    """Which of the trajectory's messages it is."""
    model: str = ""
    finish_reason: str = ""
    seconds: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: Tokens | None = None


class Turn(Struct, kw_only=True, omit_defaults=True):
    """One turn of the agent: what it said, where a model spoke, and the calls it then made."""

    calls: list[Call] = []
    generation: Generation | None = None
    rewards: dict[str, Component] = {}
    """Of this turn alone, by the rewards that are taken of every turn."""


class Provenance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What it takes to know where a reward came from."""

    env: str = ""
    """``name@version``, as it ran."""
    digest: str = ""
    """sha256 of the environment's package."""
    image: str = ""
    task_digest: str = ""
    tools_digest: str = ""
    """sha256 over names, descriptions and schemas of all tools."""
    agent: str = ""
    instance: str = ""
    earlier: int = 0
    """Episodes that were played in that instance before."""
    forwarded: int = 0
    """How often its instance was lost, and another was brought to the same place. ``instance`` is the last."""
    reset: bool = False
    """Whether the environment was reset before the agent began."""
    local_rewards: list[str] = []
    """Rewards that take more than the environment and the task: worked out by functions of the trainer's program, or
    with arguments that it gave. A replay does not take them again."""
    versions: dict[str, str] = {}


class Lineage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The trajectory that this one was made from."""

    parent: str
    relation: str
    """``rescored``: other rewards of the same episode."""


class Trajectory(Struct, frozen=True, kw_only=True):
    """One episode."""

    schema: Literal["aenv.trajectory/1"] = SCHEMA
    id: str
    env: str
    """The environment that was asked for, as it was asked for."""
    task: Task
    outcome: Scored | Failed
    ended: Ending | None = None
    """None when the agent did not come to its end."""
    seed: int | None = None
    """What the environment was seeded with."""
    group: str = ""
    """Episodes of one task that are compared with each other have it in common."""
    sample: int = 0
    """Which of its group it is, from 0."""
    messages: list[dict[str, Any]] = []
    """The conversation as the model had it, in OpenAI's form; empty for agents that tell none."""
    turns: list[Turn] = []
    tools: list[dict[str, Any]] = []
    """What the model was offered, in OpenAI's form; empty for agents that were shown none."""
    observation: Any = None
    """What the environment's reset returned."""
    answer: Any = None
    """What the agent returned, where JSON can carry it."""
    retried: list[Failed] = []
    """How earlier attempts at this episode ended."""
    began_at: float = 0.0
    """Unix time."""
    seconds: dict[str, float] = {}
    """Where the time went: by phase, and ``total``."""
    provenance: Provenance = Provenance()
    lineage: Lineage | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a score."""
        return isinstance(self.outcome, Scored)

    @property
    def reward(self) -> float:
        """The score. A failed episode has none, and raises ``EpisodeError``."""
        return self._scored().score

    @property
    def components(self) -> dict[str, float]:
        """The score of each reward, before its weight. A failed episode has none, and raises ``EpisodeError``."""
        return {name: found.score for name, found in self._scored().components.items()}

    @property
    def failure(self) -> Failed | None:
        return self.outcome if isinstance(self.outcome, Failed) else None

    @property
    def calls(self) -> list[Call]:
        """Every tool call, in the order in which they were begun."""
        return [call for turn in self.turns for call in turn.calls]

    def _scored(self) -> Scored:
        if isinstance(self.outcome, Scored):
            return self.outcome
        raise EpisodeError(
            f"episode {self.id} has no reward: {self.outcome}",
            hint="look at trajectory.outcome, and mask the rows of failed episodes",
        )
