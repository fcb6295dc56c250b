"""The client of a2a-sdk, as its users write one: ``a2a_client.py BASE-URL TOKEN VERSION``. Prints a report as JSON."""

import asyncio
import json
import sys
from uuid import uuid4

import httpx
from a2a.client import ClientConfig, ClientFactory
from a2a.client.card_resolver import A2ACardResolver
from a2a.helpers import get_artifact_text, new_text_message
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    TaskPushNotificationConfig,
    TaskState,
)


def asked(text: str, context: str = "", task: str = "") -> SendMessageRequest:
    message = new_text_message(text, role=Role.ROLE_USER)
    message.context_id, message.task_id = context, task
    return SendMessageRequest(message=message)


def state(task) -> str:
    return TaskState.Name(task.status.state).removeprefix("TASK_STATE_").lower()


async def streamed(client, request) -> dict:
    """What a message is answered with, as it comes."""
    pieces, states, ids = [], [], set()
    async for event in client.send_message(request):
        if event.HasField("artifact_update"):
            pieces.append("".join(part.text for part in event.artifact_update.artifact.parts))
            ids.add(event.artifact_update.context_id)
        elif event.HasField("status_update"):
            states.append(state(event.status_update))
        elif event.HasField("task"):
            states.append(state(event.task))
            pieces += [get_artifact_text(artifact) for artifact in event.task.artifacts]
            ids.add(event.task.context_id)
    return {"pieces": pieces, "states": states, "contexts": len(ids)}


async def cancelled(client, context: str) -> dict:
    """A message that is never answered: looked at, followed by another one, and cancelled."""
    stream = client.send_message(asked("go on", context))
    task = ""
    async for event in stream:
        if event.HasField("task"):
            task = event.task.id
        if event.HasField("artifact_update"):
            break
    await stream.aclose()
    seen = await client.get_task(GetTaskRequest(id=task))
    following = client.subscribe(SubscribeToTaskRequest(id=task))
    first = await anext(following)
    ended = await client.cancel_task(CancelTaskRequest(id=task))
    rest = [event async for event in following]
    return {
        "while": [state(seen), "".join(get_artifact_text(artifact) for artifact in seen.artifacts)],
        "followed": state(first.task),
        "after": state(ended),
        "told": [state(event.status_update) for event in rest if event.HasField("status_update")],
        "kept": state(await client.get_task(GetTaskRequest(id=task))),
    }


async def refused(work) -> str:
    """What is said to something that is not done."""
    try:
        await work
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "it was done"


async def main(base: str, token: str, version: str) -> dict:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60) as http:
        card = await A2ACardResolver(http, base).get_agent_card()
        own = [one for one in card.supported_interfaces if one.protocol_version == version]
        told = {"name": card.name, "version": card.version, "urls": sorted({one.url for one in own})}
        told["schemes"] = [one.http_auth_security_scheme.scheme for one in card.security_schemes.values()]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(own)
        config = ClientConfig(httpx_client=http, streaming=True)
        client = ClientFactory(config).create(card)
        whole = ClientFactory(ClientConfig(httpx_client=http, streaming=False)).create(card)
        context = f"{version}-{uuid4()}"
        pushed = asked("hello")
        pushed.configuration.task_push_notification_config.CopyFrom(
            TaskPushNotificationConfig(url="http://192.0.2.1/hook")
        )
        return {
            "card": told,
            "streamed": await streamed(client, asked("hello there", context)),
            "whole": await streamed(whole, asked("again", context)),
            "failed": await streamed(client, asked("fail", context)),
            "lost": await refused(streamed(client, asked("lost", context))),
            "cancelled": await cancelled(client, context),
            "unknown": await refused(client.get_task(GetTaskRequest(id="nobody"))),
            "over": await refused(streamed(client, asked("more", "", "nobody"))),
            "pushed": await refused(streamed(client, pushed)),
            "silent": await refused(streamed(client, asked(""))),
        }


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
