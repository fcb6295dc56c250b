"""From an OpenAPI document to its operations: what each takes as one schema, and where each argument goes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from urllib.parse import urljoin

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from aenv.errors import Invalid
from aenv.integrations.wrapping import host_of
from aenv.integrations.wrapping.schemas import References, Schemas, steps, wrong

METHODS = ("get", "head", "options", "put", "post", "delete", "patch", "trace")
READING = ("get", "head", "options")
MOST_TOOLS = 1_000
_OURS = ("accept", "content-type", "authorization")
"""Headers that are no parameters, as OpenAPI has it."""
_STYLES = {
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "path": ("simple",),
    "header": ("simple",),
    "cookie": ("form",),
}
FORM = "application/x-www-form-urlencoded"


class Parameter(NamedTuple):
    """An argument that goes into the path, the query, a header or a cookie."""

    argument: str
    name: str
    place: str
    style: str
    explode: bool
    is_json: bool


class Body(NamedTuple):
    """What is sent as the body."""

    media_type: str
    arguments: tuple[str, ...] | None
    """Those that are its members; None when it is the argument ``body``."""


class Credential(NamedTuple):
    """How a service wants to know who asks."""

    scheme: str
    kind: str
    """``header``, ``query`` or ``cookie``, for a key; ``bearer`` or ``basic``."""
    name: str = ""
    """Of the header, the query's parameter or the cookie."""


class Operation(NamedTuple):
    """One tool."""

    name: str
    method: str
    path: str
    base: str
    listed: dict[str, Any]
    parameters: tuple[Parameter, ...]
    body: Body | None
    security: tuple[tuple[Credential, ...], ...]
    """Alternatives, of which one is enough. None where nobody asks."""


class Unfit(Exception):
    """An operation that no tool can stand for."""


