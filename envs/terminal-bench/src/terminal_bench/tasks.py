"""Task directories as Harbor writes them: what they say, and whether it can be done here."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from aenv.errors import Invalid, did_you_mean
from terminal_bench.recipes import NotPlain, Recipe, recipe

PROJECT = Path(__file__).resolve().parents[2]
TASKS = PROJECT / "tasks"
_CONFIG = json.loads((PROJECT / "config.json").read_text())
PROJECT_NAME, VERSION = str(_CONFIG["name"]), str(_CONFIG["version"])
_NETWORKS = {"none": "no-network", "full": "public"}
"""What Harbor calls the networks of an instance."""
_ROOT = (None, "", "root", 0, "0")
_TEMPLATE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")


class HarborTask:
    """One task: ``task.toml``, ``instruction.md``, ``environment/``, ``solution/`` and ``tests/``."""

    def __init__(self, directory: Path) -> None:
        self.id = directory.name
        self.directory = directory
        try:
            self.config: dict[str, Any] = tomllib.loads((directory / "task.toml").read_text())
        except (OSError, ValueError) as exc:
            raise Invalid(f"task {self.id}: its task.toml cannot be read: {exc}") from exc

    @property
    def instruction(self) -> str:
        return (self.directory / "instruction.md").read_text()

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self._table("environment")

    @cached_property
    def verifier(self) -> dict[str, Any]:
        return self._table("verifier")

    @property
    def image(self) -> str:
        """The image that was built of it already, if it names one."""
        return str(self.environment.get("docker_image") or "")

    @property
    def separate(self) -> bool:
        """Whether its verifier asks for an environment of its own."""
        default = "separate" if "environment" in self.verifier else "shared"
        return bool(self.verifier.get("environment_mode", default) == "separate")

    @property
    def artifacts(self) -> list[str]:
        """What a verifier in an environment of its own gets to see of the agent's."""
        found = [
            entry if isinstance(entry, str) else str(entry["source"]) for entry in self.config.get("artifacts", ())
        ]
        return ["/logs/artifacts", *found]

    @property
    def own_tests(self) -> bool:
        """Whether the verifier's environment is described beside its tests."""
        return self.separate and (self.directory / "tests" / "Dockerfile").is_file()

    def recipe(self) -> Recipe:
        """How its environment is made, where no image of it is needed."""
        return recipe(self.directory / "environment")

    def verifier_recipe(self) -> Recipe:
        """The same for a verifier that asks for an environment of its own."""
        return recipe(self.directory / "tests") if self.own_tests else self.recipe()

    def wrong(self, *, built: bool) -> str:
        """Why it cannot be done here; empty when it can. ``built``: in an image of its own."""
        environment, verifier = self.environment, self.verifier
        if "steps" in self.config:
            return "it has several steps"
        if str(environment.get("os", "linux")).lower() != "linux":
            return "it is not for Linux"
        for name in ("gpus", "tpu", "mcp_servers"):
            if environment.get(name):
                return f"it asks for {name}"
        if (self.directory / "environment" / "docker-compose.yaml").exists():
            return "it has several containers"
        if any(self._table(role).get("user") not in _ROOT for role in ("agent", "verifier")):
            return "it names the user that commands run as"
        if built and self.separate:
            return "its verifier asks for a container of its own, and the image of an instance is the agent's"
        given = _network()
        default = "public" if environment.get("allow_internet", True) else "no-network"
        for wanted in (environment.get("network_mode", default), verifier.get("network_mode")):
            if wanted not in (None, given):
                return f"its network is {wanted!r}, and this project's is {given!r}: see with_tasks.py --network"
        try:
            if not built:
                self.recipe()
                self.verifier_recipe()
        except NotPlain as exc:
            return str(exc)
        return ""

    def variables(self, given: Mapping[str, str], *tables: str) -> dict[str, str]:
        """The variables that ``task.toml`` asks for, filled in from those of the instance."""
        found: dict[str, str] = {}
        for table in tables:
            for name, value in self._table(table).get("env", {}).items():
                found[name] = _TEMPLATE.sub(lambda part: self._given(part, given), str(value))
        return found

    def _given(self, part: re.Match[str], given: Mapping[str, str]) -> str:
        if part[1] not in given and part[2] is None:
            hint = f"give it as environment_variables={{{part[1]!r}: ...}}"
            raise Invalid(f"task {self.id} needs the variable {part[1]}", hint=hint)
        return given.get(part[1], part[3] or "")

    def _table(self, name: str) -> dict[str, Any]:
        return dict(self.config.get(name, {}))


def names(root: Path = TASKS) -> list[str]:
    """All tasks of a directory."""
    return sorted(path.parent.name for path in root.glob("*/task.toml"))


def find(name: str, root: Path = TASKS) -> HarborTask:
    """The task of that name."""
    if name not in (known := names(root)):
        raise Invalid(f"there is no task {name[:100]!r}", hint=did_you_mean(name, known))
    return HarborTask(root / name)


def _network() -> str:
    found = _CONFIG["deployConfig"].get("network", "full")
    return "allowlist" if isinstance(found, dict) else _NETWORKS[found]
