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

from aenv.errors import Invalid
from aenv.models import parse_duration

LEASE = 600.0
"""Seconds after which a client that asked for a lease, and was not heard of again, has lost its instance."""
PAGE = 100
LARGEST_PAGE = 1000
_FARTHEST = 253402214400.0
"""The last day of the year 9999: what is later cannot be written."""


def timestamp(seconds: float) -> str:
    """A time as it is on the wire: ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(text: str, now: float, what: str) -> float:
    """When it was: a time in ISO 8601, of UTC unless it says otherwise, or how long ago, such as ``24h``."""
    try:
        found = now - parse_duration(text)
    except Invalid:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            hint = "use ISO 8601, such as 2026-01-31T12:00Z, or how long ago, such as 24h"
            raise Invalid(f"{what} {text[:64]!r} is no time", hint=hint) from None
        found = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return min(max(found, 0.0), _FARTHEST)


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


class Locked(Struct, kw_only=True, frozen=True):
    """A version that another one depends on."""

    env: str
    """``name@version``."""
    digest: str
    """sha256 of its package."""
    prefix: str = ""
    """What the names of its tools begin with among those of the one that depends on it; empty where they are not."""


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
    locked: dict[str, Locked] = {}
    """What these were when its package was pushed, by alias: what its instances start with."""
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
    forked_from: str = ""
    """The instance that it is a fork of, which must be of the same environment: it begins where that one is."""
    own_random: bool = False
    """Whether it, a fork, draws other random numbers from there on than that one does."""


class Fork(Struct, kw_only=True):
    """Forks that are wanted of an instance."""

    count: int = 1
    ttl: str | float | None = None
    labels: dict[str, str] | None = None
    lease: float | None = None
    same_random: bool = False
    """Whether they draw the same random numbers from there on, as each other and as that instance; else each has a seed
    of its own. That holds for the generators that everybody shares: ``random``, NumPy's and torch's."""


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
    phases: dict[str, float] = {}
    """Where the time of its start went, in seconds: ``queue``, ``hub``, ``package``, ``engine`` and, within that,
    ``engine.*``, as the engine names them; ``parts``, for what it depends on. What is under way is counted so far."""
    position: int | None = None
    """Its place in the queue, from 1, while it waits to be admitted."""
    estimate: float | None = None
    """Seconds that it is likely to wait there, when enough is known to say."""
    service: str = ""
    """The service that it is a replica of."""
    needs: dict[str, str] = {}
    """The instances that it depends on, by alias: they live and end with it."""
    parent: str = ""
    """The instance that depends on it."""


class Extend(Struct):
    ttl: str | float


class Renewed(Struct):
    expires_at: str
    lease_expires_at: str = ""


class Reset(Struct, omit_defaults=True):
    seed: int | None = None
    arguments: dict[str, Any] = {}
    """Of the author's reset: which task to begin, for example."""


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


# Services


class ServiceRequest(Struct, kw_only=True):
    """A service that is wanted. What is not given is what the environment's ``deployConfig.service`` says."""

    env_name: str = field(name="envName")
    service_name: str | None = None
    """Part of its id, for people; the environment's name when there is none."""
    replicas: int | None = None
    environment_variables: dict[str, str] | None = None
    owner: str | None = None
    pvc_name: str | None = None
    """The storage that it is given: made when there is none, found again when there is. Empty for none."""
    enable_storage: bool | None = None
    """Whether it has storage, where naming it is not enough to tell."""
    mount_path: str | None = None
    storage_size: str | None = None
    port: int | None = None
    """What its replicas serve on, where an engine gives them an address of their own."""
    cpu_request: str | None = None
    cpu_limit: str | None = None
    memory_request: str | None = None
    memory_limit: str | None = None
    ephemeral_storage_request: str | None = None
    ephemeral_storage_limit: str | None = None
    labels: dict[str, str] | None = None


