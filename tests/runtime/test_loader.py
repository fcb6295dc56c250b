"""From a project on disk to its functions: what is imported, what is refused, and what is said then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import StartFailed
from aenv.project import Project
from aenv.runtime import app, delivery, registry
from aenv.runtime.loader import RESERVED, Loaded, load, source_files, unload
from aenv.runtime.registry import Mark

TOOL = "from aenv import register_tool\n\n@register_tool\ndef {0}() -> str:\n    return {1!r}\n"

Make = Callable[..., Project]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Write a project's modules; they are forgotten when the test ends."""
    path, made = list(sys.path), []

    def write(files: dict[str, str], folder: str = "project") -> Project:
        source = tmp_path / folder / "src"
        source.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text)
        made.append(Project(tmp_path / folder, folder, "1.0.0", {}))
        return made[-1]

    yield write
    sys.path[:] = path
    for project in made:
        unload(project)


def fails(project: Project) -> StartFailed:
    with pytest.raises(StartFailed) as caught:
        load(project)
    return caught.value


def names(project: Project) -> list[str]:
    return [path.relative_to(project.source).as_posix() for path in source_files(project.source)]


# What is imported.


def test_modules_of_every_depth_are_loaded(make: Make) -> None:
    project = make(
        {
            "flat.py": TOOL.format("flat", 1),
            "package/__init__.py": TOOL.format("of_package", 2),
            "package/inner.py": TOOL.format("inner", 3),
            "package/deep/below.py": TOOL.format("below", 4),
            "namespace/part.py": TOOL.format("part", 5),
            "alone/__init__.py": TOOL.format("alone", 6),
        }
    )
    assert set(load(project).tools) == {"flat", "of_package", "inner", "below", "part", "alone"}


def test_what_is_not_a_module_of_the_project_is_skipped(make: Make) -> None:
    broken = "raise RuntimeError('this must not be imported')"
    skipped = (
        "_private.py", ".hidden.py", "__init__.py", "test_it.py", "conftest.py", "setup.py", "not-a-module.py",
        "1st.py", "data.json", "tests/helper.py", "test/helper.py", "_folder/module.py", ".venv/module.py",
        "__pycache__/module.py", "with-dash/module.py", "python3.11/module.py", "script.sh",
    )  # fmt: skip
    project = make({"kept.py": TOOL.format("kept", 1), **dict.fromkeys(skipped, broken)})
    assert names(project) == ["kept.py"]
    assert set(load(project).tools) == {"kept"}


def test_a_module_that_others_import_is_loaded_once(make: Make) -> None:
    project = make(
        {
            "a.py": "import shared_b\nimport shared_b as again\nfrom shared_b import tool_b\n",
            "shared_b.py": TOOL.format("tool_b", 1),
            "z.py": "import shared_b\n",
        }
    )
    assert list(load(project).tools) == ["tool_b"]


def test_loading_keeps_its_marks_to_itself(make: Make) -> None:
    before = registry.marks()
    load(make({"marks_env.py": TOOL.format("t", 1)}))
    assert registry.marks() == before


def test_every_kind_finds_its_place(make: Make) -> None:
    kinds = ("tool", "reward", "function", "health", "setup", "teardown", "reset")
    lines = ["import aenv"] + [f"@aenv.register_{kind}\ndef {kind}(): pass" for kind in kinds]
    lines += ["@aenv.register_agent", "def agent(message: str): pass"]
    loaded = load(make({"kinds_env.py": "\n".join(lines)}))
    assert list(loaded.tools) == ["tool", "chat", "chat_history", "chat_reset"]
    assert list(loaded.agents) == ["agent"]
    assert (list(loaded.rewards), list(loaded.functions)) == (["reward"], ["function"])
    assert [function.name for function in (*loaded.setups, *loaded.teardowns)] == ["setup", "teardown"]
    assert loaded.health is not None
    assert loaded.health.name == "health"
    assert loaded.reset is not None
    assert loaded.reset.name == "reset"


def test_a_change_is_seen_after_unload_even_within_a_second(make: Make) -> None:
    project = make({"changing.py": TOOL.format("t", 1), "package_c/__init__.py": "", "package_c/m.py": "V = 1"})
    for value in range(2, 6):  # the same size every time
        unload(project)
        make({"changing.py": TOOL.format("t", value), "package_c/m.py": f"V = {value}"})
        assert load(project).tools["t"].mark.function() == value
        assert vars(sys.modules["package_c.m"])["V"] == value


