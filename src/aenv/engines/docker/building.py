"""From a project to an image: what it is called, the daemon's builder and how far it is, tags, push, and the entry in
``config.json`` that says what was built."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol
from urllib.parse import quote

from aenv import project
from aenv.engines.docker import context, registries
from aenv.engines.docker.daemon import Daemon, failure, full, out_of_space
from aenv.engines.docker.images import Image, Moved, look, move
from aenv.errors import AEnvError, Invalid, NetworkError, NotFound, StorageFull
from aenv.project import Project
from aenv.project.images import Reference, architecture

BASE = "BASE"
"""The build argument that names the image a project is built on."""
LABEL, SOURCES = "aenv.env", "aenv.sources"
"""Say of an image of which project and version it was built, and of which files."""
SILENCE = 3600.0
"""Seconds that a step may take without a word."""
SHOWN_OUTPUT = 20
"""Lines of what a failed step printed that its error repeats."""
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9_]+(/[a-z0-9.]+)?")
_STEP = re.compile(r"step (\d+)/(\d+) ?: ?(.*)", re.IGNORECASE)
_TALK = re.compile(r"(-+>|Removing intermediate|Successfully (built|tagged)|COMMIT\b|[0-9a-f]{64}$|Cache\b)")
"""What a builder says of itself, beside what the steps print."""
_CACHED = re.compile(r"-+> Using cache")
_NOISE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]| &imagebuilder\.Step\{.*")
"""Colours; and what Podman holds, where it says which line it cannot read."""
_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})")
_PIECE = 256 * 1024
_LONGEST_LINE, _SHORT = 500, 40


class Teller(Protocol):
    """Who tells a person how far it is."""

    def done(self, text: str) -> None:
        """Say what is over."""

    def doing(self, text: str) -> None:
        """Say what goes on, until something else is said."""


class Plan(NamedTuple):
    """What is to be built."""

    project: Project
    context: Path
    dockerfile: Path
    references: tuple[Reference, ...]
    """What it will be called; the first is the one that is recorded."""
    platform: str
    """Empty for the daemon's own."""
    arguments: Mapping[str, str]


class Built(NamedTuple):
    """An image that was built of a project."""

    image: Image
    references: tuple[Reference, ...]
    seconds: float
    sources: str
    """A digest of the files that it was built of."""
    digest: str = ""
    """What its registry knows it by; empty when it was not pushed."""

    @property
    def reference(self) -> str:
        return str(self.references[0])


def plan(
    found: Project,
    *,
    image_name: str | None = None,
    tags: Sequence[str] = (),
    registry: str | None = None,
    namespace: str | None = None,
    platform: str | None = None,
    dockerfile: Path | None = None,
    arguments: Mapping[str, str] | None = None,
    base_image: str | None = None,
) -> Plan:
    """What to build of a project: as its ``buildConfig`` says, but for what is given here."""
    directory = _directory(found)
    file = dockerfile or found.dockerfile
    if not file.is_file():
        raise NotFound(f"there is no Dockerfile {file}", hint="'aenv init' writes one; name another with --dockerfile")
    told = dict(arguments or {})
    if base_image:
        Reference.parse(base_image)
        if not re.search(rf"^\s*ARG\s+{BASE}\b", _text(file), re.IGNORECASE | re.MULTILINE):
            raise Invalid(
                f"{file} does not take another base image",
                hint=f"let it begin with: ARG {BASE}=python:3.12-slim, then FROM ${{{BASE}}}",
            )
        told[BASE] = base_image
    return Plan(
        found,
        directory,
        file,
        _references(found, image_name, tags, registry, namespace),
        _platform(platform),
        told,
    )


