"""From a spec to the objects that a cluster is asked for. Pure."""

from __future__ import annotations

import hashlib
import ipaddress
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from aenv.engines import live
from aenv.engines.base import RESOURCES
from aenv.engines.kubernetes import overlays
from aenv.engines.room import CPU, Room, amount, room
from aenv.errors import Invalid, Unsupported
from aenv.models import SandboxSpec, Volume
from aenv.runtime.delivery import Brought
from aenv.runtime.warm import INTERPRETER

PORT = 8081
USER = 1000
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
"""What can be the name of a pod, and of a host."""
APP, SANDBOX, VOLUME = "app.kubernetes.io/name", "aenv-sandbox", "aenv-volume"
STATE, INSTANCE, NETWORK, WARM = "aenv/state", "aenv/instance", "aenv/network", "aenv/warm"
"""Labels: whose sandboxes they are, which one, what it may reach, and whether it was made to wait."""
FACTS, EXPIRES, ENDED, HOLDER = "aenv/facts", "aenv/expires-at", "aenv/ended", "aenv/holder"
"""Annotations: what must be known again, when it ends, why it had to end, and which sandbox has a volume."""
MAIN, BESIDE, PORTER = "main", "second", "porter"
"""Containers."""
WORK, TMP, SHARED, LINK, AGENT = "/work", "/tmp", "/shared", "/aenv/link", "/aenv/agent"  # noqa: S108
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""What root may do in a second container, as with the container engine."""
GRACE = 2
"""Seconds between asking a sandbox to end and ending it."""
MOST_VARIABLES = 2 * 1024**2 - 128 * 1024
LONGEST_VARIABLE = 128 * 1024 - 1
"""Bytes of all variables and of one, its name counted, that Linux gives a program."""
_MANAGED = "app.kubernetes.io/managed-by"
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_KEY = re.compile(
    r"((?=[^/]{1,253}/)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
_AMOUNT = re.compile(r"[0-9]{1,15}", re.ASCII)
_SHARE = 0.25
"""The part of a sandbox that its main container is sure to get, where there are two."""
_PORTER = {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "16Mi"}
_EVERYWHERE = {
    "to": [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}},
        {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::254/128"]}},
    ]
}
"""All addresses, but for those at which clouds give a node's credentials to whoever asks from it."""
_STARTING, _ALIVE, _READY = 2, 20, 10
"""Seconds between two looks of the node: whether it has begun, is alive, and is well."""
_RESERVED = (WORK, TMP, SHARED, "/aenv", "/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")


class Facts(live.Facts, frozen=True, kw_only=True, omit_defaults=True):
    """What must be known of a pod's sandbox. The values of its secrets are nowhere in the cluster."""

    memory: tuple[int, int] = (0, 0)
    """Bytes that each of its containers may have."""


class Site(Struct, frozen=True, kw_only=True):
    """What all sandboxes of an engine share."""

    namespace: str
    state: str
    base_image: str
    longest: float
    """Seconds after which the cluster itself ends a sandbox, unless it is a lasting one."""
    templates: dict[str, dict[str, Any]] = {}
    direct: bool = True
    """Whether pods are reached at their own addresses. Outside of the cluster those may be somebody else's."""


def facts(id: str, spec: SandboxSpec, now: float) -> Facts:
    share = room(spec)
    return Facts.of(id, spec, now, memory=(share.main, share.second))


def check(id: str, spec: SandboxSpec) -> None:
    """Refuse what no pod can be."""
    if not NAME.fullmatch(id):
        raise Invalid(f"{id[:100]!r} cannot be a pod's name", hint="use small letters, digits and '-', at most 63")
    if spec.datasource:
        raise Unsupported(
            f"a pod does not see the datasource {spec.datasource!r}, a path of this machine",
            hint="put the data into the image, into a volume, or upload it",
        )
    network_name(spec.network)
    for one in spec.volumes:
        place = posixpath.normpath(one.mount)
        if place == "/" or any(_overlap(place, reserved) for reserved in _RESERVED):
            hint = "use a directory of its own, such as /home/admin/data"
            raise Invalid(f"the volume {one.name!r} cannot be at {place}, which sandboxes need themselves", hint=hint)


def extended(names: str) -> tuple[str, ...]:
    """The extended resources that an operator allows, from their names by comma."""
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        if not _is_extended(name):
            raise Invalid(
                f"{name[:100]!r} in AENV_EXTENDED_RESOURCES is no extended resource",
                hint="use names as nodes have them, for example nvidia.com/gpu",
            )
    return found


