"""What was not saved here is refused before anything is changed."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from aenv import Environment
from aenv.errors import AEnvError, Invalid, Unsupported
from tests.rl.bench import Bench
from tests.runtime.saving.support import DESCRIBED, load, put, run, told

pytestmark = pytest.mark.asyncio(loop_scope="module")


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def directory(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=0o755)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


END = member("end")


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as made:
        for info, content in members:
            made.addfile(info, io.BytesIO(content))
    return held.getvalue()


Members = list[tuple[tarfile.TarInfo, bytes]]
FOREIGN: dict[str, Members] = {
    "a way up": [member("project/../etc/x", b"x")],
    "a way up and back": [member("project/../project/x", b"x")],
    "only a way up": [member("..", b"x")],
    "an absolute path": [member("/project/x", b"x")],
    "two slashes": [member("//project/x", b"x")],
    "a slash too many": [member("project//x", b"x")],
    "another place": [member("etc/x", b"x")],
    "a place like ours": [member("project-too/x", b"x")],
    "the place itself": [link("project", "/etc")],
    "a dot": [directory("project/.")],
    "no name": [member("project/", b"x")],
    "a device": [member("project/x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "a disk": [member("project/x", type=tarfile.BLKTYPE, devmajor=8, devminor=0)],
    "through a link": [link("project/a", "/tmp"), member("project/a/x", b"x")],
    "through a link, deeper": [link("project/a", "/tmp"), member("project/a/b/x", b"x")],
    "through a link that comes later": [member("project/a/x", b"x"), link("project/a", "/tmp")],
    "a directory that becomes a link": [directory("project/a"), link("project/a", "/tmp"), member("project/a/x", b"x")],
    "onto a link": [link("project/a", "/tmp/x"), member("project/a", b"x")],
    "a hard link out": [link("project/a", "etc/passwd", tarfile.LNKTYPE)],
    "an absolute hard link": [link("project/a", "/etc/passwd", tarfile.LNKTYPE)],
    "a hard link to nothing": [link("project/a", "project/b", tarfile.LNKTYPE)],
    "a hard link to a link": [link("project/b", "/etc/passwd"), link("project/a", "project/b", tarfile.LNKTYPE)],
    "twice": [member("project/a", b"x"), member("project/a", b"y")],
    "an unknown kind": [member("project/a", type=b"Z")],
    "a directory without its parent": [directory("project/a/b")],
}


async def _refused(victim: tuple[Environment, bytes], content: bytes) -> AEnvError:
    env, _ = victim
    before = await run(env, DESCRIBED)
    error = told(await put(env, content))
    assert await run(env, DESCRIBED) == before
    assert await env.call_reward() == 4.0
    return error


@pytest.fixture
def head(victim: tuple[Environment, bytes]) -> Callable[..., tuple[tarfile.TarInfo, bytes]]:
    def make(**changes: Any) -> tuple[tarfile.TarInfo, bytes]:
        with tarfile.open(fileobj=io.BytesIO(victim[1])) as found:
            file = found.extractfile("said")
            assert file is not None
            return member("said", json.dumps({**json.loads(file.read()), **changes}).encode())

    return make


@pytest.mark.parametrize("case", FOREIGN)
async def test_files_that_lead_elsewhere_are_refused_before_anything_is_changed(
    victim: tuple[Environment, bytes], head: Callable[..., tuple[tarfile.TarInfo, bytes]], case: str
) -> None:
    error = await _refused(victim, archive(head(), member("project/new", b"new"), *FOREIGN[case]))
    assert type(error) is Invalid
    assert "/" in error.message


async def test_what_is_no_archive_of_ours_is_refused(
    victim: tuple[Environment, bytes], head: Callable[..., tuple[tarfile.TarInfo, bytes]]
) -> None:
    whole = victim[1]
    for content in (
        b"",
        b"x",
        b"\0" * 10_240,
        b"not a tar" * 10_000,
        os.urandom(5000),
        archive(member("project/x", b"x")),
        archive(member("project/x", b"x"), head()),
        archive(directory("said")),
        archive(link("said", "/etc/passwd")),
        archive(link("said", "project/x", tarfile.LNKTYPE)),
        archive(member("said", b"")),
        archive(member("said", b"{}")),
        archive(member("said", b"\xff")),
        archive(member("said", b"[" * 100_000)),
        archive(head(places="/project")),
        archive(head(drawn=[])),
        archive(head(data="not base64!")),
        archive(head()),
        archive(head(), member("project/x", b"x")),
        whole[:100],
        whole[:512],
        whole[: len(whole) // 2],
    ):
        error = await _refused(victim, content)
        assert type(error) is Invalid
        assert "this is nothing that was saved" in error.message


async def test_an_archive_that_is_damaged_anywhere_gives_an_answer_in_words(
    victim: tuple[Environment, bytes], bench: Bench
) -> None:
    more = [member(f"project/{'long' * 40}/{number}", b"x" * 100, mtime=1.5) for number in range(3)]
    begun = victim[1].rstrip(b"\0")
    begun = begun[: len(begun) // 512 * 512]  # without the block that is the end
    whole = begun + archive(directory(f"project/{'long' * 40}"), *more, END)
    negative = bytearray(archive(member("project/x", b""), END))
    negative[124:136] = b"\xff" * 10 + b"\xfe\x00"
    async with bench.env("box") as env:
        for place in range(0, len(whole), 487):
            answer = await put(env, whole[:place] + b"\xff99" + whole[place + 3 :])
            if answer.status != 200:
                told(answer)
        for cut in (begun, whole[: len(begun) + 2048], begun + bytes(negative)):
            assert type(told(await put(env, cut))) is Invalid
        await load(env, whole)
        assert await env.call_reward() == 4.0


async def test_places_that_are_not_here_are_named(
    victim: tuple[Environment, bytes], head: Callable[..., tuple[tarfile.TarInfo, bytes]]
) -> None:
    for places in ([], ["/project"], ["/", "/project"]):
        error = await _refused(victim, archive(head(places=places)))
        assert type(error) is Unsupported
        assert "and has /dev/shm, /home/sandbox, /project, /tmp here" in error.message


async def test_generators_that_cannot_be_are_refused(
    bench: Bench, head: Callable[..., tuple[tarfile.TarInfo, bytes]]
) -> None:
    async with bench.env("box") as env:
        for drawn in (
            {"python": [3, [1, 2], None]},
            {"python": [9, [0] * 625, None]},
            {"python": [3, [-1] * 625, None]},
            {"python": [3, [0] * 625, None], "numpy": ["MT19937", [1], 0, 0, 0.0]},
            {"python": [3, [0] * 625, None], "torch": [1]},
        ):
            error = told(await put(env, archive(head(drawn=drawn), END)))
            assert type(error) is Invalid
            assert "generators" in error.message
