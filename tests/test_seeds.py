"""The programs of the SDK guide that existing users follow, run as they stand.

They are in ``tests/seeds``: what an author writes in ``guide/src``, which one sandbox serves, and what a user writes in
``programs``. The terminal is the built-in mini-terminal, in a sandbox of its own. They differ from the guide in this,
and in nothing else:

- The guide's text had lost its indentation; it is restored everywhere.
- ``parameters.py``: the guide does not import ``BaseModel``; the import is added. Its line ``mcp = FastMCP("Example")``
  is left out: it names what is not imported, nothing uses it, and a server object in a project would serve ``/mcp``.
  So are the ticks in its comments.
- ``safe_env.py`` is what the guide's "safe-env" offers, which the guide does not show.
- ``advanced_configuration.py``: the guide does not import ``Environment`` here; ``made`` keeps what each snippet made.
- The interactive loop reads ``input()``; the test gives it three lines.
- Every program attaches to a sandbox through ``DUMMY_INSTANCE_IP``, whose name is then not compared. So
  "my-python-env" and "safe-env" are the same project. With ``AENV_SYSTEM_URL`` and a platform, the same programs run
  in ``tests/platform/test_seeds.py``.
- "Data Transformation Logic" is pseudo-code (``Boolean``, ``Result``, ``mcp_call_results`` and a ``return`` outside a
  function); what it promises of a result is asserted instead.
- "Calling Example" passes ``{"input": input}`` where the tool, in the same guide, takes ``command``; it is called with
  ``command``. Its printed result has no ``structured``, which ours adds, and ours has more fields after those of the
  guide; content, as far as the guide shows it, and ``is_error`` are compared.
- "Tool details example" shows no description, and a title for ``timeout`` in the place of a type. Ours describes the
  tool and its arguments, and leaves out titles that repeat a name.
- The lines ``await env.call_reward(...)`` and ``await env.check_health()`` stand alone there; here they are in tests.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from aenv import Environment, __version__, project
from aenv.project.builtin import builtin
from tests.support import serve

SEEDS = Path(__file__).parent / "seeds"
PROGRAMS = SEEDS / "programs"


@pytest.fixture(scope="module")
def url():
    with serve(SEEDS / "guide") as found:
        yield found


@pytest.fixture(scope="module")
def terminal_url():
    with serve(builtin("mini-terminal")) as found:
        yield found


def attach_to(url, monkeypatch):
    monkeypatch.setenv("DUMMY_INSTANCE_IP", url)
    for name in ("AENV_SYSTEM_URL", "AENV_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def attached(url, monkeypatch):
    attach_to(url, monkeypatch)


@pytest.fixture
def with_terminal(terminal_url, monkeypatch):
    attach_to(terminal_url, monkeypatch)


@pytest.fixture
async def env(attached):
    async with Environment("my-env") as env:
        yield env


@pytest.fixture
async def terminal(with_terminal):
    async with Environment("mini-terminal@1.0.1") as env:
        yield env


def run(program, stdin=""):
    done = subprocess.run(
        [sys.executable, PROGRAMS / program],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_verify_installation():
    assert run("version.py") == f"{__version__}\n"


def test_the_interactive_terminal(with_terminal):
    out = run("mini_terminal.py", "echo helloworld\nexit 3\nsleep 60\nexit\n")
    assert out.startswith("Successfully obtained tool list: [{'name': 'mini-terminal@1.0.1/execute_command', 'desc")
    assert r"""'text': '{"output":["helloworld\\n",true],"returncode":0""" in out
    assert '{"output":["",true],"returncode":3' in out
    assert '{"output":["",false],"returncode":124' in out
    assert out.endswith("Exiting interactive mode\nEnvironment successfully released\n")


def test_basic_usage(attached):
    assert run("basic_usage.py") == "Available tools: 4\n"


def test_recommended_usage(attached):
    assert run("recommended_usage.py") == "[{'type': 'text', 'text': 'Hello from AEnvironment!\\n'}]\n"


def test_advanced_configuration(monkeypatch):
    for name in ("DUMMY_INSTANCE_IP", "AENV_SYSTEM_URL"):
        monkeypatch.delenv(name, raising=False)
    full, dataset, variables, arguments, *lives = runpy.run_path(str(PROGRAMS / "advanced_configuration.py"))["made"]
    assert full.env_name == "data-analysis-env"
    assert full.spec.datasource == "/data/workspace"
    assert full.spec.ttl == 2 * 3600
    assert full.spec.environment_variables["MODEL_PATH"] == "/models/bert"
    assert full.spec.arguments == ["--verbose", "--gpu"]
    assert (full.timeout, full.max_retries) == (60.0, 5)
    assert dataset.spec.datasource == "/path/to/dataset"
    assert variables.spec.environment_variables["LOG_LEVEL"] == "info"
    assert arguments.spec.arguments == ["--config", "/app/config.yaml", "--verbose"]
    assert [env.spec.ttl for env in lives] == [1800, 7200, 86400]


