"""Sandboxes that are saved and loaded: an environment that does what it is told, and ways to ask it."""

from __future__ import annotations

import ast
import json
import secrets
import textwrap
from typing import Any

from aenv import Environment, http
from aenv.errors import AEnvError, from_wire
from tests.rl.bench import Bench, write_env

HEAD = """
import asyncio
import os
import random
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv import *

state: dict[str, Any] = {}


@register_tool
def run(code: str) -> str:
    there = {"state": state}
    exec(code, there)
    return repr(there.get("out"))


@register_tool
async def wait() -> str:
    Path("/tmp/waiting").touch()
    await asyncio.Event().wait()
    return ""


@register_health
def health(path: str = "") -> dict:
    return {"there": os.path.exists(path)}


@register_reset
def begin(ctx: Context, seed: int | None = None) -> None:
    pass


@register_tool
def about(ctx: Context) -> int | None:
    return ctx.seed


@register_reward
def score() -> float:
    return float(state.get("score", 0))
"""
PAIR = """
@register_save
def save() -> dict:
    return state


@register_load
def load(found: dict) -> None:
    state.clear()
    state.update(found)
"""
DESCRIBED = r"""
import hashlib, os, stat
out, first = {}, {}

def look(path):
    there = os.lstat(path)
    mode = there.st_mode
    if stat.S_ISSOCK(mode):
        return
    told = [oct(mode)]
    if not stat.S_ISLNK(mode):
        told.append(int(there.st_mtime))
    if stat.S_ISDIR(mode):
        if not (open_ := os.access(path, os.R_OK | os.X_OK)):
            os.chmod(path, 0o700)
        for name in sorted(os.listdir(path)):
            look(path + b"/" + name)
        if not open_:
            os.chmod(path, stat.S_IMODE(mode))
    elif stat.S_ISLNK(mode):
        told.append(os.readlink(path))
    elif stat.S_ISREG(mode):
        if not (open_ := os.access(path, os.R_OK)):
            os.chmod(path, 0o600)
        told.append(hashlib.sha256(open(path, "rb").read()).hexdigest())
        if not open_:
            os.chmod(path, stat.S_IMODE(mode))
        told.append(first.setdefault((there.st_dev, there.st_ino), path))
    out[path] = told

for place in (b"/project", b"/tmp", b"/home/sandbox", b"/dev/shm"):
    for name in sorted(os.listdir(place)):
        look(place + b"/" + name)
"""


def written(bench: Bench, body: str, **deploy: Any) -> str:
    """The name of an environment of its own."""
    name = f"e{secrets.token_hex(6)}"
    write_env(bench.home, name, HEAD + textwrap.dedent(body))
    config = bench.home / "envs" / name / "1.0.0" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "deployConfig": deploy}))
    return name


async def run(env: Environment, code: str) -> Any:
    result = await env.call_tool("run", {"code": textwrap.dedent(code)})
    assert not result.is_error, result.text
    return ast.literal_eval(result.text)


async def saved(env: Environment) -> bytes:
    response = await env._fetch("/state")
    if response.status != 200:
        raise told(response)
    return response.body


async def put(env: Environment, content: bytes) -> http.Response:
    return await env._ask("/state", b"Content-Type: application/octet-stream\r\n", content, None, "load", "PUT")


async def load(env: Environment, content: bytes) -> None:
    response = await put(env, content)
    if response.status != 200:
        raise told(response)


def told(response: http.Response) -> AEnvError:
    """What an answer that is a failure says, after it was seen to say everything that one must."""
    body = json.loads(response.body)
    assert body["success"] is False
    error = from_wire({**body, "message": body["error"]})
    assert error.code == body["code"] != "internal", body
    assert error.status == response.status
    return error


async def saves(env: Environment) -> bool:
    return (await env._fetch("/state")).status == 200
