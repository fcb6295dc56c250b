"""The values that cross a process boundary: frozen, typed, and with no behaviour beyond their own meaning."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import msgspec
from msgspec import Struct

from aenv.errors import Invalid, ToolError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
VERSION = re.compile(r"\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.+-]+)?", re.ASCII)
RANGE = re.compile(
    r"(?P<operator>[\^~]?)(?P<numbers>\d+(?:\.\d+){0,2})(?P<rest>[-+][0-9A-Za-z.+-]+)?|latest|\*", re.ASCII
)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+", re.ASCII)


class EnvRef(Struct, frozen=True):
    """A name, and which of its versions: exact, a range (``^1.0``), ``latest``, or none for the newest."""

    name: str
    version: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        name, at, version = text.partition("@")
        if not NAME.fullmatch(name):
            raise Invalid(
                f"{text[:100]!r} is not an environment name",
                hint="use letters, digits, '-', '_' and '.', for example 'mini-terminal@1.0.1'",
            )
        if at and not RANGE.fullmatch(version):
            raise Invalid(
                f"{version[:100]!r} in {text[:100]!r} is not a version", hint="use name@1.0.1, name@^1.0 or name@latest"
            )
        return cls(name, version or None)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name


def parse_duration(value: str | float, what: str = "ttl") -> float:
    """Seconds in ``90s``, ``30m``, ``1h30m``, ``24h``, ``1d`` or a plain number; anything else is an error."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e308 else -1.0
    else:
        text = str(value).strip().lower()
        match = _DURATION.fullmatch(text)
        if _NUMBER.fullmatch(text):
            seconds = float(text)
        elif text and match:
            days, hours, minutes, rest = (float(part or 0) for part in match.groups())
            seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
        else:
            seconds = -1.0
    if not 0 < seconds < float("inf"):
        shown = value[:100] if isinstance(value, str) else value
        raise Invalid(f"{what} {shown!r} is not a length of time", hint="use 90s, 30m, 1h30m, 24h, 1d or seconds")
    return seconds


def _foreign(value: Any) -> Any:
    """What msgspec does not know: pydantic models, arrays and scalars that can list themselves, kinds of str, int
    and float."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return value.tolist()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} has no JSON form")


to_json = msgspec.json.Encoder(enc_hook=_foreign).encode
"""A value as JSON. Raises one of ``NOT_JSON`` when it has none."""
NOT_JSON = (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError)


class Volume(Struct, frozen=True, kw_only=True):
    """Storage that outlives sandboxes: an engine makes it when there is none of that name, and keeps it."""

    owner: str
    """Whose it is: two owners' volumes of one name are two."""
    name: str
    mount: str
    """Where it is in the sandbox: an absolute path."""
    size: int
    """Bytes that it holds at most."""


class Second(Struct, frozen=True, kw_only=True):
    """The task's own container beside the runtime's: an image, taken as it is, or a directory of this machine."""

    image: str = ""
    directory: str = ""


class SandboxSpec(Struct, frozen=True, kw_only=True):
    """What a caller asks for, and, once the environment is found, what an engine needs to start it."""

    env: EnvRef
    datasource: str = ""
    ttl: float | None = None
    startup_timeout: float = 500.0
    environment_variables: dict[str, str] = {}
    secrets: list[str] = []
    """Names of variables whose values are shown nowhere: not in what the sandbox prints, and in no answer of it."""
    arguments: list[str] = []
    owner: str | None = None
    labels: dict[str, str] = {}
    seed: int | None = None
    resources: dict[str, str] = {}
    """``cpu``, ``memory`` and ``ephemeralStorage``, as ``deployConfig`` writes them."""
    project: str = ""
    """Directory of the project on this machine. Whoever resolves ``env`` sets it; engines do not look for it."""
    image: str = ""
    """Reference of the image that holds the project and the runtime. Whoever resolves ``env`` sets it; without one, an
    engine of containers brings the project into its base image."""
    second: Second | None = None
    template: str = ""
    """The pod template of the site that it is made by, where the engine has any."""
    stamp: str = ""
    """Which state of the project's files it is, where they may change: an engine keeps nothing from another one."""
    network: str | dict[str, list[str]] | None = None
    """``none``, ``full`` or ``{"allow": ["host:port", ...]}``; None leaves it to the engine."""
    preload: bool | str = "auto"
    idle: float | None = None
    """Seconds without a call after which the sandbox may end itself."""
    suspend: float | None = None
    """Seconds without a call after which the sandbox may stand still until the next one, where its engine can do that;
    None leaves it to the engine."""
    lasting: bool = False
    """Whether it lives until it is deleted, whatever ``ttl`` says: a replica of a service."""
    volumes: list[Volume] = []
    warm: bool = False
    """Whether it waits to be specialised, with its variables, arguments and seed, before it runs."""
    owner_token_sha256: str | None = None
    """Digest of the token that opens the sandbox to its owner. The engine never sees the token."""
    forkable: bool = False
    """Whether the project allows that it is forked while it lives."""
    forked_from: str = ""
    """The sandbox that it is a fork of: it begins where that one is, with its files and its memory."""


