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
        return to_json(msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value)
    except Exception as exc:  # an author's own serialiser may raise anything
        reason = str(exc) if isinstance(exc, NOT_JSON) else f"{type(exc).__name__}: {exc}"
        raise AuthorError(
            f"{who}() returned something that cannot be sent: {reason}",
            hint="return str, numbers, dict, list, dataclasses, pydantic models, bytes or aenv.Image",
        ) from exc


def tool_result(value: Any, result: Result, who: str) -> dict[str, Any]:
    """The ``content``, ``structuredContent`` and ``isError`` of a ``tools/call`` result."""
    if type(value) is str and result.schema is None:
        return {"content": [_text(value, who)], "isError": False}
    if isinstance(value, ToolResult):
        answer: dict[str, Any] = {"content": _content(value, who), "isError": value.is_error}
        if value.structured is not None:
            answer["structuredContent"] = msgspec.Raw(encode(value.structured, who))
        return answer
    blocks = _blocks(value, who)
    if blocks is not None and not result.declared:
        return {"content": blocks, "isError": False}
    returned = result.check(value)
    if blocks:  # a list that is declared as no more than that
        return {"content": blocks, "isError": False, "structuredContent": {"result": blocks}}
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
        return msgspec.Raw(encode({"content": _content(value, who), "is_error": value.is_error}, who))
    returned = result.check(value)
    if blocks := _blocks(value, who):
        return msgspec.Raw(encode(blocks if isinstance(value, (list, tuple)) else blocks[0], who))
    return msgspec.Raw(returned.json or encode(returned.value, who))


def data(value: Any, result: Result, who: str) -> msgspec.Raw:
    """A value as JSON for who reads it back as that type: nothing in it is content."""
    returned = result.check(value)
    return msgspec.Raw(returned.json or encode(returned.value, who))


def _blocks(value: Any, who: str) -> list[dict[str, Any]] | None:
    """Content blocks for what is content by itself, ``None`` for data."""
    if value is None:
        return []
    if (block := _block(value, who)) is not None:
        return [block]
    if isinstance(value, (list, tuple)):
        parts = [_block(item, who) for item in value]
        if any(part is not None for part in parts):
            return [part or _text(item, who) for part, item in zip(parts, value, strict=True)]
    return None


def _content(value: ToolResult, who: str) -> msgspec.Raw:
    if not isinstance(value.content, list) or not all(isinstance(block, dict) for block in value.content):
        raise AuthorError(
            f"{who}() returned a ToolResult whose content is not a list of blocks",
            hint='a block is a dict such as {"type": "text", "text": ...}',
        )
    return msgspec.Raw(encode(value.content, who))


def _text(value: Any, who: str) -> dict[str, Any]:
    if not isinstance(value, str):
        return {"type": "text", "text": encode(value, who).decode()}
    if not value.isascii():
        encode(value, who)  # half of a surrogate pair is found here, and not when the answer is written
    return {"type": "text", "text": value}


def _block(value: Any, who: str) -> dict[str, Any] | None:
    try:
        if isinstance(value, (Image, Audio)):
            return value.block()
        if isinstance(value, (bytes, bytearray, memoryview)):
            return _bytes_block(bytes(value))
        if hasattr(value, "save") and hasattr(value, "getbands"):  # a Pillow image
            buffer = io.BytesIO()
            value.save(buffer, format="PNG")
            return Image(buffer.getvalue()).block()
    except Exception as exc:
        raise AuthorError(
            f"{who}() returned a {type(value).__name__} that cannot be sent: {exc}",
            hint="give aenv.Image and aenv.Audio bytes, and convert a Pillow image to RGB or RGBA first",
        ) from exc
    return None


def _bytes_block(data: bytes) -> dict[str, Any]:
    kind = _RIFF.get(data[8:12]) if data[:4] == b"RIFF" else None
    kind = kind or next((mime for magic, mime in _MAGIC if data.startswith(magic)), None)
    if kind is None:
        resource = {"uri": "aenv://result", "mimeType": "application/octet-stream"}
        return {"type": "resource", "resource": {**resource, "blob": base64.b64encode(data).decode()}}
    return Image(data, kind).block() if kind.startswith("image/") else Audio(data, kind).block()
