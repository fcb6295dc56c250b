"""What goes over HTTP between clients, hub and API service: every request and every answer, as SPEC 5 and 6 name them.

Requests to the hub are in camelCase and its answers in snake_case, as programs in the wild send and expect them.
Every answer is in an envelope: ``{"success", "code", "message", "data"}``, with ``total``, ``limit`` and ``offset``
where ``data`` is a page, and ``error`` (a name of ``errors``) and ``hint`` where it is a failure.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

from msgspec import Struct, field

LEASE = 600.0
"""Seconds after which a client that asked for a lease, and was not heard of again, has lost its instance."""
PAGE = 100
LARGEST_PAGE = 1000


def timestamp(seconds: float) -> str:
    """A time as it is on the wire: ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# The hub


class Status(IntEnum):
    """Where a version of an environment is in its life."""

    INIT = 0
    PENDING = 1
    CREATING = 2
    CREATED = 3
    TESTING = 4
    VERIFIED = 5
    READY = 6
    RELEASED = 7
    FAILED = 8

    @property
    def title(self) -> str:
        return self.name.capitalize()


class EnvRequest(Struct, kw_only=True, rename="camel"):
    """A version that is pushed: what ``config.json`` says, and what a package alone cannot say."""

    name: str
    version: str
    description: str = ""
    tags: list[str] = []
    status: int | str | None = None
    """Accepted from existing clients; the hub decides."""
    code_url: str = ""
    artifacts: list[dict[str, Any]] = []
    build_config: dict[str, Any] = {}
    test_config: dict[str, Any] = {}
    deploy_config: dict[str, Any] = {}


class Tool(Struct, kw_only=True, rename="camel"):
    """A tool, function or reward with its schema."""

    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}


class Event(Struct, kw_only=True):
    """Something that happened to a version."""

    at: str
    what: str
    by: str


class Env(Struct, kw_only=True):
    """A version of an environment."""

    id: str
    """``name@version``."""
    name: str
    version: str
    description: str = ""
    tags: list[str] = []
    code_url: str = ""
    status: int = Status.INIT
    artifacts: list[dict[str, Any]] = []
    build_config: dict[str, Any] = {}
    test_config: dict[str, Any] = {}
    deploy_config: dict[str, Any] = {}
    created_at: str
    updated_at: str
    owner: str = ""
    digest: str = ""
    """sha256 of the package; empty while there is none."""
    size: int = 0
    readme: str = ""
    tools: list[Tool] = []
    functions: list[Tool] = []
    rewards: list[Tool] = []
    dependencies: dict[str, str] = {}
    """``dependsOn``: alias to ``name@range``."""
    yanked: str = ""
    """Why it was withdrawn; empty while it was not."""
    reason: str = ""
    """Why it failed."""
    history: list[Event] = []


class EnvStatus(Struct, kw_only=True):
    name: str
    version: str
    status: int
    title: str
    reason: str = ""


class Exists(Struct):
    exists: bool


class Yank(Struct):
    reason: str = ""


class Policy(Struct, kw_only=True):
    """Who may see an environment, and who may push to it."""

    owner: str = ""
    public: bool = True
    readers: list[str] = []
    writers: list[str] = []


class PolicyChange(Struct, kw_only=True):
    """What is not given stays as it is."""

    owner: str | None = None
    public: bool | None = None
    readers: list[str] | None = None
    writers: list[str] | None = None


# The API service


class InstanceRequest(Struct, kw_only=True):
    """An instance that is wanted, or ``count`` of them."""

    env_name: str = field(name="envName")
    datasource: str = ""
    environment_variables: dict[str, str] | None = None
    arguments: list[str] | None = None
    ttl: str | float | None = None
    """``90s``, ``30m``, ``1h30m``, seconds; nothing, or an empty text, leaves it to the environment."""
    owner: str | None = None
    """Whose it is to be: one's own name, or, for an admin, anybody's."""
    labels: dict[str, str] | None = None
    resources: dict[str, str] | None = None
    seed: int | None = None
    count: int | None = None
    """How many; with it, the answer is a list."""
    lease: float | None = None
    """Seconds after which it ends when nobody renewed it or called it; None: only its TTL counts."""
    startup_timeout: float | None = None


class Instance(Struct, kw_only=True):
    """An instance as its owner sees it."""

    id: str
    env: Env
    status: str
    """A ``models.State``."""
    created_at: str
    updated_at: str
    ip: str = ""
    """The gateway's host, for existing clients."""
    ttl: str = ""
    owner: str = ""
    labels: dict[str, str] = {}
    url: str = ""
    """Where calls go: the gateway, with the instance in its path."""
    socket: str = ""
    """``unix:PATH``, for a client on the same machine that may open it."""
    boot: str = ""
    agent_token: str = ""
    owner_token: str = ""
    expires_at: str = ""
    reason: str = ""
    """Why it failed or ended, or what it is waiting for."""


class Extend(Struct):
    ttl: str | float


class Renewed(Struct):
    expires_at: str
    lease_expires_at: str = ""


class Reset(Struct):
    seed: int | None = None


class Exec(Struct, kw_only=True):
    """A command to run inside: a line for the shell, or arguments with the program first."""

    command: str | list[str]
    timeout: float = 60.0
    directory: str | None = None
    stdin: str | None = None


class Expose(Struct, kw_only=True):
    port: int
    ttl: str | float | None = None


class Exposed(Struct, kw_only=True):
    url: str
    port: int
    expires_at: str


# Accounts


class TokenRequest(Struct, kw_only=True):
    name: str = ""
    owner: str | None = None
    scopes: list[str] | None = None
    ttl: str | float | None = None


class Token(Struct, kw_only=True):
    """A token without its secret, which is shown once, when it is made."""

    id: str
    name: str = ""
    owner: str
    scopes: list[str]
    created_at: str
    expires_at: str = ""
    made_by: str = ""
    token: str = ""
    """The secret: only in the answer to the request that made it."""


class SecretRequest(Struct):
    value: str


class Secret(Struct, kw_only=True):
    """That there is a secret of that name. Its value is never answered."""

    name: str
    owner: str
    created_at: str
    updated_at: str


class Audited(Struct, kw_only=True):
    """One line of the audit log."""

    at: str
    owner: str
    token: str
    """Its id."""
    action: str
    """``METHOD route``, the template and not the path."""
    target: str
    status: int
    request_id: str = ""
