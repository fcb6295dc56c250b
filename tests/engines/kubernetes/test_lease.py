"""Which of several engines leads, against a real API server: one at a time, and always one again."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aenv.engines.kubernetes import lease
from aenv.engines.kubernetes.lease import Leader
from aenv.errors import NotFound
from tests.cluster.api import ApiServer
from tests.engines.kubernetes.lab import PATIENCE, asker, eventually
from tests.support import ROOT, until

pytestmark = pytest.mark.xdist_group("kubernetes-api")

LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
RENEW, LASTS = 0.3, 3.0

Make = Callable[[], Leader]


@pytest.fixture
async def make(api_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes engines' parts in one lease, which lasts for a short time."""
    monkeypatch.setattr(lease, "RENEW", RENEW)
    monkeypatch.setattr(lease, "LASTS", LASTS)
    cluster, state = await asker(api_server.kubeconfig), f"s{secrets.token_hex(4)}"
    made: list[Leader] = []

    def one() -> Leader:
        made.append(Leader(cluster, "default", state))
        return made[-1]

    yield one
    for each in made:
        await each.close()


async def held(leader: Leader) -> dict[str, Any]:
    found: dict[str, Any] = await leader._cluster.ask("GET", f"{LEASES}/{leader._name}")
    return found


async def test_one_of_many_leads(make: Make) -> None:
    many = [make() for _ in range(6)]
    await asyncio.gather(*(each.open() for each in many))
    assert sum(each.leads for each in many) == 1
    await asyncio.sleep(LASTS * 1.5)
    assert sum(each.leads for each in many) == 1, "and goes on to"


async def test_who_closes_lets_another_lead_at_once(make: Make) -> None:
    first, second = make(), make()
    await first.open()
    await second.open()
    assert (first.leads, second.leads) == (True, False)
    await first.close()
    assert not first.leads
    assert (await held(second))["spec"].get("holderIdentity", "") in ("", second.me)
    await until(lambda: second.leads, "a new leader", PATIENCE)


async def test_one_that_closes_and_does_not_lead_leaves_the_lease_alone(make: Make) -> None:
    first, second = make(), make()
    await first.open()
    await second.open()
    await second.close()
    assert first.leads
    assert (await held(first))["spec"]["holderIdentity"] == first.me


async def test_the_lease_of_one_that_was_killed_is_taken_over(make: Make, api_server: ApiServer) -> None:
    waits = make()
    script = f"""
        import asyncio
        from aenv.engines.kubernetes import lease
        from aenv.engines.kubernetes.api import Cluster
        lease.RENEW, lease.LASTS = {RENEW}, {LASTS}

        async def main():
            one = lease.Leader(await Cluster.find({str(api_server.kubeconfig)!r}), "default", "killed")
            await one.open()
            print(one.leads, flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
    """
    waits._name = Leader(waits._cluster, "default", "killed")._name
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            assert (await asyncio.to_thread(process.stdout.readline)) == "True\n"
            await waits.open()
            await asyncio.sleep(LASTS)
            assert not waits.leads, "the other one lives"
        finally:
            process.kill()
    await until(lambda: waits.leads, "a new leader", PATIENCE)


@pytest.mark.parametrize("hours", [-1000, 1000])
async def test_times_that_others_write_do_not_count(make: Make, hours: int) -> None:
    first, second = make(), make()
    await first.open()
    await first.close()
    found = await held(first)
    body = {**found, "spec": {**found["spec"], "holderIdentity": "another"}}
    body["spec"]["renewTime"] = (datetime.now(UTC) + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    await second._cluster.ask("PUT", f"{LEASES}/{first._name}", body=body)
    await second.open()
    assert not second.leads, "as long as nobody knows better, the other one may be there"
    await until(lambda: second.leads, "a new leader", PATIENCE)


async def test_who_reaches_nobody_leads_no_more(make: Make, api_server: ApiServer) -> None:
    one = make()
    await one.open()
    assert one.leads
    api_server.halt()
    try:
        await until(lambda: not one.leads, "the end of its time", PATIENCE)
    finally:
        api_server.resume()
    await until(lambda: one.leads, "its return", PATIENCE)


async def test_never_two_while_the_server_is_killed(make: Make, api_server: ApiServer) -> None:
    first, second = make(), make()
    await asyncio.gather(first.open(), second.open())
    both: list[bool] = []

    async def look() -> None:
        while True:
            both.append(first.leads and second.leads)
            await asyncio.sleep(0.005)

    looking = asyncio.create_task(look())
    for _ in range(2):
        api_server.kill()
        api_server.start()  # from this thread: it ends with the one that started it
        await until(lambda: first.leads or second.leads, "a leader", PATIENCE)
    looking.cancel()
    assert set(both) == {False}


async def test_a_lease_that_somebody_deleted_is_made_again(make: Make) -> None:
    one = make()
    await one.open()
    before = (await held(one))["metadata"]["uid"]
    await one._cluster.ask("DELETE", f"{LEASES}/{one._name}")

    async def is_there() -> bool:
        try:
            found = await held(one)
        except NotFound:
            return False
        return bool(found["metadata"]["uid"] != before and found["spec"]["holderIdentity"] == one.me)

    await eventually("a new lease", is_there)
    assert one.leads
