"""A page where a person says which web app they want, an agent builds it in an instance, and both see it grow.

    python app.py                          a scripted agent, with nothing to start and no model
    python app.py --model qwen3-coder      any server of OpenAI's API: OPENAI_BASE_URL, OPENAI_API_KEY

Each conversation is an episode in an instance of its own. It is scored and written down when it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import uvicorn
from scripted import Scripted
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from aenv import AEnvError, Environment
from aenv.rl import Episode, OpenAIAgent, Rules, Task, Trajectory, Writer, rollout

HERE = Path(__file__).parent
SYSTEM = """You build a small web app with your tools, in plain HTML, CSS and JavaScript, beginning with index.html.
The person you talk to sees the app beside this conversation while you work. Load nothing from other servers.
When you are done, say in a sentence or two what you made."""
MOST_SESSIONS, MOST_LETTERS = 8, 8000
QUIET = 30 * 60
"""Seconds after which a conversation ends in which nothing is said."""
PREVIEW = 600
"""Seconds that an address of the app is good for. The page asks for another when it loads the app again."""
PATIENCE = 20.0


class Speaker(Protocol):
    """A model, or what stands in for one: ``OpenAIAgent`` is one."""

    async def answer(self, env: Episode, message: str) -> str:
        """Do what one message asks for, and say so."""


class Session:
    """One conversation."""

    def __init__(self, speaker: Speaker, env: Environment, keep: Callable[[Trajectory], None]) -> None:
        """``keep`` is given the episode when it is over, however it ends."""
        self.env: Episode | None = None
        """While there is an instance."""
        self._speaker = speaker
        self._keep = keep
        self._heard: asyncio.Queue[str | None] = asyncio.Queue()
        self._busy = False
        self._messages: list[dict[str, Any]] = []
        self._port = 0
        self._over: Trajectory | None = None
        self._run = asyncio.create_task(self._running(env))

    async def _running(self, env: Environment) -> None:
        task = Task(id="conversation", system=SYSTEM)
        self._over = await rollout(env, self._play, task, rules=Rules(once=True))
        self._keep(self._over)

    async def _play(self, env: Episode, task: Task) -> None:
        env.hear({"role": "system", "content": task.system})
        self._messages = env.messages
        self._port = (await env.call_function("preview"))["port"]
        self.env = env
        try:
            while (message := await self._next()) is not None:
                await self._speaker.answer(env, message)
                self._busy = False
        finally:
            self.env, self._busy = None, False

    async def _next(self) -> str | None:
        try:
            return await asyncio.wait_for(self._heard.get(), QUIET)
        except TimeoutError:
            return None

    @property
    def state(self) -> str:
        """What the page shows it as."""
        return "over" if self._run.done() else "working" if self._busy else "ready" if self.env else "starting"

    def say(self, message: str) -> None:
        """A message of the person's, once the agent is ready."""
        self._busy = True
        self._heard.put_nowait(message)

    async def end(self) -> None:
        """Have it scored, and give the instance back. What the agent is at has no score."""
        if self.state == "ready":
            self._heard.put_nowait(None)
        else:
            self._run.cancel()
        await asyncio.wait((self._run,))

    def shown(self, begin: int) -> dict[str, Any]:
        """All there is to show, with the messages from one on."""
        failure = reward = None
        if self._run.done() and self._over is None:
            failure = "it was ended while the agent was at work"
        elif self._over and self._over.failure:
            failure = self._over.failure.reason
        elif self._over:
            reward = self._over.reward
        return {"state": self.state, "messages": self._messages[begin:], "failure": failure, "reward": reward}

    async def preview(self) -> str | None:
        """An address of the app, on an origin of its own, as long as there is an instance."""
        return await self.env.expose(self._port, ttl=PREVIEW) if self.env else None


