"""How an answer is sent: in one piece, or as it is written, with an eye on the client that waits for it."""

from __future__ import annotations

import asyncio

from aenv.runtime.answers import EVENTS, Answer, Response
from aenv.runtime.protocol import Receive, Send

QUICK = 0.05
"""A call that takes longer is watched for its client's leaving; a quick one is not worth it."""
KEEP_ALIVE = 15.0
"""Seconds of silence after which a client hears that its call is still running."""
CHUNK = 256 * 1024


async def send_whole(response: Response, send: Send) -> None:
    """Send an answer that is complete."""
    body = response.body
    headers = [*response.headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    for start in range(0, max(len(body) - CHUNK, 0), CHUNK):
        await send({"type": "http.response.body", "body": body[start : start + CHUNK], "more_body": True})
    rest = body if len(body) <= CHUNK else body[(len(body) - 1) // CHUNK * CHUNK :]
    await send({"type": "http.response.body", "body": rest})


async def follow(answer: Answer, position: int, receive: Receive, send: Send) -> None:
    """Send an answer as it is written, until it is done or its client has left."""
    answer.joined()
    begun = False
    watch: asyncio.Task[None] | None = None
    try:
        while not answer.cut:
            if answer.done and not begun and position == 0 and len(answer.chunks) <= 1:
                await send_whole(Response(answer.status, b"".join(answer.chunks), answer.headers), send)
                return
            if answer.status and not begun:
                await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
                await send({"type": "http.response.body", "body": b"", "more_body": True})  # let the head go out
                begun = True
            while begun and position < len(answer.chunks):
                await send({"type": "http.response.body", "body": answer.chunks[position], "more_body": True})
                if answer.transient:
                    answer.chunks[position] = b""
                    answer.taken()
                position += 1
            if answer.done and position >= len(answer.chunks):
                await send({"type": "http.response.body", "body": b""})
                return
            if watch is None:
                await answer.changed(QUICK)
                watch = asyncio.create_task(_until_gone(receive))
                watch.add_done_callback(lambda _: answer.wake())
                continue
            await answer.changed(KEEP_ALIVE)
            if watch.done():
                return
            if position == len(answer.chunks) and not answer.done:
                if begun and answer.headers[: len(EVENTS)] == EVENTS:
                    await send({"type": "http.response.body", "body": b": still running\r\n\r\n", "more_body": True})
                elif not begun and answer.upgrade is not None:
                    answer.upgrade()
    finally:
        if watch is not None:
            watch.cancel()
        answer.left()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
