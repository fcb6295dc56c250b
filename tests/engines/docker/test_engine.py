"""The engine on containers: what is in one, who gets in, how starts fail, what is found again, and what is left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from aenv.engines.conformance import projects as probes
from aenv.engines.docker import doors, host, projects, sweeping
from aenv.engines.docker.doors import seal
from aenv.engines.docker.engine import DockerEngine
from aenv.errors import Conflict, Invalid, NetworkError, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import State
from tests.engines.docker.lab import call, eventually, killed, of_image, over, probe, python

NAP = "import time\ntime.sleep(3600)"


# What is in one


async def test_a_sandbox_starts_and_its_phases_are_told(harbour):
    async with harbour.engine() as engine:
        odd = {"a=b": 'c,"d"', "ключ": "\U0001f600"}
        many = {f"V{number}": "x" * 20_000 for number in range(10)}
        made = await engine.create("one", probe(labels=odd, environment_variables=many))
        assert made.state is State.RUNNING
        assert list(made.phases) == ["image", "project", "create", "start", "import", "health"]
        assert made.boot
        assert await call(made, "echo", text="hello") == "hello"
        assert await call(made, "environ", name="V9") == "x" * 20_000
        assert [found.id for found in await engine.find(odd)] == ["one"]
        await engine.delete("one")
        assert await harbour.left() == []


async def test_a_container_has_no_powers(harbour):
    async with harbour.engine() as engine:
        await engine.create("one", probe())
        look = "import os; print(os.getuid(), os.getgid(), os.getcwd(), open('/proc/self/status').read())"
        code, text = await harbour.run(engine, "one", *python(look))
        assert (code, text.split()[:3]) == (0, ["1000", "1000", "/work"])
        status = dict(line.split(":\t", 1) for line in text.splitlines()[1:] if ":\t" in line)
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for place in ("/etc/passwd", "/aenv/project/config.json", "/usr/bin/new", "/run/aenv/new"):
            code, text = await harbour.run(engine, "one", *python(f"open({place!r}, 'a')"))
            assert code == 1, place
            assert re.search("Read-only|Permission", text), place
        code, text = await harbour.run(engine, "one", *python("print(open('/proc/net/dev').read())"))
        assert [line.split(":")[0].strip() for line in text.splitlines() if ":" in line] == ["lo"]


async def test_networks(harbour):
    async with harbour.engine() as engine:
        await engine.create("one", probe(network="full"))
        _, text = await harbour.run(engine, "one", *python("print(open('/proc/net/dev').read())"))
        assert "eth0" in text


async def test_a_disk_that_is_full_is_its_own(harbour):
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(resources={"memory": "256Mi", "ephemeralStorage": "8Mi"}))
        code, text = await harbour.run(engine, "one", *python("open('big', 'wb').write(bytes(2**24))"))
        assert code == 1
        assert "No space left" in text
        assert await call(made, "echo", text="still here") == "still here"


async def test_arguments_reach_an_image_of_its_own(harbour):
    tools = "import sys, aenv\n@aenv.register_tool\ndef argv() -> list[str]:\n    return sys.argv[1:]\n"
    lines = (
        "import os, sys",
        "os.mkdir('/tmp/app')",
        f"open('/tmp/app/tools.py', 'w').write({tools!r})",
        "os.execvp('python3', ['python3', '-m', 'aenv.runtime', '/tmp/app', *sys.argv[1:]])",
    )
    async with harbour.image(*python(*lines)) as image, harbour.engine() as engine:
        made = await engine.create("one", of_image(image, arguments=["--x", "a b"]))
        assert await call(made, "argv") == ["--x", "a b"]
        assert await call(await engine.create("two", of_image(image)), "argv") == []
        await engine.delete("one")
        await engine.delete("two")
    async with harbour.image("/bin/sh", "-ec", "exec python3 -m aenv.main /tmp") as image, harbour.engine() as engine:
        with pytest.raises(Invalid, match="starts with a shell"):
            await engine.create("one", of_image(image, arguments=["x"]))


# Who gets in: the door


def test_a_directory_without_a_socket_is_not_sealed(tmp_path):
    assert seal(str(tmp_path / "none")) is None
    assert seal(str(tmp_path)) is None
    assert tmp_path.stat().st_mode & 0o222


@pytest.fixture
def volume(tmp_path):
    """A directory that may be sealed, and is an ordinary one again afterwards."""
    folder = tmp_path / "volume"
    folder.mkdir()
    os.chown(folder, 1000, 1000)
    yield folder
    unseal(folder)


def unseal(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.ioctl(descriptor, doors.SET_FLAGS, bytes(8))
    os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to take a directory away from its owner")
def test_only_one_socket_is_let_through(volume):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{_descriptor(volume)}/runtime.sock")
        assert seal(str(volume)) == f"{volume}/runtime.sock"
        assert (volume.stat().st_uid, volume.stat().st_mode & 0o777) == (0, 0o555)
        assert seal(str(volume)) == f"{volume}/runtime.sock"
        unseal(volume)
        (volume / "more").touch()
        with pytest.raises(SandboxLost, match="hostile"):
            seal(str(volume))


def _descriptor(path: Path) -> int:
    """Of a directory, for sockets whose path would be too long. It ends with the test process."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to take a directory away from its owner")
