"""The SDK against a live sandbox."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import threading
from pathlib import Path

import pytest

from aenv import (
    AEnvError,
    AuthorError,
    CallTimeout,
    Conflict,
    Environment,
    Invalid,
    NetworkError,
    NotFound,
    RateLimited,
    SandboxLost,
    StartFailed,
    ToolError,
    ToolTimeoutError,
    Unsupported,
    attach,
)
from aenv.client.provision import _sandbox_url
from aenv.errors import Expired, ModelError, OutOfMemory
from aenv.models import ExecResult
from aenv.models import Sandbox as Address
from tests.support import FIXTURES, Sandbox, sandbox


def make(lab: Sandbox, name: str = "lab@1.2.3", **options: object) -> Environment:
    return Environment(name, provision=attach(lab.url), **options)  # type: ignore[arg-type]


async def test_tools_are_listed_as_documented(lab: Sandbox) -> None:
    async with make(lab) as env:
        tools = {tool["name"]: tool for tool in await env.list_tools()}
    add = tools["lab@1.2.3/add"]
    assert set(add) == {"name", "description", "inputSchema"}
    assert add["description"] == "Add two numbers."
    assert add["inputSchema"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert tools["lab@1.2.3/renamed"]["description"] == "Another text."
    assert "lab@1.2.3/chat" in tools


@pytest.mark.parametrize("name", ["add", "lab/add", "lab@1.2.3/add", "lab@9.9.9/add"])
async def test_a_tool_answers_to_each_form_of_its_name(lab: Sandbox, name: str) -> None:
    async with make(lab) as env:
        result = await env.call_tool(name, {"a": 1})
    assert (result.text, result.structured, result.is_error) == ("3", {"result": 3}, False)


async def test_a_prefix_of_another_env_is_refused_unless_attached(lab: Sandbox) -> None:
    from contextlib import nullcontext

    own = Environment("lab", provision=lambda spec: nullcontext(Address(url=lab.url)))
    async with own as env:
        with pytest.raises(Invalid, match="names a tool of 'other'"):
            await env.call_tool("other/add", {"a": 1})
        assert (await env.call_tool("lab/add", {"a": 1})).text == "3"


async def test_results_keep_their_kind(lab: Sandbox) -> None:
    async with make(lab) as env:
        assert (await env.call_tool("echo", {"text": ""})).content == [{"type": "text", "text": ""}]
        picture = await env.call_tool("picture")
        assert picture.content[0]["type"] == "image"
        assert picture.content[0]["mimeType"] == "image/png"
        assert [block["type"] for block in (await env.call_tool("mixed")).content] == ["text", "image"]
        assert (await env.call_tool("custom")).structured == {"mine": True}
        assert (await env.call_tool("point", {"x": 1, "y": 2})).structured == {"x": 1, "y": 2}
        found = await env.call_tool("search", {"query": {"text": "a", "limit": 2}})
        assert found.structured == {"result": ["a", "a"]}
        assert (await env.call_tool("chat", {"message": "hi"})).text == "you said hi"


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("fail", {"message": "broken"}, "ValueError: broken"),
        ("polite_fail", {}, "ask for less"),
        ("leave", {}, "SystemExit: 3"),
        ("leave_async", {}, "SystemExit: 3"),
        ("cancel_itself", {}, "CancelledError"),
        ("stop_iteration", {}, "StopIteration: odd"),
        ("odd", {}, "cannot be sent"),
        ("wrong", {}, "declared to return int, but returned str"),
        ("add", {"a": "x"}, "argument 'a'"),
        ("add", {}, "argument 'a' is missing"),
        ("add", {"a": 1, "z": 1}, "there is no argument 'z'"),
        ("search", {"query": {"limit": 1}}, "query.text"),
        ("addd", {}, "did you mean 'add'?"),
    ],
)
async def test_a_tools_failure_is_a_result(lab: Sandbox, tool: str, arguments: dict[str, object], words: str) -> None:
    async with make(lab) as env:
        result = await env.call_tool(tool, arguments)
        assert result.is_error
        assert words in result.text
        with pytest.raises(ToolError, match=result.text[:5]):
            result.raise_for_error()
        assert (await env.call_tool("add", {"a": 1})).raise_for_error().text == "3"


async def test_the_context_tells_about_the_instance(lab: Sandbox) -> None:
    async with make(lab) as env:
        about = (await env.call_tool("about")).structured
    assert about == {
        "instance_id": "local",
        "env": "lab@1.2.3",
        "arguments": ["--verbose", "x"],
        "argv": ["--verbose", "x"],
        "seed": 7,
        "setup": True,
        "secret": False,
    }


async def test_rewards_by_name(lab: Sandbox) -> None:
    async with make(lab) as env:
        assert await env.call_reward({"answer": "42"}, name="score") == 1.0
        assert await env.call_reward({"answer": "x"}, name="detailed") == {"score": 0.5, "why": "x"}
        with pytest.raises(Invalid, match="there are 5 rewards"):
            await env.call_reward({"answer": "42"})
        with pytest.raises(NotFound, match="no reward 'scor'") as caught:
            await env.call_reward({}, name="scor")
        assert caught.value.hint == "did you mean 'score'?"
        with pytest.raises(Invalid, match="argument 'answer' is missing"):
            await env.call_reward({}, name="score")


@pytest.mark.parametrize("name", ["broken", "nan", "limited"])
async def test_a_reward_that_fails_is_never_a_number(lab: Sandbox, name: str) -> None:
    async with make(lab) as env:
        with pytest.raises(AuthorError):
            await env.call_reward({}, name=name)


async def test_functions(lab: Sandbox) -> None:
    async with make(lab) as env:
        assert await env.call_function("shout", {"text": "a", "times": "2"}) == {"text": "AA"}
        listed = await env.list_functions()
        assert listed["total"] == 4
        assert {"name", "endpoint", "method", "description", "inputSchema"} == set(listed["functions"][0])
        assert listed["reward"] == ["score", "detailed", "broken", "nan", "limited"]
        assert listed["health"] == "check"
        with pytest.raises(NotFound):
            await env.call_function("shot")


async def test_health_is_the_authors(lab: Sandbox) -> None:
    async with make(lab) as env:
        assert await env.check_health() == {"status": "healthy", "detail": "all well"}
        await env.call_function("set_healthy", {"value": False})
        try:
            assert (await env.check_health())["status"] == "sick"
            with pytest.raises(StartFailed, match="unhealthy"):
                await env.wait_for_ready(timeout=0.1)
        finally:
            await env.call_function("set_healthy", {"value": True})
        assert await env.wait_for_ready(timeout=5)


async def test_reset_and_info(lab: Sandbox) -> None:
    async with make(lab) as env:
        await env.call_tool("count")
        assert await env.reset(seed=11) == {"seed": 11}
        assert (await env.call_tool("count")).structured == {"result": 1}
        info = await env.get_env_info()
        assert (info["name"], info["version"]) == ("lab", "1.2.3")
        assert info["protocols"][:2] == ["2026-07-28", "2025-11-25"]


async def test_openai_tools_and_back(lab: Sandbox) -> None:
    async with make(lab) as env:
        tools = await env.list_openai_tools()
        names = [tool["function"]["name"] for tool in tools]
        assert len(set(names)) == len(names)
        assert all(tool["type"] == "function" and tool["function"]["parameters"]["type"] == "object" for tool in tools)
        assert (await env.call_tool(names[names.index("add")], {"a": 5})).text == "7"


async def test_openai_names_of_tools_that_are_alike(tmp_path: Path) -> None:
    code = "from aenv import register_tool\n"
    for name in ("a.b", "a_b", "a-b"):
        code += f"@register_tool(name={name!r})\ndef f() -> str:\n    return {name!r}\n"
    (tmp_path / "tools.py").write_text(code)
    with sandbox(tmp_path) as running:
        async with make(running) as env:
            names = [tool["function"]["name"] for tool in await env.list_openai_tools()]
            assert [(await env.call_tool(name)).text for name in names] == ["a.b", "a_b", "a-b"]
            assert (await env.call_tool("a_b")).text == "a_b"


async def test_a_model_that_an_environment_asks_itself_is_no_failure_of_a_tool(tmp_path: Path) -> None:
    code = "from aenv import ModelError, register_function, register_reset, register_reward, register_tool\n"
    for kind in ("tool", "function", "reward", "reset"):
        code += f"@register_{kind}\ndef ask_{kind}():\n    raise ModelError('the user model did not answer')\n"
    (tmp_path / "tools.py").write_text(code)
    with sandbox(tmp_path) as running:
        async with make(running) as env:
            for asking in (
                env.call_tool("ask_tool"),
                env.call_function("ask_function"),
                env.call_reward(),
                env.reset(),
            ):
                with pytest.raises(ModelError, match="the user model did not answer"):
                    await asking


class Counting:
    """A provision that counts what is given and given back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.given = self.back = 0

    def __call__(self, spec: object) -> Counting:
        return self

    async def __aenter__(self) -> Address:
        await asyncio.sleep(0.05)
        self.given += 1
        return Address(url=self.url, attached=True)

    async def __aexit__(self, *_: object) -> None:
        self.back += 1


