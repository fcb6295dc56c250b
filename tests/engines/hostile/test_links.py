"""Links lead nowhere outside: not by an upload or a download, not in a project, not in a datasource."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from aenv.errors import AEnvError, NotFound
from tests.engines.hostile.ground import attacks, project, soon, start

pytestmark = pytest.mark.asyncio(loop_scope="module")
LINKER = """
import os
from pathlib import Path

from aenv import register_tool

@register_tool
def link(target: str, path: str) -> None:
    os.symlink(target, path)

@register_tool
def show(path: str) -> list[str]:
    link = os.readlink(path) if os.path.islink(path) else ""
    try:
        return [link, Path(path).read_text()]
    except OSError as exc:
        return [link, type(exc).__name__]

@register_tool
def listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as exc:
        return [type(exc).__name__]
"""


@pytest.fixture
def canary() -> Iterator[Path]:
    """A secret of the owner's, in a folder that everybody may write to."""
    folder = Path("/var/tmp", f"aenv-canary-{secrets.token_hex(8)}")
    folder.mkdir()
    folder.chmod(0o777)
    file = folder / "secret.txt"
    file.write_text("the owner's secret")
    file.chmod(0o666)
    yield file
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(engine, tmp_path_factory):
    return await start(engine, project(tmp_path_factory.mktemp("linker") / "project", LINKER))


async def downloaded(engine, box, path: str) -> bytes:
    try:
        return await soon(engine.download(box.id, path), "the download")
    except AEnvError as exc:
        return exc.message.encode()


async def words_of(engine, path: Path) -> str:
    """What is said about a project that does not start; nothing when it does."""
    try:
        box = await soon(start(engine, path), "the start")
    except AEnvError as exc:
        return f"{exc.message} {exc.hint}"
    await engine.delete(box.id)
    return ""


@pytest.mark.parametrize("prefix", ["", "../../../../..", "/proc/self/root", "/proc/1/root", "/proc/self/cwd/../.."])
async def test_a_download_through_a_link_gets_nothing_from_outside(engine, box, canary, prefix):
    path = f"/project/link-{secrets.token_hex(4)}"
    await box.tool("link", target=f"{prefix}{canary}", path=path)
    assert b"secret" not in (await downloaded(engine, box, path)).replace(canary.name.encode(), b"")
    assert b"secret" not in (await downloaded(engine, box, f"{prefix}{canary}")).replace(canary.name.encode(), b"")


async def test_a_download_of_an_account_file_gets_the_sandboxs(engine, box):
    await box.tool("link", target="/etc/passwd", path="/project/accounts")
    found = await engine.download(box.id, "/project/accounts")
    assert found.startswith(b"root:x:0:0:root:/home/sandbox")
    assert found != Path("/etc/passwd").read_bytes()
    await box.tool("link", target="/etc/shadow", path="/project/shadow")
    with pytest.raises(NotFound):
        await engine.download(box.id, "/project/shadow")


async def test_an_upload_through_a_link_writes_nothing_outside(engine, box, canary):
    await box.tool("link", target=str(canary), path="/project/file")
    await box.tool("link", target=str(canary.parent), path="/project/folder")
    for path in ("/project/file", "/project/folder/secret.txt", "/project/folder/new.txt", str(canary)):
        try:
            await soon(engine.upload(box.id, path, b"overwritten"), "the upload")
        except AEnvError:
            continue
    assert canary.read_text() == "the owner's secret"
    assert os.listdir(canary.parent) == ["secret.txt"]


@pytest.mark.parametrize("path", ["..", "../..", "/", "/proc/1/root/", "/home", "/root"])
async def test_a_listing_shows_the_sandbox_alone(engine, box, canary, path):
    shown = await box.tool("listed", path=path)
    assert canary.parent.name not in shown
    assert not {"boot", "srv", "lost+found"} & set(shown)


@pytest.mark.parametrize("preload", [False, True])
async def test_links_of_a_project_are_followed_only_inside(engine, canary, tmp_path, preload):
    path = project(tmp_path / "project", LINKER)
    (path / "file").symlink_to(canary)
    (path / "folder").symlink_to(canary.parent)
    (path / "up").symlink_to("../" * 20 + str(canary).lstrip("/"))
    (path / "accounts").symlink_to("/etc/passwd")
    (path / "src" / "data").symlink_to(canary.parent)
    os.mkfifo(path / "pipe")
    box = await soon(start(engine, path, preload=preload), "the start")
    assert await box.tool("show", path="/project/file") == [str(canary), "FileNotFoundError"]
    assert await box.tool("show", path="/project/folder/secret.txt") == ["", "FileNotFoundError"]
    assert (await box.tool("show", path="/project/up"))[1] == "FileNotFoundError"
    assert (await box.tool("show", path="/project/src/data/secret.txt"))[1] == "FileNotFoundError"
    assert "sandbox" in (await box.tool("show", path="/project/accounts"))[1]
    assert "pipe" not in await box.tool("listed", path="/project")
    await engine.delete(box.id)
    assert canary.read_text() == "the owner's secret"


async def test_a_module_that_is_a_link_is_not_read_outside(engine, canary, tmp_path):
    path = project(tmp_path / "project", LINKER)
    canary.write_text("raise RuntimeError('read outside')")
    (path / "src" / "other.py").symlink_to(canary)
    assert "read outside" not in await words_of(engine, path)


@pytest.mark.parametrize("name", ["requirements.txt", "config.json"])
async def test_a_file_of_a_project_that_is_a_link_tells_nothing_of_its_target(engine, canary, tmp_path, name):
    path = project(tmp_path / "project", LINKER)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(canary)
    canary.write_text("hunter2 is {the} password")
    assert "hunter2" not in await words_of(engine, path)


async def test_a_requirement_cannot_name_a_file_outside(engine, canary, tmp_path):
    path = project(tmp_path / "project", LINKER)
    canary.write_text("hunter2 is {the} password")
    (path / "requirements.txt").write_text(f"-r {canary}\n-c {canary}\n")
    with pytest.raises(AEnvError) as caught:
        await soon(start(engine, path), "the refusal")
    assert "hunter2" not in f"{caught.value.message} {caught.value.hint}"


async def test_links_of_a_datasource_are_followed_only_inside(engine, canary, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "link").symlink_to(canary)
    (data / "kept").write_text("as it is")
    box = await soon(start(engine, project(tmp_path / "project", LINKER), datasource=str(data)), "the start")
    assert await box.tool("show", path="/datasource/link") == [str(canary), "FileNotFoundError"]
    assert await box.tool("show", path="/datasource/kept") == ["", "as it is"]
    with pytest.raises(AEnvError):
        await engine.upload(box.id, "/datasource/kept", b"changed")
    assert (data / "kept").read_text() == "as it is"
    await engine.delete(box.id)


async def test_a_command_of_the_owners_runs_inside(engine, canary, tmp_path):
    box = await soon(start(engine, attacks(tmp_path / "project")), "the start")
    done = await engine.exec(box.id, ["/bin/cat", str(canary), "/etc/shadow"])
    assert done.returncode != 0
    assert done.stdout == ""
    assert (await engine.exec(box.id, ["/bin/sh", "-c", "id -u"])).stdout.strip() != "0"
    await engine.delete(box.id)
