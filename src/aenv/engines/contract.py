"""What passes between an engine elsewhere and its controller, below ``/aenvironment``.

The paths of ``INSTANCE`` and the fields of ``Wanted`` and ``Held`` up to ``ttl`` are those that existing programs send
and expect. What follows them is ours, and a stranger may leave it out.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from aenv.models import Sandbox, SandboxSpec

INSTANCE = "/aenvironment/instance"
WARMUP = f"{INSTANCE}/action/warmup"
CLEANUP = f"{INSTANCE}/action/cleanup"
PROJECT = "/aenvironment/project"
VOLUME = "/aenvironment/volume"
ENGINE = "/aenvironment/engine"
ATTEMPT = "AEnv-Attempt"
"""The header that names one attempt to create: who gives it up says so with the same name, whichever comes first."""
START = "AEnv-Start"
"""The header of output: the position of its first byte."""
MOST_FILE = 1024 * 1024 * 1024
"""Bytes of a file that goes into a sandbox."""


class Wanted(Struct, kw_only=True):
    """An environment of which an instance is wanted."""

    id: str = ""
    """Of the environment: ``name@version``."""
    name: str = ""
    version: str = ""
    description: str = ""
    tags: list[str] | None = None
    code_url: str = ""
    artifacts: list[dict[str, Any]] | None = None
    build_config: dict[str, Any] | None = None
    test_config: dict[str, Any] | None = None
    deploy_config: dict[str, Any] | None = None
    instance_id: str = ""
    """Of the instance; the controller chooses one where it is not given. One that is alive is returned as it is."""
    spec: SandboxSpec | None = None
    """What the engine is given; without it, what the environment itself says. Its ``project`` means nothing here."""
    project: str = ""
    """The sha256 of the project's archive, where the engine needs its files."""


class Named(Struct, kw_only=True):
    """Which environment an instance is of."""

    name: str = ""
    version: str = ""


class Held(Struct, kw_only=True):
    """An instance, as a controller shows it."""

    id: str = ""
    env: Named | None = None
    status: str = ""
    created_at: str = ""
    updated_at: str = ""
    ip: str = ""
    """The host that calls to it go to."""
    ttl: str = ""
    sandbox: Sandbox | None = None
    """All that the engine says of it; its ``url`` is where it is reached from elsewhere."""
    pending: bool = False
    """Whether it is still being made when the time to wait was over: ask again, with the same id."""
    missing: bool = False
    """Whether the project's files must be sent before it can be made."""
    reason: str = ""


class Cleaned(Struct, kw_only=True):
    """What a clean-up removed."""

    instances: int
    """Sandboxes that were over."""
    projects: int
    """Unpacked projects that nobody uses."""


class Update(Struct, kw_only=True):
    """What is changed of a sandbox."""

    ttl: float
    """Seconds that it lives from now."""


class Hide(Struct, kw_only=True):
    """Values that are shown no more."""

    secrets: dict[str, str]


class Command(Struct, kw_only=True):
    """A command to run inside."""

    command: list[str]
    timeout: float = 60.0


class Use(Struct, kw_only=True):
    """What a sandbox has used, and uses."""

    cpu: float
    memory: int


class Facts(Struct, kw_only=True):
    """What a controller's engine is, and cannot do."""

    name: str
    version: str = ""
    """Of the controller's package."""
    cannot: dict[str, str] = {}
    images: bool = False
    refusals: dict[str, dict[str, Any]] = {}
    """Why a second container cannot be had that is made of an ``image``, or of a ``directory``: an error as it is on
    the wire."""
