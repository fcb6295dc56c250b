"""Where a spawner is, what it may use, and what every instance of it has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from aenv.engines.egress import clients
from aenv.engines.process.cgroups import Tree
from aenv.engines.process.powers import Powers


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

    def network(self, spec: dict[str, Any]) -> str:
        """``none``, ``proxy`` or ``full``."""
        wanted = spec["network"]
        if not self.powers.namespaces:
            return "full"  # nothing else can be had; strict isolation refuses to start
        if wanted is None:
            wanted = "none" if self.isolation == "strict" else "full"
        return wanted if isinstance(wanted, str) else "proxy"

    def variables(self, spec: dict[str, Any]) -> dict[str, str]:
        """What every instance has, and its zygote when it imports."""
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/home/sandbox" if self.powers.namespaces else os.path.expanduser("~"),
            "LANG": "C.UTF-8",
            "USER": "sandbox",
        }
        return variables | clients.variables(spec["network"]["allow"]) if self.network(spec) == "proxy" else variables
