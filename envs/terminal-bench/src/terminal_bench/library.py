"""What the programs of a verifier are made of, where an agent that is root could change it: shared libraries, and the
library of every Python that a verifier could find. Compared by content with what was there before the agent.

Files are listed and hashed by programs of the container, so these must have been compared before (``Box.replaced``).
"""

from __future__ import annotations

import json
import posixpath
import secrets
from collections.abc import Iterable
from typing import NamedTuple

from aenv.errors import AEnvError, NotFound, TooLarge
from aenv.runtime.second import Second

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CACHE = "/etc/ld.so.cache"
"""Where programs look up their libraries. Each installation of one writes it, so it is put back, and made anew."""
SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/local/lib/")
"""Where every library is compared."""
_TIME = 600.0
_AT_ONCE = 500
_TELL = """
import json, os, site, sys, sysconfig
paths = sysconfig.get_paths()
bin = os.path.dirname(os.path.realpath(sys.executable))
print(json.dumps({
    "standard": [paths["stdlib"], paths["platstdlib"], *(path for path in sys.path if path.endswith("lib-dynload"))],
    "site": [*site.getsitepackages(), paths["purelib"], paths["platlib"]],
    "files": [*(path for path in sys.path if path.endswith(".zip")),
              *(os.path.join(place, "pyvenv.cfg") for place in (bin, os.path.dirname(bin)))],
}))
"""
_ASK = """
for folder in $(echo "$PATH" | tr : ' '); do
    for name in python3 python; do [ -x "$folder/$name" ] && "$folder/$name" -I -c "$1"; done
done
true
"""
_LIST = f"""
find -L {" ".join(SYSTEM)} -type f -name '*.so*' -exec sha256sum {{}} + 2> /dev/null
[ $# -eq 0 ] || find -L "$@" -type f -exec sha256sum {{}} + 2> /dev/null
true
"""
_CACHED = """
ldconfig -iX -C "$1" && ldconfig -p -C "$1"
rm -f "$1" "$1~"
true
"""
"""Prints what a cache made now would have, where the C library has one, and leaves the cache as it is."""
_HOOKS = ("sitecustomize", "usercustomize")
_RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "pip")
"""What verifiers import that is no part of Python."""


class Found(NamedTuple):
    """What differs from what was there."""

    replaced: list[str]
    loose: list[str]
    """What only steers Python, and is as good when it is gone: its caches, and new plugins of pytest."""


class Entry(NamedTuple):
    """A line of a cache: the name that programs have for a library, what it is made for, and the file."""

    name: str
    kind: str
    path: str

    @property
    def key(self) -> tuple[str, str]:
        """What a program looks for: the name, and the machine if that has a name."""
        return self.name, self.kind.partition(", ")[0].partition(",")[2]


def entries(printed: str) -> list[Entry]:
    """What ``ldconfig -p`` prints."""
    found = (line.strip().partition(" (") for line in printed.splitlines() if ") => " in line)
    return [Entry(name, *rest.split(") => ", 1)) for name, _, rest in found]


def rivals(cached: list[Entry]) -> list[str]:
    """Files outside the system's directories that could be found in the place of a library of the system."""
    keys = {entry.key for entry in cached if entry.path.startswith(SYSTEM)}
    return sorted({entry.path for entry in cached if entry.key in keys and not entry.path.startswith(SYSTEM)})


def led_elsewhere(before: list[Entry], now: list[Entry]) -> list[str]:
    """Files that programs find now by a name of before and did not, or no longer do."""
    keys = {entry.key for entry in before}
    return sorted({entry.path for entry in {*before} ^ {entry for entry in now if entry.key in keys}})


