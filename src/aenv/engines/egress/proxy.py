"""Serves sandboxes: accepts what comes from inside, checks where it wants to go, dials and carries both directions.

A sandbox makes a listener inside its network namespace and hands it out. A socket belongs to the namespace it was made
in, so connections accepted here come from inside, and what is dialled here leaves by the machine's own network. All
that arrives is taken for hostile: the bytes, and the listener itself, which its maker may still hold.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import NoReturn

from aenv.engines.egress.messages import Request, read_request
from aenv.engines.egress.peers import Gone, Idle, Peer, Refusal, TooLong, exchange
from aenv.engines.egress.rules import IP, LOOPBACK, Address, Rules
from aenv.errors import Invalid

MOST_HEAD = 64 * 1024
SLOW_HEAD = 30.0
"""Seconds a client may take to send the head of a request."""
CONNECT_TIMEOUT = 10.0
"""Seconds for finding an address and connecting to it."""
ADDRESS_TIMEOUT = 3.0
"""Seconds for one address of several, so that one that is dead does not hide the next."""
MOST_ADDRESSES = 4
LINGER = 2.0
"""Seconds a client has to read an answer and close."""
MOST_CONNECTIONS = 128
"""Of one sandbox at once; more wait for their turn."""
MOST_LOOKUPS = 4
"""Names of one sandbox that are looked up at once."""
MOST_DENIALS = 20
"""Denials of one sandbox that are logged in a minute."""

_HOW_TO_ALLOW = 'To allow it, add "{}" to deployConfig.network.allow in config.json.'
_PRIVATE = "To allow an address that is not public, add it as IP:port to deployConfig.network.allow, beside the name."
_NO_LINGER = struct.pack("ii", 0, 0)
_USELESS = (errno.EINVAL, errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP)
"""What accept says of a listener that will never give a connection again."""

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""From a name to its addresses; ``OSError`` when it has none."""


class Stalled(Exception):
    """A system call that must not wait did."""


def on_alarm(number: int, frame: object) -> NoReturn:
    """End the system call that the alarm interrupts."""
    raise Stalled


