"""The commands and programs of the documents that existing users follow, against ``aenv serve``.

They are in ``tests/seeds``, as they stand: what an author writes in ``guide`` (the SDK guide) and ``concepts`` (the
other pages), and what a user writes in ``programs``. ``tests/test_seeds.py`` runs what needs no platform; what it says
of the guide's own gaps holds here, too. Beyond that, the documents are changed in this, and in nothing else:

- Lost indentation is restored. ``async with`` and ``await`` that stand alone are put into a function, which is run;
  ``asyncio`` and, once, ``Environment`` are imported. Where a program prints nothing, it is made to print what it got.
- ``http://aenv-service/``, ``http://service`` and ``http://localhost:8080`` stand for the platform's address,
  ``your-api-key`` for a token, ``/data/workspace`` and ``/path/to/dataset`` for directories, and ``instance-id`` for
  the id that was shown; so does ``service-id``.
- ``analyze``, which seed 003 calls and does not show, and ``given``, which tells what an instance was given, are ours:
  ``concepts/src/ours.py``. "data-analysis-env", "swe-env" and "my-env" are this one project under three names;
  "my-python-env" and "safe-env" are the guide's. "myenv" and "myapp" are what ``aenv init`` writes.
- A terminal confirms ``aenv instance delete`` and ``aenv service delete``; here, a "y" on stdin does. ``aenv run
  --quiet`` gets free ports.
- The quick example of seed 004 registers its tool and uses it in one program. With a platform, its environment is one
  that was pushed; the tool is the same.
- Two containers are for engines that run images, which are not of this platform yet: the configuration is pushed and
  kept, and instances of it are refused by name. So is a data source that is an image. ``aenv build`` is
  a command to come (see ``COMMANDS``).
"""

from __future__ import annotations

import asyncio
import json
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aenv import Environment, Invalid, Unsupported
from aenv.client.hub import HubClient
from aenv.project import archive, read
from aenv.wire import EnvRequest
from tests.platform.support import PATIENCE, Platform, Program, platform

SEEDS = Path(__file__).parent.parent / "seeds"
PROGRAMS = SEEDS / "programs"
IMAGES = "images are not built yet"
COMMANDS = {
    "aenv init": "",
    "aenv push my-env": "",
    "aenv run --quiet": "",
    "aenv instance create myenv@1.0.0 --ttl 1h": "",
    "aenv instance list": "",
    "aenv instance delete instance-id": "",
    "aenv service create myapp@1.0.0 --replicas 3": "",
    "aenv service create myapp@1.0.0 --enable-storage": "",
    "aenv service list": "",
    "aenv service update service-id --replicas 5": "",
    "aenv service delete service-id": "",
    "aenv service create": "",
    "aenv build": IMAGES,
}
"""Every command line in seeds 000, 002 and 003, and why it is not run, if it is not."""
DEFAULT = {
    "name": "aenv",
    "version": "1.0.0",
    "tags": ["linux"],
    "status": "Ready",
    "codeUrl": "",
    "artifacts": [],
    "buildConfig": {"dockerfile": "./Dockerfile", "context": "."},
    "testConfig": {"script": ""},
    "deployConfig": {
        "cpu": "1",
        "memory": "2Gi",
        "os": "linux",
        "ephemeralStorage": "5Gi",
        "environmentVariables": {},
        "service": {
            "replicas": 1,
            "port": 8081,
            "enableStorage": False,
            "storageName": "aenv",
            "storageSize": "10Gi",
            "mountPath": "/home/admin/data",
        },
    },
}
"""The ``config.json`` that seed 003 shows first."""
EXTENDED = {
    "cpu": "2",
    "memory": "4Gi",
    "os": "linux",
    "ephemeralStorage": "5Gi",
    "imagePrefix": "registry.example.com/envs",
    "podTemplate": "Default",
    "environmentVariables": {"MODEL_PATH": "/models/llm"},
    "service": {
        "replicas": 1,
        "port": 8081,
        "enableStorage": False,
        "storageName": "my-env",
        "storageSize": "10Gi",
        "mountPath": "/home/admin/data",
    },
}
FRAGMENTS: dict[str, dict[str, Any]] = {
    "1.0.0": {
        "artifacts": [{"id": "", "type": "image", "content": "reg.example.com/faas-swe/image:search-1.0.0-v3"}],
        "buildConfig": {
            "dockerfile": "./Dockerfile",
            "context": ".",
            "image_name": "helloworld",
            "image_tag": "latest",
        },
    },
    "1.1.0": {"deployConfig": DEFAULT["deployConfig"]},
    "1.2.0": {"deployConfig": EXTENDED},
    "1.3.0": {"deployConfig": {"cpuRequest": "1", "cpuLimit": "2", "memoryRequest": "1Gi", "memoryLimit": "2Gi"}},
    "1.4.0": {"deployConfig": {"podTemplate": "DualContainer", "imagePrefix": "registry.example.com/envs"}},
    "1.5.0": {"deployConfig": {"ttl": "2h"}},
}
"""Pieces of ``config.json`` that seeds 001 and 003 show."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that the operator lets instances have."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("workspace", "dataset"):
        (folder / name).mkdir()
        (folder / name / f"{name}.txt").touch()
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the author's projects are."""
    folder = tmp_path_factory.mktemp("work")
    for name, source in (
        ("my-env", "concepts"),
        ("swe-env", "concepts"),
        ("data-analysis-env", "concepts"),
        ("my-python-env", "guide"),
        ("safe-env", "guide"),
    ):
        shutil.copytree(SEEDS / source, folder / name)
        configure(folder / name, name=name)
    return folder