async def test_release_during_initialize_leaves_no_sandbox(lab: Sandbox) -> None:
    provision = Counting(lab.url)
    env = Environment("lab", provision=provision)
    opening = asyncio.create_task(env.initialize())
    await asyncio.sleep(0)
    await env.release()
    await opening
    assert (provision.given, provision.back) == (1, 1)


async def test_release_cancelled_while_it_says_farewell_gives_the_sandbox_back(lab: Sandbox) -> None:
    provision = Counting(lab.url)
    env = Environment("lab", provision=provision)
    with pytest.raises(CallTimeout):
        await env.call_tool("sleep", {"seconds": 60}, timeout=0.05)
    releasing = asyncio.create_task(env.release())
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert provision.back == 1


def test_an_environment_made_before_a_fork_is_released_by_the_child_that_used_it(lab: Sandbox) -> None:
    provision = Counting(lab.url)
    env = Environment("lab", provision=provision)
    child = os.fork()
    if child == 0:
        code = 99
        try:

            async def use() -> int:
                async with env:
                    assert (await env.call_tool("add", {"a": 1})).text == "3"
                return 10 * provision.given + provision.back

            code = asyncio.new_event_loop().run_until_complete(use())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11


async def test_a_token_that_is_no_header_is_refused(lab: Sandbox) -> None:
    env = Environment("lab", provision=attach(lab.url, "t\r\nX-Injected: 1"))
    with pytest.raises(Invalid, match="the token has characters"):
        await env.initialize()


