"""Environments that do not start, and parts of a platform that fail: processes that are killed or stopped, a clock that
is set, a disk that is full, a store that is away. Each against ``aenv serve``: nothing lost, nothing left."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aenv import Environment, OutOfMemory, SandboxLost, StartFailed
from aenv.engines.process import powers
from tests.platform.support import PATIENCE, Platform, Reply, eventually, platform, variant
from tests.platform.watching import living, sandboxes, status
from tests.store.servers import Server, redis_server

MOODS = Path(__file__).parent / "moods"


@pytest.fixture(scope="module")
def platform_here() -> Iterator[Platform]:
    with platform() as found:
        found.push()
        found.push(MOODS)
        yield found


@pytest.fixture
def served(platform_here: Platform, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The platform, which runs whatever an earlier test did to it, and whose user this process is."""
    for name in ("AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    if not platform_here.alive:
        platform_here.start()
    monkeypatch.setenv("AENV_HOME", str(platform_here.home))
    monkeypatch.setenv("AENV_SYSTEM_URL", platform_here.control)
    return platform_here


def persistent(asking: Callable[[], Reply]) -> Reply:
    """An answer, from a platform that may be away for a while: who retries gets one."""
    deadline = time.monotonic() + 2 * PATIENCE
    while True:
        try:
            if (reply := asking()).status != 503:
                return reply
        except (OSError, http.client.HTTPException):
            pass
        assert time.monotonic() < deadline, "nobody answers"
        time.sleep(0.1)


# Environments that do not start, and one that dies


async def test_starts_that_fail_say_why(served: Platform) -> None:
    """In the SDK's exception, and afterwards to who asks for the instance."""
    reasons = {
        "missing": "No module named 'nothing_like_this'",
        "leaving": "not in the mood",
        "dying": "exit code 9",
        "hanging": "not ready within 8 s; the last it printed:\nthis import does not end",
        "tired": "the health check answered {'status': 'tired'}",
    }

    async def start(mood: str, reason: str) -> None:
        patience = 8 if mood in ("hanging", "tired") else PATIENCE
        env = Environment(
            "moods", environment_variables={"MOOD": mood}, labels={"mood": mood}, startup_timeout=patience
        )
        with pytest.raises(StartFailed) as failed:
            await env.initialize()
        assert reason in failed.value.message
        (found,) = served.ask("GET", f"/env-instance/moods/list?label=mood%3D{mood}").data
        assert (found["status"], reason in found["reason"]) == ("Failed", True), found
        assert found["id"] in failed.value.message

    await asyncio.gather(*(start(*each) for each in reasons.items()))
    (found,) = served.ask("GET", "/env-instance/moods/list?label=mood%3Dmissing").data
    shown = await asyncio.to_thread(served.aenv, "instance", "get", found["id"])
    assert "Failed" in shown.stdout
    assert reasons["missing"] in shown.stdout
    made = await asyncio.to_thread(
        served.aenv, "instance", "create", "moods", "-e", "MOOD=leaving", "--keep-alive", check=False
    )
    assert (made.returncode, made.stdout) == (1, "")
    assert reasons["leaving"] in made.stderr
    assert await asyncio.to_thread(living, served, mood="missing") == set()


async def test_too_much_memory_is_told_as_such(served: Platform) -> None:
    if not powers.probe().cgroups:
        pytest.skip("the memory of a sandbox cannot be limited here")
    async with Environment("moods", resources={"memory": "128Mi"}) as env:
        with pytest.raises(OutOfMemory, match="out of memory: it may use 128 MiB"):
            await env.call_tool("eat", {"size": 512 * 1024 * 1024})
        found = served.ask("GET", f"/env-instance/{env.instance_id}").data
    assert (found["status"], found["reason"]) == ("Failed", "out of memory: it may use 128 MiB")


# Parts that fail


def test_what_holds_the_sandboxes_is_killed(served: Platform) -> None:
    """They end with it, which is noticed; those to come are held by another one."""
    id = served.create("desk")["id"]
    (place,) = served.home.glob("run/platform*/spawner.json")
    os.kill(json.loads(place.read_text())["pid"], signal.SIGKILL)

    async def use() -> None:
        async with Environment(instance_id=id) as env:
            while True:  # for a moment it may answer yet
                await env.call_tool("look")

    with pytest.raises(SandboxLost):
        asyncio.run(use())
    eventually("news of it", lambda: status(served, id) == "Failed")
    assert "lost" in served.ask("GET", f"/env-instance/{id}").data["reason"]
    fresh = served.create("desk")["id"]
    assert served.call(fresh, "POST", "/tools/look", {}).json["data"] == []


def test_a_server_that_is_killed_while_many_are_made(served: Platform) -> None:
    """Everybody gets an answer, and gets it once; what is written down is what lives."""

    def create(number: int) -> dict[str, Any]:
        body = {"envName": "desk", "labels": {"crowd": "killed"}}
        headers = {"Idempotency-Key": f"killed-{number}", "Prefer": "wait=60"}
        found: dict[str, Any] = persistent(lambda: served.ask("POST", "/env-instance", body, headers=headers)).data
        return found

    with ThreadPoolExecutor(64) as pool:
        answers = [pool.submit(create, number) for number in range(64)]
        eventually("some answers", lambda: any(answer.done() for answer in answers))
        served.kill()
        served.start()
        made = {answer.result()["id"] for answer in answers}
    assert len(made) == 64
    for id in made:
        eventually("it to run", lambda it=id: status(served, it) == "Running")
        assert served.call(id, "POST", "/tools/look", {}).json["data"] == []
    assert living(served, crowd="killed") == made
    assert made <= sandboxes(served)

    with ThreadPoolExecutor(64) as pool:  # and again, while they are ended
        answers = [pool.submit(persistent, lambda it=id: served.ask("DELETE", f"/env-instance/{it}")) for id in made]
        eventually("some answers", lambda: any(answer.done() for answer in answers))
        served.kill()
        served.start()
        assert {answer.result().status for answer in answers} == {200}
    assert living(served, crowd="killed") == set()
    eventually("their end", lambda: not made & sandboxes(served))


def test_a_server_that_was_stopped_for_a_while_has_not_missed_its_clients(served: Platform) -> None:
    id = served.create("desk", lease=5)["id"]
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.2):
            served.ask("POST", f"/env-instance/{id}/renew", timeout=2 * PATIENCE)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        served.signal(signal.SIGSTOP)
        time.sleep(9)  # far longer than the lease
        served.signal(signal.SIGCONT)
        eventually("it to notice", lambda: "did not run for" in served.text)
        assert served.call(id, "POST", "/tools/look", {}).status == 200
        assert status(served, id) == "Running"
    finally:
        served.signal(signal.SIGCONT)
        stop.set()
        renewing.join(2 * PATIENCE)


