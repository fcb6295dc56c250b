"""Names of exposed ports: each an origin of its own, signed, and good until a time.

    8000-tq1x9c-<signature>.<instance>.localhost
    port expiry               id        domain

A name is all it takes to get in, so browsers must not tell it to other sites: ``NO_REFERRER`` goes with answers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from aenv.api.gateway.failures import Expired
from aenv.errors import Forbidden, Invalid

NO_REFERRER = b"Referrer-Policy: same-origin\r\n"
_SIGNED = 20
"""Bytes of a signature."""
_PLAIN = re.compile(r"(?!x--)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""An id that is a label as it is; any other is written in base 32 after ``x--``."""
_LABEL = re.compile(r"([1-9][0-9]{0,4})-([0-9a-v]{1,12})-([a-z2-7]{32})")
_DIGITS = "0123456789abcdefghijklmnopqrstuv"


class Exposed(NamedTuple):
    """A port inside an instance."""

    id: str
    port: int


class Names:
    """Makes and reads the names of exposed ports."""

    def __init__(self, key: bytes, domain: str) -> None:
        self._key = hmac.new(key, b"aenv exposed ports", hashlib.sha256).digest()
        url = urlsplit(domain if "://" in domain else f"http://{domain}")
        if not url.hostname:
            raise Invalid(f"{domain!r} is not a domain for exposed ports", hint="use localhost or ports.example.com")
        self._scheme = url.scheme
        self._port = f":{url.port}" if url.port else ""
        self._in_front = "://" in domain
        self._suffix = f".{url.hostname}"

    def url(self, id: str, port: int, expires_at: float, our_port: int) -> str:
        """The URL of a port; ``our_port`` is where we are reached, unless another server is in front of us."""
        if not 0 < port < 65536:
            raise Invalid(f"{port} is not a port", hint="ports are from 1 to 65535")
        name = _label_of(id)
        expiry = _number(int(expires_at))
        label = f"{port}-{expiry}-{self._signature(id, port, expiry)}"
        at = self._port or ("" if self._in_front else f":{our_port}")
        return f"{self._scheme}://{label}.{name}{self._suffix}{at}/"

    def matches(self, host: bytes) -> bool:
        """Whether a Host is of an exposed port, or wants to be."""
        return _hostname(host).endswith(self._suffix)

    def read(self, host: bytes, now: float) -> Exposed:
        """What a Host names. Raises Forbidden for one that was not made here, and Expired after its time."""
        label, _, name = _hostname(host).removesuffix(self._suffix).partition(".")
        found, id = _LABEL.fullmatch(label), _id_of(name)
        if found is None or id is None or not hmac.compare_digest(found[3], self._signature(id, found[1], found[2])):
            raise Forbidden("this address is not one that was given out here")
        if int(found[2], 32) <= now:
            raise Expired("this address was good for a time, which is over; ask for a new one")
        return Exposed(id, int(found[1]))

    def _signature(self, id: str, port: int | str, expiry: str) -> str:
        made = hmac.new(self._key, f"{id}\n{port}\n{expiry}".encode(), hashlib.sha256).digest()
        return base64.b32encode(made[:_SIGNED]).decode().lower()


def _hostname(host: bytes) -> str:
    return host.decode("latin-1").lower().rpartition(":")[0] if b":" in host else host.decode("latin-1").lower()


def _number(value: int) -> str:
    digits = ""
    while value:
        value, digit = divmod(value, 32)
        digits = _DIGITS[digit] + digits
    return digits or "0"


def _label_of(id: str) -> str:
    if _PLAIN.fullmatch(id):
        return id
    written = base64.b32encode(id.encode()).decode().rstrip("=").lower()
    if len(written) > 60:
        raise Invalid(f"the id {id!r} is too long to be part of a name")
    return f"x--{written}"


def _id_of(label: str) -> str | None:
    if not label.startswith("x--"):
        return label if _PLAIN.fullmatch(label) else None
    written = label.removeprefix("x--").upper()
    try:
        return base64.b32decode(written + "=" * (-len(written) % 8)).decode()
    except ValueError:
        return None
