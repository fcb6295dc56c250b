"""The description of a service as a page to read: one file, without scripts, fonts or pictures from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

HEADERS = ((b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),)
_STYLE = """
:root { color-scheme: light dark; --line: #8883; --soft: #8881; --link: light-dark(#0550ae, #79b8ff); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1.5rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { margin: 2rem 0 .3rem; font: 600 1rem ui-monospace, monospace; overflow-wrap: anywhere; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
code { font: .9em ui-monospace, monospace; background: var(--soft); padding: .1em .3em; border-radius: 3px; }
p { margin: .3rem 0; } .soft { opacity: .7; }
table { border-collapse: collapse; margin: .4rem 0; }
td, th { text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; } th { font-weight: 600; font-size: .85em; opacity: .7; }
.verb { display: inline-block; min-width: 4.2em; color: light-dark(#116329, #56d364); }
.PUT, .POST { color: light-dark(#953800, #ffa657); } .DELETE { color: light-dark(#a40e26, #ff7b72); }
nav li { list-style: none; } nav ul { padding: 0; margin: .2rem 0 1rem; } nav code { background: none; }
"""


def page(document: dict[str, Any]) -> str:
    """The page for an OpenAPI document of ours."""
    return "\n".join(_page(document))


def _page(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    yield f'<h1>{escape(info["title"])}</h1><p class="soft">version {escape(info["version"])}, '
    yield '<a href="openapi.json">openapi.json</a></p>'
    yield f"<p>{_text(info['description'])}</p><p>Where a scope is named, send a token that has it as "
    yield "<code>Authorization: Bearer ...</code>.</p>"
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = list(dict.fromkeys(operation["tags"][0] for _, _, operation in operations))
    yield "<nav>"
    for tag in tags:
        yield f"<b>{escape(tag)}</b><ul>"
        for method, path, operation in operations:
            if operation["tags"][0] == tag:
                verb = f'<span class="verb {method}">{method}</span>'
                link = f'<a href="#{escape(operation["operationId"])}"><code>{verb}{escape(path)}</code></a>'
                yield f'<li>{link} <span class="soft">{_text(operation["summary"])}</span></li>'
        yield "</ul>"
    yield "</nav>"
    for tag in tags:
        yield f"<h2>{escape(tag)}</h2>"
        for method, path, operation in operations:
            if operation["tags"][0] == tag:
                yield from _operation(method, path, operation)
    yield "<h2>Types</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield from _type(name, schema)
    yield "</body></html>"


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f'<h3 id="{escape(operation["operationId"])}"><span class="verb {method}">{method}</span>{escape(path)}</h3>'
    scopes = [scope for needed in operation["security"] for found in needed.values() for scope in found]
    yield f"<p>{_text(operation['summary'])} {_text(operation.get('description', ''))}</p>"
    yield f'<p class="soft">{"scope " + escape(", ".join(scopes)) if scopes else "open to anybody"}</p>'
    rows = [
        (found["name"], found["in"] + ("" if found["required"] else ", optional"), found["schema"], found)
        for found in operation.get("parameters", ())
    ]
    if rows:
        yield "<table><tr><th>parameter</th><th>where</th><th>type</th><th></th></tr>"
        for name, where, schema, found in rows:
            about = _text(found.get("description", ""))
            yield f"<tr><td><code>{escape(name)}</code></td><td>{where}</td>"
            yield f"<td>{shape(schema)}</td><td>{about}</td></tr>"
        yield "</table>"
    if body := operation.get("requestBody"):
        schema = next(iter(body["content"].values()))["schema"]
        optional = "" if body["required"] or not schema else ", optional"
        yield f"<p>Body{optional}: {shape(schema) if schema else 'bytes'}</p>"
    for status, response in operation["responses"].items():
        if status != "default":
            shapes = [_answer(kind, found["schema"]) for kind, found in response["content"].items()]
            yield f"<p>Answers {status}: {' or '.join(shapes)}</p>"


def _answer(kind: str, schema: dict[str, Any]) -> str:
    if "data" not in schema.get("properties", {}):
        return f"<code>{escape(kind)}</code>"
    paged = ", a page" if "total" in schema["properties"] else ""
    return f"{shape(schema['properties']['data'])}{paged}"


def _type(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<h3 id="type-{escape(name)}">{escape(name)}</h3><p>{_text(schema.get("description", ""))}</p>'
    if "properties" not in schema:
        yield f"<p>{shape(schema)}</p>"
        return
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    required = schema.get("required", ())
    for field, found in schema["properties"].items():
        optional = "" if field in required else ' <span class="soft">optional</span>'
        about = _text(found.get("description", ""))
        yield f"<tr><td><code>{escape(field)}</code></td><td>{shape(found)}{optional}</td><td>{about}</td></tr>"
    yield "</table>"


def shape(schema: dict[str, Any]) -> str:
    """A schema in a few words, its types linked."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        return " or ".join(shape(found) for found in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"<code>{escape(json.dumps(found))}</code>" for found in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {shape(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {shape(schema['additionalProperties'])}"
    names = " or ".join(kind) if isinstance(kind, list) else kind
    return names + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    bounds = ""
    if least is not None and most is not None:
        bounds = f", {least} to {most}" if most < 2**32 else f", from {least}" if least > -(2**32) else ""
    default = schema.get("default")
    return bounds + ("" if default in (None, "", [], {}) else f", {json.dumps(default)} by default")


def _text(text: str) -> str:
    return re.sub(r"`(.+?)`", r"<code>\1</code>", escape(text))
