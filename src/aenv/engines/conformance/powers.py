"""Checks of commands and files inside, and of the powers that an engine may have: output, update, exec."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from aenv.engines.base import Engine, new_id
from aenv.engines.conformance.bench import Bench, Box, refusal, require, running_here
from aenv.engines.conformance.projects import NAME
from aenv.engines.conformance.table import check
from aenv.errors import AEnvError, NotFound
from aenv.models import ExecResult, State

FLOOD = 8
"""Megabytes; an engine keeps less than that."""


# Output


async def logs(bench: Bench) -> None:
    """What author code prints, to stdout or stderr, is in the logs without anybody flushing it."""
    await refusal(bench.engine.output(new_id(NAME), 0), NotFound)
    box, _ = await bench.lab.pair()
    text = secrets.token_hex(8)
    await box.tool("say", text=text)
    for line in (f"{text} to stdout", f"{text} to stderr"):
        await bench.eventually(f"{line!r} in the logs", partial(_printed, bench, box.id, line))


async def logs_apart(bench: Bench) -> None:
    """The logs of a sandbox hold nothing of another's."""
    first, second = await bench.lab.pair()
    text = secrets.token_hex(8)
    await first.tool("say", text=text)
    await bench.eventually("the line in its own log", lambda: _printed(bench, first.id, f"{text} to stdout"))
    require(not await _printed(bench, second.id, f"{text} to stdout"), "another sandbox's log has it")


async def secrets_are_hidden(bench: Bench) -> None:
    """The value of a variable that is named a secret is in no answer, and not in the logs."""
    value = secrets.token_hex(8)
    box = await bench.start(environment_variables={"PROBE_KEY": value}, secrets=["PROBE_KEY"])
    told = await box.tool("environ", name="PROBE_KEY")
    require(told == "***", f"its value is answered as {told!r}")
    await box.tool("say", text=f"key {value}")
    await bench.eventually("the line with three stars", lambda: _printed(bench, box.id, "key *** to stdout"))
    require(value.encode() not in (await bench.engine.output(box.id, 0)).data, "the logs have its value")


async def warm_secrets_are_hidden(bench: Bench) -> None:
    """The value of a secret that a warm sandbox is told is not in the logs either."""
    value = secrets.token_hex(8)
    box = await bench.start(warm=True, secrets=["PROBE_KEY"])
    await bench.engine.hide(box.id, {"PROBE_KEY": value})
    await box.post("/specialise", {"environment_variables": {"PROBE_KEY": value}, "secrets": ["PROBE_KEY"]})
    await box.tool("say", text=f"key {value}")
    await bench.eventually("the line with three stars", lambda: _printed(bench, box.id, "key *** to stdout"))
    require(value.encode() not in (await bench.engine.output(box.id, 0)).data, "the logs have its value")


async def logs_tail(bench: Bench) -> None:
    """With tail, the logs are the last lines only."""
    box = await bench.start()
    for number in range(5):
        await box.tool("say", text=f"line {number}")
    await bench.eventually("the last line", lambda: _printed(bench, box.id, "line 4 to stderr"))
    lines = [line async for line in bench.engine.logs(box.id)]
    tail = [line async for line in bench.engine.logs(box.id, tail=3)]
    require(tail == lines[-3:], f"tail=3 gave {tail}, and the log ends with {lines[-3:]}")


async def logs_follow(bench: Bench) -> None:
    """Following the logs gives what is printed from then on, and ends when the sandbox does."""
    box = await bench.start()
    seen = asyncio.Event()

    async def follow() -> None:
        async for line in bench.engine.logs(box.id, follow=True):
            if line.startswith("while following"):
                seen.set()

    following = asyncio.create_task(follow())
    try:
        await box.tool("say", text="while following")
        bench.waiting = "a line to be followed"
        await seen.wait()
        await bench.engine.delete(box.id)
        bench.waiting = "following to end with the sandbox"
        await following
    finally:
        following.cancel()