def check_resources(resources: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Besides what every engine gives there is what only some nodes have, in whole numbers. By such names nodes hand
    out devices of their own, too, so the operator allows each."""
    given = ", ".join((*RESOURCES, *allowed))
    for name, value in resources.items():
        if name in RESOURCES:
            continue
        if not (_is_extended(name) and _AMOUNT.fullmatch(value)):
            raise Invalid(
                f"{name[:100]}={value[:100]!r} is nothing that a node could give",
                hint=f"use {given}; what only some nodes have comes in whole numbers",
            )
        if name not in allowed:
            raise Invalid(
                f"{name[:100]!r} may not be asked for here",
                hint=f"use {given}; the operator allows more with AENV_EXTENDED_RESOURCES",
            )


def _is_extended(name: str) -> bool:
    return "/" in name and _KEY.fullmatch(name) is not None


def _overlap(place: str, other: str) -> bool:
    return place == other or place.startswith(f"{other}/") or other.startswith(f"{place}/")


# Pods


def pod(spec: SandboxSpec, known: Facts, site: Site, key_sha256: str) -> dict[str, Any]:
    """The pod of a sandbox. ``key_sha256`` is of the token that the engine itself comes with."""
    share = room(spec)
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {"sizeLimit": str(share.disk)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": str(share.disk)}},
    ]
    containers, before = [_main(spec, known, site, share, key_sha256)], []
    for number, one in enumerate(spec.volumes):
        claim = claim_name(site.state, one.owner, one.name)
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    if spec.second is not None:
        memory = {"medium": "Memory"}
        volumes += [
            {"name": "agent", "emptyDir": {**memory, "sizeLimit": "8Mi"}},
            {"name": "link", "emptyDir": {**memory, "sizeLimit": "1Mi"}},
            {"name": "shared", "emptyDir": {**memory, "sizeLimit": str(share.shared)}},
            {"name": "second-tmp", "emptyDir": {"sizeLimit": str(share.disk)}},
        ]
        containers.append(_second(spec, spec.second.image, share))
        before.append(_porter(spec, site))
    body: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE,
        "hostname": "sandbox",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": USER},
        "containers": containers,
        "volumes": volumes,
    }
    if before:
        body["initContainers"] = before
    if not spec.lasting:
        body["activeDeadlineSeconds"] = max(math.ceil(site.longest), 1)
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": known.id,
            "namespace": site.namespace,
            "labels": labels(spec, known, site),
            "annotations": _notes(known),
        },
        "spec": body,
    }
    return overlays.lay_over(made, site.templates, spec.template)


def labels(spec: SandboxSpec, known: Facts, site: Site) -> dict[str, str]:
    """For whoever looks with ``kubectl``; what is not fit to be a label is in the annotation alone, and so is what has
    a prefix: others' programs act on such labels."""
    theirs = {
        key: value
        for key, value in known.labels.items()
        if "/" not in key and _KEY.fullmatch(key) and _LABEL.fullmatch(value)
    }
    return {
        **theirs,
        APP: SANDBOX,
        _MANAGED: "aenv",
        STATE: site.state,
        INSTANCE: known.id,
        NETWORK: network_name(spec.network),
        "aenv/name": _shown(spec.env.name),
        "aenv/version": _shown(spec.env.version or ""),
        "aenv/owner": _shown(known.owner or ""),
        **({WARM: "true"} if spec.warm else {}),
    }


def _notes(known: Facts) -> dict[str, str]:
    found = {FACTS: msgspec.json.encode(known).decode()}
    if known.ttl is not None:
        found[EXPIRES] = expiry(known.created_at + known.ttl)
    return found


def expiry(moment: float) -> str:
    """A moment, as an annotation says it."""
    return f"{moment:.3f}"


def _shown(text: str) -> str:
    """A text as the value of a label: two that differ differ."""
    if _LABEL.fullmatch(text):
        return text
    kept = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:40].strip("-_.")
    return f"{kept}-{short(text)[:8]}".lstrip("-")


