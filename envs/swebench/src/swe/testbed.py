"""The second sandbox: the repository at ``/testbed``, from one episode to the next, and for the evaluation once more.

Without an image, the sandbox has this machine's programs and an empty root. In an image, its user is not root, and may
write a few places. Whatever an agent could write is removed before each episode and before each run of tests, so
nothing of it is left but what is brought back on purpose.
"""

from __future__ import annotations

import importlib.metadata
import io
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from aenv.errors import AEnvError, Invalid, Unsupported
from aenv.models import ExecResult
from aenv.runtime.second import Second
from swe.rows import PACKAGES, Row

ROOT = "/testbed"
HOME = "/tmp/home"  # noqa: S108
TOOLS = "/opt/testbed"
"""Where the packages are that tests run by, and the command ``python``."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIME = 600.0
_SHOWN = 2000
_KEPT = "usr|bin|sbin|lib|lib32|lib64|libx32|etc|proc|dev|sys|shared"
"""Mounts of the root that is this machine's programs; nobody in it can change them."""
_WIPE = f"""
kill -9 -1 2> /dev/null
cd /
for name in .[!.]* ..?* *; do
    case "$name" in {_KEPT}) continue ;; esac
    if [ -e "$name" ] || [ -L "$name" ]; then
        [ -L "$name" ] || chmod -R u+rwX -- "$name" 2> /dev/null
        rm -rf -- "$name" || exit 1
    fi
done
find /shared /dev/shm -mindepth 1 -delete
ipcrm -a > /dev/null 2>&1
mkdir -p root tmp home opt run srv mnt var/log var/tmp && chmod 1777 tmp var/tmp
"""
_EMPTY = """
kill -9 -1 2> /dev/null
ipcrm -a > /dev/null 2>&1
for place in "$@"; do find "$place" -mindepth 1 -delete || exit 1; done
"""
_PROBE = "test -w / && echo root; test -w /usr && echo usr; for name in git python3 bash tar; do command -v $name; done"
_OWN = ("/tmp", "/var/tmp", "/shared", "/dev/shm")  # noqa: S108
"""Places that everybody may write, whatever the image."""
_WRITABLE = (
    "find / -xdev -type %s -writable -not -path '/proc/*' -not -path '/sys/*' -not -path '/dev/*' 2> /dev/null; true"
)
_COMMIT = f"""
cd {ROOT} && git init -q --template= . && mkdir -p .git/info &&
printf '%s\\n' __pycache__/ '*.py[co]' .pytest_cache/ '*.egg-info/' > .git/info/exclude &&
git add -A -f . && git commit -q -m base && git gc -q && rm -rf .git/hooks .git/logs
"""
_PACK = f"tar -cf /tmp/testbed.tar -C {ROOT} ."
_UNPACK = 'mkdir -p "$2" && tar -xf "$1" -C "$2" && rm "$1"'
_PYTHON = f'mkdir -p {TOOLS}/bin && ln -s "$(command -v python3)" {TOOLS}/bin/python'
_COMMITTER = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "testbed"), ("EMAIL", "testbed@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}
_RUNNER = ("pytest", "pluggy", "iniconfig", "packaging")
"""Distributions of pure Python, for whatever Python this machine has."""


class Testbed:
    """One second sandbox."""

    def __init__(self, second: Second) -> None:
        self.second = second
        self.variables: dict[str, str] = {}
        self._found: list[str] = []
        self._places: list[str] = []
        """In an image, all that its user may write; found before there is an agent."""
        self._packed: dict[Path, bytes] = {}
        """Checkouts with a repository of git in each, whose history is one commit."""

    async def begin(self, row: Row) -> None:
        """The repository of a row, and nothing else that anybody wrote."""
        await self._check()
        await self.fresh(row)

    async def fresh(self, row: Row) -> None:
        """The same again."""
        await (self._sh(_EMPTY, *self._places) if self._places else self._sh(_WIPE))
        self.variables = {
            "PATH": f"{TOOLS}/bin:{PATH}",
            "PYTHONPATH": f"{TOOLS}/lib",
            "HOME": HOME,
            "LANG": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        await self._sh('mkdir -p "$1"', HOME)
        await self.put(_tools(), f"{TOOLS}/lib")
        await self._sh(_PYTHON)
        packed = self._packed.get(row.checkout)
        if packed is None:
            await self.put(_tar(row.checkout), ROOT)
            await self._sh(_COMMIT, **_COMMITTER)
            await self._sh(_PACK)
            self._packed = {row.checkout: await self.second.read("/tmp/testbed.tar")}  # noqa: S108
            await self._sh("rm /tmp/testbed.tar")
        else:
            await self.put(packed, ROOT)

    async def run(
        self, command: str | list[str], timeout: float, on_output: Callable[[str, bytes], None] | None = None
    ) -> ExecResult:
        """A command in the repository."""
        line = ["bash", "-c", command] if isinstance(command, str) else command
        return await self.second.exec(line, cwd=ROOT, env=self.variables, timeout=timeout, on_output=on_output)

    async def sh(self, script: str, *arguments: str) -> str:
        """What a script prints that must not fail, with no variable of an agent's."""
        return await self._sh(script, *arguments)

    async def end_all(self) -> None:
        """End every process in it."""
        await self._sh("kill -9 -1 2> /dev/null; true")

    async def _check(self) -> None:
        if self._found:
            return
        found = (await self.second.exec(_PROBE, env={"PATH": PATH})).stdout.split()
        if "usr" in found:
            raise Invalid(
                "the user of the second container may change its programs, and so the tests that judge its work",
                hint=f"name an image with another user, to whom {ROOT} and {TOOLS} belong, or leave out the datasource",
            )
        if "root" not in found:
            self._places = await self._writable()
        programs = {path.rpartition("/")[2] for path in found}
        if lacking := {"git", "python3", "bash", "tar"} - programs:
            names = ", ".join(sorted(lacking))
            raise Unsupported(f"the second sandbox has no {names} in {PATH}, which tasks are worked on with")
        self._found = found

    async def _writable(self) -> list[str]:
        """The topmost directories that its user may write. All that is in them can be removed, and must be all that
        the user may write."""
        places = {*(await self._sh(_WRITABLE % "d")).splitlines(), *_OWN}
        roots = sorted(place for place in places if not any(place.startswith(f"{other}/") for other in places))
        if lacking := {ROOT, TOOLS} - set(roots):
            raise Invalid(f"the user of the second container cannot write {', '.join(sorted(lacking))}")
        files = (await self._sh(_WRITABLE % "f")).splitlines()
        if loose := [file for file in files if not any(file.startswith(f"{root}/") for root in roots)]:
            raise Invalid(f"the user of the second container may write {loose[0]}, which cannot be made anew")
        return roots

    async def put(self, packed: bytes, place: str) -> None:
        """The files of an archive, below a directory."""
        await self.second.write("/tmp/put.tar", packed)  # noqa: S108
        await self._sh(_UNPACK, "/tmp/put.tar", place)  # noqa: S108

    async def _sh(self, script: str, *arguments: str, **variables: str) -> str:
        line = ["/bin/sh", "-c", script, "sh", *arguments]
        env = {"PATH": PATH, "HOME": HOME, "LC_ALL": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1", **variables}
        done = await self.second.exec(line, env=env, timeout=_TIME)
        if done.returncode:
            raise AEnvError(f"the second sandbox cannot be made ready: {done.stderr[-_SHOWN:].strip()}")
        return done.stdout


@cache
def _tools() -> bytes:
    """What tests run by: pytest as it is installed beside this, and the project's ``packages``."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in _RUNNER:
            distribution = importlib.metadata.distribution(name)
            for file in distribution.files or ():
                place = Path(str(distribution.locate_file(file)))
                if ".." not in file.parts and file.parts[0] != "bin" and place.is_file():
                    archive.add(place, str(file), filter=_plain)
        if PACKAGES.is_dir():
            archive.add(PACKAGES, ".", filter=_plain)
    return packed.getvalue()


def _tar(directory: Path) -> bytes:
    """The files of a checkout. Its history stays away: it may hold what comes after the base commit."""
    if not directory.is_dir():
        hint = "with_rows.py brings rows and checkouts into a project; tasks(images=True) needs none"
        raise Invalid(f"there is no checkout {directory.name!r} among the project's repos", hint=hint)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(directory, ".", filter=_plain)
    return packed.getvalue()


def _plain(found: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """As the sandbox's own, and without repositories of git."""
    if found.name.rpartition("/")[2] == ".git":
        return None
    found.uid = found.gid = 0
    found.uname = found.gname = ""
    return found
