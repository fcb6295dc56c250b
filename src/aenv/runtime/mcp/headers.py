"""The routing headers of 2026-07-28 must say what the body says."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from aenv.runtime.answers import Request
from aenv.runtime.mcp.messages import HEADER_MISMATCH, Message, Refused

_INTEGER = re.compile(r"-?[0-9]+(\.0+)?")


def check_headers(request: Request, message: Message, meta_version: str, version: str) -> None:
    """The routing headers of 2026-07-28 must say what the body says."""
    if len(request.headers) != len(request.raw_headers):
        given = [header for header, _ in request.raw_headers]
        for header in (b"mcp-protocol-version", b"mcp-method", b"mcp-name"):
            if given.count(header) > 1:
                raise Refused(HEADER_MISMATCH, f"header {header.decode()} is given twice")
    if meta_version != version:
        raise Refused(HEADER_MISMATCH, "MCP-Protocol-Version differs from params._meta")
    if request.header(b"mcp-method") != message.method:
        raise Refused(HEADER_MISMATCH, "Mcp-Method differs from the body's method")
    name = message.params.name if message.params else None
    if message.method == "tools/call" and name is not None and _plain_header(request, b"mcp-name") != name:
        raise Refused(HEADER_MISMATCH, "Mcp-Name differs from params.name")


def check_mirrored(request: Request, headers: dict[str, bytes], arguments: Raw | UnsetType) -> None:
    try:
        given = msgspec.json.decode(arguments) if arguments is not UNSET else {}
    except RecursionError:
        given = {}
    for name, header in headers.items():
        value = given.get(name) if isinstance(given, dict) else None
        shown = _plain_header(request, header)
        if value is None and shown is None:
            continue
        if shown is None or value is None or not _same(shown, value):
            raise Refused(HEADER_MISMATCH, f"header {header.decode()} differs from argument {name!r}")


def _same(shown: str, value: Any) -> bool:
    if isinstance(value, bool):
        return shown == ("true" if value else "false")
    if isinstance(value, int):
        return _INTEGER.fullmatch(shown) is not None and float(shown) == value
    return bool(shown == value)


def _plain_header(request: Request, name: bytes) -> str | None:
    """A header's text; what does not fit in one travels as ``=?base64?...?=``."""
    value = request.headers.get(name)
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if not (text.startswith("=?base64?") and text.endswith("?=")):
        return text
    try:
        coded = text[len("=?base64?") : -len("?=")]
        decoded = base64.b64decode(coded, validate=True)
        if base64.b64encode(decoded).decode() != coded:
            raise ValueError("not canonical")
        return decoded.decode()
    except (binascii.Error, ValueError) as exc:
        raise Refused(HEADER_MISMATCH, f"header {name.decode()} is not valid base64") from exc
