"""A desk with a drawer: tools with state, a reward, a function, and ways to be slow, loud and gone."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from pathlib import Path
from typing import Any

from aenv import Context, register_function, register_reset, register_reward, register_tool

drawer: list[str] = []


@register_tool
def put(thing: str) -> int:
    """Put something into the drawer.

    Args:
        thing: What to put in.
    """
    drawer.append(thing)
    print(f"put {thing}", flush=True)
    return len(drawer)


@register_tool
def look() -> list[str]:
    """What is in the drawer."""
    return drawer


@register_tool
def about(ctx: Context) -> dict[str, Any]:
    """What the desk knows of itself."""
    return {
        "id": ctx.instance_id,
        "colour": os.environ.get("COLOUR"),
        "size": os.environ.get("SIZE"),
        "arguments": list(ctx.arguments),
        "seed": ctx.seed,
    }


@register_tool
async def wait_for(file: str) -> str:
    """Wait until a file is there.

    Args:
        file: Its path.
    """
    Path(f"{file}.awaited").touch()
    while not Path(file).exists():
        await asyncio.sleep(0.02)
    return "there"


@register_tool
def serve(port: int) -> str:
    """Listen on a port, as a program in the sandbox would."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"desk at {self.path}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return "listening"


@register_reward
def tidy(bonus: float = 0.0) -> float:
    """The emptier, the better."""
    return 1.0 / (1 + len(drawer)) + bonus


@register_function
def count() -> dict[str, int]:
    """How many things are in the drawer."""
    return {"things": len(drawer)}


@register_reset
def empty(seed: int | None = None) -> dict[str, Any]:
    """Begin again."""
    drawer.clear()
    return {"seed": seed}