class ServiceChange(Struct, kw_only=True):
    """What is to be different; what is not given stays as it is."""

    replicas: int | None = None
    image: str | None = None
    """What is to run: an image for an engine of images, ``name@version`` for one that runs packages."""
    version: str | None = None
    """Another version of the same environment: exact, a range or ``latest``."""
    environment_variables: dict[str, str] | None = None
    """All of them: they replace those that it has."""
    generation: int | None = None
    """What it is a change of, as it was seen: ``Conflict`` when somebody else has changed it since."""


class Replica(Struct, kw_only=True):
    """One of a service's sandboxes."""

    id: str
    status: str
    ready: bool
    """Whether it is given calls."""
    env: str
    """``name@version``."""
    generation: int
    restarts: int = 0
    reason: str = ""
    created_at: str = ""


class Service(Struct, kw_only=True):
    """A service as its owner sees it."""

    id: str
    env: Env
    status: str
    """Pending, Creating, Running, Updating, Failed or Terminated."""
    created_at: str
    updated_at: str
    replicas: int
    """How many there are to be."""
    available_replicas: int = 0
    """How many take calls."""
    service_url: str = ""
    """Where calls go, for as long as the service is there."""
    owner: str = ""
    environment_variables: dict[str, str] = {}
    pvc_name: str = ""
    name: str = ""
    labels: dict[str, str] = {}
    mount_path: str = ""
    storage_size: str = ""
    port: int = 8081
    resources: dict[str, str] = {}
    generation: int = 1
    """Grows with each change of what it is to be."""
    reason: str = ""
    """Why it is not as it should be, or what became of the last update."""
    members: list[Replica] = []
    agent_token: str = ""
    owner_token: str = ""


# Quotas and usage


class QuotaRequest(Struct, kw_only=True):
    """Limits; what is not given is not limited."""

    instances: int | None = None
    """Instances that live at once, replicas of services among them."""
    creates_per_second: float | None = None
    cpu: str | None = None
    memory: str | None = None
    waiting: int | None = None
    """Instances that may wait in the queue; those that come then are refused."""


class Quota(Struct, kw_only=True):
    """A limit, and what is in use under it."""

    subject: str
    """``platform``; ``owner`` for each that has none of its own, or ``owner:NAME``; ``experiment`` for each, or
    ``experiment:OWNER/NAME``."""
    instances: int | None = None
    creates_per_second: float | None = None
    cpu: str | None = None
    memory: str | None = None
    waiting: int | None = None
    used: dict[str, float] = {}
    """``instances``, ``cpu`` (cores), ``memory`` (bytes), ``waiting``: of those that are in use or in the queue."""
    updated_at: str = ""


class Pool(Struct, kw_only=True):
    """Sandboxes that wait for an owner's next creates of an environment, as one server sees them."""

    owner: str
    env: str
    """``name@version``."""
    size: int
    """How many there are, also those that are being made."""
    ready: int
    """How many can be taken at once."""
    target: int
    """How many there should be."""
    min: int
    max: int
    claims: int
    """How many instances came from it, by this server."""
    misses: int
    """How many did not, since none was there."""


class Usage(Struct, kw_only=True):
    """What an owner's instances of one experiment used in one hour."""

    hour: str
    """When it began."""
    owner: str
    experiment: str = ""
    """The value of the label ``experiment``."""
    instances: int = 0
    """How many were made."""
    instance_seconds: float = 0.0
    cpu_seconds: float = 0.0
    calls: int = 0


class Load(Struct, kw_only=True):
    """What one instance, or replica, does at the moment."""

    id: str
    env: str
    """``name@version``."""
    owner: str
    experiment: str = ""
    service: str = ""
    status: str
    created_at: str
    cpu_seconds: float | None = None
    """Since it began; None where its engine cannot tell."""
    memory: int | None = None
    """Bytes, now."""
    calls: int = 0
    """That this server carried to it."""


class Top(Struct, kw_only=True):
    """What goes on at the moment."""

    at: str
    counts: dict[str, int]
    """Instances and replicas by status."""
    loads: list[Load]
    """The busiest first, as many as were asked for."""


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
