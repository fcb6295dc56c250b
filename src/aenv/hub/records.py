"""What the hub keeps: names with their policy, versions with what is said about them, and how they are found again.

A version is two records, so that lists are read quickly: ``env`` with what a list shows, and ``env-doc`` with the rest.
The record of its name holds the policy and all versions at a glance. It is written with every change of a version:
whoever changes a policy and whoever changes a version meanwhile hear of each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import msgspec
from msgspec import Struct

from aenv.auth.callers import Caller, Scope
from aenv.errors import Conflict, Forbidden, Invalid, NotFound, TooLarge
from aenv.models import NAME, NOT_JSON, VERSION, EnvRef
from aenv.project import depends, versions
from aenv.store import Delete, Page, Put, Record, Store
from aenv.store.base import LARGEST_PAGE
from aenv.wire import Env, EnvRequest, Event, Status, Tool, timestamp

ENVS, NAMES, DOCS, PAST, BUSY = "env", "env-name", "env-doc", "env-past", "env-busy"
"""Kinds: versions, names, the rest of a version, versions that were deleted, versions whose package is being read."""

MOST_VERSIONS = 5_000
MOST_USERS = 64
"""Readers and writers of a name."""
MOST_TAGS = 32
MOST_FOUND = 120
"""Tools of a version by which it is found."""
MOST_SAID = 64 * 1024
"""Bytes of what is said about a version, beside its package."""
_LONGEST_TAG, _LONGEST_VERSION, _LONGEST_USER = 100, 100, 200
_HISTORY = 100
"""Events of a version that are kept: the first and the last ones."""
_NEAR = 300
"""Names that are looked at when one is not found."""
_MERGED = 200
"""Versions that are put among many others here, and not by the store."""
RUNNABLE = frozenset({Status.READY, Status.RELEASED})

TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.INIT: frozenset({Status.PENDING, Status.CREATED}),
    Status.PENDING: frozenset({Status.CREATED, Status.TESTING}),
    Status.CREATING: frozenset(),
    Status.CREATED: frozenset({Status.PENDING, Status.TESTING, Status.RELEASED}),
    Status.TESTING: frozenset({Status.READY, Status.FAILED}),
    Status.VERIFIED: frozenset(),
    Status.READY: frozenset({Status.TESTING, Status.RELEASED}),
    Status.RELEASED: frozenset(),
    Status.FAILED: frozenset({Status.PENDING, Status.CREATED, Status.TESTING}),
}
"""What may become of a version. Creating and Verified are names on the wire that no version of ours has."""
_INSTEAD = {
    Status.PENDING: "upload its package first",
    Status.TESTING: "its package is being read at this moment; wait until that is done",
    Status.FAILED: "push it again",
}


class Mark(Struct, array_like=True):
    """A version at a glance."""

    status: int
    package: bool = False
    yanked: bool = False

    @property
    def runnable(self) -> bool:
        return self.package and self.status in RUNNABLE


class Name(Struct, kw_only=True):
    """An environment's name: whose it is, who sees it, and which versions there are."""

    name: str
    owner: str
    created: float
    """Seconds since the epoch."""
    public: bool = True
    readers: list[str] = []
    writers: list[str] = []
    versions: dict[str, Mark] = {}

    def reads(self, caller: Caller) -> bool:
        return self.public or caller.has(Scope.FETCH) or self.writes(caller) or caller.owner in self.readers

    def writes(self, caller: Caller) -> bool:
        return caller.owns(self.owner) or caller.owner in self.writers

    @property
    def visible(self) -> list[str]:
        """Who sees it, as the values of a tag."""
        return ["public"] if self.public else [f"user:{user}" for user in {self.owner, *self.readers, *self.writers}]


class Doc(Struct, kw_only=True):
    """What a list does not show of a version."""

    digest: str = ""
    """Of the package that it tells about."""
    readme: str = ""
    tools: list[Tool] = []
    functions: list[Tool] = []
    rewards: list[Tool] = []
    history: list[Event] = []

    def note(self, what: str, caller: Caller) -> None:
        """Write down that something happened."""
        self.history.append(Event(at=timestamp(time.time()), what=what, by=caller.owner))
        del self.history[1 : len(self.history) - _HISTORY + 1]


class Past(Struct, kw_only=True):
    """A version that was deleted."""

    history: list[Event] = []
    released: bool = False


class Found(Struct, kw_only=True):
    """A version with its name, and the revisions under which they were read; 0 for what is new."""

    name: Name
    env: Env
    doc: Doc
    name_revision: int = 0
    env_revision: int = 0
    order: float
    """When it was made, to a finer measure than the wire has."""

    @property
    def whole(self) -> Env:
        """The version with all that is known of it."""
        doc = self.doc
        return msgspec.structs.replace(
            self.env,
            readme=doc.readme,
            tools=doc.tools,
            functions=doc.functions,
            rewards=doc.rewards,
            history=doc.history,
        )

    def puts(self) -> list[Put | Delete]:
        """What keeps it as it is now, unless somebody changed it meanwhile."""
        env, name = self.env, self.name
        env.owner = name.owner
        name.versions[env.version] = Mark(env.status, bool(env.digest), bool(env.yanked))
        return [
            put_name(name, self.name_revision),
            put_env(Kept(env, self.env_revision, self.order), name),
            Put(DOCS, env.id, msgspec.json.encode(self.doc)),
        ]


