"""Environments of ours for SkyRL: ``register("NAME")``, and ``skyrl_gym.make("NAME", extras=...)`` plays an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from aenv.client.sync import wait
from aenv.errors import AEnvError, from_wire
from aenv.integrations.checking import ENV, LOOK, TASK, WRITE, judge, lose_episode
from aenv.rl.driven import Driven
from aenv.rl.generating import hermes
from aenv.rl.models import called, opening
from aenv.rl.recording import Over
from aenv.rl.rules import Rules

OFFER = """\
You may call these tools:
{tools}
For each call, write its name and arguments as JSON:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def register(env: str, id: str = "") -> str:
    """Let SkyRL know an environment, in the process that makes it; the id that it has there."""
    skyrl_gym.register(id or env, entry_point=f"{__name__}:AenvTextEnv", kwargs={"env": env})
    return id or env


class AenvTextEnv(BaseTextEnv):
    """One episode, in an instance of its own. The model writes calls of tools, until it writes none.

    There is no mask in SkyRL's environments: an episode whose instance is lost goes on in another, or the failure is
    raised. No step returns a reward of what failed.
    """

    def __init__(
        self, env: str, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, rules: Rules | None = None
    ) -> None:
        """``extras`` is the row of the data set; of it ``task``, ``seed`` and ``max_turns`` are looked at."""
        super().__init__()
        given = dict(extras or {})
        self.max_turns = int(given.get("max_turns", 10))
        self.driven = Driven(env, given.get("task"), given.get("seed"), rules=rules)
        """The episode; ``driven.trajectory`` is what there is of it, once it is over."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Begin the episode: the prompt, with the tools before it, and what is seen after it."""
        return wait(self._begin(prompt)), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """What the model wrote, and what came of it. An episode ends without a call, or after ``max_turns``."""
        return wait(self._step(action))

    def close(self) -> None:
        """Give the instance back."""
        wait(self.driven.abandon())

    async def _begin(self, prompt: list[dict[str, str]]) -> list[dict[str, str]]:
        seen = await self.driven.begin()
        tools = await self.driven.list_openai_tools()
        offer = OFFER.format(tools="\n".join(msgspec.json.encode(tool).decode() for tool in tools))
        task = self.driven.task
        conversation = [{"role": "system", "content": f"{task.system}\n\n{offer}".strip()}, *prompt]
        if first := opening(task, seen):
            conversation.append({"role": "user", "content": first})
        self.driven.episode.hear(*conversation)
        return conversation

    async def _step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        words, calls = hermes(action)
        episode = self.driven.episode
        try:
            await episode.say({"role": "assistant", "content": action})
            said = [{"role": "user", "content": await called(episode, call)} for call in calls]
            episode.hear(*said)
        except Over:  # ``end`` tells why
            said = []
        except AEnvError:
            await self.driven.abandon()
            raise
        if said and self.turns < self.max_turns:
            return BaseTextEnvStepOutput(observations=said, reward=0.0, done=False, metadata={})
        trajectory = await self.driven.end(words)
        if failed := trajectory.failure:
            raise from_wire({"code": failed.kind, "message": failed.reason, "hint": failed.hint})
        return BaseTextEnvStepOutput(observations=[], reward=trajectory.reward, done=True, metadata={})


def check() -> str:
    """Play an episode whose instance is lost on the way."""
    if ENV not in skyrl_gym.registry:
        register(ENV)
    env = skyrl_gym.make(ENV, extras={"task": TASK})
    try:
        env.init([])
        env.step(_written(WRITE))
        before = env.driven.episode.instance_id
        wait(lose_episode(env.driven))
        env.step(_written(LOOK))
        after = env.driven.episode.instance_id
        return judge(env.step("It is done.")["reward"], before, after)
    finally:
        env.close()


def _written(call: Mapping[str, Any]) -> str:
    return f"<tool_call>{msgspec.json.encode(call).decode()}</tool_call>"
