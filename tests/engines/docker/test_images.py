"""Images of real daemons, from a real registry: there or not, got or refused, for this machine or another."""

import base64
import contextlib
import io
import json
import tarfile
import uuid

import pytest

from aenv.engines.docker import registries
from aenv.engines.docker.daemon import Daemon, failure
from aenv.engines.docker.images import Moved, check, look, move, present
from aenv.errors import (
    AEnvError,
    Invalid,
    InvalidConfig,
    NetworkError,
    NotFound,
    RateLimited,
    SandboxError,
    StartFailed,
    StorageFull,
    Unauthorized,
)
from aenv.project.images import Reference
from tests.engines.docker.locked import PASSWORD, USER, locked_registry


@pytest.fixture
async def asked(daemon):
    return await Daemon.find(daemon)


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """A user who is logged in nowhere."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return tmp_path / "docker" / "config.json"


@pytest.fixture
async def made(asked):
    """Makes small images, which are gone when the test ends."""
    names = []

    async def make(name, platform=None):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for file, content in (("Dockerfile", b"FROM scratch\nCOPY note /\n"), ("note", uuid.uuid4().bytes * 9000)):
                info = tarfile.TarInfo(file)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        query = {"t": name, "platform": platform, "forcerm": True, "labels": {"aenv.test": "images"}}
        reason = await built(asked, query, buffer.getvalue())
        if reason and "unable to find image" in reason:  # a layer of it went meanwhile, with another test's image
            reason = await built(asked, query, buffer.getvalue())
        assert not reason
        names.append(name)
        return await look(asked, name)

    yield make
    for name in names:
        await gone(asked, name)


async def built(asked, query, content):
    """Why an image could not be built, if it could not."""
    said = [line async for line in asked.lines("POST", "/build", query=query, content=content)]
    return next(filter(None, map(failure, said)), None)


async def gone(asked, name):
    with contextlib.suppress(NotFound):
        await asked.ask("DELETE", f"/images/{name}", query={"force": True})


async def pushed(asked, name):
    """Push an image; its digest, or the daemon's complaint."""
    reference = Reference.parse(name)
    moved = Moved("pushing", lambda text: None)
    query = {"tag": reference.tag, "tlsVerify": "false"}
    reason = await move(asked, f"/images/{reference.name}/push", query, reference, moved)
    return reason or next(word for line in moved.status for word in line.split() if word.startswith("sha256:"))


def unused():
    return f"aenv-test/{uuid.uuid4().hex}"


async def test_an_image_that_is_there(asked, base_image):
    image = await present(asked, base_image)
    about = await asked.about()
    assert image.platform == f"{about.os}/{about.architecture}"
    assert image.id.startswith("sha256:")
    assert image.command[:3] == ("python", "-m", "aenv.runtime")
    assert image.environment["PYTHONUNBUFFERED"] == "1"
    assert image.user
    assert image.working_directory == "/app"
    assert "aenv.runtime" in image.labels
    assert image.size > 0
    assert image.layers > 0


async def test_an_image_that_nobody_has(asked, registry):
    with pytest.raises(Invalid, match="has no image") as caught:
        await present(asked, unused(), pull="never")
    assert "docker pull" in caught.value.hint
    with pytest.raises(Invalid, match=f"{registry} has no"):
        await present(asked, f"{registry}/{unused()}:1")
    with pytest.raises(Invalid, match="not the name of an image"):
        await present(asked, "No Name")


async def test_a_registry_that_is_down(asked):
    with pytest.raises(StartFailed, match="127.0.0.1:1 cannot be reached") as caught:
        await present(asked, f"127.0.0.1:1/{unused()}:1")
    assert "127.0.0.1:1" in caught.value.hint


async def test_an_image_is_got_from_its_registry_by_tag_and_by_digest(asked, registry, made):
    name = f"{registry}/{unused()}"
    built = await made(f"{name}:1")
    digest = await pushed(asked, f"{name}:1")
    for reference in (f"{name}:1", f"{name}@{digest}"):
        await gone(asked, f"{name}:1")
        said: list[str] = []
        image = await present(asked, reference, progress=said.append)
        assert (image.id, image.reference) == (built.id, reference)
        assert await present(asked, reference, pull="never") == image
        await gone(asked, reference)
    assert all("pulling" in line for line in said)


async def test_always_means_what_the_registry_has_now(asked, registry, made):
    name = f"{registry}/{unused()}:1"
    first = await made(name)
    await pushed(asked, name)
    second = await made(name)
    assert (await present(asked, name)).id == second.id
    assert (await present(asked, name, pull="always")).id == first.id
    await gone(asked, second.id)


async def test_an_image_for_another_machine(asked, made):
    other = "arm64" if (await asked.about()).architecture == "amd64" else "amd64"
    name = f"{unused()}:other"
    await made(name, f"linux/{other}")
    with pytest.raises(Invalid, match=f"is for {other} processors") as caught:
        await present(asked, name)
    assert "--platform" in caught.value.hint


async def test_a_registry_with_a_password(asked, daemon, made, nobody, tmp_path):
    with locked_registry(daemon, tmp_path / "registry") as registry:
        name = f"{registry}/{unused()}:1"
        built = await made(name)
        assert isinstance(registries.meaning(await pushed(asked, name), Reference.parse(name), ""), Unauthorized)
        nobody.parent.mkdir()
        _log_in(nobody, registry, PASSWORD)
        assert (await pushed(asked, name)).startswith("sha256:")
        await gone(asked, name)
        assert (await present(asked, name)).id == built.id
        await gone(asked, name)
        _log_in(nobody, registry, "guessed-word")
        with pytest.raises(StartFailed, match="does not let us") as caught:
            await present(asked, name)
        assert f"docker login {registry}" in caught.value.hint
        assert "guessed-word" not in str(caught.value)


