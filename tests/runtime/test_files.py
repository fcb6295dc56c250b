"""Files of a sandbox, for its owner: what is read and written, and what is refused without hanging."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from aenv.runtime import tokens
from tests.runtime.wire import Reply, send, send_raw
from tests.support import FIXTURES, Sandbox, sandbox

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sandbox, Path]]:
    """A sandbox, and its work directory."""
    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        with sandbox(FIXTURES / "lab") as running:
            yield running, work


def get(running: Sandbox, path: object) -> Reply:
    return send(running.port, "GET", f"/files?path={quote(str(path))}")


def put(running: Sandbox, path: object, content: bytes, headers: dict[str, str] | None = None) -> Reply:
    return send(running.port, "PUT", f"/files?path={quote(str(path))}", content, headers)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("content", [b"", b"text\n", bytes(range(256)) * 10, os.urandom(3 * MIB + 7)], ids=len)
@pytest.mark.parametrize("name", ["plain", "deep/er/file.txt", "with space & ünïcode#?.txt", "n" * 255])
def test_what_was_written_is_read(box: tuple[Sandbox, Path], name: str, content: bytes) -> None:
    running, work = box
    path = work / f"{len(content)}" / name
    shown = f"{len(content)}/{name}"
    assert put(running, shown, content).json == {"success": True, "data": {"path": str(path), "size": len(content)}}
    assert path.read_bytes() == content
    assert not [found for found in os.listdir(path.parent) if found.startswith(".")]
    for asked in (shown, path):
        reply = get(running, asked)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/octet-stream")
        assert reply.body == content


def test_a_file_is_replaced_in_one_step_and_keeps_its_mode(box: tuple[Sandbox, Path]) -> None:
    running, work = box
    script = work / "script"
    script.write_bytes(b"old")
    script.chmod(0o750)
    with script.open("rb") as held:
        assert put(running, script, b"new").status == 200
        assert held.read() == b"old"
    assert (script.read_bytes(), script.stat().st_mode & 0o777) == (b"new", 0o750)


def test_a_link_is_replaced_and_its_target_left_alone(box: tuple[Sandbox, Path], tmp_path: Path) -> None:
    running, work = box
    target = tmp_path / "target"
    target.write_text("precious")
    link = work / "link"
    link.symlink_to(target)
    assert get(running, link).body == b"precious"
    assert put(running, link, b"mine").status == 200
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("precious", "mine", False)


def test_a_directory_is_listed(box: tuple[Sandbox, Path], tmp_path: Path) -> None:
    running, _ = box
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").mkdir()
    (tmp_path / "c").symlink_to("nowhere")
    os.mkfifo(tmp_path / "d")
    assert get(running, tmp_path).json["data"] == {
        "path": str(tmp_path),
        "entries": [
            {"name": "a", "type": "file", "size": 3},
            {"name": "b", "type": "directory", "size": None},
            {"name": "c", "type": "link", "size": None},
            {"name": "d", "type": "other", "size": None},
        ],
        "truncated": False,
    }


def test_a_file_without_a_size_is_read_to_its_end(box: tuple[Sandbox, Path]) -> None:
    running, _ = box
    assert f"Pid:\t{running.process.pid}\n".encode() in get(running, "/proc/self/status").body


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Path]:
    """A folder of things that are not files."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "to_fifo").symlink_to("fifo")
    (tmp_path / "to_zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(tmp_path / "socket"))
        yield tmp_path


@pytest.mark.parametrize(
    ("method", "name", "status", "words"),
    [
        ("GET", "none", 404, "No such file"),
        ("GET", "fifo", 409, "not a regular file"),
        ("GET", "to_fifo", 409, "not a regular file"),
        ("GET", "to_zero", 409, "not a regular file"),
        ("GET", "socket", 409, "not a regular file"),
        ("GET", "file/below", 409, "Not a directory"),
        ("GET", "loop", 422, "symbolic links"),
        ("GET", "nul\0byte", 422, "not a path"),
        ("GET", "n" * 256, 422, "too long"),
        ("GET", "/proc/self/mem", 500, "Input/output error"),
        ("PUT", "folder", 409, "is a directory"),
        ("PUT", "fifo", 409, "not a regular file"),
        ("PUT", "socket", 409, "not a regular file"),
        ("PUT", "/dev/null", 409, "not a regular file"),
        ("PUT", "file/below", 409, "Not a directory"),
        ("PUT", "/proc/none", 404, "No such file"),
        ("PUT", "nul\0byte", 422, "not a path"),
        ("PUT", "n" * 256, 422, "too long"),
    ],
)
def test_what_is_no_file_is_refused_at_once(
    box: tuple[Sandbox, Path], odd: Path, method: str, name: str, status: int, words: str
) -> None:
    running, _ = box
    before = sorted(os.listdir(odd))
    path = os.path.join(odd, name)
    reply = send(running.port, method, f"/files?path={quote(path)}", b"new" if method == "PUT" else None)
    assert (reply.status, reply.json["success"]) == (status, False)
    assert words in reply.json["error"]
    assert sorted(os.listdir(odd)) == before
    assert (odd / "fifo").is_fifo()


@pytest.mark.parametrize("query", ["", "?path=", "?other=x", "?path=a&path=b"])
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_one_file_has_to_be_named(box: tuple[Sandbox, Path], method: str, query: str) -> None:
    reply = send(box[0].port, method, f"/files{query}", b"x" if method == "PUT" else None)
    assert (reply.status, reply.json["error"]) == (422, "which file?")


def test_an_upload_over_the_limit_is_refused(tmp_path: Path) -> None:
    with sandbox(FIXTURES / "lab", variables={"AENV_MAX_BODY": "1000"}) as running:
        assert put(running, tmp_path / "fits", b"x" * 1000).status == 200
        reply = put(running, tmp_path / "over", b"x" * 1001)
        assert (reply.status, reply.json["code"]) == (413, "too_large")
    assert os.listdir(tmp_path) == ["fits"]


def test_a_file_that_may_not_grow_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with sandbox(FIXTURES / "lab") as running:
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        reply = put(running, file, b"x" * 2 * MIB)
        assert reply.status == 500
        assert str(file) in reply.json["error"]
        assert (file.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])
        assert put(running, file, b"x" * MIB).status == 200


