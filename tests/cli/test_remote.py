"""The commands against a platform that ``aenv serve`` serves: an author's day, a user's day, and what goes wrong."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aenv import project
from tests.platform.support import PATIENCE, eventually
from tests.platform.support import platform as serving

AENV = (sys.executable, "-m", "aenv")
CODE = '''
import os, sys, time
from aenv import register_function, register_reward, register_setup, register_tool

MODE = os.environ.get("MODE")

@register_setup
def begin() -> None:
    print("hello from the setup", flush=True)
    if MODE == "unlucky":
        raise RuntimeError("no luck today")
    if MODE == "slow":
        time.sleep(3)
    if MODE == "stuck":
        time.sleep(600)

@register_tool
def mode() -> str:
    """The instance's mode."""
    return f"{MODE} {sys.argv[1:]}"

@register_reward
def score() -> float:
    return 1.0

@register_function
def reading() -> int:
    return 1
'''


def first_json(process):
    """The JSON object that a command prints when it is ready."""
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            return json.loads(text)
    raise AssertionError(f"it ended with {process.wait(PATIENCE)}, {text!r} and {process.stderr.read()}")


def ended(process, number=signal.SIGTERM):
    """Its exit code, and what it still said."""
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def platform():
    with serving() as found:
        yield found


def variables(platform):
    return {**platform.environment, "AENV_SYSTEM_URL": platform.control}


@pytest.fixture
def home(platform, monkeypatch):
    """The home of the platform's user, who has told the commands where it is."""
    monkeypatch.setenv("AENV_HOME", str(platform.home))
    monkeypatch.setenv("AENV_SYSTEM_URL", platform.control)
    for name in ("AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP", "AENV_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return platform.home


@pytest.fixture
def remote(aenv):
    """The command, and the end of every instance that a test left."""
    yield aenv
    left = aenv("instance", "list", "-o", "json").data["items"]
    if ids := [one["id"] for one in left if one["status"] in ("Pending", "Creating", "Running")]:
        aenv("instance", "delete", "-y", *ids)


@pytest.fixture
def my_env(here):
    """A project in ./NAME; tests on one hub give each a name of its own."""

    def make(name, code=CODE, **config):
        project.scaffold(name, here, force=True)
        project.write(project.read(here / name), config)
        (here / name / "src" / "custom_env.py").write_text(code)
        return here / name

    return make


def ok(answer):
    assert answer.code == 0, answer.err
    return answer


def refused(answer, *said):
    assert (answer.code, answer.out) == (1, ""), answer
    assert "unexpected" not in answer.err
    for text in said:
        assert text in answer.err
    return answer


# An author's day


def test_from_a_project_to_a_release_and_back(remote, here, my_env, platform, monkeypatch):
    root = my_env("journey", tags=["linux", "shell"], description="A day of an author.")
    pushed = ok(remote("push", "journey", "-o", "json")).data
    assert (pushed["name"], pushed["version"], pushed["tools"]) == ("journey", "1.0.0", ["mode"])
    assert pushed["digest"] == project.digest(project.pack(project.read(root))).removeprefix("sha256:")
    assert len(pushed["env"]["digest"]) == 64

    again = ok(remote("push", "journey"))
    assert "already, with the same content" in again.err
    (root / "README.md").write_text("changed")
    refused(remote("push", "journey"), "journey@1.0.0 is on the hub already, with other content", "--force")
    forced = ok(remote("push", "journey", "--force", "-o", "json")).data
    assert forced["digest"] != pushed["digest"]

    released = ok(remote("release", "journey", "-o", "json")).data
    assert (released["version"], released["status"], released["digest"]) == ("1.0.0", 7, forced["digest"])
    (root / "README.md").write_text("changed again")
    for force in ([], ["--force"]):
        refused(remote("push", "journey", *force), "journey@1.0.0 is released, and never changes again", "--version")
    ok(remote("push", "journey", "-v", "1.1.0"))
    assert project.read(root).version == "1.1.0"

    rows = ok(remote("versions", "journey")).out.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["1.1.0", "Ready"], ["1.0.0", "Released"]]
    assert ok(remote("get", "journey", "-v", "1.0.0", "-o", "json")).data["digest"] == forced["digest"]
    table = ok(remote("get", "journey@^1.0")).out
    assert "A day of an author." in table
    assert "mode  The instance's mode." in table

    built = [{"id": f"sha256:{'0' * 64}", "type": "image", "content": "reg.example.com/x:1", "platform": "linux/arm64"}]
    project.write(project.read(root), {"artifacts": built})
    ok(remote("push", "journey", "-v", "1.2.0"))
    assert ok(remote("get", "journey@1.2.0", "-o", "json")).data["artifacts"] == built
    assert f"reg.example.com/x:1  linux/arm64  sha256:{'0' * 64}" in ok(remote("get", "journey@1.2.0")).out
    ok(remote("delete", "journey@1.2.0", "--yes"))

    pulled = ok(remote("pull", "journey@1.0.0", "-o", "json")).data
    assert pulled["directory"] == str(platform.home / "envs" / "journey" / "1.0.0")
    assert (Path(pulled["directory"]) / "README.md").read_text() == "changed"
    assert "is there already" in ok(remote("pull", "journey@1.0.0")).err
    elsewhere = ok(remote("pull", "journey@1.0.0", "--to", "elsewhere", "-o", "json")).data
    assert project.read(here / "elsewhere").version == "1.0.0"
    assert elsewhere["digest"] == forced["digest"]
    (here / "elsewhere" / "mine.txt").write_text("mine")
    refused(remote("pull", "journey@1.0.0", "--to", "elsewhere"), "elsewhere is there already", "--force")
    assert (here / "elsewhere" / "mine.txt").read_text() == "mine"
    ok(remote("pull", "journey@1.0.0", "--to", "elsewhere", "--force"))
    assert not (here / "elsewhere" / "mine.txt").exists()
    assert sorted(path.name for path in here.iterdir()) == ["elsewhere", "journey"]

    author = ok(remote("token", "create", "--scope", "push", "--scope", "read", "-o", "json")).data
    monkeypatch.setenv("AENV_API_KEY", author["token"])
    refused(remote("delete", "journey@1.0.0", "--yes"), "journey@1.0.0 is released", "aenv yank")
    assert ok(remote("delete", "journey@1.1.0", "--yes", "-o", "json")).data == {"deleted": "journey@1.1.0"}
    yanked = ok(remote("yank", "journey@1.0.0", "--reason", "a test", "-o", "json")).data
    assert yanked["yanked"] == "a test"
    assert "was yanked: a test" in ok(remote("pull", "journey@1.0.0")).err
    refused(remote("pull", "journey"), "journey@1.0.0 was yanked: a test", "aenv pull journey@1.0.0")
    refused(remote("get", "jorney"), "journey")
    monkeypatch.delenv("AENV_API_KEY")


def test_a_list_in_pages(remote, my_env):
    for name, tags in (("page-a", ["pages", "first"]), ("page-b", ["pages"])):
        my_env(name, tags=tags)
        ok(remote("push", name))
    found = ok(remote("list", "--name", "page-", "--limit", "1", "-o", "json")).data
    assert (found["total"], len(found["items"])) == (2, 1)
    table = ok(remote("list", "--name", "page-", "-l", "1"))
    assert table.out.splitlines()[0].split()[:3] == ["NAME", "VERSION", "STATUS"]
    assert "1 to 1 of 2; --offset 1 goes on" in table.err
    names = {one["name"] for one in remote("list", "--tags", "pages,first", "-o", "json").data["items"]}
    assert names == {"page-a"}
    assert remote("list", "--tool", "mode", "--name", "page-", "--offset", "1", "-o", "json").data["total"] == 2
    assert ok(remote("list", "--tool", "no-such-tool", "-o", "json")).data["items"] == []


def test_who_may_see_it(remote, my_env):
    my_env("guarded")
    ok(remote("push", "guarded"))
    assert ok(remote("access", "guarded", "-o", "json")).data["public"] is True
    changed = ok(
        remote("access", "guarded", "--private", "--add-reader", "ann", "--add-reader", "ben", "--add-writer", "cat")
    )
    assert ["public", "no"] in [row.split() for row in changed.out.splitlines()]
    policy = ok(remote("access", "guarded", "--remove-reader", "ann", "-o", "json")).data
    assert (policy["readers"], policy["writers"], policy["public"]) == (["ben"], ["cat"], False)


def test_a_project_that_the_hub_cannot_read(remote, my_env):
    my_env("broken", "raise RuntimeError('out of luck')")
    refused(remote("push", "broken"), "out of luck")


# A user's day


@pytest.fixture(scope="module")
def pushed(platform, tmp_path_factory):
    """An environment on the hub, for tests of instances."""
    folder = tmp_path_factory.mktemp("pushed")
    project.scaffold("subject", folder)
    (folder / "subject" / "src" / "custom_env.py").write_text(CODE)
    done = subprocess.run(
        [*AENV, "push", "subject"],
        cwd=folder,
        env=variables(platform),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return "subject"


def test_an_instance_from_outside(remote, platform, pushed):
    options = ("-e", "MODE=fast", "-a=--verbose", "-a", "x", "--label", "team=a", "--ttl", "1h")
    made = ok(remote("instance", "create", pushed, *options, "--keep-alive", "-o", "json")).data
    id = made["id"]
    assert (made["status"], made["env"]["name"], made["labels"]) == ("Running", pushed, {"team": "a"})
    assert made["mcp"].startswith(made["url"] + "/mcp?token=")

    listed = ok(remote("instance", "list", "-n", pushed, "--label", "team=a", "-o", "json")).data["items"]
    assert id in [one["id"] for one in listed]
    assert all(one["owner_token"] == one["agent_token"] == "" for one in listed)
    assert ok(remote("instance", "list", "--label", "team=b", "-o", "json")).data["items"] == []
    for status, there in (("running", True), ("failed", False)):
        found = ok(remote("instance", "list", "--status", status, "--label", "team=a", "-o", "json")).data["items"]
        assert (id in [one["id"] for one in found]) is there
        assert {one["status"].lower() for one in found} <= {status}
    assert id in ok(remote("instance", "list")).out
    got = ok(remote("instance", "get", id)).out
    assert ["status", "Running"] in [row.split() for row in got.splitlines()]
    assert made["owner_token"] not in got

    done = remote("instance", "exec", id, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.code, done.out, done.err) == (7, "out\n", "err\n")
    assert remote("instance", "exec", id, "--", "echo $MODE | tr a-z A-Z").out == "FAST\n"
    shown = remote("instance", "exec", id, "-o", "json", "--", "kill -9 $$")
    assert (shown.code, shown.data["returncode"]) == (137, -9)
    slow = remote("instance", "exec", id, "--timeout", "0.2", "--", "sleep", "60")
    assert slow.code == 124
    assert "its 0.2 s were over" in slow.err

    following = subprocess.Popen(
        [*AENV, "instance", "logs", id, "--follow", "-o", "json"],
        env=variables(platform),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "hello from the setup" in [json.loads(following.stdout.readline())["line"]]
    assert "hello from the setup" in ok(remote("instance", "logs", id)).out
    lines = ok(remote("instance", "logs", id, "--tail", "1", "-o", "json")).data["lines"]
    assert len(lines) == 1
    before = got.split("ends")[1].split()[0]
    assert ok(remote("instance", "extend", id, "2h", "-o", "json")).data["expires_at"] > before
    assert ok(remote("instance", "expose", id, "3000", "-o", "json")).data["url"].startswith("http")

    assert ok(remote("instance", "delete", id, "-y", "-o", "json")).data == {"deleted": [id]}
    assert following.communicate(timeout=PATIENCE)[1] == ""
    assert following.returncode == 0
    refused(remote("instance", "exec", id, "--", "ls"))
    refused(remote("instance", "delete", "no-such-instance", "-y"), "no-such-instance")
    both = remote("instance", "delete", "no-such-instance", "nor-this-one", "-y")
    assert (both.code, "nor-this-one: " in both.err) == (1, True)


def test_the_project_here_is_what_is_meant(remote, here, pushed, monkeypatch):
    (here / "config.json").write_text(json.dumps({"name": pushed, "version": "1.0.0"}))
    made = ok(remote("instance", "create", "--keep-alive", "-o", "json")).data
    assert made["env"]["id"] == f"{pushed}@1.0.0"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_instance_ends_with_its_command(remote, platform, pushed, number):
    process = subprocess.Popen(
        [*AENV, "instance", "create", f"{pushed}@1.0.0", "--ttl", "1h", "-o", "json"],
        env=variables(platform),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    made = first_json(process)
    assert ok(remote("instance", "get", made["id"], "-o", "json")).data["status"] == "Running"
    code, out, err = ended(process, number)
    assert (code, out) == (0, "")
    assert err == f"it runs until Ctrl-C, or until its time is over\nended {made['id']}\n"
    listed = remote("instance", "list", "-n", pushed, "-o", "json").data["items"]
    assert made["id"] not in [one["id"] for one in listed if one["status"] == "Running"]


def test_an_instance_whose_time_is_over_ends_its_command(remote, platform, pushed):
    process = subprocess.Popen(
        [*AENV, "instance", "create", pushed, "-o", "json"],
        env=variables(platform),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    id = first_json(process)["id"]
    ok(remote("instance", "extend", id, "1s"))
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "")
    assert f"\n{id} ended: " in err


def test_a_start_that_is_interrupted_leaves_nothing(remote, platform, pushed):
    process = subprocess.Popen(
        [*AENV, "instance", "create", pushed, "-e", "MODE=stuck", "--label", "which=interrupted"],
        env=variables(platform),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def living():
        found = remote("instance", "list", "--label", "which=interrupted", "-o", "json").data["items"]
        return [one["id"] for one in found if one["status"] in ("Pending", "Creating", "Running")]

    [id] = eventually("an instance", living)
    code, out, err = ended(process, signal.SIGINT)
    assert (code, out) == (130, "")
    assert f"ended {id}\n" in err
    assert err.endswith("error: interrupted\n")
    assert living() == []


def test_a_start_that_fails_and_one_that_takes_long(remote, pushed, monkeypatch):
    monkeypatch.setattr("aenv.cli.foreground.PATIENCE", (1, 1))
    refused(remote("instance", "create", pushed, "-e", "MODE=unlucky"), "no luck today")
    made = ok(remote("instance", "create", pushed, "-e", "MODE=slow", "--keep-alive", "-o", "json"))
    assert f"waiting for {made.data['id']}: " in made.err
    refused(remote("instance", "create", f"{pushed}@2.0.0"), pushed)
    refused(remote("instance", "create", "unheard-of"), "unheard-of")


# Who is let in


def test_a_wrong_token_and_a_token_for_less(remote, monkeypatch, pushed):
    made = ok(remote("token", "create", "--name", "reader", "--scope", "read", "-o", "json")).data
    monkeypatch.setenv("AENV_API_KEY", made["token"])
    ok(remote("get", pushed))
    refused(remote("instance", "create", pushed), "hint: ")
    monkeypatch.setenv("AENV_API_KEY", "aenv_wrong")
    refused(remote("list"), "hint: ")
    assert "aenv_wrong" not in remote("list").err
    monkeypatch.delenv("AENV_API_KEY")


def test_a_doctor_looks_at_the_platform(remote, platform, monkeypatch):
    monkeypatch.setenv("PATH", "")
    rows = {row["check"]: row for row in remote("doctor", "-o", "json").data["checks"]}
    assert rows["remote"]["status"] == "ok", rows["remote"]
    assert platform.control in rows["remote"]["detail"]
    monkeypatch.setenv("AENV_API_KEY", "aenv_wrong")
    rows = {row["check"]: row for row in remote("doctor", "-o", "json").data["checks"]}
    assert rows["remote"]["status"] == "fail"
    monkeypatch.delenv("AENV_API_KEY")
