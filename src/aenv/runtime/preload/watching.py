"""One import, watched as it happens, and what is to be said of it.

Calls are seen by a profile function, so nothing is replaced that an author's module could keep, but for ``sys.argv``,
which is seen when it is kept. What the import leaves behind in the process is compared with what was there before.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import threading
from _socket import socket as _socket_type
from asyncio import base_events
from collections.abc import Hashable
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any

import msgspec

from aenv.runtime.preload import acts, remains
from aenv.runtime.preload.acts import ACTS, CLOCK, GENERATOR, IDENTITY, NETWORK, RANDOM, Act, shown
from aenv.runtime.preload.arguments import Arguments
from aenv.runtime.preload.authors import Authors, frames
from aenv.runtime.preload.hidden import handed


class Verdict(msgspec.Struct, frozen=True):
    """What was seen of an import."""

    reasons: tuple[str, ...] = ()
    """Why the project may not be forked after it, each with its place; none when it may."""
    variables: tuple[str, ...] = ()
    """What libraries read from the environment, and what anybody changed in it: names, or patterns such as
    ``OMP_*``. ``*`` is all of it."""
    changes: dict[str, str | None] = msgspec.field(default_factory=dict)
    """What the import set in the environment, None where it removed; an instance has to keep it."""

    @property
    def clean(self) -> bool:
        return not self.reasons


class Watch:
    """``begin``, import, ``end``; then the ``verdict``."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._reasons: dict[str, None] = {}
        self._noted: set[tuple[str, str, int]] = set()
        self._variables: set[str] = set()
        self._changes: dict[str, str | None] = {}
        self._written: dict[str, tuple[Any, bytes, bytes | None]] = {}
        """Variables as they were before they were first changed, with the mapping and the key they have there."""
        self._listed: set[str] = set()
        """The files that went through the whole environment; what they read of it one by one adds nothing."""
        self._places: dict[Hashable, str] = {}
        """Where a thread, a descriptor or a handler comes from, by its key in ``remains``."""
        self._pending: dict[FrameType, Any] = {}
        """Calls whose end matters, with what was so at their begin."""
        self._validated = False
        self._on = False
        environ: Any = type(os.environ)
        self._setdefault = environ.setdefault.__code__
        self._in_python = {
            id(function.__code__): seen
            for function, seen in (
                (environ.__getitem__, self._variable_read),
                (environ.__setitem__, self._variable_changed),
                (environ.__delitem__, self._variable_changed),
                (environ.__iter__, self._environment_read),
                (environ.__len__, self._environment_read),
                (environ.__repr__, self._environment_read),
                (random.Random.seed, self._seeded),
                (random.Random.setstate, self._seeded),
                (platform.node, self._host_asked),
                (base_events.BaseEventLoop.__init__, self._loop_made),
            )
        }
        """Functions written in Python that are looked for."""

    def verdict(self) -> Verdict:
        """What was seen; complete when the watch has ended."""
        variables = {"*"} if "*" in self._variables else self._variables
        return Verdict(tuple(self._reasons), tuple(sorted(variables)), self._changes)

    def begin(self) -> None:
        self._authors = Authors(self._source, sys._getframe(1))
        self._before = remains.Before()
        self._tasks = remains.tasks()
        self._modules = set(sys.modules)
        self._numpy = _numpy_state()
        self._argv, watched = sys.argv, Arguments(sys.argv)
        watched.looked = self._arguments_read
        sys.argv = watched
        self._profiles = sys.getprofile(), threading.getprofile()
        self._on = True
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def failed(self, exc: BaseException) -> None:
        self._reasons[f"fails with {type(exc).__name__}"] = None

    def end(self) -> None:
        displaced = sys.getprofile() != self._event
        sys.setprofile(self._profiles[0])
        threading.setprofile(self._profiles[1])
        self._on = False
        if displaced:
            self._reasons["sets a profile function, so that not everything was seen"] = None
        self._put_arguments_back()
        try:
            self._compare()
        except Exception as exc:  # whatever an author's modules are made of
            self._reasons[f"could not be watched ({exc!r})"] = None
        self._pending.clear()
        self._authors.forget()

    # As it happens

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._on:  # a thread that outlives the watch
            sys.setprofile(None)
            return
        try:
            if event == "call":
                if seen := self._in_python.get(id(frame.f_code)):
                    seen(frame)
            elif event == "c_call":
                if arg.__name__ in acts.NAMES:
                    self._called(frame, arg)
            elif event != "return" and frame in self._pending:
                before = self._pending.pop(frame)
                if event == "c_return":
                    self._returned(frame, arg, before)
        except Exception as exc:  # it must not reach the author's code
            self._note(f"could not be watched ({exc!r})", frame)

    def _called(self, frame: FrameType, function: BuiltinFunctionType) -> None:
        key, owner = (function.__module__, function.__name__), function.__self__
        act = ACTS.get(key)
        if key in acts.LOADING or (act and act.once_done):
            self._pending[frame] = None
        elif key in acts.OPENING:
            self._pending[frame] = remains.descriptors()
        elif act:
            self._acted(act, frame, function)
        elif key in acts.STARTING:
            self._thread_started(frame)
        elif key == acts.HANDLING:
            self._places["signal", int(frame.f_locals.get("signalnum", 0))] = self._authors.trail(frame)
        elif key in acts.MOVING:
            self._places["directory"] = self._authors.trail(frame)
        elif key[1] in acts.CLOCK_METHODS and isinstance(owner, type):
            self._by_project(f"{CLOCK} ({owner.__name__}.{key[1]})", frame)
        elif owner is GENERATOR and key[1] in ("random", "getrandbits"):
            self._by_project(f"{RANDOM} (random)", frame)
        elif key[1] in acts.SOCKET_METHODS and isinstance(owner, _socket_type):
            self._by_project(f"{NETWORK} ({key[1]})", frame)
        elif key[1] in acts.VALIDATING and self._authors.actor(frame):
            self._validated = True

    def _returned(self, frame: FrameType, function: BuiltinFunctionType, before: Any) -> None:
        key = (function.__module__, function.__name__)
        if key in acts.LOADING:
            self._library_loaded(frame)
        elif self._authors.of(frame) == "import":
            return  # bytecode is written
        elif key in acts.OPENING:
            for descriptor in remains.descriptors().keys() - before.keys():
                self._opened(frame, descriptor)
        else:
            self._acted(ACTS[key], frame, function)

    def _acted(self, act: Act, frame: FrameType, function: BuiltinFunctionType) -> None:
        if id(frame.f_code) in self._in_python:  # such as putenv by os.environ itself
            return
        if act.text in (CLOCK, IDENTITY) and self._authors.is_standard(frame, acts.FOR_THEMSELVES):
            return
        if act.by_anyone:
            self._note(f"{act.text} ({shown(function)})", frame)
        else:
            self._by_project(f"{act.text} ({shown(function)})", frame)

    def _opened(self, frame: FrameType, descriptor: int) -> None:
        path = remains.path_of(descriptor)
        self._places["descriptor", descriptor] = self._authors.trail(frame)
        if remains.is_written(descriptor):
            self._note(f"writes {path}", frame)
        elif path.startswith("/proc/"):
            self._by_project(f"reads {path}", frame)
        elif path in ("/dev/random", "/dev/urandom"):
            self._by_project(f"{RANDOM} ({path})", frame)

    def _library_loaded(self, frame: FrameType) -> None:
        if (count := remains.tasks()) > self._tasks:
            self._places["tasks"] = self._authors.trail(frame)
        self._tasks = count
        self._numpy = self._numpy or _numpy_state()

    def _thread_started(self, frame: FrameType) -> None:
        thread = frame.f_locals.get("self")
        if isinstance(thread, threading.Thread):
            self._places[thread] = self._authors.trail(frame)
        else:
            self._note("starts a thread (_thread)", frame)

    def _variable_read(self, frame: FrameType) -> None:
        name = os.fsdecode(frame.f_locals["key"])
        reader = self._authors.reader(frame)
        if reader is None or self._reads_for_itself(frame):
            self._variables.add(name)
        elif reader.f_code.co_filename not in self._listed:
            self._note(f"reads the variable {name}", reader)

    def _reads_for_itself(self, frame: FrameType) -> bool:
        """Whether it is a part of the standard library that has variables of its own, or ``os.environ.setdefault``,
        whose outcome another instance has too, unless it sets the variable."""
        return any(
            found.f_code is self._setdefault or self._authors.is_standard(found, acts.CONFIGURABLE)
            for found in islice(frames(frame), 4)
        )

    def _environment_read(self, frame: FrameType) -> None:
        if reader := self._authors.reader(frame):
            self._listed.add(reader.f_code.co_filename)
            self._note("reads the whole environment", reader)
        else:
            self._variables.add("*")

    def _variable_changed(self, frame: FrameType) -> None:
        environ = frame.f_locals["self"]
        key = environ.encodekey(frame.f_locals["key"])
        self._written.setdefault(os.fsdecode(key), (environ, key, environ._data.get(key)))

    def _seeded(self, frame: FrameType) -> None:
        generator, given = frame.f_locals["self"], frame.f_locals.get("a", frame.f_locals.get("state"))
        if generator is GENERATOR:
            self._by_project(f"{RANDOM} (random)", frame)
        elif given is None and (self._authors.actor(frame) or self._authors.library(frame)):
            # A library's own generator, too: forks would all draw the same from it.
            self._note(f"{RANDOM} (random.{type(generator).__name__})", frame)

    def _host_asked(self, frame: FrameType) -> None:
        self._by_project(f"{IDENTITY} (platform.node)", frame)

    def _loop_made(self, frame: FrameType) -> None:
        self._by_project("makes an event loop", frame)

    def _arguments_read(self, frame: FrameType, only_name: bool) -> None:
        if self._authors.of(frame) == "project" or not only_name:
            self._note("reads the arguments (sys.argv)", frame)

    def _by_project(self, text: str, frame: FrameType) -> None:
        if actor := self._authors.actor(frame):
            self._note(text, actor)

    def _note(self, text: str, frame: FrameType) -> None:
        key = (text, frame.f_code.co_filename, frame.f_lineno)
        if self._authors.of(frame) != "project" or key not in self._noted:
            self._noted.add(key)
            self._reasons[f"{text} at {self._authors.trail(frame)}"] = None

    # When it is over

    def _put_arguments_back(self) -> None:
        watched, sys.argv = sys.argv, self._argv
        if not isinstance(watched, Arguments):
            self._reasons["replaces sys.argv"] = None
            return
        watched.looked = None
        if sys.getrefcount(watched) > 2:  # this name, and the argument of the call
            self._reasons["keeps sys.argv"] = None

    def _compare(self) -> None:
        for name, (environ, key, before) in self._written.items():
            now = environ._data.get(key)
            if now != before:
                self._changes[name] = None if now is None else os.fsdecode(now)
                self._variables.add(name)
        if self._numpy != _numpy_state():
            self._reasons[f"{RANDOM} (numpy.random)"] = None
        new = {name: sys.modules[name] for name in sorted(sys.modules.keys() - self._modules)}
        if "torch" in new and new["torch"].initial_seed() != acts.TORCH_SEED:
            self._reasons[f"{RANDOM} (torch)"] = None
        for what, origin in self._before.remains():
            place = self._places.get(origin)
            self._reasons[f"{what}, from {place}" if place else what] = None
        for module in new.values():
            self._look_at(module)

    def _look_at(self, module: ModuleType) -> None:
        file = _file(module)
        kind = self._authors.kind(file)
        if file.endswith(tuple(EXTENSION_SUFFIXES)) and kind != "standard":
            self._variables.update(acts.NATIVE)
        elif file.endswith(".py") and kind == "project":
            for what, to, line in handed(module, file, validated=self._validated):
                place = self._authors.place(file, line)
                self._reasons[f"hands {what} to {to}, which may call it, at {place}"] = None


def _file(module: object) -> str:
    """A module's file, without waking one that loads when it is asked."""
    names = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
    return str(names.get("__file__") or "")


def _numpy_state() -> tuple[Any, ...] | None:
    """How far numpy's global generator is; None when there is none yet."""
    generator = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    if generator is None:
        return None
    state = generator.get_state(legacy=False)
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
