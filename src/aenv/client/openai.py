"""Tools as OpenAI's API takes them, under names that it allows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

_ALLOWED = re.compile(r"[A-Za-z0-9_-]{1,64}")


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tools of a ``tools/list`` in that form, and which tool each name there means."""
    found = []
    names = {tool["name"]: tool["name"] for tool in tools if _ALLOWED.fullmatch(tool["name"])}
    for tool in tools:
        name = tool["name"] if tool["name"] in names else openai_name(tool["name"], names)
        names[name] = tool["name"]
        function = {
            "name": name,
            "description": tool.get("description") or "",
            "parameters": tool["inputSchema"],
        }
        found.append({"type": "function", "function": function})
    return found, names


def openai_name(tool: str, taken: Mapping[str, str]) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", tool)[:64]
    if name in taken or len(tool) > 64:
        name = f"{name[:55]}_{sha256(tool.encode()).hexdigest()[:8]}"
    return name
