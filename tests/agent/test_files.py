"""Files of a second container: whole or not at all, whatever their size, and with the reason when not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
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


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_is_followed_and_stays(agent: Agent, folder: Path, absolute: bool) -> None:
    (folder / "sub").mkdir()
    target = folder / "sub" / "target"
    target.write_bytes(b"old")
    target.chmod(0o640)
    (folder / "sub" / "one").symlink_to(target if absolute else "target")
    (folder / "link").symlink_to("sub/one")
    assert read(agent, folder / "link").stdout == b"old"
    assert write(agent, folder / "link", b"new").code == 0
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"new", 0o640)
    assert sorted(os.listdir(folder / "sub")) == ["one", "target"]
    assert (folder / "link").is_symlink()
    assert (folder / "sub" / "one").is_symlink()


def test_a_link_to_what_is_not_there_yet(agent: Agent, folder: Path) -> None:
    (folder / "link").symlink_to("new/file")
    assert write(agent, folder / "link", b"1").code == 0
    assert ((folder / "new" / "file").read_bytes(), (folder / "link").is_symlink()) == (b"1", True)


@pytest.mark.parametrize(
    ("path", "reading", "writing"),
    [
        ("nowhere", errno.ENOENT, None),
        ("directory", errno.EISDIR, errno.EISDIR),
        ("file/below", errno.ENOTDIR, errno.ENOTDIR),
        ("pipe", errno.ENXIO, errno.ENXIO),
        ("agent.sock", errno.ENXIO, errno.ENXIO),
        ("to-directory", errno.EISDIR, errno.EISDIR),
        ("to-pipe", errno.ENXIO, errno.ENXIO),
        ("new/", errno.ENOENT, errno.EISDIR),
        ("new/.", errno.ENOENT, errno.EISDIR),
        ("new/..", errno.ENOENT, errno.EISDIR),
        ("loop", errno.ELOOP, errno.ELOOP),
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
    (folder / "to-directory").symlink_to("directory")
    (folder / "to-pipe").symlink_to("pipe")
    os.mkfifo(folder / "pipe")
    before = sorted(os.listdir(folder))
    if reading is not None:
        done = read(agent, f"{folder}/{path}")
        assert (done.errno, done.stage, done.code) == (reading, "g", None)
    if writing is not None:
        done = write(agent, f"{folder}/{path}", b"x" * MB)
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


def test_who_moves_a_file_cannot_be_stopped(agent: Agent, folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * MB)
    (folder / "sub").mkdir()
    with agent.connect() as reader, agent.connect() as writer:
        left = agent.connect()
        for wire in (writer, left):
            wire.send("u", os.fsencode(folder / "sub" / "new"))
            wire.send("i", b"1")
        until(lambda: len(os.listdir(folder / "sub")) == 2, "the writers")
        reader.send("g", os.fsencode(folder / "file"))
        until(lambda: len(agent.children) == 3, "the reader")
        for child in agent.children:
            child.suspend()
        left.close()
        writer.send("e")
        assert (len(reader.end().stdout), writer.end().code) == (MB, 0)
    until(lambda: not agent.children, "the end of all")
    assert os.listdir(folder / "sub") == ["new"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can trace what is not dumpable")
def test_what_does_not_move_ends(agent: Agent, folder: Path) -> None:
    """It is held where nothing continues it, as a disk would that does not answer."""
    with agent.connect() as wire:
        left = agent.connect()
        for one in (wire, left):
            one.send("u", os.fsencode(folder / "new"))
        until(lambda: len(agent.children) == 2, "the writers")
        with contextlib.ExitStack() as held:
            for child in agent.children:
                held.enter_context(traced(child.pid))
            left.close()
            wire.send("e")
            done = wire.end()
            assert (done.errno, done.stage) == (errno.ETIMEDOUT, "g")
            until(lambda: not agent.children, "the end of both")
    assert not (folder / "new").exists()


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """A process that stands still."""
    attach, detach = 16, 17
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    assert trace(attach, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    try:
        os.waitpid(pid, 0x40000000)  # __WALL: also who is another's child
        yield
    finally:
        trace(detach, pid, None, None)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
