"""Puts the agent of second containers, compiled, into a wheel, where this machine has a compiler."""

from __future__ import annotations

import importlib.util
import platform
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src", "aenv", "agent")


class CustomBuildHook(BuildHookInterface):
    """A wheel with the program is one for its kind of machine; one without it is one for all."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        sources = Path(self.root) / SOURCES
        recipe = _recipe(sources / "recipe.py")
        self._folder = tempfile.TemporaryDirectory(prefix="aenv-agent-")
        made = []
        for architecture in recipe.ARCHITECTURES:
            name = recipe.file_name(architecture)
            try:
                path = recipe.make(sources, architecture, Path(self._folder.name) / name)
            except recipe.NotMade as exc:
                self.app.display_info(f"without the agent for {architecture}: {exc}")
                continue
            made.append(architecture)
            build_data["force_include"][str(path)] = f"aenv/agent/bin/{name}"
        if platform.machine() in made:
            # It is static, and so runs with whatever C library a system has.
            machine = platform.machine()
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux2014_{machine}.musllinux_1_1_{machine}"
        elif made:
            build_data["force_include"] = {
                path: name for path, name in build_data["force_include"].items() if "agent/bin" not in name
            }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _recipe(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
