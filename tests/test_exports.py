"""The names that ``aenv`` offers, and what importing it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import aenv
from aenv import evals, rl

HEAVY = {"mcp", "fastmcp", "uvicorn", "starlette", "httptools", "pydantic", "msgspec", "asyncio", "aiohttp", "httpx"}
ERRORS = [
    name
    for name in aenv.__all__
    if inspect.isclass(getattr(aenv, name)) and issubclass(getattr(aenv, name), aenv.AEnvError)
]


def python(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", aenv.__all__)
def test_every_name_resolves(name: str) -> None:
    value = getattr(aenv, name)
    assert value is getattr(aenv, name)
    assert name in dir(aenv)


def test_there_are_no_other_names() -> None:
    assert len(set(aenv.__all__)) == len(aenv.__all__)
    with pytest.raises(AttributeError, match="module 'aenv' has no attribute 'register_tols'"):
        _ = aenv.register_tols  # type: ignore[attr-defined]
    assert not hasattr(aenv, "Mark")


@pytest.mark.parametrize("module", [aenv, rl, evals])
def test_type_checkers_see_the_same_names(module: ModuleType) -> None:
    """The names under ``TYPE_CHECKING`` are those that load on first use, from the same modules."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    below = "" if module is aenv else f"{module.__name__}."
    assert seen == {name: f"{below}{home}" for name, home in module._MODULE_OF.items()}


@pytest.mark.parametrize("module", [rl, evals])
def test_every_name_of_a_part_resolves_and_is_documented(module: ModuleType) -> None:
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
        assert name in dir(module)
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("name", [name for name in aenv.__all__ if name != "__version__" and name not in ERRORS])
def test_every_name_is_documented(name: str) -> None:
    value = getattr(aenv, name)
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own
    assert own.strip().endswith((".", "...")) or "\n" in own


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_in_the_drawing(name: str) -> None:
    from aenv import errors

    assert getattr(aenv, name).__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    "module", ["aenv", "aenv.runtime.registry", "aenv.errors", "aenv.config", "aenv.runtime.context"]
)
def test_importing_is_light(module: str) -> None:
    loaded = python(f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})").split()
    assert not HEAVY & set(loaded)


def test_decorating_is_light() -> None:
    marked = "from aenv import Context, register_tool\n@register_tool\ndef t(ctx: Context): pass\n"
    code = marked + "import sys; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in python(code).split()}
    assert not HEAVY & loaded


@pytest.mark.parametrize(
    "code", ["import aenv", "from aenv import *", "import aenv.runtime.server, aenv.client, aenv.cli"]
)
def test_importing_warns_of_nothing(code: str) -> None:
    assert python(code, "-W", "error") == ""


def test_importing_names_does_not_disturb_pythons_own() -> None:
    code = (
        "import builtins, aenv; print(aenv.EnvironmentError is builtins.EnvironmentError, EnvironmentError is OSError)"
    )
    assert python(code).split() == ["False", "True"]


def test_the_version_is_one() -> None:
    assert aenv.__version__.count(".") == 2
    assert (
        python("import importlib.metadata; print(importlib.metadata.version('aenvironment'))").strip()
        == aenv.__version__
    )
