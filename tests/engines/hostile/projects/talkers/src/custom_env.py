"""Author code that talks to the spawner: from a tool, or while it is imported when ``deed.txt`` names what to say."""

import os
from pathlib import Path

import _talk

from aenv import register_tool

_named = Path(__file__).parent.parent / "deed.txt"
AT_IMPORT = _talk.DEEDS[_named.read_text()]() if _named.exists() else ""


@register_tool
def talk(deed: str) -> str:
    return _talk.DEEDS[deed]()


@register_tool
def end(code: int) -> None:
    os._exit(code)


@register_tool
def fine() -> str:
    return "fine"
