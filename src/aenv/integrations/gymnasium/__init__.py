"""Gymnasium, both ways: environments of ours for its trainers, and its environments published as ours.

``gymnasium.make("aenv.integrations.gymnasium:aenv/env", env="NAME")`` is one of ours.
"""

from __future__ import annotations

import gymnasium

from aenv.integrations.gymnasium.envs import AenvEnv as AenvEnv
from aenv.integrations.gymnasium.envs import AenvVectorEnv as AenvVectorEnv
from aenv.integrations.gymnasium.faces import Face as Face
from aenv.integrations.gymnasium.faces import Published as Published
from aenv.integrations.gymnasium.faces import Seen as Seen
from aenv.integrations.gymnasium.faces import Tools as Tools
from aenv.integrations.gymnasium.publishing import publish as publish
from aenv.integrations.gymnasium.spaces import ToolCalls as ToolCalls
from aenv.integrations.gymnasium.spaces import Words as Words


def register(name: str = "") -> str:
    """Let ``gymnasium.make`` know an environment; the id that it has there, ``aenv/`` and its name."""
    id = f"aenv/{name.replace('@', '-') or 'env'}"
    if id not in gymnasium.registry:
        gymnasium.register(
            id,
            entry_point=f"{__name__}:AenvEnv",
            vector_entry_point=f"{__name__}:AenvVectorEnv",
            kwargs={"env": name} if name else {},
            order_enforce=False,
            disable_env_checker=True,
        )
    return id


register()