async def build(daemon: Daemon, planned: Plan, teller: Teller) -> Built:
    """Build it, and call it what was planned. Nothing gets the name unless all is well."""
    begun = time.monotonic()
    teller.doing("packing the project")
    files = await asyncio.to_thread(sources, planned.project)
    own = _own(planned.project)
    content, name = await asyncio.to_thread(context.pack, planned.context, planned.dockerfile, own)
    with content:
        image = await _built(daemon, planned, files, content, name, teller)
        if _on_nothing(planned) and not _is_for(image, planned.platform or (await daemon.about()).platform):
            # It was in the daemon's cache, where nothing and the same files are one image for every platform.
            await _drop(daemon, image)
            content.seek(0)
            image = await _built(daemon, planned, files, content, name, teller, cache=False)
    if not _is_for(image, planned.platform):
        await _drop(daemon, image)
        raise Invalid(
            f"the image came out for {image.platform}, not for {planned.platform}",
            hint=f"its base image is for {image.platform}: name one for {planned.platform} with --base-image",
        )
    for reference in planned.references:
        where = f"/images/{quote(image.id, safe=':')}/tag"
        await daemon.ask("POST", where, query={"repo": reference.name, "tag": reference.tag})
    return Built(image, planned.references, time.monotonic() - begun, files)


async def push(daemon: Daemon, built: Built, teller: Teller) -> Built:
    """Bring it to its registry, under all its names; with the digest that it has there."""
    digest = ""
    for reference in built.references:
        begun = time.monotonic()
        moved = Moved(f"pushing {reference}", teller.doing)
        teller.doing(f"pushing {reference}")
        query = {"tag": reference.tag}
        if registries.is_local(reference):  # Docker asks for no TLS there; Podman has to be told
            query["tlsVerify"] = "false"
        reason = await move(daemon, f"/images/{quote(reference.name, safe='/:')}/push", query, reference, moved)
        if reason:
            raise registries.meaning(reason, reference, built.image.platform)
        told = [str(moved.aux.get("Digest") or ""), *("".join(_DIGEST.findall(line)[:1]) for line in moved.status)]
        digest = digest or next(filter(None, told), "")
        teller.done(f"pushed {reference}, {time.monotonic() - begun:.1f} s")
    if not digest:
        hint = "look at the daemon's log"
        raise NetworkError(f"{built.reference} was pushed, but {daemon.shown} did not tell its digest", hint=hint)
    return built._replace(digest=digest)


def sources(found: Project) -> str:
    """A digest of the files that an image of the project is built of, as they are; empty when they cannot be packed."""
    try:
        content, _ = context.pack(_directory(found), found.dockerfile, _own(found))
    except AEnvError:
        return ""
    with content:
        digest = hashlib.sha256()
        while piece := content.read(_PIECE):
            digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def record(found: Project, built: Built) -> Project:
    """Write to ``config.json`` what was built, in the place of what was built for the same platform before.

    Its ``id`` is a digest that the image can be got by: none before it was pushed, when its name has a registry.
    """
    local = "" if built.references[0].registry else built.image.id
    entry = {
        "id": built.digest or local,
        "type": "image",
        "content": built.reference,
        "platform": built.image.platform,
        "sources": built.sources,
    }
    known = project.read(found.root).value("artifacts")
    kept = [
        artifact
        for artifact in known
        if str(artifact.get("type", "")).lower() != "image"
        or artifact.get("platform", built.image.platform) != built.image.platform
    ]
    return project.write(found, {"artifacts": [*kept, entry]})


def _directory(found: Project) -> Path:
    directory = found.root / str(found.value("buildConfig.context"))
    if not directory.is_dir() or not directory.resolve().is_relative_to(found.root.resolve()):
        hint = 'correct buildConfig.context in config.json; "." is the project itself'
        raise Invalid(f"{directory} is not a directory of the project", hint=hint)
    return directory


# What it is called


def _references(
    found: Project, name: str | None, tags: Sequence[str], registry: str | None, namespace: str | None
) -> tuple[Reference, ...]:
    named = Reference.parse(name or str(found.value("buildConfig.image_name") or "") or found.name.lower())
    if named.digest:
        raise Invalid(f"an image cannot be given the digest {named.digest}", hint="give it a tag")
    path = "/".join(part for part in ((namespace or "").strip("/"), named.path) if part)
    host = re.sub(r"^https?://", "", registry or named.registry).strip("/")
    written = str(found.value("buildConfig.image_tag") or "")
    wanted = list(dict.fromkeys(tags)) or [named.tag or written or _tag(found.version)]
    prefix = f"{host}/{path}" if host else path
    references = tuple(Reference.parse(f"{prefix}:{tag}") for tag in wanted)
    if host and not references[0].registry:
        raise Invalid(f"{host!r} is not a registry", hint="write it as registry.example.org or localhost:5000")
    return references


