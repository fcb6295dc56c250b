"""Every fault that these tests know: in which phase it strikes, how it is brought about, and which ends are honest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from aenv.client import handle
from aenv.models import Sandbox
from aenv.rl import Episode, OpenAIAgent, Rules, Task, Trajectory, rollout
from aenv.rl.playing import Agent
from tests.engines.process.lab import processes
from tests.rl import proxies, standin
from tests.rl.bench import TURNS, Bench
from tests.rl.proxies import Trigger
from tests.support import eventually

LOST = frozenset({"sandbox_lost", "network"})
"""What the end of a sandbox looks like to one whom nobody tells why."""
SHORT = 2.0
"""Seconds for what never comes."""
SMALL = {"memory": "192Mi"}


@dataclass(frozen=True)
class Case:
    """One way in which an episode is broken."""

    phase: str
    kinds: frozenset[str]
    env: str = "saboteur"
    options: dict[str, Any] = field(default_factory=dict)
    """Of the ``Environment``."""
    arguments: tuple[str, ...] = ()
    reward: dict[str, Any] = field(default_factory=dict)
    tool: str = ""
    """What the tool is told in the turn of the fault."""
    tool_timeout: float | None = None
    rules: dict[str, Any] = field(default_factory=dict)
    act: str | Callable[[Bench, Sandbox], Awaitable[str | None]] | None = None
    """What is done when the exchange of the phase comes."""
    exchange: str = ""
    model: Any = None
    """What the model answers in the turn of the fault."""
    agent: Callable[[Episode, Task], Awaitable[Any]] | None = None


# What is done from outside


async def evict(bench: Bench, sandbox: Sandbox) -> None:
    await bench.engine.delete(sandbox.id)


async def kill_instance(bench: Bench, sandbox: Sandbox) -> None:
    found = await bench.family.runtime(bench.engine, sandbox.id)  # type: ignore[arg-type]
    found.kill()


async def kill_zygotes(bench: Bench, sandbox: Sandbox) -> None:
    for found in (*bench.family.instances(), *bench.family.zygotes()):
        found.kill()


async def kill_spawner(bench: Bench, sandbox: Sandbox) -> None:
    held = {found.pid for found in (*bench.family.instances(), *bench.family.firsts())}
    bench.family.spawner.kill()
    await eventually("the end of what it held", lambda: not [found for found in processes(held) if not found.zombie])


async def expire(bench: Bench, sandbox: Sandbox) -> str:
    await bench.engine.update(sandbox.id, ttl=0.01)
    await asyncio.sleep(0.2)  # what comes is the end of its time; the exchange then finds it gone
    return proxies.CUT


# Agents that break


async def raises(env: Episode, task: Task) -> None:
    await env.call_tool("work")
    raise ValueError("broken on purpose")


def not_async(env: Episode, task: Task) -> Any:
    return "done"


async def hangs(env: Episode, task: Task) -> None:
    await env.call_tool("work")
    await asyncio.Event().wait()


async def deaf(env: Episode, task: Task) -> str:
    """Catches what ends it, and goes on."""
    try:
        await asyncio.Event().wait()
    except BaseException:
        await env.call_tool("work")
    return "went on"


async def cancels_itself(env: Episode, task: Task) -> None:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


async def gives_back(env: Episode, task: Task) -> str:
    """Uses the environment as in a program of its own, where it is given back at the end of the block."""
    async with env:
        await env.call_tool("work")
    return "done"


async def gives_back_and_goes_on(env: Episode, task: Task) -> None:
    await env.call_tool("work")
    await env.release()
    await env.call_tool("work")


async def loses_one_of_two(env: Episode, task: Task) -> None:
    """One of two things at a time fails, and the other still goes on after the agent's end."""

    async def fails() -> None:
        await env.call_tool("work")
        raise ValueError("broken on purpose")

    async def goes_on() -> None:
        while True:
            await env.call_tool("work")

    await asyncio.gather(fails(), goes_on())


async def groups_too_many(env: Episode, task: Task) -> None:
    """Does several things at a time, and one of them fails by itself."""

    async def fails() -> None:
        raise ValueError("broken on purpose")

    async with asyncio.TaskGroup() as group:
        for _ in range(TURNS):
            group.create_task(env.call_tool("work"))
        group.create_task(fails())


