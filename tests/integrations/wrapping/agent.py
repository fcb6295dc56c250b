"""An A2A agent, by a2a-sdk's own server. Run, it tells where it is, and streams or does not."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn
from a2a.helpers import new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Role,
    Task,
    TaskState,
    TaskStatus,
)
from starlette.applications import Starlette

cancelled: list[str] = []


class Parrot(AgentExecutor):
    """Does what its first word says, and repeats the rest."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        said = context.get_user_input()
        word, _, rest = said.partition(" ")
        assert context.task_id
        assert context.context_id
        if word == "quick":
            await event_queue.enqueue_event(new_text_message(rest, context_id=context.context_id, role=Role.ROLE_AGENT))
            return
        if context.current_task is None:
            status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            await event_queue.enqueue_event(Task(id=context.task_id, context_id=context.context_id, status=status))
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        await updater.start_work()
        if word == "fail":
            await updater.failed(updater.new_agent_message([new_text_part(rest)]))
        elif word == "reject":
            await updater.reject(updater.new_agent_message([new_text_part(rest)]))
        elif word == "ask":
            await updater.requires_input(updater.new_agent_message([new_text_part(rest)]))
        elif word == "die":
            os._exit(1)
        elif word == "wait":
            await asyncio.sleep(600)
        elif word == "cancelled?":
            await updater.complete(updater.new_agent_message([new_text_part(",".join(cancelled))]))
        else:
            pieces = [f"{piece} " for piece in said.split()]
            for place, piece in enumerate(pieces):
                await updater.add_artifact(
                    [new_text_part(piece)],
                    artifact_id="answer",
                    append=place > 0,
                    last_chunk=place == len(pieces) - 1,
                )
            await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id
        assert context.context_id
        cancelled.append(context.context_id)
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def main(streaming: bool) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    card = AgentCard(
        name="Parrot",
        description="Repeats what it hears.",
        version="1.0.0",
        supported_interfaces=[AgentInterface(url=f"{url}/rpc", protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=AgentCapabilities(streaming=streaming),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="repeat", name="repeat", description="Repeats.", tags=["talk"])],
    )
    handler = DefaultRequestHandler(agent_executor=Parrot(), task_store=InMemoryTaskStore(), agent_card=card)
    app = Starlette(routes=[*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/rpc")])
    print(url, flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main(sys.argv[1] == "streaming")
