"""From what a function returned to what goes on the wire. Nothing is ever turned into ``str()`` in silence."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec

from aenv.errors import AuthorError
from aenv.models import NOT_JSON, Audio, Image, ToolResult, to_json
from aenv.runtime.schema import Result

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


def encode(value: Any, who: str) -> bytes:
    """A value as JSON; an ``AuthorError`` that says what in it cannot be sent."""
    try:
        return to_json(value)
    except NOT_JSON as exc:
        raise AuthorError(
            f"{who}() returned something that cannot be sent: {exc}",
            hint="return str, numbers, dict, list, dataclasses, pydantic models, bytes or aenv.Image",
        ) from exc


def tool_result(value: Any, result: Result, who: str) -> dict[str, Any]:
    """The ``content``, ``structuredContent`` and ``isError`` of a ``tools/call`` result."""
    if type(value) is str and result.schema is None:
        return {"content": [{"type": "text", "text": value}], "isError": False}
    if isinstance(value, ToolResult):
        answer: dict[str, Any] = {"content": value.content, "isError": value.is_error}
        if value.structured is not None:
            answer["structuredContent"] = value.structured
        return answer
    if (blocks := _blocks(value, who)) is not None:
        return {"content": blocks, "isError": False}
    returned = result.check(value)
    raw = returned.json or encode(returned.value, who)
    text = returned.value if type(returned.value) is str else raw.decode()
    answer = {"content": [{"type": "text", "text": text}], "isError": False}
    if result.schema is not None and result.wrapped:
        answer["structuredContent"] = {"result": msgspec.Raw(raw)}
    elif raw[:1] == b"{":
        answer["structuredContent"] = msgspec.Raw(raw)
    return answer


def plain(value: Any, result: Result, who: str) -> msgspec.Raw:
    """A value as JSON for the plain HTTP routes; bytes and images travel as their content block."""
    if isinstance(value, ToolResult):
        return msgspec.Raw(encode({"content": value.content, "is_error": value.is_error}, who))
    if (blocks := _blocks(value, who)) is not None and value is not None:
        return msgspec.Raw(encode(blocks if isinstance(value, (list, tuple)) else blocks[0], who))
    returned = result.check(value)
    return msgspec.Raw(returned.json or encode(returned.value, who))


def _blocks(value: Any, who: str) -> list[dict[str, Any]] | None:
    """Content blocks for what is content by itself, ``None`` for data."""
    if value is None:
        return []
    if (block := _block(value)) is not None:
        return [block]
    if isinstance(value, (list, tuple)):
        parts = [_block(item) for item in value]
        if any(part is not None for part in parts):
            return [part or _text(item, who) for part, item in zip(parts, value, strict=True)]
    return None


def _text(value: Any, who: str) -> dict[str, Any]:
    return {"type": "text", "text": value if isinstance(value, str) else encode(value, who).decode()}


def _block(value: Any) -> dict[str, Any] | None:
    if isinstance(value, (Image, Audio)):
        return value.block()
    if isinstance(value, (bytes, bytearray)):
        return _bytes_block(bytes(value))
    if hasattr(value, "save") and hasattr(value, "getbands"):  # a Pillow image
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return Image(buffer.getvalue()).block()
    return None


def _bytes_block(data: bytes) -> dict[str, Any]:
    kind = _RIFF.get(data[8:12]) if data[:4] == b"RIFF" else None
    kind = kind or next((mime for magic, mime in _MAGIC if data.startswith(magic)), None)
    if kind is None:
        resource = {"uri": "aenv://result", "mimeType": "application/octet-stream"}
        return {"type": "resource", "resource": {**resource, "blob": base64.b64encode(data).decode()}}
    return Image(data, kind).block() if kind.startswith("image/") else Audio(data, kind).block()
