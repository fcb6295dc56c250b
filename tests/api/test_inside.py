"""Sandboxes that answer the platform with what no runtime does: a typed failure, never a defect of ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aenv.api import inside
from aenv.api.gateway.places import Place
from aenv.errors import AEnvError, SandboxError

DEEP = b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, DEEP, "nonsense"),
        (200, b"\xff", "nonsense"),
        (200, b"[]", "nonsense"),
        (500, DEEP, "nonsense"),
        (500, b'{"code": ["x"], "error": {"a": 1}, "hint": {"b": 2}}', "{'a': 1}"),
        (500, b'{"code": "internal", "error": null}', "it answered 500"),
        (401, b'{"code": "unauthorized", "error": "no"}', "does not know this platform's token"),
    ],
)
async def test_nonsense_is_told_as_such(status: int, body: bytes, words: str, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    place = Place("one", f"unix:{tmp_path / 's'}", "anna", "token")
    try:
        with pytest.raises(AEnvError) as caught:
            await inside.ask(place, "GET", "/history", timeout=30)
    finally:
        server.close()
    assert words in caught.value.message
    assert caught.value.hint is None or isinstance(caught.value.hint, str)
    if status == 200:
        assert isinstance(caught.value, SandboxError)
