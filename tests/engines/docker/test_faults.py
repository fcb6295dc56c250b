"""What goes wrong with images, daemons, disks and names: each says why, in words for a person, and leaves nothing."""

from __future__ import annotations

import asyncio
import io
import secrets
import struct
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from aenv.engines.docker.daemon import Daemon, failure
from aenv.engines.docker.engine import DockerEngine
from aenv.errors import Conflict, Invalid, NetworkError, NotFound, StartFailed, StorageFull
from aenv.models import State
from tests import daemons
from tests.engines.docker.lab import Harbour, call, of_image, over, own_daemon, probe, python

ARM = 183
"""The number of 64-bit ARM in the head of a program."""
INTEL = 62
DISK = 900 * 1024**2


@pytest.fixture
async def harbour(daemon: str, base_image: str, home: Path) -> AsyncIterator[Harbour]:
    """A daemon on which nothing is left of the test, neither by label nor by name."""
    found = Harbour(daemon, base_image)
    yield found
    left = await found.left() if all(engine._host is None for engine in found.engines) else []
    await found.clear()
    assert left == []


@asynccontextmanager
async def image(daemon: Daemon, dockerfile: str, platform: str = "", **files: bytes) -> AsyncIterator[str]:
    """An image, for as long as the block runs."""
    name = f"localhost/aenv-fault-{secrets.token_hex(5)}:1"
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for file, content in {**files, "Dockerfile": dockerfile.encode()}.items():
            info = tarfile.TarInfo(file)
            info.size, info.mode = len(content), 0o755
            archive.addfile(info, io.BytesIO(content))
    query = {"t": name, "platform": platform or None, "forcerm": True}
    async for line in daemon.lines("POST", "/build", query=query, content=held.getvalue()):
        assert not failure(line), line
    try:
        yield name
    finally:
        with suppress(NotFound):
            await daemon.ask("DELETE", f"/images/{name}", query={"force": "1"})


async def everything(daemon: Daemon) -> dict[str, list[str]]:
    """All that a daemon has."""
    containers = await daemon.ask("GET", "/containers/json", query={"all": "1"})
    volumes = (await daemon.ask("GET", "/volumes"))["Volumes"] or ()
    return {
        "containers": sorted(row["Id"] for row in containers),
        "volumes": sorted(row["Name"] for row in volumes),
        "networks": sorted(row["Id"] for row in await daemon.ask("GET", "/networks")),
        "images": sorted(row["Id"] for row in await daemon.ask("GET", "/images/json", query={"all": "1"})),
    }


# Images


async def test_an_image_that_its_registry_has_not(harbour: Harbour, registry: str) -> None:
    async with harbour.engine() as engine:
        with pytest.raises(Invalid, match=f"{registry} has no {registry}/aenv-none:1") as caught:
            await engine.create("one", of_image(f"{registry}/aenv-none:1"))
        assert "name and tag" in str(caught.value.hint)
        found = await engine.get("one")
        assert (found.state, list(found.phases)) == (State.FAILED, ["image"])


async def test_an_image_for_another_processor(harbour: Harbour) -> None:
    other = "arm64" if (await harbour.daemon.about()).architecture == "amd64" else "amd64"
    dockerfile = 'FROM scratch\nCOPY run /bin/\nCMD ["/bin/run"]\n'
    async with image(harbour.daemon, dockerfile, f"linux/{other}", run=b"") as name, harbour.engine() as engine:
        with pytest.raises(Invalid, match=f"is for {other} processors") as caught:
            await engine.create("one", of_image(name))
        assert "--platform" in str(caught.value.hint)
        assert (await engine.get("one")).state is State.FAILED