async def test_an_address_that_is_no_sandbox() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    env = Environment("x", provision=attach(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    with pytest.raises(NetworkError, match="no data"):
        await env.call_reward()
    server.close()


async def test_the_first_call_initializes_once(lab: Sandbox) -> None:
    opened = 0
    provision = attach(lab.url)

    def counting(spec):  # type: ignore[no-untyped-def]
        nonlocal opened
        opened += 1
        return provision(spec)

    env = Environment("lab", provision=counting)
    results = await asyncio.gather(*(env.call_tool("add", {"a": n}) for n in range(20)))
    assert [result.text for result in results] == [str(n + 2) for n in range(20)]
    assert opened == 1
    await env.release()
    await env.release()
    assert (await env.call_tool("add", {"a": 1})).text == "3"
    assert opened == 2
    await env.release()


async def test_a_timed_out_call_harms_no_other(lab: Sandbox) -> None:
    async with make(lab) as env:
        before = (await env.call_tool("cancelled")).structured["result"]
        others = [asyncio.create_task(env.call_tool("sleep", {"seconds": 0.5})) for _ in range(5)]
        with pytest.raises(CallTimeout, match="within 0.1 s") as caught:
            await env.call_tool("sleep", {"seconds": 60}, timeout=0.1)
        assert isinstance(caught.value, ToolTimeoutError)
        assert [(await task).text for task in others] == ["awake"] * 5
        await until(env, "cancelled", before + 1)


async def test_cancelling_reaches_the_tool(lab: Sandbox) -> None:
    async with make(lab) as env:
        before = (await env.call_tool("cancelled")).structured["result"]
        task = asyncio.create_task(env.call_tool("sleep", {"seconds": 60}))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(env, "cancelled", before + 1)


async def until(env: Environment, tool: str, value: int) -> None:
    """Wait for a counter in the sandbox to get there."""
    async with asyncio.timeout(20):
        while (await env.call_tool(tool)).structured["result"] < value:
            await asyncio.sleep(0.02)


async def test_two_hundred_calls_with_one_that_hangs_one_that_raises_and_one_cancelled(lab: Sandbox) -> None:
    async with make(lab) as env:
        hanging = asyncio.create_task(env.call_tool("hang", timeout=3))
        raising = asyncio.create_task(env.call_tool("fail"))
        doomed = asyncio.create_task(env.call_tool("sleep", {"seconds": 60}))
        others = [
            asyncio.create_task(env.call_tool("add", {"a": n}) if n % 2 else env.call_tool("echo", {"text": str(n)}))
            for n in range(197)
        ]
        await asyncio.sleep(0.05)
        doomed.cancel()
        results = await asyncio.gather(*others)
        assert [result.text for result in results] == [str(n + 2) if n % 2 else str(n) for n in range(197)]
        assert (await raising).is_error
        with pytest.raises(asyncio.CancelledError):
            await doomed
        with pytest.raises(CallTimeout):
            await hanging


async def test_long_arguments_and_answers(lab: Sandbox) -> None:
    async with make(lab) as env:
        assert (await env.call_tool("length", {"text": "x" * 5_000_000})).structured == {"result": 5_000_000}
        result = await env.call_tool("big", {"size": 20_000_000})
        assert len(result.text) == 20_000_000
        with pytest.raises(Invalid, match="over 67108864 bytes") as caught:
            await env.call_tool("length", {"text": "x" * 100_000_000})
        assert caught.value.code == "too_large"
        assert (await env.call_tool("add", {"a": 1})).text == "3"


async def test_arguments_that_json_cannot_carry(lab: Sandbox) -> None:
    async with make(lab) as env:
        with pytest.raises(Invalid, match="cannot be sent"):
            await env.call_tool("echo", {"text": object()})
        with pytest.raises(Invalid, match="cannot be sent"):
            await env.call_reward({"answer": object()})


async def test_a_sandbox_that_dies_is_an_exception_not_a_result() -> None:
    with sandbox(FIXTURES / "lab") as mortal:
        async with make(mortal) as env:
            with pytest.raises(AEnvError):
                await env.call_tool("die")
            for call in (env.call_tool("add", {"a": 1}), env.list_tools(), env.check_health(), env.get_env_info()):
                with pytest.raises(SandboxLost):
                    await call


async def test_a_sandbox_that_was_restarted_is_lost() -> None:
    with sandbox(FIXTURES / "lab") as first:
        env = make(first)
        await env.call_tool("count")
        first.kill()
        with sandbox(FIXTURES / "lab", "--port", str(first.port)):
            with pytest.raises(SandboxLost, match="restarted"):
                await env.call_tool("count")
            await env.release()
            assert (await env.call_tool("count")).structured == {"result": 1}


async def test_a_busy_gateway_is_asked_up_to_max_retries() -> None:
    asked = 0

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await reader.readuntil(b"\r\n\r\n"):
            asked += 1
            body = b'{"success": false, "error": "full", "code": "rate_limited"}'
            head = b"HTTP/1.1 429 Busy\r\nRetry-After: 0\r\nContent-Length: %d\r\n\r\n" % len(body)
            writer.write(head + body)

    server = await asyncio.start_server(busy, "127.0.0.1", 0)
    provision = attach(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    env = Environment("lab", provision=provision, max_retries=4, skip_for_healthy=True)
    with pytest.raises(RateLimited, match="full"):
        await env.get_env_info()
    assert asked == 5
    server.close()


async def test_nobody_there_says_how_to_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        env = Environment("lab", provision=attach(f"127.0.0.1:{taken.getsockname()[1]}"), startup_timeout=0.3)
        with pytest.raises(StartFailed, match="cannot connect") as caught:
            await env.initialize()
    assert "aenv run" in (caught.value.hint or "")


async def test_a_failed_start_gives_the_sandbox_back(lab: Sandbox) -> None:
    from contextlib import asynccontextmanager

    given_back = []

    @asynccontextmanager
    async def broken(spec):  # type: ignore[no-untyped-def]
        try:
            yield Address(url="http://127.0.0.1:1")
        finally:
            given_back.append(True)

    with pytest.raises(StartFailed):
        async with Environment("lab", provision=broken, startup_timeout=0.1):
            pass
    assert given_back == [True]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost", "http://localhost:8081"),
        ("http://localhost", "http://localhost:8081"),
        ("http://localhost/", "http://localhost:8081"),
        ("10.0.0.1:99", "http://10.0.0.1:99"),
        ("http://h:1/prefix/", "http://h:1/prefix"),
        ("https://h", "https://h"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert _sandbox_url(given) == url


async def test_attached_by_environment_variable(lab: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_INSTANCE_IP", f"http://localhost:{lab.port}")
    async with Environment("anything-at-all") as env:
        assert (await env.call_tool("anything-else/add", {"a": 1})).text == "3"


async def test_embedded_runs_the_project_in_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES / "lab")
    async with Environment("lab", arguments=["a"], seed=3) as env:
        about = (await env.call_tool("about")).structured
        assert (about["arguments"], about["seed"]) == (["a"], 3)
    with pytest.raises(NotFound, match="no environment 'other'"):
        await Environment("other").initialize()
    with pytest.raises(NotFound, match="lab@1.2.3"):
        await Environment("lab@^2.0").initialize()


async def test_what_concerns_the_owner_does_not_reach_an_embedded_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES / "lab")
    monkeypatch.setenv("AENV_OWNER_TOKEN_SHA256", "0" * 64)
    monkeypatch.setenv("AENV_SEED", "77")
    async with Environment("lab@^1.0") as env:
        assert (await env.call_tool("lab@1.2.3/about")).structured["seed"] is None


# The sandbox itself


async def test_a_command_is_a_result_whatever_it_returns(lab: Sandbox, tmp_path: Path) -> None:
    async with make(lab) as env:
        found = await env.exec("pwd; cat >&2; exit 3", directory=str(tmp_path), stdin="in")
        assert found == ExecResult(returncode=3, stdout=f"{tmp_path}\n", stderr="in")
        assert (await env.exec(["printf", "%s", "a b"])).stdout == "a b"
        slow = await env.exec(("sleep", "1000"), timeout=0.1)
        assert (slow.returncode, slow.timed_out) == (-9, True)
        with pytest.raises(NotFound, match="no-such-program"):
            await env.exec(["no-such-program"])
        with pytest.raises(Invalid, match="timeout"):
            await env.exec("true", timeout=-1)


async def test_a_command_of_a_cancelled_task_is_killed(lab: Sandbox, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with make(lab) as env:
        task = asyncio.create_task(env.exec(f"echo $$ > {pid}; exec sleep 1000"))
        async with asyncio.timeout(20):
            while not pid.exists() or not pid.read_text().strip():
                await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):
            while Path(f"/proc/{pid.read_text().strip()}").exists():
                await asyncio.sleep(0.02)


async def test_a_sandbox_that_dies_under_a_command_is_an_exception() -> None:
    with sandbox(FIXTURES / "lab") as mortal:
        async with make(mortal) as env:
            with pytest.raises(SandboxLost):
                await env.exec(f"kill -9 {mortal.process.pid}")


@pytest.mark.parametrize("content", [b"\0\xff", "tëxt\n", "", bytearray(b"abc"), b"x" * 3_000_000], ids=type)
async def test_files_there_and_back(lab: Sandbox, tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "new folder" / "ünï?&#.bin"
    expected = content.encode() if isinstance(content, str) else bytes(content)
    async with make(lab) as env:
        await env.upload(str(path), content)
        assert path.read_bytes() == expected
        assert await env.download(str(path)) == expected


async def test_a_local_file_is_uploaded(lab: Sandbox, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"from here")
    async with make(lab) as env:
        await env.upload(str(tmp_path / "there"), local)
        assert (tmp_path / "there").read_bytes() == b"from here"
        with pytest.raises(Invalid, match="none cannot be read: No such file"):
            await env.upload(str(tmp_path / "there"), tmp_path / "none")
        with pytest.raises(Invalid, match="a int cannot be uploaded"):
            await env.upload(str(tmp_path / "there"), 5)  # type: ignore[arg-type]


async def test_files_that_cannot_be_had(lab: Sandbox, tmp_path: Path) -> None:
    async with make(lab) as env:
        with pytest.raises(NotFound, match="No such file"):
            await env.download(str(tmp_path / "none"))
        with pytest.raises(Conflict, match="is a directory"):
            await env.download(str(tmp_path))
        with pytest.raises(Conflict, match="is a directory"):
            await env.upload(str(tmp_path), b"")
        with pytest.raises(Invalid, match="which file"):
            await env.download("")


async def test_history_is_newest_last(lab: Sandbox) -> None:
    async with make(lab) as env:
        await env.call_tool("add", {"a": 1})
        await env.call_tool("fail", {"message": "broken"})
        add, fail = await env.history(last=2)
        assert (add["kind"], add["name"], add["arguments"], add["is_error"]) == ("tool", "add", {"a": 1}, False)
        assert (fail["name"], fail["error"]) == ("fail", "ValueError: broken")
        assert (await env.history())[-2:] == [add, fail]


class Controlled:
    """A provision with power over its sandbox."""

    def __init__(self, url: str, reason: str = "") -> None:
        self.url = url
        self.why = reason
        self.extended: list[tuple[str, float]] = []
        self.open = 0

    def __call__(self, spec: object) -> Controlled:
        return self

    async def __aenter__(self) -> Address:
        return Address(url=self.url, id="box-1")

    async def __aexit__(self, *_: object) -> None:
        pass

    async def extend(self, id: str, ttl: float) -> None:
        self.extended.append((id, ttl))

    async def logs(self, id: str, tail: int | None, follow: bool):  # type: ignore[no-untyped-def]
        self.open += 1
        try:
            for line in ["one", "two", "three"][-(tail or 0) :]:
                yield f"{id}: {line}"
            while follow:
                yield "more"
        finally:
            self.open -= 1

    async def reason(self, id: str, patience: float) -> str:
        assert id == "box-1"
        return self.why


async def test_control_goes_to_the_provision(lab: Sandbox) -> None:
    provision = Controlled(lab.url)
    env = Environment("lab", provision=provision)
    assert env.instance_id is None
    async with env:
        assert env.instance_id == "box-1"
        await env.extend("1h30m")
        assert provision.extended == [("box-1", 5400.0)]
        with pytest.raises(Invalid, match="length of time"):
            await env.extend("soon")
        assert [line async for line in env.logs()] == ["box-1: one", "box-1: two", "box-1: three"]
        assert [line async for line in env.logs(tail=1)] == ["box-1: three"]
        following = env.logs(follow=True)
        assert [await anext(following) for _ in range(5)][-1] == "more"
        await following.aclose()
        assert provision.open == 0
    assert env.instance_id is None


async def test_an_attached_sandbox_is_not_ours_to_control(lab: Sandbox) -> None:
    async with make(lab) as env:
        with pytest.raises(Unsupported, match="cannot be extended"):
            await env.extend("1h")
        with pytest.raises(Unsupported, match="logs"):
            _ = [line async for line in env.logs()]


@pytest.mark.parametrize(
    ("why", "kind", "words"),
    [
        ("out of memory (limit 512Mi)", OutOfMemory, "gone: out of memory \\(limit 512Mi\\)"),
        ("its time to live is over", Expired, "gone: its time to live is over"),
        ("", SandboxLost, "gone: cannot connect"),
    ],
)
async def test_a_lost_sandbox_says_why(why: str, kind: type[AEnvError], words: str) -> None:
    with sandbox(FIXTURES / "lab") as mortal:
        async with Environment("lab", provision=Controlled(mortal.url, why)) as env:
            mortal.kill()
            for call in (env.call_tool("add", {"a": 1}), env.get_env_info(), env.exec("true"), env.download("x")):
                with pytest.raises(kind, match=words) as caught:
                    await call
                assert type(caught.value) is kind


async def test_a_call_that_is_cut_off_or_late_asks_why(lab: Sandbox) -> None:
    provision = Controlled(lab.url)
    async with Environment("lab", provision=provision) as env:
        with pytest.raises(CallTimeout):
            await env.call_tool("sleep", {"seconds": 60}, timeout=0.1)
        provision.why = "it was deleted"
        with pytest.raises(SandboxLost, match="it was deleted"):
            await env.call_tool("sleep", {"seconds": 60}, timeout=0.1)
        assert (await env.call_tool("add", {"a": 1})).text == "3"


async def test_a_start_that_fails_says_why() -> None:
    provision = Controlled("http://127.0.0.1:1", "exit code 7")
    with pytest.raises(StartFailed, match="exit code 7"):
        await Environment("lab", provision=provision, startup_timeout=0.1).initialize()


async def test_nobody_to_say_why_is_no_second_failure(lab: Sandbox) -> None:
    class Silent(Controlled):
        async def reason(self, id: str, patience: float) -> str:
            raise NotFound("never heard of it")

    async with Environment("lab", provision=Silent(lab.url)) as env:
        with pytest.raises(CallTimeout):
            await env.call_tool("sleep", {"seconds": 60}, timeout=0.1)


async def test_logs_name_the_tool_and_never_its_arguments(lab: Sandbox, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aenv.environment"):
        async with make(lab) as env:
            await env.call_tool("echo", {"text": "secret-value"})
    assert "[ENV:local] Executing tool: echo in environment lab@1.2.3" in caplog.text
    assert "secret-value" not in caplog.text


@pytest.mark.parametrize("ttl", ["soon", "", "-5", 0, float("inf"), "1w"])
def test_a_ttl_that_is_no_time_is_an_error_at_once(ttl: object) -> None:
    with pytest.raises(Invalid, match="length of time"):
        Environment("lab", ttl=ttl, provision=attach("localhost"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ttl", "seconds"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("24h", 86400), ("1d", 86400), (5, 5), ("45", 45)]
)
def test_a_ttl_in_each_way_of_writing(ttl: object, seconds: float) -> None:
    assert Environment("lab", ttl=ttl, provision=attach("localhost")).spec.ttl == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a b", "x@", "x@one", "@1.0.0", "../x"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(Invalid):
        Environment(name, provision=attach("localhost"))


def test_a_forked_child_has_connections_of_its_own(lab: Sandbox) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_forked(lab)))
    thread.start()
    thread.join(60)
    assert found == [42]


def _forked(lab: Sandbox) -> int:
    async def warm() -> Environment:
        env = make(lab)
        assert (await env.call_tool("add", {"a": 1})).text == "3"
        return env

    loop = asyncio.new_event_loop()
    env = loop.run_until_complete(warm())
    child = os.fork()
    if child == 0:
        code = 99
        try:

            async def again() -> int:
                await env.release()  # the parent's: nothing happens
                return int((await make(lab).call_tool("add", {"a": 40})).text)

            code = asyncio.new_event_loop().run_until_complete(again())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert loop.run_until_complete(env.call_tool("add", {"a": 2})).text == "4"
    loop.run_until_complete(env.release())
    loop.close()
    return os.waitstatus_to_exitcode(status)


def test_missing_project_directory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match="no environment 'ghost'") as caught:
        asyncio.run(Environment("ghost").initialize())
    assert caught.value.hint


def test_one_that_is_not_started_can_be_sent_to_another_process() -> None:
    sent = Environment("mini-terminal", ttl="5m", labels={"run": "7"})
    found = pickle.loads(pickle.dumps(sent))
    assert found.spec == sent.spec
    assert found.provision is sent.provision  # what runs environments there