@pytest.mark.parametrize("kind", ["link", "file", "directory", "fifo", "other name"])
def test_what_is_no_socket_is_not_let_through(volume, kind):
    place = volume / "runtime.sock"
    makers = {
        "link": lambda: place.symlink_to("/var/run/docker.sock"),
        "file": place.touch,
        "directory": place.mkdir,
        "fifo": lambda: os.mkfifo(place),
        "other name": (volume / "else.sock").touch,
    }
    makers[kind]()
    with pytest.raises(SandboxLost, match="hostile"):
        seal(str(volume))


def test_a_volume_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SandboxLost, match="cannot be opened"):
        seal(str(tmp_path / "link"))


@pytest.mark.parametrize(
    "lines",
    [
        ("import os", "os.symlink('/var/run/docker.sock', '/run/aenv/runtime.sock')"),
        ("open('/run/aenv/runtime.sock', 'w')",),
        (
            "import os, socket",
            "sock = socket.socket(socket.AF_UNIX)",
            "sock.bind('/run/aenv/runtime.sock')",
            "os.symlink('/', '/run/aenv/more')",
            "sock.listen()",
        ),
    ],
    ids=["a link", "a file", "a socket and a link"],
)
async def test_a_hostile_image_leads_nobody_astray(harbour, lines):
    async with harbour.image(*python(*lines, NAP)) as image, harbour.engine() as engine:
        await engine.find()
        if engine._host is None or not engine._host.seen("/"):
            pytest.skip("this process does not see the daemon's volumes")
        with pytest.raises(StartFailed, match="hostile"):
            await engine.create("one", of_image(image))
        found = await engine.get("one")
        assert (found.state, found.url) == (State.FAILED, "")
        await engine.delete("one")
        assert await harbour.left() == []


async def test_nobody_inside_can_move_the_socket(harbour):
    async with harbour.engine() as engine:
        made = await engine.create("one", probe())
        for line in (
            "os.rename('/run/aenv/runtime.sock', '/run/aenv/x')",
            "os.unlink('/run/aenv/runtime.sock')",
            "os.chmod('/run/aenv', 0o777)",
            "os.symlink('/', '/run/aenv/x')",
        ):
            code, text = await harbour.run(engine, "one", *python("import os", line))
            if engine._host.seen("/"):
                assert code == 1, line
                assert re.search("Permission|not permitted", text), line
        assert await call(made, "echo", text="x") == "x"


async def test_a_tunnel_where_volumes_are_not_seen(harbour, monkeypatch):
    monkeypatch.setattr(doors, "outlook", lambda daemon, about: None)
    async with harbour.engine() as engine:
        made = await engine.create("one", probe())
        assert await call(made, "echo", text="hello") == "hello"
        assert await call(made, "echo", text="x" * 2**20) == "x" * 2**20
        await engine.upload("one", "a.txt", b"content")
        assert await engine.download("one", "a.txt") == b"content"
        with pytest.raises(Unsupported, match="does not see"):
            await engine.volumes("ada")
    async with harbour.engine() as later:
        again = await later.get("one")
        assert again.url == made.url
        assert await call(again, "echo", text="again") == "again"
        await later.delete("one")
        with pytest.raises(NetworkError):
            await call(again, "echo", text="x")
        assert await harbour.left() == []


# Starts that fail


async def test_without_the_base_image_it_is_said_how_to_make_it(harbour):
    async with DockerEngine(address=harbour.address, base_image="127.0.0.1:9/aenv-no-such-base:1") as engine:
        with pytest.raises((Invalid, StartFailed), match="the base image is not to be had") as caught:
            await engine.create("one", probe())
        assert "make base-image" in caught.value.hint


