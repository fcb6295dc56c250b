"""Writes settings.md, api.md, http.md and values.md in docs/reference from the code; ``--check`` says whether they are
current."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aenv
from aenv import config, errors, evals, rl
from aenv.api import pools, quotas, top, usage_routes
from aenv.api.routes import routes as instance_routes
from aenv.api.services.routes import routes as service_routes
from aenv.client.handle import Handle
from aenv.controller.routes import routes as controller_routes
from aenv.deploy import documents
from aenv.deploy.chart import Chart, chart
from aenv.hub.routes import routes as hub_routes
from aenv.runtime.access import Hosts
from aenv.web import openapi
from aenv.web.accounts import routes as account_routes
from aenv.web.app import App

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
WIDTH = 100
GROUPS = (
    ("Using an environment", ("Environment", "SyncEnvironment", "attach", "Siblings", "Forked")),
    ("Tools for the API of a model", ("openai_tools", "anthropic_tools", "gemini_tools")),
    ("Results", ("ToolResult", "ExecResult", "Image", "Audio")),
    ("Writing an environment", aenv._HOME["aenv.runtime.registry"]),
    ("What a function may ask", ("Context",)),
)
EPISODES = (
    ("Episodes", ("rollout", "rollouts", "Rollouts", "Task", "Rules", "Reward", "Stragglers")),
    ("Agents", ("Episode", "OpenAIAgent", "TokenAgent", "Generated")),
    ("Episodes that other loops drive", ("Driven",)),
    ("What is left of an episode", ("Trajectory", "Scored", "Failed", "Turn", "Call", "Tokens", "Group", "Tally")),
    ("Kept episodes", ("read", "Writer", "grouped", "replay", "Replayed", "rescore", "export", "Exported")),
)
"""Names of ``aenv.rl``."""
EVALUATIONS = (
    ("Evaluations", ("evaluate", "Taskset", "Evaluation", "TaskResult", "Estimate", "page")),
    ("Comparing evaluations", ("compare", "Comparison")),
    ("Agents by name", ("agent", "Oracle", "Nop", "Command")),
)
"""Names of ``aenv.evals``."""
SERVICES = {
    "env": "Environments: the hub",
    "env-instance": "Instances: the API service",
    "env-service": "Services: the API service",
    "quota": "Limits, pools and use: the API service",
    "pool": "Limits, pools and use: the API service",
    "top": "Limits, pools and use: the API service",
    "usage": "Limits, pools and use: the API service",
    "token": "Tokens, secrets and the audit log: both",
    "secret": "Tokens, secrets and the audit log: both",
    "audit": "Tokens, secrets and the audit log: both",
    "aenvironment": "An engine, served: the controller",
    "service": "Every service",
}
HAND_OVER = "Made from the code by `scripts/reference.py`."


def settings() -> str:
    rows = [
        f"| `{found.key}` | `{found.variable}` | {_default(found.default)} | {'yes' if found.in_file else 'no'} | "
        f"{found.about}{'; a secret, never shown' if found.secret else ''} |"
        for found in config.SETTINGS
    ]
    return "\n".join(
        [
            "# Settings",
            "",
            f"{HAND_OVER} A value comes from the argument that was given, else from the",
            "environment variable, else from the config file, else it is the default. `aenv config show` prints each",
            "with where it came from.",
            "",
            "| key | variable | default | in the file | what it is |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Two more variables have no key. `AENV_HOME` is the folder that holds `config.json`, `~/.aenv` when it is",
            "not set. `NO_COLOR` turns the command's colours off.",
            "",
        ]
    )


def _default(value: Any) -> str:
    return "-" if value in (None, "") else f"`{value}`"


def api() -> str:
    parts = [
        "# Python API",
        "",
        f"{HAND_OVER} Every name is imported from `aenv`, those of episodes from `aenv.rl`, those of evaluations",
        "from `aenv.evals`, and loads on first use. `aenv.__version__` is the version.",
        "",
    ]
    for module, groups in ((aenv, GROUPS), (rl, EPISODES), (evals, EVALUATIONS)):
        for title, names in groups:
            parts += [f"## {title}", ""]
            for name in names:
                parts += _entry(name, getattr(module, name))
    parts += ["## Errors", "", *_errors()]
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    yield _code(name, value)
    yield ""
    yield _about(value)
    yield ""
    if not inspect.isclass(value):
        return
    if value is aenv.SyncEnvironment:
        shown = [method for method, _ in _members(value)]
        yield f"Methods, each as in `Environment`: {', '.join(f'`{method}`' for method in shown)}."
        yield ""
        return
    for member, found in _members(value):
        if isinstance(found, property) or hasattr(found, "func"):
            yield f"- **`.{member}`** {_about(found)}".rstrip()
        else:
            prefix = "await " if inspect.iscoroutinefunction(found) else ""
            yield f"- **`{prefix}.{member}{_signature(found)}`** {_about(found)}".rstrip()
    yield ""


def _members(value: type) -> list[tuple[str, Any]]:
    found = []
    below = vars(Handle) if value is aenv.Environment else {}
    for name, member in {**below, **vars(value)}.items():
        function = member.__func__ if isinstance(member, staticmethod) else member
        named = inspect.isfunction(function) or isinstance(function, property) or hasattr(function, "func")
        if named and not name.startswith("_"):
            found.append((name, function))
    return found


def _about(value: Any) -> str:
    """The first paragraph of a docstring, in Markdown."""
    text = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _code(name: str, value: Any) -> str:
    line = name + _signature(value)
    return f"```text\n{_folded(line)}\n```"


def _folded(line: str) -> str:
    if len(line) <= WIDTH:
        return line
    head, _, rest = line.partition("(")
    inside, _, tail = rest.rpartition(")")
    depth, parts, current = 0, [], ""
    for character in inside:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    parts.append(current.strip())
    return f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"


def _signature(function: Callable[..., Any]) -> str:
    """A signature as it is written, the same on every version of Python."""
    parts: list[str] = []
    starred = False
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred = starred or mark == "*"
        text = mark + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_shown(parameter.default)}"
        parts.append(text)
        following = parameters[index + 1].kind if index + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.POSITIONAL_ONLY:
            parts.append("/")
    returned = inspect.signature(function).return_annotation
    arrow = "" if returned in (inspect.Signature.empty, "None", None) else f" -> {returned}"
    return f"({', '.join(parts)}){arrow}"


def _annotation(found: Any) -> str:
    return found.__name__ if isinstance(found, type) else str(found).replace("typing.", "")


def _shown(default: Any) -> str:
    return default.__name__ if inspect.isfunction(default) else repr(default)


def _errors() -> Iterator[str]:
    doc = inspect.getdoc(errors) or ""
    tree = [line for line in doc.splitlines() if line.startswith("    ")]
    yield "```text"
    yield from (line[4:].rstrip() for line in tree)
    yield "```"
    yield ""
    yield "Each has `message` and `hint`; `code` and the HTTP status are what travels."
    other = [name for name in aenv._HOME["aenv.errors"] if getattr(errors, name).__name__ != name]
    names = ", ".join(f"`{name}` is `{getattr(errors, name).__name__}`" for name in other)
    yield f"Older names go on working: {names}."
    yield "[Failures](../concepts/failures.md) says when each is raised."
    yield ""


def http() -> str:
    """The page of all services. A table of routes needs no service behind it to be read."""
    nothing: Any = None
    routes = [
        *hub_routes(nothing),
        *instance_routes(nothing),
        *service_routes(nothing),
        *quotas.routes(nothing),
        *pools.routes(nothing),
        *top.routes(nothing),
        *usage_routes.routes(nothing, nothing),
        *account_routes(nothing, nothing, nothing),
        *controller_routes(nothing),
    ]
    app = App(routes, title="AEnvironment", authenticate=nothing, guard=Hosts(loopback=True))
    document = openapi.describe(app.title, app.table.endpoints)
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            group = groups.setdefault(SERVICES[operation["tags"][0]], [])
            group += _route(method.upper(), path, operation)
    parts = [
        "# HTTP",
        "",
        f"{HAND_OVER} A platform also serves this description itself, as `/openapi.json` and `/docs`.",
        "",
        document["info"]["description"],
        "",
        "A token goes along as `Authorization: Bearer ...`. Each route names the scope that it must have; `admin` has",
        "them all. The data port has the routes of [the runtime](../concepts/runtime.md), under the instance's URL.",
        "",
    ]
    for title in dict.fromkeys(SERVICES.values()):
        parts += [f"## {title}", "", *groups[title]]
    parts += ["## Types", ""]
    for name, schema in document["components"]["schemas"].items():
        parts += _type(name, schema)
    parts += [
        "## Statuses",
        "",
        "`error` is a code of [the errors](api.md#errors).",
        "",
        "| status | why |",
        "|---|---|",
    ]
    parts += [f"| {status} | {why} |" for status, why in openapi.STATUSES.items()]
    return "\n".join([*parts, ""])


def _route(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    scopes = [f"`{scope}`" for needed in operation["security"] for found in needed.values() for scope in found]
    yield f"### `{method} {path}`"
    yield ""
    yield f"{operation['summary']} {operation.get('description', '')}".strip()
    yield f"Scope: {', '.join(scopes)}." if scopes else "Open to anybody."
    yield ""
    parameters = operation.get("parameters", ())
    if parameters := [found for found in parameters if found["in"] != "path" or "description" in found]:
        yield "| parameter | where | type | what it is |"
        yield "|---|---|---|---|"
        for found in parameters:
            where = found["in"] if found["required"] else f"{found['in']}, optional"
            yield f"| `{found['name']}` | {where} | {_shape(found['schema'])} | {found.get('description', '')} |"
        yield ""
    if body := operation.get("requestBody"):
        schema = next(iter(body["content"].values()))["schema"]
        optional = "" if body["required"] or not schema else ", optional"
        yield f"Body{optional}: {_shape(schema) if schema else 'bytes'}."
    for status, response in operation["responses"].items():
        if status != "default":
            yield f"Answers {status}: {', or '.join(_content(*found) for found in response['content'].items())}."
    yield ""


def _content(kind: str, found: dict[str, Any]) -> str:
    properties = found["schema"].get("properties", {})
    if "data" not in properties:
        return "bytes" if kind == "*/*" else kind
    return _shape(properties["data"]) + (", a page" if "total" in properties else "")


def _type(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if "description" in schema:
        yield schema["description"]
        yield ""
    if "enum" in schema:
        yield f"One of {', '.join(f'`{value}`' for value in schema['enum'])}."
        yield ""
        return
    yield "| field | type | what it is |"
    yield "|---|---|---|"
    for field, found in schema["properties"].items():
        optional = "" if field in schema.get("required", ()) else ", optional"
        yield f"| `{field}` | {_shape(found)}{optional} | {found.get('description', '')} |"
    yield ""


def _shape(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_shape, schema["anyOf"]))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if schema.get("type") == "array":
        return f"list of {_shape(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_shape(schema['additionalProperties'])}"
    kind = schema.get("type", "anything")
    default = schema.get("default")
    shown = "" if default in (None, "", [], {}) else f", `{json.dumps(default)}` by default"
    return (" or ".join(kind) if isinstance(kind, list) else kind) + shown


def values() -> str:
    """The page of the chart's values."""
    found = chart()
    return "\n".join(
        [
            "# Values of the chart",
            "",
            f"{HAND_OVER} `helm install -f` and `aenv deploy -f` take the same ones;",
            "`deploy/chart/values.schema.json` is their schema. [Deploy on Kubernetes](../guides/deploy.md) uses them.",
            "",
            "| value | default | what it is |",
            "|---|---|---|",
            *_values(found, found.values, found.schema, ""),
            "",
        ]
    )


def _values(found: Chart, held: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    for name, value in held.items():
        described = schema["properties"][name]
        if "properties" in described:
            yield from _values(found, value, described, f"{where}{name}.")
            continue
        default = json.dumps(documents.plain(value)) if value not in ("", [], {}) else "-"
        yield f"| `{where}{name}` | {default if default == '-' else f'`{default}`'} | {described['description']} |"


def main() -> int:
    stale = 0
    pages = {"settings.md": settings(), "api.md": api(), "http.md": http(), "values.md": values()}
    for name, page in pages.items():
        file = FOLDER / name
        if "--check" not in sys.argv[1:]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(page, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != page:
            sys.stderr.write(f"{file} is out of date; run: python scripts/reference.py\n")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
