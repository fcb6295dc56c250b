"""What hostile code gets out of the two containers of a sandbox: the attacks on the process engine, on real daemons.

main          a tool of the project
second        a command in the second container, as the user of its image
second root   the same, where that user is root
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aenv import agent
from aenv.engines.base import new_id
from aenv.engines.conformance.bench import Box
from aenv.engines.docker.engine import DockerEngine
from aenv.errors import Unsupported
from aenv.models import Second
from aenv.runtime.tokens import new_owner_token
from tests.engines.docker.lab import Harbour
from tests.engines.hostile import ground
from tests.engines.hostile.loot import KEY, Loot, as_agent, attack_plan

PATIENCE = 600.0
PLACES = ("main", "second", "second root")
SECONDS = PLACES[1:]
everywhere = pytest.mark.parametrize("place", PLACES)
in_second = pytest.mark.parametrize("place", SECONDS)
POWERS = 0b10011101011
"""What root has in a second container, as a number."""
LEFT_OUT = (
    "private files",
    "made outside",
    "made inside",
    "opened to write",
    "descriptors",
    "debugged",
    "set user id",
    "named sockets",
)
"""What an image has of its own, or holds no promise of a container's."""
ITSELF = ("kill", "kill all", "looked into")
"""What a tool, in the first process of its container, would do to itself."""
RUN = """
import json, sys
sys.path.insert(0, "/shared")
import _attacks
json.dump(_attacks.run_all(json.load(open("/shared/plan.json"))), sys.stdout)
"""
ASK = """
import sys
from aenv.runtime.second import Second
done = Second("/aenv/link/second.sock").sync.exec(["python3", "-c", sys.argv[1]], timeout=300)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
"""


@pytest.fixture(scope="module")
def loot(daemon: str, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loot]:
    """What the attacks got, from each place."""
    try:
        agent.binary()
    except Unsupported as exc:
        pytest.skip(f"{exc} ({exc.hint})")
    with ExitStack() as stack:
        home = stack.enter_context(ground.own_home())
        treasure = stack.enter_context(ground.Treasure(home))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OWNERS_SECRET", treasure.secret)
        found = Loot(treasure)
        project = ground.attacks(tmp_path_factory.mktemp("hostile") / "project")
        asyncio.run(asyncio.wait_for(_gather(found, treasure, project, Harbour(daemon, base_image)), PATIENCE))
        found.outside |= {"visits": list(treasure.visits), "datagrams": list(treasure.datagrams)}
        assert treasure.victim is not None
        found.outside["victim"] = treasure.victim.poll()
        yield found


async def _gather(loot: Loot, treasure: ground.Treasure, project: Path, harbour: Harbour) -> None:
    others, own, token = secrets.token_hex(24), secrets.token_hex(24), new_owner_token()
    async with harbour.image("python3", user="0") as root, harbour.engine(state="") as engine:
        seconds = {"second": harbour.base_image, "second root": root}
        neighbour = await _start(engine, project, others, harbour.base_image)
        left = await neighbour.tool("attack", name="leave", arguments={"key": KEY, "text": others})
        loot.found["neighbour"] = {"left": left}
        steps = attack_plan(treasure, neighbour, others, token, own)
        steps = {label: step for label, step in steps.items() if label not in LEFT_OUT}
        boxes = {name: await _start(engine, project, own, image, token) for name, image in seconds.items()}
        for place, box in boxes.items():
            loot.found[place] = await _in_second(engine, box.id, project, steps)
            assert await box.answers()
        mine = {label: step for label, step in steps.items() if label not in ITSELF}
        loot.found["main"] = await as_agent(boxes["second"], "attack_all", plan=mine)
        loot.outside["daemon"] = (await harbour.daemon.about()).name
        loot.outside["healthy"] = [await box.answers() for box in (neighbour, *boxes.values())]


async def _start(engine: DockerEngine, project: Path, own: str, image: str, token: str = "") -> Box:
    token = token or new_owner_token()
    given = {"environment_variables": {"OWN_SECRET": own}, "second": Second(image=image), "startup_timeout": 300.0}
    return Box(await engine.create(new_id("hostile"), ground.spec(project, token, **given)), token)


async def _in_second(engine: DockerEngine, id: str, project: Path, steps: dict[str, Any]) -> dict[str, Any]:
    for file in (project / "src" / "_attacks").glob("*.py"):
        await engine.upload(id, f"/shared/_attacks/{file.name}", file.read_bytes())
    await engine.upload(id, "/shared/plan.json", json.dumps(steps).encode())
    done = await engine.exec(id, ["python3", "-c", ASK, RUN], timeout=400)
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@everywhere
@pytest.mark.parametrize("what", ["secret files", "hunt", "left the root", "environments"])
def test_the_owners_files_and_variables_cannot_be_read(loot: Loot, place: str, what: str) -> None:
    assert not loot.got(place, what)


