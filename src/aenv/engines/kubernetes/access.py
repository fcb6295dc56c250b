"""Where a cluster is and how it is asked: a kubeconfig, or the account of the pod that this process runs in."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aenv import config, http
from aenv.cleanup import finish
from aenv.errors import InvalidConfig, Unauthorized

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod is given that may ask its cluster."""
HINT = "set KUBECONFIG or AENV_KUBECONFIG to a kubeconfig, or run in a pod that has an account"
_FRESH = 60.0
"""Seconds after which a token's file is read again: a cluster gives pods new ones."""
_MARGIN = 30.0
"""Seconds before its end at which a token from a program is asked for again."""
_PROGRAM = 60.0
"""Seconds that such a program may take."""


class Access:
    """A cluster's address, and whatever opens it."""

    def __init__(self, url: str, namespace: str = "") -> None:
        self.url, self.namespace = url.rstrip("/"), namespace
        self.token = ""
        self.token_file: Path | None = None
        self.inside = False
        """Whether this process is in a pod of the cluster."""
        self.program: Mapping[str, Any] | None = None
        """What prints a token, as a kubeconfig describes it."""
        self._until = 0.0
        self._asking = asyncio.Lock()

    async def header(self) -> bytes:
        """The line that says who asks; nothing where a certificate does."""
        if self.token_file is not None and time.monotonic() > self._until:
            self.token = await asyncio.to_thread(_read, self.token_file)
            self._until = time.monotonic() + _FRESH
        if self.program is not None:
            async with self._asking:
                if time.time() > self._until:
                    self.token, self._until = await _ask_program(self.program)
        return f"Authorization: Bearer {self.token}\r\n".encode() if self.token else b""

    def doubt(self) -> bool:
        """The server does not take the token. Whether there may be another one, which is asked for next time."""
        self._until = 0.0
        return self.token_file is not None or self.program is not None


def find(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """The cluster that is meant: of the kubeconfig that is given or set, of the pod that this is, or of the user."""
    given = config.get("kubeconfig", kubeconfig) or config.get("kubeconfig_default")
    host, port = config.get("kubernetes_host"), config.get("kubernetes_port")
    if not given and host:
        return _of_the_pod(f"https://{f'[{host}]' if ':' in host else host}:{port}")
    places = [Path(place).expanduser() for place in (given or "~/.kube/config").split(os.pathsep) if place]
    found = [place for place in places if place.is_file()]
    if not found:
        where = ", ".join(map(str, places))
        raise InvalidConfig(f"no cluster is known: there is no kubeconfig {where}", hint=HINT)
    return _of_file(found[0], config.get("kube_context", context) or "")


def _of_the_pod(url: str) -> Access:
    found = Access(url, _read(ACCOUNT / "namespace"))
    found.token_file, found.inside = ACCOUNT / "token", True
    http.trust(url, _context({"certificate-authority": str(ACCOUNT / "ca.crt")}, {}, ACCOUNT))
    return found


def _of_file(file: Path, wanted: str) -> Access:
    try:
        import yaml
    except ImportError as exc:
        hint = "install it: pip install 'aenvironment[kubernetes]'"
        raise InvalidConfig("reading a kubeconfig needs the package PyYAML", hint=hint) from exc
    try:
        known = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise InvalidConfig(f"{file} cannot be read: {exc}", hint=HINT) from exc
    try:
        name = wanted or known.get("current-context") or ""
        context = _named(known, "contexts", name, file)["context"]
        cluster = _named(known, "clusters", context.get("cluster"), file)["cluster"]
        user = _named(known, "users", context["user"], file)["user"] or {} if context.get("user") else {}
        url = str(cluster["server"])
    except (KeyError, TypeError, AttributeError) as exc:
        raise InvalidConfig(f"{file} is no kubeconfig: {exc!r} is missing or of another kind", hint=HINT) from exc
    found = Access(url, str(context.get("namespace") or ""))
    found.token = str(user.get("token") or "")
    if user.get("tokenFile"):
        found.token_file = _beside(file, user["tokenFile"])
    found.program = user.get("exec")
    if user.get("auth-provider"):
        raise InvalidConfig(f"{file}: an auth-provider is not known any more", hint="use a token or exec")
    if url.startswith("https:"):
        http.trust(url, _context(cluster, user, file.parent))
    return found


def _named(known: Mapping[str, Any], what: str, name: object, file: Path) -> Mapping[str, Any]:
    rows: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in known.get(what) or ()}
    if name not in rows:
        listed = ", ".join(sorted(rows)) or "none"
        raise InvalidConfig(f"{file} has no {what[:-1]} {name!r}", hint=f"it has: {listed}")
    return rows[str(name)]


def _context(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    """How the server is recognised, and what is shown to it."""
    try:
        authority = _pem(cluster, "certificate-authority", folder)
        context = ssl.create_default_context(cadata=authority or None)
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        certificate, key = (_pem(user, name, folder) for name in ("client-certificate", "client-key"))
        if certificate and key:
            with tempfile.NamedTemporaryFile("w", prefix="aenv-", suffix=".pem") as pair:  # only its owner may read it
                pair.write(f"{certificate}\n{key}\n")
                pair.flush()
                context.load_cert_chain(pair.name)
    except (OSError, ValueError) as exc:
        raise InvalidConfig(f"a certificate of the cluster cannot be used: {exc}", hint=HINT) from exc
    return context


def _pem(values: Mapping[str, Any], name: str, folder: Path) -> str:
    """A certificate or key that is given itself, or by the name of a file."""
    if data := values.get(f"{name}-data"):
        return base64.b64decode("".join(str(data).split()), validate=True).decode()
    if place := values.get(name):
        return (folder / str(place)).read_text(encoding="utf-8")
    return ""


def _beside(file: Path, place: str) -> Path:
    return file.parent / place


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise InvalidConfig(f"{file} cannot be read: {exc.strerror}", hint=HINT) from exc


async def _ask_program(wanted: Mapping[str, Any]) -> tuple[str, float]:
    """The token that a program prints, and until when it can be used."""
    command = [str(wanted.get("command") or ""), *map(str, wanted.get("args") or ())]
    given = {str(row["name"]): str(row["value"]) for row in wanted.get("env") or ()}
    version = str(wanted.get("apiVersion") or "client.authentication.k8s.io/v1")
    asked = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    variables = config.child_environment({**given, "KUBERNETES_EXEC_INFO": json.dumps(asked)})
    try:
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=variables)
        try:
            async with asyncio.timeout(_PROGRAM):
                printed, said = await running.communicate()
        finally:
            if running.returncode is None:
                running.kill()
                await finish(_ended(running))
        if running.returncode:
            raise ValueError(said.decode(errors="replace").strip()[-1000:])
        status = json.loads(printed)["status"]
        ends = status.get("expirationTimestamp")
        until = moment(ends) - _MARGIN if ends else time.time() + _FRESH
        return str(status["token"]), until
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        why = f"it took more than {_PROGRAM:g} s" if isinstance(exc, TimeoutError) else str(exc)
        raise Unauthorized(f"{command[0]!r}, which gives tokens for the cluster, failed: {why}") from exc


async def _ended(process: asyncio.subprocess.Process) -> None:
    await process.wait()


def moment(text: str) -> float:
    """A time as a cluster writes it, as seconds since 1970; 0 for none."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, TypeError):
        return 0.0
