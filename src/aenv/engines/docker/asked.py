"""What a guarded engine may ask Docker to make: bodies in, the same bodies out, or ``Forbidden``. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aenv.engines.docker.containers import KIND, PROJECT, SANDBOX, SECOND
from aenv.engines.docker.second import AGENT, CAPABILITIES
from aenv.errors import Forbidden, Invalid

KEEPERS, RUNNING = (PROJECT, AGENT), (SANDBOX, SECOND)
"""Kinds of containers: those that are filled and never run, and those that run."""
AGENT_IMAGE = "localhost/aenv-agent-[0-9a-f]{32}"
LOG_DRIVERS = ("json-file", "k8s-file", "local")
NETWORKS = ("none", "bridge")
MOST_KEEPERS = 4
_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]*"
_OPTION = re.compile("nosuid|nodev|noexec|(uid|gid|mode|size|nr_inodes|nr_blocks)=[0-9]+k?")
Check = Callable[[Any], bool]


class Container(NamedTuple):
    """A container that may be made, where what it refers to is ours."""

    body: dict[str, Any]
    volumes: list[str]
    keepers: list[str]
    """Containers whose volumes it has."""


def parsed(body: bytes) -> dict[str, Any]:
    """An object, whose names come once: Docker would take the last."""
    try:
        found = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError) as exc:
        raise Invalid(f"this is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise Invalid("this is not a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Forbidden("a name comes twice in an object")
    return found


def only(given: Mapping[str, Any], checks: Mapping[str, Check], what: str) -> dict[str, Any]:
    """The same, when there is nothing in it but what the checks let through. Null is as good as not there."""
    for name, value in given.items():
        if name not in checks or not (value is None or checks[name](value)):
            raise Forbidden(f"{what} may not have {name[:100]} {json.dumps(value)[:200]}")
    return dict(given)


def _is(*allowed: Any) -> Check:
    return lambda value: any(value == one and type(value) is type(one) for one in allowed)


def _has(kind: type) -> Check:
    return lambda value: type(value) is kind


def _all(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _within(checks: Mapping[str, Check]) -> Check:
    return lambda value: type(value) is dict and all(name in checks and checks[name](value[name]) for name in value)


def _texts(value: Any) -> bool:
    return type(value) is dict and all(type(one) is str for one in value.values())


def _matches(pattern: str) -> Check:
    return lambda value: type(value) is str and re.fullmatch(pattern, value) is not None


IS_FALSE = _is(False)
_FLAG, _NUMBER, _TEXT, _WORDS = _has(bool), _has(int), _has(str), _all(_has(str))
_MOUNT = {
    "Type": _is("volume"),
    "Source": _matches(_NAME),
    "Target": _TEXT,
    "ReadOnly": _FLAG,
    "VolumeOptions": _within({"NoCopy": _FLAG}),
}
_LIMIT = {"Name": _is("fsize"), "Soft": _NUMBER, "Hard": _NUMBER}
_CONTAINER: Mapping[str, Check] = {
    "Image": _TEXT,
    "User": _TEXT,
    "Hostname": _TEXT,
    "Env": _WORDS,
    "Entrypoint": _WORDS,
    "Cmd": _WORDS,
    "OpenStdin": _FLAG,
    "StdinOnce": _FLAG,
    "StopSignal": _TEXT,
    "Healthcheck": _within({"Test": _is(["NONE"])}),
    "Labels": _texts,
    "HostConfig": _has(dict),
}
_HOST: Mapping[str, Check] = {
    "CapDrop": _WORDS,
    "CapAdd": _all(_is(*CAPABILITIES)),
    "SecurityOpt": _all(_is("no-new-privileges")),
    "IpcMode": _is("private"),
    "Init": _FLAG,
    "PidsLimit": _NUMBER,
    "Memory": _NUMBER,
    "MemorySwap": _NUMBER,
    "ShmSize": _NUMBER,
    "CpuPeriod": _NUMBER,
    "CpuQuota": _NUMBER,
    "LogConfig": _within({"Type": _is(*LOG_DRIVERS), "Config": _within({"max-size": _TEXT})}),
    "Runtime": _TEXT,  # one that is named, see container()
    "NetworkMode": _is(*NETWORKS),
    "ReadonlyRootfs": _FLAG,
    "Tmpfs": _texts,
    "Mounts": _all(_within(_MOUNT)),
    "VolumesFrom": lambda value: _all(_matches(f"{_NAME}:ro"))(value) and len(value) <= MOST_KEEPERS,
    "Ulimits": _all(_within(_LIMIT)),
    "StorageOpt": _within({"size": _TEXT}),
}
_COMMAND: Mapping[str, Check] = {
    "Cmd": _WORDS,
    "User": _TEXT,
    "AttachStdin": _FLAG,
    "AttachStdout": _FLAG,
    "AttachStderr": _FLAG,
}
_VOLUME: Mapping[str, Check] = {
    "Name": _matches(_NAME),
    "Driver": _is("local"),
    "DriverOpts": _texts,
    "Labels": _texts,
}


def container(given: Mapping[str, Any], runtime: str = "") -> Container:
    """A container: in no network or on the bridge, with volumes, and without powers unless it never runs.

    ``runtime`` is the one that it may have besides the daemon's own: others may give it devices.
    """
    body = only(given, _CONTAINER, "a container")
    host = only(body.get("HostConfig") or {}, _HOST, "a container")
    powers = (host.get("CapDrop"), host.get("SecurityOpt"))
    if _marked(body) not in KEEPERS and powers != (["ALL"], ["no-new-privileges"]):
        raise Forbidden("a container that runs has no powers: CapDrop is ALL, and SecurityOpt no-new-privileges")
    if host.get("Runtime") not in (None, "", runtime):
        raise Forbidden(
            f"a container may not have the runtime {str(host['Runtime'])[:100]}: the guard was not told of it"
        )
    if not host.get("NetworkMode"):
        raise Forbidden("a container says which network it has")
    volumes = [str(mount["Source"]) for mount in host.get("Mounts") or () if "Source" in mount]
    return Container(body, volumes, [name.removesuffix(":ro") for name in host.get("VolumesFrom") or ()])


def command(given: Mapping[str, Any]) -> dict[str, Any]:
    """A command in a container."""
    return only(given, _COMMAND, "a command")


def volume(given: Mapping[str, Any]) -> dict[str, Any]:
    """A volume: in memory, and of no device or path of the host's."""
    body = only(given, _VOLUME, "a volume")
    _marked(body)
    driver = only(body.get("DriverOpts") or {}, {"type": _is("tmpfs"), "device": _is("tmpfs"), "o": _TEXT}, "a volume")
    if driver.keys() != {"type", "device", "o"} or not all(map(_OPTION.fullmatch, driver["o"].split(","))):
        raise Forbidden("a volume is in memory, with a size and an owner")
    return body


def _marked(body: Mapping[str, Any]) -> str:
    """Its kind, which everything of ours has."""
    if not (kind := (body.get("Labels") or {}).get(KIND)):
        raise Forbidden(f"what is made has the label {KIND}")
    return str(kind)
