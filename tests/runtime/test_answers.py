"""Answers: written once, followed by many, kept by call id within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from aenv.errors import Conflict
from aenv.runtime.answers import EVENTS, JSON, Answer, Answers, Request, Response

Starts = Callable[[bytes], "Call"]


class Call:
    """A call in flight that ends when told."""

    def __init__(self, body: bytes) -> None:
        self.answer = Answer(None)
        self._go = asyncio.Event()
        self.answer.task = asyncio.create_task(self._run(body))

    async def _run(self, body: bytes) -> None:
        await self._go.wait()
        self.answer.reply(Response(200, body))

    async def finish(self) -> Answer:
        self._go.set()
        assert self.answer.task is not None
        await self.answer.task
        await asyncio.sleep(0)  # what follows from the end of a task happens in the next turn
        return self.answer


@pytest.fixture
async def start() -> AsyncIterator[Starts]:
    """Start calls; those still running when the test ends are ended with it."""
    started: list[Call] = []

    def begin(body: bytes = b"x") -> Call:
        started.append(Call(body))
        return started[-1]

    yield begin
    tasks = [call.answer.task for call in started if call.answer.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def request(body: bytes = b"{}", path: str = "/tools/t") -> Request:
    return Request("POST", path, b"", [(b"host", b"localhost")], body)


async def fill(answers: Answers, start: Starts, *ids: str, body: bytes = b"x") -> None:
    for call_id in ids:
        call = start(body)
        answers.keep(call_id, request(), call.answer)
        await call.finish()


def known(answers: Answers, call_id: str) -> str:
    try:
        return "kept" if answers.find(call_id, request()) else "new"
    except Conflict:
        return "dropped"


# Keeping.


async def test_the_same_request_gets_the_same_answer(start: Starts) -> None:
    answers, call = Answers(), start(b"x")
    assert answers.find("a", request()) is None
    answers.keep("a", request(), call.answer)
    assert answers.find("a", request()) is call.answer
    await call.finish()
    assert answers.find("a", request()) is call.answer
    assert answers.find("b", request()) is None


@pytest.mark.parametrize("other", [request(b'{"x": 1}'), request(path="/tools/other"), request(b"")])
async def test_another_request_under_the_same_id_is_a_conflict(start: Starts, other: Request) -> None:
    answers = Answers()
    answers.keep("a", request(), start(b"x").answer)
    with pytest.raises(Conflict, match="call id a was used for another call") as caught:
        answers.find("a", other)
    assert caught.value.hint


async def test_the_oldest_are_dropped_by_number(start: Starts) -> None:
    answers = Answers(most=2)
    await fill(answers, start, "a", "b", "c")
    assert [known(answers, id) for id in "abcd"] == ["dropped", "kept", "kept", "new"]


async def test_the_oldest_are_dropped_by_size(start: Starts) -> None:
    answers = Answers(most_bytes=80)
    await fill(answers, start, *"abcdefgh", body=b"x" * 10)
    assert {known(answers, id) for id in "abcdefgh"} == {"kept"}
    await fill(answers, start, "i", body=b"x" * 10)
    assert [known(answers, id) for id in "abi"] == ["dropped", "kept", "kept"]


async def test_large_answers_push_out_each_other_and_not_the_small(start: Starts) -> None:
    answers = Answers(most_bytes=80)
    await fill(answers, start, "small", body=b"x")
    await fill(answers, start, "a", "b", "c", body=b"x" * 1000)
    assert [known(answers, id) for id in ("small", "a", "b", "c")] == ["kept", "dropped", "kept", "kept"]


async def test_a_dropped_id_is_told_from_a_new_one(start: Starts) -> None:
    answers = Answers(most=1)
    await fill(answers, start, "a", "b")
    with pytest.raises(Conflict, match="call a was answered before, and its answer is no longer kept"):
        answers.find("a", request())


async def test_dropped_ids_are_forgotten_in_the_end(start: Starts) -> None:
    answers = Answers(most=1)
    await fill(answers, start, *(str(number) for number in range(20)))
    assert known(answers, "18") == "dropped"
    assert known(answers, "0") == "new"


async def test_calls_in_flight_are_never_dropped(start: Starts) -> None:
    answers = Answers(most=2, most_bytes=80)
    flying = {call_id: start(b"later") for call_id in "xyz"}
    for call_id, call in flying.items():
        answers.keep(call_id, request(), call.answer)
    await fill(answers, start, "a", "b", body=b"1234")  # small, and more than two
    for call_id, call in flying.items():
        assert answers.find(call_id, request()) is call.answer
    assert [known(answers, id) for id in "ab"] == ["dropped", "dropped"]
    await flying["x"].finish()
    assert known(answers, "x") == "dropped"
    assert known(answers, "y") == "kept"


async def test_a_cancelled_call_is_kept_like_any_other(start: Starts) -> None:
    answers, call = Answers(), start(b"x")
    answers.keep("a", request(), call.answer)
    assert answers.cancel("a") is True
    assert call.answer.task is not None
    with pytest.raises(asyncio.CancelledError):
        await call.answer.task
    assert answers.find("a", request()) is call.answer


async def test_only_a_call_in_flight_can_be_cancelled(start: Starts) -> None:
    answers = Answers(most=1)
    await fill(answers, start, "gone", "done")
    assert [answers.cancel(id) for id in ("gone", "done", "never")] == [False, False, False]
    assert known(answers, "done") == "kept"


async def test_an_agent_ends_no_call_but_its_own(start: Starts) -> None:
    answers, asked = Answers(), request()
    asked.agent = "x"
    for id in ("first", "second"):
        answers.keep(id, asked, start(b"x").answer)
    assert [answers.cancel("first", agent) for agent in ("o", "", "x")] == [False, False, True]
    assert answers.cancel("second") is True  # as the owner does


# Following.


async def following(answer: Answer, act: Callable[[], object]) -> None:
    """Wait for a change that ``act`` makes."""
    waiting = asyncio.create_task(answer.changed(60))
    await asyncio.sleep(0)
    assert not waiting.done()
    act()
    await waiting


@pytest.mark.parametrize(
    "act",
    [
        lambda answer: answer.begin(200, EVENTS),
        lambda answer: answer.write(b"x"),
        lambda answer: answer.close(),
        lambda answer: answer.reply(Response(200, b"x")),
        lambda answer: answer.wake(),
    ],
    ids=["begin", "write", "close", "reply", "wake"],
)
async def test_a_change_wakes_every_follower(act: Callable[[Answer], object]) -> None:
    answer = Answer(None)
    others = [asyncio.create_task(answer.changed(60)) for _ in range(3)]
    await following(answer, lambda: act(answer))
    await asyncio.gather(*others)
    assert all(other.done() for other in others)


async def test_a_follower_wakes_by_itself() -> None:
    answer = Answer(None)
    await answer.changed(0)
    answer.write(b"a waiter that is gone is no trouble")
    assert answer.chunks == [b"a waiter that is gone is no trouble"]


async def test_a_follower_that_is_cancelled_leaves_the_others(start: Starts) -> None:
    answer = Answer(None)
    first, second = (asyncio.create_task(answer.changed(60)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    answer.write(b"x")
    await second
    assert first.cancelled()


def test_an_answer_in_pieces() -> None:
    answer = Answer(None)
    assert (answer.status, answer.size) == (0, 0)
    answer.begin(200, EVENTS)
    answer.write(b"ab")
    answer.write(b"c")
    answer.close()
    answer.write(b"too late")
    assert (answer.status, answer.chunks, answer.size, answer.done) == (200, [b"ab", b"c"], 3, True)


def test_an_answer_in_one_piece() -> None:
    answer = Answer(None)
    answer.reply(Response(404, b"{}"))
    assert (answer.status, answer.headers, answer.chunks, answer.done) == (404, JSON, [b"{}"], True)


# Patience.


async def ended(answer: Answer, patience: float | None) -> bool:
    """Whether the call was ended, once every timer that is due has run."""
    assert answer.task is not None
    if patience is not None and answer.followers == 0 and patience < 1:
        await asyncio.wait([answer.task], timeout=30)
    for _ in range(10):
        await asyncio.sleep(0)
    return answer.task.done()


async def leave(answer: Answer) -> None:
    answer.joined()
    answer.left()


async def join_again(answer: Answer) -> None:
    answer.joined()
    answer.left()
    answer.joined()


async def one_of_two(answer: Answer) -> None:
    answer.joined()
    answer.joined()
    answer.left()


@pytest.mark.parametrize(
    ("patience", "act", "ends"),
    [
        (0, leave, True),
        (0.001, leave, True),
        (None, leave, False),
        (1000, leave, False),
        (0, join_again, False),
        (0, one_of_two, False),
    ],
)
async def test_a_call_that_nobody_follows_ends_after_its_patience(
    start: Starts, patience: float | None, act: Callable[[Answer], Awaitable[None]], ends: bool
) -> None:
    answer = start(b"x").answer
    answer.patience = patience
    await act(answer)
    assert await ended(answer, patience) is ends


async def test_a_finished_call_needs_no_patience(start: Starts) -> None:
    call = start(b"x")
    call.answer.patience = 0
    call.answer.joined()
    await call.finish()
    call.answer.left()
    assert call.answer.task is not None
    assert call.answer.task.cancelled() is False


def test_cancelling_an_answer_without_a_call_does_nothing() -> None:
    answer = Answer(None)
    answer.cancel()
    assert answer.done is False


# Requests and responses.


def test_a_request_reads_its_headers() -> None:
    found = Request("GET", "/x", b"a=1", [(b"name", b"caf\xe9"), (b"empty", b"")], b"")
    assert (found.header(b"name"), found.header(b"empty"), found.header(b"none")) == ("café", "", None)


@pytest.mark.parametrize(
    ("response", "headers"),
    [
        (Response(200, b"{}"), JSON),
        (Response(202), []),
        (Response(200, b"", EVENTS), EVENTS),
        (Response(405, headers=[(b"allow", b"POST")]), [(b"allow", b"POST")]),
    ],
)
def test_only_a_response_with_a_body_has_a_type(response: Response, headers: list[tuple[bytes, bytes]]) -> None:
    assert response.headers == headers