class Library:
    """The libraries of one container, as they were."""

    def __init__(self, second: Second) -> None:
        self._second = second
        self._site: tuple[str, ...] = ()
        self._standard: tuple[str, ...] = ()
        self._before: dict[str, str] = {}
        self._cache = b""
        self._cached: list[Entry] = []
        self._rivals: list[str] = []
        self.files: list[str] = []
        """Files that would steer a Python from outside its library."""

    async def look(self) -> None:
        """See what there is, before there is an agent."""
        done = await self._second.exec(["/bin/sh", "-c", _ASK, "sh", _TELL], env={"PATH": PATH}, timeout=_TIME)
        told = [json.loads(line) for line in done.stdout.splitlines()]
        self._site = _places(told, "site")
        self._standard = _places(told, "standard")
        self.files = sorted({file for one in told for file in one["files"]})
        self._cache = await self._read(CACHE)
        self._cached = await self._entries()
        self._rivals = rivals(self._cached)
        self._before = await self._list()
        if told and not any(path.startswith(self._standard) for path in self._before):
            raise AEnvError("the second container has a Python whose library cannot be compared: find, sha256sum")

    async def put_back(self) -> bool:
        """Have programs find their libraries as before; whether somebody changed that."""
        if await self._read(CACHE) == self._cache:
            return False
        await self._second.write(CACHE, self._cache, mode=0o644)
        return True

    async def found(self, *, packages: bool) -> Found:
        """What differs now. ``packages``: also in packages of others, but for what tests run by."""
        now = await self._list()
        differing = [path for path in {**self._before, **now} if self._before.get(path) != now.get(path)]
        names = {posixpath.basename(path) for path in self._before}
        found = Found([], [])
        for path in sorted(differing):
            if posixpath.basename(posixpath.dirname(path)) == "__pycache__" and path.endswith(".pyc"):
                found.loose.append(path)
            elif not self._of(path, self._site):
                if path in self._before or self._of(path, self._standard) or posixpath.basename(path) in names:
                    found.replaced.append(path)
            elif await self._plugin(path):
                found.loose.append(path)
            elif self._steers(path, packages=packages):
                found.replaced.append(path)
        if not found.replaced:  # a cache made now is also what the verifier would get that installs something
            found.replaced.extend(led_elsewhere(self._cached, await self._entries()))
        return found

    async def remove(self, paths: list[str]) -> None:
        for start in range(0, len(paths), _AT_ONCE):
            await self._second.exec(["rm", "-f", "--", *paths[start : start + _AT_ONCE]], env={"PATH": PATH})

    async def renew(self) -> None:
        """Let programs find new libraries, too."""
        await self._second.exec(["/bin/sh", "-c", "ldconfig 2> /dev/null; true"], env={"PATH": PATH}, timeout=_TIME)

    def _of(self, path: str, places: Iterable[str]) -> str:
        return next((place for place in places if path.startswith(place)), "")

    def _steers(self, path: str, *, packages: bool) -> bool:
        """Whether a file of the packages that differs could change what Python or a test does."""
        place = self._of(path, self._site)
        name, top = posixpath.basename(path), path[len(place) :].partition("/")[0].partition(".")[0]
        if name.endswith(".pth") or top in _HOOKS or top in _RUNNERS:
            return True
        hidden = any(self._has(other, top) for other in self._site if other != place)
        return packages and (path in self._before or hidden)

    def _has(self, place: str, top: str) -> bool:
        start = place + top
        return any(path.startswith((f"{start}/", f"{start}.")) for path in self._before)

    async def _plugin(self, path: str) -> bool:
        """Whether it makes a new package one that pytest loads by itself."""
        if path in self._before or posixpath.basename(path) != "entry_points.txt":
            return False
        return b"pytest11" in await self._read(path)

    async def _list(self) -> dict[str, str]:
        lines = (await self._printed(_LIST, *self._standard, *self._site, *self._rivals)).splitlines()
        return {path: digest for digest, _, path in (line.partition("  ") for line in lines)}

    async def _entries(self) -> list[Entry]:
        return entries(await self._printed(_CACHED, f"{CACHE}.{secrets.token_hex(8)}"))

    async def _printed(self, script: str, *arguments: str) -> str:
        """All that it prints, however much; nothing where it takes too long."""
        printed = bytearray()

        def hear(stream: str, piece: bytes) -> None:
            if stream == "stdout":
                printed.extend(piece)

        line = ["/bin/sh", "-c", script, "sh", *arguments]
        done = await self._second.exec(line, env={"PATH": PATH}, timeout=_TIME, on_output=hear)
        return "" if done.timed_out else printed.decode(errors="surrogateescape")

    async def _read(self, path: str) -> bytes:
        try:
            return await self._second.read(path)
        except (NotFound, TooLarge):
            return b""


def _places(told: list[dict[str, list[str]]], kind: str) -> tuple[str, ...]:
    """Directories, the deepest first."""
    found = {f"{place.rstrip('/')}/" for one in told for place in one[kind]}
    return tuple(sorted(found, key=len, reverse=True))