async def logs_of_a_flood(bench: Bench) -> None:
    """A flood of output is kept within bounds, the newest of it, and the sandbox lives on."""
    box = await bench.start()
    await box.tool("flood", megabytes=FLOOD)
    await bench.eventually("the line after the flood", lambda: _printed(bench, box.id, "after the flood"))
    kept = await bench.engine.output(box.id, 0)
    size = len(kept.data) / 1024 / 1024
    require(kept.start > 0 and size < FLOOD, f"of {FLOOD} MB, {size:.1f} MB are kept, from position {kept.start}")
    later = await bench.engine.output(box.id, kept.start + len(kept.data))
    require(not later.data, "the end of the output is not where its start and length say")
    require(await box.tool("echo", text="still here") == "still here", "a tool gave a wrong answer")


async def logs_of_the_dead(bench: Bench) -> None:
    """What a sandbox printed can be read after it failed."""
    box = await bench.start()
    await box.tool("say", text="last words")
    await bench.eventually("a line in the logs", lambda: _printed(bench, box.id, "last words to stdout"))
    await refusal(box.tool("crash"), AEnvError)
    await bench.eventually("it to be over", lambda: bench.gone(box.id))
    require(await _printed(bench, box.id, "last words to stdout"), "its last words are gone")


# Update


async def update_extends(bench: Bench) -> None:
    """Update lets a sandbox live beyond its first end."""
    await refusal(bench.engine.update(new_id(NAME), ttl=60), NotFound)
    box, ttl = await bench.start_for_a_moment()
    before = (await bench.engine.get(box.id)).expires_at or 0
    after = (await bench.engine.update(box.id, ttl=3600)).expires_at or 0
    require(after > before + 3000, f"expires_at was {before:.0f} and became {after:.0f}")
    bench.waiting = f"its first end, after {ttl:g} s, to pass"
    await asyncio.sleep(ttl + 1)
    require((await bench.engine.get(box.id)).state is State.RUNNING, "it ended all the same")
    require(await box.answers(), "it does not answer")


async def update_shortens(bench: Bench) -> None:
    """Update lets a sandbox end sooner."""
    box = await bench.start(ttl=3600)
    await bench.engine.update(box.id, ttl=0.5)
    await bench.eventually("the end of its new ttl", lambda: bench.gone(box.id))


# What it uses


async def used(bench: Bench) -> None:
    """What a sandbox used grows with what it does, and memory that it takes is counted."""
    await refusal(bench.engine.used(new_id(NAME)), NotFound)
    box = await bench.start()
    before = await bench.engine.used(box.id)
    python = await box.tool("python")
    code = "import time\nwhile time.process_time() < 0.5:\n    pass"
    require((await box.exec([python, "-IS", "-c", code])).returncode == 0, "a command failed")
    after = await bench.engine.used(box.id)
    require(after.cpu - before.cpu >= 0.4, f"half a second of work made {before.cpu:.2f} s to {after.cpu:.2f} s")
    require(after.cpu < 60, f"it is said to have used {after.cpu:.0f} s")
    await box.tool("keep", megabytes=64)
    grown = (await bench.engine.used(box.id)).memory - after.memory
    require(48 * 2**20 < grown < 256 * 2**20, f"64 MB that it took count as {grown / 2**20:.0f} MB")


# Commands and files: the runtime serves them to the owner, and an engine may bring them on a way of its own


async def exec_answers(bench: Bench) -> None:
    """A command runs in the work directory; its output, apart by stream, and its exit code come back."""
    box, _ = await bench.lab.pair()
    place, python = await box.tool("getcwd"), await box.tool("python")
    code = "import os, sys; print(os.getcwd()); print('to stderr', file=sys.stderr); sys.exit(5)"
    for way in _ways(bench, box, "exec"):
        done = await way.exec([python, "-IS", "-c", code])
        require(done.returncode == 5, f"the exit code is {done.returncode} instead of 5: {done.stderr!r}")
        require(done.stdout == f"{place}\n", f"it ran in {done.stdout!r}, and tools run in {place!r}")
        require(done.stderr == "to stderr\n", f"stderr is {done.stderr!r}")
        done = await way.exec([python, "-IS", "-c", "print(open('data.txt').read(), end='')"])
        require(done.returncode == 0, f"the exit code is {done.returncode} instead of 0: {done.stderr!r}")
        require(done.stdout == "of the project\n", f"data.txt reads {done.stdout!r}")


