"""Builds deploy/base, the image that the Docker engine uses for projects without one of their own; and on it
deploy/platform, that of ``aenv serve``.

The package and all it needs come as wheels, for the Python that the image is built on: the build uses no network.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from aenv import __version__
from aenv.engines.docker.daemon import Daemon, demultiplex, failure
from aenv.errors import AEnvError, NotFound, StartFailed

ROOT = Path(__file__).resolve().parent.parent
BASE = "python:3.12-slim"
WHAT = ("base", "platform")
_OF_REDIS = "async-timeout>=4.0.3"
"""What that needs on an older Python, which pip asks only of the one that it runs on."""
PATIENCE = 600.0
"""Seconds of silence after which a build, a pull or pip is given up."""
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_GLIBC = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")


def wheels(folder: Path, python: str, machine: str, what: str = "base") -> None:
    """Put what an image gets, for that Python (3.12) and machine (x86_64), into a folder: the package and all it needs;
    or what the platform's has beyond that."""
    if what == "base":
        _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        wanted = list(map(str, folder.glob("aenvironment-*.whl")))
    else:
        asked = [requirement.partition(";") for requirement in metadata.requires("aenvironment") or ()]
        wanted = [name for name, _, when in asked if re.fullmatch(r"""\s*extra == ['"]redis['"]""", when)]
        wanted.append(_OF_REDIS)
    platforms = [option for tag in _GLIBC for option in ("--platform", f"{tag}_{machine}")]
    target = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
    _pip("download", "--dest", str(folder), *target, *wanted)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise StartFailed(f"pip {arguments[0]} failed:\n{done.stderr[-4000:]}")


def context(folder: Path, what: str = "base") -> bytes:
    """What the daemon builds from, as a tar archive: the Dockerfile, and the wheels of a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(ROOT / "deploy" / what / "Dockerfile", "Dockerfile")
        for wheel in sorted(folder.glob("*.whl")):
            archive.add(wheel, f"wheels/{wheel.name}")
    return buffer.getvalue()


def names(what: str) -> list[str]:
    """What an image is called."""
    return [f"aenv-{what}:{__version__}", f"aenv-{what}:latest"]


async def build(
    daemon: Daemon,
    *,
    what: str = "base",
    base: str = BASE,
    tags: Sequence[str] = (),
    labels: dict[str, str] | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Build the image, and return its first tag. Wheels that a folder has from before are taken from there."""
    tags = tags or names(what)
    machine, python = await _ask(daemon, base, say)
    with tempfile.TemporaryDirectory(prefix="aenv-base-") as made:
        chosen = folder or Path(made)
        if not any(chosen.glob("*.whl")):
            say(f"wheels for Python {python} on {machine}")
            await asyncio.to_thread(wheels, Path(made), python, machine, what)
            if folder is not None:
                shutil.copytree(made, folder)
        content = context(chosen, what)
    query = {
        "t": tuple(tags),
        "buildargs": {"BASE": base, "VERSION": __version__},
        "labels": labels or {},
        "networkmode": "none",
        "rm": "1",
        "forcerm": "1",
    }
    headers = {"Content-Type": "application/x-tar"}
    async for line in daemon.lines("POST", "/build", query=query, content=content, headers=headers, patience=PATIENCE):
        if reason := failure(line):
            raise StartFailed(f"{tags[0]} cannot be built: {reason}")
        if words := str(line.get("stream") or "").strip():
            say(words)
    return tags[0]


async def _ask(daemon: Daemon, base: str, say: Callable[[str], None]) -> tuple[str, str]:
    """For which machine an image is, and which Python it has. It is pulled where it is not there."""
    try:
        found = await daemon.ask("GET", f"/images/{base}/json")
    except NotFound:
        say(f"pulling {base}")
        async for line in daemon.lines("POST", "/images/create", query={"fromImage": base}, patience=PATIENCE):
            if reason := failure(line):
                raise NotFound(f"{base} cannot be pulled: {reason}", hint="name one that is there: BASE=...") from None
        found = await daemon.ask("GET", f"/images/{base}/json")
    architecture = str(found["Architecture"])
    if architecture not in _MACHINES:
        raise StartFailed(f"{base} is for {architecture}", hint=f"use one for {' or '.join(_MACHINES)}")
    script = "import platform, sys; print(platform.libc_ver()[0], '%d.%d' % sys.version_info[:2])"
    body = {
        "Image": base,
        "Entrypoint": ["python3", "-c", script],
        "Cmd": [],
        "HostConfig": {"NetworkMode": "none"},
        "NetworkDisabled": True,
    }
    made = await daemon.ask("POST", "/containers/create", body=body)
    place = f"/containers/{made['Id']}"
    try:
        await daemon.ask("POST", f"{place}/start")
        await daemon.ask("POST", f"{place}/wait")
        printed = await daemon.fetch(f"{place}/logs", query={"stdout": "1", "stderr": "1"}, most=65536)
    except AEnvError as exc:
        raise StartFailed(f"{base} has no python3: {exc}", hint="build on an image with Python 3.11 or later") from exc
    finally:
        await daemon.ask("DELETE", place, query={"force": "1"})
    words = b"".join(piece for _, piece in demultiplex(printed)).decode(errors="replace").split()
    if len(words) != 2 or words[0] != "glibc":
        raise StartFailed(f"{base} cannot be built on: {' '.join(words)}", hint="use one with Python 3.11 and glibc")
    return _MACHINES[architecture], words[1]


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the base image of the Docker engine, or the platform's.")
    parser.add_argument("what", nargs="?", choices=WHAT, default="base")
    parser.add_argument("--base", help=f"image to build on, with Python 3.11 or later, and glibc: {BASE}, or aenv-base")
    parser.add_argument("--tag", action="append", help="name of the image; may come again")
    parser.add_argument("--host", help="where Docker or Podman listens")
    options = parser.parse_args()

    async def made() -> None:
        daemon = await Daemon.find(options.host)
        tags = options.tag or names(options.what)
        base = options.base or (BASE if options.what == "base" else names("base")[-1])
        await build(daemon, what=options.what, base=base, tags=tags, say=_say)
        sys.stdout.write(" ".join(tags) + "\n")

    try:
        asyncio.run(made())
    except AEnvError as exc:
        sys.stderr.write(f"error: {exc}\n")
        if exc.hint:
            sys.stderr.write(f"hint: {exc.hint}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
