"""``aenv push`` and its kin, as far as they go without a platform."""

import json
import socket

import pytest

from aenv import project


@pytest.fixture
def my_env(here):
    project.scaffold("my-env", here)
    return here / "my-env"


@pytest.fixture
def nobody():
    """The address of a platform that is not there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(
    "target", [["my-env"], ["./my-env"], ["my-env@1.0.0"], ["-w", "my-env"], ["my-env", "-w", "."]]
)
def test_a_dry_run_checks_packs_and_asks_nobody(aenv, my_env, target):
    answer = aenv("push", *target, "--dry-run", "-o", "json")
    assert answer.code == 0, answer.err
    package = project.pack(project.read(my_env))
    assert answer.data == {
        "name": "my-env",
        "version": "1.0.0",
        "digest": project.digest(package).removeprefix("sha256:"),
        "size": len(package),
    }
    assert "nothing was pushed" in answer.err


def test_a_project_is_found_from_its_own_directory(aenv, my_env, monkeypatch):
    monkeypatch.chdir(my_env)
    for target in ([], ["my-env"], ["."]):
        assert aenv("push", *target, "--dry-run", "-o", "json").data["name"] == "my-env"
    table = aenv("push", "--dry-run")
    assert table.out.splitlines()[1].split() == ["name", "my-env"]


def test_a_built_in_environment_is_found_by_its_name(aenv, here):
    answer = aenv("push", "mini-terminal", "--dry-run", "-o", "json")
    assert (answer.code, answer.data["name"]) == (0, "mini-terminal")
    answer = aenv("push", "mini-terminal", "-v", "9.0.0")
    assert (answer.code, "comes with this package" in answer.err) == (1, True)


def test_a_version_is_written_to_the_config_unless_it_is_a_dry_run(aenv, my_env, nobody):
    answer = aenv("push", "my-env", "-v", "1.1.0", "--dry-run", "-o", "json")
    assert (answer.code, answer.data["version"], "digest" in answer.data) == (0, "1.1.0", False)
    assert project.read(my_env).version == "1.0.0"
    answer = aenv("push", "my-env", "-v", "1.1.0", "--hub-url", nobody)
    assert (answer.code, answer.out) == (1, "")
    assert "version 1.0.0 is now 1.1.0" in answer.err
    assert project.read(my_env).version == "1.1.0"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["yours"], 1, "there is no project 'yours'"),
        (["my-enf"], 1, "run it in the project's directory, or give the directory"),
        (["./nowhere"], 1, "does not exist"),
        (["my-env@2.0.0"], 1, "says version 1.0.0, not 2.0.0"),
        (["my-env", "-v", "two"], 1, "'two' is not a semantic version"),
        (["my env"], 1, "not an environment name"),
        ([], 3, "there is no config.json"),
        (["my-enw", "-w", "my-env"], 1, "did you mean 'my-env'?"),
        (["other"], 1, "config.json names another"),
        (["a", "b"], 2, "aenv push --help"),
    ],
)
def test_what_cannot_be_pushed(aenv, here, my_env, arguments, code, said):
    (here / "other").mkdir()
    (here / "other" / "config.json").write_text(json.dumps({"name": "another", "version": "1.0.0"}))
    answer = aenv("push", *arguments, "--dry-run")
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert "Traceback" not in answer.err


DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("artifact", "code", "said"),
    [
        (
            {"content": "my-env:1", "id": DIGEST},
            0,
            "warning: image: my-env:1 is at the daemon that built it only: it has",
        ),
        ({"content": "reg.example.com/x:1"}, 0, "reg.example.com/x:1 is at the daemon that built it only: it was not"),
        ({"content": "reg.example.com/x:1", "id": DIGEST}, 0, ""),
        (
            {"content": "reg.example.com/x:1", "id": DIGEST, "sources": DIGEST},
            0,
            "warning: image: reg.example.com/x:1 was built of other files than these",
        ),
        ({"content": "Not A Name"}, 1, "'Not A Name' is not the name of an image"),
    ],
)
def test_what_is_said_of_an_image_that_was_built(aenv, my_env, artifact, code, said):
    project.write(project.read(my_env), {"artifacts": [{"type": "image", **artifact}, {"type": "other"}]})
    answer = aenv("push", "my-env", "--dry-run")
    assert answer.code == code, answer.err
    assert said in answer.err
    assert said or "image" not in answer.err


def test_a_project_with_mistakes_is_not_pushed(aenv, my_env):
    (my_env / "src" / "custom_env.py").write_text("def broken(:\n")
    (my_env / "Dockerfile").unlink()
    answer = aenv("push", "my-env", "--dry-run")
    assert (answer.code, answer.out) == (1, "")
    assert "warning: dockerfile: ./Dockerfile is not there" in answer.err
    assert "source: src/custom_env.py:1: " in answer.err
    assert "hint: 'aenv validate' says more" in answer.err
    (my_env / "config.json").write_text('{"name": "my-env", "version": 1}')
    answer = aenv("push", "my-env", "--dry-run")
    assert (answer.code, answer.out) == (3, "")
    assert "config.json:1: version must" in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["pull", "../up"], 1, "not an environment name"),
        (["pull", "a@1.0.0", "-v", "2.0.0"], 2, "are two versions"),
        (["get", "a@one"], 1, "'one' in 'a@one' is not a version"),
        (["yank", "a", "--reason", "x"], 1, "say which version to yank"),
        (["yank", "a@^1.0", "--reason", "x"], 1, "say which version to yank"),
        (["yank", "a@1.0.0"], 2, "--reason"),
        (["delete", "a", "-y"], 1, "say which version to delete"),
        (["release", "a@latest"], 1, "say which version to release"),
        (["release"], 3, "there is no config.json"),
        (["list", "--limit", "1001"], 2, "--limit"),
        (["list", "--offset", "-1"], 2, "--offset"),
        (["list", "--system-url", "ftp://x"], 1, "is not an address"),
    ],
)
def test_what_is_refused_before_anybody_is_asked(aenv, arguments, code, said):
    answer = aenv(*arguments)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_a_deletion_that_nobody_confirms(aenv, nobody, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    answer = aenv("delete", "a@1.0.0", "--hub-url", nobody)
    assert (answer.code, answer.out) == (2, "")
    assert "give --yes" in answer.err
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    answer = aenv("delete", "a@1.0.0", "--hub-url", nobody)
    assert (answer.code, answer.out) == (1, "")
    assert "nothing was changed" in answer.err
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert "cannot be reached" in aenv("delete", "a@1.0.0", "--hub-url", nobody).err


@pytest.mark.parametrize("how", ["option", "variable", "system option", "config"])
def test_a_platform_that_is_not_there(aenv, nobody, monkeypatch, how):
    """Whichever way it was named, its address is in the message, and what to do."""
    options = []
    if how == "option":
        options = ["--hub-url", nobody]
    elif how == "system option":
        options = ["--system-url", nobody]
    elif how == "config":
        assert aenv("config", "set", "system_url", nobody).code == 0
    else:
        monkeypatch.setenv("AENV_HUB_URL", nobody)
        monkeypatch.setenv("AENV_SYSTEM_URL", "http://127.0.0.1:1")
    answer = aenv("list", *options)
    assert (answer.code, answer.out) == (1, "")
    assert f"error: the platform at {nobody} cannot be reached" in answer.err
    assert "hint: start one with 'aenv serve'" in answer.err
