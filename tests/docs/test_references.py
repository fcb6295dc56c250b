"""The reference pages say what the code says."""

import inspect
import json
import re
import subprocess
import sys

import pytest

import aenv
from aenv import Environment, SyncEnvironment, config, evals, rl
from aenv.project import fields
from tests.docs.doc_pages import ROOT

REFERENCE = ROOT / "docs" / "reference"
_ROW = re.compile(r"^\| `([^`]+)` \|([^|]+)\|([^|]+)\|(.+)\|$", re.MULTILINE)


@pytest.mark.parametrize("script", ["reference.py", "cli_reference.py"])
def test_generated_pages_are_current(script):
    found = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--check"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_every_setting_is_documented():
    page = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    for setting in config.SETTINGS:
        assert f"`{setting.variable}`" in page
        assert f"`{setting.key}`" in page
        assert setting.about in page


def test_every_public_name_is_documented():
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    for name in (*aenv.__all__, *rl.__all__, *evals.__all__):
        assert re.search(rf"\b{re.escape(name)}\b", page), f"{name} is not in api.md"


def test_every_method_of_environment_is_documented_and_has_a_blocking_twin():
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    for name, method in inspect.getmembers(Environment, inspect.isfunction):
        if name.startswith("_"):
            continue
        assert f"{name}(" in page
        if inspect.iscoroutinefunction(method):
            assert hasattr(SyncEnvironment, name)


def test_every_argument_of_environment_is_in_the_guide():
    guide = (ROOT / "docs" / "guides" / "use-an-environment.md").read_text(encoding="utf-8")
    for name in inspect.signature(Environment.__init__).parameters:
        if name != "self":
            assert f"`{name}`" in guide, f"the argument {name} is not in the guide"


def test_every_field_of_config_json_is_documented_with_its_default():
    page = (REFERENCE / "config-json.md").read_text(encoding="utf-8")
    rows = {path: default.strip() for path, _, default, _ in _ROW.findall(page)}
    for field in fields.FIELDS:
        expected = "required" if field.required else "-" if field.default is None else f"`{json.dumps(field.default)}`"
        assert rows.get(field.path) == expected, f"{field.path}: the page says {rows.get(field.path)}"
    assert not set(rows) - {field.path for field in fields.FIELDS}


def test_every_error_is_explained():
    page = (ROOT / "docs" / "concepts" / "failures.md").read_text(encoding="utf-8")
    for name in aenv._HOME["aenv.errors"]:
        assert name in page


def test_every_module_is_in_the_tree_of_the_architecture():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.split("```text\n", 1)[1].split("```", 1)[0]
    shown, parents = set(), {}
    for line in tree.splitlines()[1:]:
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        if depth == 0:
            break
        parents[depth] = name
        shown.add("".join(parents[level] for level in range(1, depth + 1)))
    source = ROOT / "src" / "aenv"
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if "templates" not in path.parts}
    assert {path for path in shown if path.endswith(".py")} <= found
    assert {path for path in found if not path.endswith("/__init__.py")} <= shown


def test_every_route_is_in_the_table():
    from aenv.runtime.app import EXACT, PREFIX

    page = (ROOT / "docs" / "concepts" / "runtime.md").read_text(encoding="utf-8")
    for path in EXACT:
        assert f"`{path}`" in page or f" {path}`" in page, f"{path} is not in runtime.md"
    for path in PREFIX:
        assert f"/{path}/<" in page, f"/{path}/... is not in runtime.md"
