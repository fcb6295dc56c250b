"""An author's function, made callable from outside: validated arguments, a thread when it blocks, its own errors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from aenv.errors import AEnvError, AuthorError, Invalid, ModelError, SandboxError, Unsupported
from aenv.runtime import docstrings, threads
from aenv.runtime.context import Context, printable
from aenv.runtime.registry import Mark
from aenv.runtime.schema import Arguments, Result
from aenv.runtime.threads import Threads

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict})
"""What need not be asked whether it can be awaited."""
OF_OTHERS = (SandboxError, ModelError)
"""Failures of what an author's function uses, which are not its own."""


class Raised(Exception):
    """The author's code raised. ``cause`` is what it raised; ``summary`` is one line about it."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        try:
            text = printable(str(cause))
        except Exception:
            text = "(its message cannot be read)"
        self.summary = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
        super().__init__(self.summary)

    def details(self) -> str:
        """The traceback from the author's first line on, for the sandbox's log."""
        trace = self.cause.__traceback__
        while trace and trace.tb_next and trace.tb_frame.f_code.co_filename in (__file__, threads.__file__):
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(self.cause), self.cause, trace))


class Timing:
    """Where the time of a call goes, from the moment that it was read: it waits, then its function runs."""

    __slots__ = ("_began", "_came", "_ended")

    def __init__(self) -> None:
        self._came = monotonic()
        self._began = self._ended = 0.0

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Call a function that blocks."""
        self.begin()
        try:
            return function(**arguments)
        finally:
            self.end()

    def begin(self) -> None:
        """The function runs, which may be said again when its second half does."""
        self._began = self._began or monotonic()

    def end(self) -> None:
        self._ended = monotonic()

    @property
    def queue(self) -> float:
        """Seconds until its function ran: for a thread, for example."""
        return (self._began or monotonic()) - self._came

    @property
    def tool(self) -> float:
        """Seconds for which its function ran, or has been running."""
        return max((self._ended or monotonic()) - self._began, 0.0) if self._began else 0.0

    def header(self) -> tuple[bytes, bytes]:
        """For the answer, in milliseconds."""
        return b"server-timing", b"queue;dur=%.3f, tool;dur=%.3f" % (self.queue * 1e3, self.tool * 1e3)


class Function:
    """One marked function. ``decode`` and ``call`` are apart so that bad arguments are told from bad luck."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.name = mark.name
        self._function = mark.function
        target = mark.function
        while isinstance(target, functools.partial):
            target = target.func
        doc = docstrings.parse(inspect.getdoc(target))
        self.description: str | None = mark.options.get("description") or doc.description
        self.arguments = Arguments(mark.function, doc)
        self.result = Result(mark.function)
        self._context = self.arguments.context
        self._conversations = self.arguments.conversations
        self._is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
            getattr(target, "__call__", None)  # noqa: B004 - the method itself is wanted
        )

    @property
    def wants_context(self) -> bool:
        return self._context is not None

    def decode(self, given: bytes | Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
        """Keyword arguments, validated. Raises ``Invalid`` that names the argument."""
        return self.arguments.decode(given, text=text)

    async def call(self, arguments: dict[str, Any], context: Context, timing: Timing | None = None) -> Any:
        """Run the function. Whatever it raises, even ``SystemExit``, comes out as ``Raised``."""
        timing = timing or Timing()
        if self._context is not None:
            arguments = {**arguments, self._context: context}
        if self._conversations:
            arguments = {**arguments, **{name: getattr(context, what) for name, what in self._conversations.items()}}
        found: Any = None
        if not self._is_async:
            found = await in_thread(functools.partial(timing.run, self._function, **arguments))
            if found.__class__ in _PLAIN or not inspect.isawaitable(found):
                return found
        timing.begin()
        try:
            return await (self._function(**arguments) if found is None else found)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Raised(exc) from None  # the author's own cancelled task, not a cancelled call
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as exc:
            raise Raised(exc) from None
        finally:
            timing.end()


@functools.lru_cache(maxsize=1)
def _threads(loop: asyncio.AbstractEventLoop) -> Threads:
    """The threads of a sandbox, which has one loop."""
    return Threads()


def abandoned(loop: asyncio.AbstractEventLoop) -> int:
    """How many functions still run whose calls were given up."""
    return _threads(loop).abandoned


def rest_threads(loop: asyncio.AbstractEventLoop) -> None:
    """End the threads that are idle; another is started when it is needed."""
    _threads(loop).close()


def end_threads(loop: asyncio.AbstractEventLoop) -> None:
    """End the threads of a loop that has run its last."""
    _threads(loop).close()
    _threads.cache_clear()


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run an author's blocking code off the event loop; what it raises comes out as ``Raised``."""
    outcome = await _threads(asyncio.get_running_loop()).run(work)
    if outcome.error is not None:
        raise Raised(outcome.error) from None
    return outcome.value


async def run_hook(function: Function, context: Context, arguments: dict[str, Any]) -> Any:
    """Call a setup, teardown, reset or health function; what it raises is an ``AuthorError``."""
    try:
        return await function.call(arguments, context)
    except Raised as exc:
        raise author_error(function, exc) from exc.cause


def of_the_platform(cause: BaseException) -> AEnvError | None:
    """The failure of the platform in what an author's function raised, if it is one: of what the function uses. Where
    it asked several at once, that is one of a group."""
    if isinstance(cause, BaseExceptionGroup):
        return next(filter(None, map(of_the_platform, cause.exceptions)), None)
    return cause if isinstance(cause, OF_OTHERS) else None


def author_error(function: Function, raised: Raised) -> AEnvError:
    """What the caller of a reward, function or hook is told when it raised."""
    if (lost := of_the_platform(raised.cause)) is not None:
        return lost
    if isinstance(raised.cause, Invalid):  # the caller is at fault
        return raised.cause
    if function.mark.kind in ("save", "load") and isinstance(raised.cause, Unsupported):  # so there is another way
        return raised.cause
    return AuthorError(f"{function.mark.kind} {function.name}() raised {raised.summary}")
