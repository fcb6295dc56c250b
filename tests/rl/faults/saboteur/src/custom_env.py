"""An environment that breaks where it is told to: by its arguments (``reset=kill``), by a tool's argument, or
by a reward's. What is left whole counts its work, and the count is the reward."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from aenv import Context, register_function, register_reset, register_reward, register_setup, register_tool

FOR_EVER = 3600.0
VALUES: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "minus-inf": float("-inf"),
    "bool": True,
    "text": "1.0",
    "none": None,
    "list": [1.0],
    "score-nan": {"score": float("nan")},
    "score-bool": {"score": True},
    "score-text": {"score": "1.0"},
    "no-score": {"reward": 1.0},
    "huge": 10**400,
}
done = 0


def do(what: str) -> Any:
    """Break so; a value is given back."""
    if what == "raise":
        raise RuntimeError("broken on purpose")
    if what == "base":
        raise SystemExit(3)
    if what == "hang":
        time.sleep(FOR_EVER)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FOR_EVER)
    if what == "exit":
        os._exit(0)
    if what == "memory":
        kept = []
        while True:
            kept.append(b"x" * 8_000_000)
    return VALUES.get(what)


def told(name: str) -> str:
    return dict(argument.partition("=")[::2] for argument in sys.argv[1:]).get(name, "")


@register_setup
def prepare() -> None:
    do(told("setup"))


@register_reset
def reset(seed: int | None = None) -> dict[str, Any]:
    global done
    done = 0
    do(told("reset"))
    return {"seed": seed}


@register_tool
def work(what: str = "") -> int:
    """Do some work, or break."""
    global done
    do(what)
    done += 1
    return done


@register_tool
def pause(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@register_function
def count() -> int:
    return done


@register_reward
def score(ctx: Context, what: str = "", value: float | None = None) -> Any:
    """How often work was done, or what was asked for."""
    found = do(what)
    if what in VALUES:
        return found
    return float(done) if value is None else value
