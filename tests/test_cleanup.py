"""Work that is done to its end."""

from __future__ import annotations

import asyncio

import pytest

from aenv.cleanup import finish


async def begun(*, fails: bool) -> tuple[asyncio.Task[None], asyncio.Event, list[str]]:
    """A task in the midst of work that it must finish, what lets the work go on, and what was done."""
    started, go_on, done = asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> None:
        started.set()
        await go_on.wait()
        done.append("all")
        if fails:
            raise ValueError("it failed")

    task = asyncio.create_task(finish(work()))
    await started.wait()
    return task, go_on, done


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_is_told_after_the_work(fails, caplog):
    task, go_on, done = await begun(fails=fails)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert done == ["all"]
    assert ("it failed" in caplog.text) is fails


async def test_a_failure_is_told():
    task, go_on, _ = await begun(fails=True)
    go_on.set()
    with pytest.raises(ValueError, match="it failed"):
        await task


async def test_work_that_is_cancelled_itself_is_over():
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await finish(work())
