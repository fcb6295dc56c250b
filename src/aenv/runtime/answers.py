"""What a request is answered with: a ``Response`` that is ready, or an ``Answer`` that is still being written.

An ``Answer`` belongs to the call, not to the connection. Any number of connections may follow it, from any point:
the one that asked, one that asks again with the same call id after a cut, one that resumes an event stream.
``Kept`` holds recent ones within bounds; ``Answers`` finds them by call id, so that a call whose answer was lost is
not run again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from aenv.errors import AEnvError, Conflict, SandboxLost

Headers = list[tuple[bytes, bytes]]
JSON: Headers = [(b"content-type", b"application/json")]
BYTES: Headers = [(b"content-type", b"application/octet-stream")]
EVENTS: Headers = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class Request:
    """One HTTP request, its body read and bounded."""

    __slots__ = ("agent", "body", "headers", "method", "path", "query", "raw_headers")

    def __init__(self, method: str, path: str, query: bytes, raw_headers: Headers, body: bytes) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.raw_headers = raw_headers
        self.headers = dict(raw_headers)
        self.body = body
        self.agent: str | None = None
        """Which of several agents asks. Empty is an agent of no name, and None the owner."""

    def identity(self) -> int:
        """Tells this request from others under the same call id."""
        return hash((self.method, self.path, self.query, self.body, self.agent))

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


class Response:
    """A complete answer."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes = b"", headers: Headers = JSON) -> None:
        self.status = status
        self.body = body
        self.headers = headers if body or headers is not JSON else []


ENDING = "the sandbox ends"
"""Why a call is cancelled whose client did not ask for it: goes with the cancellation."""


def cancelled(exc: asyncio.CancelledError) -> AEnvError | None:
    """What a client is told of a call that it did not cancel itself."""
    return SandboxLost("the sandbox is gone: it ended while the call ran") if exc.args == (ENDING,) else None