async def test_an_image_that_is_nowhere(harbour):
    async with harbour.engine() as engine:
        with pytest.raises((Invalid, StartFailed), match="aenv-no-such-image|cannot be reached"):
            await engine.create("one", of_image("127.0.0.1:9/aenv-no-such-image:1"))
        found = await engine.get("one")
        assert found.state is State.FAILED
        assert found.reason
        with pytest.raises(Conflict, match="has ended"):
            await engine.create("one", of_image("x"))
        assert await harbour.left() == []
        await engine.delete("one")
        with pytest.raises(NotFound):
            await engine.get("one")


async def test_an_image_that_exits(harbour):
    command = python("import sys", "print('last words')", "sys.exit(7)")
    async with harbour.image(*command) as image, harbour.engine() as engine:
        with pytest.raises(StartFailed, match=r"(?s)exit code 7.*last words"):
            await engine.create("one", of_image(image))
        assert "last words" in (await engine.get("one")).reason
        assert b"last words" in (await engine.output("one", 0)).data
        await engine.delete("one")
        assert await harbour.left() == []


async def test_an_image_without_the_runtime(harbour):
    async with harbour.image("aenv-no-such-program") as image, harbour.engine() as engine:
        with pytest.raises(StartFailed, match="cannot run its command") as caught:
            await engine.create("one", of_image(image))
        assert "install the runtime" in str(caught.value.hint)
        assert await harbour.left() == []


async def test_an_image_that_never_listens(harbour):
    async with harbour.image(*python("print('busy', flush=True)", NAP)) as image, harbour.engine() as engine:
        with pytest.raises(StartFailed, match=r"not ready within 20 s; it printed last:\nbusy"):
            await engine.create("one", of_image(image, startup_timeout=20.0))
        found = await engine.get("one")
        assert found.state is State.FAILED
        await engine.delete("one")
        assert await harbour.left() == []


async def test_requirements_beyond_the_base_image(harbour, tmp_path):
    place = tmp_path / "needy"
    probes.write(tmp_path)
    (tmp_path / "at-import").rename(place)
    (place / "requirements.txt").write_text("aenv>=0.1\n# a word\nnumpy==2.0\n", encoding="utf-8")
    async with harbour.engine() as engine:
        with pytest.raises(Invalid, match=r"numpy==2\.0") as caught:
            await engine.create("one", probe(place))
        assert "aenv build" in str(caught.value.hint)


async def test_a_name_that_is_taken(harbour):
    name = f"aenv-{harbour.state}-one"
    made = await harbour.daemon.ask(
        "POST", "/containers/create", query={"name": name}, body={"Image": harbour.base_image}
    )
    try:
        async with harbour.engine() as engine:
            with pytest.raises(Conflict, match="none of this engine's"):
                await engine.create("one", probe())
            await harbour.daemon.ask("GET", f"/containers/{made['Id']}/json")
            with pytest.raises(NotFound):
                await engine.get("one")
            assert await harbour.left() == []
    finally:
        await harbour.daemon.ask("DELETE", f"/containers/{made['Id']}", query={"force": "1"})


async def test_a_runtime_that_the_daemon_has_not(harbour):
    engine = harbour.engine(runtime="aenv-no-such-runtime")
    with pytest.raises(Invalid, match="no runtime 'aenv-no-such-runtime'"):
        await engine.create("one", probe())


# Ends


async def test_removed_behind_our_back(harbour):
    async with harbour.engine() as engine:
        await engine.create("one", probe())
        await harbour.daemon.ask("DELETE", f"/containers/aenv-{harbour.state}-one", query={"force": "1", "v": "1"})
        ended = await over(engine, "one")
        assert ended.state is State.FAILED
        assert re.search("was removed|signal 9", ended.reason)
        with pytest.raises(SandboxLost):
            await engine.exec("one", ["true"])
        await engine.delete("one")
        assert await harbour.left() == []


async def test_it_ends_when_nobody_calls(harbour):
    async with harbour.engine() as engine:
        await engine.create("one", probe(idle=0.5))
        ended = await over(engine, "one")
        assert ended.state is State.TERMINATED
        assert "no call for 0.5 s" in ended.reason


# Found again