def put_name(name: Name, revision: int) -> Put:
    return Put(
        NAMES,
        name.name.lower(),
        msgspec.json.encode(name),
        expect=revision,
        tags={"visible": name.visible},
        order=name.created,
        search=name.name,
    )


class Kept(NamedTuple):
    """A version as it is in its record."""

    env: Env
    revision: int
    order: float


def put_env(kept: Kept, name: Name) -> Put:
    env = kept.env
    facets = facets_of(tags=env.tags, tools=[tool.name for tool in env.tools][:MOST_FOUND], owner=name.owner)
    tags: dict[str, Sequence[str]] = {
        "name": [env.name],
        "visible": name.visible,
        "digest": [env.digest],
        "depends": sorted({EnvRef.parse(wanted).name for wanted in env.dependencies.values()}),
        **{facet: ["public" if name.public else "private"] for facet in facets},
    }
    value = msgspec.json.encode(env)
    tags = {key: values for key, values in tags.items() if any(values)}
    return Put(ENVS, env.id, value, expect=kept.revision, tags=tags, order=kept.order, search=env.name)


def facets_of(*, tags: Sequence[str] = (), tools: Sequence[str] = (), owner: str = "") -> list[str]:
    """The names of tags by which a version is found. Their value tells whether it is public."""
    found = [f"tag:{tag.lower()}" for tag in tags] + [f"tool:{tool}" for tool in tools]
    return [*found, *([f"owner:{owner}"] if owner else [])]


def visible_to(caller: Caller) -> dict[str, list[str]]:
    """The tags of what a caller sees."""
    return {} if caller.has(Scope.FETCH) else {"visible": ["public", f"user:{caller.owner}"]}


