"""The embedded mode: an environment by its name, with nothing to start."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aenv import Environment, Invalid, NotFound, StartFailed
from aenv.client.local import Embedded, resolve
from aenv.models import EnvRef, SandboxSpec, Second
from tests.support import FIXTURES, until

QUICK = """\
import asyncio
from aenv import Environment, register_tool
from helper import where

@register_tool
def search_code(query: str, max_results: int = 10) -> list:
    \"\"\"Search code in the repository.\"\"\"
    return [{"file": "main.py", "query": query, "where": where()}]

async def main():
    async with Environment("swe-env") as env:
        print([tool["name"] for tool in await env.list_tools()])
        result = await env.call_tool("search_code", {"query": "bug fix"})
        print(result.text)

asyncio.run(main())
"""

RACE = """\
import json, subprocess, sys
from pathlib import Path
import helper
from aenv import register_tool
from aenv.client.local import resolve
from aenv.models import EnvRef, SandboxSpec

@register_tool
def tool() -> str:
    return "x"

def kept():
    root = Path(resolve(SandboxSpec(env=EnvRef("race"))).project)
    files = [file for file in sorted(root.rglob("*")) if file.is_file()]
    return [[str(file.relative_to(root)), file.read_text(), file.stat().st_mtime_ns] for file in files]

write, others = Path.write_bytes, []

def write_and_wait(path, data):
    write(path, data)
    if not others:
        others.append("asked")
        others.append(json.loads(subprocess.check_output([sys.executable, __file__, "other"])))

if sys.argv[1:] == ["first"]:
    Path.write_bytes = write_and_wait
print(json.dumps([kept(), others[1]] if sys.argv[1:] == ["first"] else kept()))
"""
EITHER = """\
import {other}
from aenv import register_tool
from aenv.client.local import resolve
from aenv.models import EnvRef, SandboxSpec

@register_tool
def tool() -> str:
    return "x"

if __name__ == "__main__":
    print(resolve(SandboxSpec(env=EnvRef("either"))).project)
