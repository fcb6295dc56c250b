"""Services of others as projects: MCP servers, HTTP services with an OpenAPI description, A2A agents.

``aenv add`` reads such a service once and writes a project, whose module calls ``serve`` of one of these. What the
service was then is a file of the project, so that the tools of a published version do not change beneath it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aenv import config
from aenv.errors import Invalid, SandboxLost

CONNECT = 20.0
"""Seconds to reach a host."""


class Found(NamedTuple):
    """What a project of a service is made of."""

    name: str
    """What the service calls itself."""
    about: str
    """What it says of itself, in a line."""
    stored: dict[str, Any]
    """What its project keeps of it."""
    tools: dict[str, Any]
    """What each of its tools is made of, to tell whether it changed."""
    words: dict[str, str]
    """What stands in the template of its module, as Python."""
    allow: tuple[str, ...] = ()
    """Hosts that it is reached at."""
    secrets: tuple[str, ...] = ()
    left_out: Mapping[str, str] = MappingProxyType({})
    """What could not become a tool, and why."""


def usable_name(text: str) -> str:
    """The name of a project that is called after ``text``; empty when nothing is left of it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-")


def host_of(url: str, *, what: str = "the address") -> str:
    """Where a URL leads, as an allow-list has it."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (KeyError, ValueError):
        raise Invalid(f"{what} {url!r} is no http or https URL", hint="write it as https://host/path") from None
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise Invalid(f"{what} {url!r} has no host, or a password", hint="give credentials as secrets, not in the URL")
    return f"[{parts.hostname}]:{port}" if ":" in parts.hostname else f"{parts.hostname}:{port}"


def is_url(source: str) -> bool:
    return bool(re.match(r"https?://", source))


def read_stored(path: Path) -> dict[str, Any]:
    """What a project keeps of its service."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise Invalid(f"{path.name} cannot be read: {exc}", hint="'aenv add' writes it, with --update anew") from exc
    if not isinstance(found, dict):
        raise Invalid(f"{path.name} is no JSON object", hint="'aenv add' writes it, with --update anew")
    return found


def secret(name: str) -> str:
    """The value of a secret of this instance; without it, nothing can be asked of the service."""
    if value := config.named(name):
        return value
    raise SandboxLost(
        f"the secret {name} is not set",
        hint=f"'aenv secret set {name}' on a platform; on this machine, environment_variables={{{name!r}: ...}}",
    )


def line(name: str) -> str:
    """The value of a secret that goes into a header. What does not fit there is not tried: errors would show it."""
    value = secret(name)
    if value.isascii() and value.isprintable():
        return value
    raise SandboxLost(
        f"the secret {name} is not one line of ASCII, which a header takes",
        hint="set it anew, without the line break at its end",
    )


def bearer(name: str | None) -> dict[str, str]:
    """The header for a secret that is a token, where there is one."""
    return {"Authorization": f"Bearer {line(name)}"} if name else {}


def option(name: str, value: Any) -> str:
    """An argument of ``serve`` in a project's module, where there is one."""
    return f"\n    {name}={python(value)}," if value else ""


def python(value: Any) -> str:
    """A value of JSON as Python has it."""
    return "True" if value is True else json.dumps(value, ensure_ascii=False)
