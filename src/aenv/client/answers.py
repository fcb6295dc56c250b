"""What a sandbox answered outside MCP: its envelope, and the failure it may hold."""

from __future__ import annotations

from typing import Any

import msgspec

from aenv.errors import AEnvError, NetworkError, from_wire
from aenv.http import Response


def envelope(response: Response) -> dict[str, Any]:
    try:
        return msgspec.json.decode(response.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NetworkError(f"the answer (status {response.status}) is not the runtime's: {exc}") from exc


def data(response: Response) -> Any:
    """What was asked for, or the failure that came instead, raised."""
    if response.status != 200:
        raise error(response)
    body = envelope(response)
    if "data" not in body:
        raise NetworkError("the answer has no data: is this a sandbox's address?")
    return body["data"]


def error(response: Response) -> AEnvError:
    body = envelope(response)
    return from_wire({**body, "message": body.get("error")})


def reason(response: Response) -> str:
    return str(envelope(response).get("error") or response.status)
