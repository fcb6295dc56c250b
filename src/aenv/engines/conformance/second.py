"""Checks of sandboxes with a second container. Its image, or the directory that it is made of, needs a shell, ``cat``,
``echo``, ``ls`` and ``sleep``, and nothing else."""

from __future__ import annotations

import secrets
from typing import Any

from aenv.engines.conformance.bench import Bench, Box, refusal, require, running_here
from aenv.engines.conformance.table import check
from aenv.errors import AEnvError, Invalid, StartFailed, Unsupported
from aenv.models import Second, State

SHARED = "/shared"
"""The directory that both containers see."""
PLACE = "/tmp/made"  # noqa: S108
"""Where files can be made, whatever the second container is made of."""


def _given(bench: Bench) -> Second:
    if not bench.lab.second:
        raise Unsupported("neither an image nor a directory for the second container was given")
    return _made_of(bench.lab.second)


def _made_of(text: str) -> Second:
    """No image's name begins like a path."""
    return Second(directory=text) if text.startswith("/") else Second(image=text)


async def _start(bench: Bench, **fields: Any) -> Box:
    return await bench.start(second=_given(bench), **fields)


async def second_runs_commands(bench: Bench) -> None:
    """A command in the second container gets its input; its output, apart by stream, and its exit code come back."""
    box = await _start(bench)
    done = await box.tool("second", command="cat; echo to stderr >&2; exit 5", given="typed")
    wanted = {"returncode": 5, "stdout": "typed", "stderr": "to stderr\n", "timed_out": False}
    require(done == wanted, f"it answered {done}")
    done = await box.tool("second", command=["echo", "a  b", "$HOME"])
    require(done["stdout"] == "a  b $HOME\n", f"arguments became {done['stdout']!r}")
    done = await box.tool("second", command="kill -USR1 $$; sleep 60")
    require(done["returncode"] == -10, f"a command that a signal ended has the exit code {done['returncode']}")
    error = await refusal(box.tool("second", command=["aenv-no-such-command"]), AEnvError)
    require("aenv-no-such-command" in error.message, f"the error does not name the command: {error}")


async def second_takes_too_long(bench: Bench) -> None:
    """A command in the second container that takes too long is ended with all that it started, and its result says
    so."""
    box = await _start(bench)
    marker = f"86{secrets.randbelow(10**9):09}"
    done = await box.tool("second", command=f"sleep {marker} & sleep {marker}", timeout=0.5)
    require(done["timed_out"] and done["returncode"] != 0, f"it did not say that its time was over: {done}")
    require(not running_here(marker), "it still runs")
    done = await box.tool("second", command="echo still here")
    require(done["stdout"] == "still here\n", f"the next command answered {done}")


async def second_files(bench: Bench) -> None:
    """Files of the second container are written and read, with their folders; one that is missing is an error."""
    box = await _start(bench)
    by_tool, inside, nowhere = f"{PLACE}/by/tool", f"{PLACE}/inside", f"{PLACE}/nowhere"
    await box.tool("second_write", path=by_tool, text="from the tool")
    require((await box.tool("second", command=f"cat {by_tool}"))["stdout"] == "from the tool", "it is not there")
    await box.tool("second", command=f"echo from inside > {inside}")
    require(await box.tool("second_read", path=inside) == "from inside\n", "it reads otherwise")
    error = await refusal(box.tool("second_read", path=nowhere), AEnvError)
    require(nowhere in error.message, f"the error does not name the file: {error}")


async def second_shares_a_directory(bench: Bench) -> None:
    """Both containers see one directory, and each what the other wrote there."""
    box = await _start(bench)
    await box.tool("write", path=f"{SHARED}/by-main", text="main")
    done = await box.tool("second", command=f"cat {SHARED}/by-main && echo second > {SHARED}/by-second")
    require((done["returncode"], done["stdout"]) == (0, "main"), f"the second one answered {done}")
    require(await box.tool("read", path=f"{SHARED}/by-second") == "second\n", "the main one does not see the file")


async def second_is_apart(bench: Bench) -> None:
    """The second container sees nothing else of the main one: not its project, token, variables or processes."""
    value = secrets.token_hex(8)
    box = await _start(bench, environment_variables={"PROBE_VALUE": value}, network="none")
    done = await box.tool(
        "second", command="export -p; cat /proc/[0-9]*/environ; ls -a / /work /aenv/project /run/aenv"
    )
    seen = done["stdout"] + done["stderr"]
    require(value not in seen and "AENV_" not in seen, f"it has variables of the main one: {seen[:500]}")
    require("data.txt" not in seen and "runtime.sock" not in seen, f"it sees files of the main one: {seen[:500]}")
    done = await box.tool("second", command="cat /proc/[0-9]*/cmdline")
    require("aenv.runtime" not in done["stdout"], "it sees processes of the main one")
    main = " ".join(await box.tool("processes"))
    require("aenv-agent" not in main, "the main one sees processes of the second")


async def second_ends_with_it(bench: Bench) -> None:
    """The second container ends with the sandbox, with all that runs in it."""
    box = await _start(bench)
    marker = f"87{secrets.randbelow(10**9):09}"
    await box.tool("second", command=f"sleep {marker} >/dev/null 2>&1 &")
    await bench.engine.delete(box.id)
    require(not running_here(marker), "what ran in the second container still runs")


async def second_ends_with_a_crash(bench: Bench) -> None:
    """The second container ends when the main one has crashed."""
    box = await _start(bench)
    marker = f"88{secrets.randbelow(10**9):09}"
    await box.tool("second", command=f"sleep {marker} >/dev/null 2>&1 &")
    await refusal(box.tool("crash"), AEnvError)
    await bench.eventually("it to be over", lambda: bench.gone(box.id))
    await bench.eventually("the second one to end", lambda: _ended(marker))


async def second_is_needed(bench: Bench) -> None:
    """A second container that cannot be had fails the start, and the reason names it."""
    what, where = ("directory", "") if _given(bench).directory else ("image", "127.0.0.1:1")
    missing = f"{where}/aenv-no-such-{what}-{secrets.token_hex(4)}{':1' if where else ''}"
    spec = bench.spec(second=_made_of(missing))
    error = await refusal(bench.up(bench.id(), spec), StartFailed, Invalid)
    require(missing in error.message, f"the reason does not name the {what}: {error.message}")
    require(await bench.alive() == [], "something of it is alive")


async def second_is_lasting(bench: Bench) -> None:
    """Another engine finds a sandbox again with its second container, which works as before."""
    if why := bench.lab.cannot.get("restart"):
        raise Unsupported(why)
    another = bench.another()
    box = await _start(bench)
    await box.tool("second", command="echo kept > /tmp/kept")
    async with another() as engine:
        found = await engine.get(box.id)
        require(found.state is State.RUNNING, f"another engine says it is {found.state}: {found.reason}")
        done = await box.tool("second", command="cat /tmp/kept")
        require(done["stdout"] == "kept\n", f"the second one answered {done}")
        await engine.delete(box.id)
    await refusal(box.tool("second", command="cat /tmp/kept"), AEnvError)


async def _ended(marker: str) -> bool:
    return not running_here(marker)


CHECKS = (
    check(second_runs_commands, needs="second"),
    check(second_takes_too_long, needs="second"),
    check(second_files, needs="second"),
    check(second_shares_a_directory, needs="second"),
    check(second_is_apart, needs="second"),
    check(second_ends_with_it, needs="second"),
    check(second_ends_with_a_crash, needs="second"),
    check(second_is_needed, needs="second"),
    check(second_is_lasting, needs="second"),
)
