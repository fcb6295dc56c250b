"""A sandbox that is started, reached and given back: what every ``Environment`` is underneath.

All that is asked of a sandbox passes here, and what has an effect on it goes into its journal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self, cast

from aenv import config, http
from aenv.cleanup import finish
from aenv.client import answers, mcp, spans
from aenv.client.provision import Control, Provision
from aenv.control import RESTART, plain_header
from aenv.errors import (
    AEnvError,
    CallTimeout,
    Conflict,
    Invalid,
    NetworkError,
    NotFound,
    SandboxLost,
    StartFailed,
    Unsupported,
    loss,
)
from aenv.journal import Entry, Journal
from aenv.models import NOT_JSON, Sandbox, SandboxSpec, to_json
from aenv.runtime import nesting

log = logging.getLogger("aenv.environment")
log.addHandler(logging.NullHandler())
UNREACHABLE = 5.0
"""Seconds a sandbox may be unreachable at the start before it is taken for absent."""
FAREWELL = 5.0
"""Seconds that cancelling a call on the other side may take."""
NEWS = 2.0
"""Seconds in which an engine hears of the end of a sandbox that does not answer."""
ASKING = 5.0
"""Seconds that whoever made the sandbox gets to say why it is gone."""


class Handle:
    """One sandbox of a provision. The first request starts it."""

    env_name: str
    timeout: float
    startup_timeout: float
    max_retries: int
    skip_for_healthy: bool
    spec: SandboxSpec
    _provision: Provision
    _most = http.MOST_BODY
    """Bytes of an answer."""

    def _blank(self) -> None:
        """No sandbox yet."""
        self._sandbox: Sandbox | None = None
        self._stack: AsyncExitStack | None = None
        self._forwarded: str | None = None
        self._opening = asyncio.Lock()
        self._headers = b""
        self._openai_names: dict[str, str] = {}
        self._mirrored: dict[str, dict[str, str]] = {}
        """Per tool, the arguments that are repeated in headers; read when a server asks for them."""
        self.journal = Journal(config.get("journal"))
        """What had an effect on the sandbox."""
        self._farewells: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        """Sandboxes that were replaced, on their way out."""
        self._process = os.getpid()

    @property
    def instance_id(self) -> str | None:
        """What the sandbox is called; None while there is none."""
        return None if self._sandbox is None else self._sandbox.id

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox as it was given; None while there is none."""
        return self._sandbox

    @property
    def provision(self) -> Provision:
        """Where its sandbox comes from."""
        return self._provision

    # Life

    async def initialize(self) -> bool:
        """Start the sandbox and wait until it is healthy. Once, however many ask."""
        if self._sandbox is not None:
            return True
        async with self._opening:
            if self._sandbox is None:
                with spans.Asking("initialize", self.env_name):
                    await self._open()
        return True

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(self._provision(self.spec))
            token = b""
            if sandbox.token:
                token = f"Authorization: Bearer {plain_header(sandbox.token, 'the token')}\r\n".encode()
            boot: bytes | None = sandbox.boot.encode()
            if not boot and not self.skip_for_healthy:
                boot = await self._healthy(sandbox, token, self.startup_timeout)
            token += b"AEnv-Boot: %b\r\n" % boot if boot and not sandbox.shared else b""
            self._headers = token
            self._process = os.getpid()
            self.journal = Journal(config.get("journal"))
            self._stack = stack.pop_all()
            self._sandbox = sandbox
            self.env_name = self.env_name or sandbox.env
        log.info("[ENV:%s] Environment %s is ready", sandbox.id, self.env_name)

    async def _healthy(self, sandbox: Sandbox, headers: bytes, patience: float) -> bytes | None:
        """Wait until ``/health`` says yes; the answer names the sandbox's life."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        pause = 0.01
        while True:
            try:
                async with asyncio.timeout(max(patience, 0.001)):
                    response = await http.request("GET", sandbox.url, "/health", headers=headers, retries=0)
                reason = f"unhealthy: {answers.reason(response)}"
                if response.status == 200:
                    return response.headers.get(b"aenv-boot")
                if response.status not in http.BUSY:
                    raise answers.error(response)
                limit = patience
            except (NetworkError, TimeoutError) as exc:
                reason = str(exc) or "no answer"
                limit = min(patience, UNREACHABLE)
            if loop.time() - start > limit:
                hint = "is it running? start one with 'aenv run'" if sandbox.attached else None
                reason = await self._reason(sandbox) or reason
                raise StartFailed(f"{sandbox.url} is not ready after {limit:g} s: {reason}", hint=hint)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def release(self) -> None:
        """Give the sandbox back. Safe to call twice; a released environment can be used again."""
        async with self._opening:
            stack, self._stack, sandbox, self._sandbox = self._stack, None, self._sandbox, None
            self._forwarded = None
            if stack is None or sandbox is None or self._process != os.getpid():
                return  # nothing to give back, or a forked child that does not own its parent's sandbox
            await finish(self._leave(stack, sandbox))
        log.info("[ENV:%s] Environment %s is released", sandbox.id, self.env_name)

    async def _leave(self, stack: AsyncExitStack, sandbox: Sandbox) -> None:
        try:
            await self._close(stack, sandbox)
        finally:
            if self._leaving:
                await asyncio.wait(self._leaving)

    async def _close(self, stack: AsyncExitStack, sandbox: Sandbox) -> None:
        if sandbox.attached and self._farewells:  # it lives on, so what was cancelled in it should hear that
            await asyncio.wait(set(self._farewells), timeout=FAREWELL)
        for task in list(self._farewells):
            task.cancel()
        await stack.aclose()

    destroy = release

    async def _take_over(self, other: Handle, before: Sandbox | None) -> None:
        """Have the sandbox of another handle, which then has none. The own one, which is ``before``, is given back, for
        which nobody waits before the end."""
        async with self._opening:
            if self._sandbox is not before:
                raise Conflict("the environment was released or replaced meanwhile")
            stack, sandbox = self._stack, self._sandbox
            self._stack, self._sandbox, self._forwarded = other._stack, other._sandbox, None
            self._headers, self.journal, self._process = other._headers, other.journal, other._process
            other._stack = other._sandbox = None
            if stack is not None and sandbox is not None:
                task = asyncio.get_running_loop().create_task(self._give_up(stack, sandbox))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def _give_up(self, stack: AsyncExitStack, sandbox: Sandbox) -> None:
        try:
            await self._close(stack, sandbox)
        except AEnvError as exc:  # what is left of it ends with its lease
            log.warning("[ENV:%s] could not be released: %s", sandbox.id, exc)

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    # The one way out

    async def _ready(self) -> Sandbox:
        if self._sandbox is None:
            await self.initialize()
        if self._sandbox is None:
            raise AEnvError("the environment was released while it started")
        return self._sandbox

    async def _data(
        self, path: str, arguments: Mapping[str, Any] | None, timeout: float | None, what: str, more: bytes = b""
    ) -> Any:
        await self._ready()
        try:
            body = to_json(arguments or {})
        except NOT_JSON as exc:
            raise Invalid(f"the arguments of {what} cannot be sent: {exc}") from exc
        return answers.data(await self._call(path, b"Content-Type: application/json\r\n" + more, body, timeout, what))

    async def _get(self, path: str) -> Any:
        return answers.data(await self._fetch(path))

    async def _fetch(self, path: str, retries: int | None = None, timeout: float | None = None) -> http.Response:
        sandbox = await self._ready()
        request = self._request(sandbox, "GET", path, self._headers + spans.context(), retries=retries)
        return await self._within(self.timeout if timeout is None else timeout, request, path, sandbox)

    async def _call(
        self, path: str, headers: bytes, body: bytes, timeout: float | None, what: str, method: str = "POST"
    ) -> http.Response:
        """Ask for something that has an effect, and write it down."""
        sandbox = await self._ready()
        journal, entry = self.journal, Entry(what, method, path, headers, body, timeout)
        journal.begin(entry)
        try:
            response = await self._ask(path, headers, body, timeout, what, method)
        except BaseException as exc:
            journal.unanswered(entry, harmless=isinstance(exc, (SandboxLost, http.NotSent)))
            raise
        if (response.status == SandboxLost.status and sandbox.relayed) or _cut_short(path, response):
            journal.unanswered(entry, harmless=False)
        else:
            journal.answered(entry, response)
        return response

    async def _again(self, entry: Entry) -> http.Response:
        """Ask for what somebody asked of another sandbox."""
        return await self._call(entry.path, entry.headers, entry.body, entry.timeout, entry.what, entry.method)

    async def _query(self, path: str, headers: bytes, body: bytes, what: str) -> http.Response:
        """Ask for something that has no effect."""
        return await self._ask(path, headers, body, None, what)

    async def _ask(
        self,
        path: str,
        headers: bytes,
        body: bytes,
        timeout: float | None,
        what: str,
        method: str = "POST",
        call_id: str = "",
    ) -> http.Response:
        """Ask for something: its id makes asking again safe, and cancelling possible."""
        sandbox = await self._ready()
        call_id = call_id or secrets.token_hex(12)
        with spans.Asking(what, self.env_name, sandbox) as asking:
            more = nesting.header() + asking.header
            headers = b"%b%b%bAEnv-Call-Id: %b\r\n" % (headers, self._headers, more, call_id.encode())
            request = self._request(sandbox, method, path, headers, body)
            try:
                seconds = self.timeout if timeout is None else timeout
                return asking.answered(await self._within(seconds, request, what, sandbox))
            except (asyncio.CancelledError, CallTimeout):
                self._say_cancelled(sandbox, call_id)
                raise

    def _request(
        self, sandbox: Sandbox, method: str, path: str, headers: bytes, body: bytes = b"", retries: int | None = None
    ) -> Coroutine[Any, Any, http.Response]:
        return http.request(
            *(method, sandbox.url, path),
            headers=headers,
            body=body,
            retries=self.max_retries if retries is None else retries,
            repeatable=method == "GET" or not sandbox.shared,  # another replica would not know the call
            most=self._most,
            reconnecting=RESTART if sandbox.relayed else 0.0,
        )

    async def _within(
        self, seconds: float, request: Coroutine[Any, Any, http.Response], what: str, sandbox: Sandbox
    ) -> http.Response:
        failed: AEnvError | http.Response
        try:
            async with asyncio.timeout(seconds) as limit:
                response = await request
                gone = NotFound if sandbox.shared and response.status == NotFound.status else SandboxLost
                if response.status != gone.status:
                    return response
                failed = answers.error(response) if sandbox.relayed else response
        except TimeoutError:
            if not limit.expired():
                raise
            failed = CallTimeout(f"{what} did not answer within {seconds:g} s")
        except http.NotSent as exc:
            failed = exc if sandbox.relayed else SandboxLost(f"the sandbox is gone: {exc}")
        except NetworkError as exc:
            failed = exc
        if reason := await self._reason(sandbox, 0.0 if isinstance(failed, CallTimeout) else NEWS):
            cause = failed if isinstance(failed, AEnvError) else None
            raise loss(reason)(f"the sandbox is gone: {reason}") from cause
        if sandbox.relayed and isinstance(failed, SandboxLost) and await self._lives(sandbox):
            return response  # what its author's code uses is lost, or a gateway was wrong
        if isinstance(failed, AEnvError):
            raise failed
        return failed  # the sandbox itself says what is wrong, and nobody knows better

    async def _lives(self, sandbox: Sandbox) -> bool:
        """Whether a sandbox still answers that is said to be lost, or nobody can tell."""
        try:
            async with asyncio.timeout(ASKING):
                found = await http.request("GET", sandbox.url, "/health", headers=self._headers, retries=0)
            return found.status != SandboxLost.status
        except NetworkError:
            return True
        except TimeoutError:
            return False

    def _control(
        self, power: str, asked: str, hint: str = "an attached sandbox is its starter's to control"
    ) -> Control:
        if not hasattr(self._provision, power):
            raise Unsupported(f"this sandbox cannot be {asked}: what provided it has no such power", hint=hint)
        return cast(Control, self._provision)

    async def _reason(self, sandbox: Sandbox, patience: float = 0.0) -> str:
        """Why the sandbox is gone, when somebody knows, or learns it within so many seconds."""
        if not hasattr(self._provision, "reason"):
            return ""
        with suppress(AEnvError, TimeoutError):
            async with asyncio.timeout(ASKING):
                return await self._control("reason", "").reason(sandbox.id, patience)
        return ""

    def _say_cancelled(self, sandbox: Sandbox, call_id: str) -> None:
        async def farewell() -> None:
            with suppress(AEnvError, TimeoutError):
                async with asyncio.timeout(FAREWELL):
                    await http.request("DELETE", sandbox.url, f"/calls/{call_id}", headers=self._headers)

        task = asyncio.get_running_loop().create_task(farewell())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)


def _cut_short(path: str, response: http.Response) -> bool:
    """Whether an answer says that the sandbox waited no longer for a call, which may go on there."""
    if b'"call_timeout"' not in response.body:
        return False
    try:
        _ = mcp.tool_result(response) if path == "/mcp" else answers.data(response)
    except CallTimeout:
        return True
    except AEnvError:
        pass
    return False