def configure(project: Path, **changes: Any) -> None:
    config = json.loads((project / "config.json").read_text())
    (project / "config.json").write_text(json.dumps(config | changes))


async def push(served: Platform, project: Path) -> dict[str, Any]:
    """What ``aenv push`` asks for."""
    found = read(project)
    hub = HubClient(served.control, served.token)
    await hub.create(EnvRequest(name=found.name, version=found.version))
    await hub.upload(found.name, found.version, archive.pack(found))
    shown: dict[str, Any] = served.ask("GET", f"/env/{found.name}/{found.version}").data
    return shown


@pytest.fixture(scope="module")
def served(work: Path, data: Path) -> Iterator[Platform]:
    """A platform with the environments that the programs name."""

    async def pushed(served: Platform) -> None:
        await asyncio.gather(*(push(served, project) for project in work.iterdir()))

    with platform("--allow-datasource", str(data)) as served:
        asyncio.run(pushed(served))
        yield served


@pytest.fixture
def user(served: Platform, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The platform, whose user this process is."""
    for name in ("AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(served.home))
    monkeypatch.setenv("AENV_SYSTEM_URL", served.control)
    return served


def run(
    served: Platform,
    program: str,
    stdin: str = "",
    *,
    placeholders: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What one of the programs prints."""
    text = (PROGRAMS / program).read_text()
    for placeholder, value in (placeholders or {}).items():
        assert placeholder in text
        text = text.replace(placeholder, value)
    done = subprocess.run(
        [sys.executable, "-c", text],
        input=stdin,
        env={**served.environment, "AENV_SYSTEM_URL": served.control, **(variables or {})},
        cwd=served.home,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def newest(served: Platform, env: str) -> dict[str, Any]:
    """The instance that was made last of an environment."""
    found: dict[str, Any] = served.ask("GET", f"/env-instance/{env}/list?limit=1").data[0]
    return found


# Commands


class Terminal:
    """Somebody who types the documents' command lines, each of which must be among ``COMMANDS``."""

    def __init__(self, served: Platform, folder: Path) -> None:
        self._environment = {**served.environment, "AENV_SYSTEM_URL": served.control}
        self._folder = folder
        self.typed: set[str] = set()
        self._begun: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._begun:
            process.terminate()
            process.communicate(timeout=2 * PATIENCE)

    def begin(self, line: str, *more: str, here: str = ".", **placeholders: str) -> subprocess.Popen[str]:
        """A command that goes on."""
        assert COMMANDS[line] == ""
        self.typed.add(line)
        words = [placeholders.get(word.replace("-", "_"), word) for word in shlex.split(line)]
        assert words[0] == "aenv"
        process = subprocess.Popen(
            [sys.executable, "-m", "aenv", *words[1:], *more],
            env=self._environment,
            cwd=self._folder / here,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._begun.append(process)
        return process

    def type(self, line: str, *more: str, answer: str = "", here: str = ".", **placeholders: str) -> str:
        """What a command prints."""
        process = self.begin(line, *more, here=here, **placeholders)
        out, err = process.communicate(answer, timeout=2 * PATIENCE)
        assert process.returncode == 0, err
        return out


def test_every_command(served: Platform, tmp_path: Path) -> None:
    with Terminal(served, tmp_path) as terminal:
        terminal.type("aenv init", "myenv")
        written = json.loads((tmp_path / "myenv" / "config.json").read_text())
        assert written == json.loads(json.dumps(DEFAULT).replace('"aenv"', '"myenv"'))
        asyncio.run(push(served, tmp_path / "myenv"))
        shutil.copytree(SEEDS / "concepts", tmp_path / "my-env")
        configure(tmp_path / "my-env", version="1.1.0")  # the fixture's is there
        assert "my_tool" in terminal.type("aenv push my-env")

        creating = terminal.begin("aenv instance create myenv@1.0.0 --ttl 1h")
        rows = {}
        while "tools" not in rows:  # the last one
            what, _, value = Program(creating).line().partition(" ")
            assert what, creating.communicate()
            rows[what] = value.strip()
        assert (rows["env"], rows["status"]) == ("myenv@1.0.0", "Running")
        id = rows["id"]
        assert id in terminal.type("aenv instance list")
        assert newest(served, "myenv")["ttl"] == "3600s"
        terminal.type("aenv instance delete instance-id", answer="y\n", instance_id=id)
        _, said = creating.communicate(timeout=2 * PATIENCE)
        assert (creating.returncode, f"{id} ended" in said) == (0, True), said

        terminal.type("aenv init", "myapp")
        asyncio.run(push(served, tmp_path / "myapp"))
        terminal.type("aenv service create myapp@1.0.0 --replicas 3")
        [service] = served.ask("GET", "/env-service/myapp@1.0.0/list").data
        assert (service["status"], service["available_replicas"]) == ("Running", 3)
        assert service["id"] in terminal.type("aenv service list")
        terminal.type("aenv service update service-id --replicas 5", service_id=service["id"])
        assert served.ask("GET", f"/env-service/{service['id']}").data["available_replicas"] == 5
        terminal.type("aenv service delete service-id", answer="y\n", service_id=service["id"])
        assert "myapp@1.0.0" in terminal.type("aenv service create", here="myapp")
        stored = terminal.type("aenv service create myapp@1.0.0 --enable-storage", "--no-wait", "-o", "json")
        assert json.loads(stored)["pvc_name"] == "myapp"
        for left in served.ask("GET", "/env-service/myapp/list").data:
            served.aenv("service", "delete", left["id"], "-y")

        running = terminal.begin("aenv run --quiet", "--port=0", "--control-port=0", "-o", "json", here="my-env")
        text = ""
        while not text.endswith("}"):
            line = Program(running).line()
            assert line, running.communicate()
            text += line
        told = json.loads(text)
        for variable, url in (("DUMMY_INSTANCE_IP", told["url"]), ("AENV_SYSTEM_URL", told["control"])):
            assert "my-env/my_tool" in run(served, "usage.py", variables={"AENV_SYSTEM_URL": "", variable: url})
        assert terminal.typed == {line for line, reason in COMMANDS.items() if not reason}


# Programs


def test_usage(served: Platform) -> None:
    assert "'my-env/my_tool'" in run(served, "usage.py")
    assert newest(served, "my-env")["status"] == "Terminated"


def test_remote_mode(served: Platform) -> None:
    assert run(served, "remote_mode.py", placeholders={"http://aenv-service/": f"{served.control}/"}) == "True\n"
    assert newest(served, "mini-terminal@1.0.1")["status"] == "Terminated"


def test_the_interactive_terminal(served: Platform) -> None:
    out = run(served, "mini_terminal.py", "echo helloworld\nexit\n")
    assert out.startswith("Successfully obtained tool list: [{'name': 'mini-terminal@1.0.1/execute_command', 'desc")
    assert r"""'text': '{"output":["helloworld\\n",true],"returncode":0""" in out
    assert out.endswith("Exiting interactive mode\nEnvironment successfully released\n")
    ended = newest(served, "mini-terminal@1.0.1")
    assert (ended["status"], ended["ttl"]) == ("Terminated", "3600s")


def test_basic_and_recommended_usage(served: Platform) -> None:
    assert run(served, "basic_usage.py") == "Available tools: 4\n"
    assert run(served, "recommended_usage.py") == "[{'type': 'text', 'text': 'Hello from AEnvironment!\\n'}]\n"
    for name in ("my-python-env", "safe-env"):
        assert newest(served, name)["status"] == "Terminated"


def test_the_quick_example(served: Platform) -> None:
    assert "main.py" in run(served, "quick_example.py")


def test_the_life_of_an_instance(served: Platform) -> None:
    assert run(served, "lifecycle.py") == "{'DEBUG': 'true'}\n"
    assert newest(served, "my-env")["ttl"] == "3600s"
    assert run(served, "best_practices.py") == "analyzed sample\n"
    ended = newest(served, "my-env")
    assert (ended["status"], ended["ttl"]) == ("Terminated", "7200s")


# Snippets


async def test_the_concepts_tool_and_reward(user: Platform) -> None:
    async with Environment("my-env") as env:
        assert (await env.call_tool("my_tool", {"param1": "x"})).structured == {"result": "Processed x"}
        assert await env.call_reward({"code": "", "test_results": {"passed": True}}) == 1.0
        assert await env.call_reward({"code": "", "test_results": {"passed": False}}) == -0.5
    shown = user.ask("GET", "/env/my-env/1.0.0").data
    tool = next(tool for tool in shown["tools"] if tool["name"] == "my_tool")
    assert tool["description"].startswith("Tool description for LLMs.")
    assert tool["inputSchema"]["properties"]["param1"]["description"] == "Description of param1"
    assert [reward["name"] for reward in shown["rewards"]] == ["code_quality_reward"]


async def test_what_the_guide_registers(user: Platform) -> None:
    async with Environment("my-python-env") as env:
        assert (await env.call_tool("my_custom_echo_env", {"content": "hi"})).structured == {"result": "hi"}
        assert (await env.call_tool("search_users", {"params": {"query": "bob"}})).text == "Searching: bob"
        reward = await env.call_reward(
            {"code": "def hello(): return 'world'", "test_results": {"passed": 5, "failed": 0}}
        )
        assert reward["score"] == 0.8
        assert await env.call_function("custom_endpoint", {"data": {"a": 1}}) == {"status": "success", "data": {"a": 1}}
        assert (await env.check_health())["uptime"] == "Running normally"


async def test_tool_discovery_and_the_calling_example(user: Platform) -> None:
    async with Environment("mini-terminal@1.0.1") as env:
        [tool] = [tool for tool in await env.list_tools() if tool["name"] == "mini-terminal@1.0.1/execute_command"]
        assert tool["inputSchema"]["required"] == ["command"]
        result = await env.call_tool("mini-terminal@1.0.1/execute_command", {"command": "echo helloworld"})
        assert result.text.startswith('{"output":["helloworld\\n",true],"returncode":0')
        assert result.is_error is False


async def test_advanced_configuration(user: Platform, data: Path, tmp_path: Path) -> None:
    text = (PROGRAMS / "advanced_configuration.py").read_text()
    for placeholder, value in (
        ("http://localhost:8080", user.control),
        ("your-api-key", user.token),
        ("/data/workspace", str(data / "workspace")),
        ("/path/to/dataset", str(data / "dataset")),
    ):
        assert placeholder in text
        text = text.replace(placeholder, value)
    (tmp_path / "program.py").write_text(text)
    found = []
    for env in runpy.run_path(str(tmp_path / "program.py"))["made"]:
        async with env:
            found.append(((await env.call_tool("given")).structured, newest(user, env.env_name)["ttl"]))
    variables = {"PYTHONPATH": "/app", "MODEL_PATH": "/models/bert", "API_KEY": "sk-xxx"}
    full = {"variables": variables, "arguments": ["--verbose", "--gpu"], "data": ["workspace.txt"]}
    assert found[0] == (full, "7200s")
    assert found[1] == ({"variables": {}, "arguments": [], "data": ["dataset.txt"]}, "1800s")
    assert found[2][0]["variables"] == {"API_KEY": "secret-key", "DEBUG": "true", "LOG_LEVEL": "info"}
    assert found[3][0]["arguments"] == ["--config", "/app/config.yaml", "--verbose"]
    assert [ttl for _, ttl in found[4:]] == ["1800s", "7200s", "86400s"]


async def test_a_time_to_live_of_the_project_and_one_of_the_caller(user: Platform) -> None:
    """The guide's ``config.json`` says two hours; who makes an instance may say something else."""
    async with Environment("safe-env"):
        assert newest(user, "safe-env")["ttl"] == "7200s"
    async with Environment("safe-env", ttl="30m"):
        assert newest(user, "safe-env")["ttl"] == "1800s"


# Configuration


async def test_the_configuration_of_the_document_is_kept(user: Platform, tmp_path: Path) -> None:
    """As the document shows it first, and in each of its pieces."""
    assert user.ask("POST", "/env/", DEFAULT).data["deploy_config"] == DEFAULT["deployConfig"]
    for version, fragment in FRAGMENTS.items():
        made = user.ask("POST", "/env/", {"name": "pieces", "version": version, **fragment}).data
        for name, value in fragment.items():
            assert made[{"buildConfig": "build_config", "deployConfig": "deploy_config"}.get(name, name)] == value
    project = tmp_path / "extended"
    shutil.copytree(SEEDS / "concepts", project)
    configure(project, **{**DEFAULT, **FRAGMENTS["1.0.0"], "name": "extended", "deployConfig": EXTENDED})
    shown = await push(user, project)
    assert (shown["deploy_config"], shown["build_config"]["image_name"]) == (EXTENDED, "helloworld")
    async with Environment("extended") as env:
        assert (await env.call_tool("given")).structured["variables"] == {"MODEL_PATH": "/models/llm"}


async def test_two_containers_are_kept_and_refused_by_name(user: Platform, tmp_path: Path) -> None:
    none, image, suffix = runpy.run_path(str(PROGRAMS / "dual_container.py"))["made"]
    async with none:
        assert (await none.call_tool("given")).structured["data"] is None
    for env in (image, suffix):
        with pytest.raises(Invalid, match="is not among the data that may be used here") as refused:
            await env.initialize()
        assert repr(env.spec.datasource) in refused.value.message
    project = tmp_path / "swe-env"
    shutil.copytree(SEEDS / "concepts", project)
    configure(project, name="swe-env", version="2.0.0", **FRAGMENTS["1.4.0"])
    assert (await push(user, project))["deploy_config"] == FRAGMENTS["1.4.0"]["deployConfig"]
    with pytest.raises(Unsupported, match=r"second container \(registry.example.com/envs\)"):
        await none.initialize()
    for env, why in ((image, "outside of the prefix"), (suffix, "'{instance_id}' is no tag")):
        with pytest.raises(Invalid, match=why):
            await env.initialize()
    assert user.ask("DELETE", "/env/swe-env/2.0.0").status == 200
