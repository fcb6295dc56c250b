"""Virtual environments for requirements beyond this interpreter: made once, whole or not at all, and shared."""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

import aenv
from aenv import Environment, attach
from aenv.engines.process import engine, jail, requirements, venvs
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.process.venvs import interpreter_for
from aenv.errors import Conflict, Invalid, StartFailed
from aenv.models import EnvRef, SandboxSpec
from tests.engines import packages
from tests.support import sandbox

PATIENCE = 60
UV = shutil.which("uv")
needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="this interpreter has no pip to fall back to")
ASK = """
import asyncio, json, sys
from pathlib import Path
from aenv.engines.process.venvs import interpreter_for
told = []
found = asyncio.run(interpreter_for(Path(sys.argv[1]), lambda line: (told.append(line), print(line, file=sys.stderr))))
print(json.dumps([found.executable, told]))
"""


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """A user who keeps nothing yet, and has no uv."""
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    found = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(folder for folder in found if not shutil.which("uv", path=folder)))
    return tmp_path / "home" / "venvs"


@pytest.fixture(scope="session")
def uv_folder(tmp_path_factory):
    if UV:
        return Path(UV).parent
    folder = tmp_path_factory.mktemp("uv")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "uv"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("uv is not on PATH, and cannot be installed from the index")
    return folder / "bin"


@pytest.fixture(params=["pip", "uv"])
def installer(request, monkeypatch, tmp_path):
    if request.param == "uv":
        folder = request.getfixturevalue("uv_folder")
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return request.param


