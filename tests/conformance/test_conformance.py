"""Both fixture environments against the official MCP conformance suite, on both revisions.

`scenarios.json` says which environment answers which scenario and what is left out, with the reason. A failed
check fails the test and so does a warning; an exception that no longer fails has to be removed from the list.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.support import serve

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PREFIX = Path(os.environ.get("AENV_TEST_NODE_PREFIX") or ROOT / ".cache" / "node")
SUITE = PREFIX / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
SCENARIOS: dict[str, Any] = json.loads((HERE / "scenarios.json").read_text())
CASES = [
    (revision, env, scenario)
    for revision, envs in SCENARIOS["run"].items()
    for env, scenarios in envs.items()
    for scenario in scenarios
]
INSTALL = "run scripts/node-tools, or set AENV_TEST_NODE_PREFIX to a directory with node_modules"


def find_node() -> str | None:
    """Node 22 or newer: the one beside the suite, else the one on PATH."""
    beside = PREFIX / "node_modules" / ".bin" / "node"
    node = str(beside) if beside.exists() else shutil.which("node")
    if node is None:
        return None
    found = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.match(r"v(\d+)", found)
    return node if match and int(match[1]) >= 22 else None


def has_sdk() -> bool:
    """Whether the official SDK of the second major version is installed."""
    try:
        return int(version("mcp").partition(".")[0]) >= 2
    except PackageNotFoundError:
        return False


NODE = find_node()
pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(not SUITE.exists(), reason=f"the conformance suite is not in {PREFIX}: {INSTALL}"),
    pytest.mark.skipif(NODE is None, reason=f"Node 22 or newer was not found: {INSTALL}"),
]


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suite's command line."""
    assert NODE is not None
    return subprocess.run(
        [NODE, str(SUITE), *arguments], capture_output=True, text=True, check=False, timeout=120, cwd=PREFIX
    )


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Callable[[str], str]]:
    """The MCP address of a fixture environment; each is started once, when first asked for."""
    running: dict[str, str] = {}
    with ExitStack() as stack:

        def address(env: str) -> str:
            if env not in running:
                running[env] = stack.enter_context(serve(HERE / f"{env}_env"))
            return f"{running[env]}/mcp"

        yield address


def exceptions(revision: str, env: str, scenario: str) -> dict[str, str]:
    """Checks that do not apply here, each with its reason."""
    where = {"revision": revision, "env": env, "scenario": scenario}
    return {
        item["check"]: item["reason"]
        for item in SCENARIOS["not_applicable"]
        if all(item[key] == value for key, value in where.items())
    }


@pytest.mark.parametrize(("revision", "env", "scenario"), CASES)
def test_scenario(revision: str, env: str, scenario: str, endpoint: Callable[[str], str], tmp_path: Path) -> None:
    """Every check of the scenario succeeds, or is listed as not applicable and still does not."""
    if env == "full" and not has_sdk():
        pytest.skip("the full environment needs the official SDK: pip install 'mcp>=2'")
    arguments = ("--url", endpoint(env), "--scenario", scenario, "--spec-version", revision)
    done = suite("server", *arguments, "--output-dir", str(tmp_path))
    reports = list(tmp_path.rglob("checks.json"))
    assert reports, f"the suite gave no report:\n{done.stdout}{done.stderr}"
    checks = json.loads(reports[0].read_text())
    bad = [check for check in checks if check["status"] in ("FAILURE", "WARNING")]
    expected = exceptions(revision, env, scenario)
    unexpected = [
        f"{check['status']} {check['id']}: {check.get('errorMessage')}" for check in bad if check["id"] not in expected
    ]
    assert not unexpected, "\n".join(unexpected)
    stale = set(expected) - {check["id"] for check in bad}
    assert not stale, f"listed as not applicable, but succeeds: {sorted(stale)}"
    assert done.returncode == any(check["status"] == "FAILURE" for check in bad), done.stdout
    proven = [check for check in checks if check["status"] == "SUCCESS" and check["id"] != "wire-schema-valid"]
    assert proven, f"nothing was checked:\n{done.stdout}"


def test_no_scenario_is_forgotten() -> None:
    """What the suite offers for a revision is either run or left out with a reason."""
    left_out = {item["scenario"]: item["reason"] for item in SCENARIOS["left_out"]}
    offered = {
        name: set(revisions.split(","))
        for name, revisions in re.findall(r"- (\S+) \[(.*?)\]", suite("list", "--server").stdout)
    }
    assert offered
    for revision, envs in SCENARIOS["run"].items():
        run = {scenario for scenarios in envs.values() for scenario in scenarios}
        wanted = {name for name, revisions in offered.items() if revisions & {revision, "extension"}}
        assert run | set(left_out) >= wanted, f"{revision}: {sorted(wanted - run - set(left_out))} is nowhere"
        assert run <= wanted, f"{revision}: {sorted(run - wanted)} is not in the suite"
        assert not run & set(left_out)
    assert all(left_out.values())
