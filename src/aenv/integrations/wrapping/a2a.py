"""An A2A agent as a project: a conversation with it, as tools.

What the agent answers, also that it failed or refuses, is the tool's answer. An agent that is not there is a platform
failure. A call that is given up cancels the task that it began.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.card_resolver import parse_agent_card
from a2a.client.errors import A2AClientError
from a2a.types.a2a_pb2 import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    StreamResponse,
    Task,
    TaskState,
)
from a2a.utils.errors import A2AError
from google.protobuf.json_format import MessageToDict, ParseError

from aenv.errors import NetworkError, SandboxLost
from aenv.integrations import wrapping
from aenv.integrations.wrapping import Found
from aenv.models import Audio, Image, ToolResult
from aenv.runtime.context import Context
from aenv.runtime.registry import register_reset, register_setup, register_teardown, register_tool

BINDINGS = ("JSONRPC", "HTTP+JSON")
MOST_ANSWER = 16 * 1024 * 1024
"""Bytes of one answer, or of one stream of them."""
_FAREWELL = 5.0
"""Seconds that an agent has to take a cancellation."""
_SHORTEST, _LONGEST = 0.02, 1.0
"""Seconds after which an agent that does not stream is asked again."""
_GOING_ON = (TaskState.TASK_STATE_UNSPECIFIED, TaskState.TASK_STATE_SUBMITTED, TaskState.TASK_STATE_WORKING)
_FAILED = (TaskState.TASK_STATE_FAILED, TaskState.TASK_STATE_REJECTED, TaskState.TASK_STATE_CANCELED)
_WELL_KNOWN = "/.well-known/agent-card.json"


def serve(stored: Path, *, bearer: str | None = None) -> Agent:
    """Offer tools ``chat``, ``chat_history`` and ``chat_reset``, for the agent whose card is in ``stored``.

    ``bearer`` names the secret with the token that it wants.
    """
    card = wrapping.read_stored(stored)
    agent = Agent(card, bearer)
    about = f"Say something to {card.get('name', 'the agent')}, and hear its answer. {card.get('description', '')}"
    register_tool(description=f"{about.strip()}\n\nA session is a conversation of its own.")(agent.chat)
    register_tool(annotations={"readOnlyHint": True})(agent.chat_history)
    register_tool(agent.chat_reset)
    register_setup(agent.start)
    register_teardown(agent.stop)
    register_reset(agent.restart)
    return agent


def _bounded(patience: httpx.Timeout, bearer: str | None = None) -> httpx.AsyncClient:
    """A client whose answers end somewhere, also when they were small on their way."""

    async def bound(response: httpx.Response) -> None:
        if "content-encoding" in response.headers:
            raise httpx.DecodingError("the answer is compressed, which was not asked for")
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Bounded(response.stream)

    headers = {"Accept-Encoding": "identity", **wrapping.bearer(bearer)}
    return httpx.AsyncClient(timeout=patience, headers=headers, event_hooks={"response": [bound]})


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, pieces: httpx.AsyncByteStream) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MOST_ANSWER
        async for piece in self._pieces:
            left -= len(piece)
            if left < 0:
                raise httpx.ReadError(f"the answer is larger than {MOST_ANSWER // 1024**2} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._pieces.aclose()


class Conversation:
    """What was said in one session."""

    def __init__(self) -> None:
        self.context = ""
        """What the agent calls it."""
        self.task = ""
        """The task that waits for an answer of ours, if any."""
        self.said: list[dict[str, str]] = []
        self.turn = asyncio.Lock()


class Agent:
    """The agent, as an instance talks to it."""

    def __init__(self, card: Mapping[str, Any], bearer: str | None = None) -> None:
        self._card: AgentCard = parse_agent_card(json.loads(json.dumps(card)))
        self._bearer = bearer
        self._http: httpx.AsyncClient | None = None
        self._client: Client | None = None
        self._conversations: dict[str, Conversation] = {}
        self._farewells: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Make ready to talk. Nobody is asked yet: an instance may be without a network."""
        self._http = _bounded(httpx.Timeout(None, connect=wrapping.CONNECT))

    async def stop(self) -> None:
        """Take leave: what was given up is cancelled."""
        if self._farewells:
            await asyncio.wait(self._farewells)
        http, self._http, self._client = self._http, None, None
        if http is not None:
            await http.aclose()

    async def restart(self) -> None:
        """Begin with conversations that know nothing of before."""
        self._conversations.clear()

    def history(self, session: str = "") -> list[dict[str, str]]:
        """What was said in a session, by ``user`` and ``agent``."""
        found = self._conversations.get(session)
        return list(found.said) if found else []

    async def chat_history(self, session: str = "") -> list[dict[str, str]]:
        """What was said so far.

        Args:
            session: Which conversation.
        """
        return self.history(session)

    async def chat_reset(self, session: str = "") -> str:
        """Forget a conversation, and begin anew.

        Args:
            session: Which conversation.
        """
        self._conversations.pop(session, None)
        return "forgotten"

    async def chat(self, message: str, session: str = "", *, ctx: Context) -> ToolResult:
        """Say something to the agent, and hear its answer.

        Args:
            message: What to say.
            session: Which conversation.
        """
        conversation = self._conversations.setdefault(session, Conversation())
        async with conversation.turn:
            turn = Turn(self._open(), conversation, ctx)
            try:
                answer = await turn.played(message)
            except (A2AClientError, ParseError, ValueError) as exc:  # the last two: what it says is no A2A
                raise SandboxLost(f"the agent {self._card.name} is gone: {exc}") from exc
            except A2AError as exc:
                return ToolResult(content=[_text(str(exc))], is_error=True)
            finally:
                if turn.going_on:
                    self._cancel(turn)
            conversation.said += [{"role": "user", "text": message}, {"role": "agent", "text": answer.text}]
            return answer

    def _open(self) -> Client:
        if self._http is None:
            raise SandboxLost("the agent is used before the instance is ready, or after its end")
        if self._client is None:
            self._http.headers.update(wrapping.bearer(self._bearer))
            config = ClientConfig(
                httpx_client=self._http,
                polling=not self._card.capabilities.streaming,  # so that the task is known, and can be cancelled
                supported_protocol_bindings=list(BINDINGS),
            )
            self._client = ClientFactory(config).create(self._card)
        return self._client

    def _cancel(self, turn: Turn) -> None:
        """Tell the agent that nobody waits any more."""

        async def farewell() -> None:
            with suppress(A2AError, TimeoutError):
                async with asyncio.timeout(_FAREWELL):
                    await turn.client.cancel_task(CancelTaskRequest(id=turn.going_on))

        saying = asyncio.create_task(farewell())
        self._farewells.add(saying)
        saying.add_done_callback(self._farewells.discard)