async def test_an_image_that_hides_for_which_processor_it_is(harbour: Harbour) -> None:
    other = ARM if (await harbour.daemon.about()).architecture == "amd64" else INTEL
    head = struct.pack(
        "<4sBBB9xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 2, other, 1, 0x400000, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    body = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0x400000, 120, 120, 4096)
    dockerfile = 'FROM scratch\nCOPY run /bin/\nCMD ["/bin/run"]\n'
    async with image(harbour.daemon, dockerfile, run=head + body) as name, harbour.engine() as engine:
        with pytest.raises(StartFailed, match=r"(?i)exec format error") as caught:
            await engine.create("one", of_image(name))
        assert "another kind of processor" in str(caught.value.hint)
        assert "exec format error" in (await engine.get("one")).reason
        await engine.delete("one")


async def test_an_image_with_python_and_without_the_runtime(harbour: Harbour) -> None:
    base = await daemons.debian_on(harbour.daemon)
    dockerfile = f'FROM {base}\nCMD ["python3", "-m", "aenv.runtime", "/app"]\n'
    async with image(harbour.daemon, dockerfile) as name, harbour.engine() as engine:
        with pytest.raises(StartFailed, match=r"(?s)exit code 1.*No module named '?aenv") as caught:
            await engine.create("one", of_image(name))
        assert "install the runtime" in str(caught.value.hint)
        await engine.delete("one")


async def test_last_words_that_come_in_pieces(harbour: Harbour) -> None:
    lines = (
        "import os",
        "for piece in (b'first\\n', b'last ', b'words', b'\\n'):",
        "    os.write(2, piece)",
        "exit(7)",
    )
    async with harbour.image(*python(*lines)) as name, harbour.engine() as engine:
        with pytest.raises(StartFailed, match=r"exit code 7; it printed last:\nfirst\nlast words"):
            await engine.create("one", of_image(name))
        assert (await engine.output("one", 0)).data == b"first\nlast words\n"
        await engine.delete("one")


async def test_an_image_that_is_removed_while_it_runs(harbour: Harbour) -> None:
    tool = b"import aenv\n@aenv.register_tool\ndef hello() -> str:\n    return 'hello'\n"
    dockerfile = f"FROM {harbour.base_image}\nCOPY tools.py /app/\n"
    async with image(harbour.daemon, dockerfile, **{"tools.py": tool}) as name, harbour.engine() as engine:
        made = await engine.create("one", of_image(name))
        await harbour.daemon.ask("DELETE", f"/images/{name}", query={"force": "1"})
        if (await harbour.daemon.about()).name == "podman":  # which removes what runs of it, too
            assert (await over(engine, "one")).state is State.FAILED
        else:
            assert await call(made, "hello") == "hello"
        with pytest.raises((Invalid, StartFailed)) as caught:
            await engine.create("two", of_image(name))
        assert name.partition(":")[0] in str(caught.value)
        for id in ("one", "two"):
            await engine.delete(id)


# Names, labels and variables


async def test_a_volume_of_that_name_is_somebody_elses(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        await engine.find()
        assert engine._host is not None
        name = engine._host.door_volume("one")
        await harbour.daemon.ask("POST", "/volumes/create", body={"Name": name, "Labels": {"mine": "yes"}})
        try:
            with pytest.raises(Conflict, match=f"the name {name} is taken"):
                await engine.create("one", probe())
            found = await harbour.daemon.ask("GET", f"/volumes/{name}")
            assert found["Labels"] == {"mine": "yes"}
        finally:
            await harbour.daemon.ask("DELETE", f"/volumes/{name}")
        assert await call(await engine.create("one", probe()), "echo", text="x") == "x"
        await engine.delete("one")


async def test_labels_of_all_characters(harbour: Harbour) -> None:
    odd = {"": "", "a b=c": "x\n\0\t", 'quote"\\': "'$(id)`", "\U0001f600/../": "ü" * 10_000}
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(labels=odd, owner='ada "o"\n'))
        assert (made.labels, made.owner) == (odd, 'ada "o"\n')
    async with harbour.engine() as later:
        (found,) = await later.find(odd)
        assert (found.id, found.labels, found.owner) == ("one", odd, 'ada "o"\n')
        await later.delete("one")


async def test_more_variables_than_a_program_can_have(harbour: Harbour) -> None:
    for wanted, said in (
        ({"V": "x" * 200_000}, "the variable V has 200002 bytes"),
        ({f"V{number}": "x" * 100_000 for number in range(30)}, "the variables have 30"),
        ({"a=b": "x"}, "cannot be a variable"),
        ({"a": "\0"}, "cannot be a variable"),
    ):
        async with harbour.engine() as engine:
            with pytest.raises(Invalid, match=said) as caught:
                await engine.create("one", probe(environment_variables=wanted))
            assert caught.value.hint
            assert len(caught.value.message) < 1000
            assert await harbour.left() == []
            await engine.delete("one")


# Daemons


async def test_many_that_are_removed_at_once_behind_our_back(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        ids = [f"n{number}" for number in range(4)]
        await asyncio.gather(*(engine.create(id, probe()) for id in ids))
        names = [name for name in await harbour.left() if name.startswith("/")]
        assert len(names) == 4
        await asyncio.gather(
            *(harbour.daemon.ask("DELETE", f"/containers{name}", query={"force": "1"}) for name in names)
        )
        for id in ids:
            assert (await over(engine, id)).state is State.FAILED
            await engine.delete(id)
        assert await harbour.left() == []


async def test_a_daemon_that_is_not_there(home: Path) -> None:
    async with DockerEngine(address=f"unix://{home}/none.sock", state="none") as engine:
        for work in (engine.find(), engine.create("one", probe()), engine.get("one"), engine.delete("one")):
            with pytest.raises(NetworkError) as caught:
                await work
            assert "none.sock" in str(caught.value)
            assert caught.value.hint


async def test_a_disk_that_is_full(dockerd: str, home: Path, tmp_path: Path) -> None:
    """The daemon's, so that nothing can be made; until there is room again."""
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(disk)], check=True, capture_output=True)
    async with own_daemon(dockerd, disk=disk) as (ground, harbour), harbour.engine() as engine:
        await engine.create("one", probe())
        await engine.delete("one")
        before = await everything(harbour.daemon)
        filler = f"{ground.folder}/docker/data/filler"
        ground.run("sh", "-c", f"cat /dev/zero > {filler} 2>/dev/null; true")
        with pytest.raises(StorageFull, match="the disk of the daemon is full") as caught:
            await engine.create("two", probe())
        assert "docker system df" in str(caught.value.hint)
        assert (await engine.get("two")).state is State.FAILED
        await engine.delete("two")
        ground.run("rm", filler)
        assert await everything(harbour.daemon) == before
        assert await call(await engine.create("two", probe()), "echo", text="x") == "x"
        await engine.delete("two")
        assert await everything(harbour.daemon) == before
