"""Every route of both planes, as requests about what belongs to one owner, for ``test_access``."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aenv import project
from aenv.project import archive
from tests.platform.support import DESK, PATIENCE, Platform, eventually

WORDS = "ada keeps this to herself"
"""What is said of ada's private environment, and to be found in no answer to others."""
CLERK = """from aenv import register_agent


@register_agent
def clerk(message: str) -> str:
    return message
"""
MCP = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


class Ask(NamedTuple):
    """A request that would do something, were it allowed."""

    path: str
    body: Any = None
    headers: Mapping[str, str] = {}
    done: int = 200
    """The status when it is allowed."""
    shows: str = ""
    """What of ada's is in the answer. Answered without it, the outcome is ``empty``."""
    look: Callable[[], Any] | None = None
    """What it changes, and a refusal leaves as it was."""


Probe = Callable[["World"], Ask]


class World:
    """A platform with what belongs to ada: two environments, one of them public, instances, a secret, a token."""

    def __init__(self, served: Platform, folder: Path) -> None:
        self.platform = served
        self._folder = folder
        self._numbers = itertools.count()
        ada = self.ada = self._token(owner="ada", scopes=["read", "push", "run"])["token"]
        self.tokens: dict[str, str | None] = {
            "none": None,
            "garbage": "aenv_" + "x" * 43,
            "expired": self._token(owner="ada", ttl=0.001)["token"],
            "other": self._token(owner="bob", scopes=["read", "push", "run"])["token"],
            "read": self._token(owner="ada", scopes=["read"])["token"],
            "push": self._token(owner="ada", scopes=["push"])["token"],
            "run": self._token(owner="ada", scopes=["run"])["token"],
            "full": ada,
            "admin": self._token(owner="eve", scopes=["admin"])["token"],
        }
        revoked = self._token(owner="ada")
        self.ask("DELETE", f"/token/{revoked['id']}")
        self.tokens["revoked"] = revoked["token"]
        for name in ("study", "hall"):
            self.version(name, "1.0.0")
            self.ask("POST", f"/env/{name}/1.0.0/package", self.package(name, "1.0.0"))
        self.ask("PUT", "/env/study/policy", {"public": False})
        self.instance, other = self.create(), self.create()
        self.id = self.instance["id"]
        self.tokens |= {"agent": self.instance["agent_token"], "owner": self.instance["owner_token"]}
        self.tokens |= {"agent 2": other["agent_token"], "owner 2": other["owner_token"]}
        self.service = self.serve()
        self.ask("PUT", "/secret/KEY", {"value": WORDS})
        for kind in ("expired", "revoked"):
            eventually(f"the end of the {kind} token", lambda kind=kind: self._is_refused(self.tokens[kind]))

    def _token(self, **fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.platform.ask("POST", "/token", fields).data
        return found

    def _is_refused(self, token: str | None) -> bool:
        return self.platform.ask("GET", "/env", token=token).status == 401

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """What ada does, and hears."""
        return self.platform.ask(method, path, body, token=self.ada).data

    def inside(self, method: str, path: str, body: Any = None) -> Any:
        """What ada does in her instance."""
        return self.platform.call(self.id, method, path, body, token=self.ada).data

    def look(self, path: str) -> Callable[[], Any]:
        """What is there, as an admin sees it."""

        def found() -> Any:
            reply = self.platform.ask("GET", path)
            return [reply.json[key] for key in ("error", "data", "total") if key in reply.json]

        return found

    def number(self) -> int:
        """One that no other has."""
        return next(self._numbers)

    def version(self, name: str, version: str = "") -> str:
        """A new version of an environment, without a package."""
        made = version or f"0.0.{self.number()}"
        said = {"name": name, "version": made, "status": "created", "description": WORDS if name == "study" else ""}
        self.ask("POST", "/env", said)
        return made

    def package(self, name: str, version: str) -> bytes:
        """The desk under another name, with somebody to talk to."""
        root = self._folder / f"{name}-{version}"
        shutil.copytree(DESK, root, dirs_exist_ok=True)
        config = json.loads((DESK / "config.json").read_text())
        config |= {"name": name, "version": version, "description": WORDS if name == "study" else ""}
        (root / "config.json").write_text(json.dumps(config))
        (root / "src" / "clerk.py").write_text(CLERK)
        return archive.pack(project.read(root))

    def create(self) -> dict[str, Any]:
        return self.platform.create("study@1.0.0", token=self.ada)

    def serve(self) -> str:
        """A service of ada's, of which there is nobody yet: its id."""
        found: str = self.ask("POST", "/env-service", {"envName": "study@1.0.0", "replicas": 0})["id"]
        return found

    def session(self) -> dict[str, str]:
        """The headers of an MCP session in ada's instance."""
        reply = self.platform.call(self.id, "POST", "/mcp", HELLO, token=self.tokens["agent"], headers=MCP)
        return {**MCP, "Mcp-Session-Id": reply.headers["mcp-session-id"]}


# The control plane


def _new_token(world: World) -> Ask:
    return Ask("/token", {"name": "new", "scopes": ["read"]}, look=world.look("/token"))


def _revoke(world: World) -> Ask:
    id = world.ask("POST", "/token", {"scopes": ["read"]})["id"]
    return Ask(f"/token/{id}", look=lambda: id in {token["id"] for token in world.ask("GET", "/token?limit=1000")})


def _set_secret(world: World) -> Ask:
    return Ask("/secret/KEY?owner=ada", {"value": "another value"}, look=world.look("/secret"))


def _delete_secret(world: World) -> Ask:
    name = f"KEY_{world.number()}"
    world.ask("PUT", f"/secret/{name}", {"value": WORDS})
    return Ask(f"/secret/{name}?owner=ada", look=world.look("/secret"))


def _set_quota(world: World) -> Ask:
    subject = f"experiment:ada/{world.number()}"
    return Ask(f"/quota?subject={subject}", {"instances": 5}, look=world.look("/quota?limit=1000"))


def _delete_quota(world: World) -> Ask:
    path = f"/quota?subject=experiment:ada/{world.number()}"
    assert world.platform.ask("PUT", path, {"instances": 5}).status == 200
    return Ask(path, look=world.look("/quota?limit=1000"))


def _new_version(name: str) -> Probe:
    def made(world: World) -> Ask:
        said = {"name": name, "version": f"0.1.{world.number()}"}
        return Ask("/env", said, look=world.look(f"/env/{name}/versions?limit=1"))

    return made


def _of(name: str, rest: str, *, shows: str = "") -> Probe:
    """Something that only looks at an environment."""
    return lambda world: Ask(f"/env/{name}{rest}", shows=shows)


def _change(name: str, act: str = "", body: Any = None) -> Probe:
    """Something that changes a version that was made for it."""

    def made(world: World) -> Ask:
        version = world.version(name)
        at = f"/env/{name}/{version}"
        said = None if body is None else {"name": name, "version": version, **body}
        return Ask(at + act, said, look=world.look(at))

    return made


def _share(name: str) -> Probe:
    at = f"/env/{name}/policy"
    return lambda world: Ask(at, {"readers": [f"friend-{world.number()}"]}, look=world.look(at))


def _upload(name: str) -> Probe:
    """A package that is read, or, for the public environment, nonsense: that takes less time."""

    def made(world: World) -> Ask:
        version = world.version(name)
        at = f"/env/{name}/{version}"
        if name == "study":
            return Ask(f"{at}/package", world.package(name, version), look=world.look(at))
        return Ask(f"{at}/package", b"nonsense", done=422)

    return made


def _hub(name: str, note: str) -> dict[str, Probe]:
    words = WORDS if name == "study" else name
    probes: dict[str, Probe] = {
        "POST /env": _new_version(name),
        "GET /env": lambda world: Ask("/env", shows=f'"name":"{name}"'),
        "GET /env/{name}/versions": _of(name, "/versions", shows=words),
        "GET /env/{name}/policy": _of(name, "/policy", shows='"ada"'),
        "PUT /env/{name}/policy": _share(name),
        "GET /env/{name}/{version}": _of(name, "/1.0.0", shows=words),
        "PUT /env/{name}/{version}": _change(name, body={"tags": ["changed"]}),
        "DELETE /env/{name}/{version}": _change(name),
        "GET /env/{name}/{version}/exists": _of(name, "/1.0.0/exists", shows="true}"),
        "GET /env/{name}/{version}/status": _of(name, "/1.0.0/status"),
        "POST /env/{name}/{version}/release": _change(name, "/release"),
        "POST /env/{name}/{version}/yank": _change(name, "/yank"),
        "POST /env/{name}/{version}/package": _upload(name),
        "GET /env/{name}/{version}/package": _of(name, "/1.0.0/package"),
    }
    return {f"{route}{note}": probe for route, probe in probes.items()}


def _running(act: str, body: Any = None, **more: Any) -> Probe:
    """Something that is done to ada's instance."""
    return lambda world: Ask(f"/env-instance/{world.id}{act}", body, **more)


def _create(world: World) -> Ask:
    wanted = {"envName": "study@1.0.0", "ttl": "1h"}
    listed = world.look("/env-instance/list?limit=1")
    return Ask("/env-instance", wanted, {"Prefer": f"wait={PATIENCE:g}"}, look=lambda: listed()[-1])


def _end(world: World) -> Ask:
    at = f"/env-instance/{world.create()['id']}"
    return Ask(at, look=world.look(at))


def _extend(world: World) -> Ask:
    at = f"/env-instance/{world.id}"
    return Ask(f"{at}/extend", {"ttl": f"{world.number() + 3600}s"}, look=lambda: world.look(at)()[0]["expires_at"])


def _reset(at: str) -> Probe:
    def made(world: World) -> Ask:
        world.inside("POST", "/tools/put", {"thing": "pen"})
        return Ask(at.format(world.id), {}, look=lambda: world.inside("POST", "/tools/look"))

    return made


def _exec(at: str) -> Probe:
    def made(world: World) -> Ask:
        command = {"command": f"touch made-{world.number()}"}
        return Ask(at.format(world.id), command, look=lambda: world.inside("GET", "/files?path=."))

    return made


def _write(at: str) -> Probe:
    def made(world: World) -> Ask:
        path = f"{at.format(world.id)}?path=written-{world.number()}"
        return Ask(path, b"x", look=lambda: world.inside("GET", "/files?path=."))

    return made


def _serving(act: str, body: Any = None, **more: Any) -> Probe:
    """Something that is done to ada's service."""
    return lambda world: Ask(f"/env-service/{world.service}{act}", body, **more)


def _serve(world: World) -> Ask:
    listed = world.look("/env-service/list?limit=1")
    return Ask("/env-service", {"envName": "study@1.0.0", "replicas": 0}, look=lambda: listed()[-1])


def _generation(world: World) -> Callable[[], Any]:
    at = world.look(f"/env-service/{world.service}")
    return lambda: at()[0]["generation"]


def _change_service(world: World) -> Ask:
    body = {"environment_variables": {"NUMBER": str(world.number())}}
    return Ask(f"/env-service/{world.service}", body, look=_generation(world))


def _restart(world: World) -> Ask:
    return Ask(f"/env-service/{world.service}/restart", look=_generation(world))


def _end_service(world: World) -> Ask:
    at = f"/env-service/{world.serve()}"
    found = world.look(at)
    return Ask(at, look=lambda: found()[0]["status"])


CONTROL_PROBES: dict[str, Probe] = {
    "POST /token": _new_token,
    "GET /token": lambda world: Ask("/token", shows='"owner":"ada"'),
    "DELETE /token/{id}": _revoke,
    "PUT /secret/{name}": _set_secret,
    "GET /secret": lambda world: Ask("/secret", shows='"owner":"ada"'),
    "DELETE /secret/{name}": _delete_secret,
    "GET /audit": lambda world: Ask("/audit", shows='"owner":"ada"'),
    "GET /usage": lambda world: Ask("/usage?owner=ada"),
    "GET /top": lambda world: Ask("/top", shows='"owner":"ada"'),
    **_hub("study", ""),
    **_hub("hall", " (public)"),
    "POST /env-instance": _create,
    "GET /env-instance/list": lambda world: Ask("/env-instance/list", shows='"owner":"ada"'),
    "GET /env-instance/{name}/list": lambda world: Ask("/env-instance/study/list", shows='"owner":"ada"'),
    "GET /env-instance/{id}": _running("", shows='"owner":"ada"'),
    "DELETE /env-instance/{id}": _end,
    "POST /env-instance/{id}/extend": _extend,
    "POST /env-instance/{id}/renew": _running("/renew"),
    "POST /env-instance/{id}/reset": _reset("/env-instance/{}/reset"),
    "POST /env-instance/{id}/exec": _exec("/env-instance/{}/exec"),
    "POST /env-instance/{id}/expose": _running("/expose", {"port": 8000}),
    "POST /env-instance/{id}/fork": _running("/fork", done=501),
    "POST /env-instance/{id}/checkpoint": _running("/checkpoint", done=501),
    "POST /env-instance/{id}/restore": _running("/restore", done=501),
    "GET /env-instance/{id}/logs": _running("/logs"),
    "GET /env-instance/{id}/history": _running("/history"),
    "GET /env-instance/{id}/files": _running("/files?path=config.json"),
    "PUT /env-instance/{id}/files": _write("/env-instance/{}/files"),
    "POST /env-service": _serve,
    "GET /env-service/list": lambda world: Ask("/env-service/list", shows='"owner":"ada"'),
    "GET /env-service/{name}/list": lambda world: Ask("/env-service/study/list", shows='"owner":"ada"'),
    "GET /env-service/{id}": _serving("", shows='"owner":"ada"'),
    "PUT /env-service/{id}": _change_service,
    "DELETE /env-service/{id}": _end_service,
    "POST /env-service/{id}/restart": _restart,
    "GET /env-service/{id}/logs": _serving("/logs"),
    "GET /quota": lambda world: Ask("/quota", shows='"subject":"owner:ada"'),
    "PUT /quota": _set_quota,
    "DELETE /quota": _delete_quota,
    "GET /pool": lambda world: Ask("/pool"),
    "GET /health": lambda world: Ask("/health"),
    "GET /metrics": lambda world: Ask("/metrics"),
    "GET /openapi.json": lambda world: Ask("/openapi.json"),
    "GET /docs": lambda world: Ask("/docs"),
}


# The data plane, and a sandbox itself


SANDBOX_PROBES: dict[str, Probe] = {
    "POST /mcp": lambda world: Ask("/mcp", HELLO, MCP),
    "GET /mcp": lambda world: Ask("/mcp", headers=world.session()),
    "DELETE /mcp": lambda world: Ask("/mcp", headers=world.session()),
    "GET /health": lambda world: Ask("/health"),
    "POST /specialise": lambda world: Ask("/specialise", {}),
    "GET /info": lambda world: Ask("/info"),
    "POST /task/reward": lambda world: Ask("/task/reward", {}),
    "GET /functions/list": lambda world: Ask("/functions/list"),
    "GET /tools": lambda world: Ask("/tools"),
    "POST /reset": _reset("/reset"),
    "POST /reseed": lambda world: Ask("/reseed", {"seed": 1}),
    "GET /state": lambda world: Ask("/state", done=501),
    "PUT /state": lambda world: Ask("/state", b"x", done=501),
    "GET /files": lambda world: Ask("/files?path=config.json"),
    "PUT /files": _write("/files"),
    "POST /exec": _exec("/exec"),
    "GET /history": lambda world: Ask("/history"),
    "POST /shell": lambda world: Ask("/shell", done=426),
    "POST /children": lambda world: Ask("/children", done=426),
    "POST /functions/...": lambda world: Ask("/functions/count", {}),
    "GET /functions/...": lambda world: Ask("/functions/count", done=405),
    "POST /tools/...": lambda world: Ask("/tools/look", {}),
    "DELETE /calls/...": lambda world: Ask("/calls/of-nobody"),
    "POST /ports/...": lambda world: Ask("/ports/8000", done=426),
    "POST /a2a": lambda world: Ask("/a2a", {}),
    "POST /a2a/...": lambda world: Ask("/a2a/clerk", {}),
    "GET /a2a/...": lambda world: Ask("/a2a/clerk/.well-known/agent-card.json"),
    "GET /.well-known/agent-card.json": lambda world: Ask("/.well-known/agent-card.json"),
    "GET /openenv/ws": lambda world: Ask("/openenv/ws", done=426),
    "POST /openenv/reset": _reset("/openenv/reset"),
    "POST /openenv/step": lambda world: Ask("/openenv/step", {"action": {"type": "list_tools"}}),
    "GET /openenv/state": lambda world: Ask("/openenv/state"),
    "POST /openenv/mcp": lambda world: Ask("/openenv/mcp", {}),
    "GET /openenv/schema": lambda world: Ask("/openenv/schema"),
    "GET /openenv/metadata": lambda world: Ask("/openenv/metadata"),
    "GET /openenv/openapi.json": lambda world: Ask("/openenv/openapi.json"),
    "GET /openenv/health": lambda world: Ask("/openenv/health"),
}
"""The routes of a runtime, for ada's instance."""
GATEWAY_PROBES: dict[str, Probe] = {
    "GET /health (the gateway's own)": lambda world: Ask("/health"),
    "GET /env-service/...": lambda world: Ask("/env-service/some/health", done=501),
}
