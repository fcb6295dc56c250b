"""The clients of hub and API service, against control planes that answer well, badly and not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from aenv import errors
from aenv.auth.tokens import local_token
from aenv.client.api import ApiClient
from aenv.client.hub import HubClient
from aenv.control import Service, hub_url, key_for, platform_url
from aenv.errors import (
    AEnvError,
    Conflict,
    Invalid,
    InvalidConfig,
    NetworkError,
    NotFound,
    RateLimited,
    TooLarge,
    Unauthorized,
)
from aenv.models import EnvRef
from aenv.wire import Env, EnvRequest, EnvStatus, Exec, Expose, InstanceRequest, PolicyChange
from tests.client.planes import ENV, Asked, Cut, failed, ok, plane, write
from tests.support import until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AENV_SYSTEM_URL", "AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    return tmp_path


# Addresses and keys


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("host", "http://host:8080"),
        ("host:99", "http://host:99"),
        ("http://host", "http://host:8080"),
        ("http://host/", "http://host:8080"),
        ("http://host/base/", "http://host:8080/base"),
        ("http://host:81/base", "http://host:81/base"),
        ("https://host", "https://host:8080"),
        ("https://host:443", "https://host:443"),
        ("[::1]", "http://[::1]:8080"),
        ("http://[::1]:9/x", "http://[::1]:9/x"),
        ("unix:/run/platform.sock", "unix:/run/platform.sock"),
    ],
)
def test_addresses(given: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform_url(given) == url
    monkeypatch.setenv("AENV_SYSTEM_URL", given)
    assert platform_url(None) == hub_url(None) == url
    assert platform_url("other:1") == "http://other:1"
    monkeypatch.setenv("AENV_HUB_URL", "the-hub")
    assert hub_url(None) == "http://the-hub:8080"
    assert hub_url("mine") == "http://mine:8080"


@pytest.mark.parametrize("given", ["http://", "ftp://host", "http://host:port", "a b:x", "http://[::1"])
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(Invalid, match="not an address") as caught:
        platform_url(given)
    assert given in caught.value.message


def test_an_address_has_no_password_in_it() -> None:
    with pytest.raises(Invalid, match="a user or a password") as caught:
        platform_url("http://ada:lovelace@host:80")
    assert "lovelace" not in str(caught.value)


def test_nothing_named_is_this_machine(home: Path) -> None:
    assert platform_url(None) == hub_url(None) == "http://127.0.0.1:8080"
    (home / "config.json").write_text(json.dumps({"system_url": "there", "hub_url": "hub.there:1"}))
    assert platform_url(None) == "http://there:8080"
    assert hub_url(None) == "http://hub.there:1"


def test_the_key_is_the_first_that_is_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, away = "http://127.0.0.1:8080", "http://10.0.0.1:8080"
    assert key_for(here) is None
    left = local_token(home)
    for url in (here, "http://localhost:1", "http://[::1]:1", "http://127.8.8.8", "unix:/x"):
        assert key_for(url) == left
    for url in (away, "http://localhost.example:1", "http://127.0.0.1.example:1"):
        assert key_for(url) is None
    (home / "config.json").write_text(json.dumps({"api_key": "in-the-file"}))
    assert key_for(here) == key_for(away) == "in-the-file"
    monkeypatch.setenv("AENV_API_KEY", "in-the-variable")
    assert key_for(here) == "in-the-variable"
    assert key_for(here, "given") == "given"


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"another's"])
def test_a_token_file_that_holds_no_token_is_explained(home: Path, content: bytes) -> None:
    (home / "token").write_bytes(content)
    (home / "token").chmod(0o600)
    with pytest.raises(InvalidConfig, match="token holds no token"):
        key_for("http://localhost:8080")
    assert key_for("http://10.0.0.1:8080") is None


def test_a_token_file_that_others_could_read_is_explained(home: Path) -> None:
    local_token(home)
    (home / "token").chmod(0o644)
    with pytest.raises(InvalidConfig, match="open to others") as caught:
        key_for("http://localhost:8080")
    assert "chmod 600" in str(caught.value.hint)
    assert key_for("http://localhost:8080", "given") == "given"


def test_a_key_that_is_no_header_is_refused() -> None:
    with pytest.raises(Invalid, match="the API key has characters"):
        Service("http://h:1", "key\r\nX-Other: 1")


# Asking


async def test_what_is_sent_and_what_comes_back() -> None:
    async def answer(asked: Asked) -> tuple[int, Any]:
        return ok([{**ENV, "unknown": 1}], total=7, limit=1, offset=0)

    async with plane(answer) as made:
        hub = HubClient(f"{made.url}/base", "secret")
        found, total = await hub.list("l b/&", ["a", "b"], limit=1)
        assert (found[0].id, total) == ("lab@1.2.3", 7)
        asked = made.asked[0]
        assert asked.line == "GET /base/env/"
        assert asked.query == {"name": ["l b/&"], "tags": ["a", "b"], "limit": ["1"], "offset": ["0"]}
        assert asked.headers["authorization"] == "Bearer secret"
        assert "authorization" not in (await _asked_without_a_key(made.url, made.asked)).headers


async def _asked_without_a_key(url: str, asked: list[Asked]) -> Asked:
    await HubClient(url).list()
    return asked[-1]


ON_THE_WIRE = [found for found in vars(errors).values() if isinstance(found, type) and "code" in vars(found)]


@pytest.mark.parametrize("kind", dict.fromkeys(ON_THE_WIRE), ids=lambda kind: kind.__name__)
async def test_a_failure_is_what_it_was_there(kind: type[AEnvError]) -> None:
    async def answer(asked: Asked) -> tuple[int, Any]:
        return failed(kind.status, kind.code, "what it is", "what to do")

    async with plane(answer) as made:
        with pytest.raises(kind, match="^what it is$") as caught:
            await ApiClient(made.url, retries=0).get("x")
        assert type(caught.value) is kind
        assert caught.value.hint == "what to do"


@pytest.mark.parametrize(
    ("status", "told", "kind"),
    [
        (401, {"success": False, "code": 401, "message": "who?"}, Unauthorized),
        (404, b"<html>nothing here</html>", NotFound),
        (502, b"", NetworkError),
        (500, {"detail": "a stranger's error"}, AEnvError),
        (409, ["odd"], Conflict),
        (404, {"success": False, "error": "a gateway's message", "code": "not_found"}, NotFound),
        (302, b"", AEnvError),
        (200, b"<html>a page</html>", NetworkError),
        (200, {"success": True}, NetworkError),
        (200, {"success": True, "data": {"id": 5}}, NetworkError),
        (200, b"\xff", NetworkError),
    ],
)
async def test_answers_of_somebody_else(status: int, told: Any, kind: type[AEnvError]) -> None:
    async def answer(asked: Asked) -> tuple[int, Any]:
        return status, told

    async with plane(answer) as made:
        with pytest.raises(kind) as caught:
            await ApiClient(made.url, retries=0).get("x")
        assert type(caught.value) is kind
        assert made.url in caught.value.message or caught.value.message == "who?"


async def test_only_what_is_safe_is_asked_again() -> None:
    async def answer(asked: Asked) -> tuple[int, Any]:
        raise Cut

    async with plane(answer) as made:
        api, hub = ApiClient(made.url, retries=2), HubClient(made.url, retries=2)
        with pytest.raises(NetworkError):
            await api.get("x")
        with pytest.raises(NetworkError):
            await api.create(InstanceRequest(env_name="lab"))
        with pytest.raises(NetworkError):
            await api.reset("x")
        with pytest.raises(NetworkError):
            await hub.create(EnvRequest(name="lab", version="1.0.0"))
    assert made.count("GET /env-instance/x") == 3
    assert made.count("POST /env-instance") == 3
    assert len({asked.headers["idempotency-key"] for asked in made.asked if asked.line == "POST /env-instance"}) == 1
    assert made.count("POST /env-instance/x/reset") == made.count("POST /env/") == 1


async def test_a_busy_platform_is_asked_again_a_bounded_number_of_times() -> None:
    busy = 2

    async def answer(asked: Asked) -> tuple[int, Any]:
        nonlocal busy
        busy -= 1
        if busy < 0:
            return ok({"exists": True})
        write(asked.writer, 429, failed(429, "rate_limited", "too many")[1], "Retry-After: 0\r\n")
        await asked.writer.drain()
        raise Cut

    async with plane(answer) as made:
        assert await HubClient(made.url, retries=2).exists("lab", "1.0.0")
        busy = 100
        with pytest.raises(RateLimited, match="too many"):
            await HubClient(made.url, retries=2).exists("lab", "1.0.0")
    assert busy == 97


async def test_a_platform_that_is_not_there_says_how_to_get_one() -> None:
    async with plane(lambda asked: asyncio.sleep(0, ok(None))) as made:
        pass
    with pytest.raises(NetworkError, match="cannot be reached") as caught:
        await ApiClient(made.url, retries=1).get("x")
    assert "aenv serve" in (caught.value.hint or "")
    with pytest.raises(NetworkError, match="cannot be reached"):
        _ = [line async for line in ApiClient(made.url).logs("x")]


async def test_a_platform_that_never_answers() -> None:
    async def answer(asked: Asked) -> tuple[int, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async with plane(answer) as made:
        with pytest.raises(NetworkError, match="did not answer GET /env-instance/x within 0.2 s"):
            await ApiClient(made.url, timeout=0.2).get("x")
        with pytest.raises(NetworkError, match="silent for 0.2 s"):
            _ = [line async for line in ApiClient(made.url, timeout=0.2).logs("x")]


@pytest.mark.parametrize("name", ["", ".", ".."])
async def test_names_that_would_lead_elsewhere(name: str) -> None:
    with pytest.raises(Invalid, match="is not a name"):
        await ApiClient("http://127.0.0.1:1").get(name)


# The hub


async def test_every_question_to_a_hub() -> None:
    async def answer(asked: Asked) -> tuple[int, Any]:
        last = asked.path.rpartition("/")[2]
        told = {
            "versions": [ENV],
            "policy": {"owner": "me", "public": False},
            "exists": {"exists": False},
            "status": {"name": "lab", "version": "1.2.3", "status": 6, "title": "Ready"},
        }
        return ok(None if asked.method == "DELETE" else told.get(last, ENV), total=2)

    async with plane(answer) as made:
        hub = HubClient(made.url)
        request = EnvRequest(name="lab", version="1.2.3", code_url="here", deploy_config={"ttl": "1h"})
        assert (await hub.create(request)).id == "lab@1.2.3"
        assert made.asked[-1].json["codeUrl"] == "here"
        assert made.asked[-1].json["deployConfig"] == {"ttl": "1h"}
        await hub.update(request)
        await hub.upload("lab", "1.2.3", b"\0package")
        assert made.asked[-1].body == b"\0package"
        assert made.asked[-1].headers["content-type"] == "application/octet-stream"
        assert (await hub.get(EnvRef("lab"))).name == "lab"
        assert (await hub.get(EnvRef("lab", "^1.0"))).version == "1.2.3"
        assert len(await hub.versions("lab")) == 2
        await hub.release("lab", "1.2.3")
        await hub.yank("lab", "1.2.3", "broken")
        assert made.asked[-1].json == {"reason": "broken"}
        assert (await hub.policy("lab")).public is False
        await hub.set_policy("lab", PolicyChange(public=True))
        assert not await hub.exists("lab", "1.2.3")
        assert await hub.status("lab", "1.2.3") == EnvStatus(name="lab", version="1.2.3", status=6, title="Ready")
        await hub.delete("lab", "1.2.3")
    assert made.lines == [
        "POST /env/",
        "PUT /env/lab/1.2.3",
        "POST /env/lab/1.2.3/package",
        "GET /env/lab/latest",
        "GET /env/lab/^1.0",
        *["GET /env/lab/versions"] * 2,
        "POST /env/lab/1.2.3/release",
        "POST /env/lab/1.2.3/yank",
        "GET /env/lab/policy",
        "PUT /env/lab/policy",
        "GET /env/lab/1.2.3/exists",
        "GET /env/lab/1.2.3/status",
        "DELETE /env/lab/1.2.3",
    ]


def pushed(data: bytes, **changes: Any) -> Env:
    about = {**ENV, "digest": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return Env(**{**about, **changes})


async def test_a_package_is_checked_against_what_the_hub_announced() -> None:
    data = bytes(range(256)) * 4096

    async def answer(asked: Asked) -> tuple[int, Any]:
        return 200, data

    async with plane(answer) as made:
        hub = HubClient(made.url)
        assert await hub.download(pushed(data)) == data
        with pytest.raises(NetworkError, match="lab@1.2.3 is not what was pushed"):
            await hub.download(pushed(data, digest="0" * 64))
        with pytest.raises(TooLarge, match="more than 1000 bytes"):
            await hub.download(pushed(data, size=1000))
        with pytest.raises(NotFound, match="no package"):
            await hub.download(pushed(data, digest=""))
        assert made.lines == ["GET /env/lab/1.2.3/package"] * 3


async def test_a_package_that_the_hub_refuses_or_cuts_off() -> None:
    async def answer(asked: Asked) -> tuple[int, Any]:
        if "1.2.3" in asked.path:
            return failed(403, "forbidden", "not yours")
        asked.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegin")
        await asked.writer.drain()
        raise Cut

    async with plane(answer) as made:
        with pytest.raises(errors.Forbidden, match="not yours"):
            await HubClient(made.url).download(pushed(b"x"))
        with pytest.raises(NetworkError, match="cut in the middle"):
            await HubClient(made.url).download(pushed(b"x" * 100, version="2.0.0"))


# The API service


async def test_every_question_to_an_api_service() -> None:
    instance = {"id": "i-1", "env": ENV, "status": "Running", "created_at": "", "updated_at": ""}
    renewed = {"expires_at": "later", "lease_expires_at": "soon"}

    async def answer(asked: Asked) -> tuple[int, Any]:
        last = asked.path.rpartition("/")[2]
        if last == "files" and asked.method == "GET":
            return (200, b"content") if asked.query["path"] == ["a b"] else ok([{"name": "x"}])
        told: dict[str, Any] = {
            "list": [instance],
            "extend": renewed,
            "renew": renewed,
            "reset": {"seed": 3},
            "exec": {"returncode": 1, "stdout": "out", "stderr": ""},
            "history": [{"name": "add"}],
            "expose": {"url": "http://p", "port": 80, "expires_at": "later"},
            "files": {"path": "a b", "size": 1},
        }
        many = asked.line == "POST /env-instance" and "count" in asked.json and asked.json["count"]
        return ok(None if asked.method == "DELETE" else [instance] if many else told.get(last, instance), total=1)

    async with plane(answer) as made:
        api = ApiClient(made.url)
        wanted = InstanceRequest(env_name="lab@^1.0", labels={"a": "b"}, lease=600.0)
        assert (await api.create(wanted, wait=2.7, key="k")).id == "i-1"
        sent = made.asked[-1]
        assert (sent.headers["idempotency-key"], sent.headers["prefer"]) == ("k", "wait=2")
        assert (sent.json["envName"], sent.json["labels"], sent.json["lease"]) == ("lab@^1.0", {"a": "b"}, 600)
        wanted.count = 1
        assert len(await api.create_many(wanted)) == 1
        assert "prefer" not in made.asked[-1].headers
        assert (await api.get("i-1", wait=20)).status == "Running"
        assert made.asked[-1].headers["prefer"] == "wait=20"
        assert (await api.list())[1] == 1
        await api.list("lab@1.2.3", "me", {"x": "1", "y": "a=b"}, status=["Running"], limit=5, offset=2)
        assert made.asked[-1].query == {
            "owner": ["me"],
            "status": ["Running"],
            "label": ["x=1", "y=a=b"],
            "limit": ["5"],
            "offset": ["2"],
        }
        assert (await api.extend("i-1", "1h")).expires_at == "later"
        assert (await api.renew("i-1")).lease_expires_at == "soon"
        assert await api.reset("i-1", 3) == {"seed": 3}
        assert (await api.exec("i-1", Exec(command="false"))).returncode == 1
        assert await api.history("i-1", 1) == [{"name": "add"}]
        assert (await api.expose("i-1", Expose(port=80))).url == "http://p"
        await api.upload("i-1", "a b", b"\0")
        assert (made.asked[-1].query, made.asked[-1].body) == ({"path": ["a b"]}, b"\0")
        assert await api.download("i-1", "a b") == b"content"
        with pytest.raises(Conflict, match="is a directory"):
            await api.download("i-1", "folder")
        await api.delete("i-1")
    assert made.lines[3:5] == ["GET /env-instance/*/list", "GET /env-instance/lab@1.2.3/list"]
    assert made.lines[-1] == "DELETE /env-instance/i-1"


async def test_logs_come_by_line_however_they_are_cut() -> None:
    text = "eins\nzwei ü\n\nlast".encode()

    async def answer(asked: Asked) -> tuple[int, Any]:
        asked.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in text:
            asked.writer.write(b"1\r\n%c\r\n" % byte)
            await asked.writer.drain()
        asked.writer.write(b"0\r\n\r\n")
        raise Cut

    async with plane(answer) as made:
        lines = [line async for line in ApiClient(made.url).logs("i-1", tail=4)]
        assert lines == ["eins", "zwei ü", "", "last"]
        assert made.asked[0].query == {"tail": ["4"]}


async def test_logs_of_which_nothing_has_come_are_asked_for_again() -> None:
    """Of a server that is about to stop, or gone; what has begun is not begun again."""

    async def answer(asked: Asked) -> tuple[int, Any]:
        if len(made.asked) == 1:
            raise Cut
        if len(made.asked) == 2:
            return failed(503, "network")
        if len(made.asked) == 3:
            return 200, b"one\n"
        asked.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")
        raise Cut

    async with plane(answer) as made:
        api = ApiClient(made.url)
        assert [line async for line in api.logs("i-1")] == ["one"]
        assert len(made.asked) == 3
        with pytest.raises(NetworkError):
            assert [line async for line in api.logs("i-1")] == []
        assert len(made.asked) == 4


async def test_leaving_the_logs_ends_the_request() -> None:
    left = asyncio.Event()

    async def answer(asked: Asked) -> tuple[int, Any]:
        asked.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")
        await asked.reader.read(1)
        left.set()
        raise Cut

    async with plane(answer) as made:
        lines = ApiClient(made.url).logs("i-1", follow=True)
        assert await anext(lines) == "one"
        assert made.asked[0].query == {"follow": ["true"]}
        await lines.aclose()
        await until(left.is_set, "the end of the request")


async def test_a_line_without_an_end_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from aenv.client import api

    monkeypatch.setattr(api, "LONGEST_LINE", 10)

    async def answer(asked: Asked) -> tuple[int, Any]:
        return 200, b"x" * 1_000_000

    async with plane(answer) as made:
        found = [line async for line in ApiClient(made.url).logs("i-1")]
    assert "".join(found) == "x" * 1_000_000
    assert len(found) > 1
