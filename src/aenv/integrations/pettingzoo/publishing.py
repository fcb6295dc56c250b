"""A PettingZoo environment as one of ours: an author's module calls ``publish``, and its agents share an instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

from aenv.errors import Conflict, Invalid, NotFound
from aenv.integrations.gymnasium import spaces
from aenv.integrations.published import Offer, register
from aenv.runtime.context import Context
from aenv.runtime.registry import register_turn

_STEP = {
    "type": "object",
    "properties": {"action": {"description": "A member of the action space: a number, a list, or an object."}},
    "required": ["action"],
}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def publish(make: Callable[[], Any]) -> None:
    """Register the tools ``step`` and ``observe`` of each agent, whose turn it is, the reward ``agent_return`` and a
    reset, and what PettingZoo's faces ask of an instance.

    ``make`` gives the environment: an ``AECEnv``, or a ``ParallelEnv``, whose agents then move one after the other.
    """
    table = Table(make)
    agents = tuple(table.env.possible_agents)
    tools = [
        Offer("step", table.step, _STEP, agents=agents),
        Offer("observe", table.observe, _NOTHING, agents=agents, anytime=True),
    ]
    asked: dict[str, Callable[..., Any]] = {"pettingzoo_spaces": table.spaces, "pettingzoo_play": table.play}
    register(table, tools, table.agent_return, asked)
    register_turn(table.turn)


class Table:
    """The environment, and what its agents have earned in the episode."""

    def __init__(self, make: Callable[[], Any]) -> None:
        made = make()
        self.env: AECEnv = parallel_to_aec(made) if isinstance(made, ParallelEnv) else made
        self._totals: dict[str, float] | None = None

    async def start(self) -> None:
        """It is made when the project is imported: its agents are who has tools."""

    async def stop(self) -> None:
        """Close it."""
        self.env.close()

    async def turn(self) -> str | None:
        """Whose turn it is."""
        return self.env.agent_selection if self._totals is not None and self.env.agents else None

    async def restart(self, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin an episode; whose turn it is.

        Args:
            seed: Makes it repeatable.
            options: What the environment takes as options of a reset.
        """
        self._reset(seed, options)
        return {"turn": await self.turn()}

    async def step(self, action: Any, ctx: Context) -> dict[str, Any]:
        """Take an action; what there is to be seen after it."""
        self._step(action)
        while self.env.agents and self._is_over(self.env.agent_selection):
            self._step(None)  # as PettingZoo has those leave whose episode is over
        return await self.observe(ctx)

    async def observe(self, ctx: Context) -> dict[str, Any]:
        """What the agent sees, what it has earned so far, whether its episode is over, and whose turn it is."""
        agent = self._agent(ctx)
        is_there = agent in self.env.agents
        return {
            "observation": self._observed(agent) if is_there else None,
            "return": self._earned()[agent],
            "over": not is_there or self._is_over(agent),
            "info": spaces.plain(self.env.infos[agent]) if is_there else {},
            "turn": await self.turn(),
        }

    async def agent_return(self, ctx: Context) -> dict[str, Any]:
        """The sum of the rewards of an agent in the episode so far."""
        agent = self._agent(ctx)
        return {"score": self._earned()[agent], "over": agent not in self.env.agents or self._is_over(agent)}

    async def spaces(self) -> dict[str, Any]:
        """The spaces of each agent, and whether its parallel face is exact."""
        return {
            "agents": {
                agent: {
                    "observation": spaces.told(self.env.observation_space(agent)),
                    "action": spaces.told(self.env.action_space(agent)),
                }
                for agent in self.env.possible_agents
            },
            "is_parallelizable": bool(self.env.metadata.get("is_parallelizable")),
        }

    async def play(self, kind: Literal["reset", "step"], given: Any = None) -> dict[str, Any]:
        """Reset, or take a step as PettingZoo has it, of whoever is on; where the game is then."""
        if kind == "reset":
            self._reset(**(given or {}))
        else:
            self._step(given)
        env = self.env
        return {
            "agents": list(env.agents),
            "selection": env.agent_selection,
            "observations": {agent: self._observed(agent) for agent in env.agents},
            "infos": {agent: spaces.plain(info) for agent, info in env.infos.items()},
            "rewards": {agent: float(reward) for agent, reward in env.rewards.items()},
            "cumulative": {agent: float(reward) for agent, reward in env._cumulative_rewards.items()},
            "terminations": {agent: bool(over) for agent, over in env.terminations.items()},
            "truncations": {agent: bool(over) for agent, over in env.truncations.items()},
        }

    def _reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.env.reset(seed=seed, options=options)
        self._totals = dict.fromkeys(self.env.possible_agents, 0.0)

    def _step(self, action: Any) -> None:
        totals = self._earned()
        if not self.env.agents:
            raise Conflict("the episode is over", hint="reset begins another")
        agent = self.env.agent_selection
        is_over = self._is_over(agent)
        self.env.step(None if is_over else spaces.taken(self.env.action_space(agent), action))
        if not is_over:
            for name, reward in self.env.rewards.items():
                totals[name] += float(reward)

    def _earned(self) -> dict[str, float]:
        if self._totals is None:
            raise Conflict("no episode has begun", hint="begin one with Environment.reset")
        return self._totals

    def _is_over(self, agent: str) -> bool:
        return bool(self.env.terminations[agent] or self.env.truncations[agent])

    def _observed(self, agent: str) -> Any:
        return spaces.written(self.env.observation_space(agent), self.env.observe(agent))

    def _agent(self, ctx: Context) -> str:
        if not ctx.agent:
            raise Invalid("which agent?", hint="use env.agent(name)")
        if ctx.agent not in self.env.possible_agents:
            raise NotFound(f"there is no agent {ctx.agent!r}")
        return ctx.agent