class Answer:
    """An answer in the making. Written on the event loop only; followed by connections."""

    __slots__ = (
        "_leaving",
        "_taken",
        "_waiters",
        "chunks",
        "cut",
        "done",
        "followers",
        "headers",
        "patience",
        "status",
        "task",
        "transient",
        "upgrade",
    )

    def __init__(self, patience: float | None) -> None:
        self.status = 0
        """HTTP status; 0 until the answer has begun."""
        self.headers: Headers = []
        self.chunks: list[bytes] = []
        self.done = False
        self.cut = False
        """Whether it ended in the middle: its connection must break, or half would pass for the whole."""
        self.followers = 0
        self.patience = patience
        """Seconds the call goes on when nobody follows it any more; ``None`` for as long as it takes."""
        self.transient = False
        """Whether what was sent is forgotten: a stream without end, or one too long to keep."""
        self.task: asyncio.Task[None] | None = None
        self.upgrade: Callable[[], None] | None = None
        """Turns an answer that is slow to begin into an event stream, where the client takes one."""
        self._waiters: list[asyncio.Future[None]] = []
        self._leaving: asyncio.TimerHandle | None = None
        self._taken: asyncio.Future[None] | None = None

    def reply(self, response: Response) -> None:
        """Answer in one piece."""
        self.status, self.headers = response.status, response.headers
        self.chunks.append(response.body)
        self.close()

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer in pieces."""
        self.status, self.headers = status, headers
        self.wake()

    def write(self, chunk: bytes) -> None:
        if not self.done:
            self.chunks.append(chunk)
            self.wake()

    async def pass_on(self, chunk: bytes) -> None:
        """Write a piece of a transient answer, and wait until it was sent: memory holds one at a time."""
        self._taken = asyncio.get_running_loop().create_future()
        self.write(chunk)
        await self._taken

    def taken(self) -> None:
        """A connection has sent what was written."""
        if self._taken is not None:
            _settle(self._taken)

    def close(self) -> None:
        self.done = True
        self.wake()

    def fail(self, response: Response) -> None:
        """Answer with a failure; one that has begun breaks off instead."""
        if self.status:
            self.cut = True
            self.close()
        else:
            self.reply(response)

    def cancel(self) -> None:
        """End the call behind this answer."""
        if self.task is not None:
            self.task.cancel()

    async def changed(self, seconds: float) -> None:
        """Wait until something was written, at most so long."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters.append(future)
        timer = loop.call_later(seconds, _settle, future)
        try:
            await future
        finally:
            timer.cancel()

    def wake(self) -> None:
        """Let followers look again."""
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            _settle(future)

    def joined(self) -> None:
        """A connection follows."""
        self.followers += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def left(self) -> None:
        """A connection follows no more. An unfinished call that nobody follows is ended after ``patience``."""
        self.followers -= 1
        if self.followers or self.done or self.patience is None:
            return
        self._leaving = asyncio.get_running_loop().call_later(self.patience, self.cancel)

    @property
    def size(self) -> int:
        return sum(map(len, self.chunks))


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Kept:
    """Answers by a key, bounded in number and in bytes; those that are still being written are never dropped.

    The few last ones that are large are kept apart, so that one of them does not push out all the others.
    """

    def __init__(self, most: int = 2048, most_bytes: int = 32 * 1024 * 1024, most_large: int = 2) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._most_large = most_large
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._bytes = 0
        self._large: deque[str] = deque()

    def get(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer whose task is running; what that makes too much is dropped when it has ended."""
        self._answers[key] = answer
        if answer.task is not None:
            answer.task.add_done_callback(lambda _: self._ended(key, answer))

    def dropped(self, key: str) -> None:
        """Called for each answer that is kept no longer."""

    def _ended(self, key: str, answer: Answer) -> None:
        answer.task = None
        if answer.size > self._most_bytes // 8:
            self._large.append(key)
            if len(self._large) > self._most_large:
                self._drop(self._large.popleft())
        else:
            self._bytes += answer.size
        for _ in range(len(self._answers)):
            if self._bytes <= self._most_bytes and len(self._answers) <= self._most:
                break
            oldest = next(iter(self._answers))
            if not self._answers[oldest].done or oldest in self._large:
                self._answers.move_to_end(oldest)
                continue
            self._bytes -= self._answers[oldest].size
            self._drop(oldest)

    def _drop(self, key: str) -> None:
        if self._answers.pop(key, None) is not None:
            self.dropped(key)


class Answers(Kept):
    """Recent answers by call id."""

    def __init__(self, most: int = 2048, most_bytes: int = 32 * 1024 * 1024) -> None:
        super().__init__(most, most_bytes)
        self._most_gone = 8 * most
        self._requests: dict[str, tuple[int, str | None]] = {}
        """Which request each answers, and which agent asked."""
        self._gone: OrderedDict[str, None] = OrderedDict()

    def find(self, call_id: str, request: Request) -> Answer | None:
        """The answer to this very request, if it was made before."""
        if call_id in self._gone:
            raise Conflict(f"call {call_id} was answered before, and its answer is no longer kept")
        answer = self.get(call_id)
        if answer is not None and self._requests[call_id][0] != request.identity():
            raise Conflict(f"call id {call_id} was used for another call", hint="use a new id for a new call")
        return answer

    def keep(self, call_id: str, request: Request, answer: Answer) -> None:
        self._requests[call_id] = request.identity(), request.agent
        self.add(call_id, answer)

    def cancel(self, call_id: str, agent: str | None = None) -> bool:
        """End a call by its id, an agent one of its own; False when there is none in flight."""
        answer = self.get(call_id)
        if answer is None or answer.done or agent not in (None, self._requests[call_id][1]):
            return False
        answer.cancel()
        return True

    def dropped(self, key: str) -> None:
        del self._requests[key]
        self._gone[key] = None
        if len(self._gone) > self._most_gone:
            self._gone.popitem(last=False)
