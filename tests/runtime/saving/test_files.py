"""The files of a sandbox: of every kind, also while they change, and those that are no part of it."""

from __future__ import annotations

import io
import os
import re
import secrets
import socket
import tarfile
import tempfile
from pathlib import Path

import msgspec
import pytest

from aenv.engines.process import powers
from aenv.errors import StorageFull, TooLarge, Unsupported
from aenv.models import Volume
from aenv.runtime import seeds
from aenv.runtime.saving import Said, pack
from tests.rl.bench import Bench
from tests.runtime.saving.support import DESCRIBED, load, run, saved

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = r"""
import os, socket
os.chdir("/project")
os.makedirs("a/b/empty")
open("a/one", "w").write("1" * 1000)
for name in ("a/two", "a/b/three"):
    os.link("a/one", name)
os.symlink("one", "a/link")
os.symlink("/nowhere/at/all", "a/dangling")
os.symlink("b", "a/to-directory")
os.symlink("/etc", "a/out")
os.symlink("../../../../etc/passwd", "a/far-out")
os.symlink("itself", "a/itself")
os.mkdir("shut", 0o700)
open("shut/inside", "w").write("x")
open("closed", "w").write("secret")
os.chmod("closed", 0)
for name, mode in (("read-only", 0o555), ("private", 0o700), ("none", 0), ("sticky", 0o1777), ("group", 0o2755)):
    os.mkdir(name)
    open(name + "/inside", "w").write(name)
    os.mkdir(name + "/deeper")
    os.chmod(name + "/deeper", mode)
    os.chmod(name, mode)
odd = (b"new\nline", b"\xff\xfe", b"-rf", b" ", b"x" * 255, "\u00e9\u20ac".encode(), b"back\\slash", b"a\ttab", b"*")
for name in odd:
    open(name, "wb").write(name)
    os.mkdir(b"odd " + name[:200])
    os.symlink(name, b"odd " + name[:200] + b"/link")
os.mkfifo("pipe", 0o640)
open("runs", "w").write("#!/bin/sh\n")
os.chmod("runs", 0o6755)
open("old", "w").close()
os.utime("old", (1e9, 1e9))
os.utime("a/b", (1.1e9, 1.1e9))
open("before", "w").close()
os.utime("before", (-5, -5))
open("large", "wb").write(os.urandom(9 << 20))
with open("sparse", "wb") as file:
    file.write(b"begin")
    file.truncate(20 << 20)
os.remove("config.json")
open("/tmp/there", "w").write("tmp")
open("/home/sandbox/.there", "w").write("home")
open("/dev/shm/there", "w").write("shm")
socket.socket(socket.AF_UNIX).bind("/tmp/listens")
os.makedirs("long/" + ("x" * 250 + "/") * 15)
"""


async def test_every_kind_of_file_is_the_same_afterwards_and_nothing_else_is_there(bench: Bench) -> None:
    async with bench.env("box") as env, bench.env("box") as other:
        await run(env, FILES)
        before = await run(env, DESCRIBED)
        await run(other, FILES.replace("a/b/empty", "a/b/more").replace('"1" * 1000', '"other"'))
        content = await saved(env)
        await load(other, content)
        after = await run(other, DESCRIBED)
        assert {path: (before.get(path), after.get(path)) for path in before | after} == {
            path: (there, there) for path, there in before.items()
        }
        assert before[b"/project/a/two"] == before[b"/project/a/one"], "they are one file"
        assert b"/project/config.json" not in after
        assert await run(env, DESCRIBED) == before, "the one that was saved is as it was"
        await load(other, content)
        await load(other, await saved(other))
        assert await run(other, DESCRIBED) == before, "as often as one likes"


async def test_directories_within_each_other_may_be_as_deep_as_paths_are_long(bench: Bench) -> None:
    async with bench.env("box") as env, bench.env("box") as other:
        for one in (env, other):
            await run(
                one,
                """
                import os
                for depth in range(1, 2001):
                    os.mkdir("/tmp" + "/d" * depth)
                open("/tmp" + "/d" * 2000 + "/x", "w").close()
                """,
            )
        await load(other, await saved(env))
        assert await run(other, "import os; out = os.listdir('/tmp' + '/d' * 2000)") == ["x"]
        await run(
            env,
            """
            import os
            os.chdir("/tmp" + "/d" * 2000)
            os.makedirs("y" * 200)
            os.chdir("y" * 200)
            open("z" * 100, "w").close()
            os.chdir("/project")
            """,
        )
        with pytest.raises(Unsupported, match="cannot be saved: File name too long"):
            await saved(env)


