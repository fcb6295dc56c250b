"""What others learn of calls: their names, who is told of each, and the spans that are made of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aenv.api.gateway import Answered
from aenv.tracing import Tracer
from tests.api.gateway.support import (
    OWNER,
    Known,
    Request,
    Seen,
    Served,
    asked,
    client,
    head,
    inside,
    ok,
    place,
    posted,
    serving,
    upstream,
)
from tests.support import Sandbox, until

ONE, BOTH = "/env-instance/one", "/env-service/both"
TIMING = "queue;dur=1.5, tool;dur=20.25"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextlib.asynccontextmanager
async def echo(extra: str = f"Server-Timing: {TIMING}\r\n") -> AsyncIterator[tuple[str, list[Request]]]:
    """A server that remembers what it was asked."""
    heard: list[Request] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            await reader.readexactly(int(request.headers.get("content-length", 0)))
            heard.append(request)
            if "/never" in request.line:
                await reader.read()
            if "/cut" in request.line:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
                return
            writer.write(ok(extra=extra))

    async with upstream(handler) as url:
        yield url, heard


# The names of requests


@pytest.mark.parametrize("given", ["abc-1", "a" * 128, "A.b_c:d/e+f=g@h"])
async def test_a_request_keeps_its_name(given: str) -> None:
    async with echo() as (url, heard), serving(Known(place(url))) as gateway:
        reply = await asked(gateway, f"{ONE}/x", f"{OWNER}X-Request-Id: {given}\r\n")
        assert reply.headers["x-request-id"] == heard[0].headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", 'x"y', "\x80", "<script>"])
async def test_a_name_that_is_none_is_replaced(given: str) -> None:
    async with echo("X-Request-Id: of-the-sandbox\r\n") as (url, heard), serving(Known(place(url))) as gateway:
        replies = [await asked(gateway, f"{ONE}/x", f"{OWNER}X-Request-Id: {given}\r\n") for _ in range(2)]
        names = [reply.headers["x-request-id"] for reply in replies]
        assert names == [request.headers["x-request-id"] for request in heard]
        assert len(set(names)) == 2
        assert all(re.fullmatch(r"[0-9a-f]{12}-[0-9a-f]+", name) for name in names)


async def test_a_refusal_has_a_name_too() -> None:
    async with serving(Known()) as gateway:
        reply = await asked(gateway, f"{ONE}/x", "X-Request-Id: mine\r\n")
        assert (reply.status, reply.headers["x-request-id"]) == (401, "mine")


async def test_an_exposed_port_has_names_of_its_own(lab: Sandbox) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        writer.write(ok(json.dumps(request.headers).encode(), "X-Request-Id: theirs\r\nMcp-Session-Id: s\r\n"))

    async with inside(handler) as port, serving(Known(place(lab.url))) as gateway:
        name = gateway.exposed_url("one", port, 1e10).split("/")[2]
        reply = await asked(gateway, "/", "X-Request-Id: a b\r\n", host=name)
        assert (reply.headers["x-request-id"], reply.headers["mcp-session-id"]) == ("theirs", "s")
        assert reply.json["x-request-id"] == "a b"
        assert "x-request-id" not in (await asked(gateway, "/", "", host=name)).json


# Who is told


async def test_each_call_is_told_once() -> None:
    seen = Seen()
    async with (
        echo() as (url, _),
        serving(Known(place(url)), services=Served(url), watcher=seen) as gateway,
        client(gateway) as gone,
    ):
        headers = f"{OWNER}X-Request-Id: mine\r\ntraceparent: {PARENT}\r\n"
        reply = await posted(gateway, f"{ONE}/tools/add?secret=1", b"{}", headers)
        assert reply.headers["server-timing"] == TIMING
        (call,) = seen.calls
        assert call.place is not None
        assert (call.place.id, call.service, call.method, call.path) == ("one", "", b"POST", b"/tools/add")
        assert (call.status, call.request_id, call.trace) == (200, b"mine", PARENT.encode())
        assert call.timing == TIMING.encode()
        assert call.began <= call.answered <= call.ended
        await asked(gateway, f"{BOTH}/health")
        assert (seen.calls[1].service, seen.calls[1].place and seen.calls[1].place.id) == ("both", "r0")
        assert seen.calls[1].trace == b""
        await asked(gateway, "/health")  # the gateway's own is nobody's call
        for path, headers, status in (
            (f"{ONE}/x", "", 401),
            ("/env-instance/two/x", OWNER, 401),
            ("/nowhere", OWNER, 404),
            ("/env-service/none/x", "Authorization: Bearer anna\r\n", 404),
            ("/env-instance/%2e%2e/x", OWNER, 400),
        ):
            before = len(seen.calls)
            assert (await asked(gateway, path, headers)).status == status
            assert len(seen.calls) == before + 1
            assert (seen.calls[-1].place, seen.calls[-1].status) == (None, status)
        assert seen.calls[-2].service == "none"
        before = len(seen.calls)
        gone.get(f"{ONE}/never")
        await until(lambda: bool(gateway.router.sandboxes["one"].calls), "the call")
        gone.vanish()
        await until(lambda: len(seen.calls) > before, "the end of a call whose client left")
        assert (seen.calls[-1].status, seen.calls[-1].path) == (0, b"/never")
        async with client(gateway) as one:
            one.get(f"{ONE}/cut")
            await one.rest()
        assert [call.status for call in seen.calls[before + 1 :]] == [200]


async def test_a_connection_that_goes_on_with_another_protocol_is_told_when_it_ends() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
        await reader.read()

    seen = Seen()
    async with upstream(handler) as url, serving(Known(place(url)), watcher=seen) as gateway:
        async with client(gateway) as one:
            one.get(f"{ONE}/x", f"{OWNER}Connection: Upgrade\r\nUpgrade: x\r\n")
            assert (await one.head()).status == 101
            assert seen.calls == []
            assert gateway.router.sandboxes["one"].calls == 1
        await until(lambda: bool(seen.calls), "the end")
        assert seen.calls[0].status == 101
        assert gateway.router.sandboxes["one"].calls == 0


async def test_who_is_told_cannot_break_a_call(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Seen):
        def answered(self, call: Answered) -> None:
            raise RuntimeError("no room")

    async with (
        echo() as (url, _),
        serving(Known(place(url)), watcher=Broken()) as gateway,
        client(gateway) as one,
    ):
        for _ in range(3):
            one.get(f"{ONE}/x")
            assert (await one.reply()).status == 200
    assert "no room" in caplog.text


# Spans


class Collector:
    """Takes spans as a collector of OpenTelemetry does."""

    def __init__(self) -> None:
        self.spans: dict[str, dict[str, Any]] = {}

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        body = json.loads(await reader.readexactly(int(request.headers["content-length"])))
        for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            self.spans[span["name"]] = span | {
                "attributes": {pair["key"]: next(iter(pair["value"].values())) for pair in span.get("attributes", [])}
            }
        writer.write(ok(b"{}"))


async def test_a_call_is_a_span_and_what_the_sandbox_says_is_in_it() -> None:
    collector = Collector()
    async with echo() as (url, heard), inside(collector) as port:
        tracer = Tracer(f"http://127.0.0.1:{port}")
        async with serving(Known(place(url)), services=Served(url), tracer=tracer) as gateway:
            await posted(gateway, f"{BOTH}/tools/add?secret=1", b"{}", f"{OWNER}traceparent: {PARENT}\r\n")
            assert await asyncio.to_thread(tracer.flush, 30)
            span = collector.spans["gateway"]
            assert (span["traceId"], span["parentSpanId"]) == tuple(PARENT.split("-")[1:3])
            assert heard[0].headers["traceparent"] == f"00-{span['traceId']}-{span['spanId']}-01"
            assert span["attributes"]["aenv.service"] == "both"
            assert span["attributes"]["aenv.instance"] == "r0"
            assert span["attributes"]["aenv.route"] == "tool"
            assert span["attributes"]["http.response.status_code"] == "200"
            assert "secret" not in json.dumps(span)
            for name in ("queue", "tool"):
                assert collector.spans[name]["parentSpanId"] == span["spanId"]
            collector.spans.clear()
            await asked(gateway, f"{ONE}/x", "")  # refused
            assert await asyncio.to_thread(tracer.flush, 30)
            span = collector.spans["gateway"]
            assert span["status"]["message"] == "Unauthorized"
            collector.spans.clear()
            for parent in (f"{PARENT[:-2]}00", "nonsense"):
                await asked(gateway, f"{ONE}/x", f"{OWNER}traceparent: {parent}\r\n")
            assert heard[-2].headers["traceparent"] == f"{PARENT[:-2]}00"  # not sampled: passed on, and not told
            assert heard[-1].headers["traceparent"] != "nonsense"
            assert await asyncio.to_thread(tracer.flush, 30)
            assert collector.spans["gateway"]["traceId"] in heard[-1].headers["traceparent"]


async def test_without_a_tracer_the_context_passes_as_it_is() -> None:
    async with echo() as (url, heard), serving(Known(place(url))) as gateway:
        for given in (PARENT, "whatever it is"):
            await asked(gateway, f"{ONE}/x", f"{OWNER}traceparent: {given}\r\n")
            assert heard[-1].headers["traceparent"] == given
        await asked(gateway, f"{ONE}/x")
        assert "traceparent" not in heard[-1].headers