class Desk:
    """All conversations, and what a browser asks of them."""

    def __init__(self, speaker: Speaker, env: Environment, keep: Callable[[Trajectory], None]) -> None:
        self._begun = partial(Session, speaker, env, keep)
        self._sessions: dict[str, Session] = {}
        routes = [
            Route("/", self.page),
            Route("/sessions", self.begin, methods=["POST"]),
            Route("/sessions/{id}", self.look),
            Route("/sessions/{id}/messages", self.say, methods=["POST"]),
            Route("/sessions/{id}/files", self.files),
            Route("/sessions/{id}/preview", self.preview),
            Route("/sessions/{id}/end", self.end, methods=["POST"]),
        ]
        # A page of another site may neither read nor ask: its name is not ours, and it may send no JSON.
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"])
        answers: Any = {AEnvError: failed, Refused: refused}
        self.app = Starlette(routes=routes, middleware=[hosts], exception_handlers=answers, lifespan=self._living)

    async def page(self, request: Request) -> Response:
        return FileResponse(HERE / "page.html")

    async def begin(self, request: Request) -> Response:
        await asked(request)
        self._sessions = {id: session for id, session in self._sessions.items() if session.state != "over"}
        if len(self._sessions) >= MOST_SESSIONS:
            raise Refused(429, f"there are {MOST_SESSIONS} conversations already: end one first")
        id = uuid4().hex
        self._sessions[id] = self._begun()
        return JSONResponse({"id": id})

    async def look(self, request: Request) -> Response:
        """Answers when there is something new, or when nothing was for a while."""
        session, state = self._of(request), request.query_params.get("state")
        given = request.query_params.get("from", "0")
        if not given.isdecimal():
            raise Refused(400, "from is the number of a message")
        begin = int(given)
        until = time.monotonic() + PATIENCE
        while True:
            found = session.shown(begin)
            if found["messages"] or found["state"] != state or time.monotonic() > until:
                return JSONResponse(found)
            await asyncio.sleep(0.1)

    async def say(self, request: Request) -> Response:
        message = (await asked(request)).get("message")
        if not isinstance(message, str) or not 0 < len(message.strip()) <= MOST_LETTERS:
            raise Refused(400, f"a message is a text of up to {MOST_LETTERS} letters")
        if (session := self._of(request)).state != "ready":
            raise Refused(409, "the agent is not ready: wait until it has answered")
        session.say(message)
        return JSONResponse({})

    async def files(self, request: Request) -> Response:
        env = self._of(request).env
        return JSONResponse(await env.call_function("files") if env else {})

    async def preview(self, request: Request) -> Response:
        if (address := await self._of(request).preview()) is None:
            raise Refused(409, "there is no app yet, or none any more")
        return RedirectResponse(address)

    async def end(self, request: Request) -> Response:
        await asked(request)
        session = self._of(request)
        await session.end()
        return JSONResponse(session.shown(0))

    @asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*(session.end() for session in self._sessions.values()))

    def _of(self, request: Request) -> Session:
        found = self._sessions.get(request.path_params["id"])
        if found is None:
            raise Refused(404, "there is no such conversation: begin another")
        return found


class Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def refused(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Refused)
    return JSONResponse({"error": str(exc)}, exc.status)


async def failed(request: Request, exc: Exception) -> Response:
    return JSONResponse({"error": str(exc)}, 502)


async def asked(request: Request) -> dict[str, Any]:
    """The JSON of a request."""
    if request.headers.get("content-type") != "application/json":
        raise Refused(415, "send JSON")
    try:
        found = json.loads(await request.body())
    except ValueError as exc:
        raise Refused(400, f"that is no JSON: {exc}") from exc
    return found if isinstance(found, dict) else {}


@contextmanager
def platform() -> Iterator[str]:
    """Where instances come from: the platform of AENV_SYSTEM_URL, or one of this project's own."""
    if url := os.environ.get("AENV_SYSTEM_URL"):
        yield url
        return
    line = (sys.executable, "-m", "aenv", "run", "--quiet", "--port", "0", "--control-port", "0", "-o", "json")
    with tempfile.TemporaryFile("w+") as said:
        # In a session of its own: Ctrl-C is for us, and conversations are scored before their platform ends.
        process = subprocess.Popen(
            line, cwd=HERE, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        with process:
            assert process.stdout is not None
            told = ""
            for part in process.stdout:
                told += part
                if part == "}\n":
                    break
            else:
                said.seek(0)
                sys.exit(f"the platform did not start:\n{said.read()}")
            try:
                yield json.loads(told)["control"]
            finally:
                process.terminate()


async def serve(speaker: Speaker, url: str, port: int, writer: Writer) -> None:
    desk = Desk(speaker, Environment("mini-program", aenv_url=url, ttl="2h"), writer.write)
    server = uvicorn.Server(uvicorn.Config(desk.app, log_level="warning", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", port)) as listening:
        print(f"open http://localhost:{listening.getsockname()[1]}, and stop with Ctrl-C", flush=True)
        await server.serve([listening])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the name of a model; without one, the agent is scripted")
    parser.add_argument("--port", type=int, default=8090, help="0 for any that is free")
    parser.add_argument("--out", type=Path, default=Path("runs/mini-program/trajectories.jsonl"))
    given = parser.parse_args()
    speaker = OpenAIAgent(given.model) if given.model else Scripted()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with platform() as url, Writer(given.out) as writer, suppress(KeyboardInterrupt):
        asyncio.run(serve(speaker, url, given.port, writer))
    print(f"the conversations are written down: aenv trajectory show {given.out}")


if __name__ == "__main__":
    main()
