"""A sandbox that is up before anybody knows which instance it will be: it waits, is told once, and becomes that one.

What depends on the instance comes then: its variables, arguments and seed, the author's import where forks do not
share it, setup and health. Until then it answers nothing but that it is warm. It is never given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from aenv import config
from aenv.errors import AEnvError, Conflict, Invalid, SandboxLost, StartFailed
from aenv.runtime.hidden import Hidden

if TYPE_CHECKING:
    from aenv.project import Project
    from aenv.runtime.loader import Loaded

INTERPRETER = ("PYTHON*", "LD_*", "MALLOC_*", "GLIBC_TUNABLES", "LC_*", "LANG", "LANGUAGE")
"""What an interpreter reads when it starts."""
SETTINGS = ("AENV_*",)
"""What the runtime reads when it starts."""
UNFIT = 86
"""Exit code of a sandbox that was to import its project before it waits, and found that this must not be so early."""
_OPEN = ("/health", "/specialise")


class Told(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a warm sandbox an instance."""

    environment_variables: dict[str, str] = {}
    """They are set over those that the sandbox has."""
    arguments: list[str] = []
    seed: int | None = None
    secrets: list[str] = []
    """Names of the variables whose values are never shown."""
    startup_timeout: float | None = None
    """Seconds until it must be healthy."""


_decode = msgspec.json.Decoder(Told).decode