AHEAD = """
import os, time

def now(real=time.time):
    with open(os.environ["AHEAD"]) as file:
        return real() + float(file.read() or 0)

time.time = now
"""


def test_a_clock_that_is_set(tmp_path: Path) -> None:
    """Hours ahead and hours back: what has time left keeps it, and what has none ends."""
    (tmp_path / "sitecustomize.py").write_text(AHEAD)
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    with platform(PYTHONPATH=str(tmp_path), AHEAD=str(ahead)) as served:
        served.push()
        key = {"Idempotency-Key": "across-a-jump", "Prefer": "wait=60"}
        body = {"envName": "desk", "ttl": "1h", "lease": 3600}
        kept = served.ask("POST", "/env-instance", body, headers=key).data
        for hours in (5, -5):
            short = served.ask("POST", "/env-instance", {"envName": "desk", "ttl": "4s"}).data["id"]
            (tmp_path / "new").write_text(str(hours * 3600))
            (tmp_path / "new").replace(ahead)
            fresh = served.create("desk", ttl="1h")["id"]
            eventually("its end", lambda it=short: status(served, it) == "Terminated")
            assert {status(served, kept["id"]), status(served, fresh)} == {"Running"}
            assert served.call(kept["id"], "POST", "/tools/look", {}).status == 200
            assert served.ask("POST", "/env-instance", body, headers=key).data["id"] == kept["id"]
        eventually("word of both", lambda: served.text.count("the clock of this machine was set by") >= 2)
        served.kill()
        served.start()
        assert {status(served, kept["id"]), status(served, fresh)} == {"Running"}
        assert "Traceback" not in served.text


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """All of the platform is on it: records, packages, sandboxes."""
    home = Path(tempfile.mkdtemp(prefix="aenvd-", dir="/tmp"))  # sockets want a short path
    mounting = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(home)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode:
        home.rmdir()
        pytest.skip("a file system can be mounted by root only")
    try:
        with platform(home=home) as served:
            served.push()
            id = served.create("desk")["id"]
            large = variant(tmp_path, "large")
            (large / "noise.bin").write_bytes(os.urandom(30 * 1024 * 1024))
            done = served.aenv("push", str(large), check=False)
            assert (done.returncode, "no room is left" in done.stderr) == (1, True), done.stderr
            fill(home / "filler")
            more = {"value": "x" * 8192}  # a store has a little room of its own
            eventually("its end", lambda: served.ask("PUT", f"/secret/A{time.monotonic_ns()}", more).status == 507)
            key = {"Idempotency-Key": "on-a-full-disk", "Prefer": "wait=60"}
            for method, path, body in (
                ("POST", "/env/", {"name": "small", "version": "1.0.0"}),
                ("POST", "/env/large/1.2.0/package", b"x" * 100_000),
                ("POST", "/env-instance", {"envName": "desk"}),
                ("POST", "/token", {"name": "x"}),
                ("PUT", "/secret/WORD", {"value": "x" * 8}),
            ):
                reply = served.ask(method, path, body, headers=key)
                assert (reply.status, reply.json["error"]) == (507, "storage_full"), reply
            # What is there can be read, used and ended.
            assert served.ask("GET", "/env/desk/1.2.0").data["status"] == 7
            assert served.call(id, "POST", "/tools/look", {}).json["data"] == []
            assert served.ask("DELETE", f"/env-instance/{id}").status == 200
            (home / "filler").unlink()
            made = served.ask("POST", "/env-instance", {"envName": "desk"}, headers=key).data
            assert made["status"] == "Running"
            (large / "noise.bin").unlink()
            served.aenv("push", str(large))
            served.stop()
            served.start()
            found = served.ask("GET", f"/env-instance/{id}").data
            assert (found["status"], found["reason"]) == ("Terminated", "it was deleted")
            assert "Traceback" not in served.text
    finally:
        subprocess.run(["umount", "--lazy", str(home)], check=True)
        home.rmdir()


