"""``aenv build``, as far as it goes without a daemon: what is built, what it is called, and what is left out."""

import os
import tarfile
from pathlib import Path

import pytest

from aenv import project
from aenv.engines.docker import building, context
from aenv.errors import Invalid, NotFound, TooLarge


@pytest.fixture
def my_env(here, monkeypatch):
    project.scaffold("my-env", here)
    monkeypatch.chdir(here / "my-env")
    return here / "my-env"


def written(root: Path, **changes: object) -> project.Project:
    return project.write(project.read(root), {"buildConfig": changes})


def names(planned: building.Plan) -> list[str]:
    return [str(reference) for reference in planned.references]


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({}, {}, ["my-env:1.0.0"]),
        ({"image_name": "other", "image_tag": "v7"}, {}, ["other:v7"]),
        ({"image_name": "r.example/a/other:v6"}, {}, ["r.example/a/other:v6"]),
        (
            {"image_name": "other", "image_tag": "v7"},
            {"image_name": "mine", "tags": ["1", "2", "1"]},
            ["mine:1", "mine:2"],
        ),
        ({}, {"registry": "r.example:5000", "namespace": "a/b"}, ["r.example:5000/a/b/my-env:1.0.0"]),
        ({}, {"registry": "https://r.example/", "namespace": "/a/"}, ["r.example/a/my-env:1.0.0"]),
        ({"image_name": "r.example/x"}, {"registry": "localhost"}, ["localhost/x:1.0.0"]),
    ],
)
def test_an_image_is_called_as_the_config_and_the_options_say(my_env, config, options, expected):
    assert names(building.plan(written(my_env, **config), **options)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"image_name": "Upper"},
        {"image_name": f"x@sha256:{'0' * 64}"},
        {"tags": ["no tag"]},
        {"tags": [""]},
        {"registry": "team"},
        {"registry": "r.example:port"},
        {"namespace": "../x"},
        {"platform": "linux"},
        {"platform": "windows/amd64"},
        {"platform": "linux/amd64; x"},
        {"base_image": "No Image"},
    ],
)
def test_what_cannot_be_is_refused_before_anybody_is_asked(my_env, options):
    with pytest.raises(Invalid) as caught:
        building.plan(project.read(my_env), **options)
    assert caught.value.hint


def test_a_platform_is_written_as_images_write_it(my_env):
    assert building.plan(project.read(my_env), platform="linux/x86_64").platform == "linux/amd64"
    assert building.plan(project.read(my_env), platform="linux/arm/v7").platform == "linux/arm/v7"


def test_a_version_with_build_metadata_is_a_tag_too(my_env):
    found = project.write(project.read(my_env), {"version": "1.0.0-rc.1+5"})
    assert names(building.plan(found)) == ["my-env:1.0.0-rc.1_5"]


def test_a_base_image_needs_a_dockerfile_that_takes_one(my_env):
    assert building.plan(project.read(my_env), base_image="aenv-base").arguments == {"BASE": "aenv-base"}
    (my_env / "Dockerfile").write_text("FROM python:3.12-slim\n# ARG BASE\n")
    with pytest.raises(Invalid, match="does not take another base image") as caught:
        building.plan(project.read(my_env), base_image="aenv-base")
    assert "ARG BASE" in caught.value.hint


def test_dockerfile_and_context_are_of_the_project(my_env):
    with pytest.raises(Invalid, match="not a directory of the project"):
        building.plan(written(my_env, context=".."))
    with pytest.raises(Invalid, match="not a directory of the project"):
        building.plan(written(my_env, context="nonesuch"))
    with pytest.raises(NotFound, match="there is no Dockerfile"):
        building.plan(written(my_env, context=".", dockerfile="./Other"))


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("a", "a", True),
        ("a", "a/b/c", True),
        ("a", "b/a", False),
        ("/a", "a/b", True),
        ("./a/", "a/b", True),
        ("*.log", "x.log", True),
        ("*.log", "b/x.log", False),
        ("*/x.log", "b/x.log", True),
        ("*/x.log", "b/c/x.log", False),
        ("**/x.log", "x.log", True),
        ("**/x.log", "b/c/x.log", True),
        ("a/**", "a/b/c", True),
        ("a/**/c", "a/c", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[ab].txt", "b.txt", True),
        ("a\\*b", "a*b", True),
        ("a\\*b", "axb", False),
        ("a.c", "abc", False),
    ],
)
def test_patterns_of_dockerignore_are_dockers(pattern, path, matches):
    found = context.Pattern.parse(pattern)
    assert found is not None
    assert found.matches(path) is matches


