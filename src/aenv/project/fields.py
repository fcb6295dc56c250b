"""What ``config.json`` may hold: one row for each field, and the few rules that span several.

A check takes a value and yields what is wrong with it, as a place inside the value and a phrase
that completes "<field> ..."; after a phrase that begins with "must" comes what was found.
Nothing here reads a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aenv.errors import Invalid, nearest
from aenv.models import NAME, VERSION, parse_duration
from aenv.project import depends
from aenv.project.scan import Where

Check = Callable[[Any], Iterable[tuple[Where, str]]]

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3} | {
    unit + suffix: base**power
    for suffix, base in (("", 1000.0), ("i", 1024.0))
    for power, unit in enumerate("KMGTPE", 1)
    if (unit, suffix) != ("K", "")
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|(?:\*\.)?[A-Za-z0-9][A-Za-z0-9.-]*):(\d{1,5})", re.ASCII)
_REVISION = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class Problem(NamedTuple):
    """One thing that is wrong, or odd, in a config."""

    where: Where
    message: str
    fatal: bool = True


class Field(NamedTuple):
    path: str
    check: Check
    default: Any = None
    required: bool = False
    private: bool = False
    """Its value may be a secret and is never shown."""


def quantity(value: str | float) -> float:
    """A Kubernetes quantity as a number: ``"500m"`` is 0.5, ``"2Gi"`` is 2147483648; -1 when it is none."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None or match[2] not in _UNITS or isinstance(value, bool):
        return -1.0
    return float(match[1]) * _UNITS[match[2]]


def _must(phrase: str, holds: Callable[[Any], bool]) -> Check:
    def check(value: Any) -> Iterator[tuple[Where, str]]:
        if not holds(value):
            yield (), phrase

    return check


def _matches(pattern: re.Pattern[str], phrase: str) -> Check:
    return _must(phrase, lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None)


def _integer(low: int, high: int | None = None) -> Check:
    def check(value: Any) -> Iterator[tuple[Where, str]]:
        if not isinstance(value, int) or isinstance(value, bool):
            yield (), "must be an integer"
        elif value < low or (high is not None and value > high):
            yield (), f"must be {low} or more" if high is None else f"must be between {low} and {high}"

    return check


def _each(item: Check, plural: str) -> Check:
    def check(value: Any) -> Iterator[tuple[Where, str]]:
        if not isinstance(value, list):
            yield (), f"must be a list of {plural}"
            return
        for index, entry in enumerate(value):
            for where, phrase in item(entry):
                yield (index, *where), phrase

    return check


def _mapping(key: re.Pattern[str], item: Check, what: str) -> Check:
    def check(value: Any) -> Iterator[tuple[Where, str]]:
        if not isinstance(value, dict):
            yield (), f"must be an object of {what}"
            return
        for name, entry in value.items():
            if not key.fullmatch(name):
                yield (name,), "is not a usable name"
            for where, phrase in item(entry):
                yield (name, *where), phrase

    return check


def _refused_by(parse: Callable[[Any], object], phrase: str) -> Check:
    def check(value: Any) -> Iterator[tuple[Where, str]]:
        try:
            if isinstance(value, (dict, list, bool)):
                raise Invalid("neither text nor a number")
            parse(value)
        except Invalid:
            yield (), phrase

    return check


def _dependency(value: Any) -> Iterator[tuple[Where, str]]:
    try:
        depends.parse(value)
    except Invalid:
        yield (), 'must be "name" or "name@range", or {"env": "name@range", "prefix": "name_"}'


def _network(value: Any) -> Iterator[tuple[Where, str]]:
    if isinstance(value, dict) and set(value) == {"allow"}:
        for where, phrase in _each(_must('must be "host:port"', _is_address), "addresses")(value["allow"]):
            yield ("allow", *where), phrase
    elif value not in ("none", "full"):
        yield (), 'must be "none", "full" or {"allow": ["host:port", ...]}'


def _is_address(value: Any) -> bool:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return match is not None and 0 < int(match[1]) < 65536


def _artifact(value: Any) -> Iterator[tuple[Where, str]]:
    if not isinstance(value, dict):
        yield (), 'must be an object like {"id": "", "type": "image", "content": "name:tag"}'
        return
    for key in ("id", "type", "content"):
        if not isinstance(value.get(key, ""), str):
            yield (key,), "must be a string"