def test_unload_forgets_files_that_are_gone_and_nothing_else(make: Make) -> None:
    project = make({"gone.py": TOOL.format("gone", 1), "stays.py": TOOL.format("stays", 1), "ns_gone/m.py": ""})
    load(project)
    unload(project)
    assert not {"gone", "stays", "ns_gone", "ns_gone.m"} & set(sys.modules)
    assert str(project.source) not in sys.path
    assert "aenv.runtime.loader" in sys.modules
    (project.source / "gone.py").unlink()
    assert list(load(project).tools) == ["stays"]


def test_two_projects_with_modules_of_one_name_can_take_turns(make: Make) -> None:
    first = make({"turns_env.py": TOOL.format("first", 1)})
    second = make({"turns_env.py": TOOL.format("second", 1)}, "other")
    for _ in range(2):
        for project, tool in ((first, "first"), (second, "second")):
            assert list(load(project).tools) == [tool]
            unload(project)


# What fails the start.


def test_an_empty_project(make: Make) -> None:
    error = fails(make({}))
    assert "nothing is registered under" in error.message
    assert "@register_tool" in (error.hint or "")


def test_hooks_alone_are_not_an_environment(make: Make) -> None:
    assert (
        "nothing is registered" in fails(make({"hooks.py": "import aenv\n@aenv.register_setup\ndef s(): pass"})).message
    )


def test_no_directory(tmp_path: Path) -> None:
    assert "is not a directory" in fails(Project(tmp_path / "none", "none", "1.0.0", {})).message


def test_two_tools_of_one_name(make: Make) -> None:
    project = make({"one.py": TOOL.format("same", 1), "two.py": "\n\n" + TOOL.format("same", 2)})
    error = fails(project)
    assert error.message == (
        f"tool 'same' is registered twice: {project.source}/one.py:3 and {project.source}/two.py:5"
    )
    assert "name=" in (error.hint or "")


def test_one_file_under_two_names(make: Make) -> None:
    project = make({"pkg_t/__init__.py": "", "pkg_t/tools.py": TOOL.format("same", 1)})
    sys.path.insert(0, str(project.source / "pkg_t"))
    make({"env_t.py": "import tools"})
    error = fails(project)
    assert "registered twice" in error.message
    assert "two names" in (error.hint or "")


@pytest.mark.parametrize("module", ["json", "types", "asyncio"])
def test_a_module_named_like_one_of_pythons(make: Make, module: str) -> None:
    error = fails(make({f"{module}.py": TOOL.format("t", 1)}))
    assert f"{module}.py is hidden by another module of the same name" in error.message
    assert error.hint == "rename the file"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("from aenv import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        ("def broken(:\n    pass", "SyntaxError: "),
        ("if True:\npass", "IndentationError: "),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("raise SystemExit", "SystemExit"),
        ("eval('1 +')", "SyntaxError: "),
        ("import aenv\naenv.register_tool('name')", "TypeError: @register_tool goes on a function"),
    ],
)
def test_a_module_that_fails_to_import(make: Make, text: str, expected: str) -> None:
    project = make({"failing_env.py": text})
    error = fails(project)
    assert error.message.startswith("failing_env failed to import:\n")
    assert expected in error.message
    assert f'File "{project.source}/failing_env.py", line ' in error.message
    assert "importlib" not in error.message
    assert "loader.py" not in error.message
    assert "failing_env" not in sys.modules


def test_the_traceback_runs_through_the_authors_files(make: Make) -> None:
    project = make(
        {"a_outer.py": "def go():\n    import b_inner\n\ngo()\n", "b_inner.py": "x = 1\nraise ValueError('deep')\n"}
    )
    lines = fails(project).message.splitlines()
    files = [line.strip() for line in lines if line.strip().startswith("File ")]
    source = project.source
    assert files == [
        f'File "{source}/a_outer.py", line 4, in <module>',
        f'File "{source}/a_outer.py", line 2, in go',
        f'File "{source}/b_inner.py", line 2, in <module>',
    ]
    assert lines[-1] == "ValueError: deep"


def test_a_folder_called_importlib_hides_nothing(make: Make) -> None:
    error = fails(make({"importlib_tricks/m.py": "1 / 0"}))
    assert 'importlib_tricks/m.py", line 1' in error.message
    assert "1 / 0" in error.message


def test_a_chain_of_exceptions_is_shown(make: Make) -> None:
    text = "try:\n    {}['key']\nexcept KeyError as exc:\n    raise ValueError('no key') from exc\n"
    message = fails(make({"chained.py": text})).message
    assert message.index("KeyError: 'key'") < message.index("ValueError: no key")


