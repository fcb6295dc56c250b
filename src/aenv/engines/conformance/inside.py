"""Checks of what author code finds in a sandbox, who may reach it, and what stays apart from other sandboxes."""

from __future__ import annotations

import secrets
from pathlib import Path

from aenv.engines.conformance.bench import Bench, require
from aenv.engines.conformance.table import check
from aenv.errors import AEnvError


async def serves_every_route(bench: Bench) -> None:
    """Tools, rewards, functions and MCP are all served at the sandbox's URL."""
    box, _ = await bench.lab.pair()
    require(await box.tool("add", a=2, b=3) == 5, "the tool is wrong")
    require(await box.post("/task/reward", {"value": 0.25}) == 0.25, "the reward is wrong")
    require(await box.post("/functions/ping", {}) == "pong", "the function is wrong")
    require(await box.status("GET", "/tools", box.token) == 200, "the tools cannot be listed")
    status = await box.status("GET", "/mcp", box.token)
    require(status not in (401, 403, 404), f"/mcp answers {status}")


async def knows_its_id(bench: Bench) -> None:
    """Author code is told the id that the sandbox was created under."""
    for box in await bench.lab.pair():
        told = (await box.tool("instance"))["id"]
        require(told == box.id, f"{box.id} is told that it is {told!r}")


async def variables(bench: Bench) -> None:
    """The variables of the spec are those of the process, and in the context."""
    box, _ = await bench.lab.pair()
    value = await box.tool("environ", name="PROBE_VALUE")
    require(value == "first", f"PROBE_VALUE is {value!r} in the process")
    told = (await box.tool("instance"))["variables"]
    require(told.get("PROBE_VALUE") == "first", f"the context has {told}")


async def variables_of_the_project(bench: Bench) -> None:
    """The variables of deployConfig are there, and the spec's come before them."""
    first, second = await bench.lab.pair()
    for box, name, wanted in (
        (first, "PROBE_PROJECT", "project"),
        (first, "PROBE_BOTH", "instance"),
        (second, "PROBE_BOTH", "project"),
    ):
        value = await box.tool("environ", name=name)
        require(value == wanted, f"{name} is {value!r} instead of {wanted!r}")


async def arguments(bench: Bench) -> None:
    """The arguments of the spec are sys.argv[1:], and in the context."""
    first, second = await bench.lab.pair()
    for box, wanted in ((first, ["--side", "first", "a b"]), (second, [])):
        given = await box.tool("argv")
        require(given == wanted, f"sys.argv[1:] is {given} instead of {wanted}")
        told = (await box.tool("instance"))["arguments"]
        require(told == wanted, f"the context has {told} instead of {wanted}")


async def seed(bench: Bench) -> None:
    """The seed of the spec is in the context, and none when none was given."""
    first, second = await bench.lab.pair()
    for box, wanted in ((first, 7), (second, None)):
        told = (await box.tool("instance"))["seed"]
        require(told == wanted, f"the seed is {told} instead of {wanted}")


async def datasource(bench: Bench) -> None:
    """The data that the spec names can be read where the context says."""
    first, second = await bench.lab.pair()
    place = (await first.tool("instance"))["datasource"]
    require(place, "the context has no datasource")
    text = await first.tool("read", path=f"{place}/table.txt")
    require(text == "1,2,3\n", f"its file reads {text!r}")
    place = (await second.tool("instance"))["datasource"]
    require(not place, f"a sandbox without one is told of {place!r}")


async def datasource_read_only(bench: Bench) -> None:
    """The data that the spec names cannot be changed from inside."""
    box, _ = await bench.lab.pair()
    place = (await box.tool("instance"))["datasource"]
    for name in ("table.txt", "new.txt"):
        try:
            await box.tool("write", path=f"{place}/{name}", text="changed")
        except AEnvError:
            continue
        require(False, f"{name} was written")


async def work_directory(bench: Bench) -> None:
    """The work directory holds the project's files and can be written to; the project itself does not change."""
    box = await bench.start()
    text = await box.tool("read", path="data.txt")
    require(text == "of the project\n", f"the project's data.txt reads {text!r}")
    project = bench.lab.projects / "probe"
    for name in ("made.txt", "data.txt"):
        before = _text(project / name)
        await box.tool("write", path=name, text="from inside")
        require(await box.tool("read", path=name) == "from inside", f"what was written to {name} cannot be read")
        after = _text(project / name)
        require(after == before, f"the project's own {name} held {before!r} and now holds {after!r}")


async def at_import(bench: Bench) -> None:
    """What a module reads while it is imported is the sandbox's own: variables, arguments, randomness."""
    first = await bench.start("at-import", environment_variables={"PROBE_VALUE": "one"}, arguments=["one"])
    second = await bench.start("at-import", environment_variables={"PROBE_VALUE": "two"}, arguments=["two"])
    seen = [await box.tool("seen") for box in (first, second)]
    for found, wanted in zip(seen, ("one", "two"), strict=True):
        require(found["value"] == wanted, f"PROBE_VALUE was {found['value']!r} instead of {wanted!r}")
        require(found["arguments"] == [wanted], f"sys.argv[1:] was {found['arguments']} instead of {[wanted]}")
    require(seen[0]["random"] != seen[1]["random"], "both drew the same random number")


# Who may