class Turn:
    """One message, and what comes of it."""

    def __init__(self, client: Client, conversation: Conversation, context: Context) -> None:
        self.going_on = ""
        """The task that the agent is at work on."""
        self.client = client
        self._conversation = conversation
        self._context = context
        self._state = TaskState.TASK_STATE_UNSPECIFIED
        self._heard = 0
        self._artifacts: dict[str, list[Part]] = {}
        self._last: list[Part] = []
        """Of the latest message, or of the status that ended the task."""

    async def played(self, message: str) -> ToolResult:
        said = Message(
            message_id=str(uuid4()),
            role=Role.ROLE_USER,
            parts=[Part(text=message)],
            context_id=self._conversation.context,
            task_id=self._conversation.task,
        )
        async for event in self.client.send_message(SendMessageRequest(message=said)):
            self._hear(event)
        pause = _SHORTEST
        while self.going_on:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            self._take(await self.client.get_task(GetTaskRequest(id=self.going_on)))
        if self._state == TaskState.TASK_STATE_UNSPECIFIED:
            raise SandboxLost("the agent broke off, and has not said how its task ended")
        waits = self._state == TaskState.TASK_STATE_INPUT_REQUIRED
        if self._state == TaskState.TASK_STATE_AUTH_REQUIRED:
            raise SandboxLost("the agent wants an authorisation that it has not got", hint="see bearer= of serve")
        parts = [part for parts in self._artifacts.values() for part in parts]
        content = [_block(part) for part in parts + [part for part in self._last if part not in parts]]
        if self._state in _FAILED:
            name = TaskState.Name(self._state).removeprefix("TASK_STATE_").lower()
            return ToolResult(content=[_text(f"the agent's task is {name}"), *content], is_error=True)
        if not waits:
            self._conversation.task = ""
        return ToolResult(content=content, structured={"state": "input-required" if waits else "completed"})

    def _hear(self, event: StreamResponse) -> None:
        kind = event.WhichOneof("payload")
        if kind == "message":
            self._conversation.context = event.message.context_id or self._conversation.context
            self._state = TaskState.TASK_STATE_COMPLETED
            self._last = list(event.message.parts)
            self.going_on = ""
        elif kind == "task":
            self._take(event.task)
        elif kind == "status_update":
            update = event.status_update
            self._stand(update.task_id, update.context_id, update.status.state)
            self._last = [] if self.going_on else list(update.status.message.parts)
            self._tell(list(update.status.message.parts))
        elif kind == "artifact_update":
            update = event.artifact_update
            before = self._artifacts.get(update.artifact.artifact_id, []) if update.append else []
            self._artifacts[update.artifact.artifact_id] = _joined(before, list(update.artifact.parts))
            self._tell(list(update.artifact.parts))

    def _take(self, task: Task) -> None:
        self._stand(task.id, task.context_id, task.status.state)
        self._artifacts.update({one.artifact_id: _joined([], list(one.parts)) for one in task.artifacts})
        self._last = list(task.status.message.parts)

    def _stand(self, task: str, context: str, state: TaskState) -> None:
        self._state = state
        self.going_on = task if state in _GOING_ON else ""
        self._conversation.context = context or self._conversation.context
        self._conversation.task = task if state == TaskState.TASK_STATE_INPUT_REQUIRED else ""

    def _tell(self, parts: list[Part]) -> None:
        text = "".join(part.text for part in parts)
        if text:
            self._heard += 1
            self._context.progress(self._heard, None, text)