def packed(root: Path, dockerfile: str = "Dockerfile", **other: bytes) -> tuple[dict[str, tarfile.TarInfo], str]:
    content, name = context.pack(root, root / dockerfile, {root / key: value for key, value in other.items()})
    with content, tarfile.open(fileobj=content) as archive:
        return {member.name: member for member in archive}, name


def test_a_builder_gets_what_a_package_has_less_what_dockerignore_lists(my_env):
    for name in (".env", "src/__pycache__/x.pyc", "big.log", "keep.log", "data/a/1.bin", "notes.md"):
        (my_env / name).parent.mkdir(parents=True, exist_ok=True)
        (my_env / name).write_text("x")
    (my_env / "src" / "link.py").symlink_to("custom_env.py")
    (my_env / "run.sh").write_text("x")
    (my_env / "run.sh").chmod(0o700)
    (my_env / ".aenvignore").write_text("notes.md\n")
    (my_env / ".dockerignore").write_text(
        "# what is not needed\n*.log\n!keep.log\n\ndata\nDockerfile\ntest\nREADME.md\n"
    )
    found, name = packed(my_env)
    assert name == "Dockerfile"
    assert set(found) == {
        *(".aenvignore", ".dockerignore", "Dockerfile", "config.json", "keep.log", "requirements.txt", "run.sh"),
        *("src/custom_env.py", "src/link.py"),
    }
    assert (found["run.sh"].mode, found["keep.log"].mode, found["run.sh"].uid, found["run.sh"].mtime) == (
        0o755,
        0o644,
        0,
        0,
    )
    assert found["src/link.py"].linkname == "custom_env.py"


def test_a_dockerfile_from_elsewhere_comes_along(my_env):
    (my_env / "build").mkdir()
    (my_env / "build" / "one.dockerfile").write_text("FROM scratch\n")
    assert packed(my_env, "build/one.dockerfile")[1] == "build/one.dockerfile"
    content, name = context.pack(my_env / "src", my_env / "Dockerfile", {})
    with content, tarfile.open(fileobj=content) as archive:
        assert set(archive.getnames()) == {name, "custom_env.py"}


def test_what_cannot_be_packed_is_told(my_env, monkeypatch):
    (my_env / "away").symlink_to("/etc/passwd")
    with pytest.raises(Invalid, match="leaves the project"):
        packed(my_env)
    (my_env / "away").unlink()
    (my_env / "nothing").symlink_to("nonesuch")
    with pytest.raises(Invalid, match="points to nothing"):
        packed(my_env)
    (my_env / "nothing").unlink()
    os.mkfifo(my_env / "pipe")
    with pytest.raises(Invalid, match="neither a file nor a link"):
        packed(my_env)
    (my_env / "pipe").unlink()
    monkeypatch.setattr(context, "MAX_SIZE", 100)
    with pytest.raises(TooLarge):
        packed(my_env)


def test_where_neither_docker_nor_podman_answers(aenv, my_env, tmp_path, monkeypatch):
    monkeypatch.setenv("AENV_DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    answer = aenv("build")
    assert (answer.code, answer.out) == (1, "")
    assert "neither Docker nor Podman answers" in answer.err
    assert "hint: start Docker or Podman, or set AENV_DOCKER_HOST" in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--push"], 1, "has no registry"),
        (["--build-arg", "novalue"], 2, "KEY=VALUE"),
        (["--platform", "amd64"], 1, "is not a platform"),
        (["-w", ".."], 3, "there is no config.json"),
        (["-f", "nonesuch"], 1, "there is no Dockerfile"),
    ],
)
def test_mistakes_are_told_before_anybody_is_asked(aenv, my_env, arguments, code, said):
    answer = aenv("build", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err


def test_an_ssh_address_is_refused_with_what_to_do(aenv, my_env, monkeypatch):
    monkeypatch.setenv("AENV_DOCKER_HOST", "ssh://ada@host")
    answer = aenv("build")
    assert (answer.code, "ssh -nNT -L" in answer.err) == (3, True)
