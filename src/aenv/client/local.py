"""The embedded mode: an environment by its name, on this machine, with nothing to start.

A name is looked for, first match wins: the project in the current directory, the environments that were fetched to
``~/.aenv/envs``, the built-in ones, and the functions that the calling script itself registered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from aenv import config, project
from aenv.client.provision import Package
from aenv.engines import load_engine
from aenv.engines.base import Engine
from aenv.engines.specs import complete
from aenv.errors import AEnvError, Invalid, NotFound, did_you_mean
from aenv.models import EnvRef, Sandbox, SandboxSpec, Second
from aenv.project import Project
from aenv.project.builtin import ALIASES, builtin, builtin_names
from aenv.project.images import is_path, second_of
from aenv.project.stamp import stamp
from aenv.project.versions import admits, newest
from aenv.runtime import registry

_ENGINE = "process" if sys.platform == "linux" else "plain"
_SCRIPT = """\
from aenv.runtime.registry import load_script

load_script({path!r}, {name!r})
"""


class Embedded:
    """A provision that runs environments on the engine of the settings: one engine for each event loop."""

    def __init__(self) -> None:
        self._engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._digests: dict[tuple[str, str], str] = {}
        self._reading: dict[tuple[str, str], asyncio.Task[str]] = {}
        self._parts: dict[str, Sequence[str]] = {}
        """The sandboxes that one depends on, by its id."""

    def __reduce__(self) -> str:
        return "embedded"  # in another process, what runs environments there

    def __call__(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        resolved, found = _resolved(spec)
        if not found.depends_on:
            return self._engine().provision(resolved)
        from aenv.client.composing import compose

        return compose(self._engine(), resolved, self._parts, self)

    @asynccontextmanager
    async def accompanied(self, found: Project, url: str, token: str | None = None) -> AsyncIterator[None]:
        """Have what a project depends on for the length of a block, in which somebody else serves it at a URL."""
        if not found.depends_on:
            yield
            return
        from aenv.client.composing import accompany

        served = Sandbox(url=url, token=token, id=f"{found.name} at {url}")
        async with accompany(self._engine(), found, served, self._parts, self):
            yield

    async def extend(self, id: str, ttl: float) -> None:
        await self._engine().update(id, ttl=ttl)
        for part in self._parts.get(id, ()):
            await self.extend(part, ttl)

    def logs(self, id: str, tail: int | None = None, follow: bool = False) -> AsyncIterator[str]:
        return self._engine().logs(id, tail, follow)

    async def reason(self, id: str, patience: float) -> str:
        """Why a sandbox is no more, as far as the engine knows, or learns within so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            found = await self._engine().get(id)
            if found.state.over or time.monotonic() >= deadline:
                return found.reason
            await asyncio.sleep(0.01)

    async def package(self, spec: SandboxSpec) -> Package:
        """What a sandbox of that spec is made of. A project is read for it once, until a file of it changes."""
        found = resolve(spec)
        key = (found.project, found.stamp)
        if key not in self._digests:
            loop = asyncio.get_running_loop()
            reading = self._reading.get(key)
            if reading is None or reading.get_loop() is not loop:  # once, however many ask at the same time
                reading = self._reading[key] = loop.create_task(asyncio.to_thread(_digest, Path(found.project)))
            self._digests[key] = await asyncio.shield(reading)
            self._reading.pop(key, None)
        return Package(str(found.env), self._digests[key], found.image)

    def _engine(self) -> Engine:
        if self._process != os.getpid():  # a forked child starts its own
            self._engines, self._process = weakref.WeakKeyDictionary(), os.getpid()
        loop = asyncio.get_running_loop()
        if loop not in self._engines:
            self._engines[loop] = load_engine(config.get("engine") or _ENGINE)
        return self._engines[loop]


embedded = Embedded()


def _digest(root: Path) -> str:
    """The digest that a hub would give the project; none where it could not be pushed."""
    try:
        return project.digest(project.pack(project.read(root)))
    except AEnvError:
        return ""


def resolve(spec: SandboxSpec, near: Path | None = None) -> SandboxSpec:
    """The spec with the project that bears its name on this machine; ``near`` is one that depends on it."""
    return _resolved(spec, near)[0]


def _resolved(spec: SandboxSpec, near: Path | None = None) -> tuple[SandboxSpec, Project]:
    found, is_edited = find(spec.env, near)
    return complete(_with_data(spec, found), found, stamp=stamp(found.root) if is_edited else ""), found


