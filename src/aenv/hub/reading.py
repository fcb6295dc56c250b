"""What a pushed project offers, read by running it once in a sandbox without network. The hub imports none of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from aenv import http
from aenv.engines.base import Engine
from aenv.engines.specs import complete
from aenv.errors import Invalid, NetworkError, SandboxError
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.project import Project
from aenv.wire import Tool

START = 180.0
"""Seconds that a project may take to start, with what it requires being installed."""
ANSWER = 20.0
"""Seconds that it has to say what it offers."""
MOST_ANSWER = 4 * 1024 * 1024
MOST_SCHEMAS = 640 * 1024
"""Bytes of the schemas of all tools, functions and rewards, as JSON."""
MOST_OFFERED = 1_000
"""Tools, functions or rewards."""
MOST_README = 256 * 1024
_LONGEST_NAME, _LONGEST_REASON = 200, 4_000
_RESOURCES = {"cpu": "1", "memory": "2Gi", "ephemeralStorage": "1Gi"}
_PLACEHOLDER = "not-set-while-the-hub-reads"
"""What a secret is while a project is read."""
_README = ("README.md", "readme.md", "README.rst", "README.txt", "README")

T = TypeVar("T")


class Unreadable(Invalid):
    """The project did not start, or did not say what it offers."""


class Contents(Struct, frozen=True):
    """What a project offers."""

    tools: list[Tool] = []
    functions: list[Tool] = []
    rewards: list[Tool] = []
    readme: str = ""


async def read(engine: Engine, project: Project, *, owner: str, stamp: str) -> Contents:
    """Start a project, ask it, and end it. ``Unreadable`` says what is wrong with it."""
    secrets = dict.fromkeys(project.value("deployConfig.secrets"), _PLACEHOLDER)
    spec = SandboxSpec(
        env=EnvRef(project.name, project.version),
        ttl=START + 4 * ANSWER,
        startup_timeout=START,
        environment_variables=secrets,
        owner=owner,
        labels={"aenv/purpose": "reading"},
        resources=_RESOURCES,
        network="none",
        preload=False,
    )
    try:
        async with engine.provision(complete(spec, project, stamp=stamp)) as sandbox:
            tools = await _ask(sandbox, "/tools", list[Tool])
            listed = await _ask(sandbox, "/functions/list", _Listed)
            info = await _ask(sandbox, "/info", _Info)
    except (Invalid, SandboxError, NetworkError) as exc:
        reason = exc.message.replace(f"{project.root}/", "").replace(str(project.root), project.name)
        raise Unreadable(
            f"{project.name}@{project.version} cannot be read: {reason[-_LONGEST_REASON:]}",
            hint=exc.hint or "'aenv validate' shows the same on your machine",
        ) from exc
    found = Contents(tools, listed.functions, info.reward_schemas, await asyncio.to_thread(_readme, project.root))
    _check(found, project)
    return found


class _Listed(Struct):
    functions: list[Tool]


class _Info(Struct):
    reward_schemas: list[Tool]


class _Answer(Struct):
    data: msgspec.Raw


async def _ask(sandbox: Sandbox, path: str, type: type[T]) -> T:
    headers = f"Authorization: Bearer {sandbox.token}\r\n".encode()
    try:
        async with asyncio.timeout(ANSWER) as limit:
            response = await http.request("GET", sandbox.url, path, headers=headers, retries=0, most=MOST_ANSWER)
    except TimeoutError:
        if not limit.expired():
            raise
        raise Unreadable(f"it did not answer GET {path} within {ANSWER:g} s") from None
    if response.status != 200:
        raise Unreadable(f"it answered GET {path} with status {response.status}")
    try:
        answer = msgspec.json.decode(response.body, type=_Answer)
        return msgspec.json.decode(_without_nulls(answer.data), type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Unreadable(f"what it answered GET {path} is no answer of a runtime: {exc}") from exc


def _without_nulls(data: msgspec.Raw) -> bytes:
    """The same without descriptions that are null: where an author wrote none, there is none."""
    found = msgspec.json.decode(data)
    rows: Any = found if isinstance(found, list) else None
    if isinstance(found, dict):
        rows = [row for value in found.values() if isinstance(value, list) for row in value]
    for row in rows or ():
        if isinstance(row, dict) and row.get("description", "") is None:
            del row["description"]
    return msgspec.json.encode(found)


def _check(found: Contents, project: Project) -> None:
    env = f"{project.name}@{project.version}"
    size = 0
    for what, offered in (("tools", found.tools), ("functions", found.functions), ("rewards", found.rewards)):
        if len(offered) > MOST_OFFERED:
            raise Unreadable(f"{env} has {len(offered)} {what}; {MOST_OFFERED} is the most")
        for tool in offered:
            if not 0 < len(tool.name) <= _LONGEST_NAME or not tool.name.isprintable():
                raise Unreadable(f"{env} has {what} with a name that cannot be kept: {tool.name[:100]!a}")
        size += len(msgspec.json.encode(offered))
    if size > MOST_SCHEMAS:
        raise Unreadable(f"the schemas of {env} have {size} bytes; {MOST_SCHEMAS} is the most")


def _readme(root: Path) -> str:
    for name in _README:
        file = root / name
        if file.is_file():
            with file.open("rb") as opened:
                return opened.read(MOST_README).decode(errors="replace").replace("\0", "")
    return ""
