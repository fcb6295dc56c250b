"""The MCP endpoint for lifecycle and tools, on both kinds of revision.

2026-07-28: every POST stands for itself. 2025-11-25 and older: ``initialize`` opens a session, which owns its calls
in flight, its log level and its event streams, so that one client can never cancel or read another's.
A call is answered as JSON, and becomes an event stream only when there is something to say before the result.
"""

from aenv.runtime.mcp.endpoint import Endpoint, Reply
from aenv.runtime.mcp.messages import LEGACY, MODERN, is_modern

__all__ = ["LEGACY", "MODERN", "Endpoint", "Reply", "is_modern"]
