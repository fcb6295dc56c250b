"""What may be asked of a service: the bounds of a request and of a change, and what follows from both.

Nothing here is asked of an engine or a store. Whatever is wrong is ``Invalid`` by name, before anything is made.
"""

from __future__ import annotations

import posixpath
from typing import Any

import msgspec
from msgspec import Struct

from aenv.api import admission
from aenv.api.records import slim
from aenv.api.services.records import Plan, ServiceRecord
from aenv.errors import Invalid, Unsupported
from aenv.models import NAME, VERSION, EnvRef
from aenv.project import fields
from aenv.wire import Env, InstanceRequest, ServiceChange, ServiceRequest

MOST_REPLICAS = 100
_LONGEST_PATH = 1024
_SMALLEST, _LARGEST = 2**20, 2**60
"""Bytes of storage."""
_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Where no storage may be, since what a sandbox runs on is there."""
_RESOURCES = {"cpu": "cpu", "memory": "memory", "ephemeral_storage": "ephemeralStorage"}


class Storage(Struct, frozen=True):
    """Storage that is wanted."""

    name: str
    mount: str
    size: str
    """Empty when nobody says: then it must be there already."""
    is_asked: bool
    """Whether the caller says the size; what the environment says is for storage that is not there yet."""

    @property
    def bytes(self) -> int:
        return int(fields.quantity(self.size))


class Wish(Struct, frozen=True):
    """A service that may be made."""

    name: str
    replicas: int
    plan: Plan
    labels: dict[str, str]
    resources: dict[str, str]
    port: int
    storage: Storage | None


async def wish(request: ServiceRequest, env: Env) -> Wish:
    """What is to be made of a request for this environment."""
    name = request.service_name or env.name
    if not NAME.fullmatch(name):
        raise Invalid(
            f"service_name {name[:64]!r} is not a name", hint="use letters, digits, '-', '_' and '.', at most 63"
        )
    plan, labels = await planned(env, request.environment_variables or {}, request.labels, 1)
    said = _said(env)
    storage = _storage(request, env, said)
    replicas = checked_replicas(said["replicas"] if request.replicas is None else request.replicas, storage is not None)
    port = said["port"] if request.port is None else request.port
    if not 0 < port < 65536:
        raise Invalid(f"port {port} is not between 1 and 65535")
    return Wish(name, replicas, plan, labels, _resources(request), port, storage)


async def planned(
    env: Env, variables: dict[str, str], labels: dict[str, str] | None, generation: int
) -> tuple[Plan, dict[str, str]]:
    """What every replica is to be, and its labels."""
    if env.dependencies:
        raise Unsupported(f"{env.id} depends on others, and is no service", hint="make instances of it")
    request = InstanceRequest(env_name=env.id, environment_variables=variables, labels=labels)
    found = await admission.plan(request, env, datasources=())
    plan = Plan(
        generation=generation,
        env=slim(env),
        environment_variables=found.wanted.environment_variables,
        secrets=found.secrets,
        startup_timeout=found.wanted.startup_timeout,
        second=found.wanted.second,
    )
    return plan, found.labels


def checked_replicas(count: int, has_storage: bool) -> int:
    if not 0 <= count <= MOST_REPLICAS:
        raise Invalid(f"replicas {count} is not between 0 and {MOST_REPLICAS}")
    if count > 1 and has_storage:
        raise Invalid(
            f"replicas {count}: a service with storage has one replica at most",
            hint="make one service for each, or do without storage",
        )
    return count


def wanted_version(change: ServiceChange, env: Env, engine: str) -> EnvRef | None:
    """The version of the environment that a change asks for; None when it asks for none."""
    refs = []
    if change.version is not None:
        refs.append(EnvRef.parse(f"{env.name}@{change.version}"))
    if change.image is not None:
        refs.append(_image(change.image, env, engine))
    if len(refs) == 2 and refs[0] != refs[1]:
        raise Invalid(f"version {change.version!r} and image {change.image!r} differ", hint="give one of the two")
    return refs[0] if refs else None


def _image(image: str, env: Env, engine: str) -> EnvRef:
    """What runs packages takes a version where others take an image."""
    hint = f"give the version to run: {env.name}@{env.version}, or {env.version}"
    if VERSION.fullmatch(image):
        return EnvRef(env.name, image)
    name, at, _ = image.partition("@")
    if not NAME.fullmatch(name) or (at and ":" in image):
        raise Invalid(f"image {image[:256]!r}: the {engine} engine runs packages of the hub, no images", hint=hint)
    ref = EnvRef.parse(image)
    if ref.name != env.name:
        raise Invalid(f"image {image[:256]!r} is of another environment than {env.name}", hint=hint)
    return ref


def changed(record: ServiceRecord, replicas: int, plan: Plan, now: float, *, again: bool = False) -> ServiceRecord:
    """A service that is to be otherwise; the same record when nothing differs. ``again`` makes replicas anew all the
    same."""
    generation = record.generation + 1
    same = msgspec.structs.replace(plan, generation=record.plan.generation) == record.plan
    if same and replicas == record.replicas and not again:
        return record
    plan = record.plan if same and not again else msgspec.structs.replace(plan, generation=generation)
    return msgspec.structs.replace(
        record, replicas=replicas, plan=plan, generation=generation, reason="", updated_at=now
    )


def _said(env: Env) -> dict[str, Any]:
    """What an environment says of its services."""
    names = ("replicas", "port", "enableStorage", "storageName", "storageSize", "mountPath")
    config = {"deployConfig": env.deploy_config}
    return {name: fields.value(config, f"deployConfig.service.{name}") for name in names}


def _storage(request: ServiceRequest, env: Env, said: dict[str, Any]) -> Storage | None:
    enabled = request.enable_storage
    if enabled is None:
        given = bool(request.storage_size or request.mount_path)
        enabled = bool(request.pvc_name) if request.pvc_name is not None else given or bool(said["enableStorage"])
    if not enabled:
        if request.pvc_name or request.storage_size:
            raise Invalid("storage is named, and not enabled", hint="leave enable_storage out, or the storage")
        return None
    name = request.pvc_name or said["storageName"] or env.name
    if not NAME.fullmatch(name):
        raise Invalid(f"pvc_name {name[:64]!r} is not a name", hint="use letters, digits, '-', '_' and '.', at most 63")
    size = request.storage_size or str(said["storageSize"] or "")
    if size:
        for _, phrase in fields.BY_PATH["deployConfig.service.storageSize"].check(size):
            raise Invalid(f"storage_size {phrase}, found {size[:64]!r}")
        if not _SMALLEST <= fields.quantity(size) <= _LARGEST:
            what = "little" if fields.quantity(size) < _SMALLEST else "much"
            raise Invalid(f"storage_size {size[:64]} is too {what}", hint="1Mi is the least")
    return Storage(name, _mount(request.mount_path or said["mountPath"]), size, bool(request.storage_size))


def _mount(path: str) -> str:
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or not path.isprintable() or len(path) > _LONGEST_PATH:
        raise Invalid(
            f"mount_path {path[:256]!r} is not an absolute path without '..'", hint="for example /home/admin/data"
        )
    found = "/" + posixpath.normpath(path).strip("/")
    if found == "/" or any(found == system or found.startswith(f"{system}/") for system in _SYSTEM):
        raise Invalid(
            f"mount_path {path[:256]!r} is where the sandbox itself lives", hint="use a folder such as /home/admin/data"
        )
    return found


def _resources(request: ServiceRequest) -> dict[str, str]:
    """What each replica may use. The limit wins."""
    found = {}
    for field, name in _RESOURCES.items():
        given: dict[str, str] = {}
        for half in ("request", "limit"):
            value = getattr(request, f"{field}_{half}")
            if not value:
                continue
            for _, phrase in fields.BY_PATH[f"deployConfig.{name}"].check(value):
                raise Invalid(f"{field}_{half} {phrase}, found {value[:64]!r}")
            given[half] = value
        if len(given) == 2 and fields.quantity(given["request"]) > fields.quantity(given["limit"]):
            raise Invalid(f"{field}_request {given['request']} is over {field}_limit {given['limit']}")
        if given:
            found[name] = given.get("limit") or given["request"]
            if fields.quantity(found[name]) > _LARGEST:
                raise Invalid(f"{field} is too much")
    return found