def _log_in(file, registry, password):
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    file.write_text(json.dumps({"auths": {registry: {"auth": auth}}}))


async def test_an_image_for_another_system(asked, base_image):
    image, about = await look(asked, base_image), await asked.about()
    with pytest.raises(Invalid, match="is for windows, and the daemon runs linux"):
        check(image._replace(os="windows"), about)
    check(image._replace(architecture="386"), about._replace(architecture="amd64"))
    check(image._replace(architecture=""), about)


# What is known without a daemon


def _sent(reference):
    return json.loads(base64.urlsafe_b64decode(registries.credentials(Reference.parse(reference))[registries.HEADER]))


def test_credentials_are_taken_for_the_registry_that_is_meant(nobody):
    assert _sent("r.example/x") == {}
    assert registries.all_credentials() == {}
    nobody.parent.mkdir()
    hub = {"auth": base64.b64encode(b"hub:a:b").decode()}
    auths = {"https://index.docker.io/v1/": hub, "r.example:5000": {"identitytoken": "t"}, "helped.example": {}}
    nobody.write_text(json.dumps({"auths": auths, "credsStore": "desktop"}))
    assert _sent("python:3.12") == {
        "username": "hub",
        "password": "a:b",
        "serveraddress": "https://index.docker.io/v1/",
    }
    assert _sent("docker.io/library/python") == _sent("python")
    assert _sent("r.example:5000/x") == {"identitytoken": "t", "serveraddress": "r.example:5000"}
    for other in ("r.example/x", "helped.example/x", "evil.example/r.example:5000"):
        assert _sent(other) == {}
    config = json.loads(base64.urlsafe_b64decode(registries.all_credentials()["X-Registry-Config"]))
    assert set(config) == {"https://index.docker.io/v1/", "r.example:5000"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"auths": 7}',
        '{"auths": {"r.example": {"auth": "%%%"}}}',
        '{"auths": {"r.example": {"auth": "/w=="}}}',
    ],
)
def test_credentials_that_cannot_be_read_are_told_without_them(nobody, text):
    nobody.parent.mkdir()
    nobody.write_text(text)
    with pytest.raises(InvalidConfig, match="cannot be read") as caught:
        registries.credentials(Reference.parse("r.example/x"))
    assert "%%%" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("no matching manifest for linux/amd64 in the manifest list entries", Invalid),
        ("choosing an image from manifest list: no image found in manifest list for architecture amd64", Invalid),
        ("toomanyrequests: You have reached your pull rate limit", RateLimited),
        ("pull access denied for x, repository does not exist or may require 'docker login'", Unauthorized),
        ('Head "https://r/v2/x/manifests/1": unauthorized: authentication required', Unauthorized),
        ("no basic auth credentials", Unauthorized),
        ("manifest for r/x:1 not found: manifest unknown: manifest unknown", NotFound),
        ('Get "http://r/v2/": dial tcp 127.0.0.1:1: connect: connection refused', NetworkError),
        ("dial tcp: lookup r.example: no such host", NetworkError),
        ("http: server gave HTTP response to HTTPS client", NetworkError),
        ("x509: certificate signed by unknown authority", NetworkError),
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", StorageFull),
        ("something nobody has seen", SandboxError),
    ],
)
def test_what_daemons_say_of_registries_has_a_meaning(said, kind):
    error = registries.meaning(said, Reference.parse("r.example/x:1"), "linux/amd64")
    assert type(error) is kind
    assert isinstance(error, AEnvError)
    assert said in error.message
    assert error.hint or kind is SandboxError


@pytest.mark.parametrize(
    "name",
    ["r.example/certificate:1", "r.example/forbidden:1", "r.example/eof/denied:no-such-host", "x509.example/x:1"],
)
def test_the_name_of_an_image_means_nothing(name):
    parsed = Reference.parse(name)
    for said, kind in (
        (f"manifest for {name} not found", NotFound),
        (f"reading manifest {parsed.tag} in {parsed.name}: manifest unknown: forbidden", NotFound),
        (f'Get "https://{parsed.registry}/v2/{parsed.path}/manifests/{parsed.tag}": connection refused', NetworkError),
        (f"{name}: toomanyrequests: slow down", RateLimited),
        (f"pull access denied for {parsed.name}", Unauthorized),
        (f"{name}: something nobody has seen", SandboxError),
    ):
        assert type(registries.meaning(said, parsed, "linux/amd64")) is kind, said


def test_progress_counts_layers_and_bytes():
    said: list[str] = []
    moved = Moved("pulling x", said.append)
    for line in (
        {"status": "Pulling from x", "id": "1"},
        {"status": "Pulling fs layer", "progressDetail": {}, "id": "a"},
        {"status": "Downloading", "progressDetail": {"current": 1048576, "total": 4194304}, "id": "a"},
        {"status": "Already exists", "id": "b"},
        {"status": "Pull complete", "progressDetail": None, "id": "a"},
        {"status": "Odd", "progressDetail": {"current": "x", "total": []}, "id": "c"},
        {"status": "Digest: sha256:0"},
    ):
        moved.hear(line)
    assert said[-1].startswith("pulling x: 2 of ")
    assert str(moved) == "pulling x: 2 of 3 layers, 4.0 of 4.0 MiB"
    assert moved.status == ["Pulling from x", "Digest: sha256:0"]
