"""The state of one sandbox: the project it runs, the author's functions, and how each kind of them is called."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from aenv.errors import (
    AEnvError,
    AuthorError,
    CallTimeout,
    Invalid,
    NotFound,
    StartFailed,
    ToolError,
    Unsupported,
    did_you_mean,
)
from aenv.models import ExecResult, ToolResult, to_json
from aenv.project import Project
from aenv.runtime import commands, files, seeds, trusted
from aenv.runtime.agents import TOOLS_EACH
from aenv.runtime.commands import Command
from aenv.runtime.content import data, plain, tool_result
from aenv.runtime.context import Context, Instance, Notify, silent
from aenv.runtime.functions import Function, Raised, Timing, author_error, of_the_platform, run_hook
from aenv.runtime.hidden import Hidden
from aenv.runtime.history import History, Noted
from aenv.runtime.loader import Loaded

if TYPE_CHECKING:
    from aenv.runtime.children import Children

log = logging.getLogger("aenv.runtime")
HEALTHY = ("healthy", "success", "ok")
HEALTH_LIMIT = 30.0


class Unhealthy(AEnvError):
    """The health check says no; ``data`` is the author's answer."""

    code, status = "unhealthy", 503

    def __init__(self, message: str, data: Any) -> None:
        super().__init__(message)
        self.data = data


