"""Bad input, and clients that stop reading, vanish, die and change their minds, against ``aenv serve``: right answers,
nothing left."""

from __future__ import annotations

import io
import json
import socket
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.platform.support import PATIENCE, Platform, Reply, ask, eventually, platform, variant
from tests.platform.watching import living, sandboxes, status

MOODS = Path(__file__).parent / "moods"
MANY = 100_000
NO_NAMES = ("a/b", "../../etc/passwd", "..", "%", "größe", "日本", "\u202edesk", "a b", "a\nb", "a\0b", "x" * 999, "😀")
NO_VERSIONS = (
    "1.0",
    "v1.0.0",
    "1.0.0.0",
    "latest",
    "^1.0",
    "*",
    "1.0.0-",
    "-1.0.0",
    "\uff11.0.0",
    "1.0.0\n",
    "1.0.0-ß",
    "",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Platform]:
    with platform() as found:
        found.push()
        found.push(MOODS)
        yield found


def refused(reply: Reply, *statuses: int) -> dict[str, Any]:
    """What a refusal says, which is in the envelope and names the caller's fault."""
    found: dict[str, Any] = reply.json
    assert 400 <= reply.status < 500, found
    assert reply.status in statuses or not statuses, found
    assert (found["success"], found["code"], found["data"]) == (False, reply.status, None)
    assert found["message"]
    return found


# Bad input


def test_names_that_are_none(served: Platform) -> None:
    """On every route that has one."""
    right = {"name": "desk", "version": "1.2.0", "id": served.create("desk")["id"]}
    described = ask(served.control, "GET", "/openapi.json").json["paths"]
    for path, operations in described.items():
        for parameter in [each for each in ("name", "version", "id") if f"{{{each}}}" in path]:
            for method in operations:
                for wrong in NO_NAMES:
                    where = path.format(**{**right, parameter: quote(wrong, safe="")})
                    body = None if method in ("get", "delete") else {"value": "x" * 8, "reason": wrong}
                    refused(served.ask(method.upper(), where, body))
    for wrong in NO_NAMES:
        refused(served.ask("POST", "/env/", {"name": wrong, "version": "1.0.0"}), 422)
        refused(served.ask("POST", "/env-instance", {"envName": wrong}), 422)
        refused(served.ask("POST", "/token", {"owner": wrong}), 422)
        for path in (f"/env-instance/{quote(wrong, safe='')}/tools/look", f"/{quote(wrong, safe='')}"):
            reply = ask(served.data, "POST", path, {}, token=served.token)
            assert 400 <= reply.status < 500, (path, reply)
    for command in (("get", "a/b"), ("instance", "get", "../größe"), ("instance", "create", "a b")):
        done = served.aenv(*command, check=False)
        assert (done.returncode, done.stdout) == (1, ""), done
        assert done.stderr.startswith("error: "), done
    assert served.call(right["id"], "POST", "/tools/look", {}).json["data"] == []
    assert "Traceback" not in served.text


def test_versions_that_are_none(served: Platform) -> None:
    for wrong in NO_VERSIONS:
        refused(served.ask("POST", "/env/", {"name": "versions", "version": wrong}), 422)
        refused(served.ask("POST", f"/env/desk/{quote(wrong, safe='')}/release"))
    for wrong in ("v1.0.0", "1.0.0.0", "1.0.0-", ">=1", "1.x", "\uff11.0.0", "1.0.0-ß"):
        refused(served.ask("POST", "/env-instance", {"envName": f"desk@{wrong}"}), 422)
        refused(served.ask("GET", f"/env/desk/{quote(wrong, safe='')}"), 422)
    assert served.ask("GET", "/env/versions/versions").status == 404


def test_pages_of_a_hundred_thousand(served: Platform) -> None:
    found = 0
    for path, operations in ask(served.control, "GET", "/openapi.json").json["paths"].items():
        if not any(parameter.get("name") == "limit" for parameter in operations.get("get", {}).get("parameters", [])):
            continue
        found += 1
        where = path.format(name="desk")
        assert "limit" in refused(served.ask("GET", f"{where}?limit={MANY}"), 422)["message"]
        reply = served.ask("GET", f"{where}?offset={MANY}")
        assert (reply.data, reply.json["offset"]) == ([], MANY)
        refused(served.ask("GET", f"{where}?offset={10**40}"), 422)
    assert found > 5
    labels = {f"label{number}": "x" for number in range(MANY)}
    for field, value in (("labels", labels), ("environment_variables", labels), ("count", MANY)):
        refused(served.ask("POST", "/env-instance", {"envName": "desk", field: value}), 413, 422)
    refused(served.ask("POST", "/env/", {"name": "many", "version": "1.0.0", "tags": list(labels)}), 413, 422)
    refused(served.ask("PUT", "/env/desk/policy", {"readers": list(labels)}), 413, 422)


class Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return b"\0" * size


def archive(entry: tarfile.TarInfo) -> bytes:
    """A package of one more entry than it should have."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        config = json.dumps({"name": "bomb", "version": "1.0.0"}).encode()
        first = tarfile.TarInfo("config.json")
        first.size = len(config)
        tar.addfile(first, io.BytesIO(config))
        tar.addfile(entry, Zeros() if entry.isreg() else None)
    return buffer.getvalue()


def entry(name: str, *, size: int = 0, type: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, type, to
    return made


def endless_zeros(size: int) -> bytes:
    """So many zeros as gzip, and nothing else."""
    packing = zlib.compressobj(1, wbits=31)
    piece = bytes(1024 * 1024)
    return b"".join([*(packing.compress(piece) for _ in range(size // len(piece))), packing.flush()])


def test_bombs(served: Platform, tmp_path: Path) -> None:
    served.ask("POST", "/env/", {"name": "bomb", "version": "1.0.0"}).data  # noqa: B018
    for package, why in (
        (archive(entry("zeros", size=300 * 1024 * 1024)), "256.0 MiB"),
        (endless_zeros(300 * 1024 * 1024), "archive"),
        (archive(entry("../../up")), "leaves the project"),
        (archive(entry("/tmp/up")), "absolute"),
        (archive(entry("src/x", type=tarfile.SYMTYPE, to="/etc/passwd")), "absolute"),
        (archive(entry("src/x", type=tarfile.SYMTYPE, to="../../../x")), "src/x"),
        (archive(entry("src/x", type=tarfile.LNKTYPE, to="config.json")), "hard link"),
        (archive(entry("src/x", type=tarfile.CHRTYPE)), "device"),
        (archive(entry("src/x", type=tarfile.FIFOTYPE)), "pipe"),
        (archive(entry("/".join(["d"] * 3000))), "too long"),
    ):
        said = refused(served.ask("POST", "/env/bomb/1.0.0/package", package), 413, 422)
        assert why in said["message"], said
    assert served.ask("GET", "/env/bomb/1.0.0/status").data["title"] == "Pending"
    left = [path.name for path in (served.home / "platform" / "pushed").rglob("*") if "lock" not in path.name]
    assert len(left) == 1, left  # the folder of the server that runs
    bomb = variant(tmp_path, "bomb", "1.0.0")
    served.aenv("push", str(bomb))
    assert served.ask("GET", "/env/bomb/1.0.0/status").data["title"] == "Ready"


# Clients that misbehave


def raw(
    url: str, served: Platform, method: str, path: str, body: bytes = b"", size: int | None = None
) -> socket.socket:
    """A request of which nobody reads the answer, yet."""
    place = urlsplit(url)
    made = socket.create_connection((place.hostname or "", place.port or 0), PATIENCE)
    lines = (
        f"{method} {path} HTTP/1.1",
        f"Host: {place.netloc}",
        f"Authorization: Bearer {served.token}",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if size is None else size}",
    )
    made.sendall("\r\n".join((*lines, "", "")).encode() + body)
    return made


def vanish(connection: socket.socket) -> None:
    """As the connection of a machine that crashed and came back: no farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_client_that_vanishes_ends_what_it_asked_for(served: Platform) -> None:
    id = served.create("moods")["id"]
    one = f"/env-instance/{id}"

    def there(file: str) -> bool:
        return served.ask("GET", f"{one}/files?path={file}").status == 200

    for name, leave in (("closed", socket.socket.close), ("reset", vanish)):
        body = json.dumps({"name": name}).encode()
        connection = raw(served.data, served, "POST", f"{one}/tools/stay", body)
        eventually("the call", lambda file=f"{name}.begun": there(file))
        leave(connection)
        eventually("its end inside", lambda file=f"{name}.ended": there(file))

    command = {"command": "echo $$ > pid; exec sleep 3600", "timeout": 3600}
    connection = raw(served.control, served, "POST", f"{one}/exec", json.dumps(command).encode())
    eventually("the command", lambda: there("pid"))
    vanish(connection)
    gone = {"command": "! kill -0 $(cat pid)"}
    eventually("its end inside", lambda: served.ask("POST", f"{one}/exec", gone).data["returncode"] == 0)

    served.ask("POST", "/env/", {"name": "half", "version": "1.0.0"}).data  # noqa: B018
    for method, path in (("PUT", f"{one}/files?path=half.bin"), ("POST", "/env/half/1.0.0/package")):
        with raw(served.control, served, method, path, b"x" * 300_000, 600_000):
            pass
    with raw(served.control, served, "GET", f"{one}/logs?follow=true") as following:
        assert following.recv(12) == b"HTTP/1.1 200"
    whole = {f"{name}.{what}" for name in ("closed", "reset") for what in ("begun", "ended")} | {
        "config.json",
        "src",
        "pid",
    }

    def files() -> set[str]:
        return {each["name"] for each in served.ask("GET", f"{one}/files?path=.").data["entries"]}

    eventually("the end of what is half", lambda: files() == whole)
    eventually("the same", lambda: served.ask("GET", "/env/half/1.0.0/status").data["title"] == "Pending")
    assert served.ask("DELETE", one).status == 200
    assert "Traceback" not in served.text
    assert "never retrieved" not in served.text