async def test_what_was_told_is_known_again(harbour):
    async with harbour.engine() as engine:
        await engine.create("one", probe(labels={"a": "b"}, owner="ada"))
        told = await engine.update("one", ttl=3600.0)
    async with harbour.engine() as later:
        found = await later.get("one")
        assert (found.state, found.owner, found.labels) == (State.RUNNING, "ada", {"a": "b"})
        assert found.expires_at == told.expires_at
        assert (await later.create("one", probe(owner="bob"))).owner == "ada"
        assert (await harbour.run(later, "one", "true"))[0] == 0


async def test_a_create_that_finds_it_made(harbour):
    async with harbour.engine() as engine, harbour.engine() as other:
        made = await engine.create("one", probe(owner="ada"))
        again = await other.create("one", probe(owner="bob"))
        assert (again.owner, again.url, again.created_at) == ("ada", made.url, made.created_at)
        await other.delete("one")
        await over(engine, "one")


async def test_its_time_was_over_while_no_engine_ran(harbour):
    async with harbour.engine() as engine:
        await engine.create("one", probe())
        told = await engine.update("one", ttl=0.5)
        engine._live["one"].timer.cancel()
    await eventually("its time to be over", lambda: time.time() > told.expires_at)
    async with harbour.engine() as later:
        assert [found for found in await later.find() if not found.state.over] == []
        await harbour.gone()


async def test_what_a_killed_process_left_is_removed(harbour, home):
    name = await killed(harbour, home, "probe()")
    await harbour.stopped(f"aenv-{name}-one")
    async with harbour.engine() as engine:
        await engine.find()
        await harbour.gone(label=f"aenv.engine={name}")
        await eventually("its directory to be gone", lambda: not (home / "docker" / name).exists())


async def test_without_a_state_nothing_outlives_the_engine(harbour):
    engine = harbour.engine(state="")
    async with engine:
        await engine.create("one", probe())
        label = f"aenv.engine={engine._engine}"
        assert len(await harbour.left(label)) >= 1
    assert await harbour.left(label) == []


# Projects


async def test_a_project_is_brought_once(harbour, tmp_path, monkeypatch):
    for module in (projects, sweeping):
        monkeypatch.setattr(module, "PROJECT", f"project-{harbour.state}")
    monkeypatch.setattr(host, "UNUSED", 1)
    label = f"aenv.kind=project-{harbour.state}"
    probes.write(tmp_path)
    place = tmp_path / "at-import"
    source = place / "src" / "custom_env.py"
    source.write_text(f"{source.read_text(encoding='utf-8')}\n# {harbour.state}\n", encoding="utf-8")
    async with harbour.engine() as engine:
        await asyncio.gather(*(engine.create(f"n{number}", probe(place)) for number in range(3)))
        (first,) = await harbour.left(label)
        source.write_text(source.read_text(encoding="utf-8").replace("SEEN", "SAW"), encoding="utf-8")
        await engine.create("edited", probe(place))
        assert len(await harbour.left(label)) == 2
        (place / "more.txt").write_text("more", encoding="utf-8")
        await engine.create("again", probe(place))
        await engine.delete("edited")
        await engine.delete("again")
        await engine._host.sweep()
        kept = await harbour.left(label)
        assert len(kept) == 2  # the one that is used, and the newest of the others
        assert first in kept
        for name in kept:
            await harbour.daemon.ask("DELETE", f"/containers{name}", query={"force": "1", "v": "1"})
        engine._host.projects.keepers._filled.add(first.strip("/"))
        made = await engine.create("later", probe(place))  # what it took to be there is brought anew
        assert made.state is State.RUNNING
        for name in await harbour.left(label):
            await harbour.daemon.ask("DELETE", f"/containers{name}", query={"force": "1"})


async def test_data_that_is_not_there(harbour, tmp_path):
    async with harbour.engine() as engine:
        with pytest.raises(Invalid, match="there is no datasource"):
            await engine.create("one", probe(datasource=str(tmp_path / "none")))
        assert not (tmp_path / "none").exists()
        await engine.delete("one")
        assert await harbour.left() == []


@pytest.mark.parametrize("id", ["", "a b", "../x", "x" * 200])
async def test_what_is_no_id(harbour, id):
    async with harbour.engine() as engine:
        with pytest.raises(Invalid, match="is not an id"):
            await engine.create(id, probe())
        with pytest.raises(NotFound):
            await engine.get(id)
        await engine.delete(id)
