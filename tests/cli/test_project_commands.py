"""``aenv init``, ``run``, ``test`` and ``validate`` on real projects, with real sandboxes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from aenv import project

TOOL = 'from aenv import register_tool\n\n@register_tool\ndef hello() -> str:\n    """Greet."""\n    return "hello"\n'
REWARD = "\nfrom aenv import register_reward\n\n@register_reward\ndef score() -> float:\n    return 1.0\n"


@pytest.fixture
def demo(here):
    """A project in ./demo; call it with the code of its one module."""

    def make(code=TOOL + REWARD, **config):
        project.scaffold("demo", here, force=True)
        project.write(project.read(here / "demo"), config)
        (here / "demo" / "src" / "custom_env.py").write_text(code)
        return here / "demo"

    return make


# init


def test_init_says_what_to_do_next(aenv, here):
    answer = aenv("init", "my-env")
    assert (answer.code, answer.out) == (0, "")
    assert "cd my-env" in answer.err
    assert "aenv run" in answer.err
    assert project.read(here / "my-env").version == "1.0.0"


def test_init_as_json_elsewhere(aenv, tmp_path):
    answer = aenv("init", "my-env", "-v", "2.1.0", "-t", "terminal", "-w", tmp_path / "new", "--output", "json")
    assert answer.data["directory"] == str(tmp_path / "new" / "my-env")
    assert (answer.data["name"], answer.data["version"]) == ("my-env", "2.1.0")
    assert {"config.json", "src/custom_env.py"} <= set(answer.data["files"])
    assert "execute_command" in (tmp_path / "new" / "my-env" / "src" / "custom_env.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["../up"], "not a usable name"),
        (["a", "-v", "one"], "not a semantic version"),
        (["a", "-t", "nope"], "no template 'nope'"),
        (["full"], "full is not empty"),
    ],
)
def test_init_refuses(aenv, here, arguments, message):
    (here / "full").mkdir()
    (here / "full" / "mine.txt").write_text("")
    answer = aenv("init", *arguments)
    assert (answer.code, answer.out) == (1, "")
    assert message in answer.err
    assert os.listdir(here) == ["full"]


def test_init_config_only_and_force(aenv, here):
    assert aenv("init", "a", "--config-only").code == 0
    assert os.listdir(here / "a") == ["config.json"]
    assert aenv("init", "a").code == 1
    assert aenv("init", "a", "--force").code == 0
    assert (here / "a" / "Dockerfile").is_file()


@pytest.mark.parametrize("template", project.TEMPLATES)
def test_the_tests_of_a_new_project_pass(tmp_path, template):
    project.scaffold("my-env", tmp_path, template=template)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "my-env",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# run


@contextmanager
def running(root, *arguments, path=None, control=("--no-control",)):
    """``aenv run -o json`` in ``root``: its process and what it said when it was ready. Ended by SIGINT."""
    process = subprocess.Popen(
        [Path(sys.executable).parent / "aenv", "run", "--port", "0", *control, "-o", "json", *arguments],
        cwd=root,
        env={**os.environ, "PATH": path or os.environ["PATH"], "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        text = ""
        while not text.endswith("}\n") and (line := process.stdout.readline()):
            text += line
        assert text, process.stderr.read()
        yield process, json.loads(text)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stdout.close()
        process.stderr.close()


def ended(pid):
    """Whether a process is over; one that nobody has collected yet is."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
    return False


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_run_serves_and_ends_well(demo):
    root = demo(
        TOOL.replace('"hello"\n', "f\"{os.environ['GREETING']} {sys.argv[1:]}\"\n").replace(
            "from", "import os, sys\nfrom", 1
        ),
        deployConfig={"environmentVariables": {"GREETING": "good day"}},
    )
    with running(root, "--quiet", "--", "--verbose", "x") as (process, served):
        assert (served["name"], served["tools"], served["rewards"]) == ("demo", ["hello"], [])
        assert served["mcp"] == served["url"] + "/mcp"
        assert served["openenv"] == served["url"] + "/openenv"
        assert ask(served["url"] + "/health")["success"] is True
        assert "good day ['--verbose', 'x']" in json.dumps(ask(served["url"] + "/tools/hello", {}))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")
    assert f"export DUMMY_INSTANCE_IP=http://localhost:{served['url'].rpartition(':')[2]}\n" in err
    assert "Traceback" not in err
    assert "inspector" not in err


