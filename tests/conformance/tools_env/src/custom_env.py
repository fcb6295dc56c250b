"""The tools the conformance suite calls on the runtime's own endpoint, with its names, texts and delays.

`test_simple_text` comes first: one scenario calls whatever tool is listed first, without arguments.
"""

import asyncio
import base64
import io
import wave
from typing import Annotated, Any

from pydantic import Field

from aenv import Audio, Context, Image, ToolResult, register_tool

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
"""One red pixel."""

STEP = 0.05
"""Seconds between two notifications of one call."""

SCHEMA_2020_12: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def silence(seconds: float = 0.01, rate: int = 8000) -> bytes:
    """A WAV file of nothing."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(1)
        sound.setframerate(rate)
        sound.writeframes(b"\x80" * int(seconds * rate))
    return buffer.getvalue()


@register_tool
def test_simple_text() -> str:
    """Answer with one line of text."""
    return "This is a simple text response for testing."


@register_tool
def test_image_content() -> Image:
    """Answer with an image."""
    return Image(PNG)


@register_tool
def test_audio_content() -> Audio:
    """Answer with a sound."""
    return Audio(silence())


@register_tool
def test_embedded_resource() -> ToolResult:
    """Answer with a resource inside the result."""
    resource = {
        "uri": "test://embedded-resource",
        "mimeType": "text/plain",
        "text": "This is an embedded resource content.",
    }
    return ToolResult(content=[{"type": "resource", "resource": resource}])


@register_tool
def test_multiple_content_types() -> ToolResult:
    """Answer with text, an image and a resource."""
    resource = {
        "uri": "test://mixed-content-resource",
        "mimeType": "application/json",
        "text": '{"test":"data","value":123}',
    }
    return ToolResult(
        content=[
            {"type": "text", "text": "Multiple content types test:"},
            Image(PNG).block(),
            {"type": "resource", "resource": resource},
        ]
    )


@register_tool
def test_error_handling() -> str:
    """Fail on every call."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@register_tool
async def test_tool_with_progress(ctx: Context) -> str:
    """Report progress three times."""
    for done in (0, 50):
        ctx.progress(done, 100)
        await asyncio.sleep(STEP)
    ctx.progress(100, 100)
    return "Tool with progress executed successfully"


@register_tool
async def test_tool_with_logging(ctx: Context) -> str:
    """Log three times."""
    ctx.logger.info("Tool execution started")
    await asyncio.sleep(STEP)
    ctx.logger.info("Tool processing data")
    await asyncio.sleep(STEP)
    ctx.logger.info("Tool execution completed")
    return "Tool with logging executed successfully"


@register_tool
async def test_logging_tool(ctx: Context) -> str:
    """Log once. A client of the stateless revision sees it only when its request asks for logs."""
    ctx.logger.info("Log message from the logging tool")
    return "Logging tool executed successfully"


@register_tool
async def test_streaming_elicitation(ctx: Context) -> str:
    """Report progress and answer. Tools of this endpoint never ask the client anything."""
    ctx.progress(1, 2)
    await asyncio.sleep(STEP)
    ctx.progress(2, 2)
    return "Nothing was asked"


@register_tool
async def test_reconnection(ctx: Context) -> str:
    """Log, which opens an event stream in a session, take a moment and answer."""
    ctx.logger.info("Reconnection test started")
    await asyncio.sleep(STEP)
    return "Reconnection test completed successfully"


@register_tool(description="Tool with JSON Schema 2020-12 features", input_schema=SCHEMA_2020_12)
def json_schema_2020_12_tool(
    name: str | None = None,
    address: dict[str, str] | None = None,
    contactMethod: str | None = None,
    phone: str | None = None,
    email: str | None = None,
) -> dict[str, Any]:
    """Give back what was received."""
    given = {"name": name, "address": address, "contactMethod": contactMethod, "phone": phone, "email": email}
    return {key: value for key, value in given.items() if value is not None}


@register_tool
def lookup_by_region(
    region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})], query: str = "all"
) -> dict[str, str]:
    """Give back a parameter that also travels as a header.

    Args:
        region: where to look
        query: what to look for
    """
    return {"region": region, "query": query}
