"""The platform's key, and the tokens that follow from it."""

from __future__ import annotations

import asyncio
import string

import pytest

from aenv.auth.keys import owner_token, platform_key
from aenv.errors import AEnvError
from aenv.store import Put, Store, open_store


async def test_the_key_is_made_once(url: str) -> None:
    async with await open_store(url) as store:
        key = await platform_key(store)
        assert len(key) == 32
        assert await platform_key(store) == key
    async with await open_store(url) as store:
        assert await platform_key(store) == key


async def test_servers_that_start_at_once_agree(url: str, store: Store) -> None:
    if url.startswith("redis"):
        async with await open_store(url) as other:
            keys = await asyncio.gather(*(platform_key(each) for each in (store, other) * 4))
    else:
        keys = await asyncio.gather(*(platform_key(store) for _ in range(8)))
    assert set(keys) == {await platform_key(store)}


@pytest.mark.parametrize("value", [b'""', b'"YWJj"', b"1", b"{", b'"***"'])
async def test_a_damaged_key_is_not_used(sqlite: Store, value: bytes) -> None:
    await sqlite.change(Put("platform", "key", value))
    with pytest.raises(AEnvError, match="damaged") as caught:
        await platform_key(sqlite)
    assert caught.value.hint is not None


def test_owner_tokens_follow_from_the_key() -> None:
    token = owner_token(b"k" * 32, "a-1")
    assert owner_token(b"k" * 32, "a-1") == token
    assert len({token, owner_token(b"k" * 32, "a-2"), owner_token(b"l" * 32, "a-1")}) == 3
    assert len(token) == 43
    assert set(token) <= set(string.ascii_letters + string.digits + "-_")
