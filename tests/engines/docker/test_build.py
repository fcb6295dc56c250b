"""``aenv build`` on a real Docker and a real Podman, and its push to a real registry."""

import asyncio
import contextlib
import io
import json
import re
import tarfile
import uuid

import pytest

from aenv import http, project
from aenv.engines.docker.building import sources
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.images import present
from aenv.errors import AEnvError
from tests.cli.conftest import aenv, here, home  # noqa: F401

SMALL = "FROM scratch\nCOPY config.json /\n"


@pytest.fixture
def built(aenv, here, daemon, monkeypatch):  # noqa: F811
    """``aenv build`` in a new project, with this daemon; what it built is gone when the test ends."""
    monkeypatch.setenv("AENV_DOCKER_HOST", daemon)
    monkeypatch.setenv("DOCKER_CONFIG", str(here / "nobody"))
    name = f"aenv-test-{uuid.uuid4().hex[:12]}"
    project.scaffold(name, here)
    monkeypatch.chdir(here / name)

    def build(*arguments):
        return aenv("build", "-o", "json", *arguments)

    build.name, build.root = name, here / name
    yield build
    asking(daemon, lambda asked: _all_gone(asked, f"aenv.env={name}@1.0.0"))


def asking(address, work):
    """What a daemon answers, in a test that is not asynchronous."""

    async def talk():
        try:
            return await work(await Daemon.find(address))
        finally:
            await http.close()

    return asyncio.run(talk())


async def _all_gone(asked, label):
    for found in await asked.ask("GET", "/images/json", query={"filters": {"label": [label]}}):
        await _gone(asked, found["Id"])


async def _gone(asked, tag):
    with contextlib.suppress(AEnvError):
        await asked.ask("DELETE", f"/images/{tag}", query={"force": True})


async def _files(asked, image):
    """The files of an image below /app, with what they hold."""
    body = {"Image": image, "Labels": {"aenv.test": "build"}}
    made = (await asked.ask("POST", "/containers/create", body=body))["Id"]
    try:
        archive = await asked.fetch(f"/containers/{made}/archive", query={"path": "/app"}, most=10_000_000)
    finally:
        await asked.ask("DELETE", f"/containers/{made}", query={"force": True})
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened if member.isreg()}


def test_a_new_project_is_built_offline_and_written_down(built, base_image, daemon):
    (built.root / ".env").write_text("TOKEN=secret")
    (built.root / "src" / "private.txt").write_text("mine")
    (built.root / ".dockerignore").write_text("src/*.txt\n")
    first = built("--base-image", base_image)
    assert first.code == 0, first.err
    assert first.data["reference"] == f"{built.name}:1.0.0"
    assert first.data["tags"] == [f"{built.name}:1.0.0"]
    assert (first.data["digest"], first.data["pushed"]) == (None, False)
    assert first.data["size"] > 0
    assert first.data["layers"] > 0
    assert first.data["seconds"] > 0
    assert "RUN pip install" in first.err
    assert project.read(built.root).value("artifacts") == [
        {
            "id": first.data["id"],
            "type": "image",
            "content": f"{built.name}:1.0.0",
            "platform": first.data["platform"],
            "sources": sources(project.read(built.root)),
        }
    ]
    image = asking(daemon, lambda asked: present(asked, first.data["reference"], pull="never"))
    assert (image.id, image.user) == (first.data["id"], "1000")
    assert image.command == ("python", "-m", "aenv.runtime", "/app", "--host", "0.0.0.0")
    assert image.labels["aenv.env"] == f"{built.name}@1.0.0"
    assert image.labels["aenv.sources"] == sources(project.read(built.root))
    files = asking(daemon, lambda asked: _files(asked, image.reference))
    assert set(files) == {"app/config.json", "app/requirements.txt", "app/src/custom_env.py"}
    assert json.loads(files["app/config.json"])["artifacts"] == []

    again = built("--base-image", base_image)
    assert re.search(r"RUN pip install .*, cached", again.err), again.err
    assert len(project.read(built.root).value("artifacts")) == 1