def _mounts(folder: Path) -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    if not _mounts(tmp_path):
        pytest.skip("this machine lets nobody mount a small disk in a namespace of his own")
    disk, python = tmp_path / "disk", tmp_path / "python"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1m none {disk} && exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\nexec unshare -rm sh -c '{mount}' sh \"$@\"\n")
    python.chmod(0o755)
    with sandbox(FIXTURES / "lab", python=str(python)) as running:
        assert put(running, disk / "file", b"old").status == 200
        reply = put(running, disk / "file", b"x" * 2 * MIB)
        assert (reply.status, reply.json["hint"]) == (500, "nothing was changed there")
        assert reply.json["error"] == f"{disk}/file cannot be written: No space left on device"
        assert get(running, disk / "file").body == b"old"
        assert [entry["name"] for entry in get(running, disk).json["data"]["entries"]] == ["file"]


def test_the_same_call_id_writes_once(box: tuple[Sandbox, Path], tmp_path: Path) -> None:
    running, _ = box
    file, headers = tmp_path / "file", {"AEnv-Call-Id": "write-once"}
    assert put(running, file, b"first", headers).status == 200
    file.write_bytes(b"changed since")
    assert put(running, file, b"first", headers).status == 200
    assert file.read_bytes() == b"changed since"


# Large files


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate(256 * MIB)
    return file


def _peak(running: Sandbox) -> int:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _open_files(running: Sandbox) -> list[str]:
    found = []
    for link in Path(f"/proc/{running.process.pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return found


def test_a_large_file_takes_little_memory(large: Path) -> None:
    with sandbox(FIXTURES / "lab") as running:
        assert len(get(running, "/proc/self/status").body) > 0
        before = _peak(running)
        with send_raw(running.port, "GET", f"/files?path={large}", None, {"Connection": "close"}) as sock:
            received = len(sock.recv(100))
            for _ in range(300):  # a reader that does not read
                assert send(running.port, "GET", "/info").status == 200
            while data := sock.recv(MIB):
                received += len(data)
        assert received > 256 * MIB
        assert _peak(running) - before < 12 * MIB


def test_a_client_that_leaves_ends_the_reading(box: tuple[Sandbox, Path], large: Path) -> None:
    running, _ = box
    with send_raw(running.port, "GET", f"/files?path={large}", None, {}) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert str(large) in _open_files(running)
    until(lambda: str(large) not in _open_files(running))


def test_a_reader_that_is_slow_delays_nobody(box: tuple[Sandbox, Path], large: Path) -> None:
    running, _ = box
    socks = [send_raw(running.port, "GET", f"/files?path={large}", None, {}) for _ in range(8)]
    for sock in socks:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    assert get(running, "/proc/self/status").status == 200
    assert send(running.port, "POST", "/tools/add", {"a": 1}).json["data"] == 3
    for sock in socks:
        sock.close()


def test_half_a_file_never_passes_for_the_whole(large: Path) -> None:
    with sandbox(FIXTURES / "lab", variables={"AENV_GRACE": "0"}) as running:
        with send_raw(running.port, "GET", f"/files?path={large}", None, {}) as sock:
            end = sock.recv(100)
            assert end.startswith(b"HTTP/1.1 200")
            assert running.stop() == 0
            received = 0
            try:
                while data := sock.recv(MIB):
                    received += len(data)
                    end = (end + data)[-10:]
            except ConnectionResetError:
                pass
    assert received < 256 * MIB
    assert not end.endswith(b"\r\n0\r\n\r\n")


# Who may


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/files?path=x"), ("PUT", "/files?path=x"), ("POST", "/exec"), ("GET", "/history")]
)
def test_only_the_owner_has_these_powers(guarded: tuple[Sandbox, str], method: str, path: str) -> None:
    running, owner = guarded
    agent = tokens.agent_token(tokens.digest(owner))
    body = b'{"command": "true"}'
    assert send(running.port, method, path, body).status == 401
    assert send(running.port, method, path, body, {"Authorization": f"Bearer {agent}"}).status == 403
    reply = send(running.port, method, path, body, {"Authorization": f"Bearer {owner}"})
    assert reply.status in (200, 404)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sandbox, str]]:
    owner = tokens.new_owner_token()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("guarded"))
        with sandbox(FIXTURES / "lab", variables={"AENV_OWNER_TOKEN_SHA256": tokens.digest(owner)}) as running:
            yield running, owner


def test_a_page_of_another_site_reaches_none_of_them(box: tuple[Sandbox, Path]) -> None:
    for method, path in (("POST", "/exec"), ("PUT", "/files?path=x"), ("GET", "/files?path=x"), ("GET", "/history")):
        for headers in ({"Origin": "http://evil.example.com"}, {"Sec-Fetch-Site": "cross-site"}):
            assert send(box[0].port, method, path, b'{"command": "true"}', headers).status == 403
