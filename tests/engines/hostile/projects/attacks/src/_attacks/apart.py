"""Something dangerous: in a process of its own, whose end is a result too, and nowhere but in a jail."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any


def apart(work: Callable[[], Any], patience: int = 20) -> Any:
    """What ``work`` returns in a forked process; a dict with ``errno`` or ``signal`` when it fails or is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            signal.alarm(patience)
            try:
                answer = {"value": work()}
            except OSError as exc:
                answer = {"errno": exc.errno}
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return json.loads(said) if said else {"signal": 0}


def is_jail() -> bool:
    """Whether this is the root of a sandbox. Nowhere else may an attack go beyond what a test named."""
    is_container = os.path.ismount("/aenv/link")
    is_second = os.path.ismount("/task") and os.path.isdir("/stage")
    is_main = all(os.path.isdir(path) for path in ("/runtime/aenv", "/stage", "/home/sandbox"))
    return is_main or is_container or is_second


def in_a_jail() -> None:
    """Raise anywhere else, where what follows would hit this machine itself."""
    if not is_jail():
        raise RuntimeError("this attack is for jails only")
