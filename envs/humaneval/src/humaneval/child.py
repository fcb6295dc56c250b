"""The process that runs the agent's code. It is started with this text as its program, confines itself, and only then
gets to the code.

Landlock takes from it every file but the standard library, the system's programs and its scratch directory: not the
benchmark's answers, not the project, not other processes. Its input begins with its job. Imports nothing but
the standard library.
"""

import ctypes
import importlib.util
import json
import os
import resource
import sys
from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_NO_NEW_PRIVS = 38
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_ALL = (1 << 13) - 1
"""Every right over files that the first version of Landlock knows."""
_CONNECT_AND_BIND = 3
_SIGNALS_AND_SOCKETS = 3
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
_LARGEST_FILE = 16 * 1024 * 1024


def landlock_version() -> int:
    """Which version of Landlock the kernel has; under 1 where it has none."""
    if sys.platform != "linux":
        return 0
    return int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, ctypes.c_size_t(0), 1))


def confine(scratch: str, hidden: list[str]) -> None:
    """Give up all files but those of the system and of ``scratch``, and what is ``hidden`` among them."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = landlock_version()
    rights = (ctypes.c_uint64 * 3)(_ALL, _CONNECT_AND_BIND, _SIGNALS_AND_SOCKETS)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(_CREATE, rights, ctypes.c_size_t(size), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "Landlock makes no rules")

    def allow(path: str, access: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        if not os.path.isdir(path):
            access &= _EXECUTE | _WRITE | _READ
        rule = access.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder, signed=True)
        if libc.syscall(_ADD, rules, 1, rule, 0):
            raise OSError(ctypes.get_errno(), f"Landlock takes no rule for {path}")
        os.close(descriptor)

    def allow_but_hidden(path: str) -> None:
        if any(path == one or path.startswith(f"{one}/") for one in hidden):
            return
        if any(one.startswith(f"{path}/") for one in hidden):
            allow(path, _LIST)
            for name in os.listdir(path):
                allow_but_hidden(os.path.realpath(os.path.join(path, name)))
        else:
            allow(path, _EXECUTE | _READ | _LIST)

    for path in {os.path.realpath(path) for path in (*_SYSTEM, sys.base_prefix, sys.base_exec_prefix)}:
        if os.path.exists(path):
            allow_but_hidden(path)
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        allow(path, _READ | _WRITE)
    allow(scratch, _ALL)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock does not hold")
    os.close(rules)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    # Nothing that it starts could outlive it: it starts nothing.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def run(job: dict[str, Any]) -> None:
    """Become an interpreter that runs the code."""
    confine(job["scratch"], job["hidden"])
    os.execv(sys._base_executable, ["python", "-I", "-S", "-B", "main.py"])  # noqa: S606


def check(job: dict[str, Any], answer: int) -> None:
    """The benchmark's own check, whose verdict the code can forge: it runs in the same process."""
    spec = importlib.util.spec_from_file_location("execution", job["execution"])
    assert spec is not None
    assert spec.loader is not None
    execution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execution)
    confine(job["scratch"], job["hidden"])
    write, found = os.write, []
    write(answer, b"\n")  # from now on its time counts
    execution.unsafe_execute(job["problem"], job["completion"], job["timeout"], found)
    write(answer, json.dumps(found[:1]).encode())


def serve(job: dict[str, Any], answer: int) -> None:
    """Define what was submitted, and call it as often as asked. No test is in this process."""
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    told = os.fdopen(answer, "w", encoding="utf-8")
    confine(job["scratch"], job["hidden"])
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    space: dict[str, Any] = {}
    try:
        exec(job["program"], space)  # noqa: S102
        function = space[job["entry_point"]]
    except BaseException as exc:
        told.write(json.dumps({"raised": f"{type(exc).__name__}: {exc}"}) + "\n")
        return
    told.write(json.dumps({"ready": True}) + "\n")
    told.flush()
    for line in asked:
        try:
            answered = json.dumps({"result": encode(function(*decode(json.loads(line))))})
        except BaseException as exc:
            answered = json.dumps({"raised": f"{type(exc).__name__}: {exc}"[:1000]})
        told.write(f"{answered}\n")
        told.flush()


class Opaque:
    """A value that cannot be told in another process. It equals nothing."""


def encode(value: Any) -> Any:
    """A value as JSON, by what it is and not by what its class says of it; ``decode`` makes a plain one of it."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind.__new__(kind, value)
    if value is None:
        return None
    if isinstance(value, list):
        return [encode(one) for one in list.__iter__(value)]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(one) for one in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in dict.items(value)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"opaque": type(value).__name__}


def decode(told: Any) -> Any:
    """What ``encode`` was given, of plain types only."""
    if isinstance(told, list):
        return [decode(one) for one in told]
    if not isinstance(told, dict):
        return told
    ((kind, parts),) = told.items()
    match kind:
        case "tuple":
            return tuple(decode(one) for one in parts)
        case "set":
            return {decode(one) for one in parts}
        case "frozenset":
            return frozenset(decode(one) for one in parts)
        case "dict":
            return {decode(key): decode(one) for key, one in parts}
        case "complex":
            return complex(*parts)
    return Opaque()


def main(mode: str, length: int, answer: int) -> None:
    """Read the job, and not a byte more: what follows is for the code, or is calls."""
    text = b""
    while len(text) < length:
        text += os.read(0, length - len(text))
    job = json.loads(text)
    if mode == "run":
        run(job)
    elif mode == "check":
        check(job, answer)
    else:
        serve(job, answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
