"""Where a spawner is, what it may use, and what every instance of it has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from aenv.engines.egress import clients
from aenv.engines.process.cgroups import Tree
from aenv.engines.process.freezer import Freezer
from aenv.engines.process.powers import Powers
from aenv.project.builtin import builtin_root

HIDDEN = [str(builtin_root().resolve())]
"""What no sandbox sees: the built-in environments, with answers to their tasks. One that runs is its own project."""


class Site(NamedTuple):
    """One spawner's surroundings."""

    directory: Path
    isolation: str
    powers: Powers
    users: int
    """The machine's user that is root inside; those that follow are for instances."""
    groups: Tree | None
    spare: bool = True
    """Whether a zygote in use keeps an instance ready for whoever comes next."""
    freezer: Freezer | None = None
    """Holds instances that nobody calls, where this machine can."""

    def network(self, spec: dict[str, Any]) -> str:
        """``none``, ``proxy`` or ``full``."""
        wanted = spec["network"]
        if not self.powers.namespaces:
            return "full"  # nothing else can be had; strict isolation refuses to start
        if wanted is None:
            wanted = "none" if self.isolation == "strict" else "full"
        return wanted if isinstance(wanted, str) else "proxy"

    def why_not_forked(self, spec: dict[str, Any]) -> str:
        """Why instances of a spec cannot be forked while they live; empty where they can."""
        powers = self.powers
        reasons = {
            "its project does not say that it is forkable": not spec["forkable"],
            "strict isolation leaves no instance the calls that it takes": self.isolation == "strict",
            "it has volumes, which one instance has at a time": bool(spec.get("volumes")),
            "there is a second sandbox beside it": bool(spec.get("second")),
            "this machine isolates no instance well enough for it ('aenv doctor' says why)": not (
                powers.privileged and powers.namespaces and powers.overlay and powers.cgroups and powers.seccomp
            ),
        }
        return next((why for why, holds in reasons.items() if holds), "")

    def variables(self, spec: dict[str, Any]) -> dict[str, str]:
        """What every instance has, and its zygote when it imports."""
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/home/sandbox" if self.powers.namespaces else os.path.expanduser("~"),
            "LANG": "C.UTF-8",
            "USER": "sandbox",
        }
        return variables | clients.variables(spec["network"]["allow"]) if self.network(spec) == "proxy" else variables
