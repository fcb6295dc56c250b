"""Tools with small and with large bodies, on the event loop: what is between them and their caller is measured."""

from aenv import register_tool


@register_tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@register_tool
async def echo(text: str) -> str:
    """Say the same."""
    return text
