"""Who may do what: every route of both planes, asked with every kind of credential, and compared with ``access.md``.

``python -m tests.platform.test_access --write`` writes that table anew, from what a platform answers. Read what changed
in it before you commit it: the table is what is meant, this file only what is found.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from aenv.runtime.app import EXACT, PREFIX
from aenv.runtime.openenv import ROUTES
from tests.platform.asking import CONTROL_PROBES, GATEWAY_PROBES, SANDBOX_PROBES, WORDS, Ask, Probe, World
from tests.platform.support import PATIENCE, Reply, ask, platform

pytestmark = pytest.mark.xdist_group("platform-access")
TABLE = Path(__file__).with_name("access.md")
CONTROL, DATA, STRAIGHT = "Control plane", "Data plane", "A sandbox, asked directly"
KINDS = {
    "none": "no credential",
    "garbage": "what looks like a token and is none",
    "expired": "a token of ada's that has expired",
    "revoked": "a token of ada's that was revoked",
    "other": "bob's token, with every scope but admin",
    "read": "ada's token that is for reading only",
    "push": "ada's token that is for pushing only",
    "run": "ada's token that is for running only",
    "full": "ada's token, with every scope but admin",
    "admin": "an admin's token",
    "agent": "the agent token of the instance",
    "owner": "the owner token of the instance",
    "agent 2": "the agent token of another instance of ada's",
    "owner 2": "the owner token of another instance of ada's",
}
REFUSED = {401: "unauthorized", 403: "forbidden", 404: "not_found", 409: "conflict"}


# What is found


def _answer(connection: http.client.HTTPConnection, method: str, asked: Ask, token: str | None) -> Reply:
    """One request. Of an answer without an end, only the head."""
    headers = dict(asked.headers)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    data = asked.body if asked.body is None or isinstance(asked.body, bytes) else json.dumps(asked.body).encode()
    try:
        connection.request(method, asked.path, data, headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_endless = found.get("content-type", "").startswith("text/event-stream")
        return Reply(response.status, found, b"" if is_endless else response.read())
    finally:
        connection.close()


def _outcome(asked: Ask, reply: Reply) -> str:
    """What became of a request, in the words of the table."""
    text = reply.body.decode(errors="replace")
    if reply.status in REFUSED:
        told = reply.json
        assert told["success"] is False, text
        assert REFUSED[reply.status] in (told.get("error"), told.get("code")), text
        assert reply.status != 401 or reply.headers["www-authenticate"] == "Bearer", reply.headers
        assert WORDS not in text, text
        return str(reply.status)
    if reply.status != asked.done:
        return str(reply.status)
    if asked.shows and asked.shows not in text:
        return "empty"
    return "bare" if '"owner_token":""' in text else "yes"


def _asked(world: World, method: str, probe: Probe, send: Callable[[Ask, str | None], Reply]) -> list[str]:
    """What becomes of a request with each kind of credential. Whatever it would change, it changes only if it may."""
    outcomes = []
    for kind in KINDS:
        asked = probe(world)
        before = asked.look and asked.look()
        reply = send(asked, world.tokens[kind])
        outcome = _outcome(asked, reply)
        if asked.look is not None:
            changed = asked.look() != before
            assert changed == (outcome == "yes"), f"{method} {asked.path} as {kind}: {outcome}, changed: {changed}"
        outcomes.append(outcome)
    return outcomes


def _connection(url: str) -> http.client.HTTPConnection:
    place = urlsplit(url)
    return http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE)


class _Straight(http.client.HTTPConnection):
    """A connection to a socket in the file system."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


Found = dict[str, dict[str, list[str]]]


def _control(world: World) -> dict[str, list[str]]:
    found = {}
    for route, probe in CONTROL_PROBES.items():
        method = route.split()[0]

        def send(asked: Ask, token: str | None, method: str = method) -> Reply:
            reply = _answer(_connection(world.platform.control), method, asked, token)
            if method == "GET":
                head = _answer(_connection(world.platform.control), "HEAD", asked, token)
                assert (head.status, head.body) == (reply.status, b""), f"HEAD {asked.path}: {head}"
            return reply

        found[route] = _asked(world, method, probe, send)
    return found


def _data(world: World) -> dict[str, list[str]]:
    """By the path and by the header: it makes no difference."""
    found = {}
    for route, probe in {**SANDBOX_PROBES, **GATEWAY_PROBES}.items():
        method, of_gateway = route.split()[0], route in GATEWAY_PROBES

        def by_path(asked: Ask, token: str | None, method: str = method, of_gateway: bool = of_gateway) -> Reply:
            path = asked.path if of_gateway else f"/env-instance/{world.id}{asked.path}"
            return _answer(_connection(world.platform.data), method, asked._replace(path=path), token)

        def by_header(asked: Ask, token: str | None, method: str = method) -> Reply:
            headers = {**asked.headers, "AEnvCore-EnvInstance-ID": world.id}
            return _answer(_connection(world.platform.data), method, asked._replace(headers=headers), token)

        found[route] = _asked(world, method, probe, by_path)
        if not of_gateway:
            assert found[route] == _asked(world, method, probe, by_header), route
    found["GET exposed port"] = _exposed(world)
    return found


