"""A project's own MCP server, FastMCP's or the official SDK's, behind our routes.

It answers ``/mcp`` itself, so resources, prompts, sampling and elicitation work as its author wrote them; the tools
marked with ``@register_tool`` beside it are added to it, and its tools are callable at ``/tools`` like any other.
A server on the older line of the SDK knows sessions only: single exchanges of 2026-07-28 are then answered by us.
"""

from aenv.runtime.wrapped.mount import Wrapped

__all__ = ["Wrapped"]