async def test_sockets_are_not_saved_and_those_that_are_there_stay(bench: Bench) -> None:
    listens = """
        import os, socket, threading
        os.makedirs("/tmp/deep/{0}")
        server = socket.create_server("/tmp/deep/{0}/socket", family=socket.AF_UNIX)
        open("/tmp/deep/{0}/file", "w").close()
        threading.Thread(target=lambda: server.accept()[0].sendall(b"heard"), daemon=True).start()
    """
    async with bench.env("box") as env, bench.env("box") as other:
        await run(env, listens.format("own"))
        await run(other, listens.format("other"))
        await load(other, await saved(env))
        assert await run(
            other,
            """
            import os, socket
            client = socket.socket(socket.AF_UNIX)
            client.connect("/tmp/deep/other/socket")
            out = client.recv(10), sorted(os.listdir("/tmp/deep/other")), os.listdir("/tmp/deep/own")
            """,
        ) == (b"heard", ["socket"], ["file"])


async def test_files_that_change_and_go_meanwhile_take_no_others_with_them(bench: Bench) -> None:
    async with bench.env("box") as env, bench.env("box") as other:
        await run(
            env,
            """
            import os, subprocess
            os.makedirs("/project/busy/deep")
            for number in range(500):
                open(f"/project/busy/deep/{number:03}-stays", "w").write(str(number))
            script = 'while :; do echo line >> grows; : > 000-goes; rm 000-goes; mkdir d; : > d/x; rm -r d; done'
            out = subprocess.Popen(["sh", "-c", script], cwd="/project/busy/deep", start_new_session=True).pid
            """,
        )
        for _ in range(20):
            await load(other, await saved(env))
            names, grown = await run(
                other, "import os; here = '/project/busy/deep/'; out = os.listdir(here), open(here + 'grows').read()"
            )
            assert len([name for name in names if name.endswith("-stays")]) == 500
            assert re.fullmatch(r"(line\n)*(l|li|lin|line)?", grown)


async def test_a_volume_is_no_part_of_a_sandbox_and_is_left_as_it_is(bench: Bench) -> None:
    if why := powers.probe().no_volumes:
        pytest.skip(why)
    for mount in ("/project/a place/data", "/home/sandbox/data"):
        async with bench.env("box") as env:
            await run(env, "open('/project/note', 'w').write('new')")
            content = await saved(env)
        given = Volume(owner="ada", name=secrets.token_hex(4), mount=mount, size=2 << 20)
        env = bench.env("box")
        env.spec = msgspec.structs.replace(env.spec, volumes=[given])
        async with env:
            await run(env, f"open('{mount}/kept', 'w').write('of the volume')")
            assert b"of the volume" not in await saved(env)
            await load(env, content)
            assert await run(env, f"out = open('{mount}/kept').read(), open('/project/note').read()") == (
                "of the volume",
                "new",
            )
            await load(env, await saved(env))


async def test_a_disk_that_is_full_says_so(bench: Bench) -> None:
    small = {"ephemeralStorage": "2Mi"}
    async with bench.env("box") as env, bench.env("box", resources=small) as other:
        await run(env, "import os; open('/project/large', 'wb').write(os.urandom(4 << 20))")
        with pytest.raises(StorageFull, match="its files cannot be written: No space left") as caught:
            await load(other, await saved(env))
        assert caught.value.hint == "make another sandbox"


# What is packed, without a sandbox


def said(*places: Path) -> Said:
    return Said(places=[str(place) for place in places], seed=None, drawn=seeds.drawn())


def names(content: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return [f"/{name}" for name in archive.getnames()]


async def test_what_is_over_the_limit_is_refused_and_what_is_at_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    size = len(pack(said(tmp_path), 1 << 20))
    assert len(pack(said(tmp_path), size)) == size
    with pytest.raises(TooLarge, match=f"its files are over {size - 1} bytes") as caught:
        pack(said(tmp_path), size - 1)
    assert caught.value.hint == "AENV_MAX_BODY sets this limit"


async def test_sockets_are_left_out_and_pipes_are_not_waited_for(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{short}/socket")
        os.mkfifo(f"{short}/pipe")
        assert names(pack(said(Path(short)), 1 << 20)) == ["/said", f"{short}/pipe", "/end"]


async def test_a_device_is_refused_by_its_name(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "null", 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("needs root")
    with pytest.raises(Unsupported, match="/null cannot be saved: it is a device"):
        pack(said(tmp_path), 1 << 20)


async def test_an_archive_begins_with_what_is_said_has_the_places_in_order_and_an_end(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside").touch()
    found = names(pack(said(tmp_path / "b", tmp_path / "a"), 1 << 20))
    assert found == ["/said", f"{tmp_path}/b/inside", f"{tmp_path}/a/inside", "/end"]
