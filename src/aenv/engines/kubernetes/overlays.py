"""Pod templates of a site: what an operator lays over the pods that we ask for. Pure, but for reading the files.

They are merged as Kubernetes merges patches: objects field by field, lists of things that have names by those names,
other lists as a whole; null removes a field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aenv.errors import InvalidConfig, NotFound, did_you_mean

DEFAULT = "default"
"""What is laid over every pod."""
OURS = frozenset((DEFAULT, "singlecontainer", "dualcontainer"))
"""Names that every site knows, in any case."""
_CONTAINERS = frozenset(("main", "second", "porter"))
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""By which fields the members of a list are the same."""
_ENDINGS = (".yaml", ".yml", ".json")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The one with the other laid over it."""
    found = dict(base)
    for name, value in over.items():
        before = found.get(name)
        if value is None:
            found.pop(name, None)
        elif isinstance(value, Mapping):
            found[name] = merge(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(before, list) and name in _KEYS:
            found[name] = _merge_lists(before, value, _KEYS[name])
        else:
            found[name] = value
    return found


def _merge_lists(base: list[Any], over: list[Any], keys: tuple[str, ...]) -> list[Any]:
    def key(member: Any) -> tuple[Any, ...]:
        return tuple(member.get(name) for name in keys) if isinstance(member, Mapping) else (member,)

    found = {key(member): member for member in base}
    for member in over:
        if not isinstance(member, Mapping):
            found[key(member)] = member
        elif member.get("$patch") == "delete":
            found.pop(key(member), None)
        else:
            found[key(member)] = merge(found.get(key(member), {}), member)
    return list(found.values())


def read(folder: str) -> dict[str, dict[str, Any]]:
    """The templates of a site, by their names in small letters."""
    if not folder:
        return {}
    found: dict[str, dict[str, Any]] = {}
    try:
        files = sorted(path for path in Path(folder).iterdir() if path.suffix in _ENDINGS)
    except OSError as exc:
        raise InvalidConfig(
            f"the pod templates in {folder} cannot be read: {exc.strerror}", hint="AENV_POD_TEMPLATES names them"
        ) from exc
    for file in files:
        found[file.stem.lower()] = _read_one(file)
    return found


def _read_one(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            value = json.loads(text)
        else:
            import yaml

            value = yaml.safe_load(text)
    except ImportError as exc:
        raise InvalidConfig(f"{file} needs the package PyYAML", hint="pip install 'aenvironment[kubernetes]'") from exc
    except Exception as exc:  # whatever a parser says
        raise InvalidConfig(f"the pod template {file} cannot be read: {exc}") from exc
    if not isinstance(value, dict) or not set(value) <= {"metadata", "spec"}:
        raise InvalidConfig(f"{file} is no pod template", hint="it has 'metadata' and 'spec', as a pod has, or one")
    return value


def lay_over(pod: dict[str, Any], templates: Mapping[str, Mapping[str, Any]], wanted: str) -> dict[str, Any]:
    """A pod with what the site says of every pod, and of those of this template."""
    name = wanted.lower()
    if name and name not in OURS and name not in templates:
        raise NotFound(f"this site has no pod template {wanted!r}", hint=did_you_mean(wanted, [*templates, *OURS]))
    for one in dict.fromkeys((DEFAULT, name)):
        if one in templates:
            pod = merge(pod, _fitting(templates[one], pod))
    return pod


def _fitting(template: Mapping[str, Any], pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """A template without what it says of containers of ours that a pod does not have."""
    spec = dict(template.get("spec") or {})
    for kind in ("containers", "initContainers"):
        there = {member["name"] for member in pod["spec"].get(kind) or ()}
        if kind in spec:
            spec[kind] = [one for one in spec[kind] if one.get("name") in there or one.get("name") not in _CONTAINERS]
            if not spec[kind]:
                del spec[kind]
    return {**template, "spec": spec}
