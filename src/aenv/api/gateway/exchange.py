"""One request on its way to a sandbox, and its answer on the way back.

A body is never gathered: what has come goes on, and whoever is slower sets the pace of the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import httptools

from aenv.api.gateway import failures
from aenv.api.gateway.exposed import NO_REFERRER
from aenv.api.gateway.heads import MOST_HEAD, Address, Answer, Head, Headers
from aenv.api.gateway.passages import Passage
from aenv.api.gateway.router import Router
from aenv.api.gateway.upstream import Upstream
from aenv.api.gateway.watching import Watch
from aenv.errors import AEnvError, NetworkError, SandboxError

if TYPE_CHECKING:
    from aenv.api.gateway.connection import Connection

log = logging.getLogger("aenv.gateway")

MOST_HELD = 64 * 1024
"""Bytes of a body that wait for a connection to the sandbox before the client is made to wait."""
MOST_REPEATED = 64 * 1024
"""Bytes of a request that can be sent again when a connection turns out to be dead."""
REPEATS = 2
_TOO_LONG = "its head is too long"


class Exchange:
    """A request and its answer."""

    __slots__ = (
        "_answered",
        "_back",
        "_bare",
        "_begins",
        "_begun",
        "_chunks",
        "_connection",
        "_exposed",
        "_fault",
        "_head",
        "_headers",
        "_held",
        "_keep",
        "_moves",
        "_out",
        "_parser",
        "_passage",
        "_reason",
        "_repeats",
        "_reusable",
        "_router",
        "_sent",
        "_size",
        "_switched",
        "_task",
        "_until_end",
        "_untold",
        "_upstream",
        "_wanted",
        "_watch",
        "done",
        "early",
        "received",
    )

    def __init__(self, connection: Connection, head: Head, router: Router, watch: Watch | None = None) -> None:
        self._connection = connection
        self._head = head
        self._router = router
        self._watch = watch
        self._exposed = router.is_exposed(head)
        self._wanted: Address | None = None
        self._passage: Passage | None = None
        self._upstream: Upstream | None = None
        self._task: asyncio.Task[None] | None = None
        # The request
        self.received = False
        """Whether all of it has come."""
        self.early = b""
        """What came after a request to go on with another protocol."""
        self._out: list[bytes] = []
        self._held = 0
        self._sent: list[bytes] | None = [] if head.upgrade is None else None
        """What was passed on, for as long as it may have to be once more."""
        self._repeats = 0
        self._begins = 0
        """Where the body begins in what was sent; 0 when nothing was."""
        # The answer
        self.done = False
        self._begun = False
        self._keep = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._reason = b""
        self._size = 0
        self._untold = 0
        """Bytes since the parser last told of a head or of a piece of the body; a line without end is never told."""
        self._back: list[bytes] = []
        self._fault = ""
        self._chunks = False
        """Whether the client gets the answer in chunks."""
        self._bare = False
        """Whether the client takes the end of the connection for that of the answer."""
        self._until_end = False
        """Whether the answer's end is that of the sandbox's connection."""
        self._answered = False
        self._reusable = False
        self._switched = False
        self._moves = False
        """Whether another replica is asked instead."""

    # From the client's connection

    def start(self) -> None:
        """Send the request on its way: its turn has come."""
        try:
            self._wanted = self._router.wanted(self._head, exposed=self._exposed)
            if self._wanted is None:
                self._watch = None
                self._answer(failures.healthy(close=self._closes(), with_body=self._head.method != b"HEAD"))
                return
            passage = self._passage = self._router.at_once(self._wanted, self._head)
        except AEnvError as exc:
            self.refuse(exc)
            return
        upstream = passage.sandbox.take(passage.port) if passage is not None else None
        if upstream is not None:
            self._attach(upstream)
        else:
            self._run(self._find)

    def add(self, part: bytes) -> None:
        """A part of the body has come."""
        if self.done:
            return  # answered already: the rest is of no interest
        if self._head.chunked:
            self._out += (b"%x\r\n" % len(part), part, b"\r\n")
        else:
            self._out.append(part)
        self._held += len(part)

    def end(self) -> None:
        """All of the body has come."""
        self.received = True
        if self._head.chunked and not self.done:
            self._out.append(b"0\r\n\r\n")

    def flush(self) -> None:
        """Pass on what has come."""
        if self._upstream is None or not self._out:
            return
        data = b"".join(self._out)
        self._out, self._held = [], 0
        if self._sent is not None:
            self._sent.append(data)
            if sum(map(len, self._sent)) > MOST_REPEATED:
                self._sent = None
        self._upstream.transport.write(data)

    @property
    def is_full(self) -> bool:
        """Whether the client should wait before it sends more."""
        if self.done:
            return False
        if len(self.early) > MOST_HELD:
            return True
        return self._held > MOST_HELD if self._upstream is None else self._upstream.full

    def hold(self, held: bool) -> None:
        """The client takes less than it is sent, or takes it again."""
        if self._upstream is not None:
            self._upstream.hold(held)

    def abandon(self) -> None:
        """The client has left: what it asked for is not wanted any more."""
        self.done = True
        if self._task is not None:
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.give_up()
            self._upstream = None
        self.over()

    def over(self) -> None:
        """Nothing more comes of it, however it went. Safe to call twice."""
        if self._passage is not None:
            self._passage.leave()
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.ended(self._head, self._wanted, self._passage)

    def touch(self) -> None:
        """Let it be known that the instance is in use."""
        if self._passage is not None and self._head.path != b"/health":
            self._router.directory.touched(self._passage.sandbox.place.id)

    # To the sandbox

    def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except AEnvError as exc:
                self.refuse(self._told(exc))
            except Exception:
                log.exception("the gateway failed")
                self.refuse(AEnvError("the gateway failed", hint="its log says how"))

        self._task = asyncio.get_running_loop().create_task(run())

    async def _find(self) -> None:
        assert self._wanted is not None
        passage = self._passage = self._passage or await self._router.find(self._wanted, self._head)
        self._attach(await self._router.connect(passage))

    def _attach(self, upstream: Upstream, *body: bytes) -> None:
        """Pass on what there is, after what of the body was sent before on another connection."""
        passage = self._passage
        assert passage is not None
        self._task = None
        self._upstream = upstream
        upstream.user = self
        self.touch()
        if passage.crew is not None:
            self._router.sent(passage)
            if upstream.sandbox.is_beyond and not self._begins and self._head.upgrade is None:
                self._sent = []  # until it is known that something of it got there
        if self._watch is not None:
            self._watch.passed()
        self._begins = len(passage.head)
        self._out[:0] = (passage.head, *body)
        self.flush()
        upstream.hold(self._connection.stalled)
        self._connection.regulate()

    async def _again(self) -> None:
        """The connection ended without an answer: find out why, and where that does no harm, ask once more."""
        passage = self._passage
        assert passage is not None
        can_repeat = self._sent is not None and self._repeats < REPEATS
        if passage.crew is None or can_repeat:
            upstream = await self._router.reconnect(passage, only_looks=self._head.only_looks)
            if self._sent is not None and can_repeat:
                self._repeats += 1
                body, self._sent = b"".join(self._sent)[self._begins :], []
                self._reset()
                self._attach(upstream, body)
                return
            upstream.sandbox.give(upstream, self._connection.now)
        else:
            self._router.broke(passage)
        message = "the sandbox closed the connection without an answer"
        # Whoever asks a service again under the id of a call may come to another replica, which does not know it.
        of_service = passage.crew is not None or self._is_for_service
        if self._head.only_looks or (self._head.repeatable and not of_service):
            raise failures.Busy(message, hint="ask again: it does no harm")
        raise NetworkError(message, hint="whether it did what was asked is not known")

    async def _elsewhere(self) -> None:
        """The replica that was asked got nothing of the request."""
        assert self._passage is not None
        self._repeats += 1
        body = b"".join(self._sent or ())[self._begins :]
        self._sent = [] if self._repeats < REPEATS else None
        self._reset()
        self._attach(await self._router.connect(self._passage), body)

    @property
    def _is_for_service(self) -> bool:
        """Whether another gateway passes on to us what was asked of a service."""
        return self._head.headers.get(b"aenv-hop") == b"service"

    def _told(self, error: AEnvError) -> AEnvError:
        """What a failure is to whoever asked: to a service's gateway, what did not get as far as the sandbox did not
        run, and may go to another replica."""
        if self._is_for_service and not self._begins and isinstance(error, SandboxError | NetworkError):
            return failures.Busy(error.message, hint=error.hint)
        return error

    # From the connection to the sandbox

    def answer_received(self, data: bytes) -> None:
        if self._passage is None or self._passage.crew is None or not self._passage.sandbox.is_beyond:
            self._sent = None  # else the answer may be that nothing of it got there
        rest = b""
        self._untold += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            rest = data[exc.args[0] :]
        except httptools.HttpParserError as exc:
            self._reusable = False
            if not self._answered:
                self._fault = self._fault or str(exc)
        if self._untold > MOST_HEAD:
            self._fault = self._fault or _TOO_LONG
        if self._back:
            back, self._back = self._back, []
            self._connection.send(b"".join(back))
        if self._moves and self._upstream is not None:
            self._upstream.give_up()
            self._upstream = None
            self._run(self._elsewhere)
        elif self._fault:
            self._fail(NetworkError(f"the sandbox's answer is not one: {self._fault}"))
        elif self._switched:
            self._switch(rest)
        elif self._answered:
            self._finish()

    def upstream_lost(self, error: Exception | None) -> None:
        self._upstream = None
        if not self._begun:
            # What was written in one piece, to a sandbox that had closed by then, was not read by anybody.
            refused = isinstance(error, BrokenPipeError) and self._sent is not None and len(self._sent) == 1
            if self._untold or not (self._head.repeatable or refused):
                self._sent = None  # it may have run
            self._run(self._again)
        elif self._until_end and error is None:
            if self._chunks:
                self._connection.send(b"0\r\n\r\n")
            self._finish()
        else:
            self._cut()

    def upstream_moves(self) -> None:
        self._connection.regulate()

    # httptools

    def on_message_begin(self) -> None:
        if self._answered:
            self._reusable = False  # more than was asked for

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value) + 4
        if self._size > MOST_HEAD:
            self._fault = _TOO_LONG
        elif not self._begun:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._answered or self._fault:
            return
        headers, self._headers, self._size = self._headers, [], 0
        self._untold = 0
        try:
            answer = Answer(self._parser.get_status_code(), self._reason, headers)
        except ValueError as exc:
            self._fault = str(exc)
            return
        self._reason = b""
        if answer.status == 101:
            self._agree(answer)
        elif answer.not_sent and self._sent is not None and self._router.moved(self._passage):
            self._moves = self._answered = True
        elif answer.status >= 200:
            self._begin(answer)
        elif not self._head.is_old:
            self._back.append(answer.to_client(answer.as_told()))

    def on_body(self, part: bytes) -> None:
        self._untold = 0
        if self._answered or self._fault:
            self._reusable = False
        elif self._chunks:
            self._back += (b"%x\r\n" % len(part), part, b"\r\n")
        else:
            self._back.append(part)

    def on_message_complete(self) -> None:
        self._untold = 0
        if self._answered or self._fault or self._switched or not self._begun:
            return
        self._answered = True
        self._reusable = self.received and self._parser.should_keep_alive()
        if self._chunks:
            self._back.append(b"0\r\n\r\n")

    # To the client

    def _begin(self, answer: Answer) -> None:
        """Write the head, and settle how the client learns where the body ends."""
        self._begun = True
        self._sent = None
        is_empty = answer.is_bare or self._head.method == b"HEAD"
        has_no_length = answer.length is None and not answer.is_bare
        self._chunks = has_no_length and not is_empty and not self._head.is_old
        self._bare = has_no_length and not is_empty and self._head.is_old
        self._until_end = has_no_length and not is_empty and not answer.chunked
        self._keep = not self._closes()
        if self._watch is not None:
            self._watch.answered(answer.status, answer.timing)
        lines = [answer.as_told() if self._exposed else answer.ours(self._head.request_id, self._replica)]
        if has_no_length and not self._head.is_old:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        if not self._keep:
            lines.append(b"Connection: close\r\n")
        if self._exposed and not answer.has(b"referrer-policy"):
            lines.append(NO_REFERRER)
        self._back.append(answer.to_client(*lines))
        if self._head.method == b"HEAD":
            self._answered = True
            self._reusable = self.received and self._parser.should_keep_alive()

    @property
    def _replica(self) -> bytes:
        passage = self._passage
        return b"" if passage is None or passage.crew is None else passage.sandbox.place.id.encode()

    def _closes(self) -> bool:
        """Whether the client's connection ends with this answer. It must when the request goes on behind it."""
        return not (self._head.keep_alive and self.received) or self._connection.ends

    def _agree(self, answer: Answer) -> None:
        if self._head.upgrade is None or answer.upgrade is None:
            self._fault = "it goes on with a protocol that nobody asked for"
            return
        self._switched = self._begun = True
        if self._watch is not None:
            self._watch.answered(answer.status, answer.timing)
        line = b"Connection: Upgrade\r\nUpgrade: %b\r\n" % answer.upgrade
        self._back.append(answer.to_client(answer.as_told(), line))

    def _switch(self, rest: bytes) -> None:
        upstream, self._upstream = self._upstream, None
        assert upstream is not None
        self.done = True
        upstream.user = None
        self._connection.join(upstream, rest, self)

    def _finish(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            # What was asked to go on with another protocol may end the connection, whatever it answered.
            if self._reusable and not self._out and self._head.upgrade is None:
                upstream.sandbox.give(upstream, self._connection.now)
            else:
                upstream.give_up()
        self.done = True
        self.touch()
        self.over()
        self._connection.finished(self, keep=self._keep)

    def _fail(self, error: AEnvError) -> None:
        if self._begun:
            self._cut()
        else:
            self.refuse(error)

    def _cut(self) -> None:
        """The rest of the answer will not come, and the client must not take what it has for the whole."""
        self.abandon()
        self._connection.cut(hard=self._bare)

    def refuse(self, error: AEnvError) -> None:
        """Answer with a failure; an answer that has begun breaks off instead."""
        if self.done:
            return
        if self._begun:
            self._cut()
            return
        if self._watch is not None:
            self._watch.answered(error.status, b"", error=type(error).__name__)
        self._answer(
            failures.answer(
                error,
                close=self._closes(),
                page=self._exposed,
                with_body=self._head.method != b"HEAD",
                request_id=self._head.request_id,
                not_sent=self._is_for_service and not self._begins and isinstance(error, failures.Busy),
            )
        )

    def _answer(self, answer: bytes) -> None:
        keep = not self._closes()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.give_up()
            self._upstream = None
        self._begun = self.done = True
        self._connection.send(answer)
        self.over()
        self._connection.finished(self, keep=keep)
