"""Images of a daemon: whether one is there, getting it from its registry, and whether it fits the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from aenv.engines.docker import registries
from aenv.engines.docker.daemon import HINT, About, Daemon, failure
from aenv.errors import AEnvError, Invalid, NetworkError, NotFound, StartFailed, StorageFull
from aenv.project.images import Reference, architecture

PATIENCE = 600.0
"""Seconds of silence after which a registry is given up."""
EVERY = 0.2
"""Seconds between two words about one pull or push."""
_RUNS: Mapping[str, frozenset[str]] = {"amd64": frozenset({"amd64", "386"}), "arm64": frozenset({"arm64", "arm"})}
"""The images that a processor runs."""
_MOST_LAYERS, _MOST_STATUS = 1000, 1000
_DONE = ("pull complete", "already exists", "download complete", "pushed", "layer already exists", "mounted from")


class Image(NamedTuple):
    """An image that a daemon has."""

    id: str
    reference: str
    architecture: str
    os: str
    command: tuple[str, ...]
    """What a container of it runs: its entry point and the arguments of that."""
    environment: Mapping[str, str]
    user: str
    working_directory: str
    labels: Mapping[str, str]
    size: int = 0
    layers: int = 0
    digests: tuple[str, ...] = ()
    """``name@sha256:...``, for each registry that it came from or was pushed to."""
    volumes: tuple[str, ...] = ()
    """Directories that a daemon puts on its disk for each container, without a bound."""

    @property
    def platform(self) -> str:
        return f"{self.os}/{self.architecture}"


async def present(
    daemon: Daemon,
    reference: str,
    *,
    pull: Literal["missing", "never", "always"] = "missing",
    progress: Callable[[str], None] | None = None,
) -> Image:
    """The image, got from its registry where that is needed and wanted.

    ``Invalid``: its name is wrong, nobody has it, or it is for another kind of machine. ``StartFailed``: it could not
    be got, for the reason in the message.
    """
    parsed = Reference.parse(reference)
    found = None if pull == "always" else await _look(daemon, reference)
    if found is None:
        if pull == "never":
            raise Invalid(f"the daemon has no image {reference}", hint=f"get it: docker pull {reference}")
        await _pull(daemon, parsed, progress or (lambda text: None))
        found = await _look(daemon, reference)
        if found is None:
            raise StartFailed(f"{reference} was pulled, and is gone again")
    check(found, await daemon.about())
    return found


async def look(daemon: Daemon, reference: str) -> Image:
    """What the daemon knows of an image that it has; ``NotFound``."""
    found = await daemon.ask("GET", f"/images/{quote(reference, safe='/:@')}/json")
    try:
        return _image(reference, found)
    except (TypeError, AttributeError, KeyError, ValueError) as exc:
        raise NetworkError(f"{daemon.shown} describes {reference} in a way nobody understands", hint=HINT) from exc


async def _look(daemon: Daemon, reference: str) -> Image | None:
    try:
        return await look(daemon, reference)
    except NotFound:
        return None


def _image(reference: str, found: Any) -> Image:
    config = found.get("Config") or {}
    variables = (text.partition("=") for text in config.get("Env") or ())
    return Image(
        id=str(found["Id"]),
        reference=reference,
        architecture=architecture(str(found.get("Architecture") or "")),
        os=str(found.get("Os") or "linux").lower(),
        command=(*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())),
        environment={name: value for name, _, value in variables},
        user=str(config.get("User") or ""),
        working_directory=str(config.get("WorkingDir") or ""),
        labels=dict(config.get("Labels") or {}),
        size=int(found.get("Size") or 0),
        layers=len((found.get("RootFS") or {}).get("Layers") or ()),
        digests=tuple(found.get("RepoDigests") or ()),
        volumes=tuple(config.get("Volumes") or ()),
    )


def check(image: Image, about: About) -> None:
    """That the daemon's machine can run it; else ``Invalid``."""
    if image.os != about.os:
        raise Invalid(f"{image.reference} is for {image.os}, and the daemon runs {about.os}", hint="use another image")
    runs = _RUNS.get(about.architecture, frozenset({about.architecture}))
    if image.architecture and image.architecture not in runs:
        raise Invalid(
            f"{image.reference} is for {image.architecture} processors, and the daemon's is {about.architecture}",
            hint=f"build or pull it for --platform {about.platform}",
        )