def log(text: str) -> None:
    """A line to standard error, unless nobody reads there."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"egress: {text}\n".encode("ascii", "replace"))


async def look_up(name: str) -> list[str]:
    """The addresses of a name, by the machine's own resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(name.encode("ascii"), None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class Proxy:
    """All sandboxes of this process. An accept that waits for ``stalled`` seconds is ended by an alarm."""

    def __init__(self, resolve: Resolve = look_up, stalled: float = 0.0) -> None:
        self.resolve = resolve
        self.stalled = stalled
        self.open = 0
        self._outlets: dict[str, Outlet] = {}
        self._waiting: set[Outlet] = set()
        """Those that have as many connections as they may have, and may be asked for more."""
        self._half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 5
        """Connections, of two descriptors each, that any sandbox may take. As many again are kept for those that have
        fewer than their share, so that some cannot take all there is. The rest is for listeners."""

    def add(self, id: str, listener: socket.socket, allow: Sequence[str]) -> None:
        """Serve a sandbox; ``Invalid`` when it cannot be."""
        if id in self._outlets:
            raise Invalid(f"{id} is served already")
        asked = (socket.SO_TYPE, socket.SO_PROTOCOL, socket.SO_ACCEPTCONN)
        kind = [listener.getsockopt(socket.SOL_SOCKET, option) for option in asked]
        if kind != [socket.SOCK_STREAM, socket.IPPROTO_TCP, 1]:
            raise Invalid("what came with it is not a TCP listener")
        outlet = self._outlets[id] = Outlet(self, id, listener, Rules(allow))
        outlet.listen()

    async def remove(self, id: str) -> None:
        """End all that belongs to a sandbox; gone already is success."""
        if outlet := self._outlets.pop(id, None):
            self._waiting.discard(outlet)
            await outlet.close()

    def admits(self, outlet: Outlet) -> bool:
        """Whether a sandbox may have one more connection now. If not, it is asked again when one has ended."""
        if self._has_room(outlet):
            return True
        outlet.pause()
        self._waiting.add(outlet)
        return False

    def freed(self) -> None:
        """A connection has ended."""
        self.open -= 1
        for outlet in [outlet for outlet in self._waiting if self._has_room(outlet)]:
            self._waiting.discard(outlet)
            outlet.listen()

    def _has_room(self, outlet: Outlet) -> bool:
        own = len(outlet.connections)
        share = max(1, self._half // max(1, len(self._outlets)))
        return own < MOST_CONNECTIONS and (self.open < self._half or own < share)


class Outlet:
    """One sandbox: its listener, what it may reach, and its connections."""

    def __init__(self, proxy: Proxy, id: str, listener: socket.socket, rules: Rules) -> None:
        self._proxy = proxy
        self._id = id
        self._listener = listener
        self._rules = rules
        self._loop = asyncio.get_running_loop()
        self._lookups = asyncio.Semaphore(MOST_LOOKUPS)
        self._logged_since, self._logged = 0.0, 0
        self.connections: set[asyncio.Task[None]] = set()

    # Accepting

    def listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def pause(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)

    async def close(self) -> None:
        """End the listener and every connection."""
        self.pause()
        self._listener.close()
        for task in self.connections:
            task.cancel()
        if self.connections:
            await asyncio.wait(self.connections)

    def _accept(self) -> None:
        """Take one connection. The next is for the next turn of the loop, after everybody else's."""
        if not self._proxy.admits(self):
            return
        try:
            client = Peer(self._take())
        except BlockingIOError:
            return
        except Stalled:
            self._give_up("somebody else changes its listener")
        except OSError as exc:
            if exc.errno in _USELESS:
                self._give_up("its listener is of no use")
            else:
                self.pause()
                self._loop.call_later(1.0, self.listen)
        else:
            task = self._loop.create_task(self._serve(client))
            self.connections.add(task)
            self._proxy.open += 1
            task.add_done_callback(partial(self._ended, client))

    def _take(self) -> socket.socket:
        # Whoever made the listener may still hold it, and shares its flags: it can make accept wait, and pass on
        # options to every connection, such as one that makes close wait.
        self._listener.setblocking(False)
        signal.setitimer(signal.ITIMER_REAL, self._proxy.stalled)
        try:
            sock, _ = self._listener.accept()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        return sock

    def _give_up(self, why: str) -> None:
        self.pause()
        self._listener.close()
        log(f"{self._id}: {why}; it is cut off")

    def _ended(self, client: Peer, task: asyncio.Task[None]) -> None:
        client.close()  # here, because a task that is cancelled at once never runs
        self.connections.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log(f"{self._id}: a connection failed: {type(exc).__name__}")
        self._proxy.freed()

    # One connection

    async def _serve(self, client: Peer) -> None:
        try:
            try:
                await self._converse(client)
            except Refusal as refusal:
                if client.answered:
                    return
                async with asyncio.timeout(LINGER):
                    await client.send(refusal.wire())
                client.clean = True
            async with asyncio.timeout(LINGER):
                await client.leave()
        except (Gone, TimeoutError):
            pass

    async def _converse(self, client: Peer) -> None:
        """One request. A connection carries no second one, so none can hide behind the first."""
        request = await self._request(client)
        server = await self._dial(request.address)
        try:
            async with Idle(client, server) as idle:
                await exchange(client, server, request, idle)
            client.clean = server.clean = True
        except Gone as gone:
            if gone.peer is client:
                raise
            raise Refusal(502, f"{request.address} closed the connection without an answer") from gone
        except TimeoutError as exc:
            raise Refusal(504, f"{request.address} did not answer in time") from exc
        finally:
            server.close()

    async def _request(self, client: Peer) -> Request:
        try:
            async with asyncio.timeout(SLOW_HEAD):
                return read_request(await client.until(b"\r\n\r\n", MOST_HEAD))
        except TimeoutError as exc:
            if client.silent:
                client.clean = True
                raise Gone(client) from exc
            raise Refusal(408, "the head of the request did not come in time") from exc
        except TooLong as exc:
            raise Refusal(431, "the head of the request is too long") from exc
        except ValueError as exc:
            raise Refusal(400, f"bad request: {exc}") from exc

    async def _dial(self, address: Address) -> Peer:
        """A connection to an address that was checked, and not to what its name may mean a moment later."""
        if not self._rules.admits(address):
            raise self._denied(address, f"{address} is not in network.allow", _HOW_TO_ALLOW.format(address))
        reason = OSError()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                found = await self._addresses(address)
                for ip in found:
                    try:
                        async with asyncio.timeout(None if ip is found[-1] else ADDRESS_TIMEOUT):
                            return await _connect(ip, address.port)
                    except OSError as exc:
                        reason = exc
        except TimeoutError as exc:
            reason = exc
        if isinstance(reason, TimeoutError):
            raise Refusal(504, f"{address} cannot be reached in time") from reason
        raise Refusal(502, f"{address} cannot be reached: {os.strerror(reason.errno or errno.EIO)}") from reason

    async def _addresses(self, address: Address) -> Sequence[IP]:
        if address.ip is not None:
            return (address.ip,)
        if address.host == "localhost":
            return LOOPBACK
        await self._lookups.acquire()
        lookup = asyncio.ensure_future(self._proxy.resolve(address.host))
        # A client that leaves does not end the resolver's thread, and must not make room for one more.
        lookup.add_done_callback(lambda _: self._lookups.release())
        try:
            found = [ip_address(text.partition("%")[0]) for text in await asyncio.shield(lookup)]
        except OSError as exc:
            raise Refusal(502, f"the name {address.host} cannot be resolved") from exc
        allowed = [ip for ip in dict.fromkeys(found) if self._rules.reaches(ip, address.port)]
        if not allowed:
            raise self._denied(address, f"{address} leads to an address that is not public", _PRIVATE)
        return allowed[:MOST_ADDRESSES]

    def _denied(self, address: Address, reason: str, hint: str) -> Refusal:
        now = self._loop.time()
        if now - self._logged_since > 60:
            self._logged_since, self._logged = now, 0
        self._logged += 1
        if self._logged <= MOST_DENIALS:
            more = "; more in this minute are not logged" if self._logged == MOST_DENIALS else ""
            log(f"{self._id}: denied {address}{more}")
        return Refusal(403, reason, hint)


async def _connect(ip: IP, port: int) -> Peer:
    sock = socket.socket(socket.AF_INET6 if isinstance(ip, IPv6Address) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(ip), port))
        return Peer(sock)
    except BaseException:
        sock.close()
        raise