_STRING = _must("must be a string", lambda value: isinstance(value, str))
_BOOLEAN = _must("must be true or false", lambda value: isinstance(value, bool))
_OBJECT = _must("must be an object", lambda value: isinstance(value, dict))
_FILLED = _must("must be a string that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
_NAMED = _matches(NAME, "must be letters, digits, '-', '_' and '.', at most 63, and start with a letter or digit")
_DURATION = _refused_by(parse_duration, 'must be a length of time such as "90s", "30m", "1h30m" or seconds')
_CPU = _must(
    'must be a number of cores such as "1", "0.5" or "500m"',
    lambda value: quantity(value) > 0 and str(value).rstrip("m").replace(".", "", 1).isdigit(),
)
_BYTES = _must(
    'must be a size such as "512Mi", "2Gi" or a number of bytes',
    lambda value: quantity(value) >= 1 and not str(value).endswith("m"),
)
_VALUE = _must(
    "must be a string or a number",
    lambda value: isinstance(value, (str, int, float)) and not isinstance(value, bool) and "\0" not in str(value),
)
_PRELOAD = _must('must be true, false or "auto"', lambda value: isinstance(value, bool) or value == "auto")
_LINUX = _must('must be "linux", the only system a sandbox runs', lambda value: str(value).lower() == "linux")
_MOUNT = _must(
    "must be an absolute path without '..'",
    lambda value: isinstance(value, str) and value.startswith("/") and ".." not in value.split("/"),
)
_SECRETS = _each(_matches(_VARIABLE, "must be the name of a variable"), "names; the platform holds the values")

FIELDS = (
    Field("name", _NAMED, required=True),
    Field("version", _matches(VERSION, 'must be a semantic version such as "1.0.0"'), required=True),
    Field("description", _STRING, ""),
    Field("tags", _each(_FILLED, "strings"), []),
    Field("status", _STRING, ""),
    Field("codeUrl", _STRING, ""),
    Field("artifacts", _each(_artifact, "objects"), []),
    Field("buildConfig", _OBJECT, {}),
    Field("buildConfig.dockerfile", _FILLED, "./Dockerfile"),
    Field("buildConfig.context", _FILLED, "."),
    Field("buildConfig.image_name", _STRING),
    Field("buildConfig.image_tag", _STRING),
    Field("testConfig", _OBJECT, {}),
    Field("testConfig.script", _STRING, ""),
    Field("deployConfig", _OBJECT, {}),
    Field("deployConfig.cpu", _CPU, "1"),
    Field("deployConfig.memory", _BYTES, "2Gi"),
    Field("deployConfig.ephemeralStorage", _BYTES, "5Gi"),
    Field("deployConfig.cpuRequest", _CPU),
    Field("deployConfig.cpuLimit", _CPU),
    Field("deployConfig.memoryRequest", _BYTES),
    Field("deployConfig.memoryLimit", _BYTES),
    Field("deployConfig.ephemeralStorageRequest", _BYTES),
    Field("deployConfig.ephemeralStorageLimit", _BYTES),
    Field("deployConfig.os", _LINUX, "linux"),
    Field("deployConfig.environmentVariables", _mapping(_VARIABLE, _VALUE, "strings"), {}, private=True),
    Field("deployConfig.ttl", _DURATION),
    Field("deployConfig.podTemplate", _FILLED, "singleContainer"),
    Field("deployConfig.imagePrefix", _STRING),
    Field("deployConfig.datasource", _STRING),
    Field("deployConfig.timeouts", _OBJECT, {}),
    Field("deployConfig.timeouts.startup", _DURATION),
    Field("deployConfig.timeouts.call", _DURATION),
    Field("deployConfig.timeouts.idle", _DURATION),
    Field("deployConfig.timeouts.suspend", _DURATION),
    Field("deployConfig.protocol", _matches(_REVISION, 'must be an MCP revision such as "2025-11-25"')),
    Field("deployConfig.pool", _OBJECT, {}),
    Field("deployConfig.pool.min", _integer(0), 0),
    Field("deployConfig.pool.max", _integer(0), 0),
    Field("deployConfig.network", _network),
    Field("deployConfig.secrets", _SECRETS, [], private=True),
    Field("deployConfig.preload", _PRELOAD, "auto"),
    Field("deployConfig.forkable", _BOOLEAN),
    Field("deployConfig.deterministic", _BOOLEAN),
    Field(
        "deployConfig.dependsOn",
        _mapping(NAME, _dependency, "environments"),
        {},
    ),
    Field("deployConfig.service", _OBJECT, {}),
    Field("deployConfig.service.replicas", _integer(0), 1),
    Field("deployConfig.service.port", _integer(1, 65535), 8081),
    Field("deployConfig.service.enableStorage", _BOOLEAN, False),
    Field("deployConfig.service.storageName", _NAMED),
    Field("deployConfig.service.storageSize", _BYTES),
    Field("deployConfig.service.mountPath", _MOUNT, "/home/admin/data"),
)
BY_PATH = {field.path: field for field in FIELDS}
_CHILDREN: dict[str, list[str]] = {}
for _field in FIELDS:
    _parent, _, _key = _field.path.rpartition(".")
    _CHILDREN.setdefault(_parent, []).append(_key)


def value(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of the table; the table's default when it is absent or null."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return BY_PATH[path].default if found is None else found


def problems(config: Any) -> list[Problem]:
    """Everything wrong or odd in a config, in the order of the table."""
    if not isinstance(config, dict):
        return [Problem((), "must hold one JSON object")]
    found: list[Problem] = []
    for field in FIELDS:
        given = value(config, field.path)
        if field.required and given is None:
            found.append(Problem((field.path,), f"{field.path} is missing"))
        elif given is not None and given is not field.default:
            found.extend(_wrong(field, given))
    found.extend(Problem(where, message) for where, message in _combined(config, {p.where for p in found}))
    found.extend(_unknown(config))
    return found


def _wrong(field: Field, given: Any) -> Iterator[Problem]:
    for inside, phrase in field.check(given):
        where = (*field.path.split("."), *inside)
        found = given
        for step in inside:
            found = found[step]
        shown = f", found {_kind(found) if field.private else _shown(found)}" if phrase.startswith("must") else ""
        yield Problem(where, f"{dotted(where)} {phrase}{shown}")


def _combined(config: dict[str, Any], wrong: set[Where]) -> Iterator[tuple[Where, str]]:
    """Rules over several fields; each looks only at fields that are right by themselves."""

    def sound(path: str) -> Any:
        where = tuple(path.split("."))
        return None if any(where[: len(bad)] == bad for bad in wrong) else value(config, path)

    service = "deployConfig.service"
    if sound(f"{service}.enableStorage"):
        if (sound(f"{service}.replicas") or 0) > 1:
            where = (*service.split("."), "replicas")
            yield where, f"{dotted(where)} must be 1 when enableStorage is true"
        if value(config, f"{service}.storageSize") is None:
            yield (
                tuple(service.split(".")),
                f"{service}.storageSize is missing; it is required when enableStorage is true",
            )
    if (low := sound("deployConfig.pool.min")) and low > (sound("deployConfig.pool.max") or 0):
        yield ("deployConfig", "pool", "min"), f"deployConfig.pool.min must not be over pool.max, found {low}"
    for resource in ("cpu", "memory", "ephemeralStorage"):
        request, limit = (
            sound(f"deployConfig.{resource}{half}") or sound(f"deployConfig.{resource}")
            for half in ("Request", "Limit")
        )
        if request is not None and limit is not None and quantity(request) > quantity(limit):
            where = ("deployConfig", f"{resource}Request")
            where = where if where[1] in config["deployConfig"] else ("deployConfig", f"{resource}Limit")
            yield where, f"{dotted(where)}: the request {request} is over the limit {limit}"


def _unknown(config: dict[str, Any]) -> Iterator[Problem]:
    for parent, known in _CHILDREN.items():
        holder = value(config, parent) if parent else config
        if not isinstance(holder, dict):
            continue
        for key in holder:
            if key not in known:
                where = (*parent.split("."), key) if parent else (key,)
                meant = nearest(key, known)
                advice = f"; did you mean {meant!r}?" if meant else ""
                yield Problem(where, f"{dotted(where)} is not a known field{advice}", fatal=False)
    for section in ("buildConfig", "deployConfig"):
        if config.get(section) is None:
            yield Problem((), f"{section} is missing; the defaults are used", fatal=False)


def dotted(where: Where) -> str:
    """``("a", "b", 0)`` as ``a.b[0]``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
    return text.removeprefix(".")


def _shown(found: Any) -> str:
    text = json.dumps(found)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(found: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(found), "a number")
