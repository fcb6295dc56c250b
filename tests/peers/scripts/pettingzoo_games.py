"""PettingZoo's own tests on its games in instances of ours: ``pettingzoo_games.py``, in its project."""

import json
import os
import warnings
from typing import Any

from pettingzoo.classic import rps_v2, tictactoe_v3
from pettingzoo.test import api_test, parallel_api_test, seed_test

from aenv import AEnvError, Environment
from aenv.client.sync import wait
from aenv.integrations.checking import lose
from aenv.integrations.pettingzoo import AenvAEC, parallel_env

warnings.simplefilter("ignore")


def game(name: str) -> Environment:
    return Environment("games", environment_variables={"GAME": name})


def played(env: Any) -> list[Any]:
    """An episode in which everybody takes the lowest move that is allowed."""
    env.reset(seed=1)
    found = []
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        action = None if terminated or truncated else int(observation["action_mask"].argmax())
        found.append([agent, float(reward), bool(terminated), action, observation["observation"].tolist()])
        env.step(action)
    return found


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    other = Environment("mini-terminal")
    try:
        AenvAEC(other)
    except AEnvError as exc:
        found["other"] = [exc.code, other.instance_id]
    env = AenvAEC(game("tictactoe"))
    api_test(env, num_cycles=20)
    found["same"] = played(env) == played(tictactoe_v3.env())
    found["moves"] = len(played(env))
    wait(lose(env.instance.environment))
    try:
        env.reset()
    except AEnvError as exc:
        found["lost"] = exc.code
    env.close()
    seen = []

    def make() -> AenvAEC:
        seen.append(AenvAEC(game("rps")))
        return seen[-1]

    seed_test(make, num_cycles=5)
    for one in seen:
        one.close()
    both = parallel_env(game("rps"))
    parallel_api_test(both, num_cycles=20)
    theirs = rps_v2.parallel_env(max_cycles=5)
    told = []
    for face in (both, theirs):
        face.reset(seed=3)
        for moves in ((0, 1), (2, 2), (1, 0)):
            _, rewards, terminations, truncations, _ = face.step(dict(zip(face.agents, moves, strict=True)))
            told.append(
                [{name: float(value) for name, value in one.items()} for one in (rewards, terminations, truncations)]
            )
    found["together"] = told[:3] == told[3:]
    both.close()
    return found


if __name__ == "__main__":
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    print(json.dumps(main()))
