"""Checks of the four verbs, and of what is built on them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from aenv.engines.base import new_id
from aenv.engines.conformance.bench import CHECK, RUN, Bench, Box, refusal, require, together
from aenv.engines.conformance.projects import NAME, VERSION
from aenv.engines.conformance.table import check
from aenv.errors import AEnvError, Conflict, NotFound, StartFailed
from aenv.models import Sandbox, State
from aenv.runtime.tokens import digest, new_owner_token

CLOCKS = 60.0
"""Seconds by which two machines' clocks may differ."""


# Create


async def create(bench: Bench) -> None:
    """A sandbox is made under the id that is given, and answers at its URL once it is RUNNING."""
    id, token = bench.id(), new_owner_token()
    made = await bench.engine.create(id, bench.spec(owner_token_sha256=digest(token)))
    require(made.id == id, f"the id {id!r} was given, and {made.id!r} came back")
    sandbox = await bench.engine.wait(id, bench.lab.limit)
    require(sandbox.id == id, f"get({id!r}) gave {sandbox.id!r}")
    require(sandbox.state is State.RUNNING, f"its state is {sandbox.state}")
    require(await Box(sandbox, token).tool("echo", text="hello") == "hello", "a tool gave a wrong answer")


async def running_is_healthy(bench: Bench) -> None:
    """RUNNING means that the health check passes, not only that a port is open."""
    box = await bench.start("slowly-healthy")
    status = await box.status("GET", "/health")
    require(status == 200, f"it is RUNNING, and /health answers {status}")


async def create_again(bench: Bench) -> None:
    """An id that is alive is returned as it is, and not made anew."""
    box = await bench.start()
    before = await box.tool("count")
    again = await bench.engine.create(box.id, bench.spec())
    require(again.url == box.sandbox.url, f"its URL was {box.sandbox.url} and became {again.url}")
    require(await box.tool("count") == before + 1, "its state was lost")


async def create_again_with_another_spec(bench: Bench) -> None:
    """An id that is alive keeps the spec it was made with."""
    box = await bench.start(environment_variables={"PROBE_VALUE": "before"}, labels={"colour": "green"})
    await bench.engine.create(
        box.id, bench.spec(environment_variables={"PROBE_VALUE": "after"}, labels={"colour": "blue"})
    )
    require(await box.tool("environ", name="PROBE_VALUE") == "before", "its variables changed")
    labels = (await bench.engine.get(box.id)).labels
    require(labels.get("colour") == "green", f"its labels changed to {labels}")


async def create_together(bench: Bench) -> None:
    """Several creates of one id at once give one sandbox."""
    id = bench.id()
    spec = bench.spec()
    made = {sandbox.created_at for sandbox in await together(bench.engine.create(id, spec) for _ in range(5))}
    require(len(made) == 1, f"they were made at {len(made)} different times")
    urls = {sandbox.url for sandbox in await together(bench.up(id, spec) for _ in range(5))}
    require(len(urls) == 1, f"they have {len(urls)} URLs")
    alive = await bench.alive()
    require(len(alive) == 1, f"find() shows {len(alive)} sandboxes")


async def create_after_the_end(bench: Bench) -> None:
    """An id that has failed, and is kept with its reason, is a Conflict."""
    box = await _crashed(bench)
    await refusal(bench.engine.create(box.id, bench.spec()), Conflict)


async def create_cancelled(bench: Bench) -> None:
    """A create that is cancelled, early or late, leaves nothing behind."""
    usual = bench.lab.slowest or 0.5
    for moment in (0.0, usual / 8, usual / 2):
        id = bench.id()
        creating = asyncio.create_task(bench.engine.create(id, bench.spec()))
        await asyncio.sleep(moment)
        if creating.cancel():
            await asyncio.wait({creating})
        if creating.cancelled():
            alive = await bench.alive()
            require(not alive, f"after {moment:.2f} s of create, {len(alive)} sandboxes are left")
        else:
            await bench.engine.delete(creating.result().id)


# Get and find


