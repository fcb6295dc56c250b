"""``Environment`` on a platform, against one that does as the test says: a scripted control plane, a real sandbox."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv import (
    Environment,
    Invalid,
    NetworkError,
    NotFound,
    OutOfMemory,
    RateLimited,
    SandboxLost,
    StartFailed,
    Unsupported,
)
from aenv.client import leases as leasing
from aenv.client import platform
from aenv.client.leases import leases
from aenv.wire import LEASE
from tests.client.planes import ENV, Asked, Cut, Plane, failed, ok, plane, read, write
from tests.support import Sandbox, until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AENV_SYSTEM_URL", "AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(tmp_path))


class Site:
    """A platform whose instances are all one sandbox. What it does with a request can be changed, route by route."""

    def __init__(self, sandbox: str) -> None:
        self.sandbox = sandbox
        self.about: dict[str, Any] = {}
        """What every instance says of itself from now on."""
        self.instances: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.instead: dict[str, Callable[[Asked], Awaitable[tuple[int, Any] | None]]] = {}
        """By ``METHOD last-part-of-the-path``: done first; what it returns is the answer, unless that is None."""
        self.plane: Plane

    @property
    def url(self) -> str:
        return self.plane.url

    async def answer(self, asked: Asked) -> tuple[int, Any]:
        last = asked.path.rpartition("/")[2]
        key = f"{asked.method} {'id' if last in self.instances or last.startswith('i-') else last}"
        if key in self.instead and (told := await self.instead[key](asked)):
            return told
        if key == "POST env-instance":
            id = self.keys.setdefault(asked.headers["idempotency-key"], f"i-{len(self.keys) + 1}")
            return ok(self.instances.setdefault(id, self.make(id)))
        parts = asked.path.split("/")
        id = parts[2]
        if id not in self.instances:
            return failed(404, "not_found", f"there is no instance {id}")
        if key == "DELETE id":
            del self.instances[id]
            return ok(None)
        if last in ("renew", "extend"):
            return ok({"expires_at": "later"})
        if last == "expose":
            return ok({"url": f"http://{asked.json['port']}.ports", "port": asked.json["port"], "expires_at": "later"})
        return ok(self.instances[id] | self.about)

    def make(self, id: str) -> dict[str, Any]:
        about = {"id": id, "env": ENV, "status": "Running", "created_at": "", "updated_at": "", "url": self.sandbox}
        return about | self.about


@asynccontextmanager
async def site(sandbox: str) -> AsyncIterator[Site]:
    made = Site(sandbox)
    async with plane(made.answer) as made.plane:
        yield made


async def test_an_episode(lab: Sandbox) -> None:
    async with site(lab.url) as made:
        env = Environment(
            *("lab@^1.0", "data", "1h", {"A": "b"}, ["--x"]),
            aenv_url=made.url,
            api_key="key",
            owner="me",
            labels={"run": "7"},
            seed=3,
            resources={"cpu": "1"},
            startup_timeout=100,
        )
        async with env:
            assert env.instance_id == "i-1"
            assert (await env.call_tool("lab/add", {"a": 1})).text == "3"
            with pytest.raises(Invalid, match="names a tool of 'other'"):
                await env.call_tool("other/add", {"a": 1})
            assert await env.call_reward({"answer": "42"}, name="score") == 1.0
            await env.extend("2h")
            assert await env.expose(8000, "5m") == "http://8000.ports"
            assert await env.agent_url() == f"{lab.url}/mcp?token={env_agent_token('key')}"
        assert made.instances == {}
        assert made.plane.lines == [
            "POST /env-instance",
            "POST /env-instance/i-1/extend",
            "POST /env-instance/i-1/expose",
            "DELETE /env-instance/i-1",
        ]
        create, extend, expose, _ = made.plane.asked
        assert create.json == {
            "envName": "lab@^1.0",
            "datasource": "data",
            "environment_variables": {"A": "b"},
            "arguments": ["--x"],
            "ttl": 3600.0,
            "owner": "me",
            "labels": {"run": "7"},
            "resources": {"cpu": "1"},
            "seed": 3,
            "count": None,
            "lease": LEASE,
            "startup_timeout": 100.0,
            "forked_from": "",
            "own_random": False,
        }
        assert create.headers["prefer"] == "wait=20"
        assert {asked.headers["authorization"] for asked in made.plane.asked} == {"Bearer key"}
        assert (extend.json, expose.json) == ({"ttl": 7200.0}, {"port": 8000, "ttl": 300.0})
        await env.initialize()
        assert env.instance_id == "i-2"
        await env.release()
        keys = [asked.headers["idempotency-key"] for asked in made.plane.asked if asked.line == "POST /env-instance"]
        assert len(set(keys)) == 2


def env_agent_token(token: str) -> str:
    from aenv.runtime.tokens import agent_token, digest

    return agent_token(digest(token))


async def test_the_platform_is_the_variables_unless_a_sandbox_is_attached(
    lab: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(lab.url) as made:
        monkeypatch.setenv("AENV_SYSTEM_URL", made.url)
        async with Environment("lab") as env:
            assert env.instance_id == "i-1"
        monkeypatch.setenv("DUMMY_INSTANCE_IP", f"localhost:{lab.port}")
        async with Environment("lab") as env:
            assert env.instance_id == "local"
        async with Environment("lab", aenv_url=made.url) as env:
            assert env.instance_id == "i-2"
        with pytest.raises(NotFound, match="no instance i-9"):  # an instance is a platform's, whatever is attached
            await Environment(instance_id="i-9").initialize()


def test_the_blocking_face(lab: Sandbox) -> None:
    async def serve(started: asyncio.Future[Site], over: asyncio.Event) -> None:
        async with site(lab.url) as made:
            started.set_result(made)
            await over.wait()

    async def main() -> None:
        started: asyncio.Future[Site] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()
        serving = asyncio.create_task(serve(started, over))
        made = await started

        def episode() -> str:
            with Environment.sync("lab", aenv_url=made.url) as env:
                assert env.expose(80) == "http://80.ports"
                return env.call_tool("add", {"a": 1}).text

        assert await asyncio.to_thread(episode) == "3"
        assert made.instances == {}
        over.set()
        await serving

    asyncio.run(main())


# Starting


async def test_a_start_is_waited_for_piece_by_piece(lab: Sandbox) -> None:
    waits: list[str] = []

    async def get(asked: Asked) -> tuple[int, Any] | None:
        waits.append(asked.headers["prefer"])
        if len(waits) == 3:
            made.about = {"status": "Running"}
        return None

    async with site(lab.url) as made:
        made.about = {"status": "Pending", "reason": "in the queue"}
        made.instead["GET id"] = get
        async with Environment("lab", aenv_url=made.url) as env:
            assert (await env.call_tool("add", {"a": 1})).text == "3"
    assert waits == ["wait=20"] * 3


@pytest.mark.parametrize("status", ["Failed", "Terminated"])
async def test_a_start_that_fails_says_why_and_leaves_nothing(status: str) -> None:
    async with site("http://127.0.0.1:1") as made:
        made.about = {"status": status, "reason": "ModuleNotFoundError: no module named 'left'"}
        with pytest.raises(StartFailed, match=r"lab@1.2.3 \(i-1\) did not start: ModuleNotFoundError"):
            async with Environment("lab", aenv_url=made.url):
                pass
        assert made.plane.lines == ["POST /env-instance", "DELETE /env-instance/i-1"]


async def test_a_start_that_takes_too_long_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "MARGIN", 0.0)
    async with site("http://127.0.0.1:1") as made:
        made.about = {"status": "Creating", "reason": "installing 12 requirements"}
        with pytest.raises(StartFailed, match="after 0.3 s: it is Creating: installing 12 requirements"):
            await Environment("lab", aenv_url=made.url, startup_timeout=0.3).initialize()
        assert made.instances == {}


async def test_a_sandbox_that_is_never_healthy_is_given_back() -> None:
    async with site("http://127.0.0.1:1") as made:
        with pytest.raises(StartFailed, match="cannot connect"):
            async with Environment("lab", aenv_url=made.url, startup_timeout=0.2):
                pass
        assert made.instances == {}


async def test_what_the_platform_refuses_is_raised_and_nothing_asked_again() -> None:
    async def refuse(asked: Asked) -> tuple[int, Any]:
        return failed(404, "not_found", "there is no environment 'lba'", "did you mean 'lab'?")

    async with site("") as made:
        made.instead["POST env-instance"] = refuse
        with pytest.raises(NotFound, match="no environment 'lba'") as caught:
            await Environment("lba", aenv_url=made.url).initialize()
        assert caught.value.hint == "did you mean 'lab'?"
        assert made.plane.lines == ["POST /env-instance"]


async def test_a_platform_that_is_busy_or_cut_off_is_asked_again_under_the_same_key(lab: Sandbox) -> None:
    turn = 0

    async def create(asked: Asked) -> tuple[int, Any] | None:
        nonlocal turn
        turn += 1
        if turn == 1:
            write(asked.writer, 503, failed(503, "network", "starting")[1], "Retry-After: 0\r\n")
        if turn == 2:
            made.keys[asked.headers["idempotency-key"]] = "i-1"
            made.instances["i-1"] = made.make("i-1")
        if turn <= 2:
            raise Cut
        return None

    async with site(lab.url) as made:
        made.instead["POST env-instance"] = create
        async with Environment("lab", aenv_url=made.url):
            assert list(made.instances) == ["i-1"]
        assert made.instances == {}
        assert len({asked.headers.get("idempotency-key") for asked in made.plane.asked[:3]}) == 1

        async def busy(asked: Asked) -> tuple[int, Any]:
            write(asked.writer, 429, failed(429, "rate_limited", "full")[1], "Retry-After: 0\r\n")
            raise Cut

        made.plane.asked.clear()
        made.instead["POST env-instance"] = busy
        with pytest.raises(RateLimited, match="full"):
            await Environment("lab", aenv_url=made.url, max_retries=3).initialize()
        assert made.plane.lines == ["POST /env-instance"] * 4


async def test_nobody_there_says_so() -> None:
    async with site("") as made:
        pass
    with pytest.raises(NetworkError, match="cannot be reached") as caught:
        await Environment("lab", aenv_url=made.url, max_retries=1).initialize()
    assert "aenv serve" in (caught.value.hint or "")


# Nothing is left behind


async def test_cancelled_before_the_platform_answered(lab: Sandbox) -> None:
    holding = asyncio.Event()

    async def hold(asked: Asked) -> tuple[int, Any] | None:
        if not holding.is_set():
            made.keys[asked.headers["idempotency-key"]] = "i-1"
            made.instances["i-1"] = made.make("i-1")
            holding.set()
            await asked.reader.read(1)
            raise Cut
        return None

    async with site(lab.url) as made:
        made.instead["POST env-instance"] = hold
        opening = asyncio.create_task(Environment("lab", aenv_url=made.url).initialize())
        await until(holding.is_set, "the request")
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert made.instances == {}
        first, second, last = made.plane.asked
        assert (first.headers["idempotency-key"], first.body) == (second.headers["idempotency-key"], second.body)
        assert "prefer" not in second.headers
        assert last.line == "DELETE /env-instance/i-1"


async def test_cancelled_while_it_starts(lab: Sandbox) -> None:
    waiting = asyncio.Event()

    async def wait(asked: Asked) -> tuple[int, Any]:
        waiting.set()
        await asked.reader.read(1)
        raise Cut

    async with site(lab.url) as made:
        made.about = {"status": "Creating"}
        made.instead["GET id"] = wait
        opening = asyncio.create_task(Environment("lab", aenv_url=made.url).initialize())
        await until(waiting.is_set, "the wait")
        for _ in range(3):
            opening.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert made.instances == {}


async def test_cancelled_while_it_is_given_back(lab: Sandbox) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def delete(asked: Asked) -> None:
        begun.set()
        await go.wait()

    async with site(lab.url) as made:
        made.instead["DELETE id"] = delete
        env = Environment("lab", aenv_url=made.url)
        await env.initialize()
        leaving = asyncio.create_task(env.release())
        await until(begun.is_set, "the deletion")
        leaving.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert made.instances == {}


@pytest.mark.parametrize(
    "told", [failed(500, "internal"), failed(404, "not_found"), (200, b"odd"), None], ids=["500", "404", "odd", "never"]
)
async def test_a_deletion_that_fails_is_no_failure_of_the_episode(
    lab: Sandbox,
    told: tuple[int, Any] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(platform, "DEPARTURE", 0.5)

    async def delete(asked: Asked) -> tuple[int, Any]:
        if told is None:
            await asked.reader.read(1)
            raise Cut
        return told

    async with site(lab.url) as made:
        made.instead["DELETE id"] = delete
        with caplog.at_level(logging.WARNING, "aenv.environment"):
            async with Environment("lab", aenv_url=made.url) as env:
                await env.call_tool("add", {"a": 1})
        assert ("[ENV:i-1] could not be released" in caplog.text) is (told is None or told[0] != 404)
        assert leases()._held == {}


def test_nothing_is_printed_unless_logging_is_set_up() -> None:
    code = "import logging, aenv; aenv.Environment; logging.getLogger('aenv.environment').warning('x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# Leases


async def test_leases_are_renewed_until_the_instance_is_given_back(
    lab: Sandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leasing, "RENEWAL", 0.05)
    monkeypatch.setattr(leasing, "AGAIN", 0.05)
    renewed: list[str] = []
    fail = True

    async def renew(asked: Asked) -> tuple[int, Any] | None:
        nonlocal fail
        if fail:
            fail = False
            return failed(500, "internal", "not now")
        if "i-3" in asked.path:
            renewed.append("i-3")
            return failed(404, "not_found")
        renewed.append(asked.path.split("/")[2])
        return None

    async with site(lab.url) as made:
        made.instead["POST renew"] = renew
        environments = [Environment("lab", aenv_url=made.url) for _ in range(3)]
        await asyncio.gather(*(env.initialize() for env in environments))
        await until(lambda: renewed.count("i-1") > 2 and renewed.count("i-2") > 2, "renewals")
        assert "its lease could not be renewed: not now" in caplog.text
        assert renewed.count("i-3") == 1  # ended, as far as the platform knows
        held = leases()
        assert sorted(held._held) == ["i-1", "i-2"]
        task = held._task
        assert task is not None
        by_id = {env.instance_id: env for env in environments}
        await by_id["i-1"].release()
        count, others = renewed.count("i-1"), renewed.count("i-2")
        await until(lambda: renewed.count("i-2") > others + 2, "renewals of the other")
        assert renewed.count("i-1") <= count + 1  # one may have been under way
        await by_id["i-2"].release()
        await by_id["i-3"].release()
        await asyncio.wait((task,), timeout=30)
        assert task.cancelled()
        await environments[0].initialize()
        await until(lambda: renewed.count("i-4") > 0, "renewals after a new start")
        await environments[0].release()


def test_a_forked_child_neither_renews_nor_deletes(lab: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "RENEWAL", 0.05)

    async def main() -> int:
        async with site(lab.url) as made:
            env = Environment("lab", aenv_url=made.url)
            await env.initialize()
            await until(lambda: made.plane.count("POST /env-instance/i-1/renew") > 0, "a renewal")
            child = os.fork()
            if child == 0:
                code = 99
                try:
                    code = in_the_child(env)
                finally:
                    os._exit(code)
            status = (await asyncio.to_thread(os.waitpid, child, 0))[1]
            assert list(made.instances) == ["i-1"]
            assert (await env.call_tool("add", {"a": 1})).text == "3"
            await env.release()
            assert made.instances == {}
            return os.waitstatus_to_exitcode(status)

    def in_the_child(env: Environment) -> int:
        asyncio._set_running_loop(None)
        loop = asyncio.new_event_loop()

        async def use() -> int:
            assert leases()._held == {}
            found = int((await env.call_tool("add", {"a": 40})).text)
            await env.release()
            return found

        return loop.run_until_complete(use())

    assert asyncio.run(main()) == 42


async def test_a_loop_that_is_gone_takes_its_leases_with_it(lab: Sandbox) -> None:
    def episode() -> None:
        async def forget() -> None:
            async with site(lab.url) as made:
                await Environment("lab", aenv_url=made.url).initialize()

        asyncio.run(forget())

    before = len(leasing._leases)
    await asyncio.to_thread(episode)
    gc.collect()
    assert len(leasing._leases) <= before


# Where calls go


async def test_calls_go_straight_to_a_socket_that_opens(lab: Sandbox, tmp_path: Path) -> None:
    seen = 0
    path = tmp_path / "sandbox.sock"

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        there, inside = await asyncio.open_connection("127.0.0.1", lab.port)
        await asyncio.gather(pump(reader, inside), pump(there, writer))

    server = await asyncio.start_unix_server(relay, path)
    async with site("http://127.0.0.1:1/gateway") as made:
        made.about = {"socket": f"unix:{path}", "owner_token": "own", "boot": await boot_of(lab)}
        async with Environment("lab", aenv_url=made.url) as env:
            assert (await env.call_tool("add", {"a": 1})).text == "3"
            assert seen > 0
            assert await env.agent_url() == f"http://127.0.0.1:1/gateway/mcp?token={env_agent_token('own')}"
    server.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def boot_of(lab: Sandbox) -> str:
    from aenv import http

    return (await http.request("GET", lab.url, "/health")).headers[b"aenv-boot"].decode()


@pytest.mark.parametrize("given", ["unix:{0}/none", "unix:{0}/file", "unix:relative", "{0}", "", "http://127.0.0.1:1"])
async def test_calls_go_to_the_gateway_when_the_socket_does_not_open(lab: Sandbox, tmp_path: Path, given: str) -> None:
    (tmp_path / "file").write_text("no socket")
    async with site(lab.url) as made:
        made.about = {"socket": given.format(tmp_path), "owner_token": "own", "boot": await boot_of(lab)}
        async with Environment("lab", aenv_url=made.url) as env:
            assert (await env.call_tool("add", {"a": 1})).text == "3"


async def test_nothing_is_told_to_another_sandbox_that_has_the_same_path(lab: Sandbox, tmp_path: Path) -> None:
    heard: list[Asked] = []

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await read(reader, writer))
        writer.write(b"HTTP/1.1 200 OK\r\nAEnv-Boot: another\r\nContent-Length: 2\r\n\r\n{}")

    server = await asyncio.start_unix_server(other, tmp_path / "1.sock")
    async with site(lab.url) as made:
        made.about = {"socket": f"unix:{tmp_path}/1.sock", "owner_token": "own", "boot": await boot_of(lab)}
        async with Environment("lab", aenv_url=made.url) as env:
            assert (await env.call_tool("add", {"a": 1})).text == "3"
    server.close()
    assert [asked.line for asked in heard] == ["GET /health"]
    assert "authorization" not in heard[0].headers


async def test_an_answer_that_names_no_place_is_an_error() -> None:
    async with site("") as made:
        with pytest.raises(NetworkError, match="did not say where"):
            await Environment("lab", aenv_url=made.url).initialize()
        assert made.instances == {}


# What a gateway says


class Gateway:
    """A gateway on a unix socket, which can stop and start again at the same place."""

    def __init__(self, path: Path, port: int) -> None:
        self.path, self.port = path, port
        self.told: tuple[int, Any] | None = None
        self.passed = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._handle, self.path)

    async def stop(self) -> None:
        self._server.close()
        self.path.unlink(missing_ok=True)
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        if self.told is not None:
            await reader.readuntil(b"\r\n\r\n")
            write(writer, *self.told)
            writer.close()
            return
        there, inside = await asyncio.open_connection("127.0.0.1", self.port)
        self._open.add(inside)
        self.passed += 1
        await asyncio.gather(pump(reader, inside), pump(there, writer), return_exceptions=True)


@asynccontextmanager
async def behind_a_gateway(lab: Sandbox, path: Path) -> AsyncIterator[tuple[Site, Gateway]]:
    from aenv import http

    gateway = Gateway(path, lab.port)
    await gateway.start()
    async with site(f"unix:{path}") as made:
        made.about = {"boot": await boot_of(lab)}
        try:
            yield made, gateway
        finally:
            await http.close()
            await gateway.stop()


def lost(code: str, message: str) -> tuple[int, Any]:
    return 502, {"success": False, "error": message, "code": code, "hint": "ask for another"}


@pytest.mark.parametrize(
    ("told", "about", "kind", "words"),
    [
        (lost("sandbox_lost", "gone: it was deleted"), {}, SandboxLost, "gone: it was deleted"),
        (lost("out_of_memory", "gone: out of memory"), {}, OutOfMemory, "out of memory"),
        (
            lost("network", "the sandbox does not answer"),
            {"status": "Failed", "reason": "out of memory (limit 64Mi)"},
            OutOfMemory,
            r"out of memory \(limit 64Mi\)",
        ),
        (lost("sandbox_lost", "gone"), {"status": "Terminated", "reason": "its time is over"}, SandboxLost, "time is"),
        ((502, b"<html>"), {}, NetworkError, "not the runtime's"),
    ],
)
async def test_what_a_gateway_says_of_a_sandbox_is_typed(
    lab: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: tuple[int, Any],
    about: dict[str, Any],
    kind: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr("aenv.client.handle.NEWS", 0.1)
    async with behind_a_gateway(lab, tmp_path / "gateway") as (made, gateway):
        async with Environment("lab", aenv_url=made.url) as env:
            gateway.told = told
            made.about |= about
            for call in (
                lambda: env.call_tool("add", {"a": 1}),
                lambda: env.call_reward({}, name="score"),
                lambda: env.get_env_info(),
                lambda: env.list_tools(),
            ):
                with pytest.raises(kind, match=words) as caught:
                    await call()
                assert type(caught.value) is kind


async def test_an_instance_that_the_platform_forgot_is_lost(lab: Sandbox, tmp_path: Path) -> None:
    async with behind_a_gateway(lab, tmp_path / "gateway") as (made, gateway):
        async with Environment("lab", aenv_url=made.url) as env:
            gateway.told = lost("sandbox_lost", "gone")
            made.instances.clear()
            with pytest.raises(SandboxLost, match="no such instance any more"):
                await env.call_tool("add", {"a": 1})


async def test_a_gateway_that_restarts_in_the_middle_of_a_call_is_not_noticed(lab: Sandbox, tmp_path: Path) -> None:
    async with behind_a_gateway(lab, tmp_path / "gateway") as (made, gateway):
        async with Environment("lab", aenv_url=made.url) as env:
            before = (await env.call_tool("count")).structured["result"]
            calls = [asyncio.create_task(env.call_tool("sleep", {"seconds": 1})) for _ in range(3)]
            await until(lambda: gateway.passed >= 3, "the calls at the gateway")
            await gateway.stop()
            calls.append(asyncio.create_task(env.call_tool("count")))
            for _ in range(20):
                await asyncio.sleep(0.02)
            await gateway.start()
            found = await asyncio.gather(*calls)
            assert [result.text for result in found] == ["awake"] * 3 + [str(before + 1)]


async def test_a_gateway_that_stays_away_is_the_networks_failure(
    lab: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.client.handle.RESTART", 0.1)
    async with behind_a_gateway(lab, tmp_path / "gateway") as (made, gateway):
        async with Environment("lab", aenv_url=made.url) as env:
            await gateway.stop()
            with pytest.raises(NetworkError, match="cannot connect") as caught:
                await env.call_tool("add", {"a": 1})
            assert not isinstance(caught.value, SandboxLost)
            await gateway.start()
            assert (await env.call_tool("add", {"a": 1})).text == "3"


# Instances that are there already


async def test_attaching_to_an_instance(lab: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "RENEWAL", 0.01)
    async with site(lab.url) as made:
        made.instances["i-7"] = made.make("i-7")
        async with Environment(instance_id="i-7", aenv_url=made.url) as env:
            assert (env.instance_id, env.env_name) == ("i-7", "lab@1.2.3")
            assert (await env.list_tools())[0]["name"].startswith("lab@1.2.3/")
            assert (await env.call_tool("whatever/add", {"a": 1})).text == "3"
            await env.extend("1h")
            assert leases()._held == {}
        assert list(made.instances) == ["i-7"]
        async with Environment("mine", instance_id="i-7", aenv_url=made.url) as env:
            assert (await env.list_tools())[0]["name"].startswith("mine/")
        assert {line.partition(" ")[0] for line in made.plane.lines} == {"GET", "POST"}
        made.about = {"status": "Failed", "reason": "out of memory"}
        with pytest.raises(SandboxLost, match="instance i-7 is Failed: out of memory"):
            await Environment(instance_id="i-7", aenv_url=made.url).initialize()
        with pytest.raises(NotFound, match="no instance i-8"):
            await Environment(instance_id="i-8", aenv_url=made.url).initialize()


def test_one_of_the_two_is_meant() -> None:
    with pytest.raises(Invalid, match="instance_id and service_id are both given"):
        Environment(instance_id="i-1", service_id="s-1", aenv_url="localhost")
    with pytest.raises(Invalid, match="not an environment name"):
        Environment(aenv_url="localhost")


async def test_a_port_of_an_embedded_sandbox_is_not_shown() -> None:
    with pytest.raises(Unsupported, match="show a port") as caught:
        await Environment("mini-terminal").expose(80)
    assert "aenv serve" in (caught.value.hint or "")
