"""Creates that are cancelled half-way: nothing is left, and the engine goes on."""

from __future__ import annotations

import asyncio
import random
import types

import pytest

from aenv.engines.process.engine import ProcessEngine
from aenv.errors import NotFound
from tests.engines.process import lab
from tests.engines.process.lab import eventually, probe, works


@types.coroutine
def cancelled_at(work, step, times=1):
    """Run ``work``, and cancel it while it waits for the ``step``-th time, and so often in a row. True when it came
    to that."""
    count = 0
    send, value = work.send, None
    try:
        while True:
            waited = send(value)
            count += 1
            if step <= count < step + times:
                asyncio.current_task().cancel()
            try:
                value = yield waited
                send = work.send
            except BaseException as exc:
                value = exc
                send = work.throw
    except StopIteration:
        return count >= step
    finally:
        work.close()


async def _cancel_at(work, step, times):
    """Whether it was cancelled."""
    task = asyncio.create_task(_driven(work, step, times))
    done, _ = await asyncio.wait((task,), timeout=lab.PATIENCE)
    assert done, f"cancelled at wait {step}, it does not end"
    return task.cancelled() or task.result()


async def _driven(work, step, times):
    return await cancelled_at(work, step, times)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_create_that_is_cancelled_at_each_wait(engine, family, times):
    await works(engine)
    for step in range(1, 100):
        id = f"a{step}"
        if not await _cancel_at(engine.create(id, probe()), step, times):
            break
        with pytest.raises(NotFound):
            await engine.get(id)
        assert await engine.find() == []
    else:
        pytest.fail("it never ran to its end")
    assert step > 1
    await engine.delete(id)
    await eventually("their processes to be gone", lambda: not family.instances() and not family.firsts())
    await works(engine)


async def test_a_provision_that_is_cancelled_at_each_wait(engine, family):
    async def use():
        async with engine.provision(probe()) as sandbox:
            await lab.call(sandbox, "echo", text="x")

    await works(engine)
    for step in range(1, 200):
        if not await _cancel_at(use(), step, 1):
            break
        assert await engine.find() == []
    else:
        pytest.fail("it never ran to its end")
    assert step > 3
    await eventually("their processes to be gone", lambda: not family.instances() and not family.firsts())
    await works(engine)


async def test_a_first_create_that_is_cancelled_at_each_wait(home, leftovers):
    """The spawner is started by it, too."""
    for step in range(1, 100):
        engine = ProcessEngine(isolation="none")
        cancelled = await _cancel_at(engine.create("a", probe()), step, 1)
        if cancelled:
            assert await engine.find() == []
        await engine.close()
        await leftovers.none()
        if not cancelled:
            break
    else:
        pytest.fail("it never ran to its end")
    assert step > 3


async def test_a_thousand_creates_that_are_cancelled(engine, family):
    chance = random.Random(11)
    await works(engine)
    made = 0
    spec = probe()

    async def use(id):
        nonlocal made
        if chance.random() < 0.5:
            async with engine.provision(spec):
                made += 1
        else:
            await engine.create(id, spec)
            made += 1
            await engine.delete(id)

    for round in range(10):
        tasks = [asyncio.create_task(use(f"a{round}-{number}")) for number in range(100)]
        moments = sorted((chance.random() * 0.8, number) for number in range(100))
        begun = asyncio.get_running_loop().time()
        for moment, number in moments:
            await asyncio.sleep(begun + moment - asyncio.get_running_loop().time())
            tasks[number].cancel()
        async with asyncio.timeout(lab.PATIENCE):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(found is None or isinstance(found, asyncio.CancelledError) for found in outcomes), outcomes
        await eventually("the end of deletions that were cancelled", lambda: _none(engine))
    assert made < 1000
    await eventually("their processes to be gone", lambda: not family.instances() and not family.firsts())
    await works(engine)


async def _none(engine):
    return await engine.find() == []


async def test_many_who_wait_for_one_zygote_and_are_cancelled(engine, study, family):
    door = study.door("here")
    spec = study.spec("wait('here')", preload=True)
    tasks = [asyncio.create_task(engine.create(f"a{number}", spec)) for number in range(20)]
    await door.reached()
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks[1:])
    assert not tasks[0].done()
    assert [sandbox.id for sandbox in await engine.find()] == ["a0"]
    door.remove()
    assert await lab.call(await tasks[0], "echo", text="x") == "x"
    await engine.delete("a0")
    await eventually("their processes to be gone", lambda: not family.instances() and not family.firsts())
