"""Who may talk to a server: Host and Origin against DNS rebinding, and what a sandbox's token opens."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from aenv.errors import Forbidden, Unauthorized
from aenv.runtime.answers import Request
from aenv.runtime.tokens import Access, Gate


def is_loopback(host: str) -> bool:
    """Whether an address or name can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


class Headed(Protocol):
    """A request, as far as its headers go."""

    @property
    def headers(self) -> Mapping[bytes, bytes]: ...


class Hosts:
    """The names under which a server is served, and whose pages may call it."""

    def __init__(self, *, loopback: bool, allowed_hosts: Iterable[str] = ()) -> None:
        self._loopback = loopback
        self._allowed = {host.lower() for host in allowed_hosts}
        self._seen: set[tuple[bytes | None, bytes | None]] = set()
        """Pairs of Host and Origin that were let in; a client sends the same ones every time."""

    def check_host(self, request: Headed) -> None:
        """Refuse a name that an attacker's page may have pointed at this address."""
        pair = (request.headers.get(b"host"), request.headers.get(b"origin"))
        if pair in self._seen and b"sec-fetch-site" not in request.headers:
            return
        host = _hostname(f"//{(pair[0] or b'').decode('latin-1')}")
        if not self._host_is_ours(host):
            raise Forbidden(f"Host {host!r} is not served here", hint="name it in AENV_ALLOWED_HOSTS if it should be")
        if pair[1] is not None:
            origin = _hostname(pair[1].decode("latin-1"))
            if not (is_loopback(origin) or origin in self._allowed or (origin == host and not self._loopback)):
                raise Forbidden(f"pages of {origin!r} may not call this server")
        elif request.headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise Forbidden("pages of other sites may not call this server")
        if len(self._seen) < 256:
            self._seen.add(pair)

    def _host_is_ours(self, host: str) -> bool:
        # An address cannot be rebound, a name can.
        return is_loopback(host) or host in self._allowed or (not self._loopback and _is_address(host))


_POWERS = ("/exec", "/files", "/ports/", "/shell")
"""What nobody gets without a token from beyond this machine, whatever else is open there."""


_OF_AGENTS = ("/mcp", "/tools", "/calls/", "/health")
"""What one of several agents may ask."""


class Guard(Hosts):
    """Lets a request into a sandbox, or raises what it is refused with."""

    def __init__(self, gate: Gate, *, loopback: bool, allowed_hosts: Iterable[str] = ()) -> None:
        super().__init__(loopback=loopback, allowed_hosts=allowed_hosts)
        self._gate = gate

    def access(self, request: Request) -> Access:
        """What the request's token opens."""
        return self._gate.access(_token(request))

    def _agent(self, request: Request, found: Access) -> str | None:
        """Who asks: one of several agents, which an owner may act as, or an agent of no name, or the owner."""
        if agent := self._gate.agent(_token(request)):
            if not request.path.startswith(_OF_AGENTS):
                raise Forbidden(f"one of several agents has no use of {request.path}")
            return agent
        acting = request.header(b"aenv-agent")
        if found is Access.OWNER:
            return acting
        if acting is not None:
            raise Forbidden("an agent cannot act as another", hint="use the token of that agent")
        return ""

    def require(self, request: Request, needed: Access) -> None:
        found = self.access(request)
        if found >= needed:
            request.agent = self._agent(request, found)
            if request.path.startswith(_POWERS) and self._gate.open and not self._loopback:
                raise Forbidden(f"{request.path} is not open to everybody", hint="start it with a token")
            return
        if found is Access.NONE:
            raise Unauthorized(f"{request.path} needs a token", hint="send it as 'Authorization: Bearer ...'")
        raise Forbidden(f"an agent's token does not open {request.path}", hint="use the owner's token")


def _token(request: Request) -> str | None:
    header = request.headers.get(b"authorization", b"")
    token = header[7:].strip().decode("latin-1") if header[:7].lower() == b"bearer " else None
    if token is None and request.path == "/mcp" and b"token=" in request.query:
        token = parse_qs(request.query.decode("latin-1")).get("token", [None])[0]
    return token


def _hostname(url: str) -> str:
    try:
        found = urlsplit(url)
        return "" if "@" in found.netloc else (found.hostname or "").lower()
    except ValueError:
        return ""