async def exec_of_no_command(bench: Bench) -> None:
    """A command that is not there is an error of ours, or ends with a code that says so."""
    box, _ = await bench.lab.pair()
    for way in _ways(bench, box, "exec"):
        with suppress(AEnvError):
            done = await way.exec(["aenv-no-such-command"])
            require(done.returncode in (126, 127), f"the exit code is {done.returncode}")


async def exec_takes_too_long(bench: Bench) -> None:
    """A command that takes too long is ended, and its result says so; the sandbox lives on."""
    box, _ = await bench.lab.pair()
    python = await box.tool("python")
    for way in _ways(bench, box, "exec"):
        marker = f"aenv-marker-{secrets.token_hex(8)}"
        done = await way.exec([python, "-IS", "-c", "import time; time.sleep(120)", marker], timeout=0.5)
        require(done.timed_out, f"it did not say that its time was over: {done}")
        require(done.returncode != 0, "its exit code is that of a success")
        require(not running_here(marker), "it still runs")
        require(await box.tool("echo", text="still here") == "still here", "a tool gave a wrong answer")


async def files_go_both_ways(bench: Bench) -> None:
    """What is uploaded is what is downloaded, byte for byte, and tools see the same file."""
    box, _ = await bench.lab.pair()
    place = await box.tool("getcwd")
    content = bytes(range(256)) * 4096
    for way in _ways(bench, box, "upload"):
        name = f"sent-{secrets.token_hex(4)}"
        await way.upload(name, content)
        got = await way.download(name)
        require(got == content, f"{len(content)} bytes were sent, and {len(got)} others came back")
        await way.upload(name, b"shorter")
        require(await box.tool("read", path=name) == "shorter", "a tool does not see what was uploaded")
        await box.tool("write", path=name, text="from inside")
        require(await way.download(name) == b"from inside", "what a tool wrote is not downloaded")
        require(await way.download(f"{place}/{name}") == b"from inside", "an absolute path is not the same file")
        await way.upload(name, b"")
        require(await way.download(name) == b"", "an empty file is not empty")


async def files_that_are_missing(bench: Bench) -> None:
    """Download of a file that is not there is NotFound."""
    box, _ = await bench.lab.pair()
    for way in _ways(bench, box, "upload"):
        await refusal(way.download("no-such-file"), NotFound)
        await refusal(way.download("no-such-folder/file"), NotFound)


async def exec_in_nothing(bench: Bench) -> None:
    """A command in an unknown id is NotFound."""
    await refusal(bench.engine.exec(new_id(NAME), ["true"]), NotFound)


async def files_of_nothing(bench: Bench) -> None:
    """Files of an unknown id are NotFound."""
    await refusal(bench.engine.upload(new_id(NAME), "file", b""), NotFound)
    await refusal(bench.engine.download(new_id(NAME), "file"), NotFound)


class _Way(NamedTuple):
    """How commands and files reach a sandbox."""

    exec: Callable[..., Awaitable[ExecResult]]
    upload: Callable[[str, bytes], Awaitable[None]]
    download: Callable[[str], Awaitable[bytes]]


def _ways(bench: Bench, box: Box, power: str) -> Iterator[_Way]:
    """Through the runtime; and through the engine, where it has the power."""
    yield _Way(box.exec, box.upload, box.download)
    engine = bench.engine
    if getattr(type(engine), power) is not getattr(Engine, power):
        yield _Way(partial(engine.exec, box.id), partial(engine.upload, box.id), partial(engine.download, box.id))


async def _printed(bench: Bench, id: str, line: str) -> bool:
    return line in [found async for found in bench.engine.logs(id)]


CHECKS = (
    check(logs, needs="output"),
    check(logs_apart, needs="output"),
    check(secrets_are_hidden, needs="output"),
    check(warm_secrets_are_hidden, needs="output"),
    check(logs_tail, needs="output"),
    check(logs_follow, needs="output"),
    check(logs_of_a_flood, needs="output"),
    check(logs_of_the_dead, needs="output"),
    check(update_extends, needs="update"),
    check(update_shortens, needs="update"),
    check(used, needs="used"),
    check(exec_answers),
    check(exec_of_no_command),
    check(exec_takes_too_long),
    check(files_go_both_ways),
    check(files_that_are_missing),
    check(exec_in_nothing, needs="exec"),
    check(files_of_nothing, needs="files"),
)
