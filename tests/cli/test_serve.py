"""``aenv serve`` and the control plane of ``aenv run``, as processes."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from aenv import project
from aenv.auth.tokens import new_token
from tests.platform.support import PATIENCE, Platform, eventually, new_home, platform

AENV = (sys.executable, "-m", "aenv")


@pytest.fixture
def taken():
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield str(listening.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["everything"], 2, "'everything' is not one of 'all', 'hub', 'api'"),
        (["--legacy-data-plane", "--host", "0.0.0.0"], 2, "--legacy-data-plane-beyond-loopback"),
        (["--legacy-data-plane-beyond-loopback"], 2, "adds to --legacy-data-plane"),
        (["api"], 1, "an API service needs a hub"),
        (["hub", "--hub-url", "http://x"], 1, "only an API service asks another hub"),
        (["--engine", "proces", "--port", "0", "--data-port", "0"], 1, "did you mean 'process'?"),
        (["--store", "postgres:x", "--port", "0", "--data-port", "0"], 1, "there is no store 'postgres'"),
        (["--port", "70000"], 2, "70000 is not in the range"),
    ],
)
def test_what_is_not_served(aenv, arguments, code, said):
    answer = aenv("serve", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_the_engine_is_that_of_the_option_or_of_the_settings(aenv, tmp_path, monkeypatch):
    monkeypatch.setenv("AENV_DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    ports = ("--port", "0", "--data-port", "0")
    monkeypatch.setenv("AENV_ENGINE", "proces")
    answers = [aenv("serve", *ports), aenv("serve", "--engine", "docker", *ports)]
    monkeypatch.setenv("AENV_ENGINE", "docker")
    answers.append(aenv("serve", *ports))
    assert [(answer.code, answer.out) for answer in answers] == [(1, "")] * 3
    assert "did you mean 'process'?" in answers[0].err
    for answer in answers[1:]:
        assert "neither Docker nor Podman answers" in answer.err
        assert f"{tmp_path}/no.sock" in answer.err
        assert "hint: start Docker or Podman, or set AENV_DOCKER_HOST" in answer.err


def test_a_port_that_is_taken(aenv, taken):
    answer = aenv("serve", "--port", taken)
    assert (answer.code, answer.out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{taken}" in answer.err
    answer = aenv("serve", "--port", "0", "--data-port", taken)
    assert (answer.code, "--data-port" in answer.err) == (1, True)


def test_beyond_this_machine_the_first_token_is_shown_once():
    with platform("hub", "--host", "0.0.0.0", AENV_ISOLATION="none") as served:
        assert (served.told["what"], served.told["data_url"], served.told["token_file"]) == ("hub", None, None)
        first = served.token
        assert first
        listed = served.aenv("list", "-o", "json", AENV_API_KEY=first)
        assert "items" in json.loads(listed.stdout)
        refused = served.aenv("list", check=False)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert served.stop() == 0
        served.start()
        assert served.told["first_token"] is None
        served.stop()
        assert "the hub is ready: control " in served.text
        assert first not in served.text


def test_the_operator_may_bring_the_first_token_and_name_the_store(tmp_path):
    given = new_token()
    variables = {"AENV_FIRST_TOKEN": given, "AENV_STORE": f"sqlite:{tmp_path}/records.db"}
    with platform("hub", "--host", "0.0.0.0", AENV_ISOLATION="none", **variables) as served:
        assert served.told["first_token"] is None
        assert "items" in json.loads(served.aenv("list", "-o", "json", AENV_API_KEY=given).stdout)
        assert served.stop() == 0
        assert given not in served.text
    assert (tmp_path / "records.db").is_file()


@contextmanager
def running(root, home, *arguments):
    """``aenv run -o json``: its process, and what it said when it was ready."""
    process = subprocess.Popen(
        [*AENV, "run", "--quiet", "--port", "0", "-o", "json", *arguments],
        cwd=root,
        env={**home.environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        text = ""
        for line in process.stdout:
            text += line
            if line == "}\n":
                break
        assert text, process.stderr.read()
        yield process, json.loads(text)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


def answers(url):
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


@pytest.fixture
def user():
    """Somebody with a home of their own, and no platform."""
    with new_home() as home:
        yield Platform(home)


def test_the_control_plane_of_run(here, user):
    """Programs that find their platform with AENV_SYSTEM_URL get instances of the project as it is then."""
    project.scaffold("demo", here)
    source = here / "demo" / "src" / "custom_env.py"
    source.write_text("from aenv import register_tool\n\n@register_tool\ndef hello() -> str:\n    return 'one'\n")
    script = (
        "from aenv import Environment\n"
        "with Environment.sync('demo') as env:\n"
        "    print(env.call_tool('hello', {}).text, len(env.list_tools()))\n"
    )
    with running(here / "demo", user, "--control-port", "0") as (process, told):
        user.control = told["control"]
        assert user.run(script) == "one 1\n"
        source.write_text(source.read_text().replace("one", "another"))
        assert user.run(script) == "another 1\n"
        made = json.loads(user.aenv("instance", "create", "demo", "--keep-alive", "-o", "json").stdout)
        assert made["env"]["id"] == "demo@1.0.0"
        assert "only the one of this directory" in user.aenv("instance", "create", "other", check=False).stderr
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 0
    assert f"export AENV_SYSTEM_URL={told['control'].replace('127.0.0.1', 'localhost')}\n" in err
    assert not answers(told["control"])


def test_the_control_plane_ends_with_a_run_that_is_killed(here, user):
    project.scaffold("demo", here)
    with running(here / "demo", user, "--control-port", "0") as (process, told):
        process.kill()
        eventually("the end of the control plane", lambda: not answers(told["control"]))


def test_run_goes_on_without_a_control_plane(aenv, here, user, taken, monkeypatch):
    project.scaffold("demo", here)
    answer = aenv("run", "-w", "demo", "--quiet", "--port", "0", "--control-port", taken)
    assert (answer.code, answer.out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{taken}" in answer.err
    with running(here / "demo", user, "--no-control") as (_, told):
        assert told["control"] is None