def short(*words: str) -> str:
    """A few characters that stand for those words in the names of objects."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogatepass")).hexdigest()[:16]


def _main(spec: SandboxSpec, known: Facts, site: Site, share: Room, key_sha256: str) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": "work", "mountPath": WORK}, {"name": "tmp", "mountPath": TMP}]
    mounts += [
        {"name": f"volume-{number}", "mountPath": posixpath.normpath(one.mount)}
        for number, one in enumerate(spec.volumes)
    ]
    if spec.second is not None:
        mounts += [{"name": "link", "mountPath": LINK, "readOnly": True}, {"name": "shared", "mountPath": SHARED}]
    told = {
        "AENV_INSTANCE_ID": known.id,
        "AENV_OWNER_TOKEN_SHA256": spec.owner_token_sha256 or "",
        "AENV_ENGINE_TOKEN_SHA256": key_sha256,
        "AENV_LISTEN": f"0.0.0.0:{PORT}",
        "AENV_DELIVERY": "1",
        "AENV_WORK": WORK,
        "HOME": TMP,
        "PYTHONUNBUFFERED": "1",
        **_early(spec),
    }
    main: dict[str, Any] = {
        "name": MAIN,
        "image": spec.image or site.base_image,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value.replace("$", "$$")} for name, value in told.items()],
        "ports": [{"name": "runtime", "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(spec, share.main, 1.0 if spec.second is None else _SHARE),
        "volumeMounts": mounts,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": {
            "tcpSocket": {"port": PORT},
            "periodSeconds": _STARTING,
            "failureThreshold": max(math.ceil(spec.startup_timeout / _STARTING), 1) + 5,
        },
        "livenessProbe": {
            "tcpSocket": {"port": PORT},
            "periodSeconds": _ALIVE,
            "timeoutSeconds": 10,
            # What takes deliveries listens too, and is gone while the project is imported.
            "failureThreshold": math.ceil(spec.startup_timeout / _ALIVE) + 6,
        },
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": PORT},
            "periodSeconds": _READY,
            "timeoutSeconds": 10,
        },
    }
    if not spec.image:
        main["command"] = ["python", "-m", "aenv.runtime"]
        main["args"] = [WORK]
    return main


def _early(spec: SandboxSpec) -> dict[str, str]:
    """Variables that an interpreter reads when it starts, before anything is brought to it; but no secrets."""
    names = tuple(name for name in INTERPRETER if not name.endswith("*"))
    beginnings = tuple(name[:-1] for name in INTERPRETER if name.endswith("*"))
    return {
        name: value
        for name, value in spec.environment_variables.items()
        if (name in names or name.startswith(beginnings)) and name not in spec.secrets
    }


def _second(spec: SandboxSpec, image: str, share: Room) -> dict[str, Any]:
    return {
        "name": BESIDE,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [f"{AGENT}/aenv-agent", f"{LINK}/second.sock"],
        "args": [],
        "resources": _resources(spec, share.second, 1.0 - _SHARE),
        "volumeMounts": [
            {"name": "agent", "mountPath": AGENT, "readOnly": True},
            {"name": "link", "mountPath": LINK},
            {"name": "shared", "mountPath": SHARED},
            {"name": "second-tmp", "mountPath": TMP},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
        },
    }


def _porter(spec: SandboxSpec, site: Site) -> dict[str, Any]:
    """Brings the agent to the second container, from the image of the runtime, before either starts."""
    return {
        "name": PORTER,
        "image": spec.image or site.base_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "aenv.agent", f"{AGENT}/aenv-agent"],
        "args": [],
        "resources": {"requests": _PORTER, "limits": _PORTER},
        "volumeMounts": [{"name": "agent", "mountPath": AGENT}],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _resources(spec: SandboxSpec, memory: int, part: float) -> dict[str, Any]:
    """What a container may have, and the part of it that it is sure to get. Two that share it may each have all of it,
    but for memory; what there is one of goes to the task's."""
    cpu, disk = amount(spec.resources, "cpu", CPU) * 1000, room(spec).disk
    more = {name: value for name, value in spec.resources.items() if name not in RESOURCES} if part > _SHARE else {}

    def found(part: float) -> dict[str, str]:
        return {
            "cpu": f"{max(round(cpu * part), 1)}m",
            "memory": str(memory),
            "ephemeral-storage": str(max(int(disk * part), 1)),
            **more,
        }

    return {"requests": found(part), "limits": found(1.0)}


