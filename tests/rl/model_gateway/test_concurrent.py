"""Several calls of an episode at a time, calls that are left early, and what an episode may hold."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from benchmarks.servers.model import Model

from aenv import http
from aenv.rl.model_gateway import ModelEpisode, ModelGateway, Record, app, episodes, routes
from aenv.rl.model_gateway.routes import owned
from aenv.runtime.access import Hosts
from tests.rl.model_gateway.support import asking, ids, post, standin, stream
from tests.support import eventually

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOKEN = "aenv_" + "t" * 43


@pytest_asyncio.fixture
async def made() -> AsyncIterator[tuple[Model, ModelGateway]]:
    async with standin() as (model, url), ModelGateway([url]) as gateway:
        yield model, gateway


async def under_way(model: Model) -> None:
    await eventually("a call under way", lambda: bool(model.asked))


# Limits


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_calls_at_the_same_time_keep_to_the_limit_of_tokens(
    made: tuple[Model, ModelGateway], more: dict[str, bool]
) -> None:
    model, gateway = made
    async with gateway.episode(max_completion_tokens=5) as episode:
        found = await asyncio.gather(*(post(episode, CHAT, asking(f"say hell{n}", **more)) for n in range(6)))
    assert sorted(status for status, _ in found) == [200, *[429] * 5]
    assert len(model.asked) == 1


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {"max_completion_tokens": 7}),
        ({"max_tokens": 1000}, {"max_tokens": 7}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": "1000"}, {"max_completion_tokens": 7}),
        ({"max_tokens": -1}, {"max_tokens": 7}),
    ],
)
async def test_an_answer_may_be_as_long_as_what_is_left(
    made: tuple[Model, ModelGateway], given: dict[str, object], sent: dict[str, int]
) -> None:
    model, gateway = made
    async with gateway.episode(max_completion_tokens=12) as episode:
        await post(episode, CHAT, asking("say hello"))
        await post(episode, CHAT, asking("say hello", **given))
    assert {name: value for name, value in model.asked[1].items() if name.startswith("max")} == sent


async def test_what_one_episode_holds_is_bounded(
    made: tuple[Model, ModelGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, gateway = made
    monkeypatch.setattr(episodes, "MOST_HELD", 4000)
    async with gateway.episode() as episode, gateway.episode() as other:
        first = asyncio.create_task(post(episode, CHAT, asking(f"{'x' * 3000}\nhang")))
        await under_way(model)
        assert (await post(episode, CHAT, asking(f"{'x' * 3000}\nsay hello")))[0] == 429
        assert (await post(other, CHAT, asking(f"{'x' * 3000}\nsay hello")))[0] == 200
        first.cancel()
        await asyncio.wait((first,))
        await asyncio.wait_for(model.left.wait(), 30)
        assert (await post(episode, CHAT, asking(f"{'x' * 3000}\nsay hello")))[0] == 200
        monkeypatch.setattr(app, "MOST_REQUEST", 1000)
        assert (await post(episode, CHAT, asking(f"{'x' * 3000}\nsay hello")))[0] == 413
    assert (episode.failure, episode.is_spent) == (None, False)


@pytest.mark.parametrize("said", ["refuse", "say hello"])
async def test_what_is_kept_of_requests_does_not_grow_with_them(made: tuple[Model, ModelGateway], said: str) -> None:
    """Neither where a server has refused them, nor where somebody else is told."""
    size, calls = 100_000, 8

    async def heard(record: Record) -> None:
        pass

    async with made[1].episode() as episode:
        episode.heard = None if said == "refuse" else heard
        tracemalloc.start()
        try:
            for number in range(calls + 1):
                await post(episode, CHAT, asking(f"{'x' * size}\n{said}"))
                made[0].asked.clear()
                made[0].tokens.clear()
                if number == 0:
                    before = tracemalloc.get_traced_memory()[0]
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        records = episode.records
    assert grown < size
    assert [(record.messages, record.error) for record in records] == [([], "status 400")] * (calls + 1) * (
        said == "refuse"
    )


async def test_what_is_kept_of_an_episode_is_bounded(made: tuple[Model, ModelGateway]) -> None:
    async with made[1].episode(max_bytes=7000) as episode, made[1].episode(max_bytes=1000) as refused:
        statuses = [(await post(episode, CHAT, asking(f"{'x' * 500}\nsay hello")))[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        assert (episode.is_spent, len(episode.records)) == (True, 3)
        for _ in range(1000):
            if (await post(refused, CHAT, asking("refuse")))[0] == 429:
                break
        assert refused.is_spent


async def test_a_request_weighs_what_it_becomes(made: tuple[Model, ModelGateway]) -> None:
    model, gateway = made
    async with gateway.episode() as episode:
        assert (await post(episode, CHAT, asking("say hello", logit_bias=[{}] * 1_000_000)))[0] == 413
        assert (await post(episode, CHAT, asking(f"{'x' * 4_000_000}\nsay hello")))[0] == 200
    assert len(model.asked) == 1


# Telling


async def test_answers_are_told_one_after_the_other(made: tuple[Model, ModelGateway]) -> None:
    told: list[str] = []

    async def heard(record: Record) -> None:
        told.append("begins")
        await asyncio.sleep(0.01)
        told.append("ends")

    async with made[1].episode() as episode:
        episode.heard = heard
        await asyncio.gather(*(post(episode, CHAT, asking("say hello")) for _ in range(4)))
    assert told == ["begins", "ends"] * 4


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_an_answer_that_cannot_be_written_down_leaves_no_episode(
    made: tuple[Model, ModelGateway], more: dict[str, bool]
) -> None:
    async def heard(record: Record) -> None:
        raise KeyError("function")

    async with made[1].episode() as episode:
        episode.heard = heard
        status, answer = await post(episode, CHAT, asking("say hello", **more))
        assert status == 502 or b'"error"' in answer
        assert episode.failure is not None
        assert "KeyError" in episode.failure.message


# Leaving


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_stream_that_is_left_early_counts(made: tuple[Model, ModelGateway], path: str) -> None:
    """The server would go on only when its client has left: what had come was sent on at once."""
    model, gateway = made
    told: list[Record] = []

    async def heard(record: Record) -> None:
        told.append(record)

    body = {"model": "m", "input": "say forever"} if path == RESPONSES else asking("say forever")
    async with gateway.episode(max_completion_tokens=4) as episode:
        episode.heard = heard
        async with stream(episode, path, {**body, "stream": True}) as pieces:
            seen = b""
            while b"fore" not in seen:
                seen += await anext(pieces)
        await asyncio.wait_for(model.left.wait(), 30)
        await eventually("its record", lambda: bool(told))
        assert (await post(episode, CHAT, asking("say hello")))[0] == 429
    assert episode.records == []
    (record,) = told
    assert (record.message or {})["content"] == "fore"
    assert record.tokens is not None
    assert (record.tokens.completion, record.completion_tokens) == (ids("fore"), 4)
    assert record.error == "the client left"


async def test_without_token_ids_the_pieces_count(made: tuple[Model, ModelGateway]) -> None:
    async with standin() as (model, url), ModelGateway([url], tokens=False) as gateway:
        async with gateway.episode(max_completion_tokens=1) as episode:
            async with stream(episode, CHAT, asking("say forever", stream=True)) as pieces:
                assert b"fore" in await anext(pieces)
            await asyncio.wait_for(model.left.wait(), 30)
            await eventually("its record", lambda: bool(episode.records))
            assert (await post(episode, CHAT, asking("say hello")))[0] == 429


async def test_a_stream_whose_episode_ends_has_one_head(made: tuple[Model, ModelGateway]) -> None:
    _, gateway = made
    async with gateway.episode() as episode:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "say forever"}]}'
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {episode.key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        seen = b""
        while b"fore" not in seen:
            seen += await reader.read(4096)
    seen += await asyncio.wait_for(reader.read(), 30)
    assert (seen.count(b"HTTP/1.1"), b"[DONE]" in seen) == (1, False)
    writer.close()
    assert [(record.message or {})["content"] for record in episode.records] == ["fore"]


async def test_a_body_that_comes_after_the_end_of_its_episode(made: tuple[Model, ModelGateway]) -> None:
    model, gateway = made
    body = b'{"model": "m", "messages": [{"role": "user", "content": "say hello"}]}'
    async with gateway.episode() as episode:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {episode.key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        await writer.drain()
        assert (await post(episode, CHAT, asking("say first")))[0] == 200
    writer.write(body[10:])
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)).split()[1] == b"401"
    writer.close()
    assert len(model.asked) == 1


# Owners


async def test_the_end_of_an_episode_tells_all_and_may_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def owner(method: str, path: str) -> http.Response:
        lines = f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n".encode()
        return await http.request(method, gateway.url, path, headers=lines, body=b"{}", retries=0)

    desk, app = owned(TOKEN, Hosts(loopback=True, allowed_hosts=["127.0.0.1"]))
    async with standin() as (model, url), ModelGateway([url], owner=app) as gateway:
        desk.gateway = gateway
        assert (await owner("POST", "/episodes")).status == 201
        (episode,) = gateway.episodes.unused(float("inf"))
        waiting = asyncio.create_task(post(episode, CHAT, asking("hang")))
        await under_way(model)
        ended = await owner("DELETE", f"/episodes/{episode.id}")
        assert b"the client left" in ended.body
        assert (await waiting)[0] == 401
        for method in ("DELETE", "GET"):
            again = await owner(method, f"/episodes/{episode.id}")
            assert (again.status, again.body.count(b"the client left")) == (200, 1)
        monkeypatch.setattr(routes, "KEPT", -1.0)
        await owner("POST", "/episodes")
        assert (await owner("GET", f"/episodes/{episode.id}")).status == 404


async def test_an_episode_that_nobody_wants_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, app = owned(TOKEN, Hosts(loopback=True, allowed_hosts=["127.0.0.1"]))

    async def begun() -> ModelEpisode:
        lines = f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n".encode()
        before = set(gateway.episodes.unused(float("inf")))
        await http.request("POST", gateway.url, "/episodes", headers=lines, body=b"{}", retries=0)
        (new,) = {*gateway.episodes.unused(float("inf"))} - before
        return new

    async with standin() as (_, url), ModelGateway([url], owner=app) as gateway:
        desk.gateway = gateway
        first = await begun()
        second = await begun()
        assert (await post(first, CHAT, asking("say hello")))[0] == 200
        monkeypatch.setattr(routes, "ABANDONED", -1.0)
        await begun()
        for episode in (first, second):
            assert (await post(episode, CHAT, asking("say hello")))[0] == 401