def test_files_that_changed_since_are_told(built, aenv):  # noqa: F811
    (built.root / "Dockerfile").write_text(SMALL)
    (built.root / ".dockerignore").write_text("notes.txt\n")
    assert built().code == 0
    told = f"{built.name}:1.0.0 was built of other files than these"
    assert told not in aenv("push", "--dry-run").err
    (built.root / "notes.txt").write_text("not in the image")
    assert told not in aenv("push", "--dry-run").err
    (built.root / "src" / "custom_env.py").write_text("import aenv\n@aenv.register_tool\ndef new() -> None: ...\n")
    answer = aenv("push", "--dry-run")
    assert answer.code == 0, answer.err
    assert told in answer.err
    assert "'aenv build'" in answer.err
    assert built().code == 0
    assert told not in aenv("push", "--dry-run").err


def test_an_image_has_many_tags_and_is_pushed(built, registry, daemon):
    (built.root / "Dockerfile").write_text(SMALL)
    answer = built("-r", registry, "-s", "team/a", "-n", built.name, "-t", "1", "-t", "latest", "--push")
    assert answer.code == 0, answer.err
    name = f"{registry}/team/a/{built.name}"
    assert answer.data["tags"] == [f"{name}:1", f"{name}:latest"]
    assert answer.data["pushed"] is True
    digest = answer.data["digest"]
    (artifact,) = project.read(built.root).value("artifacts")
    assert (artifact["id"], artifact["content"]) == (digest, f"{name}:1")
    for tag in answer.data["tags"]:
        asking(daemon, lambda asked, tag=tag: _gone(asked, tag))
    for reference in (f"{name}@{digest}", f"{name}:latest"):
        image = asking(daemon, lambda asked, reference=reference: present(asked, reference))
        assert image.id == answer.data["id"]
        asking(daemon, lambda asked, reference=reference: _gone(asked, reference))


def test_what_was_built_for_another_platform_stays_written_down(built, daemon):
    (built.root / "Dockerfile").write_text(SMALL)
    for platform in ("linux/arm64", "linux/amd64", "linux/arm64"):
        answer = built("--platform", platform, "-t", platform.partition("/")[2])
        assert answer.code == 0, answer.err
        assert answer.data["platform"] == platform
    own = asking(daemon, lambda asked: asked.about()).platform
    assert built("-t", "own").data["platform"] == own
    found = project.read(built.root).value("artifacts")
    assert sorted(artifact["platform"] for artifact in found) == ["linux/amd64", "linux/arm64"]


def test_build_arguments_and_another_dockerfile(built, daemon):
    (built.root / "other.dockerfile").write_text("FROM scratch\nARG WHO\nLABEL who=${WHO}\nCOPY config.json /\n")
    answer = built("-f", "other.dockerfile", "--build-arg", "WHO=ada=1")
    assert answer.code == 0, answer.err
    image = asking(daemon, lambda asked: present(asked, answer.data["reference"]))
    assert image.labels["who"] == "ada=1"


def test_a_base_image_for_another_platform(built, base_image):
    other = "linux/arm64"
    answer = built("--base-image", base_image, "--platform", other)
    assert answer.code == 1
    assert (answer.out, other in answer.err, "hint: " in answer.err) == ("", True, True)
    assert project.read(built.root).value("artifacts") == []


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("FROM ${BASE}\nRUN echo what it printed >&2; exit 7\n", "what it printed"),
        ("FROM ${BASE}\nCOPY nonesuch /\n", "nonesuch"),
        ("FROM ${BASE}\nBREW coffee\n", "BREW"),
    ],
)
def test_a_build_that_fails_says_where(built, base_image, dockerfile, said):
    (built.root / "Dockerfile").write_text(f"ARG BASE\n{dockerfile}")
    answer = built("--base-image", base_image)
    assert (answer.code, answer.out) == (1, "")
    assert "the build failed" in answer.err
    assert said in answer.err
    assert not re.search(r"\[\d*m|&imagebuilder", answer.err)
    assert project.read(built.root).value("artifacts") == []


def test_a_base_image_that_cannot_be_got(built, registry):
    answer = built("--base-image", f"{registry}/nonesuch:1")
    assert (answer.code, f"{registry} has no" in answer.err) == (1, True)
    answer = built("--base-image", "127.0.0.1:1/nonesuch:1")
    assert (answer.code, "127.0.0.1:1 cannot be reached" in answer.err) == (1, True)
    assert "--base-image" in answer.err


def test_a_push_to_a_registry_that_is_down(built):
    (built.root / "Dockerfile").write_text(SMALL)
    answer = built("-r", "127.0.0.1:1", "-t", "1", "--push")
    assert (answer.code, answer.out) == (1, "")
    assert "127.0.0.1:1 cannot be reached" in answer.err
    assert project.read(built.root).value("artifacts") == []