def test_run_opens_the_inspector_and_ends_it(demo, tmp_path):
    binaries = tmp_path / "bin"
    binaries.mkdir()
    child = tmp_path / "child"
    (binaries / "node").write_text("#!/bin/sh\necho v24.0.0\n")
    (binaries / "npx").write_text(
        f'#!/bin/sh\n/bin/sleep 600 &\necho "$! $CLIENT_PORT $*" > {child}.new\nmv {child}.new {child}\nwait\n'
    )
    for file in binaries.iterdir():
        file.chmod(0o755)
    with running(demo(), "--inspector-port", "7001", path=f"{binaries}:{os.environ['PATH']}") as (process, served):
        said = ""
        while "npx downloads it" not in said:
            said += process.stderr.readline()
        os.set_blocking(process.stderr.fileno(), False)
        while not child.exists():
            assert process.poll() is None
        pid, port, arguments = child.read_text().strip().split(" ", 2)
        assert port == "7001"
        url = f"http://localhost:{served['url'].rpartition(':')[2]}/mcp"
        assert arguments == f"--yes @modelcontextprotocol/inspector --transport http --server-url {url}"
    assert ended(int(pid))


def test_run_goes_on_without_node(demo, tmp_path):
    with running(demo(), path=str(tmp_path / "none")) as (process, served):
        assert ask(served["url"] + "/health")["success"] is True
        process.send_signal(signal.SIGINT)
        assert "no inspector: the MCP inspector needs Node" in process.communicate(timeout=30)[1]


def test_a_closed_terminal_ends_the_sandbox_in_good_order(demo):
    with running(demo(), "--quiet") as (process, _):
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_run_without_a_project_or_with_a_broken_one(aenv, demo):
    answer = aenv("run", "--quiet")
    assert (answer.code, answer.out) == (3, "")
    assert "aenv init" in answer.err
    demo(TOOL + "\nimport not_there\n")
    answer = aenv("run", "--quiet", "-w", "demo", "--port", "0")
    assert (answer.code, answer.out) == (1, "")
    assert "No module named 'not_there'" in answer.err
    assert answer.err.count("Traceback") == 1


# test


def test_test_runs_the_projects_tests_against_a_sandbox(aenv, demo):
    root = demo()
    (root / "test" / "test_custom_env.py").write_text(
        "from aenv import Environment\n\n"
        "def test_live():\n"
        '    with Environment.sync("demo") as env:\n'
        '        assert env.call_tool("hello", {}).text == "hello"\n'
    )
    answer = aenv("test", "-w", "demo", "-o", "json")
    assert (answer.code, answer.data["passed"], answer.data["exit_code"]) == (0, True, 0)
    assert "1 passed" in answer.err


def test_test_fails_when_they_fail(aenv, demo):
    root = demo()
    (root / "test" / "test_custom_env.py").write_text("def test_no():\n    assert False\n")
    answer = aenv("test", "-w", "demo")
    assert answer.code == 1
    assert "the tests failed: exit code 1" in answer.err
    (root / "test" / "test_custom_env.py").write_text("")
    assert "the tests failed: no test was found" in aenv("test", "-w", "demo").err


def test_test_runs_the_authors_own_script(aenv, demo):
    demo(testConfig={"script": 'echo "at $DUMMY_INSTANCE_IP in $(basename $PWD)"; exit 7'})
    answer = aenv("test", "-w", "demo", "-o", "json")
    assert (answer.code, answer.data["exit_code"]) == (1, 7)
    assert re.search(r"at http://127\.0\.0\.1:\d+ in demo", answer.err)


def test_test_without_tests_or_pytest(aenv, demo, monkeypatch):
    root = demo()
    monkeypatch.setattr("aenv.cli.project.find_spec", lambda name: None)
    answer = aenv("test", "-w", "demo")
    assert answer.code == 1
    assert "hint: pip install pytest" in answer.err
    for file in (root / "test").iterdir():
        file.unlink()
    (root / "test").rmdir()
    assert "has no tests" in aenv("test", "-w", "demo").err