def _of(phases: dict[str, str], **given: Any) -> dict[str, Case]:
    """The same fault in several phases: how its exchange is called in each."""
    return {phase: Case(phase=phase, exchange=exchange, **given) for phase, exchange in phases.items()}


def _table() -> dict[str, Case]:
    everywhere = {"create": "tools", "reset": "reset", "tool": "tool", "reward": "reward"}
    inside = {name: name for name in ("reset", "tool", "reward")}
    start, author, timeout = frozenset({"start_failed"}), frozenset({"author_failed"}), frozenset({"call_timeout"})
    agent, model = frozenset({"agent_failed"}), frozenset({"model_failed"})
    short = {"timeout": SHORT, "max_retries": 0}
    families: dict[str, dict[str, Case]] = {
        "unknown environment": {"create": Case("create", frozenset({"not_found"}), env="nothing-of-that-name")},
        "import error": {"create": Case("create", start, env="unimportable")},
        "setup raises": {"create": Case("create", start, arguments=("setup=raise",))},
        "setup kills": {"create": Case("create", start, arguments=("setup=kill",))},
        "startup time-out": {
            "create": Case("create", start, arguments=("setup=hang",), options={"startup_timeout": SHORT})
        },
        "reset raises": {"reset": Case("reset", author, arguments=("reset=raise",))},
        "reset exits": {"reset": Case("reset", author | LOST, arguments=("reset=exit",))},
        "reset hangs": {"reset": Case("reset", timeout, arguments=("reset=hang",), options=short)},
        "reset kills": {"reset": Case("reset", LOST, arguments=("reset=kill",))},
        "reset uses all memory": {
            "reset": Case(
                "reset", frozenset({"out_of_memory"}), arguments=("reset=memory",), options={"resources": SMALL}
            )
        },
        "files cut": {"reset": Case("reset", LOST, act=proxies.CUT, exchange="file", options={"max_retries": 1})},
        "tool kills": {"tool": Case("tool", LOST, tool="kill")},
        "tool exits": {"tool": Case("tool", LOST, tool="exit")},
        "tool hangs": {"tool": Case("tool", timeout, tool="hang", tool_timeout=0.5)},
        "tool hangs past its turn": {
            "tool": Case("tool", frozenset({"turn_timeout"}), tool="hang", rules={"turn_timeout": SHORT})
        },
        "tool hangs past the episode": {
            "tool": Case("tool", frozenset({"episode_timeout"}), tool="hang", rules={"episode_timeout": SHORT})
        },
        "tool uses all memory": {
            "tool": Case("tool", frozenset({"out_of_memory"}), tool="memory", options={"resources": SMALL})
        },
        "reward hangs": {"reward": Case("reward", timeout, reward={"what": "hang"}, options=short)},
        "reward kills": {"reward": Case("reward", LOST, reward={"what": "kill"})},
        "reward uses all memory": {
            "reward": Case(
                "reward", frozenset({"out_of_memory"}), reward={"what": "memory"}, options={"resources": SMALL}
            )
        },
        "reward of no such name": {"reward": Case("reward", frozenset({"not_found"}), rules={"rewards": "none"})},
        "reward of wrong arguments": {"reward": Case("reward", frozenset({"invalid"}), reward={"unknown": 1})},
        "cut": _of(everywhere, kinds=LOST, act=proxies.CUT, options={"max_retries": 1}),
        "cut after it was done": _of(everywhere, kinds=LOST, act=proxies.CUT_LATE, options={"max_retries": 1}),
        "half an answer": _of(everywhere, kinds=LOST, act=proxies.HALF, options={"max_retries": 1}),
        "stalled": _of(inside, kinds=timeout, act=proxies.STALL, options=short),
        "evicted": _of(everywhere, kinds=LOST, act=evict),
        "killed from outside": _of(everywhere, kinds=LOST, act=kill_instance),
        "zygote killed": _of(everywhere, kinds=LOST, act=kill_zygotes),
        "spawner killed": _of(inside, kinds=LOST, act=kill_spawner),
        "time to live over": _of(inside, kinds=frozenset({"expired"}), act=expire),
        "agent raises": {"agent": Case("agent", agent, agent=raises)},
        "agent is not async": {"agent": Case("agent", agent, agent=not_async)},
        "agent hangs past its turn": {
            "agent": Case("agent", frozenset({"turn_timeout"}), agent=hangs, rules={"turn_timeout": SHORT})
        },
        "agent hangs past the episode": {
            "agent": Case("agent", frozenset({"episode_timeout"}), agent=hangs, rules={"episode_timeout": SHORT})
        },
        "agent does not hear that its time is over": {
            "agent": Case("agent", frozenset({"turn_timeout"}), agent=deaf, rules={"turn_timeout": SHORT})
        },
        "agent leaves something behind that goes on": {"agent": Case("agent", agent, agent=loses_one_of_two)},
        "agent loses one of a group": {"agent": Case("agent", agent, agent=groups_too_many)},
        "agent waits for what it cancelled": {"agent": Case("agent", agent, agent=cancels_itself)},
        "agent gives its instance back": {"reward": Case("reward", agent, agent=gives_back)},
        "agent gives its instance back and goes on": {"agent": Case("agent", agent, agent=gives_back_and_goes_on)},
    }
    for what in ("raise", "nan", "inf", "minus-inf", "bool", "text", "none", "list", "huge"):
        families[f"reward {what}"] = {"reward": Case("reward", author, reward={"what": what})}
    for what in ("score-nan", "score-bool", "score-text", "no-score"):
        families[f"reward {what}"] = {"reward": Case("reward", author, reward={"what": what})}
    models: dict[str, Any] = {
        "status 500": (500, {"error": "broken on purpose"}),
        "status 401": (401, {"error": "no key"}),
        "status 302": (302, b""),
        "garbage": (200, b"<html>not what was asked for</html>"),
        "no choices": (200, {"choices": []}),
        "another shape": (200, {"choices": [{"text": "of old"}]}),
        "nothing": (200, b""),
        "half": standin.HALF,
        "cut": standin.CUT,
    }
    for name, answer in models.items():
        families[f"model: {name}"] = {"model": Case("model", model, model=answer)}
    families["model: hangs"] = {"model": Case("model", model, model=standin.HANG)}
    families["model: hangs past its turn"] = {
        "model": Case("model", frozenset({"turn_timeout"}), model=standin.HANG, rules={"turn_timeout": SHORT})
    }
    return {
        name if len(cases) == 1 else f"{name}, {phase}": case
        for name, cases in families.items()
        for phase, case in cases.items()
    }