class Filter(NamedTuple):
    """Which operations are meant: names of tools, or such as ``GET /pets/*``."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    read_only: bool = False

    def takes(self, name: str, method: str, path: str) -> bool:
        spelled = (name, f"{method.upper()} {path}")
        if self.read_only and method not in READING:
            return False
        if self.include and not any(fnmatchcase(one, pattern) for pattern in self.include for one in spelled):
            return False
        return not any(fnmatchcase(one, pattern) for pattern in self.exclude for one in spelled)


class Read(NamedTuple):
    """What a document comes to."""

    operations: tuple[Operation, ...]
    left_out: dict[str, str]
    """Operations that could not become tools, and why."""


def read(document: Mapping[str, Any], base: str, wanted: Filter) -> Read:
    """The operations that are wanted; ``Invalid`` names the place that is wrong."""
    check(document)
    try:
        return _Reader(document, base).read(wanted)
    except RecursionError:
        raise Invalid("the document is nested too deeply") from None


def check(document: Mapping[str, Any]) -> None:
    """Refuse what is no OpenAPI document of a kind that is known."""
    if "swagger" in document:
        raise Invalid(
            f"this is Swagger {document['swagger']}, which came before OpenAPI 3",
            hint="convert it first, for example with 'npx swagger2openapi'",
        )
    version = document.get("openapi")
    if not isinstance(version, str) or not re.match(r"3\.[0-9]+", version):
        raise Invalid(f"openapi: the version of OpenAPI is needed, such as '3.1.0', found {version!r}")
    if not isinstance(document.get("paths"), dict):
        raise wrong("paths", "an object of paths is needed")


def server_of(document: Mapping[str, Any], where: str | None) -> str:
    """The address of the service: the first that the document names, seen from where it came from."""
    found = _server(document.get("servers"), where, "servers")
    if found is None:
        raise Invalid("servers: the document does not say where its service is", hint="say it with --server URL")
    return found


def _server(servers: Any, where: str | None, place: str) -> str | None:
    if not servers:
        return urljoin(where, "/").rstrip("/") if where else None
    if not isinstance(servers, list) or not isinstance(servers[0], dict) or not isinstance(servers[0].get("url"), str):
        raise wrong(place, "a list of objects with a url is needed")
    url = servers[0]["url"]
    variables = servers[0].get("variables") or {}
    for name in re.findall(r"\{([^}]*)\}", url):
        default = variables.get(name, {}).get("default") if isinstance(variables, dict) else None
        if default is None:
            raise wrong(f"{place}[0].variables", f"{name!r} has no default")
        url = url.replace(f"{{{name}}}", str(default))
    if where:
        url = urljoin(where, url)
    elif not url.startswith(("http://", "https://")):
        return None
    return str(url).rstrip("/")


class _Reader:
    def __init__(self, document: Mapping[str, Any], base: str) -> None:
        self._document = document
        self._base = base
        self._host = host_of(base, what="the address of the service")
        self._references = References(document)
        self._old = str(document["openapi"]).startswith("3.0")
        self._names: dict[str, str] = {}
        self._checked: set[str] = set()

    def read(self, wanted: Filter) -> Read:
        found: list[Operation] = []
        left_out: dict[str, str] = {}
        for method, path, item, node, place in self._each():
            name = self._name(node, method, path, place)
            if not wanted.takes(name, method, path):
                continue
            try:
                found.append(self._operation(name, method, path, item, node, place))
            except Unfit as exc:
                left_out[f"{method.upper()} {path}"] = str(exc)
        if len(found) > MOST_TOOLS:
            raise Invalid(
                f"the document has {len(found)} operations, and at most {MOST_TOOLS} become tools",
                hint="choose with --include",
            )
        return Read(tuple(found), left_out)

    def _each(self) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any], str]]:
        for path, node in self._document["paths"].items():
            if path.startswith("x-"):
                continue
            if not path.startswith("/"):
                raise wrong(f"paths.{path}", "a path begins with /")
            item = self._references.resolved(node, f"paths.{path}")
            for method in METHODS:
                if method in item:
                    place = f"paths.{path}.{method}"
                    yield method, path, item, self._references.resolved(item[method], place), place

    def _name(self, node: dict[str, Any], method: str, path: str, place: str) -> str:
        given = node.get("operationId", "")
        if not isinstance(given, str):
            raise wrong(f"{place}.operationId", f"a text is needed, found {given!r}")
        if given and given in self._names.values():
            raise wrong(f"{place}.operationId", f"{given!r} is taken by another operation")
        base = re.sub(r"[^A-Za-z0-9_-]+", "_", given or f"{method}{path}").strip("_")[:60] or method
        name, number = base, 2
        while name in self._names:
            name, number = f"{base}_{number}", number + 1
        self._names[name] = given
        return name

    def _operation(
        self, name: str, method: str, path: str, item: dict[str, Any], node: dict[str, Any], place: str
    ) -> Operation:
        schemas = Schemas(self._references, self._old)
        properties: dict[str, Any] = {}
        required: list[str] = []
        parameters = self._parameters(path, item, node, place, schemas, properties, required)
        body = self._body(node.get("requestBody"), f"{place}.requestBody", schemas, properties, required)
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if required:
            schema["required"] = required
        if schemas.definitions:
            schema["$defs"] = schemas.definitions
        self._check({key: value for key, value in schema.items() if key != "$defs"}, place)
        for name_of, definition in schemas.definitions.items():
            self._check(definition, place, "$defs", name_of)
        said = [str(node[key]).strip() for key in ("summary", "description") if node.get(key)]
        listed = {
            "name": name,
            "description": "\n\n".join(dict.fromkeys(said)) or f"{method.upper()} {path}",
            "inputSchema": schema,
            "annotations": {
                "readOnlyHint": method in READING,
                "destructiveHint": method == "delete",
                "idempotentHint": method in (*READING, "put", "delete"),
            },
        }
        security = self._security(node.get("security", self._document.get("security", [])), place)
        return Operation(name, method, path, self._server_of(item, node, place), listed, parameters, body, security)

    def _check(self, schema: Any, place: str, *at: str) -> None:
        """Refuse what is no JSON Schema. Operations share their definitions, and each is looked at once."""
        if (written := json.dumps(schema)) in self._checked:
            return
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as exc:
            where = ".".join(map(str, (*at, *exc.absolute_path))) or "its schema"
            raise wrong(f"{place}, at {where}", exc.message) from None
        self._checked.add(written)

    def _server_of(self, item: dict[str, Any], node: dict[str, Any], place: str) -> str:
        own = _server(node.get("servers") or item.get("servers"), self._base + "/", f"{place}.servers")
        if not (node.get("servers") or item.get("servers")) or own is None:
            return self._base
        if host_of(own) != self._host:
            raise Unfit(f"it is at {own}, and not at the service")
        return own

    def _parameters(
        self,
        path: str,
        item: dict[str, Any],
        node: dict[str, Any],
        place: str,
        schemas: Schemas,
        properties: dict[str, Any],
        required: list[str],
    ) -> tuple[Parameter, ...]:
        given: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
        for owner, at in ((item, place.rpartition(".")[0]), (node, place)):
            listed = owner.get("parameters")
            if listed is None:
                continue
            if not isinstance(listed, list):
                raise wrong(f"{at}.parameters", "a list is needed")
            for index, one in enumerate(listed):
                where = f"{at}.parameters[{index}]"
                found = self._references.resolved(one, where)
                if not isinstance(found.get("name"), str) or found.get("in") not in _STYLES:
                    raise wrong(where, f"a parameter has a name, and is in {', '.join(_STYLES)}")
                given[found["name"], found["in"]] = (found, where)
        made = []
        for (name, into), (found, where) in given.items():
            if into == "header" and name.lower() in _OURS:
                continue
            argument = name if name not in properties else f"{name}_{into}"
            made.append(self._parameter(argument, found, where, schemas, properties))
            if found.get("required") is True or into == "path":
                required.append(argument)
        for name in re.findall(r"\{([^}]*)\}", path):
            if (name, "path") not in given:
                raise wrong(place, f"the path has {{{name}}}, and no parameter of that name")
        return tuple(made)

    def _parameter(
        self, argument: str, found: dict[str, Any], where: str, schemas: Schemas, properties: dict[str, Any]
    ) -> Parameter:
        into = found["in"]
        content = found.get("content")
        schema = found.get("schema", {})
        if content is not None:
            if not isinstance(content, dict) or len(content) != 1:
                raise wrong(f"{where}.content", "one media type is needed")
            kind, media = next(iter(content.items()))
            if not _is_json(kind):
                raise Unfit(f"its parameter {found['name']} is written as {kind}")
            schema = self._references.resolved(media, f"{where}.content").get("schema", {})
        style = found.get("style", _STYLES[into][0])
        if style not in _STYLES[into]:
            raise Unfit(f"its parameter {found['name']} is of style {style}")
        properties[argument] = _described(schemas.read(schema, f"{where}.schema"), found.get("description"))
        explode = bool(found.get("explode", style == "form"))
        return Parameter(argument, found["name"], into, style, explode, content is not None)

    def _body(
        self, given: Any, place: str, schemas: Schemas, properties: dict[str, Any], required: list[str]
    ) -> Body | None:
        if given is None:
            return None
        found = self._references.resolved(given, place)
        content = found.get("content")
        if not isinstance(content, dict):
            raise wrong(f"{place}.content", "an object of media types is needed")
        if not content:
            return None
        kind = next((one for one in content if _is_json(one)), None)
        kind = kind or next((one for one in content if one.partition(";")[0].strip() in (FORM, "text/plain")), None)
        if kind is None:
            raise Unfit(f"its body is {', '.join(content)}")
        where = f"{place}.content.{kind}"
        plain = self._references.resolved(content[kind], where).get("schema", {})
        is_required = found.get("required") is True
        schema = schemas.read(plain, f"{where}.schema")
        members = schema
        if isinstance(schema, dict) and set(schema) == {"$ref"}:
            members = schemas.definitions[steps(schema["$ref"])[-1]]
        if is_required and _has_members(members) and not properties.keys() & members["properties"].keys():
            properties.update(members["properties"])
            required += [name for name in members.get("required", ()) if name not in required]
            return Body(kind, tuple(members["properties"]))
        properties["body"] = _described(schema, found.get("description"))
        if is_required:
            required.append("body")
        return Body(kind, None)

    def _security(self, given: Any, place: str) -> tuple[tuple[Credential, ...], ...]:
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise wrong(f"{place}.security", "a list of objects is needed")
        if not given or {} in given:
            return ()
        ways = [[self._credential(name) for name in one] for one in given]
        fit = tuple(tuple(one for one in way if one) for way in ways if all(way))
        if not fit:
            raise Unfit(f"it wants {' or '.join(' and '.join(one) for one in given)}, of a kind that is not known here")
        return fit

    def _credential(self, scheme: str) -> Credential | None:
        place = f"components.securitySchemes.{scheme}"
        components = self._document.get("components")
        schemes = components.get("securitySchemes") if isinstance(components, dict) else None
        if not isinstance(schemes, dict) or scheme not in schemes:
            raise wrong(place, "it is asked for, and not described")
        found = self._references.resolved(schemes[scheme], place)
        kind = found.get("type")
        if kind == "apiKey":
            if found.get("in") not in ("header", "query", "cookie") or not isinstance(found.get("name"), str):
                raise wrong(place, "a key has a name, and is in header, query or cookie")
            return Credential(scheme, found["in"], found["name"])
        if kind in ("oauth2", "openIdConnect"):
            return Credential(scheme, "bearer")
        http = str(found.get("scheme", "")).lower()
        return Credential(scheme, http) if kind == "http" and http in ("bearer", "basic") else None


def _is_json(media_type: str) -> bool:
    bare = media_type.partition(";")[0].strip().lower()
    return bare in ("application/json", "*/*") or bare.endswith("+json")


def _has_members(schema: Any) -> bool:
    """Whether it is an object that is no more than its members."""
    return (
        isinstance(schema, dict)
        and schema.get("type") == "object"
        and bool(schema.get("properties"))
        and not schema.keys() - {"type", "properties", "required", "title", "description", "additionalProperties"}
        and schema.get("additionalProperties", False) is False
    )


def _described(schema: Any, description: Any) -> Any:
    if not description or not isinstance(schema, dict):
        return schema
    return {**schema, "description": str(description)}