def test_test_of_a_project_that_does_not_start(aenv, demo):
    demo("raise RuntimeError('out of luck')")
    answer = aenv("test", "-w", "demo", "-o", "json")
    assert (answer.code, answer.out) == (1, "")
    assert "RuntimeError: out of luck" in answer.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_test_that_is_ended_leaves_nothing_behind(demo, number):
    root = demo(testConfig={"script": "echo $$; exec sleep 600"})
    process = subprocess.Popen(
        [Path(sys.executable).parent / "aenv", "test"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    script = int(process.stdout.readline())
    sandbox = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(sandbox) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.rstrip().endswith("error: interrupted")
    assert all(ended(pid) for pid in [script, *sandbox])


# validate


def rows(answer, *statuses):
    return {row["check"]: row for row in answer.data["checks"] if row["status"] in statuses}


@pytest.mark.parametrize("template", project.TEMPLATES)
def test_a_new_project_is_valid(aenv, here, template):
    project.scaffold("demo", here, template=template)
    answer = aenv("validate", "-w", "demo", "-o", "json")
    assert answer.code == 0, answer
    assert rows(answer, "warn", "fail") == {}
    assert {"config", "start", "health", "tools", "schemas", "reward"} <= set(rows(answer, "ok"))


def test_every_mistake_in_the_config_is_a_row(aenv, demo):
    root = demo()
    (root / "config.json").write_text('{"name": "demo",\n "version": "1",\n "tags": 3}')
    answer = aenv("validate", "-w", "demo", "-o", "json")
    assert answer.code == 1
    details = [row["detail"] for row in answer.data["checks"]]
    assert [detail.split(" must")[0] for detail in details] == [
        "demo/config.json:2: version",
        "demo/config.json:3: tags",
    ]
    assert all(row["fix"] for row in answer.data["checks"])


def test_static_mistakes(aenv, demo):
    root = demo("def broken(:\n")
    (root / "requirements.txt").write_text("numpy>=1\n# fine\n-r other.txt\nnot a requirement\n\nx==\n")
    (root / "Dockerfile").unlink()
    (root / "out").symlink_to("/etc/hostname")
    answer = aenv("validate", "-w", "demo", "-o", "json")
    assert answer.code == 1
    failed = rows(answer, "fail")
    assert set(failed) == {"source", "requirements", "package"}
    assert failed["source"]["detail"].startswith("src/custom_env.py:1: ")
    assert failed["requirements"]["detail"] == "requirements.txt:4: not a requirement\nrequirements.txt:6: x=="
    assert set(rows(answer, "warn")) == {"dockerfile"}
    assert "start" not in rows(answer, "ok", "warn", "fail")


@pytest.mark.parametrize(
    "line",
    [
        *("numpy", "numpy >= 1.0, <2", "uvicorn[standard]>=0.3 # why", "a~=1.0; python_version < '3.12'"),
        *("pkg @ https://example.org/a.whl", "git+https://example.org/a.git", "./local", "a==1.0 --hash=sha256:00"),
    ],
)
def test_requirements_that_pip_takes(aenv, demo, line):
    (demo("def broken(:") / "requirements.txt").write_text(line + "\n")
    assert "requirements" in rows(aenv("validate", "-w", "demo", "-o", "json"), "ok")


def test_requirements_that_come_alone_are_read_too(aenv, demo):
    (demo("def broken(:") / "requirements-no-deps.txt").write_text("numpy\nx==\n")
    failed = rows(aenv("validate", "-w", "demo", "-o", "json"), "fail")
    assert failed["requirements"]["detail"] == "requirements-no-deps.txt:2: x=="


def test_live_mistakes(aenv, demo):
    demo(TOOL.replace('    """Greet."""\n', ""))
    answer = aenv("validate", "-w", "demo", "-o", "json")
    assert answer.code == 0
    assert set(rows(answer, "warn")) == {"tools", "reward"}
    assert "hello" in rows(answer, "warn")["tools"]["detail"]
    demo(TOOL + TOOL)
    answer = aenv("validate", "-w", "demo", "-o", "json")
    assert answer.code == 1
    assert "'hello' is registered twice" in rows(answer, "fail")["start"]["detail"]


def test_a_project_that_prints_leaves_the_json_pure(aenv, demo):
    root = demo("print('talk')\n" + TOOL + REWARD)
    assert aenv("validate", "-w", "demo", "-o", "json").data["ok"] is True
    with running(root, "--quiet") as (process, served):
        assert served["tools"] == ["hello"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (out, "talk" in err) == ("", True)