def brought(spec: SandboxSpec) -> Brought:
    """What is brought to it once it is up."""
    for name, value in spec.environment_variables.items():
        if not name or "=" in name or "\0" in name or "\0" in value or not _encodes(name + value):
            raise Invalid(f"{name[:100]!r} cannot be a variable", hint="a name has no '=', and nothing has a zero byte")
    sizes = {name: len(f"{name}={value}".encode()) for name, value in spec.environment_variables.items()}
    for name, size in sizes.items():
        if size > LONGEST_VARIABLE:
            raise Invalid(
                f"the variable {name[:100]} has {size} bytes; Linux gives a program no variable of more than "
                f"{LONGEST_VARIABLE}, its name counted",
                hint="upload a file instead, or split it",
            )
    if (total := sum(sizes.values())) > MOST_VARIABLES:
        raise Invalid(
            f"the variables have {total} bytes together; {MOST_VARIABLES} is the most that Linux gives a program",
            hint="upload a file instead",
        )
    return Brought(
        variables={
            **spec.environment_variables,
            "AENV_SECRETS": ",".join(spec.secrets),
            "AENV_SECOND": f"{LINK}/second.sock" if spec.second is not None else "",
            "AENV_WARM": "1" if spec.warm else "",
            "AENV_PRELOAD": str(_preload(spec)).lower() if spec.warm else "",
            "AENV_SEED": "" if spec.seed is None else str(spec.seed),
            "AENV_IDLE": f"{spec.idle:g}" if spec.idle and not spec.lasting else "",
        },
        arguments=spec.arguments,
        project=not spec.image,
    )


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _preload(spec: SandboxSpec) -> bool | str:
    """Whether one that waits imports its project first. The import may look into a volume, so with those it comes later
    unless the author says otherwise."""
    return False if spec.preload == "auto" and spec.volumes else spec.preload


# Networks


def network_name(wanted: object) -> str:
    """The label of those that may reach the same."""
    if wanted in (None, "full"):
        return "full"
    if wanted == "none":
        return "none"
    if isinstance(wanted, dict) and set(wanted) == {"allow"}:
        for entry in wanted["allow"]:
            _rule(entry)
        return f"allow-{short(*sorted(wanted['allow']))}"
    raise Invalid(f"{wanted!r} is not a network", hint="use 'none', 'full' or {'allow': ['10.0.0.7:443']}")


def network_policy(wanted: object, site: Site) -> dict[str, Any]:
    """What keeps sandboxes of such a network to it, whoever's they are; and what opens it, where a namespace is
    closed."""
    name = network_name(wanted)
    rules: list[dict[str, Any]] = [dict(_EVERYWHERE)] if name == "full" else []
    if isinstance(wanted, dict):
        rules = [_rule(entry) for entry in sorted(wanted["allow"])]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"aenv-network-{name}",
            "namespace": site.namespace,
            "labels": {_MANAGED: "aenv"},
        },
        "spec": {
            "podSelector": {"matchLabels": {APP: SANDBOX, NETWORK: name}},
            "policyTypes": ["Egress"],
            "egress": rules,
        },
    }


def _rule(entry: str) -> dict[str, Any]:
    host, _, port = entry.rpartition(":")
    try:
        block = ipaddress.ip_network(host.strip("[]"), strict=False)
        number = int(port)
        if not 0 < number < 65536:
            raise ValueError
    except ValueError:
        raise Unsupported(
            f"a cluster lets pods out by address, and {entry!r} is none with a port",
            hint="list addresses or networks, such as 10.0.0.7:443 or 10.0.0.0/24:443",
        ) from None
    return {"to": [{"ipBlock": {"cidr": str(block)}}], "ports": [{"protocol": "TCP", "port": number}]}


# Volumes


def claim_name(state: str, owner: str, name: str) -> str:
    shown = re.sub(r"[^a-z0-9]+", "-", name.lower())[:30].strip("-")
    return f"aenv-{shown}-{short(state, owner, name)}".replace("--", "-")


def claim(one: Volume, site: Site) -> dict[str, Any]:
    """The storage behind a volume, which outlives its sandboxes."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": claim_name(site.state, one.owner, one.name),
            "namespace": site.namespace,
            "labels": {APP: VOLUME, _MANAGED: "aenv", STATE: site.state, "aenv/owner": _shown(one.owner)},
            "annotations": {FACTS: msgspec.json.encode({"owner": one.owner, "name": one.name}).decode()},
        },
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": str(one.size)}}},
    }


def claimed(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """The owner and name of a volume of ours; None for what is none."""
    try:
        told = msgspec.json.decode(found["metadata"]["annotations"][FACTS])
        return str(told["owner"]), str(told["name"])
    except (KeyError, TypeError, msgspec.MsgspecError):
        return None
