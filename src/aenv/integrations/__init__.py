"""Other projects' programs on our sandboxes. Each module needs its project's package, and nothing else imports it."""

from __future__ import annotations

from typing import NamedTuple


class Framework(NamedTuple):
    """A trainer that plugs in."""

    package: str
    """What it is called on PyPI."""
    tested: str
    """The version that our tests run with."""
    module: str
    """What has the ``check`` that ``aenv train-check`` runs."""


FRAMEWORKS = {
    "agentlightning": Framework("agentlightning", "1.0", "aenv.integrations.agent_lightning"),
    "areal": Framework("areal", "1.0", "aenv.integrations.areal"),
    "gymnasium": Framework("gymnasium", "1.4", "aenv.integrations.gymnasium.checking"),
    "openenv": Framework("openenv", "0.10", "aenv.integrations.openenv"),
    "ray": Framework("ray", "2.60", "aenv.integrations.ray"),
    "rllib": Framework("ray", "2.60", "aenv.integrations.rllib"),
    "sb3": Framework("stable-baselines3", "2.9", "aenv.integrations.stable_baselines3"),
    "skyrl": Framework("skyrl-gym", "0.4", "aenv.integrations.skyrl"),
    "trl": Framework("trl", "1.16", "aenv.integrations.trl"),
    "verifiers": Framework("verifiers", "0.4", "aenv.integrations.verifiers"),
    "verl": Framework("verl", "0.9", "aenv.integrations.verl"),
}
"""By the name of the extra that installs them."""