class Shelf:
    """Reading the records of a hub."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def name(self, name: str) -> tuple[Name, int] | None:
        record = await self.store.get(NAMES, name.lower())
        return None if record is None else (msgspec.json.decode(record.value, type=Name), record.revision)

    async def env(self, id: str) -> Kept | None:
        record = await self.store.get(ENVS, id)
        return None if record is None else Kept(await self.seen(record), record.revision, record.order)

    async def found(self, name: Name, name_revision: int, version: str) -> Found | None:
        """A version as it is now."""
        id = f"{name.name}@{version}"
        while True:
            read = await self.env(id)
            if read is None:
                return None
            record = await self.store.get(DOCS, id)
            doc = Doc() if record is None else msgspec.json.decode(record.value, type=Doc)
            env, revision, order = read
            if doc.digest == env.digest:
                return Found(
                    name=name, env=env, doc=doc, name_revision=name_revision, env_revision=revision, order=order
                )
            # its package was replaced between the two

    async def seen(self, record: Record) -> Env:
        """The version in a record. One whose reader died has failed."""
        env = msgspec.json.decode(record.value, type=Env)
        if env.status == Status.TESTING and await self.store.get(BUSY, env.id) is None:
            env.status, env.reason = Status.FAILED, "the hub was stopped while it read the package; push it again"
        return env

    async def envs(self, tags: Mapping[str, str | Sequence[str]]) -> list[Kept]:
        """Every version that bears these tags."""
        found: list[Kept] = []
        while True:
            page = await self.store.find(ENVS, tags, limit=LARGEST_PAGE, offset=len(found))
            found += [
                Kept(msgspec.json.decode(record.value, type=Env), record.revision, record.order)
                for record in page.records
            ]
            if len(found) >= page.total or not page.records:
                return found

    async def page(self, caller: Caller, facets: Sequence[str], containing: str, limit: int, offset: int) -> Page:
        """Versions that a caller sees and that have all of these facets, the newest first.

        What is public and what is private are found by a tag each, and put together here: of two tags, or of one with
        two values, a store would have to look at every record, however few are wanted.
        """

        async def find(tags: Mapping[str, str | Sequence[str]], limit: int, offset: int) -> Page:
            return await self.store.find(ENVS, tags, containing=containing, limit=limit, offset=offset)

        either: dict[str, str | Sequence[str]] = dict.fromkeys(facets, ("public", "private"))
        if caller.has(Scope.FETCH):
            return await find(either, limit, offset)
        public = dict.fromkeys(facets or ["visible"], "public")
        own = {**dict.fromkeys(facets, "private"), "visible": f"user:{caller.owner}"}
        counted = [((await find(tags, 0, 0)).total, tags) for tags in (own, public)]
        (few, rare), (_, common) = sorted(counted, key=lambda part: part[0])
        if not few:
            return await find(common, limit, offset)
        if few > _MERGED or few + limit > LARGEST_PAGE:
            return await find({**either, **visible_to(caller)}, limit, offset)
        start = max(offset - few, 0)
        parts = await find(rare, few, 0), await find(common, offset - start + limit, start)
        found = {record.key: record for part in parts for record in part.records}
        merged = sorted(found.values(), key=lambda record: (-record.order, record.key))
        return Page(merged[offset - start : offset - start + limit], sum(part.total for part in parts))

    async def past(self, id: str) -> Past | None:
        record = await self.store.get(PAST, id)
        return None if record is None else msgspec.json.decode(record.value, type=Past)

    async def near(self, caller: Caller, name: str) -> list[str]:
        """Names like that one, of those that the caller sees."""
        page = await self.store.find(NAMES, visible_to(caller), limit=_NEAR)
        known = {record.search.lower(): record.search for record in page.records}
        return [known[near] for near in get_close_matches(name.lower(), known, 3)]

    async def dependants(self, caller: Caller, found: Found) -> list[str]:
        """What depends on this version: it is the one that they would get."""
        env = found.env
        there = {version for version, mark in found.name.versions.items() if mark.runnable and not mark.yanked}

        def needs(user: Env) -> bool:
            if user.locked:
                return any(locked.env == env.id for locked in user.locked.values())
            wanted = [ref for ref in map(EnvRef.parse, user.dependencies.values()) if ref.name == env.name]
            return any(ref.version == env.version or versions.newest(there, ref) == env.version for ref in wanted)

        users = [user for user, _, _ in await self.envs({"depends": env.name}) if user.id != env.id and needs(user)]
        names = {user.name for user in users}
        seen = {name for name in names if (read := await self.name(name)) and read[0].reads(caller)}
        shown = [user.id for user in users if user.name in seen][:5]
        return [*shown, *(["others"] if len(shown) < len(users) else [])]


# What may be asked for


def advance(env: Env, status: Status) -> None:
    """Let a version become something, if it may."""
    now = Status(env.status)
    if status not in TRANSITIONS[now]:
        raise Conflict(f"{env.id} is {now.title} and cannot become {status.title}", hint=_INSTEAD.get(now))
    env.status = status


def unreleased(env: Env) -> None:
    if env.status == Status.RELEASED:
        raise Forbidden(f"{env.id} is released and never changes", hint="push another version")


def writable(name: Name, caller: Caller) -> None:
    if not name.writes(caller):
        raise Forbidden(
            f"{name.name} belongs to {name.owner}, and {caller.owner} is none of its writers",
            hint="its owner adds writers with 'aenv access'",
        )


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        hint = "use letters, digits, '-', '_' and '.', at most 63, and start with a letter or digit"
        raise Invalid(f"{name[:100]!r} is not an environment name", hint=hint)


def check_version(version: str) -> None:
    if not VERSION.fullmatch(version) or len(version) > _LONGEST_VERSION:
        raise Invalid(f"{version[:100]!r} is not a semantic version", hint="use three numbers, for example 1.0.0")


def check_users(users: Sequence[str], what: str) -> None:
    for user in users:
        if not user or len(user) > _LONGEST_USER or not user.isprintable():
            raise Invalid(f"{what}: {user[:100]!r} is no owner's name")


def describe(env: Env, request: EnvRequest, *, configs: bool = True) -> None:
    """Take over what a request says of a version; without ``configs``, those of its package stay."""
    tags = list(dict.fromkeys(request.tags))
    if len(tags) > MOST_TAGS:
        raise TooLarge(f"{env.id} has {len(tags)} tags; {MOST_TAGS} is the most")
    for tag in tags:
        if not tag.strip() or len(tag) > _LONGEST_TAG or not tag.isprintable() or "," in tag:
            raise Invalid(f"{tag[:100]!r} is not a tag", hint=f"use up to {_LONGEST_TAG} characters, and no comma")
    dependencies = depends.dependencies(request.deploy_config) if configs else {}
    try:
        said = len(msgspec.json.encode(request))
    except NOT_JSON as exc:
        raise Invalid(f"what is said of {env.id} has no JSON form: {exc}") from None
    if said > MOST_SAID:
        raise TooLarge(f"what is said of {env.id} has {said} bytes; {MOST_SAID} is the most")
    env.description, env.tags = request.description, tags
    env.code_url, env.artifacts = request.code_url, request.artifacts
    if configs:
        env.build_config, env.test_config = request.build_config, request.test_config
        env.deploy_config = request.deploy_config
        env.dependencies = {alias: str(wanted.env) for alias, wanted in dependencies.items()}
    env.updated_at = timestamp(time.time())


def missing(name: str, near: Sequence[str]) -> NotFound:
    hint = f"did you mean {', '.join(near)}?" if near else "'aenv list' shows which there are"
    return NotFound(f"there is no environment {name!r}", hint=hint)