def test_an_unreadable_signature_fails_the_start(make: Make) -> None:
    text = "from aenv import register_tool\n@register_tool\ndef t(x: 'Missing'): pass"
    assert "annotations of t()" in fails(make({"hinted.py": text})).message


SERVER = "class FastMCP:\n    __module__ = 'fastmcp.server'\n    __qualname__ = 'FastMCP'\n"


def test_an_mcp_server_object_is_found_once(make: Make) -> None:
    project = make({"srv.py": SERVER + "mcp = FastMCP()\nsame = mcp\n", "user.py": "from srv import mcp as mine\n"})
    loaded = load(project)
    assert loaded.server is sys.modules["srv"].mcp
    assert loaded.tools == {}


def test_two_mcp_server_objects(make: Make) -> None:
    assert "2 MCP servers" in fails(make({"srv2.py": SERVER + "a = FastMCP()\nb = FastMCP()\n"})).message


def test_an_object_that_is_only_called_like_one_is_not_a_server(make: Make) -> None:
    assert "nothing is registered" in fails(make({"own.py": "class FastMCP: pass\nmcp = FastMCP()\n"})).message


# Functions that fit together.


def work() -> None: ...


def other() -> None: ...


def mark(kind: Any, function: Callable[..., Any] = work, name: str | None = None, **options: Any) -> Mark:
    defaults = {"method": "POST"} if kind == "function" else {}
    return Mark(kind, function, name or function.__name__, {**defaults, **options})


@pytest.mark.parametrize("kind", ["tool", "agent", "reward", "function", "health", "reset"])
def test_two_of_one_name(kind: str) -> None:
    with pytest.raises(StartFailed, match=rf"{kind} 'work' is registered twice: .+:\d+ and .+:\d+"):
        Loaded([mark(kind), mark(kind)])


@pytest.mark.parametrize("kind", ["health", "reset"])
def test_only_one_of_some(kind: str) -> None:
    with pytest.raises(StartFailed, match="registered twice") as caught:
        Loaded([mark(kind, work), mark(kind, other)])
    assert str(work.__code__.co_firstlineno) in caught.value.message
    assert str(other.__code__.co_firstlineno) in caught.value.message


def test_other_kinds_do_not() -> None:
    loaded = Loaded([mark("tool"), mark("reward"), mark("function"), mark("setup"), mark("setup"), mark("teardown")])
    assert (list(loaded.tools), list(loaded.rewards), list(loaded.functions)) == (["work"], ["work"], ["work"])
    assert len(loaded.setups) == 2


def test_one_function_under_two_names() -> None:
    assert list(Loaded([mark("tool", name="a"), mark("tool", name="b")]).tools) == ["a", "b"]


@pytest.mark.parametrize(("endpoint", "path"), [("/score", "/score"), ("score", "/score"), ("/a/b/", "/a/b")])
def test_an_endpoint_of_its_own(endpoint: str, path: str) -> None:
    loaded = Loaded([mark("function", endpoint=endpoint, method="get")])
    assert list(loaded.endpoints) == [("GET", path)]
    assert loaded.endpoints["GET", path] is loaded.functions["work"]


@pytest.mark.parametrize("endpoint", [*RESERVED, "/info", "mcp", "/mcp/", "/tools/mine", "/", "//"])
def test_an_endpoint_that_is_the_runtimes(endpoint: str) -> None:
    with pytest.raises(StartFailed, match=r"work\(\) belongs to the runtime") as caught:
        Loaded([mark("function", endpoint=endpoint)])
    assert caught.value.message.startswith(mark("function").place)
    assert caught.value.hint


def test_what_the_runtime_serves_is_its_own_and_nothing_else() -> None:
    paths = (*app.EXACT, *map("/{}".format, app.PREFIX), delivery.PATH)
    assert set(RESERVED) == {f"/{path.split('/')[1]}" for path in paths}
    assert len(RESERVED) == len(set(RESERVED))


def test_an_endpoint_may_begin_like_a_reserved_one() -> None:
    assert list(Loaded([mark("function", endpoint="/toolshed")]).endpoints) == [("POST", "/toolshed")]


def test_two_functions_at_one_endpoint() -> None:
    first = mark("function", work, endpoint="/score")
    with pytest.raises(StartFailed, match="'POST /score' is registered twice"):
        Loaded([first, mark("function", other, endpoint="score/", method="post")])
    assert len(Loaded([first, mark("function", other, endpoint="/score", method="GET")]).endpoints) == 2


def test_a_function_cannot_be_called_list() -> None:
    with pytest.raises(StartFailed, match="/functions/list"):
        Loaded([mark("function", name="list")])
