"""Who gets to which sandbox, as whom, and by which names: with a real sandbox behind the gateway."""

from __future__ import annotations

import pytest

from aenv import Environment, attach, http
from aenv.errors import Conflict
from tests.api.gateway.support import AGENT_TOKEN, OWNER, OWNER_TOKEN, Known, Reply, asked, client, serving

ONE = "/env-instance/one"
NONE = ""


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}\r\n"


@pytest.mark.parametrize(
    ("headers", "tools", "info"),
    [
        (bearer(OWNER_TOKEN), 200, 200),
        (bearer(AGENT_TOKEN), 200, 403),
        (bearer("anna"), 200, 200),
        (bearer("admin"), 200, 200),
        (bearer("anna-reads"), 403, 403),
        (bearer("bert"), 404, 404),
        (bearer("nobody"), 401, 401),
        ("Authorization: Basic eDp5\r\n", 401, 401),
        ("Authorization: Bearer \r\n", 401, 401),
        (NONE, 401, 401),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["known", "asked-for"])
async def test_what_a_token_opens(directory: Known, headers: str, tools: int, info: int, known: bool) -> None:
    if not known:
        directory.running.clear()
    headers += "X-Request-Id: mine\r\n"
    async with serving(directory) as gateway:
        assert (await asked(gateway, f"{ONE}/tools", headers)).status == tools
        assert (await asked(gateway, "/tools", f"{headers}AEnvCore-EnvInstance-ID: one\r\n")).status == tools
        assert (await asked(gateway, f"{ONE}/info", headers)).status == info
        elsewhere = await asked(gateway, "/env-instance/two/tools", headers)
        if tools in (401, 403, 404):  # whoever may not use it cannot tell whether it is there
            here = await asked(gateway, f"{ONE}/tools", headers)
            assert here.body.replace(b"one", b"two") == elsewhere.body
            assert here.headers == elsewhere.headers
        else:
            assert elsewhere.status == (404 if headers.startswith((bearer("anna"), bearer("admin"))) else 401)
    assert directory.used.count("one") == len(directory.used)
    assert bool(directory.used) is (tools == 200)


async def test_legacy_clients_need_no_token(directory: Known) -> None:
    async with serving(directory, legacy=True) as gateway:
        proxy = "AEnvCore-EnvInstance-ID: one\r\nAEnvCore-MCPProxy-URL: http://127.0.0.1:1\r\n"
        assert (await asked(gateway, "/info", proxy)).status == 200
        directory.running.clear()
        assert (await asked(gateway, "/info", proxy)).status == 200
        assert (await asked(gateway, f"{ONE}/info", NONE)).status == 200
        assert (await asked(gateway, f"{ONE}/info", bearer(AGENT_TOKEN))).status == 403
        assert (await asked(gateway, f"{ONE}/info", bearer("nobody"))).status == 401
        assert (await asked(gateway, "/env-instance/two/info", NONE)).status == 404


async def test_an_agents_url_opens_the_tools_only(directory: Known) -> None:
    async with serving(directory) as gateway:
        listen = {"path": f"{ONE}/mcp?token={AGENT_TOKEN}", "headers": NONE, "method": "DELETE"}
        assert (await asked(gateway, **listen)).status not in (401, 403)
        for path in (f"{ONE}/info?token={OWNER_TOKEN}", f"{ONE}/mcp?token=wrong", f"{ONE}/mcp?token=anna"):
            assert (await asked(gateway, path, NONE)).status == 401
        assert (await asked(gateway, f"/env-instance/two/mcp?token={AGENT_TOKEN}", NONE)).status == 401


async def test_an_environment_cannot_tell_the_difference(directory: Known) -> None:
    async with serving(directory) as gateway:
        url = f"http://127.0.0.1:{gateway.port}{ONE}"
        async with Environment("lab", provision=attach(url, OWNER_TOKEN)) as env:
            assert (await env.call_tool("add", {"a": 1, "b": 2})).text == "3"
            assert await env.call_reward({"answer": "42"}, name="score") == 1.0
            assert await env.call_function("shout", {"text": "a"}) == {"text": "A"}
            agent = await env.agent_url()
            assert agent.startswith(f"{url}/mcp?token=")
            assert len((await env.call_tool("big", {"size": 3_000_000})).text) == 3_000_000
        await http.close()


async def test_the_gateways_own_routes(directory: Known) -> None:
    async with serving(directory) as gateway:
        assert (await asked(gateway, "/health", NONE)).json == {"success": True, "data": {"status": "healthy"}}
        assert (await asked(gateway, "/health", NONE, "HEAD")).status == 200
        assert _failure(await asked(gateway, "/env-service/x/mcp")) == (501, "unsupported")  # it was given none
        assert _failure(await asked(gateway, "/mcp")) == (404, "not_served")
        assert _failure(await asked(gateway, "/", NONE)) == (404, "not_served")
        assert _failure(await asked(gateway, "/health", NONE, "POST")) == (404, "not_served")
        async with client(gateway) as one:  # a refusal does not cost the connection
            one.post("/nowhere", b"x" * 1000)
            assert (await one.reply()).status == 404
            one.post(f"{ONE}/tools/add", b'{"a": 1}')
            assert (await one.reply()).json["data"] == 3


def _failure(reply: Reply) -> tuple[int, str]:
    assert reply.json["success"] is False
    assert reply.json["error"]
    return reply.status, reply.json["code"]


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("localhost:8081", NONE, 200),
        ("127.0.0.1", NONE, 200),
        ("aenv.example.com", NONE, 200),
        ("evil.example.com", NONE, 403),
        ("", NONE, 403),
        ("localhost", "Origin: http://evil.example.com\r\n", 403),
        ("localhost", "Origin: null\r\n", 403),
        ("localhost", "Origin: http://localhost:3000\r\n", 200),
        ("localhost", "Origin: http://aenv.example.com\r\n", 200),
        ("localhost", "Origin: http://8000-x-y.one.localhost:8081\r\n", 403),
        ("localhost", "Sec-Fetch-Site: cross-site\r\n", 403),
    ],
)
async def test_only_our_names_and_pages_are_served(directory: Known, host: str, headers: str, status: int) -> None:
    async with serving(directory, allowed_hosts=["aenv.example.com"]) as gateway:
        for path in ("/health", f"{ONE}/info"):
            assert (await asked(gateway, path, OWNER + headers, host=host)).status == status


async def test_why_an_instance_is_not_there_is_told_to_its_owner_alone(directory: Known) -> None:
    directory.fails("one", Conflict("instance one is still being created"))
    async with serving(directory) as gateway:
        for token in (OWNER_TOKEN, AGENT_TOKEN, "anna", "admin"):
            assert _failure(await asked(gateway, f"{ONE}/info", bearer(token))) == (409, "conflict")
        assert (await asked(gateway, f"{ONE}/info", bearer("bert"))).status == 404
        assert (await asked(gateway, f"{ONE}/info", bearer("nobody"))).status == 401
