"""Registries: what a daemon is given to log in there, and what its complaints about them mean."""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

from aenv import config
from aenv.engines.docker.daemon import full, out_of_space
from aenv.errors import (
    AEnvError,
    Invalid,
    InvalidConfig,
    NetworkError,
    NotFound,
    RateLimited,
    SandboxError,
    Unauthorized,
)
from aenv.project.images import Reference

HEADER = "X-Registry-Auth"
_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_MOST_CONFIG = 1024 * 1024
_MOST_WORDS = 4096
"""Characters of a complaint in which its meaning is looked for."""

_NO_PLATFORM = ("no matching manifest", "no image found in", "does not match the specified platform")
_DENIED = ("unauthorized", "authentication required", "access denied", "denied:", "forbidden", "no basic auth")
_UNKNOWN = "manifest unknown"
_MISSING = (_UNKNOWN, "name unknown", "not found", "does not exist", "no such image")
_NOT_TLS = ("server gave http response to https client", "x509:", "certificate")
_UNREACHED = (
    *("connection refused", "no such host", "i/o timeout", "network is unreachable", "no route to host"),
    *("tls handshake", "dial tcp", "lookup ", "connection reset", "timeout exceeded", "deadline exceeded", "eof"),
    *("request canceled", "server misbehaving", "bad gateway", "service unavailable", "pinging container registry"),
)


def credentials(reference: Reference) -> dict[str, str]:
    """The header with which the daemon logs in for this image; it is as nobody where nothing is known for its registry.

    Taken from ``auths`` in Docker's ``config.json``, as ``docker login`` writes it. Credential helpers are not asked.
    """
    entry = _entry(reference.registry or _HUB[0])
    return {HEADER: base64.urlsafe_b64encode(json.dumps(entry).encode()).decode()}


def all_credentials() -> dict[str, str]:
    """The header with which a build pulls what it begins with, from whichever registry."""
    entries = {name: _login(name, found) for name, found in _auths().items()}
    found = {name: entry for name, entry in entries.items() if entry}
    return {"X-Registry-Config": base64.urlsafe_b64encode(json.dumps(found).encode()).decode()} if found else {}


def _entry(registry: str) -> dict[str, str]:
    for name, found in _auths().items():
        host = re.sub(r"^https?://", "", name).partition("/")[0]
        if host == registry or (host in _HUB and registry in _HUB):
            return _login(name, found)
    return {}


def _login(server: str, found: Any) -> dict[str, str]:
    """One entry of ``auths`` as the daemon takes it. An empty one means that a helper has it."""
    if not isinstance(found, dict):
        return {}
    if token := found.get("identitytoken"):
        return {"identitytoken": str(token), "serveraddress": server}
    try:
        user, colon, password = base64.b64decode(str(found.get("auth") or ""), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        hint = f"log in again: docker login {server}"
        raise InvalidConfig(f"what {_file()} has for {server} cannot be read", hint=hint) from None
    return {"username": user, "password": password.rstrip("\0"), "serveraddress": server} if colon else {}


def _file() -> Path:
    variables = config.environment()
    folder = variables.get("DOCKER_CONFIG") or str(Path(variables.get("HOME") or "/nonexistent", ".docker"))
    return Path(folder, "config.json")


def _auths() -> dict[str, Any]:
    file = _file()
    try:
        if not file.is_file():
            return {}
        with file.open("rb") as opened:
            found = json.loads(opened.read(_MOST_CONFIG)).get("auths") or {}
        return dict(found)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as exc:
        hint = "correct it, or remove it and log in again with 'docker login'"
        raise InvalidConfig(f"{file} cannot be read: {type(exc).__name__}", hint=hint) from None


def is_local(reference: Reference) -> bool:
    """Whether its registry is on the daemon's own machine, where Docker asks for no TLS."""
    return re.fullmatch(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", reference.registry) is not None


def meaning(message: str, reference: Reference, platform: str) -> AEnvError:
    """The error for what a daemon says when an image could not be got from a registry, or brought there."""
    registry, low = reference.registry or _HUB[0], _without_name(message[:_MOST_WORDS], reference).lower()
    if full(message):
        return out_of_space(message)
    if any(word in low for word in _NO_PLATFORM):
        hint = f"build it with --platform {platform}"
        return Invalid(f"{reference} is not there for {platform}: {message}", hint=hint)
    if _UNKNOWN in low:
        return _missing(registry, reference, message)
    if "toomanyrequests" in low or "too many requests" in low:
        hint = f"try later, or log in: docker login {registry}"
        return RateLimited(f"{registry} refuses more requests: {message}", hint=hint)
    if any(word in low for word in _DENIED):
        hint = f"look whether the name is right, and log in: docker login {registry}"
        return Unauthorized(f"{registry} does not let us have {reference}: {message}", hint=hint)
    if any(word in low for word in _NOT_TLS):
        hint = f"give {registry} a certificate, or list it in the daemon's insecure registries"
        return NetworkError(f"{registry} has no TLS that the daemon trusts: {message}", hint=hint)
    if any(word in low for word in _MISSING):
        return _missing(registry, reference, message)
    if any(word in low for word in _UNREACHED):
        hint = f"look whether the daemon reaches {registry}"
        return NetworkError(f"{registry} cannot be reached for {reference}: {message}", hint=hint)
    return SandboxError(f"{reference}: {message}")


def _missing(registry: str, reference: Reference, message: str) -> NotFound:
    return NotFound(f"{registry} has no {reference}: {message}", hint="look whether name and tag are right")


def _without_name(message: str, reference: Reference) -> str:
    """What a daemon says, but for the name of the image, which may have any of the words that are looked for."""
    registry, path, tag = (re.escape(part) for part in (reference.registry, reference.path, reference.tag))
    name = rf"(?:[\w.:\[\]/-]*/)?{path}(?:[:@/][\w.:@/-]*\w)?"
    for part in (name, registry, rf"reading manifest {tag}" if tag else ""):
        message = re.sub(rf"(?<![\w.-]){part}(?![\w-])", " ", message) if part else message
    return message