async def get_shows_what_was_asked_for(bench: Bench) -> None:
    """Get shows state, env, owner, labels, and when the sandbox was made and ends."""
    box, _ = await bench.lab.pair()
    found = await bench.engine.get(box.id)
    require(found.state is State.RUNNING, f"state is {found.state}")
    require(found.env == f"{NAME}@{VERSION}", f"env is {found.env!r}")
    require(found.owner == "ada", f"owner is {found.owner!r}")
    wanted = {"side": "first", "colour": "red", RUN: bench.lab.id, CHECK: "pair"}
    require(wanted.items() <= found.labels.items(), f"labels are {found.labels}")
    age = time.time() - found.created_at
    require(-CLOCKS < age < CLOCKS + 100 * bench.lab.limit, f"created_at is {age:.0f} s ago")
    require(found.expires_at, "expires_at is not set")
    lives = (found.expires_at or 0) - found.created_at
    require(abs(lives - 3600) < 2 + bench.lab.slowest, f"with a ttl of 3600 s, it lives {lives:.1f} s")
    require(found.token is None, "the engine knows the owner's token")


async def get_unknown(bench: Bench) -> None:
    """Get of an id that was never made is NotFound."""
    await refusal(bench.engine.get(new_id(NAME)), NotFound)


async def find_by_one_label(bench: Bench) -> None:
    """Find gives every sandbox with a label, and no other."""
    first, second = await bench.lab.pair()
    mine = {RUN: bench.lab.id}
    _same(await bench.engine.find({**mine, "colour": "red"}), first, second)
    _same(await bench.engine.find({**mine, "colour": "blue"}))
    _same(await bench.engine.find({**mine, "no-such-label": "red"}))


async def find_by_several_labels(bench: Bench) -> None:
    """Find gives the sandboxes that bear all the labels."""
    first, second = await bench.lab.pair()
    mine = {RUN: bench.lab.id, "colour": "red"}
    _same(await bench.engine.find({**mine, "side": "first"}), first)
    _same(await bench.engine.find({**mine, "side": "second"}), second)
    _same(await bench.engine.find({**mine, "side": "third"}))


async def find_all(bench: Bench) -> None:
    """Find without labels gives every sandbox, as get shows it."""
    pair = await bench.lab.pair()
    nothing: dict[str, str] = {}
    for labels in (None, nothing):
        found = {sandbox.id: sandbox for sandbox in await bench.engine.find(labels)}
        for box in pair:
            require(box.id in found, f"find({labels}) does not show {box.id}")
            listed, got = found[box.id], await bench.engine.get(box.id)
            same = (listed.url, listed.state, listed.labels) == (got.url, got.state, got.labels)
            require(same, f"find({labels}) shows {listed}, and get {got}")


async def restart(bench: Bench) -> None:
    """What is alive when the engine is closed is found by the next one of its kind, and still answers."""
    make = bench.another()
    async with make() as before:
        earlier = bench.through(before)
        box = await earlier.start(ttl=2 * bench.lab.limit)
        await box.tool("count")
    async with make() as after:
        later = bench.through(after)
        try:
            found = [sandbox.id for sandbox in await later.alive()]
            require(found == [box.id], f"find() shows {found}")
            sandbox = await after.get(box.id)
            require(sandbox.url == box.sandbox.url, f"its URL was {box.sandbox.url} and became {sandbox.url}")
            require(await box.tool("count") == 2, "its state was lost")
        finally:
            await after.delete(box.id)
        require(await later.gone(box.id), "it could not be deleted")


# Delete


async def delete(bench: Bench) -> None:
    """Delete returns when the sandbox is gone: nothing answers at its address, and find shows nothing alive."""
    box = await bench.start()
    require(await box.answers(), "it did not answer when it was RUNNING")
    await bench.engine.delete(box.id)
    require(not await box.answers(), "something still answers at its address")
    require(await bench.gone(box.id), "get() shows it alive")
    alive = await bench.alive()
    require(not alive, f"find() shows {alive}")


async def delete_twice(bench: Bench) -> None:
    """A second delete is a success, after the first and at the same time."""
    box = await bench.start()
    await together(bench.engine.delete(box.id) for _ in range(3))
    require(not await box.answers(), "something still answers at its address")
    await bench.engine.delete(box.id)


async def delete_unknown(bench: Bench) -> None:
    """Delete of an id that was never made is a success."""
    await bench.engine.delete(new_id(NAME))


async def delete_during_a_call(bench: Bench) -> None:
    """Delete waits for no tool: a call in flight ends with an error."""
    box = await bench.start()
    call = asyncio.create_task(box.tool("sleep", seconds=3600, mark="begun"))
    try:
        await bench.eventually("a call to begin", lambda: _exists(box, "begun"))
        bench.waiting = "delete, during a call"
        await bench.engine.delete(box.id)
        bench.waiting = "the call to end, after delete"
        await refusal(call, AEnvError)
    finally:
        call.cancel()