async def _pull(daemon: Daemon, reference: Reference, progress: Callable[[str], None]) -> None:
    about = await daemon.about()
    path, query = "/images/create", {"fromImage": reference.name, "tag": reference.digest or reference.tag or "latest"}
    if about.name == "podman" and registries.is_local(reference):  # by its own API, since it insists on TLS otherwise
        path, query = "/v4.0.0/libpod/images/pull", {"reference": str(reference), "tlsVerify": "false"}
    reason = await move(daemon, path, query, reference, Moved(f"pulling {reference}", progress))
    if not reason:
        return
    error = registries.meaning(reason, reference, about.platform)
    if isinstance(error, StorageFull):
        raise error
    kind = Invalid if isinstance(error, (Invalid, NotFound)) else StartFailed  # what the registry says is not of ours
    raise kind(error.message, hint=error.hint)


async def move(daemon: Daemon, path: str, query: Mapping[str, Any], reference: Reference, moved: Moved) -> str:
    """Pull or push, telling ``moved`` how it goes; the daemon's words when it failed, else nothing."""
    headers = registries.credentials(reference)
    try:
        async with aclosing(daemon.lines("POST", path, query=query, headers=headers, patience=PATIENCE)) as lines:
            async for line in lines:
                if reason := failure(line):
                    return reason
                moved.hear(line)
    except (NetworkError, StorageFull):  # the daemon's own
        raise
    except AEnvError as exc:
        return exc.message
    return ""


class Moved:
    """How far a pull or a push is, from what the daemon says about each layer."""

    def __init__(self, what: str, progress: Callable[[str], None]) -> None:
        self.aux: dict[str, Any] = {}
        """What a push says at its end."""
        self.status: list[str] = []
        """What was said of the whole."""
        self._what, self._progress = what, progress
        self._layers: dict[str, tuple[int, int, bool]] = {}
        self._spoken = 0.0

    def hear(self, line: Mapping[str, Any]) -> None:
        status, layer = str(line.get("status") or line.get("stream") or "").strip(), str(line.get("id") or "")
        if isinstance(line.get("aux"), dict):
            self.aux.update(line["aux"])
        if not layer or status.lower().startswith(("pulling from", "pulling image")):
            if status and len(self.status) < _MOST_STATUS:
                self.status.append(status)
            return
        detail = line.get("progressDetail")
        current, total = _counted(detail if isinstance(detail, Mapping) else {})
        before = self._layers.get(layer, (0, 0, False))
        done = before[2] or status.lower().startswith(_DONE)
        whole = max(total, before[1])
        if len(self._layers) < _MOST_LAYERS:
            self._layers[layer] = (whole if done else max(current, before[0]), whole, done)
        if done or time.monotonic() >= self._spoken + EVERY:
            self._spoken = time.monotonic()
            self._progress(str(self))

    def __str__(self) -> str:
        done = sum(done for _, _, done in self._layers.values())
        moved, total = (sum(layer[part] for layer in self._layers.values()) for part in (0, 1))
        size = f", {moved / 2**20:.1f} of {total / 2**20:.1f} MiB" if total else ""
        return f"{self._what}: {done} of {len(self._layers)} layers{size}"


def _counted(detail: Mapping[str, Any]) -> tuple[int, int]:
    current, total = detail.get("current"), detail.get("total")
    return (current if isinstance(current, int) else 0, total if isinstance(total, int) else 0)