def _exposed(world: World) -> list[str]:
    """The page of a server inside, at its signed address."""
    world.inside("POST", "/tools/serve", {"port": 8765})
    place = urlsplit(world.ask("POST", f"/env-instance/{world.id}/expose", {"port": 8765})["url"])
    asked = Ask("/page", headers={"Host": place.netloc}, shows="desk at /page")
    return [
        _outcome(asked, _answer(_connection(world.platform.data), "GET", asked, token))
        for token in (world.tokens[kind] for kind in KINDS)
    ]


def _straight(world: World) -> dict[str, list[str]]:
    path = world.instance["socket"].removeprefix("unix:")

    def send(method: str) -> Callable[[Ask, str | None], Reply]:
        return lambda asked, token: _answer(_Straight(path), method, asked, token)

    return {
        route: _asked(world, route.split()[0], probe, send(route.split()[0])) for route, probe in SANDBOX_PROBES.items()
    }


def find(world: World) -> Found:
    """What the platform answers."""
    return {CONTROL: _control(world), DATA: _data(world), STRAIGHT: _straight(world)}


# The table


def written(found: Found) -> str:
    lines = [
        "# Who may do what",
        "",
        "Every route, asked with every kind of credential; `test_access.py` compares a platform with this page.",
        "What is asked about is ada's: an environment that only she sees (or, where it says so, one that is public),",
        "an instance of it, a secret, a token.",
        "",
        "| credential | what it is |",
        "|---|---|",
        *(f"| {kind} | {text} |" for kind, text in KINDS.items()),
        "",
        "| outcome | what happens |",
        "|---|---|",
        "| yes | it is done |",
        "| bare | it is shown, without the tokens of the instance |",
        "| empty | it is answered, and nothing of ada's is in it |",
        "| 401 | the credential is none, or opens nothing here |",
        "| 403 | it is known, and not for this |",
        "| 404 | for this caller there is no such thing |",
        "| 409 | the name is taken; by whom is not said |",
    ]
    for section, rows in found.items():
        lines += ["", f"## {section}", "", f"| route | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
        lines += [f"| `{route}` | {' | '.join(outcomes)} |" for route, outcomes in rows.items()]
    return "\n".join([*lines, ""])


def read(text: str) -> Found:
    found: Found = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            found[section] = {}
        elif line.startswith("| `"):
            route, *outcomes = (cell.strip() for cell in line.strip("|").split("|"))
            found[section][route.strip("`")] = outcomes
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with platform() as served:
        yield World(served, tmp_path_factory.mktemp("projects"))


@pytest.fixture(scope="module")
def table() -> Found:
    return read(TABLE.read_text())


def _compare(found: dict[str, list[str]], meant: dict[str, list[str]]) -> None:
    assert list(found) == list(meant), "routes and rows differ"
    wrong = [
        f"{route} as {kind}: {is_} where {should} is meant"
        for route, outcomes in found.items()
        for kind, is_, should in zip(KINDS, outcomes, meant[route], strict=True)
        if is_ != should
    ]
    assert not wrong, "\n".join(wrong)


def test_every_route_has_a_row(world: World, table: Found) -> None:
    """And every row has a route."""
    described = json.loads(ask(world.platform.control, "GET", "/openapi.json").body)["paths"]
    served = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert {route.removesuffix(" (public)") for route in table[CONTROL]} == served
    inside = {f"{method} {path}" for path, methods in EXACT.items() for method in methods}
    inside |= {f"{method} /{prefix}/..." for prefix, methods in PREFIX.items() for method in methods}
    inside |= {f"{method} /openenv/{name}" for name, methods in ROUTES.items() for method in methods}
    assert set(table[STRAIGHT]) == inside
    assert set(table[DATA]) == inside | set(GATEWAY_PROBES) | {"GET exposed port"}


def test_the_control_plane(world: World, table: Found) -> None:
    _compare(_control(world), table[CONTROL])


def test_the_data_plane(world: World, table: Found) -> None:
    _compare(_data(world), table[DATA])


def test_a_sandbox_asked_directly(world: World, table: Found) -> None:
    """It trusts nobody on its own socket, either."""
    _compare(_straight(world), table[STRAIGHT])


def test_what_is_others_is_as_if_it_were_not_there(world: World, table: Found) -> None:
    """Whoever may not see something cannot tell whether it is there."""
    bob = list(KINDS).index("other")
    planes = (
        (world.platform.control, CONTROL_PROBES, table[CONTROL], ""),
        (world.platform.data, SANDBOX_PROBES, table[DATA], f"/env-instance/{world.id}"),
    )
    for url, probes, rows, prefix in planes:
        for route, probe in probes.items():
            if rows[route][bob] != "404":
                continue
            method, asked = route.split()[0], probe(world)
            there = asked._replace(path=prefix + asked.path)
            nowhere = there._replace(path=_nowhere(there.path), body=_elsewhere(there.body))
            answers = [_answer(_connection(url), method, sent, world.tokens["other"]) for sent in (there, nowhere)]
            told = [_nowhere(answer.body.decode()) for answer in answers]
            assert told[0] == told[1], route


def _elsewhere(body: Any) -> Any:
    return body if isinstance(body, bytes) else json.loads(_nowhere(json.dumps(body)))


def _nowhere(text: str) -> str:
    """The same about what nobody has: another name, and with it another instance, or another token."""
    return re.sub(r"[0-9a-f]{16}", "0" * 16, text).replace("study", "attic")


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python -m tests.platform.test_access --write")
    with tempfile.TemporaryDirectory() as folder, platform() as served:
        TABLE.write_text(written(find(World(served, Path(folder)))))


if __name__ == "__main__":
    main()
