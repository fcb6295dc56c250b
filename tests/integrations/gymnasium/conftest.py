"""An engine for blocking clients, and environments that were Gymnasium's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.client.sync import wait
from tests.rl.bench import Bench, benches, write_env

WALK = (Path(__file__).parent / "walk.py").read_text()
PUBLISHED = "\nfrom aenv.integrations.gymnasium import publish\n\n"
ODD = """
import gymnasium
from gymnasium import spaces

class Odd(gymnasium.Env):
    observation_space = action_space = spaces.Discrete(2)

    def __init__(self, reward):
        self.reward = reward

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        if self.reward == "raise":
            raise RuntimeError("it is broken")
        return 0, float(self.reward), False, False, {}
"""
LIAR = """
import sys
from aenv import register_function

DISCRETE = {"type": "discrete", "n": 2, "start": 0, "dtype": "int64"}
ANSWERS = {
    "spaces": {"observation": {"type": "box", "dtype": "object", "shape": [-1]}, "action": DISCRETE},
    "reset": {"observation": "much"},
    "step": {"observation": 0, "reward": None, "terminated": 0, "truncated": 0, "info": {}},
}
WELL = {"spaces": {"observation": DISCRETE, "action": DISCRETE}, "reset": {"observation": 1, "info": {}}, "step": {}}

def said(what):
    return (ANSWERS if sys.argv[1] == what else WELL)[what]

@register_function
def gymnasium_spaces() -> dict:
    return said("spaces")

@register_function
def gymnasium_play(moves: list) -> list:
    return [said(kind) for _, kind, _ in moves] if sys.argv[1] != "many" else []
"""
DEAF = """
import gymnasium
from gymnasium import spaces

class Deaf(gymnasium.Env):
    observation_space = action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        if options:
            raise RuntimeError("it takes no options")
        return 0, {}

    def step(self, action):
        if action == 2:
            raise RuntimeError("it takes no twos")
        return action, 1.0, False, False, {}
"""
COUNTER = """
from aenv import Context, register_reset, register_reward, register_tool

state = {"count": 0}

@register_reset
def begin(by: int = 0) -> str:
    state["count"] = by
    return f"it is {by}"

@register_tool
def add(number: int) -> str:
    if number > 100:
        raise ValueError("too much")
    state["count"] += number
    return str(state["count"])

@register_tool
def submit() -> str:
    return "done"

@register_reward
def count(factor: float = 1.0) -> float:
    return state["count"] * factor
"""


@pytest.fixture(scope="package")
def bench() -> Iterator[Bench]:
    """An engine in the background, where blocking clients wait."""
    opened = benches()
    found = wait(opened.__aenter__())
    try:
        write_env(found.home, "walk", f"{WALK}{PUBLISHED}publish(Walk)\n")
        write_env(found.home, "short", f"{WALK}{PUBLISHED}publish(lambda ctx: Walk(int(ctx.arguments[0])))\n")
        write_env(found.home, "moody", f"{WALK}{PUBLISHED}publish(Moody)\n")
        write_env(found.home, "broken", f"{PUBLISHED}publish(lambda: 1 / 0)\n")
        write_env(found.home, "odd", f"{ODD}{PUBLISHED}publish(lambda ctx: Odd(ctx.arguments[0]))\n")
        write_env(found.home, "liar", LIAR)
        write_env(found.home, "deaf", f"{DEAF}{PUBLISHED}publish(Deaf)\n")
        write_env(found.home, "counter", COUNTER)
        write_env(found.home, "once", COUNTER.replace("@register_reset\n", ""))
        yield found
        wait(found.empty())
    finally:
        wait(opened.__aexit__(None, None, None))
