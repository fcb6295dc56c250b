"""A tool that somebody else describes and validates: a server's, behind a sandbox of ours."""

from __future__ import annotations

from typing import Any

import msgspec

from aenv.errors import Invalid
from aenv.runtime.context import Context
from aenv.runtime.functions import Function, Timing
from aenv.runtime.registry import Mark
from aenv.runtime.schema import Result


class Foreign(Function):
    """A function of two arguments, those of the call as they came and its ``Context``, behind a listing of MCP."""

    def __init__(self, mark: Mark) -> None:
        listed: dict[str, Any] = mark.options["listed"]
        shown = {key: listed[key] for key in ("title", "annotations") if listed.get(key)}
        self.mark = mark._replace(options={**shown, "input_schema": listed["inputSchema"]})
        self.name = mark.name
        self.description = listed.get("description")
        self.arguments = _Published(listed["inputSchema"])  # type: ignore[assignment]
        self.result = Result(mark.function)
        self.result.schema = listed.get("outputSchema")
        self._function = mark.function
        self._context = None
        self._conversations = {}
        self._is_async = True

    async def call(self, arguments: dict[str, Any], context: Context, timing: Timing | None = None) -> Any:
        return await super().call({"arguments": arguments, "context": context}, context, timing)


class _Published:
    """Arguments whose schema and validation are somebody else's."""

    context = None

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def decode(self, given: Any, *, text: bool = False) -> dict[str, Any]:
        if not isinstance(given, bytes):
            return dict(given)
        try:
            return msgspec.json.decode(given, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as exc:
            raise Invalid(f"the arguments are not a JSON object: {exc}") from None
