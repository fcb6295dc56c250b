"""An instance in which a PettingZoo environment is published, as an ``AECEnv`` or a ``ParallelEnv``."""

from __future__ import annotations

from typing import Any

import numpy
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel

from aenv.client.environment import Environment
from aenv.client.sync import SyncEnvironment
from aenv.integrations.gymnasium import spaces


class AenvAEC(AECEnv):  # type: ignore[misc, unused-ignore]
    """The game of an instance: all its agents in one program. What the platform fails at is raised."""

    def __init__(self, env: str | Environment) -> None:
        """``env`` is what is played in; its instance starts here."""
        super().__init__()
        self.instance = SyncEnvironment.of(Environment(env) if isinstance(env, str) else env)
        try:
            told = self.instance.call_function("pettingzoo_spaces")
        except BaseException:
            self.close()
            raise
        self.metadata = {
            "name": self.instance.environment.env_name,
            "render_modes": [],
            "is_parallelizable": told["is_parallelizable"],
        }
        self.render_mode = None
        self.possible_agents = list(told["agents"])
        self.agents: list[str] = []
        self._spaces = {
            agent: {kind: spaces.made(given) for kind, given in both.items()} for agent, both in told["agents"].items()
        }

    def observation_space(self, agent: str) -> Any:
        """The same object each time, as PettingZoo wants it."""
        return self._spaces[agent]["observation"]

    def action_space(self, agent: str) -> Any:
        """The same."""
        return self._spaces[agent]["action"]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode."""
        self._play("reset", {"seed": seed, "options": options})

    def step(self, action: Any) -> None:
        """Move for the agent that is on; None for one whose episode is over."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            if action is not None:
                raise ValueError("when an agent is dead, the only valid action is None")
            given = None
        else:
            given = spaces.written(self.action_space(agent), action)
        self._play("step", given)

    def observe(self, agent: str) -> Any:
        """What an agent sees."""
        return spaces.read(self.observation_space(agent), self._seen[agent])

    def close(self) -> None:
        """Give the instance back."""
        self.instance.release()

    def _play(self, kind: str, given: Any) -> None:
        found = self.instance.call_function("pettingzoo_play", {"kind": kind, "given": given})
        self.agents, self.agent_selection = found["agents"], found["selection"]
        self._seen, self.rewards = found["observations"], found["rewards"]
        self._cumulative_rewards = found["cumulative"]
        self.terminations, self.truncations = found["terminations"], found["truncations"]
        self.infos = {agent: _info(info) for agent, info in found["infos"].items()}


def parallel_env(env: str | Environment) -> ParallelEnv:
    """The same as a ``ParallelEnv``, for games that PettingZoo calls parallelizable."""
    return aec_to_parallel(AenvAEC(env))


def _info(given: dict[str, Any]) -> dict[str, Any]:
    """What is told beside. Spaces draw with a mask that is an array."""
    mask = given.get("action_mask")
    return given if mask is None else {**given, "action_mask": numpy.asarray(mask, numpy.int8)}
