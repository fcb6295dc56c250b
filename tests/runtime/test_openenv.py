"""A session of OpenEnv's over a WebSocket that is written here byte by byte: what it gets, and what it cannot break."""

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from aenv.runtime import tokens
from tests.runtime.wire import send
from tests.support import FIXTURES, ROOT, sandbox

PATIENCE = 30
MOST = 4096
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
ASK = (
    "GET /openenv/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n{more}\r\n"
)
ANSWER = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""To that key, as RFC 6455 has it."""


@pytest.fixture(scope="module")
def keypad() -> Iterator[int]:
    with sandbox(ROOT / "examples" / "06-keypad", variables={"AENV_MAX_BODY": str(MOST)}) as running:
        yield running.port


@pytest.fixture(scope="module")
def lab() -> Iterator[int]:
    with sandbox(FIXTURES / "lab") as running:
        yield running.port


class Client:
    """One connection, of which every byte is ours."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes, kind: int = TEXT, *, first: int = 0x80, masked: bool = True) -> None:
        size = struct.pack("!B", 0x80 | len(data)) if len(data) < 126 else struct.pack("!BH", 0xFE, len(data))
        if not masked:
            self.writer.write(bytes((first | kind, len(data))) + data)
            return
        mask = os.urandom(4)
        body = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
        self.writer.write(bytes((first | kind,)) + size + mask + body)

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(PATIENCE):
            first, size = await self.reader.readexactly(2)
            if size > 125:
                size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8))
            return first & 0x0F, await self.reader.readexactly(size)

    async def said(self) -> dict:
        kind, data = await self.frame()
        assert kind == TEXT
        return json.loads(data)

    async def ask(self, kind: str, data: object = None) -> dict:
        self.send(json.dumps({"type": kind, **({} if data is None else {"data": data})}).encode())
        return await self.said()

    async def closed(self) -> int:
        """Why it was closed."""
        kind, data = await self.frame()
        assert kind == CLOSE
        self.send(data[:2], CLOSE)
        async with asyncio.timeout(PATIENCE):
            assert await self.reader.read() == b""
        return int.from_bytes(data[:2])


@asynccontextmanager
async def connected(port: int, more: str = "") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(ASK.format(more=more).encode())
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert ANSWER in head
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def seated(port: int) -> AsyncIterator[Client]:
    """A session, once the one before it has ended: nothing tells when the server has seen that."""
    async with asyncio.timeout(PATIENCE):
        while True:
            async with connected(port) as client:
                found = await client.ask("state")
                if found["type"] == "state":
                    yield client
                    return
                assert found["data"]["code"] == "CAPACITY_REACHED"


SLEEP = b'{"type": "step", "data": {"tool_name": "sleep", "arguments": {"seconds": 600}}}'
PRESS = {"type": "call_tool", "tool_name": "press", "arguments": {"key": 3}}


