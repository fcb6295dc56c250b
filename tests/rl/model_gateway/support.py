"""Help for tests of the model gateway: the stand-in, here or as a process, and calls over real sockets."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.servers.model import Model

from aenv import http
from aenv.rl.model_gateway import ModelEpisode

ROOT = Path(__file__).parent.parent.parent.parent
PATIENCE = 60


@asynccontextmanager
async def standin() -> AsyncIterator[tuple[Model, str]]:
    """The stand-in in this process, and its URL."""
    made = Model()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    try:
        yield made, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


class Scripted:
    """A server that answers with these, one for each request, and the last of them for all others."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.headers = b""
        """Further lines of all answers."""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
                data = await reader.readexactly(size)
                self.asked.append(msgspec.json.decode(data) if data else {})
                status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                kind = b"text/event-stream" if body.startswith(b"data:") else b"application/json"
                head = b"HTTP/1.1 %d S\r\n%bContent-Type: %b\r\nContent-Length: " % (status, self.headers, kind)
                writer.write(head)
                writer.write(b"%d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *of: object) -> None:
        self._server.close()


def completion(text: str, **more: Any) -> bytes:
    """An answer of a server."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return msgspec.json.encode({"object": "chat.completion", "model": "scripted", "choices": [choice], **more})


def events(*chunks: Any) -> bytes:
    """An answer as a stream."""
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


@asynccontextmanager
async def stream(episode: ModelEpisode, path: str, body: Any) -> AsyncIterator[AsyncIterator[bytes]]:
    """Ask for a stream, and read it piece by piece; whoever goes leaves in the middle of it."""
    headers = f"Authorization: Bearer {episode.key}\r\n".encode()
    async with http.stream(
        "POST", episode.url, path, headers=headers, body=msgspec.json.encode(body), patience=PATIENCE
    ) as answer:
        assert answer.status == 200
        yield aiter(answer)


@contextmanager
def standin_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The stand-in as a process, which may die."""
    command = [sys.executable, "-m", "benchmarks.servers.model"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdin.close()
        process.stdout.close()


def asking(text: str, **more: Any) -> dict[str, Any]:
    """A request of one message."""
    return {"model": "stand-in", "messages": [{"role": "user", "content": text}], **more}


async def post(episode: ModelEpisode, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
    """Ask, with the key in a header; the status, and the answer as JSON or, of a stream, as bytes."""
    headers = f"Authorization: Bearer {episode.key if key is None else key}\r\n".encode()
    async with asyncio.timeout(PATIENCE):
        sent = msgspec.json.encode(body)
        answer = await http.request("POST", episode.url, path, headers=headers, body=sent, retries=0)
    is_json = answer.headers[b"content-type"] == b"application/json"
    return answer.status, msgspec.json.decode(answer.body) if is_json else answer.body


def ids(text: str) -> list[int]:
    """The stand-in's tokens."""
    return [ord(character) for character in text]