class State(StrEnum):
    """Where a sandbox is in its life."""

    PENDING = "Pending"
    """There is no room for it yet."""
    CREATING = "Creating"
    RUNNING = "Running"
    """The author's code is loaded and its health check passes."""
    FAILED = "Failed"
    TERMINATED = "Terminated"

    @property
    def over(self) -> bool:
        return self in (State.FAILED, State.TERMINATED)


class Sandbox(Struct, frozen=True, kw_only=True):
    """A sandbox as its client reaches it."""

    url: str
    """Base URL of the runtime inside: ``http://...`` or ``unix:/path``; empty while there is none."""
    public_url: str = ""
    """Where others reach it, too: at a platform's gateway. Empty when there is none."""
    id: str = "local"
    token: str | None = None
    """The owner's token, where one is asked for. Only who asked for the sandbox knows it."""
    attached: bool = False
    """Somebody else's: it is taken as it is, whatever its name."""
    shared: bool = False
    """A service: each call goes to one of several sandboxes, and a second time perhaps to another."""
    boot: str = ""
    """Names this life of it, where the engine has seen it healthy; a client then need not ask."""
    state: State = State.RUNNING
    reason: str = ""
    """Why it failed or ended, in words for a person."""
    env: str = ""
    """``name@version`` of what runs in it."""
    digest: str = ""
    """sha256 of the package that it is made of, where that is known."""
    image: str = ""
    """The image that holds it, where there is one."""
    owner: str | None = None
    labels: dict[str, str] = {}
    created_at: float = 0.0
    expires_at: float | None = None
    """Unix times."""
    phases: dict[str, float] = {}
    """Where the time of its start went, in seconds, in the engine's own words, such as ``import``; while it starts,
    so far."""

    @property
    def relayed(self) -> bool:
        """Whether calls pass through a gateway, which may restart while the sandbox lives."""
        return self.url == self.public_url


def told(seconds: Mapping[str, float]) -> str:
    """Where the time went, in words: ``12.1 s engine (11.9 import, 0.2 health), 0.3 s package``."""

    def parts(of: str) -> str:
        found = {name.partition(".")[2]: taken for name, taken in seconds.items() if name.startswith(f"{of}.")}
        listed = ", ".join(f"{taken:.3g} {name}" for name, taken in _longest(found))
        return f" ({listed})" if listed else ""

    whole = {name: taken for name, taken in seconds.items() if "." not in name}
    return ", ".join(f"{taken:.3g} s {name}{parts(name)}" for name, taken in _longest(whole))


def _longest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, taken) for name, taken in seconds.items() if taken >= 0.001), key=lambda pair: -pair[1])


class Image(Struct, frozen=True):
    """Return this from a tool to show the model a picture."""

    data: bytes
    mime_type: str = "image/png"

    def block(self) -> dict[str, Any]:
        return {"type": "image", "data": base64.b64encode(self.data).decode(), "mimeType": self.mime_type}


class Audio(Struct, frozen=True):
    """Return this from a tool to give the model a sound."""

    data: bytes
    mime_type: str = "audio/wav"

    def block(self) -> dict[str, Any]:
        return {"type": "audio", "data": base64.b64encode(self.data).decode(), "mimeType": self.mime_type}


class ToolResult(Struct, frozen=True, kw_only=True):
    """What a tool answered. ``is_error`` means that the tool failed; the platform's failures are exceptions."""

    content: list[dict[str, Any]]
    """MCP content blocks: ``{"type": "text", "text": ...}``; images and audio keep ``data`` and ``mimeType``."""
    is_error: bool = False
    structured: Any = None
    """MCP structuredContent, when the tool gave any."""

    @property
    def text(self) -> str:
        return "\n".join(block["text"] for block in self.content if block.get("type") == "text")

    def raise_for_error(self) -> Self:
        """Raise ``ToolError`` when the tool failed; otherwise return the result itself."""
        if self.is_error:
            raise ToolError(self.text or "the tool failed without a message")
        return self

    def __repr__(self) -> str:
        structured = "" if self.structured is None else f", structured={self.structured!r}"
        return f"ToolResult(content={self.content!r}, is_error={self.is_error}{structured})"


class ExecResult(Struct, frozen=True, kw_only=True):
    """What a command in a sandbox did. One that ran and failed is a result too, with its return code."""

    returncode: int
    """0 for success; minus the signal's number for a command that was killed."""
    stdout: str
    stderr: str
    truncated: bool = False
    """Whether more was written to one of the two than is kept."""
    timed_out: bool = False
    """Whether it was killed because its time was over."""
