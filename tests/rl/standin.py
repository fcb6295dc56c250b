"""A server that speaks OpenAI's chat completions, on a real socket, and does what a test says instead of thinking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

USAGE = {"prompt_tokens": 11, "completion_tokens": 7}


def calling(name: str = "work", arguments: str = "{}", *, id: str = "c1", content: str | None = None) -> Any:
    """An answer that calls a tool."""
    return _completion({"content": content, "tool_calls": [_call(name, arguments, id)]}, "tool_calls")


def calling_all(*calls: tuple[str, str]) -> Any:
    """An answer that calls several."""
    asked = [_call(name, arguments, f"c{place}") for place, (name, arguments) in enumerate(calls)]
    return _completion({"content": None, "tool_calls": asked}, "tool_calls")


def saying(text: str) -> Any:
    """An answer that calls none."""
    return _completion({"content": text}, "stop")


def _call(name: str, arguments: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _completion(message: dict[str, Any], reason: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return {"object": "chat.completion", "model": "stand-in-1", "choices": [choice], "usage": USAGE}


def _events(completion: dict[str, Any]) -> bytes:
    """A completion for those who want it in pieces, in one."""
    (choice,) = completion["choices"]
    calls = choice["message"].get("tool_calls") or []
    delta = choice["message"] | ({"tool_calls": [{"index": n, **one} for n, one in enumerate(calls)]} if calls else {})
    piece = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    chunk = {
        **completion,
        "id": "x",
        "created": 0,
        "object": "chat.completion.chunk",
        "choices": [piece],
        "usage": USAGE | {"total_tokens": sum(USAGE.values())},
    }
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()


HANG, HALF, CUT = "hang", "half", "cut"
Answer = Any
"""A completion; ``(status, body)``; or one of ``HANG``, ``HALF`` and ``CUT``."""


class Model:
    """Answers one request after the other as it is told, and the last answer again for all others. Who asks is told
    apart by nothing: a test with several episodes gives answers by ``choose``."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.url = ""
        self.hanging = asyncio.Event()
        """Set when somebody waits in vain."""

    def choose(self, body: dict[str, Any]) -> Answer:
        """By how many answers the asker has had."""
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        return self.answers[min(spoken, len(self.answers) - 1)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.asked.append(body)
                self.heads.append(head)
                answer = self.choose(body)
                if answer == HANG:
                    self.hanging.set()
                    await asyncio.Event().wait()
                if answer == CUT:
                    break
                status, told = answer if isinstance(answer, tuple) else (200, answer)
                if answer == HALF:
                    status, told = 200, saying("half of it")
                streamed = bool(body.get("stream")) and isinstance(told, dict) and "choices" in told
                kind = "text/event-stream" if streamed else "application/json"
                data = told if isinstance(told, bytes) else _events(told) if streamed else json.dumps(told).encode()
                sent = f"HTTP/1.1 {status} S\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(sent.encode() + (data[: len(data) // 2] if answer == HALF else data))
                await writer.drain()
                if answer == HALF:
                    break
        writer.close()


@asynccontextmanager
async def model(*answers: Answer, kind: Callable[[Sequence[Answer]], Model] = Model) -> AsyncIterator[Model]:
    """A server that gives these answers, until the block ends."""
    made = kind(answers)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.CancelledError):
            await made.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield made
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
