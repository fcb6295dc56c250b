"""Checks of how sandboxes fail to start, die, run out of time, and leave nothing behind."""

from __future__ import annotations

import re
import secrets
import time

from aenv.engines.conformance.bench import Bench, Box, refusal, require, running_here
from aenv.engines.conformance.table import check
from aenv.errors import AEnvError, Invalid, NetworkError, NotFound, SandboxError, StartFailed
from aenv.models import Sandbox, State

MEMORY = 128
"""Megabytes that a sandbox is given to run out of."""


# Starts that fail


async def bad_import(bench: Bench) -> None:
    """A module that fails to import is StartFailed, with the last line of its traceback."""
    await _does_not_start(bench, "bad-import", "RuntimeError: broken on purpose at import")


async def bad_setup(bench: Bench) -> None:
    """A setup hook that raises is StartFailed, with what it raised."""
    await _does_not_start(bench, "bad-setup", "broken on purpose in setup")


async def bad_project(bench: Bench) -> None:
    """A project that is not there is Invalid or StartFailed, and leaves nothing alive."""
    exc = await refusal(bench.up(bench.id(), bench.spec("no-such-project")), Invalid, StartFailed)
    require("no-such-project" in f"{exc} {exc.hint}", f"the error does not name the directory: {exc}")
    require(not await bench.alive(), "something is alive")


# Ends


async def crash(bench: Bench) -> None:
    """When the process ends, its caller hears it, and the sandbox is FAILED with the exit code in its reason."""
    box = await bench.start()
    await refusal(box.tool("crash", code=3), NetworkError, SandboxError)
    failed = await _over(bench, box, State.FAILED)
    require(re.search(r"\b3\b", failed.reason), f"it ended with exit code 3, and its reason is {failed.reason!r}")
    found = {sandbox.id: sandbox.state for sandbox in await bench.engine.find(bench.labels)}
    require(found.get(box.id) is State.FAILED, f"find() shows {found}")


async def crash_apart(bench: Bench) -> None:
    """A sandbox that crashes harms no other of the same project."""
    victim, other = await bench.start(), await bench.start()
    await other.tool("count")
    await refusal(victim.tool("crash"), AEnvError)
    await bench.eventually("the one that crashed to be over", lambda: bench.gone(victim.id))
    require(await other.tool("count") == 2, "the other one lost its state")
    require((await bench.engine.get(other.id)).state is State.RUNNING, "the other one is not RUNNING")
    await bench.start()


async def ttl(bench: Bench) -> None:
    """A sandbox ends by itself when its time is over, not before, and its reason says so where it is kept."""
    box, _ = await bench.start_for_a_moment()
    ends = (await bench.engine.get(box.id)).expires_at or 0
    await bench.eventually("the end of its ttl", lambda: bench.gone(box.id))
    early = ends - time.time()
    require(early < 1, f"it ended {early:.1f} s before expires_at")
    try:
        ended = await bench.engine.get(box.id)
    except NotFound:
        pass
    else:
        require(ended.state is State.TERMINATED, f"its state is {ended.state}")
        require(re.search(r"ttl|time", ended.reason, re.IGNORECASE), f"its reason is {ended.reason!r}")
    await bench.eventually("its address to be silent", lambda: _silent(box))


async def out_of_memory(bench: Bench) -> None:
    """A sandbox that takes more memory than it was given is FAILED, and its reason says memory."""
    box = await bench.start(resources={"memory": f"{MEMORY}Mi"})
    await refusal(box.tool("eat", megabytes=4 * MEMORY), NetworkError, SandboxError)
    failed = await _over(bench, box, State.FAILED)
    require("memory" in failed.reason.lower(), f"its reason is {failed.reason!r}")


async def orphans(bench: Bench) -> None:
    """Processes that a tool left behind die with the sandbox, also those that left its session."""
    box = await bench.start()
    marker = f"aenv-marker-{secrets.token_hex(8)}"
    await box.tool("orphan", marker=marker)
    await bench.engine.delete(box.id)
    require(not running_here(marker), "a process outlived it")


async def _does_not_start(bench: Bench, project: str, shown: str) -> None:
    id = bench.id()
    exc = await refusal(bench.up(id, bench.spec(project)), StartFailed)
    require(shown in str(exc), f"the error does not say {shown!r}: {exc}")
    require(not await bench.alive(), "it is alive")
    try:
        failed = await bench.engine.get(id)
    except NotFound:
        return
    require(failed.state is State.FAILED, f"its state is {failed.state}")
    require(shown in failed.reason, f"its reason does not say {shown!r}: {failed.reason}")


async def _over(bench: Bench, box: Box, wanted: State) -> Sandbox:
    """The sandbox once it is over; it must be kept for a while."""

    async def look() -> Sandbox | None:
        found = await bench.engine.get(box.id)
        return found if found.state.over else None

    found = await bench.eventually(f"the sandbox to be {wanted}", look)
    require(found.state is wanted, f"its state is {found.state}")
    return found


async def _silent(box: Box) -> bool:
    return not await box.answers()


CHECKS = (
    check(bad_import),
    check(bad_setup),
    check(bad_project),
    check(crash),
    check(crash_apart),
    check(ttl),
    check(out_of_memory, needs="limits"),
    check(orphans),
)
