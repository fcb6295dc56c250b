"""Every attack that only looks, carried out once from each place where author code runs; the tests read what it got.

tool      a tool of an instance under strict isolation
import    the module's body, imported in the sealed instance
zygote    the module's body, imported before the fork
open      a tool of an instance without isolation, which shows that the attacks work
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from aenv.engines.conformance.bench import Box
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.process.seal import PROXY_PORT
from aenv.models import to_json
from aenv.runtime.tokens import new_owner_token
from tests.engines.hostile.ground import Treasure, attacks, own_home, start

PLACES = ("tool", "import", "zygote")
INSTANCE = ("tool", "import")
KEY = 0x61656E76
OUTSIDE = (
    *("/", "/usr", "/usr/bin", "/etc", "/venv", "/runtime", "/runtime/aenv", "/runtime/aenv/runtime"),
    *("/dev", "/proc", "/sys", "/run", "/stage", "/root", "/var", "/home", "/opt", "/mnt"),
)
"""Where nobody inside may make a file."""
FIXED = (
    *("/etc/passwd", "/etc/hosts", "/usr/bin/env", "/runtime/aenv/__init__.py", "/venv/pyvenv.cfg", "/proc/self/exe"),
    *("/bin/sh", "/etc/ssl/openssl.cnf", "/dev/null/../../etc/group"),
)
"""What nobody inside may open for writing."""


class Loot:
    """What each attack got, by place and label."""

    def __init__(self, treasure: Treasure) -> None:
        self.secret = treasure.secret
        self.marker = treasure.marker
        self.ports = treasure.ports
        self.home = treasure.home
        self.found: dict[str, dict[str, Any]] = {}
        self.outside: dict[str, Any] = {}
        """What is so on this machine after the attacks."""

    def got(self, place: str, label: str) -> Any:
        """What an attack got; nothing when the system refused."""
        return self.found[place][label]["got"]


def known_by_half(secret: str) -> dict[str, Any]:
    """A secret as a search is told it that must not find itself."""
    return {
        "begins": secret[: len(secret) // 2],
        "digest": hashlib.sha256(secret.encode()).hexdigest(),
        "size": len(secret),
    }


def attack_plan(treasure: Treasure, neighbour: Box, others: str, token: str, own: str) -> dict[str, Any]:
    """Every attack with what it needs to know. ``others`` and ``own`` are variables of the neighbour and of itself."""
    assert treasure.victim is not None
    endpoint = neighbour.sandbox.url.removeprefix("unix:")
    files = [str(file) for file in treasure.files]
    private = ["/etc/shadow", "/etc/hostname", "/etc/machine-id", "/etc/sudoers", "/etc/gshadow", "/root/.bashrc"]
    mine = [os.getpid(), treasure.victim.pid]
    halves = {"begins": treasure.secret[: treasure.half], "ends": treasure.secret[treasure.half :]}
    steps = {
        "secret files": ("read", {"paths": files}),
        "private files": ("read", {"paths": private}),
        "hunt": ("hunt", halves),
        "named sockets": ("sockets", {}),
        "environments": ("environments", {"pids": mine, **halves}),
        "made outside": ("make_in", {"folders": [*OUTSIDE, sys.base_prefix]}),
        "made at home": ("make_in", {"folders": [str(treasure.home), str(treasure.home / ".ssh")]}),
        "made inside": ("make_in", {"folders": ["/tmp", "/project", "/project/src", "/dev/shm", "/home/sandbox"]}),
        "opened to write": ("open_to_write", {"paths": [*FIXED]}),
        "opened secrets to write": ("open_to_write", {"paths": files}),
        "made devices": ("make_devices", {}),
        "devices": ("devices", {}),
        "processes": ("seen", {"marker": treasure.marker}),
        "signalled": ("find_signalled", {"pids": mine}),
        "looked into": ("look_into", {"pid": "1"}),
        "looked into a victim": ("look_into", {"pid": str(treasure.victim.pid)}),
        "descriptors": ("descriptors", {}),
        "more than a share": ("rise", {}),
        "core": ("core_limit", {}),
        "ids": ("ids", {}),
        "set user id": ("set_user_id_programs", {}),
        "owner's secret in memory": ("scan", known_by_half(treasure.secret)),
        "neighbour's variable in memory": ("scan", known_by_half(others)),
        "own variable in memory": ("scan", known_by_half(own)),
        "token in memory": ("scan", known_by_half(token)),
        "left by a neighbour": ("find", {"key": KEY}),
        "calls": ("reached_calls", {}),
        "made namespaces": ("made_namespaces", {}),
        "joined namespaces": ("joined_namespaces", {}),
        "other abis": ("other_abis", {}),
        "settings": ("settings", {}),
        "maps": ("maps", {}),
        "kernel": ("secrets_of_the_kernel", {}),
        "mounts": ("unlocked_mounts", {"paths": ["/", "/usr", "/runtime/aenv", "/venv", "/project", "/etc/hosts"]}),
        "new mounts": ("new_mounts", {}),
        "control groups": ("control_groups", {}),
        "under proc": ("under_proc", {}),
        "left the root": ("escape_root", {"paths": [*files, "/boot", "/var/log"]}),
        "debugged": ("debug", {}),
        "odd sockets": ("odd_sockets", {}),
        "connected": ("connect", {"addresses": treasure.addresses}),
        "datagrams": ("send_datagrams", {"addresses": treasure.addresses}),
        "unix": ("connect_unix", {"names": [f"@{treasure.abstract}", str(treasure.unix), endpoint, f"@{others[:16]}"]}),
        "neighbour's port": ("connect", {"addresses": [["127.0.0.1", 8099]]}),
        "abstract names": ("abstract_names", {}),
        "interfaces": ("interfaces", {}),
        "kill": ("kill_first", {}),
        "kill all": ("kill_all", {}),
    }
    return {label: {"attack": name, "with": arguments} for label, (name, arguments) in steps.items()}


_IN_THE_OPEN = (
    *("secret files", "environments", "made at home", "opened secrets to write", "made devices", "processes"),
    *("signalled", "looked into a victim", "ids", "calls", "made namespaces", "other abis", "maps", "debugged"),
    *("odd sockets", "connected", "datagrams", "unix", "owner's secret in memory", "own variable in memory"),
)
"""What shows, where there is no jail, that an attack works. It touches nothing but what the test made."""
_FOR_INSTANCES = ("kill", "kill all", "looked into")
"""What a zygote, the first of its own namespace, could do to nobody but itself."""


async def as_agent(box: Box, tool: str, **arguments: Any) -> Any:
    """Call a tool as an agent does, who has another token than the owner."""
    headers = f"Content-Type: application/json\r\nAuthorization: Bearer {box.agent_token}\r\n".encode()
    answer = await http.request("POST", box.sandbox.url, f"/tools/{tool}", headers=headers, body=to_json(arguments))
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["data"]


def _way_out(treasure: Treasure) -> dict[str, Any]:
    """Attacks around an allow-list that names the first service, by address, and nothing else."""
    listed, unlisted = treasure.ports
    spellings = ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0")
    urls = [f"http://{host}:{unlisted}/" for host in spellings]
    urls += [f"http://user:{listed}@127.0.0.1:{unlisted}/", f"http://127.0.0.1:{listed}@127.0.0.1:{unlisted}/"]
    steps = {
        "listed": ("ask_proxy", {"port": PROXY_PORT, "urls": [f"http://127.0.0.1:{listed}/"]}),
        "unlisted": ("ask_proxy", {"port": PROXY_PORT, "urls": urls}),
        "tunnels": ("tunnel", {"port": PROXY_PORT, "targets": [f"{host}:{unlisted}" for host in spellings]}),
        "connected": ("connect", {"addresses": treasure.addresses}),
        "datagrams": ("send_datagrams", {"addresses": treasure.addresses}),
        "interfaces": ("interfaces", {}),
        "took the proxy's port": ("hijack_proxy", {"port": PROXY_PORT}),
        "odd sockets": ("odd_sockets", {}),
    }
    return {label: {"attack": name, "with": arguments} for label, (name, arguments) in steps.items()}


def gather(folder: Path) -> Loot:
    """Carry everything out, and end all of it."""
    with ExitStack() as stack:
        home = stack.enter_context(own_home())
        treasure = stack.enter_context(Treasure(home))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OWNERS_SECRET", treasure.secret)
        loot = Loot(treasure)
        tools = attacks(folder / "tools")
        asyncio.run(_inside(loot, treasure, folder, tools))
        loot.outside |= {"visits": list(treasure.visits), "datagrams": list(treasure.datagrams)}
        treasure.visits.clear()
        asyncio.run(_around_the_list(loot, treasure, folder, tools))
        loot.outside |= {"visits by the list": list(treasure.visits), "datagrams": list(treasure.datagrams)}
        asyncio.run(_in_the_open(loot, treasure, tools))
        assert treasure.victim is not None
        loot.outside["victim"] = treasure.victim.poll()
        return loot


async def _inside(loot: Loot, treasure: Treasure, folder: Path, tools: Path) -> None:
    async with ProcessEngine(isolation="strict") as engine:
        others, own, token = secrets.token_hex(24), secrets.token_hex(24), new_owner_token()
        # The first of its zygote: what is wrong with the second, it would have from the first.
        neighbour = await start(engine, tools, environment_variables={"NEIGHBOURS_SECRET": others})
        loot.found["neighbour"] = {
            "left": await neighbour.tool("attack", name="leave", arguments={"key": KEY, "text": others}),
            "listens": await neighbour.tool("attack", name="listen_unix", arguments={"name": others[:16]}),
            "finds": await neighbour.tool("attack", name="find", arguments={"key": KEY}),
            "reaches": await neighbour.tool("attack", name="connect_unix", arguments={"names": [f"@{others[:16]}"]}),
        }
        plan = attack_plan(treasure, neighbour, others, token, own)
        boxes = {}
        for place in PLACES:
            mine = {label: step for label, step in plan.items() if place != "zygote" or label not in _FOR_INSTANCES}
            path = tools if place == "tool" else attacks(folder / place, mine)
            given: dict[str, Any] = {"environment_variables": {"OWN_SECRET": own}, "preload": place == "zygote"}
            boxes[place] = await start(engine, path, token=token, **given)
            if place == "tool":
                loot.found[place] = await as_agent(boxes[place], "attack_all", plan=mine)
            else:
                loot.found[place] = await as_agent(boxes[place], "at_import")
        later = await start(engine, folder / "zygote", preload=True)
        steps = {label: plan[label] for label in ("own variable in memory", "token in memory")}
        loot.found["later"] = await later.tool("attack_all", plan=steps)
        loot.outside["healthy"] = [await box.answers() for box in (neighbour, *boxes.values())]


async def _around_the_list(loot: Loot, treasure: Treasure, folder: Path, tools: Path) -> None:
    plan = _way_out(treasure)
    network = {"allow": [f"127.0.0.1:{treasure.ports[0]}"]}
    async with ProcessEngine(isolation="strict") as engine:
        box = await start(engine, tools, network=network)
        loot.found["allowed tool"] = await box.tool("attack_all", plan=plan)
        box = await start(engine, attacks(folder / "allowed", plan), network=network)
        loot.found["allowed import"] = await box.tool("at_import")


async def _in_the_open(loot: Loot, treasure: Treasure, tools: Path) -> None:
    async with ProcessEngine(isolation="none") as engine:
        neighbour = await start(engine, tools)
        own, token = secrets.token_hex(24), new_owner_token()
        plan = attack_plan(treasure, neighbour, secrets.token_hex(24), token, own)
        box = await start(engine, tools, token=token, environment_variables={"OWN_SECRET": own})
        safe = {label: plan[label] for label in _IN_THE_OPEN}
        loot.found["open"] = await box.tool("attack_all", plan=safe)
