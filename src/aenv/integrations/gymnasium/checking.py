"""Whether Gymnasium, as it is installed here, can play in an instance."""

from __future__ import annotations

import gymnasium

from aenv.client.sync import wait
from aenv.integrations.checking import ENV, LOOK, TASK, WRITE, judge, lose
from aenv.integrations.gymnasium import register
from aenv.integrations.gymnasium.envs import AenvEnv
from aenv.integrations.gymnasium.faces import Tools


def check() -> str:
    """Play an episode whose instance is lost on the way."""
    env = gymnasium.make(register(ENV), face=Tools(TASK, max_steps=2)).unwrapped
    assert isinstance(env, AenvEnv)
    try:
        env.reset(seed=1)
        env.step(WRITE)
        before = env.instance.instance_id
        wait(lose(env.instance))
        _, reward, *_ = env.step(LOOK)
        return judge(reward, before, env.instance.instance_id)
    finally:
        env.close()
