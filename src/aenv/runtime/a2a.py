"""The agents of a project as A2A has them: a card, and messages, tasks and streams over JSON-RPC.

The protocol is that of the package ``a2a-sdk``, where the project has it. A message is answered as the tool ``chat``
answers it, in the conversation that A2A calls a context. An agent that fails is a task that failed; what the platform
fails at is an error of the protocol, which no model is to read as an answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Self

import msgspec

from aenv.errors import AEnvError, Invalid, NotFound, Unsupported, did_you_mean
from aenv.runtime import mounted
from aenv.runtime.answers import Answer, Request, Response
from aenv.runtime.context import Context
from aenv.runtime.conversations import MOST_NAME

try:
    from a2a.helpers import get_message_text, new_task_from_user_message, new_text_message, new_text_part
    from a2a.server.agent_execution import AgentExecutor, RequestContext, SimpleRequestContextBuilder
    from a2a.server.request_handlers import DefaultRequestHandler
    from a2a.server.request_handlers.response_helpers import agent_card_to_dict
    from a2a.server.routes import create_jsonrpc_routes
    from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
    from a2a.types import (
        AgentCapabilities,
        AgentCard,
        AgentInterface,
        AgentSkill,
        HTTPAuthSecurityScheme,
        SecurityRequirement,
        SecurityScheme,
        StringList,
        TaskState,
    )
    from a2a.utils.errors import InternalError, InvalidParamsError, PushNotificationNotSupportedError
    from starlette.applications import Starlette
except ImportError as exc:
    raise Unsupported(
        f"A2A is spoken with the package a2a-sdk, which is not installed here ({exc.name})",
        hint="add 'a2a-sdk[http-server]>=1.3,<2' to the project's requirements.txt",
    ) from exc

if TYPE_CHECKING:
    from aenv.runtime.app import App

CARD = ".well-known/agent-card.json"
BASE = b"aenv-base"
"""The header in which a gateway says under which URL its client sees the sandbox."""
MOST_TASKS = 1000
"""Tasks that are remembered once they are over."""
MOST_BYTES = 32 * 1024 * 1024
"""Bytes of them together; the last one is remembered all the same."""
_OVER = frozenset(
    (
        *(TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_FAILED),
        *(TaskState.TASK_STATE_CANCELED, TaskState.TASK_STATE_REJECTED),
    )
)
_PATH = "/a2a"
_encode = msgspec.json.Encoder().encode


class A2A:
    """What is served below ``/a2a``, and the card."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._servers: dict[str, Starlette] = {}

    def card(self, request: Request, path: str) -> Response:
        """Who the agent is, and where it is reached by whoever asks. ``path`` is the one below ``/a2a``, if any."""
        name, found, rest = (path or CARD).rpartition(CARD)
        if rest or not found:
            raise NotFound(f"nothing is served at {request.path}", hint=f"the card is at {_PATH}/{CARD}")
        name = name.rstrip("/")
        chosen = self._chosen(name)
        base = request.header(BASE) or f"http://{request.header(b'host')}"
        card = self._described(chosen, f"{base}{_PATH}{f'/{name}' if name else ''}")
        return Response(200, _encode(agent_card_to_dict(card)))

    def handle(self, request: Request, name: str) -> Answer:
        """Answer a message of JSON-RPC. The task goes on when its client leaves, who may ask for it again."""
        found = self._chosen(name)
        if found not in self._servers:
            self._servers[found] = self._made(found)
        answer = Answer(0)
        answer.task = asyncio.create_task(mounted.ask(self._servers[found], request, _PATH, answer))
        return answer

    def _chosen(self, name: str) -> str:
        agents = self._app.service.loaded.agents
        if not name and len(agents) == 1:
            return next(iter(agents))
        if name in agents:
            return name
        hint = did_you_mean(name, agents) if name else f"choose one: {', '.join(f'{_PATH}/{one}' for one in agents)}"
        raise NotFound(f"there is no agent {name!r}" if name else f"there are {len(agents)} agents", hint=hint)

    def _described(self, name: str, url: str) -> AgentCard:
        project = self._app.service.project
        chat = self._app.service.loaded.agents[name]
        about = chat.description or name
        title = project.name if len(self._app.service.loaded.agents) == 1 else f"{project.name} {name}"
        return AgentCard(
            name=title,
            description=about,
            version=project.version,
            supported_interfaces=[
                AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version=version)
                for version in ("1.0", "0.3")
            ],
            capabilities=AgentCapabilities(streaming=True, push_notifications=False),
            default_input_modes=["text/plain"],
            default_output_modes=["text/plain"],
            skills=[AgentSkill(id=name, name=name, description=about, tags=["chat"])],
            security_schemes={
                "bearer": SecurityScheme(http_auth_security_scheme=HTTPAuthSecurityScheme(scheme="bearer"))
            },
            security_requirements=[SecurityRequirement(schemes={"bearer": StringList()})],
        )

    def _made(self, name: str) -> Starlette:
        handler = DefaultRequestHandler(
            agent_executor=_Executor(self._app, name),
            task_store=_Tasks(),
            agent_card=self._described(name, _PATH),
            request_context_builder=_Contexts(),
            validate_input_modes=True,
        )
        return Starlette(routes=create_jsonrpc_routes(handler, _PATH, enable_v0_3_compat=True))


