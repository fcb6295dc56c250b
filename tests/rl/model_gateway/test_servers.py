"""Servers of a model that fail, refuse, answer with nonsense, or tell what is nobody's business."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from aenv import http
from aenv.rl.model_gateway import Limits, ModelGateway, Upstream, calls, upstreams
from aenv.rl.model_gateway.events import Events
from aenv.rl.trajectory import Tokens
from tests.rl.model_gateway.support import Scripted, asking, completion, events, ids, post, standin

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
KEY = "sk-provider-4711"
BUSY = (503, b'{"error": {"message": "busy"}}')
UNKNOWN = (400, b'{"error": {"message": "return_token_ids: extra inputs are not permitted"}}')


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "_PAUSE", 0.001)
    monkeypatch.setenv("PROVIDER_KEY", KEY)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_wherever_a_stream_is_cut(end: bytes, size: int) -> None:
    line = end[: len(end) // 2]
    stream = end.join(
        (b"data: one", b"", b": said", b"event: x" + line + b"data:two" + line + b"data: 2", b"data: 3", b"")
    )
    events = Events()
    found = [event for start in range(0, len(stream), size) for event in events.feed(stream[start : start + size])]
    assert found == [b"one", b"two\n2", b"3"]


def piece(**more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": "well"}, "finish_reason": None, **more}]}


@pytest.mark.parametrize(
    "odd",
    [
        [],
        {"choices": [None]},
        {"choices": 3},
        {"choices": [{"delta": "said"}]},
        {"choices": [{"delta": {"tool_calls": [{"index": "first"}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": "work"}]}}]},
        {"choices": [], "usage": {"prompt_tokens": "many"}},
        {**piece(), "error": {"message": f"no more, {KEY}"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_stream_of_what_is_no_completion(path: str, odd: Any) -> None:
    async with Scripted((200, events(piece(), odd))) as server:
        async with ModelGateway([Upstream(server.url, key_variable="PROVIDER_KEY")]) as gateway:
            async with gateway.episode() as episode:
                body = {"model": "m", "input": "hello"} if path == RESPONSES else asking("hello")
                status, stream = await post(episode, path, {**body, "stream": True})
    assert (status, b"well" in stream, b"error" in stream, b"[DONE]" in stream) == (200, True, True, False)
    assert KEY.encode() not in stream
    assert episode.failure is not None
    assert KEY not in episode.failure.message
    (record,) = episode.records
    assert (record.message or {})["content"] == "well"
    assert record.error


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": "said"}]}',
        b'{"choices": [{"message": {"content": "", "tool_calls": [{"function": "work"}]}}]}',
        completion("well", usage={"prompt_tokens": "many"}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_an_answer_that_is_no_completion(path: str, odd: bytes) -> None:
    async with Scripted((200, odd)) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        body = {"model": "m", "input": "hello"} if path == RESPONSES else asking("hello")
        assert (await post(episode, path, body))[0] == 502
    assert episode.failure is not None
    assert [record.message for record in episode.records] == [None]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_call_of_a_tool_without_a_name_or_arguments(path: str) -> None:
    """Some servers leave out what is empty."""
    answer = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}}]}
    async with Scripted((200, msgspec.json.encode(answer))) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode() as episode:
            body = {"model": "m", "input": "hello"} if path == RESPONSES else asking("hello")
            status, told = await post(episode, path, body)
    assert (status, episode.failure) == (200, None)
    assert b"c1" in msgspec.json.encode(told)


CALL = {"id": "c1", "type": "function", "function": {"name": "work", "arguments": "{}"}}


@pytest.mark.parametrize(
    "more",
    [
        {"message": {"role": None, "content": "well"}},
        {"message": {"content": [{"type": "text", "text": "well"}]}},
        {"message": {"content": None, "tool_calls": [{**CALL, "id": None, "type": None}]}},
        {"message": {"content": None, "tool_calls": [{**CALL, "function": {"name": "work", "arguments": None}}]}},
        {"message": {"content": None, "tool_calls": [{**CALL, "function": {"name": "work", "arguments": {}}}]}},
        {"message": {"content": "well", "tool_calls": []}, "logprobs": None, "stop_reason": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_what_servers_write_in_ways_of_their_own(path: str, more: dict[str, Any]) -> None:
    usage = {"prompt_tokens": 12.0, "completion_tokens": 3.0, "total_tokens": 15.0}
    answer = {"model": None, "choices": [{"index": 0, "finish_reason": "stop", **more}], "usage": usage, "error": None}
    async with Scripted((200, msgspec.json.encode(answer))) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode() as episode:
            body = {"model": "m", "input": "hello"} if path == RESPONSES else asking("hello")
            status, told = await post(episode, path, body)
    assert (status, episode.failure) == (200, None)
    assert b"work" in msgspec.json.encode(told) or b"well" in msgspec.json.encode(told)
    (record,) = episode.records
    assert (record.prompt_tokens, record.completion_tokens) == (12, 3)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("indices", [(None, None), (0, 0), (0, 1)], ids=str)
async def test_calls_of_a_stream_whatever_their_index(path: str, indices: tuple[int | None, int | None]) -> None:
    """Some servers give none, or each call the same."""
    parts = [
        {"index": indices[0], "id": "a", "function": {"name": "look", "arguments": "{}"}},
        {"index": indices[1], "id": "b", "function": {"name": "work", "arguments": None}},
        {"index": indices[1], "function": {"arguments": '{"n": 1}'}},
    ]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]} for part in parts]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": None}
    stream = b": keep-alive\n\ndata:\n\n" + events(*chunks, last)
    async with Scripted((200, b"data:\n\n" + stream)) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode() as episode:
            body = {"model": "m", "input": "hello"} if path == RESPONSES else asking("hello")
            status, _told = await post(episode, path, {**body, "stream": True})
    assert (status, episode.failure) == (200, None)
    (record,) = episode.records
    calls = (record.message or {})["tool_calls"]
    assert [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
        ("a", "look", "{}"),
        ("b", "work", '{"n": 1}'),
    ]


def written(*tokens: tuple[int | None, float | None], usage: int | None = None) -> bytes:
    """A stream of pieces, each with its id and its log-probability; ``usage`` is how many it says there are."""
    pieces = [
        piece(token_ids=id and [id], logprobs=logprob and {"content": [{"token": "t", "logprob": logprob}]})
        for id, logprob in tokens
    ]
    told = [] if usage is None else [{"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": usage}}]
    return events(*pieces, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, *told)


@pytest.mark.parametrize(
    ("stream", "ids", "logprobs"),
    [
        (written((1, -1.0), (2, -2.0), usage=2), [1, 2], [-1.0, -2.0]),
        (written((1, -1.0), (None, -2.0), (3, None), usage=3), None, None),
        (written((1, -1.0), (None, -2.0), (3, -3.0)), None, [-1.0, -2.0, -3.0]),
        (written((1, -1.0), (2, None)), [1, 2], None),
        (written((1, -1.0), (3, -3.0), usage=3), None, None),
        (written((1, None), (2, -2.0), usage=2), [1, 2], None),
    ],
    ids=["all", "one has none", "an id is missing", "a logprob is missing", "a piece is missing", "the first has none"],
)
async def test_tokens_of_which_some_are_missing_are_none(
    stream: bytes, ids: list[int] | None, logprobs: list[float] | None
) -> None:
    async with Scripted((200, stream)) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        assert (await post(episode, CHAT, asking("hello", stream=True)))[0] == 200
    tokens = episode.records[0].tokens or Tokens()
    assert (tokens.completion, tokens.logprobs) == (ids, logprobs)


async def test_tokens_of_a_whole_answer_of_which_some_are_missing_are_none() -> None:
    choice = {"message": {"content": "well"}, "logprobs": {"content": [{"logprob": -1.0}] * 2}, "token_ids": [1, 2]}
    answers = [
        (200, msgspec.json.encode({"choices": [choice], "usage": {"completion_tokens": written}})) for written in (3, 2)
    ]
    async with Scripted(*answers) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        for _ in range(2):
            await post(episode, CHAT, asking("hello"))
    assert [record.tokens for record in episode.records] == [None, Tokens(completion=[1, 2], logprobs=[-1.0, -1.0])]


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_a_second_answer_is_none_that_was_asked_for(more: dict[str, Any]) -> None:
    other = {**piece()["choices"][0], "index": 1}
    choice = {"message": {"content": "well"}}
    well = events(piece(), {"choices": [other]}) if more else msgspec.json.encode({"choices": [choice] * 2})
    async with Scripted((200, well)) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        await post(episode, CHAT, asking("hello", **more))
    assert episode.failure is not None
    assert "more than the one answer" in episode.failure.message


async def test_a_stream_is_as_long_as_an_answer_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_ANSWER", 10_000)
    async with Scripted((200, events(*[piece()] * 1000))) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode() as episode:
            _, told = await post(episode, CHAT, asking("hello", stream=True))
    assert len(told) < 20_000
    assert episode.failure is not None
    assert "over 10000 bytes" in episode.failure.message


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_what_a_model_has_thought(path: str, name: str) -> None:
    """By its old name and by its new one, in an answer, in a stream, and on the way back."""
    message = {"role": "assistant", "content": "4", name: "two and two"}
    whole = msgspec.json.encode({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    deltas = [{"choices": [{"index": 0, "delta": {part: message[part]}}]} for part in (name, "content")]
    streamed = events(*deltas, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    async with Scripted((200, whole), (200, streamed), (200, whole)) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode() as episode:
            asked: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": "2+2?"}]}
            if path == MESSAGES:
                asked = asking("2+2?", max_tokens=9)
            _, told = await post(episode, path, asked)
            assert b"two and two" in msgspec.json.encode(told)
            _, stream = await post(episode, path, {**asked, "stream": True})
            assert b"two and two" in stream
            key = "messages" if path == MESSAGES else "input"
            said = [{"role": "assistant", "content": told["content"]}] if path == MESSAGES else told["output"]
            await post(episode, path, {**asked, key: [*asked[key], *said]})
    sent = server.asked[-1]["messages"][1]
    assert (sent["reasoning_content"], sent["reasoning"]) == ("two and two", "two and two")
    assert (episode.failure, len(episode.records)) == (None, 3)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_refusal_tells_no_key(status: int) -> None:
    told = f'{{"error": {{"message": "wrong, Bearer {KEY}"}}}}'.encode()
    async with Scripted((status, told)) as server:
        async with ModelGateway([Upstream(server.url, key_variable="PROVIDER_KEY")]) as gateway:
            async with gateway.episode() as episode:
                for path, more in ((CHAT, {}), (CHAT, {"stream": True}), (MESSAGES, {})):
                    found, answer = await post(episode, path, {**asking("hello"), **more})
                    assert (found, answer["error"]["message"]) == (status, "wrong, Bearer ...")
    assert episode.failure is None
    assert len(episode.records) == 3


@pytest.mark.parametrize(
    "answer",
    [(404, b'{"detail": "Not Found"}'), (404, b"<html>"), (402, b'{"error": "pay"}'), (405, b"{}"), (401, b"{}")],
    ids=str,
)
async def test_what_is_not_the_clients_fault_is_no_answer(answer: tuple[int, bytes]) -> None:
    async with Scripted(answer) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        assert (await post(episode, CHAT, asking("hello")))[0] == 502
    assert episode.failure is not None


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_a_server_that_gives_no_token_ids_is_asked_without(more: dict[str, Any]) -> None:
    well = events(piece(), piece(finish_reason="stop")) if more else completion("well")
    async with Scripted(UNKNOWN, (200, well)) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode() as episode:
            for _ in range(2):
                assert (await post(episode, CHAT, asking("hello", **more)))[0] == 200
    assert [asked.get("return_token_ids") for asked in server.asked] == [True, None, None]
    assert [asked.get("logprobs") for asked in server.asked] == [True] * 3


async def test_a_request_that_is_wrong_either_way_says_nothing_about_the_server() -> None:
    async with Scripted(UNKNOWN, UNKNOWN, (200, completion("well"))) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode() as episode:
            assert (await post(episode, CHAT, asking("hello")))[0] == 400
            assert (await post(episode, CHAT, asking("hello")))[0] == 200
    assert [asked.get("return_token_ids") for asked in server.asked] == [True, None, True]
    assert episode.failure is None


@pytest.mark.parametrize("after", ["inf", "1e300", "nan", "-1", "soon"])
async def test_a_server_that_wants_to_be_left_alone_for_ever_is_not(
    monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(upstreams, "_LONGEST_PAUSE", 0.001)
    async with Scripted(BUSY, (200, completion("well"))) as server, ModelGateway([server.url]) as gateway:
        server.headers = f"Retry-After: {after}\r\n".encode()
        async with gateway.episode() as episode:
            assert (await post(episode, CHAT, asking("hello")))[0] == 200
        now = asyncio.get_running_loop().time()
        assert now < gateway.upstreams.all[0].resting_until <= now + 60


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_an_answer_that_is_too_long_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(upstreams, "MOST_ANSWER", 10_000)
    long = (400 if more else 200, completion("x" * 20_000))
    async with Scripted(long) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        assert (await post(episode, CHAT, asking("hello", **more)))[0] == 502
        assert gateway.upstreams.all[0].resting_until == 0.0
    assert episode.failure is not None
    assert len(server.asked) == 1


async def test_usage_below_zero_gives_nothing_back() -> None:
    usage = {"prompt_tokens": -1000, "completion_tokens": -1000}
    less = completion("well", usage=usage)
    well = completion("well", usage={"prompt_tokens": 5, "completion_tokens": 5})
    async with Scripted((200, less), (200, well)) as server, ModelGateway([server.url]) as gateway:
        async with gateway.episode(max_tokens=10) as episode:
            statuses = [(await post(episode, CHAT, asking("hello")))[0] for _ in range(3)]
    assert statuses == [200, 200, 429]


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_request_that_servers_fail_at_is_its_agents_affair(path: str, more: dict[str, Any]) -> None:
    """Servers that are well otherwise: no episode is lost for it, and no other one has fewer servers."""
    async with standin() as (one, first), standin() as (two, second), ModelGateway([first, second]) as gateway:
        async with gateway.episode() as episode, gateway.episode() as other:
            body = {"model": "m", "input": "fail"} if path == RESPONSES else asking("fail")
            status, told = await post(episode, path, {**body, **more})
            assert (status, told["error"]["type"]) == (400, "invalid_request_error")
            assert "the sampler has failed" in told["error"]["message"]
            assert [upstream.resting_until for upstream in gateway.upstreams.all] == [0.0, 0.0]
            for each in (episode, other):
                assert (await post(each, CHAT, asking("say hello")))[0] == 200
    asked = [[each["messages"][-1]["content"] for each in model.asked] for model in (one, two)]
    assert [each[:2] for each in asked] == [["fail", "Hello."]] * 2
    assert (episode.failure, episode.trouble) == (None, None)
    assert "the sampler has failed" in episode.records[0].error


async def test_the_only_server_is_asked_twice_before_a_request_is_at_fault() -> None:
    async with standin() as (model, url), ModelGateway([url]) as gateway, gateway.episode() as episode:
        assert (await post(episode, CHAT, asking("fail")))[0] == 400
    assert [each["messages"][-1]["content"] for each in model.asked] == ["fail", "Hello."] * 2
    assert episode.failure is None


FAILS = (500, b'{"error": {"message": "the engine has failed"}}')


@pytest.mark.parametrize("after", [FAILS, BUSY, (400, b'{"error": {"message": "no"}}')], ids=str)
async def test_a_server_that_fails_at_everything_has_failed(after: tuple[int, bytes]) -> None:
    """Its episode is not scored."""
    async with Scripted(FAILS, after, FAILS, after, FAILS, after) as server:
        async with ModelGateway([server.url], retries=2) as gateway, gateway.episode() as episode:
            assert (await post(episode, CHAT, asking("hello")))[0] == 502
            assert gateway.upstreams.all[0].resting_until > 0.0
    assert episode.failure is not None


async def test_a_server_that_fails_once_goes_on() -> None:
    well = (200, completion("well"))
    async with Scripted(FAILS, well) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        assert (await post(episode, CHAT, asking("hello")))[0] == 200
        assert gateway.upstreams.all[0].resting_until == 0.0
    assert len(server.asked) == 3
    assert (episode.failure, episode.trouble) == (None, None)


async def test_a_round_asks_each_server_once() -> None:
    async with (
        Scripted(BUSY, (200, completion("one"))) as one,
        Scripted(BUSY, (200, completion("two"))) as two,
        Scripted(BUSY, (200, completion("three"))) as three,
        ModelGateway([one.url, two.url, three.url], retries=1) as gateway,
        gateway.episode() as episode,
    ):
        assert (await post(episode, CHAT, asking("hello")))[0] == 200
    assert sorted(len(server.asked) for server in (one, two, three)) == [1, 1, 2]
    assert (episode.failure, episode.trouble) == (None, None)


async def test_a_server_that_wants_to_be_asked_at_once_is_asked_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float, *result: Any) -> Any:
        paused.append(seconds)
        return await sleep(0, *result)

    monkeypatch.setattr(upstreams, "_PAUSE", 0.5)
    async with standin() as (_, url), ModelGateway([url], retries=3) as gateway, gateway.episode() as episode:
        monkeypatch.setattr(asyncio, "sleep", noted)
        assert (await post(episode, CHAT, asking("busy 3")))[0] == 200
    assert len([seconds for seconds in paused if seconds >= 0.25]) >= 3


async def test_all_the_time_of_an_answer_is_taken_twice_and_no_more() -> None:
    async with standin() as (model, url), ModelGateway([url], timeout=0.1, retries=50) as gateway:
        async with gateway.episode() as episode:
            assert (await post(episode, CHAT, asking("hang")))[0] == 502
            assert episode.failure is not None
        async with gateway.episode() as episode:
            assert (await post(episode, CHAT, asking("hang", stream=True)))[0] == 502
    assert len(model.asked) == 4


async def test_episodes_are_spread_over_servers() -> None:
    async with standin() as (one, first), standin() as (two, second), ModelGateway([first, second]) as gateway:
        begun = [gateway.begin(Limits()) for _ in range(6)]
        for _ in range(2):
            for episode in begun:
                assert (await post(episode, CHAT, asking("say hello")))[0] == 200
        assert (len(one.asked), len(two.asked)) == (6, 6)
        for episode in begun:
            await gateway.episodes.end(episode)
        assert [upstream.episodes for upstream in gateway.upstreams.all] == [0, 0]


async def test_which_models_there_are() -> None:
    listed = (200, b'{"object": "list", "data": []}')
    async with Scripted(BUSY, listed) as server, ModelGateway([server.url]) as gateway, gateway.episode() as episode:
        assert (await http.request("GET", episode.path_url, "/models")).status == 200
        assert (episode.failure, len(server.asked)) == (None, 2)
    async with ModelGateway(["http://127.0.0.1:9/v1"], retries=1) as gateway, gateway.episode() as episode:
        assert (await http.request("GET", episode.path_url, "/models", retries=0)).status == 502
        assert episode.failure is not None


async def test_what_an_agent_may_not_have_of_a_server() -> None:
    async with standin() as (model, url), ModelGateway([url]) as gateway, gateway.episode() as episode:
        image = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/secret.png"}}
        remote = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
        source = {"type": "url", "url": "file:///etc/passwd"}
        told = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        for path, body in (
            (CHAT, remote),
            (MESSAGES, {"model": "m", "max_tokens": 9, "messages": told}),
            (CHAT, asking("say hello", kv_transfer_params={"remote_host": "10.0.0.1"})),
            (CHAT, asking("say hello", bootstrap_host="10.0.0.1")),
        ):
            status, answer = await post(episode, path, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert model.asked == []
    assert episode.failure is None


@pytest.mark.parametrize(
    "field",
    [
        *("logits_processors", "chat_template", "chat_template_kwargs", "vllm_xargs", "priority", "best_of"),
        *("use_beam_search", "prompt_logprobs", "ec_transfer_params", "lora_path", "anything"),
    ],
)
async def test_fields_of_a_server_are_its_operators(field: str) -> None:
    """Nobody who wanted one is let believe that it was heard. A null asks for nothing."""
    async with standin() as (model, url):
        async with ModelGateway([url]) as gateway, gateway.episode() as episode:
            status, told = await post(episode, CHAT, asking("say hello", **{field: 3}))
            assert (status, told["error"]["type"]) == (400, "invalid_request_error")
            assert repr(field) in told["error"]["message"]
            assert (await post(episode, CHAT, asking("say hello", **{field: None})))[0] == 200
        async with ModelGateway([url], allowed_fields=[field]) as gateway, gateway.episode() as episode:
            assert (await post(episode, CHAT, asking("say hello", **{field: 3})))[0] == 200
    assert [asked.get(field, "not told") for asked in model.asked] == ["not told", 3]


async def test_what_is_between_a_client_and_its_provider_is_not_told() -> None:
    async with standin() as (model, url), ModelGateway([url]) as gateway, gateway.episode() as episode:
        more = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k"}
        sampling = {"top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["x"]}
        assert (await post(episode, CHAT, asking("say hello", **more, **sampling)))[0] == 200
    assert not more.keys() & model.asked[0].keys()
    assert sampling.items() <= model.asked[0].items()


async def test_the_operators_model_is_asked_for() -> None:
    async with standin() as (model, url), ModelGateway([Upstream(url, model="ours")]) as gateway:
        async with gateway.episode() as episode:
            for more in ({}, {"stream": True}):
                assert (await post(episode, CHAT, asking("say hello", **more)))[0] == 200
    assert [asked["model"] for asked in model.asked] == ["ours", "ours"]
    assert [record.tokens and record.tokens.completion for record in episode.records] == [ids("hello")] * 2