@everywhere
@pytest.mark.parametrize("whose", ["owner's secret", "neighbour's variable", "token"])
def test_memory_holds_no_secret_of_others(loot: Loot, place: str, whose: str) -> None:
    assert loot.got(place, f"{whose} in memory") == 0


@in_second
def test_a_second_container_has_nothing_of_the_main_ones_variables(loot: Loot, place: str) -> None:
    assert loot.got("main", "own variable in memory") > 0
    assert loot.got(place, "own variable in memory") == 0


@everywhere
def test_nothing_is_shared_with_another_sandbox(loot: Loot, place: str) -> None:
    assert loot.found["neighbour"]["left"]
    assert loot.got(place, "left by a neighbour") == []


@everywhere
@pytest.mark.parametrize("what", ["made at home", "opened secrets to write", "made devices"])
def test_nothing_outside_can_be_written(loot: Loot, place: str, what: str) -> None:
    assert loot.got(place, what) == []


@everywhere
def test_no_device_of_the_machine_is_there(loot: Loot, place: str) -> None:
    own = {f"/dev/{name}" for name in ("urandom", "zero", "full", "random", "null", "tty", "ptmx", "pts/ptmx")}
    assert {path for path in loot.got(place, "devices") if not path.startswith("/dev/shm/")} <= own


@everywhere
def test_other_processes_are_not_to_be_seen(loot: Loot, place: str) -> None:
    seen = loot.got(place, "processes")
    assert seen["marked"] == []
    assert seen["number"] <= 4


@everywhere
@pytest.mark.parametrize("what", ["signalled", "looked into a victim"])
def test_other_processes_cannot_be_reached(loot: Loot, place: str, what: str) -> None:
    assert loot.got(place, what) == []


@in_second
def test_the_agent_is_out_of_reach(loot: Loot, place: str) -> None:
    assert set(loot.got(place, "looked into")) <= {"fd"}  # how many there are, and not what they are
    assert not loot.got(place, "kill")
    assert not loot.got(place, "kill all")


def test_who_kills_everything_kills_nobody_outside(loot: Loot) -> None:
    assert loot.outside["victim"] is None
    assert loot.outside["healthy"] == [True] * 3


@everywhere
@pytest.mark.parametrize("who", ["own", "child"])
def test_nobody_has_more_rights_than_they_should(loot: Loot, place: str, who: str) -> None:
    status = loot.got(place, "ids")[who]
    most = POWERS if place == "second root" else 0
    for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb"):
        assert int(status[name], 16) & ~most == 0, name
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@everywhere
def test_nothing_beyond_its_share_is_to_be_had(loot: Loot, place: str) -> None:
    least = {"root", "a group of root's"} if place == "second root" else set()
    assert set(loot.got(place, "more than a share")) <= least


@everywhere
@pytest.mark.parametrize("what", ["joined namespaces", "mounts", "new mounts", "maps"])
def test_what_leads_out_of_a_container_is_shut(loot: Loot, place: str, what: str) -> None:
    assert loot.got(place, what) == []


@everywhere
def test_no_namespace_can_be_made(loot: Loot, place: str) -> None:
    made = loot.got(place, "made namespaces")
    if loot.outside["daemon"] == "podman":  # whose own filter lets everybody make a namespace of users
        made = [one for one in made if not one.endswith(" user")]
    assert made == []


@everywhere
def test_calls_that_change_the_machine_are_refused(loot: Loot, place: str) -> None:
    shut = {"bpf", "perf_event_open", "reboot", "init_module", "kexec_load", "open_by_handle_at", "swapon", "acct"}
    if loot.outside["daemon"] != "podman":
        shut |= {"mount", "umount2", "pivot_root", "setns", "keyctl"}
    assert not shut & set(loot.got(place, "calls"))


@everywhere
def test_nothing_of_the_kernel_can_be_set(loot: Loot, place: str) -> None:
    own = {"/proc/1/oom_score_adj", "/proc/1/coredump_filter", "/proc/1/comm", "/proc/1/timens_offsets"}
    assert set(loot.got(place, "settings")) <= own
    assert set(loot.got(place, "control groups")) <= {"/sys/fs/cgroup/"}  # the place where they are, in memory


@everywhere
@pytest.mark.parametrize("what", ["connected", "unix", "neighbour's port", "interfaces"])
def test_nobody_can_be_reached(loot: Loot, place: str, what: str) -> None:
    assert loot.got(place, what) == []


@everywhere
def test_no_socket_of_another_is_to_be_seen(loot: Loot, place: str) -> None:
    own = {"/aenv/link/second.sock", "/run/aenv/runtime.sock"}
    assert set(loot.got(place, "abstract names")) <= own


@everywhere
def test_no_raw_socket_can_be_made(loot: Loot, place: str) -> None:
    assert set(loot.got(place, "odd sockets")) <= {"vsock"}  # what the daemon's own filter lets through


def test_nobody_was_reached(loot: Loot) -> None:
    assert loot.outside["visits"] == []
    assert loot.outside["datagrams"] == []