"""


def _project(root: Path, name: str, version: str, answer: str = "") -> Path:
    (root / "src").mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({"name": name, "version": version}))
    code = f"from aenv import register_tool\n\n@register_tool\ndef which() -> str:\n    return {answer or version!r}\n"
    (root / "src" / "custom_env.py").write_text(code)
    return root


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def _found(name: str) -> Path:
    return Path(resolve(SandboxSpec(env=EnvRef.parse(name))).project)


def test_the_current_directory_comes_first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _project(tmp_path / "mine", "mini-terminal", "9.0.0")
    monkeypatch.chdir(mine)
    assert _found("mini-terminal") == mine
    assert _found("mini-terminal@1.0.1") != mine


def test_then_the_newest_version_that_was_fetched(home: Path) -> None:
    for version in ("1.9.0", "1.10.0", "2.0.0-rc.1", "2.0.0"):
        _project(home / "envs" / "tool" / version, "tool", version)
    assert _found("tool").name == "2.0.0"
    assert _found("tool@^1.0").name == "1.10.0"
    assert _found("tool@1.9.0").name == "1.9.0"
    with pytest.raises(NotFound, match="no environment 'tool@3.0.0' is known here"):
        _found("tool@3.0.0")


def test_a_fetched_pre_release_is_taken_when_it_is_named_or_alone(home: Path) -> None:
    for version in ("1.0.0", "2.0.0-rc.2", "2.0.0-rc.10", "notes"):
        _project(home / "envs" / "tool" / version, "tool", version)
    assert _found("tool").name == "1.0.0"
    assert _found("tool@2.0.0-rc.2").name == "2.0.0-rc.2"
    assert _found("tool@^2.0").name == "2.0.0-rc.10"


def test_then_the_built_in_ones(home: Path) -> None:
    assert _found("mini-terminal@1.0.1").name == "mini-terminal"
    with pytest.raises(NotFound) as caught:
        _found("mini-terminl")
    assert caught.value.hint is not None
    assert "mini-terminal" in caught.value.hint


def test_a_datasource_must_be_there(home: Path) -> None:
    with pytest.raises(Invalid, match="datasource 'nowhere' is no file or directory"):
        resolve(SandboxSpec(env=EnvRef("mini-terminal"), datasource="nowhere"))


def test_the_second_container_of_a_project(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path / "swe", "swe", "1.0.0")
    config = {"name": "swe", "version": "1.0.0", "deployConfig": {"podTemplate": "dualContainer"}}
    (root / "config.json").write_text(json.dumps(config))
    (root / "task").mkdir()
    monkeypatch.chdir(root)

    def second(datasource: str) -> Second | None:
        spec = resolve(SandboxSpec(env=EnvRef("swe"), datasource=datasource))
        assert spec.datasource == ""
        return spec.second

    assert second("swebench/x:1") == Second(image="swebench/x:1")
    assert second("task") == Second(image="task"), "only what begins like a path is one"
    assert second("./task") == second(str(root / "task")) == Second(directory=str(root / "task"))
    for wrong, why in {"": "no image", "./none": "no directory", "./config.json": "no directory", "A": "upper"}.items():
        with pytest.raises(Invalid, match=why):
            second(wrong)
    config["deployConfig"]["imagePrefix"] = "reg.example.com/swe"  # type: ignore[index]
    (root / "config.json").write_text(json.dumps(config))
    assert second("task") == Second(image="reg.example.com/swe:task")
    config["deployConfig"] = {"podTemplate": "DualContainer", "datasource": "aenv-base"}
    (root / "config.json").write_text(json.dumps(config))
    assert second("") == Second(image="aenv-base"), "the project's own, where nobody names one"
    assert second("task") == Second(image="task")


def test_the_image_of_a_project(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path / "built", "built", "1.0.0")
    artifacts = [{"id": "", "type": "image", "content": "built:1.0.0"}]
    (root / "config.json").write_text(json.dumps({"name": "built", "version": "1.0.0", "artifacts": artifacts}))
    monkeypatch.chdir(root)
    assert resolve(SandboxSpec(env=EnvRef("built"))).image == "built:1.0.0"
    assert resolve(SandboxSpec(env=EnvRef("built"), image="mine")).image == "mine"
    assert resolve(SandboxSpec(env=EnvRef("mini-terminal"))).image == ""


@pytest.mark.parametrize("engine", ["plain", "process"])
async def test_processes_run_the_files_whatever_image_there_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    root = _project(tmp_path / "built", "built", "1.0.0")
    artifacts = [{"id": "", "type": "image", "content": "no-such-image:1"}]
    (root / "config.json").write_text(json.dumps({"name": "built", "version": "1.0.0", "artifacts": artifacts}))
    monkeypatch.chdir(root)
    monkeypatch.setenv("AENV_ENGINE", engine)
    async with Environment("built", provision=Embedded()) as env:
        assert (await env.call_tool("which", {})).text == "1.0.0"


async def test_the_engine_is_the_one_of_the_settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_ENGINE", "plain")
    embedded = Embedded()
    async with embedded(SandboxSpec(env=EnvRef("mini-terminal"))) as sandbox:
        assert sandbox.url.startswith("http://"), "other engines use unix sockets"
    monkeypatch.setenv("AENV_ENGINE", "plan")
    with pytest.raises(NotFound, match="no engine 'plan'"):
        Embedded()(SandboxSpec(env=EnvRef("mini-terminal")))


def test_a_script_runs_the_functions_it_registered_itself(home: Path, tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(QUICK)
    (tmp_path / "helper.py").write_text("import os\n\ndef where():\n    return os.getcwd()\n")
    done = subprocess.run(
        [sys.executable, "quick.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    names, result = done.stdout.splitlines()
    assert names == "['swe-env/search_code']"
    (row,) = json.loads(result)
    assert row["query"] == "bug fix"
    assert row["where"] != str(tmp_path)


def _output(script: Path, *arguments: str) -> str:
    return subprocess.check_output([sys.executable, script, *arguments], text=True, timeout=60)


def test_a_script_that_is_run_twice_at_once_is_kept_whole_and_once(home: Path, tmp_path: Path) -> None:
    (tmp_path / "race.py").write_text(RACE)
    (tmp_path / "helper.py").write_text("x = 1\n")
    first, other = json.loads(_output(tmp_path / "race.py", "first"))
    names = ["config.json", "script/helper.py", "script/race.py", "src/load_script.py"]
    assert [name for name, *_ in other] == names
    assert first == other, "what the other process found complete was written again"
    (root,) = (home / "cache" / "scripts").iterdir()

    os.utime(root, (0, 0))
    assert json.loads(_output(tmp_path / "race.py")) == other
    assert root.stat().st_mtime > time.time() - 3600, "that it is used is not to be seen"


def test_two_scripts_of_the_same_files_are_two(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(EITHER.format(other="b"))
    (tmp_path / "b.py").write_text(EITHER.format(other="a"))
    roots = [Path(_output(tmp_path / name).strip()) for name in ("a.py", "b.py")]
    assert ["script/a.py" in (root / "src" / "load_script.py").read_text() for root in roots] == [True, False]


def test_a_script_that_cannot_be_kept_is_said(home: Path, tmp_path: Path) -> None:
    home.write_text("")
    (tmp_path / "race.py").write_text(RACE)
    (tmp_path / "helper.py").write_text("")
    done = subprocess.run([sys.executable, tmp_path / "race.py"], capture_output=True, text=True, check=False)
    assert "AEnvError" in done.stderr.splitlines()[-1]
    assert "cannot be written: Not a directory" in done.stderr


def test_a_file_that_vanishes_is_not_part_of_a_project(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = _project(tmp_path / "mine", "mine", "1.0.0")
    monkeypatch.chdir(mine)
    before = resolve(SandboxSpec(env=EnvRef("mine"))).stamp
    walk = os.walk

    def listed_before(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for directory, names, files in walk(root):
            yield directory, names, [*files, ".swapped-away"]

    monkeypatch.setattr(os, "walk", listed_before)
    assert resolve(SandboxSpec(env=EnvRef("mine"))).stamp == before


async def test_an_edited_project_is_seen(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _project(tmp_path / "mine", "mine", "1.0.0", "before")
    monkeypatch.chdir(mine)
    async with Environment("mine") as env:
        assert (await env.call_tool("which", {})).text == "before"
    code = mine / "src" / "custom_env.py"
    code.write_text(code.read_text().replace("before", "afterwards"))
    async with Environment("mine") as env:
        assert (await env.call_tool("which", {})).text == "afterwards"


async def test_two_sandboxes_of_a_name_do_not_see_each_other(home: Path) -> None:
    async with Environment("mini-terminal") as first, Environment("mini-terminal") as second:
        await first.call_tool("write_file", {"path": "note.txt", "content": "mine"})
        assert (await first.call_tool("read_file", {"path": "note.txt"})).is_error is False
        assert (await second.call_tool("read_file", {"path": "note.txt"})).is_error


async def test_an_agent_gets_a_url_that_it_can_use(home: Path) -> None:
    from aenv.client.provision import attach

    async with Environment("mini-terminal") as env:
        url = await env.agent_url()
        assert url == await env.agent_url()
        base, _, token = url.partition("/mcp?token=")
        agent = Environment("mini-terminal", provision=attach(base, token))
        assert "execute_command" in str(await agent.list_tools())
        result = await agent.call_tool("execute_command", {"command": "echo through"})
        assert result.structured["output"][0] == "through\n"
        await agent.release()


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


async def test_cancelled_while_it_starts_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = _project(home.parent / "stuck", "stuck", "1.0.0")
    (stuck / "src" / "custom_env.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.chdir(stuck)
    async with Environment("mini-terminal"):
        before = _children()
        task = asyncio.create_task(Environment("stuck").initialize())
        await until(lambda: not _children() <= before, "the start")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_project_that_fails_to_import_shows_its_traceback(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _project(home.parent / "broken", "broken", "1.0.0")
    (broken / "src" / "custom_env.py").write_text("1/0\n")
    monkeypatch.chdir(broken)
    with pytest.raises(StartFailed, match="ZeroDivisionError"):
        await Environment("broken").initialize()


async def test_cancelled_while_it_is_released_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES / "lab")
    env = Environment("lab")
    await env.initialize()
    id = env.instance_id
    assert id is not None
    releasing = asyncio.create_task(env.release())
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    from aenv.client.local import embedded

    with pytest.raises(NotFound):
        await embedded.reason(id, 0.0)
