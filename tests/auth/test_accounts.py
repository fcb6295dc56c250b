"""Tokens, secrets and the audit log over HTTP, with the client that comes with them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from aenv import http
from aenv.auth.tokens import new_token
from aenv.client.accounts import AccountsClient
from aenv.errors import AEnvError, Forbidden, Invalid, NotFound, TooLarge, Unauthorized
from aenv.wire import Token, TokenRequest
from tests.auth.served import Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("accounts"), tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
async def admin(server: Served) -> AsyncIterator[AccountsClient]:
    yield AccountsClient(server.url, server.admin)
    await http.close()


async def user(admin: AccountsClient, owner: str, *scopes: str) -> AccountsClient:
    made = await admin.create_token(TokenRequest(owner=owner, scopes=list(scopes) or None))
    return AccountsClient(admin.url, made.token)


async def test_tokens(admin: AccountsClient) -> None:
    made = await admin.create_token(TokenRequest(name="ci", owner="tom", scopes=["push", "read"], ttl="1d"))
    tom = AccountsClient(admin.url, made.token)
    assert (made.owner, made.scopes, made.name) == ("tom", ["read", "push"], "ci")
    found, total = await tom.tokens()
    assert (found, total) == ([msgspec.structs.replace(made, token="")], 1)
    assert (await admin.tokens("tom"))[1] == 1
    assert [token.owner for token in (await admin.tokens(limit=1))[0]] == ["tom"]
    more = await tom.create_token(TokenRequest(scopes=["read"]))
    assert more.expires_at == made.expires_at
    await tom.revoke_token(made.id)
    for token in (made, more):
        with pytest.raises(Unauthorized):
            await AccountsClient(admin.url, token.token).tokens()
    with pytest.raises(NotFound):
        await admin.revoke_token(made.id)


async def test_secrets(admin: AccountsClient) -> None:
    sue = await user(admin, "sue")
    made = await sue.set_secret("API_KEY", "hunter22")
    assert (made.name, made.owner) == ("API_KEY", "sue")
    await admin.set_secret("OTHER", "hunter33", owner="sue")
    found, total = await sue.secrets()
    assert ([secret.name for secret in found], total) == (["API_KEY", "OTHER"], 2)
    assert (await admin.secrets("sue", limit=1, offset=1))[0] == found[1:]
    await sue.delete_secret("API_KEY")
    await admin.delete_secret("OTHER", owner="sue")
    assert await sue.secrets() == ([], 0)
    response = await http.request(
        "PUT",
        admin.url,
        "/secret/API_KEY",
        headers=f"Authorization: Bearer {(await admin.create_token(TokenRequest())).token}\r\n".encode(),
        body=json.dumps({"value": "hunter22"}).encode(),
    )
    assert response.status == 200
    assert b"hunter" not in response.body


async def test_what_others_may_not(admin: AccountsClient) -> None:
    eve, reader = await user(admin, "eve"), await user(admin, "eve", "read")
    [bobs] = (await (await user(admin, "bob")).tokens())[0]
    await admin.set_secret("KEY", "of bob", owner="bob")
    refusals = [
        (eve.create_token(TokenRequest(owner="bob")), Forbidden),
        (eve.create_token(TokenRequest(scopes=["admin"])), Forbidden),
        (reader.create_token(TokenRequest(scopes=["run"])), Forbidden),
        (eve.tokens("bob"), Forbidden),
        (eve.revoke_token(bobs.id), NotFound),
        (eve.set_secret("KEY", "value", owner="bob"), Forbidden),
        (reader.set_secret("KEY", "value"), Forbidden),
        (reader.delete_secret("KEY"), Forbidden),
        (eve.delete_secret("KEY", owner="bob"), Forbidden),
        (eve.delete_secret("KEY"), NotFound),
        (eve.secrets("bob"), Forbidden),
        (eve.audit(), Forbidden),
    ]
    for asking, error in refusals:
        with pytest.raises(error):
            await asking
    assert [secret.name for secret in (await admin.secrets("bob"))[0]] == ["KEY"]


async def test_without_a_token_there_is_nothing(admin: AccountsClient) -> None:
    for key in (None, "nonsense", new_token()):
        stranger = AccountsClient(admin.url, key)
        for asking in (
            stranger.create_token(TokenRequest()),
            stranger.tokens(),
            stranger.revoke_token("x"),
            stranger.set_secret("KEY", "value"),
            stranger.secrets(),
            stranger.delete_secret("KEY"),
            stranger.audit(),
        ):
            with pytest.raises(Unauthorized) as caught:
                await asking
            assert caught.value.hint


@pytest.mark.parametrize("ttl", ["soon", "9" * 100_000, -1, 1e300, "4000d"], ids=lambda value: f"{value}"[:20])
async def test_a_wrong_time_to_live(admin: AccountsClient, ttl: str | float) -> None:
    with pytest.raises(Invalid, match="ttl") as caught:
        await admin.create_token(TokenRequest(ttl=ttl))
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/token", b"", 200),
        ("POST", "/token", b"[]", 422),
        ("POST", "/token", b'{"scopes": "run"}', 422),
        ("POST", "/token", b'{"scopes": ["fly"]}', 422),
        ("POST", "/token", b'{"owner": "a/b"}', 422),
        ("POST", "/token", b'{"ttl": true}', 422),
        ("POST", "/token", b'{"name": "\\u0001"}', 422),
        ("GET", "/token?limit=100000", b"", 422),
        ("GET", "/token?offset=-1", b"", 422),
        ("GET", "/token?owner=%00", b"", 422),
        ("GET", "/token?owner=%C3%A4", b"", 422),
        ("DELETE", "/token/%F0%9F%8E%88", b"", 404),
        ("DELETE", "/token/..%2f..", b"", 422),
        ("DELETE", "/token/local", b"", 422),
        ("PUT", "/secret/KEY", b"{}", 422),
        ("PUT", "/secret/KEY", b'{"value": 1}', 422),
        ("PUT", "/secret/KEY", b'{"value": "a~c"}', 422),
        ("PUT", "/secret/1KEY", b'{"value": "a~cdef"}', 422),
        ("PUT", "/secret/KEY?owner=*", b'{"value": "a~cdef"}', 422),
        ("PUT", "/secret/KEY", b'{"value": "a~c%b"}' % (b"x" * 70_000), 413),
        ("PUT", "/secret/%C3%A4", b'{"value": "a~cdef"}', 422),
        ("DELETE", "/secret/a%20b", b"", 422),
        ("DELETE", "/secret/NONE", b"", 404),
        ("GET", "/audit?limit=0", b"", 422),
    ],
    ids=lambda value: f"{value}"[:20],
)
async def test_wrong_requests(server: Served, method: str, path: str, body: bytes, status: int) -> None:
    headers = f"Authorization: Bearer {server.admin}\r\nContent-Type: application/json\r\n".encode()
    response = await http.request(method, server.url, path, headers=headers, body=body)
    await http.close()
    assert response.status == status, response.body
    envelope = json.loads(response.body)
    assert envelope["success"] is (status == 200)
    assert b"a~c" not in response.body


async def test_the_largest_secret_fits_in_a_request(admin: AccountsClient) -> None:
    value = "\x01" * (64 * 1024 - 4) + "abcd"
    assert (await admin.set_secret("LARGEST", value)).name == "LARGEST"
    with pytest.raises(TooLarge):
        await admin.set_secret("LARGEST", value + "x")
    await admin.delete_secret("LARGEST")


async def test_the_audit_log(admin: AccountsClient) -> None:
    joe = await user(admin, "joe")
    [token] = (await joe.tokens())[0]
    await joe.set_secret("KEY", "hunter22")
    with pytest.raises(Forbidden):
        await joe.set_secret("KEY", "hunter22", owner="bob")
    found, total = await admin.audit(limit=3)
    assert total >= 3
    assert [(line.owner, line.token, line.action, line.target, line.status) for line in found[:2]] == [
        ("joe", token.id, "PUT /secret/{name}", "KEY", 403),
        ("joe", token.id, "PUT /secret/{name}", "KEY", 200),
    ]
    assert (found[2].action, found[2].target) == ("POST /token", token.id)
    assert (await admin.audit(limit=1, offset=1))[0] == found[1:2]


async def test_a_token_that_is_taken_for_an_id_is_in_no_log(admin: AccountsClient) -> None:
    made: Token = await admin.create_token(TokenRequest())
    with pytest.raises(NotFound) as caught:
        await admin.revoke_token(made.token)
    with pytest.raises(AEnvError):
        await AccountsClient(admin.url, None).revoke_token(made.token)
    lines, _ = await admin.audit()
    assert lines[1].action == "DELETE /token/{id}"
    assert made.token not in f"{lines}{caught.value}"