def test_a_client_that_stops_reading_is_in_nobodys_way(served: Platform) -> None:
    id = served.create("moods")["id"]
    body = json.dumps({"size": 8_000_000}).encode()
    held = []
    try:
        for _ in range(12):
            held.append(raw(served.data, served, "POST", f"/env-instance/{id}/tools/flood", body))
            held.append(raw(served.control, served, "GET", f"/env-instance/{id}/logs?follow=true"))
            lists = raw(served.control, served, "GET", "/env-instance/list?limit=1000")
            held.append(lists)
            lists.setblocking(False)
            with suppress(BlockingIOError):  # and so on, without reading one answer
                lists.send(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
        assert served.call(id, "POST", "/tools/flood", {"size": 3}).json["data"] == "xxx"
        assert served.ask("GET", "/env/desk/1.2.0").status == 200
        other = served.create("desk")["id"]
        assert served.call(other, "POST", "/tools/look", {}).status == 200
        for each in (id, other):
            assert served.ask("DELETE", f"/env-instance/{each}").status == 200
        eventually("their end", lambda: not {id, other} & sandboxes(served))
    finally:
        for connection in held:
            connection.close()


TRAINER = """
import json, os, time, urllib.request

def ask(path, body):
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", "Prefer": "wait=60"}
    request = urllib.request.Request(os.environ["AENV_SYSTEM_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"]

made = ask("/env-instance", {"envName": "desk", "lease": 3})
print(made["id"], flush=True)
while True:
    ask(f"/env-instance/{made['id']}/renew", {})
    time.sleep(0.2)
"""


def test_a_trainer_that_is_killed_is_missed(served: Platform) -> None:
    with served.program(f"TOKEN = {served.token!r}\n{TRAINER}") as trainer:
        id = trainer.line()
        trainer.process.kill()
        eventually("its end", lambda: status(served, id) == "Terminated")
    assert "not heard of for 3 s" in served.ask("GET", f"/env-instance/{id}").data["reason"]
    eventually("the end of its sandbox", lambda: id not in sandboxes(served))


CANCELLED = """
import asyncio
from aenv import Environment

async def one(moment):
    env = Environment("desk", labels={"crowd": "cancelled"})
    task = asyncio.create_task(env.initialize())
    await asyncio.sleep(moment)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return 1
    await env.release()
    return 0

async def main():
    print(sum(await asyncio.gather(*(one(number / 40) for number in range(24)))))

asyncio.run(main())
"""


def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(served: Platform) -> None:
    assert int(served.run(CANCELLED)) > 0
    assert living(served, crowd="cancelled") == set()
    eventually("the end of their sandboxes", lambda: sandboxes(served) <= living(served))
