"""Hostile code in a second sandbox gets nothing either: of the machine, its owner, others, or its own instance.

Every attack that only looks is carried out once, by a command that a tool runs there; the tests read what it got.
"""

from __future__ import annotations

import asyncio
import json
import platform
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.conformance.bench import Box
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.process.second import SOCKET
from aenv.errors import Unsupported
from aenv.models import Second
from aenv.runtime.tokens import new_owner_token
from tests.engines.hostile.ground import ATTACKS, PATIENCE, Treasure, attacks, own_home, start
from tests.engines.hostile.loot import KEY, Loot, attack_plan
from tests.engines.process import dual

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are for x86-64")
CAPABILITIES = ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")
OWN = ["/tmp", "/task", "/dev/shm", "/home/sandbox", "/shared"]
CODE = (
    "import json, sys; sys.path.insert(0, '/task'); import _attacks; "
    "json.dump(_attacks.run_all(json.load(sys.stdin)), sys.stdout)"
)


@pytest.fixture(scope="module")
def second(strict_is_to_be_had: None, tmp_path_factory: pytest.TempPathFactory) -> Loot:
    """What the attacks got there."""
    if shutil.which("python3", path="/usr/bin:/usr/local/bin") is None:
        pytest.skip("needs python3 below /usr, which second sandboxes see")
    folder = tmp_path_factory.mktemp("second")
    with ExitStack() as stack:
        home = stack.enter_context(own_home())
        try:
            agent = dual.compiled()
        except Unsupported as exc:
            pytest.skip(f"needs the agent of second sandboxes: {exc.message}")
        treasure = stack.enter_context(Treasure(home))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OWNERS_SECRET", treasure.secret)
        loot = Loot(treasure)
        asyncio.run(_gather(loot, treasure, folder, dual.Duals(folder, folder / "home", agent)))
        loot.outside |= {"visits": list(treasure.visits), "datagrams": list(treasure.datagrams)}
        assert treasure.victim is not None
        loot.outside["victim"] = treasure.victim.poll()
        return loot


async def _gather(loot: Loot, treasure: Treasure, folder: Path, duals: dual.Duals) -> None:
    task = folder / "task"
    shutil.copytree(ATTACKS / "src", task, ignore=shutil.ignore_patterns("__pycache__"))
    async with ProcessEngine(isolation="strict") as engine:
        others, own, token = secrets.token_hex(24), secrets.token_hex(24), new_owner_token()
        neighbour = await start(engine, attacks(folder / "tools"), environment_variables={"NEIGHBOURS_SECRET": others})
        await neighbour.tool("attack", name="leave", arguments={"key": KEY, "text": others})
        await neighbour.tool("attack", name="listen_unix", arguments={"name": others[:16]})
        given: dict[str, Any] = {"environment_variables": {"OWN_SECRET": own}, "second": Second(directory=str(task))}
        box = await start(engine, duals.project, token=token, **given)
        other = await start(engine, duals.project, second=Second(directory=str(task)))
        loot.found["other"] = await _run(other, {"left": {"attack": "leave", "with": {"key": KEY, "text": own}}})
        plan = attack_plan(treasure, neighbour, others, token, own)
        plan["made inside"] = {"attack": "make_in", "with": {"folders": OWN}}
        loot.found["second"] = await _run(box, plan)
        loot.outside["healthy"] = [await one.answers() for one in (neighbour, box, other)]
        loot.outside["goes on"] = (await box.tool("run", command="echo on"))["out"]


async def _run(box: Box, plan: dict[str, Any]) -> Any:
    command = f'exec python3 -c "{CODE}"'
    done = await box.tool("run", command=command, input=json.dumps(plan), timeout=PATIENCE)
    assert done["code"] == 0, done
    return json.loads(done["out"])


@pytest.mark.parametrize(
    "what",
    [
        *("secret files", "private files", "hunt", "left the root", "environments", "named sockets"),
        *("made outside", "made at home", "opened to write", "opened secrets to write", "made devices"),
        *("signalled", "looked into", "looked into a victim", "kill", "more than a share", "joined namespaces"),
        *("settings", "maps", "kernel", "mounts", "new mounts", "control groups", "debugged"),
        *("connected", "unix", "neighbour's port", "interfaces", "odd sockets"),
    ],
)
def test_it_gets_nothing(second: Loot, what: str) -> None:
    assert not second.got("second", what)


@on_x86
@pytest.mark.parametrize("what", ["calls", "made namespaces", "other abis"])
def test_calls_that_lead_out_are_refused(second: Loot, what: str) -> None:
    assert second.got("second", what) == []


@pytest.mark.parametrize("whose", ["owner's secret", "neighbour's variable", "own variable", "token"])
def test_memory_holds_no_secret_not_even_of_its_own_instance(second: Loot, whose: str) -> None:
    assert second.got("second", f"{whose} in memory") == 0


@pytest.mark.parametrize("who", ["own", "child"])
def test_it_has_no_rights(second: Loot, who: str) -> None:
    status = second.got("second", "ids")[who]
    assert {name: int(status[name], 16) for name in CAPABILITIES} == dict.fromkeys(CAPABILITIES, 0)
    assert status["NoNewPrivs"] == "1"
    assert (status["Seccomp"], status["Seccomp_filters"]) == ("2", "2")
    assert len(set(status["Uid"].split())) == 1
    assert int(status["Uid"].split()[0]) >= 1000
    assert status["Groups"] == ""
    assert second.got("second", "core") == 0


def test_it_sees_no_process_but_the_agent_and_its_own(second: Loot) -> None:
    seen = second.got("second", "processes")
    assert seen["marked"] == []
    assert seen["number"] <= 2  # the agent and the attack itself


def test_it_writes_what_is_its_own(second: Loot) -> None:
    assert set(second.got("second", "made inside")) == set(OWN)


def test_there_are_no_devices_but_the_harmless_ones(second: Loot) -> None:
    harmless = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/pts/ptmx"}
    assert set(second.got("second", "devices")) <= harmless


def test_it_has_nothing_open_that_is_not_its_own(second: Loot) -> None:
    rows = second.got("second", "descriptors")
    assert not [row for row in rows if "family" in row], "no socket, not even the agent's"
    assert {row["target"].split(":")[0] for row in rows} <= {"pipe"} | {f"/proc/{pid}/fd" for pid in range(1, 1000)}


def test_it_hears_the_name_of_the_agents_socket_which_is_not_there(second: Loot) -> None:
    assert second.got("second", "abstract names") == [SOCKET]
    assert second.got("second", "named sockets") == []


def test_nothing_is_shared_with_another_instance(second: Loot) -> None:
    assert {"shm", "msg", "sem", "/dev/shm", "/tmp"} <= set(second.got("other", "left"))
    assert second.got("second", "left by a neighbour") == []


def test_nobody_outside_notices(second: Loot) -> None:
    assert second.outside["visits"] == []
    assert second.outside["datagrams"] == []
    assert second.outside["victim"] is None
    assert second.outside["healthy"] == [True] * 3
    assert second.outside["goes on"] == "on\n"
