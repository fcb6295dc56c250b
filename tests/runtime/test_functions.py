"""An author's function called from outside: what it gets, what it raises, and the threads that it runs in."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aenv.errors import AuthorError, Forbidden, Invalid, InvalidConfig, RateLimited, SandboxError
from aenv.runtime import functions
from aenv.runtime.context import Context
from aenv.runtime.functions import Function, Raised, author_error, in_thread, run_hook
from aenv.runtime.registry import Mark
from aenv.runtime.threads import Threads

HERE = contextvars.ContextVar("HERE", default="nowhere")
PATIENCE = 30
"""Seconds after which a test that hangs fails; none waits for it to pass."""


@pytest.fixture(autouse=True)
def _fresh_threads() -> Iterator[None]:
    """Threads belong to one event loop, and each test has its own."""
    functions._threads.cache_clear()
    yield
    functions._threads.cache_clear()


def made(function: Callable[..., Any], **options: Any) -> Function:
    return Function(Mark("tool", function, getattr(function, "__name__", "given"), options))


async def called(function: Callable[..., Any], **arguments: Any) -> Any:
    return await made(function).call(arguments, Context(name="t"))


# What a function is.


def documented(a: int, b: str = "x") -> int:
    """Count things.

    Args:
        a: how many
    """
    return a


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    function = made(documented)
    assert function.description == "Count things."
    assert function.arguments.schema["properties"]["a"] == {"type": "integer", "description": "how many"}
    assert function.result.schema is not None
    assert function.wants_context is False
    assert made(documented, description="Given.").description == "Given."


def test_arguments_are_decoded_apart_from_the_call() -> None:
    function = made(documented)
    assert function.decode(b'{"a": "5"}') == {"a": 5}
    assert function.decode({"a": "5"}, text=True) == {"a": 5}
    with pytest.raises(Invalid, match="argument 'a'"):
        function.decode(b'{"a": "x"}')


# Calling.


def plain_work(a: int) -> tuple[int, int]:
    return a, threading.get_ident()


async def async_work(a: int) -> tuple[int, int]:
    return a, threading.get_ident()


class Worker:
    def __call__(self, a: int) -> tuple[int, int]:
        return a, threading.get_ident()

    async def method(self, a: int) -> tuple[int, int]:
        return a, threading.get_ident()


class AsyncWorker:
    async def __call__(self, a: int) -> tuple[int, int]:
        return a, threading.get_ident()


@pytest.mark.parametrize(
    ("function", "in_loop"),
    [
        (plain_work, False),
        (functools.partial(plain_work), False),
        (Worker(), False),
        (async_work, True),
        (functools.partial(async_work), True),
        (Worker().method, True),
        (AsyncWorker(), True),
        (functools.partial(AsyncWorker()), True),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_only_a_blocking_function_leaves_the_event_loop(function: Callable[..., Any], in_loop: bool) -> None:
    value, thread = await called(function, a=1)
    assert value == 1
    assert (thread == threading.get_ident()) is in_loop


def wants(ctx: Context, a: int = 1) -> Context:
    return ctx


async def wants_async(a: int = 1, *, ctx: Context | None = None) -> Context | None:
    return ctx


@pytest.mark.parametrize("function", [wants, wants_async])
async def test_the_context_is_given_by_annotation(function: Callable[..., Any]) -> None:
    context, arguments = Context(name="t"), {"a": 2}
    found = made(function)
    assert found.wants_context
    assert await found.call(arguments, context) is context
    assert arguments == {"a": 2}


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_context_variables_reach_the_function(kind: str) -> None:
    def read() -> str:
        return HERE.get()

    async def read_async() -> str:
        return HERE.get()

    HERE.set("here")
    assert await called(read if kind == "sync" else read_async) == "here"


async def test_a_thread_cannot_change_the_callers_context_variables() -> None:
    HERE.set("before")
    await called(lambda: HERE.set("changed"))
    assert HERE.get() == "before"


# Raising.

ESCAPES = [SystemExit(3), SystemExit(), KeyboardInterrupt(), StopIteration(5), StopAsyncIteration(), GeneratorExit(),
           ValueError("no"), asyncio.CancelledError(), asyncio.InvalidStateError("x"), TimeoutError(), RuntimeError(),
           ExceptionGroup("two", [ValueError("a"), KeyError("b")]), Forbidden("ours")]  # fmt: skip


@pytest.mark.parametrize("error", ESCAPES, ids=repr)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_whatever_is_raised_comes_out_as_raised(error: BaseException, kind: str) -> None:
    def fail() -> None:
        raise error

    async def fail_async() -> None:
        raise error

    with pytest.raises(Raised) as caught:
        await called(fail if kind == "sync" else fail_async)
    cause = caught.value.cause
    if kind == "async" and isinstance(error, StopIteration):
        assert isinstance(cause, RuntimeError)  # Python's own doing, PEP 479
        cause = cause.__cause__  # type: ignore[assignment]
    assert cause is error
    assert await called(plain_work, a=1)


@pytest.mark.parametrize(
    ("error", "summary"),
    [(ValueError("no"), "ValueError: no"), (ValueError(), "ValueError"), (SystemExit(3), "SystemExit: 3")],
)
def test_a_summary_is_one_line(error: BaseException, summary: str) -> None:
    assert Raised(error).summary == summary


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_traceback_begins_at_the_authors_first_line(kind: str) -> None:
    def dig() -> None:
        raise ValueError("a stone")

    async def dig_async() -> None:
        dig()

    with pytest.raises(Raised) as caught:
        await called(dig if kind == "sync" else dig_async)
    lines = caught.value.details().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'"{__file__}"' in lines[1]
    assert lines[-1] == "ValueError: a stone"
    assert "threads.py" not in caught.value.details()


@pytest.mark.parametrize("wait", [asyncio.sleep, None], ids=["async", "sync"])
async def test_a_cancelled_call_is_cancelled_and_not_raised(wait: Any) -> None:
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block() -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait(PATIENCE)

    async def block_async() -> None:
        begun.set()
        await wait(PATIENCE)

    task = asyncio.create_task(called(block_async if wait else block))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()


# Hooks.


def failing(message: str = "") -> None:
    raise ValueError(message or "broken")


def refusing() -> None:
    raise InvalidConfig("not like this", hint="like that")


async def test_a_hook_that_fails_is_the_authors_error() -> None:
    with pytest.raises(AuthorError, match=r"tool failing\(\) raised ValueError: broken") as caught:
        await run_hook(made(failing), Context(), {})
    assert isinstance(caught.value.__cause__, ValueError)


async def test_an_error_of_ours_goes_through_as_it_is() -> None:
    with pytest.raises(InvalidConfig, match="not like this") as caught:
        await run_hook(made(refusing), Context(), {})
    assert caught.value.hint == "like that"


async def test_a_hook_gives_its_value() -> None:
    assert await run_hook(made(documented), Context(), {"a": 3}) == 3


@pytest.mark.parametrize("cause", [SystemExit(1), KeyError("k"), RateLimited("slow"), Invalid("yours")], ids=repr)
def test_what_the_caller_is_told(cause: BaseException) -> None:
    error = author_error(made(documented), Raised(cause))
    if isinstance(cause, Invalid):  # the author found the caller at fault
        assert error is cause
    else:
        assert isinstance(error, AuthorError)
        assert error.message == f"tool documented() raised {type(cause).__name__}: {cause}"


# Threads.


async def run(threads: Threads, work: Callable[[], Any]) -> Any:
    outcome = await asyncio.wait_for(threads.run(work), PATIENCE)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


async def test_more_jobs_than_threads_queue_and_finish() -> None:
    threads = Threads(3)
    found = await asyncio.gather(*(run(threads, lambda n=n: (n, threading.get_ident())) for n in range(200)))
    assert [number for number, _ in found] == list(range(200))
    assert len({thread for _, thread in found}) <= 3
    assert threading.get_ident() not in {thread for _, thread in found}


async def test_an_idle_thread_is_used_again() -> None:
    threads = Threads(100)
    assert len({await run(threads, threading.get_ident) for _ in range(20)}) == 1


async def test_jobs_run_side_by_side() -> None:
    meeting = threading.Barrier(8, timeout=PATIENCE)
    threads = Threads(8)
    assert sorted(await asyncio.gather(*(run(threads, meeting.wait) for _ in range(8)))) == list(range(8))


async def test_a_hung_thread_does_not_block_the_others() -> None:
    threads, hung, go = Threads(2), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(hung.set)
        go.wait(PATIENCE)

    abandoned = asyncio.create_task(threads.run(hang))
    await asyncio.wait_for(hung.wait(), PATIENCE)
    abandoned.cancel()
    assert await asyncio.gather(*(run(threads, lambda n=n: n) for n in range(50))) == list(range(50))
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await abandoned


async def test_an_abandoned_thread_comes_back_when_it_ends() -> None:
    threads, go = Threads(1), threading.Event()
    abandoned = asyncio.create_task(threads.run(lambda: go.wait(PATIENCE)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(run(threads, lambda: "ran"))
    await asyncio.sleep(0)
    abandoned.cancel()
    go.set()
    assert await waiting == "ran"


async def test_a_job_that_is_cancelled_while_it_waits_never_runs() -> None:
    threads, go, ran = Threads(1), threading.Event(), []
    first = asyncio.create_task(run(threads, lambda: go.wait(PATIENCE)))
    await asyncio.sleep(0)
    unwanted = [asyncio.create_task(threads.run(lambda n=n: ran.append(n))) for n in range(3)]
    wanted = asyncio.create_task(run(threads, lambda: ran.append("wanted")))
    await asyncio.sleep(0)
    for task in unwanted:
        task.cancel()
    await asyncio.gather(*unwanted, return_exceptions=True)
    go.set()
    await asyncio.gather(first, wanted)
    assert ran == ["wanted"]


@pytest.mark.parametrize("error", ESCAPES, ids=repr)
async def test_a_thread_survives_what_it_ran(error: BaseException) -> None:
    threads = Threads(1)

    def fail() -> None:
        raise error

    before = await run(threads, threading.get_ident)
    outcome = await threads.run(fail)
    assert outcome.error is error
    assert await run(threads, threading.get_ident) == before


async def test_a_first_thread_is_waited_for_when_others_have_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refusals = threading.Thread.start, 3

    def refuse(thread: threading.Thread) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert await run(Threads(2), lambda: "ran") == "ran"
    assert not refusals


async def test_a_first_thread_that_never_comes_is_the_platforms_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("aenv.runtime.threads.WAIT", 0.1)
    with pytest.raises(SandboxError, match="can start no thread"):
        await Threads(2).run(lambda: "ran")


async def test_threads_do_not_keep_the_process_alive() -> None:
    found = await run(Threads(1), threading.current_thread)
    assert found.daemon
    assert found.name.startswith("aenv-tool-")


async def test_the_number_of_threads_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_THREADS", "1")
    threads = Threads()
    found = await asyncio.gather(*(run(threads, threading.get_ident) for _ in range(10)))
    assert len(set(found)) == 1


async def test_blocking_code_can_be_run_by_itself() -> None:
    assert await in_thread(lambda: 5) == 5
    with pytest.raises(Raised, match="ValueError: broken"):
        await in_thread(failing)