TABLE = _table()


def _swallowing(agent: Agent) -> Agent:
    """The same agent in a program that catches everything that one usually does."""

    async def play(env: Episode, task: Task) -> Any:
        try:
            return await agent(env, task)
        except Exception:
            return "never mind"

    return play


def _scripted(case: Case, turn: int, swallow: bool) -> Agent:
    async def play(env: Episode, task: Task) -> str:
        for number in range(TURNS):
            here = number == turn
            try:
                given = {"what": case.tool} if here and case.tool else {}
                await env.call_tool("work", given, timeout=case.tool_timeout if here else None)
            except Exception:
                if not swallow:
                    raise
        return "finished"

    return play


async def run(
    bench: Bench, case: Case, *, turn: int = 1, retries: int = 0, swallow: bool = False, times: float = float("inf")
) -> Trajectory:
    """An episode in which that happens: in that turn, where it is a matter of turns, and that many times."""
    task = Task.of(
        {
            "id": "sabotage",
            "arguments": list(case.arguments),
            "reward": case.reward,
            "files": {"note.txt": "x"} if case.exchange == "file" else {},
        }
    )
    async with AsyncExitStack() as stack:
        if case.model is not None:
            answers = [*[standin.calling()] * turn, case.model, standin.saying("done")]
            server = await stack.enter_async_context(standin.model(*answers))
            patience = 60.0 if "turn_timeout" in case.rules else SHORT
            agent: Agent = OpenAIAgent("stand-in", base_url=server.url, timeout=patience, retries=0)
            agent = _swallowing(agent) if swallow else agent
        else:
            agent = case.agent or _scripted(case, turn, swallow)
        if case.act is not None:
            act = case.act
            nth = turn if case.exchange == "tool" else 0

            async def strike(sandbox: Sandbox) -> str | None:
                return act if isinstance(act, str) else await act(bench, sandbox)

            bench.between = Trigger(case.exchange, strike, nth, times).between
            if isinstance(act, str):  # the sandbox is well, so there is nothing to be heard of its end
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(handle, "NEWS", 0.1)
        try:
            rules = Rules(**{"retries": retries, **case.rules})
            return await rollout(bench.env(case.env, **case.options), agent, task, rules=rules)
        finally:
            bench.between = None