def _tag(version: str) -> str:
    """A version as a tag, which has no ``+``."""
    return version.replace("+", "_")


def _platform(platform: str | None) -> str:
    if not platform:
        return ""
    if not _PLATFORM.fullmatch(platform):
        raise Invalid(f"{platform!r} is not a platform", hint="write it as linux/amd64 or linux/arm64")
    system, machine, *variant = platform.split("/")
    if system != "linux":
        raise Invalid(
            f"an image for {system} cannot be run: sandboxes are linux", hint="use linux/amd64 or linux/arm64"
        )
    return "/".join((system, architecture(machine), *variant))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise Invalid(f"{file} cannot be read: {exc.strerror}") from exc


# The daemon's builder


def _own(found: Project) -> dict[Path, bytes]:
    """The project's ``config.json`` without what was built before: else each image would differ from the last."""
    text = json.dumps({**found.config, "artifacts": []}, indent=2, ensure_ascii=False)
    return {(found.root / project.CONFIG).resolve(): f"{text}\n".encode()}


async def _built(
    daemon: Daemon,
    planned: Plan,
    files: str,
    content: IO[bytes],
    dockerfile: str,
    teller: Teller,
    *,
    cache: bool = True,
) -> Image:
    """Build it without a name."""
    query = {
        "dockerfile": dockerfile,
        "buildargs": dict(planned.arguments),
        "labels": {LABEL: f"{planned.project.name}@{planned.project.version}", SOURCES: files},
        "platform": planned.platform or None,
        "nocache": not cache,
        "rm": True,
        "forcerm": True,
    }
    base = _base(_first(planned), planned)
    if base is not None and registries.is_local(base):  # as for a push
        query["tlsVerify"] = False
    headers = {"Content-Type": "application/x-tar", **registries.all_credentials()}
    steps, reason = _Steps(teller), ""
    try:
        async with aclosing(
            daemon.lines("POST", "/build", query=query, content=_pieces(content), headers=headers, patience=SILENCE)
        ) as lines:
            async for line in lines:
                if reason := failure(line):
                    break
                steps.hear(line)
    except (NetworkError, StorageFull):
        raise
    except AEnvError as exc:
        reason = exc.message
    if reason:
        raise await _failed(daemon, reason, steps, planned)
    steps.end()
    if not steps.id:
        raise NetworkError(f"{daemon.shown} ended the build without an image", hint="look at the daemon's log")
    return await look(daemon, steps.id)