async def test_an_episode(keypad):
    async with seated(keypad) as client:
        begun = await client.ask("reset", {"digit": 3, "episode_id": "mine"})
        assert begun == {
            "type": "observation",
            "data": {
                "observation": {"result": "The display shows 3.", "metadata": {}},
                "reward": None,
                "done": False,
            },
        }
        pressed = (await client.ask("step", PRESS))["data"]
        assert (pressed["observation"]["result"]["data"], pressed["reward"], pressed["done"]) == (
            *("You pressed 3.", None, False),
        )
        assert await client.ask("state") == {"type": "state", "data": {"episode_id": "mine", "step_count": 1}}
        ended = (await client.ask("step", {"name": "finish"}))["data"]
        assert (ended["reward"], ended["done"]) == (1.0, True)
        again = await client.ask("step", PRESS)
        assert (again["type"], again["data"]["error"]) == ("error", "conflict")
        assert (await client.ask("reset", {"seed": 1}))["type"] == "observation"


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ({"tool_name": "press", "arguments": {"key": "x"}}, "invalid_args"),
        ({"tool_name": "press", "arguments": [1]}, "invalid_args"),
        ({"tool_name": "press", "arguments": {"key": 9}}, "execution_error"),
        ({"tool_name": "none"}, "tool_not_found"),
    ],
)
async def test_a_call_that_fails_is_an_observation(keypad, action, kind):
    async with seated(keypad) as client:
        await client.ask("reset", {"seed": 1})
        told = (await client.ask("step", action))["data"]
        assert told["observation"]["error"]["error_type"] == kind
        assert (told["reward"], told["done"]) == (None, False)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"{", "INVALID_JSON"),
        (b"", "INVALID_JSON"),
        (b'{"type": "reset", "data": {"digit": ' + b"[" * 1900 + b"]" * 1900 + b"}}", "INVALID_JSON"),
        (b"[]", "VALIDATION_ERROR"),
        (b'{"type": 1}', "VALIDATION_ERROR"),
        (b"{}", "UNKNOWN_TYPE"),
        (b'{"type": "fly"}', "UNKNOWN_TYPE"),
        (b'{"type": "step", "data": [1]}', "VALIDATION_ERROR"),
        (b'{"type": "step"}', "VALIDATION_ERROR"),
        (b'{"type": "step", "data": {"tool_name": 1}}', "VALIDATION_ERROR"),
        (b'{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR"),
        (b'{"type": "reset", "data": {"seed": "1"}}', "VALIDATION_ERROR"),
        (b'{"type": "reset", "data": {"episode_id": 1}}', "VALIDATION_ERROR"),
        (b'{"type": "reset", "data": {"reward": 1}}', "VALIDATION_ERROR"),
        (b'{"type": "reset", "data": {"nothing": 1}}', "VALIDATION_ERROR"),
        (b'{"type": "reset", "data": {"digit": 7}}', "EXECUTION_ERROR"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[:40].decode(),
)
async def test_a_message_that_is_none_is_refused_and_the_session_goes_on(keypad, message, code):
    async with seated(keypad) as client:
        client.send(message)
        told = await client.said()
        assert (told["type"], told["data"]["code"]) == ("error", code)
        assert (await client.ask("state"))["type"] == "state"


async def test_what_the_environment_fails_at_is_no_reward(lab):
    async with seated(lab) as client:
        await client.ask("reset", {"reward": {}, "reward_name": "broken"})
        told = await client.ask("step", {"tool_name": "finish"})
        assert (told["type"], told["data"]["error"]) == ("error", "author_failed")
        told = await client.ask("reset", {"reward_name": "nope"})
        assert (told["type"], told["data"]["error"]) == ("error", "not_found")


async def test_a_second_session_is_told_so_and_the_first_one_goes_on(keypad):
    async with seated(keypad) as first:
        async with connected(keypad) as second:
            told = await second.said()
            assert (told["type"], told["data"]["code"]) == ("error", "CAPACITY_REACHED")
            assert (told["data"]["active_sessions"], told["data"]["max_sessions"]) == (1, 1)
            assert "make another instance" in told["data"]["message"]
            assert await second.closed() == 1013
        assert (await first.ask("state"))["type"] == "state"


@pytest.mark.parametrize("how", ["cut", "closed", "said"])
async def test_the_seat_is_free_when_its_client_has_left(keypad, how):
    async with seated(keypad) as client:
        if how == "closed":
            client.send(struct.pack("!H", 1000), CLOSE)
            assert (await client.frame())[0] == CLOSE
        elif how == "said":
            client.send(b'{"type": "close"}')
            assert await client.closed() == 1000
    async with seated(keypad) as client:
        assert (await client.ask("reset", {"seed": 2}))["type"] == "observation"


async def test_a_cut_ends_the_call_that_runs(lab):
    cancelled = send(lab, "POST", "/tools/cancelled", {}).data
    async with seated(lab) as client:
        client.send(SLEEP)
        async with asyncio.timeout(PATIENCE):
            while send(lab, "GET", "/health").headers["aenv-calls"] == "0":
                await asyncio.sleep(0.01)
    async with seated(lab) as client:
        assert (await client.ask("state"))["type"] == "state"
    assert send(lab, "POST", "/tools/cancelled", {}).data == cancelled + 1


async def test_it_answers_a_ping_while_a_call_runs(lab):
    async with seated(lab) as client:
        client.send(SLEEP)
        client.send(b"still there?", PING)
        assert await client.frame() == (PONG, b"still there?")


async def test_messages_in_pieces_and_in_a_row(keypad):
    async with seated(keypad) as client:
        client.send(b'{"type":', first=0)
        client.send(b"", PING)
        client.send(b'"state"}', 0)
        assert await client.frame() == (PONG, b"")
        assert (await client.said())["type"] == "state"
        for _ in range(10):
            client.send(b'{"type":"state"}')
        assert [(await client.said())["type"] for _ in range(10)] == ["state"] * 10


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([{"data": b"x" * (MOST + 1)}], 1009),
        ([{"data": b"x" * 3000, "first": 0}, {"data": b"x" * 3000, "kind": 0}], 1009),
        ([{"data": b"{}", "kind": BINARY}], 1003),
        ([{"data": b"\xff"}], 1007),
        ([{"data": b"{}", "masked": False}], 1002),
        ([{"data": b"{}", "first": 0xC0}], 1002),
        ([{"data": b"{}", "kind": 0}], 1002),
        ([{"data": b"{", "first": 0}, {"data": b"}"}], 1002),
        ([{"data": b"x" * 126, "kind": PING}], 1002),
        ([{"data": b"", "kind": PING, "first": 0}], 1002),
        ([{"data": b"", "kind": 3}], 1002),
    ],
)
async def test_what_breaks_the_protocol_ends_the_session(keypad, frames, why):
    async with seated(keypad) as client:
        for frame in frames:
            client.send(**frame)
        assert await client.closed() == why


async def test_a_frame_that_is_announced_too_large_is_not_waited_for(keypad):
    async with seated(keypad) as client:
        client.writer.write(struct.pack("!BBQ", 0x80 | TEXT, 0xFF, 1 << 62))
        assert await client.closed() == 1009


