"""The gateway over real sockets, in front of a stand-in that gives token ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from benchmarks.servers.model import Model

from aenv import http
from aenv.errors import Invalid
from aenv.rl.model_gateway import ModelGateway, Upstream, upstreams
from aenv.rl.trajectory import Tokens
from tests.rl.model_gateway.support import asking, ids, post, standin, standin_process
from tests.support import eventually

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
KEY = "sk-provider-4711"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "_PAUSE", 0.001)


@pytest_asyncio.fixture
async def made(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Model, ModelGateway]]:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with standin() as (model, url), ModelGateway([Upstream(url, key_variable="PROVIDER_KEY")]) as gateway:
        yield model, gateway


async def test_tokens_are_recorded_and_only_what_was_asked_for_is_answered(made: tuple[Model, ModelGateway]) -> None:
    model, gateway = made
    async with gateway.episode() as episode:
        status, answer = await post(episode, CHAT, asking("say hello", temperature=0.5))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")
        assert "logprobs" not in answer["choices"][0]
        assert "token_ids" not in answer["choices"][0]
        assert "prompt_token_ids" not in answer
        _, answer = await post(episode, CHAT, asking("say hello", logprobs=True, return_token_ids=True))
        assert answer["choices"][0]["token_ids"] == ids("hello")
        assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.104
    first, second = episode.records
    assert first.tokens == second.tokens
    assert first.tokens is not None
    assert first.tokens.completion == ids("hello")
    assert first.tokens.logprobs == [-ord(c) / 1000 for c in "hello"]
    assert first.parameters["temperature"] == 0.5
    assert (first.message or {})["content"] == "hello"
    assert model.keys == [f"Bearer {KEY}"] * 2


async def test_a_client_that_says_that_it_wants_no_tokens_gets_none(made: tuple[Model, ModelGateway]) -> None:
    async with made[1].episode() as episode:
        for more in ({"logprobs": False, "return_token_ids": False}, {"logprobs": None, "stream": True}):
            _, answer = await post(episode, CHAT, asking("say hello", **more))
            assert not any(name in str(answer) for name in ("token_ids", "logprob'"))
    for record in episode.records:
        assert record.tokens is not None
        assert (record.tokens.completion, record.tokens.logprobs) == (ids("hello"), [-ord(c) / 1000 for c in "hello"])


async def test_what_a_tool_shows_is_told_after_all_results(made: tuple[Model, ModelGateway]) -> None:
    """Messages of tools hold text alone in chat completions, and stand together."""
    model, gateway = made
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    shown = [{"type": "text", "text": "a page"}, {"type": "image", "source": source}]
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": shown},
        {"type": "tool_result", "tool_use_id": "c2", "content": "empty"},
        {"type": "text", "text": "say well"},
    ]
    page = [
        {"type": "input_text", "text": "a page"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    ]
    items = [
        {"type": "function_call_output", "call_id": "c1", "output": page},
        {"type": "function_call_output", "call_id": "c2", "output": "empty"},
        {"role": "user", "content": "say well"},
    ]
    async with gateway.episode() as episode:
        told = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": blocks}]}
        assert (await post(episode, MESSAGES, told))[0] == 200
        assert (await post(episode, RESPONSES, {"model": "m", "input": items}))[0] == 200
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tools = [
        {"role": "tool", "tool_call_id": "c1", "content": "a page"},
        {"role": "tool", "tool_call_id": "c2", "content": "empty"},
    ]
    text = {"type": "text", "text": "say well"}
    first, second = (asked["messages"] for asked in model.asked)
    assert first == [*tools, {"role": "user", "content": [image, text]}]
    assert second == [*tools, {"role": "user", "content": [image]}, {"role": "user", "content": "say well"}]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("said", ["say hello there, all of you", 'call work {"times": 2}'])
async def test_a_stream_is_recorded_as_the_whole_answer_is(
    made: tuple[Model, ModelGateway], path: str, said: str
) -> None:
    _, gateway = made
    body = asking(said) if path != RESPONSES else {"model": "stand-in", "input": said}
    async with gateway.episode() as episode:
        status, _ = await post(episode, path, {**body, "max_tokens": 9} if path == MESSAGES else body)
        assert status == 200
        status, stream = await post(episode, path, {**body, "stream": True})
        assert status == 200
        assert b"token_ids" not in stream
        assert b'logprob"' not in stream
    whole, streamed = episode.records
    assert whole.tokens == streamed.tokens
    assert isinstance(whole.tokens, Tokens)
    assert whole.tokens.completion == ids(said.split(" ", 2)[2] if said.startswith("call") else said[4:])
    assert (whole.completion_tokens, whole.prompt_tokens) == (streamed.completion_tokens, streamed.prompt_tokens)
    assert whole.finish_reason == streamed.finish_reason
    for record in (whole, streamed):
        assert record.message is not None
        for call in record.message.get("tool_calls", ()):
            call.pop("id")
    assert whole.message == streamed.message


async def test_keys_and_paths(made: tuple[Model, ModelGateway]) -> None:
    _, gateway = made
    async with gateway.episode() as one, gateway.episode() as other:
        assert (await post(one, f"/episode/{one.key}/v1/chat/completions", asking("say a"), key="none"))[0] == 200
        for path in (CHAT, RESPONSES, MESSAGES):
            assert (await post(one, path, asking("say a"), key="ek-wrong"))[0] == 401
        await asyncio.gather(
            *(post(one, CHAT, asking("say one")) for _ in range(8)),
            *(post(other, CHAT, asking("say other")) for _ in range(8)),
        )
        assert {(record.message or {})["content"] for record in one.records} == {"a", "one"}
        assert [(record.message or {})["content"] for record in other.records] == ["other"] * 8
        assert (await post(one, "/v1/embeddings", {}))[0] == 404
        listed = await http.request("GET", one.path_url, "/models")
        assert b"stand-in" in listed.body
    status, answer = await post(one, CHAT, asking("say a"))
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, answer = await post(one, MESSAGES, asking("say a"))
    assert (status, answer["type"]) == (401, "error")


@pytest.mark.parametrize("sent", [("sk-other", "KEY"), ("KEY", "sk-other"), ("KEY", "KEY"), ("sk-other", "sk-other")])
async def test_a_client_with_two_keys_needs_one_that_is_its_episodes(
    made: tuple[Model, ModelGateway], sent: tuple[str, str]
) -> None:
    """Some clients of Anthropic send both where ANTHROPIC_AUTH_TOKEN is set on their machine."""
    async with made[1].episode() as episode:
        assert episode.variables["ANTHROPIC_AUTH_TOKEN"] == episode.key
        bearer, key = (each.replace("KEY", episode.key) for each in sent)
        lines = f"Authorization: Bearer {bearer}\r\nX-Api-Key: {key}\r\n".encode()
        body = msgspec.json.encode(asking("say hello", max_tokens=9))
        answer = await http.request("POST", episode.url, MESSAGES, headers=lines, body=body, retries=0)
    assert answer.status == (200 if "KEY" in sent else 401)


async def test_limits(made: tuple[Model, ModelGateway]) -> None:
    model, gateway = made
    async with gateway.episode(max_calls=1) as calls, gateway.episode(max_completion_tokens=5) as tokens:
        for episode in (calls, tokens):
            assert (await post(episode, CHAT, asking("say hello")))[0] == 200
            status, answer = await post(episode, CHAT, asking("say hello"))
            assert (status, answer["error"]["type"]) == (429, "insufficient_quota")
            assert "used up" in answer["error"]["message"]
            assert episode.is_spent
    assert len(model.asked) == 2
    with pytest.raises(Invalid, match="max_calls"):
        async with gateway.episode(max_calls=0):
            pass


async def test_what_is_asked_again_and_what_is_not(made: tuple[Model, ModelGateway]) -> None:
    model, gateway = made
    async with gateway.episode() as episode:
        assert (await post(episode, CHAT, asking("busy 2")))[0] == 200
        assert len(model.asked) == 3
        assert len(episode.records) == 1
        status, answer = await post(episode, CHAT, asking("refuse"))
        assert (status, answer["error"]["message"]) == (400, "the prompt is too long")
        assert episode.failure is None
        model.busy = -100
        status, answer = await post(episode, CHAT, asking("busy 2"))
        assert status == 502
        assert episode.failure is not None
        assert (await post(episode, CHAT, asking("say hello")))[0] == 502


async def test_a_server_that_dies_in_the_middle_of_a_stream() -> None:
    with standin_process() as (process, url):
        async with ModelGateway([url], retries=1) as gateway, gateway.episode() as episode:
            status, stream = await post(episode, CHAT, asking("die", stream=True))
            assert (status, b"[DONE]" in stream) == (200, False)
            assert b'"error"' in stream
            assert process.wait(30) == 1
    assert episode.failure is not None
    assert episode.failure.code == "model_failed"
    assert episode.records[0].error


async def test_another_server_takes_over() -> None:
    async with standin() as (model, url):
        async with ModelGateway(["http://127.0.0.1:9/v1", url]) as gateway, gateway.episode() as episode:
            for _ in range(3):
                assert (await post(episode, CHAT, asking("say hello")))[0] == 200
            assert (await post(episode, CHAT, asking("say hello", stream=True)))[0] == 200
    assert len(model.asked) == 4
    assert episode.failure is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(made: tuple[Model, ModelGateway], stream: bool) -> None:
    model, gateway = made
    async with gateway.episode() as episode:
        asked = asking("say forever and ever" if stream else "hang", stream=stream)
        asking_now = asyncio.create_task(post(episode, CHAT, asked))
        await eventually("a call under way", lambda: asyncio.sleep(0, bool(model.asked)))
        asking_now.cancel()
        await asyncio.wait_for(model.left.wait(), 30)
        assert episode.failure is None
        assert (await post(episode, CHAT, asking("say hello")))[0] == 200


async def test_a_server_that_is_silent() -> None:
    async with standin() as (_, url), ModelGateway([url], timeout=0.1, retries=0) as gateway:
        for more in ({}, {"stream": True}):
            async with gateway.episode() as episode:
                assert (await post(episode, CHAT, asking("hang", **more)))[0] == 502
                assert episode.failure is not None


async def test_the_end_of_an_episode_ends_its_calls(made: tuple[Model, ModelGateway]) -> None:
    model, gateway = made
    async with gateway.episode() as episode:
        waiting = asyncio.create_task(post(episode, CHAT, asking("hang")))
        await eventually("a call under way", lambda: asyncio.sleep(0, bool(model.asked)))
    assert (await waiting)[0] == 401
    await asyncio.wait_for(model.left.wait(), 30)


async def test_keys_are_in_no_log(made: tuple[Model, ModelGateway], caplog: pytest.LogCaptureFixture) -> None:
    _, gateway = made
    caplog.set_level(logging.DEBUG)
    async with gateway.episode() as episode:
        await post(episode, CHAT, asking("say hello"))
        await post(episode, CHAT, {"model": 1})
    assert episode.key not in caplog.text
    assert KEY not in caplog.text
    assert KEY not in repr(gateway.upstreams.all)


async def test_who_may_ask() -> None:
    with pytest.raises(Invalid, match="owner's token"):
        ModelGateway(["http://127.0.0.1:9/v1"], host="0.0.0.0")
    with pytest.raises(Invalid, match="NO_SUCH_VARIABLE"):
        Upstream("http://127.0.0.1:9/v1", key_variable="NO_SUCH_VARIABLE")
    async with ModelGateway(["http://127.0.0.1:9/v1"]) as gateway, gateway.episode() as episode:
        lines = f"Authorization: Bearer {episode.key}\r\nOrigin: http://evil.example\r\n".encode()
        answer = await http.request("POST", gateway.url, CHAT, headers=lines, body=b"{}", retries=0)
        assert answer.status == 403
