"""Attacks on files: reading what is the owner's, writing what is not the instance's."""

import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from _attacks.apart import is_jail

_BIG = ("/proc", "/usr", "/venv", "/runtime", "/lib", "/lib64", "/sys", sys.base_prefix)
"""Trees of this machine's programs, and what is no file."""
_PREFIXES = (
    "",
    "/proc/1/root",
    "/proc/self/root/../../..",
    "/proc/2/root",
    "/proc/1/cwd/../../../..",
    "../../../../../..",
)


def read(paths: list[str]) -> dict[str, str]:
    """Open files by their names outside, plainly and by every detour, also relative to each open descriptor."""
    found: dict[str, str] = {}
    for path in paths:
        for prefix in _PREFIXES:
            try:
                with open(prefix + path, "rb") as file:
                    found[prefix + path] = file.read(4096).decode("latin-1")
            except OSError:
                continue
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                opened = os.open("../../../../../.." + path, os.O_RDONLY, dir_fd=int(descriptor))
            except OSError:
                continue
            with open(opened, "rb") as file:
                found[f"{descriptor}:{path}"] = file.read(4096).decode("latin-1")
    return found


def hunt(begins: str, ends: str) -> list[str]:
    """Every file that can be read and holds the two texts as one; big trees of this machine's programs left out."""
    needle = (begins + ends).encode()
    found = []
    for folder, names, files in os.walk("/"):
        names[:] = [name for name in names if not os.path.join(folder, name).startswith(_BIG)]
        for name in files:
            path = os.path.join(folder, name)
            try:
                if stat.S_ISREG(os.lstat(path).st_mode) and needle in Path(path).read_bytes():
                    found.append(path)
            except OSError:
                continue
    return found


def sockets() -> list[str]:
    """Every socket that has a name in the file system."""
    found = []
    for folder, names, files in os.walk("/"):
        names[:] = [name for name in names if not os.path.join(folder, name).startswith(_BIG)]
        for name in files:
            path = os.path.join(folder, name)
            try:
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    found.append(path)
            except OSError:
                continue
    return found


def environments(pids: list[int], begins: str, ends: str) -> list[str]:
    """Whose environment holds the two texts as one: these processes', and in a jail everybody's."""
    needle, found = (begins + ends).encode(), []
    names = [name for name in os.listdir("/proc") if name.isdigit()] if is_jail() else map(str, pids)
    for name in names:
        try:
            if needle in Path(f"/proc/{name}/environ").read_bytes():
                found.append(name)
        except OSError:
            continue
    return found + (["own"] if needle.decode() in os.environ.values() else [])


def make_in(folders: list[str]) -> list[str]:
    """Make a file in each folder; those where it worked."""
    made = []
    for folder in folders:
        try:
            descriptor, path = tempfile.mkstemp(prefix="aenv-hostile-", dir=folder)
        except OSError:
            continue
        os.close(descriptor)
        os.unlink(path)
        made.append(folder)
    return made


def open_to_write(paths: list[str]) -> list[str]:
    """Open files for writing, and write nothing; those that opened."""
    opened = []
    for path in paths:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        except OSError:
            continue
        opened.append(path)
    return opened


def plant(path: str, text: str) -> bool:
    """Write a file of the project."""
    Path(path).write_text(text)
    return True


def find_files(paths: list[str]) -> list[str]:
    """Those of these files that are there."""
    return [path for path in paths if os.path.lexists(path)]


def make_devices() -> list[str]:
    """Make device nodes, the disk's among them."""
    made = []
    for kind, major, minor in (
        (stat.S_IFCHR, 1, 1),
        (stat.S_IFCHR, 1, 3),
        (stat.S_IFBLK, 254, 0),
        (stat.S_IFBLK, 8, 0),
    ):
        path = os.path.join(tempfile.gettempdir(), f"node-{kind}-{major}-{minor}")
        try:
            os.mknod(path, kind | 0o666, os.makedev(major, minor))
        except OSError:
            continue
        os.unlink(path)
        made.append(path)
    return made


def devices() -> list[str]:
    """What is in /dev and can be opened."""
    found = []
    for folder, _, files in os.walk("/dev"):
        for name in files:
            path = os.path.join(folder, name)
            if stat.S_ISLNK(os.lstat(path).st_mode):
                continue
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            except OSError:
                continue
            found.append(path)
    return found


def show(path: str) -> Any:
    """A file's text."""
    return Path(path).read_bytes().decode("latin-1")
