"""One episode of verifiers whose agent is whoever calls our tools: its moves, as turns of a model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from mcp import Client
from mcp.types import CallToolResult, TextContent
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

from aenv.errors import AEnvError, AuthorError, ModelError, SandboxLost, ToolError, Unsupported
from aenv.models import ToolResult

_FAILURES: dict[str, type[AEnvError]] = {
    **dict.fromkeys(("SandboxError", "TunnelError", "InterceptionError", "ToolsetError", "HarnessError"), SandboxLost),
    "ProviderError": ModelError,
}
"""What its errors are here; all others are the author's."""
_LEFT = "agent_left"
SHELL = "bash"
SHELL_HOW = "Run a command where the files of the task are."
SHELL_TAKES = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "What bash runs."}},
    "required": ["command"],
}


class Episode:
    """What verifiers plays in a task of its own, and what is passed between it and the callers of tools."""

    def __init__(self, run: Awaitable[vf.Episode], *, shell: bool) -> None:
        self._shell = shell
        self.answer: dict[str, Any] = {}
        """What the model of the seat answers next: a completion."""
        self._moves: asyncio.Queue[tuple[dict[str, Any] | None, asyncio.Future[Any]]] = asyncio.Queue()
        self._waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Given what is said to the agent, when it is to move."""
        self._opening = self._waiting
        self._trace: vf.Trace | None = None
        self._refused: Unsupported | None = None
        self._said: list[dict[str, Any]] = []
        """The conversation, as the chat API has it."""
        self._run = asyncio.ensure_future(run)

    # What the callers of tools do

    async def opening(self) -> dict[str, Any]:
        """What the agent is shown first."""
        seen: dict[str, Any] | None = await self._result(self._opening)
        if seen is None:
            self._check()
            raise AuthorError("the episode was over before the agent had a turn")
        return seen

    async def say(self, text: str) -> dict[str, Any]:
        """Say something; what is answered."""
        found = await self._move({"role": "assistant", "content": text})
        if found is None:
            self._check()
            return {"done": True}
        return {"done": False, "message": "\n\n".join(_text(one["content"]) for one in found["messages"])}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool."""
        called = {"name": name, "arguments": json.dumps(arguments)}
        asked = {"id": f"call_{len(self._said)}", "type": "function", "function": called}
        found: ToolResult | None = await self._move({"role": "assistant", "content": None, "tool_calls": [asked]})
        if found is None:
            self._check()
            raise ToolError(f"the episode is over{self._why()}")
        return found

    async def score(self, answer: str | None) -> dict[str, Any]:
        """End it, and tell what verifiers scored."""
        if answer is not None:
            await self._move({"role": "assistant", "content": answer})
        await self._move(None)
        await asyncio.wait({self._run})
        self._check()
        trace = self._trace
        if trace is None:
            raise AuthorError("the episode is over, and the agent had no turn in it")
        rewards = {name: reward.model_dump() for name, reward in trace.rewards.items() if reward is not None}
        if not rewards or len(rewards) < len(trace.rewards):
            raise AuthorError(f"verifiers gave {len(rewards)} of {len(trace.rewards)} rewards{self._why()}")
        return {
            "score": trace.reward,
            "rewards": rewards,
            "metrics": dict(trace.metrics),
            "stop": trace.stop_condition,
        }

    async def cancel(self) -> None:
        """End it, whatever it is at."""
        self._run.cancel()
        await asyncio.wait({self._run})

    async def _move(self, message: dict[str, Any] | None) -> Any:
        """Make a move: what came of it, or None where the episode is over."""
        if self._run.done():
            return None
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._moves.put_nowait((message, done))
        return await self._result(done)

    async def _result(self, done: asyncio.Future[Any]) -> Any:
        await asyncio.wait({done, self._run}, return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None

    def _check(self) -> None:
        """Raise what went wrong, where the episode has ended with that."""
        if not self._run.done():
            return
        if self._run.cancelled():
            raise AuthorError("the episode was cancelled")
        ended = self._run.result()
        if self._refused is not None:
            raise self._refused
        if ended.ok:
            return
        errors = [*ended.errors, *(error for trace in ended.traces for error in trace.errors)]
        kind, why = (errors[-1].type, errors[-1].message) if errors else ("", "it says not why")
        raise _FAILURES.get(kind, AuthorError)(f"the episode of verifiers failed: {kind} {why}"[:2000])

    def _why(self) -> str:
        stopped = self._trace.stop_condition if self._trace is not None else None
        return f": {stopped}" if stopped else ""

    # What verifiers does

    async def play(
        self,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        urls: Mapping[str, str],
        system: str | None,
        messages: vf.Messages,
    ) -> None:
        """Make the agent's moves, until it has said something or is stopped."""
        if self._trace is not None and self._trace is not trace:
            self._refused = Unsupported("this environment plays the agent more than once in an episode")
            raise self._refused
        self._trace = trace
        said = [message_to_wire(message) for message in messages]
        if not self._said and system:
            self._said.append({"role": "system", "content": system})
        self._said += said
        async with AsyncExitStack() as stack:
            bearer = {"Authorization": f"Bearer {secret}"}
            waits = httpx.Timeout(None)  # verifiers has the time limits
            model = await stack.enter_async_context(httpx.AsyncClient(base_url=endpoint, headers=bearer, timeout=waits))
            tools = Tools(runtime, self._shell)
            for name, url in urls.items():
                await tools.add(name, await stack.enter_async_context(Client(url)))
            if not self._waiting.done():
                self._waiting.set_result({**({"system": system} if system else {}), "messages": said})
            while True:
                message, done = await self._moves.get()
                if message is None:
                    trace.stop(_LEFT)
                    return
                if not await self._take_turn(model, message, tools.offered):
                    return
                if not message.get("tool_calls"):
                    self._waiting = done
                    return
                (asked,) = message["tool_calls"]
                found = await tools.call(asked["function"]["name"], json.loads(asked["function"]["arguments"]))
                content = mcp_content_to_chat_content(found.content)
                self._said.append({"role": "tool", "tool_call_id": asked["id"], "content": content})
                if not done.done():
                    done.set_result(_result(found))

    async def _take_turn(self, model: httpx.AsyncClient, message: dict[str, Any], tools: list[Any]) -> bool:
        """Let the seat's model answer that; whether verifiers lets the episode go on."""
        assert self._trace is not None
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        self.answer = {
            "id": f"turn-{len(self._said)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "agent",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        }
        body = {"model": "agent", "messages": self._said, **({"tools": tools} if tools else {})}
        found = await model.post("/chat/completions", json=body)
        if found.status_code != httpx.codes.OK and self._trace.stop_condition is None:
            raise RuntimeError(f"a turn was refused: {found.text[:500]}")
        self._said.append(message)
        return bool(found.status_code == httpx.codes.OK)


class Tools:
    """Tools of the servers that verifiers started for the episode, and the shell."""

    def __init__(self, runtime: vf.Runtime, shell: bool) -> None:
        self.offered: list[dict[str, Any]] = []
        """As the model is told them."""
        self._runtime = runtime
        self._owners: dict[str, tuple[Client, str]] = {}
        if shell:
            self._offer(SHELL, SHELL_HOW, SHELL_TAKES)

    async def add(self, prefix: str, client: Client) -> None:
        """Take those of a server."""
        for tool in (await client.list_tools()).tools:
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            self._owners[name] = (client, tool.name)
            self._offer(name, tool.description or "", tool.input_schema)

    def _offer(self, name: str, description: str, takes: dict[str, Any]) -> None:
        function = {"name": name, "description": description, "parameters": takes}
        self.offered.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """What a tool answers."""
        if name not in self._owners:
            done = await self._runtime.run(["bash", "-c", arguments["command"]], {})
            text = f"{done.stdout}{done.stderr}" + (f"\nexit code {done.exit_code}" if done.exit_code else "")
            return CallToolResult(content=[TextContent(type="text", text=text)])
        client, own = self._owners[name]
        return await client.call_tool(own, arguments)


def _result(found: CallToolResult) -> ToolResult:
    content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in found.content]
    return ToolResult(content=content, is_error=bool(found.is_error), structured=found.structured_content)


def _text(content: Any) -> str:
    """What is said, in words; anything else by its kind."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or f"[{part['type']}]" for part in content)
