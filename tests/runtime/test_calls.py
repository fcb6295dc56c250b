"""Call ids: a call whose answer was lost is answered again, not run again."""

from __future__ import annotations

import threading

from tests.runtime.wire import Reply, lines, send, send_raw
from tests.support import FIXTURES, Sandbox, sandbox


def _count(lab: Sandbox) -> int:
    return int(send(lab.port, "POST", "/tools/count", {}).json["data"])


def test_the_same_id_is_answered_from_memory(lab: Sandbox) -> None:
    headers = {"AEnv-Call-Id": "same"}
    first = send(lab.port, "POST", "/tools/count", {}, headers)
    again = send(lab.port, "POST", "/tools/count", {}, headers)
    assert first.json == again.json
    assert _count(lab) == first.json["data"] + 1


def test_another_call_under_the_same_id_is_refused(lab: Sandbox) -> None:
    headers = {"AEnv-Call-Id": "reused"}
    assert send(lab.port, "POST", "/tools/add", {"a": 1}, headers).status == 200
    reply = send(lab.port, "POST", "/tools/add", {"a": 2}, headers)
    assert (reply.status, reply.json["code"]) == (409, "conflict")


def test_asking_again_while_it_runs_joins_the_same_call(lab: Sandbox) -> None:
    before = _count(lab)
    replies: list[Reply] = []
    body, headers = {"seconds": 0.5}, {"AEnv-Call-Id": "joined"}

    def ask() -> None:
        replies.append(send(lab.port, "POST", "/tools/slow_count", body, headers))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [reply.json["data"] for reply in replies] == [before + 1] * 4


def test_a_cut_call_goes_on_and_is_answered_to_who_comes_back(lab: Sandbox) -> None:
    before = _count(lab)
    body, headers = {"seconds": 0.3}, {"AEnv-Call-Id": "cut"}
    send_raw(lab.port, "POST", "/tools/slow_count", body, headers).close()
    assert send(lab.port, "POST", "/tools/slow_count", body, headers).json["data"] == before + 1
    assert _count(lab) == before + 2


def test_a_call_can_be_cancelled_by_its_id(lab: Sandbox) -> None:
    before = send(lab.port, "POST", "/tools/cancelled", {}).json["data"]
    sock = send_raw(lab.port, "POST", "/tools/sleep", {"seconds": 60}, {"AEnv-Call-Id": "stop"})
    while not send(lab.port, "DELETE", "/calls/stop").json["data"]["cancelled"]:
        continue
    with sock:
        assert "500" in next(lines(sock))
    assert send(lab.port, "POST", "/tools/cancelled", {}).json["data"] == before + 1
    assert send(lab.port, "DELETE", "/calls/never").json["data"] == {"cancelled": False}


def test_a_caller_that_knew_an_earlier_life_is_told(lab: Sandbox) -> None:
    boot = send(lab.port, "GET", "/health").headers["aenv-boot"]
    assert send(lab.port, "POST", "/tools/add", {"a": 1}, {"AEnv-Boot": boot}).status == 200
    reply = send(lab.port, "POST", "/tools/add", {"a": 1}, {"AEnv-Boot": "other"})
    assert (reply.status, reply.json["code"]) == (502, "sandbox_lost")


async def test_the_client_asks_again_after_a_cut_and_the_call_runs_once() -> None:
    """A proxy that cuts the connection when the first answer comes, between the SDK and a sandbox."""
    import asyncio

    from aenv import Environment, attach

    with sandbox(FIXTURES / "lab") as running:
        cuts = 0

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal cuts
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", running.port)

            async def up() -> None:
                while data := await reader.read(65536):
                    up_writer.write(data)
                up_writer.close()

            task = asyncio.create_task(up())
            while data := await up_reader.read(65536):
                if b"structuredContent" in data and cuts < 2:
                    cuts += 1
                    break
                writer.write(data)
            writer.transport.abort()
            up_writer.close()
            task.cancel()

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Environment("lab", provision=attach(f"127.0.0.1:{port}")) as env:
            assert (await env.call_tool("count")).structured == {"result": 1}
            assert (await env.call_tool("count")).structured == {"result": 2}
        assert cuts == 2
        server.close()


def test_the_query_belongs_to_the_call(lab: Sandbox) -> None:
    headers = {"AEnv-Call-Id": "queried"}
    assert send(lab.port, "POST", "/task/reward?name=score", {"answer": "42"}, headers).json["data"] == 1.0
    assert send(lab.port, "POST", "/task/reward?name=detailed", {"answer": "42"}, headers).status == 409


def test_a_huge_answer_does_not_push_out_the_others(lab: Sandbox) -> None:
    small, huge = {"AEnv-Call-Id": "before-huge"}, {"AEnv-Call-Id": "huge"}
    first = send(lab.port, "POST", "/tools/count", {}, small)
    body = {"size": 40_000_000}
    assert len(send(lab.port, "POST", "/tools/big", body, huge).body) > 40_000_000
    assert send(lab.port, "POST", "/tools/count", {}, small).json == first.json
    assert len(send(lab.port, "POST", "/tools/big", body, huge).body) > 40_000_000
