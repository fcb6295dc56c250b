"""A part of a composition, and, by itself, what one is measured beside."""

from aenv import register_tool


@register_tool
def echo(text: str) -> str:
    return text
