"""JSON-RPC as MCP speaks it: revisions, error codes, and the messages that are read and written."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from aenv.runtime.answers import Request

MODERN = "2026-07-28"
LEGACY = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
META = "io.modelcontextprotocol/"

PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, UNSUPPORTED_VERSION, CANCELLED, PLATFORM = -32020, -32022, -32800, -32000
STATUS = {NO_METHOD: 404} | dict.fromkeys(
    (PARSE_ERROR, INVALID_REQUEST, INVALID_PARAMS, HEADER_MISMATCH, UNSUPPORTED_VERSION), 400
)
Id = str | int


def is_modern(request: Request) -> bool:
    """Whether a request belongs to the revisions without sessions, known to us or not."""
    version = request.header(b"mcp-protocol-version")
    return version is not None and version not in LEGACY


class Meta(
    Struct,
    rename={
        "version": META + "protocolVersion",
        "capabilities": META + "clientCapabilities",
        "log_level": META + "logLevel",
        "progress_token": "progressToken",
    },
):
    version: str | None = None
    capabilities: dict[str, Any] | None = None
    log_level: str | None = None
    progress_token: str | int | None = None


class Params(Struct, rename={"meta": "_meta", "request_id": "requestId", "version": "protocolVersion"}):
    name: str | None = None
    arguments: Raw | UnsetType = UNSET
    meta: Meta | None = None
    version: str | None = None
    request_id: Id | None = None
    level: str | None = None
    notifications: dict[str, Any] | None = None


class Message(Struct):
    jsonrpc: str
    method: str | UnsetType = UNSET
    id: Id | UnsetType = UNSET
    params: Params | None = None


_decode = msgspec.json.Decoder(Message).decode
encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """A JSON-RPC error on its way to the caller."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class BadMessage(Exception):
    def __init__(self, code: int, message: str, id: Id | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.id = id


def error(code: int, message: str, id: Id | None, data: Any = None) -> bytes:
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return encode({"jsonrpc": "2.0", "id": id, "error": error})


_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _anything(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except _NOT_JSON as exc:
        raise BadMessage(PARSE_ERROR, f"the body is not JSON: {exc}") from None


def parse(body: bytes) -> Message:
    try:
        message = _decode(body)
    except msgspec.ValidationError as exc:
        found = _anything(body)
        if isinstance(found, list):
            raise BadMessage(INVALID_REQUEST, "batches are not supported: send one message") from None
        id = found.get("id") if isinstance(found, dict) else None
        code = INVALID_PARAMS if "$.params" in str(exc) else INVALID_REQUEST
        raise BadMessage(code, str(exc), id if isinstance(id, (str, int)) else None) from None
    except _NOT_JSON as exc:
        raise BadMessage(PARSE_ERROR, f"the body is not JSON: {exc}") from None
    if message.jsonrpc != "2.0":
        id = None if message.id is UNSET else message.id
        raise BadMessage(INVALID_REQUEST, "jsonrpc must be '2.0'", id)
    return message