def find(ref: EnvRef, near: Path | None = None) -> tuple[Project, bool]:
    """The project that a reference means on this machine, and whether it may be edited at any moment."""
    here = _here()
    beside = _project(near.parent / ref.name) if near is not None else None
    for edited in (here, beside):
        if edited is not None and edited.name == ref.name and admits(ref, edited.version):
            return edited, True
    other = EnvRef(ALIASES.get(ref.name, ref.name), ref.version)
    if found := _fetched(ref) or _built_in(ref) or _script(ref.name) or _built_in(other):
        return found, False
    known = {*builtin_names(), *_names(config.home() / "envs"), *([here.name] if here else [])}
    places = ("this directory", here), ("the one beside it", beside)
    there = [f"; {where} holds {one.name}@{one.version}" for where, one in places if one and one.name == ref.name]
    raise NotFound(
        f"no environment {str(ref)!r} is known here{''.join(there)}",
        hint=f"{did_you_mean(ref.name, known)}; a project is found from its own directory",
    )


def _with_data(spec: SandboxSpec, found: Project) -> SandboxSpec:
    """With what the datasource means: a path of this machine, or, in a dual container, the second one."""
    given = spec.datasource or found.datasource
    if found.is_dual and not is_path(given):
        return msgspec.structs.replace(spec, datasource="", second=second_of(found.image_prefix, given))
    if not given:
        return spec
    path = Path(given).expanduser().absolute()
    if not found.is_dual:
        if not path.exists():
            raise Invalid(f"datasource {given!r} is no file or directory of this machine", hint="give a path")
        return msgspec.structs.replace(spec, datasource=str(path))
    if not path.is_dir():
        raise Invalid(f"datasource {given!r} is no directory of this machine", hint="give a directory, or an image")
    return msgspec.structs.replace(spec, datasource="", second=Second(directory=str(path)))


def _here() -> Project | None:
    return _project(Path.cwd())


def _project(directory: Path) -> Project | None:
    return project.read(directory) if (directory / project.CONFIG).is_file() else None


def _names(envs: Path) -> list[str]:
    return sorted(path.name for path in envs.iterdir() if path.is_dir()) if envs.is_dir() else []


def _fetched(ref: EnvRef) -> Project | None:
    """The newest version in ``~/.aenv/envs/NAME/VERSION`` that is asked for."""
    folder = config.home() / "envs" / ref.name
    version = newest(_names(folder), ref)
    return project.read(folder / version) if version else None


def _built_in(ref: EnvRef) -> Project | None:
    path = builtin(ref.name)
    if path is None:
        return None
    found = project.read(path)
    return found if admits(ref, found.version) else None


def _script(name: str) -> Project | None:
    """A project made of the functions that the running script registered, and of the files it is made of."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not registry.marks() or path is None:
        if registry.marks():
            raise Invalid(
                f"the functions for {name!r} are not in a file, and cannot be run in a sandbox",
                hint="write them to a file, or make a project with 'aenv init'",
            )
        return None
    script = Path(path).resolve()
    files = {script: script.name} | {
        Path(file).resolve(): str(Path(file).resolve().relative_to(script.parent))
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None)) and _beside(Path(file), script.parent)
    }
    content = {f"script/{inside}": outside.read_bytes() for outside, inside in files.items()}
    content["src/load_script.py"] = _SCRIPT.format(path=f"script/{script.name}", name=script.stem).encode()
    content[project.CONFIG] = json.dumps({"name": name, "version": "0.0.0"}).encode()
    digest = hashlib.sha256(json.dumps(sorted((k, hashlib.sha256(v).hexdigest()) for k, v in content.items())).encode())
    root = config.home() / "cache" / "scripts" / f"{name}-{digest.hexdigest()[:16]}"
    _keep(root, content)
    return project.read(root)


def _keep(root: Path, content: Mapping[str, bytes]) -> None:
    """Write a directory in one step, so that whoever finds it finds all of it. One that is there is as good."""
    if root.is_dir():
        with suppress(OSError):
            os.utime(root)  # ``aenv gc`` goes by it
        return
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=root.parent) as folder:
            made = Path(folder, root.name)
            for inside, data in content.items():
                target = made / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            try:
                made.rename(root)
            except OSError:
                if not root.is_dir():  # where it is, another process was faster
                    raise
    except OSError as exc:
        hint = f"AENV_HOME names another place than {config.home()}"
        raise AEnvError(f"{root} cannot be written: {exc.strerror or exc}", hint=hint) from exc


def _beside(file: Path, directory: Path) -> bool:
    """Whether a module is the script's own, and not something installed that happens to be below it."""
    file = file.resolve()
    return (
        file.suffix == ".py"
        and file.is_relative_to(directory)
        and not {"site-packages", "dist-packages"} & set(file.parts)
        and not any(file.is_relative_to(prefix) for prefix in {sys.prefix, sys.base_prefix})
    )
