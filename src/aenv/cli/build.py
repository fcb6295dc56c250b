"""``aenv build``: an image of the project, by Docker or Podman."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aenv import project
from aenv.cli.output import label, output_option, say, show_record
from aenv.cli.platform import PATIENCE, pairs_option, size, talk
from aenv.cli.project import work_dir_option
from aenv.errors import Invalid

if TYPE_CHECKING:
    from aenv.engines.docker.building import Built, Plan

_EVERY = 0.2
"""Seconds between two pictures of what goes on, on a terminal."""
_CLEAR = "\r\x1b[2K"


@click.command()
@work_dir_option
@click.option(
    "-n", "--image-name", metavar="NAME", help="Name of the image. Else buildConfig.image_name, the project's."
)
@click.option(
    "-t",
    "--image-tag",
    "tags",
    metavar="TAG",
    multiple=True,
    help="Tag of the image. Else buildConfig.image_tag, the version. Repeatable.",
)
@click.option("-r", "--registry", metavar="HOST[:PORT]", help="Registry that the image is for.")
@click.option("-s", "--namespace", metavar="PATH", help="What the name is below in the registry.")
@click.option("--push/--no-push", default=False, help="Push the image to its registry.")
@click.option("-p", "--platform", metavar="OS/ARCH", help="Platform to build for; else the daemon's own.")
@click.option(
    "-f",
    "--dockerfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The Dockerfile. Else buildConfig.dockerfile.",
)
@pairs_option("--build-arg", help="Argument of the Dockerfile.")
@click.option("--base-image", metavar="IMAGE", help="Image to build on, for a Dockerfile that begins with ARG BASE.")
@output_option
def build(
    *,
    work_dir: Path,
    image_name: str | None,
    tags: Sequence[str],
    registry: str | None,
    namespace: str | None,
    push: bool,
    platform: str | None,
    dockerfile: Path | None,
    build_arg: dict[str, str],
    base_image: str | None,
    output: str,
) -> None:
    """Build an image of the project, with Docker or Podman.

    What is built is written to artifacts in config.json, with its digest once it is pushed. The image has the files
    that 'aenv push' packs, less what .dockerignore lists. The daemon is the one of AENV_DOCKER_HOST or DOCKER_HOST,
    else of this machine. For a registry that asks who you are, log in with 'docker login' first; what it put into a
    credential helper is not seen.

    \b
    Example:
      aenv build
      aenv build --base-image aenv-base
      aenv build -r registry.example.org -s team -t 1.0.0 -t latest --push
    """
    from aenv.engines.docker import building

    found = project.read(work_dir)
    for warning in found.warnings:
        label("warning", warning)
    planned = building.plan(
        found,
        image_name=image_name,
        tags=tags,
        registry=registry,
        namespace=namespace,
        platform=platform,
        dockerfile=dockerfile and work_dir / dockerfile,
        arguments=build_arg,
        base_image=base_image,
    )
    if push and not planned.references[0].registry:
        raise Invalid(f"{planned.references[0]} has no registry to be pushed to", hint="name it with --registry")
    built = talk(_build(planned, push), quiet=True)
    _show(built, push, output)
    building.record(found, built)


async def _build(planned: Plan, push: bool) -> Built:
    from aenv.engines.docker import building
    from aenv.engines.docker.daemon import Daemon

    daemon = await Daemon.find()
    about = await daemon.about()
    say(f"building {planned.references[0]} with {about.name} {about.version}")
    async with _telling() as teller:
        built = await building.build(daemon, planned, teller)
        if push:
            built = await building.push(daemon, built, teller)
    return built


def _show(built: Built, pushed: bool, output: str) -> None:
    shown: dict[str, Any] = {
        "reference": built.reference,
        "digest": built.digest or None,
        "id": built.image.id,
        "platform": built.image.platform,
        "size": built.image.size,
        "layers": built.image.layers,
        "seconds": round(built.seconds, 3),
        "tags": [str(reference) for reference in built.references],
        "pushed": pushed,
    }
    if output == "table":
        shown |= {
            "digest": built.digest or "-",
            "size": size(built.image.size),
            "seconds": f"{built.seconds:.1f}",
            "tags": ", ".join(shown["tags"]),
            "pushed": "yes" if pushed else "no",
        }
    show_record(shown, output)


class _Talk:
    """What goes on, on stderr: on a terminal in its last line, all the time; else now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._now, self._since = "", time.monotonic()
        self._marks: list[int] = []

    def done(self, text: str) -> None:
        self._wipe()
        say(text)
        self._begin("")

    def doing(self, text: str) -> None:
        if text.partition(": ")[0] != self._now.partition(": ")[0]:
            self._begin(text)
        self._now = text

    async def follow(self) -> None:
        """Say again and again what goes on, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY)
            self._tell()

    def close(self) -> None:
        self._wipe()

    def _begin(self, text: str) -> None:
        self._now, self._since, self._marks = text, time.monotonic(), list(PATIENCE)

    def _tell(self) -> None:
        if not self._now:
            return
        seconds = time.monotonic() - self._since
        if self._live:
            room = shutil.get_terminal_size().columns - 12
            text = self._now if len(self._now) <= room else f"{self._now[: max(room - 3, 0)]}..."
            click.echo(f"{_CLEAR}{text} {seconds:.0f} s", nl=False, err=True)
        elif seconds >= self._marks[0]:
            say(f"{self._now} ... {self._marks[0]} s")
            self._marks = self._marks[1:] or [self._marks[0] + PATIENCE[-1]]

    def _wipe(self) -> None:
        if self._live:
            click.echo(_CLEAR, nl=False, err=True)


@asynccontextmanager
async def _telling() -> AsyncIterator[_Talk]:
    teller = _Talk()
    following = asyncio.create_task(teller.follow())
    try:
        yield teller
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        teller.close()
