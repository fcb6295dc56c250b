"""Rollouts that trainers can trust: episodes that end with a score or with a typed failure, and what is done with them.

Every public name is here, and each loads on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv.rl.batches import Rollouts as Rollouts
    from aenv.rl.batches import Stragglers as Stragglers
    from aenv.rl.batches import rollouts as rollouts
    from aenv.rl.driven import Driven as Driven
    from aenv.rl.exporting import Exported as Exported
    from aenv.rl.exporting import export as export
    from aenv.rl.files import Writer as Writer
    from aenv.rl.files import read as read
    from aenv.rl.generating import Generated as Generated
    from aenv.rl.generating import TokenAgent as TokenAgent
    from aenv.rl.groups import Group as Group
    from aenv.rl.groups import Tally as Tally
    from aenv.rl.groups import grouped as grouped
    from aenv.rl.models import OpenAIAgent as OpenAIAgent
    from aenv.rl.playing import rollout as rollout
    from aenv.rl.recording import Episode as Episode
    from aenv.rl.replaying import Replayed as Replayed
    from aenv.rl.replaying import replay as replay
    from aenv.rl.rescoring import rescore as rescore
    from aenv.rl.rewards import Reward as Reward
    from aenv.rl.rules import Rules as Rules
    from aenv.rl.tasks import Task as Task
    from aenv.rl.trajectory import Call as Call
    from aenv.rl.trajectory import Failed as Failed
    from aenv.rl.trajectory import Scored as Scored
    from aenv.rl.trajectory import Tokens as Tokens
    from aenv.rl.trajectory import Trajectory as Trajectory
    from aenv.rl.trajectory import Turn as Turn

_HOME = {
    "batches": ("Rollouts", "Stragglers", "rollouts"),
    "driven": ("Driven",),
    "exporting": ("Exported", "export"),
    "generating": ("Generated", "TokenAgent"),
    "files": ("Writer", "read"),
    "groups": ("Group", "Tally", "grouped"),
    "models": ("OpenAIAgent",),
    "replaying": ("Replayed", "replay"),
    "rescoring": ("rescore",),
    "rewards": ("Reward",),
    "playing": ("rollout",),
    "recording": ("Episode",),
    "rules": ("Rules",),
    "tasks": ("Task",),
    "trajectory": ("Call", "Failed", "Scored", "Tokens", "Trajectory", "Turn"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_MODULE_OF]  # noqa: PLE0604 - names, all of them strings


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'aenv.rl' has no attribute {name!r}")
    value = getattr(import_module(f"aenv.rl.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
