"""Files of a second container: whole or not at all, whatever their size, and with the reason when not."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from tests.agent.running import Agent, Done, Wire, until

MB = 1024 * 1024


def read(agent: Agent, path: Path | str) -> Done:
    with agent.connect() as wire:
        wire.send("g", os.fsencode(path))
        return wire.end()


def write(agent: Agent, path: Path | str, data: bytes, mode: int | None = None) -> Done:
    with agent.connect() as wire:
        if mode is not None:
            wire.number("m", mode, "!I")
        wire.send("u", os.fsencode(path))
        sender = threading.Thread(target=_send, args=(wire, data))
        sender.start()
        done = wire.end()
        sender.join()
        return done


def _send(wire: Wire, data: bytes) -> None:
    wire.send("i", data)
    wire.send("e")


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, MB + 1])
def test_what_was_written_is_read(agent: Agent, folder: Path, size: int) -> None:
    data = os.urandom(size)
    assert write(agent, folder / "file", data).code == 0
    assert (folder / "file").read_bytes() == data
    done = read(agent, folder / "file")
    assert (bytes(done.stdout), done.size, done.code) == (data, size, 0)


def test_100_mb_cost_no_memory(agent: Agent, folder: Path) -> None:
    data = os.urandom(MB) * 100
    assert write(agent, folder / "file", data).code == 0
    assert (folder / "file").read_bytes() == data
    with agent.connect() as wire:
        wire.send("g", os.fsencode(folder / "file"))
        done, size = Done(), 0
        while done.code != 0:
            for kind, piece in wire.hear():
                size += len(piece) if kind == b"o" else 0
                done.code = 0 if kind == b"x" else done.code
    assert size == len(data)
    assert agent.memory < 8 * MB


def test_a_file_without_a_size(agent: Agent) -> None:
    done = read(agent, "/proc/self/status")
    assert done.size == 0
    assert done.stdout.startswith(b"Name:")


def test_parents_are_made(agent: Agent, folder: Path) -> None:
    path = folder / "a" / "b" / "c" / "file"
    assert write(agent, path, b"x").code == 0
    assert path.read_bytes() == b"x"


def test_a_deep_path(agent: Agent, folder: Path) -> None:
    path = f"{folder}/{'d' * 200}" + "/d" * 1800 + "/" + "f" * 100
    assert len(path) < 4096
    assert write(agent, path, b"deep").code == 0
    assert read(agent, path).stdout == b"deep"
    subprocess.run(["rm", "-rf", folder / ("d" * 200)], check=True)  # deeper than Python's own goes
    assert (read(agent, path + "/x" * 200).errno, write(agent, path + "/x" * 200, b"").errno) == (
        errno.ENAMETOOLONG,
    ) * 2


@pytest.mark.parametrize("name", ["ü", " ", "a\nb", "-rf", b"\xff\xfe", "x" * 255])
def test_any_name(agent: Agent, folder: Path, name: str | bytes) -> None:
    path = os.fsencode(folder) + b"/" + os.fsencode(name)
    assert write(agent, os.fsdecode(path), b"1").code == 0
    assert os.listdir(os.fsencode(folder)) == [b"agent.sock", os.fsencode(name)] or os.path.exists(path)
    assert read(agent, os.fsdecode(path)).stdout == b"1"


def test_the_mode_is_the_given_one_or_stays(agent: Agent, folder: Path) -> None:
    path = folder / "file"
    assert write(agent, path, b"1", 0o751).code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert write(agent, path, b"2").code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert write(agent, folder / "other", b"1").code == 0
    assert stat.S_IMODE((folder / "other").stat().st_mode) & 0o600 == 0o600
    assert write(agent, folder / "odd", b"1", 0o6777).code == 0
    assert stat.S_IMODE((folder / "odd").stat().st_mode) == 0o777


def test_a_link_is_replaced_and_followed_to_read(agent: Agent, folder: Path) -> None:
    (folder / "target").write_bytes(b"old")
    (folder / "link").symlink_to("target")
    assert read(agent, folder / "link").stdout == b"old"
    assert write(agent, folder / "link", b"new").code == 0
    assert ((folder / "target").read_bytes(), (folder / "link").is_symlink()) == (b"old", False)


@pytest.mark.parametrize(
    ("path", "reading", "writing"),
    [
        ("nowhere", errno.ENOENT, None),
        ("directory", errno.EISDIR, errno.EISDIR),
        ("file/below", errno.ENOTDIR, errno.ENOTDIR),
        ("pipe", errno.ENXIO, errno.ENXIO),
        ("agent.sock", errno.ENXIO, errno.ENXIO),
        ("loop", errno.ELOOP, None),
        ("loop/below", errno.ELOOP, errno.ELOOP),
        ("x" * 256, errno.ENAMETOOLONG, errno.ENAMETOOLONG),
        ("x" * 5000, errno.ENAMETOOLONG, errno.ENAMETOOLONG),
    ],
)
def test_what_cannot_be_says_why(
    agent: Agent, folder: Path, path: str, reading: int | None, writing: int | None
) -> None:
    (folder / "directory").mkdir()
    (folder / "file").touch()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    before = sorted(os.listdir(folder))
    if reading is not None:
        done = read(agent, folder / path)
        assert (done.errno, done.stage, done.code) == (reading, "g", None)
    if writing is not None:
        done = write(agent, folder / path, b"x" * MB)
        assert (done.errno, done.stage, done.code) == (writing, "g", None)
        assert sorted(os.listdir(folder)) == before


def test_a_full_disk_is_told_and_leaves_nothing(agent: Agent) -> None:
    done = write(agent, "/dev/full", b"x")
    assert done.errno == errno.ENXIO
    done = write(agent, "/proc/file", b"x")
    assert done.errno in (errno.ENOENT, errno.EACCES, errno.EPERM)


def test_a_client_that_leaves_writes_nothing(agent: Agent, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_bytes(b"old")
    for _ in range(20):
        wire = agent.connect()
        wire.send("u", os.fsencode(folder / "sub" / "file"))
        wire.send("i", b"new" * 50000)
        wire.close()
    until(lambda: not agent.children, "the end of the writers")
    until(lambda: os.listdir(folder / "sub") == ["file"], "the end of what was half written")
    assert (folder / "sub" / "file").read_bytes() == b"old"


def test_a_client_that_leaves_reads_no_more(agent: Agent, folder: Path) -> None:
    with open(folder / "file", "wb") as file:
        file.truncate(10_000 * MB)
    wire = agent.connect()
    wire.send("g", os.fsencode(folder / "file"))
    assert wire.hear()
    wire.close()
    until(lambda: not agent.children, "the end of the reader")
