"""What makes an import unfit to be forked: the functions that are looked for, and what a reason says of each."""

from __future__ import annotations

import random
from types import BuiltinFunctionType
from typing import Any, NamedTuple

CLOCK, RANDOM, IDENTITY = "reads the clock", "draws randomness", "asks where or as whom it runs"
NETWORK = "uses the network"
_PROCESS = "starts a process"


class Act(NamedTuple):
    """Functions of one module that is written in C."""

    text: str
    module: str
    names: str
    by_anyone: bool = False
    """Whether it counts when a library does it for itself, too."""
    once_done: bool = False
    """Whether it counts only when it succeeded."""


_ACTS = (
    Act(
        *(CLOCK, "time"),
        "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns thread_time "
        "thread_time_ns clock_gettime clock_gettime_ns localtime gmtime ctime asctime strftime",
    ),
    Act(CLOCK, "posix", "times"),
    Act(RANDOM, "posix", "urandom getrandom"),
    Act(RANDOM, "_uuid", "generate_time_safe"),
    Act(RANDOM, "_ssl", "RAND_bytes RAND_priv_bytes"),
    Act(IDENTITY, "posix", "getpid getppid getpgid getpgrp getsid getlogin getuid geteuid getgid getegid getgroups"),
    Act(IDENTITY, "posix", "getcwd getcwdb uname"),
    Act(IDENTITY, "_socket", "gethostname"),
    Act(_PROCESS, "posix", "fork forkpty posix_spawn posix_spawnp system", by_anyone=True),
    Act(_PROCESS, "_posixsubprocess", "fork_exec", by_anyone=True),
    Act(NETWORK, "_socket", "getaddrinfo getnameinfo gethostbyname gethostbyname_ex gethostbyaddr"),
    Act(
        *("makes or changes files", "posix"),
        "mkdir mkfifo mknod rename replace remove unlink rmdir symlink link truncate ftruncate",
        by_anyone=True,
        once_done=True,
    ),
    Act("sets a timer", "_signal", "alarm setitimer set_wakeup_fd", by_anyone=True),
    Act("changes the environment past os.environ", "posix", "putenv unsetenv"),
)
ACTS = {(act.module, name): act for act in _ACTS for name in act.names.split()}
"""By module and name."""

CLOCK_METHODS = ("now", "utcnow", "today")
"""Methods of classes that read the clock: ``datetime``'s, and those of libraries like it."""
SOCKET_METHODS = ("bind", "connect", "connect_ex", "listen", "sendto")
VALIDATING = ("validate_python", "validate_json", "validate_strings")
"""Methods of pydantic that may call default factories unseen."""
OPENING = {("io", "open"), ("_io", "open"), ("posix", "open")}
LOADING = {("_imp", "create_dynamic"), ("_imp", "exec_dynamic")}
STARTING = {("_thread", "start_new_thread"), ("_thread", "start_joinable_thread")}
HANDLING = ("_signal", "signal")
MOVING = {("posix", "chdir"), ("posix", "fchdir")}
NAMES = frozenset(
    [name for _, name in (*ACTS, *OPENING, *LOADING, *STARTING, *MOVING, HANDLING)]
    + ["random", "getrandbits", *CLOCK_METHODS, *SOCKET_METHODS, *VALIDATING]
)
"""A function of any other name is not looked at."""

FOR_THEMSELVES = ("/logging/__init__.py", "/platform.py", "/queue.py", "/threading.py")
"""Parts of the standard library that ask for the clock or the process and tell their caller nothing of it."""
CONFIGURABLE = ("/gettext.py", "/locale.py", "/shutil.py", "/subprocess.py")
"""Parts of it that read variables as a library does: names of their own, whoever calls."""
CALLING_IN_PYTHON = ("aenv", "attr", "attrs", "dataclasses")
"""Packages that call what they are handed where it is seen."""
NATIVE = (
    *("BLIS_*", "CUDA_*", "GOMP_*", "GOTO_*", "HIP_*", "KMP_*", "MKL_*", "NVIDIA_*", "OMP_*", "OPENBLAS_*"),
    *("PYTORCH_*", "ROCR_*", "TF_*", "VECLIB_*", "XLA_*"),
)
"""Variables that compiled libraries read when they are loaded, unseen from Python."""
TORCH_SEED = 67280421310721
"""What torch draws from until somebody seeds it."""
GENERATOR: Any = getattr(random.random, "__self__", None)
"""The generator behind the functions of ``random``."""
_MODULES = {"posix": "os", "_posixsubprocess": "subprocess"}


def shown(function: BuiltinFunctionType) -> str:
    """A function as an author knows it: ``os.urandom``, not ``posix.urandom``."""
    module = str(function.__module__)
    return f"{_MODULES.get(module, module.lstrip('_'))}.{function.__name__}"


def gives_something_else(function: Any) -> bool:
    """Whether it is a function in C whose answer another process would not get."""
    if not isinstance(function, BuiltinFunctionType):
        return False
    if function.__self__ is GENERATOR or (function.__name__ in CLOCK_METHODS and isinstance(function.__self__, type)):
        return True
    act = ACTS.get((str(function.__module__), function.__name__))
    return act is not None and act.text in (CLOCK, RANDOM, IDENTITY)