class Service:
    """What the routes call."""

    def __init__(self, project: Project, instance: Instance, loaded: Loaded) -> None:
        self.project = project
        self.instance = instance
        self.loaded = loaded
        self.call_limit: float | None = project.timeouts.call
        self.history = History()
        self.hidden: Hidden | None = None
        """Hides the instance's secrets in every answer, where it has any."""
        self.children = _children(project)
        """What it depends on; None where that is nothing."""
        self._turns = asyncio.Lock()
        self._checking: asyncio.Task[dict[str, Any]] | None = None

    def load(self, project: Project, loaded: Loaded) -> None:
        """Take a project that was not imported before."""
        self.project, self.loaded = project, loaded
        self.call_limit = project.timeouts.call
        self.children = _children(project)

    def offer(self, tools: Sequence[Function]) -> None:
        """Have tools of others among our own."""
        if self.loaded.server is not None:
            raise StartFailed("tools of others cannot be among those of an MCP server", hint="take the prefix away")
        for tool in tools:
            if tool.name in self.loaded.tools:
                raise StartFailed(f"there are two tools {tool.name!r}", hint="choose another prefix in dependsOn")
            self.loaded.tools[tool.name] = tool

    def context(
        self, name: str, notify: Notify = silent, progress_token: str | int | None = None, agent: str | None = None
    ) -> Context:
        return Context(
            self.instance,
            name=name,
            agent=agent or "",
            notify=notify,
            progress_token=progress_token,
            conversations=self.loaded.conversations,
            children=self.children,
            hidden=self.hidden,
        )

    def tools(self, agent: str | None) -> dict[str, Function]:
        """The tools that an agent has, by name; the owner has all."""
        found = self.loaded.tools
        if agent is None or not self.loaded.players:
            return found
        return {name: tool for name, tool in found.items() if agent in tool.mark.options.get("agents", (agent,))}

    async def setup(self) -> None:
        for function in self.loaded.setups:
            await run_hook(function, self.context(function.name), {})

    async def teardown(self) -> None:
        for function in self.loaded.teardowns:
            try:
                await run_hook(function, self.context(function.name), {})
            except AEnvError as exc:
                log.error("%s", exc)

    async def call_tool(
        self, function: Function, arguments: dict[str, Any], context: Context, timing: Timing | None = None
    ) -> dict[str, Any]:
        """The result of a tool: its own failure is a result too, the platform's is an exception."""
        timing = timing or Timing()
        with Noted(self.history, "tool", function.name, arguments, timing) as note:
            try:
                value = await self._limited(function, arguments, context, timing)
                result = tool_result(value, function.result, function.name)
            except Raised as exc:
                log.info("tool %s failed\n%s", function.name, exc.details())
                note.error = exc.cause.message if isinstance(exc.cause, AEnvError) else exc.summary
                if (lost := of_the_platform(exc.cause)) is not None:  # no model is to read of it
                    raise lost from None
                return tool_error(note.error)
            except AuthorError as exc:
                log.warning("tool %s: %s", function.name, exc)
                note.error = f"{exc}; {exc.hint}" if exc.hint else str(exc)
                return tool_error(note.error)
            if result["isError"]:
                note.error = _said(value)
            return result

    async def call(
        self, function: Function, arguments: dict[str, Any], timing: Timing, agent: str | None = None
    ) -> msgspec.Raw:
        """The result of a reward or function, or of a tool over plain HTTP, as JSON."""
        kind = function.mark.kind
        with Noted(self.history, "tool" if kind == "agent" else kind, function.name, arguments, timing) as note:
            try:
                value = await self._limited(function, arguments, self.context(function.name, agent=agent), timing)
            except Raised as exc:
                log.warning("%s %s failed\n%s", kind, function.name, exc.details())
                raise author_error(function, exc) from exc.cause
            if kind == "reward":
                _check_reward(function, value)
            answer = plain(value, function.result, function.name)
            if isinstance(value, ToolResult) and value.is_error:
                note.error = _said(value)
            return answer

    async def run(self, command: Command) -> ExecResult:
        """Run a command of the owner's; one that fails is a result."""
        arguments = {name: value for name, value in msgspec.structs.asdict(command).items() if value is not None}
        with Noted(self.history, "exec", command.argv[0][:200], arguments) as note:
            result = await commands.run(command, self.instance.working_directory)
            if result.timed_out:
                note.error = f"it was killed after {command.timeout:g} s"
            elif result.returncode:
                note.error = f"it returned {result.returncode}"
            return result

    async def _limited(self, function: Function, arguments: dict[str, Any], context: Context, timing: Timing) -> Any:
        if self.call_limit is None:
            return await self._in_turn(function, arguments, context, timing)
        try:
            async with asyncio.timeout(self.call_limit) as limit:
                return await self._in_turn(function, arguments, context, timing)
        except TimeoutError:
            if not limit.expired():
                raise
            waited = f", {timing.queue:.3g} s of it in wait for a thread" if timing.queue > self.call_limit / 10 else ""
            raise CallTimeout(
                f"{function.name}() took longer than {self.call_limit:g} s{waited}",
                hint="deployConfig.timeouts.call sets this limit",
            ) from None

    async def _in_turn(self, function: Function, arguments: dict[str, Any], context: Context, timing: Timing) -> Any:
        """Call it, for one of several agents only in its turn: one after the other, so that no two have it at once."""
        turn = self.loaded.turn
        is_free = turn is None or not context.agent or function.mark.kind != "tool"
        if is_free or function.mark.options.get("anytime"):
            return await function.call(arguments, context, timing)
        assert turn is not None
        async with self._turns:
            found = await run_hook(turn, self.context(turn.name), {})
            whose = [found] if isinstance(found, str) else list(found or ())
            if context.agent not in whose:
                named = " and ".join(map(str, whose)) or "nobody"
                raise Raised(ToolError(f"it is {named}'s turn"))
            return await function.call(arguments, context, timing)

    async def reset(self, seed: int | None, arguments: dict[str, Any] | None = None) -> Any:
        """Forget conversations, and run the author's reset with the seed, if it takes one, and with whatever else it is
        given. One of agents that has none takes a seed alone."""
        function = self.loaded.reset
        if function is None and (arguments or not self.loaded.agents):
            raise Unsupported("this environment cannot be reset", hint="register one with @register_reset")
        given = {} if function is None else _for_reset(function, seed, arguments or {})
        if self.children is not None:
            await self.children.reset(seed)
        self.instance = self.instance._replace(seed=seed)
        seeds.plant(seed)
        name = "" if function is None else function.name
        with Noted(self.history, "reset", name, {**(arguments or {}), "seed": seed}):
            self.loaded.conversations.clear()
            if function is None:
                return None
            value = await run_hook(function, self.context(function.name), given)
            return plain(value, function.result, function.name)

    @property
    def saves(self) -> bool:
        """Whether the author's code can say where it is, and go on from there in another sandbox, or there is nothing
        to it but agents, whose place is in their conversations. What it depends on is in no such place."""
        loaded = self.loaded
        if self.children is not None:
            return False
        only_agents = len(loaded.tools) == TOOLS_EACH * len(loaded.agents) > 0 and loaded.server is None
        return loaded.save is not None or (only_agents and not loaded.functions)

    async def save(self, most: int) -> bytes:
        """Where the environment is, for another sandbox to go on from."""
        function = self.loaded.save
        if not self.saves:
            raise _no_saving()
        saving = _saving()
        with Noted(self.history, "save", "" if function is None else function.name, {}):
            directory = self.instance.working_directory
            kept: dict[str, Any] = {"conversations": self.loaded.conversations.saved()}
            if function is not None:
                value = await run_hook(function, self.context(function.name), {})
                if isinstance(value, (bytes, bytearray, memoryview)):
                    kept["data"] = bytes(value)
                else:
                    kept["value"] = data(value, function.result, function.name)
            facts = {"seed": self.instance.seed, "drawn": seeds.drawn()}
            return await files.apart(
                lambda: saving.pack(saving.Said(places=saving.places(directory), **facts, **kept), most)
            )

    async def restore(self, content: bytes) -> None:
        """Be where another sandbox was."""
        function = self.loaded.load
        if not self.saves:
            raise _no_saving()
        saving = _saving()
        with Noted(self.history, "load", "" if function is None else function.name, {}):
            said = await files.apart(lambda: saving.unpack(self.instance.working_directory, content))
            self.instance = self.instance._replace(seed=said.seed)
            self.loaded.conversations.load(said.conversations)
            if function is not None:
                given: dict[str, Any] = {}
                for name in function.arguments.schema["properties"]:  # the one that it has, if any
                    given = {name: said.data} if said.data is not None else function.decode(to_json({name: said.value}))
                await run_hook(function, self.context(function.name), given)
            seeds.go_on(said.drawn)

    def reseed(self, seed: int) -> None:
        """Let what draws go on from another seed, and everything else as it was."""
        with Noted(self.history, "reseed", "", {"seed": seed}):
            self.instance = self.instance._replace(seed=seed)
            seeds.plant(seed)

    @property
    def is_checked(self) -> bool:
        """Whether the author's health check runs at the moment."""
        return self._checking is not None and not self._checking.done()

    async def health(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The author's health, or the default; raises ``Unhealthy``.

        Whoever asks while a check is running gets its answer: one that hangs takes one thread, however many ask.
        """
        function = self.loaded.health
        if function is None:
            return {"status": "success"}
        given = function.decode(arguments, text=True)
        check = None if given else self._checking
        if check is None or check.done():
            check = asyncio.create_task(self._check_health(function, given))
            check.add_done_callback(lambda task: task.cancelled() or task.exception())
            if not given:
                self._checking = check
        await asyncio.wait({check}, timeout=HEALTH_LIMIT)
        if not check.done():
            reason = f"the health check has not answered within {HEALTH_LIMIT:g} s"
            raise Unhealthy(reason, {"status": "unhealthy", "reason": reason})
        return check.result()

    async def _check_health(self, function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            value = await run_hook(function, self.context(function.name), arguments)
            found = msgspec.json.decode(plain(value, function.result, function.name))
        except AEnvError as exc:
            raise Unhealthy(str(exc), {"status": "unhealthy", "reason": str(exc)}) from exc
        answer = {"status": "success", **found} if isinstance(found, dict) else {"status": "success"}
        if found is False or str(answer["status"]) not in HEALTHY:
            data = found if isinstance(found, dict) else {"status": "unhealthy"}
            raise Unhealthy(f"the health check answered {found!r}", data)
        return answer

    def reward(self, name: str | None) -> Function:
        """The reward of that name, or the only one."""
        rewards = self.loaded.rewards
        if not rewards:
            raise NotFound("this environment has no reward", hint="register one with @register_reward")
        if name is None and len(rewards) > 1:
            raise Invalid(f"there are {len(rewards)} rewards", hint=f"choose with name=: {', '.join(rewards)}")
        return next(iter(rewards.values())) if name is None else lookup(rewards, name, "reward")


def _for_reset(function: Function, seed: int | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """What an author's reset is called with. A reset that takes nothing but a seed takes any, also none."""
    schema = function.arguments.schema
    required = set(schema.get("required", ()))
    own = {"seed": seed} if "seed" in schema["properties"] else {}
    if not arguments and required <= {"seed"}:
        return own
    if "seed" in arguments:
        raise Invalid("a reset is given its seed beside its arguments", hint="use reset(seed=...)")
    return function.decode(to_json({**arguments, **(own if seed is not None or "seed" in required else {})}))


def _children(project: Project) -> Children | None:
    """Loaded for what depends on others, which most does not."""
    if not project.depends_on:
        return None
    with trusted.imports():
        from aenv.runtime.children import Children
    return Children(project.depends_on)


def _saving() -> ModuleType:
    """Loaded when the first is saved, which in most sandboxes is never."""
    with trusted.imports():
        from aenv.runtime import saving

        return saving


def _no_saving() -> Unsupported:
    return Unsupported(
        "this environment does not say where it is",
        hint="register functions with @register_save and @register_load, which one that depends on others cannot have",
    )


def lookup(table: dict[str, Function], name: str, kind: str) -> Function:
    """The function of that name; a miss is answered with the nearest."""
    if found := table.get(name):
        return found
    raise NotFound(f"there is no {kind} {name!r}", hint=did_you_mean(name, table))


def tool_error(message: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": message}], "isError": True}


def _said(value: ToolResult) -> str:
    try:
        return value.text
    except (KeyError, TypeError):  # blocks are the author's, and not all of them are whole
        return "the tool failed"


def _check_reward(function: Function, value: Any) -> None:
    score: Any = value.get("score") if isinstance(value, dict) else getattr(value, "score", value)
    if hasattr(score, "dtype") and getattr(score, "size", 0) == 1:
        score = score.item()
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not abs(score) <= sys.float_info.max:
        raise AuthorError(
            f"reward {function.name}() returned {value!r}"[:300],
            hint="return a finite number, or a dict whose 'score' is one",
        )
