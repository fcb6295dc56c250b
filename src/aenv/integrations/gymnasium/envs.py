"""Instances as a Gymnasium environment, and as many at a time as a vector of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import gymnasium
import numpy
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from aenv.client.environment import Environment
from aenv.client.sync import wait
from aenv.errors import Invalid
from aenv.integrations.gymnasium.faces import Face, Seen
from aenv.integrations.gymnasium.instances import Instance
from aenv.integrations.gymnasium.players import RETRIES, Player
from aenv.rl.playing import template

R = TypeVar("R")
_MOST = 2**31


class AenvEnv(gymnasium.Env[Any, Any]):
    """An environment of ours, in an instance of its own."""

    def __init__(self, env: str | Environment, face: Face | None = None, *, retries: int = RETRIES) -> None:
        """``env`` is a name, or an ``Environment`` that is not started. ``face`` is how it is looked at: nothing for
        what ``publish`` has published, else ``Tools(...)``. ``retries`` is how often an episode goes on elsewhere."""
        self.metadata = {"render_modes": []}
        self.render_mode = None
        self._player = Player(Instance.like(template(env)), face, retries=retries)
        try:
            met = wait(self._player.open())
        except BaseException:
            self.close()
            raise
        self.observation_space, self.action_space = met.observation_space, met.action_space

    @property
    def instance(self) -> Environment:
        """The instance at the moment, for what Gymnasium has no word for. Another one, once it was lost."""
        return self._player.instance

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(_MOST)) if seed is None else seed
        seen = wait(self._player.reset(drawn, options or {}))
        return seen.observation, dict(seen.info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on with it."""
        seen = wait(self._player.step(action))
        return seen.observation, seen.reward, seen.terminated, seen.truncated, dict(seen.info)

    def close(self) -> None:
        """Give the instance back."""
        wait(self._player.close())


class AenvVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Instances of one environment that step at the same time."""

    def __init__(
        self,
        env: str | Environment,
        num_envs: int,
        faces: Sequence[Face] | None = None,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        retries: int = RETRIES,
        per_instance: int = 1,
    ) -> None:
        """``faces``: how each instance is looked at. ``per_instance``: how many environments that were published share
        an instance, and are lost with it; the rest is as in ``AenvEnv``."""
        if num_envs < 1 or (faces is not None and not len(faces) == len({id(face) for face in faces}) == num_envs):
            raise Invalid(f"{num_envs} environments want as many faces, each its own")
        if per_instance < 1 or (faces is not None and per_instance > 1):
            raise Invalid("an instance has one environment or more, and only one where faces are given")
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        like = template(env)
        self._players: list[Player] = []
        for place in range(num_envs):
            seat = place % per_instance
            if seat == 0:
                instance = Instance.like(like)
                instance.seats = min(per_instance, num_envs - place)
            self._players.append(Player(instance, faces[place] if faces else None, seat, retries=retries))
        try:
            met = self._all(player.open() for player in self._players)
        except BaseException:
            self.close()
            raise
        self.single_observation_space, self.single_action_space = met[0].observation_space, met[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._seen: list[Any] = [None] * num_envs
        self._over = numpy.zeros(num_envs, dtype=numpy.bool_)
        self._place: Any = create_empty_array(self.single_observation_space, n=num_envs)

    @property
    def instances(self) -> list[Environment]:
        """The instances at the moment, in the order of what is played in them."""
        return list(dict.fromkeys(player.instance for player in self._players))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in each; with a mask as the option ``reset_mask``, only in those."""
        super().reset(seed=seed if isinstance(seed, int) else None)
        given = dict(options or {})
        mask = given.pop("reset_mask", numpy.ones(self.num_envs, dtype=numpy.bool_))
        seeds: list[int | None] = [None] * self.num_envs
        if isinstance(seed, int):
            seeds = [seed + place for place in range(self.num_envs)]
        elif seed is not None:
            seeds = list(seed)
        chosen = [place for place in range(self.num_envs) if mask[place]]
        found = self._all(self._players[place].reset(self._drawn(seeds[place]), given) for place in chosen)
        infos: dict[str, Any] = {}
        for place, seen in zip(chosen, found, strict=True):
            self._seen[place], self._over[place] = seen.observation, False
            infos = self._add_info(infos, dict(seen.info), place)
        return self._observed(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Go on with each."""
        if self.autoreset_mode == AutoresetMode.DISABLED and self._over.any():
            raise Invalid("some episodes are over: call reset with options={'reset_mask': ...}")
        seeds = self.np_random.integers(_MOST, size=self.num_envs).tolist()  # whoever is ready first
        given = zip(iterate(self.action_space, actions), seeds, strict=True)
        found = self._all(self._stepped(place, *each) for place, each in enumerate(given))
        rewards = numpy.zeros(self.num_envs, dtype=numpy.float64)
        terminated, truncated = (numpy.zeros(self.num_envs, dtype=numpy.bool_) for _ in range(2))
        infos: dict[str, Any] = {}
        for place, (seen, after) in enumerate(found):
            rewards[place], terminated[place], truncated[place] = seen.reward, seen.terminated, seen.truncated
            info = dict(seen.info)
            if after is not None:
                last = {"final_obs": seen.observation, "final_info": info}
                infos, info = self._add_info(infos, last, place), dict(after.info)
            infos = self._add_info(infos, info, place)
            self._seen[place] = (after or seen).observation
        self._over = numpy.logical_or(terminated, truncated)
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            self._over = numpy.zeros(self.num_envs, dtype=numpy.bool_)
        return self._observed(), rewards, terminated, truncated, infos

    async def _stepped(self, place: int, action: Any, seed: int) -> tuple[Seen, Seen | None]:
        """What comes of one step, and of the reset after it where there is one."""
        player = self._players[place]
        if self._over[place]:
            return await player.reset(seed, {}), None
        seen = await player.step(action)
        if self.autoreset_mode == AutoresetMode.SAME_STEP and (seen.terminated or seen.truncated):
            return seen, await player.reset(seed, {})
        return seen, None

    def _drawn(self, seed: int | None) -> int:
        return int(self.np_random.integers(_MOST)) if seed is None else seed

    def _observed(self) -> Any:
        self._place = concatenate(self.single_observation_space, self._seen, self._place)
        return copy.deepcopy(self._place)

    def _all(self, work: Any) -> list[Any]:
        return wait(_all(list(work)))

    def close_extras(self, **kwargs: Any) -> None:
        """Give all instances back."""
        self._all(player.close() for player in self._players)


async def _all(work: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """All results, once all have ended; the first failure where there is one."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]
