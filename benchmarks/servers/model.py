"""A server that speaks OpenAI's chat completions with token ids and log-probabilities, as vLLM gives them.

It says what the last message tells it to: ``say TEXT``, ``call NAME JSON``, ``hang``, ``fail``, ``die`` half-way in an
answer, ``busy N`` times and then well. While it has a ``script``, it does what comes next there instead. Its tokens
are the code points of what it read and wrote. ``python -m benchmarks.servers.model`` prints its address.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PIECE = 4
"""Characters of each piece of a stream."""


class Model:
    """What it says, and what it was asked."""

    def __init__(self) -> None:
        self.busy = 0
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.script: list[str] = []
        """What it does, a line for each request: for clients whose messages are their own."""
        self.template: Callable[[list[dict[str, Any]]], str] = json.dumps
        """How messages become what it reads."""
        self.dropped = ""
        """What of a stream's second piece is not sent: its ``ids``, or all of it (``pieces``)."""
        self.tokens: list[tuple[list[int], list[int]]] = []
        """What it read and wrote, of each answer."""
        self.left = asyncio.Event()
        """Set when a client has gone in the middle of an answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *headers = head.decode().split("\r\n")
                found = {name.lower(): value for name, _, value in (each.partition(": ") for each in headers)}
                data = await reader.readexactly(int(found.get("content-length", 0)))
                self.keys.append(found.get("authorization", ""))
                if " /v1/models " in line:
                    _whole(writer, {"object": "list", "data": [{"id": "stand-in", "object": "model"}]})
                else:
                    await self._answer(json.loads(data), reader, writer)
                await writer.drain()
        writer.close()

    async def _answer(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(body)
        read = self.template(body["messages"])
        content = body["messages"][-1].get("content") or ""
        text = content if isinstance(content, str) else content[-1]["text"]
        line = self.script.pop(0) if self.script else text.strip().rpartition("\n")[2]
        verb, _, rest = line.partition(" ")
        if verb == "busy" and self.busy < int(rest):
            self.busy += 1
            _whole(writer, {"error": {"message": "busy"}}, 503, "Retry-After: 0\r\n")
            return
        if verb == "fail":
            _whole(writer, {"error": {"message": "the sampler has failed"}}, 500)
            return
        if verb == "refuse":
            _whole(writer, {"error": {"message": "the prompt is too long"}}, 400)
            return
        if verb == "hang":
            await reader.read(1)
            self.left.set()
            return
        name, _, arguments = rest.partition(" ")
        said = arguments or "{}" if verb == "call" else rest if verb == "say" else "It is done."
        ids = [ord(character) for character in said]
        self.tokens.append(([ord(character) for character in read], ids))
        logprobs = {"content": [{"token": character, "logprob": -ord(character) / 1000} for character in said]}
        usage = {"prompt_tokens": len(read), "completion_tokens": len(ids), "total_tokens": len(read) + len(ids)}
        head: dict[str, Any] = {"id": "c1", "created": 1, "model": "stand-in-1"}
        prompt = {"prompt_token_ids": [ord(c) for c in read]} if body.get("return_token_ids") else {}
        call = {"id": f"call_{len(self.asked)}", "type": "function", "function": {"name": name, "arguments": said}}
        reason = "tool_calls" if verb == "call" else "stop"
        if not body.get("stream"):
            message = {"role": "assistant", "content": None if verb == "call" else said}
            message |= {"tool_calls": [call]} if verb == "call" else {}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            choice |= {"token_ids": ids} if body.get("return_token_ids") else {}
            choice["logprobs"] = logprobs if body.get("logprobs") else None
            _whole(writer, {**head, "object": "chat.completion", "choices": [choice], "usage": usage, **prompt})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        head["object"] = "chat.completion.chunk"
        for start in range(0, len(said), PIECE):
            if verb != "call":
                delta: dict[str, Any] = {"content": said[start : start + PIECE]}
            elif start == 0:
                delta = {"tool_calls": [{"index": 0, **call, "function": {"name": name, "arguments": said[:PIECE]}}]}
            else:
                delta = {"tool_calls": [{"index": 0, "function": {"arguments": said[start : start + PIECE]}}]}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            is_hole = start == PIECE
            if is_hole and self.dropped == "pieces":
                continue
            if body.get("return_token_ids") and not (is_hole and self.dropped == "ids"):
                choice["token_ids"] = ids[start : start + PIECE]
            if body.get("logprobs"):
                choice["logprobs"] = {"content": logprobs["content"][start : start + PIECE]}
            _event(writer, {**head, "choices": [choice], **(prompt if start == 0 else {})})
            await writer.drain()
            if verb == "die":
                os._exit(1)
            if said.startswith("forever"):
                await reader.read(1)
                self.left.set()
                return
        _event(writer, {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            _event(writer, {**head, "choices": [], "usage": usage})
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _whole(writer: asyncio.StreamWriter, body: Any, status: int = 200, more: str = "") -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} S\r\nContent-Type: application/json\r\n{more}Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def _event(writer: asyncio.StreamWriter, data: Any) -> None:
    writer.write(_chunk(b"data: " + json.dumps(data).encode() + b"\n\n"))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def main() -> None:
    """Serve until the standard input ends."""
    server = await asyncio.start_server(Model().serve, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