async def delete_during_create(bench: Bench) -> None:
    """Delete of a sandbox that is being created ends it, whatever create says then."""
    id = bench.id()
    creating = asyncio.create_task(bench.up(id, bench.spec()))
    try:
        await bench.eventually("create to begin", lambda: _begun(bench, id, creating))
        await bench.engine.delete(id)
        with suppress(AEnvError):
            await creating
        require(await bench.gone(id), "it is alive")
        require(not await bench.alive(), "find() shows it alive")
    finally:
        creating.cancel()
        await asyncio.wait({creating})


async def delete_failed(bench: Bench) -> None:
    """A sandbox that failed can be deleted like any other."""
    box = await _crashed(bench)
    await bench.engine.delete(box.id)
    require(await bench.gone(box.id), "get() shows it alive")


# Provision


async def provision(bench: Bench) -> None:
    """A provisioned sandbox opens to the token it comes with, and is gone after the block."""
    async with bench.engine.provision(bench.spec()) as sandbox:
        require(sandbox.token, "it has no token")
        box = Box(sandbox, sandbox.token or "")
        require(await box.post("/task/reward", {"value": 0.5}) == 0.5, "the reward is wrong")
    require(not await bench.alive(), "it is alive after the block")
    require(not await box.answers(), "it answers after the block")


async def provision_that_raises(bench: Bench) -> None:
    """A block that raises loses its sandbox, and raises what it raised."""
    try:
        async with bench.engine.provision(bench.spec()):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    require(not await bench.alive(), "it is alive after the block")


async def provision_cancelled(bench: Bench) -> None:
    """A block that is cancelled, while it starts or later, leaves nothing behind."""

    async def use(entered: asyncio.Event) -> None:
        async with bench.engine.provision(bench.spec()):
            entered.set()
            await asyncio.Event().wait()

    for early in (True, False):
        entered = asyncio.Event()
        using = asyncio.create_task(use(entered))
        if early:
            await asyncio.wait({using}, timeout=(bench.lab.slowest or 0.5) / 2)
        else:
            reached = asyncio.create_task(entered.wait())
            await asyncio.wait({using, reached}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
        using.cancel()
        await asyncio.wait({using})
        if not using.cancelled():
            using.result()
        alive = await bench.alive()
        require(not alive, f"{len(alive)} are alive, cancelled {'during the start' if early else 'in the block'}")


async def provision_that_never_starts(bench: Bench) -> None:
    """A sandbox that does not become healthy in time is StartFailed, and leaves nothing behind."""
    spec = bench.spec("never-healthy", startup_timeout=max(1.0, 2 * bench.lab.slowest))

    async def use() -> None:
        async with bench.engine.provision(spec):
            pass

    await refusal(use(), StartFailed)
    require(not await bench.alive(), "it is alive")


async def close_twice(bench: Bench) -> None:
    """Close can be called twice."""
    engine = bench.another()()
    await engine.find(bench.labels)
    await engine.close()
    await engine.close()


def _same(found: list[Sandbox], *wanted: Box) -> None:
    shown, due = sorted(sandbox.id for sandbox in found), sorted(box.id for box in wanted)
    require(shown == due, f"find() shows {shown} instead of {due}")


async def _crashed(bench: Bench) -> Box:
    """A sandbox that failed."""
    token = new_owner_token()
    box = Box(await bench.up(bench.id(), bench.spec(owner_token_sha256=digest(token))), token)
    await refusal(box.tool("crash"), AEnvError)
    await bench.eventually("a sandbox that crashed to be FAILED", lambda: bench.gone(box.id))
    return box


async def _exists(box: Box, path: str) -> bool:
    return await box.tool("read", path=path) is not None


async def _begun(bench: Bench, id: str, creating: asyncio.Task[Sandbox]) -> bool:
    if creating.done():
        return True
    try:
        await bench.engine.get(id)
    except NotFound:
        return False
    return True


CHECKS = (
    check(create),
    check(running_is_healthy),
    check(create_again),
    check(create_again_with_another_spec),
    check(create_together),
    check(create_after_the_end),
    check(create_cancelled),
    check(get_shows_what_was_asked_for),
    check(get_unknown),
    check(find_by_one_label),
    check(find_by_several_labels),
    check(find_all),
    check(restart, needs="restart"),
    check(delete),
    check(delete_twice),
    check(delete_unknown),
    check(delete_during_a_call),
    check(delete_during_create),
    check(delete_failed),
    check(provision),
    check(provision_that_raises),
    check(provision_cancelled),
    check(provision_that_never_starts),
    check(close_twice, needs="another"),
)
