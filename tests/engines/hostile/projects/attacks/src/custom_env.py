"""Author code that attacks: from a tool, and, where the project has a ``plan.json``, while it is imported."""

import json
from pathlib import Path
from typing import Any

import _attacks

from aenv import register_tool

_plan = Path(__file__).parent.parent / "plan.json"
AT_IMPORT = _attacks.run_all(json.loads(_plan.read_text())) if _plan.exists() else {}


@register_tool
def attack(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return _attacks.run(name, arguments)


@register_tool
def attack_all(plan: dict[str, Any]) -> dict[str, Any]:
    return _attacks.run_all(plan)


@register_tool
def at_import() -> dict[str, Any]:
    return AT_IMPORT
