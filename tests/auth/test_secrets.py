"""Secrets, on each kind of store, and how they are kept out of texts."""

from __future__ import annotations

import json

import pytest

from aenv.auth import secrets as module
from aenv.auth.callers import Caller
from aenv.auth.secrets import LARGEST, Secrets, hide
from aenv.errors import Conflict, Forbidden, Invalid, NotFound, TooLarge
from aenv.store import Store


@pytest.fixture
def secrets(store: Store) -> Secrets:
    return Secrets(store)


async def test_a_secret_is_set_given_and_deleted(secrets: Secrets, alice: Caller) -> None:
    first = await secrets.set(alice, "API_KEY", "hunter22")
    second = await secrets.set(alice, "API_KEY", "hunter33")
    assert (second.name, second.owner, second.created_at) == ("API_KEY", "alice", first.created_at)
    await secrets.set(alice, "_b9", "long\nvalue ü 🎈")
    assert await secrets.values("alice", ["_b9", "API_KEY", "_b9"]) == {
        "_b9": "long\nvalue ü 🎈",
        "API_KEY": "hunter33",
    }
    assert await secrets.values("alice", []) == {}
    found, total = await secrets.list(alice)
    assert ([secret.name for secret in found], total) == (["API_KEY", "_b9"], 2)
    assert "hunter" not in f"{found}"
    await secrets.delete(alice, "API_KEY")
    with pytest.raises(NotFound, match="alice has no secret 'API_KEY'"):
        await secrets.delete(alice, "API_KEY")
    with pytest.raises(NotFound) as near:
        await secrets.delete(alice, "_b8")
    assert near.value.hint == "did you mean '_b9'?"


async def test_what_is_not_set_is_named(secrets: Secrets, alice: Caller) -> None:
    await secrets.set(alice, "ONE", "11111111")
    with pytest.raises(Invalid, match="alice has not set the secrets TWO, THREE") as caught:
        await secrets.values("alice", ["TWO", "ONE", "THREE"])
    assert caught.value.hint == "run 'aenv secret set TWO'"


async def test_a_secret_is_its_owners(secrets: Secrets, alice: Caller, admin: Caller) -> None:
    await secrets.set(alice, "KEY", "alice's")
    await secrets.set(admin, "KEY", "bob's", owner="bob")
    assert await secrets.values("alice", ["KEY"]) == {"KEY": "alice's"}
    assert await secrets.values("bob", ["KEY"]) == {"KEY": "bob's"}
    with pytest.raises(Invalid):
        await secrets.values("root", ["KEY"])
    for denied in (
        secrets.set(alice, "KEY", "mine", owner="bob"),
        secrets.delete(alice, "KEY", owner="bob"),
        secrets.list(alice, owner="bob"),
    ):
        with pytest.raises(Forbidden, match="secrets of 'bob'"):
            await denied
    assert [(secret.owner, secret.name) for secret in (await secrets.list(admin))[0]] == [
        ("alice", "KEY"),
        ("bob", "KEY"),
    ]
    assert (await secrets.list(admin, owner="bob"))[1] == (await secrets.list(alice))[1] == 1
    assert (await secrets.list(admin, limit=1, offset=1))[0][0].owner == "bob"
    await secrets.delete(admin, "KEY", owner="bob")
    with pytest.raises(Invalid, match="owner's name"):
        await secrets.set(admin, "KEY", "value", owner="a/b")


@pytest.mark.parametrize("name", ["", "1A", "a-b", "a b", "a/b", "ä", "A=B", "x" * 129, "A\n", "\0", "\ud800"])
async def test_what_is_no_name(sqlite: Store, alice: Caller, name: str) -> None:
    secrets = Secrets(sqlite)
    for ask in (secrets.set(alice, name, "value"), secrets.delete(alice, name), secrets.values("alice", [name])):
        with pytest.raises(Invalid, match="not a secret's name"):
            await ask


@pytest.mark.parametrize(
    ("value", "error", "why"),
    [
        ("x" * (LARGEST + 1), TooLarge, "65537 bytes"),
        ("ü" * (LARGEST // 2 + 1), TooLarge, "65538 bytes"),
        ("hunter\0hunter", Invalid, "NUL"),
        ("hunter\ud800", Invalid, "half a character"),
        ("abc", Invalid, "too short"),
        ("", Invalid, "too short"),
        (" \n abc \n", Invalid, "too short"),
        ("hunter2\n", Invalid, "white space"),
        (" hunter2", Invalid, "white space"),
    ],
    ids=lambda value: f"{value}"[:20],
)
async def test_what_is_no_value(sqlite: Store, alice: Caller, value: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=f"the value of KEY .*{why}") as caught:
        await Secrets(sqlite).set(alice, "KEY", value)
    assert "hunter" not in str(caught.value)


async def test_the_largest_value(secrets: Secrets, alice: Caller) -> None:
    value = "\n" * (LARGEST - 8) + "a\n" * 4
    await secrets.set(alice, "KEY", value)
    assert await secrets.values("alice", ["KEY"]) == {"KEY": value}


async def test_an_owner_has_not_too_many(sqlite: Store, alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    secrets = Secrets(sqlite)
    await secrets.set(alice, "A", "value")
    await secrets.set(alice, "B", "value")
    with pytest.raises(Conflict, match="alice has 2 secrets"):
        await secrets.set(alice, "C", "value")
    await secrets.set(alice, "B", "another")


KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("text", "values", "shown"),
    [
        ("", ["hunter2"], ""),
        ("nothing", [], "nothing"),
        ("a hunter2, hunter2!", ["hunter2"], "a ***, ***!"),
        ("hunter2hunter2", ["hunter2"], "***"),
        ("hunter hunter22 hunter2", ["hunter", "hunter2", "hunter22"], "*** *** ***"),
        ("abcdef", ["cdef", "abcdef", "abcd"], "***"),
        (json.dumps({"key": 'say "hi"\nü\\'}), ['say "hi"\nü\\'], '{"key": "***"}'),
        (json.dumps({"key": 'say "hi"\nü\\'}, ensure_ascii=False), ['say "hi"\nü\\'], '{"key": "***"}'),
        ("a.c+ abcc", ["a.c+"], "*** abcc"),
        ("abc", ["abc", ""], "abc"),
        (KEY, [KEY], "***"),
        ("it is MIIEvQIBADANBgkqhkiG9w0", [KEY], "it is ***"),
    ],
)
def test_values_are_hidden(text: str, values: list[str], shown: str) -> None:
    assert hide(text, values) == shown
