"""What an allow-list admits: hosts and IP literals in one spelling, and which addresses are public.

Nothing here touches the network. Both sides are read by the same code: what the list says and what a client asks for.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import NamedTuple

from aenv.errors import Invalid

IP = IPv4Address | IPv6Address

LOOPBACK: tuple[IP, ...] = (IPv4Address("127.0.0.1"), IPv6Address("::1"))
"""What ``localhost`` is, whatever a resolver would say."""

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,254}))(?::([0-9]{1,5}))?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_AMBIGUOUS = frozenset("\u00df\u03c2\u200c\u200d")
"""Characters that the two versions of IDNA turn into different names."""

_NOT_PUBLIC_4 = tuple(
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_UNICAST_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(IPv6Network(block) for block in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
"""Among them the tunnels 6to4 and Teredo, which carry an IPv4 address inside."""
_NAT64 = IPv6Network("64:ff9b::/96")


class Address(NamedTuple):
    """A host and a port, in the one spelling that is compared."""

    host: str
    """A name in lower case without its last dot, or the usual form of ``ip``."""
    port: int
    ip: IP | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str, port: int | None = None) -> Address:
    """Read ``host:port``; ``port`` stands in where none is written. ``ValueError`` when it is anything else.

    An IP literal is recognised in every spelling that a C library would take for one.
    """
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise ValueError("not host:port")
    literal, name, digits = found.groups()
    if digits is not None:
        port = int(digits)
    if port is None or not 0 < port < 65536:
        raise ValueError("no port between 1 and 65535")
    if literal is not None:
        ip = unmapped(IPv6Address(literal))
        return Address(str(ip), port, ip)
    name = name.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            numeric = IPv4Address(socket.inet_aton(name))
        except OSError as exc:
            raise ValueError("neither a name nor an IP address") from exc
        return Address(str(numeric), port, numeric)
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("not a host name")
    return Address(name, port)


def unmapped(ip: IP) -> IP:
    """An IPv4 address that is written as IPv6 (``::ffff:127.0.0.1``) as what it is."""
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip


def is_public(ip: IP) -> bool:
    """Whether an address is global unicast: not loopback, link-local, private, multicast or reserved."""
    ip = unmapped(ip)
    if isinstance(ip, IPv6Address) and ip in _NAT64:
        ip = IPv4Address(int(ip) & 0xFFFFFFFF)
    if isinstance(ip, IPv4Address):
        return not any(ip in block for block in _NOT_PUBLIC_4)
    return ip in _UNICAST_6 and not any(ip in block for block in _NOT_PUBLIC_6)


class Rules:
    """An allow-list: ``host:port``, ``*.suffix:port``, ``1.2.3.4:port`` and ``[::1]:port``."""

    def __init__(self, allow: Iterable[str]) -> None:
        self._exact: set[tuple[str, int]] = set()
        self._suffixes: set[tuple[str, int]] = set()
        for entry in allow:
            wildcard = entry.startswith("*.")
            try:
                address = parse(_ascii(entry.removeprefix("*.") if wildcard else entry))
                if wildcard and address.ip is not None:
                    raise ValueError("an IP address has no names below it")
            except ValueError as exc:
                raise Invalid(
                    f"{entry!r} cannot be allowed: {exc}",
                    hint='network.allow takes "host:port", "*.example.org:443", "10.0.0.5:5432" or "[::1]:80"',
                ) from exc
            (self._suffixes if wildcard else self._exact).add((address.host, address.port))

    def admits(self, address: Address) -> bool:
        """Whether that host and port may be asked for."""
        host, port, ip = address
        if (host, port) in self._exact:
            return True
        while ip is None and "." in host:
            host = host.partition(".")[2]
            if (host, port) in self._suffixes:
                return True
        return False

    def reaches(self, ip: IP, port: int) -> bool:
        """Whether a name that is admitted may lead there: a public address, or one that the list names itself."""
        return is_public(ip) or (str(unmapped(ip)), port) in self._exact


def _ascii(entry: str) -> str:
    """The entry with its name in the form that DNS knows."""
    if entry.isascii():
        return entry
    host, _, port = entry.rpartition(":")
    if _AMBIGUOUS & set(host):
        raise ValueError("write the name in its xn-- form")
    try:
        return f"{host.encode('idna').decode()}:{port}"
    except UnicodeError as exc:
        raise ValueError("not a host name") from exc