class Unfit(AEnvError):
    """The import did something that an instance must do for itself. It cannot be taken back: another sandbox is needed,
    which imports nothing before it is told what it is."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__(
            "\n".join(["the project is not imported before there is an instance, since the import", *reasons])
        )


class Imported(NamedTuple):
    """What a sandbox has that waits."""

    loaded: Loaded | None
    """None when nothing was imported."""
    late: tuple[str, ...]
    """Names of variables, or beginnings with a star, which come too late for it."""


def import_early(found: Project) -> Imported:
    """Import a project in a sandbox that will wait, where that is right; ``Unfit`` when it was not.

    An engine that can begin anew with another sandbox says ``auto``. Where nobody does, it is the author's word alone
    that counts.
    """
    from aenv.runtime import loader

    told, own = config.get("preload"), found.value("deployConfig.preload")
    preload = {"true": True, "auto": own, "": own is True}.get(told, False)
    known = (*INTERPRETER, *SETTINGS)
    if preload is False:
        return Imported(None, known)
    if preload is True:
        return Imported(loader.load(found), known)
    from aenv.runtime.preload import early

    given = config.environment()
    loaded, verdict = early.load(found, preload)
    if loaded is None:
        raise Unfit(verdict.reasons)
    secrets = dict.fromkeys(filter(None, config.get("secrets").split(",")), "")
    if names := late(secrets, verdict.variables, given):
        raise Unfit([f"goes by {', '.join(names)}, of which the value comes later"])
    return Imported(loaded, (*verdict.variables, *known))


class Warm:
    """The time from being up to being an instance, once in a sandbox's life."""

    def __init__(self, driver: Driver, become: Callable[[Told], None], *, late: Sequence[str], preloaded: bool) -> None:
        """``become`` makes what is told this process's own, imports what is not imported yet, and may raise. ``late``
        are names of variables, or beginnings with a star, which would come too late."""
        self._driver = driver
        self._become = become
        self._late = tuple(late)
        self._preloaded = preloaded
        self._told: Told | None = None
        self._is_told = asyncio.Event()
        self._outcome: asyncio.Future[None] | None = None
        self._hidden: Hidden | None = None
        self.phases: dict[str, float] = {}
        """Where the time went since it was told, in seconds."""

    # For whoever asks

    def admit(self, path: str) -> None:
        """Refuse what only an instance can answer."""
        if path not in _OPEN and not self._is_done:
            raise Conflict(
                "the sandbox is warm: it is no instance yet", hint="POST /specialise makes it one, and is the owner's"
            )

    def health(self) -> dict[str, Any] | None:
        """What is said of it while it waits, and while it becomes an instance; None once it is one."""
        if self._told is None:
            return {"status": "warm", "preloaded": self._preloaded, "late": list(self._late)}
        return None if self._is_done else {"status": "unhealthy", "reason": "it is being specialised"}

    @property
    def _is_done(self) -> bool:
        return self._outcome is not None and self._outcome.done() and self._outcome.exception() is None

    def specialise(self, body: bytes) -> Coroutine[Any, Any, None]:
        """Take what it is told; what is returned waits until it is healthy, or raises why it is not."""
        try:
            told = _decode(body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            hint = "send environment_variables, arguments, seed, secrets and startup_timeout, or some of them"
            raise Invalid(f"what the sandbox is to be cannot be read: {exc}", hint=hint) from None
        _check(told)
        if self._told is not None:
            raise Conflict("the sandbox is specialised already", hint="it is so once; make another")
        if too_late := late(told.environment_variables, self._late, config.environment()):
            message = f"the variables {', '.join(too_late)} come too late: what reads them is imported"
            raise Conflict(message, hint="make an instance that is not warm")
        self._told = told
        self._hidden = Hidden.of(told.secrets, told.environment_variables) if told.secrets else None
        self._outcome = asyncio.get_running_loop().create_future()
        self._is_told.set()
        return _heard(self._outcome)

    # For whoever serves

    async def told(self, stop: asyncio.Event) -> bool:
        """Wait until it is told what it is; False when it is to end before."""
        waiting = [asyncio.create_task(event.wait()) for event in (self._is_told, stop)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return self._told is not None and not stop.is_set()

    @asynccontextmanager
    async def becoming(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """The time in which it comes up. How that ends is what its owner hears, and who serves it, too."""
        assert self._told is not None
        assert self._outcome is not None
        patience = self._told.startup_timeout
        self._outcome.add_done_callback(lambda outcome: outcome.cancelled() or outcome.exception())
        try:
            async with asyncio.timeout(patience) as limit:
                told = self._told
                with timed(self.phases, "import"):
                    await self._driver.standstill(lambda: self._become(told))
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            failure = StartFailed(f"it was not ready within {patience:g} s")
            self._outcome.set_exception(failure)
            raise failure from None
        except AEnvError as exc:
            if self._hidden is not None:
                exc.message = self._hidden.text(exc.message)
                exc.hint = exc.hint and self._hidden.text(exc.hint)
            self._outcome.set_exception(exc)
            raise
        except Exception as exc:
            self._outcome.set_exception(StartFailed(f"the runtime failed: {exc!r}"))
            raise
        if stop.is_set():
            self._outcome.set_exception(SandboxLost("the sandbox was asked to end"))
        else:
            self._outcome.set_result(None)


class Driver:
    """Runs an event loop, and has it stand still for what must find none that runs: an author's module may call
    ``asyncio.run`` while it is imported."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: tuple[Callable[[], None], asyncio.Future[None]] | None = None

    def run(self, serving: Coroutine[Any, Any, None]) -> None:
        """Run this to its end."""
        task = self._loop.create_task(serving)
        task.add_done_callback(lambda _: self._loop.stop())
        while not task.done():
            self._loop.run_forever()
            if self._work is not None:
                self._do(*self._work)
        task.result()

    def _do(self, work: Callable[[], None], done: asyncio.Future[None]) -> None:
        self._work = None
        try:
            work()
        except Exception as exc:
            done.set_exception(exc)
        else:
            done.set_result(None)

    async def standstill(self, work: Callable[[], None]) -> None:
        """Have ``work`` done in the main thread, while the loop does not run."""
        done = self._loop.create_future()
        self._work = work, done
        self._loop.stop()
        await done


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Note how long a block takes."""
    began = perf_counter()
    try:
        yield
    finally:
        phases[name] = round(phases.get(name, 0.0) + perf_counter() - began, 6)


def late(variables: Mapping[str, str], patterns: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """The variables that have another value than ``given`` and are among those that would come too late."""
    names = {pattern for pattern in patterns if not pattern.endswith("*")}
    beginnings = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    changed = (name for name, value in variables.items() if given.get(name) != value)
    return [name for name in changed if name in names or name.startswith(beginnings)]


async def _heard(outcome: asyncio.Future[None]) -> None:
    """Wait for it; who leaves takes it from nobody."""
    await asyncio.shield(outcome)


def _check(told: Told) -> None:
    """What is wrong is said without its value."""
    for name, value in told.environment_variables.items():
        if not name or "=" in name or "\0" in name or not _encodes(name):
            raise Invalid(f"{name[:64]!r} is not a variable's name")
        if "\0" in value or not _encodes(value):
            raise Invalid(f"the value of {name[:64]} is no text that a variable can have")
    if told.startup_timeout is not None and not 0 < told.startup_timeout < float("inf"):
        raise Invalid("startup_timeout is not a number of seconds over 0")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