def fill(path: Path) -> None:
    """Take all room that is left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


# A store that fails under traffic


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("redis")
    with redis_server(folder, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture(scope="module")
def on_redis(redis: Server) -> Iterator[Platform]:
    with platform("--store", redis.url) as found:
        found.push()
        yield found


def pause(redis: Server) -> None:
    assert redis._process is not None
    redis._process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(10)
    finally:
        redis._process.send_signal(signal.SIGCONT)


def restart(redis: Server) -> None:
    redis.kill()
    time.sleep(1)
    redis.start()


@pytest.mark.parametrize("fault", [pause, restart])
def test_a_store_that_fails_under_traffic(on_redis: Platform, redis: Server, fault: Callable[[Server], None]) -> None:
    served, stop = on_redis, threading.Event()
    used = served.create("desk", ttl="1h")
    path = f"/env-instance/{used['id']}"
    answers: Counter[tuple[str, int]] = Counter()

    def calls() -> None:
        while not stop.wait(0.05):
            reply = served.call(used["id"], "POST", "/tools/look", {}, token=used["owner_token"])
            answers["call", reply.status] += 1

    def looks() -> None:
        while not stop.wait(0.05):
            answers["hub", served.ask("GET", "/env/desk/1.2.0").status] += 1
            answers["get", served.ask("GET", path).status] += 1

    def lives(number: int) -> set[str]:
        """Instances that are made and ended, one after another; those that are left."""
        kept = set()
        while not stop.wait(0.05):
            headers = {"Idempotency-Key": f"{fault.__name__}-{number}-{len(kept)}", "Prefer": "wait=60"}
            labels = {"fault": fault.__name__}
            body = {"envName": "desk", "labels": labels}
            for _ in range(2):  # the second time, it is there
                made = persistent(lambda body=body, key=headers: served.ask("POST", "/env-instance", body, headers=key))
                kept.add(made.data["id"])
            body = {"envName": "desk", "labels": labels}
            ended = persistent(lambda body=body: served.ask("POST", "/env-instance", body)).data["id"]
            assert persistent(lambda it=ended: served.ask("DELETE", f"/env-instance/{it}")).status in (200, 404)
        return kept

    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(calls), pool.submit(calls), pool.submit(looks), pool.submit(looks)]
        making = [pool.submit(lives, number) for number in range(4)]
        try:
            eventually("traffic", lambda: answers["call", 200] > 10 and answers["hub", 200] > 10)
            fault(redis)
            seen = answers["hub", 200]
            eventually("traffic again", lambda: answers["hub", 200] > seen + 10)
        finally:
            stop.set()
        for each in working:
            each.result()
        kept = set().union(*(each.result() for each in making))
    assert {code for what, code in answers if what == "call"} == {200}  # calls need no store
    assert {code for _, code in answers} <= {200, 503}
    for id in kept:
        eventually("it to run", lambda it=id: status(served, it) == "Running")
    assert status(served, used["id"]) == "Running"
    assert kept <= living(served, fault=fault.__name__)
    eventually("agreement", lambda: living(served) == sandboxes(served))
    assert "Traceback" not in served.text
