"""SkyRL's environments on instances of ours: ``skyrl.py`` plays keypads; some lose their instance on the way."""

import json
import sys
from typing import Any

import skyrl_gym

from aenv import AEnvError
from aenv.client.sync import wait
from aenv.integrations.checking import lose_episode
from aenv.integrations.skyrl import AenvTextEnv, register
from aenv.rl import Rules

PROMPT = [{"role": "user", "content": "Press the key that the display shows."}]


def press(key: int) -> str:
    return f'I press it.\n<tool_call>\n{{"name": "press", "arguments": {{"key": {key}}}}}\n</tool_call>'


def made(digit: int, *, rules: Rules | None = None, **extras: Any) -> AenvTextEnv:
    env = skyrl_gym.make("keypad", extras={"task": {"reset": {"digit": digit}}, **extras}, rules=rules)
    assert isinstance(env, AenvTextEnv)
    return env


def play(digit: int, key: int, *, lost: bool = False, **extras: Any) -> float:
    """The sum of the rewards of one episode, as SkyRL's generator takes it."""
    env = made(digit, **extras)
    conversation, _ = env.init(PROMPT)
    assert [message["role"] for message in conversation] == ["system", "user", "user"]
    assert '"name":"press"' in conversation[0]["content"]
    assert conversation[2]["content"] == f"The display shows {digit}."
    total = 0.0
    for words in (press(key), press(9), "I have pressed it."):
        step = env.step(words)
        total += step["reward"]
        if step["done"]:
            break
        if lost:
            wait(lose_episode(env.driven))
    else:
        raise AssertionError("it goes on")
    assert env.driven.trajectory is not None
    assert env.driven.trajectory.reward == total
    env.close()
    return total


def told(digit: int) -> list[str]:
    """What the model is told of its calls."""
    env = made(digit)
    env.init(PROMPT)
    said = [env.step(words)["observations"] for words in (press(digit), press(9), "<tool_call>no JSON</tool_call>")]
    env.close()
    return [message["content"] for messages in said for message in messages]


def raised(digit: int) -> str:
    """What comes of an episode that cannot go on elsewhere."""
    env = made(digit, rules=Rules())
    env.init(PROMPT)
    wait(lose_episode(env.driven))
    try:
        env.step(press(digit))
    except AEnvError as exc:
        return exc.code
    return ""


if __name__ == "__main__":
    register("keypad")
    found = {
        "scores": [play(digit, key, lost=digit % 2 == 1) for digit in range(5) for key in (digit, (digit + 1) % 5)],
        "cut": play(3, 3, max_turns=1),
        "told": told(2),
        "raised": raised(2),
    }
    json.dump(found, sys.stdout)