@pytest.fixture
def stubborn_uv(tmp_path, monkeypatch):
    """A uv that says one thing and goes on until it is told to fail; its folder."""
    folder = tmp_path / "stubborn"
    folder.mkdir()
    script = folder / "uv"
    script.write_text(
        f"#!/bin/sh\necho downloading thing\ntouch {folder}/runs\n"
        f"while [ ! -e {folder}/fail ]; do sleep 0.05; done\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


def running(text):
    """Processes with this text in their command."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(text in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_in(found, code):
    """What ``code`` prints in that interpreter, started as the engine does."""
    command = jail.python(found.executable, code, site=True)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def folder_of(found):
    return Path(found.executable).parent.parent


async def test_a_project_without_requirements_has_this_interpreter(tmp_path, kept):
    found = await interpreter_for(tmp_path)
    assert found.executable == sys.executable
    assert run_in(found, "import aenv, msgspec; print(aenv.__file__)").endswith("aenv/__init__.py")
    (tmp_path / "requirements.txt").write_text("packaging\naenvironment\n")
    assert await interpreter_for(tmp_path) == found
    assert not kept.exists()


async def test_requirements_are_installed_once_and_kept_read_only(tmp_path, kept, installer):
    root = packages.project(tmp_path / "project", "thing", "aenvironment", "-c bounds.txt")
    (root / "bounds.txt").write_text("thing<2\n")
    for version in ("1.0", "2.0"):
        packages.wheel(root / "vendor", "thing", version)
    (root / "config.json").write_text('{"name": "shop", "version": "1.0.0"}')
    told = []
    found = await interpreter_for(root, told.append)
    assert told[0] == f"installing 1 requirement of shop (first use; kept in {folder_of(found)})"
    assert told[-1].startswith("installed 1 requirement of shop in ")
    assert folder_of(found).parent == kept

    code = (
        "import json, sys, thing, aenv; print(json.dumps([thing.version, thing.__cached__, aenv.__file__, sys.prefix]))"
    )
    version, cached, package, prefix = json.loads(run_in(found, code))
    assert (version, prefix) == ("1.0", str(folder_of(found)))
    assert os.path.samefile(package, sys.modules["aenv"].__file__)
    assert Path(cached).exists(), "an instance would compile it each time"
    hidden = ["pytest", *(["pip"] if installer == "uv" or find_spec("pip") else [])]
    code = f"from importlib.util import find_spec; print([name for name in {hidden} if find_spec(name)])"
    assert run_in(found, code) == "[]"
    for folder, _, files in os.walk(folder_of(found)):
        for name in files:
            file = Path(folder, name)
            assert file.is_symlink() or file == folder_of(found) / "complete" or not file.stat().st_mode & 0o222, file
            assert file.stat().st_nlink == 1, f"{file} is shared with a cache"
    assert not list(kept.glob("*.lock"))

    assert await interpreter_for(root, told.append) == found
    assert len([line for line in told if line.startswith("install")]) == 2


async def test_what_is_to_come_alone_brings_nothing_along(tmp_path, installer):
    root = packages.project(tmp_path / "project", "small")
    packages.wheel(root / "vendor", "small", "1.0")
    packages.wheel(root / "vendor", "large", "1.0", needs="no-such-package")
    plain = await interpreter_for(root)
    (root / "requirements-no-deps.txt").write_text("# without the rest\nlarge==1.0\n")
    found = await interpreter_for(root)
    assert found != plain
    code = "import large, small; print(large.version, small.version)"
    assert run_in(found, code) == "1.0 1.0"
    (root / "requirements-no-deps.txt").unlink()
    assert await interpreter_for(root) == plain
    (root / "requirements.txt").write_text((root / "requirements.txt").read_text() + "large==1.0\n")
    with pytest.raises(StartFailed, match="no-such-package"):
        await interpreter_for(root)


async def test_hashes_are_kept_to_for_what_comes_alone(tmp_path, installer):
    root = packages.project(tmp_path / "project", "small")
    packages.wheel(root / "vendor", "small", "1.0")
    path = packages.wheel(root / "vendor", "large", "1.0", needs="no-such-package")
    alone = root / "requirements-no-deps.txt"
    alone.write_text(f"large==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    assert run_in(await interpreter_for(root), "import large; print(large.version)") == "1.0"
    alone.write_text(f"large==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(StartFailed, match="(?i)hash"):
        await interpreter_for(root)


async def test_equal_requirements_share_one_and_others_have_their_own(tmp_path, kept):
    root = packages.project(tmp_path / "a", "thing")
    packages.wheel(root / "vendor", "thing", "1.0")
    same, other = (Path(shutil.copytree(root, tmp_path / name)) for name in "bc")
    packages.wheel(other / "vendor", "thing", "2.0")
    first, second, third = [await interpreter_for(each) for each in (root, same, other)]
    assert first == second != third
    assert [run_in(found, "import thing; print(thing.version)") for found in (first, third)] == ["1.0", "2.0"]


async def test_installing_runs_nothing_of_a_package_on_this_machine(tmp_path, installer):
    witness = tmp_path / "witness"
    root = packages.project(tmp_path / "project", "thing")
    hook = f"import pathlib; pathlib.Path({str(witness)!r}).touch()\n"
    packages.wheel(root / "vendor", "thing", "1.0", {"hook.pth": hook})
    found = await interpreter_for(root)
    assert not witness.exists()
    run_in(found, "")
    assert witness.exists(), "the hook is not one that runs at each start"


async def test_packages_are_built_for_the_trusted_only(tmp_path, kept, installer):
    witness = tmp_path / "witness"
    root = packages.project(tmp_path / "project", "thing")
    packages.source_archive(root / "vendor", "thing", witness)
    with pytest.raises(StartFailed) as caught:
        await interpreter_for(root)
    assert "only wheels are installed" in caught.value.hint
    assert not witness.exists()
    found = await interpreter_for(root, trusted=True)
    assert witness.exists()
    assert run_in(found, "import thing; print(thing.version)") == "1.0"


@pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux")
@pytest.mark.parametrize(("isolation", "built"), [("auto", True), ("strict", False)])
async def test_packages_are_built_for_what_comes_with_us_unless_isolation_is_strict(
    tmp_path, kept, monkeypatch, isolation, built
):
    witness = tmp_path / "witness"
    root = packages.project(tmp_path / "envs" / "project", "thing")
    packages.source_archive(root / "vendor", "thing", witness)
    spec = SandboxSpec(env=EnvRef("project"), project=str(root))
    async with ProcessEngine(isolation=isolation) as making:
        with pytest.raises(StartFailed, match="could not be installed"):
            await making.prepare(spec)
        monkeypatch.setattr(engine, "builtin_root", lambda: tmp_path / "envs")
        if built:
            assert await making.prepare(spec)
        else:
            with pytest.raises(StartFailed, match="could not be installed"):
                await making.prepare(spec)
    assert witness.exists() == built


async def test_a_source_tree_is_installed_as_it_is_now(tmp_path):
    root = packages.project(tmp_path / "project", "-e ./thing")
    packages.source(root / "thing", "thing", tmp_path / "witness")
    with pytest.raises(Invalid, match="would be built"):
        await interpreter_for(root)
    first = await interpreter_for(root, trusted=True)
    shutil.move(root / "thing", tmp_path / "away")
    assert run_in(first, "import thing; print(thing.version)") == "1.0"


async def test_hashes_are_kept_to(tmp_path, installer):
    root = packages.project(tmp_path / "project")
    path = packages.wheel(root / "vendor", "thing", "1.0")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = root / "requirements.txt"
    lines = file.read_text()
    file.write_text(f"{lines}--require-hashes\nthing==1.0 \\\n  --hash=sha256:{digest}\n")
    found = await interpreter_for(root)
    assert run_in(found, "import thing, msgspec; print(thing.version)") == "1.0"
    file.write_text(f"{lines}thing==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(StartFailed, match="(?i)hash"):
        await interpreter_for(root)


async def test_a_failure_tells_what_the_installer_said_and_leaves_nothing(tmp_path, kept, installer):
    root = packages.project(tmp_path / "project", "no-such-package==1.5")
    with pytest.raises(StartFailed) as caught:
        await interpreter_for(root)
    assert "project did not start: its requirements could not be installed" in str(caught.value)
    assert "no-such-package" in str(caught.value)
    assert f"install --dry-run --only-binary :all: -r {root}/requirements.txt" in caught.value.hint
    assert list(kept.iterdir()) == []


async def test_bounds_of_the_runtime_are_part_of_the_resolution(tmp_path, installer):
    root = packages.project(tmp_path / "project", "msgspec<0.19")
    packages.wheel(root / "vendor", "msgspec", "0.18.5")
    with pytest.raises(StartFailed) as caught:
        await interpreter_for(root)
    assert "msgspec>=" in str(caught.value) + caught.value.hint
    packages.wheel(root / "vendor", "msgspec", "0.18.99")
    assert run_in(await interpreter_for(root), "import msgspec; print(msgspec.version)") == "0.18.99"


@needs_pip
async def test_progress_is_shown_and_pip_follows_when_uv_fails(tmp_path, stubborn_uv):
    root = packages.project(tmp_path / "project", "thing")
    packages.wheel(root / "vendor", "thing", "1.0")
    told = []
    asking = asyncio.create_task(interpreter_for(root, told.append))
    await until(lambda: any(line.startswith("downloading thing (") for line in told))
    (stubborn_uv / "fail").touch()
    found = await asking
    assert any("trying" in line and line.endswith("-m pip") for line in told)
    assert run_in(found, "import thing; print(thing.version)") == "1.0"


@needs_pip
async def test_all_who_ask_at_once_share_one_installation(tmp_path, stubborn_uv):
    root = packages.project(tmp_path / "project", "thing")
    packages.wheel(root / "vendor", "thing", "1.0")
    told = []
    asking = [asyncio.create_task(interpreter_for(root, told.append)) for _ in range(20)]
    await until((stubborn_uv / "runs").exists)
    asking[0].cancel()  # the others still wait
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    (stubborn_uv / "fail").touch()
    found = await asyncio.gather(*asking[1:])
    assert len(set(found)) == 1
    assert len([line for line in told if line.startswith("install")]) == 2


async def test_cancelling_ends_the_installer_and_leaves_nothing(tmp_path, kept, stubborn_uv):
    root = packages.project(tmp_path / "project", "thing")
    asking = asyncio.create_task(interpreter_for(root))
    await until((stubborn_uv / "runs").exists)
    assert running(str(stubborn_uv))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert list(kept.iterdir()) == []
    await until(lambda: not running(str(stubborn_uv)))


async def test_a_killed_installation_is_neither_taken_for_complete_nor_in_the_way(tmp_path, kept, stubborn_uv):
    root = packages.project(tmp_path / "project", "thing")
    packages.wheel(root / "vendor", "thing", "1.0")
    owner = subprocess.Popen([sys.executable, "-c", ASK, str(root)], stderr=subprocess.DEVNULL)
    try:
        await until((stubborn_uv / "runs").exists)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    await until(lambda: not running(str(stubborn_uv)))
    left = []
    await until(lambda: left.extend(venvs.unused(0)) or left)  # none while a test, here or elsewhere, installs
    assert [path.parent for path in left] == [kept]
    (stubborn_uv / "uv").unlink()
    found = await interpreter_for(root)
    assert left == [folder_of(found)]
    assert run_in(found, "import thing; print(thing.version)") == "1.0"
    assert not list(kept.glob("*.lock"))


@needs_pip
async def test_two_processes_that_ask_at_once_build_once(tmp_path, stubborn_uv):
    root = packages.project(tmp_path / "project", "thing")
    packages.wheel(root / "vendor", "thing", "1.0")
    command = [sys.executable, "-c", ASK, str(root)]
    askers = [await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1) for _ in range(2)]
    waits = b""
    async with asyncio.timeout(PATIENCE):
        # Both are at it: one installs, the other says that it waits.
        first = [asyncio.create_task(asker.stderr.readline()) for asker in askers]
        await asyncio.wait(first)
        waits = b"".join(line.result() for line in first)
        (stubborn_uv / "fail").touch()
        printed = [json.loads((await asker.communicate())[0]) for asker in askers]
    assert waits.count(b"installing 1 requirement") == 1
    assert waits.count(b"waiting for another process") == 1
    assert printed[0][0] == printed[1][0]
    assert sum(line.startswith("installed") for _, told in printed for line in told) == 1


async def test_a_full_disk_is_said(tmp_path):
    root = packages.project(tmp_path / "project", "thing")
    packages.wheel(root / "vendor", "thing", "1.0", {"large.py": f"text = {'x' * 3_000_000!r}"})
    home = tmp_path / "home"
    home.mkdir()
    mount = f"mount -t tmpfs -o size=2m none {home}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("a small file system cannot be mounted here")
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'{mount} && "$@"; ls {home}/venvs',
        "-",
        sys.executable,
        "-c",
        ASK,
        str(root),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "aenv.errors.StartFailed" in found.stderr
    assert "No space left on device" in found.stderr
    assert found.stdout == "", "something was left"


async def test_what_is_no_longer_used_is_listed_and_removed(tmp_path, kept):
    name = f"thing{os.getpid()}"  # what another test uses at this moment counts as used, whoever keeps it
    root = packages.project(tmp_path / "project", name)
    packages.wheel(root / "vendor", name, "1.0")
    found = folder_of(await interpreter_for(root))
    assert venvs.unused(3600) == []
    long_ago = time.time() - 7200
    os.utime(found / "complete", (long_ago, long_ago))
    await until(lambda: venvs.unused(3600) == [found])
    await interpreter_for(root)
    assert venvs.unused(3600) == [], "using it was not noticed"

    with pytest.raises(Conflict, match="in use"):  # by somebody who asked since it was listed
        venvs.remove(found, 3600)

    lock = os.open(kept / f"{found.name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Conflict, match="being made"):
        venvs.remove(found, -3600)
    assert venvs.unused(-3600) == []
    os.close(lock)

    await until(lambda: venvs.unused(-3600) == [found])
    venvs.remove(found, -3600)
    venvs.remove(found, -3600)
    assert venvs.unused(-3600) == []
    assert list(kept.iterdir()) == []
    shutil.rmtree(kept)
    again = await interpreter_for(root)
    assert folder_of(again) == found
    assert run_in(again, f"import aenv, {name}; print({name}.version)") == "1.0"


class Copied:
    """An installation that takes what the runtime needs from this interpreter, and so needs no index."""

    def __init__(self, order, lock, tell):
        self._path = order.path

    async def run(self):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._path], check=True)
        bases = {"base": str(self._path), "platbase": str(self._path)}
        target = Path(sysconfig.get_path("purelib", "venv", bases))
        for name in self._needed(requirements.of_runtime()):
            for file in metadata.files(name):
                if ".." not in file.parts:
                    (target / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file.locate(), target / file)

    def _needed(self, texts):
        for one in map(Requirement, texts):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                yield one.name
                yield from self._needed(metadata.requires(one.name) or ())


@pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux")
@pytest.mark.parametrize("isolation", ["auto", "none"])
async def test_what_a_sandbox_runs_in_counts_as_used_however_old(tmp_path, kept, monkeypatch, isolation):
    monkeypatch.setattr(venvs, "Installation", Copied)
    root = packages.project(tmp_path / "project", "thing")
    (root / "src" / "tools.py").write_text("from aenv import register_tool\n\n@register_tool\ndef nothing(): ...\n")
    async with ProcessEngine(isolation=isolation) as engine:
        await engine.create("a", SandboxSpec(env=EnvRef("project"), project=str(root)))
        (found,) = kept.iterdir()
        os.utime(found / "complete", (0, 0))
        assert venvs.unused(3600) == []
        with pytest.raises(Conflict, match="in use"):
            venvs.remove(found, 3600)
    await until(lambda: venvs.unused(3600) == [found])


async def test_where_processes_cannot_be_seen_everything_counts_as_used(tmp_path, kept, monkeypatch):
    found = kept / ("0" * 40)
    found.mkdir(parents=True)
    assert venvs.unused(3600) == [found]
    read = Path.read_bytes

    def refuse(path):
        if path.name == "mountinfo":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert venvs.unused(3600) == []


async def test_a_home_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    root = packages.project(tmp_path / "project", "thing")
    (tmp_path / "file").touch()
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "file"))
    with pytest.raises(StartFailed) as caught:
        await interpreter_for(root)
    assert "AENV_HOME" in caught.value.hint


@pytest.fixture(scope="module")
def old_msgspec(tmp_path_factory):
    """The oldest msgspec that the runtime takes, as its index has it."""
    needed = next(text for text in requirements.of_runtime() if text.startswith("msgspec"))
    pin = needed.replace(">=", "==")
    folder = tmp_path_factory.mktemp("probe")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(folder), pin]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{pin} cannot be had from the package index: {found.stderr.strip().splitlines()[-1]}")
    return pin


async def test_a_runtime_serves_a_project_whose_pins_differ_from_ours(tmp_path, installer, old_msgspec):
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "requirements.txt").write_text(f"{old_msgspec}\naenvironment\n")
    (root / "src" / "tools.py").write_text(
        "from aenv import register_tool\n\n@register_tool\ndef version() -> str:\n"
        "    import msgspec\n    return msgspec.__version__\n"
    )
    found = await interpreter_for(root)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "aenv").symlink_to(Path(aenv.__file__).parent)
    variables = {"PYTHONPATH": str(tmp_path / "path")}
    with sandbox(root, python=found.executable, variables=variables) as running:
        async with Environment("project", provision=attach(running.url)) as env:
            result = await env.call_tool("version")
    assert result.text == old_msgspec.partition("==")[2]