def look(source: str, *, bearer: str | None = None) -> Found:
    """Read an agent's card, at its address or in a file."""
    given = wrapping.read_stored(Path(source)) if Path(source).is_file() else None
    return asyncio.run(_look(source, given, bearer))


async def _look(source: str, given: dict[str, Any] | None, bearer: str | None) -> Found:
    base = source.rstrip("/").removesuffix(_WELL_KNOWN)
    try:
        async with _bounded(httpx.Timeout(wrapping.CONNECT), bearer) as http:
            if given is not None:
                card = parse_agent_card(given)
            else:
                wrapping.host_of(source)
                card = await A2ACardResolver(http, base).get_agent_card()
            config = ClientConfig(httpx_client=http, supported_protocol_bindings=list(BINDINGS))
            ClientFactory(config).create(card)
    except (A2AError, ParseError, ValueError, httpx.InvalidURL) as exc:
        hint = f"an A2A agent tells its card at {base}{_WELL_KNOWN}, and speaks {' or '.join(BINDINGS)}"
        raise NetworkError(f"{source} is no A2A agent that can be talked to: {exc}", hint=hint) from exc
    stored = MessageToDict(card)
    hosts = [wrapping.host_of(one.url) for one in card.supported_interfaces if one.protocol_binding in BINDINGS]
    return Found(
        name=wrapping.usable_name(card.name),
        about=card.name,
        stored=stored,
        tools=tools_of(stored),
        words={"options": wrapping.option("bearer", bearer)},
        allow=tuple(dict.fromkeys(hosts)),
        secrets=(bearer,) if bearer else (),
    )


def tools_of(stored: dict[str, Any]) -> dict[str, Any]:
    """The tools that a stored card comes to, each with what it is made of."""
    return dict.fromkeys(("chat", "chat_history", "chat_reset"), stored)


def _joined(before: list[Part], pieces: list[Part]) -> list[Part]:
    """Pieces of a text, as one."""
    found = list(before)
    for piece in pieces:
        if found and piece.WhichOneof("content") == "text" == found[-1].WhichOneof("content"):
            found[-1] = Part(text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


def _block(part: Part) -> dict[str, Any]:
    kind = part.WhichOneof("content")
    if kind == "text":
        return _text(part.text)
    if kind == "raw" and part.media_type.startswith("image/"):
        return Image(part.raw, part.media_type).block()
    if kind == "raw" and part.media_type.startswith("audio/"):
        return Audio(part.raw, part.media_type).block()
    return _text(json.dumps(MessageToDict(part)))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