async def needs_a_token(bench: Bench) -> None:
    """Without a token, only the health of a sandbox can be asked."""
    box, _ = await bench.lab.pair()
    for method, path in (("GET", "/tools"), ("POST", "/tools/count"), ("POST", "/mcp"), ("POST", "/task/reward")):
        for token in (None, "guessed"):
            status = await box.status(method, path, token)
            require(status == 401, f"{method} {path} answers {status} to {token or 'no token'}")
    status = await box.status("GET", "/health")
    require(status == 200, f"/health answers {status}")


async def agents_have_tools_only(bench: Bench) -> None:
    """The agent's token opens the tools, and neither rewards nor functions."""
    box, _ = await bench.lab.pair()
    status = await box.status("GET", "/tools", box.agent_token)
    require(status == 200, f"/tools answers {status} to an agent")
    for path in ("/task/reward", "/functions/ping"):
        status = await box.status("POST", path, box.agent_token)
        require(status == 403, f"{path} answers {status} to an agent")


async def tokens_apart(bench: Bench) -> None:
    """The tokens of a sandbox do not open another."""
    first, second = await bench.lab.pair()
    for token in (first.token, first.agent_token):
        status = await second.status("GET", "/tools", token)
        require(status == 401, f"/tools answers {status} to another sandbox's token")


# Apart


async def state_apart(bench: Bench) -> None:
    """What author code keeps in memory is not shared."""
    first, second = await bench.start(), await bench.start()
    for _ in range(3):
        await first.tool("count")
    counted = await second.tool("count")
    require(counted == 1, f"a fresh sandbox counts {counted}")


async def variables_apart(bench: Bench) -> None:
    """A sandbox has no variable of another."""
    _, second = await bench.lab.pair()
    value = await second.tool("environ", name="PROBE_VALUE")
    require(value == "second", f"PROBE_VALUE is {value!r}")
    value = await second.tool("environ", name="PROBE_FIRST")
    require(value is None, f"a variable of the other one reads {value!r}")


async def files_apart(bench: Bench) -> None:
    """What one sandbox writes in its work directory is not seen by another, now or later."""
    first, second = await bench.lab.pair()
    name = f"apart-{secrets.token_hex(4)}.txt"
    await first.tool("write", path=name, text="mine")
    for box in (second, await bench.start()):
        require(await box.tool("read", path=name) is None, "another sandbox reads it")


async def tmp_apart(bench: Bench) -> None:
    """What one sandbox writes in /tmp is seen neither by another nor on this machine."""
    first, second = await bench.lab.pair()
    file = Path("/tmp") / f"aenv-apart-{secrets.token_hex(8)}.txt"  # noqa: S108
    await first.tool("write", path=str(file), text="mine")
    try:
        require(await second.tool("read", path=str(file)) is None, "another sandbox reads it")
        require(not file.exists(), "it is on this machine")
    finally:
        file.unlink(missing_ok=True)


async def processes_apart(bench: Bench) -> None:
    """A sandbox sees no process of another."""
    first, second = await bench.lab.pair()
    marker = f"aenv-marker-{secrets.token_hex(8)}"
    await first.tool("orphan", marker=marker)
    seen = [line for line in await second.tool("processes") if marker in line]
    require(not seen, f"it sees {seen}")


async def randomness_apart(bench: Bench) -> None:
    """Two sandboxes draw different random numbers."""
    first, second = await bench.start(), await bench.start()
    drawn = zip(await first.tool("randomness"), await second.tool("randomness"), strict=True)
    same = [one for one, other in drawn if one == other]
    require(not same, f"both drew {same}")


async def state_goes_elsewhere(bench: Bench) -> None:
    """What is saved in one sandbox is loaded in another: memory, files of the work directory and of /tmp, and what was
    removed."""
    box, other = await bench.start(), await bench.start()
    name = f"kept-{secrets.token_hex(4)}"
    for path in (name, f"/tmp/{name}"):  # noqa: S108
        await box.tool("write", path=path, text=f"at {path}")
    for _ in range(3):
        await box.tool("count")
    await box.exec(["rm", "data.txt"])
    await other.tool("write", path=f"{name}-more", text="of its own")
    saved = await box.save()
    drawn = await box.tool("randomness")
    await other.load(saved)
    require(await other.tool("count") == 4, "it does not have the memory")
    for path in (name, f"/tmp/{name}"):  # noqa: S108
        require(await other.tool("read", path=path) == f"at {path}", f"it does not have {path}")
    require(await other.tool("read", path="data.txt") is None, "a file is there that was removed")
    require(await other.tool("read", path=f"{name}-more") is None, "it has kept a file of its own")
    require((await other.tool("randomness"))[0] == drawn[0], "it draws another number")
    require(await box.tool("count") == 4, "the one that was saved is not as it was")


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


CHECKS = (
    check(serves_every_route),
    check(knows_its_id),
    check(variables),
    check(variables_of_the_project),
    check(arguments),
    check(seed),
    check(datasource, needs="datasource"),
    check(datasource_read_only, needs="datasource"),
    check(work_directory),
    check(at_import),
    check(needs_a_token),
    check(agents_have_tools_only),
    check(tokens_apart),
    check(state_apart),
    check(variables_apart),
    check(files_apart),
    check(tmp_apart),
    check(processes_apart),
    check(randomness_apart),
    check(state_goes_elsewhere),
)