async def _pieces(content: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(content.read, _PIECE):
        yield piece


async def _drop(daemon: Daemon, image: Image) -> None:
    """Remove an image that was built for nothing, unless it has a name from before."""
    with suppress(AEnvError):
        found = await daemon.ask("GET", f"/images/{quote(image.id, safe=':')}/json")
        if not found.get("RepoTags"):
            await daemon.ask("DELETE", f"/images/{quote(image.id, safe=':')}")


class _Steps:
    """How far a build is, from what the builder prints."""

    def __init__(self, teller: Teller) -> None:
        self.id = ""
        self.instruction = ""
        self.printed: deque[str] = deque(maxlen=SHOWN_OUTPUT)
        """What the step that runs has printed last."""
        self._teller = teller
        self._place, self._begun, self._cached = "", 0.0, False
        self._partial = ""
        self._pulled = Moved("pulling", self._detail)

    def hear(self, line: Mapping[str, Any]) -> None:
        aux = line.get("aux")
        if isinstance(aux, Mapping) and aux.get("ID"):
            self.id = str(aux["ID"])
        if line.get("status"):
            self._pulled.hear(line)
        *whole, self._partial = (self._partial + str(line.get("stream") or "")).split("\n")
        self._partial = self._partial[-_LONGEST_LINE:]
        for text in whole:
            last = _NOISE.sub("", text).rstrip().rpartition("\r")[2][:_LONGEST_LINE]
            self._line("".join(character if character.isprintable() else " " for character in last))

    def _line(self, text: str) -> None:
        if step := _STEP.fullmatch(text.strip()):
            self.end()
            self._place, self.instruction = f"[{step[1]}/{step[2]}]", step[3].strip()
            self._begun, self._cached = time.monotonic(), False
            self._teller.doing(f"{self._place} {self._short}")
        elif _CACHED.match(text.strip()):
            self._cached = True
        elif text.strip() and not _TALK.match(text.strip()):
            self.printed.append(text)
            self._detail(text.strip())

    def _detail(self, text: str) -> None:
        self._teller.doing(f"{self._place} {self._short}: {text}")

    @property
    def _short(self) -> str:
        """The instruction, so that what it prints is seen beside it."""
        return self.instruction if len(self.instruction) <= _SHORT else f"{self.instruction[: _SHORT - 3]}..."

    def end(self) -> None:
        """The step that ran is over."""
        if self._place:
            how = "cached" if self._cached else f"{time.monotonic() - self._begun:.1f} s"
            self._teller.done(f"{self._place} {self.instruction}, {how}")
        self._place = self.instruction = ""
        self.printed.clear()


async def _failed(daemon: Daemon, reason: str, steps: _Steps, planned: Plan) -> AEnvError:
    """The error for a build that the daemon gave up."""
    if full(reason):
        return out_of_space(reason)
    if base := _base(steps.instruction, planned):
        return await _no_base(daemon, reason, base, planned)
    hint = None
    if "exec format error" in reason.lower() or any("exec format error" in text.lower() for text in steps.printed):
        wanted = planned.platform or "the platform of the base image"
        hint = (
            f"this machine does not run programs for {wanted}: build it on one that does, or install binfmt emulation"
        )
    elif "does not match the specified platform" in reason:
        hint = f"name a base image for {planned.platform} with --base-image"
    reason = _NOISE.sub("", reason)
    where = f"{steps.instruction} failed: " if steps.instruction else ""
    return Invalid("\n".join([f"the build failed: {where}{reason}", *steps.printed]), hint=hint)


async def _no_base(daemon: Daemon, reason: str, base: Reference, planned: Plan) -> AEnvError:
    """The error for a build whose base image could not be got."""
    if planned.platform:
        with suppress(AEnvError):
            there = await look(daemon, str(base))
            if not _is_for(there, planned.platform):
                return Invalid(
                    f"the base image {base} is here for {there.platform} only, not for {planned.platform}: {reason}",
                    hint=f"name one for {planned.platform} with --base-image",
                )
    error = registries.meaning(reason, base, planned.platform or "this machine")
    hint = "; or ".join(filter(None, (error.hint, "name an image that the daemon has: --base-image")))
    return type(error)(f"the base image: {error.message}", hint=hint)


def _is_for(image: Image, platform: str) -> bool:
    """Whether an image is for that platform; it is for none in particular."""
    return not platform or image.platform.split("/") == platform.split("/")[:2]


def _on_nothing(planned: Plan) -> bool:
    return re.search(r"^\s*FROM\s+scratch\b", _text(planned.dockerfile), re.IGNORECASE | re.MULTILINE) is not None


def _first(planned: Plan) -> str:
    """The instruction that a Dockerfile begins with."""
    found = re.search(r"^\s*(FROM\s.*)$", _text(planned.dockerfile), re.IGNORECASE | re.MULTILINE)
    return found[1].strip() if found else ""


def _base(instruction: str, planned: Plan) -> Reference | None:
    """The image that an instruction begins with, when it is one that does."""
    found = re.match(r"FROM\s+(?:--\S+\s+)*(\S+)", instruction, re.IGNORECASE)
    if found is None:
        return None
    written = re.search(rf"^\s*ARG\s+{BASE}=(\S+)", _text(planned.dockerfile), re.IGNORECASE | re.MULTILINE)
    default = written[1].strip("'\"") if written else ""
    name = re.sub(rf"\$({BASE}\b|{{{BASE}}})", lambda _: planned.arguments.get(BASE, default), found[1])
    with suppress(Invalid):
        return Reference.parse(name)
    return None
