"""Images by name: what a reference is made of, which image holds a project, and which one a task brings along.

Rules only: nobody is asked here, and nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from aenv.errors import Invalid
from aenv.models import Second

DUAL = "DualContainer"
"""The ``podTemplate`` of a project whose instances have a second container, in any case."""
_LONGEST_NAME = 255
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY = re.compile(rf"(?:{_HOST}(?:\.{_HOST})*|\[[0-9A-Fa-f:]+\])(?::[0-9]{{1,5}})?", re.ASCII)
_PATH = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv8l": "arm64", "i686": "386", "armv7l": "arm"}
"""What images call processors that others call otherwise."""
_SHOWN = 200
"""Characters of a name that an error repeats."""


class Reference(NamedTuple):
    """The name of an image, in its parts: ``registry/path:tag@digest``."""

    registry: str
    """Empty when the name has none, and the daemon's own is meant."""
    path: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The parts of a name; ``Invalid`` says what is wrong with it."""
        if wrong := _wrong(*(parts := _split(text))):
            hint = "use registry.example.org/path/name:tag, in lower case but for the tag"
            raise Invalid(f"{text[:_SHOWN]!r} is not the name of an image: {wrong}", hint=hint)
        return cls(*(part or "" for part in parts))

    @property
    def name(self) -> str:
        """Without tag and digest."""
        return f"{self.registry}/{self.path}" if self.registry else self.path

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}{f'@{self.digest}' if self.digest else ''}"


def image_of(artifacts: Iterable[Any], machine: str = "") -> str:
    """The image that was built of a project, for that kind of processor; empty when there is none.

    It is named by its digest where it was pushed: a tag may come to mean another image. Of several, the last that was
    built for this processor is taken, else the last that does not say, else the last: an engine then says what is
    wrong.
    """
    wanted = architecture(machine)
    fitting: dict[bool | None, str] = {}
    for artifact in artifacts:
        if not isinstance(artifact, Mapping) or str(artifact.get("type", "")).lower() != "image":
            continue
        content = str(artifact.get("content") or "")
        if content:
            platform = str(artifact.get("platform") or "")
            fits = architecture(platform.split("/")[1]) == wanted if "/" in platform else None
            fitting[fits] = _pinned(content, str(artifact.get("id") or ""))
    return next((fitting[fits] for fits in (True, None, False) if fits in fitting), "")


def architecture(machine: str) -> str:
    """What images call a kind of processor: ``amd64`` for ``x86_64``."""
    return _MACHINES.get(machine.lower(), machine.lower())


def is_dual(pod_template: str) -> bool:
    """Whether instances have a second container. A site's own template is for the site's own engine."""
    return pod_template.strip().lower() == DUAL.lower()


def is_path(datasource: str) -> bool:
    """Whether a datasource names something on a disk: no image's name begins like a path."""
    return datasource.startswith(("/", "./", "../", "~")) or datasource in (".", "..")


def second_of(prefix: str, datasource: str) -> Second:
    """The image of the second container: ``imagePrefix`` and ``datasource``, put together.

    They are joined by ``:`` where neither brings one, and the prefix does not end in ``/``. A datasource that begins
    with the prefix is the whole name. One with a path of its own is refused where the prefix does not end in ``/``,
    since it would lead elsewhere. Without a prefix, the datasource is the name.
    """
    if not prefix and not datasource:
        raise Invalid(
            "the second container has no image",
            hint="name it as the instance's datasource, or set deployConfig.imagePrefix",
        )
    try:
        found = Reference.parse(_joined(prefix, datasource))
    except Invalid as exc:
        if prefix and datasource:
            message = f"imagePrefix {prefix[:_SHOWN]!r} and datasource {datasource[:_SHOWN]!r} make no image: "
            raise Invalid(message + exc.message, hint=exc.hint) from None
        raise
    return Second(image=str(found))


def _joined(prefix: str, datasource: str) -> str:
    if not prefix or not datasource:
        return prefix or datasource
    if "/" in datasource:
        if datasource.startswith(prefix):
            return datasource
        if not prefix.endswith("/") or _is_registry(datasource.partition("/")[0]):
            raise Invalid(f"{datasource[:_SHOWN]!r} is a path outside of the prefix", hint=f"begin it with {prefix!r}")
    own = prefix.rpartition("/")[2]
    return f"{prefix}{datasource}" if not own or ":" in own or ":" in datasource else f"{prefix}:{datasource}"


def _pinned(content: str, digest: str) -> str:
    """A reference by its digest, where others can get it from: one that has no registry is only here."""
    try:
        found = Reference.parse(content)
    except Invalid:
        return content  # who has to get it says so
    if not found.registry or not _DIGEST.fullmatch(digest):
        return content
    return str(found._replace(tag="", digest=digest))


def _split(text: str) -> tuple[str, str, str | None, str | None]:
    """Registry, path, tag and digest; None for what is not there."""
    rest, at, digest = text.partition("@")
    registry, slash, path = rest.partition("/")
    if not slash or not _is_registry(registry):
        registry, path = "", rest
    path, colon, tag = path.partition(":")
    return registry, path, tag if colon else None, digest if at else None


def _is_registry(first: str) -> bool:
    return "." in first or ":" in first or first == "localhost"


def _wrong(registry: str, path: str, tag: str | None, digest: str | None) -> str:
    if not path:
        return "it has no name"
    if registry and not _REGISTRY.fullmatch(registry):
        return f"{registry[:_SHOWN]!r} is no registry"
    if not _PATH.fullmatch(path):
        return (
            "it has upper-case letters" if _PATH.fullmatch(path.lower()) else f"{path[:_SHOWN]!r} is no path of names"
        )
    if len(registry) + len(path) + bool(registry) > _LONGEST_NAME:
        return f"it has more than {_LONGEST_NAME} characters"
    if tag is not None and not _TAG.fullmatch(tag):
        return f"{tag[:_SHOWN]!r} is no tag" if tag else "its tag is empty"
    if digest is not None and not _DIGEST.fullmatch(digest):
        return f"{digest[:_SHOWN]!r} is no digest"
    return ""
