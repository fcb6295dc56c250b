"""Tokens, on each kind of store."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from aenv.auth import tokens as module
from aenv.auth.callers import Caller, Scope
from aenv.auth.tokens import DEEPEST, GIVEN, LONGEST_TTL, Tokens, check_given, digest, new_token
from aenv.errors import Conflict, Forbidden, Invalid, InvalidConfig, NetworkError, NotFound, Unauthorized
from aenv.store import Delete, Store, open_store
from aenv.store import redis as redis_store
from aenv.wire import Token, TokenRequest
from tests.store.servers import redis_server


async def made(tokens: Tokens, caller: Caller, **request) -> tuple[Token, Caller]:
    """A new token, and who shows it."""
    token = await tokens.create(caller, TokenRequest(**request))
    return token, await tokens.authenticate(token.token)


async def refused(tokens: Tokens, token: str) -> bool:
    try:
        await tokens.authenticate(token)
    except Unauthorized:
        return True
    return False


async def until_refused(tokens: Tokens, token: str) -> None:
    async with asyncio.timeout(30):
        while not await refused(tokens, token):
            await asyncio.sleep(0.01)


async def test_a_token_is_its_owners(store: Store, tokens: Tokens, alice: Caller) -> None:
    token, caller = await made(tokens, alice, name="laptop", scopes=["run"], ttl="1h")
    assert caller == Caller("alice", frozenset({Scope.RUN}), token.id)
    assert (token.name, token.owner, token.scopes, token.made_by) == ("laptop", "alice", ["run"], "")
    assert token.created_at < token.expires_at
    found, total = await tokens.list(alice)
    assert total == 1
    assert found == [Token(**{**{name: getattr(token, name) for name in token.__struct_fields__}, "token": ""})]
    assert await Tokens(store).authenticate(token.token) == caller


async def test_a_token_is_kept_as_its_digest_only(store: Store, tokens: Tokens, alice: Caller) -> None:
    token, _ = await made(tokens, alice)
    assert token.token.startswith("aenv_")
    [record] = [record async for record in store.scan("token")]
    assert record.key == digest(token.token)
    assert token.token.removeprefix("aenv_") not in f"{record}"
    assert token.id not in token.token


@pytest.mark.parametrize(
    "token",
    [None, "", "x", "aenv_", "aenv_" + "x" * 44, "aenv_" + "ä" * 43, "x" * 100_000],
    ids=lambda value: f"{value}"[:20],
)
async def test_what_is_no_token_is_refused(sqlite: Store, token: str | None) -> None:
    tokens = Tokens(sqlite)
    await sqlite.close()  # it is not even asked
    with pytest.raises(Unauthorized) as caught:
        await tokens.authenticate(token)
    assert caught.value.hint is not None
    assert "AENV_API_KEY" in caught.value.hint


async def test_an_unknown_token_is_refused(tokens: Tokens) -> None:
    token = new_token()
    for _ in range(2):
        with pytest.raises(Unauthorized, match="not known here") as caught:
            await tokens.authenticate(token)
        assert token not in f"{caught.value.to_wire()}"


async def test_an_expired_token_is_refused(tokens: Tokens, alice: Caller) -> None:
    token = await tokens.create(alice, TokenRequest(ttl=0.01))
    await until_refused(tokens, token.token)
    with pytest.raises(Unauthorized, match=f"ended at {token.expires_at}"):
        await tokens.authenticate(token.token)


async def test_a_token_expires_while_it_is_remembered(
    sqlite: Store, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FRESH", 1e9)
    tokens = Tokens(sqlite)
    token, _ = await made(tokens, alice, ttl="1d")
    later = SimpleNamespace(time=lambda: time.time() + 86_401, monotonic=time.monotonic)
    monkeypatch.setattr(module, "time", later)
    assert await refused(tokens, token.token)


@pytest.mark.parametrize(
    "ttl",
    [0, -1, 1e300, float("inf"), LONGEST_TTL * 1.01, "", "9" * 400, "4000d", "soon", "-1s"],
    ids=lambda value: f"{value}"[:20],
)
async def test_what_is_no_time_to_live(sqlite: Store, alice: Caller, ttl: float | str) -> None:
    with pytest.raises(Invalid, match="ttl"):
        await Tokens(sqlite).create(alice, TokenRequest(ttl=ttl))


async def test_the_longest_time_to_live(sqlite: Store, alice: Caller) -> None:
    token, _ = await made(Tokens(sqlite), alice, ttl=LONGEST_TTL)
    assert token.expires_at.startswith("20")


async def test_scopes_are_those_of_the_maker_or_fewer(tokens: Tokens, alice: Caller, admin: Caller) -> None:
    assert (await made(tokens, alice))[0].scopes == ["read", "run"]
    assert (await made(tokens, alice, scopes=["run", "run"]))[0].scopes == ["run"]
    assert (await made(tokens, admin))[0].scopes == ["read", "push", "run"]
    assert (await made(tokens, admin, scopes=["admin"]))[1].has(Scope.PUSH)
    for scopes in (["push"], ["admin"], ["read", "admin"]):
        with pytest.raises(Forbidden, match="no scope") as caught:
            await tokens.create(alice, TokenRequest(scopes=scopes))
        assert caught.value.hint == "ask for read, run"
    with pytest.raises(Invalid, match="no scope 'pusj'") as wrong:
        await tokens.create(alice, TokenRequest(scopes=["pusj"]))
    assert wrong.value.hint == "did you mean 'push'?"
    with pytest.raises(Invalid, match="opens nothing"):
        await tokens.create(alice, TokenRequest(scopes=[]))


async def test_only_an_admin_makes_tokens_for_others(tokens: Tokens, alice: Caller, admin: Caller) -> None:
    assert (await made(tokens, admin, owner="bob"))[1].owner == "bob"
    assert (await made(tokens, alice, owner="alice"))[1].owner == "alice"
    with pytest.raises(Forbidden, match="tokens of 'bob'"):
        await tokens.create(alice, TokenRequest(owner="bob"))
    for owner in ("", "a/b", "..", "ä", "x" * 64, "a\n"):
        with pytest.raises(Invalid, match="not an owner's name"):
            await tokens.create(admin, TokenRequest(owner=owner))


@pytest.mark.parametrize("name", ["x" * 129, "a\nb", "\0", "\ud800"])
async def test_what_is_no_name_for_a_token(sqlite: Store, alice: Caller, name: str) -> None:
    with pytest.raises(Invalid, match="name"):
        await Tokens(sqlite).create(alice, TokenRequest(name=name))


async def test_a_token_ends_no_later_than_its_maker(tokens: Tokens, alice: Caller) -> None:
    first, caller = await made(tokens, alice, ttl="1h")
    same, _ = await made(tokens, caller)
    less, _ = await made(tokens, caller, ttl="30m")
    assert same.expires_at == first.expires_at > less.expires_at
    assert same.made_by == less.made_by == first.id
    with pytest.raises(Forbidden, match="outlive") as caught:
        await tokens.create(caller, TokenRequest(ttl="2h"))
    assert first.expires_at in caught.value.message


async def test_lists_are_paged_and_show_ones_own(tokens: Tokens, alice: Caller, admin: Caller) -> None:
    ids = [(await tokens.create(alice, TokenRequest())).id for _ in range(5)]
    other = await tokens.create(admin, TokenRequest(owner="bob"))
    found, total = await tokens.list(alice, limit=2, offset=1)
    assert ([token.id for token in found], total) == ([ids[3], ids[2]], 5)
    assert (await tokens.list(alice, offset=10)) == ([], 5)
    found, total = await tokens.list(admin)
    assert (found[0].id, total) == (other.id, 6)
    assert (await tokens.list(admin, owner="bob"))[1] == 1
    assert (await tokens.list(alice, owner="alice"))[1] == 5
    assert not [token for token in found if token.token]
    with pytest.raises(Forbidden):
        await tokens.list(alice, owner="bob")


async def test_revoking_ends_what_was_made_with_it(store: Store, tokens: Tokens, admin: Caller) -> None:
    elsewhere = Tokens(store)  # another server
    root, by_root = await made(tokens, admin, scopes=["admin"])
    child, by_child = await made(tokens, by_root, owner="bob")
    grandchild, _ = await made(tokens, by_child, scopes=["read"])
    sibling, _ = await made(tokens, admin, owner="bob")
    for token in (root, child, grandchild, sibling):
        assert not await refused(elsewhere, token.token)
    await tokens.revoke(admin, child.id)
    assert await refused(tokens, child.token)
    assert await refused(tokens, grandchild.token)
    assert not await refused(tokens, root.token)
    await until_refused(elsewhere, child.token)
    await until_refused(elsewhere, grandchild.token)
    await tokens.revoke(by_root, root.id)  # itself
    await until_refused(elsewhere, root.token)
    assert not await refused(elsewhere, sibling.token)
    assert [token.id for token in (await tokens.list(admin))[0]] == [sibling.id]
    with pytest.raises(NotFound, match=root.id):
        await tokens.revoke(admin, root.id)


async def test_a_token_that_is_made_during_the_revocation_opens_nothing(
    store: Store, tokens: Tokens, admin: Caller
) -> None:
    _, root = await made(tokens, admin)
    several = [(await made(tokens, root))[1] for _ in range(3)]
    seen: list[str] = []

    async def make(caller: Caller) -> None:
        for _ in range(10):
            try:
                seen.append((await tokens.create(caller, TokenRequest())).token)
            except Unauthorized:
                return

    makers = [asyncio.create_task(make(caller)) for caller in (root, *several)]
    async with asyncio.timeout(30):
        while not seen:
            await asyncio.sleep(0)
    await tokens.revoke(admin, root.token_id)
    await asyncio.gather(*makers)
    fresh = Tokens(store)
    assert all([await refused(fresh, token) for token in seen])
    with pytest.raises(Unauthorized):
        await fresh.create(root, TokenRequest())
    with pytest.raises(Unauthorized):
        await fresh.create(several[0], TokenRequest())


async def test_a_revocation_that_was_cut_off(store: Store, tokens: Tokens, admin: Caller, alice: Caller) -> None:
    root, by_root = await made(tokens, alice)
    child, _ = await made(tokens, by_root)
    await store.change(Delete("token", digest(root.token)))  # as far as it came
    fresh = Tokens(store)
    assert await refused(fresh, child.token)
    with pytest.raises(NotFound):
        await fresh.revoke(Caller("bob", frozenset(Scope) - {Scope.ADMIN}), root.id)
    await fresh.revoke(alice, root.id)
    assert await tokens.list(admin) == ([], 0)

    root, by_root = await made(tokens, alice)
    await made(tokens, by_root)
    await store.change(Delete("token", digest(root.token)))
    last = await Tokens(store).create(alice, TokenRequest())  # a server that has just started tidies up
    assert [token.id for token in (await tokens.list(admin))[0]] == [last.id]


async def test_what_may_not_be_revoked(sqlite: Store, admin: Caller, alice: Caller) -> None:
    tokens = Tokens(sqlite)
    strong, _ = await made(tokens, admin, owner="alice", scopes=["read", "push", "run"])
    with pytest.raises(Forbidden, match="may do more than yours"):
        await tokens.revoke(alice, strong.id)
    with pytest.raises(NotFound):
        await tokens.revoke(Caller("bob", alice.scopes), strong.id)
    with pytest.raises(Invalid, match="token of this machine"):
        await tokens.revoke(admin, "local")
    assert not await refused(tokens, strong.token)
    for id in (strong.token, "", "x" * 1000, "ä", "*", "\0"):
        with pytest.raises(NotFound) as caught:
            await tokens.revoke(admin, id)
        assert strong.token not in f"{caught.value.to_wire()}"


async def test_a_row_of_tokens_has_an_end(sqlite: Store, alice: Caller) -> None:
    tokens, caller = Tokens(sqlite), alice
    for _ in range(DEEPEST + 1):
        token, caller = await made(tokens, caller)
    with pytest.raises(Forbidden, match="in a row of 9"):
        await tokens.create(caller, TokenRequest())
    await tokens.revoke(caller, token.id)


async def test_an_owner_has_not_too_many(tokens: Tokens, alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    brief = await tokens.create(alice, TokenRequest(ttl=0.01))
    for _ in range(2):
        await tokens.create(alice, TokenRequest())
    await until_refused(tokens, brief.token)
    last = await tokens.create(alice, TokenRequest())  # in the place of the one that expired
    with pytest.raises(Conflict, match="alice has 3 tokens"):
        await tokens.create(alice, TokenRequest())
    await tokens.revoke(alice, last.id)
    await tokens.create(alice, TokenRequest())


async def test_answers_are_remembered_but_not_too_many(
    sqlite: Store, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FRESH", 1e9)
    monkeypatch.setattr(module, "_REMEMBERED", 10)
    tokens = Tokens(sqlite)
    token, caller = await made(tokens, alice)
    tried = [new_token() for _ in range(100)]
    for wrong in tried:
        assert await refused(tokens, wrong)
    assert len(tokens._bad) == 10
    await sqlite.close()
    assert await tokens.authenticate(token.token) == caller
    assert await refused(tokens, tried[-1])
    with pytest.raises(NetworkError):
        await tokens.authenticate(tried[0])


async def test_a_store_that_is_away_is_no_wrong_token(tmp_path, alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path) as server:
        async with await open_store(server.url) as store:
            token = await Tokens(store).create(alice, TokenRequest())
            monkeypatch.setattr(redis_store, "_PATIENCE", 0.2)
            server.kill()
            with pytest.raises(NetworkError, match="does not answer"):
                await Tokens(store).authenticate(token.token)


@pytest.mark.parametrize("patience", [0.2, 3600.0])
async def test_tokens_of_the_settings_need_no_store(tmp_path, monkeypatch: pytest.MonkeyPatch, patience: float) -> None:
    reader, given = Caller("(metrics)", frozenset({Scope.READ}), GIVEN), new_token()
    with redis_server(tmp_path) as server:
        async with await open_store(server.url) as store:
            tokens = Tokens(store, given={digest(given): reader})
            monkeypatch.setattr(redis_store, "_PATIENCE", patience)
            server.kill()
            async with asyncio.timeout(30):
                assert await tokens.authenticate(given) == reader
            monkeypatch.setattr(redis_store, "_PATIENCE", 0.2)
            with pytest.raises(NetworkError, match="does not answer"):
                await tokens.authenticate(new_token())


async def test_the_first_admin(url: str, store: Store, admin: Caller) -> None:
    if url.startswith("redis"):
        async with await open_store(url) as other:
            answers = await asyncio.gather(*(Tokens(each).first() for each in (store, other, store, other)))
    else:
        answers = await asyncio.gather(*(Tokens(store).first() for _ in range(4)))
    [token] = [answer for answer in answers if answer is not None]
    tokens = Tokens(store)
    caller = await tokens.authenticate(token)
    assert (caller.owner, caller.admin) == ("admin", True)
    assert await tokens.first() is None
    brief = await tokens.create(admin, TokenRequest(scopes=["admin"], ttl=0.01))
    await tokens.revoke(caller, caller.token_id)
    await until_refused(tokens, brief.token)
    again = await tokens.first()  # nobody was left who could make one
    assert again not in (None, token)
    assert await tokens.first() is None


async def test_the_first_admin_may_bring_a_token(store: Store) -> None:
    tokens, given = Tokens(store), new_token()
    assert await asyncio.gather(*(Tokens(store).first(given) for _ in range(4))) == [None] * 4
    admin = await tokens.authenticate(given)
    assert admin.admin
    assert await tokens.first(new_token()) is None  # somebody is an admin
    await tokens.revoke(admin, admin.token_id)
    other = await tokens.first(given)  # it was revoked, and stays so
    assert other not in (None, given)
    with pytest.raises(Unauthorized):
        await Tokens(store).authenticate(given)
    with pytest.raises(InvalidConfig, match="AENV_FIRST_TOKEN is no token"):
        await tokens.first("aenv_short")


async def test_a_server_takes_tokens_of_its_settings(store: Store, alice: Caller) -> None:
    reader, given = Caller("(metrics)", frozenset({Scope.READ}), GIVEN), new_token()
    kept = await Tokens(store).create(alice, TokenRequest(scopes=["run"]))
    tokens = Tokens(store, given={digest(token): reader for token in (given, kept.token)})
    for _ in range(2):
        assert await tokens.authenticate(given) == reader
    assert (await tokens.authenticate(kept.token)).owner == "alice"  # what the store says of one counts
    assert await tokens.list(reader) == ([], 0)
    with pytest.raises(Forbidden, match="makes no other one"):
        await tokens.create(reader, TokenRequest())
    assert await refused(Tokens(store), given)
    with pytest.raises(InvalidConfig, match="AENV_HUB_KEY is no token"):
        check_given("AENV_HUB_KEY", "aenv_short")