async def test_the_calling_example(terminal, caplog):
    with caplog.at_level("INFO", "aenv.environment"):
        result = await terminal.call_tool(
            "env_name@1.0.1/execute_command", {"command": "echo helloworld", "timeout": 5}
        )
    [block] = result.content
    assert block["type"] == "text"
    assert block["text"].startswith('{"output":["helloworld\\n",true],"returncode":0')
    assert json.loads(block["text"]) == result.structured
    assert result.is_error is False
    assert "Executing tool: execute_command in environment mini-terminal@1.0.1" in caplog.text
    assert "[ENV:" in caplog.text
    assert "helloworld" not in caplog.text


async def test_what_the_transformation_promises(terminal):
    """``content`` is a list of dicts, each with its type; ``is_error`` is a boolean."""
    failed = await terminal.call_tool("execute_command", {"input": "echo"})
    assert failed.is_error is True
    assert [block["type"] for block in failed.content] == ["text"]
    assert "command" in failed.text


async def test_tool_discovery(terminal):
    tools = {tool["name"]: tool for tool in await terminal.list_tools()}
    found = tools["mini-terminal@1.0.1/execute_command"]
    assert set(found) == {"name", "description", "inputSchema"}
    schema = found["inputSchema"]
    assert schema["type"] == "object"
    assert schema["required"] == ["command"]
    assert schema["properties"]["command"]["type"] == "string"
    assert schema["properties"]["timeout"]["default"] == 60


async def test_the_registered_tools(env):
    assert (await env.call_tool("my_custom_echo_env", {"content": "hi"})).structured == {"result": "hi"}
    types = {"name": "a", "count": 1, "price": 0.5, "enabled": True, "tags": ["x"]}
    assert (await env.call_tool("simple_types", types)).text == "OK"
    assert (await env.call_tool("search_users", {"params": {"query": "bob"}})).text == "Searching: bob"
    wrong = await env.call_tool("simple_types", {**types, "count": "many"})
    assert wrong.is_error
    assert "count" in wrong.text


async def test_descriptions_come_from_the_docstring(env):
    echo = next(tool for tool in await env.list_tools() if tool["name"].endswith("my_custom_echo_env"))
    assert echo["description"].startswith("Custom environment tool description.")
    assert "Args" not in echo["description"]
    assert echo["inputSchema"]["properties"]["content"]["description"] == "Any content to echo"


async def test_the_reward(env):
    reward = await env.call_reward({"code": "def hello(): return 'world'", "test_results": {"passed": 5, "failed": 0}})
    assert reward == {"score": 0.8, "feedback": "Tests passed; Code concise", "details": {"passed": 5, "failed": 0}}


async def test_the_function(env):
    assert await env.call_function("custom_endpoint", {"data": {"a": 1}}) == {"status": "success", "data": {"a": 1}}


async def test_the_health_check(env):
    health = await env.check_health()
    assert health["status"] == "healthy"
    assert health["uptime"] == "Running normally"
    assert {"cpu_percent", "memory_percent", "disk_usage"} <= set(health)


def test_the_ttl_of_the_project():
    assert project.read(SEEDS / "guide").ttl == 2 * 3600
    assert json.loads((SEEDS / "guide" / "config.json").read_text())["deployConfig"] == {"ttl": "2h"}


@pytest.mark.parametrize("name", ["echo", "parameters", "reward", "function", "health"])
def test_an_authors_module_imports_without_a_server(name):
    module = runpy.run_path(str(SEEDS / "guide" / "src" / f"{name}.py"))
    called = {
        "echo": lambda: module["my_custom_echo_env"]("x") == {"result": "x"},
        "parameters": lambda: module["search_users"](module["UserQuery"](query="x")) == "Searching: x",
        "reward": lambda: module["evaluate_code_quality"]("", {})["score"] == 0.3,
        "function": lambda: module["custom_endpoint"]({})["status"] == "success",
        "health": lambda: module["system_health_check"]()["status"] == "healthy",
    }
    assert called[name]()
