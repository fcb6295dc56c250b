"""``python -m aenv.runtime PATH``: serve one project. What a container runs."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from aenv import config
from aenv.errors import AEnvError, Invalid

if TYPE_CHECKING:
    from aenv.runtime.server import Served


def main(argv: list[str] | None = None, *, host: str = "127.0.0.1") -> int:
    gc.disable()  # what is imported is hardly ever garbage, and to look at it again and again is a tenth of the start
    from aenv.runtime.delivery import receive
    from aenv.runtime.server import run
    from aenv.runtime.warm import UNFIT, Unfit

    gc.freeze()
    gc.enable()
    given = sys.argv[1:] if argv is None else argv
    given, arguments = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(prog="python -m aenv.runtime", description="Serve a project over MCP and HTTP.")
    parser.add_argument("path", nargs="?", default=".", type=Path, help="the project's directory")
    parser.add_argument("--host", default=host, help="address to listen on (0.0.0.0 in a container)")
    parser.add_argument("--port", default=8081, type=int, help="port to listen on; 0 for any free one")
    parser.add_argument("--socket", help="unix socket to listen on, instead of a port")
    parser.add_argument("--open-access", action="store_true", help="ask for no token, also beyond loopback")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input does")
    parser.epilog = "Arguments after -- reach the author's code as sys.argv[1:]."
    options = parser.parse_args(given)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        path, work = options.path, config.get("work")
        host, port = _address(options.host, options.port)
        if config.get("delivery"):
            brought, unpacked = receive(host, port, Path(work or tempfile.gettempdir()))
            arguments = brought.arguments
            path, work = (path, work) if unpacked is None else (unpacked, "")
        run(
            path,
            host=host,
            port=port,
            arguments=arguments,
            open_access=options.open_access,
            unix=config.get("socket", options.socket),
            work=work,
            lifeline=_lifeline() if options.until_eof or config.get("until_eof") else None,
            on_ready=_ready,
        )
    except Unfit as exc:
        sys.stderr.write(f"{exc}\n")
        sys.stderr.flush()
        os._exit(UNFIT)  # whatever threads the import left
    except AEnvError as exc:
        sys.stderr.write(f"error: {exc}\n")
        if exc.hint:
            sys.stderr.write(f"hint: {exc.hint}\n")
        return 1
    return 0


def _address(host: str, port: int) -> tuple[str, int]:
    """Where to listen: an engine knows better than the command of an image."""
    told = config.get("listen")
    if not told:
        return host, port
    name, _, number = told.rpartition(":")
    if not name or not number.isdigit():
        raise Invalid(f"AENV_LISTEN {told!r} is not host:port")
    return name, int(number)


def _lifeline() -> int:
    """Standard input, moved out of the way of the author's code."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def _ready(served: Served) -> None:
    place = served.url if served.url.startswith("unix:") else f"{served.url}/mcp"
    sys.stderr.write(f"serving {len(served.tools)} tools at {place}\n")
    if served.owner_token:
        sys.stderr.write(f"owner token (shown once): {served.owner_token}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