class _Contexts(SimpleRequestContextBuilder):
    """Refuses messages that nothing can be done with, before there is a task."""

    async def build(self, context: Any, params: Any = None, *args: Any, **kwargs: Any) -> RequestContext:
        if params is not None:
            if params.configuration.HasField("task_push_notification_config"):  # nobody is dialled whom a caller names
                raise PushNotificationNotSupportedError(message="push notifications are not sent here: subscribe")
            if not get_message_text(params.message):
                raise InvalidParamsError(message="the message has no part with text")
            if len(params.message.context_id) > MOST_NAME:
                raise InvalidParamsError(message=f"contextId must be at most {MOST_NAME} characters")
        return await super().build(context, params, *args, **kwargs)


class _Tasks(InMemoryTaskStore):
    """Remembers tasks within bounds, each with its answer in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self._over: OrderedDict[str, int] = OrderedDict()
        """How large each is that is over, the oldest first."""
        self._bytes = 0

    async def save(self, task: Any, context: Any) -> None:
        for artifact in task.artifacts:
            if len(artifact.parts) > 1:  # its pieces are one text, and no lines
                whole = new_text_part("".join(part.text for part in artifact.parts))
                del artifact.parts[:]
                artifact.parts.append(whole)
        await super().save(task, context)
        if task.status.state in _OVER:
            size = task.ByteSize()
            self._bytes += size - self._over.get(task.id, 0)
            self._over[task.id] = size
        while len(self._over) > MOST_TASKS or (self._bytes > MOST_BYTES and len(self._over) > 1):
            oldest, size = self._over.popitem(last=False)
            self._bytes -= size
            await self.delete(oldest, context)


class _Told(Context):
    """A context whose pieces become parts of a task's artifact."""

    updater: Any
    told: list[str]
    """They; shared with its copies."""

    @classmethod
    def of(cls, context: Context) -> Self:
        """One that knows all that another one knows."""
        made = cls()
        vars(made).update(vars(context))
        return made

    async def piece(self, text: str, number: int) -> None:
        self.told.append(text)
        await self.updater.add_artifact([new_text_part(text)], artifact_id="answer", append=number > 1)


class _Executor(AgentExecutor):
    """Answers messages of one agent."""

    def __init__(self, app: App, name: str) -> None:
        self._app = app
        self._name = name

    async def execute(self, context: Any, event_queue: Any) -> None:
        if context.current_task is None:
            await event_queue.enqueue_event(new_task_from_user_message(context.message))
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        await updater.start_work()
        service = self._app.service
        chat = service.loaded.agents[self._name]
        told = _Told.of(service.context(chat.name))
        told.updater, told.told = updater, []
        with self._app.counted():
            try:
                given = {"message": context.get_user_input(), "session": context.context_id}
                result = await service.call_tool(chat, chat.decode(_encode(given)), told)
            except Invalid as exc:
                await updater.reject(new_text_message(exc.message))
                return
            except AEnvError as exc:
                raise InternalError(message=exc.message) from exc
        said = "".join(block["text"] for block in msgspec.json.decode(_encode(result["content"])))
        if result["isError"]:
            await updater.failed(new_text_message(said))
            return
        if not told.told:
            await updater.add_artifact([new_text_part(said)], artifact_id="answer", last_chunk=True)
        await updater.complete()

    async def cancel(self, context: Any, event_queue: Any) -> None:
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()
