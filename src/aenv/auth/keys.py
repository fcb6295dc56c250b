"""The platform's own key, from which the credentials of its instances follow."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

import msgspec

from aenv.errors import AEnvError, Conflict
from aenv.store.base import Put, Store

_KIND, _KEY = "platform", "key"
_SIZE = 32


async def platform_key(store: Store) -> bytes:
    """32 random bytes, made once: every server on this store has the same, also when several start at once."""
    while True:
        if (record := await store.get(_KIND, _KEY)) is not None:
            return _read(record.value)
        value = msgspec.json.encode(secrets.token_bytes(_SIZE))
        try:
            await store.change(Put(_KIND, _KEY, value, expect=0))
        except Conflict:  # another server was faster
            continue
        return _read(value)


def owner_token(key: bytes, instance_id: str) -> str:
    """The token that opens an instance to its owner. Whoever has the key can tell it; nobody else can."""
    made = hmac.new(key, b"aenv owner " + instance_id.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def _read(value: bytes) -> bytes:
    try:
        key = msgspec.json.decode(value, type=bytes)
    except msgspec.MsgspecError:
        key = b""
    if len(key) != _SIZE:
        raise AEnvError(
            "the platform's key in the store is damaged",
            hint=f"put the store's copy back; without the record {_KIND} {_KEY} a new key is made, and living instances"
            " are lost to their owners",
        )
    return key