async def test_who_sends_on_without_listening_is_shown_out(lab):
    async with seated(lab) as client:
        client.send(SLEEP)
        for _ in range(17):
            client.send(b'{"type":"state"}')
        assert await client.closed() == 1008


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Connection": "Upgrade", "Upgrade": "tcp"},
        {"Connection": "Upgrade", "Upgrade": "websocket"},
        {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "8"},
    ],
)
def test_a_session_is_a_websocket(keypad, headers):
    reply = send(keypad, "GET", "/openenv/ws", headers=headers)
    assert (reply.status, reply.json["code"]) == (426, "invalid")


def test_who_may_ask():
    owner = tokens.new_owner_token()
    variables = {"AENV_OWNER_TOKEN_SHA256": tokens.digest(owner)}
    with sandbox(ROOT / "examples" / "06-keypad", variables=variables) as running:
        agent = {"Authorization": f"Bearer {tokens.agent_token(tokens.digest(owner))}"}
        for method, path in (
            ("GET", "/openenv/ws"),
            ("POST", "/openenv/step"),
            ("GET", "/openenv/state"),
            ("POST", "/openenv/reset"),
            ("POST", "/openenv/mcp"),
        ):
            assert send(running.port, method, path).status == 401
            assert send(running.port, method, path, headers=agent).status == 403
        for path in ("/openenv/schema", "/openenv/metadata", "/openenv/openapi.json"):
            assert send(running.port, "GET", path).status == 401
            assert send(running.port, "GET", path, headers=agent).status == 200
        assert send(running.port, "GET", "/openenv/health").json == {"status": "healthy"}

        async def begin() -> None:
            async with connected(running.port, f"Authorization: Bearer {owner}\r\n") as client:
                assert (await client.ask("reset"))["type"] == "observation"

        asyncio.run(begin())


def test_pages_of_others_open_no_session(keypad):
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Origin": "http://evil.example.com"}
    assert send(keypad, "GET", "/openenv/ws", headers=headers).status == 403


async def test_an_environment_without_a_reset_is_one_episode(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text(
        "import os\nfrom aenv import register_tool\n"
        "@register_tool\ndef key() -> str:\n    return 'the key is ' + os.environ['KEY']\n"
    )
    with sandbox(tmp_path, variables={"KEY": "s3cr3t-value", "AENV_SECRETS": "KEY"}) as running:
        async with seated(running.port) as client:
            assert (await client.ask("reset", {"seed": 1}))["data"]["observation"] == {"metadata": {}}
            told = json.dumps(await client.ask("step", {"tool_name": "key"}))
            assert "the key is ***" in told
            assert "s3cr3t-value" not in told
            assert (await client.ask("reset"))["data"]["error"] == "unsupported"
            ended = (await client.ask("step", {"tool_name": "finish"}))["data"]
            assert (ended["reward"], ended["done"]) == (None, True)
        over_http = send(running.port, "POST", "/openenv/step", {"action": {"tool_name": "key"}})
        assert (over_http.status, over_http.json["code"]) == (409, "conflict")


def test_over_http(keypad):
    begun = send(keypad, "POST", "/openenv/reset", {"digit": 2, "episode_id": "e"}).json
    assert begun["observation"]["result"] == "The display shows 2."
    action = {"tool_name": "press", "arguments": {"key": 2}}
    assert send(keypad, "POST", "/openenv/step", {"action": action, "timeout_s": 3}).json["done"] is False
    assert send(keypad, "GET", "/openenv/state").json == {"episode_id": "e", "step_count": 1}
    assert send(keypad, "POST", "/openenv/step", {"action": {"tool_name": "finish"}}).json["reward"] == 1.0
    assert send(keypad, "POST", "/openenv/step", {}).status == 422


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/openenv", 404), ("GET", "/openenv/", 404), ("GET", "/openenv/fly", 404), ("GET", "/openenv/step", 405)],
)
def test_what_is_not_served(keypad, method, path, status):
    assert send(keypad, method, path).status == status


def test_an_environment_that_is_not_healthy_is_not_so_here_either(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "sick.py").write_text(
        "from aenv import register_function, register_health\nill = []\n"
        "@register_function\ndef catch() -> None:\n    ill.append('a cold')\n"
        "@register_health\ndef health() -> dict:\n    return {'status': 'ill' if ill else 'healthy'}\n"
    )
    with sandbox(tmp_path) as running:
        assert send(running.port, "GET", "/openenv/health").json == {"status": "healthy"}
        send(running.port, "POST", "/functions/catch", {})
        reply = send(running.port, "GET", "/openenv/health")
        assert (reply.status, reply.json) == (503, {"status": "unhealthy"})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"openenv/session/fly"}', -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"session_id":"x"}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"session_id":"x","name":"none"}}', -32603),
    ],
)
def test_messages_without_a_handshake(keypad, body, code):
    send(keypad, "POST", "/openenv/reset", {"seed": 1})
    reply = send(keypad, "POST", "/openenv/mcp", body)
    assert (reply.status, reply.json["error"]["code"]) == (200, code)
